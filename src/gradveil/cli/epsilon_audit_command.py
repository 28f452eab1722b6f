"""`gradveil audit-epsilon`: lower bounds of the epsilons of a run's defences, next to what they claim."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradveil.cli.shared_options import DataDirOption, DefenceOption, completed, own_code
from gradveil.core.errors import GradveilError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gradveil.assurance.replay_audit import EpsilonAudit
    from gradveil.audit.experiment import Experiment

NOTHING = 1
"""Exit code where nothing could be audited."""
VIOLATED = 3
"""Exit code where an audit contradicts a claim."""
_HELP = {
    "run": "A run file (TOML), or the name of a bundled run.",
    "replays": "Replays with the canary, and as many without it.",
    "canaries": "Audit one update with this number of canaries in it, instead of replays.",
    "deployed": "Replay the exact clips and grid noise of a deployed client.",
    "claim": "Epsilon that is claimed for one update. Default: the accountant's.",
    "delta": "Should be well below one over the number of examples.",
    "set": "Any setting of the run file: --set model.name='\"lenet-zhu\"'. Repeatable.",
    "json": "Print one JSON object per defence.",
}


def audit_epsilon(
    name: Annotated[str, typer.Argument(metavar="RUN", help=_HELP["run"], autocompletion=completed("runs"))],
    defence: DefenceOption = None,
    replays: Annotated[int, typer.Option(min=20, help=_HELP["replays"])] = 1000,
    canaries: Annotated[int | None, typer.Option(min=2, help=_HELP["canaries"])] = None,
    deployed: Annotated[bool, typer.Option("--deployed", help=_HELP["deployed"])] = False,
    claim: Annotated[float | None, typer.Option(metavar="EPSILON", help=_HELP["claim"])] = None,
    delta: Annotated[float, typer.Option(help=_HELP["delta"])] = 1e-5,
    seed: Annotated[int, typer.Option(help="Seed of canaries and simulated noise.")] = 0,
    setting: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help=_HELP["set"])] = None,
    data_dir: DataDirOption = None,
    as_json: Annotated[bool, typer.Option("--json", help=_HELP["json"])] = False,
) -> int:
    """Audit the code behind an epsilon: compare a lower bound of it with the claim.

    The client's release is replayed with a crafted example and without it. The better the replays can be told apart,
    the larger the epsilon of this code is at least. A bound above the claim shows a fault (exit code 3; 1 if there was
    nothing to audit). A low bound is no guarantee.
    """
    import torch
    from rich.console import Console

    from gradveil.audit.preflight import open_experiment
    from gradveil.audit.run_file import read

    own_code()
    config = read(name, {"defences": defence or None}, setting or ())
    torch.set_num_threads(1)
    experiment = open_experiment(config, data_dir)
    settings = {"delta": delta, "claimed": claim, "seed": seed}
    settings |= {"canaries": canaries} if canaries else {"replays": replays, "deployed": deployed}
    console = Console(soft_wrap=True, markup=False, highlight=False)
    rows, violated = list[dict[str, Any]](), False
    for text, result in _audits(experiment, settings):
        failed = isinstance(result, str)
        violated |= not failed and result.violated
        rows.append({"defence": text, **({"not_audited": result} if failed else result.plain())})
        if not as_json:
            style = "dim" if failed else "bold red" if result.violated else ""
            console.print(f"{text}: {'not audited: ' if failed else ''}{result}", style=style)
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
    else:
        console.print(
            "The attacker of this audit sees every update. The lower bound is no guarantee: only the claim is, if the "
            "code keeps it.",
            style="dim",
        )
    audited = any("claimed" in row for row in rows)
    return VIOLATED if violated else 0 if audited else NOTHING


def _audits(experiment: Experiment, settings: dict[str, Any]) -> Iterator[tuple[str, EpsilonAudit | str]]:
    """Audit each defence of each client setting; a reason takes the place of a result."""
    from gradveil.assurance.one_run_audit import rehearsed_run
    from gradveil.assurance.replay_audit import audit_epsilon as replayed
    from gradveil.core.types import Batch

    for index in range(len(experiment.config.client)):
        raw = experiment.batch(experiment.examples(index, range(1)))
        others = Batch(raw.inputs[0], raw.targets[0])
        for text in experiment.defences:
            client = experiment.client(index, text, experiment.config.seeds[0])
            try:
                run = {key: value for key, value in settings.items() if key != "canaries"}
                if "canaries" in settings:
                    yield text, rehearsed_run(client, others, settings["canaries"], **run)
                else:
                    yield text, replayed(client, others, **run)
            except GradveilError as error:
                yield (
                    text,
                    "; ".join(f"{each.where} {each.what} -> {each.remedy}" for each in error.problems),
                )
