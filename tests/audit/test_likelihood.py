"""An answer that fits noise better than the true images do explains the update only if the noise is weighed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from gradveil.attacks.noise_likelihood import log_likelihood
from gradveil.audit.attack_check import examine
from gradveil.audit.attack_selection import trials
from gradveil.audit.preflight import open_experiment
from gradveil.audit.result_rows import Row
from gradveil.audit.score import TrialNames, score
from gradveil.audit.trial import recover
from gradveil.audit.verdict import verdicts
from gradveil.core.noise import Noise, NoiseSpec, Normal
from gradveil.core.types import Stage, Transform
from gradveil.defences import Defence, chain
from tests.audit.runs import config
from tests.report.trials import BARE, HEALTHY, row


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


half = Defence("half", send=chain(half=HalfLoud()))


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
    data = {"name": "digits", "size": 16}
    experiment = open_experiment(config(defences=[defence], data=data, attacks=[attack], target_clients=4))
    address = trials(experiment.config)[0]
    found = score(
        experiment, address, recover(experiment, address, range(4), lambda step: None), TrialNames("", "", ())
    )
    health = found.info["health"]
    if worse is None:
        assert health["likelihood"] is health["likelihood_truth"] is None
        return
    control = row(
        32, defence="none", simulated_client="naive", **{n: found.info[n] for n in ("model", "data", "client")}
    )
    trial = Row(0, found)
    assert any("it fits the noise" in doubt for doubt in examine(trial, [control]).doubts) is worse
    assert examine(trial, [control]).state == ("under-optimised" if worse else "ambiguous")


@pytest.mark.parametrize(
    ("likelihood", "change", "state"),
    [
        (1.0, {}, "ambiguous"),
        (0.992, {}, "ambiguous"),
        (0.98, {}, "under-optimised"),
        (2.0, {}, "ambiguous"),
        (None, {}, "ambiguous"),
        (0.5, {"simulated_client": "naive"}, "ambiguous"),
    ],
)
def test_a_clearly_less_likely_answer_leaves_the_verdict_open(
    likelihood: float | None, change: dict[str, Any], state: str
) -> None:
    health = HEALTHY | {"objective_truth": 0.01, "likelihood": likelihood, "likelihood_truth": 1.0}
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
            log_likelihood({"w": unit * x}, [{"w": unit * (x + noise())} for _ in range(4)], {"w": unit * sent})
            for x in (truth, fitted)
        )
        assert float(best - worst) > 1
    assert log_likelihood({"w": truth}, [{"w": truth}] * 2, {"w": sent}).isnan().all()
    scaled = log_likelihood({"w": 0.1 * truth}, [{"w": 0.1 * truth + noise()} for _ in range(4)], {"w": sent})
    assert float(scaled) == pytest.approx(float(best) - float(units.log().mean()), abs=0.2)
