"""Label restoration: where each method works, where it must fail, and what raises."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from gradveil.attacks.knowledge import Knowledge
from gradveil.attacks.labels import _complete, _proved, find_labels, label_problems, smallest_entries
from gradveil.attacks.protocol import Observation, Prospect
from gradveil.client import Client, Local
from gradveil.core.errors import GradveilError
from gradveil.core.noise import Key
from gradveil.core.tree import stack
from gradveil.core.types import Batch
from gradveil.data import load
from gradveil.defences import parse
from gradveil.metrics.label_scores import label_accuracy
from gradveil.nn.models import build

TARGET_CLIENTS = 6
KEY = Key(0)
DIGITS = load("digits")


def digits(examples, target_clients=TARGET_CLIENTS):
    count = target_clients * examples
    inputs = DIGITS.private.inputs[:count].view(target_clients, examples, 1, 32, 32)
    return Batch(inputs, DIGITS.private.targets[:count].view(target_clients, examples))


def model(classes=10, gain=1.0, name="scheliga-cnn"):
    net = build(name, channels=1, size=32, classes=classes, generator=KEY.child("model").generator())
    with torch.no_grad():
        list(net.modules())[-1].weight.mul_(gain)
    return net


def sent(client, batch, hidden=()):
    """Return the observation of these batches; parameters whose name ends in `hidden` are not sent."""
    params = client.params()
    target_clients, examples = batch.targets.shape
    spec = client.noise_spec(params, Batch(batch.inputs[0], batch.targets[0]))
    noise = stack([spec.sample(KEY.child("noise", target_client)) for target_client in range(target_clients)])
    state = {name: value.expand(target_clients, *value.shape) for name, value in client.init(params).items()}
    update, _ = client.updates(params, batch, noise, state)
    kept = {name: value.detach() for name, value in update.items() if not name.endswith(hidden or ("?",))}
    return Observation(params, kept, examples, tuple(range(target_clients)))


def knowledge(classes=10, public=None):
    return Knowledge(DIGITS.private.space, classes, public=public)


def restored(client, observation, way="restore", facts=None):
    return find_labels(way, observation, client.undefended_update(), facts or knowledge(), KEY)


def accuracy(client, batch, way="restore", facts=None):
    return float(label_accuracy(restored(client, sent(client, batch), way, facts), batch.targets).mean())


def test_every_label_of_sixteen_is_restored_repeats_included():
    batch = digits(16)
    assert all(len(row.unique()) < 16 for row in batch.targets)
    assert accuracy(Client(model()), batch) == 1


def test_labels_of_another_client_are_not_restored():
    client, batch = Client(model()), digits(16)
    other = label_accuracy(restored(client, sent(client, batch)).roll(1, 0), batch.targets)
    assert float(other.mean()) < 0.85
    classes = 50
    client, batch = Client(model(classes)), many(4, classes)
    wrong = restored(client, sent(client, batch), facts=knowledge(classes)).roll(1, 0)
    assert float(label_accuracy(wrong, batch.targets).mean()) < 0.25


def many(examples, classes, target_clients=TARGET_CLIENTS):
    """Digits with labels of many classes, drawn at random."""
    targets = torch.randint(classes, (target_clients, examples), generator=KEY.child("targets").generator())
    return Batch(digits(examples, target_clients).inputs, targets)


@pytest.mark.parametrize(("examples", "settings"), [(24, {"batch": 24, "steps": 1}), (16, {"batch": 4, "epochs": 4})])
def test_labels_of_local_training_are_restored(examples, settings):
    """A batch above the number of probes; and sixteen steps, after which sums are far from linear in the counts."""
    client, batch = Client(model(), local=Local(lr=0.1, **settings)), digits(examples, 4)
    found = restored(client, sent(client, batch))
    assert float(label_accuracy(found, batch.targets).mean()) > 0.95
    assert float(label_accuracy(found.roll(1, 0), batch.targets).mean()) < 0.85


def test_aggregation_group_reveals_all_its_labels():
    batch = digits(15)
    assert accuracy(replace(Client(model()), members=3), batch) == 1
    assert accuracy(replace(Client(model(), local=Local(batch=5, lr=0.1, steps=2)), members=3), batch) > 0.95


@pytest.mark.parametrize(("local", "members"), [(None, 1), (Local(batch=2, lr=0.1, steps=2), 1), (None, 2)])
def test_labels_of_clients_with_state_are_restored(local, members):
    batch = digits(4)
    assert accuracy(parse("keylock(width=16)")(replace(Client(model(), local=local), members=members)), batch) > 0.8


def test_unique_with_more_examples_than_classes_raises():
    client, batch = Client(model()), digits(16)
    with pytest.raises(GradveilError, match=r"16 examples cannot have different labels among 10 classes.*restore"):
        accuracy(client, batch, "unique")


def test_unique_restores_distinct_labels_only():
    targets = torch.stack([torch.randperm(10, generator=KEY.child(v).generator())[:4] for v in range(TARGET_CLIENTS)])
    batch = Batch(digits(4).inputs, targets)
    client = Client(model())
    assert accuracy(client, batch, "unique") == 1
    same = Batch(batch.inputs, torch.full_like(targets, 3))
    found = smallest_entries(sent(client, same).update, "head", 4)
    assert all(len(row.unique()) == 4 for row in found)
    assert accuracy(client, same) == 1


@pytest.mark.parametrize("hidden", [(), ("head.bias",)])
def test_the_signs_of_confident_outputs_prove_labels(hidden):
    """Random images do not resemble the private ones of a confident network, but the signs still prove labels."""
    net = model(gain=200.0)
    batch = Batch(digits(4).inputs, torch.stack([torch.arange(v, v + 4) for v in range(TARGET_CLIENTS)]))
    client = Client(net, trainable=tuple(n for n, _ in net.named_parameters() if not n.endswith(hidden or ("?",))))
    assert accuracy(client, batch) == 1


def test_the_bias_proves_repeats_of_confident_mistakes():
    targets = torch.stack([torch.tensor([v, v, v + 1, v + 1, v + 1, v + 2, 9, 9]) for v in range(TARGET_CLIENTS)])
    client = Client(model(gain=1000.0), trainable=("head.bias",))
    observation = sent(client, Batch(digits(8).inputs, targets))
    bias = observation.update["head.bias"].unsqueeze(2).double()
    proved = _proved(bias, 8, noise=torch.zeros(TARGET_CLIENTS), signs=torch.ones(1), biased=True)
    counts = nn.functional.one_hot(targets, 10).sum(1)
    assert bool((proved <= counts).all())
    assert bool((proved.sum(1) >= 3).all())
    assert int((proved > 1).sum()) > TARGET_CLIENTS
    assert float(label_accuracy(restored(client, observation), targets).mean()) > 0.65


def test_without_a_bias_sums_are_scaled_to_the_features():
    batch = digits(16)
    brighter = Batch(3 * batch.inputs, batch.targets)
    net = model()
    client = Client(net, trainable=tuple(name for name, _ in net.named_parameters() if name != "head.bias"))
    assert accuracy(client, brighter) > 0.9


def test_undetermined_labels_are_spread_evenly():
    client, batch = Client(model()), digits(10)
    nothing = sent(client, batch)
    blank = {name: torch.zeros_like(value) for name, value in nothing.update.items()}
    found = find_labels("restore", replace(nothing, update=blank), client, knowledge(), KEY)
    assert torch.equal(found, torch.arange(10).expand(TARGET_CLIENTS, 10))


def test_signs_prove_nothing_where_features_may_be_negative():
    net = nn.Sequential(nn.Flatten(), nn.Linear(1024, 64), nn.Tanh(), nn.Linear(64, 10))
    for parameter in net.parameters():
        nn.init.normal_(parameter.data, std=0.02, generator=KEY.generator())
    assert accuracy(Client(net), digits(16)) == 1


def test_signs_prove_nothing_without_a_softmax():
    def squares(outputs, targets):
        return (outputs - torch.eye(10)[targets]).square().sum(-1)

    assert accuracy(Client(model(), loss=squares), digits(16)) > 0.9


@pytest.mark.parametrize(("text", "classes", "least"), [("prune(0.99)", 50, 0.99), ("dgp", 10, 0.95)])
def test_pruned_sums_are_completed_from_the_weight(text, classes, least):
    batch = many(4, classes)
    client = parse(text)(Client(model(classes)))
    assert bool((sent(client, batch).update["head.bias"] == 0).any(1).all())
    assert accuracy(client, batch, facts=knowledge(classes)) >= least


def test_repeats_survive_pruning():
    """One entry of the bias is left; the others follow from the weight, which has rank one for a single image."""
    image = digits(1).inputs.expand(TARGET_CLIENTS, 7, 1, 32, 32)
    targets = torch.stack([torch.tensor([v] * 4 + [v + 20] * 2 + [v + 30]) for v in range(TARGET_CLIENTS)])
    client, batch = parse("prune(0.98)")(Client(model(50))), Batch(image, targets)
    assert bool(((sent(client, batch).update["head.bias"] != 0).sum(1) == 1).all())
    assert accuracy(client, batch, facts=knowledge(50)) == 1


@pytest.mark.parametrize("biased", [True, False])
def test_a_layer_of_rank_one_is_completed_exactly(biased):
    a, mu = torch.randn(2, 6, generator=KEY.generator()).double(), torch.rand(2, 9, generator=KEY.generator()).double()
    mu[:, -1] = 1
    whole = a.unsqueeze(2) * mu.unsqueeze(1)
    kept = torch.rand(whole.shape, generator=Key(3).generator()) > 0.3
    kept[:, 4], kept[:, 0, -1] = False, True
    sums, known, pruned = _complete(torch.where(kept, whole, 0.0), biased, steps=200)
    assert pruned.tolist() == [True, True]
    assert known.tolist() == [[1, 1, 1, 1, 0, 1]] * 2
    rest = known.bool()
    if biased:
        torch.testing.assert_close(sums[rest], a[rest])
    else:
        torch.testing.assert_close(sums[:, :4] / sums[:, :1], a[:, :4] / a[:, :1])
    untouched = _complete(whole, biased)
    assert torch.equal(untouched[0], whole[..., -1] if biased else whole.sum(-1))
    assert not bool(untouched[2].any())


def test_clipped_sums_are_scaled_back():
    batch = digits(16)
    assert accuracy(parse("clip-example(0.5)")(Client(model())), batch) > 0.95
    assert accuracy(parse("dp(clip=0.5, sigma=0.01)")(Client(model())), batch) > 0.85


def test_public_images_calibrate_a_trained_model():
    public = Batch(DIGITS.public.inputs, DIGITS.public.targets)
    net = model()
    client = Client(net, local=Local(batch=32, lr=0.1, steps=20, momentum=0.5))
    params = client.params()
    update, _ = client.update(params, public, client.noise_spec(params, public).sample(KEY), {})
    net.load_state_dict({name: value - update[name] for name, value in params.items()})
    batch = digits(16)
    blind, told = (accuracy(Client(net), batch, facts=knowledge(public=images)) for images in (None, public))
    assert told > blind + 0.05
    some = Batch(*(value[public.targets > 0] for value in public))
    assert accuracy(Client(net), batch, facts=knowledge(public=some)) > blind


class HeadFirst(nn.Module):
    """A custom network whose classifier is defined before the layers that it follows."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(32, 10)
        self.body = nn.Linear(1024, 32)
        for parameter in self.parameters():
            nn.init.normal_(parameter.data, std=0.05, generator=KEY.generator())

    def forward(self, x):
        return self.head(self.body(x.flatten(1)).relu())


def test_the_last_layer_is_the_one_that_is_run_last():
    client = Client(HeadFirst())
    assert accuracy(client, digits(1), "idlg") == 1
    assert accuracy(client, digits(16)) > 0.9
    frozen = replace(client, trainable=("body.*",))
    (problem,) = label_problems("restore", Prospect(frozen, (1, 32, 32), 2, 10, public=False))
    assert "the last layer 'head' is not trained" in problem.what


def test_frozen_last_layer_raises():
    client = Client(model(), trainable=("body.*",))
    with pytest.raises(GradveilError, match="the last layer 'head' was not sent"):
        accuracy(client, digits(2))
