"""Optimal noise and pruning: their formulas against loops, their optimality, and what is left alone."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from gradveil.client import Client
from gradveil.core.errors import GradveilError
from gradveil.core.noise import Key
from gradveil.core.tree import select, squared_norm, tmap
from gradveil.core.types import Batch, Context
from gradveil.defences import Defence, OptimalNoise, OptimalPruning, chain, parse
from gradveil.theory.sensitivity import exact_squared_row_norms, norms
from tests.laws.cases import CLIENTS, B, T, Tiny, draw, draw_batch


def relu_net() -> nn.Module:
    """Two of its units are off for every input of the tests."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    generator = Key(3).generator()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        net[1].bias[:2] = -50.0
    return net


def flat(tensors) -> Tensor:
    return torch.cat([value.flatten() for value in tensors.values()])


def context_of(client: Client, batch: Batch) -> Context:
    params = client.params()

    def gradient(own: Batch):
        return client.undefended_update().update(params, own, {}, {})[0]

    return Context(params, batch, gradient=gradient)


def setting(defence: OptimalNoise | OptimalPruning, model: nn.Module | None = None):
    """A client's update, its probes and context, and its row norms from one double backward pass a probe."""
    client = Client(model or Tiny())
    batch = draw_batch(Key(1))
    probe = defence.directions(batch).sample(Key(2))["probe"]
    context = context_of(client, batch)
    assert context.gradient is not None
    names = list(client.params())
    total = 0.0
    for direction in probe:
        _, products = torch.autograd.functional.jvp(
            lambda x: tuple(context.gradient(Batch(x, batch.targets))[n] for n in names), batch.inputs, direction
        )
        total = total + torch.cat([value.flatten() for value in products]).square()
    return context.gradient(batch), probe, context, (total / len(probe)).sqrt()


def scales(defence: OptimalNoise, g, probe: Tensor, context: Context):
    return defence.scales(g, defence.squares({}, {"probe": probe}, context))


def test_variances_follow_the_ratio_and_have_the_mean_that_was_asked_for():
    defence = OptimalNoise(0.3)
    g, probe, context, rows = setting(defence)
    scale = flat(scales(defence, g, probe, context))
    ratio = (rows / flat(g).abs().clamp(min=1e-8)).clamp(max=1e6)
    torch.testing.assert_close(scale, 0.3 * (ratio / ratio.mean()).sqrt())
    torch.testing.assert_close(scale.square().mean(), torch.tensor(0.09).double())
    assert scale.max() > 10 * scale.min()


def test_noise_has_the_variances_it_says():
    client = parse("optimal-noise(0.3)")(CLIENTS["gradient"])
    params, batch, noise, _ = draw(client)
    context = context_of(client, batch)
    plain = context.gradient(batch)
    scale = flat(scales(OptimalNoise(0.3), plain, noise["send.noise.probe"], context))
    rows = []
    for number in range(60):
        fresh = client.noise_spec(params, batch).sample(Key(number, ("fresh",)))
        fresh["send.noise.probe"] = noise["send.noise.probe"]
        rows.append((flat(client.update(params, batch, fresh, {})[0]) - flat(plain)) / scale)
    units = torch.cat(rows).sort().values
    assert len(units) == 60 * flat(plain).numel()
    expected = torch.special.ndtr(units)
    place = torch.linspace(0, 1, len(units), dtype=torch.float64)
    assert float((expected - place).abs().max()) < 1.63 / len(units) ** 0.5, "Kolmogorov-Smirnov at 1 %"


def test_no_other_noise_tells_less_at_the_same_utility():
    """s_i^2 = lambda ||dg_i/dx|| / |g_i| minimises sum_i ||dg_i/dx||^2 / s_i^2 where sum_i g_i^2 s_i^2 is given."""
    defence = OptimalNoise(0.3)
    g, probe, context, rows = setting(defence)
    worth, best = flat(g).square(), flat(scales(defence, g, probe, context)).square()

    def told(variances: Tensor) -> Tensor:
        same = variances * (worth @ best) / (worth @ variances)
        return (rows.square() / same).sum()

    smallest = told(best)
    isotropic = told(torch.ones_like(best))
    assert isotropic > 1.5 * smallest
    generator = Key(5).generator()
    for size in (0.01, 0.1, 1.0):
        for _ in range(300):
            other = best * (size * torch.randn(best.shape, generator=generator, dtype=best.dtype)).exp()
            assert told(other) > smallest


def test_units_that_are_off_get_no_noise_and_spend_no_variance():
    defence = OptimalNoise(0.3)
    g, probe, context, _ = setting(defence, relu_net())
    found = scales(defence, g, probe, context)
    assert not found["1.weight"][:2].any()
    assert not found["3.weight"][:, :2].any()
    assert bool((found["1.weight"][2:] > 0).any())
    torch.testing.assert_close(flat(found).square().mean(), torch.tensor(0.09).double())


def test_a_gradient_of_zero_that_depends_on_the_inputs_is_capped():
    defence = OptimalNoise(1.0)
    g, probe, context, _ = setting(defence)
    g = {name: value.clone() for name, value in g.items()}
    g["head.bias"][0] = 0.0
    found = scales(defence, g, probe, context)
    assert bool(flat(found).isfinite().all())
    count = flat(g).numel()
    assert 0.9 * count < float(found["head.bias"][0]) ** 2 <= count, "one entry at the cap takes most of the variance"


def test_layerwise_noise_has_one_scale_a_parameter():
    defence = OptimalNoise(0.3, layerwise=True)
    g, probe, context, rows = setting(defence)
    found = scales(defence, g, probe, context)
    parts = torch.split(rows, [value.numel() for value in g.values()])
    ratio = torch.cat([(r.norm() / v.norm()).expand(v.numel()) for r, v in zip(parts, g.values(), strict=True)])
    torch.testing.assert_close(flat(found), 0.3 * (ratio / ratio.mean()).sqrt())
    assert len({float(value) for value in flat(found)}) == len(g)


def test_clamped_entries_get_no_noise():
    defence = OptimalNoise(0.3, clamp=0.05)
    g, probe, context, _ = setting(defence)
    noise = {"probe": probe, **{f"normal.{name}": torch.ones_like(value) for name, value in g.items()}}
    sent, _ = defence.apply(g, {}, noise, context)
    cut = flat(g).abs() > 0.05
    assert 0.1 < float(cut.double().mean()) < 0.9
    torch.testing.assert_close(flat(sent)[cut], 0.05 * flat(g)[cut].sign())
    scale = flat(scales(defence, g, probe, context))
    assert not scale[cut].any()
    assert bool((scale[~cut] > 0).all())
    torch.testing.assert_close(scale.square().mean(), torch.tensor(0.09).double())
    torch.testing.assert_close(flat(sent)[~cut], (flat(g) + scale)[~cut])
    only = replace(defence, std=0.0).apply(g, {}, {}, Context({}, draw_batch(Key(1))))[0]
    torch.testing.assert_close(only, tmap(lambda value: value.clamp(-0.05, 0.05), g), rtol=0, atol=0)


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
    worth = OptimalPruning(0.5).worth(g, probe, context)
    silent = rows == 0
    assert bool(silent.any())
    assert not flat(worth)[silent & (flat(g) == 0)].any()
    g["1.weight"] = g["1.weight"] + 1.0
    worth = OptimalPruning(0.5).worth(g, probe, context)
    assert bool(worth["1.weight"][:2].isinf().all())
    sent, _ = OptimalPruning(0.5).apply(g, {}, {"probe": probe}, context)
    assert bool((sent["1.weight"][:2] != 0).all())


def test_an_attacker_may_pin_the_scales_or_compute_them():
    client = parse("optimal-noise(0.3)")(CLIENTS["gradient"])
    params, batch, noise, _ = draw(client)
    sent, _ = client.update(params, batch, noise, {})
    context = context_of(client, batch)
    plain = context.gradient(batch)
    found = scales(OptimalNoise(0.3), plain, noise["send.noise.probe"], context)
    pinned = {f"send.noise.scale.{name}": value for name, value in found.items()}
    assert set(client.intermediates(params)) == set(pinned)
    drawn = {name: value for name, value in noise.items() if "probe" not in name}
    torch.testing.assert_close(client.update(params, batch, {**drawn, **pinned}, {})[0], sent)
    off = tmap(torch.zeros_like, pinned)
    torch.testing.assert_close(client.update(params, batch, {**drawn, **off}, {})[0], plain)
    torch.testing.assert_close(
        client.update(params, batch, client.noise_spec(params, batch).neutral(), {})[0], plain, rtol=0, atol=0
    )


def test_each_local_step_has_its_own_probes():
    """In the step slot the norms are those of each local gradient, and probes are shaped like a step's batch."""
    defence = Defence("mine", step=chain(noise=OptimalNoise(0.1, probes=3)))
    client = defence(CLIENTS["sgd"])
    params, batch, noise, state = draw(client)
    assert noise["step.noise.probe"].shape == (T, 3, 2, *Tiny.input_shape)
    sent, _ = client.update(params, batch, noise, state)
    other = {**noise, "step.noise.probe": noise["step.noise.probe"].flip(0)}
    assert squared_norm(tmap(torch.sub, client.update(params, batch, other, state)[0], sent)) > 0
    whole = parse("optimal-noise(0.1, probes=3)")(CLIENTS["sgd"])
    assert select(draw(whole)[2], "send.noise")["probe"].shape == (3, B, *Tiny.input_shape)


def test_together_with_noise_before_it():
    client = parse("optimal-prune(0.5) + gaussian(0.1)")(CLIENTS["gradient"])
    params, batch, noise, state = draw(client)
    assert {"send.prune.probe", "send.noise.head.bias"} <= set(noise)
    sent = flat(client.update(params, batch, noise, state)[0])
    assert int((sent == 0).sum()) == len(sent) // 2


def test_wrong_settings_and_places_are_refused():
    with pytest.raises(GradveilError) as caught:
        OptimalNoise(-1.0, probes=0, layerwise=2, clamp=0.0)
    places = [problem.where for problem in caught.value.problems]
    assert places == [f"optimal-noise.{name}" for name in ("std", "probes", "layerwise", "clamp")]
    with pytest.raises(GradveilError) as caught:
        OptimalPruning(1.0, "row", probes=1.5, mixed=2, std=-1.0)
    places = [problem.where for problem in caught.value.problems]
    assert places == [f"optimal-prune.{name}" for name in ("ratio", "scope", "probes", "mixed", "std")]
    with pytest.raises(GradveilError, match="draws noise"):
        parse("optimal-prune(0.5, std=0.1, feedback=true)")
    g, probe, context, _ = setting(OptimalPruning(0.5))
    with pytest.raises(GradveilError, match="needs the client's gradient"):
        OptimalPruning(0.5).apply(g, {}, {"probe": probe}, replace(context, gradient=None))
