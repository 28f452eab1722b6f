"""Run an audit: every missing trial is attacked, scored and written."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any, Protocol

import torch
from rich.console import Console
from safetensors.torch import load, save
from torch import Tensor

from gradveil.attacks.attack_catalogue import ALL_ATTACKS
from gradveil.attacks.closed_form.defended_layers import Estimated
from gradveil.attacks.closed_form.first_layer import Analytic
from gradveil.attacks.closed_form.layer_by_layer import Recursive
from gradveil.attacks.closed_form.unmix import Unmix
from gradveil.attacks.inversion.inversion import Inversion
from gradveil.attacks.malicious.hidden_units import HiddenUnits
from gradveil.attacks.malicious.planted_block import Planting
from gradveil.attacks.protocol import Attack, Progress
from gradveil.audit.attack_selection import TrialAddress, open_ended, target_clients, trials, undefended
from gradveil.audit.attackers.needless_searches import needless
from gradveil.audit.attackers.run_attackers import Decision, closed_forms, untried
from gradveil.audit.audit_config import AUTO, ClientConfig, RunConfig
from gradveil.audit.budgets import (
    AUTO_SECONDS,
    Plan,
    Plans,
    read_budget,
    read_plans,
    restarts_worth,
    spends,
    write_plan,
)
from gradveil.audit.display import Screen
from gradveil.audit.experiment import Experiment
from gradveil.audit.grants import told
from gradveil.audit.preflight import open_experiment
from gradveil.audit.recorded.recorded_attack import recover_observed, score_observed
from gradveil.audit.run_directory import TRAINING, Store, Trial
from gradveil.audit.score import TrialNames, failure, score
from gradveil.audit.sources import Source, TrainingSource
from gradveil.audit.trial import Recovered, merge, recover, sharers_of, sharing
from gradveil.audit.verdict import ENOUGH
from gradveil.core.errors import GradveilError, Problem
from gradveil.core.formatting import duration, listing, percent, plural
from gradveil.core.freed_memory import keep_freed_memory
from gradveil.core.user_code import code_of
from gradveil.defences import entries
from gradveil.federated.training_run import TRAINING_RUN, load_summaries, load_training
from gradveil.federated.training_run import describe as describe_training
from gradveil.federated.training_run import run as train
from gradveil.federated.training_run import site as train_site
from gradveil.federated.training_setup import TrainingSetting, TrainingTrial, refuse_other_images
from gradveil.federated.training_state import RoundResult, Status
from gradveil.nn.weight_files import fingerprint
from gradveil.runs.run_folder import described
from gradveil.runs.task import Job, Parcel, Report, Scheduler, Site, Work, in_process


def expected_work(experiment: Experiment) -> dict[str, float]:
    """Say of every trial how many gradients of an image it takes, at most: iterations x restarts x examples x steps.

    Target clients are the same everywhere, but for a control's, who are few.

    A closed form counts as nothing, and an attack of which nobody knows it counts as
    the mean of the others.
    """
    config = experiment.config
    known: dict[str, float | None] = {}
    for trial in trials(config):
        rows = _row_iterations(experiment.attacks[trial.attack], trial.attack, config, sharers_of(experiment, trial))
        share = trial.clients(config.target_clients) / config.target_clients
        known[trial.id] = None if rows is None else rows * pass_cost(config.client[trial.client]) * share
        if trial.meeting in experiment.unfit:
            known[trial.id] = 0.0
    usual = fmean(counted) if (counted := [work for work in known.values() if work]) else 1.0
    return {name: usual if work is None else work for name, work in known.items()}


def _row_iterations(attack: Attack, text: str, config: RunConfig, attackers: float) -> float | None:
    """Count the iterations of all restarts of one target; a budget in time is taken to be spent, whatever it buys."""
    if isinstance(attack, Analytic | Estimated | HiddenUnits | Planting | Recursive | Unmix):
        return 0.0
    if not isinstance(attack, Inversion):
        return None
    own = attack.descent.iterations * restarts_worth(attack)
    if config.budget is None:
        return own
    if config.budget == AUTO:  # what seconds buy is not known before
        return None if open_ended(text, config.iterations) else own
    budget = read_budget(config.budget)
    if budget.unit == "seconds":
        return 1.0
    return min(own, budget.amount / attackers / config.target_clients)


def pass_cost(client: ClientConfig) -> float:
    """Count the examples whose gradients make one update.

    >>> pass_cost(ClientConfig(batch=8)), pass_cost(ClientConfig(batch=8, local={"lr": 0.1, "steps": 3, "batch": 2}))
    (8, 6)
    >>> pass_cost(ClientConfig(batch=8, members=2, local={"lr": 0.1, "epochs": 3}))
    48
    """
    if client.local is None:
        return client.examples
    if client.local.epochs is not None:
        return client.examples * client.local.epochs
    return client.members * (client.local.batch or client.batch) * (client.local.steps or 1)


@dataclass(frozen=True)
class AuditTask:
    """A share of a trial's target clients: one piece of work for one process."""

    trial: TrialAddress
    share: int
    numbers: range

    def order(self, plans: Mapping[str, Plan], source: Source) -> Parcel:
        """Say what a worker needs to attack this share: what was settled before, where its training stood."""
        trial = self.trial
        stood = source.kept(trial.defence, trial.seed, trial.trained)
        return Parcel(
            {"trial": trial.id, "target_clients": [self.numbers.start, self.numbers.stop], "plans": plans}, stood
        )


def site(experiment: Experiment, data_dir: Path | None) -> Site:
    """Say what workers elsewhere open to attack the trials of this run, and which attacks do not apply there."""
    setting = {
        "config": experiment.config.resolved(),
        "data_dir": str(data_dir.resolve()) if data_dir else None,
        "unfit": [[*meeting, why] for meeting, why in experiment.unfit.items()],
        "images": experiment.images,
    }
    return Site(f"{__name__}:{open_work.__name__}", setting)


def open_work(setting: Mapping[str, Any]) -> Work:
    """Open the experiment of a run, where somebody else has checked it."""
    keep_freed_memory()
    data_dir = Path(setting["data_dir"]) if setting["data_dir"] else None
    experiment = open_experiment(RunConfig.model_validate(setting["config"]), data_dir, checked=False)
    refuse_other_images(setting["images"], experiment.images)
    unfit = {(client, defence, attack): why for client, defence, attack, why in setting["unfit"]}
    return working(replace(experiment, unfit=unfit))


def working(experiment: Experiment) -> Work:
    """Return the work of a run whose experiment is open."""
    addresses = {address.id: address for address in trials(experiment.config)}

    def work(order: Parcel, tell: Report) -> Parcel:
        def settle(name: str, plan: Plan) -> None:
            tell(Parcel({"plan": name, "settled": plan}))

        def progress(step: Progress) -> None:
            tell(Parcel({"step": asdict(step)}))

        facts = order.facts
        trial, numbers = addresses[facts["trial"]], range(*facts["target_clients"])
        plans = Plans(facts["plans"], settle)
        standing = experiment.source.standing(order.data, trial.defence, trial.seed)
        found = (
            recover(experiment, trial, numbers, progress, plans, standing)
            if experiment.source.simulated
            else recover_observed(experiment, trial, numbers, progress, plans)
        )
        return Parcel({"facts": found.facts, "statuses": found.statuses}, save(found.tensors))

    return work


def recovered(parcel: Parcel) -> Recovered:
    """Read what came back."""
    # Copied to where torch puts its own: sums within a tensor depend on where it lies.
    tensors = {name: value.clone() for name, value in load(parcel.data).items()}
    return Recovered(tensors, dict(parcel.facts["facts"]), tuple(parcel.facts["statuses"]))


_PACKAGES = ("torch", "numpy", "scipy", "safetensors", "scikit-image", "scikit-learn", "torchmetrics", "pydantic")


def title(experiment: Experiment) -> str:
    """Say in a few words what a run attacks, for its first line of progress."""
    config = experiment.config
    clients = listing(dict.fromkeys(client.update_of(experiment.space.words.noun) for client in config.client))
    known = [told(attack)["targets"] == "known" for attack in experiment.attacks.values()]
    to = "" if all(known) else f" to {sum(known)} of {plural(len(known), 'attack')}"
    labels = f", labels known{to}" if any(known) else ", labels unknown"
    budget = "" if config.budget is None else f", budget {config.budget} per defence"
    budget = f", about {duration(AUTO_SECONDS)} of computing" if config.budget == AUTO else budget
    return f"{config.model.name} on {config.data.name}, {clients}{labels}{budget}"


def too_few(experiment: Experiment) -> str:
    """Say before the first trial that a run has too few examples to show that a defence is not broken, or nothing."""
    config, words = experiment.config, experiment.space.words
    most = config.target_clients * max(client.examples for client in config.client)
    if most >= ENOUGH or all(map(undefended, config.defences)) or not experiment.source.scored:
        return ""
    return f"No defence can be shown to be not broken with {plural(most, words.noun)}: at least {ENOUGH} are needed."


RoundReport = Callable[[TrainingTrial, RoundResult, Status], None]
"""Is called after each round of a training."""


class Display(Protocol):
    """What a run tells while it works. Every method is called from one thread."""

    def start(
        self,
        planned: Sequence[TrialAddress],
        finished: set[str],
        target_clients: int,
        damaged: Sequence[Problem] = (),
        work: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Hear of the trials: those that are there, files whose trials are made again, how much work each will be."""
        ...

    def progress(self, trial: TrialAddress, share: int, step: Progress) -> None:
        """Hear that one share of a trial got on."""
        ...

    def done(self, trial: TrialAddress, result: Trial) -> None:
        """Hear that a trial is finished."""
        ...


@dataclass(frozen=True)
class OpenedRun:
    """A run that is ready to start, and what its files are to say."""

    experiment: Experiment
    info: Mapping[str, Any]
    command: str

    @property
    def training(self) -> TrainingSetting | None:
        """The trainings that the audit attacks, or that measure accuracies."""
        source = self.experiment.source
        return source.setting if isinstance(source, TrainingSource) else self.experiment.cost

    @cached_property
    def training_info(self) -> Mapping[str, Any] | None:
        """What the file of the trainings is to say."""
        if (setting := self.training) is None:
            return None
        return describe_training(setting.config, self.command, setting.weights, setting.data.identities())

    def problems(self, folder: Path) -> list[Problem]:
        """Find out why the run can neither begin in a folder nor go on there."""
        found = Store(folder).problems(self.info)
        if not found and self.training_info is not None:
            found = TRAINING_RUN.problems(folder / TRAINING, self.training_info)
        return found

    def finish(
        self,
        folder: Path,
        console: Console,
        fresh: bool = False,
        workers: Callable[[Site], Scheduler] = lambda _: in_process,
        data_dir: Path | None = None,
        heard: RoundReport | None = None,
    ) -> None:
        """Run the trainings and the trials that are not done, by `workers` who read `data_dir`, or in this process.

        `heard` is called after each round of the trainings; without it a line says how each of them ended.
        """
        experiment = self.experiment.following(folder / TRAINING)
        with Store(folder).open(self.info, fresh) as store:
            share = store.info()["share"]
            if (setting := self.training) is not None:
                self._train(folder / TRAINING, console, workers(train_site(setting, data_dir)), heard)
            with Screen(console, title(experiment), too_few(experiment)) as screen:
                run(experiment, store, screen, share, workers(site(experiment, data_dir)))

    def _train(self, folder: Path, console: Console, schedule: Scheduler, heard: RoundReport | None) -> None:
        """Run the unfinished trainings that the audit attacks, or that measure accuracies, and keep their states."""
        config, setting, info = self.experiment.config, self.training, self.training_info
        assert setting is not None
        assert info is not None
        with TRAINING_RUN.opened(folder, info):
            if config.train is None:
                planned, finished = load_training(folder).trials, load_summaries(folder)
                done = f", {len(finished)} of them already done" if finished else ""
                done += f" ({setting.note})" * bool(setting.note)
                count = f"{plural(len(planned), 'training')} of {plural(setting.config.rounds, 'round')}"
                words = f"{count} for the accuracy of each defence{done}"
                console.print(words, style="bold", highlight=False, soft_wrap=True)
            stages = config.train.stages if config.train else ()
            train(setting, folder, heard or partial(_print_end, console), schedule, at=stages)


def opened_run(
    experiment: Experiment, decisions: Sequence[Decision], share: int, command: str, called: bool = False
) -> OpenedRun:
    """Describe a run as its files do; `called` says that it is a call of a function."""
    warnings = [str(problem) for problem in closed_forms(experiment, decisions, called=called)]
    info = describe(
        experiment.config,
        share,
        command,
        experiment.held,
        sharing(experiment),
        warnings,
        experiment.images,
        untried(decisions),
    )
    return OpenedRun(experiment, info, command)


def _print_end(console: Console, trial: TrainingTrial, last: RoundResult, status: Status) -> None:
    """Print one line when a training next to an audit has ended."""
    if status != "running":
        ended = "" if status == "finished" else f" ({status})"
        words = f"trained with {trial.title}, seed {trial.seed}: accuracy {percent(last.accuracy)}{ended}"
        console.print(words, highlight=False, soft_wrap=True)


def run(
    experiment: Experiment, store: Store, display: Display, share: int, schedule: Scheduler = in_process
) -> list[Trial]:
    """Attack every trial that is not there whole; write each as soon as it is. Returns the results of this call."""
    planned = trials(experiment.config)
    finished, damaged = store.survey(trial.id for trial in planned)
    display.start(planned, finished, experiment.config.target_clients, damaged, expected_work(experiment))
    first, whole = experiment.config.first_target_client, experiment.config.target_clients
    divided = {
        control: [
            some
            for numbers in shares(target_clients(whole, control), share)
            for some in experiment.source.together(numbers, first)
        ]
        for control in (False, True)
    }
    left = [trial for trial in planned if trial.id not in finished]
    fits = [trial for trial in left if trial.meeting not in experiment.unfit]
    tasks = [AuditTask(trial, i, numbers) for trial in fits for i, numbers in enumerate(divided[trial.control])]
    results: list[Trial] = []

    def finished_with(trial: TrialAddress, result: Trial) -> None:
        store.write(trial.id, result)
        display.done(trial, result)
        results.append(result)

    for trial in left:
        if why := experiment.unfit.get(trial.meeting):
            finished_with(trial, failure(experiment, trial, name(experiment, trial), why, unfit=True))

    def order(task: AuditTask) -> Parcel:
        return task.order(read_plans(store.plans(task.trial.id), task.numbers), experiment.source)

    def heard(task: AuditTask, news: Parcel) -> None:
        if "step" in news.facts:
            display.progress(task.trial, task.share, Progress(**news.facts["step"]))
        else:
            write_plan(store.plans(task.trial.id), task.numbers, news.facts["plan"], news.facts["settled"])

    open_parts: dict[str, dict[int, Recovered | str]] = {}

    def in_turn() -> Iterator[list[AuditTask]]:
        """Yield the closed forms, which take seconds, then the searches that are needed still."""
        quick, searches = _by_length(tasks, experiment)
        if not experiment.until_broken:
            yield [*quick, *searches]
            return
        yield quick
        addresses = {trial.id: trial for trial in planned}
        waiting = list(dict.fromkeys(task.trial for task in searches))
        done_before = [store.read(trial.id) for trial in planned if trial.id in finished]
        reasons = needless(waiting, [*done_before, *results], addresses)
        for trial in waiting:
            if trial.id in reasons:
                finished_with(trial, failure(experiment, trial, name(experiment, trial), reasons[trial.id], unfit=True))
        yield [task for task in searches if task.trial.id not in reasons]

    for some in filter(None, in_turn()):
        with schedule(Job(working(experiment), order, heard), some) as done:
            for task, part in done:
                parts = open_parts.setdefault(task.trial.id, {})
                parts[task.share] = part if isinstance(part, str) else recovered(part)
                if len(parts) < len(divided[task.trial.control]):
                    continue
                whole = [parts[i] for i in sorted(open_parts.pop(task.trial.id))]
                finished_with(task.trial, finish(experiment, task.trial, whole))
    return results


def _by_length(tasks: Iterable[AuditTask], experiment: Experiment) -> tuple[list[AuditTask], list[AuditTask]]:
    """Part the closed forms, which take seconds and come first, from searches and learners."""
    parted: tuple[list[AuditTask], list[AuditTask]] = [], []
    for task in tasks:
        parted[spends(experiment.attacks[task.trial.attack])].append(task)
    return parted


def shares(target_clients: int, share: int) -> list[range]:
    """Divide the target clients into shares of this size.

    >>> shares(5, 2)
    [range(0, 2), range(2, 4), range(4, 5)]
    """
    return [range(start, min(start + share, target_clients)) for start in range(0, target_clients, share)]


def finish(experiment: Experiment, trial: TrialAddress, parts: Sequence[Recovered | str]) -> Trial:
    """Score a trial, or say why it failed."""
    named = name(experiment, trial)
    failures = list(dict.fromkeys(part for part in parts if isinstance(part, str)))
    if failures:
        return failure(experiment, trial, named, "; ".join(failures))
    scored = score if experiment.source.simulated else score_observed
    result = scored(experiment, trial, merge([part for part in parts if isinstance(part, Recovered)]), named)
    return replace(
        result, info={**result.info, "code": code_of((experiment.config.model.name, trial.defence, trial.attack))}
    )


def name(experiment: Experiment, trial: TrialAddress) -> TrialNames:
    """Look up titles and citations in the tables of attacks and defences."""
    attack = ALL_ATTACKS.get(experiment.attacks[trial.attack].name.partition("(")[0])
    # A defence given as an object has a name of its own, which need not be a text of the grammar.
    known = entries(trial.defence) if _reads(trial.defence) else []
    citations = [entry.citation for entry in known if entry.name != "none"]
    return TrialNames(
        "; ".join(entry.description for entry in known) or trial.defence,
        attack.description if attack else trial.attack,
        tuple(dict.fromkeys(([attack.citation] if attack else []) + citations)),
    )


def _reads(text: str) -> bool:
    try:
        return bool(entries(text))
    except GradveilError:
        return False


def describe(
    config: RunConfig,
    share: int,
    command: str,
    weights: Mapping[str, Tensor] = MappingProxyType({}),
    sharing: Mapping[str, Sequence[int]] = MappingProxyType({}),
    warnings: Sequence[str] = (),
    images: Mapping[str, str | None] | None = None,
    untried: Sequence[str] = (),
) -> dict[str, Any]:
    """Return what `run.json` holds; other weights in a file of the same name are another run.

    `sharing` tells how many attacks share the budget of each defence, client by client; `warnings` what a reader of the
    results has to know that no attack of the run shows; `images` what the files of the data hold; `untried` which
    attacks the run does not try, and why.
    """
    start = fingerprint(weights) if weights else None
    return {
        **described(config, command, (trial.id for trial in trials(config)), start, images),
        "share": share,
        "sharing": dict(sharing),
        "warnings": list(warnings),
        "untried": list(untried),
        "packages": dict(_versions()),
        "machine": machine(config.device),
    }


def machine(device: str) -> Mapping[str, Any]:
    """Describe the machine: what a timing depends on, and nothing that names its owner."""
    where = torch.cuda.get_device_name(device) if device.startswith("cuda") else device
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "device": where,
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text("utf-8").splitlines() if info.is_file() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


@cache
def _versions() -> tuple[tuple[str, str], ...]:
    found = list[tuple[str, str]]()
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            found.append((package, version(package)))
    return tuple(found)
