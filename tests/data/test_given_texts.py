"""Texts come as strings or token numbers, in every form that users have."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from gradveil.core.errors import GradveilError
from gradveil.data.given_texts import Words, encode_texts, read_texts
from gradveil.data.texts import WordPieces

STRINGS, IDS, LABELS = ["a good film", "a bad one"], [[5, 6, 7], [8, 9]], [1, 0]
PADDED = torch.tensor([[5, 6, 7], [8, 9, 0]])
ROWS = [{"text": text, "label": label} for text, label in zip(STRINGS, LABELS, strict=True)]


@pytest.mark.parametrize(
    "given",
    [
        (STRINGS, LABELS),
        [STRINGS, torch.tensor(LABELS)],
        (np.array(STRINGS), np.array(LABELS)),
        {"text": STRINGS, "label": LABELS},
        ROWS,
        list(zip(STRINGS, LABELS, strict=True)),
        DataLoader(ROWS, batch_size=1),  # type: ignore[arg-type]
    ],
)
def test_strings_are_read_with_their_labels(given):
    texts = read_texts(given, "batch")
    assert texts is not None
    assert (texts.strings, list(texts.rows)) == (True, STRINGS)
    assert texts.labels is not None
    assert texts.labels.tolist() == LABELS


@pytest.mark.parametrize(
    "given",
    [
        (IDS, LABELS),
        {"input_ids": PADDED, "attention_mask": PADDED != 0, "labels": torch.tensor(LABELS)},
        ({"input_ids": PADDED.flip(1), "attention_mask": (PADDED != 0).flip(1)}, LABELS),
        [{"input_ids": row, "label": label} for row, label in zip(IDS, LABELS, strict=True)],
    ],
)
def test_token_numbers_are_read_without_what_the_mask_hides(given):
    texts = read_texts(given, "batch")
    assert texts is not None
    assert not texts.strings
    assert sorted(map(sorted, texts.rows)) == IDS  # type: ignore[type-var]
    assert texts.labels is not None


@pytest.mark.parametrize("given", [STRINGS, {"input_ids": PADDED}, PADDED, {"input_ids": PADDED, "labels": PADDED}])
def test_texts_without_classes_have_no_labels(given):
    texts = read_texts(given, "batch")
    assert texts is not None
    assert texts.labels is None


@pytest.mark.parametrize(
    "given",
    [
        (torch.zeros(2, 1, 4, 4), torch.tensor(LABELS)),
        {"pixel_values": np.zeros((2, 1, 4, 4)), "labels": LABELS},
        (torch.zeros(2, 5), torch.tensor(LABELS)),
        [(torch.zeros(1, 4, 4), 1)],
    ],
)
def test_other_examples_are_no_texts(given):
    assert read_texts(given, "batch") is None


def test_a_vocabulary_of_bytes_is_written_as_pieces_of_words():
    tokenizers = pytest.importorskip("tokenizers")
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "Ġgood": 1, "ly": 2, "Ã": 3, "©": 4}, []))
    texts = read_texts((IDS[:1], [0]), "batch")
    assert texts is not None
    words = Words(10, 9)
    _, _, space = encode_texts(texts, "batch", words, inner)
    assert space.vocabulary[:4] == ("##a", "good", "##ly", "##\ufffd")
    assert space.text(torch.tensor([1, 2])) == "goodly"


def test_longer_texts_are_cut_with_a_warning_and_keep_their_end():
    pieces = WordPieces.learned(STRINGS, 40)
    texts = read_texts((["a good film a bad film"], [0]), "batch")
    assert texts is not None
    with pytest.warns(UserWarning, match="cut"):
        ids, _, space = encode_texts(texts, "batch", Words(40, 0, 4), pieces)
    assert (ids.shape, int(ids[0, -1]), space.end) == ((1, 4), 2, 2)


@pytest.mark.parametrize(
    ("given", "words", "place"),
    [
        ((STRINGS, LABELS), Words(9, 0), "tokenizer"),
        (([[5, 60]], [0]), Words(9, 0), "belongs to the model"),
        ((STRINGS, [0]), Words(9, 0), "labels"),
        ((STRINGS, ["good", "bad"]), Words(9, 0), "strings"),
    ],
)
def test_texts_that_cannot_be_meant_are_refused(given, words, place):
    def read():
        texts = read_texts(given, "batch")
        assert texts is not None
        encode_texts(texts, "batch", words)

    with pytest.raises(GradveilError, match=place):
        read()
