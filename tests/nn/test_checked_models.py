"""`check`: silent about what is right, and says what is wrong, where, and what to do, all at once."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from gradveil.core.types import Batch
from gradveil.nn.check import check
from gradveil.nn.initial_weights import drawing_from
from gradveil.nn.models import MODELS, build
from gradveil.nn.stochastic_layers import with_dropout
from gradveil.nn.surgery import prepare
from tests.nn.unsuitable_models import (
    Apply,
    FunctionalNorm,
    Holding,
    OnceDifferentiable,
    Recurrent,
    SelfAttention,
    Tied,
    Unused,
    frozen,
    hidden_dropout,
    item_loss,
    model_of,
    with_nan,
)


@pytest.fixture(autouse=True)
def _fixed_weights():
    with drawing_from(torch.Generator().manual_seed(0)):
        yield


def batch(**changes: Tensor) -> Batch:
    inputs = torch.rand(4, 2, 2, 2, generator=torch.Generator().manual_seed(1))
    return Batch(**({"inputs": inputs, "targets": torch.tensor([0, 1, 2, 0])} | changes))


NAN = torch.tensor(float("nan"))
GOOD = batch()
MODELS_WRONG: list[tuple[str, Callable[[], nn.Module], str]] = [
    ("dropout", lambda: model_of(nn.Dropout(0.2)), r"2: Dropout draws its mask .*-> replace it: .*replace_dropout"),
    (
        "alpha-dropout",
        lambda: model_of(nn.AlphaDropout(0.2)),
        r"2: AlphaDropout in training mode draws from the global",
    ),
    (
        "functional-dropout",
        hidden_dropout,
        r"2: two passes over the same inputs differ.*-> call an nn.Dropout .*or use gradveil.nn.Dropout",
    ),
    (
        "batchnorm",
        lambda: model_of(nn.BatchNorm1d(6)),
        r"2: BatchNorm1d in training mode changes its running statistics",
    ),
    (
        "batchnorm-without-statistics",
        lambda: model_of(nn.BatchNorm1d(6, track_running_stats=False)).eval(),
        r"2: batched derivatives through BatchNorm1d, which uses .*-> .*replace_batchnorm",
    ),
    (
        "layernorm",
        lambda: model_of(nn.LayerNorm(6)),
        r"2: batched .* torch's LayerNorm are silently .*replace_layernorm",
    ),
    (
        "functional-layernorm",
        lambda: model_of(FunctionalNorm()),
        r"2: calls torch's layer normalisation, which has silently wrong .*-> compute it by its formula: .*prepare",
    ),
    (
        "instancenorm",
        lambda: nn.Sequential(nn.InstanceNorm2d(2), model_of()),
        r"0: batched .* torch's InstanceNorm2d are",
    ),
    (
        "instancenorm-with-statistics",
        lambda: nn.Sequential(nn.InstanceNorm2d(2, track_running_stats=True), model_of()),
        r"0: InstanceNorm2d keeps running statistics -> make it with track_running_stats=False",
    ),
    ("inplace-module", lambda: model_of(nn.ReLU(inplace=True)), r"2: ReLU\(inplace=True\) overwrites .*remove_inplace"),
    (
        "functional-inplace",
        lambda: model_of(nn.Sigmoid(), Apply(lambda x: x.mul_(2))),
        r"3: overwrites a value that the derivatives need -> write x = x \+ 1, .*prepare\(model, batch=batch\)",
    ),
    (
        "inputs-overwritten",
        lambda: nn.Sequential(Apply(lambda x: x.sub_(0.5)), model_of()),
        r"0: overwrites a value that the derivatives need -> write x = x \+ 1",
    ),
    (
        "once-differentiable",
        lambda: model_of(Apply(OnceDifferentiable.apply)),
        r"model: the second derivative fails: RuntimeError: .*-> replace the operation that has no",
    ),
    (
        "detached-inputs",
        lambda: nn.Sequential(Apply(torch.Tensor.round), model_of()),
        r"model: the gradient does not change with the inputs: its derivative is zero, .*-> remove detach\(\)",
    ),
    ("recurrent", Recurrent, r"rnn: LSTM is recurrent, and torch cannot batch its derivatives -?"),
    (
        "wrong-size",
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(9, 3)),
        r"1: its forward pass fails .*\(here \(4, 8\)\)",
    ),
    (
        "wrong-channels",
        lambda: nn.Sequential(nn.Conv2d(3, 8, 1), model_of()),
        r"0: its forward pass fails for inputs of shape \(4, 2, 2, 2\).*3 channels.*-> give the model inputs of 3",
    ),
    ("nan-weights", with_nan, r"1.weight: holds NaN or infinity in 3 of 48 entries -> load or train the weights again"),
    (
        "nan-outputs",
        lambda: model_of(Apply(lambda x: (x - 100).log())),
        r"model: returns NaN or infinity in 12 of 12 outputs -> check the weights",
    ),
    ("frozen-parameter", lambda: frozen("1.bias"), r"1.bias: has requires_grad=False: .*-> parameter.requires_grad_"),
    ("all-frozen", frozen, r"model: has no parameter with requires_grad=True -> model.requires_grad_\(True\)"),
    ("no-parameters", nn.Flatten, r"model: has no parameters, so there is no update to attack"),
    ("tied", Tied, r"one.weight: is the same tensor as two.weight: the update holds it once"),
    ("lazy", lambda: nn.Sequential(nn.Flatten(), nn.LazyLinear(3)), r"1.weight: has no shape yet \(a lazy layer\)"),
    ("mixed-dtypes", lambda: model_of(nn.Linear(6, 6).double()), r"model: its parameters have more than one dtype"),
    (
        "too-few-outputs",
        lambda: nn.Sequential(model_of(), nn.Linear(3, 2)),
        r"model: has 2 outputs, too few for the targets, which class numbers beyond 1: 2 -> give the model as many",
    ),
    (
        "tuple-outputs",
        lambda: nn.Sequential(model_of(), Apply(lambda x: (x, x))),
        r"model: returns tuple, not a tensor",
    ),
    (
        "examples-lost",
        lambda: nn.Sequential(model_of(), Apply(lambda x: x.mean(0))),
        r"model: returns outputs of shape \(3,\) for 4 examples -> keep the batch dimension first",
    ),
    (
        "unused-parameter",
        lambda: nn.Sequential(model_of(), Apply(lambda x: x)).append(Unused()),
        r"2.spare.weight: gets no gradient: the loss does not depend on it",
    ),
    (
        "zero-gradient",
        lambda: nn.Sequential(model_of(), Apply(lambda x: x * 0)),
        r"model: the gradient is zero|does not change with the inputs",
    ),
    (
        "data-dependent",
        lambda: model_of(Apply(lambda x: x if x.sum().item() > -1e9 else -x)),
        r"model: cannot be batched over target clients by torch.func.vmap: RuntimeError: .*-> avoid .item\(\)",
    ),
    ("attention-dropout", lambda: model_of(SelfAttention()), r"2.attend: MultiheadAttention drops out inside"),
    ("cannot-be-copied", lambda: Holding(), r"model: cannot be copied: RuntimeError: Only Tensors created explicitly"),
]


BATCHES_WRONG: list[tuple[str, Callable[[], object], dict, str]] = [
    ("not-a-batch", lambda: [1, 2], {}, r"batch: is a list, not a pair of tensors -> give gradveil.core.types.Batch"),
    (
        "empty",
        lambda: Batch(torch.zeros(0, 2, 2, 2), torch.zeros(0).long()),
        {},
        r"batch.inputs: is empty: .*\(0, 2, 2",
    ),
    (
        "bytes",
        lambda: batch(inputs=torch.ones(4, 2, 2, 2, dtype=torch.uint8)),
        {},
        r"dtype torch.uint8, .*float\(\) / 255",
    ),
    (
        "nan-inputs",
        lambda: batch(inputs=GOOD.inputs.where(GOOD.inputs > GOOD.inputs.min(), NAN)),
        {},
        r"batch.inputs: holds NaN or infinity in 1 of 32 entries, in the examples \d",
    ),
    ("double", lambda: batch(inputs=GOOD.inputs.double()), {}, r"has dtype torch.float64, the model torch.float32 -> "),
    ("meta", lambda: Batch(GOOD.inputs.to("meta"), GOOD.targets.to("meta")), {}, r"lies on meta, the model on cpu"),
    (
        "out-of-bounds",
        lambda: batch(inputs=GOOD.inputs * 255),
        {"bounds": (0.0, 1.0)},
        r"batch.inputs: \d+ of 32 entries lie outside the bounds \[0, 1\]: they span \[.*\] -> normalise the inputs",
    ),
    (
        "bounds-shape",
        batch,
        {"bounds": (torch.zeros(3), torch.ones(3))},
        r"bounds: of shapes \(3,\) and \(3,\) do not fit inputs \(4, 2, 2, 2\) -> give numbers, or .*\[C, 1, 1\]",
    ),
    (
        "targets-elsewhere",
        lambda: batch(targets=GOOD.targets.to("meta")),
        {},
        r"batch.targets: lies on meta, the inputs on cpu -> targets.to\('cpu'\)",
    ),
    (
        "too-few-targets",
        lambda: batch(targets=torch.tensor([0, 1])),
        {},
        r"has shape \(2,\) for 4 examples -> give one",
    ),
    (
        "negative",
        lambda: batch(targets=torch.tensor([0, -1, 2, 0])),
        {},
        r"batch.targets: holds negative class numbers: -1",
    ),
    (
        "beyond-classes",
        lambda: batch(targets=torch.tensor([0, 7, 2, 9])),
        {"classes": 3},
        r"batch.targets: holds class numbers beyond 2: 7, 9 -> number the 3 classes from 0",
    ),
    (
        "float-labels",
        lambda: batch(targets=torch.rand(4)),
        {},
        r"batch.targets: has shape \(4,\) and dtype torch.float32",
    ),
    (
        "int32-labels",
        lambda: batch(targets=GOOD.targets.int()),
        {},
        r"dtype torch.int32; losses take .*-> targets.long",
    ),
    ("no-probabilities", lambda: batch(targets=torch.ones(4, 3)), {}, r"the examples 0, 1, 2, 3 hold no probabilities"),
    (
        "wrong-width",
        lambda: batch(targets=torch.full((4, 5), 0.2)),
        {"classes": 3},
        r"holds probabilities of 5 classes, there are 3 -> give probabilities \[B, 3\]",
    ),
    ("loss-fails", batch, {"loss": nn.MSELoss()}, r"loss: fails: RuntimeError: .*-> give a loss \(outputs, targets\)"),
    ("loss-is-float", batch, {"loss": item_loss}, r"loss: returns float, not a tensor -> .*without .item\(\)"),
    ("loss-shape", batch, {"loss": lambda o, t: o}, r"loss: returns shape \(4, 3\) -> return a scalar, or one .*\[4\]"),
    ("loss-nan", batch, {"loss": lambda o, t: o.sum() * NAN}, r"loss: is NaN or infinite -> check the outputs"),
    (
        "loss-one-hot",
        batch,
        {"loss": lambda o, t: (o.softmax(1) - F.one_hot(t)).square().sum(1)},
        r"loss: cannot be batched over target clients .*-> use gradveil.client.cross_entropy.*torch.eye",
    ),
    (
        "loss-one-hot-of-known-classes",
        batch,
        {"loss": lambda o, t: (o.softmax(1) - F.one_hot(t, 3)).square().sum(1)},
        r"loss: cannot be batched over target clients .*torch.eye\(K\)\[targets\], not F.one_hot",
    ),
    (
        "loss-data-dependent",
        batch,
        {"loss": lambda o, t: F.cross_entropy(o[t >= 0], t[t >= 0])},
        r"loss: cannot be batched over target clients .*-> use gradveil.client.cross_entropy",
    ),
    (
        "loss-detached",
        batch,
        {"loss": lambda o, t: o.argmax(1).float().mean()},
        r"loss: does not depend on the parameters",
    ),
]


def said(problems: list) -> str:
    return "\n".join(str(problem) for problem in problems)


@pytest.mark.filterwarnings("ignore:.*(dense|Initializing zero-element|dropout option)")
def test_one_output_for_a_single_class_is_explained() -> None:
    found = check(nn.Sequential(nn.Flatten(), nn.Linear(8, 1)), batch(targets=torch.zeros(4, dtype=torch.long)))
    assert "the gradient is zero" in said(found)
    assert "one output, for data of a single class, learns nothing" in said(found)


@pytest.mark.parametrize(("make", "message"), [row[1:] for row in MODELS_WRONG], ids=[row[0] for row in MODELS_WRONG])
def test_wrong_models_are_explained(make: Callable[[], nn.Module], message: str) -> None:
    problems = check(make(), batch())
    assert re.search(message, said(problems)), said(problems)
    assert len(problems) <= 2, said(problems)


@pytest.mark.parametrize(
    ("make", "options", "message"), [row[1:] for row in BATCHES_WRONG], ids=[row[0] for row in BATCHES_WRONG]
)
def test_wrong_batches_are_explained(make: Callable[[], Batch], options: dict, message: str) -> None:
    problems = check(model_of(), make(), **options)
    assert re.search(message, said(problems)), said(problems)
    assert len(problems) == 1, said(problems)


class Attends(nn.Module):
    """Attention by torch's fused operation, which has no second derivative, or by its formula."""

    def __init__(self, by_formula: bool) -> None:
        super().__init__()
        self.embed, self.head, self.by_formula = nn.Linear(8, 8), nn.Linear(8, 3), by_formula

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        tokens = self.embed(inputs.flatten(1).view(len(inputs), 1, -1, 8))
        with sdpa_kernel(SDPBackend.MATH if self.by_formula else SDPBackend.FLASH_ATTENTION):
            return self.head(F.scaled_dot_product_attention(tokens, tokens, tokens).mean((1, 2)))


def test_fused_attention_is_a_problem_until_it_is_computed_by_its_formula() -> None:
    batch = Batch(torch.rand(2, 1, 8, 8), torch.tensor([0, 1]))
    (problem,) = check(Attends(by_formula=False), batch)
    assert "fused attention" in problem.what
    assert check(Attends(by_formula=True), batch) == []
    assert check(prepare(Attends(by_formula=False), batch=batch)[0], batch) == []


def test_all_problems_come_at_once() -> None:
    model = model_of(nn.Dropout(0.5), nn.LayerNorm(6), nn.ReLU(inplace=True), Apply(F.dropout))
    model[1].bias.data[0] = torch.inf
    wrong = batch(inputs=GOOD.inputs + 3, targets=torch.tensor([0, 5, -2, 1]))
    where = [problem.where for problem in check(model, wrong, bounds=(0, 1), classes=3)]
    assert where == ["2", "3", "4", "1.bias", "batch.inputs", "batch.targets", "batch.targets"]


@pytest.mark.parametrize("name", ["lenet-zhu", "scheliga-cnn", "vit", "mnist-conv", "resnet18"])
def test_right_models_have_no_problem(name: str, generator: torch.Generator) -> None:
    defaults = MODELS[name].defaults
    sizes = {key: defaults[key] for key in ("channels", "size", "classes")}
    model = with_dropout(build(name, **sizes, generator=generator))
    inputs = torch.rand(2, *model.input_shape, generator=generator)
    assert said(check(model, Batch(inputs, torch.tensor([1, 2])), bounds=(0.0, 1.0), classes=10)) == ""


def test_soft_targets_max_pooling_and_tensor_bounds_are_fine() -> None:
    model = nn.Sequential(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(2, 3))
    lower, upper = torch.zeros(2, 1, 1), torch.ones(2, 1, 1)
    assert said(check(model, batch(targets=torch.full((4, 3), 1 / 3)), bounds=(lower, upper), classes=3)) == ""


def test_the_remedy_for_one_hot_losses_works(generator: torch.Generator) -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(outputs, torch.eye(10)[targets])

    batch = Batch(torch.rand(2, 1, 16, 16, generator=generator), torch.tensor([0, 2]))
    model = nn.Sequential(nn.Flatten(), nn.Linear(256, 10))
    assert check(model, batch, loss) == []


def test_tied_and_frozen_parameters_only_warn() -> None:
    inner = nn.Linear(6, 6, bias=False)
    named_twice = model_of(inner, nn.Tanh(), inner)
    for model in (Tied(), frozen("1.bias"), named_twice):
        assert [problem.severity for problem in check(model, batch())] == ["warning"]


def test_double_softmax_warns() -> None:
    model = model_of().append(nn.Softmax(1))
    (warning,) = check(model, batch())
    assert warning.severity == "warning"
    assert "returns probabilities" in warning.what
    assert check(model, batch(), lambda outputs, targets: F.nll_loss(outputs.log(), targets)) == []
    assert check(model, batch(), lambda outputs, targets: F.binary_cross_entropy(outputs, torch.eye(3)[targets])) == []
    assert check(model_of(), batch()) == []


def test_check_leaves_model_and_random_state_as_they_are() -> None:
    model = model_of(nn.BatchNorm1d(6), nn.Dropout(0.5))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state, given = torch.random.get_rng_state(), GOOD.inputs.clone()
    assert len(check(model, GOOD)) == 2
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(GOOD.inputs, given)
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())
    assert all(module.training for module in model.modules())
    assert not any(module._forward_hooks for module in model.modules())
