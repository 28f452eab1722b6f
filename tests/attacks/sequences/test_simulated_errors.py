"""The errors that the model gives a sentence's tokens order its words, and show how many there are, behind noise."""

import pytest
import torch

from gradveil.attacks.sequences.row_likelihood import NoisyRows, row_likelihood
from gradveil.attacks.sequences.simulated_errors import SimulatedErrors
from gradveil.client import Client
from gradveil.core.tree import Tensors
from gradveil.nn.initial_weights import initialise
from gradveil.nn.models.token_transformers import small_encoder

WORDS, LENGTH = 400, 16
TRUTH = torch.tensor([1, 30, 31, 32, 30, 33, 34, 30, 35, 31, 36, 37, 38, 2])


def sent(truth: torch.Tensor, noise: float) -> tuple[torch.nn.Module, Tensors]:
    """Return a model and its gradient at a sentence, scaled, and with noise."""
    model = initialise(small_encoder(vocabulary=WORDS, length=LENGTH, width=96), torch.Generator().manual_seed(0))
    loss = torch.nn.functional.cross_entropy(model(truth.unsqueeze(0)), torch.tensor([1]))
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    generator = torch.Generator().manual_seed(0)
    return model, {
        name: 0.3 * value + noise * torch.randn(value.shape, generator=generator)
        for (name, _), value in zip(model.named_parameters(), gradients, strict=True)
    }


def simulated(model: torch.nn.Module, update: Tensors) -> SimulatedErrors:
    client = Client(model)
    rows = row_likelihood(update, model.layout, LENGTH)  # type: ignore[arg-type]
    assert isinstance(rows, NoisyRows)
    return SimulatedErrors(
        client, client.params(), rows, lambda words: -6.0 * words.shape[1] * torch.ones(len(words)), 1, 2, 0
    )


@pytest.mark.parametrize("change", ["order", "shorter", "longer", "other"])
def test_the_true_sentence_is_found_from_a_wrong_one(change: str) -> None:
    errors = simulated(*sent(TRUTH, 0.02))
    start = TRUTH.clone()
    if change == "order":
        start[1:-1] = TRUTH[1:-1][torch.randperm(len(TRUTH) - 2, generator=torch.Generator().manual_seed(2))]
    elif change == "shorter":
        start = torch.cat([TRUTH[:4], TRUTH[7:]])
    elif change == "longer":
        start = torch.cat([TRUTH[:4], torch.tensor([200]), TRUTH[4:]])
    else:
        start[5] = 200
    assert torch.equal(errors.likeliest(start, range(2)), TRUTH)


def test_errors_that_the_model_does_not_have_change_nothing() -> None:
    """The update of another model: no sentence has its errors."""
    _, update = sent(TRUTH, 1e-3)
    other = initialise(small_encoder(vocabulary=WORDS, length=LENGTH, width=96), torch.Generator().manual_seed(1))
    start = TRUTH.flip(0)
    start[[0, -1]] = start[[-1, 0]]
    assert torch.equal(simulated(other, update).likeliest(start, range(2)), start)


@pytest.mark.parametrize("words", [[1, 2], [1, 7, 2], [1, 7, 7, 7, 7, 2]])
def test_short_sentences_and_those_of_one_word_stay(words: list[int]) -> None:
    truth = torch.tensor(words)
    assert torch.equal(simulated(*sent(truth, 0.02)).likeliest(truth, range(2)), truth)


def test_words_are_read_where_entries_were_rounded_at_random() -> None:
    """TernGrad sends few entries of a row, and none of the words that are not there."""
    truth = TRUTH[:10]
    model, update = sent(truth, 0.0)
    generator = torch.Generator().manual_seed(0)
    for name, value in update.items():
        top = value.abs().max()
        drawn = torch.rand(value.shape, generator=generator) < value.abs() / top
        update[name] = torch.where(drawn, top * value.sign(), 0.0)
    start = torch.tensor([1, 200, 201, 202, 2])
    found = simulated(model, update).likeliest(start, range(2))
    assert len(found) == len(truth)
    assert set(truth.tolist()) <= set(found.tolist())
