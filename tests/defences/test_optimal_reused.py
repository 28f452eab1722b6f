"""Optimal noise from rough estimates: from few examples, from earlier rounds, and what it does about dead rows."""

import pytest
import torch
from torch import Tensor

from gradveil.client import Client, load_state, save_state
from gradveil.core.errors import GradveilError
from gradveil.core.noise import Key
from gradveil.core.tree import select, tmap
from gradveil.core.types import Batch
from gradveil.defences import parse
from gradveil.defences.optimal import SHRINK
from gradveil.gradients.input_sensitivity import example_squared_row_norms
from gradveil.theory.first_order_utility import privacy_loss
from gradveil.theory.input_jacobian import exact_squared_row_norms
from tests.defences.optimal_defence_cases import context_of, flat, relu_net
from tests.laws.cases import Tiny, draw_batch


def scales_of(client: Client, batch: Batch, state, number: int = 0):
    """Return the standard deviations of one update, the next state, and the gradient: its normal noise is one."""
    params = client.params()
    noise = client.noise_spec(params, batch).sample(Key(number, ("noise",)))
    ones = {name: torch.ones_like(value) if ".normal." in name else value for name, value in noise.items()}
    sent, after = client.update(params, batch, ones, state)
    gradient = client.undefended_update().update(params, batch, {}, {})[0]
    return tmap(torch.sub, sent, gradient), after, gradient


def exact(client: Client, batch: Batch):
    gradient = context_of(client, batch).gradient
    assert gradient is not None
    return exact_squared_row_norms(gradient, batch)


def rounds(text: str, count: int = 4, same: bool = True):
    """Scales of several rounds; the directions are always fresh, the batch is the same or not."""
    client = parse(text)(Client(Tiny()))
    state, found = client.init(client.params()), []
    for number in range(count):
        scales, state, _ = scales_of(client, draw_batch(Key(1 if same else number)), state, number)
        found.append(flat(scales))
    return found, state


def test_many_directions_of_examples_are_the_optimum_but_for_the_shrinking():
    batch = draw_batch(Key(1))
    client = parse("optimal-noise(0.3, probes=2000, of=example)")(Client(Tiny()))
    scales, _, g = scales_of(client, batch, {})
    squares = exact(client, batch)
    mixed = {}
    for name, value in squares.items():
        layer = value.sum() / g[name].square().sum()
        mixed[name] = ((1 - SHRINK) * value / g[name].square() + SHRINK * layer).sqrt()
    ratio = flat(mixed)
    torch.testing.assert_close(flat(scales), 0.3 * (ratio / ratio.mean()).sqrt(), rtol=0.15, atol=0)
    torch.testing.assert_close(flat(scales).square().mean(), torch.tensor(0.09).double())
    assert float(privacy_loss(squares, g, tmap(torch.square, scales))) < 0.02


def test_directions_of_examples_lose_less_than_those_of_the_batch_that_cost_as_much():
    """Four directions of one example each cost as much as one of the batch of four."""
    batch = draw_batch(Key(1))
    squares = exact(Client(Tiny()), batch)

    def lost(text: str) -> float:
        client = parse(text)(Client(Tiny()))
        rows = []
        for number in range(40):
            scales, _, g = scales_of(client, batch, client.init(client.params()), number)
            rows.append(privacy_loss(squares, g, tmap(torch.square, scales)))
        return float(torch.stack(rows).median())

    each, whole = lost("optimal-noise(0.3, probes=8, of=example)"), lost("optimal-noise(0.3, probes=2)")
    assert each < 0.6 * whole, (each, whole)


def test_every_other_round_takes_what_was_found_before():
    found, state = rounds("optimal-noise(0.3, probes=3, every=2)")
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(found[3], found[2], rtol=0, atol=1e-12)
    assert not torch.allclose(found[2], found[0], rtol=0.01)
    assert float(state["send.noise.rounds"]) == 4
    moved, _ = rounds("optimal-noise(0.3, probes=3, every=2)", 2, same=False)
    assert not torch.allclose(moved[1], moved[0], rtol=0.01), "the gradient is this round's"


def test_memory_is_a_mean_that_weighs_what_was_found_first_in_full():
    client = parse("optimal-noise(0.3, probes=3, memory=0.75)")(Client(Tiny()))
    fresh = parse("optimal-noise(0.3, probes=3, every=9)")(Client(Tiny()))
    state, batch, expected = client.init(client.params()), draw_batch(Key(1)), None
    for number in range(3):
        _, state, _ = scales_of(client, batch, state, number)
        alone = scales_of(fresh, batch, fresh.init(fresh.params()), number)[1]
        now = flat({name: value for name, value in alone.items() if "squares" in name})
        expected = now if expected is None else 0.75 * expected + 0.25 * now
        torch.testing.assert_close(flat({n: v for n, v in state.items() if "squares" in n}), expected)


def switched(offs: Tensor) -> Client:
    """A client with units that are off for every input."""
    net = relu_net()
    with torch.no_grad():
        net[1].bias[:] = torch.where(offs, -50.0, 0.5).double()
    return parse("optimal-noise(0.3, probes=5, every=2)")(Client(net))


def test_units_that_wake_up_get_noise_and_units_that_die_spend_none():
    first, later = torch.tensor([[1, 1, 0, 0, 0, 0], [1, 0, 1, 0, 0, 0]]).bool()
    batch, before = draw_batch(Key(1)), switched(first)
    scales, state, _ = scales_of(before, batch, before.init(before.params()))
    assert not scales["1.weight"][first].any()
    after = switched(later)
    scales, _, g = scales_of(after, batch, state, 1)
    squares = exact(after, batch)
    woken, dead = first & ~later, later
    assert bool((squares["1.weight"][woken] > 0).any())
    assert bool((scales["1.weight"][woken] > 0).all()), "they depend on the inputs now, and nothing was found of them"
    assert not scales["1.weight"][dead].any()
    torch.testing.assert_close(flat(scales).square().mean(), torch.tensor(0.09).double())
    assert bool(privacy_loss(squares, g, tmap(torch.square, scales)).isfinite())


def test_the_state_is_on_disk_the_clients_own(tmp_path):
    client = parse("optimal-noise(0.3, probes=3, every=2, memory=0.5)")(Client(Tiny()))
    _, state, _ = scales_of(client, draw_batch(Key(1)), client.init(client.params()))
    save_state(tmp_path / "state", client, state)
    again = load_state(tmp_path / "state", client)
    torch.testing.assert_close(again, state, rtol=0, atol=0)
    for other in ("optimal-noise(0.3, probes=3, every=3, memory=0.5)", "optimal-noise(0.3, probes=3)"):
        with pytest.raises(GradveilError):
            load_state(tmp_path / "state", parse(other)(Client(Tiny())))


def test_an_attacker_may_pin_the_scales_of_a_client_that_remembers():
    client = parse("optimal-noise(0.3, probes=3, every=2)")(Client(Tiny()))
    params, batch = client.params(), draw_batch(Key(1))
    noise = client.noise_spec(params, batch).sample(Key(2))
    scales, state, _ = scales_of(client, batch, client.init(params), 0)
    pinned = {f"send.noise.scale.{name}": value for name, value in scales.items()}
    sent, after = client.update(params, batch, {**noise, **pinned}, state)
    plain = client.undefended_update().update(params, batch, {}, {})[0]
    for name, value in plain.items():
        torch.testing.assert_close(sent[name], value + scales[name] * noise[f"send.noise.normal.{name}"])
    assert float(after["send.noise.rounds"]) == 2
    torch.testing.assert_close(after["send.noise.squares.head.bias"], state["send.noise.squares.head.bias"])


def pruned(text: str, batches: list[Batch], net=None):
    """What a client sends in each round, what of it is not zero, and its last state."""
    client = parse(text)(Client(net or Tiny()))
    params, state, kept = client.params(), client.init(client.params()), []
    for number, batch in enumerate(batches):
        noise = client.noise_spec(params, batch).sample(Key(number, ("noise",)))
        sent, state = client.update(params, batch, noise, state)
        kept.append(flat(sent) != 0)
    return kept, state


def test_pruning_from_few_examples_keeps_what_is_worth_most_for_what_they_show():
    """Against the reference of `client.probing`, its squares mixed with those of the layer, entry by entry."""
    client, batch = parse("optimal-prune(0.7, probes=6, of=example)")(Client(Tiny())), draw_batch(Key(1))
    params = client.params()
    noise = client.noise_spec(params, batch).sample(Key(0, ("noise",)))
    g = Client(Tiny()).update(params, batch, {}, {})[0]
    squares = example_squared_row_norms(
        client.objective, params, {}, batch, {}, noise["send.prune.probe"], noise["send.prune.offset"]
    )
    worth = []
    for name, value in g.items():
        layer = squares[name].sum() / value.square().sum()
        worth.append((value.abs() / ((1 - SHRINK) * squares[name] + SHRINK * layer * value.square()).sqrt()).flatten())
    order = torch.cat(worth).argsort()
    expected = torch.ones(len(order), dtype=torch.bool)
    expected[order[: int(0.7 * len(order) + 1e-9)]] = False
    sent, _ = client.update(params, batch, noise, {})
    assert torch.equal(flat(sent) != 0, expected)


def test_pruning_from_examples_tells_less_than_by_magnitude_for_its_utility():
    batch = draw_batch(Key(1))
    squares, g = (
        flat(exact(Client(Tiny()), batch)),
        flat(Client(Tiny()).update(Client(Tiny()).params(), batch, {}, {})[0]),
    )

    def price(text: str) -> float:
        (kept,), _ = pruned(text, [batch])
        return float(squares[kept].sum() / g[kept].square().sum())

    for ratio in (0.5, 0.8):
        assert price(f"optimal-prune({ratio}, probes=32, of=example)") < 0.95 * price(f"prune({ratio}, scope=global)")


def test_pruning_every_other_round_takes_what_was_found_before():
    one, other = draw_batch(Key(1)), draw_batch(Key(2))
    kept, state = pruned("optimal-prune(0.7, probes=3, every=2)", [one] * 3)
    assert torch.equal(kept[0], kept[1])
    assert not torch.equal(kept[1], kept[2])
    assert float(state["send.prune.rounds"]) == 3
    moved, _ = pruned("optimal-prune(0.7, probes=3, every=2)", [one, other])
    assert not torch.equal(moved[0], moved[1]), "the gradient is this round's"
    _, kept_apart = pruned("optimal-prune(0.7, probes=3, every=2, memory=0.5, feedback=true)", [one, other, one])
    assert float(kept_apart["send.prune.inner.rounds"]) == 3
    assert any(name.startswith("send.prune.inner.squares.") for name in kept_apart)


def test_a_unit_that_wakes_up_does_not_pass_for_one_that_tells_nothing():
    """Nothing was found of it when it was off: by that alone it would be kept before all others."""
    batch = draw_batch(Key(1))
    client = parse("optimal-prune(0.5, probes=5, every=2)")(Client(relu_net()))
    params, state = client.params(), client.init(client.params())
    noise = client.noise_spec(params, batch).sample(Key(0, ("noise",)))
    _, state = client.update(params, batch, noise, state)
    assert not state["send.prune.squares.1.weight"][:2].any()
    awake = {**params, "1.bias": torch.full_like(params["1.bias"], 0.5)}
    g = Client(relu_net()).update(awake, batch, {}, {})[0]
    pruning = dict(client.send)["prune"]
    assert bool((g["1.weight"][:2] != 0).any())
    assert bool(pruning.worth(g, select(state, "send.prune.squares"))["1.weight"][:2].isfinite().all())


def test_a_step_that_is_tried_in_double_precision_first_asks_for_its_own_outputs():
    """What comes to no number is tried again with more digits; the outputs of the trial are not those of the step."""
    client = parse("optimal-prune(0.7, probes=6, of=example)")(Client(Tiny().float()))
    batch = Batch(draw_batch(Key(1)).inputs.float(), draw_batch(Key(1)).targets)
    batch.inputs[1, 0, 3, 3] = torch.inf
    given = client.params(), batch, client.noise_spec(client.params(), batch).sample(Key(2)), {}
    (first, _), (second, _) = client.update(*given), client.update(*given)
    torch.testing.assert_close(first, second, rtol=0, atol=0, equal_nan=True)
