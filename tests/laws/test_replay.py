"""Replay: who knows the data and every named tensor computes exactly what was sent, and can differentiate it."""

import pytest
import torch

from gradveil.core.chain import last_stage
from gradveil.core.noise import Key
from gradveil.core.tree import squared_norm, tmap
from gradveil.core.types import Batch, Context, DrawsEntries
from gradveil.defences import parse
from tests.laws.cases import CLIENTS, SMOOTH, TEXTS, draw, draw_batch

OF_STEPS = [text for text in TEXTS if text.startswith(("soteria", "outpost"))]
"""What hides entries of each local step: its masks are seen only where one gradient is sent."""
_WORDS = ("prune", "topk", "dgp", "dgc", "minmax")
PRUNING = [text for text in TEXTS if any(word in text for word in _WORDS) and text not in OF_STEPS]
DRAWING = [text for text in TEXTS if isinstance(last_stage(parse(text).send), DrawsEntries)]
_UNUSED = Context({}, Batch(torch.zeros(1), torch.zeros(1)))
MASKED = [*((text, kind) for text in PRUNING for kind in CLIENTS), *((text, "gradient") for text in OF_STEPS)]


def distance(first, second) -> float:
    return float(squared_norm(tmap(torch.sub, first, second)))


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", CLIENTS)
def test_full_knowledge_gives_distance_zero(text: str, kind: str):
    """The server's copy is built anew from the defence's name, as an attacker's would be."""
    client = parse(text)(CLIENTS[kind])
    believed = parse(parse(text).name)(CLIENTS[kind])
    params, batch, noise, state = draw(client)
    sent, _ = client.update(params, batch, noise, state)
    assert distance(believed.update(params, batch, noise, state)[0], sent) == 0
    wrong = draw_batch(Key(99))
    assert distance(believed.update(params, wrong, noise, state)[0], sent) > 0


@pytest.mark.parametrize(("text", "kind"), MASKED)
def test_masks_read_off_what_was_sent_replay_it(text: str, kind: str):
    client = parse(text)(CLIENTS[kind])
    params, batch, noise, state = draw(client)
    sent, _ = client.update(params, batch, noise, state)
    evidence = client.evidence(sent)
    assert evidence
    client.noise_spec(params, batch).check({**noise, **evidence}, client.intermediates(params))
    assert distance(client.update(params, batch, {**noise, **evidence}, state)[0], sent) == 0
    masks = {name: value for name, value in evidence.items() if ".border." not in name}
    wrong = client.update(params, draw_batch(Key(99)), {**noise, **masks}, state)[0]
    hidden = [name for name in sent if any(mask.endswith(f".{name}") for mask in masks)]
    assert hidden
    assert all(not (wrong[name][sent[name] == 0]).any() for name in hidden), "the pinned mask was not used"


def test_quantising_hides_no_mask():
    """Scaled by the norm, an entry that was rounded to zero is missed in the norm, and nowhere else."""
    client = parse("prune(ratio=0.5) + quantise(bits=8)")(CLIENTS["gradient"])
    params, batch, noise, state = draw(client)
    sent, _ = client.update(params, batch, noise, state)
    masks = {name: value for name, value in client.evidence(sent).items() if ".mask." in name}
    assert set(masks) == {f"send.prune.mask.{name}" for name in sent}
    pruned = parse("prune(ratio=0.5)")(CLIENTS["gradient"]).update(params, batch, {}, {})[0]
    assert all(not masks[f"send.prune.mask.{name}"][value == 0].any() for name, value in pruned.items())
    again = client.update(params, batch, {**noise, **masks}, state)[0]
    assert distance(again, sent) < 1e-4 * float(squared_norm(sent))


@pytest.mark.parametrize("last", ["sign", "standin", "sign(feedback=true)"])
def test_what_fills_or_blurs_zeros_hides_the_mask_of_an_earlier_stage(last: str):
    client = parse(f"prune(ratio=0.5) + {last}")(CLIENTS["gradient"])
    params, batch, noise, state = draw(client)
    seen = client.evidence(client.update(params, batch, noise, state)[0])
    assert not any(".mask." in name for name in seen)


@pytest.mark.parametrize("text", DRAWING)
def test_what_draws_entries_finds_them_likeliest_at_the_truth(text: str):
    """The mean of -log P over what is drawn is least at the truth, as for any law P."""
    send = last_stage(parse(text).send)
    generator = torch.Generator().manual_seed(0)
    truth = torch.randn(100_000, generator=generator, dtype=torch.float64)
    noise = send.noise({"w": truth}).sample(Key(0))
    sent = send.apply({"w": truth}, {}, noise, _UNUSED)[0]["w"]

    def unlikely(value: torch.Tensor) -> float:
        return float(send.negative_log_likelihood({"w": value[None]}, {"w": sent[None]}, 0.03)["w"].mean())

    others = [
        0.7 * truth,
        1.3 * truth,
        truth + 0.3 * torch.randn(100_000, generator=generator, dtype=torch.float64),
        -truth,
    ]
    assert all(unlikely(truth) < unlikely(other) for other in others)
    tried = (truth[:200] + 0.1).requires_grad_()

    def whole(value: torch.Tensor) -> torch.Tensor:
        return send.negative_log_likelihood({"w": value[None]}, {"w": sent[None, :200]}, 0.3)["w"].sum()

    (slope,) = torch.autograd.grad(whole(tried), tried)
    step = 1e-6 * torch.randn(200, generator=generator, dtype=torch.float64)
    moved = whole(tried.detach() + step) - whole(tried.detach() - step)
    torch.testing.assert_close(2 * (slope * step).sum(), moved, rtol=1e-4, atol=1e-12)


@pytest.mark.parametrize("text", ["ternary", "minmax(0.5)"])
def test_what_was_sent_without_a_number_has_no_likelihood(text: str):
    sent = torch.tensor([[0.0, 1.0, torch.nan]])
    unlikely = last_stage(parse(text).send).negative_log_likelihood({"w": torch.ones(1, 3)}, {"w": sent}, 0.5)["w"]
    assert bool(unlikely.isnan()[0, 2])


def test_pinned_clip_factor_is_used():
    client = parse("clip(norm=0.3)")(CLIENTS["gradient"])
    params, batch, noise, state = draw(client)
    plain = CLIENTS["gradient"].update(params, batch, {}, {})[0]
    sent, _ = client.update(params, batch, noise, state)
    factor = 0.3 / squared_norm(plain).sqrt()
    pinned = client.update(params, batch, {"send.clip.factor": factor}, state)[0]
    torch.testing.assert_close(pinned, sent)
    half = client.update(params, batch, {"send.clip.factor": factor / 2}, state)[0]
    torch.testing.assert_close(half, tmap(lambda value: value / 2, sent))
    assert list(client.intermediates(params)) == ["send.clip.factor"]


def objective_of(text: str, kind: str):
    """The attacker's objective and slope at other inputs, everything else known; and what he knows."""
    client = parse(text)(CLIENTS[kind])
    params, batch, noise, state = draw(client)
    sent, _ = client.update(params, batch, noise, state)
    knowledge = {**noise, **client.evidence(sent)}
    x = draw_batch(Key(5)).inputs.requires_grad_()

    def objective(inputs):
        update, _ = client.update(params, Batch(inputs, batch.targets), knowledge, state)
        return squared_norm(tmap(torch.sub, update, sent))

    def of_rows(rows):
        """The same of several rows at once, summed."""
        many = len(rows)
        known, before = ({n: torch.stack([v] * many) for n, v in part.items()} for part in (knowledge, state))
        both, _ = client.updates(params, Batch(rows, torch.stack([batch.targets] * many)), known, before)
        return squared_norm({name: both[name] - sent[name] for name in sent})

    return objective, of_rows, x


@pytest.mark.parametrize("text", SMOOTH)
@pytest.mark.parametrize("kind", CLIENTS)
def test_derivative_of_the_distance_equals_finite_differences(text: str, kind: str):
    objective, _, x = objective_of(text, kind)
    direction = torch.randn(x.shape, generator=Key(6).generator(), dtype=x.dtype)
    (slope,) = torch.autograd.grad(objective(x), x)
    step = 1e-7  # Adam divides by the root of tiny gradients: its curvature is large there
    at = x.detach()
    expected = (objective(at + step * direction) - objective(at - step * direction)) / (2 * step)
    assert expected != 0
    torch.testing.assert_close((slope * direction).sum(), expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", CLIENTS)
def test_batched_derivative_is_that_of_each_row(text: str, kind: str):
    """A surrogate's derivative, too, is there and the same in a batch."""
    objective, of_rows, x = objective_of(text, kind)
    (slope,) = torch.autograd.grad(objective(x), x)
    assert bool(torch.isfinite(slope).all())
    assert bool(slope.any())
    (twice,) = torch.autograd.grad(of_rows(torch.stack([x, x])), x)
    torch.testing.assert_close(twice, 2 * slope, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "text", [text for text in PRUNING + OF_STEPS if text in SMOOTH and "+" not in text and "feedback" not in text]
)
def test_unpinned_masks_count_as_constants(text: str):
    client = parse(text)(CLIENTS["gradient"])
    params, batch, noise, state = draw(client)
    x = batch.inputs.clone().requires_grad_()
    sent, _ = client.update(params, Batch(x, batch.targets), noise, state)
    pinned, _ = client.update(params, Batch(x, batch.targets), {**noise, **client.evidence(sent)}, state)
    slopes = [torch.autograd.grad(squared_norm(update), x)[0] for update in (sent, pinned)]
    torch.testing.assert_close(slopes[0], slopes[1], rtol=0, atol=0)
