"""Word dropout: a client replaces tokens of its texts by a mask token, before anything is computed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from gradveil.core.errors import Problem, fail, refuse
from gradveil.core.noise import Bernoulli, Noise, NoiseSpec
from gradveil.core.settings import Checked, Share, TextValue
from gradveil.core.types import Batch, BatchTransform, Domain, Redraw
from gradveil.defences.entry import DefenceEntry
from gradveil.spaces.text_space import TextSpace

_MASKS = ("[MASK]", "<mask>", "[UNK]", "<unk>")
"""Tokens that take the place of others, the first that a vocabulary has: masks, then what stands for unknown words."""


@dataclass(frozen=True)
class TokenDropout(Checked, BatchTransform):
    """Replace each token by the mask token with probability p, independently, again in every local step.

    Padding, start and end stay. The gradient then says nothing of what was replaced, but all of what was not. An
    attacker may guess it from the words around it.
    """

    p: Annotated[Share, "Probability that a token is replaced."] = 0.3
    mask: Annotated[
        str | None, TextValue('a token in quotes, as "[MASK]"'), "Token to put there; none for [MASK] or else [UNK]."
    ] = None
    label: ClassVar[str] = "token-dropout"
    needs: ClassVar[str] = "tokens"
    redraw: ClassVar[Redraw] = "step"

    def problems(self, domain: Domain | None) -> Iterator[Problem]:
        """Yield what stands in the way: other examples than texts, or a vocabulary without the mask."""
        yield from super().problems(domain)
        if domain is None:
            remedy = "give Client(domain=Domain(TextSpace((length,), vocabulary), classes))"
            yield Problem(self.label, "needs to know the vocabulary", remedy)
        elif isinstance(domain.space, TextSpace) and self._number(domain.space) is None:
            what = "is not given, and the vocabulary has none of " + ", ".join(_MASKS)
            if self.mask is not None:
                what = f"is {self.mask!r}, which is no token of the vocabulary"
            some = ", ".join(map(repr, domain.space.vocabulary[:4]))
            yield Problem(f"{self.label}.mask", what, f"name one of its tokens, such as {some}")

    def noise(self, batch: Batch) -> NoiseSpec:
        """Declare which tokens are kept."""
        if not self.p:
            return NoiseSpec()
        kept = Noise(tuple(batch.inputs.shape), Bernoulli(1 - self.p), neutral=1.0, lower=0, upper=1, discrete=True)
        return NoiseSpec({"kept": kept})

    def apply(self, batch: Batch, noise: Mapping[str, Tensor], domain: Domain | None) -> Batch:
        """Put the mask token where a word is not kept."""
        if not self.p:
            return batch
        mask = self.placeholder(domain)
        if mask is None or domain is None or not isinstance(domain.space, TextSpace):
            raise fail(self.label, "is for texts", "leave it out")
        space, ids = domain.space, batch.inputs
        special = ids == space.padding
        for mark in (space.start, space.end):
            special = special if mark is None else special | (ids == mark)
        return Batch(torch.where(special | (noise["kept"] > 0), ids, mask), batch.targets)

    def placeholder(self, domain: Domain | None) -> int | None:
        """Return the number of the mask token."""
        refuse(list(self.problems(domain)))
        return self._number(domain.space) if domain and isinstance(domain.space, TextSpace) else None

    def _number(self, space: TextSpace) -> int | None:
        names = _MASKS if self.mask is None else (self.mask,)
        return next((space.vocabulary.index(name) for name in names if name in space.vocabulary), None)


TOKEN_DROPOUT = (
    DefenceEntry(
        name="token-dropout",
        factory=TokenDropout,
        description="Train on texts in which each token is replaced by a mask token with probability p",
        changes=("batch",),
        cost="nothing; all bytes",
        citation="Bowman et al. 2016, Generating Sentences from a Continuous Space (CoNLL): word dropout",
        identity={"p": 0.0},
    ),
)
