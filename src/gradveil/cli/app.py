"""The application: commands, exit codes and error messages."""

from __future__ import annotations

import os
import re
import sys
from functools import cache
from typing import Annotated

import click
import typer
from typer.main import get_command

import gradveil
from gradveil.cli.audit_command import audit
from gradveil.cli.check_command import check
from gradveil.cli.epsilon_audit_command import audit_epsilon
from gradveil.cli.figure_command import figure
from gradveil.cli.list_command import tables
from gradveil.cli.paper_command import paper
from gradveil.cli.privacy_commands import account, bound, create_ledger, ledger, show_ledger
from gradveil.cli.results_commands import assure, report, summary
from gradveil.cli.search_command import ats, search
from gradveil.cli.train_command import train
from gradveil.core.errors import INTERRUPTED, GradveilError, grouped
from gradveil.core.freed_memory import keep_freed_memory

USER_ERROR = 2
"""Exit code for wrong use."""

app = typer.Typer(
    name="gradveil",
    no_args_is_help=True,
    suggest_commands=not hasattr(click.exceptions, "NoSuchCommand"),  # click 8.4 suggests them itself
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
"""The commands. `run` calls them and turns errors into messages and exit codes."""


def _examples(*commands: str) -> str:
    """Return the examples at the end of a help page, where a blank line becomes a new line."""
    return "[bold]Examples[/bold]\n\n" + "\n\n".join(f"  {command}" for command in commands)


app.command(
    epilog=_examples(
        "gradveil audit faces",
        'gradveil audit digits --target-clients 4 --attack ig --defence none --defence "dp(clip=20, sigma=1e-3)"',
        "gradveil audit study.toml --out runs/study --seed 0 --seed 1 --fail-above 0.1",
        "gradveil audit faces --set client.batch=2 --attack ig --attack cdia --iterations 500",
        "gradveil audit --observed seen --set model.name=lenet-zhu --set data.classes=10 --set data.channels=1",
    )
)(audit)
app.command(
    epilog=_examples(
        "gradveil train digits",
        "gradveil train digits --rounds 30 --defence none --defence dgp --seed 0 --seed 1",
        "gradveil train study.toml --set partition.kind=dirichlet --set partition.concentration=0.1",
    )
)(train)
app.command(epilog=_examples("gradveil report runs/faces"))(report)
app.command(
    epilog=_examples(
        "gradveil assure runs/faces",
        'gradveil assure runs/faces --defence "dp(clip=1, sigma=2)" --epsilon-audit epsilon.json --out signed',
    )
)(assure)
app.command(
    epilog=_examples(
        "gradveil summary runs/faces --json",
        "gradveil summary runs/faces --csv faces.csv",
        "gradveil summary runs/mnist runs/cifar10 --latex table.tex",
        "gradveil summary runs/train-digits --curves rounds.csv",
    ),
)(summary)
app.command(
    epilog=_examples(
        "gradveil figure runs/faces",
        'gradveil figure runs/faces --kind grid --targets 0-3 --label "dgp=DGP" --order none --out faces.pdf',
        "gradveil figure runs/digits runs/train-digits --kind pareto --against accuracy --size double",
        "gradveil figure runs/train-digits --kind curve --format svg",
    ),
)(figure)
app.command(
    name="list",
    epilog=_examples("gradveil list defences", "gradveil list dp", "gradveil list feedback", "gradveil list --json"),
)(tables)
app.command(
    epilog=_examples(
        "gradveil check --model lenet-zhu --data faces",
        "gradveil check --model mypackage.models:resnet --data folder:scans --size 64 --set model.options.width=32",
        "gradveil check --model vit --data digits --batch 2 --set client.local.lr=0.1 --set client.local.steps=2",
        "gradveil check study.toml",
    )
)(check)
app.command(
    epilog=_examples(
        "gradveil account --sigma 1 --rate 0.01 --steps 1000 --delta 1e-5",
        "gradveil account --epsilon 3 --rate 0.01 --steps 1000 --delta 1e-5",
        "gradveil account --sigma 1 --rate 0.01 --steps 1000 --sampling shuffled --accountant rdp --json",
    )
)(account)
app.command(
    epilog=_examples(
        'gradveil bound faces --defence "gaussian(0.01)" --defence "dp(clip=1, sigma=0.1)"',
        "gradveil bound study.toml --target-clients 4 --json",
    )
)(bound)
app.command(
    name="audit-epsilon",
    epilog=_examples(
        'gradveil audit-epsilon faces --defence "dp(clip=1, sigma=1)"',
        'gradveil audit-epsilon faces --defence "dp(clip=1, sigma=1)" --deployed --replays 200',
        'gradveil audit-epsilon faces --defence "dp(clip=1, sigma=1)" --canaries 200 --json',
    ),
)(audit_epsilon)
search.command(
    name="ats",
    epilog=_examples(
        "gradveil search ats digits",
        "gradveil search ats study.toml --candidates 1600 --device cuda",
        "gradveil search ats digits --set model.weights=trained.safetensors --json",
    ),
)(ats)
app.add_typer(search, name="search")
ledger.command(name="create", epilog=_examples("gradveil ledger create --identity hospital-a --training lungs-2026"))(
    create_ledger
)
ledger.command(name="show", epilog=_examples("gradveil ledger show --identity hospital-a --training lungs-2026"))(
    show_ledger
)
app.add_typer(ledger, name="ledger")
app.add_typer(paper, name="paper")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gradveil {gradveil.__version__}")
        raise typer.Exit


@app.callback(
    epilog="Exit codes: 0 done; 1 check found problems, a trial failed, --fail-above has no result, "
    "summary has no finished trial, or search has nothing better than no defence; 2 wrong use; 3 --fail-above was "
    "exceeded, or audit-epsilon contradicts a claim; 130 interrupted."
)
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Measure what an attacker can reconstruct from federated learning updates, and which defence stops it.

    Start with [bold]gradveil audit faces[/bold]: it attacks bundled images and writes a report.
    """


@cache
def command() -> click.Command:
    """Return the commands as click has them: made once, since reading every signature takes a tenth of a second."""
    return get_command(app)


def main() -> None:
    """Run the command line and exit with its code."""
    keep_freed_memory()
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    debug = len(arguments) < len(sys.argv) - 1
    sys.exit(run(arguments, debug))


def run(arguments: list[str], debug: bool = False) -> int:
    """Run one command line; return its exit code. `debug` lets errors through with their traceback."""
    arguments = [re.sub(r"^--defense(?==|$)", "--defence", argument) for argument in arguments]
    try:
        code = command()(arguments, standalone_mode=False, prog_name="gradveil")
        return code if isinstance(code, int) else 0
    except GradveilError as error:
        if debug:
            raise
        _show(error)
        return USER_ERROR
    except click.ClickException as error:
        error.show()
        return USER_ERROR
    except (KeyboardInterrupt, click.Abort):
        if debug:
            raise
        typer.echo("Interrupted.", err=True)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (`head`, for example) has ended; Python would report it again at the flush on exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _show(error: GradveilError) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, soft_wrap=True, markup=False)
    count = len(error.problems)
    console.print(Text(f"{count} problem{'s' if count > 1 else ''}:", style="bold red"))
    for problem in grouped(error.problems):
        text = problem.what.rstrip().replace("\n", "\n    ")
        console.print(Text.assemble("  ", (problem.where, "bold"), f": {text}"))
        console.print(Text(f"    -> {problem.remedy}", style="green"))
