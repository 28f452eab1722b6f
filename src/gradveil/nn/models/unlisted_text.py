"""Text models of transformers whose attention Gradveil does not know: the mask they take is found by trying."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from gradveil.core.errors import FOREIGN, Problem, fail, refuse
from gradveil.nn.models.hugging_face_text import (
    FAMILIES,
    drawn_in_attention,
    padding_of,
    reads_tokens,
    with_plain_functions,
)
from gradveil.nn.models.watched_layout import watched_layout
from gradveil.nn.token_layout import TokenModel, next_token_loss

_EQUAL = 1e-4
"""Largest difference of outputs, relative to the largest, that is rounding."""


class UnlistedText(TokenModel):
    """A classifier or causal language model of transformers of which the word table is known, not the layers behind.

    It holds a copy. Attention is computed eagerly, and LayerNorm by its formula. Texts are masked as torch can batch:
    by zeros and ones at padding, or by floats that are added.
    """

    def __init__(self, inner: nn.Module, length: int = 32) -> None:
        """Wrap a model, and try which mask gives its own answers and batched gradients; refuse it if none does."""
        super().__init__()
        refuse(list(_problems(inner)))
        self.inner, self.training = with_plain_functions(inner), inner.training
        self.input_shape = (length,)
        config: Any = self.inner.config
        padding = padding_of(config)
        if config.pad_token_id is None:
            config.pad_token_id = padding  # a classifier looks for the last token before it
        self._ends = config.eos_token_id if _reads_the_end(self.inner) else None
        self._padding, self._adds = padding, False
        predicts_words = self.inner.get_output_embeddings() is not None  # type: ignore[operator]
        texts = _texts(config, padding, max(length, 2))
        self.inner.eval()
        expected = self._expected(texts)
        other = texts.clone()
        other[:, -1] = other[:, 0]
        if predicts_words and not _close(self._expected(other)[:, :-1], expected[:, :-1]):
            what = f"{type(inner).__name__} sees later words, and the loss of masked words is not supported"
            raise fail("model", what, "give a ...ForSequenceClassification, or a causal language model")
        if not predicts_words and (expected.ndim != 2 or expected.shape[0] != len(texts)):
            what = f"{type(inner).__name__} returns logits {list(expected.shape)} for {len(texts)} texts"
            raise fail("model", what, "give a ...ForSequenceClassification: logits [B, K]")
        if hasattr(self.inner, "set_attn_implementation"):
            self.inner.set_attn_implementation("eager")  # type: ignore[operator]
        self._adds = self._mask_by_trial(texts, expected, type(inner).__name__)
        layout = watched_layout(self.inner, self._logits, texts[:1], padding, config.model_type)
        self.layout = replace(layout, predicts_words=predicts_words, causal=predicts_words)
        self.inner.train(self.training)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits [B, K], or the mean next-token losses [B] of a language model."""
        logits = self._logits(ids)
        return next_token_loss(logits, ids, self.layout.padding) if self.layout.predicts_words else logits

    def _logits(self, ids: Tensor) -> Tensor:
        mask = (ids != self._padding).long()
        if self._adds:
            floats = torch.zeros_like(mask, dtype=next(self.inner.parameters()).dtype)
            mask = floats.masked_fill(mask == 0, -1e9)[:, None, None, :].expand(-1, 1, ids.shape[1], -1)
        inner: Any = self.inner
        if self._ends is None:
            return inner(input_ids=ids, attention_mask=mask).logits
        # transformers selects the last end of a text by a mask, which torch cannot batch.
        shifted = {"decoder_input_ids": inner._shift_right(ids)} if hasattr(inner, "_shift_right") else {}
        hidden = inner.base_model(input_ids=ids, attention_mask=mask, **shifted)[0]
        steps = torch.arange(ids.shape[1], device=ids.device)
        place = ((ids == self._ends) * steps).argmax(1)
        return inner.classification_head(hidden.gather(1, place[:, None, None].expand(-1, 1, hidden.shape[2]))[:, 0])

    def _expected(self, texts: Tensor) -> Tensor:
        """Return what transformers computes for texts, given a mask of zeros and ones."""
        name = type(self.inner).__name__
        try:
            with torch.no_grad():
                outputs = self.inner(input_ids=texts, attention_mask=(texts != self._padding).long())
        except FOREIGN as error:
            what = f"{name} fails on texts {list(texts.shape)}: {_first_line(error)}"
            raise fail(
                "model", what, "give a classifier or causal language model that takes input_ids alone"
            ) from error
        if not isinstance(getattr(outputs, "logits", None), Tensor):
            raise fail("model", f"{name} returns no logits", "give a ...ForSequenceClassification, or a ...ForCausalLM")
        return outputs.logits

    def _mask_by_trial(self, texts: Tensor, expected: Tensor, name: str) -> bool:
        """Return whether floats are added; refuse a model that torch cannot batch with either mask."""
        params = {key: value.detach() for key, value in self.named_parameters()}
        reasons = []

        def loss(params: dict[str, Tensor], ids: Tensor) -> Tensor:
            return functional_call(
                _LogitsOfText(self), {f"text.{key}": v for key, v in params.items()}, (ids[None],)
            ).sum()

        for adds in (False, True):
            self._adds = adds
            try:
                with torch.no_grad():
                    found = self._logits(texts)
                if found.shape == expected.shape and _close(found, expected):
                    vmap(grad(loss), in_dims=(None, 0))(params, texts)
                    return adds
                reasons.append("other outputs")
            except FOREIGN as error:
                reasons.append(_first_line(error))
        tried = f"mask of zeros and ones: {reasons[0]}; of floats: {reasons[1]}"
        what = f"torch cannot batch the gradients of {name} ({tried})"
        raise fail("model", what, f"choose a model of: {', '.join(FAMILIES)}")


def unlisted(model: nn.Module) -> bool:
    """Return whether a model is one of transformers that reads token numbers, and its family is not in the list."""
    return reads_tokens(model) and model.config.model_type not in FAMILIES  # type: ignore[union-attr]


class _LogitsOfText(nn.Module):
    """Runs a text model up to its logits, which `functional_call` asks a module for."""

    def __init__(self, text: UnlistedText) -> None:
        super().__init__()
        self.text = text

    def forward(self, ids: Tensor) -> Tensor:
        return self.text._logits(ids)


def _problems(inner: Any) -> Iterator[Problem]:
    """Find out from its settings why a model cannot be wrapped."""
    if inner.get_output_embeddings() is not None and getattr(inner.config, "is_encoder_decoder", False):
        what = f"{type(inner).__name__} turns one text into another, and an example is one text here"
        yield Problem("model", what, "give a ...ForSequenceClassification, or a causal language model")
    yield from drawn_in_attention(inner)


def _reads_the_end(inner: nn.Module) -> bool:
    """Return whether a classifier reads what its decoder says at the end of a text."""
    return bool(getattr(inner.config, "is_encoder_decoder", False)) and hasattr(inner, "classification_head")


def _texts(config: Any, padding: int, length: int) -> Tensor:
    """Return two texts [2, T] of many words, each with an end: one without padding, one with some."""
    marks = {padding, getattr(config, "eos_token_id", None), getattr(config, "bos_token_id", None)}
    words = [number for number in range(config.vocab_size) if number not in marks][-length:]
    texts = torch.tensor(words).repeat(2, -(-length // len(words)))[:, :length]
    kept = max(length - length // 4, 1)
    texts[1, kept:] = padding
    end = getattr(config, "eos_token_id", None)
    if isinstance(end, int) and 0 <= end < config.vocab_size and end != padding:
        texts[0, -1] = texts[1, kept - 1] = end
    return texts


def _close(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).abs().max() <= _EQUAL * expected.abs().max())


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
