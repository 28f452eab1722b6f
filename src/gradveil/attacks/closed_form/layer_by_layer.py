"""The recursive closed form (R-GAP): the input of each layer from the last to the first.

R-GAP (Zhu and Blaschko 2021). Of one image the gradient of a layer z = W x + b is dW = k x^T, with k the error at its
outputs. At the last layer k is the bias's gradient; without a bias, dW shows k and x but for a scale, which the loss
settles: at W x it has that very error. From then on each layer below is a system of linear equations for its input x:

    dW = k x^T   (its gradient)        W x + b = z   (its output, which the layer above took)

with k = (W_above^T k_above) act'(z) and z = act^-1(x_above). Where an activation is flat its output says nothing of z,
and what a layer's equations leave open is not taken for known by the next: such equations are left out. What is open
of the image is filled in smoothly.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

import torch
from torch import Tensor, nn

from gradveil.attacks.closed_form.linear_systems import as_matrix, gradient_rows, roughness, solved, taken_back
from gradveil.attacks.inversion.inversion import Inversion
from gradveil.attacks.knowledge import How, Knowledge
from gradveil.attacks.labels import Labels, find_labels, label_problems
from gradveil.attacks.protocol import Observation, Progress, Prospect, Reconstruction, Remark, in_closed_form
from gradveil.attacks.undo import undoing, undone
from gradveil.client import Client
from gradveil.core.errors import Problem, refuse
from gradveil.core.noise import Key
from gradveil.core.streams import Stream
from gradveil.core.tree import Tensors
from gradveil.nn.layer_chain import Link, chained

_SCALES = 6144
"""Magnitudes of the last layer's error that are tried at first."""
_ZOOMS, _MOST = 6, 4
_FITS = 1e-4
"""A misfit of the loss's error below which a scale is as good as any."""
_DOUBT = 1e-10
"""How much of a value may be open before the equation that it stands in counts half."""
_NAUGHT = 1e-3
"""Outputs of which the step says nothing are taken for its zeros if they are smaller than this, beside the largest."""
_WHOLE = 1 - 1e-6
"""Equations that count at least this much count whole."""
_GUESSED = 1e-3
"""How much equations count that rest on a guess, beside those that do not."""
_OPEN = 0.01
"""How much of it may be open before it is left out."""


@dataclass(frozen=True)
class Recursive:
    """Solve the layers one after the other, from the last to the first."""

    name: str = "r-gap"
    labels: Labels = "given"
    undo: bool = False
    """Undo the client's batch defence by its public transforms, once the image it trained on is solved for."""

    @property
    def simulated_client(self) -> Literal["naive", "full"]:
        """Only a batch defence is simulated, and only to undo it."""
        return "full" if self.undo else "naive"

    @property
    def knowledge(self) -> Mapping[str, How]:
        """Nothing of the client's randomness."""
        return undoing({}) if self.undo else {}

    def problems(self, prospect: Prospect) -> Iterator[Problem]:
        """Refuse batches, local training, labels that cannot be read off, and models that are no chain."""
        simulated_client = self._solved(prospect.simulated_client)
        yield from _update_problems(simulated_client, prospect.examples)
        yield from label_problems(self.labels, prospect)
        yield from chained(
            simulated_client.model, simulated_client.params(), prospect.shape, simulated_client.trained()
        )[1]

    def __call__(
        self,
        observations: Sequence[Observation],
        simulated_client: Client,
        knowledge: Knowledge,
        key: Key,
        progress: Callable[[Progress], None] | None = None,
        plan: Sequence[int] = (),
    ) -> Reconstruction:
        """Solve for every target client's image from the last round's update."""
        began, seen = time.perf_counter(), observations[-1]
        defended, simulated_client = simulated_client, self._solved(simulated_client)
        links, problems = chained(
            simulated_client.model, seen.params, knowledge.space.shape, simulated_client.trained()
        )
        refuse([*_update_problems(simulated_client, seen.examples), *problems])
        targets = find_labels(self.labels, seen, simulated_client, knowledge, key.child(Stream.LABELS))
        assert targets is not None, "labels are given or read off the update"
        sound = torch.stack([value.isfinite().flatten(1).all(1) for value in seen.update.values()]).all(0)
        layers = _Layers(links, seen.params, simulated_client)
        lower, upper = knowledge.space.bounds(next(iter(seen.params.values())))
        grey = (lower + upper) / 2
        grey = grey.expand(len(sound), 1, *knowledge.space.shape)
        tries: list[Tensor] = []
        shares: list[list[float]] = []
        scales: list[int] = []
        for place, good in enumerate(sound.tolist()):
            sent = {name: value[place].double() for name, value in seen.update.items()}
            answers = layers.images(sent, targets[place]) if good else []
            shares += [opened for _, opened in answers[:1]]
            scales += [len(answers)] if good else []
            for number, (image, _) in enumerate(answers):
                if number == len(tries):
                    tries.append((tries[0] if tries else grey).clone())
                tries[number][place, 0] = image.nan_to_num(0.0).view(knowledge.space.shape).to(grey)
            if progress:
                progress(Progress(place + 1, len(sound) - place - 1, place + 1, len(sound), float("nan")))
        inputs, misfit = self._best(tries or [grey], observations, simulated_client, knowledge, key)
        found = in_closed_form(inputs, targets, misfit, sound, began, progress)
        match = self.match(observations, simulated_client, replace(knowledge, targets=targets), key, inputs, {})
        found = replace(found, remarks=_remarks(links, shares, scales), match=match)
        return undone(found, defended, knowledge) if self.undo else found

    def _solved(self, simulated_client: Client) -> Client:
        """Return the client whose equations are solved: without its defences."""
        return simulated_client.undefended_update() if self.undo else simulated_client

    def _best(
        self,
        tries: list[Tensor],
        observations: Sequence[Observation],
        simulated_client: Client,
        knowledge: Knowledge,
        key: Key,
    ) -> tuple[Tensor, Tensor]:
        """Choose each target client's image by what it would send: images [V, 1, ...] and their misfits [V]."""
        best, least = tries[0], torch.full((len(tries[0]),), torch.inf, device=tries[0].device)
        for inputs in tries:
            inside = torch.clamp(inputs, *knowledge.space.bounds(inputs))
            misfit = self.evaluate(observations, simulated_client, knowledge, key, inside, {})
            better = (misfit < least).view(-1, *[1] * (inputs.dim() - 1))
            best, least = torch.where(better, inside, best), torch.minimum(misfit, least)
        return best, least

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
        """Return the squared distance [V] of what inputs would send from what was sent, in units of the latter."""
        given = observations, self._solved(simulated_client), knowledge, key, inputs, noise
        return self._judge().evaluate(*given) / _squares(observations[-1])

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
        found = self._judge().match(observations, self._solved(simulated_client), knowledge, key, inputs, noise)
        return torch.cat([found[:, :1] / _squares(observations[-1]).unsqueeze(1), found[:, 1:]], 1)

    def _judge(self) -> Inversion:
        return Inversion(self.name, objective="l2", labels=self.labels)


def _squares(seen: Observation) -> Tensor:
    """Return the squared length [V] of what was sent."""
    sizes = [value.flatten(1).square().sum(1) for value in seen.update.values()]
    return torch.stack(sizes).sum(0).clamp_min(torch.finfo(sizes[0].dtype).tiny)


def _update_problems(simulated_client: Client, examples: int) -> Iterator[Problem]:
    """Refuse updates that are not the gradient of one image."""
    remedy = "choose another attack, such as ig"
    if examples > 1:
        what = f"the equations are those of one image, and {examples} are mixed in an update"
        yield Problem("client.batch", what, f"give batch 1, or {remedy}")
    if simulated_client.local is not None:
        yield Problem("client.local", "the equations are those of a gradient, and clients send local steps", remedy)


def _remarks(links: Sequence[Link], shares: Sequence[Sequence[float]], scales: Sequence[int]) -> tuple[Remark, ...]:
    """Say how much the equations leave open, layer by layer from the image on, and whether the last has a rival."""
    said: list[Remark] = []
    for link, *opened in zip(links, *(reversed(each) for each in shares), strict=True):
        where = "the image" if link is links[0] else f"what '{link.path}' takes"
        words = f"the equations leave {{}} of the {prod(link.taken)} values of {where} open"
        said.append(Remark(words, tuple(opened), None if link is links[0] else 0))
    return (*said, Remark("{} scales of the last layer's error fit: the best was taken", tuple(scales), 1))


class _Layers:
    """A chain of layers that is solved from the last to the first, in double precision, update after update."""

    def __init__(self, links: Sequence[Link], params: Tensors, simulated_client: Client) -> None:
        self.links, self.simulated_client = links, simulated_client
        self.params = {name: value.double() for name, value in params.items()}
        self.squares: dict[str, Tensor] = {}
        self.matrices = {
            link.path: as_matrix(link, self.params[link.weight]) for link in links if isinstance(link.layer, nn.Conv2d)
        }

    def images(self, sent: Tensors, target: Tensor) -> list[tuple[Tensor, list[float]]]:
        """Solve one update for the image, flat, once for every error that the last layer may have; `target` [1].

        With each image comes how many values of every layer's input are open, from the last layer to the first.
        """
        return [self._descend(sent, error, taken) for error, taken in self._tops(sent, target)]

    def _descend(self, sent: Tensors, error: Tensor, taken: Tensor) -> tuple[Tensor, list[float]]:
        """Go down from the error and the input of the last layer."""
        share = torch.full_like(taken, float(not sent[self.links[-1].weight].any() and not error.any()))
        guess = torch.zeros_like(error)
        opened = [float(share.sum())]
        for above, link in zip(self.links[:0:-1], self.links[-2::-1], strict=True):
            weight = self.params[above.weight]
            error = taken_back(above, weight, error).view(link.given)
            guess = taken_back(above, weight.abs(), guess).view(link.given)
            outputs, share = taken.view(link.given), share.view(link.given).clamp(0, 1)
            if link.bends:  # their slope is known as well as what comes out of them
                guess = guess + (share >= _OPEN) * (error != 0)
            trust = (share < _OPEN) / (1 + share / _DOUBT)
            for bend in reversed(link.bends):
                trusted = outputs * (trust > 0)
                known = bend.known(trusted)
                guess = guess + ~known * (trusted.abs() > _NAUGHT * trusted.abs().max()) * (error != 0)
                outputs = bend.inverse(outputs)
                trust, error = trust * known, error * bend.slope(outputs) * known
            if isinstance(link.layer, nn.Linear) and link.bias in sent:
                error, guess = sent[link.bias], torch.zeros_like(guess)
            taken, share = self._below(link, sent, (error, guess), outputs, trust)
            opened.append(float(share.sum()))
        return taken, opened

    def _tops(self, sent: Tensors, target: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return what the error and the input of the last layer may have been."""
        link = self.links[-1]
        rows = sent[link.weight]
        if link.bias in sent:
            error = sent[link.bias]
            return [(error, _explained(rows, error))]
        u, s, vh = torch.linalg.svd(rows, full_matrices=False)
        errors, taken = u[:, 0], vh[0] * s[0]
        outputs = self.params[link.weight] @ taken
        bias = torch.zeros_like(outputs) if link.bias is None else self.params[link.bias]

        def misfit(scales: Tensor) -> Tensor:
            """Compare k = scale u with the error that the loss has at x = v / scale."""
            flat = scales.flatten().unsqueeze(1)
            live = (outputs / flat + bias).requires_grad_()
            with torch.enable_grad():
                (slope,) = torch.autograd.grad(self.simulated_client.loss(live, target.expand(len(live))).sum(), live)
            return ((slope - flat * errors).norm(dim=1) / flat.abs().squeeze(1)).view_as(scales).nan_to_num(torch.inf)

        return [(scale * errors, taken / scale) for scale in _smallest(misfit, rows)]

    def _below(
        self, link: Link, sent: Tensors, errors: tuple[Tensor, Tensor], outputs: Tensor, trust: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the input of a layer by the error at its outputs, and by its outputs as far as they are trusted.

        Beside the error it says where that is a guess. Beside the input, what share of each value is open.
        """
        rows, (error, guess) = sent[link.weight], errors
        if isinstance(link.layer, nn.Linear):
            sure = error * (guess == 0)
            found = _explained(rows, sure if sure.any() else error)
            return found, torch.full_like(found, float(not sure.any()))
        weight = self.params[link.weight]
        bias = torch.zeros_like(weight[:, 0, 0, 0]) if link.bias is None else self.params[link.bias]
        wanted = ((outputs - bias.view(-1, 1, 1)) * trust.sqrt()).flatten()
        layer, square = self.matrices[link.path], None
        if bool((trust > _WHOLE).all()):  # the layer as it is, of which the square is known
            square = self._square(link)
        else:
            layer = layer * trust.sqrt().view(-1, 1)
        shown, gradients = gradient_rows(link, error), rows.transpose(0, 1).flatten(1)
        # Both kinds of equations with the same relative accuracy.
        heavy, light = _inverse_size(wanted), _inverse_size(rows)
        prior = roughness(link.taken, rows) if link is self.links[0] else None
        square = None if square is None else square * heavy.square()
        layer, wanted, shown, gradients = layer * heavy, wanted * heavy, shown * light, gradients * light
        sure = gradient_rows(link, guess).sum(1) == 0
        if bool(sure.all()):
            return solved(layer, wanted, shown, gradients, prior, square)
        # Equations that are a guess settle nothing, but are better than none.
        weak = torch.where(sure, 1.0, _GUESSED)
        found, _ = solved(layer, wanted, shown * weak.unsqueeze(1), gradients * weak, prior, square)
        return found, solved(layer, wanted, shown[sure], gradients[:, sure], prior, square)[1]

    def _square(self, link: Link) -> Tensor:
        """Multiply a layer's matrix by itself, once for all updates."""
        if link.path not in self.squares:
            matrix = self.matrices[link.path]
            self.squares[link.path] = matrix.T @ matrix
        return self.squares[link.path]


def _inverse_size(value: Tensor) -> Tensor:
    size = value.norm()
    return torch.where(size > 0, 1 / size, 0.0)


def _explained(rows: Tensor, error: Tensor) -> Tensor:
    """Return the x of dW = k x^T, by least squares."""
    return error @ rows / error.square().sum().clamp_min(torch.finfo(error.dtype).tiny)


def _smallest(misfit: Callable[[Tensor], Tensor], like: Tensor) -> list[Tensor]:
    """Find the scales, of either sign, at which a misfit vanishes, or the one where it is smallest."""
    grid = torch.logspace(-9, 5, _SCALES, dtype=like.dtype, device=like.device)
    step = float(grid[1] / grid[0])
    signs = torch.stack([grid, -grid])
    found = torch.nn.functional.pad(misfit(signs), (1, 1), value=torch.inf)
    lowest = (found[:, 1:-1] < found[:, :-2]) & (found[:, 1:-1] <= found[:, 2:])
    order = torch.where(lowest, found[:, 1:-1], torch.inf).flatten().argsort()[:_MOST]
    best = signs.flatten()[order]
    zoom = torch.arange(-32, 33, dtype=like.dtype, device=like.device) / 32
    value = misfit(best)
    for _ in range(_ZOOMS):
        scales = best.unsqueeze(1) * step**zoom
        value, place = misfit(scales).min(1)
        best, step = scales.gather(1, place.unsqueeze(1)).squeeze(1), step ** (1 / 16)
    fits = best[value < _FITS]
    return list(fits) if len(fits) else [best[value.argmin()]]
