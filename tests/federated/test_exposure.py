"""A client's look at its own update: crafted models raise an alarm, honest ones and defences that hide do not."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradveil.client import Client, ClientTask, Local, drawn_update, first_gradient
from gradveil.core.errors import GradveilError
from gradveil.core.noise import Key
from gradveil.core.types import Batch, Domain
from gradveil.data import Dataset, load
from gradveil.defences import parse
from gradveil.federated import separated_examples
from gradveil.federated.isolated_examples import Owned, difference, partners, solved
from gradveil.federated.model_inspection import inspect
from gradveil.federated.separated_examples import separable, separated_from
from gradveil.federated.update_inspection import ALLOWED, Exposure, exposure, guarded_update
from gradveil.gradients.objective import example_gradients
from gradveil.nn.models import build
from gradveil.nn.normalisation import BatchStatistics
from gradveil.spaces import ImageSpace
from tests.federated.honest_models import HONEST, UNSCALED, batches, initialised, large_steps, trained
from tests.federated.malicious_models import (
    CRAFTED,
    PRIVATE,
    PUBLIC,
    Crafted,
    Net,
    faint,
    fishing,
    gradient,
    leaky,
    linear,
    outputs,
    pencil,
    perceptron,
    quantile,
    reconstructed,
    silent,
    trap_without_biases,
    unscaled,
)

LOOSE = {"norm_bias": 0.1, "batch_norm_bias": 0.2}
"""Norms mix a layer's errors: what is read is near the image, and the same share of the variance off no other one."""
UNSEEN_IN_WEIGHTS = {"some_quantiles", "norm_bias", "running_mean", "split", "pencil", "faint"}
"""What the inspection of weights does not find."""
QUICK = (
    *("mlp", "mlp, orthogonal", "mlp, layer norm", "mlp, 5 epochs", "cnn, group norm"),
    *("lenet", "resnet, zero convolutions", "vit", "lora", "pruned rows", "binary cnn"),
    *("mlp, leaky", "wide mlp, 5 epochs, leaky"),
)


@cache
def patches() -> Dataset:
    return load("patches").public


@pytest.mark.parametrize("local", [None, Local(batch=8, lr=0.05, epochs=1)])
def test_a_batch_that_can_be_unmixed_is_a_leak_of_the_first_layer(local: Local | None) -> None:
    """No row of an honest perceptron's gradient shows one image, but all of them together do."""
    public = patches()
    batch, other = (Batch(public.inputs[i : i + 24], public.targets[i : i + 24]) for i in (0, 24))
    net = build("mlp", channels=3, size=32, classes=len(public.classes), generator=Key(0).generator())
    client = Client(net, local=local)
    sent, _ = drawn_update(client, client.params(), *ClientTask(batch, Key(0), {}))
    shown = exposure(client, client.params(), batch, sent)
    assert shown.unmixed >= 18
    leak = shown.leak(0.9 if local is None else ALLOWED)
    assert leak is None if local is None else leak is not None and leak.where == "update.body.layer0.linear"
    assert f"{shown.unmixed} examples" in str(shown.leak())
    assert len(separated_from(net, other.inputs, sent)[1]) <= 4  # smooth patches are alike
    noisy = {name: value + 10 * value.std() * torch.randn_like(value) for name, value in sent.items()}
    assert separated_from(net, batch.inputs, noisy)[1] == frozenset()


class SecondLayerFirst(torch.nn.Module):
    """A perceptron whose second layer is defined first."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.body = torch.nn.Linear(64, 5), torch.nn.Linear(3072, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x.flatten(1)).relu())


@pytest.mark.parametrize("case", ["head first", "kernel", "flat", "no channel", "averaged", "wide"])
def test_a_leak_by_unmixing_is_seen_however_the_first_layer_takes_the_images(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    public = patches()
    images, targets = public.inputs[:12], public.targets[:12] % 5
    torch.manual_seed(0)
    values = {"no channel": 1024, "averaged": 768}.get(case, 3072)
    first = torch.nn.Conv2d(3, 64, 32) if case == "kernel" else torch.nn.Linear(values, 64)
    before = [torch.nn.AvgPool2d(2)] if case == "averaged" else []
    before += [] if case == "kernel" else [torch.nn.Flatten()]
    net = torch.nn.Sequential(*before, first, torch.nn.Flatten(), torch.nn.ReLU(), torch.nn.Linear(64, 5))
    if case == "wide":  # all 64 rows cost too much, their combinations do not
        monkeypatch.setattr(separated_examples, "_COST", 100 * 2 * 12**2 * 9216 + 63**2 * 3135)
    inputs = images.flatten(1) if case == "flat" else images.mean(1) if case == "no channel" else images
    client = Client(SecondLayerFirst() if case == "head first" else net)
    sent, _ = drawn_update(client, client.params(), *ClientTask(Batch(inputs, targets), Key(0), {}))
    assert len(separated_from(client.model, inputs, sent)[1]) >= 6


def test_a_separation_that_would_take_long_is_not_made() -> None:
    assert separable(torch.empty(512, 3072), 64, (3, 32, 32))
    many, few, wide = ((512, 3072), 65, (3, 32, 32)), ((8, 3072), 8, (3, 32, 32)), ((9000, 9000), 32, (9000,))
    for rows, examples, shape in (many, few, wide):
        assert not separable(torch.empty(rows), examples, shape)


def some(count: int, start: int = 0) -> Batch:
    return Batch(PRIVATE.inputs[start : start + count], PRIVATE.targets[start : start + count])


def shown(net: nn.Module, batch: Batch, text: str = "none", previous: Mapping[str, Tensor] | None = None) -> Exposure:
    client = parse(text)(Client(net))
    params = client.params()
    task = ClientTask(batch, Key(1), client.init(params))
    with torch.no_grad():
        sent, _ = drawn_update(client, params, *task)
    return exposure(client, params, batch, sent, previous, first_gradient(client, params, task))


@pytest.fixture(scope="module", params=CRAFTED)
def made(request: pytest.FixtureRequest) -> Crafted:
    return CRAFTED[request.param](32)


def name_of(request: pytest.FixtureRequest) -> str:
    return request.node.callspec.params["made"]


def test_exposure_of_a_crafted_model_reveals_examples(made, request) -> None:
    batch, most = some(32), LOOSE.get(name_of(request), 0.05)
    update = gradient(made.model, batch)
    count = reconstructed(made, update, batch, most)
    assert count >= 13
    assert count > reconstructed(made._replace(model=made.honest), gradient(made.honest, batch), batch, most)
    assert reconstructed(made, update, some(32, 300), most) <= 2, "nothing is read of images that are not in the update"


def test_guarded_update_of_a_crafted_model_raises(made) -> None:
    exposed = shown(made.model, some(32))
    assert exposed.malice
    with pytest.raises(GradveilError, match=r"malice: .* -> do not send it"):
        guarded_update(exposed, "refuse", "ignore", lambda finding: None)


def test_exposure_with_the_same_crafted_model_before_is_malice(made) -> None:
    before = dict(made.model.state_dict())
    assert shown(made.model, some(32), previous=before).malice
    assert shown(made.model, some(32), previous=dict(made.honest.state_dict())).malice


def test_inspect_finds_most_crafted_models(made, request) -> None:
    seen = {finding.family for finding in inspect(made.model, dict(made.model.state_dict()))}
    assert bool(seen) is (name_of(request) not in UNSEEN_IN_WEIGHTS)
    assert not {finding.family for finding in inspect(made.honest, dict(made.honest.state_dict()))}


@pytest.mark.parametrize("name", QUICK)
def test_exposure_of_an_honest_model_is_no_malice(name: str) -> None:
    net = HONEST[name]()
    assert inspect(net, dict(net.state_dict())) == inspect(None, dict(net.state_dict())) == []
    for batch in batches(PRIVATE, (8, 24, 64)):
        client = Client(net)
        exposed = exposure(client, client.params(), batch, gradient(net, batch))
        assert not exposed.malice, exposed.malice


@pytest.mark.parametrize("name", UNSCALED)
def test_exposure_of_unscaled_inputs_behind_batchnorm_is_no_malice(name: str) -> None:
    """A norm of the batch hands errors on to examples of which the model is sure, and has next to none of its own."""
    net = UNSCALED[name]()
    for start in (0, 300):
        for size in (20, 64):
            assert not shown(net, unscaled(some(size, start))).malice


def test_exposure_of_large_steps_on_unscaled_inputs_is_seldom_malice() -> None:
    """A false alarm that is known: docs/explanation/server-inspection.md names it."""
    net = large_steps()
    sizes = [(size, start) for start in (0, 300) for size in (20, 32, 64)]
    assert sum(bool(shown(net, unscaled(some(size, start))).malice) for size, start in sizes) <= 1


@pytest.mark.parametrize("size", [1e-9, 1e-11, 1e-25])
def test_exposure_does_not_depend_on_the_size_of_rows(size: float) -> None:
    made, batch = faint(32, size=size), some(32)
    exposed = shown(made.model, batch)
    assert len(exposed.read) >= reconstructed(made, gradient(made.model, batch), batch) >= 20
    assert exposed.malice


def test_exposure_finds_examples_in_columns() -> None:
    """Those of a unit that one image passes are the image's errors; of these follows what passes the other units."""
    large, small = shown(silent(32), some(32)), shown(silent(8), some(8))
    assert not large.layers[0].singled
    assert [finding.where for finding in large.malice] == ["update.second, columns"]
    assert len(small.layers[1].read) >= 6
    assert small.leak() is not None
    hidden = shown(silent(32), some(32), "gaussian(1e-2)")
    assert not hidden.malice
    assert not hidden.read


@pytest.mark.parametrize(
    ("size", "start", "malice"), [(32, 300, False), (64, 300, False), (64, 0, True), (32, 0, True)]
)
def test_excess_over_fresh_parameters_alone_is_malice_above_half_of_the_batch(
    size: int, start: int, malice: bool
) -> None:
    """Nothing else tells: there are no biases to leave out, and the round before came with the same weights."""
    made, batch = trap_without_biases(size), unscaled(some(size, start))
    batch = Batch(batch.inputs / 255, batch.targets)
    exposed = shown(made.model, batch, previous=dict(made.model.state_dict()))
    assert bool(exposed.malice) is malice


def test_honest_model_exceeds_fresh_parameters_by_an_eighth_of_the_batch() -> None:
    """It learned features that few examples have; without its biases it singles out as many."""
    exposed = shown(trained(perceptron(), 10), some(24, 300))
    fresh = shown(perceptron(), some(24, 300))
    assert len(exposed.layers[1].visible) >= len(fresh.layers[1].visible) + 3
    assert not exposed.malice


@pytest.mark.parametrize("size", [8, 20, 32, 64])
def test_exposure_of_fishing_behind_batchnorm_is_malice(size: int) -> None:
    net = fishing(size, norm=BatchStatistics).model
    for batch in (some(size), unscaled(some(size))):
        assert any("learns from 1" in finding.evidence for finding in shown(net, batch).malice)


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_exposure_of_honest_rounds_is_no_malice(name: str) -> None:
    net, before = HONEST[name](), None
    for _ in range(4):
        for batch in batches(PRIVATE, (32, 64)):
            client = Client(net)
            assert not exposure(client, client.params(), batch, gradient(net, batch), before).malice
        before = {key: value.detach().clone() for key, value in net.state_dict().items()}
        net = trained(net, 1)


@pytest.mark.parametrize("count", [20, 32, 64])
def test_exposure_of_solvable_rows_is_malice(count: int) -> None:
    made, batch = pencil(count), some(count)
    assert reconstructed(made, gradient(made.model, batch), batch, 1e-3) >= 12
    exposed = shown(made.model, batch)
    assert re.search(r"1\d\d of 2\d\d units have an error of just the same examples", exposed.malice[0].evidence)
    assert not shown(made.model, batch, "gaussian(1e-2)").malice


@pytest.mark.parametrize(("size", "start"), [(20, 0), (32, 300), (64, 0), (128, 300)])
@pytest.mark.parametrize("honest_units", [64, 160, 200])
def test_exposure_reads_examples_from_groups_of_rows(honest_units: int, size: int, start: int) -> None:
    made, batch = pencil(size, honest_units), some(size, start)
    exposed = shown(made.model, batch)
    # Which axes `pencil` gets differs between processors, and with them the share: 0.5 to 0.7 at the least.
    assert len(exposed.read) >= 0.5 * reconstructed(made, gradient(made.model, batch), batch, 1e-3)
    assert (exposed.leak() is not None) is (len(exposed.read) > 0.25 * size)
    assert not shown(made.model, batch, "gaussian(1e-2)").read


@pytest.mark.parametrize("start", [0, 300])
@pytest.mark.parametrize("size", [64, 128])
def test_exposure_of_few_solvable_units_in_a_large_batch_is_malice(size: int, start: int) -> None:
    """Honest units share their examples with 4% of the others at most there."""
    assert shown(pencil(size, 200).model, some(size, start)).malice


@pytest.mark.parametrize("size", [20, 32, 64])
def test_exposure_of_solvable_rows_before_leaky_relu_is_malice(size: int) -> None:
    """No error is zero there: units are compared by the examples that pass them."""
    made, batch = pencil(size), some(size)
    update = gradient(leaky(made.model), batch)
    exposed, count = shown(made.model, batch), reconstructed(made, update, batch, 1e-3)
    assert count >= 12
    assert len(exposed.read) >= 0.35 * count
    assert exposed.malice


def test_solved_finds_only_groups_with_combined_errors() -> None:
    generator = Key(6).generator()
    passed = torch.randn(20, 3, generator=generator)
    bins = [(torch.arange(20) < cut)[:, None] * (passed @ torch.randn(3, 3, generator=generator)) for cut in (8, 9, 12)]
    errors = torch.cat(bins, 1)
    rows, owner = solved(errors, errors != 0)
    assert owner.tolist() == [8, 8, 8], "the third bin has three examples more than the second"
    left = rows.float() @ errors.T
    assert left[:, torch.arange(20) != 8].abs().max() < 1e-5 < 0.1 < left[:, 8].abs().max()
    others = [(torch.arange(20) < cut)[:, None] * torch.randn(20, 3, generator=generator) for cut in (8, 9)]
    assert solved(torch.cat(others, 1), torch.cat(others, 1) != 0)[1].tolist() == []


def test_shared_support_ignores_copies_of_images() -> None:
    twice = Batch(some(17).inputs.repeat(2, 1, 1, 1), some(17).targets.repeat(2))
    once, copied = (shown(perceptron(), batch).layers[0] for batch in (some(17), twice))
    assert (once.partial, once.shared, once.groups) == (copied.partial, copied.shared, copied.groups)
    assert once.groups == 17


def test_exposure_of_an_honest_model_with_two_inputs_is_no_malice() -> None:
    """Lines part 32 points in few ways: fresh units are as alike as the received ones."""
    net = Net(0, flat=nn.Flatten(), first=nn.Linear(1, 256), a=nn.ReLU(), head=nn.Linear(256, 10))
    exposed = shown(net, Batch(torch.randn(32, 1, generator=Key(0).generator()), PRIVATE.targets[:32]))
    assert exposed.layers[0].shared > 0.8 * exposed.layers[0].partial > 64
    assert not exposed.malice


@pytest.mark.parametrize("blank", [23, 28])
def test_exposure_of_blank_images_before_zero_biases_is_no_malice(blank: int) -> None:
    """Their errors are zero at every unit, whatever the weights are."""
    net = initialised(perceptron(), nn.init.kaiming_normal_)
    inputs = some(32).inputs.clone()
    inputs[-blank:] = 0
    exposed = shown(net, Batch(inputs, PRIVATE.targets[:32]))
    assert exposed.layers[0].learning_share < 0.3
    assert not exposed.malice


def test_exposure_of_leaky_activations_is_found() -> None:
    """They mix a little of all other examples into each row: what is read is near the image, and not the image."""
    honest = Net(0, flat=nn.Flatten(), first=nn.Linear(256, 256), a=nn.LeakyReLU(), head=nn.Linear(256, 10))
    net = copy.deepcopy(honest)
    first = linear(net, "first")
    with torch.no_grad():
        first.bias.sub_(outputs(net, "first", PUBLIC.inputs).quantile(15 / 16, dim=0))
    assert reconstructed(Crafted(honest, net, "first"), gradient(net, some(16)), some(16), 0.02) >= 12
    assert shown(net, some(16)).share >= 0.75


def test_exposure_of_a_small_batch_leaks_at_an_honest_model() -> None:
    exposed = shown(perceptron(), some(8))
    assert exposed.share == 1
    assert not exposed.malice
    result = exposed.leak()
    assert result is not None
    assert "8 of 8 examples" in result.evidence
    assert "says nothing of the server" in result.evidence
    problem: list[str] = []
    guarded_update(exposed, "refuse", "warn", lambda finding: problem.append(finding.family))
    guarded_update(exposed, "refuse", "ignore", lambda finding: problem.append(finding.family))
    guarded_update(exposed, "refuse", "refuse", lambda finding: None, allowed=1.0)
    assert problem == ["leak"]
    with pytest.raises(GradveilError, match=r"leak: 8 of 8 .* -> train on larger batches"):
        guarded_update(exposed, "warn", "refuse", lambda finding: None)
    wrong: Any = "refused"
    with pytest.raises(GradveilError, match=r"guard: is 'refused'.*\n.*leak: is 'refused'"):
        guarded_update(exposed, wrong, wrong, lambda finding: None)


def test_exposure_of_a_small_batch_is_never_malice() -> None:
    exposed = shown(quantile(16).model, some(16))
    assert exposed.share > 0.8
    assert not exposed.judged
    assert not exposed.malice
    large = shown(perceptron(), some(128))
    assert large.judged
    assert large.leak() is None


@pytest.mark.parametrize(
    "text", ["dp(clip=1, sigma=1)", "user-dp(clip=1, sigma=0.1)", "gaussian(1e-2)", "prune(0.999)"]
)
def test_exposure_of_hidden_examples_is_no_finding(text: str) -> None:
    crafted = quantile(32).model
    assert shown(crafted, some(32)).malice
    exposed = shown(crafted, some(32), text)
    assert not exposed.malice
    assert exposed.leak() is None


@pytest.mark.parametrize("text", ["gaussian(1e-7)", "user-dp(clip=1, sigma=1e-7)", "prune(0.3)"])
def test_exposure_with_a_defence_that_hides_nothing_is_malice(text: str) -> None:
    exposed = shown(quantile(32).model, some(32), text)
    assert exposed.malice
    assert exposed.share > 0.5


def test_exposure_averages_noise_over_the_rows_of_an_example() -> None:
    """Single rows are too noisy to be read exactly; the sum of all rows of an example is not."""
    net, batch = quantile(8).model, some(8)
    client = Client(net)
    raw = gradient(net, batch)
    scale = 0.05 * raw["first.weight"].abs().max()
    noisy = {name: value + 0 * value for name, value in raw.items()}
    rows = exposure(client, client.params(), batch, noisy).layers[0]
    noise = scale * torch.randn(raw["first.weight"].shape, generator=Key(2).generator())
    sent = noisy | {"first.weight": raw["first.weight"] + 0.05 * noise}
    assert rows.alone > 4 * len(rows.owners)
    assert len(exposure(client, client.params(), batch, sent).layers[0].read) >= 4


def test_partners_finds_bins_among_many_units() -> None:
    """200 nested bins of 32 examples, of any size and order, among 1,000 units that random examples pass."""
    generator = Key(5).generator()
    ranks, size = torch.rand(32, generator=generator), 0.5 + torch.rand(2, 200, generator=generator)
    cuts = torch.linspace(0, 1, 202)[1:-1]
    bins = size[0, :32, None] * (ranks[:, None] > cuts) * size[1]
    single = int((torch.bucketize(ranks, cuts).bincount() == 1).sum())
    others = torch.randn(32, 1000, generator=generator) * (torch.rand(32, 1000, generator=generator) < 0.5)
    errors = torch.cat([others, bins], 1)[:, torch.randperm(1200, generator=generator)]
    pairs = partners(errors, errors)
    between = Owned.of(difference(errors.T, pairs).T.abs(), 0.99)
    assert len(between.examples) >= 0.7 * single > 15
    alone = Owned.of(errors.abs(), 0.99)
    assert len(alone.examples) < 8
    without = partners(others, others)
    assert len(Owned.of(difference(others.T, without).T.abs(), 0.99).examples) < 4


def test_exposure_counts_equal_those_of_single_gradients() -> None:
    net, batch = perceptron(), some(6)
    client = Client(net)
    params = client.params()
    (first, *_), each = (
        exposure(client, params, batch, {}).layers,
        example_gradients(client.objective, params, {}, batch, {}),
    )
    errors = each["first.bias"].abs()  # dc_i of one example is its error at unit i
    share = errors.amax(0) / errors.sum(0).clamp(min=1e-30)
    assert first.alone == int((share > 0.99).sum())
    assert first.live == int((errors.sum(0) > 0).sum())
    assert set(errors.argmax(0)[share > 0.99].tolist()) <= first.owners
    flat = each["first.weight"].flatten(1)
    ratios = [float(row.norm() / (flat.sum(0) - row).norm()) for row in flat]
    assert first.snr == pytest.approx(max(ratios), rel=1e-3)


LOCAL = {
    "one step": Local(batch=32, lr=0.1, steps=1),
    "an epoch": Local(batch=32, lr=0.1, epochs=1),
    "poisson": Local(batch=32, lr=0.1, steps=1, sampling="poisson"),
}


@pytest.mark.parametrize("name", LOCAL)
def test_first_gradient_equals_that_of_the_first_step(name: str) -> None:
    local = LOCAL[name]
    net, batch = perceptron(), some(64)
    client = Client(net, local=replace(local, steps=1, epochs=None))
    params = client.params()
    task = ClientTask(batch, Key(3), client.init(params))
    with torch.no_grad():
        sent, _ = drawn_update(client, params, *task)
    arguments, noise = first_gradient(client, params, task)
    assert noise == {}
    total = F.cross_entropy(net(arguments.inputs), arguments.targets, reduction="sum") / local.batch
    (expected,) = torch.autograd.grad(total, [net.get_parameter("first.weight")])
    torch.testing.assert_close(sent["first.weight"], local.lr * expected)


def test_first_gradient_has_the_transformed_examples() -> None:
    space = ImageSpace.between(PRIVATE.inputs.min(), PRIVATE.inputs.max(), (1, 32, 32))
    client = parse("ats")(Client(perceptron(), domain=Domain(space, 10)))
    params, batch = client.params(), some(8)
    task = ClientTask(batch, Key(3), client.init(params))
    with torch.no_grad():
        sent, _ = drawn_update(client, params, *task)
    arguments, _ = first_gradient(client, params, task)
    assert not torch.equal(arguments.inputs, batch.inputs)
    torch.testing.assert_close(sent, gradient(client.model, arguments))
    assert exposure(client, params, batch, sent, first=(arguments, {})).share == 1, "what was trained on is read"


@pytest.mark.parametrize("name", ["one step", "an epoch", "poisson"])
def test_exposure_of_local_training_uses_the_sent_update(name: str) -> None:
    """After several steps rows are sums over other examples: fewer are read, and the sum decides."""
    client = Client(quantile(32).model, local=LOCAL[name])
    params, batch = client.params(), some(64)
    task = ClientTask(batch, Key(3), client.init(params))
    with torch.no_grad():
        sent, _ = drawn_update(client, params, *task)
    exposed = exposure(client, params, batch, sent, first=first_gradient(client, params, task))
    assert exposed.share > 0.25
    assert bool(exposed.malice)
    wrong = exposure(client, params, some(64, 300), sent)
    assert wrong.share <= 0.05
    assert not wrong.malice


def test_exposure_of_few_examples_in_each_of_many_steps_is_malice() -> None:
    batch = some(320)
    for net, bad in ((quantile(320, 0.45).model, True), (trained(perceptron(), 5), False)):
        client = Client(net, local=Local(batch=32, lr=0.05, epochs=1))
        task = ClientTask(batch, Key(3), client.init(params := client.params()))
        with torch.no_grad():
            sent, _ = drawn_update(client, params, *task)
        exposed = exposure(client, params, batch, sent, first=first_gradient(client, params, task))
        assert exposed.summed > 8, "trained models show some too"
        assert exposed.share > 0.25
        assert bool(exposed.malice) is bad


def test_exposure_counts_all_examples_of_a_client() -> None:
    """Steps of one example each: what the first one shows is one of eight, and the sum shows them all."""
    net, batch = quantile(8).model, some(8)
    client = Client(net, local=Local(batch=1, lr=1e-4, steps=8))
    params = client.params()
    order = torch.arange(8).reshape(8, 1)
    with torch.no_grad():
        sent, _ = client.update(params, batch, {"schedule": order}, client.init(params))
    exposed = exposure(client, params, batch, sent)
    assert exposed.examples == 1
    assert exposed.share >= 0.5


def test_exposure_changes_no_state_and_draws_no_randomness() -> None:
    made = CRAFTED["running_mean"](32)
    before = {name: value.clone() for name, value in made.model.state_dict().items()}
    state = torch.random.get_rng_state()
    first, second = shown(made.model, some(32)), shown(made.model, some(32))
    assert first == second
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in made.model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in made.model.modules())


class PairNorm(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


class Odd(nn.Module):
    """What a look has to bear: a layer that runs twice, one that never runs, a padding by name, an embedding.

    One layer gets all tokens of the batch in one dimension, and a module that is called a norm returns a pair.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.conv = nn.Conv1d(8, 8, 3, padding="same")
        self.twice, self.never, self.head = nn.Linear(8, 8), nn.Linear(3, 3), nn.Linear(8, 4)
        self.flat, self.norm = nn.Linear(8, 8), PairNorm()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.conv(self.embed(tokens).transpose(1, 2)).transpose(1, 2).relu()
        x = self.twice(self.twice(x).relu()).relu()
        x = self.flat(x.flatten(0, 1)).view_as(x)
        return self.head(self.norm(x)[0].mean(1))


def test_exposure_accepts_repeated_unused_and_token_layers() -> None:
    net = Odd()
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.3, generator=Key(0).generator())
    tokens = torch.arange(120).reshape(20, 6) % 16
    batch = Batch(tokens, torch.arange(20) % 4)
    client = Client(net)
    loss = F.cross_entropy(net(tokens), batch.targets)
    names = [name for name, _ in net.named_parameters() if "never" not in name]
    sent = dict(zip(names, torch.autograd.grad(loss, [net.get_parameter(name) for name in names]), strict=True))
    exposed = exposure(client, client.params(), batch, sent)
    assert [layer.layer for layer in exposed.layers] == ["conv", "twice", "head"]
    assert not exposed.malice


def _alike(flat: nn.Module, tall: nn.Module) -> None:
    """Compare a model of sequences with the same one of images of one row; its units are open for few examples."""
    nn.init.constant_(flat.get_submodule("1").bias, -2.2)  # pyright: ignore
    tall.load_state_dict({name: value.view_as(tall.state_dict()[name]) for name, value in flat.state_dict().items()})
    draw = Key(5).generator()
    batch = Batch(torch.randn(20, 3, 12, generator=draw), torch.arange(20) % 4)
    wide = Batch(batch.inputs.unsqueeze(2), batch.targets)
    for result, expected in zip(shown(flat, batch).layers, shown(tall, wide).layers, strict=True):
        rounded = {"effective": 0.0, "agreement": 0.0, "snr": None}
        assert replace(result, **rounded) == replace(expected, **rounded)


NORMS = {
    "groups": (nn.GroupNorm(2, 4), nn.GroupNorm(2, 4)),
    "batch": (nn.BatchNorm1d(4).eval(), nn.BatchNorm2d(4).eval()),
    "instance": (nn.InstanceNorm1d(4, affine=True), nn.InstanceNorm2d(4, affine=True)),
    "layer": (nn.LayerNorm(10), nn.LayerNorm(10)),
}


@pytest.mark.parametrize("name", NORMS)
def test_exposure_norm_has_the_units_of_the_convolution_before(name: str) -> None:
    """[B, C, L] is no row of tokens."""
    flat, tall = NORMS[name]
    head = nn.Linear(40, 4)
    _alike(
        nn.Sequential(nn.Conv1d(3, 4, 3), flat, nn.ReLU(), nn.Flatten(), head),
        nn.Sequential(nn.Conv2d(3, 4, (1, 3)), tall, nn.ReLU(), nn.Flatten(), nn.Linear(40, 4)),
    )


def test_exposure_norm_has_the_units_of_the_linear_layer_before() -> None:
    """Of [B, H, W, C] the last dimension, whatever is before it."""
    draw = Key(6).generator()
    batch = Batch(torch.randn(20, 9, 6, generator=draw), torch.arange(20) % 4)
    norm = nn.LayerNorm(5)
    nn.init.constant_(norm.bias, -1.7)
    layers = nn.Linear(6, 5), norm, nn.ReLU(), nn.Flatten(), nn.Linear(45, 4)
    rows, field = (
        shown(net, batch).layers for net in (nn.Sequential(*layers), nn.Sequential(nn.Unflatten(1, (3, 3)), *layers))
    )
    assert [(one.live, one.singled, one.visible) for one in rows] == [(o.live, o.singled, o.visible) for o in field]
