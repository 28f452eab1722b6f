"""DP-SGD and Fed-CDP as Opacus does them, with the same noise."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from gradveil.client import Client
from gradveil.defences import parse
from tests.laws.cases import B, Tiny, draw

pytest.importorskip("opacus", reason="the environment is older than pyproject.toml: make")
CLIP, SIGMA = 0.4, 0.7


def whole(optimizers: Any, parameters: list[torch.nn.Parameter], **settings: Any) -> Any:
    return optimizers.DPOptimizer(torch.optim.SGD(parameters), noise_multiplier=SIGMA, max_grad_norm=CLIP, **settings)


def by_layer(optimizers: Any, parameters: list[torch.nn.Parameter], **settings: Any) -> Any:
    """Opacus scales the noise by the norm of all bounds, Fed-CDP by one."""
    count = len(parameters)
    return optimizers.DPPerLayerOptimizer(
        torch.optim.SGD(parameters), noise_multiplier=SIGMA / count**0.5, max_grad_norm=[CLIP] * count, **settings
    )


@pytest.mark.parametrize(("defence", "optimiser"), [("dp", whole), ("fed-cdp", by_layer)])
def test_defence_is_that_of_opacus(defence: str, optimiser: Callable[..., Any], monkeypatch: pytest.MonkeyPatch):
    warnings.simplefilter("ignore")  # its own
    from opacus import optimizers
    from opacus.grad_sample import GradSampleModule

    client = parse(f"{defence}(clip={CLIP}, sigma={SIGMA})")(Client(Tiny()))
    params, batch, noise, _ = draw(client)
    drawn = iter([noise[f"step.noise.{name}"] for name in params])
    monkeypatch.setattr(optimizers.optimizer, "_generate_noise", lambda std, **_: std * next(drawn))
    model = GradSampleModule(Tiny())
    private = optimiser(optimizers, list(model.parameters()), expected_batch_size=B)
    F.cross_entropy(model(batch.inputs), batch.targets).backward()
    unclipped = {name: parameter.grad.clone() for name, parameter in model._module.named_parameters()}
    private.pre_step()
    theirs = {name: parameter.grad for name, parameter in model._module.named_parameters()}
    ours = client.update(params, batch, noise, {})[0]
    # Opacus divides by the norm plus 1e-6.
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    silent = {name: value if name == "schedule" else torch.zeros_like(value) for name, value in noise.items()}
    clipped = client.update(params, batch, silent, {})[0]
    assert any(not torch.allclose(clipped[name], value, rtol=1e-2) for name, value in unclipped.items())
