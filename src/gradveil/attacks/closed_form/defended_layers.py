"""R-GAP against a defended client: an estimate from masked or noisy layers, instead of an exact solution.

The simulated client shows what the defence does to entries (`sent_entries`). Gradients that are outer products give
their factors from a part of their entries, or from noisy ones (`outer_products`). The image is then the likeliest one
given the factors and the other layers' entries (`held_errors`). Labels are found as in other attacks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Annotated, Literal

import torch
from torch import Tensor

from gradveil.attacks.closed_form.held_errors import HeldErrors, Layer, Tolerance, evidence
from gradveil.attacks.closed_form.layer_by_layer import Recursive, squared_lengths, update_problems
from gradveil.attacks.closed_form.sent_entries import sent_entries
from gradveil.attacks.inversion.inversion import Inversion
from gradveil.attacks.inversion.solve import MOST_ROWS
from gradveil.attacks.inversion_presets import MASKS
from gradveil.attacks.knowledge import How, Knowledge
from gradveil.attacks.labels import FoundLabels, find_labels, label_problems
from gradveil.attacks.protocol import Observation, Progress, Prospect, Reconstruction, Remark, Status, in_closed_form
from gradveil.attacks.undo_batch_defence import Undo
from gradveil.client import Client
from gradveil.core.errors import Problem, fail, refuse
from gradveil.core.noise import Key
from gradveil.core.settings import Checked
from gradveil.core.streams import Stream
from gradveil.core.tree import Tensors, take
from gradveil.core.types import Batch
from gradveil.nn.layer_chain import chained

_STEPS = 400
"""Steps of each pass."""
_FIRST, _AGAIN = Tolerance(2.0, 0.1), Tolerance(1.0, 0.1)
"""Tolerances of the first pass and of each later one."""
_MEASURED = 0.5
"""Share of the first pass in which measured errors are held."""
_PASSES, _OPEN_PASSES, _FITS = 8, 2, 0.2
"""Most passes, most if it is open which inputs are positive, and the misfit in nats an entry at which none follows."""
_STALLED = 0.7
"""Misfit above which an image does not explain the update; noise leaves 0.5."""
_TV, _TV_EXACT = 6.0, 20.0
"""Weight of total variation, in nats per unit of [0, 1]: as noise asks for it, and as exact entries bear it."""


@dataclass(frozen=True)
class Estimated(Checked):
    """Estimate the image behind a defended update, layer by layer and then by a descent of its likelihood."""

    name: str = "r-gap(simulated_client=full)"
    labels: FoundLabels = "given"
    simulated_client: Literal["full"] = "full"

    @property
    def knowledge(self) -> Mapping[str, How]:
        """Masks, as the zeros show them; the mean of additive noise."""
        return MASKS

    def problems(self, prospect: Prospect) -> Iterator[Problem]:
        """Refuse what is not the gradient of one image by a plain chain, and labels that cannot be read off."""
        client = prospect.simulated_client
        yield from update_problems(client, prospect.examples)
        yield from _client_problems(client, prospect.shape)
        yield from label_problems(self.labels, prospect)
        yield from chained(client.model, client.params(), prospect.shape, client.trained())[1]

    def __call__(
        self,
        observations: Sequence[Observation],
        simulated_client: Client,
        knowledge: Knowledge,
        key: Key,
        progress: Callable[[Progress], None] | None = None,
        plan: Sequence[int] = (),
    ) -> Reconstruction:
        """Estimate every target client's image from the last round's update; if clients have state, the first's."""
        began, shape = time.perf_counter(), knowledge.space.shape
        observations = _usable(observations, simulated_client)
        seen = observations[-1]
        links, problems = chained(simulated_client.model, seen.params, shape, simulated_client.trained())
        own = [*update_problems(simulated_client, seen.examples), *_client_problems(simulated_client, shape)]
        refuse([*own, *problems])
        targets = find_labels(self.labels, seen, simulated_client, knowledge, key.child(Stream.LABELS))
        assert targets is not None, "labels are given or read off the update"
        finite = torch.stack([value.isfinite().flatten(1).all(1) for value in seen.update.values()]).all(0)
        clean = {n: torch.where(v.isfinite(), v, 0.0) for n, v in seen.update.items()}
        treated = sent_entries(simulated_client, replace(seen, update=clean), shape, key)
        example = next(iter(seen.params.values()))
        lower, upper = knowledge.space.bounds(example)
        inputs = ((lower + upper) / 2).expand(len(finite), *shape).clone()
        parts, rest = list[list[Layer]](), torch.full_like(inputs.flatten(1)[:, 0], torch.inf)
        for rows in torch.arange(len(finite), device=finite.device).split(MOST_ROWS):
            layers = evidence(links, take(clean, rows), treated, example.dtype)
            loss = partial(_losses, simulated_client, targets[rows, 0])
            inputs[rows], rest[rows] = _descended(layers, seen.params, loss, (lower, upper), inputs[rows])
            parts.append(layers)
            if progress:
                done = int(rows[-1]) + 1
                progress(Progress(done, len(finite) - done, done, len(finite), float("nan")))

        inputs = inputs.nan_to_num(0.0).unsqueeze(1)
        misfit = self.evaluate(observations, simulated_client, replace(knowledge, targets=targets), key, inputs, {})
        result = in_closed_form(inputs, targets, misfit, finite, began, progress)
        match = self.match(observations, simulated_client, replace(knowledge, targets=targets), key, inputs, {})
        return replace(result, remarks=tuple(_remarks(parts)), match=match, status=_status(result.status, parts, rest))

    def evaluate(
        self,
        observations: Sequence[Observation],
        simulated_client: Client,
        knowledge: Knowledge,
        key: Key,
        inputs: Tensor,
        noise: Mapping[str, Tensor],
        plan: Sequence[int] = (),
    ) -> Tensor:
        """Return the squared distance [V] of the inputs' updates from the observed ones, relative to the latter."""
        observations = _usable(observations, simulated_client)
        distance = self._inversion().evaluate(observations, simulated_client, knowledge, key, inputs, noise)
        return distance / squared_lengths(observations[-1])

    def match(
        self,
        observations: Sequence[Observation],
        simulated_client: Client,
        knowledge: Knowledge,
        key: Key,
        inputs: Tensor,
        noise: Mapping[str, Tensor],
        plan: Sequence[int] = (),
    ) -> Tensor:
        """Return `Reconstruction.match`: first the distance of `evaluate`, which has no priors."""
        observations = _usable(observations, simulated_client)
        match = self._inversion().match(observations, simulated_client, knowledge, key, inputs, noise)
        return torch.cat([match[:, :1] / squared_lengths(observations[-1]).unsqueeze(1), match[:, 1:]], 1)

    def _inversion(self) -> Inversion:
        return Inversion(
            self.name, objective="l2", labels=self.labels, simulated_client="full", knowledge=self.knowledge
        )


def r_gap(
    labels: FoundLabels = "given",
    undo: Undo = False,
    simulated_client: Annotated[
        Literal["naive", "full"], "Client whose layers are solved: without its defence, or estimated with it."
    ] = "naive",
) -> Recursive | Estimated:
    """Return R-GAP: the exact recursion, or the estimate that believes in the client's masks and noise."""
    if simulated_client == "naive":
        return Recursive(labels=labels, undo=undo)
    if undo:
        problem = "undoes a batch defence after an exact solution, and simulated_client=full estimates"
        raise fail("r-gap.undo", problem, "leave one of them out")
    return Estimated(labels=labels)


def _losses(client: Client, targets: Tensor, rows: Tensor, outputs: Tensor) -> Tensor:
    return client.loss(outputs, targets[rows])


def _descended(
    layers: Sequence[Layer],
    params: Tensors,
    loss: Callable[[Tensor, Tensor], Tensor],
    bounds: tuple[Tensor, Tensor],
    images: Tensor,
) -> tuple[Tensor, Tensor]:
    """Descend in passes; those that fit exact entries are finished. Noisy entries take one pass.

    Returns the images and their misfit [V] in nats an entry.
    """
    noisy = any(layer.weight.noise > 0 for layer in layers)
    settled = torch.stack([layer.settled for layer in layers]).any(0) | (not any(layer.link.cuts for layer in layers))
    rows, rest = torch.arange(len(images), device=images.device), images.new_full((len(images),), torch.inf)
    for number in range(1 if noisy else _PASSES):
        search = HeldErrors([layer.of(rows) for layer in layers], params, partial(loss, rows), bounds)
        tolerance, measured = (_AGAIN, 0.0) if number else (_FIRST, _MEASURED)
        found, misfit = search.descend(images[rows], tolerance, _STEPS, _TV if noisy else _TV_EXACT, measured)
        images, rest = images.index_copy(0, rows, found), rest.index_copy(0, rows, misfit)
        rows = rows[(misfit > _FITS) & (settled[rows] | (number + 1 < _OPEN_PASSES))]
        if not len(rows):
            break
    return images, rest


def _usable(observations: Sequence[Observation], client: Client) -> Sequence[Observation]:
    """Return the round that is attacked: what a client has kept from earlier rounds is no part of one gradient."""
    return observations[:1] if client.init(observations[0].params) else observations[-1:]


def _client_problems(client: Client, shape: tuple[int, ...]) -> Iterator[Problem]:
    """Refuse clients whose sent entries do not follow from the gradient of their image entry by entry."""
    remedy = "choose another attack, such as cdia"
    if client.members > 1:
        yield Problem("client.members", "the equations hold for one client, and the server sees a sum", remedy)
        return
    if client.batch:
        yield Problem("defence", "the images are changed before their gradient is taken", remedy)
    params = client.params()
    blank = next(iter(params.values())).new_zeros(1, *shape)
    spec = client.noise_spec(params, Batch(blank, torch.zeros(1, dtype=torch.long, device=blank.device)))
    if any(name.startswith("model.") for name in spec):
        yield Problem("model", "the model draws random numbers, so that its layers are not known", remedy)


def _remarks(parts: Sequence[Sequence[Layer]]) -> Iterator[Remark]:
    """Report for each layer whose gradient is an outer product how many of its inputs were found."""
    for number, layer in enumerate(parts[0]):
        if layer.link.outer:
            counts = torch.cat([part[number].deviation.isfinite().sum(1) for part in parts])
            total = prod(layer.deviation.shape[1:])
            words = f"the sent entries determine {{}} of the {total} inputs of '{layer.link.path}'"
            yield Remark(words, tuple(map(float, counts.tolist())), total)


def _status(status: Sequence[Status], parts: Sequence[Sequence[Layer]], rest: Tensor) -> tuple[Status, ...]:
    """Mark target clients as stalled whose update the image does not explain, or gave no factors."""
    found = torch.cat([torch.stack([layer.factored for layer in part]).any(0) for part in parts])
    explained = (found & (rest <= _STALLED)).tolist()
    return tuple(
        "stalled" if each == "converged" and not well else each for each, well in zip(status, explained, strict=True)
    )
