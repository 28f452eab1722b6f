"""Examples caught by fishing: their number and their part of the update.

The crafted model classifies m of N examples as one of the K - 1 other classes, each with the same probability. The last
layer's bias then has the gradient -n_c / N for the target, with n_c caught examples, and (m / (K - 1) - n_j) / N for
a class of n_j examples, so that the counts of all classes can be read off it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from gradveil.attacks.protocol import Observation, Reconstruction, Status
from gradveil.core.tree import qualified, take

_WORSE: tuple[Status, ...] = ("converged", "stalled", "budget", "diverged")
_SURE, _LIKELY = 0.05, 0.25
"""Distance from whole counts up to which counts are accepted at once, or if nothing fits better."""

_NOTHING = 1e-5
"""A bias gradient of less than this many examples counts as zero."""


class Counts(NamedTuple):
    """Counts of examples of each class [K] in an update, and the update's scale relative to a mean gradient."""

    classes: Tensor
    scale: float
    known: bool
    """False if the counts cannot be read off the update, as after pruning or strong noise."""


@dataclass(frozen=True)
class Catch:
    """Target clients with equally many caught examples in one round."""

    places: Tensor
    """Places [v] of these target clients among those observed."""
    target: int
    observation: Observation
    """The round, with the updates of the caught examples alone."""

    def only(self, row: int) -> Catch:
        """Return the part of one target client."""
        rows = slice(row, row + 1)
        update = {name: value[rows] for name, value in self.observation.update.items()}
        part = replace(self.observation, update=update, target_clients=self.observation.target_clients[rows])
        return replace(self, places=self.places[rows], observation=part)


def count(bias: Tensor, target: int, examples: int, gated: bool, usual: float = 1.0) -> Counts:
    """Read the number of examples of each class off the last bias's gradient [K].

    With a gate the number m of other examples is unknown. `usual` is the scale of an undefended update: its steps times
    their size. If the counts are not whole at this scale, other scales are tried, since a client may clip. For few
    classes several scales may give whole counts. If these differ, the counts are unknown.
    """
    best: tuple[float, Counts] | None = None
    unknown = Counts(torch.zeros_like(bias, dtype=torch.long), usual, known=False)
    others, size = torch.arange(len(bias), device=bias.device) != target, examples * float(bias.abs().max())
    for taken in range(examples, 0, -1) if gated else (examples,):
        even = taken / (len(bias) - 1)
        largest = examples * float(bias[others].max())
        candidates: list[Counts] = []
        # The class with the largest gradient has the fewest examples: (even - n_j) scale / N is solved for the scale at
        # each possible number n_j.
        for scale in (usual, *(largest / (even - least) for least in range(int(even) + 1) if least < even)):
            if scale <= 0:
                continue
            counts = even - examples * bias / scale
            counts[target] = -examples * bias[target] / scale
            whole = counts.round()
            odd = bool(whole[others].min() < 0) or int(whole.sum()) != taken
            error = float((counts - whole).abs().max()) + float(odd)
            candidate = Counts(whole.clamp(0, examples).long(), scale, error < _LIKELY)
            # A bias gradient that is small against the scale has a small error too, so the error is relative to it.
            sure = error < _SURE * (min(1.0, size / scale) if size > _NOTHING else 1.0)
            if sure and scale == usual:
                return candidate
            if sure:
                candidates.append(candidate)
            if (best is None or error < best[0]) and scale != usual:
                best = error, candidate
        if candidates:
            same = all(torch.equal(other.classes, candidates[0].classes) for other in candidates)
            return candidates[0] if same else unknown
    return best[1] if best and best[1].known else unknown


def catches(
    seen: Observation, last: str, target: int, gated: bool, usual: float = 1.0
) -> tuple[list[Catch], list[Tensor]]:
    """Group a round's target clients by their number of caught examples. Returns the groups and the class counts.

    Target clients without a finite update or a caught example are in no group. If the number of caught examples is
    unknown, it is taken to be one.
    """
    biases = seen.update[qualified(last, "bias")].double()
    finite = torch.stack([value.isfinite().flatten(1).all(1) for value in seen.update.values()]).all(0)
    body = [value.flatten(1) for name, value in seen.update.items() if name.rpartition(".")[0] != last]
    moved = torch.stack([value.abs().amax(1) > 0 for value in body]).any(0) if body else finite
    counts = [count(row, target, seen.examples, gated, usual) for row in biases]
    numbers = [int(of_client.classes[target]) if of_client.known else 1 for of_client in counts]
    caught = torch.where(finite & moved, torch.tensor(numbers).to(finite.device), 0)
    scales = torch.tensor([of_client.scale for of_client in counts]).to(biases)
    groups = [_group(seen, last, target, caught, scales, number) for number in caught.unique().tolist() if number >= 1]
    return groups, [of_client.classes for of_client in counts]


def _group(seen: Observation, last: str, target: int, caught: Tensor, scales: Tensor, number: int) -> Catch:
    places = (caught == number).nonzero().flatten()
    # From the mean over all N examples to that over the caught ones.
    update = {n: _times(v, seen.examples / number / scales[places]) for n, v in take(seen.update, places).items()}
    # In the last layer, only the target's row belongs to the caught examples alone. It determines the other rows.
    for name in (qualified(last, "weight"), qualified(last, "bias")):
        if name in update:
            value = update[name]
            # The error of a caught example is -1 at the target and 1 / (K - 1) at each other class.
            share = torch.full((value.shape[1],), -1 / (value.shape[1] - 1)).to(value)
            share[target] = 1.0
            update[name] = _times(value[:, target].unsqueeze(1).expand_as(value), share, 1)
    target_clients = tuple(seen.target_clients[place] for place in places.tolist())
    return Catch(places, target, replace(seen, update=update, examples=number, target_clients=target_clients))


def _times(value: Tensor, factors: Tensor, dim: int = 0) -> Tensor:
    shape = [1] * value.ndim
    shape[dim] = -1
    return value * factors.to(value).view(shape)


class _SearchResult(NamedTuple):
    """The result of one search for one target client."""

    target: int
    part: Reconstruction
    row: int


def combined(
    groups: Sequence[Catch],
    parts: Sequence[Reconstruction],
    counted: Sequence[Tensor],
    seen: Observation,
    blank: Tensor,
    restarts: int,
    points: Sequence[int],
) -> Reconstruction:
    """Combine the results of every target client: single images first, repeated up to the size of the batch.

    Target clients without a catch have `blank` images, in the trace too, and an infinite objective.
    """
    example = next(iter(seen.update.values()))
    results: list[list[_SearchResult]] = [[] for _ in seen.target_clients]
    for catch, part in sorted(zip(groups, parts, strict=True), key=lambda both: both[0].observation.examples):
        for row, place in enumerate(catch.places.tolist()):
            results[place].append(_SearchResult(catch.target, part, row))
    finite = torch.stack([value.isfinite().flatten(1).all(1) for value in seen.update.values()]).all(0).tolist()
    nothing = torch.full((restarts,), torch.inf).to(example)
    return Reconstruction(
        inputs=_filled(results, lambda part: part.inputs, seen.examples, blank.to(example)),
        targets=torch.stack([_labels(r, counts, seen.examples) for r, counts in zip(results, counted, strict=True)]),
        objective=_means(results, lambda part: part.objective, nothing[0]),
        status=tuple(_status(of_client, good) for of_client, good in zip(results, finite, strict=True)),
        iterations=torch.tensor(
            [max((int(r.part.iterations[r.row]) for r in of_client), default=0) for of_client in results]
        ),
        seconds=sum(part.seconds for part in parts),
        restart=torch.tensor([int(r[0].part.restart[r[0].row]) if r else 0 for r in results]),
        objectives=_means(results, lambda part: part.objectives, nothing),
        initial=_means(results, lambda part: part.initial, nothing[0]),
        plan=tuple(size for part in parts for size in part.plan),
        trace={
            count: _filled(results, lambda part, n=count: part.trace[n], seen.examples, blank.to(example))
            for count in points
        },
    )


def _filled(
    results: Sequence[Sequence[_SearchResult]], images: Callable[[Reconstruction], Tensor], count: int, blank: Tensor
) -> Tensor:
    """Repeat the images of each target client up to this count."""
    filled: list[Tensor] = []
    for of_client in results:
        unique = torch.cat([images(part)[row] for _, part, row in of_client]) if of_client else blank.unsqueeze(0)
        filled.append(unique[torch.arange(count, device=unique.device) % len(unique)])
    return torch.stack(filled)


def _means(
    results: Sequence[Sequence[_SearchResult]], value: Callable[[Reconstruction], Tensor], otherwise: Tensor
) -> Tensor:
    """Average a value over the searches for each target client."""
    rows = [[value(part)[row] for _, part, row in of_client] for of_client in results]
    return torch.stack([torch.stack(of_client).mean(0) if of_client else otherwise for of_client in rows])


def _status(results: Sequence[_SearchResult], finite: bool) -> Status:
    """Return the worst status of a target client's searches."""
    if not results:
        return "stalled" if finite else "diverged"
    statuses: list[Status] = [part.status[row] for _, part, row in results]
    return max(statuses, key=_WORSE.index)


def _labels(results: Sequence[_SearchResult], counts: Tensor, examples: int) -> Tensor:
    """List the labels of the reconstructed images first, then of the other counted examples."""
    first = [target for target, part, _ in results for _ in range(part.inputs.shape[1])]
    left = counts.clone().cpu()
    for target in first:
        left[target] -= 1
    rest = torch.arange(len(left)).repeat_interleave(left.clamp(min=0)).tolist()
    known = [*first, *rest] or [0]
    return torch.tensor([known[place % len(known)] for place in range(examples)], device=counts.device)
