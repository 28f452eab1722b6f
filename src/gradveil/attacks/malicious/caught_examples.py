"""Examples caught by fishing: how many of the target class, and their update alone.

Of N examples, m are taken for one of the K classes but the target, each with the same probability. The last layer's
bias then has the gradient -n_c / N for the target, n_c the examples caught, and (m / (K - 1) - n_j) / N for a class of
n_j examples: the numbers of all classes can be read off it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from gradveil.attacks.protocol import Observation, Reconstruction, Status
from gradveil.core.tree import take

_WORSE: tuple[Status, ...] = ("converged", "stalled", "budget", "diverged")
_SURE, _LIKELY = 0.05, 0.25
"""Numbers of examples this near to whole ones are taken for what they are: at once, or where nothing fits better."""

_NOTHING = 1e-5
"""A bias whose gradients come to less than this many examples has none."""


class Counts(NamedTuple):
    """How many examples of each class [K] an update is made of, and how much larger than a mean gradient it is."""

    classes: Tensor
    scale: float
    known: bool
    """Whether that can be read off the update; what is pruned or drowned in noise does not say it."""


@dataclass(frozen=True)
class Catch:
    """Target clients of whose batches a round caught equally many examples."""

    places: Tensor
    """Which target clients [v], by their places among those observed."""
    target: int
    observation: Observation
    """The round, with the updates that the caught examples alone would have sent."""

    def only(self, row: int) -> Catch:
        """Return the catch of one of its target clients."""
        rows = slice(row, row + 1)
        update = {name: value[rows] for name, value in self.observation.update.items()}
        alone = replace(self.observation, update=update, target_clients=self.observation.target_clients[rows])
        return replace(self, places=self.places[rows], observation=alone)


def count(bias: Tensor, target: int, examples: int, gated: bool, usual: float = 1.0) -> Counts:
    """Read the number of examples of each class off the last bias's gradient [K].

    With a gate it is not known how many were taken for another class. `usual` says how many gradients the update comes
    to if nothing was done to it: its steps times their size. Where the numbers do not come out whole, it is taken for
    another multiple: it was clipped. Of few classes several multiples may have whole numbers: then none is known.
    """
    best: tuple[float, Counts] | None = None
    others, size = torch.arange(len(bias), device=bias.device) != target, examples * float(bias.abs().max())
    for taken in range(examples, 0, -1) if gated else (examples,):
        even = taken / (len(bias) - 1)
        largest = examples * float(bias[others].max())
        whole_too: list[Counts] = []
        for scale in (usual, *(largest / (even - least) for least in range(int(even) + 1) if least < even)):
            if scale <= 0:
                continue
            counts = even - examples * bias / scale
            counts[target] = -examples * bias[target] / scale
            whole = counts.round()
            odd = bool(whole[others].min() < 0) or int(whole.sum()) != taken
            error = float((counts - whole).abs().max()) + float(odd)
            found = Counts(whole.clamp(0, examples).long(), scale, error < _LIKELY)
            # Of a small multiple little is left over too, as of no gradient at all: it has to be little in comparison.
            sure = error < _SURE * (min(1.0, size / scale) if size > _NOTHING else 1.0)
            if sure and scale == usual:
                return found
            if sure:
                whole_too.append(found)
            if (best is None or error < best[0]) and scale != usual:
                best = error, found
        if whole_too:
            same = all(torch.equal(other.classes, whole_too[0].classes) for other in whole_too)
            return whole_too[0] if same else _unknown(bias, usual)
    return best[1] if best and best[1].known else _unknown(bias, usual)


def _unknown(bias: Tensor, usual: float) -> Counts:
    return Counts(torch.zeros_like(bias, dtype=torch.long), usual, known=False)


def catches(
    seen: Observation, last: str, target: int, gated: bool, usual: float = 1.0
) -> tuple[list[Catch], list[Tensor]]:
    """Sort a round's target clients by how many examples were caught, and say how many each has of every class.

    Whose update is not finite, and of whom nothing was caught, is in no catch. Where the number cannot be read, one
    example is supposed.
    """
    biases = seen.update[f"{last}.bias"].double()
    finite = torch.stack([value.isfinite().flatten(1).all(1) for value in seen.update.values()]).all(0)
    body = [value.flatten(1) for name, value in seen.update.items() if name.rpartition(".")[0] != last]
    moved = torch.stack([value.abs().amax(1) > 0 for value in body]).any(0) if body else finite
    counts = [count(row, target, seen.examples, gated, usual) for row in biases]
    numbers = [int(each.classes[target]) if each.known else 1 for each in counts]
    caught = torch.where(finite & moved, torch.tensor(numbers).to(finite.device), 0)
    scales = torch.tensor([found.scale for found in counts]).to(biases)
    found = list(_grouped(seen, last, target, caught, scales))
    return found, [each.classes for each in counts]


def _grouped(seen: Observation, last: str, target: int, caught: Tensor, scales: Tensor) -> Iterator[Catch]:
    for number in caught.unique().tolist():
        if number < 1:
            continue
        places = (caught == number).nonzero().flatten()
        of_mean = {n: _times(v, seen.examples / number / scales[places]) for n, v in take(seen.update, places).items()}
        alone = of_mean | _head(of_mean, last, target)
        target_clients = tuple(seen.target_clients[place] for place in places.tolist())
        yield Catch(places, target, replace(seen, update=alone, examples=number, target_clients=target_clients))


def _head(update: dict[str, Tensor], last: str, target: int) -> dict[str, Tensor]:
    """Return the last layer's gradient of the caught examples alone: the target's row is theirs, it has the others."""
    found: dict[str, Tensor] = {}
    for name in (f"{last}.weight", f"{last}.bias"):
        if name in update:
            value = update[name]
            share = torch.full((value.shape[1],), -1 / (value.shape[1] - 1)).to(value)
            share[target] = 1.0
            found[name] = _times(value[:, target].unsqueeze(1).expand_as(value), share, 1)
    return found


def _times(value: Tensor, factors: Tensor, dim: int = 0) -> Tensor:
    shape = [1] * value.ndim
    shape[dim] = -1
    return value * factors.to(value).view(shape)


class _SearchResult(NamedTuple):
    """What one search found of one target client."""

    target: int
    part: Reconstruction
    row: int


def together(
    found: Sequence[Catch],
    parts: Sequence[Reconstruction],
    counted: Sequence[Tensor],
    seen: Observation,
    blank: Tensor,
    restarts: int,
    points: Sequence[int],
) -> Reconstruction:
    """Put together what was found of every target client: single images first, repeated up to the size of the batch.

    Of whom nothing was caught, all images are `blank`, after all of these iterations too, and no objective is finite.
    """
    example = next(iter(seen.update.values()))
    mine: list[list[_SearchResult]] = [[] for _ in seen.target_clients]
    for catch, part in sorted(zip(found, parts, strict=True), key=lambda both: both[0].observation.examples):
        for row, place in enumerate(catch.places.tolist()):
            mine[place].append(_SearchResult(catch.target, part, row))
    sound = torch.stack([value.isfinite().flatten(1).all(1) for value in seen.update.values()]).all(0).tolist()
    nothing = torch.full((restarts,), torch.inf).to(example)
    objectives = [_mean([f.part.objectives[f.row] for f in own], nothing) for own in mine]
    return Reconstruction(
        inputs=_filled(mine, lambda part: part.inputs, seen.examples, blank.to(example)),
        targets=torch.stack([_labels(own, c, seen.examples) for own, c in zip(mine, counted, strict=True)]),
        objective=torch.stack([_mean([f.part.objective[f.row] for f in own], nothing[0]) for own in mine]),
        status=tuple(_status(own, whole) for own, whole in zip(mine, sound, strict=True)),
        iterations=torch.tensor([max((int(f.part.iterations[f.row]) for f in own), default=0) for own in mine]),
        seconds=sum(part.seconds for part in parts),
        restart=torch.tensor([int(own[0].part.restart[own[0].row]) if own else 0 for own in mine]),
        objectives=torch.stack(objectives),
        initial=torch.stack([_mean([f.part.initial[f.row] for f in own], nothing[0]) for own in mine]),
        plan=tuple(size for part in parts for size in part.plan),
        trace={
            count: _filled(mine, lambda part, n=count: part.trace[n], seen.examples, blank.to(example))
            for count in points
        },
    )


def _filled(
    mine: Sequence[Sequence[_SearchResult]], images: Callable[[Reconstruction], Tensor], count: int, blank: Tensor
) -> Tensor:
    """Repeat what was found of each target client until there are as many images as are asked for."""
    filled: list[Tensor] = []
    for own in mine:
        whole = torch.cat([images(part)[row] for _, part, row in own]) if own else blank.unsqueeze(0)
        filled.append(whole[torch.arange(count, device=whole.device) % len(whole)])
    return torch.stack(filled)


def _mean(values: Sequence[Tensor], otherwise: Tensor) -> Tensor:
    return torch.stack(list(values)).mean(0) if values else otherwise


def _status(own: Sequence[_SearchResult], sound: bool) -> Status:
    """Return the worst status of a target client's searches."""
    if not own:
        return "stalled" if sound else "diverged"
    ends: list[Status] = [part.status[row] for _, part, row in own]
    return max(ends, key=_WORSE.index)


def _labels(own: Sequence[_SearchResult], counts: Tensor, examples: int) -> Tensor:
    """List the labels: of the found images first, then of the others that were counted."""
    first = [target for target, part, row in own for _ in range(part.inputs.shape[1])]
    left = counts.clone().cpu()
    for target in first:
        left[target] -= 1
    rest = torch.arange(len(left)).repeat_interleave(left.clamp(min=0)).tolist()
    known = [*first, *rest] or [0]
    return torch.tensor([known[place % len(known)] for place in range(examples)], device=counts.device)
