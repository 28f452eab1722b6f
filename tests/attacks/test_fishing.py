"""Fishing: only the target class has a gradient behind the crafted last layer, and the search recovers it."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from gradveil.attacks.attack_catalogue import make_attack
from gradveil.attacks.knowledge import Knowledge
from gradveil.attacks.malicious.caught_examples import catches, count
from gradveil.attacks.protocol import Active, Observation, Persistent, Prospect
from gradveil.client import Client, Local
from gradveil.core.errors import GradveilError
from gradveil.core.noise import Key
from gradveil.core.types import Batch
from gradveil.data import load
from gradveil.defences import parse
from gradveil.federated.model_inspection import inspect
from gradveil.nn.models import build
from gradveil.nn.module_paths import last_layer
from gradveil.nn.surgery import replace_batchnorm

DIGITS = load("digits")
LOWER, UPPER = DIGITS.private.space.bounds(DIGITS.private.inputs)
SHAPE = tuple(DIGITS.private.inputs.shape[1:])
KNOWN = Knowledge(DIGITS.private.space, 10, public=Batch(DIGITS.public.inputs, DIGITS.public.targets))


def client(name="scheliga-cnn"):
    net = build(name, channels=1, size=32, classes=10, generator=Key(0).generator())
    return Client(replace_batchnorm(net))  # a batch's own statistics would mix its examples


def digits(labels, skip=0):
    """Take a batch of digits with these labels."""
    found = []
    for label in labels:
        of_class = (DIGITS.private.targets == label).nonzero().flatten().tolist()
        found.append(next(place for place in of_class[skip:] if place not in found))
    return Batch(DIGITS.private.inputs[found], DIGITS.private.targets[found])


def sent_by(crafted, *batches, params=None):
    together = Batch(*(torch.stack(parts) for parts in zip(*batches, strict=True)))
    params = params or crafted.params()
    spec = crafted.noise_spec(params, batches[0])
    noise = {n: v.expand(len(batches), *v.shape) for n, v in spec.sample(Key(0)).items()}
    state = {n: v.expand(len(batches), *v.shape) for n, v in crafted.init(params).items()}
    update, _ = crafted.updates(params, together, noise, state)
    return Observation(params, update, len(batches[0].targets), tuple(range(len(batches))))


def alone(crafted, batch, target):
    own = batch.targets == target
    return sent_by(crafted, Batch(batch.inputs[own], batch.targets[own])).update


def close(found, wanted, tolerance=1e-5):
    for name, value in wanted.items():
        assert float((found[name] - value).abs().max()) <= tolerance * float(value.abs().max()), name


@pytest.mark.parametrize("name", ["scheliga-cnn", "lenet-zhu", "resnet20"])
def test_caught_update_equals_the_update_of_the_class_alone(name):
    fishing = make_attack("fishing(target=3)")
    crafted = fishing.craft(client(name), KNOWN, Key(0))
    one, two = digits([1, 3, 7, 7, 0, 4, 5, 9]), digits([3, 2, 3, 7, 1, 1, 0, 9], skip=5)
    seen = sent_by(crafted, one, two, digits([0, 1, 2, 4, 5, 6, 7, 8]))
    found, counts = catches(seen, last_layer(crafted.model), 3, gated=False)
    assert [(catch.observation.examples, catch.places.tolist()) for catch in found] == [(1, [0]), (2, [1])]
    for catch, batch in zip(found, (one, two), strict=True):
        close(catch.observation.update, alone(crafted, batch, 3))
    assert [row.tolist() for row in counts][1] == torch.bincount(two.targets, minlength=10).tolist()


def test_other_classes_have_no_gradient_at_any_feature_size():
    big = client()
    with torch.no_grad():
        next(iter(big.model.parameters())).mul_(3000)
    crafted = make_attack("fishing(target=3)").craft(big, KNOWN, Key(0))
    batch = digits([1, 3, 7, 7, 0, 4, 5, 9])
    assert bool((crafted.model(batch.inputs)[:, :3].amin(1) > crafted.model(batch.inputs)[:, 3] + 100).all())
    (caught,), _ = catches(sent_by(crafted, batch), "head", 3, gated=False)
    assert caught.observation.examples == 1
    close(caught.observation.update, alone(crafted, batch, 3), 1e-4)


def test_craft_changes_only_the_last_layer_of_a_copy():
    honest = client()
    before = {name: value.clone() for name, value in honest.params().items()}
    crafted = make_attack("fishing").craft(honest, KNOWN, Key(0))
    assert all(torch.equal(value, before[name]) for name, value in honest.params().items())
    changed = [name for name, value in crafted.params().items() if not torch.equal(value, before[name])]
    assert changed == ["head.weight", "head.bias"]


@pytest.mark.parametrize("examples", [1, 2, 8, 64])
def test_labels_are_read_off_the_last_bias_at_any_scale(examples):
    generator = Key(examples).generator()
    for scale in (1.0, 0.037, 12.5):
        labels = torch.randint(0, 9, (examples,), generator=generator)  # of class 9 there is none
        numbers = torch.bincount(labels, minlength=10)
        bias = scale * (1 / 9 - numbers.double() / examples)
        bias[2] = -scale * numbers[2] / examples
        assert count(bias, 2, examples, gated=False).classes.tolist() == numbers.tolist()


def test_counts_that_several_scales_explain_are_unknown():
    """The counts of two classes are complements, so that a clipped bias does not determine them; steps do."""
    bias = torch.tensor([3.0, -3.0], dtype=torch.float64) / 4
    assert count(bias, 1, 4, gated=False).classes.tolist() == [1, 3]
    for scale in (0.1, 1e-3):
        assert not count(scale * bias, 1, 4, gated=False).known
    assert count(0 * bias, 1, 4, gated=False).classes.tolist() == [4, 0]
    assert count(0.1 * bias, 1, 4, gated=False, usual=0.1).classes.tolist() == [1, 3]
    net = build("scheliga-cnn", channels=1, size=32, classes=2, generator=Key(0).generator())
    fishing, local = make_attack("fishing(target=1, iterations=2)"), Local(lr=1e-2, steps=4, batch=2)
    crafted = fishing.craft(Client(net, local=local), KNOWN, Key(0))
    seen = sent_by(crafted, digits([1, 1, 0, 1]))
    assert fishing._caught([seen], crafted, KNOWN)[0][0].observation.examples == 3


def test_counts_of_a_pruned_bias_are_unknown():
    """Its sum is no longer zero, unlike a gradient's; the remaining entries may resemble whole counts."""
    found = count(torch.tensor([0.0, 0.0, 0.7, 0.0]), 0, 3, gated=False, usual=0.3)
    assert not found.known
    assert found.scale == 0.3, "what several steps come to is known all the same"


def test_clips_and_local_steps_scale_the_counts():
    fishing, batch = make_attack("fishing(target=3)"), digits([1, 3, 7, 7, 0, 4, 5, 9])
    plain = alone(fishing.craft(client(), KNOWN, Key(0)), batch, 3)
    for changed in (parse("clip(1)")(client()), replace(client(), local=Local(lr=1e-3, steps=3, batch=8))):
        crafted = fishing.craft(changed, KNOWN, Key(0))
        (caught,), _ = catches(sent_by(crafted, batch), "head", 3, gated=False)
        assert caught.observation.examples == 1
        one, other = (
            torch.cat([value.flatten() for value in update.values()]) for update in (caught.observation.update, plain)
        )
        assert float(torch.cosine_similarity(one, other, dim=0)) > 0.999


def test_unknown_counts_assume_one_example():
    fishing = make_attack("fishing(target=3)")
    for text in ("prune(0.95)", "dp(clip=1, sigma=1)"):
        crafted = fishing.craft(parse(text)(client()), KNOWN, Key(0))
        found, counts = catches(sent_by(crafted, digits([1, 3, 3, 7]), digits([1, 3, 4, 7])), "head", 3, gated=False)
        assert [(catch.observation.examples, catch.places.tolist()) for catch in found] == [(1, [0, 1])]
        assert int(torch.stack(counts).sum()) == 0


def test_gate_passes_the_least_typical_examples_only():
    fishing = make_attack("fishing(target=3, share=0.3)")
    crafted = fishing.craft(client(), KNOWN, Key(0))
    assert "public" in fishing.knowledge
    own = KNOWN.public.inputs[KNOWN.public.targets == 3]
    others = KNOWN.public.inputs[KNOWN.public.targets != 3]
    assert float((crafted.model(own)[:, 3] < 0).double().mean()) == pytest.approx(0.3, abs=0.01)
    assert float((crafted.model(others)[:, 3] > 0).double().mean()) < 0.02
    batch = digits([3, 3, 3, 3, 1, 7, 5, 8])
    logits = crafted.model(batch.inputs)[:, 3]
    passing = (logits < 0) & (batch.targets == 3)
    assert int(passing.sum()) in (1, 2, 3)
    assert not bool(((logits > 0) & (batch.targets != 3)).any())
    (caught,), _ = catches(sent_by(crafted, batch), "head", 3, gated=True)
    assert caught.observation.examples == int(passing.sum())
    close(caught.observation.update, sent_by(crafted, Batch(batch.inputs[passing], batch.targets[passing])).update)


def test_each_round_fishes_for_another_class():
    fishing = make_attack("fishing(target=8, iterations=2, restarts=2)")
    assert isinstance(fishing, Active)
    assert isinstance(fishing, Persistent)
    crafted, batch = fishing.craft(client(), KNOWN, Key(0)), digits([8, 9, 0, 0, 5, 5, 5, 7])
    rounds = []
    for number in range(12):
        params = fishing.resend(crafted, KNOWN, number) if number else crafted.params()
        rounds.append(replace(sent_by(crafted, batch, params=params), round=number))
    steps = []
    found = fishing(rounds, crafted.undefended_update(), KNOWN, Key(0), steps.append)
    assert found.targets.tolist() == [[7, 8, 9, 0, 0, 5, 5, 5]] or found.targets.tolist() == [[8, 9, 7, 0, 0, 5, 5, 5]]
    assert len(found.inputs[0].flatten(1).unique(dim=0)) == 8
    assert found.objectives.shape == (1, 2)
    assert steps[-1].row_iterations == steps[-1].row_budget == 5 * 2 * 2
    plan = fishing.plan(rounds, crafted, KNOWN, Key(0))
    again = fishing(rounds, crafted.undefended_update(), KNOWN, Key(0), plan=plan)
    assert torch.equal(again.inputs, found.inputs)
    assert again.plan == plan == found.plan


def test_objective_is_lowest_at_the_ground_truth():
    fishing = make_attack("fishing(target=3, iterations=5)")
    crafted = fishing.craft(client(), KNOWN, Key(0))
    batch, other = digits([3, 1, 3, 7]), digits([1, 4, 7, 0])
    seen, knowledge = (
        sent_by(crafted, batch, other),
        replace(KNOWN, targets=torch.stack([batch.targets, other.targets])),
    )
    simulated_client = crafted.undefended_update()
    found = fishing([seen], simulated_client, knowledge, Key(0))
    at_truth = fishing.evaluate(
        [seen], simulated_client, knowledge, Key(0), torch.stack([batch.inputs, other.inputs]), {}
    )
    assert float(at_truth[0]) < 1e-3 < float(found.objective[0])
    assert bool(at_truth[1].isnan())


@pytest.mark.parametrize("text", ["prune(0.9)", "dgp", "sign"])
def test_adaptive_fishing_explains_the_defended_catch(text):
    batch, at_truth = digits([1, 3, 7, 7, 0, 4, 5, 9]), []
    for settings in ("simulated_client=full", "simulated_client=naive"):
        fishing = make_attack(f"fishing(target=3, tv=0, {settings})")
        crafted = fishing.craft(parse(text)(client()), KNOWN, Key(0))
        simulated_client = crafted if fishing.simulated_client == "full" else crafted.undefended_update()
        knowledge = replace(KNOWN, targets=batch.targets[None])
        given = [sent_by(crafted, batch)], simulated_client, knowledge, Key(0), batch.inputs[None], {}
        at_truth.append(float(fishing.evaluate(*given)))
    assert at_truth[0] < 0.02
    assert at_truth[0] < at_truth[1] / 3


def test_empty_catch_and_nan_update_return_grey_images():
    fishing = make_attack("fishing(target=6, iterations=2)")
    crafted = fishing.craft(client(), KNOWN, Key(0))
    seen = sent_by(crafted, digits([1, 3, 7]), digits([6, 3, 7]))
    seen.update["head.weight"][1, 0, 0] = torch.nan
    found = fishing([seen], crafted.undefended_update(), KNOWN, Key(0))
    assert found.status == ("stalled", "diverged")
    assert found.objective.tolist() == [torch.inf, torch.inf]
    assert found.targets[0].tolist() == [1, 3, 7]
    assert float((found.inputs - (LOWER + UPPER) / 2).abs().max()) == 0
    assert {count: torch.equal(value, found.inputs) for count, value in found.trace.items()} == {1: True}


@pytest.mark.parametrize(
    ("text", "name"), [("fishing(target=3)", "resnet20"), ("fishing(target=3, share=0.3)", "scheliga-cnn")]
)
def test_inspection_reports_the_last_layer(text, name):
    honest = client(name)
    assert inspect(honest.model, honest.params()) == []
    crafted = make_attack(text).craft(honest, KNOWN, Key(0))
    last = last_layer(crafted.model)
    assert ("fishing", f"{last}.weight") in {(f.family, f.where) for f in inspect(crafted.model, crafted.params())}


def test_unsuitable_clients_raise_with_a_fix():
    fishing, honest = make_attack("fishing"), client()
    seen = sent_by(honest, digits([1]))
    with pytest.raises(GradveilError, match="was not in the model that the client trained"):
        fishing([seen], honest, KNOWN, Key(0))

    def problems(text, changed):
        return [(p.where, p.what) for p in make_attack(text).problems(Prospect(changed, SHAPE, 1, 10, public=0))]

    assert problems("fishing", honest) == []
    assert [where for where, _ in problems("fishing(target=10, share=0.1)", honest)] == ["target", "data.public"]
    bare = Client(nn.Sequential(nn.Flatten(), nn.Linear(1024, 10, bias=False)))
    assert "bias" in problems("fishing", bare)[0][1]
    assert "bias" in problems("fishing", replace(honest, trainable=("*.weight",)))[0][1]
    assert "one output" in problems("fishing", Client(nn.Sequential(nn.Flatten(), nn.Linear(1024, 1))))[0][1]
    assert "no nn.Linear" in problems("fishing", Client(nn.Conv2d(1, 10, 32)))[0][1]
    with pytest.raises(GradveilError, match="no public images of class 0"):
        make_attack("fishing(share=0.1)").craft(honest, replace(KNOWN, public=None), Key(0))
