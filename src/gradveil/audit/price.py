"""What a defence costs: its bytes beside those of the client without it, and how far its update moved."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gradveil.audit.rows import Row
from gradveil.core.words import number, percent, size


@dataclass(frozen=True)
class Price:
    """The cost of one update."""

    sent: float | None
    """Bytes of the defended update."""
    plain: float | None
    """Bytes of the same client's update without the defence; None where the run does not tell."""
    distance: float | None
    """How far the update moved, relative to its length without noise, clipping and pruning."""
    own: bool
    """The defence changes the model: the distance is to the changed model's own update, its noise switched off."""

    @property
    def share(self) -> float | None:
        """The bytes as a share of those without the defence."""
        return self.sent / self.plain if self.sent is not None and self.plain else None

    @property
    def order(self) -> tuple[float, float]:
        """Sort by bytes, then by distance; what is not known is dear."""
        sent, distance = (math.inf if value is None else float(value) for value in (self.sent, self.distance))
        return sent, distance

    def detail(self) -> str:
        """Say what the bytes are to be held against."""
        told = []
        if self.share is not None:
            told.append(f"{percent(self.share)} of the {size(self.plain)} without a defence")
        elif self.sent is not None:
            told.append("this run has no client without a defence to compare with")
        if self.distance is not None:
            noise = ", by the noise in the changed model" if self.own else ""
            told.append(f"update moved by {number(self.distance)}{noise}")
        return " · ".join(told)


def price(row: Row, rows: Sequence[Row]) -> Price:
    """Compare a defended client with the undefended one of the same setting and seed, who was sent the same model.

    Where the run has none, a defence that leaves the model alone is held against its own update, every entry sent.
    """
    bare = [r for r in rows if r.undefended and (r.setting, r.seed) == (row.setting, row.seed)]
    # Blocks of the same words take other bytes: most of the gradient is zero where each row is one bin.
    bare = [r for r in bare if (r.attack == row.attack if row.planted else not r.planted)]
    same_model = row.changes is not None and "model" not in row.changes
    dense = row.info.get("bytes_dense") if same_model else None
    plain = bare[0].info.get("bytes_sent") if bare else dense
    return Price(row.info.get("bytes_sent"), plain, row.info.get("distance"), "model" in (row.changes or ()))
