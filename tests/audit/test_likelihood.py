"""An answer that fits noise better than the true images do explains the update only if the noise is weighed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from gradveil.attacks.attack_catalogue import make_attack
from gradveil.attacks.noise_likelihood import drawn_again, explained, likelier, log_likelihood, reuse, sharing
from gradveil.attacks.protocol import Reconstruction
from gradveil.audit.attack_check import examine
from gradveil.audit.attack_selection import trials
from gradveil.audit.preflight import open_experiment
from gradveil.audit.result_rows import Row
from gradveil.audit.score import TrialNames, score
from gradveil.audit.trial import recover
from gradveil.audit.verdict import verdicts
from gradveil.client import Client
from gradveil.core.noise import Noise, NoiseSpec, Normal
from gradveil.core.types import Stage, Transform
from gradveil.defences import Defence, chain
from tests.audit.runs import config
from tests.report.trials import BARE, HEALTHY, row


@dataclass(frozen=True)
class OneNumber(Transform):
    """Add one loud number to all entries of a parameter."""

    stage: ClassVar[Stage] = Stage.NOISE

    def noise(self, params: Mapping[str, Tensor]) -> NoiseSpec:
        """Declare a number for every parameter."""
        return NoiseSpec({n: Noise((), Normal(), neutral=0.0, dtype=p.dtype) for n, p in params.items()})

    def apply(
        self, update: Mapping[str, Tensor], state: Mapping[str, Tensor], noise: Mapping[str, Tensor], context: Any
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Add it."""
        return {name: value + noise[name] for name, value in update.items()}, dict(state)


@dataclass(frozen=True)
class Turned(Transform):
    """Put the entries of each parameter in one of 32 public orders, after faint noise on every entry."""

    stage: ClassVar[Stage] = Stage.NOISE

    def noise(self, params: Mapping[str, Tensor]) -> NoiseSpec:
        """Declare the order, and noise for every entry."""
        faint = {n: Noise(tuple(p.shape), Normal(), neutral=0.0, dtype=p.dtype) for n, p in params.items()}
        return NoiseSpec({**faint, "order": Noise((), Normal(), neutral=-9.0)})

    def apply(
        self, update: Mapping[str, Tensor], state: Mapping[str, Tensor], noise: Mapping[str, Tensor], context: Any
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Add the noise, and gather."""
        number = ((noise["order"].detach().erf() + 1) * 16).long().clamp(0, 31)
        sent = {}
        for name, value in update.items():
            orders = torch.stack([torch.arange(value.numel()) * step % value.numel() for step in range(7, 135, 4)])
            sent[name] = (value + 1e-6 * noise[name]).flatten()[orders[number]].view_as(value)
        return sent, dict(state)


@dataclass(frozen=True)
class HalfLoud(Transform):
    """Add loud noise to a public half of every parameter."""

    stage: ClassVar[Stage] = Stage.NOISE

    def noise(self, params: Mapping[str, Tensor]) -> NoiseSpec:
        """Declare noise for every entry."""
        return NoiseSpec({n: Noise(tuple(p.shape), Normal(), neutral=0.0, dtype=p.dtype) for n, p in params.items()})

    def apply(
        self, update: Mapping[str, Tensor], state: Mapping[str, Tensor], noise: Mapping[str, Tensor], context: Any
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Add it to the first half."""
        sent = {}
        for name, value in update.items():
            first = torch.arange(value.numel(), device=value.device) < max(1, value.numel() // 2)
            sent[name] = value + noise[name] * first.view(value.shape)
        return sent, dict(state)


@dataclass(frozen=True)
class Flipped(Transform):
    """Negate every other entry, as everybody knows."""

    stage: ClassVar[Stage] = Stage.NOISE

    def noise(self, params: Mapping[str, Tensor]) -> NoiseSpec:
        """Declare nothing."""
        return NoiseSpec()

    def apply(
        self, update: Mapping[str, Tensor], state: Mapping[str, Tensor], noise: Mapping[str, Tensor], context: Any
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Negate them."""
        signs = {n: 1 - 2 * (torch.arange(v.numel(), device=v.device) % 2).view(v.shape) for n, v in update.items()}
        return {name: value * signs[name] for name, value in update.items()}, dict(state)


class Custom:
    """An attack around a known one, with its objective; it may simulate another client than it says."""

    simulated_client = "full"

    def __init__(self, *, adapts: bool) -> None:
        """Say whether it simulates what it says."""
        self.name, self.adapts = f"custom-{adapts}", adapts
        self.inner: Any = make_attack("cdia(iterations=40)")
        self.knowledge, self.labels = self.inner.knowledge, self.inner.labels

    def _simulates(self, client: Client) -> Client:
        return client if self.adapts else client.undefended_update()

    def __call__(
        self, seen: Any, client: Client, knowledge: Any, key: Any, progress: Any = None, plan: Any = ()
    ) -> Reconstruction:
        """Attack, and say nothing of the match."""
        return replace(self.inner(seen, self._simulates(client), knowledge, key, progress), match=None, plan=())

    def evaluate(
        self, seen: Any, client: Client, knowledge: Any, key: Any, inputs: Tensor, noise: Any, plan: Any = ()
    ) -> Tensor:
        """Return the objective."""
        return self.inner.evaluate(seen, self._simulates(client), knowledge, key, inputs, noise)


adapting, pretending = Custom(adapts=True), Custom(adapts=False)
flipped = Defence("flipped", send=chain(flipped=Flipped()))
half = Defence("half", send=chain(half=HalfLoud()))
shared = Defence("shared", send=chain(shared=OneNumber()))
turned = Defence("turned", send=chain(turned=Turned()))


def perceptron() -> nn.Module:
    """A first layer that shows its input."""
    return nn.Sequential(nn.Flatten(), nn.Linear(256, 16), nn.Sigmoid(), nn.Linear(16, 10))


def tried(defence: str, attack: str, **changes: Any) -> tuple[Row, Row]:
    """The trial of an attack on four small digits, and a control that vouches for it."""
    data = {"name": "digits", "size": 16}
    experiment = open_experiment(config(defences=[defence], data=data, attacks=[attack], target_clients=4, **changes))
    address = trials(experiment.config)[0]
    found = score(
        experiment, address, recover(experiment, address, range(4), lambda step: None), TrialNames("", "", ())
    )
    same = {n: found.info[n] for n in ("model", "data", "client")}
    return Row(0, found), row(32, defence="none", simulated_client="naive", **same)


@pytest.mark.parametrize(
    ("defence", "attack", "worse"),
    [
        ("tests.audit.test_likelihood:half", "cdia(iterations=40)", True),
        ("tests.audit.test_likelihood:half", "dpia(iterations=40)", True),
        ("gaussian(1.0)", "cdia(iterations=40)", False),
        ("none", "cdia(iterations=40)", None),
    ],
)
def test_noise_on_a_half_hides_nothing_and_noise_on_everything_does(
    defence: str, attack: str, worse: bool | None
) -> None:
    trial, control = tried(defence, attack)
    health = trial.info["health"]
    if worse is None:
        assert health["likelihood"] is health["likelihood_truth"] is health["truth_likelier_z"] is None
        return
    assert any("it fits the noise" in doubt for doubt in examine(trial, [control]).doubts) is worse
    assert examine(trial, [control]).state == ("under-optimised" if worse else "ambiguous")


@pytest.mark.parametrize(
    ("spreads", "change", "state"),
    [
        (0.0, {}, "ambiguous"),
        (3.9, {}, "ambiguous"),
        (4.1, {}, "under-optimised"),
        (-50.0, {}, "ambiguous"),
        (None, {}, "ambiguous"),
        (50.0, {"simulated_client": "naive"}, "ambiguous"),
    ],
)
def test_a_clearly_less_likely_answer_leaves_the_verdict_open(
    spreads: float | None, change: dict[str, Any], state: str
) -> None:
    health = HEALTHY | {"objective_truth": 0.01, "truth_likelier": 1000.0, "truth_likelier_z": spreads}
    trial = row(0, health=health, **change)
    assert examine(trial, [BARE]).state == state
    (verdict,) = [each for each in verdicts([trial, BARE]) if not each.undefended]
    if not change:
        assert (verdict.level == "inconclusive") is (state == "under-optimised")


def test_entries_are_weighed_by_their_noise_whatever_their_size() -> None:
    generator = torch.Generator().manual_seed(0)
    truth, other = (torch.randn(1, 4000, generator=generator) for _ in range(2))
    loud = 10.0 * (torch.arange(4000) < 2000)

    def noise() -> Tensor:
        return loud * torch.randn(1, 4000, generator=generator)

    sent = truth + noise()
    fitted = torch.where(loud > 0, sent, other)  # it fits the noise, and nothing else
    units = torch.ones(4000)
    units[-1] = 1e6
    for unit in (torch.ones(4000), units):
        best, worst = (
            log_likelihood({"w": unit * x}, [{"w": unit * (x + noise())} for _ in range(4)], {"w": unit * sent})[:, 0]
            for x in (truth, fitted)
        )
        assert float(best - worst) > 1
    assert log_likelihood({"w": truth}, [{"w": truth}] * 2, {"w": sent}).isnan().all()
    scaled = log_likelihood({"w": 0.1 * truth}, [{"w": 0.1 * truth + noise()} for _ in range(4)], {"w": sent})
    assert float(scaled[:, 0]) == pytest.approx(float(best) - float(units.log().mean()), abs=0.2)


def test_one_quiet_row_is_seen_however_many_are_loud() -> None:
    generator = torch.Generator().manual_seed(0)
    rows, columns = 2048, 1024
    truth, other = (torch.randn(1, rows * columns, generator=generator) for _ in range(2))
    loud = 10.0 * (torch.arange(rows * columns) >= columns)

    def noise() -> Tensor:
        return loud * torch.randn(1, rows * columns, generator=generator)

    sent = truth + noise()
    near = torch.where(loud > 0, truth + 2e-4 * (sent - truth), other)  # as far as 1024 pixels can fit noise
    draws = [noise() for _ in range(4)]
    at_truth, at_other = (
        explained(log_likelihood({"w": x}, [{"w": x + own} for own in draws], {"w": sent}), torch.zeros(1))
        for x in (truth, near)
    )
    gap, spreads = likelier(at_other, at_truth)
    assert float(at_truth[0, 0] - at_other[0, 0]) < 0.01
    assert float(gap) > 1000
    assert float(spreads) > 4


@pytest.mark.parametrize(
    ("kind", "numbers", "is_shared"),
    [
        ("independent", 6400, False),
        ("laplace", 6400, False),
        ("levels", 6400, False),
        ("mask", 6400, False),
        ("scale", 1, False),
        ("number", 1, True),
        ("signed", 6400, True),
        ("row", 6400, True),
        ("column", 6400, True),
        ("one row", 6400, True),
        ("pairs", 3200, True),
    ],
)
def test_noise_that_entries_share_is_told_from_independent_noise(kind: str, numbers: int, is_shared: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    plain = torch.randn(5, 64, 100, generator=generator)
    signs = torch.randn(64, 100, generator=generator).sign()
    levels = 10 ** (2 * torch.randn(64, 100, generator=generator))

    def drawn() -> Tensor:
        def normal(*shape: int) -> Tensor:
            return torch.randn(5, *shape, generator=generator)

        whole = normal(64, 100)
        one = whole.clone()
        one[:, 3] = normal(1)
        return {
            "independent": lambda: plain + whole,
            "laplace": lambda: plain + whole.sign() * normal(64, 100).abs().exp(),
            "levels": lambda: plain + levels * whole,
            "mask": lambda: plain * (whole > 1),
            "scale": lambda: plain * normal(1, 1),
            "number": lambda: plain + normal(1, 1),
            "signed": lambda: plain + normal(1, 1) * signs,
            "row": lambda: plain + normal(64, 1),
            "column": lambda: plain + normal(1, 100),
            "one row": lambda: plain + one,
            "pairs": lambda: plain + normal(64, 50).repeat_interleave(2, 2) * signs,
        }[kind]()

    found = sharing({"w": plain}, [{"w": drawn()} for _ in range(4)], numbers)
    assert bool((found.median() > 1) == is_shared), found


@pytest.mark.parametrize(
    ("kind", "is_shared"),
    [
        ("independent", False),
        ("two numbers", False),
        ("levels", False),
        ("mask", False),
        ("scale", False),
        ("one of two", True),
        ("rows of a table", True),
        ("five coins", True),
        ("hundred directions", False),
    ],
)
def test_few_numbers_that_move_the_update_are_found_among_many(kind: str, is_shared: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    plain = torch.randn(5, 6400, generator=generator)
    levels = 10 ** torch.randn(6400, generator=generator)
    turns = torch.stack([torch.randperm(6400, generator=generator) for _ in range(32)])
    directions = torch.randn(100, 6400, generator=generator)
    mixing = torch.stack([drawn_again((6402,), generator) for _ in range(5)], 1)

    def sent(numbers: Tensor) -> dict[str, Tensor]:
        each, (one, other) = numbers[:, :6400], numbers[:, 6400:].T
        coins = (each[:, :5] > 0).long()
        turn = turns[((other.erf() + 1) * 16).long().clamp(0, 31)]
        return {
            "w": {
                "independent": lambda: plain + each,
                "two numbers": lambda: plain + each * each.roll(1, 1).exp(),
                "levels": lambda: plain + levels * each,
                "mask": lambda: plain * (each > 1),
                "scale": lambda: plain * one.exp().unsqueeze(1),
                "one of two": lambda: plain + 1e-6 * each + one.unsqueeze(1) * levels,
                "rows of a table": lambda: plain.gather(1, turn) + 1e-6 * each,
                "five coins": lambda: plain.gather(1, turns[coins @ 2 ** torch.arange(5)]) + 1e-6 * each,
                "hundred directions": lambda: plain + 1e-6 * each + each[:, :100] @ directions,
            }[kind]()
        }

    first, second = (torch.randn(5, 6402, generator=generator) for _ in range(2))
    mixed = [sent(torch.where(again, second, first)) for again in mixing]
    found = reuse({"w": plain}, sent(first), sent(second), mixed)
    assert bool((found.median() > 1) == is_shared), found


def test_a_search_takes_noise_that_entries_share_for_what_it_is() -> None:
    """It is one direction of a parameter, far louder than the gradient."""
    own = "tests.audit.test_likelihood:shared"
    trial, control = tried(own, "cdia(iterations=40)", model={"name": "tests.audit.test_likelihood:perceptron"})
    assert (trial.asr, examine(trial, [control]).state) == (1, "effective")


@pytest.mark.parametrize(
    ("attack", "defence", "is_shared"),
    [
        ("cdia(iterations=40)", "gaussian(1)", False),
        ("analytic(prior=public)", "gaussian(1)", False),
        ("analytic(prior=public)", "tests.audit.test_likelihood:shared", True),
        ("analytic(prior=public)", "tests.audit.test_likelihood:turned", True),
        ("cdia(iterations=40)", "tests.audit.test_likelihood:turned", True),
    ],
)
def test_no_attack_passes_where_noise_is_shared(attack: str, defence: str, is_shared: bool) -> None:
    trial, control = tried(defence, attack, model={"name": "tests.audit.test_likelihood:perceptron"})
    reasons = " ".join(examine(trial, [control]).reasons)
    assert ("its noise is shared by entries" in reasons) is is_shared
    if is_shared:
        assert examine(trial, [control]).state in ("suspect", "under-optimised")
    assert trial.health("likelihood") is not None


@pytest.mark.parametrize(
    ("attack", "defence", "state"),
    [
        ("adapting", "half", "under-optimised"),
        ("pretending", "half", "under-optimised"),
        ("pretending", "flipped", "suspect"),
    ],
)
def test_what_a_custom_attack_explains_is_computed_for_it(attack: str, defence: str, state: str) -> None:
    """Its own objective is satisfied by other images, whatever client it simulates."""
    here = "tests.audit.test_likelihood"
    trial, control = tried(f"{here}:{defence}", f"{here}:{attack}", model={"name": f"{here}:perceptron"})
    reached, at_truth = trial.health("objective"), trial.health("objective_truth")
    assert reached is not None
    assert at_truth is not None
    assert reached <= 1.05 * at_truth
    own = Row(1, replace(control.trial, info={**control.info, "attack": trial.attack}))
    assert examine(trial, [own]).state == state
