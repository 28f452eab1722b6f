"""Defences of the batch against their formulas, example by example."""

from dataclasses import replace

import pytest
import torch
from scipy.stats import beta, kstest
from torch import nn
from torch.nn.functional import cross_entropy

from gradveil.client import Client, transformed_batch
from gradveil.core.distributions import Beta, OneOf, Shares, Signs
from gradveil.core.errors import GradveilError
from gradveil.core.noise import Key, Uniform
from gradveil.core.tree import select
from gradveil.core.types import Batch, Domain
from gradveil.defences import InstaHide, LabelSmoothing, Mixup, parse
from gradveil.spaces import ImageSpace

LOWER, UPPER = torch.tensor([[[-1.0]], [[-2.0]]]).double(), torch.tensor([[[2.0]], [[4.0]]]).double()
DOMAIN = Domain(ImageSpace.between(LOWER, UPPER, (2, 1, 1)), 3)


def batch(size: int = 5):
    u = torch.rand(size, 2, 4, 4, generator=Key(0).generator(), dtype=torch.float64)
    return Batch(LOWER + (UPPER - LOWER) * u, torch.arange(size) % 3)


def client(text: str, members: int = 1):
    model = nn.Sequential(nn.Flatten(), nn.Linear(32, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    return parse(text)(replace(Client(model, domain=DOMAIN), members=members))


def gradient(model: nn.Module, loss: torch.Tensor):
    return dict(zip(dict(model.named_parameters()), torch.autograd.grad(loss, list(model.parameters())), strict=True))


def test_smoothed_labels_are_torchs():
    defended, examples = client("label-smoothing(0.3)"), batch()
    sent, _ = defended.update(defended.params(), examples, {}, {})
    loss = cross_entropy(defended.model(examples.inputs), examples.targets, label_smoothing=0.3)
    torch.testing.assert_close(sent, gradient(defended.model, loss))


def test_mixup_is_the_mean_of_two_losses_on_mixed_images():
    defended, examples = client("mixup(0.7)"), batch()
    params = defended.params()
    noise = defended.noise_spec(params, examples).sample(Key(3))
    sent, _ = defended.update(params, examples, noise, {})
    c, p = noise["batch.0.coefficient"], noise["batch.0.partner"][0]
    assert 0 < c < 1
    assert sorted(p.tolist()) == list(range(5)) != p.tolist()
    out = defended.model(c * examples.inputs + (1 - c) * examples.inputs[p])
    loss = c * cross_entropy(out, examples.targets) + (1 - c) * cross_entropy(out, examples.targets[p])
    torch.testing.assert_close(sent, gradient(defended.model, loss))


def test_instahide_mixes_and_flips_entry_by_entry():
    hide, examples = InstaHide(k=3), batch()
    noise = hide.noise(examples).sample(Key(1))
    hidden = hide.apply(examples, noise, DOMAIN)
    for b in range(5):
        image = torch.zeros(2, 4, 4, dtype=torch.float64)
        label = torch.zeros(3, dtype=torch.float64)
        for j in range(3):
            other = b if j == 0 else int(noise["partner"][j - 1, b])
            scaled = 2 * (examples.inputs[other] - LOWER) / (UPPER - LOWER) - 1
            image += noise["coefficient"][b, j] * scaled
            label[examples.targets[other]] += noise["coefficient"][b, j]
        expected = LOWER + (UPPER - LOWER) * (noise["sign"][b] * image + 1) / 2
        torch.testing.assert_close(hidden.inputs[b], expected)
        torch.testing.assert_close(hidden.targets[b], label)
    assert bool((hidden.inputs >= LOWER).all() and (hidden.inputs <= UPPER).all())
    assert not torch.equal(noise["partner"][0], noise["partner"][1])


PUBLIC = LOWER + (UPPER - LOWER) * torch.rand(4, 2, 4, 4, generator=Key(8).generator(), dtype=torch.float64)


def test_instahide_mixes_two_images_of_the_clients_with_public_ones():
    hide, examples = InstaHide(k=4, mix="public"), batch()
    noise = hide.noise(examples).sample(Key(1))
    assert {name: tuple(value.shape) for name, value in noise.items() if name != "sign"} == {
        "coefficient": (5, 4),
        "partner": (1, 5),
        "public": (2, 5),
    }
    hidden = hide.apply(examples, noise, replace(DOMAIN, public=PUBLIC))
    places = (4 * noise["public"]).floor().long()
    assert len(places.unique()) > 2
    for b in range(5):
        other, c = int(noise["partner"][0, b]), noise["coefficient"][b]
        images = (examples.inputs[b], examples.inputs[other], PUBLIC[places[0, b]], PUBLIC[places[1, b]])
        scaled = sum(c[j] * (2 * (image - LOWER) / (UPPER - LOWER) - 1) for j, image in enumerate(images))
        label = torch.zeros(3, dtype=torch.float64)
        label[examples.targets[b]] += c[0]
        label[examples.targets[other]] += c[1]
        torch.testing.assert_close(hidden.inputs[b], LOWER + (UPPER - LOWER) * (noise["sign"][b] * scaled + 1) / 2)
        torch.testing.assert_close(hidden.targets[b], label)
    drawn = hide.noise(batch(1)).times(2000)["coefficient"].sample(Key(2))[:, 0]
    assert 0.3 <= float(drawn[:, :2].sum(1).min()) < 0.31
    assert float(drawn.max()) <= 0.65
    torch.testing.assert_close(drawn.sum(1), torch.ones(2000, dtype=torch.float64))


def test_every_public_image_is_as_likely():
    hide, blank = InstaHide(k=3, mix="public", cap=1.0), Batch(torch.zeros(1, 1, 1, 1), torch.zeros(1).long())
    domain = Domain(ImageSpace.between(-1, 1, (1, 1, 1)), 2, torch.arange(4.0).view(4, 1, 1, 1))
    alone = {**hide.noise(blank).neutral(), "coefficient": torch.tensor([[0.0, 0.0, 1.0]])}
    places = Uniform().sample((4000,), torch.float32, Key(3).generator())
    found = torch.stack([hide.apply(blank, {**alone, "public": u.view(1, 1)}, domain).inputs.view(()) for u in places])
    assert [abs(float((found == i).double().mean()) - 0.25) < 0.03 for i in range(4)] == [True] * 4
    last = hide.apply(blank, {**alone, "public": torch.ones(1, 1)}, domain).inputs
    assert float(last) == 3


def test_neutral_noise_mixes_nothing():
    examples = batch()
    for defence in (Mixup(1.0), InstaHide(3)):
        left = defence.apply(examples, defence.noise(examples).neutral(), DOMAIN)
        torch.testing.assert_close(left.inputs, examples.inputs)
        assert torch.equal(left.targets.argmax(1), examples.targets)


def test_laws_are_what_they_say():
    generator = Key(5).generator()
    drawn = Beta(0.4).sample((4000,), torch.float64, generator)
    assert kstest(drawn.numpy(), beta(0.4, 0.4).cdf).pvalue > 0.01
    shares = Shares(0.65).sample((2000, 4), torch.float64, generator)
    torch.testing.assert_close(shares.sum(1), torch.ones(2000, dtype=torch.float64))
    assert 0.6 < float(shares.max()) <= 0.65
    signs = Signs().sample((4000,), torch.float64, generator)
    assert set(signs.tolist()) == {-1.0, 1.0}
    assert abs(float(signs.mean())) < 0.05
    chosen = OneOf().sample((4000, 4), torch.float64, generator)
    assert torch.equal(chosen.sum(1), torch.ones(4000, dtype=torch.float64))
    assert bool(((chosen.mean(0) - 0.25).abs() < 0.03).all())


def test_priors_are_least_at_what_can_be_drawn():
    rows = torch.tensor([[0.3, 0.7], [0.3, 0.9]]).double()
    for law in (Shares(), OneOf()):
        assert law.penalty(rows)[0] < law.penalty(rows)[1]
    assert Signs().penalty(torch.tensor([[1.0, -1.0], [0.5, 1.0]])).tolist() == [0, 0.75]
    grid = torch.linspace(0.05, 0.95, 7, dtype=torch.float64).unsqueeze(1)
    found, density = Beta(0.4).penalty(grid), torch.from_numpy(beta(0.4, 0.4).logpdf(grid.squeeze(1).numpy()))
    torch.testing.assert_close(found - found[0], density[0] - density)
    assert torch.equal(Beta(0.4).penalty(grid.squeeze(1)), found)


def test_each_member_of_a_sum_mixes_its_own():
    alone, together = client("mixup(1)"), client("mixup(1)", members=2)
    examples = batch(6)
    noise = together.noise_spec(together.params(), examples).sample(Key(2))
    found = transformed_batch(together, examples, noise)
    for member in range(2):
        own = Batch(examples.inputs[3 * member : 3 * member + 3], examples.targets[3 * member : 3 * member + 3])
        expected = transformed_batch(alone, own, {name: value[member] for name, value in noise.items()})
        torch.testing.assert_close(found.inputs[3 * member : 3 * member + 3], expected.inputs)
        torch.testing.assert_close(found.targets[3 * member : 3 * member + 3], expected.targets)


def test_probabilities_are_softened_as_they_are():
    given = torch.tensor([[0.5, 0.25, 0.25, 0.0]])
    smoothed = LabelSmoothing(0.2).apply(Batch(torch.zeros(1, 1), given), {}, None)
    torch.testing.assert_close(smoothed.targets, 0.8 * given + 0.05)


def test_who_does_not_know_his_domain_is_told():
    examples = batch()
    with pytest.raises(GradveilError, match="how many classes"):
        LabelSmoothing(0.1).apply(examples, {}, None)
    with pytest.raises(GradveilError, match="which inputs are valid"):
        InstaHide().apply(examples, InstaHide().noise(examples).neutral(), None)
    with pytest.raises(GradveilError, match=r"at least 0\.29"):
        InstaHide(4, 0.25)


def test_public_images_that_are_not_there_are_told_before_anything_is_computed():
    examples = batch()
    defended = client("instahide(mix=public)")
    with pytest.raises(GradveilError, match="mixes with public images, and there are none"):
        defended.noise_spec(defended.params(), examples)
    knowing = replace(defended, domain=replace(DOMAIN, public=PUBLIC))
    noise = knowing.noise_spec(knowing.params(), examples).sample(Key(0))
    assert set(knowing.update(knowing.params(), examples, noise, {})[0]) == set(knowing.params())
    with pytest.raises(GradveilError, match="give at least 3, or leave mix out"):
        InstaHide(2, mix="public")


def test_a_naive_client_trains_on_the_raw_batch():
    defended, examples = client("instahide"), batch()
    naive = defended.undefended_update()
    assert transformed_batch(naive, examples, {}) is examples
    noise = defended.noise_spec(defended.params(), examples).sample(Key(0))
    assert not select(noise, "model")
    assert not torch.equal(transformed_batch(defended, examples, noise).inputs, examples.inputs)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"k": 4, "cap": 0.26}, "instahide.cap: is 0.26, which 4 coefficients that add up to 1 hardly ever keep"),
        ({"k": 3, "cap": 0.4, "least": 0.9}, "instahide.least: is 0.9, which two of 3 coefficients, none above 0.4,"),
        ({"k": 20, "least": 0.8}, "instahide.least: is 0.8"),
    ],
)
def test_coefficients_that_would_never_be_drawn_are_refused(settings, said: str):
    """They are drawn until they keep to their limits, which was for ever."""
    with pytest.raises(GradveilError, match=said):
        InstaHide(mix="public", **settings)
    InstaHide(k=10, cap=0.25)
    InstaHide(k=6, mix="public")
