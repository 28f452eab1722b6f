"""R-GAP: the input of each layer, solved from the last layer to the first (Zhu and Blaschko 2021).

For one image, the gradient of a layer z = W x + b is dW = k x^T, with k the error at its outputs. At the last layer k
is the bias's gradient. Without a bias, dW determines k and x up to a scale, at which the loss has this error at W x.
From then on each layer is a system of linear equations for its input x:

    dW = k x^T   (its gradient)        W x + b = z   (its output, which the layer above took)

with k = (W_above^T k_above) act'(z) and z = act^-1(x_above). A flat activation gives no equation for z, and values that
a layer's equations leave open give no equations for the layer below. Open values of the image are filled in smoothly.
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
from gradveil.attacks.labels import FoundLabels, find_labels, label_problems
from gradveil.attacks.protocol import Observation, Progress, Prospect, Reconstruction, Remark, in_closed_form
from gradveil.attacks.undo_batch_defence import Undo, undoing, undone
from gradveil.client import Client
from gradveil.core.errors import Problem, refuse
from gradveil.core.noise import Key
from gradveil.core.settings import Checked
from gradveil.core.streams import Stream
from gradveil.core.tree import Tensors
from gradveil.nn.layer_chain import Link, chained

_SCALES = 6144
"""Magnitudes of the last layer's error on the first grid."""
_ZOOMS, _MOST = 6, 4
_FITS = 1e-4
"""Misfit of the loss's error below which a scale fits."""
_DOUBT = 1e-10
"""Open share of a value at which its equation has half of its weight."""
_NAUGHT = 1e-3
"""Outputs in a flat part of the activation count as zero below this share of the largest."""
_WHOLE = 1 - 1e-6
"""Weight above which an equation counts fully."""
_GUESSED = 1e-3
"""Relative weight of equations that depend on guessed values."""
_OPEN = 0.01
"""Open share from which a value is left out."""


@dataclass(frozen=True)
class Recursive(Checked):
    """Solve the layers from the last to the first."""

    name: str = "r-gap"
    labels: FoundLabels = "given"
    undo: Undo = False

    @property
    def simulated_client(self) -> Literal["naive", "full"]:
        """Only a batch defence is simulated, and only to undo it."""
        return "full" if self.undo else "naive"

    @property
    def knowledge(self) -> Mapping[str, How]:
        """Nothing of the client's randomness."""
        return undoing({}) if self.undo else {}

    def problems(self, prospect: Prospect) -> Iterator[Problem]:
        """Refuse batches, local training, labels that cannot be read off, and models that are not a chain of layers."""
        simulated_client = self._solved(prospect.simulated_client)
        yield from update_problems(simulated_client, prospect.examples)
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
        refuse([*update_problems(simulated_client, seen.examples), *problems])
        targets = find_labels(self.labels, seen, simulated_client, knowledge, key.child(Stream.LABELS))
        assert targets is not None, "labels are given or read off the update"
        finite = torch.stack([value.isfinite().flatten(1).all(1) for value in seen.update.values()]).all(0)
        layers = _Layers(links, seen.params, simulated_client)
        lower, upper = knowledge.space.bounds(next(iter(seen.params.values())))
        grey = ((lower + upper) / 2).expand(len(finite), 1, *knowledge.space.shape)
        tries: list[Tensor] = []
        shares: list[list[float]] = []
        scales: list[int] = []
        for place, good in enumerate(finite.tolist()):
            sent = {name: value[place].double() for name, value in seen.update.items()}
            answers = layers.images(sent, targets[place]) if good else []
            shares += [opened for _, opened in answers[:1]]
            scales += [len(answers)] if good else []
            for number, (image, _) in enumerate(answers):
                if number == len(tries):
                    # A target client with fewer answers repeats its first one.
                    tries.append((tries[0] if tries else grey).clone())
                tries[number][place, 0] = image.nan_to_num(0.0).view(knowledge.space.shape).to(grey)
            if progress:
                progress(Progress(place + 1, len(finite) - place - 1, place + 1, len(finite), float("nan")))
        inputs, misfit = self._best(tries or [grey], observations, simulated_client, knowledge, key)
        result = in_closed_form(inputs, targets, misfit, finite, began, progress)
        match = self.match(observations, simulated_client, replace(knowledge, targets=targets), key, inputs, {})
        result = replace(result, remarks=_remarks(links, shares, scales), match=match)
        return undone(result, defended, knowledge) if self.undo else result

    def _solved(self, simulated_client: Client) -> Client:
        """Return the client whose equations are solved: without its defences if they are undone."""
        return simulated_client.undefended_update() if self.undo else simulated_client

    def _best(
        self,
        tries: list[Tensor],
        observations: Sequence[Observation],
        simulated_client: Client,
        knowledge: Knowledge,
        key: Key,
    ) -> tuple[Tensor, Tensor]:
        """Choose each target client's image by its simulated update: images [V, 1, ...] and their misfits [V]."""
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
        """Return the squared distance [V] of the inputs' updates from the observed ones, relative to the latter."""
        client = self._solved(simulated_client)
        distance = self._inversion().evaluate(observations, client, knowledge, key, inputs, noise)
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
        match = self._inversion().match(observations, self._solved(simulated_client), knowledge, key, inputs, noise)
        return torch.cat([match[:, :1] / squared_lengths(observations[-1]).unsqueeze(1), match[:, 1:]], 1)

    def _inversion(self) -> Inversion:
        return Inversion(self.name, objective="l2", labels=self.labels)


def squared_lengths(seen: Observation) -> Tensor:
    """Return the squared length [V] of the observed updates."""
    sizes = [value.flatten(1).square().sum(1) for value in seen.update.values()]
    return torch.stack(sizes).sum(0).clamp_min(torch.finfo(sizes[0].dtype).tiny)


def update_problems(simulated_client: Client, examples: int) -> Iterator[Problem]:
    """Refuse updates that are not the gradient of one image."""
    remedy = "choose another attack, such as ig"
    if examples > 1:
        problem = f"the equations hold for one image, and an update mixes {examples}"
        yield Problem("client.batch", problem, f"give batch 1, or {remedy}")
    if simulated_client.local is not None:
        yield Problem("client.local", "the equations hold for a gradient, and clients send local steps", remedy)


def _remarks(links: Sequence[Link], shares: Sequence[Sequence[float]], scales: Sequence[int]) -> tuple[Remark, ...]:
    """Return remarks on open values, layer by layer from the image on, and on the number of solutions."""
    remarks: list[Remark] = []
    for link, *opened in zip(links, *(reversed(of_client) for of_client in shares), strict=True):
        where = "the image" if link is links[0] else f"the input of '{link.path}'"
        words = f"the equations leave {{}} of the {prod(link.taken)} values of {where} open"
        remarks.append(Remark(words, tuple(opened), None if link is links[0] else 0))
    return (*remarks, Remark("{} scales of the last layer's error fit: the best was chosen", tuple(scales), 1))


class _Layers:
    """A chain of layers that is solved from the last to the first, in double precision."""

    def __init__(self, links: Sequence[Link], params: Tensors, simulated_client: Client) -> None:
        self.links, self.simulated_client = links, simulated_client
        self.params = {name: value.double() for name, value in params.items()}
        self.squares: dict[str, Tensor] = {}
        self.matrices = {
            link.path: as_matrix(link, self.params[link.weight]) for link in links if isinstance(link.layer, nn.Conv2d)
        }

    def images(self, sent: Tensors, target: Tensor) -> list[tuple[Tensor, list[float]]]:
        """Return the flat images that solve one update, one for each possible error of the last layer; `target` [1].

        With each image comes the number of open values of every layer's input, from the last layer to the first.
        """
        return [self._descend(sent, error, taken) for error, taken in self._tops(sent, target)]

    def _descend(self, sent: Tensors, error: Tensor, taken: Tensor) -> tuple[Tensor, list[float]]:
        """Solve all layers below the last one, given its error and input."""
        # A last layer that sent zeros only leaves its input open.
        share = torch.full_like(taken, float(not sent[self.links[-1].weight].any() and not error.any()))
        guess = torch.zeros_like(error)
        opened = [float(share.sum())]
        # Every layer but the last with the one above it, from the top down.
        for above, link in zip(self.links[:0:-1], self.links[-2::-1], strict=True):
            weight = self.params[above.weight]
            error = taken_back(above, weight, error).view(link.given)
            # A mask, above zero for errors that depend on guesses: absolute weights, so that nothing cancels.
            guess = taken_back(above, weight.abs(), guess).view(link.given)
            outputs, share = taken.view(link.given), share.view(link.given).clamp(0, 1)
            if link.bends:  # their slopes are known as far as their outputs
                guess = guess + (share >= _OPEN) * (error != 0)
            trust = (share < _OPEN) / (1 + share / _DOUBT)
            for bend in reversed(link.bends):
                trusted = outputs * (trust > 0)
                # A flat output of zero has the slope zero, which is right for a ReLU; at another flat output the slope
                # is a guess.
                known = bend.known(trusted)
                guess = guess + ~known * (trusted.abs() > _NAUGHT * trusted.abs().max()) * (error != 0)
                outputs = bend.inverse(outputs)
                trust, error = trust * known, error * bend.slope(outputs) * known
            # The bias's gradient is the error itself.
            if isinstance(link.layer, nn.Linear) and link.bias in sent:
                error, guess = sent[link.bias], torch.zeros_like(guess)
            taken, share = self._below(link, sent, (error, guess), outputs, trust)
            opened.append(float(share.sum()))
        return taken, opened

    def _tops(self, sent: Tensors, target: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return the possible errors and inputs of the last layer."""
        link = self.links[-1]
        rows = sent[link.weight]
        if link.bias in sent:
            error = sent[link.bias]
            return [(error, _explained(rows, error))]
        # dW = k x^T has one singular pair: k = scale u and x = s v / scale, with the scale open.
        u, s, vh = torch.linalg.svd(rows, full_matrices=False)
        errors, taken = u[:, 0], vh[0] * s[0]
        outputs = self.params[link.weight] @ taken
        bias = torch.zeros_like(outputs) if link.bias is None else self.params[link.bias]

        def misfit(scales: Tensor) -> Tensor:
            """Compare k = scale u with the error of the loss at x = v / scale."""
            flat = scales.flatten().unsqueeze(1)
            live = (outputs / flat + bias).requires_grad_()
            with torch.enable_grad():
                (slope,) = torch.autograd.grad(self.simulated_client.loss(live, target.expand(len(live))).sum(), live)
            return ((slope - flat * errors).norm(dim=1) / flat.abs().squeeze(1)).view_as(scales).nan_to_num(torch.inf)

        return [(scale * errors, taken / scale) for scale in _smallest(misfit, rows)]

    def _below(
        self, link: Link, sent: Tensors, errors: tuple[Tensor, Tensor], outputs: Tensor, trust: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Solve a layer for its input, given the error at its outputs, its outputs and their trust.

        `errors` are the error and a mask of guesses. Returns the input and the open share of each of its values.
        """
        rows, (error, guess) = sent[link.weight], errors
        if isinstance(link.layer, nn.Linear):
            sure = error * (guess == 0)
            x = _explained(rows, sure if sure.any() else error)
            return x, torch.full_like(x, float(not sure.any()))
        weight = self.params[link.weight]
        bias = torch.zeros_like(weight[:, 0, 0, 0]) if link.bias is None else self.params[link.bias]
        # Least squares square the rows: a root makes the trust the weight of an equation.
        wanted = ((outputs - bias.view(-1, 1, 1)) * trust.sqrt()).flatten()
        layer, square = self.matrices[link.path], None
        if bool((trust > _WHOLE).all()):  # the unweighted matrix, whose square is computed once for all updates
            if link.path not in self.squares:
                self.squares[link.path] = layer.T @ layer
            square = self.squares[link.path]
        else:
            layer = layer * trust.sqrt().view(-1, 1)
        # dW [O, C, a, b] as [C, O a b]: every input channel has the same equations.
        shown, gradients = gradient_rows(link, error), rows.transpose(0, 1).flatten(1)
        # Give both kinds of equations the same relative accuracy.
        heavy, light = _inverse_size(wanted), _inverse_size(rows)
        prior = roughness(link.taken, rows) if link is self.links[0] else None
        square = None if square is None else square * heavy.square()
        layer, wanted, shown, gradients = layer * heavy, wanted * heavy, shown * light, gradients * light
        # Guesses are not negative: a sum of zero means that no output position of this entry has one.
        sure = gradient_rows(link, guess).sum(1) == 0
        if bool(sure.all()):
            return solved(layer, wanted, shown, gradients, prior, square)
        # Guessed equations determine nothing, but improve the solution of open values.
        weak = torch.where(sure, 1.0, _GUESSED)
        x, _ = solved(layer, wanted, shown * weak.unsqueeze(1), gradients * weak, prior, square)
        return x, solved(layer, wanted, shown[sure], gradients[:, sure], prior, square)[1]


def _inverse_size(value: Tensor) -> Tensor:
    size = value.norm()
    return torch.where(size > 0, 1 / size, 0.0)


def _explained(rows: Tensor, error: Tensor) -> Tensor:
    """Solve dW = k x^T for x by least squares."""
    return error @ rows / error.square().sum().clamp_min(torch.finfo(error.dtype).tiny)


def _smallest(misfit: Callable[[Tensor], Tensor], like: Tensor) -> list[Tensor]:
    """Find the scales, of either sign, at which a misfit vanishes, or else the scale with the smallest misfit."""
    grid = torch.logspace(-9, 5, _SCALES, dtype=like.dtype, device=like.device)
    step = float(grid[1] / grid[0])
    signs = torch.stack([grid, -grid])
    # Infinity at both ends, so that the ends of the grid can be minima, too.
    values = torch.nn.functional.pad(misfit(signs), (1, 1), value=torch.inf)
    lowest = (values[:, 1:-1] < values[:, :-2]) & (values[:, 1:-1] <= values[:, 2:])
    order = torch.where(lowest, values[:, 1:-1], torch.inf).flatten().argsort()[:_MOST]
    best = signs.flatten()[order]
    zoom = torch.arange(-32, 33, dtype=like.dtype, device=like.device) / 32
    value = misfit(best)
    for _ in range(_ZOOMS):
        scales = best.unsqueeze(1) * step**zoom
        value, place = misfit(scales).min(1)
        # The next grid reaches two points of this one to either side, and holds the minimum between them.
        best, step = scales.gather(1, place.unsqueeze(1)).squeeze(1), step ** (1 / 16)
    fits = best[value < _FITS]
    return list(fits) if len(fits) else [best[value.argmin()]]
