"""Surgeries: the same function where they promise it, the given model untouched, and nothing hidden left."""

from copy import deepcopy
from functools import partial
from math import prod

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradveil.core.errors import GradveilError
from gradveil.core.noise import Key
from gradveil.core.types import Batch
from gradveil.nn.check.static import layer_problems
from gradveil.nn.normalisation import BatchStatistics, FrozenNorm, InstanceNorm, LayerNorm
from gradveil.nn.stochastic import model_noise, noise_names
from gradveil.nn.surgery import (
    TOLERANCE_DOUBLE,
    Comparison,
    prepare,
    remove_inplace,
    replace_activations,
    replace_batchnorm,
    replace_dropout,
    replace_layernorm,
    replace_recurrent,
)
from tests.nn.test_models import assert_batched_equals_looped


def filled(model: nn.Module, seed: int = 0) -> nn.Module:
    """Give weights, biases and statistics values that make a difference."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.dtype.is_floating_point:
            tensor.data.uniform_(0.2, 1.5, generator=generator)
    return model


def network(**changes: nn.Module) -> nn.Module:
    parts = {
        "conv": nn.Conv2d(2, 4, 3),
        "norm": nn.BatchNorm2d(4),
        "act": nn.ReLU(inplace=True),
        "drop": nn.Dropout2d(0.5),
        "flat": nn.Flatten(),
        "hidden": nn.Linear(64, 6),
        "last": nn.LayerNorm(6),
        "fc": nn.Linear(6, 3),
    } | changes
    model = nn.Sequential()
    for name, module in parts.items():
        model.add_module(name, module)
    return filled(model)


def gradient(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    loss = F.cross_entropy(model(x), torch.zeros(len(x), dtype=torch.long))
    slopes = torch.autograd.grad(loss, list(model.parameters()))
    return dict(zip(dict(model.named_parameters()), slopes, strict=True))


@pytest.fixture
def x(generator: torch.Generator) -> Tensor:
    return torch.rand(3, 2, 6, 6, generator=generator)


def test_frozen_batchnorm_is_batchnorm_in_evaluation(x: Tensor) -> None:
    model = network(drop=nn.Identity())
    frozen = replace_batchnorm(model, "frozen")
    assert isinstance(frozen.norm, FrozenNorm)
    torch.testing.assert_close(frozen.train()(x), deepcopy(model).eval()(x))
    assert set(frozen.state_dict()) == set(model.state_dict()) - {"norm.num_batches_tracked"}
    torch.testing.assert_close(gradient(frozen, x), gradient(deepcopy(model).eval(), x))


@pytest.mark.parametrize("affine", [True, False])
def test_batch_statistics_are_batchnorm_in_training(affine: bool, x: Tensor) -> None:
    model = network(drop=nn.Identity(), norm=nn.BatchNorm2d(4, affine=affine, eps=1e-3))
    explicit = replace_batchnorm(model, "batch_statistics")
    assert isinstance(explicit.norm, BatchStatistics)
    torch.testing.assert_close(gradient(explicit, x), gradient(deepcopy(model), x))
    assert not list(explicit.norm.buffers())


def test_group_norm_takes_over_the_weights() -> None:
    model = network()
    group = replace_batchnorm(model, "group", groups=4).norm
    assert isinstance(group, nn.GroupNorm)
    assert group.num_groups == 4
    assert torch.equal(group.weight, model.norm.weight)
    assert group.weight is not model.norm.weight


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", [(6,), (3, 2)])
def test_explicit_layer_norm_equals_that_of_torch(affine: bool, shape: tuple, generator: torch.Generator) -> None:
    norm = filled(nn.LayerNorm(shape, elementwise_affine=affine, eps=1e-3))
    values = torch.randn(4, 5, *shape, generator=generator)
    explicit = replace_layernorm(norm)
    assert isinstance(explicit, LayerNorm)
    torch.testing.assert_close(explicit(values), norm(values))


@pytest.mark.parametrize("affine", [True, False])
def test_explicit_instance_norm_equals_that_of_torch(affine: bool, x: Tensor) -> None:
    norm = filled(nn.InstanceNorm2d(2, affine=affine))
    explicit = replace_layernorm(norm)
    assert isinstance(explicit, InstanceNorm)
    torch.testing.assert_close(explicit(x), norm(x))


@pytest.mark.parametrize("kind", [FrozenNorm, BatchStatistics, InstanceNorm])
def test_explicit_norms_can_be_batched(kind: type[nn.Module], generator: torch.Generator) -> None:
    layers = nn.Sequential(nn.Conv2d(2, 3, 3), kind(3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3))
    assert_batched_equals_looped(filled(layers), (2, 4, 4), generator)


@pytest.mark.parametrize(
    ("drop", "shape"),
    [
        (nn.Dropout1d, (64, 5)),
        (nn.Dropout1d, (64, 5, 7)),
        (nn.Dropout2d, (64, 5)),
        (nn.Dropout2d, (64, 5, 7)),
        (nn.Dropout2d, (64, 5, 3, 3)),
        (nn.Dropout3d, (64, 5, 3, 3)),
        (nn.Dropout3d, (64, 5, 3, 3, 3)),
    ],
)
@pytest.mark.filterwarnings("ignore:dropout2d")
def test_explicit_dropout_draws_as_many_values_as_torch(drop: type[nn.Module], shape: tuple[int, ...]) -> None:
    old, x = drop(0.5).train(), torch.ones(shape)
    (new,) = replace_dropout(nn.Sequential(old))
    kept = old(x).flatten(1) > 0
    drawn = new.noise(x)["mask"].shape
    shared = bool((kept == kept[:, :1]).all())
    assert shared == (prod(drawn[1:]) == 1), "whole examples are dropped"


def test_explicit_dropout_takes_the_place(x: Tensor) -> None:
    model = replace_dropout(network(norm=nn.Identity(), act=nn.ReLU()))
    assert noise_names(model) == {"drop.mask"}
    assert model_noise(model, x)["drop.mask"].shape == (3, 4, 1, 1)
    assert set(model_noise(model, x).sample(Key(0))["drop.mask"].unique().tolist()) <= {0.0, 1.0}
    assert isinstance(replace_dropout(network().eval(), active_only=True).drop, nn.Dropout2d)


class Remembering(nn.Module):
    """Keeps a running mean in a buffer, which it overwrites."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 3)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        z = y - self.mean
        self.mean.mul_(0.9).add_(0.1 * y.detach().mean(0))
        return z


def test_a_buffer_that_a_model_overwrites_is_not_frozen_in_silence() -> None:
    """Its second local step would have another gradient."""
    batch = Batch(torch.rand(4, 6), torch.tensor([0, 1, 2, 0]))
    _, done = prepare(Remembering(), batch=batch)
    assert done == []


def test_activations_and_inplace(x: Tensor) -> None:
    model = network()
    assert isinstance(replace_activations(model).act, nn.Softplus)
    assert isinstance(replace_activations(model, nn.Sigmoid).act, nn.Sigmoid)
    assert (remove_inplace(model).act.inplace, model.act.inplace) == (False, True)


def test_prepare_leaves_nothing_to_do(x: Tensor) -> None:
    model = network()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    ready, done = prepare(model)
    assert done == [
        "in-place operations removed: module 'act'",
        "BatchNorm replaced (batch_statistics): module 'norm'",
        "LayerNorm or InstanceNorm made explicit: module 'last'",
        "hidden dropout made explicit: module 'drop'",
    ]
    assert layer_problems(ready) == []
    assert len(layer_problems(model)) == 4
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())
    assert prepare(ready)[1] == []
    mode = deepcopy(model)
    mode.drop.eval()
    torch.testing.assert_close(gradient(ready, x), gradient(mode, x))


def test_shared_layers_stay_shared() -> None:
    norm = nn.BatchNorm1d(3)
    replaced = replace_batchnorm(nn.Sequential(nn.Linear(3, 3), norm, nn.Linear(3, 3), norm), "group", groups=1)
    assert replaced[1] is replaced[3]


def test_a_layer_alone_is_replaced() -> None:
    assert isinstance(replace_batchnorm(nn.BatchNorm2d(4), "group"), nn.GroupNorm)


def test_modes_and_frozen_weights_are_kept() -> None:
    model = network().eval()
    model.norm.weight.requires_grad_(False)
    replaced = replace_batchnorm(model, "frozen")
    assert not replaced.norm.training
    assert not replaced.norm.weight.requires_grad
    assert replaced.norm.bias.requires_grad


BAD = [
    (lambda: replace_batchnorm(network(), "layer"), r"unknown way 'layer' -> choose one of: group, frozen, batch_stat"),
    (lambda: replace_batchnorm(network(), "group", groups=3), r"3 groups do not divide 4 channels -> .*: 1, 2, 4"),
    (
        lambda: replace_batchnorm(nn.BatchNorm2d(4, track_running_stats=False), "frozen"),
        r"keeps no running statistics that could be frozen -> choose 'group' or 'batch_statistics'",
    ),
]


@pytest.mark.parametrize(("surgery", "message"), BAD)
def test_impossible_surgeries_are_explained(surgery, message: str) -> None:
    with pytest.raises(GradveilError, match=message):
        surgery()


@pytest.mark.parametrize(("times", "noticed"), [(0.5, False), (2.0, True)])
def test_difference_beyond_rounding_is_noticed(times: float, noticed: bool) -> None:
    before = filled(nn.Linear(5, 3, bias=False)).double()
    after = deepcopy(before)
    after.weight.data *= 1 + times * TOLERANCE_DOUBLE
    batch = Batch(torch.rand(2, 5, generator=torch.Generator().manual_seed(0)), torch.zeros(2, dtype=torch.long))
    found = Comparison(batch, lambda outputs, _: outputs.sum(1)).difference(before, after)
    assert (found is not None) == noticed
    if noticed:
        assert found == "a difference of 0.002% in the outputs"


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("both_ways", [True, False])
def test_recurrent_layers_compute_the_same_step_by_step(kind, first, both_ways):
    torch.manual_seed(0)
    old = nn.Sequential(kind(5, 7, num_layers=2, batch_first=first, bidirectional=both_ways))
    new, x = replace_recurrent(old), torch.randn(3, 4, 5)
    assert [name for name, _ in old.named_parameters()] == [name for name, _ in new.named_parameters()]
    for one, other in ((old(x), new(x)), (old(x[0]), new(x[0])), (old[0](x, old(x)[1]), new[0](x, old(x)[1]))):
        torch.testing.assert_close(one, other)
    assert not layer_problems(new)
    assert layer_problems(old)


@pytest.mark.parametrize(
    "kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell, partial(nn.RNNCell, nonlinearity="relu", bias=False)]
)
def test_recurrent_cells_compute_the_same(kind):
    torch.manual_seed(0)
    old = nn.Sequential(kind(5, 7))
    new, x = replace_recurrent(old), torch.randn(3, 5)
    assert [name for name, _ in old.named_parameters()] == [name for name, _ in new.named_parameters()]
    for one, other in ((old(x), new(x)), (old(x[0]), new(x[0])), (old[0](x, old(x)), new[0](x, old(x)))):
        torch.testing.assert_close(one, other)
    assert not layer_problems(new)
    assert [problem.where for problem in layer_problems(old)] == ["0"]


def test_recurrent_layers_that_project_or_drop_out_stay():
    for old in (nn.LSTM(5, 7, proj_size=3), nn.GRU(5, 7, num_layers=2, dropout=0.5)):
        assert type(replace_recurrent(nn.Sequential(old))[0]) is type(old)


def test_prepare_makes_a_recurrent_model_one_that_batches():
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.steps, self.head = nn.GRU(3, 4, batch_first=True), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.steps(x)[0][:, -1])

    torch.manual_seed(0)
    batch = Batch(torch.randn(4, 5, 3), torch.arange(4) % 2)
    prepared, done = prepare(Last(), batch=batch)
    assert done == ["recurrent layers computed step by step: module 'steps'"]
    assert not layer_problems(prepared)


def test_a_recurrent_layer_keeps_what_users_models_ask_of_it_and_refuses_packed_sequences():
    old = nn.LSTM(5, 7, batch_first=True)
    new = replace_recurrent(nn.Sequential(old))[0]
    new.flatten_parameters()
    for name in ("input_size", "hidden_size", "num_layers", "bidirectional", "batch_first"):
        assert getattr(new, name) == getattr(old, name)
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(2, 4, 5), torch.tensor([4, 2]), batch_first=True)
    with pytest.raises(GradveilError) as caught:
        new(packed)
    assert "padded" in caught.value.problems[0].remedy
