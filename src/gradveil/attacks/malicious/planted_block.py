"""Attacks of a malicious server that inserts a block before the model: imprint bins and trap weights.

The block computes linear measures of the image, each behind a ReLU. The gradient of a measure is
dW_i = sum_x d_i(x) x and db_i = sum_x d_i(x), over the examples x that it passes. If it passes one example, dW_i / db_i
is the example. The attacks differ in the measures, and in the combinations of measures that isolate one example.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from gradveil.attacks.knowledge import How, Knowledge, Known
from gradveil.attacks.labels import FoundLabels, find_labels, label_problems
from gradveil.attacks.malicious.solved_images import alone_images, assembled, differences, filled_bins
from gradveil.attacks.protocol import Observation, Progress, Prospect, Reconstruction, in_closed_form
from gradveil.attacks.undo_batch_defence import Undo, undoing, undone
from gradveil.client import Client
from gradveil.core.errors import Problem, fail
from gradveil.core.noise import Key
from gradveil.core.settings import Checked, Count, Positive, Range
from gradveil.core.streams import Stream


class Planted(nn.Module):
    """Image -> linear measures -> clamp -> linear -> an image of the same shape -> the original model.

    Measures are clamped to the range from zero to a ceiling. Only examples within this range contribute to the gradient
    of a measure's weights and bias, so that the server chooses which examples the gradient reveals.
    """

    ceiling: Tensor

    def __init__(self, model: nn.Module, shape: tuple[int, ...], units: int) -> None:
        """Insert a block of measures before the model, with an infinite ceiling."""
        super().__init__()
        self.measure = nn.Linear(prod(shape), units)
        self.register_buffer("ceiling", torch.full((units,), torch.inf))
        self.back = nn.Linear(units, prod(shape))
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block, then the model."""
        measures = torch.minimum(torch.relu(self.measure(x.flatten(1))), self.ceiling)
        return self.model(self.back(measures).unflatten(1, x.shape[1:]))


WEIGHT, BIAS = "measure.weight", "measure.bias"
"""The parameters of the block whose gradients reveal examples."""
_LOUD = 100.0
"""Ratio of a decoy's gradient to that of a measure that the same examples pass."""


class Measures(NamedTuple):
    """Linear measures of an image: weights [K, N], biases [K], and the ceilings [K], if there are any."""

    weight: Tensor
    bias: Tensor
    ceiling: Tensor | None = None

    def most(self) -> Tensor:
        """Return an upper bound of each measure of pixels in [0, 1], with a margin for rounding."""
        return 2 * (self.weight.clamp(min=0).sum(1) + self.bias.abs())


Gain = Annotated[Positive, "Size of the measures: smaller ones have a larger gradient, relative to the model's."]
Decoys = Annotated[
    int, Range(0, integer=True), "Further rows with larger gradients, for defences that cut the largest."
]


class Planting(Checked, ABC):
    """Base of attacks with a planted block. They use the first round, before training changes the block."""

    name: str
    gain: Gain
    """It does not change the model's input, but a clip leaves more of a larger gradient."""
    decoys: Decoys
    """Every image passes the decoys, which cancel in pairs."""
    labels: FoundLabels
    undo: Undo
    rounds: ClassVar[Literal["first"]] = "first"

    @property
    def knowledge(self) -> Mapping[str, How]:
        """Nothing of the client's randomness."""
        return {}

    @property
    def simulated_client(self) -> Literal["naive", "full"]:
        """Only a batch defence is simulated, and only to undo it."""
        return "full" if self.undo else "naive"

    @property
    @abstractmethod
    def units(self) -> int:
        """Number of measures of the block."""

    @abstractmethod
    def measures(self, pixels: int, knowledge: Knowledge, key: Key) -> Measures:
        """Choose measures of pixels in [0, 1]."""

    @abstractmethod
    def read(self, weight: Tensor, bias: Tensor, count: int) -> tuple[Tensor, int]:
        """Return images [n <= count, N] from one update's dW [K, N] and db [K], and the number of clear ones.

        The clearest come first. Pixels are in [0, 1], since the gradient is that of measures of such pixels.
        """

    @abstractmethod
    def planted(self) -> str:
        """Describe the change to the model."""

    def and_decoys(self) -> str:
        """Return a phrase about the decoys, if there are any."""
        return f" and {self.decoys} decoys" if self.decoys else ""

    def problems(self, prospect: Prospect) -> Iterator[Problem]:
        """Refuse labels that cannot be read off, and an odd number of decoys."""
        yield from label_problems(self.labels, prospect)
        if self.decoys % 2:
            problem = "is odd, but decoys cancel in pairs"
            yield Problem("decoys", problem, f"give {self.decoys - 1} or {self.decoys + 1}")

    def craft(self, client: Client, knowledge: Knowledge, key: Key) -> Client:
        """Return the client with the crafted model."""
        example = next(iter(client.params().values()))
        lower, upper = (bound.expand(knowledge.space.shape).flatten() for bound in knowledge.space.bounds(example))
        shape = knowledge.space.shape
        measures = self.measures(prod(shape), knowledge, key.child(Stream.MEASURES))
        # Decoys follow the measures: copies of the first one, shifted so that every image passes.
        row = measures.weight[:1]
        weight = torch.cat([measures.weight, *[row] * self.decoys])
        bias = torch.cat([measures.bias, *[1 - row.clamp(max=0).sum(1)] * self.decoys])
        ceiling = Measures(weight, bias).most()
        if measures.ceiling is not None:
            ceiling[: self.units] = measures.ceiling
        weight, bias, ceiling = (self.gain * value.to(example) for value in (weight, bias, ceiling))
        # Pixels in [0, 1] are (x - lower) / (upper - lower) of the inputs x.
        weight = weight / (upper - lower)
        model = Planted(client.model, shape, len(bias)).to(example)
        # Every measure has the same effect on the model. It is more than a scale, which normalisation would remove.
        back, rest = torch.randn(2, prod(shape), generator=key.child(Stream.BEHIND).generator()).to(example)
        with torch.no_grad():
            model.measure.weight.copy_(weight)
            model.measure.bias.copy_(bias - weight @ lower)
            model.ceiling.copy_(ceiling)
            # Divided by both, so that neither the gain nor the number of measures changes the model's input.
            model.back.weight.copy_((back / (self.gain * self.units)).unsqueeze(1).expand(-1, len(bias)))
            for place in range(self.units, len(bias)):
                model.back.weight[:, place] *= _LOUD * (-1) ** place
            model.back.bias.copy_(rest)
        model.training = client.model.training  # not train(): layers may have modes of their own
        patterns = client.trainable
        return replace(
            client,
            model=model,
            trainable=None if patterns is None else ("measure.*", "back.*", *(f"model.{each}" for each in patterns)),
            buffers={f"model.{name}": value for name, value in client.buffers.items()},
        )

    def __call__(
        self,
        observations: Sequence[Observation],
        simulated_client: Client,
        knowledge: Knowledge,
        key: Key,
        progress: Callable[[Progress], None] | None = None,
        plan: Sequence[int] = (),
    ) -> Reconstruction:
        """Reconstruct every target client's images from the first round's update."""
        began, seen = time.perf_counter(), observations[0]
        if WEIGHT not in seen.update or not isinstance(simulated_client.model, Planted):
            fix = "let the server send the client that `craft` returns"
            raise fail(f"attack {self.name}", "its block was not in the model that the client trained", fix)
        weight, bias = (seen.update[name][:, : self.units].double() for name in (WEIGHT, BIAS))
        finite = weight.isfinite().flatten(1).all(1) & bias.isfinite().all(1)
        lower, upper = knowledge.space.bounds(weight)
        ends = [bound.expand(knowledge.space.shape).flatten() for bound in (lower, upper)]
        # x = lower + (upper - lower) u: from sum d x and sum d to sum d u of pixels u in [0, 1].
        weight = (weight - bias.unsqueeze(2) * ends[0]) / (ends[1] - ends[0])

        def read(place: int) -> tuple[Tensor, int]:
            return self.read(weight[place], bias[place], seen.examples)

        inputs, missing = assembled(read, finite, seen.examples, knowledge.space)
        targets = find_labels(
            self.labels, seen, simulated_client.undefended_update(), knowledge, key.child(Stream.LABELS)
        )
        assert targets is not None, "labels are given or read off the update"
        like = seen.update[WEIGHT]
        result = in_closed_form(inputs.to(like), targets, missing.to(like), finite, began, progress)
        return undone(result, simulated_client, knowledge) if self.undo else result


@dataclass(frozen=True)
class Imprint(Planting):
    """Rob: bins of one measurement, so that neighbouring rows differ by the examples of one bin (Fowl et al. 2022).

    Row i passes examples whose measurement exceeds the threshold c_i, so that (dW_i - dW_{i+1}) / (db_i - db_{i+1}) is
    the mean of the examples in bin i. The thresholds are quantiles of the measurement over public images: of a normal
    or Laplace law with their mean and spread, or of the images themselves.

    With `sparse` each row passes only the examples of its bin. Rows of empty bins are then zero, so that pruning leaves
    most of the others.
    """

    name: str = "rob"
    bins: Annotated[int, Range(2, integer=True), "Number of bins."] = 64
    measure: Annotated[Literal["brightness", "random"], "Measure of an image that is divided into bins."] = "brightness"
    law: Annotated[Literal["normal", "laplace", "empirical"], "Law of the measure, whose quantiles are thresholds."] = (
        "normal"
    )
    sparse: Annotated[bool, "Let each row pass only the examples of its bin."] = False
    gain: Gain = 1e-3
    decoys: Decoys = 0
    labels: FoundLabels = "given"
    undo: Undo = False

    @property
    def knowledge(self) -> Mapping[str, How]:
        """Public images, which determine the bins."""
        known: dict[str, How] = {"public": Known()}
        return undoing(known) if self.undo else known

    @property
    def units(self) -> int:
        """One measure per bin."""
        return self.bins

    def problems(self, prospect: Prospect) -> Iterator[Problem]:
        """Require public images for the bins."""
        yield from super().problems(prospect)
        if not prospect.public:
            yield Problem("data.public", "no public images for the bins", "choose data with public images, or curious")

    def measures(self, pixels: int, knowledge: Knowledge, key: Key) -> Measures:
        """Return one measurement repeatedly, with the thresholds as biases."""
        if knowledge.public is None or not len(knowledge.public.inputs):
            raise fail(f"attack {self.name}", "has no public images for its bins", "give Knowledge.public")
        row = torch.full((pixels,), 1 / pixels)
        if self.measure == "random":
            row = torch.randn(pixels, generator=key.generator()) / pixels**0.5
        lower, upper = knowledge.space.bounds(knowledge.public.inputs)
        images = ((knowledge.public.inputs - lower) / (upper - lower)).flatten(1).cpu().to(row)
        # Measurements of pixels in [0, 1] lie between the sums of the negative and of the positive weights.
        margin = 1e-3 * float(row.abs().sum())
        ends = torch.stack([row.clamp(max=0).sum() - margin, row.clamp(min=0).sum() + margin])
        cuts = self._quantiles(images @ row).clamp(float(ends[0]), float(ends[1]))
        thresholds = torch.cat([ends[:1], cuts])
        # As a ceiling, a bin's width closes the row for examples above the bin.
        widths = torch.cat([cuts, ends[1:]]) - thresholds
        return Measures(row.expand(self.bins, -1), -thresholds, widths if self.sparse else None)

    def _quantiles(self, values: Tensor) -> Tensor:
        """Return the 1/K, 2/K, ... (K - 1)/K quantiles of the measurement."""
        shares = torch.arange(1, self.bins, dtype=torch.float64) / self.bins
        if self.law == "empirical":
            return torch.quantile(values.double(), shares).to(values)
        spread = values.std(correction=0)
        if self.law == "normal":
            return values.mean() + spread * torch.special.ndtri(shares).to(values)
        # Quantiles of the Laplace law of deviation 1: its scale is 1 / sqrt(2).
        tails = -(1 - 2 * (shares - 0.5).abs()).log() * (shares - 0.5).sign() / 2**0.5
        return values.mean() + spread * tails.to(values)

    def read(self, weight: Tensor, bias: Tensor, count: int) -> tuple[Tensor, int]:
        """Subtract neighbouring rows; the bins with the largest gradients hold examples."""
        rows, errors = (weight, bias) if self.sparse else (differences(weight), differences(bias))
        best, clear = filled_bins(errors, count)
        return rows[best] / errors[best].unsqueeze(1), clear

    def planted(self) -> str:
        """Describe the block."""
        return f"an imprint block of {self.bins} bins{self.and_decoys()} before the first layer"


@dataclass(frozen=True)
class Trap(Planting):
    """Curious: half of each row's weights are negative, the others have the same sizes, positive and scaled down.

    Row i is thus below zero for most images of pixels in [0, 1]. If it passes one example, dW_i / db_i is this example
    (Boenisch et al. 2023). With a `share` the factor is chosen such that rows pass this share of public images.
    """

    name: str = "curious"
    rows: Annotated[Count, "Number of rows."] = 256
    scale: Annotated[Positive, "Ratio of positive to negative weights."] = 0.95
    std: Annotated[Positive, "Standard deviation of the weights."] = 0.5
    share: Annotated[
        float | None,
        Range(0, 1, low_open=True, high_open=True, optional=True),
        "Share of public images that a row passes, instead of `scale`.",
    ] = None
    gain: Gain = 1e-3
    decoys: Decoys = 0
    labels: FoundLabels = "given"
    undo: Undo = False

    @property
    def knowledge(self) -> Mapping[str, How]:
        """Public images, if they determine the factor."""
        known: dict[str, How] = {"public": Known()} if self.share is not None else {}
        return undoing(known) if self.undo else known

    @property
    def units(self) -> int:
        """One measure per row."""
        return self.rows

    def problems(self, prospect: Prospect) -> Iterator[Problem]:
        """Require public images if they determine the factor."""
        yield from super().problems(prospect)
        if self.share is not None and not prospect.public:
            yield Problem("data.public", "no public images to choose the factor by", "give scale instead of share")

    def measures(self, pixels: int, knowledge: Knowledge, key: Key) -> Measures:
        """Draw the rows."""
        half = pixels // 2
        sizes = self.std * torch.randn(self.rows, half, generator=key.child(Stream.SIZES).generator()).abs()
        # argsort of random numbers is a random order, another one for each row.
        shuffled = torch.rand(self.rows, pixels, generator=key.child(Stream.PLACES).generator()).argsort(1)
        below, above = shuffled[:, :half], shuffled[:, half : 2 * half]
        negative = torch.zeros(self.rows, pixels).scatter_(1, below, -sizes)
        positive = torch.zeros(self.rows, pixels).scatter_(1, above, sizes)
        scale = self.scale if self.share is None else self._scale(negative, positive, knowledge, self.share)
        return Measures(negative + scale * positive, torch.zeros(self.rows))

    def _scale(self, negative: Tensor, positive: Tensor, knowledge: Knowledge, share: float) -> float:
        """Choose the factor at which rows pass this share of public images on average."""
        if knowledge.public is None or not len(knowledge.public.inputs):
            problem = "has no public images to choose its factor by"
            raise fail(f"attack {self.name}", problem, "give scale instead of share")
        lower, upper = knowledge.space.bounds(knowledge.public.inputs)
        images = ((knowledge.public.inputs - lower) / (upper - lower)).flatten(1).cpu().to(negative)
        # A row passes an image at every factor above the ratio of its negative to its positive part.
        ratios = (-(images @ negative.T) / (images @ positive.T).clamp_min(torch.finfo(negative.dtype).tiny)).flatten()
        rank = max(1, round(len(ratios) * share))
        return float(ratios.kthvalue(rank).values)

    def read(self, weight: Tensor, bias: Tensor, count: int) -> tuple[Tensor, int]:
        """Divide row by row; images of several rows that are not mixtures passed these rows alone."""
        passed = bias != 0
        return alone_images(weight[passed] / bias[passed].unsqueeze(1), bias[passed].abs(), count)

    def planted(self) -> str:
        """Describe the block."""
        return f"a block of {self.rows} trap rows{self.and_decoys()} before the first layer"
