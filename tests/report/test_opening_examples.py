"""Sentences and rows of the first screen: the first of the run, the truth above what each defence leaves of it."""

from gradveil.audit.verdict import verdicts
from gradveil.report.exhibits import exhibits
from gradveil.report.opening_examples import opening_examples
from gradveil.report.shown_rows import shown_rows
from tests.report.trials import row


def shown(**answers: list[tuple[str, str]]):
    rows = [
        row(
            number,
            number=number,
            defence=defence,
            sentences=[{"truth": truth, "reconstruction": answer} for truth, answer in pairs],
        )
        for number, (defence, pairs) in enumerate(answers.items())
    ]
    return exhibits(verdicts(rows), {}, {each.attack: each.attack for each in rows})


def test_reconstructions_stand_below_one_truth_and_mark_what_differs() -> None:
    every = shown(none=[("a good film", "a good film")], prune=[("a good film", "a bad film")])
    found = opening_examples(every, shown_rows(every))
    assert found is not None
    assert (found.names, found.more) == ((), 0)
    assert found.truths[0][0][0].words == "a good film"
    answers = [found.answers[exhibit.row.number][0][0] for exhibit in every]
    differing = [[part.words for part in parts if part.differs] for parts in answers]
    assert sorted(differing) == [[], ["bad"]]


def test_a_defence_with_other_private_sentences_shows_none() -> None:
    every = shown(none=[("a good film", "a good film")], prune=[("the war", "the war")])
    found = opening_examples(every, shown_rows(every))
    assert found is not None
    assert len(found.answers) == 1


def test_runs_that_kept_no_examples_have_none_to_show() -> None:
    every = shown(none=[])
    assert opening_examples(every, shown_rows(every)) is None
