"""What the server makes of updates."""

import math

import pytest
import torch

from gradveil.core.errors import GradveilError
from gradveil.federated.aggregate import Server

UPDATES = {0: {"w": torch.tensor([1.0, 0.0])}, 3: {"w": torch.tensor([0.0, 2.0])}}


def test_server_mean_weights_clients_by_examples_or_equally():
    mean, state = Server().mean(UPDATES, {0: 30, 3: 10}, {})
    assert mean["w"].tolist() == [0.75, 0.5]
    assert state == {}
    assert Server(weights="uniform").mean(UPDATES, {0: 30, 3: 10}, {})[0]["w"].tolist() == [0.5, 1.0]


def test_server_sgd_subtracts_the_mean_with_momentum():
    params, mean = {"w": torch.tensor([1.0, 1.0]), "frozen": torch.ones(1)}, {"w": torch.tensor([0.5, 0.0])}
    moved, _ = Server().step(params, mean, {})
    assert moved["w"].tolist() == [0.5, 1.0]
    assert moved["frozen"] is params["frozen"]
    server = Server(momentum=0.5, lr=2.0)
    state = server.init(mean)
    first, state = server.step(params, mean, state)
    second, _ = server.step(first, mean, state)
    assert first["w"].tolist() == [0.0, 1.0]
    assert second["w"].tolist() == [0.0 - 2 * (0.25 + 0.5), 1.0]


@pytest.mark.parametrize("optimiser", ["adam", "yogi", "adagrad"])
def test_server_adaptive_optimisers_follow_their_formula(optimiser):
    """Against Algorithm 2 of Reddi et al. 2021, written out number by number."""
    server = Server(optimiser, lr=0.3, betas=(0.8, 0.9), tau=0.01)
    p, m, v = 2.0, 0.0, 0.01**2
    params, state = {"w": torch.tensor([p], dtype=torch.float64)}, server.init({"w": torch.zeros(1).double()})
    for d in (0.7, -0.2, 0.05):
        m = 0.8 * m + 0.2 * d
        step = d * d
        if optimiser == "adam":
            v = 0.9 * v + 0.1 * step
        elif optimiser == "yogi":
            v = v - 0.1 * step * math.copysign(1, v - step)
        else:
            v = v + step
        p -= 0.3 * m / (math.sqrt(v) + 0.01)
        params, state = server.step(params, {"w": torch.tensor([d], dtype=torch.float64)}, state)
        assert params["w"].item() == pytest.approx(p, rel=1e-12)


def test_server_adam_with_corrections_is_that_of_torch():
    weight = torch.zeros(3, dtype=torch.float64)
    optimiser = torch.optim.Adam([weight], lr=1e-3, eps=1e-8)
    server = Server("adam", lr=1e-3, betas=(0.9, 0.999), tau=1e-8, corrected=True)
    params, state = {"w": weight.clone()}, server.init({"w": weight})
    for number in range(6):
        weight.grad = torch.randn(3, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
        optimiser.step()
        params, state = server.step(params, {"w": weight.grad}, state)
        torch.testing.assert_close(params["w"], weight)


def test_server_angles_reduce_the_weight_of_deviating_clients():
    """FedAdp: the weights are n exp(5 (1 - exp(-exp(-5 (angle - 1))))); a client's angles are averaged over rounds."""
    server = Server(weights="angles")
    updates = {i: {"w": torch.tensor(w)} for i, w in enumerate(([1, 0.2], [1, 0.0], [1, -0.2], [-0.5, 1.5]))}
    sizes = dict.fromkeys(updates, 10)
    mean, state = server.mean(updates, sizes, {})
    plain, _ = Server().mean(updates, sizes, {})
    angles = [
        math.atan2(float(abs(torch.det(torch.stack([u["w"], plain["w"]])))), float(u["w"] @ plain["w"]))
        for u in updates.values()
    ]
    assert [float(state[f"angle.{i}"]) for i in range(4)] == pytest.approx(angles, abs=1e-6)
    gains = [math.exp(5 * (1 - math.exp(-math.exp(-5 * (angle - 1))))) for angle in angles]
    expected = sum(g * float(u["w"][1]) for g, u in zip(gains, updates.values(), strict=True)) / sum(gains)
    assert float(mean["w"][1]) == pytest.approx(expected, rel=1e-5)
    assert float(mean["w"][1]) < float(plain["w"][1])
    turned = {i: {"w": u["w"].flip(0)} for i, u in updates.items()}
    _, after = server.mean(turned, sizes, state)
    assert float(after["seen.0"]) == 2
    assert float(after["angle.0"]) == pytest.approx(float(state["angle.0"]), abs=1e-6), "mirrored: the same angles"


def test_server_angles_of_parallel_updates_weight_by_examples():
    server = Server(weights="angles")
    updates = {0: {"w": torch.tensor([1.0, 0.0])}, 1: {"w": torch.tensor([3.0, 0.0])}}
    mean, _ = server.mean(updates, {0: 10, 1: 30}, {})
    assert mean["w"].tolist() == pytest.approx([2.5, 0.0])


def test_server_with_invalid_settings_raises_every_problem():
    with pytest.raises(GradveilError) as caught:
        Server("adam", lr=0.0, momentum=0.9, betas=(0.9, 1.0), tau=0.0)
    message = [str(problem) for problem in caught.value.problems]
    assert [line.partition(":")[0] for line in message] == [
        "server.lr",
        "server.tau",
        "server.betas",
        "server.momentum",
    ]
    with pytest.raises(GradveilError, match=r"server\.optimiser: is 'Adam' .*\nserver\.weights: is 'angle' "):
        Server("Adam", weights="angle")  # type: ignore[arg-type]
