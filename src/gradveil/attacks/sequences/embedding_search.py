"""Search for texts in embedding space: steps over mixtures of likely words, then discrete moves, in turn.

Deng et al. 2021, "TAG: Gradient Attack on Transformer-based Language Models", search word embeddings that explain an
update. Balunović, Dimitrov, Jovanović, Vechev 2022, "LAMP: Extracting Text from Gradients with Language Model Priors",
alternate these steps with discrete moves that a language model scores. Ours differs in three ways: a position's
embedding is a mixture of words that the first layer's span ranks first, the prior is one of public word pairs, and
the distance is that of `text_misfit`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, ClassVar, Literal

import torch
from torch import Generator, Tensor

from gradveil.attacks.knowledge import How, Knowledge, Known
from gradveil.attacks.protocol import Observation, Progress, Prospect, Reconstruction, Remark, in_closed_form
from gradveil.attacks.sequences.bag_of_words import BagOfWords
from gradveil.attacks.sequences.guessed_tokens import with_guesses
from gradveil.attacks.sequences.sentence_search import LogPrior, Sentence
from gradveil.attacks.sequences.span_attack import SpanAttack, SpanSearch
from gradveil.attacks.sequences.text_misfit import TextMisfit
from gradveil.attacks.sequences.token_answers import (
    attention_problems,
    padded,
    simulated,
    text_space,
    token_problems,
    token_targets,
)
from gradveil.attacks.sequences.token_candidates import Candidates
from gradveil.attacks.sequences.word_prior import word_pairs
from gradveil.client import Client
from gradveil.core.errors import Problem
from gradveil.core.noise import Key
from gradveil.core.settings import Checked, Range
from gradveil.core.tree import Tensors
from gradveil.nn.token_layout import TokenLayout, TokenModel
from gradveil.spaces.text_space import TextSpace

_ROUND = 50
"""Steps between two series of discrete moves."""
_STEP = 0.5
"""Step size of Adam on the logits of words."""
_TRUST = 2.0
"""Logit of the current word before the steps of a round."""
_SPREAD = 2.0
"""Logit per unit of the log residual."""
_STALLS, _FALL = 2, 1e-4
"""The search ends after so many rounds in turn that lower the log misfit by less than this."""
_SOLVED = 0.01
"""Misfit of a text that explains an undefended update."""
_CLEAR = -0.3
"""Log misfit of a proposed text below which its length is not compared with others after some steps."""
_GRID = 8
"""Tokens between two lengths that are compared first."""
_PROBE = 8
"""Steps that compare two lengths."""
_UNSURE = 8
"""Least certain positions of a sentence whose next words are tried."""
_LABELS = 10
"""Most classes of which each is tried as a label."""


@dataclass(frozen=True)
class EmbeddingSearch(Checked):
    """Search the texts whose gradient has the smallest angle to the update, among fluent ones first."""

    name: str = "embedding-search"
    steps: Annotated[int, Range(1), "Steps in embedding space, without those that compare lengths."] = 300
    shortlist: Annotated[int, Range(2), "Words per position that are mixed."] = 64
    moves: Annotated[int, Range(0), "Discrete moves that are tried after each 50 steps."] = 24
    fluency: Annotated[float, Range(0), "Weight of public word pairs; 0 needs no public texts."] = 0.01
    rows: Annotated[bool, "Use the word embedding's gradient, if it was sent, to shorten the lists of words."] = True

    needs: ClassVar[str] = "tokens"
    simulated_client: ClassVar[Literal["naive", "full"]] = "full"
    undo: ClassVar[bool] = True
    """Texts are searched as the client trains on them; what it masked is guessed afterwards."""

    @property
    def knowledge(self) -> Mapping[str, How]:
        """The public texts of the prior."""
        return {"public": Known()} if self.fluency else {}

    def problems(self, prospect: Prospect) -> Iterator[Problem]:
        """Refuse models that read no texts, and those whose attention is known, but not trained."""
        client = prospect.simulated_client
        unknown = isinstance(client.model, TokenModel) and not client.model.layout.attention
        yield from (token_problems if unknown else attention_problems)(client, self.name)

    def __call__(
        self,
        observations: Sequence[Observation],
        simulated_client: Client,
        knowledge: Knowledge,
        key: Key,
        progress: Callable[[Progress], None] | None = None,
        plan: Sequence[int] = (),
    ) -> Reconstruction:
        """Search every target client's texts in the last round's update."""
        began = time.perf_counter()
        seen, space = observations[-1], text_space(knowledge)
        prior = None
        if self.fluency and knowledge.public is not None:
            prior = word_pairs(knowledge.public.inputs.long(), len(space.vocabulary), space.padding)
        texts, labels, misfits, starts = [], [], [], []
        for place, number in enumerate(seen.target_clients):
            search = _Search(self, seen, place, simulated_client, knowledge, space, prior, key.child(number))
            found = search.run()
            texts.append(padded(found.words, seen.examples, space, search.table.device))
            labels.append(found.labels)
            misfits.append(found.misfit)
            starts.append(search.began_at)
        inputs, targets = torch.stack(texts), torch.stack(labels)
        if knowledge.targets is None:
            targets = targets.sort(1).values
        misfit = torch.tensor(misfits, device=inputs.device).double().exp()
        result = in_closed_form(inputs, targets, misfit, torch.isfinite(misfit), began, progress)
        result = replace(
            result,
            initial=torch.tensor(starts, device=inputs.device).double().exp(),
            iterations=result.iterations * self.steps,
            match=simulated(simulated_client, observations).match(inputs, targets, key),
            remarks=(Remark("{}% of the update not explained by the texts", tuple((100 * misfit).tolist())),),
        )
        public = None if knowledge.public is None else knowledge.public.inputs
        return with_guesses(result, simulated_client, prior, public, space)

    def evaluate(
        self,
        observations: Sequence[Observation],
        simulated_client: Client,
        knowledge: Knowledge,
        key: Key,
        inputs: Tensor,
        noise: Mapping[str, Tensor],
        plan: Sequence[int] = (),
    ) -> Tensor:
        """Return the misfit [V] at texts [V, B, T]."""
        seen, space = observations[-1], text_space(knowledge)
        assert knowledge.targets is not None
        model = simulated_client.model
        assert isinstance(model, TokenModel)
        found = []
        for place, texts in enumerate(inputs.long()):
            update = {name: value[place] for name, value in seen.update.items()}
            misfit = TextMisfit(simulated_client, seen.params, update)
            found.append(misfit(_trimmed(texts, space, model.layout), knowledge.targets[place]).detach().exp())
        return torch.stack(found)

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
        assert knowledge.targets is not None
        return simulated(simulated_client, observations).match(inputs, knowledge.targets, key)


@dataclass(frozen=True, eq=False)
class _Draft:
    """The texts [T] of a batch, their labels [B], and their log misfit."""

    words: list[Tensor]
    labels: Tensor
    misfit: float = torch.inf


@dataclass(frozen=True, eq=False)
class _WordMixture:
    """Logits [T, K] of a sentence's words [T, K], and log probabilities [T - 1, K, K] of their pairs."""

    words: Tensor
    logits: Tensor
    pairs: Tensor | None

    def best(self) -> Tensor:
        """Return the likeliest words [T]."""
        return self.words.gather(1, self.logits.argmax(1, keepdim=True)).squeeze(1)


@dataclass
class _Search:
    """The search in one target client's update."""

    attack: EmbeddingSearch
    seen: Observation
    client: int
    simulated_client: Client
    knowledge: Knowledge
    space: TextSpace
    prior: LogPrior | None
    key: Key
    began_at: float = field(default=0.0, init=False)
    """Log misfit of the texts that the first layer and the prior propose."""

    def __post_init__(self) -> None:
        model = self.simulated_client.model
        assert isinstance(model, TokenModel)
        self.generator: Generator = self.key.generator()
        self.layout = model.layout
        self.params = {name: value.detach() for name, value in self.seen.params.items()}
        self.table = self.layout.word_table(self.params)
        update = {name: value[self.client] for name, value in self.seen.update.items()}
        self.misfit = TextMisfit(self.simulated_client, self.params, update)
        self.listed, self.ranked, self.proposals = self._starts(update)
        self.longest = len(self.listed.words)

    def _starts(self, update: Tensors) -> tuple[Candidates, Callable[[], list[Sentence]], Callable[[], list[Sentence]]]:
        """Return likely words, and how texts are proposed: one for each example, and one of each length."""
        if not self.layout.attention:
            public = None if self.knowledge.public is None else self.knowledge.public.inputs
            most = max(self.attack.shortlist, self.seen.examples * self.space.shape[0])
            rows = update if self.attack.rows else {}
            known = self.layout, self.space, self.seen.examples
            bag = BagOfWords(rows, *known, most, self.table.device, self.prior, public)
            return bag.listed(), bag.ranked, bag.proposed
        ranking = SpanAttack(ranked=True, rows=self.attack.rows)
        spans = SpanSearch(
            ranking, self.seen, self.client, self.simulated_client, self.knowledge, self.space, self.prior
        )
        first = spans.span(0, self.seen.examples)
        listed = spans.likely(first, self.attack.shortlist)
        return listed, partial(spans.ranked, first), partial(spans.proposed, listed)

    def run(self) -> _Draft:
        """Return the best texts that were met."""
        draft = self._labelled(self._measured(self._proposed()))
        self.began_at = draft.misfit
        if draft.misfit < _SOLVED_LOG:
            return draft
        proposed, draft = draft, self._with_lengths(draft)
        best = min(proposed, draft, key=lambda one: one.misfit)
        left, stalls = self.attack.steps, 0
        while left > 0 and stalls < _STALLS:
            mixtures, _ = self._stepped(draft, min(_ROUND, left))
            left -= _ROUND
            hard = self._measured(replace(draft, words=[mixture.best() for mixture in mixtures]))
            if _same(hard, best):
                draft = self._resized(best)
                if draft is best:
                    break
            else:
                draft = self._moved(hard, mixtures)
            stalls = stalls + 1 if draft.misfit > best.misfit - _FALL else 0
            best = min(best, draft, key=lambda one: one.misfit)
            if best.misfit < _SOLVED_LOG:
                break
        return best

    def _proposed(self) -> _Draft:
        """Return what ranking words proposes, with the labels that the last bias proves for them."""
        examples, space = self.seen.examples, self.space
        marks = [mark for mark in (space.start, space.end) if mark is not None]
        texts = [one.words for one in self.ranked()]
        texts += [torch.tensor(marks, device=self.table.device)] * (examples - len(texts))
        inputs = padded(texts, examples, space, self.table.device).unsqueeze(0)
        update = {name: value[self.client : self.client + 1] for name, value in self.seen.update.items()}
        own = replace(self.seen, update=update, target_clients=(self.seen.target_clients[self.client],))
        known = self.knowledge
        if known.targets is not None:
            return _Draft(texts, known.targets[self.client])
        return _Draft(texts, token_targets(own, self.simulated_client, known, inputs)[0])

    def _labelled(self, draft: _Draft) -> _Draft:
        """Try every label of a single text, if none was granted: noise on the last bias may have changed its signs."""
        classes = self.knowledge.classes
        granted = self.knowledge.targets is not None or self.layout.predicts_words
        if granted or len(draft.words) > 1 or classes > _LABELS:
            return draft
        each = torch.arange(classes, device=self.table.device).split(1)
        tried = [self._measured(replace(draft, labels=label)) for label in each]
        return min(tried, key=lambda one: one.misfit)

    def _measured(self, draft: _Draft) -> _Draft:
        ids = padded(draft.words, len(draft.words), self.space, self.table.device)
        return replace(draft, misfit=float(self.misfit(_trimmed(ids, self.space, self.layout), draft.labels)))

    def _with_lengths(self, draft: _Draft) -> _Draft:
        """Compare lengths, sentence by sentence: of proposed texts, and after some steps."""
        proposed = self.proposals()
        if len(draft.words) == 1 and self.longest < self.space.shape[0]:
            proposed = [one for one in proposed if len(one.words) == self.longest]
        for place in range(len(draft.words)):
            drafts = [self._measured(_with(draft, place, one.words)) for one in proposed]
            draft = self._probed(min([draft, *drafts], key=lambda one: one.misfit), drafts, place)
        return draft

    def _probed(self, best: _Draft, drafts: Sequence[_Draft], place: int) -> _Draft:
        """Take some steps from drafts of several lengths; return the one that then fits best."""
        if best.misfit < _CLEAR:
            return best
        by_length = {len(one.words[place]): one for one in drafts}
        chosen = {len(best.words[place]), *range(_GRID, self.longest + 1, _GRID)} & by_length.keys()
        reached: dict[int, float] = {}
        while chosen - reached.keys():
            for length in sorted(chosen - reached.keys()):
                reached[length] = self._stepped(by_length[length], _PROBE)[1]
            least = min(reached, key=lambda length: reached[length])
            chosen = {least - 2, least - 1, least + 1, least + 2} & by_length.keys()
        if not reached:
            return best
        least = min(reached, key=lambda length: reached[length])
        return by_length[least] if reached[least] < best.misfit else best

    def _mixture(self, words: Tensor) -> _WordMixture:
        """Return the words of each position around a sentence: its own has a larger logit."""
        last, space = len(words) - 1, self.space
        listed, residuals = self.listed.words[: last + 1].clone(), self.listed.residuals[: last + 1]
        own = (listed == words.unsqueeze(1)).any(1)
        # A word that is not listed takes the place of the last one.
        listed[~own, -1] = words[~own]
        # softmax then weighs a word by its residual to the power of -_SPREAD.
        logits = -_SPREAD * residuals.clamp_min(1e-4).log()
        logits = torch.where(torch.isfinite(residuals), logits, -torch.inf)
        if space.end is not None:
            logits[:last][listed[:last] == space.end] = -torch.inf
            # The sentence keeps its length: all words of its last position are the end.
            listed[last] = space.end
        if space.start is not None:
            listed[0] = space.start
        logits = logits - logits.amax(1, keepdim=True)
        # The likeliest word has 0 here: the current one gets at least that.
        logits = torch.where(listed == words.unsqueeze(1), logits.clamp_min(-_SPREAD) + _TRUST, logits)
        pairs = None
        if self.prior is not None:
            count = listed.shape[1]
            before, after = listed[:-1].repeat_interleave(count, 1), listed[1:].repeat(1, count)
            pairs = self.prior(before.flatten(), after.flatten()).view(-1, count, count)
        return _WordMixture(listed, logits, pairs)

    def _stepped(self, draft: _Draft, steps: int) -> tuple[list[_WordMixture], float]:
        """Take steps over the mixtures of a batch's words; return these and the last log misfit."""
        mixtures = [self._mixture(words) for words in draft.words]
        logits = [mixture.logits.clone().requires_grad_() for mixture in mixtures]
        ids = padded(draft.words, len(draft.words), self.space, self.table.device)
        optimiser = torch.optim.Adam(logits, lr=_STEP)
        reached = torch.inf
        for step in range(steps):
            for group in optimiser.param_groups:
                # Full steps in the first half, which then fall to zero.
                group["lr"] = _STEP * min(1.0, 2 * (steps - step) / steps)
            shares = [one.softmax(1) for one in logits]
            embedded = self.table[_trimmed(ids, self.space, self.layout)].clone()
            for row, (share, mixture) in enumerate(zip(shares, mixtures, strict=True)):
                embedded[row, : len(share)] = torch.einsum("tk,tkd->td", share, self.table[mixture.words])
            value = self.misfit(_trimmed(ids, self.space, self.layout), draft.labels, embedded)
            reached = float(value.detach())
            for share, mixture in zip(shares, mixtures, strict=True):
                if mixture.pairs is not None:
                    # Expected log probability of the pairs, with the words of neighbours drawn independently.
                    fluent = torch.einsum("tk,tkl,tl->", share[:-1], mixture.pairs, share[1:])
                    value = value - self.attack.fluency * fluent / len(share) / len(shares)
            optimiser.zero_grad()
            value.backward()
            optimiser.step()
        return [replace(one, logits=own.detach()) for one, own in zip(mixtures, logits, strict=True)], reached

    def _moved(self, draft: _Draft, mixtures: Sequence[_WordMixture]) -> _Draft:
        """Keep those discrete moves that lower the misfit, a fluent text counting as a better one."""
        cost = self._cost(draft)
        for move in range(self.attack.moves):
            other = self._substituted(draft, mixtures, move) if move % 2 else self._rearranged(draft)
            other = self._measured(other)
            if (lower := self._cost(other)) < cost:
                draft, cost = other, lower
        return draft

    def _resized(self, draft: _Draft) -> _Draft:
        """Return the best draft with one word less or more; the same one if none is better."""
        first = 0 if self.space.start is None else 1
        best, cost = draft, self._cost(draft)
        for place, words in enumerate(draft.words):
            last = len(words) - (self.space.end is not None)
            others = [torch.cat([words[:one], words[one + 1 :]]) for one in range(first, last) if last - first > 1]
            if len(words) < self.longest:
                likely = self.listed.words[last][:_UNSURE]
                others += [torch.cat([words[:last], new.view(1), words[last:]]) for new in likely]
            for other in others:
                tried = self._measured(_with(draft, place, other))
                if (lower := self._cost(tried)) < cost:
                    best, cost = tried, lower
        return best

    def _cost(self, draft: _Draft) -> float:
        if self.prior is None:
            return draft.misfit
        fluent = [float(self.prior(words[:-1], words[1:]).mean()) for words in draft.words]
        return draft.misfit - self.attack.fluency * sum(fluent) / len(fluent)

    def _substituted(self, draft: _Draft, mixtures: Sequence[_WordMixture], move: int) -> _Draft:
        """Return a draft with the next word of one of the least certain positions."""
        place = self._drawn(len(draft.words))
        words, mixture = draft.words[place].clone(), mixtures[place]
        length = min(len(words), len(mixture.words))
        shares = mixture.logits[:length].softmax(1)
        position = int(shares.amax(1).argsort()[self._drawn(min(_UNSURE, length))])
        words[position] = mixture.words[position, shares[position].topk(2).indices[self._drawn(2)]]
        return _with(draft, place, words)

    def _rearranged(self, draft: _Draft) -> _Draft:
        """Return a draft with words swapped, moved, left out or inserted, or exchanged between two sentences."""
        place = self._drawn(len(draft.words))
        first = 0 if self.space.start is None else 1
        texts, labels = list(draft.words), draft.labels
        words = texts[place]
        inner = len(words) - first - (self.space.end is not None)
        if inner < 2:
            return draft
        one, two = sorted(first + self._drawn(inner) for _ in range(2))
        kind = self._drawn(5 if len(texts) == 1 else 8)
        if kind == 0:  # swap two words
            words = words.clone()
            words[[one, two]] = words[[two, one]]
        elif kind == 1:  # move one word to the right
            words = torch.cat([words[:one], words[one + 1 : two + 1], words[one : one + 1], words[two + 1 :]])
        elif kind == 2:  # put a run first
            words = torch.cat([words[:first], words[one : two + 1], words[first:one], words[two + 1 :]])
        elif kind == 3:  # leave a word out
            words = torch.cat([words[:one], words[one + 1 :]])
        elif kind == 4 and len(words) < self.longest:  # insert one of the likeliest words
            new = self.listed.words[one, self._drawn(min(_UNSURE, self.listed.words.shape[1]))]
            words = torch.cat([words[:one], new.view(1), words[one:]])
        elif kind > 4:
            next_to = (place + 1 + self._drawn(len(texts) - 1)) % len(texts)
            other = texts[next_to]
            if kind == 7 and self.knowledge.targets is None and self.knowledge.classes <= _LABELS:
                labels = labels.clone()
                labels[[place, next_to]] = labels[[next_to, place]]
            elif one < len(other) - 1:  # exchange a word, or all from a word on
                end = one + 1 if kind == 5 else max(len(words), len(other))
                words, other = (torch.cat([a[:one], b[one:end], a[end:]]) for a, b in ((words, other), (other, words)))
                texts[next_to] = other
        texts[place] = words
        return replace(draft, words=texts, labels=labels)

    def _drawn(self, count: int) -> int:
        return int(torch.randint(count, (), generator=self.generator))


_SOLVED_LOG = float(torch.tensor(_SOLVED).log())


def _same(one: _Draft, other: _Draft) -> bool:
    return all(torch.equal(words, others) for words, others in zip(one.words, other.words, strict=True))


def _with(draft: _Draft, place: int, words: Tensor) -> _Draft:
    """Return a draft with another sentence at a place."""
    return replace(draft, words=[*draft.words[:place], words, *draft.words[place + 1 :]])


def _trimmed(texts: Tensor, space: TextSpace, layout: TokenLayout) -> Tensor:
    """Return texts [B, T] without the positions that are padding in all of them, if the model looks at no padding."""
    if not layout.attention:
        return texts
    used = (texts != space.padding).any(0).nonzero()
    return texts[:, : int(used.max()) + 1] if len(used) else texts[:, :1]
