"""Defences of the batch: soften labels, mix images, hide signs, mask words, before anything is computed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from gradveil.core.distributions import Beta, Shares, Signs
from gradveil.core.errors import Problem, fail, refuse
from gradveil.core.noise import Bernoulli, Key, Noise, NoiseSpec, Schedule, Uniform
from gradveil.core.settings import Checked, Range, Share, Strength, TextValue, unused
from gradveil.core.streams import Stream
from gradveil.core.types import Batch, BatchTransform, Domain, Redraw
from gradveil.defences.entry import DefenceEntry
from gradveil.spaces.text_space import TextSpace

_DRAWS, _RARE = 4096, 1e-3
"""Coefficients that fewer of so many draws keep to would take for ever to draw."""
_MASKS = ("[MASK]", "<mask>", "[UNK]", "<unk>")
"""Tokens that take the place of others, the first that a vocabulary has: masks, then what stands for unknown words."""


@dataclass(frozen=True)
class LabelSmoothing(Checked, BatchTransform):
    """Train on (1 - a) y + a / K in place of the labels y of K classes (Szegedy et al. 2016, sec. 7)."""

    alpha: Annotated[Share, "Share of a label that all classes get evenly."] = 0.1
    label: ClassVar[str] = "label-smoothing"
    smooth: ClassVar[bool] = True

    def noise(self, batch: Batch) -> NoiseSpec:
        """Draw nothing."""
        return NoiseSpec()

    def apply(self, batch: Batch, noise: Mapping[str, Tensor], domain: Domain | None) -> Batch:
        """Smooth the labels."""
        if not self.alpha:
            return batch
        targets = probabilities(batch, domain)
        return Batch(batch.inputs, (1 - self.alpha) * targets + self.alpha / targets.shape[-1])


@dataclass(frozen=True)
class Mixup(Checked, BatchTransform):
    """Train on c x + (1 - c) x[p], the labels mixed alike (Zhang et al. 2018, eq. 1).

    One coefficient c ~ Beta(alpha, alpha) and one permutation p (`partner`) per batch: of one gradient, or of every
    local step (under Poisson sampling, all of the client's examples). A batch of one example mixes with itself. An
    attacker may optimise c; p is discrete.
    """

    alpha: Annotated[Strength, "Parameter of the coefficient's law, Beta(alpha, alpha); 0 mixes nothing."] = 1.0
    label: ClassVar[str] = "mixup"
    redraw: ClassVar[Redraw] = "step"
    smooth: ClassVar[bool] = True

    def noise(self, batch: Batch) -> NoiseSpec:
        """Declare the coefficient and the partners."""
        if not self.alpha:
            return NoiseSpec()
        coefficient = Noise((), Beta(self.alpha), neutral=1.0, dtype=batch.inputs.dtype, lower=0.0, upper=1.0)
        return NoiseSpec({"coefficient": coefficient, "partner": _partners(1, batch)})

    def apply(self, batch: Batch, noise: Mapping[str, Tensor], domain: Domain | None) -> Batch:
        """Mix every example with its partner."""
        if not self.alpha:
            return batch
        c, other = noise["coefficient"], noise["partner"][0]
        inputs, targets = batch.inputs, probabilities(batch, domain)
        return Batch(c * inputs + (1 - c) * inputs[other], c * targets + (1 - c) * targets[other])


@dataclass(frozen=True)
class InstaHide(Checked, BatchTransform):
    """Mix k of the client's images, and flip the signs of the pixels at random (Huang et al. 2020, Alg. 1).

    Image b becomes s_b * sum_j c_bj x[p_j(b)] in the space where the bounds of the data are -1 and 1; p_0 is the
    identity, the others (`partner`) are permutations of the batch. The coefficients are magnitudes of normal numbers
    over their sum, none above `cap`, as in the authors' program; the labels are mixed alike, the signs s are one an
    entry. A batch of one mixes with itself. In local training all of the client's examples are mixed with each other,
    again in every epoch, as the authors do.

    With `mix="public"` only two images are the client's own, and k - 2 are public ones (`Domain.public`), any of which
    is drawn for each: x[p_0], x[p_1] and the public images of the places floor(M u), u (`public`) uniform. The
    client's coefficients then add up to `least` or more, and labels are mixed of its two images alone: as in the
    authors' program, the coefficients of a label add up to less than 1.

    An attacker may optimise coefficients and signs (in [-1, 1]); permutations and public images are discrete. They know
    which images are public, not which of them were drawn.
    """

    needs: ClassVar[str] = "pictures"

    k: Annotated[int, Range(2, integer=True), "Number of images that are mixed into one."] = 4
    cap: Annotated[float, Range(0, 1, low_open=True), "Largest coefficient of an image."] = 0.65
    mix: Annotated[Literal["own", "public"], "Images to mix with: the client's others, or mostly public ones."] = "own"
    least: Annotated[float, Range(0, 0.9), "Least sum of the client's own coefficients, with mix=public."] = 0.3
    label: ClassVar[str] = "instahide"
    smooth: ClassVar[bool] = True

    def conflicts(self, sound: bool) -> Iterator[Problem]:
        """Refuse a mixture without public images, and limits that coefficients hardly ever keep."""
        if self.mix == "own":
            yield from unused("instahide", self, ("least",), "it is for mix=public")
        if sound and self.needs_public and self.k < 3:
            what = f"is {self.k}: two images of the client's own, and no public one"
            yield Problem("instahide.k", what, "give at least 3, or leave mix out")
        elif sound:
            yield from _rare(self.k, self.cap, self.least if self.needs_public else 0.0)

    def noise(self, batch: Batch) -> NoiseSpec:
        """Declare coefficients, partners and signs."""
        dtype, count = batch.inputs.dtype, batch.inputs.shape[0]
        alone, law = torch.eye(self.k)[0], Shares(self.cap, self.least if self.needs_public else 0.0)
        shares = Noise((count, self.k), law, neutral=alone, dtype=dtype, lower=0.0, upper=1.0)
        sign = Noise(tuple(batch.inputs.shape), Signs(), neutral=1.0, dtype=dtype, lower=-1.0, upper=1.0)
        own = {"coefficient": shares, "partner": _partners(self._own - 1, batch), "sign": sign}
        if not self.needs_public:
            return NoiseSpec(own)
        place = Noise((self.k - self._own, count), Uniform(), dtype=dtype, lower=0.0, upper=1.0, discrete=True)
        return NoiseSpec({**own, "public": place})

    @property
    def needs_public(self) -> bool:
        """Whether public images are mixed in."""
        return self.mix == "public"

    @property
    def _own(self) -> int:
        """Count the client's own images in a mixture."""
        return 2 if self.needs_public else self.k

    def apply(self, batch: Batch, noise: Mapping[str, Tensor], domain: Domain | None) -> Batch:
        """Mix, then flip about the middle of the bounds."""
        lower, upper = bounds(batch, domain, "instahide")
        inputs, targets = (_mixed(value, noise) for value in (batch.inputs, probabilities(batch, domain)))
        if self.needs_public:
            inputs = inputs + self._strangers(noise, batch, domain)
        middle = (lower + upper) / 2
        return Batch(middle + noise["sign"] * (inputs - middle), targets)

    def _strangers(self, noise: Mapping[str, Tensor], batch: Batch, domain: Domain | None) -> Tensor:
        """Sum the public images that were drawn, by their coefficients."""
        refuse(list(self.problems(domain)))
        assert domain is not None
        assert domain.public is not None
        images = domain.public.to(batch.inputs)
        places = (noise["public"] * len(images)).long().clamp(max=len(images) - 1)
        shares = noise["coefficient"][:, self._own :].unbind(1)
        drawn = [share.view(-1, 1, 1, 1) * images[place] for share, place in zip(shares, places.unbind(0), strict=True)]
        return torch.stack(drawn).sum(0)


def probabilities(batch: Batch, domain: Domain | None) -> Tensor:
    """Return the targets as class probabilities [B, K]."""
    targets = batch.targets
    if targets.dtype.is_floating_point:
        return targets
    if domain is None:
        what = "holds class numbers, and how many classes there are is not known"
        raise fail(
            "batch.targets", what, "give Client(domain=Domain(ImageSpace(shape, mean, std), classes)), or probabilities"
        )
    return (targets.unsqueeze(-1) == torch.arange(domain.classes, device=targets.device)).to(batch.inputs.dtype)


def bounds(batch: Batch, domain: Domain | None, owner: str) -> tuple[Tensor, Tensor]:
    """Return the least and the greatest valid input, each [C, 1, 1]."""
    if domain is None:
        remedy = "give Client(domain=Domain(ImageSpace(shape, mean, std), classes))"
        raise fail(owner, "needs to know which inputs are valid", remedy)
    return domain.space.bounds(batch.inputs)


def _mixed(value: Tensor, noise: Mapping[str, Tensor]) -> Tensor:
    """Compute sum_j c_bj v[p_j(b)] for values v [B, ...], over the client's own images."""
    own, *shares = (c.view(-1, *[1] * (value.dim() - 1)) for c in noise["coefficient"].unbind(1))
    total = own * value
    # The coefficients of public images come last, and have no partner.
    for share, partner in zip(shares, noise["partner"].unbind(0), strict=False):
        total = total + share * value[partner]
    return total


def _rare(k: int, cap: float, least: float) -> list[Problem]:
    """Return the limit that coefficients hardly ever keep: they are drawn until they do."""
    drawn = Shares().sample((_DRAWS, k), torch.float64, Key(0, (Stream.INSTAHIDE,)).generator())
    largest, own = drawn.amax(1), drawn[:, :2].sum(1)
    if float((largest <= cap).double().mean()) < _RARE:
        what = f"is {cap:g}, which {k} coefficients that add up to 1 hardly ever keep"
        return [Problem("instahide.cap", what, f"give at least {float(largest.quantile(0.01)):.2g}")]
    own = own[largest <= cap]
    if float((own >= least).double().sum()) < _RARE * _DRAWS:
        what = f"is {least:g}, which two of {k} coefficients, none above {cap:g}, hardly ever add up to"
        return [Problem("instahide.least", what, f"give at most {float(own.quantile(0.9)):.2g}")]
    return []


def _partners(count: int, batch: Batch) -> Noise:
    """Describe `count` permutations of the batch; the neutral one leaves every example in its place."""
    examples = batch.inputs.shape[0]
    order = torch.arange(examples).expand(count, examples)
    return Noise((count, examples), Schedule(examples), neutral=order, dtype=torch.int64, discrete=True)


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


BATCHING = (
    DefenceEntry(
        name="label-smoothing",
        factory=LabelSmoothing,
        description="Train on labels that give every class a little",
        changes=("batch",),
        cost="nothing; all bytes",
        citation="Szegedy et al. 2016, Rethinking the Inception Architecture for Computer Vision (CVPR)",
        identity={"alpha": 0.0},
    ),
    DefenceEntry(
        name="mixup",
        factory=Mixup,
        description="Train on each image mixed with another of the batch, by one coefficient from Beta(alpha, alpha)",
        changes=("batch",),
        cost="one pass over the images; all bytes",
        citation="Zhang, Cissé, Dauphin, Lopez-Paz 2018, mixup: Beyond Empirical Risk Minimization (ICLR)",
        traits=("mixes",),
        identity={"alpha": 0.0},
    ),
    DefenceEntry(
        name="instahide",
        factory=InstaHide,
        description="Mix k images, of the batch or two of it and public ones, and flip the pixels' signs at random",
        changes=("batch",),
        cost="k passes over the images; all bytes",
        citation="Huang, Song, Li, Arora 2020, InstaHide: Instance-hiding Schemes for Private Distributed Learning",
        traits=("mixes",),
    ),
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
