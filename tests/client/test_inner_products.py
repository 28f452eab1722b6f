"""The angle to a target by the factors of a gradient equals the angle of the gradient itself, and so does its slope."""

import gc
from itertools import product

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradveil.client import Client, cosine_distances, cross_entropy
from gradveil.core.types import Batch
from gradveil.gradients.convolution import Geometry, only_position
from gradveil.gradients.fused import cosine_distance, squared_lengths, written_bytes
from gradveil.gradients.inner_products import _MASKED, cut, products, shorter
from gradveil.gradients.objective import Objective
from gradveil.gradients.per_client import obstacle, per_client_cosines, per_client_gradients, shortens

SHAPE = (3, 8, 8)


class Large(nn.Module):
    """Layers of all kinds: a convolution at few positions, one that meets the padding, linear ones, one used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 64, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(2, 64)
        self.wide = nn.Conv2d(64, 128, 3, stride=2, padding=1)
        self.pool = nn.AvgPool2d(2)
        self.once = nn.Conv2d(128, 512, 3, stride=2, padding=1, bias=False)
        self.covered = nn.Conv2d(64, 64, 4)
        self.linear = nn.Linear(512 + 64, 256)
        self.twice = nn.Linear(256, 256)
        self.last = nn.Linear(256, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.norm(self.first(x)))
        y = self.covered(x)
        x = self.once(self.pool(torch.tanh(self.wide(x))))
        x = torch.tanh(self.linear(torch.tanh(torch.cat([x, y], 1)).flatten(1)))
        return self.last(torch.tanh(self.twice(torch.tanh(self.twice(x)))))


def experiment(target_clients=2, examples=2):
    g = torch.Generator().manual_seed(3)
    model = Large().double()
    for parameter in model.parameters():
        parameter.data = 0.1 * torch.randn(parameter.shape, generator=g, dtype=torch.float64)
    inputs = torch.rand((target_clients, examples, *SHAPE), generator=g, dtype=torch.float64).requires_grad_()
    batch = Batch(inputs, torch.randint(10, (target_clients, examples), generator=g))
    params = {name: value.detach() for name, value in model.named_parameters()}
    arguments = Objective(model, cross_entropy), params, {}, batch, {}
    assert obstacle(*arguments) is None
    gradients = per_client_gradients(*arguments)
    noise = {n: torch.randn(v.shape, generator=g, dtype=torch.float64) for n, v in gradients.items()}
    size = {n: v.detach().square().mean().sqrt() for n, v in gradients.items()}
    targets = {n: v.detach() + size[n] * noise[n] for n, v in gradients.items()}
    return arguments, gradients, targets


@pytest.mark.parametrize(("target_clients", "examples"), [(1, 1), (3, 1), (2, 3)])
@pytest.mark.parametrize("left_out", [(), ("once.weight", "first.bias")], ids=["whole", "part"])
def test_per_client_cosines_equal_the_gradient_and_its_slope(target_clients, examples, left_out):
    arguments, gradients, targets = experiment(target_clients, examples)
    targets = {n: v for n, v in targets.items() if n not in left_out}
    assert shortens(*arguments)
    result = per_client_cosines(*arguments, targets, squared_lengths(list(targets.values())))
    expected = cosine_distance([gradients[n] for n in targets], list(targets.values()))
    assert float(expected.detach().min()) > 0.05, "the angle is one that could be got wrong"
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=0)
    slopes = [torch.autograd.grad(value.sum(), arguments[3].inputs)[0] for value in (result, expected)]
    torch.testing.assert_close(*slopes, rtol=0, atol=1e-11 * float(slopes[1].abs().max()))


@pytest.mark.parametrize(("target_clients", "examples"), [(1, 1), (2, 2), (2, 7)])
def test_per_client_cosines_with_a_mask_equal_the_gradient(target_clients, examples):
    """Seven examples at one position have too many pairs: their gradient is made."""
    arguments, gradients, targets = experiment(target_clients, examples)
    g = torch.Generator().manual_seed(9)
    masks = {n: (torch.rand(v.shape, generator=g) < 0.3).double() for n, v in targets.items() if n != "covered.weight"}
    assert len(masks) == len(targets) - 1, "one parameter is whole"
    result = per_client_cosines(*arguments, targets, squared_lengths(list(targets.values())), masks)
    left = [v * masks[n] if n in masks else v for n, v in gradients.items()]
    expected = cosine_distance(left, list(targets.values()))
    assert float(expected.detach().min()) > 0.05, "the angle is one that could be got wrong"
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=0)
    slopes = [torch.autograd.grad(value.sum(), arguments[3].inputs)[0] for value in (result, expected)]
    torch.testing.assert_close(*slopes, rtol=0, atol=1e-11 * float(slopes[1].abs().max()))


def test_masked_target_is_cached_until_modified():
    left, right = torch.ones(1, 2, 1), torch.ones(1, 3, 1)
    target, mask = torch.ones(1, 2, 3), torch.zeros(1, 2, 3)
    assert float(products(left, right, target, mask).sum()) == 0
    mask += 1
    assert products(left, right, target, mask).tolist() == [[6, 6]]
    target *= 2
    assert products(left, right, target, mask).tolist() == [[12, 6]]
    assert products(left, right, target, torch.zeros(1, 2, 3)).tolist() == [[0, 0]]
    half = torch.full((1, 2, 3), 0.5)
    assert products(left, right, target, half).tolist() == [[6, 1.5]], "a mask need not be of zeros and ones"


def test_masks_and_their_squares_are_forgotten_with_the_mask():
    before = len(_MASKED)
    mask = torch.ones(1, 4, 3)
    products(torch.ones(1, 4, 2), torch.ones(1, 3, 2), torch.ones(1, 4, 3), mask)
    del mask
    gc.collect()
    assert len(_MASKED) == before


def test_per_client_cosines_write_no_gradient_of_a_large_layer():
    arguments, gradients, targets = experiment()
    squares = squared_lengths(list(targets.values()))
    per_client_cosines(*arguments, targets, squares)  # cuts the target
    size = sum(value.numel() * value.element_size() for value in gradients.values())
    twice = 2 * sum(gradients[n].numel() * 8 for n in gradients if n.startswith("twice"))
    with torch.no_grad():
        assert written_bytes(lambda: per_client_cosines(*arguments, targets, squares)) < 0.5 * size + twice
    arguments, gradients, targets = experiment(examples=1)
    masks = {n: torch.ones_like(v) for n, v in targets.items()}
    per_client_cosines(*arguments, targets, squares, masks)  # cuts and masks
    with torch.no_grad():
        assert written_bytes(lambda: per_client_cosines(*arguments, targets, squares, masks)) < 0.5 * size + 2 * twice


def test_per_client_cosines_of_a_zero_target_have_no_slope():
    arguments, _, targets = experiment()
    silent = {n: v * torch.tensor([0.0, 1.0]).view(-1, *[1] * (v.dim() - 1)) for n, v in targets.items()}
    result = per_client_cosines(*arguments, silent, squared_lengths(list(silent.values())))
    (slope,) = torch.autograd.grad(result.sum(), arguments[3].inputs)
    assert float(result[0].detach()) == 1
    assert float(slope[0].abs().max()) == 0
    assert float(slope[1].abs().max()) > 0


def test_shortcut_needs_large_layers_with_few_positions():
    assert shorter(512, 512, 1)
    assert not shorter(255, 257, 1), "a small layer stays in the cache"
    assert not shorter(512, 512, 100), "many positions cost more than the gradient"


def test_modified_target_is_split_again():
    target = torch.zeros(1, 2, 3, 3, 3)
    middle = slice(1, 2), slice(1, 2)
    assert float(cut(target, *middle).sum()) == 0
    assert cut(target, *middle) is cut(target, *middle)
    target += 1
    assert float(cut(target, *middle).sum()) == 6
    assert float(cut(target, slice(0, 2), slice(1, 2)).sum()) == 12


class Viewed(nn.Module):
    """Kernels that are kept as matrices: one meets the padding, one covers few positions."""

    def __init__(self) -> None:
        super().__init__()
        self.once, self.few = nn.Parameter(torch.empty(256, 9 * 64)), nn.Parameter(torch.empty(256, 9 * 64))
        self.head = nn.Linear(256, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        once = F.conv2d(x[..., :2, :2], self.once.view(256, 64, 3, 3), stride=2, padding=1)
        few = F.conv2d(x, self.few.view(256, 64, 3, 3))
        return self.head(torch.tanh(once + few).mean((2, 3)))


def judged(model, shape, target_clients=2, dtype=torch.float64, far=1.0, classes=4):
    """Return what `cosines` says of updates that are this far off, and the angle of the updates themselves."""
    g = torch.Generator().manual_seed(5)
    model = model.to(dtype)
    for parameter in model.parameters():
        parameter.data = 0.1 * torch.randn(parameter.shape, generator=g, dtype=torch.float64).to(dtype)
    client = Client(model)
    inputs = torch.rand((target_clients, 2, *shape), generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    batch = Batch(inputs, torch.randint(classes, (target_clients, 2), generator=g))
    sent, _ = client.updates(client.params(), batch, {}, {})
    noise = {n: torch.randn(v.shape, generator=g, dtype=torch.float64).to(dtype) for n, v in sent.items()}
    targets = {n: (v + far * v.std() * noise[n]).detach() for n, v in sent.items()}
    expected = cosine_distance(list(sent.values()), list(targets.values()))
    return cosine_distances(
        client, client.params(), batch, {}, targets, squared_lengths(list(targets.values()))
    ), expected


def test_per_client_cosines_accept_a_kernel_that_is_a_view():
    result, expected = judged(Viewed(), (64, 3, 3))
    assert result is not None
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=0)


def test_shortcut_is_not_used_in_half_precision():
    layers = nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 4)
    assert judged(nn.Sequential(*layers), (300,), dtype=torch.float32)[0] is not None
    assert judged(nn.Sequential(*layers), (300,), dtype=torch.bfloat16)[0] is None


def test_per_client_cosines_of_rounding_are_not_zero():
    result, _ = judged(nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 4)), (300,), 16, torch.float32, far=0.0)
    assert result is not None
    assert 0 < float(result.detach().min()) <= float(result.detach().max()) < 1e-6


class Hidden(torch.autograd.Function):
    """A product with a weight that is out of sight of autograd."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, weight):
        return F.linear(x, weight)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, *uppers):
        x, weight = ctx.saved_tensors
        return uppers[0] @ weight, uppers[0].mT @ x


class Opaque(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(Hidden.apply(input, self.weight)) + self.bias


@pytest.mark.parametrize(
    ("first", "shape"),
    [
        (nn.Identity(), (300,)),
        (nn.BatchNorm1d(300, track_running_stats=False), (300,)),
        (nn.Sequential(nn.Conv2d(4, 12, 3, groups=2), nn.Flatten()), (4, 7, 7)),
    ],
    ids=["plain", "batch statistics", "groups"],
)
def test_shortcut_of_one_target_client_needs_that_of_many(first, shape):
    """His gradients come by plain double backward, for models that the sweep for many refuses, too."""
    result, _ = judged(nn.Sequential(first, nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 4)), shape, target_clients=1)
    assert (result is not None) == isinstance(first, nn.Identity)


def test_shortcut_is_not_used_if_batched_gradients_are_wrong():
    assert judged(nn.Sequential(Opaque(300, 300), nn.Tanh(), nn.Linear(300, 4)), (300,), target_clients=1)[0] is None


GEOMETRIES = [
    (Geometry((k, 3), (s, 1), (p, 1), (d, 1)), high)
    for k, s, p, d, high in product((1, 2, 3, 5), (1, 2), (0, 1, 2), (1, 2), (1, 2, 3))
    if high + 2 * p >= d * (k - 1) + 1 and p < k * d
]
GEOMETRIES.append((Geometry((2, 3), (20, 1), (4, 1), (2, 1)), 4))  # the kernel meets padding alone


def test_shortcut_counts_only_the_kernel_within_the_image():
    g = torch.Generator().manual_seed(0)
    met = 0
    for geometry, high in GEOMETRIES:
        x = torch.randn(2, 3, high, 1, generator=g, dtype=torch.float64)
        weight = torch.randn(4, 3, *geometry.kernel, generator=g, dtype=torch.float64).requires_grad_()
        expected = F.conv2d(x, weight, None, *geometry[1:])
        only = only_position(high, 1, geometry)
        assert (only is not None) == (expected[0, 0].numel() == 1)
        if only is None:
            continue
        window = only[1]
        part = weight[..., window.kernel_rows, window.kernel_columns].flatten(1)
        assert only[0].kernel[0] * only[0].kernel[1] == part.shape[1] // 3
        seen = x[..., window.rows, window.columns].flatten(1)
        torch.testing.assert_close(F.linear(seen, part), expected.flatten(1))
        met += part.shape[1] < weight[0].numel()
    assert met > 10, "some kernels are cut"
    assert only_position(2, 1, Geometry((1, 3), (9, 1), (2, 1), (1, 1))) is None, "this one ends before the image"
