"""Soteria against one backward pass a feature, and NumPy's percentile."""

import numpy as np
import pytest
import torch
from torch import nn

from gradveil.client import Client, Local
from gradveil.core.errors import GradveilError
from gradveil.core.noise import Key
from gradveil.core.types import Batch, Context
from gradveil.defences import Soteria, parse
from gradveil.defences.feature_hiding import AT_ONCE
from gradveil.nn.models import build


def wide(features: int = AT_ONCE + 7):
    """More features than are differentiated at once, some of them negative."""
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.Sigmoid(), nn.Flatten(), nn.Linear(144, features), nn.Tanh(), nn.Linear(features, 3)
    ).double()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            generator = Key(1, (number,)).generator()
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def batch(size: int = 3):
    inputs = torch.randn(size, 1, 8, 8, generator=Key(2).generator(), dtype=torch.float64)
    return Batch(inputs, torch.arange(size) % 3)


def by_loop(model: nn.Module, examples: Batch, delta: float, signed: bool) -> torch.Tensor:
    """One backward pass for each feature and example."""
    found = []
    for feature in range(model[-1].in_features):
        total = torch.zeros((), dtype=torch.float64)
        for x in examples.inputs:
            x = x[None].clone().requires_grad_()
            r = model[:-1](x)[0, feature]
            (slope,) = torch.autograd.grad(r, x)
            total = total + slope.norm() / ((r if signed else r.abs()) + delta)
        found.append(total)
    return torch.stack(found).detach()


@pytest.mark.parametrize("variant", ["paper", "published_code"])
@pytest.mark.parametrize("percentile", [10.0, 50.0, 99.0])
def test_columns_below_the_percentile_go_and_nothing_else(variant: str, percentile: float):
    model, examples = wide(), batch()
    plain, _ = Client(model).update(Client(model).params(), examples, {}, {})
    defended = parse(f"soteria(percentile={percentile}, variant={variant}, delta=0.2)")(Client(model))
    sent, _ = defended.update(defended.params(), examples, {}, {})
    q = by_loop(model, examples, 0.2, variant == "published_code").numpy()
    kept = torch.from_numpy(np.abs(q) >= np.percentile(q, percentile))
    assert int(kept.sum()) > 0
    # Where many features are negative the program's lower percentiles are above nothing.
    assert int(kept.sum()) < len(kept) or (variant == "published_code" and percentile == 10)
    for name, value in plain.items():
        torch.testing.assert_close(sent[name], value * kept if name == "5.weight" else value, rtol=0, atol=0)


def test_relevance_is_that_of_the_loop():
    model, examples = wide(), batch()
    client = Client(model)
    context = client.pipeline.gradient.context(client.params(), examples, {})
    layer, q = Soteria(delta=0.3).relevance(context)
    assert layer == "5"
    torch.testing.assert_close(q, by_loop(model, examples, 0.3, signed=False), rtol=1e-10, atol=0)


def test_the_variants_part_where_features_are_negative():
    model, examples = wide(), batch()
    masks = [
        parse(f"soteria(50, variant={variant})")(Client(model)).update(Client(model).params(), examples, {}, {})[0]
        for variant in ("paper", "published_code")
    ]
    assert not torch.equal(masks[0]["5.weight"], masks[1]["5.weight"])


def test_features_behind_a_bottleneck_see_its_noise():
    model = build("lenet-zhu", channels=1, size=32, classes=4, generator=Key(0).generator())
    client = parse("precode(k=5) + soteria")(Client(model))
    params = client.params()
    examples = Batch(torch.rand(2, 1, 32, 32, generator=Key(3).generator()), torch.tensor([0, 1]))
    noise = client.noise_spec(params, examples).sample(Key(4))
    inner = {n[6:]: v for n, v in noise.items() if n.startswith("model.")}
    seen = client.pipeline.gradient.context(params, examples, inner)
    other = client.pipeline.gradient.context(params, examples, {n: v + 1 for n, v in inner.items()})
    assert not torch.equal(seen.features(examples).values, other.features(examples).values)


def test_clients_that_do_not_ask_compute_no_features(monkeypatch):
    def forbidden(*_):
        raise AssertionError("features were computed")

    monkeypatch.setattr("gradveil.client.defended_gradient.last_inputs", forbidden)
    model, examples = wide(), batch()
    defended = parse("prune(0.5) + dp(sigma=1)")(Client(model))
    params = defended.params()
    defended.update(params, examples, defended.noise_spec(params, examples).sample(Key(0)), {})
    with pytest.raises(AssertionError, match="features"):
        parse("soteria")(Client(model)).update(params, examples, {}, {})


def test_a_client_that_does_not_train_its_classifier_is_refused():
    model, examples = wide(), batch()
    only_first = parse("soteria")(Client(model, trainable=("0.*",)))
    with pytest.raises(GradveilError, match="no weight of a linear layer"):
        only_first.noise_spec(only_first.params(), examples)
    other = parse("soteria")(Client(model, trainable=("3.*",)))
    with pytest.raises(GradveilError, match="train the last linear layer"):
        other.update(other.params(), examples, {}, {})


def test_a_classifier_that_is_defined_first_is_not_taken_for_another_layer():
    class HeadFirst(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.body = nn.Linear(6, 4), nn.Linear(batch().inputs[0].numel(), 6)

        def forward(self, x):
            return self.head(self.body(x.flatten(1)).relu())

    client = parse("soteria")(Client(HeadFirst().to(batch().inputs.dtype)))
    with pytest.raises(GradveilError, match=r"acts on 'head.weight', and the last matrix .* is 'body.weight'"):
        client.update(client.params(), batch(), {}, {})


def test_without_features_it_says_what_it_needs():
    context = Context({}, batch())
    with pytest.raises(GradveilError, match="needs the features"):
        Soteria().apply({"w": torch.ones(2, 2)}, {}, {}, context)


def test_under_poisson_sampling_only_those_in_the_step_are_asked():
    local = Local(batch=2, lr=1.0, steps=1, sampling="poisson")
    model, examples = wide(), batch(5)
    defended = parse("soteria(percentile=50)")(Client(model, local=local))
    taken = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0]).double()
    sent, _ = defended.update(defended.params(), examples, {"inclusion": taken.unsqueeze(0)}, {})
    few = Batch(examples.inputs[taken > 0], examples.targets[taken > 0])
    alone = parse("soteria(percentile=50)")(Client(model))
    wanted, _ = alone.update(alone.params(), few, {}, {})
    torch.testing.assert_close(sent, wanted)
