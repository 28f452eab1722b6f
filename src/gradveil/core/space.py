"""What an example is: how a model takes it, which values are valid, how people see it, and how two are compared."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor


class Space(ABC):
    """The kind of a client's examples. Whatever depends on it goes through here; `ImageSpace` is the first kind.

    An example has two forms: *inputs* are what a model takes, *views* are what people see and scores compare. Leading
    dimensions are free where a shape below begins with `...`.
    """

    kind: ClassVar[str]
    """The name of the kind in records: `images`."""
    noun: ClassVar[str]
    """What one example is called in reports: `image`."""
    headline: ClassVar[str]
    """The score that says whether an example is recovered: it is, where this is above the run's threshold."""
    exactly: ClassVar[float]
    """An example is recovered almost exactly where its headline score is above this: hardly any guess is."""
    shape: tuple[int, ...]
    """The shape of one example, in both forms."""

    @abstractmethod
    def bounds(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the smallest and the largest valid inputs with the dtype and device of a tensor; they broadcast."""

    @abstractmethod
    def encode(self, views: Tensor) -> Tensor:
        """Turn views [..., *shape] into inputs."""

    @abstractmethod
    def view(self, inputs: Tensor) -> Tensor:
        """Turn inputs [..., *shape] into views, invalid values into the nearest valid ones."""

    @abstractmethod
    def match(self, candidates: Tensor, truths: Tensor) -> tuple[Tensor, Tensor]:
        """Match views [V, B, *shape] one to one in each of V batches: an update does not reveal their order.

        Returns the permutation [V, B] (place b of the truths was matched with candidate `permutation[v, b]`) and the
        candidates in that order.
        """

    @abstractmethod
    def scores(self, candidates: Tensor, truths: Tensor) -> Mapping[str, Tensor]:
        """Compute every score [...] of views [..., *shape] against their truths; the headline is one of them."""

    @abstractmethod
    def similarity(self, candidates: Tensor, truths: Tensor) -> Tensor:
        """Compute the headline score [A, B] of every view of A with every truth of B; the worst where one is broken.

        Candidates [A, B, *shape] are compared each with the truth of its own place.
        """

    @abstractmethod
    def nearest(self, candidates: Tensor, gallery: Tensor) -> Tensor:
        """Return the place in the gallery of the view nearest to each candidate [N, *shape]; -1 for a broken one."""

    @abstractmethod
    def identified(self, candidates: Tensor, places: Tensor, gallery: Tensor) -> Tensor:
        """Say whether each candidate's own place in the gallery is the nearest to it: bool [...], as the places."""

    @abstractmethod
    def average(self, views: Tensor) -> Tensor:
        """Return the guess that stands for all views [N, *shape] at once."""

    @abstractmethod
    def guesses(self, views: Tensor, tested: int) -> Tensor:
        """Return guesses [A, tested, *shape] at the first views [N, *shape], each made of all other views."""

    @abstractmethod
    def central(self, views: Tensor) -> Tensor:
        """Return the places of views [N, *shape], the most typical first."""
