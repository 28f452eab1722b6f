"""Clip and noise that shrink together over the rounds, by a schedule that everybody knows.

Gradients get shorter as training goes on; a fixed bound soon clips nothing, and its noise drowns what is left (Wei et
al. 2021). In round n = 0, 1, ... both are multiplied by decay^n. Since the noise is a constant multiple of what one
example can change, every round promises what the first does: the accounting is that of a fixed clip, whatever number of
the round a server tells.
"""

from __future__ import annotations

from dataclasses import dataclass

from gradveil.core.allowed import KEPT, collect
from gradveil.core.errors import refuse
from gradveil.defences.clip import Clip
from gradveil.defences.noise import Gaussian

FLOOR = 1e-6
"""The least share of clip and noise: float32 could not tell smaller ones from nothing."""


def share(decay: float, number: int) -> float:
    """Return what clip and noise are multiplied by in round `number` = 0, 1, ...

    >>> [share(0.5, number) for number in (0, 1, 2, 1000)]
    [1.0, 0.5, 0.25, 1e-06]
    """
    return max(decay**number, FLOOR)


@dataclass(frozen=True)
class FadingClip(Clip):
    """A `Clip` to norm decay^n in round n."""

    decay: float = 1.0

    def __post_init__(self) -> None:
        """Refuse settings that cannot be meant."""
        super().__post_init__()
        refuse(collect("clip", (("decay", KEPT, self.decay),)))

    def in_round(self, number: int) -> Clip:
        """Return the clip of a round."""
        return Clip(self.norm * share(self.decay, number), self.per_example, self.scope)


@dataclass(frozen=True)
class FadingNoise(Gaussian):
    """`Gaussian` noise of std decay^n in round n."""

    decay: float = 1.0

    def __post_init__(self) -> None:
        """Refuse settings that cannot be meant."""
        super().__post_init__()
        refuse(collect("gaussian", (("decay", KEPT, self.decay),)))

    def in_round(self, number: int) -> Gaussian:
        """Return the noise of a round."""
        now = share(self.decay, number)
        return Gaussian(self.std * now, self.on, None if self.scaled_to is None else self.scaled_to * now)
