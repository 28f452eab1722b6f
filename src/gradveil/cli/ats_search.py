"""What `gradveil search ats` does and prints: score, look again, say what the best are worth."""

from __future__ import annotations

import math
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from gradveil.audit.experiment import Experiment
from gradveil.audit.preflight import open_experiment
from gradveil.audit.run_file import read
from gradveil.core.errors import GradveilError, Problem, refuse
from gradveil.core.formatting import duration, number, plural
from gradveil.defences.ats import spelled
from gradveil.defences.ats_scores import Judged, distinct_policies
from gradveil.tune.ats_policies import (
    CONTROLS,
    NONE,
    Kept,
    PolicyScorer,
    best,
    hybrid,
    least_utility,
    look_again,
    lower,
    score_controls,
    unscored,
)
from gradveil.tune.ats_policies import search as score

_MEANING = (
    "privacy: how much gradients on the way from noise to the transformed image resemble those to match, from 0 to 1; "
    "lower is better. again: the same on other images and draws, since the best of many are also the luckiest of many. "
    "utility: how well an untrained network tells the transformed images apart; higher is better.",
    "Both are proxies. Nobody was attacked: an attacker who knows the policy may undo it, which no score foresees. "
    "`gradveil audit` measures what comes back, `gradveil train` what it costs in accuracy.",
)


def show(found: Mapping[str, Any], run: Sequence[str], weights: str | None, file: Path) -> None:
    """Print the best policies beside the controls, and say plainly what they are worth. `run` are a command's words."""
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False, soft_wrap=True, markup=False)
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for header in ("defence", "privacy", "again", "utility"):
        table.add_column(header, justify="left" if header == "defence" else "right", no_wrap=True)
    for header in ("filter", "what it does"):
        table.add_column(header, overflow="fold")
    for style, rows in (("dim", found["controls"]), ("", found["best"])):
        for row in rows:
            passes = "passes" if row["passes"] else "too low"
            what = "images as they are" if row["policy"] == NONE else spelled(row["policy"])
            scores = [number(row[key]) for key in ("privacy", "privacy_again", "utility")]
            table.add_row(row["defence"], *scores, passes, what, style=style)
    Console(width=None if sys.stdout.isatty() else 120, highlight=False, markup=False).print(table)
    for line in _lines(found, weights):
        console.print(Text(line))
    if found["better_than_none"]:
        for line in _next_steps(found, run):
            console.print(Text(line, style="green"))
    for line in (*_MEANING, f"Every score: {file}"):
        console.print(Text(line, style="dim"))


def defence_text(policy: str) -> str:
    """Write a policy as a defence.

    >>> defence_text("3-1-7")
    'ats(policy="3-1-7")'
    """
    return NONE if policy == NONE else f'ats(policy="{policy}")'


def _lines(found: Mapping[str, Any], weights: str | None) -> Iterator[str]:
    """Say what was scored by what, and what came of it."""
    by = f"the weights of {weights}" if weights else "initial weights (the authors train a little first: model.weights)"
    yield f"Privacy by {by}; utility by initial weights; seed {found['settings']['seed']}."
    share = f"{found['passed']} of {plural(found['candidates'], 'candidate')} pass the filter"
    yield f"{share}: a utility of at least {number(found['least'])}."
    if not found["best"]:
        yield "No policy passes: lower the bar with --least, or ask for more with --candidates."
        return
    best, hybrid = found["best"][0], found["controls"][-1]
    told = f"again {number(best['privacy_again'])}, images as they are {number(found['controls'][0]['privacy_again'])}"
    if not found["better_than_none"]:
        yield f"Nothing found: by its second look the best is not below no transform by two standard errors ({told})."
        return
    yield f"The best scores below images as they are ({told})."
    if not best["below_the_authors"]:
        yield f"It is no better than the authors' hybrid (again {number(hybrid['privacy_again'])})."


def _next_steps(found: Mapping[str, Any], run: Sequence[str]) -> Iterator[str]:
    """Write the best as a defence, and the command that measures it."""
    best = found["best"][0]["defence"]
    yield f"As a defence: {best}"
    texts = (best, found["controls"][-1]["defence"])
    words = ["gradveil", "audit", *run, "--attack", "ig", "--attack", "adaptive", "--defence", NONE]
    for text in texts:
        words += ["--defence", text]
    yield f"To measure it: {shlex.join(words)}"


_LINE_SECONDS = 10.0


def words_of(seed: int | None, device: str | None, settings: Sequence[str], data_dir: Path | None) -> Iterator[str]:
    """Say again what the model and its data are, to the command that measures what was found."""
    for option, value in (("--seed", seed), ("--device", device), ("--data-dir", data_dir)):
        if value is not None:
            yield from (option, str(value))
    for setting in settings:
        yield from ("--set", setting)


def open_search(
    name: str,
    seed: int | None,
    count: int,
    images: int,
    least: float | None,
    device: str | None,
    settings: Sequence[str],
    data_dir: Path | None,
) -> tuple[Experiment, int]:
    """Read the run and open its data and model; what it attacks, and with what defences, plays no part."""
    problems = list(_wrong_options(count, images, least))
    overrides = {"device": device, "seeds": None if seed is None else [seed]}
    try:
        config = read(name, {**overrides, "defences": [NONE], "attacks": ["ig"], "target_clients": 1}, settings)
    except GradveilError as error:
        raise GradveilError([*problems, *error.problems]) from error
    refuse(problems)
    if config.device == "cpu":
        torch.set_num_threads(1)  # The same sums in the same order, however many cores there are.
    return open_experiment(config, data_dir), config.seeds[0]


def _wrong_options(count: int, images: int, least: float | None) -> Iterator[Problem]:
    possible = distinct_policies(3)
    if count > possible:
        what = f"is {count}, and only {possible} policies of three transforms differ"
        yield Problem("--candidates", what, f"say at most {possible}")
    if least is not None and (not math.isfinite(least) or least > -images):
        what = f"is {least:g}, and with {images} images no utility is above {-images}"
        yield Problem("--least", what, f"say less than {-images}, or leave it out: it then follows from the images")


def search_policies(
    experiment: Experiment, judge: PolicyScorer, kept: Kept, policies: Sequence[str], least: float | None, keep: int
) -> dict[str, Any]:
    """Score controls and candidates, then the best again on other images; return all that is told."""
    console = Console(stderr=True, soft_wrap=True, markup=False)
    there = sum(policy in kept.scores for policy in policies)
    settings = experiment.config
    told = f"{len(policies)} candidates by {len(judge.images.inputs)} public images of {settings.data.name}, "
    console.print(f"{told}{settings.model.name}" + (f"; {there} scored already" if there else ""), highlight=False)
    began, before = time.monotonic(), len(kept.scores)
    score_controls(judge, kept.scores, kept.tick)
    if new := len(kept.scores) - before:
        most = (time.monotonic() - began) / new * (len(policies) - there)
        console.print(f"At most about {duration(most)}: candidates below the filter take less.", highlight=False)
    filtered = least_utility(kept.scores[NONE]) if least is None else least
    left = unscored(kept.scores, policies, filtered)
    with _progress(console, "candidates", len(left), kept) as step:
        score(judge, policies, filtered, kept.scores, step)
    found = best(kept.scores, policies, filtered)
    mixed = hybrid(found)
    if mixed is not None:
        score(judge, [mixed], filtered, kept.scores, kept.tick)
    shown = [*(one.policy for one in found[:keep]), *([mixed] if mixed else [])]
    twice = list(dict.fromkeys([*CONTROLS, *shown]))
    with _progress(console, "policies looked at again", len(set(twice) - set(kept.again)), kept) as step:
        look_again(judge, twice, kept.again, step)
    kept.write()
    return _told(kept, policies, filtered, shown, found)


def _told(
    kept: Kept, policies: Sequence[str], least: float, shown: Sequence[str], found: Sequence[Judged]
) -> dict[str, Any]:
    def row(policy: str) -> dict[str, Any]:
        one, again = kept.scores[policy], kept.again[policy]
        return {
            "policy": policy,
            "defence": defence_text(policy),
            "privacy": one.privacy,
            "privacy_again": again.mean,
            "utility": one.utility,
            "passes": one.utility >= least,
            "below_none": lower(again, kept.again[NONE]),
            "below_the_authors": lower(again, kept.again[CONTROLS[-1]]),
        }

    controls, rows = [row(policy) for policy in CONTROLS], [row(policy) for policy in shown]
    return {
        "settings": kept.head["settings"],
        "candidates": len(policies),
        "passed": len(found),
        "least": least,
        "controls": controls,
        "best": rows,
        "better_than_none": bool(rows) and rows[0]["below_none"],
    }


@contextmanager
def _progress(console: Console, what: str, total: int, kept: Kept) -> Iterator[Callable[[], None]]:
    """Show how far a loop is: live on a terminal, else a line now and then; and let the scores be written."""
    done, began = 0, time.monotonic()
    last = began
    words = TextColumn("{task.completed} of {task.total} {task.description}")
    bar = Progress(words, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal)
    task = bar.add_task(what, total=total)

    def step() -> None:
        nonlocal done, last
        done += 1
        kept.tick()
        bar.advance(task)
        now = time.monotonic()
        if not console.is_terminal and done < total and now - last >= _LINE_SECONDS:
            last = now
            left = (now - began) / done * (total - done)
            console.print(f"{done} of {total} {what}, about {duration(left)} left", highlight=False)

    with bar:
        yield step
