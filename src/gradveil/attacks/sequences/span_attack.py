"""Recovery of texts from the gradients of attention: exact where rows span a subspace, ranked where noise fills it.

Petrov, Dimitrov, Baader, Müller, Vechev 2024, "DAGER: Exact Gradient Inversion for Large Language Models" (NeurIPS),
for membership in the spans of the first two layers. Ranking by weighted directions and beside known words, the
likeliest sentence behind noise, pruning and signs, the completion of pruned gradients, the match of the rows of words
and positions, by the errors that the model gives tokens too, equations for a token's companions, and the subtraction of
recovered sentences from a batch's gradient are our own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from gradveil.attacks.knowledge import How, Knowledge, Known
from gradveil.attacks.protocol import Observation, Progress, Prospect, Reconstruction, Remark, in_closed_form
from gradveil.attacks.sequences.adapter_span import adapter_span
from gradveil.attacks.sequences.entry_likelihood import EntryLikelihood, entry_rows
from gradveil.attacks.sequences.guessed_tokens import with_guesses
from gradveil.attacks.sequences.row_likelihood import NoisyRows, NoisySentRows, NoisySignRows, row_likelihood
from gradveil.attacks.sequences.sentence_evidence import SentenceEvidence
from gradveil.attacks.sequences.sentence_likelihood import SentenceLikelihood
from gradveil.attacks.sequences.sentence_search import MEMBER as SECOND_MEMBER
from gradveil.attacks.sequences.sentence_search import LogPrior, Sentence, SentenceSearch, distinct
from gradveil.attacks.sequences.simulated_errors import SimulatedErrors
from gradveil.attacks.sequences.token_answers import attention_problems, padded, simulated, text_space, token_targets
from gradveil.attacks.sequences.token_candidates import (
    DROPPED_MEMBER,
    Candidates,
    beside_known,
    rank_words,
    with_dropped,
)
from gradveil.attacks.sequences.token_companions import NEAR, TokenCompanions
from gradveil.attacks.sequences.token_span import TOLERANCE, NoisySpan, TokenSpan, are_signs, is_pruned, token_span
from gradveil.attacks.sequences.word_prior import word_pairs
from gradveil.attacks.sequences.word_rows import WordRows
from gradveil.attacks.sequences.word_rows import word_rows as read_word_rows
from gradveil.client import Client
from gradveil.core.errors import Problem, fail
from gradveil.core.noise import Key
from gradveil.core.settings import Checked, Range
from gradveil.core.tree import Tensors
from gradveil.core.types import Batch
from gradveil.gradients.objective import mean_gradient
from gradveil.nn.lora import adapters
from gradveil.nn.stochastic import switched_off
from gradveil.nn.token_layout import TokenModel
from gradveil.spaces.text_space import TextSpace

MEMBER = 3e-5
"""Largest residual of a member of the first layer's span; true tokens lie at 1e-7 to 1e-5."""
_FINE = 1e-7
"""Relative singular value below which a direction of the hidden units is rounding: better one too many than too few."""
_FITS = 0.02
"""Largest rest of the tokens of a sentence that is worth a subtraction, where rounding blurs the hidden units' span."""
_TRIES = 40
"""Tokens per example from which a sentence is solved for."""
_CROWDED = 16
"""Tries that one counts for where the units lie only near their span: it takes longer, and fails more often."""
_SCHEDULE = ((8, 12), (16, 32), (24, 64))
"""Width of the beam and words per position, tried in this order until a sentence is proved."""
_MANY = 4
"""Sentences of an encoder's batch above which only the narrowest beam is tried: wider ones find no more in minutes."""
_CAUSAL = ((256, 1024),)
"""Prefixes of causal texts are tested exactly, so that one wide beam finds all texts."""
_MOST = 1024
"""Members per position that are listed without a bag of words."""
_RANKED = 16
"""Width of the beam under noise."""
_MANY_WORDS = 384
"""Words per position that are ranked again: as inputs of which dropout has zeroed a part, or beside known words."""
_BY_ROWS = 32
"""Words per position that are listed since the embeddings' rows show them."""
_PROPOSED = 64
"""Width of the beam that proposes sentences by the first layer and the prior alone."""
_IMPROVED = 3
"""Proposed sentences per example that are improved word by word."""
_SHRUNK = 4
"""Tokens of usual cost that are added to a sentence before sentences of different lengths are compared."""
_LABELS = 10
"""Most classes that are tried to subtract a sentence."""
_FALLS = 0.1
"""Directions per token that a subtraction has to remove; in the hidden units' span it is about 1."""
_SUBTRACTED = 3
"""Rounding after a subtraction, relative to that of the update."""
_DUST = 1e-4
"""Share of an embedding's row below which the rest of a subtraction is rounding."""


@dataclass(frozen=True)
class SpanAttack(Checked):
    """Find the words of each position in the first layer's span, and their order in the second's."""

    name: str = "span"
    ranked: Annotated[bool, "Rank words where the gradient fills the whole space, as it does with noise."] = False
    rows: Annotated[bool, "Use the word embedding's gradient, if it was sent, to shorten the lists of words."] = True
    shortlist: Annotated[int, Range(1), "Words per position that are ranked under noise."] = 24
    prior_weight: Annotated[
        float,
        Range(0),
        "Weight of public word pairs; 0 needs no public texts. A single text behind noise weighs them by likelihood.",
    ] = 0.1

    needs: ClassVar[str] = "tokens"
    undo: ClassVar[bool] = True
    """Texts are searched as the client trains on them; what it masked is guessed afterwards."""

    @property
    def simulated_client(self) -> Literal["naive", "full"]:
        """Membership ignores defences; ranking expects noise, and completes what pruning removed."""
        return "full" if self.ranked else "naive"

    @property
    def knowledge(self) -> Mapping[str, How]:
        """The public texts of the prior."""
        return {"public": Known()} if self.ranked and self.prior_weight else {}

    def problems(self, prospect: Prospect) -> Iterator[Problem]:
        """Refuse models whose first layers are not known, or not trained."""
        yield from attention_problems(prospect.simulated_client, self.name)

    def __call__(
        self,
        observations: Sequence[Observation],
        simulated_client: Client,
        knowledge: Knowledge,
        key: Key,
        progress: Callable[[Progress], None] | None = None,
        plan: Sequence[int] = (),
    ) -> Reconstruction:
        """Recover every target client's texts from the last round's update."""
        began = time.perf_counter()
        seen = observations[-1]
        space = text_space(knowledge)
        prior = self._prior(knowledge, space)
        texts, costs, ranks, proofs, device = [], [], [], [], next(iter(seen.params.values())).device
        for client in range(len(seen.target_clients)):
            one = SpanSearch(self, seen, client, simulated_client, knowledge, space, prior)
            sentences = one.recovered()
            texts.append(padded([s.words for s in sentences], seen.examples, space, device))
            costs.append(sum(s.cost for s in sentences) / len(sentences) if sentences else torch.inf)
            ranks.append(float(one.rank))
            proofs.append(float(sum(s.proved for s in sentences)))
        inputs, costs = torch.stack(texts), torch.tensor(costs, device=device)
        targets = token_targets(seen, simulated_client, knowledge, inputs)
        # Sentences that nothing proves show that a defence works only if noise or pruning was expected and ranked.
        proved = torch.tensor(proofs, device=device) == seen.examples
        defended = any((simulated_client.batch, simulated_client.step, simulated_client.send))
        sound = torch.isfinite(costs) & (proved | (self.ranked and defended))
        result = in_closed_form(inputs, targets, costs, sound, began, progress)
        width = simulated_client.model.layout.word_table(seen.params).shape[1]  # type: ignore[union-attr]
        remarks = (
            Remark(f"{{}} of {width} directions of the first layer filled", tuple(ranks)),
            Remark(f"{{}} of {seen.examples} sentences proved by both layers", tuple(proofs)),
        )
        result = replace(
            result, remarks=remarks, match=simulated(simulated_client, observations).match(inputs, targets, key)
        )
        public = None if prior is None or knowledge.public is None else knowledge.public.inputs
        return with_guesses(result, simulated_client, prior, public, space)

    def match(
        self,
        observations: Sequence[Observation],
        simulated_client: Client,
        knowledge: Knowledge,
        key: Key,
        inputs: Tensor,
        noise: Mapping[str, Tensor],
        plan: Sequence[int] = (),
    ) -> Tensor:
        """Return the distance from the update, and the likelihood of the rest as noise, at texts [V, B, T]."""
        assert knowledge.targets is not None, "evaluation knows the true labels"
        return simulated(simulated_client, observations).match(inputs, knowledge.targets, key)

    def _prior(self, knowledge: Knowledge, space: TextSpace) -> LogPrior | None:
        if not self.ranked or not self.prior_weight or knowledge.public is None:
            return None
        return word_pairs(knowledge.public.inputs.long(), len(space.vocabulary), space.padding)


def span_rank() -> SpanAttack:
    """Return the attack that ranks words under noise."""
    return SpanAttack("span-rank", ranked=True)


@dataclass
class SpanSearch:
    """The search in one target client's update; what is recovered is subtracted from the update."""

    attack: SpanAttack
    seen: Observation
    client: int
    simulated_client: Client
    knowledge: Knowledge
    space: TextSpace
    prior: LogPrior | None
    rank: int = 0
    listed: tuple[TokenSpan, Candidates] | None = None
    units: tuple[Tensor, TokenSpan] | None = None
    spans: tuple[Tensors, dict[tuple[int, int], TokenSpan]] | None = None

    def __post_init__(self) -> None:
        """Take what the search reads of the update."""
        model = self.simulated_client.model
        assert isinstance(model, TokenModel)
        self.model, self.layout = model, model.layout
        self.params = {name: value.detach() for name, value in self.seen.params.items()}
        read = {f"{name}.weight" for name in self._read()} | {f"{self.layout.head}.bias"}
        adapted = tuple(f"{path.format(layer)}.lora_" for layer in (0, 1) for path in self.layout.attention)
        names = [name for name in self.seen.update if name in read or name.startswith(adapted)]
        self.rest = {name: self.seen.update[name][self.client].nan_to_num(0, 0, 0) for name in names}

    def _read(self) -> Iterator[str]:
        """Name the modules whose gradients are read: embeddings, attention of two layers, and the perceptron."""
        yield from (self.layout.words, self.layout.positions or "")
        yield from (path.format(layer) for layer in (0, 1) for path in self.layout.attention)
        yield from ((path or "").format(0) for path in (self.layout.down, self.layout.out))

    def recovered(self) -> list[Sentence]:
        """Return up to one sentence per example, proved ones first."""
        first = self.span(0, self.seen.examples)
        self.rank = first.rank
        if not first.exact:
            return self.ranked(first) if self.attack.ranked else []
        if self.layout.causal:
            found = self._searched(first, [])
            words = {word for one in found for word in one.words.tolist()}
            if self.layout.positions is None and len(found) == self.seen.examples and len(words) < first.rank:
                # Without positions a repeated word has the inputs of one alone: what the span has besides disproves it.
                found = [replace(one, proved=False) for one in found]
            return self._with_last_words(found)
        first, found = self._solved(first)
        found = self._searched(first, found)
        texts = [tuple(one.words.tolist()) for one in found]
        # Spans show which sentences there are, and not how often: the copies of one are no proof.
        return [replace(one, proved=one.proved and texts[i] not in texts[:i]) for i, one in enumerate(found)]

    def _solved(self, first: TokenSpan) -> tuple[TokenSpan, list[Sentence]]:
        """Solve for one sentence after the other, and subtract it; return the span of the others, too."""
        found: list[Sentence] = []
        tries, subtracts = _TRIES * self.seen.examples, True
        while len(found) < self.seen.examples and first.rank and tries > 0:
            system = self._companions(first)
            if system is None:
                break
            left = self.seen.examples - len(found)
            sentence, smaller = None, None
            for anchor in self._anchors(system, left, [] if subtracts else found):
                tries -= _CROWDED if system.crowded else 1
                solved = system.solve(anchor)
                known = {tuple(one.words.tolist()) for one in found}
                if (
                    solved.largest < (NEAR if system.crowded else _FITS)
                    and tuple(system.words[solved.places].tolist()) not in known
                ):
                    sentence = self._searching(system.candidates, left, _RANKED, None).measured(
                        system.words[solved.places]
                    )
                    smaller = self._subtracted(sentence, first) if subtracts and left > 1 else None
                    if smaller is not None or solved.largest < SECOND_MEMBER:
                        break
                    sentence = None
                if tries <= 0:
                    break
            if sentence is None:
                break
            subtracts = smaller is not None
            found.append(replace(sentence, proved=True))
            first = smaller or first
        return first, found

    def _companions(self, first: TokenSpan) -> TokenCompanions | None:
        """Return the equations of the sentences that are left; None if the gradients do not give them."""
        hidden = self._hidden()
        if hidden is None or not hidden.exact:
            return None
        listed = self._members(first, self.word_rows(self.seen.examples))
        residuals = torch.where(listed.residuals < MEMBER, listed.residuals, torch.inf)
        listed = Candidates(listed.words, residuals)
        perceptron = self._site() != self.layout.out
        return TokenCompanions(
            self.model, self.layout, self.params, listed, hidden, self.space.end, perceptron, self._crowded(hidden)
        )

    def _crowded(self, hidden: TokenSpan) -> bool:
        """Report whether there may be more tokens than outputs, so that their units lie near the span, not in it.

        A normalisation behind the layer takes one direction from its errors.
        """
        return hidden.rank >= len(self.rest[f"{self._site()}.weight".format(0)]) - 1

    def _site(self) -> str | None:
        """Return the path of the layer whose inputs are solved for: the perceptron's second, or attention's last."""
        sites = (self.layout.down, self.layout.out)
        return next((path for path in sites if path and f"{path.format(0)}.weight" in self.rest), None)

    def _hidden(self) -> TokenSpan | None:
        """Return the span of the first layer's hidden units, or else of what its heads give."""
        path = self._site()
        if path is None:
            return None
        name = f"{path.format(0)}.weight"
        if is_pruned([self.rest[name]]):
            return None
        gradient = self.rest[name]
        if self.units is None or self.units[0] is not gradient:
            tokens = self.seen.examples * self.space.shape[0]
            tolerance = _rounding([gradient], [self.seen.update[name][self.client]], _FINE)
            self.units = gradient, token_span([gradient], tokens, gradient.dtype, tolerance)
        return self.units[1]

    def _anchors(self, system: TokenCompanions, left: int, found: Sequence[Sentence]) -> list[int]:
        """Return candidates that no sentence found has, those first that are likely in one sentence of the batch."""
        counts = torch.bincount(system.places)[system.places]
        # Where a position has fewer words than sentences, several sentences share one: these come last.
        order = (counts < left) * len(counts) + counts
        rows = self.word_rows(self.seen.examples)
        if rows is not None and rows.shares is not None:
            # The bag is sorted. A share of 1 belongs to a word that occurs once, so that its sentence is the only one
            # with it.
            place = torch.searchsorted(rows.bag, system.words).clamp_max(len(rows.bag) - 1)
            shares = rows.shares[system.places.clamp_max(len(rows.shares) - 1), place]
            order = (counts == 1) * float(left > 1) + (shares - 1).abs()
        used = {pair for one in found for pair in enumerate(one.words.tolist())}
        pairs = list(zip(system.places.tolist(), system.words.tolist(), strict=True))
        return [one for one in order.argsort(stable=True).tolist() if pairs[one] not in used]

    def _searched(self, first: TokenSpan, found: list[Sentence]) -> list[Sentence]:
        """Search for the sentences that are left, prefix by prefix."""
        left = self.seen.examples - len(found)
        schedule = _CAUSAL if self.layout.causal else _SCHEDULE
        if not self.layout.causal and left > _MANY:
            schedule = _SCHEDULE[:1]
        level = 0
        while left and first.rank:
            widest = level == len(schedule) - 1
            avoid = {tuple(one.words.tolist()) for one in found}
            search = self._search(first, left, *schedule[level])
            tried = search.run(4 * left, avoid)
            proved = [one for one in tried if one.proved]
            if not proved and widest:
                better = [search.improved(one) for one in tried[: 2 * left]] if left <= _MANY else tried
                proved = [one for one in better if one.proved]
                if not proved:
                    found += distinct(sorted(better, key=lambda one: one.cost), left)
                    # A completed gradient has few directions, but not exactly those of the words.
                    return found or (self.ranked(first) if self.attack.ranked else [])
            level = 0 if proved else level + 1
            peeled = 0
            for one in proved[:left]:
                smaller = None if self.layout.causal else self._subtracted(one, first)
                found.append(one)
                left -= 1
                if smaller is not None:
                    first, peeled = smaller, peeled + 1
            if proved and left and not peeled:
                # Causal searches find all at once. Else a defence scaled the update: take what the spans alone prove.
                found += distinct([one for one in tried if one not in proved], left)
                break
        return found

    def span(self, layer: int, examples: int) -> TokenSpan:
        """Return the span of a layer's inputs, computed once for what is left of the update."""
        if self.spans is None or self.spans[0] is not self.rest:
            self.spans = self.rest, {}
        if (layer, examples) not in self.spans[1]:
            self.spans[1][layer, examples] = self._span(layer, examples)
        return self.spans[1][layer, examples]

    def _span(self, layer: int, examples: int) -> TokenSpan:
        one = {name: value.unsqueeze(0) for name, value in self.rest.items()}
        gradients = [value[0] for value in self.layout.gradients(one, layer)]
        dtype = next(iter(self.params.values())).dtype
        adapted = None if gradients else adapter_span(self.rest, self.layout, self.params, layer, dtype)
        if adapted is not None:
            return adapted
        if not gradients:
            remedy = "train attention, or choose embedding-rows"
            raise fail(f"attack.{self.attack.name}", f"layer {layer} of attention was not sent", remedy)
        before = [value[self.client] for value in self.layout.gradients(self.seen.update, layer)]
        return token_span(gradients, examples * self.space.shape[0], dtype, _rounding(gradients, before, TOLERANCE))

    def _second(self, examples: int) -> TokenSpan | None:
        one = {name: value.unsqueeze(0) for name, value in self.rest.items()}
        paths = [path.format(1) for path in self.layout.attention]
        if self.layout.layers < 2 or not (self.layout.gradients(one, 1) or adapters(self.rest, paths)):
            return None
        return self.span(1, examples)

    def word_rows(self, examples: int) -> WordRows | None:
        """Return what embedding rows show; None if they were not sent, or are not to be used."""
        most = examples * self.space.shape[0]
        return read_word_rows(self.rest, self.layout, 2 * most) if self.attack.rows else None

    def _search(self, span: TokenSpan, examples: int, beam: int, kept: int) -> SentenceSearch:
        """Return the search among members of the first layer's span."""
        rows = self.word_rows(examples)
        bag = None if rows is None else rows.bag
        listed = self._members(span, rows)
        costs = torch.where(listed.residuals < MEMBER, listed.residuals, torch.inf)
        order = costs
        if rows is not None and rows.shares is not None:
            assert bag is not None
            shares = rows.shares[: len(listed.words)].gather(1, torch.searchsorted(bag, listed.words))
            # The share of a position's row stands for a residual: words that occur once have all of it.
            order = torch.where(torch.isfinite(costs), 1 / shares.clamp(0.02, 1), torch.inf)
            # From 0.01 for a whole share to 0.07: the search takes logarithms of these, as of residuals.
            costs = order.sqrt() / 100
        worst = order.topk(min(kept, order.shape[1]), largest=False).values[:, -1:]
        costs = torch.where((order <= worst) | (listed.words == self.space.end), costs, torch.inf)
        costs = torch.where(torch.isfinite(order), costs, torch.inf)
        return self._searching(Candidates(listed.words, costs), examples, beam, None)

    def _members(self, span: TokenSpan, rows: WordRows | None) -> Candidates:
        """Return the words near the first layer's span, computed once per span."""
        if self.listed is None or self.listed[0] is not span:
            length = self.space.shape[0] if rows is None or rows.length is None else rows.length
            bag = None if rows is None else rows.bag
            if bag is None and self.listed is not None and self.listed[0].rank > span.rank:
                bag = self.listed[1].words.unique()  # a smaller span has no other members
            most = _MOST if bag is None else len(bag)
            found = rank_words(self.model, self.layout, self.params, span, length, most, bag, MEMBER)
            self.listed = span, found
        return self.listed[1]

    def _searching(self, candidates: Candidates, examples: int, beam: int, prior: LogPrior | None) -> SentenceSearch:
        return SentenceSearch(
            self.model, self.layout, self.params, candidates, self._second(examples), self.space.start, self.space.end,
            beam, prior, self.attack.prior_weight,
        )  # fmt: skip

    def ranked(self, span: TokenSpan) -> list[Sentence]:
        """Return the best distinct sentences among the best ranked words of each position."""
        examples, length = self.seen.examples, self.longest
        if examples == 1 and length > 2 and self.layout.positions:
            likelihood = self._likelihood(span)
            if likelihood is not None:
                start = None if likelihood.rows is None else likelihood.by_rows.likeliest()
                search = self._searching(likelihood.candidates, 1, _RANKED, self.prior)
                return [search.measured(self._by_errors(likelihood, likelihood.words(likelihood.likeliest(start))))]
        listed = self.likely(span, self.attack.shortlist)
        search = self._searching(listed, examples, _RANKED, self.prior)
        if self.layout.causal:
            tried = distinct(search.run(_RANKED * length), examples)
            return [search.improved(one) for one in tried]
        proposed = [search.measured(one.words) for same in self._proposed(search) for one in same[:examples]]
        usual = search.usual_cost(proposed)

        def cost(one: Sentence) -> float:
            # Few tokens are good by chance: some that are as bad as wrong words are added to all sentences.
            return len(one.words) * (one.cost - usual) / (len(one.words) + _SHRUNK)

        if span.exact and examples == 1:
            # The second layer says nothing of inputs that dropout changed: the first alone proves a single sentence.
            sure = [one for one in proposed if bool((search.first_residuals(one.words) < DROPPED_MEMBER).all())]
            if sure:
                return [replace(min(sure, key=cost), proved=True)]
        best = sorted(proposed, key=cost)[: _IMPROVED * examples]
        return distinct(sorted(map(search.improved, best), key=cost), examples)

    def _by_errors(self, likelihood: SentenceLikelihood, words: Tensor) -> Tensor:
        """Return the likeliest words that are found from a sentence's by the errors that the model gives its tokens."""
        rows = likelihood.rows
        if not isinstance(rows, NoisyRows):
            return words
        marks = self.space.start, self.space.end, self.space.padding
        errors = SimulatedErrors(self.simulated_client, self.params, rows, likelihood.log_priors, *marks)
        granted = self.knowledge.targets
        labels = range(self.knowledge.classes) if granted is None else granted[self.client].tolist()
        return errors.likeliest(words, labels)

    def _likelihood(self, span: TokenSpan) -> SentenceLikelihood | None:
        """Return how likely sentences make the first layer's gradient; None where that is not known."""
        gradients = [value[0] for value in self.layout.gradients({n: v.unsqueeze(0) for n, v in self.rest.items()}, 0)]
        signs = bool(gradients) and all(map(are_signs, gradients))
        noisy = isinstance(span, NoisySpan) and span.noisy
        rows = None
        # Dropout alone leaves an exact span, whose members are proved one by one.
        if self.attack.rows and (signs or not span.exact or is_pruned(gradients)):
            rows = row_likelihood(self.rest, self.layout, self.longest)
        entries = None
        # A causal text's last word predicts nothing, and leaves no entry that tells it. Noise breaks the equations.
        if not noisy and not self.layout.causal and gradients and (signs or is_pruned(gradients)):
            noise = isinstance(rows, NoisySignRows | NoisySentRows)
            entries = None if noise else entry_rows(gradients, self.longest, signs)
        if not noisy and entries is None and rows is None:
            return None
        listed = self.likely(span, _MANY_WORDS, every=rows is not None and not rows.complete)
        if rows is not None:
            listed = self._with_words(listed, rows.proposed(_BY_ROWS)[: len(listed.words)], span)
        known = (self.model, self.layout, self.params, listed, self.space.start, self.space.end, self.prior)
        if entries is not None:
            return EntryLikelihood(*known, entries, signs, rows=rows)
        if noisy:
            assert isinstance(span, NoisySpan)
            return SentenceEvidence(*known, span, rows=rows)
        return SentenceLikelihood(*known, rows=rows)

    def likely(self, span: TokenSpan, count: int, every: bool = False) -> Candidates:
        """Return the best ranked words of each position, start and end among them, of the update's or of all words."""
        rows = None if every else self.word_rows(self.seen.examples)
        bag = None if rows is None else rows.bag
        dropped = span.exact and not self.layout.causal and 2 * span.rank <= span.basis.shape[1]
        most = max(count, _MANY_WORDS) if dropped or isinstance(span, NoisySpan) else count
        listed = rank_words(self.model, self.layout, self.params, span, self.longest, most, bag)
        if dropped:
            listed = with_dropped(self.model, self.layout, self.params, span, self._with_marks(listed, span))
        if isinstance(span, NoisySpan):
            if self.layout.positions is not None:  # marks differ by position
                listed = self._with_marks(listed, span)
            listed = beside_known(self.model, self.layout, self.params, span, listed, self.seen.examples)
        return self._with_marks(Candidates(listed.words[:, :count], listed.residuals[:, :count]), span)

    @property
    def longest(self) -> int:
        """The length of the longest text, as far as position rows show it."""
        rows = self.word_rows(self.seen.examples)
        return self.space.shape[0] if rows is None or rows.length is None else rows.length

    def proposed(self, listed: Candidates) -> list[Sentence]:
        """Return the likeliest sentence of each length by the first layer and the prior."""
        found = self._proposed(self._searching(listed, self.seen.examples, _RANKED, self.prior))
        return [same[0] for same in found]

    def _proposed(self, search: SentenceSearch) -> list[list[Sentence]]:
        """Return sentences by length. Prefixes say little of the second layer: the first and the prior propose them."""
        lengths: dict[int, list[Sentence]] = {}
        for one in replace(search, second=None, beam=_PROPOSED).run(_PROPOSED * self.longest):
            lengths.setdefault(len(one.words), []).append(one)
        return list(lengths.values())

    @torch.no_grad()
    def _with_marks(self, listed: Candidates, span: TokenSpan) -> Candidates:
        """Add the start at the first position, and the end at the others: noise may drop them from the lists."""
        words, residuals = [], []
        for position, row in enumerate(listed.words):
            mark = self.space.end if position else self.space.start
            if mark is None or bool((row == mark).any()):
                words.append(row[:1])
                residuals.append(torch.full_like(listed.residuals[position, :1], torch.inf))
            else:
                words.append(torch.full_like(row[:1], mark))
                inputs = self.layout.first_inputs(self.model, self.params, position, words[-1])
                residuals.append(span.residuals(inputs))
        return Candidates(
            torch.cat([listed.words, torch.stack(words)], 1), torch.cat([listed.residuals, torch.stack(residuals)], 1)
        )

    @torch.no_grad()
    def _with_words(self, listed: Candidates, words: Tensor, span: TokenSpan) -> Candidates:
        """Add words [P, m] to those of each position; the residuals of those that are listed already are infinite."""
        added = [
            span.residuals(self.layout.first_inputs(self.model, self.params, place, row)).masked_fill(
                torch.isin(row, listed.words[place]), torch.inf
            )
            for place, row in enumerate(words)
        ]
        return Candidates(torch.cat([listed.words, words], 1), torch.cat([listed.residuals, torch.stack(added)], 1))

    def _subtracted(self, sentence: Sentence, first: TokenSpan) -> TokenSpan | None:
        """Subtract a sentence's gradient; return its words and the smaller span, None if it did not fit.

        Of the labels, that one is right which leaves the smallest rank.
        """
        best: tuple[int, Tensors, tuple[Tensor, TokenSpan] | None] | None = None
        hidden = self._hidden()
        # A crowded span stays full; the first layer's loses the words that no other sentence has.
        of_units = hidden is not None and hidden.exact and not self._crowded(hidden)
        rank = self._directions(of_units)
        before, units = self.rest, self.units
        ids = padded([sentence.words], 1, self.space, sentence.words.device)
        for label in range(min(self.knowledge.classes, _LABELS)):
            # `_directions` reads self.rest and self.units: they are set for each label, and restored below.
            update = self._simulated(ids, label)
            self.rest = {name: self._without(name, value, update[name]) for name, value in before.items()}
            left = self._directions(of_units)
            if best is None or left < best[0]:
                best = (left, self.rest, self.units)
        self.rest, self.units = before, units
        if best is None or best[0] > rank - _FALLS * len(sentence.words):
            return None
        self.rest, self.units = best[1:]
        return self.span(0, self.seen.examples)

    def _directions(self, of_units: bool) -> int:
        """Return how many directions the rest of the update fills: one per token in the hidden units' span."""
        hidden = self._hidden() if of_units else None
        return self.span(0, self.seen.examples).rank if hidden is None else hidden.rank

    def _without(self, name: str, value: Tensor, update: Tensor) -> Tensor:
        """Subtract one sentence's gradient; rows of an embedding that only rounding leaves become 0."""
        left = value - update / self.seen.examples
        if name in (f"{self.layout.words}.weight", f"{self.layout.positions}.weight"):
            left[left.norm(dim=1) < _DUST * value.norm(dim=1)] = 0
        return left

    def _simulated(self, ids: Tensor, label: int = 0) -> Tensors:
        """Return the gradient of texts [B, T] of one label, without defences and noise."""
        client, batch = self.simulated_client, Batch(ids, torch.full(ids.shape[:1], label, device=ids.device))
        trained = {name: self.params[name] for name in self.rest}
        frozen = {name: value for name, value in self.params.items() if name not in trained}
        noise = switched_off(client.model, ids)
        return mean_gradient(client.objective, trained, frozen, batch, noise)

    def _with_last_words(self, sentences: list[Sentence]) -> list[Sentence]:
        """Append the last token of each causal text: it is predicted, but predicts nothing itself.

        The bias's gradient holds -1 / (B n) for each predicted word, n the predictions of its text. The same texts
        with a wrong last word leave just the right ones.
        """
        bias = self.rest.get(f"{self.layout.head}.bias")
        examples = self.seen.examples
        if bias is None or len(sentences) < examples or not all(one.proved for one in sentences):
            return sentences
        wrong = 1 if self.space.padding == 0 else 0
        longer = [torch.cat([one.words, torch.full_like(one.words[:1], wrong)]) for one in sentences]
        ids = padded(longer, examples, self.space, bias.device)
        left = bias - self._simulated(ids)[f"{self.layout.head}.bias"]
        completed: list[Sentence] = []
        for one, words in zip(sentences, longer, strict=True):
            share = -1 / (examples * len(one.words))
            distances = (left / share - 1).abs()
            best = int(distances.argmin() if float(distances.min()) < _SAME else left.argmin())
            # The share is negative: a word was predicted if at least half of it is left.
            if float(left[best]) < share / 2:
                left[best] -= share
                words = torch.cat([one.words, torch.full_like(one.words[:1], best)])
            completed.append(replace(one, words=words))
        return completed


def _rounding(left: Sequence[Tensor], before: Sequence[Tensor], tolerance: float) -> float:
    """Return the relative singular value of rounding in what subtractions left: it stays as large as it was before."""
    shares = [float(one.norm() / other.norm().clamp_min(1e-30)) for one, other in zip(left, before, strict=True)]
    # Nothing was subtracted so far.
    return tolerance if min(shares) > 0.999 else _SUBTRACTED * tolerance / max(min(shares), 1e-30)


_SAME = 0.01
"""Relative difference below which an entry of the bias holds the share of one text."""
