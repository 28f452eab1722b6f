"""Texts from files and the bundle become token numbers of a vocabulary that public texts alone decide."""

import pytest
import torch

from gradveil.core.errors import GradveilError
from gradveil.data.registry import load
from gradveil.data.tables import Halves
from gradveil.data.texts import WordPieces, splits_of_texts
from gradveil.spaces import TextSpace


def test_bundled_reviews_have_labels_and_one_vocabulary():
    public, private = load("reviews")
    assert isinstance(private.space, TextSpace)
    assert private.space == public.space
    assert sorted({*private.targets.tolist()}) == [0, 1]
    assert private.inputs.shape[1:] == (32,)


def test_cutting_loses_no_word_whose_letters_are_known():
    pieces = WordPieces.learned(["the cat, the hat", "a cart"], 30)
    ids = pieces.encode(["The chart."])
    assert pieces.space().text(ids[0]).startswith("the chart")
    assert "[UNK]" in pieces.cut("the ñ")
    assert ids[0, 0] == 1


def test_long_texts_are_cut_and_keep_their_end():
    ids = WordPieces.learned(["a b c"], 20, length=4).encode(["a b c a b c"])
    assert ids.shape == (1, 4)
    assert ids[0, -1] == 2


def test_a_file_of_texts_is_shared_out(tmp_path):
    path = tmp_path / "notes.csv"
    rows = "".join(f"patient {i} is well,{i % 2}\n" for i in range(16))
    path.write_text(f"text,label\n{rows}", "utf-8")
    public, private = load(f"texts:{path}")
    assert (len(public), len(private)) == (12, 4)
    assert torch.equal(private.targets, torch.tensor([0, 1, 0, 1]))


@pytest.mark.parametrize(
    ("content", "where"),
    [
        ("text,label\n,1\na,1\nb,1\nc,1\n", "data"),
        ("a,label\nx,1\ny,1\n", "data"),
        ("text,label\na,\nb,\nc,\nd,\n", "data"),
    ],
)
def test_a_file_without_texts_is_refused(tmp_path, content, where):
    path = tmp_path / "notes.csv"
    path.write_text(content, "utf-8")
    with pytest.raises(GradveilError) as caught:
        load(f"texts:{path}")
    assert caught.value.problems[0].where.startswith(where)


def test_private_texts_with_other_columns_are_refused():
    halves = Halves({"text": ["a b", "c d"], "label": [0, 1]}, {"note": ["a b"], "label": [0]})
    with pytest.raises(GradveilError, match="no text in its private texts"):
        splits_of_texts(halves, "notes", "text", "label", "made")
