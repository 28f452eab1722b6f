"""Compressed updates and stand-ins met by an attacker who knows them: never worse off, and better where it can be."""

import pytest
import torch

from tests.attacks.scenes import psnr
from tests.attacks.test_cdia import defended


@pytest.mark.parametrize("defence", ["sign", "standin", "standin(optimiser=yogi, variant=published_code)"])
def test_simulating_signs_helps(defence: str):
    """With the identity as the surrogate of a sign the knowing attacker would lose to the naive one."""
    scene, found = defended(defence, 300)
    lower, upper = scene.knowledge.lower, scene.knowledge.upper
    naive, knowing = (psnr(f.inputs, scene.truth.inputs, lower, upper).mean() for f in found.values())
    assert knowing > naive + 1, (naive, knowing)


@pytest.mark.parametrize("defence", ["ternary", "quantise(bits=3)", "minmax(ratio=0.9)"])
def test_without_the_draws_the_mean_is_what_an_attacker_compares(defence: str):
    """Who read the masks of `minmax` off the zeros would lose 5 dB."""
    _, found = defended(defence, 40)
    torch.testing.assert_close(found["cdia"].inputs, found["ig-scheliga"].inputs, rtol=1e-3, atol=1e-3)
