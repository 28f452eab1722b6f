"""Batch defences under local training: drawn anew in every step or epoch, against loops by hand."""

import pytest
import torch
from torch import nn

from gradveil.client import Client, LazyNoise, Local, Task, drawn_update, transformed_batch
from gradveil.core.noise import Key
from gradveil.core.tree import select
from gradveil.core.types import Batch, Domain
from gradveil.defences import parse
from gradveil.spaces import ImageSpace

N, B, T = 5, 2, 5
"""Two steps are an epoch, of four of the five examples: three are begun."""
DOMAIN = Domain(ImageSpace.between(-1, 2, (1, 1, 1)), 3)


def examples(count: int = N) -> Batch:
    u = torch.rand(count, 1, 4, 4, generator=Key(0).generator(), dtype=torch.float64)
    return Batch(3 * u - 1, torch.arange(count) % 3)


def client(text: str, **local) -> Client:
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            drawn = torch.randn(parameter.shape, generator=Key(1, (number,)).generator(), dtype=torch.float64)
            parameter.copy_(0.4 * drawn)
    settings = Local(**{"batch": B, "lr": 0.3, "steps": T, **local})
    return parse(text)(Client(model, local=settings, domain=DOMAIN))


def by_hand(defended: Client, batch_of, weights=None) -> dict[str, torch.Tensor]:
    """Train on the batches that are given, step by step."""
    before = defended.params()
    params = {name: value.clone().requires_grad_() for name, value in before.items()}
    for t in range(T):
        inputs, targets = batch_of(t)
        out = torch.func.functional_call(defended.model, params, (inputs,))
        losses = -(targets * out.log_softmax(-1)).sum(-1)
        loss = losses.mean() if weights is None else (weights[t] * losses).sum() / B
        slopes = torch.autograd.grad(loss, list(params.values()))
        moved = zip(params.items(), slopes, strict=True)
        params = {name: (value - 0.3 * slope).detach().requires_grad_() for (name, value), slope in moved}
    return {name: before[name] - value.detach() for name, value in params.items()}


def test_mixup_draws_new_mixtures_per_batch():
    defended, batch = client("mixup(0.7)"), examples()
    noise = defended.noise_spec(defended.params(), batch).sample(Key(3))
    c, partner = noise["batch.0.coefficient"], noise["batch.0.partner"]
    assert c.shape == (T,)
    assert len(c.unique()) == T
    assert partner.shape == (T, 1, B)
    assert {tuple(row.tolist()) for row in partner[:, 0]} == {(0, 1), (1, 0)}
    hot = torch.eye(3, dtype=torch.float64)[batch.targets]

    def batch_of(t):
        rows = noise["schedule"][t]
        others = rows[partner[t, 0]]
        return tuple(c[t] * value[rows] + (1 - c[t]) * value[others] for value in (batch.inputs, hot))

    sent, _ = defended.update(defended.params(), batch, noise, {})
    torch.testing.assert_close(sent, by_hand(defended, batch_of))


@pytest.mark.parametrize("text", ["instahide(k=3)", "ats", "ats + instahide(k=2)", "label-smoothing(0.2) + instahide"])
def test_batch_transform_of_all_examples_is_redrawn_per_epoch(text: str):
    defended, batch = client(text), examples()
    noise = defended.noise_spec(defended.params(), batch).sample(Key(3))
    signs = noise["batch.0.sign"] if "ats" in text or "instahide(" in text else noise["batch.1.sign"]
    assert len(signs) == 3
    assert not torch.equal(signs[0], signs[1])
    epochs = []
    for e in range(3):
        made = batch
        for i, transform in enumerate(defended.batch):
            row = {name: value[e] for name, value in select(noise, f"batch.{i}").items()}
            made = transform.apply(made, row, DOMAIN)
        hot = made.targets if made.targets.dim() == 2 else torch.eye(3, dtype=torch.float64)[made.targets]
        epochs.append(Batch(made.inputs, hot))

    def batch_of(t):
        return tuple(value[noise["schedule"][t]] for value in epochs[t // 2])

    sent, _ = defended.update(defended.params(), batch, noise, {})
    torch.testing.assert_close(sent, by_hand(defended, batch_of))


def test_poisson_step_transforms_all_examples_and_counts_drawn_ones():
    defended, batch = client("instahide(k=2) + mixup(1)", sampling="poisson"), examples()
    noise = defended.noise_spec(defended.params(), batch).sample(Key(4))
    assert noise["batch.1.partner"].shape == (T, 1, N)

    def batch_of(t):
        hide, mix = defended.batch
        made = hide.apply(batch, {n: v[t // 2] for n, v in select(noise, "batch.0").items()}, DOMAIN)
        return mix.apply(made, {n: v[t] for n, v in select(noise, "batch.1").items()}, DOMAIN)

    sent, _ = defended.update(defended.params(), batch, noise, {})
    torch.testing.assert_close(sent, by_hand(defended, batch_of, noise["inclusion"]))


def test_batch_noise_is_drawn_lazily_per_epoch():
    defended, batch = client("instahide(k=3) + mixup(1)"), examples()
    params, noise = defended.params(), {}
    asked = []
    parts = defended.noise_parts(params, batch)
    once = parts.once.sample(Key(5))
    for name, spec in (("step", parts.step), ("epoch", parts.epoch)):
        noise[name] = [spec.sample(Key(5).child(name, number)) for number in range(T)]

    def of(name):
        return lambda number: asked.append((name, number)) or noise[name][number]

    ((sent, _),) = defended.pipeline(params, [Task(batch, LazyNoise(once, of("step"), of("epoch")), {})])
    assert [number for name, number in asked if name == "epoch"] == [0, 1, 2]
    assert [number for name, number in asked if name == "step"] == list(range(T))
    drawn, _ = drawn_update(defended, params, batch, Key(5), {})
    assert all(torch.equal(sent[name], drawn[name]) for name in sent)


@pytest.mark.parametrize("sampling", ["batches", "poisson"])
def test_transformed_batch_has_each_examples_first_version(sampling: str):
    defended, batch = client("instahide(k=3)", sampling=sampling, steps=3), examples()
    noise = defended.noise_spec(defended.params(), batch).sample(Key(6))
    (hide,) = defended.batch
    epochs = [hide.apply(batch, {n: v[e] for n, v in select(noise, "batch.0").items()}, DOMAIN) for e in range(2)]
    order = noise[defended.local.order]
    result = transformed_batch(defended, batch, noise)
    kinds = set()
    for example in range(N):
        there = [t for t in range(3) if (order[t, example] > 0 if sampling == "poisson" else example in order[t])]
        expected = epochs[there[0] // 2].inputs if there else batch.inputs
        kinds.add(there[0] // 2 if there else None)
        torch.testing.assert_close(result.inputs[example], expected[example])
        assert float(result.targets[example].sum()) == pytest.approx(1)
    assert len(kinds) > 1
