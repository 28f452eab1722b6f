"""Private images and their reconstructions as PNG pictures, each with its outcome in words."""

from __future__ import annotations

import base64
import hashlib
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from gradveil.audit.result_rows import Row
from gradveil.core.formatting import number

SIDE = 128
"""Pixels of the longer side of a picture, at most: larger images are averaged down to it."""
ROOM = 2_000_000
"""Bytes of all pictures of a page, about: beyond it, every trial shows its first images only."""
FEWEST = 6
"""Images that every trial shows in any case."""
_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def png(image: Tensor) -> bytes:
    """Encode one image, [C, H, W] in [0, 1] with 1 or 3 channels, as an 8-bit PNG (ISO/IEC 15948); NaN is black."""
    channels, height, width = image.shape
    eight = (image.nan_to_num(nan=0.0).clamp(0, 1) * 255).round().to(torch.uint8)
    lines = eight.permute(1, 2, 0).reshape(height, -1).cpu().numpy()
    # In a PNG, every line starts with its filter; 0 means unfiltered.
    raw = b"".join(b"\0" + line.tobytes() for line in lines)
    header = struct.pack(">IIBBBBB", width, height, 8, 0 if channels == 1 else 2, 0, 0, 0)
    return _SIGNATURE + _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(raw, 9)) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def data_uri(content: bytes, kind: str = "image/png") -> str:
    """Write bytes as a data URI."""
    return f"data:{kind};base64,{base64.b64encode(content).decode('ascii')}"


def picture_uri(image: Tensor) -> str:
    """Encode one image [C, H, W] for the page: averaged down to `SIDE`, and its first channel unless it has 1 or 3.

    >>> picture_uri(torch.zeros(1, 2, 2))[:22]
    'data:image/png;base64,'
    """
    shown = image.detach().float().nan_to_num(nan=0.0)
    shown = shown if len(shown) in (1, 3) else shown[:1]
    if (most := max(shown.shape[1:])) > SIDE:
        height, width = (max(1, round(side * SIDE / most)) for side in shown.shape[1:])
        shown = interpolate(shown[None], size=(height, width), mode="area")[0]
    return data_uri(png(shown))


Outcome = Literal["identifiable", "recovered", "identified", "neither", "diverged", "unknown"]
"""The outcomes of one reconstruction; `OUTCOMES` has the words."""
OUTCOMES: dict[Outcome, str] = {
    "identifiable": "recovered, identified",
    "recovered": "recovered, not identified",
    "identified": "identified only",
    "neither": "not recovered",
    "diverged": "diverged",
    "unknown": "no ground truth",
}
"""Captions of reconstructions."""


def outcome(scores: Mapping[str, Any], status: str = "") -> Outcome:
    """Judge one reconstruction; where there is no gallery, a recovered image counts as identified.

    >>> outcome({"success": 1, "identified": True}), outcome({"success": 0, "identified": True})
    ('identifiable', 'identified')
    """
    if scores["success"]:
        return "recovered" if scores.get("identified") is False else "identifiable"
    if scores.get("identified"):
        return "identified"
    return "diverged" if status == "diverged" else "neither"


@dataclass(frozen=True)
class Picture:
    """One picture of the page."""

    uri: str
    alt: str
    caption: str
    outcome: str = ""
    score: str = ""


@dataclass(frozen=True)
class Neighbour:
    """A gallery image that is near to a reconstruction, and whether it is the private image itself."""

    picture: Picture
    is_own: bool


@dataclass(frozen=True)
class TrialPictures:
    """The pictures of one trial, private images in the run's order."""

    truths: tuple[Picture, ...]
    reconstructions: tuple[Picture, ...]
    trained_on: tuple[Picture, ...]
    """What a batch defence made of the private images; empty where none did."""
    neighbours: tuple[tuple[Neighbour, ...], ...]
    """For each image, the gallery images nearest to its reconstruction; empty where the run kept none."""
    ssims: tuple[float | None, ...]
    images: int
    """How many images the trial attacked: the page may show fewer."""
    truth_digest: str
    answer_digest: str
    """Equal where two trials have the same reconstructions."""

    @property
    def order(self) -> list[int]:
        """The positions of the images, the worst leak first."""
        return sorted(range(len(self.ssims)), key=lambda place: -_known(self.ssims[place]))

    @property
    def worst(self) -> int:
        """The position of the image that leaks most."""
        return self.order[0]

    @property
    def median(self) -> int:
        """The position of the image with the median leak (the lower of two)."""
        return self.order[len(self.order) // 2]


def _known(value: float | None) -> float:
    return -2.0 if value is None else value


def room_of_each(rows: Sequence[Row]) -> int:
    """Return how many images of each trial the page has room for."""
    drawn = [row for row in rows[:1] if row.words.drawn]
    sizes = [images["reconstruction"].shape for row in drawn if (images := row.trial.images())]
    if not sizes:
        return 0
    *_, channels, height, width = sizes[0]
    scale = min(1.0, SIDE / max(height, width))
    each = (3 if channels == 3 else 1) * height * width * scale**2 * 4 / 3
    return max(FEWEST, int(ROOM / (each * len(rows))))


def pictures_of(row: Row, room: int) -> TrialPictures | None:
    """Encode the first images of a trial; None where the run kept none."""
    images = (row.trial.images() or {}) if row.words.drawn else {}
    if "truth" not in images or "reconstruction" not in images:
        return None
    flat = {name: value.detach().float().flatten(0, 1) for name, value in images.items() if name != "nearest"}
    each = [(record, scores) for record in row.trial.records for scores in record["per_image"]]
    shown = range(min(room, len(each), len(flat["truth"])))
    name = row.defence_name
    truths = [_truth(flat["truth"][i], i) for i in shown]
    answers = [_answer(flat["reconstruction"][i], i, name, *each[i]) for i in shown]
    trained = flat.get("truth_transformed")
    changed = [] if trained is None else [_changed(trained[i], i, name, each[i][1]) for i in shown]
    return TrialPictures(
        tuple(truths),
        tuple(answers),
        tuple(changed),
        tuple(_neighbours(images.get("nearest"), flat["truth"][i], i) for i in shown),
        tuple(each[i][1].get("ssim") for i in shown),
        len(each),
        _digest(images["truth"]),
        _digest(images["reconstruction"]),
    )


def _digest(values: Tensor) -> str:
    return hashlib.sha256(values.contiguous().cpu().numpy().tobytes()).hexdigest()


def _truth(image: Tensor, place: int) -> Picture:
    return Picture(picture_uri(image), f"Private image {place + 1}", f"private image {place + 1}")


def _answer(image: Tensor, place: int, defence: str, record: Mapping[str, Any], scores: Mapping[str, Any]) -> Picture:
    kind = outcome(scores, str(record.get("status")))
    score = f"SSIM {number(scores['ssim'], 2)}" if scores.get("ssim") is not None else ""
    words = ", ".join(filter(None, (OUTCOMES[kind], score)))
    alt = f"Reconstruction of private image {place + 1}, {defence}: {words}"
    return Picture(picture_uri(image), alt, OUTCOMES[kind], kind, score)


def _changed(image: Tensor, place: int, defence: str, scores: Mapping[str, Any]) -> Picture:
    flags = ("recovered", scores.get("success_transformed")), ("identified", scores.get("identified_transformed"))
    caption = ", ".join(word for word, flag in flags if flag) or "not recovered"
    alt = f"Private image {place + 1} as {defence} changes it for training: {caption}"
    return Picture(picture_uri(image), alt, caption)


def _neighbours(nearest: Tensor | None, truth: Tensor, place: int) -> tuple[Neighbour, ...]:
    if nearest is None or place >= len(nearest):
        return ()
    found = list[Neighbour]()
    for rank, image in enumerate(nearest[place]):
        is_own = image.shape == truth.shape and torch.allclose(image, truth, atol=1e-3)
        words = "the private image itself" if is_own else "another private image"
        alt = f"Gallery image {rank + 1} in the order of distance from the reconstruction: {words}"
        found.append(Neighbour(Picture(picture_uri(image), alt, words), is_own))
    return tuple(found)
