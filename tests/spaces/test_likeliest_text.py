"""A guess at texts continues them by the pairs of other texts' words."""

import torch

from gradveil.spaces.likeliest_text import likeliest_texts
from gradveil.spaces.text_space import TextSpace

TEXTS = torch.tensor([[1, 5, 6, 2, 0], [1, 5, 6, 7, 2], [1, 5, 6, 7, 2], [1, 8, 2, 0, 0]])


def test_the_likeliest_text_has_the_length_asked_for_and_ends():
    for length, text in zip((5, 3, 4), likeliest_texts(TEXTS, (5, 3, 4), padding=0, end=2), strict=True):
        assert int((text != 0).sum()) == length
        assert int(text[length - 1]) == 2


def test_no_text_guesses_itself():
    space = TextSpace((5,), tuple("abcdefghij"), padding=0, start=1, end=2)
    texts = torch.tensor([[1, 5, 6, 7, 2], [1, 8, 9, 3, 2]])
    likely = space.guesses(texts, 2)[-1]
    assert torch.equal(likely, texts.flip(0))


def test_guesses_take_values_of_any_number_type():
    space = TextSpace((5,), tuple("abcdefghij"), padding=0, start=1, end=2)
    assert space.guesses(TEXTS.double(), 4).shape == (3, 4, 5)
