"""Malicious servers that keep the architecture: examples are isolated in the units of a hidden layer.

The server moves biases such that few images of a batch open a unit (quantile biases on honest weights, Nowak et al.
2024), in the layer or in a normalisation behind it, or makes the units copies of one measure with graded biases (Fowl
et al. 2022). Convolutions before the layer are made to carry the image. dW_i / db_i is then what an isolated example
puts into the layer, and the image follows from it.
"""

from __future__ import annotations

import copy
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor, nn

from gradveil.attacks.knowledge import How, Knowledge, Known
from gradveil.attacks.labels import FoundLabels, find_labels, label_problems
from gradveil.attacks.malicious.carried_images import Decoder, Way, carried, carrying, is_carried, way
from gradveil.attacks.malicious.solved_images import alone_images, assembled, differences, filled_bins
from gradveil.attacks.protocol import Observation, Progress, Prospect, Reconstruction, in_closed_form
from gradveil.client import Client
from gradveil.core.errors import Problem, fail
from gradveil.core.noise import Key
from gradveil.core.settings import Checked, Range
from gradveil.core.streams import Stream
from gradveil.core.tree import qualified
from gradveil.core.types import Batch
from gradveil.nn.module_paths import at, evaluating, features
from gradveil.nn.normalisation import BatchStatistics, FrozenNorm

_FAINT = 1e-9
"""Share of the largest gradient of a bias below which a unit is taken to be closed."""
_ALIKE = 0.05
"""Relative distance up to which decoded images are the same example: they are not exact."""
_FEW = 2.0
"""Largest share of public images that open a moved unit, in units of the setting."""
_BATCHED = (BatchStatistics, nn.modules.batchnorm._BatchNorm)
"""Normalisations by the batch's statistics, in whose place biases of the layer have no effect."""
_CHOOSE = "choose another attack: rob, curious, fishing"


@dataclass(frozen=True)
class _PixelReader:
    """Turns what a hidden layer takes into pixels."""

    decode: Decoder | None
    knowledge: Knowledge

    @property
    def same(self) -> float | None:
        """Distance of equal images, where images are decoded."""
        return None if self.decode is None else _ALIKE

    def images(self, values: Tensor) -> Tensor:
        """Decode the layer's inputs [n, F] to pixels in [0, 1]."""
        flat = values if self.decode is None else self.decode(values)
        lower, upper = self.knowledge.space.bounds(flat)
        ends = [bound.expand(self.knowledge.space.shape).flatten() for bound in (lower, upper)]
        return (flat - ends[0]) / (ends[1] - ends[0])


class HiddenUnits(Checked, ABC):
    """Base of attacks that change a hidden layer. They use the first round, before training changes the layer."""

    name: str
    labels: FoundLabels
    rounds: ClassVar[Literal["first"]] = "first"

    @property
    def knowledge(self) -> Mapping[str, How]:
        """Public images, whose outputs determine the biases."""
        return {"public": Known()}

    @property
    def simulated_client(self) -> Literal["naive", "full"]:
        """No defence is simulated."""
        return "naive"

    @abstractmethod
    def open(self, model: nn.Module, course: Way, public: Tensor, key: Key) -> None:
        """Change the hidden layer of a model that carries images."""

    @abstractmethod
    def read(self, rows: Tensor, errors: Tensor, count: int, reader: _PixelReader) -> tuple[Tensor, int]:
        """Return images [n <= count, N] from dW [K, F] and the errors [K] of its rows, and the number of clear ones."""

    @abstractmethod
    def planted(self) -> str:
        """Describe the change to the model."""

    def problems(self, prospect: Prospect) -> Iterator[Problem]:
        """Refuse models without a hidden layer that an image reaches, and data without public images."""
        yield from label_problems(self.labels, prospect)
        if not prospect.public:
            yield Problem(
                "data.public", "no public images for the biases", "choose data with public images, or curious"
            )
        model, shape = prospect.simulated_client.model, prospect.shape
        course = way(model, shape)
        if course is None:
            yield Problem("model", "has no hidden layer that is one matrix behind convolutions at most", _CHOOSE)
        elif qualified(course.layer, "weight") not in prospect.simulated_client.trained():
            yield Problem("update", f"{qualified(course.layer, 'weight')} is not sent", _CHOOSE)
        elif not is_carried(model, course, _two_images(model, shape)):
            yield Problem("model", f"no image passes unchanged from the first layer to '{course.layer}'", _CHOOSE)
        else:
            yield from self.unsuited(model, course)

    def unsuited(self, model: nn.Module, course: Way) -> Iterator[Problem]:
        """Yield what of the layer does not suit the attack."""
        yield from ()

    def craft(self, client: Client, knowledge: Knowledge, key: Key) -> Client:
        """Return the client with the changed model."""
        public, shape = knowledge.public, knowledge.space.shape
        model = copy.deepcopy(client.model)
        course = way(model, shape)
        if course is None or public is None or not len(public.inputs):
            problem = "has no public images, or the model has no hidden layer that an image reaches"
            raise fail(f"attack {self.name}", problem, "see what `gradveil check` reports")
        lower, upper = (bound.expand(shape) for bound in knowledge.space.bounds(next(iter(client.params().values()))))
        with torch.no_grad():
            # The server sends all buffers: those that the client had of other rounds no longer count.
            for name, value in client.buffers.items():
                model.get_buffer(name).copy_(value)
            carrying(model, course, lower, upper)
            self.open(model, course, public.inputs, key.child(Stream.MEASURES))
        return replace(client, model=model, buffers={})

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
        model, public = simulated_client.model, knowledge.public
        course = way(model, knowledge.space.shape)
        if course is None or public is None or qualified(course.layer, "weight") not in seen.update:
            problem, fix = "has no public images, or no update of a hidden layer", "see what `gradveil check` reports"
            raise fail(f"attack {self.name}", problem, fix)
        count = carried(model, course, knowledge.space.shape)
        rows = seen.update[qualified(course.layer, "weight")].double().flatten(2)[:, :, :count]
        rows, errors = self.equations(rows, seen, model, course, public, count)
        reader = _PixelReader(Decoder.fitted(model, course, public.inputs), knowledge)
        finite = rows.isfinite().flatten(1).all(1) & errors.isfinite().all(1)

        def read(place: int) -> tuple[Tensor, int]:
            return self.read(rows[place], errors[place], seen.examples, reader)

        inputs, missing = assembled(read, finite, seen.examples, knowledge.space)
        naive = simulated_client.undefended_update()
        targets = find_labels(self.labels, seen, naive, knowledge, key.child(Stream.LABELS))
        assert targets is not None, "labels are given or read off the update"
        like = next(iter(seen.update.values()))
        return in_closed_form(inputs.to(like), targets, missing.to(like), finite, began, progress)

    def equations(
        self, rows: Tensor, seen: Observation, model: nn.Module, course: Way, public: Batch, count: int
    ) -> tuple[Tensor, Tensor]:
        """Return rows [V, K, F] and errors [V, K] whose quotients are inputs of the layer."""
        bias = qualified(course.layer, "bias")
        errors = seen.update[bias if bias in seen.update else qualified(course.norm, "bias")].double()
        return rows, errors


def _two_images(model: nn.Module, shape: tuple[int, ...]) -> Tensor:
    return 2 * torch.rand((2, *shape), generator=Key(0, (Stream.PROBES,)).generator()).to(next(model.parameters())) - 1


def _outputs(model: nn.Module, path: str, inputs: Tensor) -> Tensor:
    """Return what the module at a path puts out, [n, K]."""
    caught: list[Tensor] = []
    hook = at(model, path).register_forward_hook(lambda _module, _inputs, out: caught.append(out.flatten(1)))
    try:
        with torch.no_grad(), evaluating(model):
            model(inputs)
    finally:
        hook.remove()
    return caught[-1]


def _sent_bias(model: nn.Module, path: str) -> bool:
    return getattr(at(model, path), "bias", None) is not None if path else False


@dataclass(frozen=True)
class QuantileBiases(HiddenUnits):
    """Honest weights whose biases let a small share of public images through, so that units hold single examples.

    In place of the layer's biases, those of a normalisation behind it, or its fixed running means, can be moved.
    """

    name: str = "quantile"
    share: Annotated[float, Range(0, 1, low_open=True, high_open=True), "Share of public images that open a unit."] = (
        0.03
    )
    part: Annotated[float, Range(0, 1, low_open=True), "Share of the layer's units that are changed."] = 1.0
    place: Annotated[
        Literal["bias", "norm", "statistics"],
        "What is moved: biases of the layer, or biases or running means of the normalisation behind it.",
    ] = "bias"
    labels: FoundLabels = "given"

    def unsuited(self, model: nn.Module, course: Way) -> Iterator[Problem]:
        """Require what is moved."""
        norm = at(model, course.norm) if course.norm else None
        if self.place == "bias" and (isinstance(norm, _BATCHED) or not _sent_bias(model, course.layer)):
            problem = f"biases of '{course.layer}' have no effect, or there are none"
            yield Problem("place", problem, "give place=norm, or place=statistics")
        if self.place == "norm" and not _sent_bias(model, course.norm):
            yield Problem(
                "place", f"no normalisation with biases is directly behind '{course.layer}'", "give place=bias"
            )
        if self.place == "statistics" and not isinstance(norm, FrozenNorm):
            problem = f"no normalisation by fixed statistics is directly behind '{course.layer}'"
            yield Problem("place", problem, "give place=bias, or norms=frozen")

    def open(self, model: nn.Module, course: Way, public: Tensor, key: Key) -> None:
        """Move the biases of a part of the units to a quantile of their outputs for public images."""
        path = course.layer if self.place == "bias" else course.norm
        level = 1 - self.share
        module = at(model, path)
        units = len(at(model, course.layer).weight)  # type: ignore[arg-type]
        moved = torch.randperm(units, generator=key.generator())[: max(1, round(self.part * units))]
        if self.place == "statistics":
            assert isinstance(module, FrozenNorm)
            values = _outputs(model, course.layer, public)
            module.running_mean[moved] = values.quantile(level, dim=0)[moved]
            if module.bias is not None:
                module.bias[moved] = 0
        else:
            bias = module.bias
            assert isinstance(bias, Tensor)
            bias[moved] -= _outputs(model, path, public).quantile(level, dim=0)[moved]

    def equations(
        self, rows: Tensor, seen: Observation, model: nn.Module, course: Way, public: Batch, count: int
    ) -> tuple[Tensor, Tensor]:
        """Take the units that few public images open, and undo a normalisation by the batch.

        It takes off the mean and the trend along the unit: public images have nearly the same, and the same spread.
        """
        norm = at(model, course.norm) if course.norm else None
        opened = (_outputs(model, course.norm or course.layer, public.inputs) > 0).double().mean(0)
        closed = opened <= _FEW * self.share
        if not isinstance(norm, _BATCHED):
            rows, errors = super().equations(rows, seen, model, course, public, count)
            return rows, errors * closed
        with torch.no_grad(), evaluating(model):
            taken = features(model, public.inputs, course.layer).flatten(1)[:, :count].double()
        values = _outputs(model, course.layer, public.inputs).double()
        spread = values.std(0).clamp_min(1e-12)
        trend = ((values - values.mean(0)) / spread).T @ taken / len(taken)
        errors, slopes = (seen.update[f"{course.norm}.{kind}"].double() for kind in ("bias", "weight"))
        scale = at(model, course.norm).weight.detach().double()  # type: ignore[union-attr, operator]
        rows = rows * (spread / scale)[:, None] + slopes[:, :, None] * trend
        return rows + errors[:, :, None] * taken.mean(0), errors * closed

    def read(self, rows: Tensor, errors: Tensor, count: int, reader: _PixelReader) -> tuple[Tensor, int]:
        """Divide row by row; images of several rows that are no mixtures opened these units alone."""
        size = errors.abs()
        passed = size > _FAINT * size.max()
        images = reader.images(rows[passed] / errors[passed].unsqueeze(1))
        same = _ALIKE if self.place == "norm" else reader.same
        return alone_images(images, size[passed], count, **({} if same is None else {"same": same}))

    def planted(self) -> str:
        """Describe the change to the model."""
        where = {"bias": "biases", "norm": "normalisation biases", "statistics": "running means"}[self.place]
        some = "" if self.part == 1 else f" in {self.part:.0%} of the units"
        return f"{where} of a hidden layer that let {self.share:.0%} of images through{some}"


@dataclass(frozen=True)
class CopiedRows(HiddenUnits):
    """A hidden layer of copies of one measure with graded biases, behind convolutions that carry the image.

    Neighbouring rows differ by the examples of one bin, as those of a planted block.
    """

    name: str = "conv-imprint"
    labels: FoundLabels = "given"

    def unsuited(self, model: nn.Module, course: Way) -> Iterator[Problem]:
        """Require that nothing lies between the layer's units and the next layer's weights."""
        units, behind = len(at(model, course.layer).weight), at(model, course.behind)  # type: ignore[arg-type]
        if course.norm or not _sent_bias(model, course.layer):
            yield Problem("model", f"'{course.layer}' has no biases, or a normalisation behind it", _CHOOSE)
        elif behind.weight[0].numel() != units:  # type: ignore[index, operator]
            yield Problem("model", f"'{course.behind}' does not take the units of '{course.layer}'", _CHOOSE)

    def open(self, model: nn.Module, course: Way, public: Tensor, key: Key) -> None:
        """Copy one random measure of the carried features into every row, with public quantiles as thresholds."""
        weight, bias = at(model, course.layer).weight, at(model, course.layer).bias
        behind = at(model, course.behind).weight
        assert isinstance(weight, Tensor)
        assert isinstance(bias, Tensor)
        assert isinstance(behind, Tensor)
        count, rows = carried(model, course, tuple(public.shape[1:])), weight.flatten(1)
        measure = torch.zeros_like(rows[0])
        measure[:count] = torch.randn(count, generator=key.generator()).to(rows)
        measure *= rows.norm(dim=1).mean() / measure.norm()
        weight.copy_(measure.expand_as(rows).reshape(weight.shape))
        bias.zero_()
        values = _outputs(model, course.layer, public)[:, 0]
        cuts = torch.linspace(0, 1, len(bias) + 2, dtype=values.dtype, device=values.device)[:-2]
        bias.copy_(-values.quantile(cuts))
        # Every unit has the same effect, so that errors of examples above a bin cancel in the difference.
        flat = behind.flatten(1)
        # Equal terms add up to K of one: divided by the root of K, they are as large as a sum of independent weights.
        behind.copy_((flat[:, :1] / len(bias) ** 0.5).expand_as(flat).reshape(behind.shape))

    def read(self, rows: Tensor, errors: Tensor, count: int, reader: _PixelReader) -> tuple[Tensor, int]:
        """Subtract neighbouring rows; the bins with the largest errors hold examples."""
        rows, errors = differences(rows), differences(errors)
        best, clear = filled_bins(errors, count)
        return reader.images(rows[best] / errors[best].unsqueeze(1)), clear

    def planted(self) -> str:
        """Describe the change to the model."""
        return "convolutions that carry the image to a hidden layer of one measure with graded biases"
