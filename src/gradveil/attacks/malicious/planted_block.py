"""Attacks of a malicious server that inserts a block before the model: imprint bins and trap weights.

The block measures the image in several ways, each behind a ReLU. The gradient of a measure is dW_i = sum_x d_i(x) x
and db_i = sum_x d_i(x), over the examples x that it lets through: of one example alone, dW_i / db_i is the example.
What the measures are, and which of their combinations hold one example, is what such attacks differ in.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from gradveil.attacks.knowledge import How, Knowledge, Known
from gradveil.attacks.labels import Labels, find_labels, label_problems
from gradveil.attacks.protocol import Observation, Progress, Prospect, Reconstruction, in_closed_form
from gradveil.attacks.undo import undoing, undone
from gradveil.client import Client
from gradveil.core.errors import Problem, fail
from gradveil.core.noise import Key
from gradveil.core.streams import Stream


class Planted(nn.Module):
    """Image -> linear measures -> cut -> linear -> an image of the same shape -> the model as it was.

    Measures below zero are cut to zero, and those above a ceiling to it. Only examples between the two count for a
    measure's weights and bias, and the gradient of these says what the examples are: which ones count is the server's
    choice.
    """

    ceiling: Tensor

    def __init__(self, model: nn.Module, shape: tuple[int, ...], units: int) -> None:
        """Put a block of so many measures before the model; without a ceiling at first."""
        super().__init__()
        self.measure = nn.Linear(prod(shape), units)
        self.register_buffer("ceiling", torch.full((units,), torch.inf))
        self.back = nn.Linear(units, prod(shape))
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Measure the image, and give the model what comes back."""
        seen = torch.minimum(torch.relu(self.measure(x.flatten(1))), self.ceiling)
        return self.model(self.back(seen).unflatten(1, x.shape[1:]))


WEIGHT, BIAS = "measure.weight", "measure.bias"
"""The parameters of the block that examples are read off."""
_LOUD = 100.0
"""How many times as large a decoy's gradient is as that of a measure which the same examples pass."""


class Measures(NamedTuple):
    """Linear measures of an image: weights [K, N], biases [K], and above which values [K] they are cut, if they are."""

    weight: Tensor
    bias: Tensor
    ceiling: Tensor | None = None

    def most(self) -> Tensor:
        """Return the largest value of each measure of pixels in [0, 1], with room for rounding."""
        return 2 * (self.weight.clamp(min=0).sum(1) + self.bias.abs())


class Planting(ABC):
    """What attacks with a planted block share; they look at the first round, whose block is as it was planted."""

    name: str
    gain: float
    """How large measures are. The model gets what it would get of measures of size one: the smaller they are, the
    larger is their gradient beside the model's own, and the more of it is left after a clip."""
    decoys: int
    """Rows more that every image passes, in pairs of opposite effect, with the largest gradients of all: what a
    defence takes that prunes the largest entries."""
    labels: Labels
    undo: bool
    """Undo the client's batch defence by its public transforms, once the images it trained on are read off."""
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
        """How many measures the block has."""

    @abstractmethod
    def measures(self, pixels: int, knowledge: Knowledge, key: Key) -> Measures:
        """Choose measures of pixels in [0, 1]."""

    @abstractmethod
    def read(self, weight: Tensor, bias: Tensor, count: int) -> tuple[Tensor, int]:
        """Read images [n <= count, N], the surest first, off one update's dW [K, N] and db [K]; say how many stand out.

        Their pixels are in [0, 1]: the gradient is that of measures of pixels.
        """

    @abstractmethod
    def planted(self) -> str:
        """Say in words what is put into the model."""

    def and_decoys(self) -> str:
        """Mention the decoys, if there are any."""
        return f" and {self.decoys} decoys" if self.decoys else ""

    def problems(self, prospect: Prospect) -> Iterator[Problem]:
        """Refuse labels that cannot be read off, and decoys that have no partner."""
        yield from label_problems(self.labels, prospect)
        if self.decoys % 2:
            what = "is odd, and they come in pairs of opposite effect: the model would not get what it gets without"
            yield Problem("decoys", what, f"give {self.decoys - 1} or {self.decoys + 1}")

    def craft(self, client: Client, knowledge: Knowledge, key: Key) -> Client:
        """Return the client as it is after it took the model that the server sends."""
        example = next(iter(client.params().values()))
        lower, upper = (bound.expand(knowledge.space.shape).flatten() for bound in knowledge.space.bounds(example))
        shape = knowledge.space.shape
        made = self.measures(prod(shape), knowledge, key.child(Stream.MEASURES))
        weight, bias, ceiling = (self.gain * value.to(example) for value in self._with_decoys(made))
        # Pixels in [0, 1] are (x - lower) / (upper - lower) of what the model sees.
        weight = weight / (upper - lower)
        model = Planted(client.model, shape, len(bias)).to(example)
        # Every measure acts on the model in the same way, and by more than a scale, which a norm would take away.
        back, rest = torch.randn(2, prod(shape), generator=key.child(Stream.BEHIND).generator()).to(example)
        with torch.no_grad():
            model.measure.weight.copy_(weight)
            model.measure.bias.copy_(bias - weight @ lower)
            model.ceiling.copy_(ceiling)
            model.back.weight.copy_((back / (self.gain * self.units)).unsqueeze(1).expand(-1, len(bias)))
            for place in range(self.units, len(bias)):
                model.back.weight[:, place] *= _LOUD * (-1) ** place
            model.back.bias.copy_(rest)
        model.training = client.model.training  # of the whole alone: what of the client's was set apart stays so
        kept = client.trainable
        return replace(
            client,
            model=model,
            trainable=None if kept is None else ("measure.*", "back.*", *(f"model.{pattern}" for pattern in kept)),
            buffers={f"model.{name}": value for name, value in client.buffers.items()},
        )

    def _with_decoys(self, made: Measures) -> tuple[Tensor, Tensor, Tensor]:
        """Put the decoys behind the measures: the first of these, shifted so far that every image passes."""
        row = made.weight[:1]
        shift = 1 - row.clamp(max=0).sum(1)
        weight = torch.cat([made.weight, *[row] * self.decoys])
        bias = torch.cat([made.bias, *[shift] * self.decoys])
        ceiling = Measures(weight, bias).most()
        if made.ceiling is not None:
            ceiling[: self.units] = made.ceiling
        return weight, bias, ceiling

    def __call__(
        self,
        observations: Sequence[Observation],
        simulated_client: Client,
        knowledge: Knowledge,
        key: Key,
        progress: Callable[[Progress], None] | None = None,
        plan: Sequence[int] = (),
    ) -> Reconstruction:
        """Read every target client's images off the first round's update."""
        began, seen = time.perf_counter(), observations[0]
        if WEIGHT not in seen.update or not isinstance(simulated_client.model, Planted):
            remedy = "let the server send the client that `craft` returns"
            raise fail(f"attack {self.name}", "its block was not in the model that the client trained", remedy)
        target_clients, count = len(seen.target_clients), seen.examples
        weight, bias = (seen.update[name][:, : self.units].double() for name in (WEIGHT, BIAS))
        sound = weight.isfinite().flatten(1).all(1) & bias.isfinite().all(1)
        lower, upper = knowledge.space.bounds(weight)
        ends = [bound.expand(knowledge.space.shape).flatten() for bound in (lower, upper)]
        weight = (weight - bias.unsqueeze(2) * ends[0]) / (ends[1] - ends[0])
        inputs = ((lower + upper) / 2).expand(target_clients, count, *knowledge.space.shape).clone()
        missing = torch.ones(target_clients, dtype=weight.dtype, device=weight.device)
        for target_client in range(target_clients):
            if not bool(sound[target_client]):
                continue
            found, clear = self.read(weight[target_client], bias[target_client], count)
            if len(found):
                again = torch.arange(count, device=found.device) % len(found)
                inputs[target_client] = lower + (upper - lower) * found[again].clamp(0, 1).unflatten(
                    1, knowledge.space.shape
                )
            missing[target_client] = 1 - min(clear, count) / count
        targets = find_labels(
            self.labels, seen, simulated_client.undefended_update(), knowledge, key.child(Stream.LABELS)
        )
        assert targets is not None, "labels are given or read off the update"
        like = seen.update[WEIGHT]
        found = in_closed_form(inputs.to(like), targets, missing.to(like), sound, began, progress)
        return undone(found, simulated_client, knowledge) if self.undo else found


_CLEAR = 6.0
"""How many times a bin's gradient must be as large as that of bins which hold no example, but may hold noise."""
_EXACT = 1e-9
"""The share of the largest below which a bin is empty where there is no noise."""


@dataclass(frozen=True)
class Imprint(Planting):
    """Rob: bins of one measurement, so that neighbouring rows differ by the examples of one bin (Fowl et al. 2022).

    Row i lets those through whose measurement is above threshold c_i; so (dW_i - dW_{i+1}) / (db_i - db_{i+1}) is the
    mean of the examples in bin i, and the example itself where it is alone. The thresholds are quantiles of the
    measurement over public images, of a normal or Laplace law with their mean and spread, or of the images themselves.

    With `sparse` each row lets through the examples of its own bin alone: it shows them without its neighbour, and
    rows of empty bins are zero, so that pruning leaves most of the others.
    """

    name: str = "rob"
    bins: int = 64
    measure: Literal["brightness", "random"] = "brightness"
    law: Literal["normal", "laplace", "empirical"] = "normal"
    sparse: bool = False
    gain: float = 1e-3
    decoys: int = 0
    labels: Labels = "given"
    undo: bool = False

    @property
    def knowledge(self) -> Mapping[str, How]:
        """Public images, to place the bins by."""
        known: dict[str, How] = {"public": Known()}
        return undoing(known) if self.undo else known

    @property
    def units(self) -> int:
        """One measure a bin."""
        return self.bins

    def problems(self, prospect: Prospect) -> Iterator[Problem]:
        """Refuse to place bins without public images."""
        yield from super().problems(prospect)
        if not prospect.public:
            yield Problem("data.public", "no public images to place the bins by", "choose data that has, or curious")

    def measures(self, pixels: int, knowledge: Knowledge, key: Key) -> Measures:
        """Repeat one measurement, with the thresholds as biases."""
        if knowledge.public is None or not len(knowledge.public.inputs):
            raise fail(
                f"attack {self.name}", "was given no public images to place its bins by", "give Knowledge.public"
            )
        row = torch.full((pixels,), 1 / pixels)
        if self.measure == "random":
            row = torch.randn(pixels, generator=key.generator()) / pixels**0.5
        lower, upper = knowledge.space.bounds(knowledge.public.inputs)
        images = ((knowledge.public.inputs - lower) / (upper - lower)).flatten(1).cpu().to(row)
        # No measurement of pixels in [0, 1] lies outside of the sums of negative and of positive weights.
        margin = 1e-3 * float(row.abs().sum())
        ends = torch.stack([row.clamp(max=0).sum() - margin, row.clamp(min=0).sum() + margin])
        cuts = self._quantiles(images @ row).clamp(float(ends[0]), float(ends[1]))
        thresholds = torch.cat([ends[:1], cuts])
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
        tails = -(1 - 2 * (shares - 0.5).abs()).log() * (shares - 0.5).sign() / 2**0.5
        return values.mean() + spread * tails.to(values)

    def read(self, weight: Tensor, bias: Tensor, count: int) -> tuple[Tensor, int]:
        """Take neighbouring rows from each other; bins whose gradient is largest hold examples."""
        alone, errors = weight, bias
        if not self.sparse:
            alone = torch.cat([weight[:-1] - weight[1:], weight[-1:]])
            errors = torch.cat([bias[:-1] - bias[1:], bias[-1:]])
        size = errors.abs()
        # As many bins as there are examples may be full: of the others the median is empty, or the largest of few.
        empty = min((self.bins - 1) // 2, self.bins - count - 1)
        noise = float(size.sort().values[empty]) if empty >= 0 else 0.0
        baseline = max(_CLEAR * noise, _EXACT * float(size.max()))
        best = size.argsort(descending=True, stable=True)[:count]
        clear = int((size[best] > baseline).sum())
        # Where some bins stand out, the others are empty: what they hold is no image.
        best = best[: clear or int((size[best] > 0).sum())]
        return alone[best] / errors[best].unsqueeze(1), clear

    def planted(self) -> str:
        """Say what the block is."""
        return f"an imprint block of {self.bins} bins{self.and_decoys()} before the first layer"


_SAME = 1e-3
"""How near to each other, in units of their size, two rows' images are that show one and the same example."""


_LISTED = 4
"""How many different images are looked at, in units of those that are sought."""
_INSIDE = 0.99
"""The share of an image's pixels that must lie in [0, 1]: a difference of images has others."""


@dataclass(frozen=True)
class Trap(Planting):
    """Curious: of each row half of the weights are negative, the others the same numbers, positive and a bit smaller.

    Row i is then below zero for most images of pixels in [0, 1], and dW_i / db_i is an example where it alone passes
    (Boenisch et al. 2023). With a `share` the factor is chosen by public images: rows pass this share of them.
    """

    name: str = "curious"
    rows: int = 256
    scale: float = 0.95
    std: float = 0.5
    share: float | None = None
    gain: float = 1e-3
    decoys: int = 0
    labels: Labels = "given"
    undo: bool = False

    @property
    def knowledge(self) -> Mapping[str, How]:
        """Public images where the factor is chosen by them."""
        known: dict[str, How] = {"public": Known()} if self.share is not None else {}
        return undoing(known) if self.undo else known

    @property
    def units(self) -> int:
        """One measure a row."""
        return self.rows

    def problems(self, prospect: Prospect) -> Iterator[Problem]:
        """Refuse to choose the factor without public images."""
        yield from super().problems(prospect)
        if self.share is not None and not prospect.public:
            yield Problem("data.public", "no public images to choose the factor by", "give scale in the place of share")

    def measures(self, pixels: int, knowledge: Knowledge, key: Key) -> Measures:
        """Draw the rows."""
        half = pixels // 2
        sizes = self.std * torch.randn(self.rows, half, generator=key.child(Stream.SIZES).generator()).abs()
        shuffled = torch.rand(self.rows, pixels, generator=key.child(Stream.PLACES).generator()).argsort(1)
        below, above = shuffled[:, :half], shuffled[:, half : 2 * half]
        negative = torch.zeros(self.rows, pixels).scatter_(1, below, -sizes)
        positive = torch.zeros(self.rows, pixels).scatter_(1, above, sizes)
        scale = self.scale if self.share is None else self._scale(negative, positive, knowledge, self.share)
        return Measures(negative + scale * positive, torch.zeros(self.rows))

    def _scale(self, negative: Tensor, positive: Tensor, knowledge: Knowledge, share: float) -> float:
        """Choose the factor at which rows pass a share of public images, on the average."""
        if knowledge.public is None or not len(knowledge.public.inputs):
            raise fail(
                f"attack {self.name}",
                "was given no public images to choose its factor by",
                "give scale in the place of share",
            )
        lower, upper = knowledge.space.bounds(knowledge.public.inputs)
        images = ((knowledge.public.inputs - lower) / (upper - lower)).flatten(1).cpu().to(negative)
        # A row passes an image at every factor above the ratio of its negative to its positive part.
        ratios = (-(images @ negative.T) / (images @ positive.T).clamp_min(torch.finfo(negative.dtype).tiny)).flatten()
        rank = max(1, round(len(ratios) * share))
        return float(ratios.kthvalue(rank).values)

    def read(self, weight: Tensor, bias: Tensor, count: int) -> tuple[Tensor, int]:
        """Divide row by row; images that several rows show, and that are no mixtures, passed these rows alone."""
        passed = bias != 0
        images = weight[passed] / bias[passed].unsqueeze(1)
        if not len(images):
            return images, 0
        size = images.norm(dim=1)
        near = torch.cdist(images, images) <= _SAME * torch.minimum(size.unsqueeze(0), size.unsqueeze(1))
        strength, free = bias[passed].abs(), torch.ones(len(images), dtype=torch.bool, device=images.device)
        distinct: list[int] = []
        rows: list[int] = []
        while len(distinct) < _LISTED * count and bool(free.any()):
            alike = (near & free).sum(1) * free
            most = alike.max()
            place = int(torch.where(alike == most, strength, -1.0).argmax())
            distinct.append(place)
            rows.append(int(most))
            free = free & ~near[place]
            free[place] = False
        whole = (images[distinct] - 0.5).abs().le(0.5 + _SAME).double().mean(1) > _INSIDE
        alone = whole & ~_between(images[distinct], whole)
        # Sorting is stable: among the images alone, those that most rows show come first.
        order = (~alone).long().argsort(stable=True)[:count].tolist()
        clear = sum(rows[place] > 1 and bool(alone[place]) for place in order)
        return images[[distinct[place] for place in order]], clear

    def planted(self) -> str:
        """Say what the block is."""
        return f"a block of {self.rows} trap rows{self.and_decoys()} before the first layer"


def _between(images: Tensor, ends: Tensor) -> Tensor:
    """Tell which images lie between two of the marked ones: what two examples show together, when both pass."""
    products = images @ images.T
    found: list[Tensor] = []
    for place in range(len(images)):
        # The way from this image to one, times the way to another: they are opposite where it lies between the two.
        inner = products - products[place] - products[:, place : place + 1] + products[place, place]
        size = inner.diagonal().clamp_min(0).sqrt() * ends
        lengths = size.unsqueeze(1) * size
        found.append(((inner <= -(1 - _SAME) * lengths) & (lengths > 0)).any())
    return torch.stack(found)
