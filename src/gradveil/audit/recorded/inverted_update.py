"""The outcome of an attack on one update from Python: what it recovered, and how it is shown."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from torch import Tensor

from gradveil.attacks.protocol import Reconstruction
from gradveil.core.formatting import number, percent, plural
from gradveil.core.space import Space
from gradveil.spaces import TableSpace, TextSpace

_RECOVERED, _FEW = 0.5, 10
"""SSIM above which an image counts as recovered; labels that are printed at most."""
_SAME = 1e-3
"""A distance of pixels, cells or tokens below which they are the same."""
_UNEXPLAINED = 0.5
"""A distance above which examples do not explain an update: 1 is that of an update of zeros."""


@dataclass(frozen=True, eq=False)
class Inverted:
    """The outcome of an attack on one update. `print(found)` shows it in a few lines, a notebook with its pictures."""

    images: Tensor
    """[B, C, H, W] the reconstructions as pixels in [0, 1]; of texts token numbers [B, T], of rows cells [B, K]."""
    labels: Tensor
    """[B] class numbers: those that were given, or that the attack restored from the update."""
    objective: float
    """The attacker's own objective at its answer: 0 explains the update fully."""
    reconstruction: Reconstruction
    """All that the attack said: statuses, restarts, inputs in the model's own space."""
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    """Means of the scores: of images mse, psnr and ssim, of texts tokens in place, recall, exactness and ROUGE, of rows
    the right cells; with true labels the label accuracy. Empty without a truth."""
    restored: bool = False
    """Whether the attack restored the labels from the update, since none were given."""
    truth: Tensor | None = None
    """[B, C, H, W] the true images as pixels, if they were given."""
    as_html: Callable[[Inverted], str] | None = None
    space: Space | None = None
    """What one example is."""
    attack: str = ""
    """The attack that found this."""
    distance: float = math.nan
    """Relative distance between the update and what a client with these examples sends, of the worst tensor, up to one
    factor for all: 0 explains it fully, whatever the attack. NaN of texts."""
    given: bool = False
    """Whether the attack took the labels that the caller gave."""
    contradicted: tuple[int, ...] = ()
    """The labels that the caller gave, if examples with other labels explain the update."""
    of_truth: float = math.nan
    """The `distance` of the truth with the labels that were given. NaN of texts, behind a defence, and without both."""
    prepared: tuple[str, ...] = ()
    """What `prepare=True` changed in the model."""

    @property
    def texts(self) -> list[str]:
        """The reconstructions as texts; empty for other examples."""
        return [self.space.text(ids) for ids in self.images] if isinstance(self.space, TextSpace) else []

    @property
    def rows(self) -> list[dict[str, str]]:
        """The reconstructions as rows, with the cells by column; empty for other examples."""
        return self.space.written(self.images) if isinstance(self.space, TableSpace) else []

    @property
    def lines(self) -> list[str]:
        """Texts or rows, each as a line; empty for images."""
        return self.texts or [", ".join(f"{name} {cell}" for name, cell in row.items()) for row in self.rows]

    @property
    def status(self) -> str:
        """How the attack ended: converged, stalled, budget or diverged."""
        return self.reconstruction.status[0]

    @property
    def iterations(self) -> int:
        """The iterations of the best restart."""
        return int(self.reconstruction.iterations[0])

    @property
    def verdict(self) -> str:
        """Whether the images are recovered, in a few words; without a truth nobody knows."""
        if self.texts and "tokens" in self.metrics:
            named = {"tokens in place": "tokens", "found anywhere": "recall", "exact": "exact"}
            shares = (f"{name} {self.metrics[share]:.0%}" for name, share in named.items() if share in self.metrics)
            passed = self.metrics["tokens"] >= TextSpace.threshold
            return f"{'' if passed else 'not '}recovered, {', '.join(shares)}"
        if self.rows and "cells" in self.metrics:
            share = self.metrics["cells"]
            return f"{'' if share >= TableSpace.threshold else 'not '}recovered, {share:.0%} of the cells right"
        if "ssim" not in self.metrics:
            psnr = f", PSNR {self.metrics['psnr']:.1f} dB" if "psnr" in self.metrics else ""
            return f"too small for an SSIM{psnr}" if self.metrics else "no truth to compare with"
        ssim, psnr = self.metrics["ssim"], self.metrics["psnr"]
        if "recovered" in self.metrics:
            some = f"{round(self.metrics['recovered'] * len(self.images))} of {len(self.images)} recovered"
            return f"{some}, mean SSIM {ssim:z.2f}, PSNR {psnr:.1f} dB"
        return f"{'' if ssim > _RECOVERED else 'not '}recovered, SSIM {ssim:z.2f}, PSNR {psnr:.1f} dB"

    def __str__(self) -> str:
        """Render the outcome in a few lines."""
        count, *shape = self.images.shape
        labels = ", ".join(str(label) for label in self.labels.tolist()[:_FEW]) + (", …" if count > _FEW else "")
        how = "restored from the update" if self.restored else "given" if self.given else "found with the examples"
        by = f"{self.attack}: " if self.attack else ""
        ended = f"{by}objective {number(self.objective)}"
        if self.iterations > 1 or self.status != "converged":  # one is what attacks without iterations report
            ended += f" after {plural(self.iterations, 'iteration')} ({self.status})"
        ended += "" if math.isnan(self.distance) else f", its update {percent(self.distance)} off"
        doubt = "".join(f"\n{line}" for line in self._doubts())
        if self.lines:
            shown = "\n".join(f"  {text}" for text in self.lines[:_FEW])
            kind = "text" if self.texts else "row"
            return f"{plural(count, kind)}: {self.verdict}; {ended}.\n{shown}\nLabels: {labels} ({how}).{doubt}"
        return (
            f"{plural(count, 'image')} of {' x '.join(map(str, shape))}: {self.verdict}; {ended}.\n"
            f"Labels: {labels} ({how}).{doubt}\n"
            "To see them: .images are pixels [B, C, H, W]; a notebook shows them."
        )

    def _doubts(self) -> Iterator[str]:
        """Say what was changed in the model, and why an update may not be explained."""
        if self.prepared:
            yield f"Prepared: {'; '.join(self.prepared)}."
        if len(self.images) > 1 and float((self.images - self.images[:1]).double().abs().max()) < _SAME:
            yield f"All {len(self.images)} are the same: is the update of one example?"
        settings = "weights, sign, mode (train or eval), loss, defence= and local="
        if self.contradicted:
            said = ", ".join(map(str, self.contradicted[:_FEW])) + (", …" if len(self.contradicted) > _FEW else "")
            yield f"The labels that were given, {said}, are not those of the update: it has these examples'."
        elif self.of_truth > _UNEXPLAINED:
            off = percent(self.of_truth)
            yield f"The update of the truth itself is {off} off: it was not made with these {settings}."
        elif self.distance > _UNEXPLAINED:
            yield f"These examples do not explain the update: search longer (iterations=), or check the {settings}."

    def __repr__(self) -> str:
        """Name the outcome in a line."""
        shape = " x ".join(map(str, self.images.shape))
        kind = "texts" if self.texts else "rows" if self.rows else "images"
        return f"Inverted({kind} [{shape}], {self.verdict}, objective {number(self.objective)}, {self.status})"

    def _repr_html_(self) -> str | None:
        return None if self.as_html is None else self.as_html(self)
