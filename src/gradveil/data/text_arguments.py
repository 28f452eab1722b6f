"""Arguments of calls from Python that are texts: model, examples and tokenizer, as an audit or an attack needs them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradveil.core.errors import fail
from gradveil.data.dataset import Dataset
from gradveil.data.given_texts import GivenTexts, Words, encode_texts, read_texts
from gradveil.nn.models.hugging_face_text import INNER, reads_tokens
from gradveil.nn.models.own_text import reading_tokens
from gradveil.nn.models.watched_layout import padding_of_table, word_table
from gradveil.nn.token_layout import TokenModel
from gradveil.spaces import TextSpace

LONGEST = 64
"""Tokens that are looked for in an update, if nothing says how long its texts are."""


class TextArguments(NamedTuple):
    """A model of token numbers, examples (token numbers, labels), public ones, and what one text is."""

    model: TokenModel
    examples: tuple[Tensor, Tensor] | None
    public: tuple[Tensor, Tensor] | None
    space: TextSpace
    changes: tuple[str, ...] = ()
    """What was changed in the model."""


def text_arguments(
    model: nn.Module,
    examples: Any,
    public: Any = None,
    tokenizer: Any = None,
    length: int | None = None,
    limit: int | None = None,
    where: str = "batch",
) -> TextArguments | None:
    """Encode texts for a model; None if the examples are of another kind.

    `length` is the number of tokens of each text: that of the longest, if none is given.
    """
    if isinstance(examples, Dataset) and not isinstance(examples.example, TextSpace):
        return None
    if isinstance(examples, Dataset):
        ids, labels = _pair_of(examples)
        net, changes = reading_tokens(model, ids[:1])
        own = None if public is None else _pair_of(public)
        assert isinstance(examples.example, TextSpace)
        return TextArguments(net, (ids, labels), own, examples.example, changes)
    table = word_table(model)
    reads = isinstance(model, TokenModel) or reads_tokens(model)
    asked = examples is None and length is not None  # an update of texts, which nobody gives
    if not (reads or asked or tokenizer is not None or isinstance(examples, list | tuple | str | Mapping)):
        return None
    read = None if examples is None else read_texts(examples, where, limit)
    if read is None and not (reads or (asked and table is not None)):
        return None
    if read is None and examples is not None:
        what = f"holds no texts for a model that reads token numbers ({type(examples).__name__})"
        raise fail(where, what, "give (texts, labels), whole token numbers [N, T] with labels, or a tokenizer's dict")
    if not reads and table is None and read is not None and not read.strings:
        what = "holds whole numbers, which are read as token numbers, and the model has no table of words"
        raise fail(where, what, "give rows in floating point: inputs.float(); or a model with an nn.Embedding")
    if reads or table is None:
        net, changes = reading_tokens(model, torch.zeros(1, 32, dtype=torch.long))
        words, speaks = Words(net.vocabulary_size, net.layout.padding, net.most_tokens), net.layout.predicts_words
    else:
        words, speaks = Words(table.num_embeddings, padding_of_table(table)), False
    if read is None:
        longest = min(LONGEST, words.positions or LONGEST)
        blank = GivenTexts([[words.padding] * (length or longest)], None)
        _, _, space = encode_texts(blank, where, words, tokenizer)
        net, changes = reading_tokens(model, torch.zeros(1, *space.shape, dtype=torch.long))
        return TextArguments(net, None, None, space, changes)
    if read.labels is None and not speaks:
        raise fail(where, "has no labels, and the model is a classifier", "give (texts, labels), or a dict with both")
    ids, labels, space = encode_texts(read, where, words, tokenizer, length)
    net, changes = reading_tokens(model, ids[:1])
    theirs = None if public is None else read_texts(public, "public")
    if public is not None and theirs is None:
        raise fail("public", f"is {type(public).__name__}", "give texts as in batch")
    if theirs is None:
        return TextArguments(net, (ids, labels), None, space, changes)
    others, known, _ = encode_texts(theirs, "public", words, tokenizer, space.shape[0])
    return TextArguments(net, (ids, labels), (others, known), space, changes)


def _pair_of(data: Any) -> tuple[Tensor, Tensor]:
    return (data.inputs, data.targets) if isinstance(data, Dataset) else (data[0], data[1])


def named_as(wrapped: nn.Module, given: nn.Module, update: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Name an update of the caller's model as the wrapped model names its parameters."""
    if wrapped is given or not isinstance(update, Mapping):
        return update
    return {name if name.startswith(f"{INNER}.") else f"{INNER}.{name}": value for name, value in update.items()}
