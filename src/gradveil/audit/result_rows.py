"""Result rows, one per trial, shared by tables, verdicts and plots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, pstdev
from typing import Any, NamedTuple

from gradveil.audit.attack_selection import Attacker, Method
from gradveil.audit.run_directory import UNFIT, Trial
from gradveil.core.formatting import plural
from gradveil.core.space import ExampleWords
from gradveil.metrics import wilson


def summarise(trial: Trial) -> dict[str, Any]:
    """Sum one trial up in one flat object.

    Rates count images; means and standard deviations are over images; `seconds` is the attack's working time, summed
    over processes; an unfinished trial has None. `accuracy` is the model's after `trained` rounds of training,
    `final_accuracy` that at the end, `client_seconds` what one update takes, `round_*` what a round costs. Of pruning
    alone, `gamma_1` is the share of the update's energy left out, `gamma_1_assumed` and `gamma_1_least` what dual
    pruning leaves out at least (the paper's and the sharper bound), `cosine_*` how far a perfect match is off. With
    error feedback in later rounds it is the share of P = g + e, and `residual_squared` that of the mean residual.
    `mse_taylor` is the error of Proposition 1 for attackers who match all of a pruned update, `below_taylor` the number
    of target clients that were reconstructed below it. `recovery_bound` is the largest probability with which any
    attacker recovers and identifies an image from what these attackers saw, if a guess does with probability
    `recovery_guess`; `recovery_bound_any` that of at least one image of an update.
    """
    info, records = trial.info, trial.records
    keys = ("trial", "model", "data", "seed", "round", "trained", "client", "defence", "attack")
    training, pruned = info.get("training") or {}, info.get("pruned") or {}
    images = [image for record in records for image in record.get("per_image", ())]
    successes = sum(image["success"] for image in images)
    headline = words_of(info).headline
    limit = watched_limit(info)
    low, high = wilson(successes, len(images)) if images else (None, None)
    statuses: dict[str, int] = {}
    for record in records:
        statuses[record["status"]] = statuses.get(record["status"], 0) + 1
    return {
        **{key: info.get(key) for key in keys},
        "control": bool(info.get("control")),
        "target_clients": len(records),
        "images": len(images),
        "asr": successes / len(images) if images else None,
        "asr_low": low,
        "asr_high": high,
        f"{headline}_mean": _mean(images, headline),
        f"{headline}_std": _spread(images, headline),
        "psnr_mean": _mean(images, "psnr"),
        "mse_mean": _mean(images, "mse"),
        **{f"{name}_mean": _mean(images, name) for name in info.get("metrics", ())},
        "mse_bound": (info.get("bound") or {}).get("mse"),
        "unbounded": info.get("unbounded"),
        "label_accuracy": _mean(records, "label_accuracy"),
        "guarantee": info.get("guarantee"),
        "recovery_guess": limit.get("guess"),
        "recovery_bound": limit.get("bound"),
        "recovery_bound_any": limit.get("bound_any"),
        "distance": info.get("distance"),
        "first_order_utility": info.get("first_order_utility"),
        "second_order_utility": info.get("second_order_utility"),
        "gamma_1": pruned.get("gamma"),
        "gamma_1_least": pruned.get("least"),
        "gamma_1_assumed": pruned.get("gamma_1_assumed"),
        "cosine_promised": pruned.get("promised"),
        "cosine_worst": pruned.get("worst"),
        "residual_squared": pruned.get("residual"),
        "mse_taylor": _mean(records, "mse_taylor"),
        "below_taylor": below_taylor(records),
        "bytes_sent": info.get("bytes_sent"),
        "seconds": info.get("seconds"),
        "accuracy": training.get("accuracy"),
        "final_accuracy": training.get("final_accuracy"),
        "client_seconds": training.get("client_seconds"),
        **{f"round_{key}": training.get(key) for key in ("bytes_up", "bytes_down", "seconds")},
        "statuses": statuses or {UNFIT if trial.unfit else "failed": 1},
        "prepared": "; ".join(info.get("prepared", ())),
        "failed": trial.failed,
        "unscored": trial.unscored,
        "notes": "; ".join(info.get("notes", ())),
    }


def words_of(info: Mapping[str, Any]) -> ExampleWords:
    """Return what a trial calls its examples."""
    return ExampleWords(**info.get("examples") or {})


def window_note(info: Mapping[str, Any]) -> str:
    """Say which window SSIM had in a trial, if its images are too small for the usual one."""
    return f", with a window of {info['ssim_window']} pixels" if "ssim_window" in info else ""


def watched_limit(info: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the smallest proven probability of recovery for what the attackers of a trial saw; empty without one."""
    limits = [each for each in info.get("recovery_bounds") or () if each["of"] == "watched"]
    return min(limits, key=lambda each: each["bound"] or 1.0, default={})


def below_taylor(records: Sequence[Mapping[str, Any]]) -> int | None:
    """Count target clients whose error is below that of Proposition 1; None where it says nothing."""
    pairs = [(record["mse_taylor"], _mean(record["per_image"], "mse")) for record in records if _promised(record)]
    return sum(mse < promised for promised, mse in pairs if mse is not None) if pairs else None


def _promised(record: Mapping[str, Any]) -> bool:
    return record.get("mse_taylor") is not None


def _mean(rows: list[dict[str, Any]], key: str) -> float | None:
    values = [row[key] for row in rows if row.get(key) is not None]
    return fmean(values) if values else None


def _spread(rows: list[dict[str, Any]], key: str) -> float | None:
    values = [row[key] for row in rows if row.get(key) is not None]
    return pstdev(values) if values else None


class TrialSetting(NamedTuple):
    """What is attacked. Rates are compared within a setting only."""

    model: str
    data: str
    client: str
    batch: int
    round: int
    """The last round that was watched, counted from 0."""
    update: str
    """What the server receives of each target, in words."""
    trained: int | None = None
    """The rounds of training that came before; None where nothing is trained."""

    def title(self) -> str:
        """Say it in words."""
        when = f", {self.round + 1} rounds watched" if self.round else ""
        return f"{self.model} on {self.data}, {self.update}{when}{self._past()}"

    def _past(self) -> str:
        if self.trained is None:
            return ""
        return f", after {plural(self.trained, 'round')} of training" if self.trained else ", untrained"


def short_names(attacks: Iterable[str]) -> dict[str, str]:
    """Shorten attacks to what tells them apart: the name, and the settings that not all of this name share.

    >>> [*short_names(["ig(iterations=9)", "cdia(iterations=9)", "cdia(iterations=9, start=solved)"]).values()]
    ['ig', 'cdia', 'cdia(start=solved)']
    """
    parts: dict[str, tuple[str, list[str]]] = {}
    for attack in attacks:
        name, _, inner = attack.partition("(")
        parts[attack] = name, [each.strip() for each in inner.removesuffix(")").split(",") if each.strip()]
    shared: dict[str, set[str]] = {}
    for name, settings in parts.values():
        shared[name] = shared.get(name, {*settings}) & {*settings}
    left = {attack: (name, [s for s in some if s not in shared[name]]) for attack, (name, some) in parts.items()}
    return {attack: f"{name}({', '.join(some)})" if some else name for attack, (name, some) in left.items()}


BASELINES = {
    "mean_image": ("Mean image", "the public mean image"),
    "class_mean": ("Class mean", "the mean of the public images of the same class"),
    "class_image": ("Class image", "public images of the same class, on average"),
}
"""What needs no update, scored as if it were reconstructions: what tables call it, and what it is."""


class BudgetPoint(NamedTuple):
    """How good an attack's answer was after so many iterations of each restart."""

    iterations: int
    score: float | None
    """The mean of the score that decides recovery."""
    asr: float | None
    spread: float | None = None
    """Its standard deviation over examples; None where the run does not have it."""


class TrainedOnCounts(NamedTuple):
    """Counts of reconstructions against the images that a batch defence made of the private ones."""

    images: int
    recovered: int
    """SSIM above the threshold."""
    identified: int
    """The own image is the nearest of those trained on (see `audit.score.trained_on`)."""
    identifiable: int
    """Both."""

    @property
    def rate(self) -> float:
        """The share that is recovered."""
        return self.recovered / self.images


@dataclass(frozen=True)
class Row:
    """A finished trial with its scores."""

    number: int
    """Its place in the run: pictures and plot points refer to it."""
    trial: Trial

    @property
    def info(self) -> Mapping[str, Any]:
        """What `trial.json` holds."""
        return self.trial.info

    @cached_property
    def summary(self) -> Mapping[str, Any]:
        """The audit's own summary of the trial."""
        return summarise(self.trial)

    @cached_property
    def setting(self) -> TrialSetting:
        """What was attacked."""
        return TrialSetting(*(self.info[key] for key in TrialSetting._fields))

    @property
    def attacker(self) -> Attacker:
        """Whose attack it is."""
        return self.info["attacker"]

    @property
    def method(self) -> Method:
        """How the attack finds images."""
        return self.info["method"]

    @property
    def preset(self) -> str:
        """The name of the attack without its settings."""
        return self.info["preset"]

    @property
    def secrets(self) -> Sequence[str]:
        """What the attack was granted although only the client knows it."""
        return self.info["secrets"]

    @property
    def rounds_used(self) -> Sequence[int] | None:
        """The watched rounds that the attack used, counted from 0; None where a custom attack does not say."""
        return self.info["rounds_used"]

    @property
    def budget_share(self) -> float | None:
        """The share of its own iterations or epochs at which a budget stopped the attack; None where none did."""
        left = self.info.get("budget_share")
        return left if left is not None and (self.method == "learned" or self.statuses["budget"]) else None

    @property
    def local(self) -> bool:
        """Whether the client trains for local steps, instead of sending one gradient."""
        return self.info["local"]

    @property
    def is_control(self) -> bool:
        """Whether the run added it by itself, to show that an attack works without a defence."""
        return bool(self.info.get("control"))

    @property
    def planted(self) -> bool:
        """Whether the server changed the model that it sent, whatever else the attacker was told."""
        return "planted" in self.info

    @property
    def seed(self) -> int:
        """The run's seed."""
        return int(self.info["seed"])

    @property
    def defence(self) -> str:
        """The defence's canonical text."""
        return str(self.info["defence"])

    @property
    def undefended(self) -> bool:
        """Whether the client has no defence, whoever attacks it."""
        return self.info["undefended"]

    @property
    def defence_name(self) -> str:
        """What the defence is called in the page: its canonical text, which tells its settings apart."""
        if self.is_control:
            return "No defence (control)"
        return "No defence" if self.undefended else self.defence

    @property
    def changes(self) -> Sequence[str]:
        """The slots of the client that the defence fills: model, batch, step, send."""
        return self.info["changes"]

    @property
    def attack(self) -> str:
        """The attack's canonical text."""
        return str(self.info["attack"])

    @cached_property
    def successes(self) -> dict[tuple[int, int], bool]:
        """Whether each image was recovered, by (target client, place in its batch)."""
        return {(target_client, place): bool(scores["success"]) for target_client, place, scores in self.scores()}

    @cached_property
    def words(self) -> ExampleWords:
        """What its examples are called, and the score that decides recovery."""
        return words_of(self.info)

    def counted(self, number: int) -> str:
        """Count examples in words.

        >>> Row(0, Trial({}, [])).counted(2)
        '2 images'
        """
        return plural(number, self.words.noun)

    @property
    def headline(self) -> float | None:
        """The mean of the score that decides recovery."""
        return self.mean(self.words.headline)

    @cached_property
    def headlines(self) -> list[float]:
        """The score that decides recovery, of every example that has one."""
        name = self.words.headline
        return [float(scores[name]) for _, _, scores in self.scores() if scores.get(name) is not None]

    @property
    def images(self) -> int:
        """How many images were attacked."""
        return len(self.successes)

    @property
    def distinct(self) -> int:
        """How many of them are left where exact copies of an image count as one."""
        copies = [scores.get("copy_of") for _, _, scores in self.scores()]
        return copies.count(None) + len({*copies} - {None})

    @property
    def recovered(self) -> int:
        """How many of them were recovered."""
        return sum(self.successes.values())

    @property
    def exposed(self) -> int:
        """How many target clients lost at least one image of their batch."""
        return len({target_client for (target_client, _), success in self.successes.items() if success})

    @property
    def identified(self) -> int:
        """How many reconstructions lie nearer to their own image than to any other image of the private data."""
        return sum(bool(scores.get("identified")) for _, _, scores in self.scores())

    @property
    def identifiable(self) -> int:
        """How many images were recovered and identified; recovered where there is no gallery to identify among."""
        return sum(self.singled_out.values())

    @cached_property
    def singled_out(self) -> dict[tuple[int, int], bool]:
        """Whether each image was recovered and identified, by (target client, place in its batch)."""
        return {
            (client, place): bool(scores["success"]) and scores.get("identified") is not False
            for client, place, scores in self.scores()
        }

    @cached_property
    def trained_on(self) -> TrainedOnCounts | None:
        """The counts against the images that the client trained on; None where no batch defence changed them."""
        images = [scores for _, _, scores in self.scores() if scores.get("success_transformed") is not None]
        if not images:
            return None
        passed = [bool(scores["success_transformed"]) for scores in images]
        nearest = [bool(scores.get("identified_transformed")) for scores in images]
        both = sum(map(all, zip(passed, nearest, strict=True)))
        return TrainedOnCounts(len(images), sum(passed), sum(nearest), both)

    @property
    def asr(self) -> float:
        """The attack success rate: the share of images that were recovered."""
        return self.recovered / self.images if self.images else 0.0

    @cached_property
    def bounds(self) -> tuple[float, float]:
        """The rate's 95% Wilson interval."""
        return wilson(self.recovered, self.images) if self.images else (0.0, 1.0)

    @cached_property
    def statuses(self) -> Counter[str]:
        """How many target clients ended how."""
        return Counter(str(record["status"]) for record in self.trial.records)

    @cached_property
    def curve(self) -> tuple[BudgetPoint, ...]:
        """Quality against budget, the final answer last; empty for an attack that does not iterate."""
        noted, of = self.info.get("trace") or (), self.words.headline
        passed = [
            BudgetPoint(int(spot["iterations"]), spot.get(f"{of}_mean"), spot["asr"], spot.get(f"{of}_std"))
            for spot in noted
        ]
        if not passed:
            return ()
        # Half of the budget is noted last, rounded down; whoever used all of it says how much it was.
        used = max((int(record.get("iterations") or 0) for record in self.trial.records), default=0)
        spread = pstdev(self.headlines) if self.headlines else None
        return (*passed, BudgetPoint(max(2 * passed[-1].iterations, used), self.headline, self.asr, spread))

    @property
    def last_doubling(self) -> float | None:
        """What the second half of the budget added to the mean score."""
        ends = [spot.score for spot in self.curve[-2:]]
        return ends[1] - ends[0] if len(ends) == 2 and ends[0] is not None and ends[1] is not None else None

    @property
    def baseline(self) -> float | None:
        """The highest share recovered by the prior-only guesses, which use nothing of the update."""
        return self.baseline_of("asr")

    @property
    def guess(self) -> str:
        """Name the guess from public data alone that the baseline is."""
        return next(
            (title.lower() for name, (title, _) in BASELINES.items() if self.control(name) == self.baseline), ""
        )

    def baseline_of(self, score: str) -> float | None:
        """Look up the best score of a guess from public data alone."""
        found = [self.control(name, score) for name in BASELINES]
        return max((value for value in found if value is not None), default=None)

    def control(self, name: str, score: str = "asr") -> float | None:
        """Look up a control's score."""
        scores = (self.info.get("controls") or {}).get(name) or {}
        return scores.get(score)

    def health(self, name: str) -> float | None:
        """Look up one of the attack's vital signs."""
        return (self.info.get("health") or {}).get(name)

    def mean(self, name: str) -> float | None:
        """Average a score over the target clients that have it."""
        values = [record.get(name) for record in self.trial.records]
        numbers = [float(value) for value in values if isinstance(value, int | float)]
        return fmean(numbers) if numbers else None

    @property
    def below_taylor(self) -> int | None:
        """Number of targets with an error below that of Proposition 1; None where it says nothing."""
        return below_taylor(self.trial.records)

    def scores(self) -> Iterator[tuple[int, int, Mapping[str, Any]]]:
        """Yield each image's target client, its place in that client's batch, and its scores."""
        for record in self.trial.records:
            for place, scores in enumerate(record.get("per_image", ())):
                yield int(record["target_client"]), place, scores
