"""Scaled or known-masked updates are compared by direction without being computed."""

import pytest
import torch
from torch import nn

from gradveil.client import Client, cosine_distances
from gradveil.core.types import Batch
from gradveil.defences import parse
from gradveil.defences.ats_scores import Unchanged
from gradveil.defences.dp import Clip
from gradveil.gradients.fused import cosine_distance, squared_lengths
from tests.client.test_inner_products import experiment


class Never(Unchanged):
    """A transform of images that nobody is to ask for."""

    def apply(self, batch, noise, domain):
        raise AssertionError


def test_cosine_distances_of_clipped_updates_equal_the_reference():
    """Its direction is the gradient's, and so is the distance; what is done beside that needs the gradient."""
    arguments, _, targets = experiment(examples=1)
    objective, params, _, batch, _ = arguments
    client = parse("dp(clip=0.01, sigma=1)")(Client(objective.model))
    spec = client.noise_spec(params, Batch(*(value[0] for value in batch)))
    noise = {name: value.expand(2, *value.shape) for name, value in spec.neutral().items()}
    squares = squared_lengths(list(targets.values()))
    result = cosine_distances(client, params, batch, noise, targets, squares, list(spec))
    assert result is not None
    sent, _ = client.updates(params, batch, noise, {})
    assert float(squared_lengths(list(sent.values())).detach().max()) < 0.0101**2, "clipped"
    expected = cosine_distance(list(sent.values()), list(targets.values()))
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=0)
    slopes = [torch.autograd.grad(value.sum(), batch.inputs)[0] for value in (result, expected)]
    torch.testing.assert_close(*slopes, rtol=0, atol=1e-11 * float(slopes[1].abs().max()))
    assert cosine_distances(client, params, batch, noise, targets, squares, list(spec)[:-1]) is None, (
        "some of the noise is on"
    )


@pytest.mark.parametrize(
    "text", ["prune(0.9)", "clip(0.01) + dgp(top=0.2, bottom=0.6, feedback=false)", "clip-example(0.01) + topk(0.2)"]
)
def test_cosine_distances_with_known_masks_equal_the_reference(text):
    objective, params, _, batch, _ = experiment(examples=1)[0]
    client = parse(text)(Client(objective.model))
    observed = client.updates(params, Batch(batch.inputs.detach() + 0.3, batch.targets), {}, {})[0]
    pinned = torch.func.vmap(client.evidence)(observed)
    squares = squared_lengths(list(observed.values()))
    assert cosine_distances(client, params, batch, pinned, observed, squares) is None, "the borders are known as well"
    masks = {n: v for n, v in pinned.items() if "border" not in n}
    result = cosine_distances(client, params, batch, masks, observed, squares)
    assert result is not None
    sent, _ = client.updates(params, batch, masks, {})
    expected = cosine_distance(list(sent.values()), list(observed.values()))
    assert float(expected.detach().min()) > 1e-3, "the angle is one that could be got wrong"
    torch.testing.assert_close(result, expected, rtol=1e-10, atol=0)
    slopes = [torch.autograd.grad(value.sum(), batch.inputs)[0] for value in (result, expected)]
    torch.testing.assert_close(*slopes, rtol=0, atol=1e-10 * float(slopes[1].abs().max()))
    first = next(iter(masks))
    some = {n: v for n, v in masks.items() if n != first}
    assert cosine_distances(client, params, batch, some, observed, squares) is None, "one mask is computed"


def test_cosine_distances_shortcut_needs_a_large_network():
    arguments, _, targets = experiment()
    objective, params, _, batch, _ = arguments
    rest = params, batch, {}, targets, squared_lengths(list(targets.values()))
    assert cosine_distances(Client(objective.model), *rest) is not None
    assert cosine_distances(Client(objective.model, send=Clip(1.0)), *rest) is not None
    assert cosine_distances(Client(objective.model, send=Clip(1.0, scope="layer")), *rest) is None
    assert cosine_distances(Client(objective.model, step=Clip(1.0, per_example=True)), *rest) is None, "two examples"
    small = nn.Sequential(nn.Flatten(), nn.Linear(192, 10)).double()
    client = Client(small)
    assert cosine_distances(Client(small, batch=(Never(),)), client.params(), *rest[1:]) is None, (
        "without a look at images"
    )
    target = client.updates(client.params(), batch, {}, {})[0]
    assert cosine_distances(client, client.params(), batch, {}, target, batch.inputs.new_ones(2)) is None
