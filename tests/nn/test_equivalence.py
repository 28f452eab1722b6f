"""`prepare` audits the network that it was given: replacements that compute something else are refused by name."""

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradveil
from gradveil.core.errors import GradveilError
from gradveil.core.types import Batch
from gradveil.nn.check import check
from gradveil.nn.normalisation import BatchStatistics, LayerNorm
from gradveil.nn.stochastic_layers import Dropout
from gradveil.nn.surgery import prepare
from tests.nn.test_surgery import filled, gradient


class LayerNorm2d(nn.LayerNorm):
    """Normalise the channels of [B, C, H, W], as timm's layer of this name does."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps).permute(
            0, 3, 1, 2
        )


class Attention(nn.Module):
    """One head whose dropout is inside the fused product, as in timm."""

    def __init__(self, width: int, p: float = 0.0) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.drop = nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        p = self.drop.p if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, dropout_p=p)


class Overwriting(nn.Module):
    """Rely on the layer to overwrite its input: without `inplace` nothing would be rectified."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.0
        self.act(x)
        return x


def network(*middle: nn.Module, width: int = 6) -> nn.Module:
    """Make a model of [B, width, 6, 6] with something in its middle."""
    return filled(nn.Sequential(*middle, nn.Flatten(), nn.Linear(36 * width, 3)).double())


@pytest.fixture
def batch(generator: torch.Generator) -> Batch:
    return Batch(torch.rand(3, 6, 6, 6, generator=generator).double() - 0.5, torch.tensor([0, 2, 1]))


def prepared(model: nn.Module, batch: Batch) -> tuple[nn.Module, list[str]]:
    """Prepare a model, and see for ourselves that it computes the same."""
    ready, done = prepare(model, batch=batch)
    expected = deepcopy(model)
    for module in expected.modules():
        if isinstance(module, nn.Dropout | nn.Dropout2d):
            module.eval()
    torch.testing.assert_close(gradient(ready, batch.inputs), gradient(expected, batch.inputs))
    return ready, done


def test_a_channels_first_layer_norm_keeps_its_forward(batch: Batch) -> None:
    ready, done = prepared(network(LayerNorm2d(6), nn.ReLU(inplace=True)), batch)
    assert type(ready[0]) is LayerNorm2d
    assert done[1:] == ["layer normalisation computed by its formula: module '0'"]


def test_a_channels_first_layer_norm_is_a_problem_until_it_is_prepared(batch: Batch) -> None:
    """It calls F.layer_norm, whose batched derivatives are wrong in torch."""
    net = network(nn.Conv2d(6, 6, 3, padding=1), nn.Tanh(), LayerNorm2d(6))
    assert [(p.where, "prepare" in p.remedy) for p in check(net, batch)] == [("2", True)]
    assert check(prepared(net, batch)[0], batch) == []


class Elementary(nn.LayerNorm):
    """Normalise the channels by elementary operations."""

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(1, keepdim=True)
        scaled = centred / (centred.square().mean(1, keepdim=True) + self.eps).sqrt()
        return scaled * self.weight.view(1, -1, 1, 1) + self.bias.view(1, -1, 1, 1)


def test_a_subclass_whose_forward_can_be_batched_is_accepted(batch: Batch) -> None:
    model = network(nn.Conv2d(6, 6, 3, padding=1), nn.Tanh(), Elementary(6))
    assert prepared(model, batch)[1] == []
    assert check(model, batch) == []


def test_an_inherited_forward_is_a_problem_since_it_is_torchs(batch: Batch) -> None:
    class Renamed(nn.LayerNorm):
        pass

    problems = check(network(Renamed(6)), batch)
    assert {problem.where for problem in problems} == {"0"}
    assert problems[0].remedy.startswith("compute it by its formula")


@pytest.mark.parametrize(
    "middle",
    [
        (nn.ReLU(inplace=True),),
        (nn.BatchNorm2d(6), nn.Dropout(0.5), nn.ReLU(inplace=True)),
        (nn.LayerNorm(6), nn.Dropout2d(0.9)),
        (nn.InstanceNorm2d(6, affine=True),),
        (nn.utils.parametrizations.weight_norm(nn.Conv2d(6, 6, 1)), nn.LayerNorm((6, 6, 6))),
        (nn.utils.parametrizations.spectral_norm(nn.Conv2d(6, 6, 1)), nn.BatchNorm2d(6)),
        (nn.Flatten(2), Attention(36), nn.LayerNorm(36)),
    ],
    ids=["in-place", "batch-norm", "layer-norm", "instance-norm", "weight-norm", "spectral-norm", "attention"],
)
def test_replacements_compute_the_same(middle: tuple[nn.Module, ...], batch: Batch) -> None:
    assert prepared(network(*middle), batch)[1]


def test_dropout_in_fused_attention_stays_hidden_and_is_reported_by_the_check(batch: Batch) -> None:
    model = network(nn.Flatten(2), Attention(36, p=0.5))
    assert isinstance(prepare(model, batch=batch)[0][1].drop, Dropout)
    assert ("1", True) in [(p.where, "two passes over the same inputs differ" in p.what) for p in check(model, batch)]


def test_a_layer_that_must_overwrite_its_input_is_refused_by_name(batch: Batch) -> None:
    model = network(nn.Tanh(), Overwriting())
    with pytest.raises(
        GradveilError, match=r"^1\.act: in-place operations removed: a difference of .*% in the outputs"
    ):
        prepare(model, batch=batch)


def test_parametrised_and_hooked_layers_are_kept(batch: Batch) -> None:
    parametrised, hooked = nn.LayerNorm(6), nn.LayerNorm(6)
    nn.utils.parametrize.register_parametrization(parametrised, "weight", nn.Softplus())
    hooked.register_forward_hook(lambda _module, _inputs, outputs: 2 * outputs)
    model = network(parametrised, hooked, nn.LayerNorm(6))
    ready, done = prepared(model, batch)
    assert done[0] == "LayerNorm or InstanceNorm made explicit: module '2'"
    assert done[1] == "layer normalisation computed by its formula: modules '0', '1'"
    assert isinstance(ready[0], nn.LayerNorm)
    assert check(ready, batch) == []


def test_tied_weights_stay_tied(batch: Batch) -> None:
    """Of one layer in two places, and of two layers with one tensor."""
    shared, first, second = nn.BatchNorm2d(6), nn.LayerNorm(6), nn.LayerNorm(6)
    second.weight = first.weight
    model = network(shared, nn.Tanh(), shared, first, second)
    ready, _ = prepared(model, batch)
    assert ready[0] is ready[2]
    assert ready[3].weight is ready[4].weight
    assert ready[3].weight is not first.weight
    assert dict(ready.named_parameters()).keys() == dict(model.named_parameters()).keys()


def test_batchnorm_in_evaluation_mode_is_not_replaced_along_with_others(batch: Batch) -> None:
    model = network(nn.BatchNorm2d(6), nn.Tanh(), nn.BatchNorm2d(6))
    model[0].eval()
    ready, done = prepared(model, batch)
    assert done == ["BatchNorm replaced (batch_statistics): module '2'"]
    assert (type(ready[0]), type(ready[2])) == (nn.BatchNorm2d, BatchStatistics)


@pytest.mark.parametrize("way", ["group", "frozen"])
def test_a_meant_change_is_listed_and_all_else_compared(way: str, batch: Batch) -> None:
    _, done = prepare(network(nn.BatchNorm2d(6), nn.LayerNorm(6)), batchnorm=way, batch=batch)
    assert done[0] == f"BatchNorm replaced ({way}), which changes what the model computes: module '0'"
    with pytest.raises(GradveilError, match=r"^1\.act: "):
        prepare(network(nn.BatchNorm2d(6), Overwriting()), batchnorm=way, batch=batch)


def test_a_type_that_a_model_looks_for_is_not_replaced_in_silence(batch: Batch) -> None:
    """A model may treat layers by their type, and does something else after a replacement."""

    class Looking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(6)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x) if type(self.norm) is nn.LayerNorm else x

    with pytest.raises(GradveilError, match=r"^0\.norm: LayerNorm or InstanceNorm made explicit: a difference of"):
        prepare(network(Looking()), batch=batch)
    model = nn.Sequential(Looking(), nn.Flatten(), nn.Linear(144, 3))
    model[0].norm = nn.LayerNorm(12)
    images = torch.rand(2, 1, 12, 12, generator=torch.Generator().manual_seed(0))
    with pytest.raises(GradveilError, match=r"module '0\.norm' \(LayerNorm\): .*another network would be audited"):
        gradveil.audit(model, (images, torch.tensor([0, 2])), prepare=True, attacks=["ig(iterations=1)"])


def test_comparing_leaves_the_model_and_random_numbers_alone(batch: Batch) -> None:
    model = network(nn.BatchNorm2d(6), nn.Dropout(0.5), nn.ReLU(inplace=True))
    before, state = deepcopy(model.state_dict()), torch.get_rng_state()
    prepare(model, batch=batch)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_single_example_suffices(batch: Batch) -> None:
    """Training-mode BatchNorm takes no variance of one value."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(216, 6), nn.BatchNorm1d(6), Overwriting(), nn.Linear(6, 3)).double()
    with pytest.raises(GradveilError, match=r"^3\.act: "):
        prepare(model, batch=Batch(batch.inputs[:1], batch.targets[:1]))


def test_explicit_layer_norm_is_torchs(batch: Batch) -> None:
    assert isinstance(prepared(network(nn.LayerNorm(6)), batch)[0][0], LayerNorm)
