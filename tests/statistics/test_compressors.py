"""Random compressors keep the mean: 10,000 draws of one update, entry by entry."""

import pytest
import torch
from scipy.stats import binomtest, kstest, norm

from gradveil.client import Client
from gradveil.core.noise import Key
from gradveil.core.tree import select
from gradveil.core.types import Batch, Context
from gradveil.defences import parse
from tests.laws.cases import Tiny

DRAWS = 10_000
LEVEL = 0.001
CONTEXT = Context({}, Batch(torch.zeros(1), torch.zeros(1)))


def update():
    """Entries of many sizes, and a zero: [11], and a layer of one entry."""
    g = torch.randn(11, generator=Key(0).generator(), dtype=torch.float64)
    g = g + 0.1 * g.sign()  # no entry so small that 10,000 draws might never show it
    g[4] = 0
    return {"w": g, "one": torch.tensor([-0.3], dtype=torch.float64)}


def sent_by(text: str):
    """What 10,000 clients with the same gradient send."""
    transform = parse(text).send
    g = update()
    rows = {n: v.expand(DRAWS, *v.shape) for n, v in g.items()}
    spec = transform.noise(g)
    noise = spec.times(DRAWS).sample(Key(3))
    return g, torch.func.vmap(lambda one, own: transform.apply(one, {}, own, CONTEXT)[0])(rows, noise), noise


UNBIASED = ["ternary", "quantise(bits=2)", "quantise(bits=3)", "quantise(bits=3, scale=max)", "quantise(bits=8)"]
UNBIASED += ["minmax(ratio=0.5)", "minmax(ratio=0.8)"]


def standardised(g, sent):
    """Errors of the means in standard errors; entries that are always the same must be right."""
    error, spread = sent.mean(0) - g, sent.std(0)
    same = spread < 1e-12
    torch.testing.assert_close(error[same], torch.zeros_like(error[same]), rtol=0, atol=1e-12)
    return (error / spread * DRAWS**0.5)[~same]


@pytest.mark.parametrize("text", UNBIASED)
def test_the_mean_of_what_is_sent_is_the_gradient(text: str):
    g, sent, _ = sent_by(text)
    for name, value in g.items():
        z = standardised(value, sent[name])
        assert bool((z.abs() < norm.isf(LEVEL / 2 / 11)).all()), (name, z)
    z = standardised(g["w"], sent["w"])
    assert kstest(z.numpy(), "norm").pvalue > LEVEL


def test_a_clip_is_what_makes_terngrad_biased():
    g, sent, _ = sent_by("ternary(clip=1.5)")
    largest = g["w"].abs().argmax()
    bound = 1.5 * g["w"].square().mean().sqrt()
    assert g["w"].abs()[largest] > bound
    torch.testing.assert_close(sent["w"][:, largest].abs(), bound.expand(DRAWS))
    torch.testing.assert_close(sent["one"], g["one"].expand(DRAWS, 1))


def test_ternary_has_three_levels_and_its_probabilities():
    g, sent, _ = sent_by("ternary")
    largest = g["w"].abs().amax()
    assert set(sent["w"].abs().unique().tolist()) == {0.0, float(largest)}
    for entry, value in enumerate(g["w"]):
        kept = int((sent["w"][:, entry] != 0).sum())
        probability = float(value.abs() / largest)
        assert binomtest(kept, DRAWS, probability).pvalue > LEVEL
        assert not bool((sent["w"][:, entry] * value < 0).any())


@pytest.mark.parametrize(("text", "levels"), [("quantise(bits=2)", 1), ("quantise(bits=4, scale=max)", 7)])
def test_a_quantised_entry_is_one_of_the_two_levels_beside_it(text: str, levels: int):
    g, sent, _ = sent_by(text)
    size = g["w"].norm() if "max" not in text else g["w"].abs().amax()
    place = sent["w"].abs() / size * levels
    torch.testing.assert_close(place, place.round())
    assert bool(((sent["w"] - g["w"]).abs() < size / levels * (1 + 1e-12)).all())
    assert len(sent["w"].abs().unique()) <= levels + 1


@pytest.mark.parametrize("ratio", [0.2, 0.5, 0.9])
def test_a_sampler_sends_exactly_its_share_and_keeps_the_signs(ratio: float):
    g, sent, _ = sent_by(f"minmax(ratio={ratio})")
    assert set((sent["w"] != 0).sum(1).tolist()) == {11 - int(ratio * 11)}
    assert not bool((sent["w"] * g["w"] < 0).any())
    assert bool((sent["w"].abs() >= g["w"].abs())[sent["w"] != 0].all())
    often = (sent["w"] != 0).double().mean(0)
    order = g["w"].abs().argsort()
    assert bool((often[order].diff() > -0.02).all()), "larger entries are sent more often"


def test_a_sampler_is_the_spread_of_a_naive_program():
    g, sent, noise = sent_by("minmax(ratio=0.5)")
    for row in range(50):
        u, value = noise["sample.w"][row].tolist(), g["w"].tolist()
        weights = [(1 / a - 1) * b * b for a, b in zip(u, value, strict=True)]
        order = sorted(range(11), key=lambda i: -weights[i])
        kept, threshold = order[:6], weights[order[6]]
        expected = [value[i] + threshold / value[i] if i in kept else 0.0 for i in range(11)]
        torch.testing.assert_close(sent["w"][row], torch.tensor(expected, dtype=torch.float64))


def test_a_sampler_shows_its_mask_unless_it_was_rounded():
    sampled, rounded = (parse(text).send for text in ("minmax(ratio=0.5)", "minmax(ratio=0.5) + quantise(bits=2)"))
    g = update()
    noise = rounded.noise(g).sample(Key(3))
    sent, _ = sampled.apply(g, {}, noise, CONTEXT)
    assert {n: v.tolist() for n, v in sampled.evidence(sent).items()} == {
        f"sample.kept.{n}": (v != 0).double().tolist() for n, v in sent.items()
    }
    assert not rounded.evidence(rounded.apply(g, {}, noise, CONTEXT)[0])


@pytest.mark.parametrize("text", UNBIASED)
def test_neutral_noise_sends_the_mean(text: str):
    """An attacker who cannot know the draws takes what they amount to on average."""
    transform = parse(text).send
    g = update()
    sent, _ = transform.apply(g, {}, transform.noise(g).neutral(), CONTEXT)
    torch.testing.assert_close(sent, g, rtol=0, atol=0)


def test_a_layer_of_zeros_stays_zero():
    zero = {"w": torch.zeros(5)}
    for text in ("sign", *UNBIASED):
        transform = parse(text).send
        noise = transform.noise(zero).sample(Key(1))
        assert torch.equal(transform.apply(zero, {}, noise, CONTEXT)[0]["w"], zero["w"])


def test_the_client_names_the_draws():
    client = parse("quantise(bits=4)")(Client(Tiny()))
    spec = client.noise_spec(client.params(), Batch(torch.zeros(1, 1, 8, 8).double(), torch.zeros(1)))
    assert list(select(spec, "send.quantise")) == list(client.params())
