"""Text models of transformers whose attention Gradveil does not know: the mask they take is found by trying."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Self

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
from gradveil.nn.repeated_call import repeated_call
from gradveil.nn.token_layout import TokenModel, next_token_loss

_EQUAL = 1e-4
"""Largest difference of outputs, relative to the largest, that is rounding."""


class UnlistedText(TokenModel):
    """A classifier or causal language model of transformers of which the word table is known, not the layers behind.

    It holds a copy. Attention is computed eagerly, and LayerNorm by its formula. Texts are masked as torch can batch:
    by zeros and ones at padding, or by floats that are added. A model that torch can batch with neither runs one
    example after the other.
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
        self._padding, self._adds, self._repeats, self._head = padding, False, False, ""
        predicts_words = self.inner.get_output_embeddings() is not None  # type: ignore[operator]
        texts = _texts(config, padding, max(length, 3))
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
        self._choose_by_trial(texts, expected, type(inner).__name__)
        layout = watched_layout(self.inner, self._by_mask, texts[:1], padding, config.model_type, _asked_for)
        self.layout = replace(layout, predicts_words=predicts_words, causal=predicts_words)
        self._head = self.layout.head or ""
        self._sample = texts
        self.train(self.training)

    def train(self, mode: bool = True) -> Self:
        """Switch to training, or back; refuse dropout that would be drawn where nobody replays it."""
        super().train(mode)
        if mode and self._repeats and self._draws(self._sample):
            name = type(self.inner).__name__
            what = f"{name} draws dropout, and runs one example after the other, where it is not replayed"
            raise fail("model", what, "call model.eval(), or set the dropout of its configuration to 0")
        return self

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits [B, K], or the mean next-token losses [B] of a language model."""
        logits = self._logits(ids)
        return next_token_loss(logits, ids, self.layout.padding) if self.layout.predicts_words else logits

    def _logits(self, ids: Tensor) -> Tensor:
        if not self._repeats:
            return self._by_mask(ids)
        names, values = zip(*self.named_parameters(), strict=True)
        table: Any = self.inner.get_input_embeddings()  # type: ignore[operator]
        read_one = self._features if self._head else self._by_mask

        def read(ids: Tensor, embedded: Tensor, *values: Tensor) -> Tensor:
            with _answering(table, ids, embedded):
                return _called(self, read_one, dict(zip(names, values, strict=True)), ids)

        # Words are looked up outside, where attacks and defences add to what the table answers. The last layer runs
        # there, too: what a hook catches inside has no derivative, and Soteria differentiates what that layer takes.
        found = repeated_call(read, ids, table(ids), *values)
        return self.get_submodule(self._head)(found) if self._head else found

    def _features(self, ids: Tensor) -> Tensor:
        """Return what the last layer takes."""
        taken: list[Tensor] = []
        handle = self.get_submodule(self._head).register_forward_pre_hook(lambda _, given: taken.append(given[0]))
        try:
            self._by_mask(ids)
        finally:
            handle.remove()
        return taken[-1]

    def _by_mask(self, ids: Tensor) -> Tensor:
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

    def _choose_by_trial(self, texts: Tensor, expected: Tensor, name: str) -> None:
        """Choose the mask that torch can batch, or one example after the other; refuse a model without gradients."""
        params = {key: value.detach() for key, value in self.named_parameters()}
        reasons = []

        def loss(params: dict[str, Tensor], ids: Tensor) -> Tensor:
            return _called(self, self._logits, params, ids[None]).sum()

        for self._adds, self._repeats in ((False, False), (True, False), (False, True)):
            try:
                with torch.no_grad(), _adding_nothing(self.inner, texts):
                    found = self._logits(texts)
                if found.shape == expected.shape and _close(found, expected):
                    vmap(grad(loss), in_dims=(None, 0))(params, texts)
                    return
                reasons.append("other outputs")
            except FOREIGN as error:
                reasons.append(_first_line(error))
        ways = zip(("mask of zeros and ones", "mask of floats", "one example after the other"), reasons, strict=True)
        what = f"{name} gives no gradients ({'; '.join(f'{way}: {reason}' for way, reason in ways)})"
        raise fail("model", what, f"choose a model of: {', '.join(FAMILIES)}")

    def _draws(self, texts: Tensor) -> bool:
        """Return whether the model answers in another way when it is asked again."""
        texts = texts.to(next(self.parameters()).device)
        with torch.random.fork_rng(), torch.no_grad():
            return not torch.equal(self._by_mask(texts), self._by_mask(texts))


def unlisted(model: nn.Module) -> bool:
    """Return whether a model is one of transformers that reads token numbers, and its family is not in the list."""
    return reads_tokens(model) and model.config.model_type not in FAMILIES  # type: ignore[union-attr]


class _Reading(nn.Module):
    """Runs a text model by one of its methods, which `functional_call` asks a module for."""

    def __init__(self, text: UnlistedText, read: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.text, self.read = text, read

    def forward(self, ids: Tensor) -> Tensor:
        return self.read(ids)


def _called(text: UnlistedText, read: Callable[[Tensor], Tensor], params: Mapping[str, Tensor], ids: Tensor) -> Tensor:
    """Return read(ids) with other parameters."""
    return functional_call(_Reading(text, read), {f"text.{name}": value for name, value in params.items()}, (ids,))


@contextmanager
def _adding_nothing(inner: Any, texts: Tensor) -> Generator[None]:
    """Add zeros to each word where it is looked up, as attacks do with what they try; other shapes fail."""
    zeros = torch.zeros(*texts.shape, 1)
    handle = inner.get_input_embeddings().register_forward_hook(lambda _, __, embedded: embedded + zeros)
    try:
        yield
    finally:
        handle.remove()


def _asked_for(asked: Tensor, ids: Tensor) -> bool:
    """Return whether a table is asked for texts [B, T]: as they are, with padding behind them, or turned round."""
    turned = asked.T if asked.ndim == 2 and asked.shape == ids.T.shape != ids.shape else asked
    return turned.ndim == ids.ndim and torch.equal(turned[:, : ids.shape[1]], ids)


@contextmanager
def _answering(table: nn.Module, ids: Tensor, embedded: Tensor) -> Generator[None]:
    """Make a table answer what was looked up before; a model may lengthen the texts by padding."""
    look_up, hooks, count = table.forward, table._forward_hooks, ids.shape[1]

    def answer(asked: Tensor) -> Tensor:
        if not _asked_for(asked, ids):
            return look_up(asked)
        turned = asked.shape != ids.shape and asked.shape == ids.T.shape
        return embedded.transpose(0, 1) if turned else torch.cat([embedded, look_up(asked[:, count:])], 1)

    table.forward, table._forward_hooks = answer, type(hooks)()
    try:
        yield
    finally:
        table._forward_hooks = hooks
        del table.forward


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
