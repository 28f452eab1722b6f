"""Texts are matched whatever their order, scored without special tokens, and guessed from the others."""

import torch

from gradveil.spaces import TextSpace

SPACE = TextSpace((5,), ("[PAD]", "[CLS]", "[SEP]", *"abcdefg"), padding=0, start=1, end=2)
TRUTH = torch.tensor([[[1, 3, 4, 5, 2], [1, 6, 7, 2, 0]]])


def test_a_batch_in_another_order_is_matched():
    permutation, matched = SPACE.match(TRUTH.flip(1), TRUTH)
    assert permutation.tolist() == [[1, 0]]
    assert torch.equal(matched, TRUTH)


def test_scores_tell_order_from_words():
    reordered = torch.tensor([[[1, 4, 3, 5, 2], [1, 6, 7, 2, 0]]])
    scores = SPACE.scores(reordered, TRUTH)
    assert scores["exact"].tolist() == [[0, 1]]
    assert scores["recall"].tolist() == [[1, 1]]
    assert scores["tokens"][0].tolist() == [torch.tensor(1 / 3).item(), 1]
    assert scores["rouge1"][0, 0] == 1 > scores["rouge2"][0, 0]


def test_guesses_never_contain_the_text_itself():
    views = torch.tensor([[1, 3, 4, 5, 2], [1, 3, 4, 6, 2], [1, 7, 8, 9, 2]])
    guesses = SPACE.guesses(views, 3)
    assert guesses.shape == (3, 3, 5)
    assert not any(torch.equal(guess[i], views[i]) for guess in guesses for i in range(3))


def test_identification_needs_a_shared_word():
    gallery = torch.tensor([[1, 3, 4, 2, 0], [1, 5, 6, 2, 0]])
    nothing = torch.zeros(2, 5, dtype=torch.long)
    assert SPACE.identified(gallery, torch.tensor([0, 1]), gallery).tolist() == [True, True]
    assert SPACE.identified(nothing, torch.tensor([0, 1]), gallery).tolist() == [False, False]


def test_guess_that_is_as_near_to_several_texts_identifies_none_and_copies_count_as_one():
    gallery = torch.tensor([[1, 3, 4, 2, 0], [1, 3, 5, 2, 0], [1, 6, 7, 2, 0], [1, 6, 7, 2, 0]])
    common = torch.tensor([[1, 3, 2, 0, 0], [1, 3, 2, 0, 0], [1, 6, 2, 0, 0]])
    assert SPACE.identified(common, torch.tensor([0, 1, 2]), gallery).tolist() == [False, False, True]


def test_numbers_outside_of_the_vocabulary_are_a_problem():
    assert not list(SPACE.problems(TRUTH[0]))
    assert [p.where for p in SPACE.problems(TRUTH[0] + 9)] == ["inputs"]
    assert [p.where for p in SPACE.problems(TRUTH[0].float())] == ["inputs"]


def test_record_holds_no_sentence_where_a_run_keeps_scores_only():
    assert SPACE.of_trial(TRUTH, TRUTH, private=False) == {}
    assert SPACE.of_trial(TRUTH, TRUTH, private=True)["sentences"][0]["truth"] == "a b c"


def test_tokens_that_a_guess_has_are_no_part_that_comes_back():
    public = torch.tensor([[1, 3, 4, 2, 0], [1, 3, 4, 2, 0], [1, 3, 5, 2, 0]])
    truths = torch.tensor([[1, 3, 6, 2, 0], [1, 6, 3, 2, 0]])
    parts = SPACE.shared_parts(truths, truths, public)
    assert {shared.noun for shared in parts.values()} == {"unguessed token"}
    assert parts["in place"].counts.tolist() == [[1, 0], [0, 2]]  # a guess has the first 3 in its place
    assert parts["in place"].sizes.tolist() == [1, 2]
    assert parts["found"].counts.tolist() == [[1, 1], [1, 1]]
    assert parts["found"].sizes.tolist() == [1, 1]
    assert SPACE.shared_parts(truths, truths, None)["found"].sizes.tolist() == [2, 2]
