"""Low-rank adapters (LoRA) of attention, with the base model frozen: Hu et al. 2022, "LoRA" (ICLR).

y = W x + s B A x with A [r, d] and B [outputs, r]. B starts at zero. Names are those of the package peft:
`query.base_layer.weight`, `query.lora_A.weight`, `query.lora_B.weight`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, nn

from gradveil.core.errors import fail
from gradveil.nn.module_paths import at, put
from gradveil.nn.token_layout import TokenModel

_NAME = re.compile(r"(?P<path>.+)\.lora_(?P<part>[AB])(?:\.[^.]+)??(?:\.weight)?")
"""Names of adapters: `PATH.lora_A.weight`, `PATH.lora_A.default.weight` (peft), or `PATH.lora_A`."""
_ADAPTED = ("quer", "q_", "valu", "v_", "c_attn", "qkv")
"""Beginnings of the modules of attention that get adapters, as peft's usual settings have them."""


class LoraLinear(nn.Module):
    """A frozen linear module plus s B A x."""

    def __init__(self, base: nn.Module, inputs: int, outputs: int, rank: int, scale: float = 1.0) -> None:
        """Add an adapter whose B is zero, so that nothing changes at first."""
        super().__init__()
        self.base_layer, self.scale = base.requires_grad_(False), scale
        self.lora_A, self.lora_B = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return W x + s B A x."""
        return self.base_layer(x) + self.scale * self.lora_B(self.lora_A(x))


class Adapter(NamedTuple):
    """The tensors A [r, d] and B [outputs, r] of one module, or their gradients; None for what is missing."""

    path: str
    a: Tensor | None
    b: Tensor | None


def adapters(tensors: Mapping[str, Tensor], paths: Iterable[str]) -> list[Adapter]:
    """Return the adapters of these modules among tensors, by name.

    >>> [one.path for one in adapters({"q.lora_A.default.weight": torch.zeros(2, 4)}, ["q", "k"])]
    ['q']
    """
    found: dict[str, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        match = _NAME.fullmatch(name)
        if match is not None:
            found.setdefault(match["path"], {})[match["part"]] = value
    return [Adapter(path, found[path].get("A"), found[path].get("B")) for path in paths if path in found]


def with_lora(model: nn.Module, rank: int, generator: Generator) -> TokenModel:
    """Return a copy with adapters at the queries and values of attention; the head is trained, all else is frozen."""
    if not isinstance(model, TokenModel):
        what = f"adapters are for models of texts, and {type(model).__name__} is none"
        raise fail("model.options.lora", what, "choose small-encoder, small-decoder or hf:NAME, or leave it out")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise fail("model.options.lora", f"is {rank!r}", "give the rank of the adapters: 4 to 64 is usual")
    result = deepcopy(model)
    heads = _heads(result)
    for name, value in result.named_parameters():
        value.requires_grad_(any(name.startswith(f"{head}.") for head in heads) and not result.layout.predicts_words)
    for layer in range(result.layout.layers):
        for template in result.layout.attention:
            path = template.format(layer)
            if path.rpartition(".")[2].startswith(_ADAPTED):
                put(result, path, _adapted(at(result, path), result.layout.inputs_first, rank, generator))
    return result


def _adapted(base: nn.Module, inputs_first: bool, rank: int, generator: Generator) -> LoraLinear:
    weight: Any = base.weight
    outputs, inputs = weight.shape if not inputs_first else weight.shape[::-1]
    adapter = LoraLinear(base, inputs, outputs, rank)
    with torch.no_grad():
        # U(-b, b) with b = 1 / sqrt(inputs): the law of `kaiming_uniform_` with a = sqrt(5), peft's usual one for A.
        drawn = torch.rand(rank, inputs, generator=generator)
        adapter.lora_A.weight.copy_((2 * drawn - 1) * inputs**-0.5)
    return adapter


def _heads(model: TokenModel) -> list[str]:
    """Return the paths of what follows the transformer: all that is outside of it."""
    if model.layout.head is not None:
        return [model.layout.head]
    inner: Any = model.get_submodule(model.layout.words.partition(".")[0])
    base = model.layout.words.split(".")[1]
    return [f"inner.{name}" for name, _ in inner.named_children() if name != base]
