"""The interface of attacks: simulated updates of an observation, and defaults of a reconstruction."""

import math
from dataclasses import replace

import pytest
import torch

from gradveil.attacks import Reconstruction
from gradveil.client import Local
from gradveil.core.types import Batch
from gradveil.defences import parse
from tests.attacks.small_experiments import tiny


@pytest.mark.parametrize("local", [None, Local(batch=2, lr=0.1, steps=2)])
def test_observation_simulate_equals_the_update_without_noise(local):
    scene = tiny(target_clients=2, examples=2)
    client = parse("gaussian(0.1) + topk(0.5, feedback=true)")(replace(scene.client, local=local))
    params, batch = scene.observation.params, scene.truth
    updates = scene.observation.simulate(client, *batch)
    for v in range(2):
        single = Batch(batch.inputs[v], batch.targets[v])
        expected, _ = client.update(params, single, client.noise_spec(params, single).neutral(), client.init(params))
        for name, value in expected.items():
            torch.testing.assert_close(updates[name][v], value)


def test_reconstruction_defaults_are_one_iteration_of_one_restart():
    objective = torch.tensor([0.5, math.inf])
    result = Reconstruction(torch.zeros(2, 1, 3), torch.zeros(2, 1, dtype=torch.long), objective)
    assert result.status == ("converged", "diverged")
    assert result.iterations.tolist() == [1, 1]
    assert result.restart.tolist() == [0, 0]
    assert torch.equal(result.objectives, objective[:, None])
    assert result.initial.tolist() == [math.inf, math.inf]  # unknown
