"""The batched attack agrees with a plain loop over one target client to the last digits."""

import pytest
import torch
from benchmarks.loops import gradveil_attack, model_of, plain_loop, truth_of

from gradveil.core.noise import Key


@pytest.mark.parametrize("name", ["lenet-zhu", "scheliga-cnn"])
def test_fifty_iterations_agree_with_a_plain_loop(name: str) -> None:
    model = model_of(name).double()
    images, labels = truth_of(3, torch.float64)
    found = gradveil_attack(model, images, labels)(50).objective
    for target_client, (image, label) in enumerate(zip(images, labels, strict=True)):
        generator = Key(0).child(target_client, 0, "inputs").generator()
        start = torch.rand(image.shape, generator=generator, dtype=torch.float64)
        values = plain_loop(model, image, label, start, 50)
        assert values[-1] < values[0] / 2
        assert float(found[target_client]) == pytest.approx(values[-1], rel=1e-6)
