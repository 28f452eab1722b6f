"""Optimal noise: its formula against loops, its optimality, and what is left alone."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gradveil.core.errors import GradveilError
from gradveil.core.noise import Key
from gradveil.core.tree import select, squared_norm, tmap
from gradveil.core.types import Context
from gradveil.defences import Defence, OptimalNoise, OptimalPruning, chain, parse
from tests.defences.optimal_defence_cases import context_of, flat, relu_net, scales, setting
from tests.laws.cases import CLIENTS, B, T, Tiny, draw, draw_batch


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
        OptimalNoise(-1.0, probes=0, layerwise=2, clamp=0.0, of="pixel", every=0, memory=1.0)
    places = [problem.where for problem in caught.value.problems]
    assert places == [
        f"optimal-noise.{name}" for name in ("std", "probes", "layerwise", "clamp", "of", "every", "memory")
    ]
    with pytest.raises(GradveilError) as caught:
        OptimalPruning(1.0, "row", probes=1.5, mixed=2, std=-1.0, of="pixel", every=0, memory=1.0)
    places = [problem.where for problem in caught.value.problems]
    assert places == [
        f"optimal-prune.{name}" for name in ("ratio", "scope", "probes", "mixed", "std", "of", "every", "memory")
    ]
    with pytest.raises(GradveilError, match="draws noise"):
        parse("optimal-prune(0.5, std=0.1, feedback=true)")
    g, probe, context, _ = setting(OptimalPruning(0.5))
    with pytest.raises(GradveilError, match="needs the client's gradient"):
        OptimalPruning(0.5).apply(g, {}, {"probe": probe}, replace(context, gradient=None))
