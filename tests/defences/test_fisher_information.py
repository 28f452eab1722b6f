"""The Fisher information of a noisy update equals that of exact Jacobians, or a reason says why it is unknown."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import laplace
from torch import nn
from torch.nn import functional as F

from gradveil.client import Client, Local
from gradveil.core.noise import Key
from gradveil.core.tree import select, squared_norm, tmap
from gradveil.core.types import Batch, Context, Domain, Stage, Transform
from gradveil.defences import Clip, Defence, Gaussian, chain, parse
from gradveil.defences.batch_defences import LabelSmoothing
from gradveil.defences.fisher_information import information, obstacle, sight
from gradveil.spaces import ImageSpace
from gradveil.theory.input_jacobian import jacobian
from tests.laws.cases import B, Tiny, draw_batch

PLAIN = Client(Tiny())
TRAINED = Client(Tiny(), local=Local(2, 0.3, steps=3, momentum=0.5))
BATCH = draw_batch(Key(0))
MEAN = torch.full((1, 8, 8), 0.5).double()
PROBES = torch.randn(3, *BATCH.inputs.shape, generator=Key(1).generator(), dtype=torch.float64)


def information_of(client: Client, batch: Batch = BATCH, probes: torch.Tensor = PROBES):
    params = client.params()
    noise = client.noise_spec(params, batch).sample(Key(2))
    return information(sight(client, len(batch.targets)), params, batch, noise, probes, MEAN)


def exact(clean: Client, batch: Batch = BATCH, probes: torch.Tensor = PROBES, params=None, **noise: torch.Tensor):
    """||J v||^2 from the whole Jacobian, and ||g(x) - g(mean)||^2."""
    params = params or clean.params()

    def gradient(examples: Batch):
        return clean.update(params, examples, noise, clean.init(params))[0]

    products = jacobian(gradient, batch) @ probes.flatten(1).mT
    away = tmap(torch.sub, gradient(batch), gradient(Batch(MEAN.expand_as(batch.inputs), batch.targets)))
    return products.square().sum(0), squared_norm(away)


@pytest.mark.parametrize(
    ("text", "clean", "variance", "normal"),
    [
        ("gaussian(0.1)", "none", 0.01, 0.01),
        ("gaussian(0.1) + laplace(0.002)", "none", 0.010004, 0.01),
        ("clip(0.3) + gaussian(0.1)", "clip(0.3)", 0.01, 0.01),
        ("user-dp(clip=0.3, sigma=2)", "clip(0.3)", 0.36, 0.36),
        ("dp(clip=0.3, sigma=2)", "clip-example(0.3)", (0.6 / B) ** 2, (0.6 / B) ** 2),
        ("dp(clip=0.3, sigma=2, on=mean)", "clip-example(0.3)", 0.36, 0.36),
        ("dp(clip=0.3, sigma=2) + prune(0.5) + user-dp", "clip-example(0.3)", (0.6 / B) ** 2, (0.6 / B) ** 2),
        ("gaussian(0.1) + quantise + prune(0.5, feedback=true)", "none", 0.01, 0.01),
    ],
)
def test_information_of_one_gradient_equals_the_formula(text, clean, variance, normal):
    result = information_of(parse(text)(PLAIN))
    squares, away = exact(parse(clean)(PLAIN))
    torch.testing.assert_close(result.along, squares / variance)
    torch.testing.assert_close(result.nats, away / (2 * normal))


def test_information_of_clamped_noise_is_that_of_the_entries_that_are_not_cut():
    bound = 0.02
    result = information_of(parse(f"clip(0.3) + gaussian(0.1, clamp={bound})")(PLAIN))
    unclamped = parse("clip(0.3)")(PLAIN)
    params = PLAIN.params()

    def cut(examples: Batch):
        return {n: v.clamp(-bound, bound) for n, v in unclamped.update(params, examples, {}, {})[0].items()}

    squares = (jacobian(cut, BATCH) @ PROBES.flatten(1).mT).square().sum(0)
    torch.testing.assert_close(result.along, squares / 0.01)
    assert bool((squares < exact(unclamped)[0]).all())
    away = tmap(torch.sub, cut(BATCH), cut(Batch(MEAN.expand_as(BATCH.inputs), BATCH.targets)))
    torch.testing.assert_close(result.nats, squared_norm(away) / 0.02)


@pytest.mark.parametrize(("text", "variance"), [("laplace(0.1)", 0.01), ("laplace(0.1) + gaussian(0.01)", 0.0101)])
def test_information_of_laplace_noise_equals_the_formula(text: str, variance: float):
    """The mutual information is at most the divergence of the noise at g(x) from that at g(mean), entry by entry."""
    result = information_of(parse(text)(PLAIN))
    squares, _ = exact(PLAIN)
    torch.testing.assert_close(result.along, squares / variance)
    g, centre = (
        PLAIN.update(PLAIN.params(), Batch(inputs, BATCH.targets), {}, {})[0]
        for inputs in (BATCH.inputs, MEAN.expand_as(BATCH.inputs))
    )
    moved = torch.cat([(value - centre[name]).flatten() for name, value in g.items()]).numpy()[:, None]
    law, y = laplace(scale=0.1), np.linspace(-2, 2, 8001)
    nats = (law.pdf(y) * (law.logpdf(y) - law.logpdf(y - moved))).sum() * (y[1] - y[0])
    assert float(result.nats) == pytest.approx(nats, rel=1e-4)


def test_information_of_a_sum_of_laplace_noises_is_an_obstacle():
    assert bool(information_of(parse("laplace(0.1)")(replace(PLAIN, members=2))).nats.isinf())


def test_information_decreases_with_members_of_a_sum():
    two = replace(PLAIN, members=2)
    result = information_of(parse("gaussian(0.1)")(two))
    squares, away = exact(two)
    torch.testing.assert_close(result.along, squares / (0.01 / 2))
    torch.testing.assert_close(result.nats, away / (0.01 / 2) / 2)


def test_information_of_noise_on_local_training_equals_the_formula():
    client = parse("gaussian(0.1)")(TRAINED)
    schedule = client.noise_spec(client.params(), BATCH).sample(Key(2))["schedule"]
    squares, _ = exact(TRAINED, schedule=schedule)
    torch.testing.assert_close(information_of(client).along, squares / 0.01)


def test_information_sums_over_noisy_steps():
    client = parse("dp(clip=0.3, sigma=2)")(TRAINED)
    params = client.params()
    noise = client.noise_spec(params, BATCH).sample(Key(2))
    total = nats = torch.zeros(()).double()
    clean = parse("clip-example(0.3)")(PLAIN)
    now, velocity = params, tmap(torch.zeros_like, params)
    for t, rows in enumerate(noise["schedule"]):
        chosen = Batch(BATCH.inputs[rows], BATCH.targets[rows])
        squares, away = exact(clean, chosen, PROBES[:, rows], now)
        total, nats = total + squares / 0.3**2, nats + away / (2 * 0.3**2)
        sent = clean.update(now, chosen, {}, {})[0]
        noisy = {n: value + 0.3 * select(noise, "step.noise")[n][t] for n, value in sent.items()}
        velocity = {n: noisy[n] + 0.5 * velocity[n] for n in noisy} if t else noisy
        now = {n: now[n] - 0.3 * velocity[n] for n in now}
    result = information_of(client)
    torch.testing.assert_close(result.along, total)
    torch.testing.assert_close(result.nats, nats)


@pytest.mark.parametrize("model", ["keylock", "cvb + dropout"])
def test_information_treats_model_noise_as_known(model):
    """A key is drawn once; masks and samples are drawn in every step, which has them in front."""
    client = parse(f"dp(clip=0.3, sigma=2) + {model}")(Client(Tiny(), local=Local(B, 0.3, steps=1)))
    noise = client.noise_spec(client.params(), BATCH).sample(Key(2))
    rows = noise["schedule"][0]
    drawn = {n: v if model == "keylock" else v[0] for n, v in noise.items() if n.startswith("model.")}
    assert drawn
    clean = parse(f"clip-example(0.3) + {model}")(PLAIN)
    squares, away = exact(
        clean, Batch(BATCH.inputs[rows], BATCH.targets[rows]), PROBES[:, rows], client.params(), **drawn
    )
    result = information_of(client)
    torch.testing.assert_close(result.along, squares / (0.6 / B) ** 2)
    torch.testing.assert_close(result.nats, away / (0.6 / B) ** 2 / 2)


class Functional(nn.Module):
    """A network whose ReLU no list of layers shows; so wide that every small step makes some unit jump."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(64, 5000).double(), nn.Linear(5000, 3).double()
        generator = Key(0).generator()
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -0.1, 0.1, generator=generator)

    def forward(self, x):
        return self.outer(F.relu(self.inner(x.flatten(1))))


def test_information_of_a_discontinuous_gradient_is_an_obstacle():
    listed = nn.Sequential(nn.Flatten(), nn.Linear(64, 3), nn.ReLU(), nn.Linear(3, 3)).double()
    for model in (listed, Functional()):
        result = information_of(parse("gaussian(0.1)")(Client(model)))
        assert bool(result.along.isnan().all())
        assert float(result.nats) > 0


@pytest.mark.parametrize(
    "text", ["gaussian(0.1)", "dp(clip=1, sigma=1) + cvb + dropout + prune(0.5)", "laplace(1) + clip(1)"]
)
def test_information_of_supported_defences_has_no_obstacle(text):
    assert obstacle(parse(text)(PLAIN), BATCH) is None


MIXING = ["label-smoothing(0.3)", "mixup", "instahide(k=2)"]
FRAMED = replace(PLAIN, domain=Domain(ImageSpace((1, 8, 8)), 3))


@pytest.mark.parametrize("text", MIXING)
def test_information_of_a_mixture_uses_its_coefficients(text):
    client = parse(f"{text} + gaussian(0.1)")(FRAMED)
    assert obstacle(client, BATCH) is None
    noise = client.noise_spec(client.params(), BATCH).sample(Key(2))
    squares, away = exact(parse(text)(FRAMED), **{n: v for n, v in noise.items() if n.startswith("batch.")})
    plain, _ = exact(FRAMED)
    result = information_of(client)
    torch.testing.assert_close(result.along, squares / 0.01)
    torch.testing.assert_close(result.nats, away / 0.02)
    assert not torch.allclose(squares, plain)


def test_information_of_some_mixtures_is_an_obstacle():
    """Steps of one value have no derivative; mixtures of the epochs are not followed through noisy steps."""
    assert "no derivative" in (obstacle(parse("ats + gaussian(0.1)")(FRAMED), BATCH) or "")
    examples = Defence("own", batch=(type("Own", (LabelSmoothing,), {"smooth": False})(0.1),)) + parse("gaussian(0.1)")
    assert "Own changes the batch and does not declare (smooth = True)" in (obstacle(examples(FRAMED), BATCH) or "")
    trained = replace(FRAMED, local=TRAINED.local)
    assert "mixed at random" in (obstacle(parse("mixup + dp(sigma=1)")(trained), BATCH) or "")
    for text in ("mixup + gaussian(1)", "label-smoothing + dp(sigma=1)"):
        client = parse(text)(trained)
        assert obstacle(client, BATCH) is None
        assert bool(torch.isfinite(information_of(client).along).all())


class Odd(Transform):
    """Something before the noise."""

    stage = Stage.CLIP

    def apply(self, update, state, noise, context: Context):
        return update, state


@pytest.mark.parametrize(
    ("defence", "message"),
    [
        ("none", "no noise is added"),
        ("prune(0.9)", "no noise is added"),
        ("dp(sigma=0)", "no noise is added"),
        ("optimal-noise(0.1)", "no noise is added"),
        ("gaussian(0.1) + optimal-prune(0.5)", "'prune' uses the data again"),
        (Defence("odd", send=chain(odd=Odd(), noise=Gaussian(1.0))), "'odd' comes before the noise"),
        (Defence("odd", step=chain(odd=Odd()), send=chain(clip=Clip(1.0), noise=Gaussian(1.0))), "'odd' comes before"),
    ],
)
def test_information_obstacles_name_their_reason(defence, message):
    built = parse(defence) if isinstance(defence, str) else defence
    assert message in (obstacle(built(PLAIN), BATCH) or "")


def test_information_of_summed_noisy_local_training_is_an_obstacle():
    pair = replace(TRAINED, members=2)
    assert "are summed" in (obstacle(parse("dp(sigma=1)")(pair), BATCH) or "")
    assert obstacle(parse("user-dp")(pair), BATCH) is None


def test_information_with_a_lock_trained_between_steps_is_an_obstacle():
    assert "trained between noisy steps" in (obstacle(parse("dp(sigma=1) + keylock(width=4)")(TRAINED), BATCH) or "")
    for text, client in (("dp(sigma=1) + keylock(width=4)", PLAIN), ("user-dp + keylock(width=4)", TRAINED)):
        assert obstacle(parse(text)(client), BATCH) is None
