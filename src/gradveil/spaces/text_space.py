"""Texts: token numbers padded to one length, compared token by token and by ROUGE."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from gradveil.core.errors import Problem, refuse
from gradveil.core.space import ExampleWords, SharedParts, Space
from gradveil.metrics.text_similarity import disclosed, rouge_l, rouge_n, rouge_n_pairs
from gradveil.spaces.likeliest_text import likeliest_texts


@dataclass(frozen=True)
class TextSpace(Space):
    """Texts of a vocabulary; inputs and views are both token numbers [T], padded.

    Special tokens (padding, start, end) are no words: scores ignore them.

    >>> space = TextSpace((4,), ("[PAD]", "[CLS]", "[SEP]", "good", "##ly"), padding=0, start=1, end=2)
    >>> space.text(torch.tensor([1, 3, 4, 2]))
    'goodly'
    """

    shape: tuple[int, ...]
    vocabulary: tuple[str, ...]
    """The token of each number; pieces that continue a word start with `continuation`."""
    padding: int = 0
    start: int | None = None
    end: int | None = None
    continuation: str = "##"

    words: ClassVar[ExampleWords] = ExampleWords(
        "texts", "sentence", "tokens", "tokens", "at least {threshold:.0%} of the tokens are in place", "shared words"
    )
    threshold: ClassVar[float] = 0.9
    exactly: ClassVar[float] = 1.0
    offers: ClassVar[frozenset[str]] = frozenset({"tokens"})

    def __post_init__(self) -> None:
        """Raise with every problem of the length and the special tokens."""
        problems: list[Problem] = []
        if len(self.shape) != 1 or min(self.shape) < 1:
            problems.append(Problem("space.shape", f"is {self.shape}", "give (tokens,)"))
        for name in ("padding", "start", "end"):
            number = getattr(self, name)
            if number is not None and not 0 <= number < len(self.vocabulary):
                what = f"is {number}, and the vocabulary has {len(self.vocabulary)} tokens"
                problems.append(Problem(f"space.{name}", what, "give the number of a token of the vocabulary"))
        refuse(problems)

    def tokens(self, ids: Tensor) -> list[int]:
        """Return the token numbers of a text without special tokens, up to its end."""
        special = {self.padding, self.start, self.end}
        numbers: list[int] = []
        for number in ids.tolist():
            if number == self.end and numbers:
                break
            if number not in special:
                numbers.append(number)
        return numbers

    def text(self, ids: Tensor) -> str:
        """Return a text for people: pieces joined to words."""
        joined = ""
        for number in self.tokens(ids):
            token = self.vocabulary[number]
            if token.startswith(self.continuation):
                joined += token.removeprefix(self.continuation)
            else:
                joined += (" " if joined else "") + token
        return joined

    def in_words(self, view: Tensor) -> str:
        """Return a text for people."""
        return self.text(view)

    def model_facts(self) -> Mapping[str, Any]:
        """Return the number of words, the length of a text, and the number of padding."""
        return {"vocabulary": len(self.vocabulary), "length": self.shape[0], "padding": self.padding}

    def problems(self, inputs: Tensor) -> Iterator[Problem]:
        """Find token numbers that are none of the vocabulary."""
        if inputs.dtype.is_floating_point:
            yield Problem("inputs", f"are {inputs.dtype}", "give token numbers: int64")
        elif len(inputs) and not 0 <= int(inputs.min()) <= int(inputs.max()) < len(self.vocabulary):
            what = f"hold {int(inputs.min())} to {int(inputs.max())}, and there are {len(self.vocabulary)} tokens"
            yield Problem("inputs", what, "give numbers of the vocabulary's tokens")

    def passes(self, similarity: Tensor, least: float) -> Tensor:
        """Return which shares of tokens in place are at least `least`."""
        # Rounding of the share must not decide.
        return similarity >= least - 1e-6

    def of_trial(
        self, candidates: Tensor, truths: Tensor, private: bool, certainty: Tensor | None = None
    ) -> Mapping[str, Any]:
        """Return the first sentences, as they are and as they were reconstructed, if those may be kept."""
        if not private:
            return {}
        pairs = zip(candidates.flatten(0, 1)[:_SHOWN].long(), truths.flatten(0, 1)[:_SHOWN].long(), strict=True)
        return {"sentences": [{"truth": self.text(t), "reconstruction": self.text(c)} for c, t in pairs]}

    def shared_parts(self, candidates: Tensor, truths: Tensor, public: Tensor | None) -> Mapping[str, SharedParts]:
        """Count the tokens in place, and those found anywhere, that two guesses from public texts lack.

        The guesses are the most frequent token of each place, and the likeliest text of the same length.
        """
        those, these = [self.tokens(x) for x in self.view(candidates)], [self.tokens(x) for x in truths]
        guesses = self._usual(public, sorted({len(text) for text in these}))
        noun = "token" if public is None else "unguessed token"
        placed = [
            {spot for spot in enumerate(text) if not any(spot in enumerate(usual) for usual in guesses[len(text)])}
            for text in these
        ]
        bags = [Counter(text) for text in these]
        for bag, text in zip(bags, these, strict=True):
            for token in {token for usual in guesses[len(text)] for token in usual}:
                del bag[token]
        answers = [set(enumerate(text)) for text in those], [Counter(text) for text in those]
        in_place = torch.tensor([[len(one & other) for other in placed] for one in answers[0]])
        found = torch.tensor([[(one & other).total() for other in bags] for one in answers[1]])
        own, lengths = (torch.tensor([len(text) for text in texts]) for texts in (those, these))
        most = torch.minimum(own[:, None], lengths)
        return {
            "in place": SharedParts(noun, in_place, torch.tensor([len(one) for one in placed]), most, lengths),
            "found": SharedParts(noun, found, torch.tensor([bag.total() for bag in bags]), most, lengths),
        }

    def _usual(self, public: Tensor | None, lengths: Sequence[int]) -> dict[int, list[list[int]]]:
        """Return the tokens of the guesses at texts of so many tokens."""
        if public is None or not len(public):
            return {length: [] for length in lengths}
        marks = sum(special is not None for special in (self.start, self.end))
        likeliest = likeliest_texts(public.long(), [length + marks for length in lengths], self.padding, self.end)
        frequent = self.tokens(self.average(public))
        return {length: [frequent, self.tokens(text)] for length, text in zip(lengths, likeliest, strict=True)}

    def bounds(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the smallest and largest token number."""
        return torch.zeros_like(like[..., :1]), torch.full_like(like[..., :1], len(self.vocabulary) - 1)

    def encode(self, views: Tensor) -> Tensor:
        """Return the token numbers as they are."""
        return views

    def view(self, inputs: Tensor) -> Tensor:
        """Clamp token numbers to the vocabulary; values that are not finite become padding."""
        usable = torch.where(torch.isfinite(inputs.double()), inputs.double(), float(self.padding))
        return usable.round().long().clamp(0, len(self.vocabulary) - 1)

    def match(self, candidates: Tensor, truths: Tensor) -> tuple[Tensor, Tensor]:
        """Match by the largest total ROUGE-1."""
        places = []
        for those, these in zip(candidates, truths, strict=True):
            # ROUGE-2 decides between equal ROUGE-1 alone.
            first, second = self._rouge(those, these)
            overlap = (first + second / 100).float()
            rows, columns = linear_sum_assignment(-overlap.numpy())
            # `rows` are candidates and `columns` their truths; in the order of the truths they are the permutation.
            places.append(torch.as_tensor(rows)[torch.as_tensor(columns).argsort()])
        permutation = torch.stack(places).to(candidates.device)
        index = permutation.reshape(*permutation.shape, 1).expand(-1, -1, candidates.shape[-1])
        return permutation, candidates.gather(1, index)

    def scores(self, candidates: Tensor, truths: Tensor) -> Mapping[str, Tensor]:
        """Compute tokens in place, tokens as a bag, exactness, ROUGE-1, 2 and L, and names and numbers disclosed."""
        candidates, truths = torch.broadcast_tensors(self.view(candidates), self.view(truths))
        rows = [
            self._scores(self.tokens(one), self.tokens(other))
            for one, other in zip(candidates.reshape(-1, *self.shape), truths.reshape(-1, *self.shape), strict=True)
        ]
        names = ("tokens", "recall", "exact", "rouge1", "rouge2", "rougeL", "identifiers")
        table = torch.tensor(rows, dtype=torch.float32).reshape(*candidates.shape[:-1], len(names))
        return dict(zip(names, table.unbind(-1), strict=True))

    def similarity(self, candidates: Tensor, truths: Tensor) -> Tensor:
        """Compute the share of tokens in place [A, B]."""
        if candidates.dim() == 3:
            columns = enumerate(candidates.unbind(1))
            return torch.cat([self._in_place(column, truths[i : i + 1]) for i, column in columns], 1).float()
        return self._in_place(candidates, truths).float()

    def nearest(self, candidates: Tensor, gallery: Tensor) -> Tensor:
        """Return the index of the text with the largest ROUGE-1 and most tokens in place."""
        return self._closeness(candidates, gallery).argmax(1)

    def neighbours(self, candidates: Tensor, gallery: Tensor, count: int) -> Tensor:
        """Return the indices of the nearest texts."""
        return self._closeness(candidates, gallery).topk(count).indices

    def identified(self, candidates: Tensor, places: Tensor, gallery: Tensor) -> Tensor:
        """Return whether the own text is strictly the nearest among all that differ from it, and shares a word."""
        closeness = self._closeness(candidates.reshape(-1, *self.shape), gallery)
        own = closeness.gather(1, places.reshape(-1, 1)).squeeze(1)
        texts = [self.tokens(text) for text in gallery]
        same = torch.tensor([[texts[place] == text for text in texts] for place in places.flatten().tolist()])
        others = closeness.masked_fill(same.view_as(closeness), -1).amax(1)
        return ((own > others) & (own > 0)).reshape(places.shape)

    def average(self, views: Tensor) -> Tensor:
        """Return the most frequent token of each position."""
        return views.mode(0).values

    def guesses(self, views: Tensor, tested: int) -> Tensor:
        """Return three guesses for each text, from other texts.

        They are the most frequent tokens, the most typical text, and the likeliest text of the same length by word
        pairs, which one half of the texts gives for the other half.
        """
        typical, found = views[self.central(views)[:2]], []
        lengths = (views[:tested] != self.padding).sum(1).tolist()
        continued = dict[tuple[int, int], Tensor]()
        for half, other in enumerate((views[1::2], views[::2]) if len(views) > 1 else (views,)):
            wanted = sorted(set(lengths[half::2]))
            likeliest = likeliest_texts(other.long(), wanted, self.padding, self.end)
            continued |= {(half, length): text.to(views) for length, text in zip(wanted, likeliest, strict=True)}
        for i in range(tested):
            others = torch.cat([views[:i], views[i + 1 :]]) if len(views) > 1 else views
            best = typical[1] if len(typical) > 1 and torch.equal(typical[0], views[i]) else typical[0]
            found.append(torch.stack([self.average(others), best, continued[i % 2, lengths[i]]]))
        return torch.stack(found, 1)

    def central(self, views: Tensor) -> Tensor:
        """Return the indices of texts, those with the largest mean ROUGE-1 to the others first."""
        texts = [self.tokens(view) for view in views]
        return torch.tensor(rouge_n_pairs(texts, texts[:_COMPARED], 1)).mean(1).argsort(descending=True)

    def _scores(self, one: list[int], truth: list[int]) -> tuple[float, ...]:
        return (
            in_place(one, truth),
            recall(one, truth),
            float(one == truth),
            rouge_n(one, truth, 1),
            rouge_n(one, truth, 2),
            rouge_l(one, truth),
            disclosed([self.vocabulary[i] for i in one], [self.vocabulary[i] for i in truth], self.continuation),
        )

    def _closeness(self, candidates: Tensor, gallery: Tensor) -> Tensor:
        views = self.view(candidates)
        return (self._rouge(views, gallery).sum(0) + self._in_place(views, gallery)).float()

    def _rouge(self, candidates: Tensor, truths: Tensor) -> Tensor:
        """Compute ROUGE-1 and ROUGE-2 [2, A, B] in double precision."""
        those, these = [self.tokens(x) for x in candidates], [self.tokens(x) for x in truths]
        rouge = torch.tensor([rouge_n_pairs(those, these, n) for n in (1, 2)], dtype=torch.float64)
        return rouge.view(2, len(those), len(these))

    def _in_place(self, candidates: Tensor, truths: Tensor) -> Tensor:
        """Compute `in_place` [A, B] in double precision."""
        those, these = self._rows(candidates, none=-1), self._rows(truths, none=-2)
        share = torch.zeros(len(those), len(these), dtype=torch.float64)
        for row, text in zip(share, those, strict=True):
            row += (text == these).sum(1)
        return share / (these >= 0).sum(1).clamp(min=1)

    def _rows(self, texts: Tensor, none: int) -> Tensor:
        """Return the token numbers of texts [A, T] without special tokens; `none` stands where there is none."""
        rows = torch.full((len(texts), self.shape[0]), none)
        for row, text in zip(rows, texts, strict=True):
            tokens = self.tokens(text)
            row[: len(tokens)] = torch.tensor(tokens, dtype=torch.long)
        return rows


_SHOWN = 32
"""Sentences that a trial's record shows."""
_COMPARED = 200
"""Texts with which each is compared to find the most typical."""


def in_place(one: list[int], truth: list[int]) -> float:
    """Return the share of the truth's tokens that stand at their place.

    >>> in_place([5, 6, 9], [5, 6, 7, 8])
    0.5
    """
    return sum(a == b for a, b in zip(one, truth, strict=False)) / max(1, len(truth))


def recall(one: list[int], truth: list[int]) -> float:
    """Return the share of the truth's tokens that occur anywhere, each counted once.

    >>> recall([7, 5], [5, 5, 7, 8])
    0.5
    """
    left = list(one)
    hits = 0
    for number in truth:
        if number in left:
            left.remove(number)
            hits += 1
    return hits / max(1, len(truth))
