"""ROUGE agrees with torchmetrics, and identifiers are found by their patterns."""

import math

import pytest

from gradveil.metrics.text_similarity import disclosed, identifiers, rouge_l, rouge_n, rouge_n_pairs

PAIRS = [
    ("the cat sat on the mat", "the cat is on a mat today"),
    ("a b c d", "d c b a"),
    ("one", "one"),
    ("x y z", "p q"),
]


@pytest.mark.parametrize(("one", "truth"), PAIRS)
def test_rouge_equals_the_reference(one, truth):
    rouge = pytest.importorskip("torchmetrics.functional.text.rouge").rouge_score
    expected = rouge(one, truth, rouge_keys=("rouge1", "rouge2", "rougeL"))
    first, second = one.split(), truth.split()
    assert rouge_n(first, second, 1) == pytest.approx(float(expected["rouge1_fmeasure"]), abs=1e-6)
    assert rouge_n(first, second, 2) == pytest.approx(float(expected["rouge2_fmeasure"]), abs=1e-6)
    assert rouge_l(first, second) == pytest.approx(float(expected["rougeL_fmeasure"]), abs=1e-6)


def test_numbers_addresses_and_names_inside_of_a_text_are_identifiers():
    text = ["Call", "Ada", "Byron", "at", "555-1234", "or", "ada@example.org"]
    assert identifiers(text) == [("Ada", "Byron"), ("555-1234",), ("ada@example.org",)]


def test_an_identifier_counts_only_with_all_its_tokens_in_order():
    truth = ["born", "in", "19", "##84", "and", "2001"]
    assert identifiers(truth) == [("19", "##84"), ("2001",)]
    assert disclosed(["19", "##84"], truth) == 0.5
    assert disclosed(["##84", "19", "2001"], truth) == 0.5
    assert math.isnan(disclosed(["a"], ["a", "b"]))


@pytest.mark.parametrize("n", [1, 2])
def test_pairs_are_scored_as_single_texts_are(n):
    texts = ["", "a", "a b a", "a a b b a", *(text for pair in PAIRS for text in pair)]
    those, these = [text.split() for text in texts], [text.split() for text in texts[::2]]
    assert rouge_n_pairs(those, these, n) == [[rouge_n(one, other, n) for other in these] for one in those]
