"""`gradveil list`: names that a run file can use, and the settings of each."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from gradveil.cli.index import Row, read_index
from gradveil.core.errors import GradveilError, fail
from gradveil.core.formatting import listing
from gradveil.core.plugins import plugins
from gradveil.core.settings import literal

TOPICS = {"feedback": "Error feedback: what a compressor leaves out in this round is added in the next."}
"""Arguments that people look for by what they do."""


KINDS = {
    "attacks": "an attack",
    "defences": "a defence",
    "models": "a model",
    "data": "data",
    "metrics": "a metric of reconstructions",
    "runs": "a bundled run",
    "papers": "a paper",
}
"""What can be listed, and what one of them is called."""


def called(name: str, listed: Mapping[str, list[Row]]) -> dict[str, list[Row]]:
    """Find what has this name, whatever its kind: `faces` is data and a run."""
    return _chosen(listed, lambda row: row["name"] == name)


def taking(argument: str, listed: Mapping[str, list[Row]]) -> dict[str, list[Row]]:
    """Find what takes an argument of this name."""
    return _chosen(listed, lambda row: any(each["name"] == argument for each in row.get("arguments", ())))


def unknown(name: str, listed: Mapping[str, list[Row]]) -> GradveilError:
    """Say that nothing has this name, and what comes near, or that it is a path; `listed` may be one kind alone."""
    if ":" in name:
        remedy = "let `gradveil check` try it: after --defence, --attack, --model or --data"
        return fail(f"list {name}", "is where something of yours lies; list shows names only, and runs no code", remedy)
    (kind, *others) = listed
    rows = [row for kind in listed.values() for row in kind]
    arguments = [argument["name"] for row in rows for argument in row.get("arguments", ())]
    known = list(dict.fromkeys([*(KINDS if others else ()), *(row["name"] for row in rows), *arguments]))
    near = [f"'{each}'" for each in get_close_matches(name, known, n=3)]
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    if not others:
        return fail(f"list {kind} {name}", f"is none of the {kind}", f"{hint}`gradveil list {kind}` shows them")
    remedy = f"{hint}list {', '.join(KINDS)}, a name of any of these, or an argument; `gradveil list` shows them"
    return fail(f"list {name}", "is the name of nothing here", remedy)


def _chosen(listed: Mapping[str, list[Row]], wanted: Callable[[Row], bool]) -> dict[str, list[Row]]:
    matches = {kind: [row for row in rows if wanted(row)] for kind, rows in listed.items()}
    return {kind: rows for kind, rows in matches.items() if rows}


_NAME = (
    "attacks, defences, models, data, metrics, runs or papers; or one of their names; or an argument, such as feedback."
)
_OF = "After a kind, one of its names: defences dgp."
_SLOTS = {
    "model": "the model",
    "batch": "the examples",
    "step": "every local gradient",
    "send": "the update that is sent",
}
_SLOTS_SHORT = {"model": "the model", "batch": "the images", "step": "each gradient", "send": "the update"}


def tables(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help=_NAME)] = None,
    of: Annotated[str | None, typer.Argument(metavar="[NAME]", help=_OF)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> int:
    """List attacks, defences, models, data, metrics, bundled runs and papers with their arguments and citations.

    Lists everything without a kind or a name.
    """
    listed: Mapping[str, list[Row]] = read_index()["listed"]
    if any(plugins(kind) for kind in KINDS):
        from gradveil.cli.make_index import installed

        added, problems = installed()
        listed = {kind: [*rows, *added.get(kind, ())] for kind, rows in listed.items()}
        for problem in problems:
            typer.echo(f"Warning: {problem}", err=True)
    key, second = (text.partition("(")[0].strip().lower() for text in (name or "", of or ""))
    if second and key not in KINDS:
        what = "are two names" if second not in KINDS else "is the wrong way round"
        raise fail(
            f"list {key} {second}", what, "give one name, or a kind and a name of it: `gradveil list defences dgp`"
        )
    if second:
        listed, key = {key: listed[key]}, second
    if not key:
        result, shown = listed, _overview(listed)
    elif key in KINDS:
        result, shown = listed[key], _kind(key, listed[key])
    elif rows := called(key.replace("_", "-"), listed):
        result, shown = rows, _single(rows)
    elif rows := taking(key.replace("-", "_"), listed):
        result, shown = rows, _argument(key.replace("-", "_"), rows)
    else:
        raise unknown(key, listed)
    if as_json:
        typer.echo(json.dumps(result, indent=1, ensure_ascii=False, default=str))
        return 0
    console = Console(highlight=False, markup=False)
    for part in shown:
        console.print(part)
    return 0


def _overview(listed: Mapping[str, Sequence[Row]]) -> Iterator[RenderableType]:
    for kind, rows in listed.items():
        yield Text(kind, style="bold")
        yield _names(rows)
        if any(row.get("arguments") for row in rows):
            yield Text(
                f"`gradveil list {kind}` lists their arguments, `gradveil list NAME` describes one.", style="dim"
            )
        for note in _notes(kind, rows):
            yield Text(note, style="dim")
        yield ""


def _notes(kind: str, rows: Sequence[Row]) -> Iterator[str]:
    """Say how names become texts, and where things are that have no name of their own."""
    if kind == "attacks":
        yield "Settings stand in parentheses: ig(iterations=500, restarts=4)."
        yield "`adaptive` stands for the attackers that aim at each defence; `gradveil list dp` names those of dp."
        yield "`malicious` stands for those who change the model that is sent."
    if kind == "metrics":
        of_texts = "for sentences tokens in place, token recall, exact sentences, ROUGE-1, 2 and L, names and numbers"
        yield f"Always computed: for images MSE, PSNR and SSIM; {of_texts}; for rows cells right and mean error."
        yield "To add others, for images: --set 'metrics=[\"ssim_rescaled\"]'."
    if kind == "papers":
        yield "`gradveil list PAPER` shows the run files of a paper, with the commands that run them, and its tables."
        yield "PAPER/TABLE in the place of a defence stands for the defences of a table."
    if kind == "defences":
        yield "Arguments stand in parentheses, and defences join: dp(clip=20, sigma=0.001) + cvb + dropout(0.25)."
        for topic, meaning in TOPICS.items():
            switched = [_switched(row, topic) for row in taking(topic, {kind: list(rows)}).get(kind, ())]
            yield f"{meaning} It is an argument: {', '.join(switched)}."


def _switched(row: Row, flag: str) -> str:
    """Write an entry with a flag that is not as it is by default."""
    needed = [f"{argument['name']}=…" for argument in row["arguments"] if argument["required"]]
    default = any(argument["default"] for argument in row["arguments"] if argument["name"] == flag)
    return f"{row['name']}({', '.join([*needed, f'{flag}={literal(not default)}'])})"


def _kind(kind: str, rows: Sequence[Row]) -> Iterator[RenderableType]:
    """List one kind: arguments below each, those that many of them take once, at the end.

    What costs something is compared in a table first, and its arguments are left to the page of each.
    """
    if any("cost" in row for row in rows):
        yield from _compared(kind, rows)
        return
    counts = [argument["name"] for row in rows for argument in row.get("arguments", ())]
    common = [name for name in dict.fromkeys(counts) if 3 * counts.count(name) > len(rows)]
    own = {row["name"]: [each for each in row.get("arguments", ()) if each["name"] not in common] for row in rows}
    if any(own.values()):
        for row in rows:
            yield Text(row["name"], style="cyan")
            yield Padding(Group(row["description"], *_lines(own[row["name"]]), _dim(row["citation"])), (0, 0, 1, 4))
    else:
        yield _names(rows)
        yield ""
    if common:
        taken = {each["name"]: each for row in rows for each in row.get("arguments", ()) if each["name"] in common}
        lacking = {name: [r["name"] for r in rows if all(a["name"] != name for a in r["arguments"])] for name in common}
        yield Text(
            f"What these {kind} take (none: its own value, as `gradveil list {rows[0]['name']}` shows)",
            style="bold",
        )
        table = _grid()
        for name in common:
            without = f" (not {listing(lacking[name])})" if lacking[name] else ""
            table.add_row(Text(name, style="cyan"), f"{taken[name]['allowed']}{without}")
        yield table
        yield ""
    for note in _notes(kind, rows):
        yield Text(note, style="dim")


def _compared(kind: str, rows: Sequence[Row]) -> Iterator[RenderableType]:
    """Compare effects, costs, guarantees and attacks of the defences; then list citations."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for title in (kind, "changes", "costs a client", "guarantee", "adaptive attackers"):
        table.add_column(title, ratio=1 if title == "costs a client" else None, style="cyan" if title == kind else "")
    for row in rows:
        changes = listing(_SLOTS_SHORT[slot] for slot in row["changes"]) or "nothing"
        table.add_row(row["name"], changes, row["cost"], _proven(row["guarantee"]), _attackers(row["adaptive"]))
    yield table
    yield _dim(
        "Costs: gradients are plain ones of 64 images (docs/performance.md); bytes are a share of those of an update "
        "in which nothing is zero, measured with a small CNN."
    )
    yield ""
    for row in rows:
        yield Text(row["usage"], style="cyan")
        yield Padding(Group(row["description"], _dim(row["citation"])), (0, 0, 0, 4))
    yield ""
    yield _dim("`gradveil list NAME` describes the arguments, the guarantee and the settings of attackers.")
    for note in _notes(kind, rows):
        yield _dim(note)


def _proven(guarantee: str) -> str:
    """Say in a word whether anything is proven."""
    if "no formal" in guarantee:
        return "no"
    return "after a clip" if "only" in guarantee else "yes"


def _attackers(texts: Sequence[str]) -> str:
    """Name attacks once, with the number of their settings."""
    names = [text.partition("(")[0] for text in texts]
    return ", ".join(
        name if names.count(name) == 1 else f"{name} ×{names.count(name)}" for name in dict.fromkeys(names)
    )


def _single(matches: Mapping[str, Sequence[Row]]) -> Iterator[RenderableType]:
    for kind, rows in matches.items():
        for row in rows:
            yield Text.assemble((row["name"], "bold cyan"), f", {KINDS[kind]}")
            facts = _grid()
            for name, value in _facts(row):
                facts.add_row(_dim(name), value)
            table = _lines(row.get("arguments", ()), helped=True)
            arguments = [Padding(Group(*table), (0, 0, 0, 2))] if table else []
            yield Padding(Group(row["description"], *_usage(row), *arguments, facts), (0, 0, 1, 2))


def _usage(row: Row) -> list[Text]:
    """Return the text with every default, or without them where the lines below list them."""
    return [Text(row["usage"], style="cyan")] if 0 < len(row.get("arguments", ())) <= 5 else []


def _facts(row: Row) -> Iterator[tuple[str, str]]:
    if row.get("changes"):
        yield "changes", listing(_SLOTS[slot] for slot in row["changes"])
    if "cost" in row:
        yield "costs", row["cost"]
    if "guarantee" in row:
        yield "promises", row["guarantee"]
    if row.get("simulated_client"):
        yield (
            "believes",
            "in the client with its defence" if row["simulated_client"] == "full" else "in a client without defence",
        )
        # A later pattern decides only what no earlier one matches.
        yield "treats", "; ".join(f"{name}: {read_index()['positions'][how]}" for name, how in row["knowledge"].items())
    if row.get("adaptive"):
        yield "attackers", ", ".join(row["adaptive"])
        yield "malicious servers", ", ".join(row["malicious"])
    if row.get("options"):
        yield "options", ", ".join(f"{key} = {json.dumps(value, default=str)}" for key, value in row["options"].items())
    for command, description in row.get("runs", {}).items():
        yield "run", f"{command}\n{description}"
    for table, texts in row.get("tables", {}).items():
        yield "table", f"{row['name']}/{table}\n{', '.join(texts)}"
    if row["citation"]:
        yield "cite", row["citation"]


def _argument(name: str, matches: Mapping[str, Sequence[Row]]) -> Iterator[RenderableType]:
    """Show where an argument is, with what it is in each place."""
    if name in TOPICS:
        yield TOPICS[name]
    for kind, rows in matches.items():
        yield Text.assemble((name, "bold cyan"), f" is an argument of these {kind}")
        table = _grid()
        for row in rows:
            (argument,) = [each for each in row["arguments"] if each["name"] == name]
            example = _switched(row, name) if argument["allowed"] == "true or false" else ""
            table.add_row(Text(row["name"], style="cyan"), *_about(argument), example)
        yield Padding(table, (0, 0, 1, 2))


def _lines(arguments: Sequence[Mapping[str, Any]], helped: bool = False) -> list[Table]:
    if not arguments:
        return []
    table = _grid()
    for argument in arguments:
        table.add_row(Text(argument["name"], style="cyan"), *_about(argument))
        if helped and "help" in argument:
            table.add_row("", _dim(argument["help"]), "")
    return [table]


def _about(argument: Mapping[str, Any]) -> tuple[str, str]:
    allowed, default = argument["allowed"], argument["default"]
    if argument["required"]:
        return allowed, "required"
    # JSON has no infinity, so the row has the word for it, which is no text in quotes.
    endless = default == "inf" and "or inf" in allowed
    return allowed, f"default {default if endless else literal(default)}"


def _names(rows: Sequence[Row]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column("name", style="cyan", no_wrap=True)
    table.add_column("description", ratio=3)
    cited = any(row["citation"] for row in rows)
    if cited:
        table.add_column("citation", style="dim", ratio=2)
    for row in rows:
        table.add_row(row["name"], row["description"], *([row["citation"]] if cited else []))
    return table


def _grid() -> Table:
    return Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))


def _dim(text: str) -> Text:
    return Text(text, style="dim")
