"""Aligned dual gradient pruning against plain loops over entries, and what its masks promise."""

import math
from dataclasses import replace

import pytest
import torch

from gradveil.core.errors import GradveilError
from gradveil.core.noise import Key
from gradveil.core.types import Batch, Context
from gradveil.defences import Aligned, Dual, Feedback, chain

CONTEXT = Context({}, Batch(torch.zeros(1), torch.zeros(1)))
SHAPES = {"conv": (4, 3, 3, 3), "head": (10, 20), "bias": (7,), "one": (1,)}


def update(number: int = 0):
    return {n: torch.randn(s, generator=Key(number, (n,)).generator(), dtype=torch.float64) for n, s in SHAPES.items()}


def order(value):
    """Positions by falling magnitude."""
    return sorted(range(value.numel()), key=lambda i: -abs(float(value.flatten()[i])))


def many(rate: float, entries: int) -> int:
    return min(entries, math.ceil(round(rate * entries, 9)))


@pytest.mark.parametrize(("keep", "top"), [(0.2, 0.05), (0.2, 0.0), (0.45, 0.3), (0.01, 0.05)])
def test_own_top_is_dropped_and_the_largest_in_the_mask_are_sent(keep: float, top: float):
    defence = Aligned(keep, top)
    g, other = update(), update(1)
    public = defence.announce({f"mask.{n}": v[None] for n, v in said(defence, other).items()}, {}, 0)
    sent, _ = defence.apply(g, {}, {}, replace(CONTEXT, messages=public))
    for name, value in g.items():
        size = value.numel()
        mask = set(order(other[name])[: many(2 * keep, size)])
        dropped = set(order(value)[: int(top * size + 1e-9)])
        allowed = [i for i in order(value) if i in mask and i not in dropped][: many(keep, size)]
        assert sent[name].flatten().nonzero().flatten().tolist() == sorted(allowed)
        assert torch.equal(sent[name].flatten()[allowed], value.flatten()[allowed])


def said(defence: Aligned, g):
    return {name.removeprefix("mask."): value for name, value in defence.proposal(g, {}, {}, CONTEXT).items()}


def test_without_a_message_it_is_dual_pruning():
    sent, _ = Aligned(0.2, 0.05).apply(update(), {}, {}, CONTEXT)
    expected, _ = Dual(0.05, 0.75).apply(update(), {}, {}, CONTEXT)
    for name in ("conv", "head"):  # large enough for both to round to the same count
        assert torch.equal(sent[name], expected[name])


@pytest.mark.parametrize("heard", [True, False])
def test_what_was_sent_bounds_what_was_not_within_the_public_mask(heard: bool):
    """The true update breaks no order; another one does where it is told to send, and nowhere else."""
    defence, g = Aligned(0.2, 0.1), update()
    public = defence.announce({f"mask.{n}": v[None] for n, v in said(defence, update(1)).items()}, {}, 0)
    context = replace(CONTEXT, messages=public) if heard else CONTEXT
    sent, _ = defence.apply(g, {}, {}, context)
    seen = defence.evidence(sent)
    again, _ = defence.apply(g, {}, seen, context)
    assert all(torch.equal(again[name], sent[name]) for name in g)
    assert any(bool((g[n].abs() > sent[n].abs().max())[public[f"mask.{n}"].bool()].any()) for n in g), "a top is cut"
    other = {name: 1.5 * value.flip(0) for name, value in g.items()}
    found, _ = defence.apply(other, {}, seen, context)
    broken = 0
    for name, value in other.items():
        own = sent[name].abs()[sent[name] != 0]
        if len(own):
            over = torch.minimum(value.abs() - own.min(), own.max() - value.abs()).clamp_min(0) * value.sign()
            over = over * public[f"mask.{name}"] if heard else over
            torch.testing.assert_close(found[name], torch.where(sent[name] != 0, value, over))
            broken += int(((sent[name] == 0) & (over != 0)).sum())
    assert broken > 5


def votes_for(*named: set[int]):
    rows = torch.stack([torch.tensor([float(i in some) for i in range(20)]) for some in named])
    return {"mask.w": rows}


def test_most_votes_win_and_a_minority_of_liars_loses():
    defence = Aligned(0.2, 0.0, "vote", voters=5)
    honest, lie = set(range(8)), set(range(12, 20))
    public = defence.announce(votes_for(lie, honest, honest, lie, honest), {}, 0)["mask.w"]
    assert set(public.nonzero().flatten().tolist()) == honest


def test_equal_votes_take_turns():
    defence = Aligned(0.1, 0.0, "vote", voters=3)
    names = [{0, 1, 2, 3}, {10, 11, 12, 13}]
    chosen = [defence.announce(votes_for(*names), {}, number)["mask.w"] for number in range(10)]
    assert all(int(mask.sum()) == 4 for mask in chosen)
    assert torch.stack(chosen).any(0).nonzero().flatten().tolist() == sorted({0, 1, 2, 3, 10, 11, 12, 13})


def test_only_so_many_are_heard_and_a_mask_has_its_size():
    """A broadcaster who names everything, or nothing, does not change how much is sent."""
    defence = Aligned(0.2, 0.0)
    first = defence.announce(votes_for({1, 2, 3, 4, 5, 6, 7, 8}, {9}), {}, 0)["mask.w"]
    assert first.nonzero().flatten().tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    for named in (set(), set(range(20))):
        assert int(defence.announce(votes_for(named), {}, 3)["mask.w"].sum()) == 8


def test_previous_brings_every_position_back():
    defence = Aligned(0.2, 0.0, "previous")
    mean = {"w": torch.arange(20.0)}
    seen = torch.zeros(20, dtype=torch.bool)
    for number in range(1, 6):
        public = defence.announce({}, mean, number)["mask.w"]
        assert bool(public[16:].all())
        assert 4 <= int(public.sum()) <= 8
        seen |= public
    assert bool(seen.all())
    assert defence.announce({}, {}, 0) == {}
    assert defence.proposal(update(), {}, {}, CONTEXT) == {}
    assert [Aligned(selection=way).speakers() for way in ("broadcast", "vote", "previous")] == [1, 5, 0]


def test_what_a_client_proposes_is_of_all_that_it_would_send():
    """With error feedback that is the update plus the residual; behind another stage, what that stage lets through."""
    g, residual = {"w": torch.arange(10.0)}, {"residual.w": 20.0 - 2 * torch.arange(10.0)}
    fed = Feedback(Aligned(0.2, 0.0))
    assert fed.proposal(g, residual, {}, CONTEXT)["mask.w"].nonzero().flatten().tolist() == [0, 1, 2, 3]
    assert fed.proposal(g, fed.init(g), {}, CONTEXT)["mask.w"].nonzero().flatten().tolist() == [6, 7, 8, 9]
    both = chain(first=Dual(0.3, 0.0), second=Aligned(0.2, 0.0))
    said = both.proposal(g, {}, {}, CONTEXT)
    assert said["second.mask.w"].nonzero().flatten().tolist() == [3, 4, 5, 6]
    heard = both.announce({name: mask[None] for name, mask in said.items()}, {}, 0)
    assert torch.equal(heard["second.mask.w"], said["second.mask.w"].bool())
    sent, _ = both.apply({"w": 10.0 - torch.arange(10.0)}, {}, {}, replace(CONTEXT, messages=heard))
    assert sent["w"].nonzero().flatten().tolist() == [3, 4]
    assert chain(first=Aligned(selection="vote", voters=3), second=Aligned()).speakers() == 3


def test_everything_wrong_is_told_at_once():
    with pytest.raises(GradveilError) as told:
        Aligned(0.0, 1.0, "luck", 1)  # type: ignore[arg-type]
    assert [p.where for p in told.value.problems] == ["adgp.keep", "adgp.top", "adgp.selection", "adgp.voters"]
    with pytest.raises(GradveilError, match=r"top \+ keep is 1.1"):
        Aligned(0.8, 0.3)
