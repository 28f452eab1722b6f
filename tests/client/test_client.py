"""The client: what it trains and sends, and what it refuses."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradveil.client import Client, LazyNoise, Local, Task, cross_entropy, drawn_update
from gradveil.core.errors import GradveilError
from gradveil.core.noise import Key
from gradveil.core.tree import stack
from gradveil.core.types import Batch
from gradveil.defences import parse
from gradveil.defences.additive_noise import Gaussian
from gradveil.nn.stochastic_layers import Dropout
from tests.laws.cases import Tiny, V, draw, draw_batch


def problems(call) -> list[str]:
    with pytest.raises(GradveilError) as caught:
        call()
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize("text", ["none", "dp(clip=0.3)", "prune(0.5, feedback=true) + gaussian(0.1)"])
def test_client_sends_only_trainable_parameters(text: str):
    whole, part = (parse(text)(Client(Tiny(), trainable=patterns)) for patterns in (None, ("head.*", "block.0.bias")))
    params, batch, noise, state = draw(part)
    update, after = part.update(params, batch, noise, state)
    assert list(update) == ["block.0.bias", "head.weight", "head.bias"]
    assert after.keys() == state.keys()
    assert all(any(name.endswith(sent) for sent in update) for name in (*noise, *state))
    if text == "none":
        full = whole.update(params, batch, noise, state)[0]
        torch.testing.assert_close(update, {name: full[name] for name in update})


@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
def test_local_training_keeps_frozen_layers(optimiser: str):
    local = Local(2, 0.1, steps=3, optimiser=optimiser)
    client = Client(Tiny(), local=local, trainable=("head.*",))
    params, batch, noise, _ = draw(client)
    model = Tiny()
    steps = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[optimiser](model.head.parameters(), lr=0.1)
    for chosen in noise["schedule"]:
        steps.zero_grad()
        F.cross_entropy(model(batch.inputs[chosen]), batch.targets[chosen]).backward()
        steps.step()
    update, _ = client.update(params, batch, noise, {})
    moved = {f"head.{name}": params[f"head.{name}"] - value.detach() for name, value in model.head.named_parameters()}
    torch.testing.assert_close(update, moved)


def test_client_does_not_send_parameters_without_gradient():
    model = Tiny()
    model.block.requires_grad_(False)
    assert Client(model).trained() == [name for name, _ in Tiny().named_parameters() if not name.startswith("block")]


def test_trainable_with_unknown_patterns_lists_the_parameters():
    result = problems(Client(Tiny(), trainable=("head.*", "classifier.*", "fc")).trained)
    assert len(result) == 2
    assert "'classifier.*' matches no parameter" in result[0]
    assert "head.weight" in result[0]


def test_noise_check_names_every_wrong_tensor():
    client = parse("dropout + gaussian(0.1) + prune(0.5)")(Client(Tiny()))
    params, batch, noise, _ = draw(client)
    spec, optional = client.noise_spec(params, batch), client.intermediates(params)
    mask = {"send.prune.mask.head.bias": torch.ones(3)}
    spec.check({**noise, **mask}, optional)
    missing, wrong = "send.noise.head.bias", "send.noise.head.weight"
    bad = {**noise, **mask, "send.noise.fc": torch.zeros(1), wrong: torch.zeros(2)}
    del bad[missing]
    result = problems(lambda: spec.check(bad))
    assert [text.split(":")[0] for text in result] == [
        f"noise.{name}" for name in (missing, wrong, "send.prune.mask.head.bias", "send.noise.fc")
    ]
    assert "is missing" in result[0]
    assert "expected (3, 16)" in result[1]
    assert "is not an input of this client" in result[3]


@pytest.mark.parametrize("text", ["dropout", "precode(k=4)", "cvb"])
def test_update_without_model_noise_raises(text: str):
    """`strict=True`: a mask that was forgotten is an error, never a neutral mask."""
    client = parse(text)(Client(Tiny()))
    params, batch, noise, _ = draw(client)
    name = next(iter(noise))
    del noise[name]
    with pytest.raises(RuntimeError, match=name.removeprefix("model.").replace(".", r"\.")):
        client.update(params, batch, noise, {})


def test_updates_with_hidden_randomness_raise():
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Dropout(0.5), nn.Linear(8, 3)).double()
    client = Client(model)
    batches = [draw_batch(Key(i)) for i in range(V)]
    rows = Batch(torch.stack([one.inputs for one in batches]), torch.stack([one.targets for one in batches]))
    with pytest.raises(RuntimeError, match="random"):
        client.updates(client.params(), rows, {}, {})
    with pytest.raises(RuntimeError, match="random"):
        parse("dp")(client).update(*draw(parse("dp")(client)))


def test_client_buffers_replace_those_of_the_model():
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 3)).double().eval()
    later = {"1.running_mean": torch.full((64,), 0.5).double(), "1.running_var": torch.full((64,), 4.0).double()}
    params, batch, _, _ = draw(Client(model))
    sent, _ = Client(model, buffers=later).update(params, batch, {}, {})
    update, _ = Client(model).update(params, batch, {}, {})
    with torch.no_grad():
        model[1].running_mean.fill_(0.5)
        model[1].running_var.fill_(4.0)
    expected, _ = Client(model).update(params, batch, {}, {})
    torch.testing.assert_close(sent, expected)
    assert not torch.allclose(update["1.weight"], expected["1.weight"])


@pytest.mark.parametrize("local", [None, Local(batch=2, lr=0.1, epochs=1)], ids=["gradient", "local training"])
def test_shared_module_keeps_its_tensors(local: Local | None):
    """`torch.func.functional_call` leaves what it lent in such a module: the next round would start from there."""
    inner = nn.Linear(6, 6)
    model = nn.Sequential(inner, nn.Tanh(), inner, nn.Tanh(), nn.Linear(6, 3))
    client, update = Client(model, local=local), inner.weight
    batch = Batch(torch.arange(24.0).sin().reshape(4, 6), torch.tensor([0, 1, 2, 0]))
    before = {name: value.clone() for name, value in client.params().items()}
    noise = client.noise_spec(before, batch).sample(Key(0))
    client.update({name: 0.5 * value for name, value in before.items()}, batch, noise, {})
    assert inner.weight is update
    torch.testing.assert_close(client.params(), before, rtol=0, atol=0)


def test_undefended_client_has_only_the_model():
    client = parse("dp + dropout + prune(0.5)")(Client(Tiny(), local=Local(2, 0.1, steps=2)))
    naive = client.undefended_update()
    assert naive.model is client.model
    assert naive.local == client.local
    assert (naive.step, naive.send, naive.batch) == (None, None, ())


def test_init_state_is_zero_with_stable_names():
    client = parse("prune(0.5, feedback=true)")(Client(Tiny()))
    params, batch, noise, _ = draw(client)
    state = client.init(params)
    assert set(state) == {f"send.prune.residual.{name}" for name in params}
    assert not any(value.any() for value in state.values())
    assert client.update(params, batch, noise, state)[1].keys() == state.keys()


def test_local_with_invalid_settings_raises_every_problem():
    result = problems(lambda: Local(0, -1.0, steps=0, epochs=1, optimiser="lamb", momentum=1.0, weight_decay=-1.0))
    assert [text.split(":")[0] for text in result] == [
        "local.batch",
        "local.lr",
        "local.steps",
        "local.optimiser",
        "local.momentum",
        "local.weight_decay",
        "local",
    ]
    assert "no momentum" in problems(lambda: Local(2, 0.1, steps=1, nesterov=True))[0]
    assert "nothing to 'adam'" in problems(lambda: Local(2, 0.1, steps=1, optimiser="adam", momentum=0.9))[0]
    client = Client(Tiny(), local=Local(8, 0.1, epochs=1))
    assert "is 8, the client has 4 examples" in problems(lambda: draw(client))[0]


def test_cross_entropy_accepts_numbers_and_probabilities():
    outputs = torch.randn(5, 3, generator=Key(0).generator())
    targets = torch.tensor([0, 2, 1, 1, 0])
    expected = F.cross_entropy(outputs, targets, reduction="none")
    torch.testing.assert_close(cross_entropy(outputs, targets), expected)
    soft = torch.softmax(torch.randn(5, 3, generator=Key(1).generator()), -1)
    torch.testing.assert_close(cross_entropy(outputs, soft), F.cross_entropy(outputs, soft, reduction="none"))


def test_client_accepts_any_differentiable_loss():
    params, batch, _, _ = draw(Client(Tiny()))
    mean = Client(Tiny(), loss=F.cross_entropy).update(params, batch, {}, {})[0]
    each = Client(Tiny()).update(params, batch, {}, {})[0]
    torch.testing.assert_close(mean, each)
    counting = Client(Tiny(), loss=lambda outputs, targets: outputs.argmax(-1))
    assert "returns torch.int64" in problems(lambda: counting.update(params, batch, {}, {}))[0]


def test_aggregation_group_members_draw_separate_orders():
    client = replace(Client(Tiny(), local=Local(2, 0.1, epochs=1)), members=3)
    inputs, targets = (torch.cat(parts) for parts in zip(*(draw_batch(Key(i)) for i in range(3)), strict=True))
    params, batch = client.params(), Batch(inputs, targets)
    noise = client.noise_spec(params, batch).sample(Key(1))
    assert noise["schedule"].shape == (3, 2, 2)
    assert all(sorted(order.flatten().tolist()) == [0, 1, 2, 3] for order in noise["schedule"])
    assert not torch.equal(noise["schedule"][0], noise["schedule"][1])
    sent, _ = client.update(params, batch, noise, {})
    alone = Client(Tiny(), local=client.local)
    each = [
        alone.update(params, Batch(*(value[4 * i : 4 * i + 4] for value in batch)), {"schedule": order}, {})[0]
        for i, order in enumerate(noise["schedule"])
    ]
    for name, value in sent.items():
        torch.testing.assert_close(value, torch.stack([one[name] for one in each]).mean(0))


def test_lazy_noise_gives_the_same_update():
    model = nn.Sequential(nn.Flatten(), nn.Linear(8, 6), Dropout(0.5), nn.Linear(6, 3)).double()
    client = Client(model, local=Local(batch=2, lr=0.1, steps=3, momentum=0.9), step=Gaussian(0.1), send=Gaussian(0.01))
    batch = Batch(torch.randn(5, 2, 4, generator=Key(1).generator()).double(), torch.tensor([0, 1, 2, 0, 1]))
    params = client.params()
    once = client.noise_parts(params, batch).once.sample(Key(0))
    steps = [client.noise_parts(params, batch).step.sample(Key(0).child(t)) for t in range(3)]
    assert set(once) | set(steps[0]) == set(client.noise_spec(params, batch))
    whole, _ = client.update(params, batch, once | stack(steps), {})
    asked = []

    def of_step(t):
        asked.append(t)
        return steps[t]

    ((result, _),) = client.pipeline(params, [Task(batch, LazyNoise(once, of_step, lambda e: {}), {})])
    assert asked == [0, 1, 2]
    assert all(torch.equal(result[name], whole[name]) for name in whole)
    ((other, _),) = client.pipeline(params, [Task(batch, LazyNoise(once, lambda t: steps[0], lambda e: {}), {})])
    assert not torch.equal(other["1.weight"], whole["1.weight"])


@pytest.mark.parametrize(
    ("layer", "batch", "problem"),
    [
        (nn.BatchNorm1d(8), {}, "BatchNorm1d in training mode"),
        (nn.Dropout(), {}, "draws its mask from the global generator"),
        (nn.Identity(), {"inputs": torch.zeros(5, 8, dtype=torch.uint8)}, "inputs.float"),
        (nn.Identity(), {"targets": torch.tensor([0, 1, 2, 0, 7])}, "class numbers beyond 2: 7"),
    ],
)
def test_client_explains_errors_of_torch(layer, batch, problem):
    """Who has not asked `gradveil check` meets its words here, and not those of torch."""
    whole = Batch(**{"inputs": torch.randn(5, 8), "targets": torch.tensor([0, 1, 2, 0, 1]), **batch})
    undone = Client(nn.Sequential(layer, nn.Linear(8, 3)), local=Local(batch=2, lr=0.1, epochs=1))
    with pytest.raises(GradveilError, match=problem), torch.no_grad():
        drawn_update(undone, undone.params(), whole, Key(0), {})
