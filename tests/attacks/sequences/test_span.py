"""Texts of small random models are recovered exactly from undefended gradients."""

from dataclasses import replace

import pytest
import torch

from gradveil.attacks.knowledge import Knowledge
from gradveil.attacks.protocol import Observation
from gradveil.attacks.sequences.entry_likelihood import EntryLikelihood, entry_rows
from gradveil.attacks.sequences.row_likelihood import NoisySentRows, _variances, row_likelihood
from gradveil.attacks.sequences.sentence_search import Sentence
from gradveil.attacks.sequences.simulated_errors import SimulatedErrors
from gradveil.attacks.sequences.span_attack import SpanAttack, SpanSearch
from gradveil.attacks.sequences.token_candidates import beside_known, rank_words
from gradveil.attacks.sequences.token_span import NoisySpan, TokenSpan, token_span
from gradveil.client import Client
from gradveil.core.errors import GradveilError
from gradveil.core.noise import Key
from gradveil.nn.initial_weights import initialise
from gradveil.nn.models.token_transformers import TextTransformer, small_decoder, small_encoder
from gradveil.nn.token_layout import own_loss
from gradveil.spaces.text_space import TextSpace

WORDS, LENGTH = 400, 12
SPACE = TextSpace((LENGTH,), tuple(f"w{i}" for i in range(WORDS)), padding=0, start=1, end=2)


def texts(count: int, seed: int = 0) -> torch.Tensor:
    """Return random texts of different lengths, with start, end and padding."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.zeros(count, LENGTH, dtype=torch.long)
    for row in table:
        length = int(torch.randint(4, LENGTH - 1, (), generator=generator))
        row[0], row[length] = 1, 2
        row[1:length] = torch.randint(3, WORDS, (length - 1,), generator=generator)
    return table


def seen(model: TextTransformer, ids: torch.Tensor, labels: torch.Tensor) -> tuple[Client, Observation]:
    client = Client(model, loss=own_loss) if model.layout.causal else Client(model)
    params = client.params()
    outputs = model(ids)
    loss = outputs.mean() if model.layout.causal else torch.nn.functional.cross_entropy(outputs, labels)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    update = {name: g.unsqueeze(0) for (name, _), g in zip(model.named_parameters(), gradients, strict=True)}
    return client, Observation(params, update, len(ids), (0,))


def encoder() -> TextTransformer:
    model = small_encoder(vocabulary=WORDS, length=LENGTH, width=96)
    return initialise(model, torch.Generator().manual_seed(0))  # type: ignore[return-value]


def decoder() -> TextTransformer:
    model = small_decoder(vocabulary=WORDS, length=LENGTH, width=96)
    return initialise(model, torch.Generator().manual_seed(0))  # type: ignore[return-value]


@pytest.mark.parametrize(("make", "examples", "rows"), [(encoder, 1, False), (encoder, 3, True), (decoder, 4, False)])
def test_every_text_of_an_undefended_batch_is_recovered_exactly(make, examples, rows):
    ids, labels = texts(examples), torch.arange(examples) % 2
    client, observation = seen(make(), ids, labels)
    result = SpanAttack(rows=rows)([observation], client, Knowledge(SPACE, 2), Key(0))
    _, matched = SPACE.match(SPACE.view(result.inputs), ids.unsqueeze(0))
    assert SPACE.scores(matched, ids.unsqueeze(0))["exact"].mean() == 1
    if not client.model.layout.causal:
        assert result.targets[0].tolist() == sorted(labels.tolist())


@pytest.mark.parametrize(
    ("examples", "rows", "scale"), [(2, True, 1.0), (3, True, 1.0), (2, False, 1.0), (3, True, 0.4)]
)
def test_batches_of_texts_that_share_their_words_come_back_in_order(examples, rows, scale):
    """Few words, each at many positions: the first layer's span then leaves every word at every position."""
    model = initialise(small_encoder(vocabulary=WORDS, length=24), torch.Generator().manual_seed(0))
    ids = torch.zeros(examples, 24, dtype=torch.long)
    ids[:, :22] = torch.randint(3, 20, (examples, 22), generator=torch.Generator().manual_seed(1))
    ids[:, 0], ids[0, 19:], ids[1:, 22], ids[0, 19] = 1, 0, 2, 2
    client, observation = seen(model, ids, torch.arange(examples) % 2)
    for value in observation.update.values():  # as clipping does, so that no sentence can be subtracted
        value *= scale
    space = TextSpace((24,), SPACE.vocabulary, padding=0, start=1, end=2)
    result = SpanAttack(rows=rows)([observation], client, Knowledge(space, 2), Key(0))
    _, matched = space.match(result.inputs, ids.unsqueeze(0))
    assert torch.equal(matched[0], ids)
    assert [remark.numbers for remark in result.remarks][1] == (examples,)


def test_how_often_a_text_is_in_a_batch_is_not_proved():
    """A scaled update, from which no text can be subtracted exactly: the spans show the texts, not their copies."""
    ids = torch.tensor([[1, word, word, word, word, word, 2] for word in (3, 3, 4, 5, 5, 5)])
    model = initialise(small_encoder(vocabulary=WORDS, length=7, width=64), torch.Generator().manual_seed(0))
    client, observation = seen(model, ids, torch.zeros(6, dtype=torch.long))
    for value in observation.update.values():
        value *= 0.4
    space = TextSpace((7,), SPACE.vocabulary, padding=0, start=1, end=2)
    found = SpanAttack()([observation], client, Knowledge(space, 2), Key(0))
    assert found.remarks[1].numbers[0] <= 3


def test_attention_alone_orders_a_batch():
    ids = texts(3)
    client, observation = seen(encoder(), ids, torch.arange(3) % 2)
    sent = {name: value for name, value in observation.update.items() if "attention" in name}
    alone = Observation(observation.params, sent, 3, (0,))
    found = SpanAttack()([alone], client, Knowledge(SPACE, 2), Key(0))
    assert torch.equal(SPACE.match(found.inputs, ids.unsqueeze(0))[1][0], ids)


def test_another_clients_update_reveals_nothing_of_a_text():
    model = encoder()
    mine, others = texts(1), texts(1, seed=1)
    client, observation = seen(model, others, torch.tensor([1]))
    result = SpanAttack()([observation], client, Knowledge(SPACE, 2), Key(0))
    assert SPACE.scores(result.inputs, mine.unsqueeze(0))["recall"].item() < 0.3


def test_membership_fails_under_noise_and_ranking_does_not():
    ids = texts(1)
    client, observation = seen(encoder(), ids, torch.tensor([0]))
    generator = torch.Generator().manual_seed(0)
    for value in observation.update.values():
        value += 0.05 * value.norm() / value.numel() ** 0.5 * torch.randn(value.shape, generator=generator)
    exact = SpanAttack()([observation], client, Knowledge(SPACE, 2), Key(0))
    ranked = SpanAttack(ranked=True, rows=False, prior_weight=0)([observation], client, Knowledge(SPACE, 2), Key(0))
    assert SPACE.scores(exact.inputs, ids.unsqueeze(0))["tokens"].item() == 0
    assert SPACE.scores(ranked.inputs, ids.unsqueeze(0))["tokens"].item() > 0.8


@pytest.mark.parametrize("rows", [False, True])
def test_dropout_of_the_first_layers_inputs_is_undone_word_by_word(rows):
    model, ids = encoder(), texts(1, seed=2)
    mask = (torch.rand(LENGTH, 96, generator=torch.Generator().manual_seed(0)) > 0.1) / 0.9
    hook = model.get_submodule(model.layout.norm).register_forward_hook(lambda _module, _inputs, x: x * mask)
    client, observation = seen(model, ids, torch.tensor([0]))
    hook.remove()
    found = SpanAttack(ranked=True, rows=rows, prior_weight=0)([observation], client, Knowledge(SPACE, 2), Key(0))
    assert torch.equal(found.inputs[0], ids)
    assert found.status == ("converged",)  # the masks that fit prove every word
    other = SpanAttack(rows=rows)([observation], client, Knowledge(SPACE, 2), Key(0))
    assert SPACE.scores(other.inputs, ids.unsqueeze(0))["exact"].item() == 0


@pytest.mark.parametrize("ranked", [False, True])
def test_a_batch_of_more_tokens_than_directions_is_no_evidence_of_protection(ranked):
    model = initialise(small_encoder(vocabulary=WORDS, length=LENGTH, width=32), torch.Generator().manual_seed(0))
    ids = texts(8)
    client, observation = seen(model, ids, torch.arange(8) % 2)
    attack = SpanAttack(ranked=ranked, shortlist=4, prior_weight=0.0)
    assert attack([observation], client, Knowledge(SPACE, 2), Key(0)).status == ("diverged",)


def test_a_batch_of_more_tokens_than_the_perceptron_has_outputs_is_recovered():
    model = initialise(small_encoder(vocabulary=WORDS, length=24, width=96), torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(5)
    ids = torch.zeros(5, 24, dtype=torch.long)
    for row, length in zip(ids, (17, 18, 20, 20, 19), strict=True):
        row[:length] = torch.randint(3, 60, (length,), generator=generator)
        row[0], row[length] = 1, 2
    client, observation = seen(model, ids, torch.arange(5) % 2)
    space = TextSpace((24,), SPACE.vocabulary, padding=0, start=1, end=2)
    search = SpanSearch(SpanAttack(), observation, 0, client, Knowledge(space, 2), space, None)
    hidden = search._hidden()
    assert hidden is not None
    assert hidden.rank == 95 < int((ids != 0).sum())
    found = {tuple(one.words.tolist()) for one in search.recovered() if one.proved}
    assert found == {tuple(row[row != 0].tolist()) for row in ids}


def test_a_repeated_word_is_no_proof_where_a_model_knows_no_positions(monkeypatch):
    client, observation = seen(decoder(), texts(1), torch.zeros(1, dtype=torch.long))
    search = SpanSearch(SpanAttack(), observation, 0, client, Knowledge(SPACE, 2), SPACE, None)
    search.layout = replace(search.layout, positions=None)
    repeated = Sentence(torch.ones(9, dtype=torch.long), -99.0, proved=True)
    monkeypatch.setattr(search, "_searched", lambda *_: [repeated])
    assert [one.proved for one in search.recovered()] == [False]


def test_a_model_without_known_layers_is_refused_with_a_remedy():
    from gradveil.attacks.protocol import Prospect

    client = Client(torch.nn.Linear(4, 2))
    problems = list(SpanAttack().problems(Prospect(client, (4,), 1, 2, 0)))
    assert [p.where for p in problems] == ["attack.span"]
    with pytest.raises(GradveilError, match="space"):
        TextSpace((4, 4), ("a",))


@pytest.mark.parametrize("ranked", [False, True])
def test_pruning_that_leaves_no_word_in_the_span_ends_membership_and_not_ranking(ranked):
    ids, labels = texts(1), torch.zeros(1, dtype=torch.long)
    client, observation = seen(encoder(), ids, labels)
    update = {}
    for name, value in observation.update.items():
        cutoff = value.abs().flatten().quantile(0.99)
        update[name] = torch.where(value.abs() >= cutoff, value, 0)
        if name == "positions.weight":
            update[name] = torch.zeros_like(value)
    attack = SpanAttack(ranked=ranked, prior_weight=0.0)
    found = attack([Observation(observation.params, update, 1, (0,))], client, Knowledge(SPACE, 2), Key(0))
    assert bool(found.inputs.any()) == ranked


def test_the_span_of_signs_holds_words_of_small_gradients_too():
    generator = torch.Generator().manual_seed(0)
    inputs, sizes = torch.randn(8, 96, generator=generator), 0.7 ** torch.arange(8)
    gradients = [((torch.randn(96, 8, generator=generator) * sizes) @ inputs).sign() for _ in range(3)]
    likeliest = torch.linalg.svd(torch.cat(gradients), full_matrices=False).Vh[:8]
    plain = TokenSpan(likeliest, torch.ones(8), exact=False).residuals(inputs)
    fitted = token_span(gradients, 8)
    assert not fitted.exact
    assert fitted.residuals(inputs).max() < 0.6 < plain.max()
    mixed = token_span([gradients[0], 2 * gradients[1] + 0.1], 8)  # not signs
    assert not torch.allclose(mixed.weights, torch.ones(8))


def test_the_span_of_fewer_rows_than_tokens_has_finite_weights():
    span = token_span([torch.randn(12, 64, generator=torch.Generator().manual_seed(0))], tokens=200)
    assert not span.exact
    assert torch.isfinite(span.residuals(torch.eye(64))).all()


@pytest.mark.parametrize("strength", [60.0, 100.0, 300.0])
def test_the_weight_of_a_noisy_direction_is_how_much_of_it_the_true_one_explains(strength: float) -> None:
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.nn.functional.normalize(torch.randn(n, generator=generator), dim=0) for n in (1152, 384))
    noisy = strength * torch.outer(left, right) + torch.randn(1152, 384, generator=generator)
    span = token_span([noisy], 1)
    assert float(span.weights[0]) == pytest.approx(float((span.basis[0] @ right).square()), abs=0.02)


def test_a_gradient_that_is_lost_in_noise_does_not_blur_a_clear_one() -> None:
    generator = torch.Generator().manual_seed(0)
    right = torch.nn.functional.normalize(torch.randn(384, generator=generator), dim=0)
    clear, weak = (size * torch.outer(torch.randn(384, generator=generator), right) for size in (10.0, 0.1))
    clear, weak = (one + torch.randn(384, 384, generator=generator) for one in (clear, weak))
    alone, both = (float((token_span(some, 1).basis[0] @ right).square()) for some in ([clear], [clear, weak]))
    assert both == pytest.approx(alone, abs=0.01)


@pytest.mark.parametrize(("examples", "least"), [(1, 0.85), (2, 0.6)])
def test_words_that_stand_out_in_noise_show_the_others(examples: int, least: float) -> None:
    model, ids = small_encoder(vocabulary=WORDS, length=LENGTH, width=64), texts(examples)
    client, observation = seen(
        initialise(model, torch.Generator().manual_seed(0)),
        ids,
        torch.arange(examples) % 2,  # type: ignore[arg-type]
    )
    generator = torch.Generator().manual_seed(0)
    gradients = [value[0] for value in model.layout.gradients(observation.update, 0)]
    noisy = [g + g.norm() / g.numel() ** 0.5 * torch.randn(g.shape, generator=generator) for g in gradients]
    span = token_span(noisy, int((ids != 0).sum()))
    assert isinstance(span, NoisySpan)
    listed = rank_words(model, model.layout, client.params(), span, LENGTH, WORDS)
    shares = []
    for ranked in (listed, beside_known(model, model.layout, client.params(), span, listed, examples)):
        places = [ranked.words[place].tolist().index(word) for row in ids for place, word in enumerate(row) if word]
        shares.append(sum(place < examples for place in places) / len(places))
    assert shares[0] < least - 0.2
    assert shares[1] >= least


def test_the_true_sentence_is_the_likeliest_and_is_found() -> None:
    for seed in range(3):
        ids = texts(1, seed)
        client, observation = seen(encoder(), ids, torch.zeros(1, dtype=torch.long))
        generator = torch.Generator().manual_seed(seed)
        update = {
            name: value + value.norm() / value.numel() ** 0.5 * torch.randn(value.shape, generator=generator)
            for name, value in observation.update.items()
        }
        noisy = Observation(observation.params, update, 1, (0,))
        found = SpanAttack(ranked=True, rows=False)([noisy], client, Knowledge(SPACE, 2), Key(0))
        assert torch.equal(found.inputs[0], ids)


@pytest.mark.parametrize("change", ["kept", "signs"])
def test_the_true_sentence_alone_holds_all_that_was_sent_and_is_found(change: str) -> None:
    ids = texts(1)
    client, observation = seen(encoder(), ids, torch.zeros(1, dtype=torch.long))
    update = {}
    for name, value in observation.update.items():
        least = value.abs().flatten().quantile(0.8)
        update[name] = value.sign() if change == "signs" else torch.where(value.abs() >= least, value, 0.0)
    sent = Observation(observation.params, update, 1, (0,))
    attack = SpanAttack(ranked=True, rows=False, prior_weight=0.0)
    found = attack([sent], client, Knowledge(SPACE, 2), Key(0))
    assert torch.equal(found.inputs[0], ids)
    search = SpanSearch(attack, sent, 0, client, Knowledge(SPACE, 2), SPACE, None)
    likelihood = search._likelihood(search.span(0, 1))
    assert isinstance(likelihood, EntryLikelihood)
    words = ids[0][ids[0] != SPACE.padding]
    true = torch.stack(
        [(row == word).nonzero()[0, 0] for row, word in zip(likelihood.candidates.words, words, strict=False)]
    )
    assert likelihood.settled(true)
    wrong = true.clone()
    wrong[2] = int(likelihood.log_posteriors(true, 2).topk(2).indices[1])
    assert likelihood.log_posterior(wrong) < likelihood.log_posterior(true)
    assert not likelihood.settled(wrong)
    if change == "signs":
        return
    # The rest of each row is that of least squares over what was sent, computed another way.
    inputs, rest = likelihood.inputs[torch.arange(len(wrong)), wrong].double(), 0.0
    for row in likelihood.values.double():
        there = row != 0
        solved = torch.linalg.lstsq(inputs[:, there].T, row[there].unsqueeze(1)).solution
        rest += float((inputs[:, there].T @ solved - row[there].unsqueeze(1)).square().sum())
    assert float(likelihood._fit(wrong).slopes.square().sum()) == pytest.approx(rest, rel=1e-2)


@pytest.mark.parametrize("sign", [False, True])
def test_entries_that_are_no_numbers_end_the_search(sign: bool) -> None:
    ids = texts(1)
    client, observation = seen(encoder(), ids, torch.zeros(1, dtype=torch.long))
    update = {}
    for name, value in observation.update.items():
        changed = value.sign() if sign else torch.where(value.abs() >= value.abs().flatten().quantile(0.8), value, 0.0)
        changed.flatten()[::7] = torch.nan
        update[name] = changed
    attack = SpanAttack(ranked=True, rows=False, prior_weight=0.0)
    found = attack([Observation(observation.params, update, 1, (0,))], client, Knowledge(SPACE, 2), Key(0))
    assert found.inputs.shape[-1] == ids.shape[-1]


def test_a_gradient_of_zeros_has_no_span() -> None:
    assert float(token_span([torch.zeros(40, 64)], 8).weights.sum()) == 0


def test_too_few_rows_with_more_entries_than_tokens_tell_no_sentences_apart() -> None:
    rows = torch.zeros(80, 64)
    rows[:, :12] = 1
    assert entry_rows([rows], 12, signs=False) is None
    assert entry_rows([rows], 7, signs=False) is not None


def test_rows_of_signs_that_follow_from_each_other_count_once() -> None:
    generator = torch.Generator().manual_seed(0)
    few, inputs = torch.randn(5, 12, generator=generator), torch.randn(12, 64, generator=generator)
    factors = torch.randn(200, 1, generator=generator)
    copies = factors * few[torch.arange(200) % 5] @ inputs
    assert entry_rows([copies], 12, signs=True).shape == (5, 64)  # type: ignore[union-attr]
    apart = torch.randn(200, 64, generator=generator)
    assert len(entry_rows([apart], 12, signs=True)) == 200  # type: ignore[arg-type]


def sent(update, kind, seed=0):
    """Return an update of which the largest tenth, the signs, or noisy values were sent, tensor by tensor, or two."""
    generator = torch.Generator().manual_seed(seed)
    if "noise" in kind:
        update = {n: v + 2e-3 * torch.randn(v.shape, generator=generator) for n, v in update.items()}
    if kind == "noise":
        return update
    if "signs" in kind:
        return {name: value.sign() for name, value in update.items()}
    least = {name: value.abs().flatten().quantile(0.9) for name, value in update.items()}
    return {name: torch.where(value.abs() >= least[name], value, 0.0) for name, value in update.items()}


@pytest.mark.parametrize("kind", ["pruning", "signs", "noise", "pruning of noise", "signs of noise"])
def test_the_rows_of_words_and_positions_show_where_words_stand(kind):
    """The row of each word is that of its position, and the sum of those of all its positions."""
    ids = torch.tensor([[1, 30, 31, 32, 30, 33, 34, 35, 31, 2, 0, 0]])
    client, observation = seen(encoder(), ids, torch.tensor([1]))
    update = sent(observation.update, kind)
    likelihood = row_likelihood({n: v[0] for n, v in update.items()}, client.model.layout, LENGTH)
    truth = ids[:, :10]
    swapped, other, shorter = truth.clone(), truth.clone(), truth[:, :9]
    swapped[0, 3], swapped[0, 5] = 33, 32
    other[0, 4] = 200
    best, *wrong = (float(likelihood.log_likelihoods(one)) for one in (truth, swapped, other, shorter))
    assert max(wrong) < best
    exchanged = likelihood.exchanged(truth[0], 6, torch.arange(WORDS))
    assert int(exchanged.argmax()) == 34
    result = SpanAttack(ranked=True, prior_weight=0)(
        [replace(observation, update=update)], client, Knowledge(SPACE, 2), Key(0)
    )
    assert torch.equal(result.inputs[0], ids)


@pytest.mark.parametrize("kind", ["pruning", "signs", "noise", "pruning of noise", "signs of noise"])
def test_numbers_that_are_none_end_in_an_answer(kind):
    ids = torch.tensor([[1, 30, 31, 32, 30, 2, 0, 0, 0, 0, 0, 0]])
    client, observation = seen(encoder(), ids, torch.tensor([1]))
    update = sent(observation.update, kind)
    for name in ("words.weight", "positions.weight"):
        update[name][0, 0, 7] = torch.nan
    result = SpanAttack(ranked=True)([replace(observation, update=update)], client, Knowledge(SPACE, 2), Key(0))
    assert result.inputs.shape == (1, 1, LENGTH)


def test_the_variance_of_numbers_is_read_off_the_large_ones():
    rows = (
        torch.randn(4, 20_000, generator=torch.Generator().manual_seed(0)).double() * torch.tensor([[0.6, 1, 2, 9]]).T
    )
    found = _variances(torch.where(rows.abs() > 1.5, rows, 0.0), 1.5, 36)
    assert found.sqrt().tolist() == pytest.approx([0.6, 1, 2, 9], rel=0.03)


def test_rows_that_dual_pruning_left_empty_are_those_of_words_where_there_is_noise():
    """The largest entries were dropped, so that the rows of a sentence have the fewest."""
    ids = torch.tensor([[1, 30, 31, 32, 30, 33, 34, 35, 31, 2, 0, 0]])
    client, observation = seen(encoder(), ids, torch.tensor([1]))
    update = {}
    for name, value in sent(observation.update, "noise").items():
        low, high = value.abs().flatten().quantile(torch.tensor([0.75, 0.95]))
        update[name] = torch.where((value.abs() >= low) & (value.abs() <= high), value, 0.0)
    likelihood = row_likelihood({n: v[0] for n, v in update.items()}, client.model.layout, LENGTH)
    assert isinstance(likelihood, NoisySentRows)
    assert (likelihood.used[:10] > 10).all()
    assert (likelihood.used[10:] < 3).all()
    truth = ids[:, :10]
    swapped, shorter = truth.clone(), truth[:, :9]
    swapped[0, 3], swapped[0, 5] = 33, 32
    best, *wrong = (float(likelihood.log_likelihoods(one)) for one in (truth, swapped, shorter))
    assert max(wrong) < best


def test_noise_of_which_few_rows_were_sent_is_no_sentence():
    generator = torch.Generator().manual_seed(0)
    ids = torch.tensor([[1, 30, 31, 32, 30, 33, 34, 35, 31, 2, 0, 0]])
    client, observation = seen(encoder(), ids, torch.tensor([1]))
    update = {n: v + 2e-3 * torch.randn(v.shape, generator=generator) for n, v in observation.update.items()}
    least = {name: value.abs().flatten().quantile(0.98) for name, value in update.items()}
    update = {name: torch.where(value.abs() >= least[name], value, 0.0) for name, value in update.items()}
    rows = {n: v[0] for n, v in update.items()}
    assert LENGTH < int(rows["words.weight"].any(1).sum()) < 0.9 * WORDS
    assert isinstance(row_likelihood(rows, client.model.layout, LENGTH), NoisySentRows)


def test_the_label_of_a_sentence_is_the_one_that_was_granted(monkeypatch):
    ids = torch.tensor([[1, 30, 31, 32, 30, 33, 34, 35, 31, 2, 0, 0]])
    client, observation = seen(encoder(), ids, torch.tensor([1]))
    tried = list[list[int]]()
    monkeypatch.setattr(
        SimulatedErrors, "likeliest", lambda self, words, labels: (tried.append(list(labels)), words)[1]
    )
    for targets in (None, torch.tensor([[1]])):
        known = Knowledge(SPACE, 2, targets=targets)
        SpanAttack(ranked=True)([replace(observation, update=sent(observation.update, "noise"))], client, known, Key(0))
    assert tried == [[0, 1], [1]]


@pytest.mark.parametrize("causal", [False, True])
def test_rows_that_do_not_show_the_errors_are_not_read(causal):
    ids = texts(1)
    client, observation = seen(decoder() if causal else encoder(), ids, torch.tensor([0]))
    update = {name: value[0] for name, value in observation.update.items()}
    if not causal:
        del update["positions.weight"]
    assert row_likelihood(update, client.model.layout, LENGTH) is None


def test_hardly_anything_that_was_sent_is_completed_without_failing():
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        gradient = torch.randn(384, 5, generator=generator) @ torch.randn(5, 128, generator=generator)
        least = gradient.abs().flatten().quantile(0.995)
        assert torch.isfinite(token_span([torch.where(gradient.abs() > least, gradient, 0.0)], 32).basis).all()


def test_a_text_of_one_word_without_marks_ends_in_an_answer():
    """No other word can stand beside it, so that there is nothing to solve for."""
    space = replace(SPACE, start=None, end=None)
    ids = torch.zeros(1, LENGTH, dtype=torch.long)
    ids[0, 0] = 7
    client, observation = seen(encoder(), ids, torch.tensor([1]))
    assert SpanAttack()([observation], client, Knowledge(space, 2), Key(0)).inputs.shape == (1, 1, LENGTH)


def test_noise_on_words_alone_leaves_the_errors_of_positions_exact():
    ids = torch.tensor([[1, 30, 31, 32, 30, 33, 34, 35, 31, 2, 0, 0]])
    client, observation = seen(encoder(), ids, torch.tensor([1]))
    update = {name: value[0] for name, value in observation.update.items()}
    words = update["words.weight"]
    update["words.weight"] = words + 1e-3 * torch.randn(words.shape, generator=torch.Generator().manual_seed(0))
    likelihood = row_likelihood(update, client.model.layout, LENGTH)
    assert torch.isfinite(likelihood.used).all()
    assert likelihood.exchanged(ids[0, :10], 6, torch.arange(WORDS)).argmax() == 34
