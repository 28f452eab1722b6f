"""The search of `gradveil search ats`: score policies, score the best again, and print them."""

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
    PolicyScorer,
    SearchScores,
    best,
    hybrid,
    least_utility,
    lower,
    score_again,
    score_controls,
    unscored,
)
from gradveil.tune.ats_policies import search as score

_MEANING = (
    "privacy: how much gradients on the way from noise to the transformed image resemble those to match, from 0 to 1; "
    "lower is better. again: the same on other images and draws, because the best of many are partly lucky. "
    "utility: how well an untrained network separates the transformed images; higher is better.",
    "Both are proxies without an attack: an attacker who knows the policy may undo it, which no score measures. "
    "`gradveil audit` measures what attackers recover, `gradveil train` the cost in accuracy.",
)


def show(result: Mapping[str, Any], run: Sequence[str], weights: str | None, file: Path) -> None:
    """Print the best policies and the controls, with their meaning. `run` holds the words of the command."""
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False, soft_wrap=True, markup=False)
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for header in ("defence", "privacy", "again", "utility"):
        table.add_column(header, justify="left" if header == "defence" else "right", no_wrap=True)
    for header in ("filter", "transforms"):
        table.add_column(header, overflow="fold")
    for style, rows in (("dim", result["controls"]), ("", result["best"])):
        for row in rows:
            passes = "passes" if row["passes"] else "too low"
            transforms = "none" if row["policy"] == NONE else spelled(row["policy"])
            scores = [number(row[key]) for key in ("privacy", "privacy_again", "utility")]
            table.add_row(row["defence"], *scores, passes, transforms, style=style)
    Console(width=None if sys.stdout.isatty() else 120, highlight=False, markup=False).print(table)
    for line in _lines(result, weights):
        console.print(Text(line))
    if result["better_than_none"]:
        for line in _next_steps(result, run):
            console.print(Text(line, style="green"))
    for line in (*_MEANING, f"Every score: {file}"):
        console.print(Text(line, style="dim"))


def defence_text(policy: str) -> str:
    """Return a policy as the text of a defence.

    >>> defence_text("3-1-7")
    'ats(policy="3-1-7")'
    """
    return NONE if policy == NONE else f'ats(policy="{policy}")'


def _lines(result: Mapping[str, Any], weights: str | None) -> Iterator[str]:
    """Describe the scores and their outcome."""
    by = f"the weights of {weights}" if weights else "initial weights (the paper trains briefly first: model.weights)"
    yield f"Privacy by {by}; utility by initial weights; seed {result['settings']['seed']}."
    share = f"{result['passed']} of {plural(result['candidates'], 'candidate')} pass the filter"
    yield f"{share}: a utility of at least {number(result['least'])}."
    if not result["best"]:
        yield "No policy passes: lower the filter with --least, or raise --candidates."
        return
    best, hybrid = result["best"][0], result["controls"][-1]
    scores = (
        f"again {number(best['privacy_again'])}, without a transform {number(result['controls'][0]['privacy_again'])}"
    )
    if not result["better_than_none"]:
        yield f"Nothing found: the best is not two standard errors below no transform on other images ({scores})."
        return
    yield f"The best scores below no transform ({scores})."
    if not best["below_the_authors"]:
        yield f"It is no better than the paper's hybrid (again {number(hybrid['privacy_again'])})."


def _next_steps(result: Mapping[str, Any], run: Sequence[str]) -> Iterator[str]:
    """Return the best policy as a defence, and the command that audits it."""
    best = result["best"][0]["defence"]
    yield f"As a defence: {best}"
    texts = (best, result["controls"][-1]["defence"])
    words = ["gradveil", "audit", *run, "--attack", "ig", "--attack", "adaptive", "--defence", NONE]
    for text in texts:
        words += ["--defence", text]
    yield f"To measure it: {shlex.join(words)}"


_LINE_SECONDS = 10.0


def words_of(seed: int | None, device: str | None, settings: Sequence[str], data_dir: Path | None) -> Iterator[str]:
    """Return the options for model and data, for the command that audits the result."""
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
    """Read the run and open its data and model; its attacks and defences are ignored."""
    problems = list(_wrong_options(count, images, least))
    overrides = {"device": device, "seeds": None if seed is None else [seed]}
    try:
        config = read(name, {**overrides, "defences": [NONE], "attacks": ["ig"], "target_clients": 1}, settings)
    except GradveilError as error:
        raise GradveilError([*problems, *error.problems]) from error
    refuse(problems)
    if config.device == "cpu":
        torch.set_num_threads(1)  # Sums in the same order on any number of cores.
    return open_experiment(config, data_dir), config.seeds[0]


def _wrong_options(count: int, images: int, least: float | None) -> Iterator[Problem]:
    possible = distinct_policies(3)
    if count > possible:
        problem = f"is {count}, and only {possible} policies of three transforms differ"
        yield Problem("--candidates", problem, f"set at most {possible}")
    if least is not None and (not math.isfinite(least) or least > -images):
        problem = f"is {least:g}, and with {images} images no utility is above {-images}"
        yield Problem("--least", problem, f"set less than {-images}, or remove it: the default follows from the images")


def search_policies(
    experiment: Experiment,
    scorer: PolicyScorer,
    kept: SearchScores,
    policies: Sequence[str],
    least: float | None,
    keep: int,
) -> dict[str, Any]:
    """Score controls and candidates, then the best again on other images; return the result."""
    console = Console(stderr=True, soft_wrap=True, markup=False)
    there = sum(policy in kept.scores for policy in policies)
    settings = experiment.config
    summary = f"{len(policies)} candidates by {len(scorer.images.inputs)} public images of {settings.data.name}, "
    console.print(f"{summary}{settings.model.name}" + (f"; {there} scored already" if there else ""), highlight=False)
    began, before = time.monotonic(), len(kept.scores)
    score_controls(scorer, kept.scores, kept.tick)
    if new := len(kept.scores) - before:
        most = (time.monotonic() - began) / new * (len(policies) - there)
        console.print(f"At most about {duration(most)}: candidates below the filter take less.", highlight=False)
    filtered = least_utility(kept.scores[NONE]) if least is None else least
    left = unscored(kept.scores, policies, filtered)
    with _progress(console, "candidates", len(left), kept) as step:
        score(scorer, policies, filtered, kept.scores, step)
    passed = best(kept.scores, policies, filtered)
    mixed = hybrid(passed)
    if mixed is not None:
        score(scorer, [mixed], filtered, kept.scores, kept.tick)
    shown = [*(each.policy for each in passed[:keep]), *([mixed] if mixed else [])]
    twice = list(dict.fromkeys([*CONTROLS, *shown]))
    with _progress(console, "policies scored again", len(set(twice) - set(kept.again)), kept) as step:
        score_again(scorer, twice, kept.again, step)
    kept.write()
    return _result(kept, policies, filtered, shown, passed)


def _result(
    kept: SearchScores, policies: Sequence[str], least: float, shown: Sequence[str], passed: Sequence[Judged]
) -> dict[str, Any]:
    def row(policy: str) -> dict[str, Any]:
        first, again = kept.scores[policy], kept.again[policy]
        return {
            "policy": policy,
            "defence": defence_text(policy),
            "privacy": first.privacy,
            "privacy_again": again.mean,
            "utility": first.utility,
            "passes": first.utility >= least,
            "below_none": lower(again, kept.again[NONE]),
            "below_the_authors": lower(again, kept.again[CONTROLS[-1]]),
        }

    controls, rows = [row(policy) for policy in CONTROLS], [row(policy) for policy in shown]
    return {
        "settings": kept.head["settings"],
        "candidates": len(policies),
        "passed": len(passed),
        "least": least,
        "controls": controls,
        "best": rows,
        "better_than_none": bool(rows) and rows[0]["below_none"],
    }


@contextmanager
def _progress(console: Console, noun: str, total: int, kept: SearchScores) -> Iterator[Callable[[], None]]:
    """Show the progress of a loop, live on a terminal or in occasional lines, and let the scores be stored."""
    done, began = 0, time.monotonic()
    last = began
    words = TextColumn("{task.completed} of {task.total} {task.description}")
    bar = Progress(words, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal)
    task = bar.add_task(noun, total=total)

    def step() -> None:
        nonlocal done, last
        done += 1
        kept.tick()
        bar.advance(task)
        now = time.monotonic()
        if not console.is_terminal and done < total and now - last >= _LINE_SECONDS:
            last = now
            left = (now - began) / done * (total - done)
            console.print(f"{done} of {total} {noun}, about {duration(left)} left", highlight=False)

    with bar:
        yield step
