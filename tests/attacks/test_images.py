"""Search spaces of images: pixels, a generator's weights or latent numbers, and custom generators."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from gradveil.attacks.attack_catalogue import ATTACKS, make_attack
from gradveil.attacks.inversion.descent import Descent
from gradveil.attacks.inversion.generators import Generator, draw_with, train_generator
from gradveil.attacks.inversion.image_sources import INPUTS, LATENT, TARGETS, WEIGHTS, Pixels, Trained, Untrained
from gradveil.attacks.inversion.inversion import Inversion
from gradveil.attacks.inversion.optimisers import Adam
from gradveil.attacks.inversion.problem import InversionProblem
from gradveil.attacks.knowledge import Known
from gradveil.core.errors import GradveilError
from gradveil.core.noise import Key
from gradveil.core.types import Batch
from gradveil.nn.initial_weights import initialise
from tests.attacks.small_experiments import tiny

PUBLIC = Batch(torch.rand(40, 1, 6, 6, generator=Key(3).generator()), torch.arange(40) % 4)
PRESETS = {
    "grnn": "grnn(width=2, latent=8, iterations=20, restarts=2)",
    "gias": "gias(width=2, latent=4, lessons=9, iterations=20, restarts=2)",
    "ggl": "ggl(width=2, latent=4, lessons=9, iterations=20, population=6)",
}


def run(attack, scene=None, plan=(), key=Key(0)):  # noqa: B008
    scene = scene or tiny()
    return attack([scene.observation], scene.client, replace(scene.knowledge, public=PUBLIC), key, None, plan)


def rows(attack, scene=None):
    scene = scene or tiny()
    return InversionProblem(attack, [scene.observation], scene.client, replace(scene.knowledge, public=PUBLIC), Key(0))


@pytest.mark.parametrize("name", PRESETS)
def test_images_do_not_depend_on_chunks(name):
    attack = make_attack(PRESETS[name])
    whole, again = run(attack), run(attack)
    assert torch.equal(whole.inputs, again.inputs)
    single = run(attack, plan=(attack.restarts,) * 3)
    torch.testing.assert_close(single.inputs, whole.inputs, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(single.objectives, whole.objectives, rtol=1e-6, atol=1e-9)
    for count, value in whole.trace.items():
        torch.testing.assert_close(single.trace[count], value, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(run(attack, key=Key(1)).inputs, whole.inputs, atol=1e-3)


@pytest.mark.parametrize("name", PRESETS)
def test_results_are_the_images_of_the_best_iterate(name):
    """The objective at them is the one that was reported, and those of the trace are worse the earlier they are."""
    scene, attack = tiny(), replace(make_attack(PRESETS[name]), tv=1e-3, labels="given")
    found = run(attack, scene)
    knowledge = replace(scene.knowledge, public=PUBLIC)

    def at(inputs):
        return attack.evaluate([scene.observation], scene.client, knowledge, Key(0), inputs, {})

    torch.testing.assert_close(at(found.inputs), found.objective, rtol=1e-6, atol=1e-9)
    assert list(found.trace) == [1, 2, 5, 10]
    assert bool((at(found.inputs) <= at(found.trace[1])).all())
    assert found.inputs.shape == scene.truth.inputs.shape
    assert 0 <= found.inputs.min() < found.inputs.max() <= 1


def test_trace_of_the_first_part_equals_an_earlier_end():
    attack = make_attack("gias(width=2, latent=4, lessons=9, iterations=32, restarts=1)")
    whole = run(attack)
    short = run(
        replace(attack, images=replace(attack.images, tuned=0.0), descent=replace(attack.descent, iterations=8))
    )
    assert torch.equal(whole.trace[8], short.inputs)


def test_rows_have_separate_weights():
    """Batched equals looped, with the normalisation of each row's own images."""
    network = Generator(5, (3, 11, 7), 2, "batch").double()
    own = [initialise(network, Key(0, (row,)).generator()).state_dict() for row in range(3)]
    own = [{name: value.clone() for name, value in weights.items()} for weights in own]
    for row in range(3):
        own[row] = {n: v.clone() for n, v in initialise(network, Key(0, (row,)).generator()).state_dict().items()}
    latent = torch.randn(3, 4, 5, generator=Key(1).generator(), dtype=torch.float64)
    together = draw_with(network, {name: torch.stack([weights[name] for weights in own]) for name in own[0]}, latent)
    assert together.shape == (3, 4, 3, 11, 7)
    for row in range(3):
        network.load_state_dict(own[row])
        torch.testing.assert_close(network(latent[row]), together[row])
    assert not torch.allclose(together[0], together[1])


@pytest.mark.parametrize(("size", "blocks"), [(1, 0), (4, 0), (5, 1), (8, 1), (28, 3), (33, 4)])
def test_images_are_the_centre_of_the_next_power_of_two(size, blocks):
    network = Generator(3, (1, size, 4), 1, "group")
    assert len(network.blocks) == blocks
    assert network(torch.zeros(2, 3)).shape == (2, 1, size, 4)


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_a_generator_may_have_any_width(norm):
    for width in range(1, 41):
        assert Generator(3, (1, 16, 16), width, norm)(torch.zeros(2, 3)).shape == (2, 1, 16, 16)


def test_untrained_generator_draws_the_labels_too():
    scene = rows(Inversion("a", images=Untrained(8, 2), labels="joint"))
    variables, constants = scene.start([0, 2])
    assert TARGETS not in variables
    images, logits = scene.drawing.draw(variables, constants)
    linear = variables[f"{WEIGHTS}.labels.weight"], variables[f"{WEIGHTS}.labels.bias"]
    expected = torch.einsum("nbz,nkz->nbk", constants[LATENT], linear[0]) + linear[1].unsqueeze(1)
    torch.testing.assert_close(logits, expected)
    assert f"{WEIGHTS}.labels.weight" not in rows(Inversion("a", images=Untrained(8, 2))).start([0])[0]
    shown = scene.results(variables, constants)
    assert list(shown) == [INPUTS, TARGETS], "weights are not kept"
    assert torch.equal(shown[INPUTS], images)


def test_pixels_are_their_own_images():
    scene = rows(Inversion("a"))
    variables, constants = scene.start([0, 1])
    assert scene.drawing.draw(variables, constants)[0] is variables[INPUTS]
    assert Inversion("a").images == Pixels()


def test_latent_penalty_is_weight_times_half_the_mean_square():
    plain, heavy = (rows(Inversion("a", images=Trained(4, 2, prior=prior))) for prior in (0.0, 0.6))
    variables, constants = plain.start(range(3))
    difference = heavy.loss(variables, constants, torch.arange(3), {}) - plain.loss(
        variables, constants, torch.arange(3), {}
    )
    torch.testing.assert_close(difference, 0.3 * variables[LATENT].square().mean((1, 2)))


def test_trained_generator_draws_images_like_the_training_data():
    """Images from new latent numbers are nearer to some training stripe than the mean image is."""
    place = torch.arange(120) % 6
    stripes = torch.zeros(120, 1, 8, 8)
    stripes[torch.arange(120), :, :, place] = 1.0
    network = train_generator(stripes, 4, 4, 500, Key(0))
    drawn = network(torch.randn(50, 4, generator=Key(1).generator()))
    nearest = (drawn.unsqueeze(1) - stripes[:6]).square().mean((2, 3, 4)).min(1).values
    blurred = (stripes.mean(0) - stripes[:6]).square().mean((1, 2, 3)).min()
    assert float(nearest.median()) < 0.5 * float(blurred)
    assert not any(value.requires_grad for value in network.parameters())


def test_second_part_starts_at_the_end_of_the_first():
    latent_only = make_attack("gias(width=2, latent=4, lessons=9, iterations=20, restarts=1, tuned=0)")
    tuned = make_attack("gias(width=2, latent=4, lessons=9, iterations=40, restarts=1, tuned=0.5, tuning=0.01)")
    short, long = run(latent_only), run(tuned)
    assert torch.equal(long.initial, short.initial)
    assert bool((long.objective < short.objective).all()), "weights explain what latent numbers cannot"
    assert long.iterations.tolist() == [40] * 3


def gias(**settings):
    return ATTACKS["gias"](**{"width": 2, "latent": 4, "lessons": 9, "restarts": 1, **settings})


def test_stalled_rows_enter_the_second_part():
    """The latent numbers of these steps do not change; the trace shows the start of the second part."""
    stalling = {"lr": 1e-9, "patience": 3, "report": 2}
    short, long = run(gias(iterations=20, tuned=0, **stalling)), run(gias(iterations=40, tuning=0.01, **stalling))
    assert short.status == ("stalled",) * 3
    assert short.iterations.tolist() == [4] * 3
    assert long.iterations.tolist() == [24] * 3
    assert bool((long.objective < short.objective).all())
    assert all(torch.equal(long.trace[count], short.inputs) for count in (5, 10, 20))


def test_keep_last_returns_the_second_part_even_if_worse():
    first, last = run(gias(iterations=9, tuned=0, keep="last")), run(gias(iterations=18, tuning=9.0, keep="last"))
    assert bool((last.objective > first.objective).all())


def test_latent_penalty_is_the_same_in_both_parts():
    first, both = run(gias(iterations=9, tuned=0, prior=5.0)), run(gias(iterations=18, tuning=1e-9, prior=5.0))
    torch.testing.assert_close(both.objective, first.objective, rtol=1e-5, atol=0)


class Blobs(nn.Module):
    """A custom generator with running statistics, dropout and trained weights."""

    def __init__(self, shape=(1, 6, 6), latent=3):
        super().__init__()
        self.shape = shape
        self.linear = nn.Linear(latent, 36 * shape[0])
        self.norm = nn.BatchNorm1d(36 * shape[0])
        self.off = nn.Dropout(0.5)

    def forward(self, latent):
        return self.off(self.norm(self.linear(latent))).sigmoid().unflatten(1, self.shape)


@pytest.mark.parametrize("way", ["module", "path"])
@pytest.mark.parametrize("name", ["gias", "ggl"])
def test_custom_generator_needs_no_public_images(way, name):
    torch.nn.init.normal_((module := Blobs()).linear.weight, generator=Key(2).generator())
    before = {n: v.clone() for n, v in module.state_dict().items()}
    attack = make_attack(f"{name}(iterations=12, latent=3)")
    generator = module if way == "module" else "tests.attacks.test_images:Blobs"
    attack = replace(attack, images=replace(attack.images, generator=generator))
    scene = tiny(dtype=torch.float32)
    found = attack([scene.observation], scene.client, scene.knowledge, Key(0))
    assert bool((found.objective < found.initial).all() if name == "gias" else torch.isfinite(found.objective).all())
    assert all(torch.equal(value, before[n]) for n, value in module.state_dict().items())


def test_generator_path_is_imported_at_the_first_call():
    attack = make_attack('ggl(generator="nowhere.at.all:Gan", latent=7)')
    assert "public" not in attack.knowledge
    with pytest.raises(GradveilError, match="there is no module 'nowhere'"):
        run(attack)


@pytest.mark.parametrize(
    ("generator", "message"),
    [
        (Blobs((3, 6, 6)), r"returns \(2, 3, 6, 6\) for \[2, 3\]"),
        (Blobs(latent=5), "the generator raised RuntimeError"),
        (
            nn.Sequential(Blobs(), nn.Hardtanh(3, 4)),
            "draws values from 3 to 3 -> return images with",
        ),
        (nn.Sequential(Blobs(), nn.Threshold(2.0, torch.nan)), "draws values from nan to nan"),
        ("tests.attacks.test_images:PUBLIC", "is Batch, not a module"),
    ],
)
def test_generators_of_other_images_raise(generator, message):
    with pytest.raises(GradveilError, match=message):
        run(Inversion("a", images=Trained(3, generator=generator)))


@pytest.mark.parametrize("name", ["gias", "ggl"])
def test_missing_public_images_raise(name):
    scene = tiny()
    with pytest.raises(GradveilError, match=r"^data: .*public images"):
        make_attack(name)([scene.observation], scene.client, scene.knowledge, Key(0))


def test_settings_of_pixels_raise_with_a_generator():
    with pytest.raises(GradveilError) as caught:
        Inversion("a", images=Untrained(), start="solved", langevin=0.1)
    assert [problem.where for problem in caught.value.problems] == ["a.start", "a.langevin"]
    for text in ("grnn(sign=soft)", "gias(start=uniform)", "ggl(restarts=4)"):
        with pytest.raises(GradveilError, match="unknown argument"):
            make_attack(text)


@pytest.mark.parametrize(
    ("name", "given", "settings"),
    [
        ("gias", {"generator": "a:b", "width": 4, "lessons": 9}, ["gias.lessons", "gias.width"]),
        ("ggl", {"generator": "a:b", "width": 4}, ["ggl.width"]),
        ("gias", {"tuned": 0, "tuning": 0.1}, ["gias.tuning"]),
    ],
)
def test_settings_without_effect_raise(name, given, settings):
    with pytest.raises(GradveilError) as caught:
        ATTACKS[name](**given)
    assert [problem.where for problem in caught.value.problems] == settings


def test_any_inversion_accepts_a_generator():
    """Joint labels, halving and the group prior work too."""
    attack = Inversion(
        "mine",
        images=Trained(4, 2, lessons=9, tuned=0.5),
        group=1e-3,
        restarts=4,
        labels="joint",
        descent=Descent(Adam(lr=0.05), iterations=32, halving=True, report=5),
        knowledge={"public": Known()},
    )
    found = run(attack)
    assert bool((found.objective < found.initial).all())
    assert bool(torch.isfinite(found.objectives).all())
