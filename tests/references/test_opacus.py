"""DP-SGD as Opacus does it, with the same noise; only where Opacus is installed, which nothing here depends on."""

import warnings

import pytest
import torch
from torch.nn import functional as F

from gradveil.client import Client
from gradveil.defences import parse
from tests.laws.cases import B, Tiny, draw

CLIP, SIGMA = 0.4, 0.7


def test_dp_sgd_is_that_of_opacus(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("opacus", reason="Opacus is no dependency")
    warnings.simplefilter("ignore")  # its own
    from opacus.grad_sample import GradSampleModule
    from opacus.optimizers import DPOptimizer, optimizer

    client = parse(f"dp(clip={CLIP}, sigma={SIGMA})")(Client(Tiny()))
    params, batch, noise, _ = draw(client)
    drawn = iter([noise[f"step.noise.{name}"] for name in params])
    monkeypatch.setattr(optimizer, "_generate_noise", lambda std, **_: std * next(drawn))
    model = GradSampleModule(Tiny())
    dp = DPOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0),
        noise_multiplier=SIGMA,
        max_grad_norm=CLIP,
        expected_batch_size=B,
    )
    F.cross_entropy(model(batch.inputs), batch.targets).backward()
    dp.pre_step()
    theirs = {name: parameter.grad for name, parameter in model._module.named_parameters()}
    ours = client.update(params, batch, noise, {})[0]
    # Opacus divides by the norm plus 1e-6.
    torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-6)
