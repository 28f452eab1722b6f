"""Kinds of examples: model inputs, valid values, views for people, and comparisons."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor


class Space(ABC):
    """Base of the kinds of examples; `ImageSpace` is the first. All code that depends on the kind goes through it.

    An example has two forms: *inputs* go into a model, *views* are shown to people and compared by scores. `...` in a
    shape means any leading dimensions.
    """

    kind: ClassVar[str]
    """The name of the kind in records: `images`."""
    noun: ClassVar[str]
    """The name of one example in reports: `image`."""
    headline: ClassVar[str]
    """The score that decides recovery: an example is recovered if it is above the run's threshold."""
    exactly: ClassVar[float]
    """Headline score above which an example counts as recovered almost exactly."""
    shape: tuple[int, ...]
    """The shape of one example, in both forms."""

    @abstractmethod
    def bounds(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the smallest and largest valid inputs, which broadcast, with the dtype and device of `like`."""

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
