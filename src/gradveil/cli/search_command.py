"""`gradveil search`: find settings of a defence for a model and its data, without attacks."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from gradveil.cli.index import read_index
from gradveil.cli.shared_options import DataDirOption, DeviceOption, again, completed, own_code

NOTHING_FOUND = 1
"""Exit code if no policy passes, or the best is no better than no transform."""
_HELP = {
    "run": "A run file (TOML), or the name of a bundled run: the policy is for its model and data.",
    "candidates": "Number of random policies of three transforms; the paper uses 1600. A later run may add more.",
    "images": "Number of public images for the scores; the best are scored again on as many others.",
    "least": "Least utility of a policy (the paper uses -85). Default: 1.33 times that without a transform.",
    "keep": "Number of best policies to score again and show.",
    "seed": "Seed of weights, images and policies, instead of the file's first.",
    "set": "Any setting of the run file: --set model.name='\"lenet-zhu\"'. Repeatable.",
    "out": "Folder of the scores. Default: runs/ats-NAME.",
}

search = typer.Typer(no_args_is_help=True)
"""The searches, one for each defence that has one."""


@search.callback()
def searches() -> None:
    """Search for the settings of a defence that suit a model and its data."""


def ats(
    name: Annotated[str, typer.Argument(metavar="RUN", help=_HELP["run"], autocompletion=completed("runs"))],
    count: Annotated[int, typer.Option("--candidates", min=2, help=_HELP["candidates"])] = 400,
    images: Annotated[int, typer.Option(min=read_index()["options"]["images"], help=_HELP["images"])] = 64,
    least: Annotated[float | None, typer.Option(help=_HELP["least"])] = None,
    keep: Annotated[int, typer.Option(min=1, help=_HELP["keep"])] = 10,
    seed: Annotated[int | None, typer.Option(min=0, help=_HELP["seed"])] = None,
    setting: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help=_HELP["set"])] = None,
    out: Annotated[Path | None, typer.Option(help=_HELP["out"])] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Remove earlier scores and start again.")] = False,
    device: DeviceOption = None,
    data_dir: DataDirOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON; progress goes to stderr.")] = False,
) -> int:
    """Search for a policy of ATS: three image transforms that hide most and leave images that can be classified.

    Random policies are scored on public images by the proxies of Gao et al. 2021, next to no transform and the
    policies of the paper, without attacks and without target clients. Every score is stored: the same command
    continues where it stopped, with bit-identical results. Exit codes: 0 a policy was found; 1 none passes, or the best
    is no better than no transform; 2 wrong use.
    """
    from gradveil.cli import ats_search
    from gradveil.core.private_files import plain
    from gradveil.tune.ats_policies import FILE, candidates, open_scorer, opened, settings_of

    own_code()
    with redirect_stdout(sys.stderr):  # Output of a user's model must not mix with the result.
        experiment, first_seed = ats_search.open_search(
            name, seed, count, images, least, device, setting or (), data_dir
        )
        scorer = open_scorer(experiment, images, first_seed)
        folder = out or Path("runs") / f"ats-{experiment.config.name}"
        try:
            with opened(folder, settings_of(experiment, scorer, first_seed), again(), fresh) as kept:
                result = ats_search.search_policies(
                    experiment, scorer, kept, candidates(count, first_seed), least, keep
                )
        except KeyboardInterrupt:
            typer.echo(f"\nStopped. Every score is kept in {folder}. To go on:\n  {again()}", err=True)
            raise
    if as_json:
        typer.echo(json.dumps(plain(result), indent=1, ensure_ascii=False))
    else:
        run = [name, *ats_search.words_of(seed, device, setting or (), data_dir)]
        ats_search.show(result, run, experiment.config.model.weights, folder / FILE)
    return 0 if result["better_than_none"] else NOTHING_FOUND
