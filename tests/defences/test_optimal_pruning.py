"""Optimal pruning: which coordinates it keeps against loops, its optimality, its coin and its noise."""

from dataclasses import replace

import pytest
import torch

from gradveil.core.noise import Key
from gradveil.core.tree import select
from gradveil.defences import OptimalPruning, parse
from gradveil.theory.input_jacobian import exact_squared_row_norms, norms, squared_row_norms
from tests.defences.optimal_defence_cases import flat, relu_net, setting


@pytest.mark.parametrize("scope", ["global", "layer"])
def test_pruning_keeps_what_is_worth_most_for_what_it_tells(scope):
    defence = OptimalPruning(0.7, scope)
    g, probe, context, rows = setting(defence)
    sent, _ = defence.apply(g, {}, {"probe": probe}, context)
    worth = flat(g).abs() / rows
    sizes = [value.numel() for value in g.values()] if scope == "layer" else [flat(g).numel()]
    for kept, own in zip(torch.split(flat(sent) != 0, sizes), torch.split(worth, sizes), strict=True):
        removed = int(0.7 * len(own) + 1e-9)
        assert int(kept.sum()) == len(own) - removed
        assert own[kept].min() > own[~kept].max() if removed else bool(kept.all())
    torch.testing.assert_close(flat(sent)[flat(sent) != 0], flat(g)[flat(sent) != 0], rtol=0, atol=0)
    by_size = parse(f"prune(0.7, scope={scope})").send.apply(g, {}, {}, context)[0]
    assert not torch.equal(flat(by_size) != 0, flat(sent) != 0)


def test_pruned_update_tells_less_than_by_magnitude_for_its_utility():
    """Among all that is kept, the information sum ||dg_i/dx||^2 for the utility sum g_i^2 is the smallest."""
    g, _, context, _ = setting(OptimalPruning(0.5))
    probe = OptimalPruning(0.5, probes=300).directions(context.batch).sample(Key(2))["probe"]
    exact = flat(norms(exact_squared_row_norms(context.gradient, context.batch)))

    def price(text: str) -> float:
        sent = parse(text).send.apply(g, {}, {"prune.probe": probe}, context)[0]
        kept = flat(sent) != 0
        return float(exact[kept].square().sum() / flat(g)[kept].square().sum())

    for ratio in (0.3, 0.5, 0.8):
        assert price(f"optimal-prune({ratio}, probes=300)") < 0.95 * price(f"prune({ratio}, scope=global)")


@pytest.mark.parametrize("scope", ["global", "layer"])
def test_a_coin_decides_on_the_coordinate_at_the_border(scope):
    """With probability ratio P - floor(ratio P) one more goes: the least worth of those that were kept."""
    defence = OptimalPruning(0.7, scope, mixed=True)
    g, probe, context, rows = setting(defence)
    sizes = [value.numel() for value in g.values()] if scope == "layer" else [flat(g).numel()]
    chances = torch.tensor([0.7 * size - int(0.7 * size + 1e-9) for size in sizes])
    assert bool((chances > 0.05).any())
    assert bool((chances < 0.95).all())
    neutral = defence.noise(g).neutral()
    assert len(neutral) == len(sizes)
    before = flat(replace(defence, mixed=False).apply(g, {}, {"probe": probe}, context)[0])
    torch.testing.assert_close(
        flat(defence.apply(g, {}, {"probe": probe, **neutral}, context)[0]), before, rtol=0, atol=0
    )
    for side, gone in ((-0.01, chances > 0.01), (0.01, torch.zeros(len(sizes), dtype=torch.bool))):
        coins = {name: (chance + side).clamp(min=0) for name, chance in zip(neutral, chances, strict=True)}
        sent = flat(defence.apply(g, {}, {"probe": probe, **coins}, context)[0])
        parts = [torch.split(value, sizes) for value in (before != 0, sent != 0, flat(g).abs() / rows)]
        for kept, left, worth, lost in zip(*parts, gone, strict=True):
            assert int(kept.sum()) - int(left.sum()) == int(lost)
            assert torch.equal(worth[kept & ~left], worth[kept].min()[None][: int(lost)])


def test_what_is_sent_has_the_share_on_average():
    defence = OptimalPruning(0.7, mixed=True)
    g, probe, context, _ = setting(defence)
    counts = []
    for number in range(400):
        coins = defence.noise(g).sample(Key(number))
        counts.append(int((flat(defence.apply(g, {}, {"probe": probe, **coins}, context)[0]) == 0).sum()))
    exact = 0.7 * flat(g).numel()
    assert set(counts) == {int(exact), int(exact) + 1}
    chance = exact - int(exact)
    assert abs(sum(counts) / 400 - exact) < 3.3 * (chance * (1 - chance) / 400) ** 0.5


def test_noisy_pruning_adds_noise_to_what_is_kept_and_chooses_without_it():
    defence = OptimalPruning(0.7, std=5.0)
    g, probe, context, _ = setting(defence)
    noise = {"probe": probe, **defence.noise(g).sample(Key(4))}
    sent = flat(defence.apply(g, {}, noise, context)[0])
    kept = flat(replace(defence, std=0.0).apply(g, {}, noise, context)[0]) != 0
    assert torch.equal(sent != 0, kept)
    torch.testing.assert_close(sent[kept], (flat(g) + 5.0 * flat(select(noise, "normal")))[kept])
    noisy = parse("gaussian(5) + optimal-prune(0.7)").send
    other = {f"noise.{n}": value for n, value in select(noise, "normal").items()} | {"prune.probe": probe}
    assert not torch.equal(flat(noisy.apply(g, {}, other, context)[0]) != 0, kept)


def test_rows_of_zero_are_first_or_last():
    g, probe, context, rows = setting(OptimalPruning(0.5), relu_net())
    squares = squared_row_norms(context.gradient, context.batch, probe)
    worth = OptimalPruning(0.5).worth(g, squares)
    silent = rows == 0
    assert bool(silent.any())
    assert not flat(worth)[silent & (flat(g) == 0)].any()
    g["1.weight"] = g["1.weight"] + 1.0
    worth = OptimalPruning(0.5).worth(g, squares)
    assert bool(worth["1.weight"][:2].isinf().all())
    sent, _ = OptimalPruning(0.5).apply(g, {}, {"probe": probe}, context)
    assert bool((sent["1.weight"][:2] != 0).all())
