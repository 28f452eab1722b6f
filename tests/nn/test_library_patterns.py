"""Patterns of torchvision, timm and transformers, written as plain modules: `prepare` makes each of them auditable."""

import threading
from collections import namedtuple
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradveil.core.types import Batch
from gradveil.nn.check import check
from gradveil.nn.copyable import copyable
from gradveil.nn.formulas import attention
from gradveil.nn.initial_weights import drawing_from
from gradveil.nn.stochastic import model_noise
from gradveil.nn.surgery import drop_probability, prepare
from tests.nn.test_surgery import gradient


@pytest.fixture(autouse=True)
def _fixed_weights():
    with drawing_from(torch.Generator().manual_seed(0)):
        yield


@pytest.fixture
def batch(generator: torch.Generator) -> Batch:
    return Batch(torch.rand(3, 4, 6, 6, generator=generator), torch.tensor([0, 2, 1]))


class Block(nn.Module):
    """A residual block with fused attention, as in timm and transformers."""

    def __init__(self, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.norm, self.qkv, self.proj = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        return x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class MultiHead(nn.Module):
    """Self-attention by torch's own module, without weights: it takes the fused path."""

    def __init__(self, width: int = 8, batch_first: bool = True) -> None:
        super().__init__()
        self.norm, self.batch_first = nn.LayerNorm(width), batch_first
        self.attend = nn.MultiheadAttention(width, 2, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x if self.batch_first else x.transpose(0, 1))
        y = self.attend(y, y, y, need_weights=False)[0]
        return x + (y if self.batch_first else y.transpose(0, 1))


class Cross(nn.Module):
    """Attention of one learnt query to the tokens."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.query, self.attend = nn.Parameter(torch.rand(1, 1, width)), nn.MultiheadAttention(width, 2, 0.0)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.transpose(0, 1)
        query = self.query.expand(1, len(x), -1)
        return self.attend(query, tokens, tokens, need_weights=False)[0].transpose(0, 1) + x


class Tokens(nn.Module):
    """[B, 4, 6, 6] -> tokens [B, 9, 8] -> blocks -> 3 classes."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.embed, self.blocks, self.head = nn.Conv2d(4, 8, 2, 2), nn.Sequential(*blocks), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(x).flatten(2).transpose(1, 2)).mean(1))


class NormAct(nn.BatchNorm2d):
    """Batch normalisation and activation in one layer, as timm's BatchNormAct2d."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.num_batches_tracked.add_(1)
        running = (self.running_mean, self.running_var)
        return self.act(F.batch_norm(x, *running, self.weight, self.bias, self.training, self.momentum, self.eps))


class ChannelsFirst(nn.LayerNorm):
    """Normalise the channels of [B, C, H, W]."""

    def forward(self, x: Tensor) -> Tensor:
        y = F.layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps)
        return y.permute(0, 3, 1, 2)


class InPlace(nn.Module):
    """A residual block that overwrites what its derivatives need, or does not."""

    def __init__(self, overwrites: bool = True) -> None:
        super().__init__()
        self.one, self.two, self.overwrites = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1), overwrites

    def forward(self, x: Tensor) -> Tensor:
        out = self.one(x).sigmoid()
        if self.overwrites:
            out += self.two(x)
        else:
            out = out + self.two(x)
        relu = F.relu_ if self.overwrites else F.relu
        return F.hardswish(relu(out.tanh()) - 0.1, inplace=self.overwrites)


class DropPath(nn.Module):
    """Stochastic depth, as in timm and transformers."""

    def __init__(self, drop_prob: float, together: bool = False) -> None:
        super().__init__()
        self.drop_prob, self.together = drop_prob, together

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        keep, rows = 1 - self.drop_prob, 1 if self.together else len(x)
        mask = x.new_empty(rows, *[1] * (x.dim() - 1)).bernoulli_(keep)
        mask.div_(keep)
        return x * mask


class Residual(nn.Module):
    def __init__(self, drop: nn.Module, calls: int = 1) -> None:
        super().__init__()
        self.conv, self.drop, self.calls = nn.Conv2d(4, 4, 1), drop, calls

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.calls):
            x = x + self.drop(self.conv(x).tanh())
        return x


def images(*middle: nn.Module) -> nn.Module:
    """[B, 4, 6, 6] -> layers -> 3 classes."""
    return nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), *middle, nn.Flatten(), nn.Linear(144, 3))


PATTERNS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "fused-attention": (lambda: Tokens(Block()), "fused attention computed by its formula: module 'blocks.0'"),
    "multi-head": (lambda: Tokens(MultiHead()), "fused attention computed by its formula: module 'blocks.0.attend'"),
    "tokens-first": (lambda: Tokens(MultiHead(batch_first=False)), "fused attention computed by its formula"),
    "cross-attention": (lambda: Tokens(Cross()), "fused attention computed by its formula"),
    "encoder-layer": (
        lambda: Tokens(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)),
        "fused attention computed by its formula: module 'blocks.0.self_attn'",
    ),
    "batch-norm-act": (lambda: images(NormAct(4)), "batch normalisation computed by its formula: module '1'"),
    "hardsigmoid": (lambda: images(nn.Hardsigmoid()), "hardsigmoid computed by its formula: module '1'"),
    "channels-first": (lambda: images(ChannelsFirst(4), nn.Tanh()), "layer normalisation computed by its formula"),
}


@pytest.mark.parametrize(("make", "change"), PATTERNS.values(), ids=PATTERNS)
def test_prepared_pattern_can_be_audited_and_has_the_same_gradient(
    make: Callable[[], nn.Module], change: str, batch: Batch
) -> None:
    model = make()
    assert any(problem.severity == "error" for problem in check(model, batch))
    ready, changes = prepare(model, batch=batch)
    assert check(ready, batch) == []
    assert any(change in line for line in changes), changes
    torch.testing.assert_close(gradient(ready, batch.inputs), gradient(model, batch.inputs), rtol=1e-4, atol=1e-5)
    assert prepare(ready, batch=batch)[1] == []
    again = deepcopy(ready)
    assert torch.equal(again(batch.inputs), ready(batch.inputs))


def test_code_that_overwrites_is_run_out_of_place(batch: Batch) -> None:
    model = images(InPlace())
    assert [problem.where for problem in check(model, batch)] == ["1"]
    ready, changes = prepare(model, batch=batch)
    assert changes == ["in-place calls made out of place: module '1'"]
    assert check(ready, batch) == []
    model[1].overwrites = False
    torch.testing.assert_close(gradient(ready, batch.inputs), gradient(model, batch.inputs))


@pytest.mark.parametrize(("causal", "mask"), [(True, "none"), (False, "none"), (False, "boolean"), (False, "additive")])
def test_attention_by_formula_is_fused_attention(causal: bool, mask: str, generator: torch.Generator) -> None:
    q, k, v = torch.randn(3, 2, 4, 5, 6, generator=generator)
    masks = {"none": None, "boolean": torch.rand(5, 5, generator=generator) > 0.3, "additive": torch.rand(5, 5)}
    options = {"attn_mask": masks[mask], "is_causal": causal, "scale": 0.3}
    expected = F.scaled_dot_product_attention(q, k, v, **options)
    torch.testing.assert_close(attention(q, k, v, **options), expected, rtol=1e-5, atol=1e-5)


def test_prepared_batch_norm_leaves_running_statistics_alone(batch: Batch) -> None:
    ready, _ = prepare(images(NormAct(4)), batch=batch)
    ready(batch.inputs)
    assert int(ready[1].num_batches_tracked) == 0
    assert not ready[1].running_mean.any()


@pytest.mark.parametrize("way", ["group", "frozen"])
def test_other_ways_apply_to_batch_norm_subclasses(way: str, batch: Batch) -> None:
    model = images(NormAct(4))
    ready, changes = prepare(model, batch=batch, batchnorm=way)
    assert "which changes what the model computes: module '1'" in changes[-1] or "changes" in "".join(changes)
    norm = model[1]
    x = model[0](batch.inputs)
    expected = F.group_norm(x, 2) if way == "group" else deepcopy(norm).eval()(x)
    torch.testing.assert_close(ready[1](x), expected.relu())


def test_stochastic_depth_gets_a_mask_for_each_example(batch: Batch) -> None:
    ready, changes = prepare(images(Residual(DropPath(0.25))), batch=batch)
    assert "stochastic depth made explicit: module '1.drop'" in changes
    assert check(ready, batch) == []
    noise = model_noise(ready, batch.inputs)["1.drop.mask"]
    assert (noise.shape, noise.neutral) == ((3, 1, 1, 1), 0.75)


@pytest.mark.parametrize(
    ("module", "probability"),
    [(DropPath(0.3), 0.3), (DropPath(0.3, together=True), None), (nn.Dropout(0.3), None), (DropPath(0.0), None)],
    ids=["examples", "whole-batch", "entries", "never"],
)
def test_stochastic_depth_is_recognised_by_what_it_computes(module: nn.Module, probability: float | None) -> None:
    assert drop_probability(module) == probability


def test_a_batch_norm_of_one_value_is_a_problem() -> None:
    model = nn.Sequential(nn.Conv2d(4, 6, 6), nn.BatchNorm2d(6), nn.Flatten(), nn.Linear(6, 3))
    one = Batch(torch.rand(1, 4, 6, 6), torch.tensor([1]))
    places = {problem.where: problem for problem in check(prepare(model, batch=one)[0], one)}
    assert "one value per channel" in places["1"].what
    assert "client_batch=2" in places["1"].remedy


@dataclass
class Output:
    """What a classifier of transformers returns."""

    logits: Tensor
    hidden_states: tuple[Tensor, ...] = ()


Pair = namedtuple("Pair", ["logits", "aux_logits"])


class Returning(nn.Module):
    def __init__(self, wrap: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.net, self.wrap = images(), wrap

    def forward(self, x: Tensor) -> object:
        return self.wrap(self.net(x))


@pytest.mark.parametrize(
    "wrap",
    [Output, lambda x: {"logits": x}, lambda x: (x, x.sum(1)), lambda x: Pair(x, x + 1)],
    ids=["object", "dictionary", "tuple", "named-tuple"],
)
def test_logits_are_taken_from_outputs_that_hold_more(wrap: Callable[[Tensor], object], batch: Batch) -> None:
    model = Returning(wrap)
    assert [problem.where for problem in check(model, batch)] == ["model"]
    ready, changes = prepare(model, batch=batch)
    assert changes == ["logits taken from the model's outputs"]
    assert torch.equal(ready(batch.inputs), model.net(batch.inputs))
    assert check(ready, batch) == []


def test_outputs_without_logits_are_named(batch: Batch) -> None:
    (problem,) = check(Returning(lambda x: {"out": x, "aux": x}), batch)
    assert "dict with 'out', 'aux'" in problem.what


@pytest.mark.parametrize(
    ("inputs", "fix"),
    [
        (torch.rand(2, 1, 6, 6), "inputs.repeat(1, 3, 1, 1)"),
        (torch.rand(2, 6, 6, 3), "inputs.permute(0, 3, 1, 2)"),
        (torch.rand(2, 3, 4, 4), "--set data.size=6"),
    ],
    ids=["grey", "channels-last", "size"],
)
def test_inputs_that_do_not_fit_are_reported_with_a_fix(inputs: Tensor, fix: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 3))
    model.image_size = 6
    (problem,) = check(model, Batch(inputs, torch.tensor([0, 1])))
    assert fix in problem.remedy


class Logging(nn.Module):
    """A module with a logger and features kept from a forward pass, as in a LightningModule."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.lock, self.history = images(), threading.Lock(), []

    def forward(self, x: Tensor) -> Tensor:
        with self.lock:
            self.kept = self.net[0](x)
        self.history.append(self.kept)
        return self.net(x)


def test_a_model_that_holds_what_cannot_be_copied_is_copied_without_it(batch: Batch) -> None:
    model = Logging()
    model(batch.inputs)
    with pytest.raises((TypeError, RuntimeError)):
        deepcopy(model)
    twin = deepcopy(copyable(model))
    assert torch.equal(twin(batch.inputs), model(batch.inputs))
    assert twin.net[0].weight is not model.net[0].weight
