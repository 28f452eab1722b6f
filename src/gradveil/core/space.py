"""Kinds of examples: model inputs, valid values, views for people, and comparisons."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from gradveil.core.errors import Problem


@dataclass(frozen=True)
class ExampleWords:
    """What records and reports call the examples of a kind; the defaults are those of images."""

    kind: str = "images"
    noun: str = "image"
    headline: str = "ssim"
    """The score that decides recovery, as records name it."""
    metric: str = "SSIM"
    """What tables call it."""
    rule: str = "SSIM to the true image above {threshold:g}"
    """When an example counts as recovered."""
    nearest: str = "L2"
    """The distance of identification."""

    def recovered(self, threshold: float) -> str:
        """Say when an example counts as recovered.

        >>> ExampleWords().recovered(0.5)
        'SSIM to the true image above 0.5'
        """
        return self.rule.format(threshold=threshold)

    @property
    def drawn(self) -> bool:
        """Whether figures draw the examples, because they are grids of pixels."""
        return self.kind == ExampleWords.kind

    @property
    def has_prior(self) -> bool:
        """Whether a prior of the examples is known, which bounds the mean squared error of attackers."""
        return self.kind == ExampleWords.kind

    @property
    def plural(self) -> str:
        """Several examples."""
        return f"{self.noun}s"

    def told(self, text: str) -> str:
        """Return a text that was written for images in the words of this kind.

        >>> words = ExampleWords("rows", "row", "cells", "cells right")
        >>> words.told("SSIM of the true images, or an image's"), words.told("Mean SSIM of the mean image")
        ("cells right of the true rows, or a row's", 'Mean cells right of the mean row')
        """
        if self.kind == ExampleWords.kind:
            return text
        text = re.sub(r"\ban image", f"a {self.noun}", re.sub(r"\ban SSIM", self.metric, text))
        return text.replace("SSIM", self.metric).replace("image", self.noun).replace("Image", self.noun.capitalize())

    def record(self) -> dict[str, str]:
        """Return what a trial's record says of them: nothing of images, of which older records know no other kind."""
        return {} if self == ExampleWords() else asdict(self)


class SharedParts(NamedTuple):
    """The parts that candidates and truths have in common."""

    noun: str
    """What one of them is called."""
    counts: Tensor
    """[A, N] those of truth n that candidate a holds."""
    sizes: Tensor
    """[N] those of truth n."""
    most: Tensor
    """[A, N] how many parts the lengths of candidate a and truth n allow them to share."""
    lengths: Tensor
    """[N] how long truth n is, which a candidate may know alone."""


class Space(ABC):
    """Base of the kinds of examples; `ImageSpace` is the first. All code that depends on the kind goes through it.

    An example has two forms: *inputs* go into a model, *views* are shown to people and compared by scores. `...` in a
    shape means any leading dimensions.
    """

    words: ClassVar[ExampleWords]
    """What reports call the examples, and the score that decides recovery."""
    threshold: ClassVar[float]
    """The headline score that decides recovery, unless a run sets its own."""
    exactly: ClassVar[float]
    """Headline score that decides whether an example counts as recovered almost exactly."""
    offers: ClassVar[frozenset[str]]
    """What attacks and defences may need of inputs: `numbers` (they can be searched by gradients), `pictures` (they are
    grids of pixels, which can be smoothed, shifted and drawn), `columns` (numbers and categories), `tokens`."""
    shape: tuple[int, ...]
    """The shape of one example as a model takes it."""

    @property
    def view_shape(self) -> tuple[int, ...]:
        """The shape of one example as people see it."""
        return self.shape

    @property
    def pictured(self) -> bool:
        """Whether the examples are grids of pixels."""
        return "pictures" in self.offers

    def unmet(self, what: str, needs: str) -> Iterator[Problem]:
        """Yield why something that needs `numbers`, `pictures`, `columns` or `tokens` does not fit these examples."""
        if needs not in self.offers:
            told = f"needs {needs}, and the data are {self.words.plural}"
            yield Problem(what, told, f"leave it out, or choose one for {self.words.plural}")

    @property
    def headline(self) -> str:
        """The name of the score that decides recovery."""
        return self.words.headline

    @abstractmethod
    def model_facts(self) -> Mapping[str, Any]:
        """Return the facts of the examples that a model's factory needs, by the names of its arguments."""

    @abstractmethod
    def problems(self, inputs: Tensor) -> Iterator[Problem]:
        """Yield what is wrong with inputs [N, *shape]; `Problem.where` is of no account."""

    def unscored(self) -> Iterator[Problem]:
        """Yield why examples of this shape cannot be scored, as settings of a run."""
        yield from ()

    def passes(self, similarity: Tensor, least: float) -> Tensor:
        """Return which headline scores count as recovered: those above `least`."""
        return similarity > least

    def repaired(self, views: Tensor) -> Tensor:
        """Replace what is not finite in views, to keep and show them."""
        return views.nan_to_num(0.0) if views.is_floating_point() else views

    def relaxed(self, variables: Tensor) -> Tensor:
        """Turn free variables [..., *shape] of a search into inputs: they are the inputs."""
        return variables

    def pooled(self, inputs: Tensor) -> Tensor:
        """Pool matched answers [R, ...] of several restarts: their median."""
        return inputs.median(0).values

    def agreement(self, inputs: Tensor) -> Tensor | None:
        """Return how far matched answers [R, ...] agree in each part of a view, from 0 to 1; None where undefined."""
        return None

    def of_trial(
        self, candidates: Tensor, truths: Tensor, private: bool, certainty: Tensor | None = None
    ) -> Mapping[str, Any]:
        """Return what a trial's record says of matched views [V, B, ...] beside their scores.

        `certainty` is the `agreement` of the restarts that the attack pooled.
        Private examples themselves are only in it if `private` allows it.
        """
        return {}

    def shared_parts(self, candidates: Tensor, truths: Tensor, public: Tensor | None) -> Mapping[str, SharedParts]:
        """Count the parts of truths [N, ...] that candidates [A, ...] hold, by how they hold them; empty if undefined.

        Parts that guesses from public views hold as well are left out.
        """
        return {}

    def in_words(self, view: Tensor) -> str:
        """Return a view in words; nothing for what is drawn."""
        return ""

    def projected(self, inputs: Tensor) -> Tensor:
        """Turn what a search ends with into valid inputs."""
        return inputs

    @abstractmethod
    def bounds(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the smallest and largest valid inputs, which broadcast, with the dtype and device of `like`."""

    def limits(self, like: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the bounds if no valid input lies outside them; None if they are only those of public examples."""
        return self.bounds(like)

    @abstractmethod
    def encode(self, views: Tensor) -> Tensor:
        """Turn views [..., *shape] into inputs."""

    @abstractmethod
    def view(self, inputs: Tensor) -> Tensor:
        """Turn inputs [..., *shape] into views; clamp invalid values."""

    @abstractmethod
    def match(self, candidates: Tensor, truths: Tensor) -> tuple[Tensor, Tensor]:
        """Match views [V, B, *shape] one to one in each of V batches, because an update does not reveal their order.

        Returns the permutation [V, B] (truth b was matched with candidate `permutation[v, b]`) and the candidates in
        that order.
        """

    @abstractmethod
    def scores(self, candidates: Tensor, truths: Tensor) -> Mapping[str, Tensor]:
        """Compute all scores [...] of views [..., *shape] against their truths, including the headline score."""

    @abstractmethod
    def similarity(self, candidates: Tensor, truths: Tensor) -> Tensor:
        """Compute the headline score [A, B] of A views with B truths; non-finite candidates get the worst score.

        Of candidates [A, B, *shape], candidate [a, b] is compared with truth b.
        """

    @abstractmethod
    def nearest(self, candidates: Tensor, gallery: Tensor) -> Tensor:
        """Return the gallery index of the view nearest to each candidate [N, *shape]; -1 if it is not finite."""

    @abstractmethod
    def neighbours(self, candidates: Tensor, gallery: Tensor, count: int) -> Tensor:
        """Return the gallery indices [N, count] of the views nearest to each finite candidate, the nearest first."""

    @abstractmethod
    def identified(self, candidates: Tensor, places: Tensor, gallery: Tensor) -> Tensor:
        """Return whether gallery view `places[i]` is the nearest to candidate i: bool, in the shape of `places`."""

    @abstractmethod
    def average(self, views: Tensor) -> Tensor:
        """Return the mean of the views [N, *shape], a baseline for all of them."""

    @abstractmethod
    def guesses(self, views: Tensor, tested: int) -> Tensor:
        """Return baselines [A, tested, *shape] for the first views of [N, *shape], each made from all other views."""

    @abstractmethod
    def central(self, views: Tensor) -> Tensor:
        """Return the indices of views [N, *shape], the most typical first."""
