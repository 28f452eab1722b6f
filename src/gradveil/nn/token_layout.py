"""Where a language model keeps what attacks on token numbers read: five questions per family, answered as paths.

The word table, the positions (and segment types), what normalises their sum, the query, key and value weights of a
layer, and the inputs of a layer for given tokens. Models that answer them are `TokenModel`s.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from gradveil.core.tree import Tensors, single
from gradveil.core.types import Batch, InputPerturbation


@dataclass(frozen=True)
class TokenLayout:
    """The paths of a family's first layers; `{}` stands for the number of a layer, from 0."""

    family: str
    words: str
    """Path of the word embedding."""
    norm: str
    """Path of the module that normalises the first layer's inputs: behind the sum (BERT), or in the layer (GPT-2)."""
    attention: tuple[str, ...]
    """Paths of a layer's query, key and value modules, or of the one that holds all three."""
    layers: int
    causal: bool
    """Tokens see only those before them."""
    padding: int
    """The token number of padding, which is never attended to."""
    positions: str | None = None
    """Path of the learned absolute positions; None if the first layer sees words alone (rotary positions)."""
    offset: int = 0
    """The row of the first position."""
    embedded_norm: str | None = None
    """Path of a module that normalises the words before the residual stream starts, if another follows (BLOOM)."""
    types: str | None = None
    """Path of the segment types, of which single texts use the first."""
    head: str | None = None
    """Path of the last linear layer; that of a causal model predicts the next words."""
    inputs_first: bool = False
    """Weights are stored as [inputs, outputs]."""
    predicts_words: bool = False
    """The model is a language model: it returns the losses of each text's next tokens, not logits of classes."""
    heads: int = 1
    """Heads of attention, which split its width evenly."""
    out: str | None = None
    """Path of the linear layer behind a layer's heads; None if it is not known."""
    middle: tuple[str, ...] = ()
    """Paths of the modules between attention's sum with the residual stream and the perceptron's hidden units."""
    down: str | None = None
    """Path of the linear layer behind the hidden units."""
    carries_normalised: bool = False
    """The residual stream starts with the normalised inputs (BERT) and not with the plain sum (GPT-2)."""

    def word_table(self, params: Mapping[str, Tensor]) -> Tensor:
        """Return the word embeddings [W, d]."""
        return params[f"{self.words}.weight"]

    def first_inputs(self, model: nn.Module, params: Tensors, position: int, words: Tensor | None = None) -> Tensor:
        """Return what enters the first layer's query for each word [W] (or some) at a position: [W, d]."""
        return _called(model, self.norm, params, self._carried(model, params, position, words))

    def first_carried(self, model: nn.Module, params: Tensors, position: int, words: Tensor | None = None) -> Tensor:
        """Return what the first layer's attention is added to, for each word [W] (or some) at a position: [W, d]."""
        x = self._carried(model, params, position, words)
        return _called(model, self.norm, params, x) if self.carries_normalised else x

    def projections(self, params: Tensors, inputs: Tensor, layer: int) -> tuple[Tensor, ...]:
        """Return queries, keys and values [N, heads, d / heads] of a layer's inputs [N, d]."""
        names = [path.format(layer) for path in self.attention]
        parts = [nn.functional.linear(inputs, params[f"{name}.weight"], params.get(f"{name}.bias")) for name in names]
        return tuple(part.unflatten(-1, (self.heads, -1)) for part in parts)

    def hidden_units(self, model: nn.Module, params: Tensors, contexts: Tensor, carried: Tensor, layer: int) -> Tensor:
        """Return the hidden units [..., h] of a layer for what its heads give [..., d] and what it is added to."""
        assert self.out is not None
        x = _called(model, self.out.format(layer), params, contexts) + carried
        for path in self.middle:
            x = _called(model, path.format(layer), params, x)
        return x

    def _carried(self, model: nn.Module, params: Tensors, position: int, words: Tensor | None) -> Tensor:
        table = self.word_table(params)
        x = (table if words is None else table[words]) + self.added(params, position)
        return x if self.embedded_norm is None else _called(model, self.embedded_norm, params, x)

    def added(self, params: Tensors, position: int) -> Tensor:
        """Return what is added to the words of a position [d]: its vector, and that of the first segment type."""
        x = torch.zeros_like(self.word_table(params)[0])
        if self.positions is not None:
            x = x + params[f"{self.positions}.weight"][position + self.offset]
        if self.types is not None:
            x = x + params[f"{self.types}.weight"][0]
        return x

    def inputs(self, model: nn.Module, params: Tensors, ids: Tensor, layer: int) -> Tensor:
        """Return what enters the query of a layer, from 0, for token numbers [N, T]: [N, T, d]."""
        caught: list[Tensor] = []

        def stop(_: nn.Module, arguments: tuple[Any, ...]) -> None:
            caught.append(arguments[0])
            raise _Reached

        handle = model.get_submodule(self.attention[0].format(layer)).register_forward_pre_hook(stop)
        try:
            functional_call(model, params, (ids,), strict=False)
        except _Reached:
            pass
        finally:
            handle.remove()
        return caught[0]

    def reads(self, path: str) -> bool:
        """Return whether a module is, or holds, one that attacks read by its path."""
        norms = (self.embedded_norm, self.norm)
        paths = (self.words, self.positions, self.types, *norms, *self.attention, self.out, *self.middle, self.down)
        each = {one.format(layer) for one in paths if one for layer in range(max(1, self.layers))}
        return any(one == path or one.startswith(f"{path}.") for one in each)

    def gradients(self, update: Mapping[str, Tensor], layer: int) -> list[Tensor]:
        """Return the gradients [V, outputs, d] of a layer's query, key and value weights that were sent."""
        names = [f"{path.format(layer)}.weight" for path in self.attention]
        sent = [update[name] for name in names if name in update]
        sent = [value.transpose(1, 2) for value in sent] if self.inputs_first else sent
        return [part for value in sent for part in value.chunk(3, 1)] if len(self.attention) == 1 else sent


def _called(model: nn.Module, path: str, params: Tensors, x: Tensor) -> Tensor:
    module = model.get_submodule(path)
    own = {name: params.get(f"{path}.{name}", value) for name, value in module.named_parameters()}
    return functional_call(module, own, (x,))


class _Reached(Exception):
    """The forward pass reached the layer in question."""


class TokenModel(nn.Module):
    """A model of one tensor of token numbers [B, T], padded to one length.

    Classifiers return logits [B, K]. Language models return the mean loss [B] of each text's own next tokens; their
    clients use `own_loss`.
    """

    layout: TokenLayout

    @property
    def vocabulary_size(self) -> int:
        """Number of words that the model embeds."""
        return len(self.layout.word_table(dict(self.named_parameters())))

    @property
    def most_tokens(self) -> int | None:
        """Most tokens of a text; None where positions are not learned."""
        if self.layout.positions is None:
            return None
        return len(self.get_parameter(f"{self.layout.positions}.weight")) - self.layout.offset

    def keep_mask(self, ids: Tensor) -> Tensor:
        """Return the additive mask [B, 1, T, T]: 0 where a token may look, else -1e9, or less in half precision.

        It holds floats and no branch on data, so that `vmap(grad)` works.
        """
        table: Any = self.get_submodule(self.layout.words).weight
        hidden = (ids == self.layout.padding)[:, None, None, :].expand(-1, 1, ids.shape[1], -1)
        if self.layout.causal:
            # Padding follows a causal text, which therefore never looks at it.
            steps = torch.arange(ids.shape[1], device=ids.device)
            hidden = (steps[None, :] > steps[:, None]).expand(len(ids), 1, -1, -1)
        # Not minus infinity: a row that is hidden as a whole would be NaN behind the softmax.
        least = max(-1e9, torch.finfo(table.dtype).min / 2)
        return torch.zeros(hidden.shape, dtype=table.dtype, device=ids.device).masked_fill(hidden, least)


@dataclass(frozen=True)
class EmbeddingPerturbation(InputPerturbation):
    """Perturbations [B, T, d] of the word embeddings of texts, which are added where the model looks words up.

    Gradients of the word table remain: their derivative is that of the gradients at the embeddings. Padding is not
    perturbed.
    """

    model: TokenModel

    def zeros(self, inputs: Tensor) -> Tensor:
        """Return zeros for each token, as wide as the word table."""
        table: Tensor = self._words.get_parameter("weight")
        return torch.zeros((*inputs.shape, table.shape[1]), dtype=single(table.dtype), device=inputs.device)

    @contextmanager
    def added(self, batch: Batch, perturbation: Tensor) -> Generator[Batch]:
        """Add the perturbation to the embeddings of the batch, whenever the model looks them up."""
        moved = perturbation * (batch.inputs != self.model.layout.padding).unsqueeze(-1)

        def move(_: nn.Module, __: tuple[Any, ...], embedded: Tensor) -> Tensor:
            return embedded + moved

        handle = self._words.register_forward_hook(move)
        try:
            yield batch
        finally:
            handle.remove()

    @property
    def _words(self) -> nn.Module:
        return self.model.get_submodule(self.model.layout.words)


def perturbation_of(model: nn.Module) -> InputPerturbation:
    """Return what a model's gradients are differentiated by: word embeddings of texts, else the inputs themselves."""
    return EmbeddingPerturbation(model) if isinstance(model, TokenModel) else InputPerturbation()


def next_token_loss(logits: Tensor, ids: Tensor, padding: int) -> Tensor:
    """Return the mean cross-entropy [B] of each text's next tokens; padding does not count.

    >>> next_token_loss(torch.zeros(1, 3, 2), torch.tensor([[1, 1, 0]]), padding=0)
    tensor([0.6931])
    """
    following = ids[:, 1:]
    counts = (following != padding).to(logits.dtype)
    losses = -torch.log_softmax(logits[:, :-1], -1).gather(-1, following.unsqueeze(-1)).squeeze(-1)
    return (losses * counts).sum(1) / counts.sum(1).clamp_min(1)


def own_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the losses [B] that a language model computed itself, see `TokenModel`."""
    return outputs
