"""A search over mixtures of words recovers texts that noise and signs hide from spans."""

import pytest
import torch

from gradveil.attacks.knowledge import Knowledge
from gradveil.attacks.protocol import Observation
from gradveil.attacks.sequences.embedding_search import EmbeddingSearch
from gradveil.attacks.sequences.span_attack import SpanAttack
from gradveil.attacks.sequences.text_misfit import TextMisfit
from gradveil.core.noise import Key
from gradveil.nn.initial_weights import initialise
from gradveil.nn.models.token_transformers import TextTransformer, small_decoder, small_encoder
from tests.attacks.sequences.test_span import LENGTH, SPACE, WORDS, seen, texts

KNOWN = Knowledge(SPACE, 2)


def encoder(width: int) -> TextTransformer:
    model = small_encoder(vocabulary=WORDS, length=LENGTH, width=width)
    return initialise(model, torch.Generator().manual_seed(0))  # type: ignore[return-value]


def noisy(observation: Observation, size: float) -> Observation:
    """Add noise whose length is `size` times that of each tensor."""
    generator = torch.Generator().manual_seed(0)
    update = {
        name: value + size * value.norm() / value.numel() ** 0.5 * torch.randn(value.shape, generator=generator)
        for name, value in observation.update.items()
    }
    return Observation(observation.params, update, observation.examples, observation.target_clients)


def signs(observation: Observation, _: float) -> Observation:
    update = {name: value.sign() for name, value in observation.update.items()}
    return Observation(observation.params, update, observation.examples, observation.target_clients)


def kept(observation: Observation, share: float) -> Observation:
    """Keep the largest entries of each tensor."""
    update = {}
    for name, value in observation.update.items():
        least = value.abs().flatten().topk(max(1, int(share * value.numel()))).values[-1]
        update[name] = torch.where(value.abs() >= least, value, 0.0)
    return Observation(observation.params, update, observation.examples, observation.target_clients)


def exact(result, ids: torch.Tensor) -> float:
    _, matched = SPACE.match(SPACE.view(result.inputs), ids.unsqueeze(0))
    return float(SPACE.scores(matched, ids.unsqueeze(0))["exact"].mean())


@pytest.mark.parametrize(
    ("change", "size", "width", "ranked"),
    [(noisy, 0.3, 32, 1), (noisy, 3.0, 64, 1), (signs, 0.0, 64, 1), (kept, 0.05, 64, 0)],
)
def test_a_sentence_is_found_whether_ranking_recovers_it_or_not(change, size, width, ranked):
    ids = texts(1)
    client, observation = seen(encoder(width), ids, torch.zeros(1, dtype=torch.long))
    changed = [change(observation, size)]
    for attack, share in (
        (SpanAttack(ranked=True, rows=False, prior_weight=0), ranked),
        (EmbeddingSearch(rows=False, fluency=0), 1),
    ):
        assert exact(attack(changed, client, KNOWN, Key(0)), ids) == share


def test_batches_with_too_many_tokens_for_a_span_are_recovered():
    ids = texts(2, seed=3)
    client, observation = seen(encoder(32), ids, torch.arange(2))
    assert exact(SpanAttack()([observation], client, KNOWN, Key(0)), ids) == 0
    result = EmbeddingSearch(fluency=0)([observation], client, KNOWN, Key(0))
    assert exact(result, ids) == 1
    assert result.targets[0].tolist() == [0, 1]


def test_the_objective_at_the_truth_is_the_smallest():
    ids, labels = texts(1), torch.zeros(1, dtype=torch.long)
    client, observation = seen(encoder(32), ids, labels)
    changed, attack = [noisy(observation, 1.0)], EmbeddingSearch(fluency=0, steps=1, moves=0)
    known = Knowledge(SPACE, 2, targets=labels.unsqueeze(0))
    other = texts(1, seed=1)
    at_truth, elsewhere = (attack.evaluate(changed, client, known, Key(0), x.unsqueeze(0), {}) for x in (ids, other))
    assert float(at_truth) < float(elsewhere)
    assert attack.match(changed, client, known, Key(0), ids.unsqueeze(0), {}).shape[0] == 1


def test_an_undefended_decoder_needs_no_step():
    ids = texts(1)
    model = small_decoder(vocabulary=WORDS, length=LENGTH, width=64, depth=1)
    initialise(model, torch.Generator().manual_seed(0))
    client, observation = seen(model, ids, torch.zeros(1, dtype=torch.long))
    misfit = TextMisfit(client, observation.params, {name: value[0] for name, value in observation.update.items()})
    assert float(misfit(ids, torch.zeros(1, dtype=torch.long)).exp()) < 1e-4


def test_unsent_entries_do_not_count():
    ids, label = texts(1), torch.zeros(1, dtype=torch.long)
    client, observation = seen(encoder(32), ids, label)
    kept = {}
    for name, value in observation.update.items():
        least = value.abs().flatten().topk(max(1, value.numel() // 5)).values[-1]
        kept[name] = torch.where(value.abs() >= least, value, 0.0)[0]
    assert float(TextMisfit(client, observation.params, kept)(ids, label).exp()) < 1e-4
