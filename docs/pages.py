"""MkDocs hook: writes tables from the settings, pages from notebooks and docstrings. Only papers need torch."""

from __future__ import annotations

import ast
import base64
import csv
import json
import re
import sys
from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

SRC = Path(__file__).resolve().parents[1] / "src"
FACES = (
    "gradveil",
    "gradveil.client",
    "gradveil.defences",
    "gradveil.attacks",
    "gradveil.metrics",
    "gradveil.data",
    "gradveil.federated",
    "gradveil.papers",
    "gradveil.integrations.flower",
    "gradveil.nn",
    "gradveil.core",
    "gradveil.spaces",
    "gradveil.theory",
    "gradveil.wire",
)
"""The packages whose public names have a page."""
Function = ast.FunctionDef | ast.AsyncFunctionDef
Public = Function | ast.ClassDef
Assigned = ast.Assign | ast.AnnAssign


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Leave pages out of the navigation that are not written, and add those of the code."""
    entries = [written(entry, Path(config.docs_dir)) for entry in config.nav or []]
    for entry in entries:
        if "Reference" in entry:
            entry["Reference"].append({"Python": [{face: page_of(face)} for face in FACES]})
    config.nav = [entry for entry in entries if entry]
    return config


def written(entry: dict[str, Any], docs: Path) -> dict[str, Any]:
    """Return an entry of the navigation without the pages that do not exist."""
    ((title, target),) = entry.items()
    if isinstance(target, str):
        return {title: target.replace(".ipynb", ".md")} if (docs / target).exists() else {}
    pages = [each for each in (written(below, docs) for below in target) if each]
    return {title: pages} if pages else {}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the code, and a page with its pictures for each notebook."""
    files.append(File.generated(config, "colours.css", content=colours()))
    for face in FACES:
        files.append(File.generated(config, page_of(face), content=api(face)))
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        files.remove(file)
        text, pictures = notebook(Path(config.docs_dir) / file.src_uri)
        files.append(File.generated(config, file.src_uri.replace(".ipynb", ".md"), content=text))
        folder = file.src_uri.rpartition("/")[0]
        for name, content in pictures.items():
            files.append(File.generated(config, f"{folder}/{name}", content=content))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put tables where a page asks for them, and let links to notebooks lead to their pages."""
    filled = re.sub(r"<!-- table: ([\w-]+) -->", lambda asked: TABLES[asked[1]](), markdown)
    return re.sub(r"\]\(([\w./-]+)\.ipynb(#[\w-]+)?\)", r"](\1.md\2)", filled)


COLOURS = {
    "default-bg-color": "bg",
    "default-fg-color": "ink",
    "default-fg-color--light": "soft",
    "default-fg-color--lighter": "faint",
    "default-fg-color--lightest": "line",
    "code-bg-color": "sunk",
    "code-fg-color": "ink",
    "typeset-a-color": "accent",
    "accent-fg-color": "not-broken",
    "primary-fg-color": "accent",
}
"""The colours of the site, and the variables of the report that they are."""


def colours() -> str:
    """Write the palette and the fonts of the report as variables of the site's theme."""
    style = (SRC / "gradveil/report/templates/style.css").read_text(encoding="utf-8")
    pairs = {name: pair for name, *pair in re.findall(r"--([\w-]+): light-dark\((#\w+), (#\w+)\)", style)}
    fonts = dict(re.findall(r"--(serif|sans): ([^;]+);", style))
    schemes = [f":root {{ --md-text-font: {fonts['sans']}; --gradveil-heading: {fonts['serif']}; }}"]
    for place, scheme in enumerate(("default", "slate")):
        lines = [f"  --md-{ours}: {pairs[theirs][place]};" for ours, theirs in COLOURS.items()]
        if scheme == "slate":  # a bar in a light accent would dazzle
            lines[-1] = f"  --md-primary-fg-color: {pairs['sunk'][place]};"
        schemes.append(f'[data-md-color-scheme="{scheme}"] {{\n' + "\n".join(lines) + "\n}")
    return "\n".join(schemes) + "\n"


def notebook(path: Path) -> tuple[str, dict[str, bytes]]:
    """Return a notebook as Markdown, and its pictures by file name."""
    text: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            text.append(source)
            continue
        text.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {"text/plain": output.get("text", "")})
            if "image/png" in data:
                name = f"{path.stem}-{len(pictures)}.png"
                pictures[name] = base64.b64decode("".join(data["image/png"]))
                text.append(f"![Output of the code above]({name})")
            elif printed := "".join(data.get("text/plain", "")).rstrip():
                text.append(f"```text\n{printed}\n```")
    return "\n\n".join(text) + "\n", pictures


# Tables from the settings.


def listed(kind: str) -> list[dict[str, Any]]:
    """Return what `gradveil list KIND` shows."""
    return json.loads((SRC / "gradveil/cli/index.json").read_text(encoding="utf-8"))["listed"][kind]


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    r"""Write a table in Markdown.

    >>> print(table(["a", "b"], [["1", "x | y"]]))
    | a | b |
    |---|---|
    | 1 | x \\| y |
    """
    titles = list(head)
    lines = [titles, ["---"] * len(titles), *([" ".join(cell.split()).replace("|", "\\|") for cell in r] for r in rows)]
    shown = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([shown[0], shown[1].replace(" ", ""), *shown[2:]])


def shown(value: Any) -> str:
    """Write a default as code."""
    return f"`{json.dumps(value, ensure_ascii=False)}`"


def settings(arguments: Iterable[dict[str, Any]]) -> str:
    """Lay out the settings of a named attack or defence."""
    rows = (
        [f"`{each['name']}`", each["allowed"], "required" if each["required"] else shown(each["default"]), each["help"]]
        for each in arguments
    )
    return table(["setting", "value", "default", "meaning"], rows)


def attacks() -> str:
    """List every attack with the client that it simulates, its defaults, and the settings that only it has."""
    rows = listed("attacks")
    common = next(row["arguments"] for row in rows if row["name"] == "ig")
    names = {argument["name"] for argument in common}
    text = [
        table(
            ["attack", "method", "simulates", "source"],
            ([f"[`{r['name']}`](#{r['name']})", r["description"], r["simulated_client"], r["citation"]] for r in rows),
        ),
        "## Settings of every search",
        "Defaults are those of `ig`; the section of each attack shows its own.",
        settings(common),
    ]
    for row in rows:
        text += [f"## {row['name']}", f"{row['description']}. {row['citation']}.", f"```text\n{row['usage']}\n```"]
        if own := [argument for argument in row["arguments"] if argument["name"] not in names]:
            text.append(settings(own))
    return "\n\n".join(text)


def defences() -> str:
    """List every defence with what it changes, costs and guarantees, the attacks on it, and its settings."""
    rows = listed("defences")
    text = [
        table(
            ["defence", "changes", "cost", "guarantee"],
            (
                [f"[`{r['name']}`](#{r['name']})", ", ".join(r["changes"]) or "–", r["cost"], r["guarantee"]]
                for r in rows
            ),
        )
    ]
    for row in rows:
        adaptive = ", ".join(f"`{name}`" for name in row["adaptive"])
        text += [f"## {row['name']}", f"{row['description']}. {row['citation']}.", f"`adaptive` expands to {adaptive}."]
        text += [settings(row["arguments"])] if row["arguments"] else []
    return "\n\n".join(text)


def models() -> str:
    """List the models with their options."""
    rows = (
        [f"`{r['name']}`", r["description"], ", ".join(f"`{k}={v}`" for k, v in r["options"].items()), r["citation"]]
        for r in listed("models")
    )
    return table(["model", "architecture", "options", "source"], rows)


def mainstream_models() -> str:
    """List measured image classifiers of large libraries: whether they can be audited, and the time it takes."""
    with (SRC.parent / "benchmarks/results/mainstream-models.csv").open(encoding="utf-8", newline="") as file:
        measured = list(csv.DictReader(file))
    rows = (
        [
            f"`{r['model']}`",
            f"{int(r['parameters']) / 1e6:.1f} M",
            r["works"],
            (r["problem"] or r["changes"]).replace("|", "\\|"),
            r["gradient_s"],
            r["iteration_s"],
        ]
        for r in measured
    )
    return table(["model", "parameters", "works", "changes, or the problem", "gradient (s)", "iteration (s)"], rows)


def share_recovered(line: dict[str, str] | None) -> str:
    """Write what a recorded attack recovers: the rate, its interval, and the mean SSIM."""
    if line is None:
        return "not run"
    if line["failed"] or not line["asr"]:
        return line["failed"]
    low, high = (f"{100 * float(line[name]):.0f}" for name in ("asr_low", "asr_high"))
    return f"{100 * float(line['asr']):.0f}% ({low}–{high}%), {float(line['ssim_mean']):.2f}"


def strongest(lines: list[dict[str, str]]) -> dict[str, str] | None:
    """Return the recorded attack that recovers most."""
    return max(lines, key=lambda line: (float(line["asr"] or -1), float(line["ssim_mean"] or -1)), default=None)


def every_defence() -> str:
    """List what a non-adaptive attack and the best adaptive one recover behind each recorded defence, then and now."""
    cells, earlier = (by_setting(recorded_trials(f"every-defence{part}.csv")) for part in ("", "-earlier"))
    rows: list[list[str]] = []
    for (defence, model, data, batch), lines in cells.items():
        naive = next((line for line in lines if line["attack"].startswith("ig-scheliga")), None)
        best = strongest([line for line in lines if line is not naive])
        by = f"`{best['attack']}`" if best else ""
        then = strongest(earlier.get((defence, model, data, batch), []))
        shares = [share_recovered(line) for line in (naive, then, best)]
        rows.append([f"`{defence}`", f"`{model}`", data, str(batch), *shares, by])
    head = ["defence", "model", "data", "batch", "non-adaptive", "adaptive on 2026-11-24", "adaptive"]
    return table([*head, "best adaptive attack"], rows)


def by_setting(trials: Iterable[dict[str, str]]) -> dict[tuple[str, str, str, int], list[dict[str, str]]]:
    """Group recorded trials by defence, model, data and images an update."""
    cells: dict[tuple[str, str, str, int], list[dict[str, str]]] = {}
    for each in trials:
        batch = int(each["images"]) // int(each["target_clients"])
        cells.setdefault((each["defence"], each["model"], each["data"], batch), []).append(each)
    return cells


def weakest_settings() -> str:
    """List what the best adaptive attack recovers behind each strength of ten defences."""
    cells: dict[str, list[dict[str, str]]] = {}
    for each in recorded_trials("weakest-settings.csv"):
        cells.setdefault(each["defence"], []).append(each)
    rows: list[list[str]] = []
    for defence, lines in cells.items():
        if best := strongest(lines):
            rows.append([f"`{defence}`", share_recovered(best), f"`{best['attack']}`"])
    return table(["setting", "adaptive", "best attack"], rows)


def search_ablation() -> str:
    """List the mean SSIM of searches that differ in one thing, behind each defence."""
    lines = recorded_trials("search-ablation.csv")
    defences = list(dict.fromkeys(line["defence"] for line in lines))
    cells: dict[tuple[str, ...], dict[str, str]] = {}
    for line in lines:
        search = line["model"], line["data"], line["iterations"], line["variant"]
        cells.setdefault(search, {})[line["defence"]] = f"{float(line['ssim']):.2f}"
    rows = (
        [f"`{model}`", data, iterations, variant, *(found.get(defence, "") for defence in defences)]
        for (model, data, iterations, variant), found in sorted(cells.items(), key=lambda cell: cell[0][:3])
    )
    return table(["model", "data", "iterations", "search", *(f"`{each}`" for each in defences)], rows)


def recorded_trials(name: str) -> list[dict[str, str]]:
    """Read a recorded run's trials."""
    with (SRC.parent / "benchmarks/results" / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def named(kind: str) -> str:
    """List names with their description and source."""
    return table(
        ["name", "content", "source"], ([f"`{r['name']}`", r["description"], r["citation"]] for r in listed(kind))
    )


def papers() -> str:
    """List the papers with the tables of settings that a run file can name."""
    rows = (
        [f"`{r['name']}/{name}`", ", ".join(f"`{text}`" for text in texts), r["citation"]]
        for r in listed("papers")
        for name, texts in r["tables"].items()
    )
    return table(["name", "settings", "paper"], rows)


def metrics() -> str:
    """List the metrics from their table in the code."""
    tree = module("gradveil.metrics")
    (entries,) = (node.value for node in tree.body if isinstance(node, ast.AnnAssign) and target(node) == ["METRICS"])
    assert isinstance(entries, ast.Dict)
    rows: list[list[str]] = []
    for key, call in zip(entries.keys, entries.values, strict=True):
        assert isinstance(call, ast.Call)
        description, better, *_ = (ast.literal_eval(argument) for argument in call.args[1:])
        rows.append([f"`{ast.literal_eval(key or call)}`", description, "higher" if better else "lower"])
    return table(["metric", "meaning", "better"], rows)


def run_file(name: str, *classes: str) -> str:
    """Lay out the keys of a run file from the classes that read it."""
    tree = module(name)
    found = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    rows = (
        [f"`{key}`", allowed, default, help] for each in classes for key, allowed, default, help in fields(found[each])
    )
    return table(["key", "value", "default", "meaning"], rows)


def fields(scope: ast.ClassDef) -> Iterator[tuple[str, str, str, str]]:
    """Give the fields of a settings class: name, allowed values, default, and the docstring below."""
    for node, after in zip(scope.body, [*scope.body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and target(node)[0] != "model_config":
            value = ast.unparse(node.value) if node.value else "required"
            inner = re.fullmatch(r"Field\(default(?:_factory)?=(.*)\)", value)
            default = {
                "dict": "{}",
                "None": "–",
                "[ClientConfig()]": "–",
                "PartitionConfig()": "–",
                "ServerConfig()": "–",
            }.get(inner[1] if inner else value, inner[1] if inner else value)
            help = ""
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                help = str(after.value.value)
            yield (
                target(node)[0],
                allowed(node.annotation),
                default if default in ("required", "–") else f"`{default}`",
                help,
            )


WORDS = {
    "Count": "whole number from 1",
    "Name": "text",
    "str": "text",
    "float": "number",
    "int": "whole number",
    "bool": "true or false",
}
LIMITS = {"ge": "from", "gt": "above", "le": "to", "lt": "below"}


def allowed(node: ast.expr) -> str:
    """Say in words what an annotation allows.

    >>> allowed(ast.parse("Annotated[float, Field(gt=0, le=1)] | None", mode="eval").body)
    'number above 0 to 1'
    >>> allowed(ast.parse('list[Literal["a", "b"]]', mode="eval").body)
    'list of `a` or `b`'
    """
    match node:
        case ast.BinOp():
            return " or ".join(part for part in (allowed(node.left), allowed(node.right)) if part)
        case ast.Constant():
            return ""
        case ast.Subscript(value=ast.Name("Literal"), slice=values):
            each = values.elts if isinstance(values, ast.Tuple) else [values]
            return " or ".join(f"`{ast.literal_eval(value)}`" for value in each)
        case ast.Subscript(value=ast.Name("Annotated"), slice=ast.Tuple(elts=[inner, ast.Call() as field, *_])):
            limits = [f"{LIMITS[k.arg]} {ast.unparse(k.value)}" for k in field.keywords if k.arg in LIMITS]
            return " ".join([allowed(inner), *limits])
        case ast.Subscript(value=ast.Name("list"), slice=inner):
            return f"list of {allowed(inner).replace('table', 'tables').replace('number', 'numbers')}"
        case ast.Subscript(value=ast.Name("dict")):
            return "table"
        case ast.Name(name) if name.endswith(("Config", "Plan")):
            return "table"
        case ast.Name("Together"):
            return "`auto`, true or false"
    return WORDS.get(ast.unparse(node), f"`{ast.unparse(node)}`")


def commands() -> str:
    """Describe every command, its arguments and options, from the command line itself."""
    sys.path.insert(0, str(SRC))
    from typer.main import get_command

    from gradveil.cli.app import app

    return "\n\n".join(described("gradveil", get_command(app)))


def described(name: str, command: Any) -> Iterator[str]:
    """Describe a command and those below it."""
    context = command.make_context(name, [], resilient_parsing=True)
    yield f"## {name}"
    yield plain(command.help or "")
    below = getattr(command, "commands", {})
    params = [p for p in command.get_params(context) if p.name != "help" and not getattr(p, "hidden", False)]
    if params:
        yield table(["argument or option", "meaning"], ([f"`{usage(p)}`", plain(p.help or "")] for p in params))
    examples = re.findall(r"^  (gradveil .+)$", command.epilog or "", re.MULTILINE)
    if examples:
        yield "```console\n" + "\n".join(f"$ {each}" for each in examples) + "\n```"
    for each in below:
        yield from described(f"{name} {each}", below[each])


def usage(param: Any) -> str:
    """Write an argument or an option as it is typed."""
    if param.param_type_name == "argument":
        return (param.metavar or param.name.upper()).strip("[]")
    takes = "" if getattr(param, "is_flag", False) else f" {param.metavar or param.type.name.upper()}"
    return ", ".join(param.opts) + takes


def plain(text: str) -> str:
    """Drop the markup of terminals."""
    return re.sub(r"\[/?bold\]", "", text).replace("\\[", "[").strip()


def paper_claims() -> str:
    """List the claims of the papers with their outcomes by our records."""
    sys.path.insert(0, str(SRC))
    from gradveil.papers import recorded_claims

    return table(
        ["paper", "claim", "setting", "outcome", "compared numbers", "tables"],
        (
            [
                f"{each.study.content.authors.split(',')[0]} {each.study.content.year}",
                each.claim.text,
                each.claim.setting,
                f"**{each.outcome}**",
                each.basis,
                ", ".join(each.tables),
            ]
            for each in recorded_claims()
        ),
    )


def paper_cells() -> str:
    """List every printed number of the papers next to ours, as a table that a script filters and sorts."""
    sys.path.insert(0, str(SRC))
    from gradveil.papers import recorded_cells

    heads = ("paper", "table", "setting", "row", "number", "printed", "ours", "status", "floor", "adaptive", "measured")
    parts = ['<div class="wide"><table id="paper-cells"><thead><tr>', *(f"<th>{head}</th>" for head in heads)]
    parts.append("</tr></thead><tbody>")
    for each in recorded_cells():
        parts.append(f"<tr>{''.join(cell_of(*entry) for entry in each)}</tr>")
    return "\n".join([*parts, "</tbody></table></div>"])


def cell_of(text: str, small: str = "", sort: str = "") -> str:
    """Write a cell of the browsable table: its text, a smaller text below, and what it is sorted by."""
    below = f"<br><small>{escape(small)}</small>" if small else ""
    key = f' data-key="{escape(text)}"' if small else ""
    order = f' data-sort="{escape(sort)}"' if sort else ""
    return f"<td{key}{order}>{escape(text)}{below}</td>"


TABLES = {
    "attacks": attacks,
    "defences": defences,
    "models": models,
    "mainstream-models": mainstream_models,
    "every-defence": every_defence,
    "weakest-settings": weakest_settings,
    "search-ablation": search_ablation,
    "data": lambda: named("data"),
    "runs": lambda: named("runs"),
    "papers": papers,
    "paper-claims": paper_claims,
    "paper-cells": paper_cells,
    "metrics": metrics,
    "commands": commands,
    "audit": lambda: run_file("gradveil.audit.audit_config", "RunConfig"),
    "client": lambda: run_file("gradveil.audit.audit_config", "ClientConfig"),
    "privacy": lambda: run_file("gradveil.audit.audit_config", "PrivacyConfig"),
    "observed": lambda: run_file("gradveil.audit.audit_config", "ObservedConfig"),
    "cost-plan": lambda: run_file("gradveil.audit.audit_config", "CostPlan"),
    "train-plan": lambda: run_file("gradveil.audit.audit_config", "CostPlan", "TrainPlan"),
    "training": lambda: run_file("gradveil.federated.training_config", "TrainConfig"),
    "rounds": lambda: run_file("gradveil.federated.training_config", "Rounds"),
    "data-table": lambda: run_file("gradveil.federated.training_config", "DataConfig"),
    "model-table": lambda: run_file("gradveil.federated.training_config", "ModelConfig"),
    "local": lambda: run_file("gradveil.federated.training_config", "LocalConfig"),
    "partition": lambda: run_file("gradveil.federated.training_config", "PartitionConfig"),
    "server": lambda: run_file("gradveil.federated.training_config", "ServerConfig"),
    "pace": lambda: run_file("gradveil.federated.training_config", "PaceConfig"),
}
"""The tables that a page can ask for with `<!-- table: NAME -->`."""


# Pages from the docstrings.


def page_of(face: str) -> str:
    """Name the page of a package."""
    return f"reference/api/{face.removeprefix('gradveil.').replace('.', '-')}.md"


def module(name: str) -> ast.Module:
    """Parse a module or package of this library."""
    path = SRC / name.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"))


def api(face: str) -> str:
    """Describe the public names of a package, in the order of the alphabet."""
    tree = module(face)
    homes = dict.fromkeys(definitions(tree), face)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gradveil"):
            homes |= {alias.asname or alias.name: node.module or "" for alias in node.names}
    (names,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and target(node) == ["__all__"]
    )
    text = [f"# {face}", prose(tree)]
    for name in sorted(names, key=str.lower):
        text += described_name(name, homes.get(name, face))
    return "\n\n".join(text) + "\n"


def described_name(name: str, home: str) -> list[str]:
    """Describe one public name where it is defined."""
    tree = module(home)
    match definitions(tree).get(name):
        case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef() as node:
            text = [f"## {name}", f"```python\n{signature(node)}\n```", prose(node)]
            for method in node.body if isinstance(node, ast.ClassDef) else []:
                if isinstance(method, Function) and not method.name.startswith("_"):
                    text += [f"### {name}.{method.name}", f"```python\n{signature(method)}\n```", prose(method)]
            return text
        case ast.Assign() | ast.AnnAssign() as node:
            return constant(tree, node, name)
    moved = [n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and any(a.name == name for a in n.names)]
    return described_name(name, moved[0] or "") if moved and moved[0] != home else [f"## {name}"]


def definitions(tree: ast.Module) -> dict[str, Public | Assigned]:
    """Return what a module defines, by name."""
    found: dict[str, Public | Assigned] = {}
    for node in tree.body:
        if isinstance(node, Public):
            found[node.name] = node
        elif isinstance(node, Assigned):
            found |= dict.fromkeys(target(node), node)
    return found


def target(node: Assigned) -> list[str]:
    """Name what an assignment binds."""
    bound = node.targets[0] if isinstance(node, ast.Assign) else node.target
    return [part.id for part in ast.walk(bound) if isinstance(part, ast.Name)]


def constant(tree: ast.Module, node: Assigned, name: str) -> list[str]:
    """Describe a constant by its docstring and its value, of which a long one is cut."""
    after = tree.body[tree.body.index(node) + 1 :][:1]
    value = ast.unparse(node)
    text = [f"## {name}", f"```python\n{value[:100]}{'...' if len(value) > 100 else ''}\n```"]
    match after:
        case [ast.Expr(ast.Constant(str(docstring)))]:
            return [*text, docstring]
    return text


def signature(node: Public) -> str:
    """Show how a function is called, or a class with its annotated fields."""
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        own = [item for item in node.body if isinstance(item, ast.AnnAssign) and not target(item)[0].startswith("_")]
        return "\n".join([f"class {node.name}{f'({bases})' if bases else ''}", *(f"    {ast.unparse(f)}" for f in own)])
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    line = f"{node.name}({ast.unparse(node.args)}){returns}"
    if len(line) <= 100:
        return line
    arguments = re.split(r", (?![^\[(]*[\])])", ast.unparse(node.args))
    return f"{node.name}(\n    " + ",\n    ".join(arguments) + f",\n){returns}"


def prose(node: ast.Module | Public) -> str:
    """Return a docstring as Markdown, its examples as code blocks."""
    text = ast.get_docstring(node) or ""
    return re.sub(r"(?m)^>>> (?:.+\n?)+", lambda example: f"```pycon\n{example[0].rstrip()}\n```\n", text)
