"""Utilities against simulation, and the global ratio against every other noise at the same expected utility."""

import itertools
import math

import pytest
import torch
from torch import Tensor, nn

from gradveil.client import Client
from gradveil.core.noise import Key
from gradveil.core.tree import tmap
from gradveil.core.types import Batch
from gradveil.defences import OptimalNoise
from gradveil.theory.first_order_utility import (
    first_order_utility,
    global_masks,
    global_ratio,
    noise_utility,
    optimal_variances,
    privacy_loss,
    second_order_utility,
)
from gradveil.theory.input_jacobian import exact_squared_row_norms
from gradveil.theory.reconstruction_bound import information_trace


def normal(*shape: int, key: str) -> Tensor:
    return torch.randn(shape, generator=Key(0, (key,)).generator(), dtype=torch.float64)


G = {"w": normal(3, 2, key="w"), "b": normal(4, key="b")}
VARIANCES = {name: 0.1 + normal(*value.shape, key=name + "s").square() for name, value in G.items()}


def noisy(number: int):
    return {n: v + VARIANCES[n].sqrt() * normal(*v.shape, key=f"{n}{number}") for n, v in G.items()}


def test_utilities_are_the_moments_of_noisy_updates():
    sent = [noisy(number) for number in range(5000)]
    draws = torch.stack([first_order_utility(G, each) for each in sent])
    plain = first_order_utility(G, G)
    torch.testing.assert_close(draws.mean(), plain, rtol=0.02, atol=0)
    torch.testing.assert_close(-draws.var(), noise_utility(G, VARIANCES), rtol=0.06, atol=0)
    second = torch.stack([second_order_utility(G, each) for each in sent]).mean()
    torch.testing.assert_close(second, noise_utility(G, VARIANCES) - plain.square(), rtol=0.03, atol=0)


def test_a_small_step_lowers_a_quadratic_loss_by_the_first_order():
    matrix = normal(5, 5, key="loss")
    w, eta = normal(5, key="at"), 1e-6
    g = matrix.T @ matrix @ w
    sent = g * (g.abs() > g.abs().median())
    fall = ((matrix @ w).square().sum() - (matrix @ (w - eta * sent)).square().sum()) / 2
    torch.testing.assert_close(fall / eta, first_order_utility({"w": g}, {"w": sent}), rtol=1e-4, atol=0)
    torch.testing.assert_close(first_order_utility({"w": g}, {"w": sent}), sent.square().sum())


def test_no_noise_that_is_the_same_for_all_batches_tells_less():
    """Expected information against expected utility: the global ratio is the best, the local one of a batch is not."""
    squares = [{"w": normal(6, key=f"r{i}").square()} for i in range(4)]
    gradients = [{"w": normal(6, key=f"g{i}")} for i in range(4)]

    def told(variances: Tensor) -> float:
        cost = sum(-noise_utility(g, {"w": variances}) for g in gradients)
        return float(sum(information_trace(s, {"w": variances * 1 / cost}) for s in squares))

    best = optimal_variances(global_ratio(squares, gradients), mean=0.5)["w"]
    torch.testing.assert_close(best.mean(), torch.tensor(0.5).double())
    smallest = told(best)
    for number in range(300):
        assert told(best * (0.1 * normal(6, key=f"other{number}")).exp()) > smallest
    for i in range(4):
        assert told(optimal_variances(global_ratio(squares[i : i + 1], gradients[i : i + 1]), 0.5)["w"]) > smallest


@pytest.mark.parametrize("removed", range(9))
def test_no_mask_that_is_the_same_for_all_batches_keeps_as_much_and_tells_less(removed: int):
    """Against every mask there is, of any number of entries."""
    squares = [{"w": normal(5, key=f"r{i}").square(), "v": normal(3, key=f"q{i}").square()} for i in range(4)]
    gradients = [{"w": normal(5, key=f"g{i}"), "v": normal(3, key=f"h{i}")} for i in range(4)]
    told, worth = (
        torch.stack([torch.cat([one["w"], one["v"]]) for one in part]).mean(0)
        for part in (squares, [{n: v.square() for n, v in one.items()} for one in gradients])
    )
    found = global_masks(squares, gradients, removed)
    own = torch.cat([found["w"], found["v"]]).double()
    assert int(own.sum()) == 8 - removed
    every = torch.tensor(list(itertools.product((0.0, 1.0), repeat=8))).double()
    better = (every @ worth >= own @ worth - 1e-12) & (every @ told < own @ told - 1e-12)
    assert not better.any()
    local = global_masks(squares[:1], gradients[:1], removed)
    differs = any(not torch.equal(local[name], found[name]) for name in found)
    assert differs or removed in (0, 8)


def cut_batches():
    """Gradients of a small net on four batches, a bound, and the squared rows of what is left when they are cut to it.

    The bound lies below the gradients of one parameter in all batches.
    """
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2), nn.Tanh(), nn.Linear(2, 2)).double()
    for name, parameter in model.named_parameters():
        parameter.data = normal(*parameter.shape, key=name) / 3
    client = Client(model)
    params = client.params()
    batches = []
    for number in range(4):
        batches.append(Batch(normal(3, 1, 2, 2, key=f"batch{number}"), torch.tensor([0, 0, number % 2])))

    def gradient(own: Batch, limit: float = math.inf):
        sent = client.update(params, own, {}, {})[0]
        return {name: value.clamp(-limit, limit) for name, value in sent.items()}

    gradients = [gradient(batch) for batch in batches]
    clamp = 0.9 * float(flat(gradients).abs().amin(0).max())
    whole = [exact_squared_row_norms(gradient, batch) for batch in batches]
    cut = [exact_squared_row_norms(lambda own: gradient(own, clamp), batch) for batch in batches]
    return gradients, clamp, whole, cut


def flat(parts: list[dict[str, Tensor]]) -> Tensor:
    return torch.stack([torch.cat([value.flatten() for value in one.values()]) for one in parts])


def test_theorem_3_is_the_best_noise_of_cut_updates():
    """Against the best of a numerical search, from the Jacobian of the cut gradient itself."""
    gradients, clamp, whole, cut = cut_batches()
    found = flat([optimal_variances(global_ratio(whole, gradients, clamp), mean=0.5)])[0]
    rows, sizes = flat(cut).mean(0), flat(gradients).square().mean(0)
    always, sometimes = ((flat(gradients).abs() > clamp).double().mean(0) == 1), (flat(gradients).abs() > clamp).any(0)
    assert bool(always.any())
    assert bool((sometimes & ~always).any())
    assert bool((~sometimes).any())
    assert torch.equal(found == 0, always)
    torch.testing.assert_close(found.mean(), torch.tensor(0.5).double())

    def told(variances: Tensor) -> Tensor:
        """Expected information times the expected cost of utility: no scale of the noise enters."""
        live = rows > 0
        return (rows[live] / variances[live]).sum() * (sizes * variances).sum()

    best = told(found)
    for start in range(2):
        logs = normal(len(found), key=f"start{start}").requires_grad_()
        search = torch.optim.LBFGS([logs], 1, 400, 1000, 1e-12, 1e-16, line_search_fn="strong_wolfe")

        def closure(at: Tensor = logs, by: torch.optim.Optimizer = search) -> Tensor:
            by.zero_grad()
            value = told(torch.where(always, 0.0, at.exp())).log()
            value.backward()
            return value

        search.step(closure)
        reached = torch.where(always, 0.0, logs.detach().exp())
        torch.testing.assert_close(told(reached), best, rtol=1e-6, atol=0)
        torch.testing.assert_close(reached * 0.5 / reached.mean(), found, rtol=1e-2, atol=1e-6)
    uncut = flat([optimal_variances(global_ratio(whole, gradients), mean=0.5)])[0]
    assert told(uncut) > 1.001 * best


def test_of_one_batch_theorem_3_is_the_local_form():
    gradients, clamp, whole, _ = cut_batches()
    ratio = global_ratio(whole[:1], gradients[:1], clamp)
    wanted = OptimalNoise(0.7, clamp=clamp).scales(gradients[0], whole[0])
    torch.testing.assert_close(tmap(torch.sqrt, optimal_variances(ratio, mean=0.7**2)), wanted)


def test_silent_coordinates_and_the_cap():
    ratio = global_ratio([{"w": torch.tensor([0.0, 0.0, 4.0, 4.0])}], [{"w": torch.tensor([0.0, 1.0, 0.0, 1.0])}])
    assert ratio["w"].tolist() == [0, 0, float("inf"), 2]
    variances = optimal_variances(ratio, mean=1.0, cap=6.0)
    assert variances["w"].tolist() == [0, 0, 3, 1]
    assert optimal_variances({"w": torch.zeros(2)}, mean=1.0)["w"].tolist() == [0, 0]


def test_privacy_loss_is_the_excess_information_at_equal_utility():
    squares, g = {"w": normal(40, key="n").square()}, {"w": normal(40, key="g")}
    best = {"w": squares["w"].sqrt() / g["w"].abs()}
    torch.testing.assert_close(privacy_loss(squares, g, best), torch.zeros(()).double(), rtol=0, atol=1e-12)
    other = {"w": best["w"] * normal(40, key="s").exp()}
    same = other["w"] * (noise_utility(g, best) / noise_utility(g, other))
    expected = information_trace(squares, {"w": same}) / information_trace(squares, best) - 1
    torch.testing.assert_close(privacy_loss(squares, g, other), expected)
    torch.testing.assert_close(privacy_loss(squares, g, {"w": 7 * other["w"]}), expected)
    assert expected > 0.1
    open_entry = {"w": torch.where(torch.arange(40) == 3, 0.0, best["w"])}
    assert bool(privacy_loss(squares, g, open_entry).isinf())
