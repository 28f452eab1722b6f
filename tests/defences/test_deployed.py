"""Deployed clients: neighbours stay near, and what is sent shows nothing of what the noise was added to."""

import math
from threading import Lock

import pytest
import torch
from scipy import stats
from torch import nn

from gradveil.client import Client, Local, drawn_update, scheduled
from gradveil.core.errors import GradveilError
from gradveil.core.noise import Key
from gradveil.core.secure_noise import Rounded, SecretKey
from gradveil.core.types import Batch, Context
from gradveil.defences import chain, parse
from gradveil.defences.additive_noise import Gaussian
from gradveil.defences.composition import Defence
from gradveil.defences.deployed_noise import SLACK, ExactClip, Grid, LatticeGaussian, deployed
from tests.defences.custom_stages import Faint

EXAMPLES = Batch(torch.linspace(-2, 2, 32).reshape(8, 4).sin(), torch.arange(8) % 3)


def client(text, **settings):
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    for i, parameter in enumerate(net.parameters()):
        nn.init.normal_(parameter.data, generator=Key(i).generator())
    return parse(text)(Client(net, **settings))


def stages(client):
    return [stage for slot in (client.step, client.send) if slot for _, stage in slot]


def silent(own, params, batch, **noise):
    """An update with its noise off, in float64: on a grid, zero steps are none."""
    once = own.noise_spec(params, batch).neutral() | noise
    return torch.cat([value.flatten() for value in own.update(params, batch, once, own.init(params))[0].values()])


@pytest.mark.parametrize(
    ("text", "local"),
    [
        ("dp(clip=0.3, sigma=1)", None),
        ("dp(clip=0.3, sigma=1)", Local(batch=4, lr=0.1, steps=2)),
        ("dp(clip=0.3, sigma=1)", Local(batch=4, lr=0.1, steps=2, sampling="poisson")),
        ("fed-cdp(clip=0.1, sigma=1)", None),
        ("user-dp(clip=0.3, sigma=1)", Local(batch=4, lr=0.1, epochs=1)),
    ],
)
def test_but_for_the_grid_it_is_the_simulated_client(text, local):
    """The same clips and sums, though examples are taken one at a time: each entry is less than a step away."""
    own = client(text, local=local)
    placed = deployed(own, EXAMPLES)
    assert placed.without is None
    (grid,) = [stage.grid for stage in stages(placed.client) if isinstance(stage, LatticeGaussian)]
    inclusion = {}
    if local and local.sampling == "poisson":
        inclusion = {"inclusion": torch.tensor([[1.0, 0, 1, 1, 0, 0, 0, 1], [0.0] * 8])}
    found, plain = (silent(each, own.params(), EXAMPLES, **inclusion) for each in (placed.client, own))
    assert plain.any()
    assert (found - plain).abs().max() <= 0.51 * grid.step + 1e-7


@pytest.mark.parametrize(
    ("text", "bound"),
    [
        ("dp(clip=0.3, sigma=1)", 0.3 / 8),
        ("fed-cdp(clip=0.1, sigma=1)", 0.1 * 2 / 8),
        ("user-dp(clip=0.3, sigma=1)", 0.3),
    ],
)
def test_neighbours_stay_within_what_is_accounted_for(text, bound):
    """One example (or all of them) is replaced: by absurd pixels, by none, by its own opposite, by something close.

    The accounting of a replaced unit takes twice the bound; the noise covers `SLACK` more.
    """
    own = client(text)
    net = deployed(own, EXAMPLES).client
    base = silent(net, own.params(), EXAMPLES)
    far = 0.0
    for value in (1e30, -1e30, math.inf, math.nan, 0.0, 3.4e38, 1e-30, 100.0):
        for label in (0, 1, 2):
            inputs, targets = EXAMPLES.inputs.clone(), EXAMPLES.targets.clone()
            place = slice(None) if text.startswith("user") else 3
            inputs[place], targets[place] = value, label
            moved = silent(net, own.params(), Batch(inputs, targets)) - base
            assert moved.norm() <= 2 * bound * (1 + SLACK)
            far = max(far, moved.norm().item())
    assert far > bound, "the bound is not merely loose"


class Centred(nn.Module):
    """Takes the mean of the batch off: one example reaches the outputs of all."""

    def forward(self, x):
        return x - x.mean(0, keepdim=True)


class Neighbour(nn.Module):
    """Adds the example before, where the weights are large enough."""

    def __init__(self):
        super().__init__()
        self.switch = nn.Parameter(torch.zeros(4))

    def forward(self, x):
        return x + torch.relu(self.switch - 10) * x.roll(1, 0)


MIXING = {
    "a mean over the batch": (Centred(), nn.CrossEntropyLoss()),
    "its neighbour, at some weights": (Neighbour(), nn.CrossEntropyLoss()),
    "a loss weighted by class": (nn.Identity(), nn.CrossEntropyLoss(weight=torch.tensor([1.0, 1e3, 1.0]))),
}


@pytest.mark.parametrize("case", MIXING)
@pytest.mark.parametrize("before", [None, 0.1, math.nan, 3e38])
@pytest.mark.parametrize("local", [None, Local(batch=8, lr=1.0, epochs=1)])
def test_examples_that_meet_in_a_forward_pass_or_a_loss_are_clipped_each_alone(case, before, local):
    """Whatever weights came first: an example's gradient is computed without the others, so it cannot reach theirs."""
    mixing, loss = MIXING[case]
    model, alike = nn.Sequential(mixing, nn.Linear(4, 3)), torch.zeros(8, dtype=torch.long)
    net = deployed(parse("dp(clip=0.1, sigma=1)")(Client(model, loss, local=local)), EXAMPLES).client
    params = {name: torch.full_like(value, 20.0 if "switch" in name else 0.1) for name, value in net.params().items()}
    if before is not None:
        poisoned = {name: torch.full_like(value, before) for name, value in params.items()}
        silent(net, poisoned, Batch(EXAMPLES.inputs, alike))
    base = silent(net, params, Batch(EXAMPLES.inputs, alike))
    for value, label in ((1e3, 1), (-3.0, 1), (0.0, 2), (math.nan, 0)):
        inputs, targets = EXAMPLES.inputs.clone(), alike.clone()
        inputs[3], targets[3] = value, label
        moved = silent(net, params, Batch(inputs, targets)) - base
        assert moved.norm() <= 2 * 0.1 / 8 * (1 + SLACK)


def test_rounding_tells_of_no_other_example_and_not_how_many_there_are():
    """Weights whose large parts cancel make rounding as large as the gradient: it has to be the same in any company."""
    draw = Key(0).generator()
    inputs = torch.rand(40, 300, generator=draw)
    basis = torch.linalg.qr(inputs.T.double())[0]
    large = torch.randn(64, 300, generator=draw, dtype=torch.float64) * 1e8
    model = nn.Sequential(nn.Linear(300, 64), nn.Tanh(), nn.Linear(64, 4))
    own = parse("dp(clip=1, sigma=1)")(Client(model, local=Local(batch=1, lr=1.0, steps=1, sampling="poisson")))
    params = own.params() | {"0.weight": (large - large @ basis @ basis.T).float()}
    labels = torch.arange(40) % 4
    for size in (2, 3, 5, 9, 17):
        found = []
        for some in (slice(size), slice(size - 1), slice(1, size)):
            each = Batch(inputs[some], labels[some])
            net = deployed(own, each).client
            found.append(silent(net, params, each, inclusion=torch.ones(1, len(each.targets))))
        assert max((found[0] - less).norm() for less in found[1:]) <= 1 + SLACK


class Remembering(nn.Module):
    """Adds what it was given last, as a recurrent model does that keeps its state from call to call."""

    def __init__(self):
        super().__init__()
        self.layer, self.last = nn.Linear(4, 3), None

    def forward(self, x):
        own = x if self.last is None else x + self.last
        self.last = own.detach()
        return self.layer(own)


class Relative:
    """A loss over the running mean of the losses before it."""

    def __init__(self):
        self.mean = None

    def __call__(self, outputs, targets):
        value = nn.functional.cross_entropy(outputs, targets)
        self.mean = value.detach() if self.mean is None else 0.99 * self.mean + 0.01 * value.detach()
        return value / self.mean


KEEPING = {
    "a model with a state": (Remembering, nn.CrossEntropyLoss),
    "a loss with a mean": (lambda: nn.Linear(4, 3), Relative),
}


@pytest.mark.parametrize("case", KEEPING)
@pytest.mark.parametrize("local", [None, Local(batch=8, lr=1.0, epochs=1)])
def test_what_a_model_or_a_loss_keeps_of_an_example_reaches_no_other_one(case, local):
    """Neither in its round nor in the next one: a copy sees each example."""
    model, loss = (make() for make in KEEPING[case])
    net = deployed(parse("dp(clip=0.1, sigma=1)")(Client(model, loss, local=local)), EXAMPLES).client
    params = {name: torch.linspace(-1, 1, value.numel()).view_as(value) for name, value in net.params().items()}
    base = silent(net, params, EXAMPLES)
    assert base.any()
    inputs = EXAMPLES.inputs.clone()
    inputs[0] = 1e3
    moved = silent(net, params, Batch(inputs, EXAMPLES.targets)) - base
    assert moved.norm() <= 2 * 0.1 / 8 * (1 + SLACK)
    assert torch.equal(silent(net, params, EXAMPLES), base)


def test_a_model_that_cannot_be_copied_is_refused():
    model = nn.Linear(4, 3)
    model.lock = Lock()
    with pytest.raises(GradveilError, match="cannot be copied"):
        deployed(parse("dp(clip=0.1, sigma=1)")(Client(model)), EXAMPLES)


def test_nothing_is_rounded_between_a_clip_of_each_gradient_and_noise_on_what_is_sent(monkeypatch):
    """In half precision the mean would be: an example of 512 could move every entry of it by a step."""
    size, entries = 512, 64
    model = nn.Linear(entries, 1, bias=False).half()
    own = Client(model, lambda outputs, _: outputs.sum())  # an example is its own gradient
    net = deployed(parse(f"clip-example(1) + gaussian({1 / size})")(own), EXAMPLES).client
    low = torch.full((entries,), 0.1).half()
    inputs = torch.stack([low, low.nextafter(low + 1)]).repeat(size // 2, 1)  # the mean lies between two numbers
    reached = []

    def seen(_self, g, *_):
        reached.append(g["weight"].double())
        return g, {}

    monkeypatch.setattr(LatticeGaussian, "apply", seen)
    for value in (0.09, 0.11):
        inputs[0] = value
        silent(net, net.params(), Batch(inputs.clone(), torch.zeros(size, dtype=torch.long)))
    far = 0.02 * math.sqrt(entries) / size
    assert (reached[0] - reached[1]).norm() <= far * (1 + SLACK)


class Counting(nn.Module):
    """Counts how often it is asked, its copies too."""

    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Linear(4, 3), 0

    def __deepcopy__(self, memo):
        return self

    def forward(self, x):
        self.calls += 1
        return self.layer(x)


@pytest.mark.parametrize("value", [math.nan, None])
@pytest.mark.parametrize("local", [None, Local(batch=8, lr=1.0, steps=1)])
def test_an_example_that_fails_counts_as_a_gradient_of_zeros(value, local, caplog):
    """By a label that the model has no class for, or by a gradient that is no number: the others' stay as they are."""
    net = deployed(client("dp(clip=0.1, sigma=1)", local=local), EXAMPLES).client
    inputs, targets = EXAMPLES.inputs.clone(), EXAMPLES.targets.clone()
    inputs[3], targets[3] = (value, 0) if value else (0.0, 77)
    schedule = {"schedule": torch.arange(8).reshape(1, 8)} if local else {}
    found = silent(net, net.params(), Batch(inputs, targets), **schedule)
    rest = Batch(*(torch.cat([part[:3], part[4:]]) for part in EXAMPLES))
    few = deployed(client("dp(clip=0.1, sigma=1)"), rest).client
    expected = silent(few, few.params(), rest) * 7 / 8
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert found.any()
    assert "an example's gradient" in caplog.text


def test_who_is_not_drawn_is_not_computed():
    local = Local(batch=2, lr=1.0, steps=1, sampling="poisson")
    model = Counting()
    net = deployed(parse("dp(clip=0.1, sigma=1)")(Client(model, local=local)), EXAMPLES).client
    model.calls = 0
    silent(net, net.params(), EXAMPLES, inclusion=torch.tensor([[0.0, 1, 0, 0, 1, 0, 0, 1]]))
    assert model.calls == 3


@pytest.mark.parametrize("entries", [3, 1000, 100_000])
def test_rounding_brings_no_two_vectors_further_apart_than_the_slack(entries):
    """Vectors at the middle between two points of the grid, moved by C: each entry may round away from the other."""
    bound = 0.37
    grid = Grid.of(bound, entries)
    assert grid.step * math.sqrt(entries) <= bound * SLACK / 2
    assert 2 ** round(math.log2(grid.step)) == grid.step
    stage = LatticeGaussian(1.0, grid=grid)
    params = {"w": torch.zeros(entries, dtype=torch.float64)}
    noise = {"w": torch.zeros(entries, dtype=torch.int64)}
    context = Context(params, EXAMPLES)
    draw = Key(entries).generator()
    for place in (0.5, 0.5 - 1e-6, 0.25):
        steps = torch.randint(-500, 500, (entries,), generator=draw) + place
        one = steps * grid.step
        other = one + bound * torch.sign(torch.randn(entries, generator=draw)) / math.sqrt(entries)
        apart = (
            stage.apply({"w": one}, {}, noise, context)[0]["w"] - stage.apply({"w": other}, {}, noise, context)[0]["w"]
        )
        assert apart.norm() <= bound * (1 + SLACK / 2)


def test_what_proves_nothing_stays_as_it_is():
    for text in ("topk(0.1)", "gaussian(0.1)", "clip(1) + laplace(0.1)", "clip(1) + prune(0.5)", "clip-example(1)"):
        own = client(text)
        assert deployed(own, EXAMPLES).client is own
    stranger = Defence("mine", send=chain(clip=ExactClip(1.0), noise=Faint(1.0)))(client("none"))
    assert deployed(stranger, EXAMPLES).client is stranger


def test_noises_that_follow_each_other_are_drawn_as_one():
    """Their variances add up; two roundings one after the other would be no function of the sum of the two noises."""
    net = deployed(client("clip-example(1) + gaussian(0.3) + gaussian(0.4)"), EXAMPLES).client
    one, other = (stage for stage in stages(net) if isinstance(stage, Gaussian))
    assert isinstance(one, LatticeGaussian)
    assert one.std == pytest.approx(0.5)
    assert other == Gaussian(0.0)
    assert one.noise({"w": torch.zeros(2)})["w"].law == Rounded(one.grid.scale(0.5))


def test_each_noise_of_two_mechanisms_has_a_grid_of_its_own():
    net = deployed(client("dp(clip=1, sigma=1) + user-dp(clip=2, sigma=0.5)"), EXAMPLES).client
    clip, first, second_clip, second = stages(net)
    assert isinstance(clip, ExactClip)
    assert isinstance(second_clip, ExactClip)
    assert (first.std, second.std) == (1 / 8, 1.0)
    entries = sum(value.numel() for value in net.params().values())
    assert (first.grid, second.grid) == (Grid.of(1 / 8, entries), Grid.of(2.0, entries))


def test_a_clip_that_shrinks_has_the_grid_of_its_round():
    own = client("fed-cdp(clip=1, sigma=1, decay=0.5)")
    first, third = (stages(deployed(scheduled(own, number), EXAMPLES).client)[1] for number in (0, 2))
    assert third.std == first.std / 4
    assert third.grid.step == first.grid.step / 4
    assert third.noise(own.params()) == first.noise(own.params())


def test_other_noise_between_clip_and_grid_is_said_to_prove_nothing():
    """A sum with floating point numbers is rounded before the grid: by how much depends on the update."""
    found = deployed(client("clip(1) + laplace(0.1) + gaussian(0.5)"), EXAMPLES)
    assert found.without == "noise in floating point ('noise') comes before the noise that counts"


def test_the_noise_is_as_large_as_the_simulated_one_and_the_slack_more():
    own = client("dp(clip=1, sigma=2)")
    net, params = deployed(own, EXAMPLES).client, own.params()
    centre, sent = silent(net, params, EXAMPLES), []
    with torch.no_grad():
        for _ in range(200):
            update, _ = drawn_update(net, params, EXAMPLES, SecretKey(), own.init(params))
            sent.append(torch.cat([value.flatten() for value in update.values()]) - centre)
    values = torch.stack(sent).flatten()
    std = 2 / 8 * (1 + SLACK)
    assert stats.kstest(values.numpy() / std, "norm").pvalue > 1e-5
    assert abs(values.var().item() / std**2 - 1) <= 4 * math.sqrt(2 / len(values))


ENTRIES = 1_000_000
STD = 1.0


def on_the_lattice(sent: torch.Tensor, believed: torch.Tensor, std: float) -> list[bool]:
    """Which pairs of the tail would have been drawn by torch's normal numbers, if `believed` is the update.

    Those are sqrt(-2 ln(1 - u)) (cos v, sin v), eight places apart, for a u of 24 bits: exp(-r^2 / 2) is a multiple of
    2^-24, which shows where it is small.
    """
    z = ((sent.double() - believed.double()) / std)[: len(sent) // 16 * 16].view(-1, 2, 8)
    steps = torch.exp(-z.square().sum(1) / 2).flatten() * 2**24
    tail = steps[(steps < 2000) & (steps > 3)]
    return ((tail - tail.round()).abs() < 0.05).tolist()


def sent_and_neighbours(stage, key):
    """What a stage sends of a true update of norm 1, and that update, and a neighbour of it."""
    draw = Key(0).generator()
    true, other = (torch.randn(ENTRIES, generator=draw) / math.sqrt(ENTRIES) for _ in range(2))
    noise = stage.noise({"w": true}).sample(key)
    return stage.apply({"w": true}, {}, noise, Context({"w": true}, EXAMPLES))[0]["w"], true, other


def test_floating_point_noise_tells_the_true_update_from_a_neighbour():
    """The control: what simulations add must not leave a client."""
    sent, true, other = sent_and_neighbours(Gaussian(STD), Key(1))
    right, wrong = on_the_lattice(sent, true, STD), on_the_lattice(sent, other, STD)
    assert min(len(right), len(wrong)) > 40
    assert sum(right) > 0.9 * len(right)
    assert sum(wrong) < 0.3 * len(wrong)


def test_noise_on_the_grid_tells_nothing_of_which_update_it_was_added_to():
    """The same search finds as much for a neighbour, and all that is sent are whole steps, whatever was rounded."""
    grid = Grid.of(1.0, ENTRIES)
    sent, true, other = sent_and_neighbours(LatticeGaussian(STD, grid=grid), SecretKey())
    for std in (STD, STD * (1 + SLACK)):
        right, wrong = on_the_lattice(sent, true, std), on_the_lattice(sent, other, std)
        assert min(len(right), len(wrong)) > 40
        assert stats.fisher_exact([[sum(each), len(each) - sum(each)] for each in (right, wrong)]).pvalue > 1e-4
    steps = sent.double() / grid.step
    assert torch.equal(steps, steps.round())
