"""Progress of an audit: a live display on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Mapping, Sequence
from threading import Event, RLock, Thread
from types import MappingProxyType, TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gradveil.attacks.protocol import Progress
from gradveil.audit.attack_check import descent, examine
from gradveil.audit.attack_selection import TrialAddress
from gradveil.audit.result_rows import Row, summarise, words_of
from gradveil.audit.run_directory import UNFIT, Trial
from gradveil.audit.threat_model import unknown_to_all
from gradveil.core.errors import Problem
from gradveil.core.formatting import DASH, duration, interval, listing, number, percent, plural
from gradveil.core.space import ExampleWords

_LINE_SECONDS = 20.0
"""Plain output: at most one line of progress in this time."""
_LOOK_SECONDS = 8.0
"""Plain output: how often to look whether a line is due, whatever the attacks report: no longer silence than both."""


class Screen:
    """Progress of a run: trials and target clients done, and the remaining time.

    On a terminal it is live, with iterations per second. Elsewhere it is a line for each finished trial, and one at
    least every 30 seconds, even if an attack reports nothing.

    The remaining time takes the rest of the work to go as fast as the work so far did, and every attack to use all of
    its iterations: those that converge early are faster. A trial under way takes as long as its own pace says, at
    least.
    """

    def __init__(self, console: Console, title: str = "", doubt: str = "") -> None:
        """Show progress on this console; `title` says what is attacked, `doubt` what the run cannot show."""
        self.console, self.title, self.doubt = console, title, doubt
        self.live = Live(console=console, refresh_per_second=4, transient=True) if console.is_terminal else None
        self.began = time.monotonic()
        self.planned: Sequence[TrialAddress] = ()
        self.target_clients = 0
        self.skipped = 0
        self.finished = 0
        self.work: Mapping[str, float] = {}
        self.left = self.worked = 0.0
        self.steps: dict[str, dict[int, Progress]] = {}
        self.first: dict[str, tuple[float, float]] = {}
        self.iterations = 0
        self.told = self.began
        self.lock, self.ended, self.clock = RLock(), Event(), Thread(target=self._beat, daemon=True)

    def __enter__(self) -> Screen:
        """Start the live display, or the clock of plain lines."""
        if self.live:
            self.live.start()
        elif not self.console.quiet:
            self.clock.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take the live display away, or stop the clock."""
        self.ended.set()
        if self.live:
            self.live.stop()
        elif self.clock.is_alive():
            self.clock.join()

    def _beat(self) -> None:
        """Print a line whenever one is due, until the run has ended."""
        while not self.ended.wait(_LOOK_SECONDS):
            with self.lock:
                self._tell_if_due()

    def start(
        self,
        planned: Sequence[TrialAddress],
        finished: set[str],
        target_clients: int,
        damaged: Sequence[Problem] = (),
        work: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Say how much there is to do, and what is done again because its files are damaged."""
        self.planned, self.target_clients, self.skipped = planned, target_clients, len(finished)
        self.work = {trial.id: work.get(trial.id, 1.0) for trial in planned}
        self.left, self.worked = sum(self.work[trial.id] for trial in planned if trial.id not in finished), 0.0
        self.began = self.told = time.monotonic()
        done = f", {len(finished)} of them already done" if finished else ""
        for problem in damaged:
            told = f"Damaged, its trial is done again: {problem.where}: {problem.what}"
            if self.console.quiet:
                warnings.warn(told, stacklevel=2)
            self.console.print(Text(told, style="yellow"), soft_wrap=True)
        some = [trial for trial in planned if trial.control]
        control = f", {len(some)} of them an undefended control of {some[0].clients(target_clients)}" if some else ""
        count = f"{plural(len(planned), 'trial')} of {plural(target_clients, 'target client')}"
        what = f"{self.title}: " if self.title else ""
        self.console.print(f"{what}{count}{control}{done}", style="bold", soft_wrap=True)
        if self.doubt:
            self.console.print(Text(self.doubt, style="yellow"), soft_wrap=True)

    def progress(self, trial: TrialAddress, share: int, step: Progress) -> None:
        """Take a report of an attack."""
        with self.lock:
            self.steps.setdefault(trial.id, {})[share] = step
            self.first.setdefault(trial.id, (time.monotonic(), self._share(trial.id)))
            if self.live:
                self.live.update(self._table())
            else:
                self._tell_if_due()

    def _tell_if_due(self) -> None:
        now = time.monotonic()
        if self.planned and now - self.told >= _LINE_SECONDS:
            self.told = now
            self.console.print(self._line(), soft_wrap=True)

    def done(self, trial: TrialAddress, result: Trial) -> None:
        """Show a trial's result in one line."""
        with self.lock:
            self.finished += 1
            self.worked += self.work[trial.id]
            self.iterations += result.info.get("row_iterations", 0)
            self.steps.pop(trial.id, None)
            self.told = time.monotonic()
            if self.live:
                self.live.update(self._table())
            self.console.print(self._result(trial, result), soft_wrap=True)

    def _result(self, trial: TrialAddress, result: Trial) -> Text:
        number = f"[{self.skipped + self.finished}/{len(self.planned)}] "
        text = Text(number, style="dim").append(_called(trial), style="default")
        if result.unfit:
            return text.append(f": {UNFIT}: {result.failed}", style="yellow")
        if result.failed is not None:
            return text.append(f": failed: {result.failed}", style="red")
        summary = summarise(result)
        if result.unscored is not None:
            return text.append(f": no score, {descent(Row(0, result))}, {duration(summary['seconds'])}")
        words = words_of(result.info)
        told = (
            f": {percent(summary['asr'])} recovered, {words.metric} {_fixed(summary[f'{words.headline}_mean'], 2)}, "
            f"{duration(summary['seconds'])}"
        )
        return text.append(told, style="default")

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for trial in self.planned:
            if trial.id in self.steps:
                table.add_row(*self._facts(trial))
        table.add_row(Text(f"{self._rest()}, {self._pace()}", style="dim"))
        return table

    def _facts(self, trial: TrialAddress) -> tuple[str, ...]:
        steps = self.steps[trial.id].values()
        target_clients = sum(step.target_clients for step in steps)
        # A share whose rows are all finished has no objective any more.
        worst = max((step.objective for step in steps if math.isfinite(step.objective)), default=None)
        return (
            _called(trial),
            f"{target_clients}/{trial.clients(self.target_clients)} target clients",
            percent(self._share(trial.id)),
            f"objective {number(worst)}",
        )

    def _pace(self) -> str:
        under_way = [step for steps in self.steps.values() for step in steps.values()]
        iterations = self.iterations + sum(step.row_iterations for step in under_way)
        return f"{iterations / max(time.monotonic() - self.began, 1e-9):,.0f} iterations/s"

    def _rest(self) -> str:
        seconds = max(time.monotonic() - self.began, 1e-9)
        worked = self.worked + sum(self.work[trial] * self._share(trial) for trial in self.steps)
        ahead = max((self._ahead(trial) for trial in self.steps), default=0.0)
        rest = ""
        if worked > 0.01 * self.left:
            left = max(ahead, seconds / worked * (self.left - worked))
            rest = f", about {duration(left)} left" if left >= 1 else ", nearly done"
        done = f"{self.skipped + self.finished} of {len(self.planned)} trials done"
        return f"{done}, {duration(seconds)} so far{rest}"

    def _share(self, trial: str) -> float:
        steps = self.steps[trial].values()
        return sum(step.row_iterations for step in steps) / max(1, sum(step.row_budget for step in steps))

    def _ahead(self, trial: str) -> float:
        """Estimate the seconds that a trial under way still takes, from its reports alone."""
        (began, before), share = self.first[trial], self._share(trial)
        return (time.monotonic() - began) / (share - before) * (1 - share) if share > before else 0.0

    def _line(self) -> str:
        at_work = [f"{_called(t)} ({percent(self._share(t.id))})" for t in self.planned if t.id in self.steps]
        return "  " + "; ".join([self._rest(), *at_work])


def _called(trial: TrialAddress) -> str:
    client = f", client {trial.client}" if trial.client else ""
    when = "" if trial.trained is None else f", after {plural(trial.trained, 'round')}"
    what = "control, " if trial.control else ""
    return f"{what}{trial.attack} against {trial.defence}, seed {trial.seed}{client}{when}"


def _fixed(value: float | None, digits: int) -> str:
    """Write a score with so many decimals, as a column needs them."""
    return DASH if value is None or not math.isfinite(value) else f"{value:z.{digits}f}"


def _with_spread(mean: float | None, spread: float | None) -> str:
    """Write a mean with its standard deviation over images."""
    return DASH if mean is None or spread is None else f"{_fixed(mean, 2)} ± {_fixed(spread, 2)}"


def result_table(trials: Sequence[Trial]) -> Table:
    """Lay all trials out: the strongest attack first within each defence, upper bounds and the control last.

    Below stands what has to be done before a defence can be judged.
    """
    rows = {id(trial): Row(number, trial) for number, trial in enumerate(trials) if trial.failed is None}
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.caption, table.caption_justify = warnings_of([*rows.values()]), "left"
    several = len({(trial.info["seed"], trial.info["client"]) for trial in trials}) > 1
    trained = any(trial.info.get("trained") is not None for trial in trials)
    for header in ("defence", "attack", *(("seed", "client") if several else ()), *(("round",) if trained else ())):
        table.add_column(header, overflow="fold")
    table.add_column("attacker", no_wrap=True)
    further = list(dict.fromkeys(str(name) for trial in trials for name in trial.info.get("metrics") or ()))
    usual = (*(("accuracy",) if trained else ()), "recovered", "95% CI", "baseline")
    words = words_of(trials[0].info) if trials else ExampleWords()
    pictured = words.drawn
    for header in (*usual, words.metric, *further, *(("PSNR",) if pictured else ()), "distance"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("attack check", no_wrap=True)
    order = list(dict.fromkeys(trial.info["defence"] for trial in trials if not trial.info.get("control")))

    def place(pair: tuple[Trial, dict[str, Any]]) -> tuple[int, int, bool, float]:
        row = rows.get(id(pair[0]))
        bound = row is not None and row.attacker == "informed"
        which = len(order) if pair[1]["control"] else order.index(pair[1]["defence"])
        return which, pair[1]["trained"] or 0, bound, -(pair[1]["asr"] or 0)

    for trial, row in sorted(((trial, summarise(trial)) for trial in trials), key=place):
        named = "none (control)" if row["control"] else row["defence"]
        where = [named, row["attack"], *([str(row["seed"]), row["client"]] if several else [])]
        where += [str(row["trained"])] if trained else []
        if trial.failed is not None:
            table.add_row(*where, DASH, Text(UNFIT, style="yellow") if trial.unfit else Text("failed", style="red"))
            continue
        kind = rows[id(trial)].attacker
        where.append(DASH if kind == "undefended" else kind)
        if trial.unscored is not None:
            table.add_row(*where, *[DASH] * (5 + pictured + len(further)), Text(descent(rows[id(trial)])))
            continue
        numbers = (
            *((percent(row["accuracy"]),) if trained else ()),
            percent(row["asr"]),
            interval(row["asr_low"], row["asr_high"]),
            percent(rows[id(trial)].baseline),
            _with_spread(row[f"{words.headline}_mean"], row[f"{words.headline}_std"]),
            *(_fixed(row.get(f"{name}_mean"), 3) for name in further),
            *((_fixed(row["psnr_mean"], 1),) if pictured else ()),
            _distance(trial, row["distance"]),
        )
        health = examine(rows[id(trial)], [*rows.values()])
        table.add_row(*where, *numbers, Text(health.label, style="yellow" if health.doubts else ""))
    return table


def _distance(trial: Trial, distance: float | None) -> str:
    if distance is None:  # of a recorded update it may be unknown, of a simulated one it is no number
        return DASH if "observed" in trial.info else "inf"
    return f"{distance:.2g}"


def warnings_of(rows: Sequence[Row]) -> Text | None:
    """Say against which defences nobody was run who knows them, and what to do about it."""
    missing: dict[str, list[str]] = {}
    for defence in dict.fromkeys(row.defence for row in rows):
        if warning := unknown_to_all([row for row in rows if row.defence == defence]):
            missing.setdefault(warning, []).append(defence)
    told = []
    for warning, defences in missing.items():
        said = warning if len(defences) == 1 else warning.replace("this defence", "them")
        told.append(f"{listing(defences)}: {said[0].lower()}{said[1:]}")
    return Text("\n".join(told), style="bold yellow not italic") if told else None
