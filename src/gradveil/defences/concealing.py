"""DCS: conceal each example behind a proxy whose gradient is like its own and whose image is not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.func import grad

from gradveil.core.errors import fail
from gradveil.core.noise import Noise, NoiseSpec, Normal, Uniform
from gradveil.core.settings import Checked, Count, Range, Strength
from gradveil.core.tree import Tensors, norm, plain, root, tmap
from gradveil.core.types import Batch, Context, Domain, Searches, Stage, Transform
from gradveil.defences.batch_defences import probabilities
from gradveil.defences.entry import DefenceEntry

_Objective = Callable[[Tensor], tuple[Tensor, Tensor]]
"""(proxies) -> what is lowered, and the mean distance from the examples."""
_MARGIN, _ADDED = 0.5, 1e-3
"""Least multiple of the gradient that is added to an update that points away from it; what raises its square."""
_MOMENTS, _TINY = (0.9, 0.999), 1e-8
"""Adam's constants."""
_DROPS = (3 / 8, 5 / 8, 7 / 8)
"""Parts of the iterations after which the step size falls to a tenth."""


class Proxies(NamedTuple):
    """A proxy for each example of a batch."""

    images: Tensor
    """[B, C, H, W]"""
    labels: Tensor
    """[B, K] class probabilities."""


class Concealed(Transform):
    """Base of updates that add the gradients of proxies: (g + g(x', s y' + (1 - s) y)) / 3, y' the labels of x'.

    The divisor is that of the authors' program: 2 where s is 0 or 1. An update with g . g_sent < 0 gets v g added,
    v = max(1/2, -g . g_sent / (g . g + 0.001)): the program's solution of a quadratic program. Under Poisson sampling,
    labels of examples that were not drawn are zeros, which have a cross-entropy of zero.
    """

    stage: ClassVar[Stage] = Stage.STANDIN
    added_inputs: ClassVar[int] = 1
    share: float
    project: bool

    def with_proxies(self, update: Tensors, proxies: Proxies, context: Context) -> Tensors:
        """Return the update, given the proxies and their own labels."""
        assert context.gradient is not None, "checked when proxies were made"
        own = probabilities(context.batch, _domain(context))
        targets = self.share * proxies.labels + (1 - self.share) * own
        added = context.gradient(Batch(proxies.images, targets * _weights(context).unsqueeze(-1)))
        of_sum, divisor = len(own) / context.divisor, 3 if 0 < self.share < 1 else 2
        sent = {name: (value + of_sum * added[name].to(value.dtype)) / divisor for name, value in update.items()}
        if not self.project:
            return sent
        along, square = _dot(sent, update), _dot(update, update)
        more = torch.where(along < 0, (-along / (square + _ADDED)).clamp_min(_MARGIN), 0.0)
        return {name: value + more * update[name] for name, value in sent.items()}


@dataclass(frozen=True)
class Dcs(Checked, Concealed, Searches):
    """Add the gradients of proxies to the batch's gradient g (Wu et al. 2024, DCS^2).

    A proxy x' starts at a public image (mixed with its example x, s to 1 - s) with that image's label y', and Adam
    lowers 1 - cos(g, g(x', y')) + exp(-a |x' - x|) + b |f(x') - f(x)| / |f(x)|, with f the model's outputs and norms
    averaged over the batch; the step size falls to a tenth after 3/8, 5/8 and 7/8 of the iterations. It stops early
    where the mean |x' - x| exceeds `limit`. What is sent is said at `Concealed`. Norms are in normalised units. Every
    example counts as sensitive, with one proxy each; the program can protect the last ones of a batch alone.

    The public images that proxies start from are drawn by `place`. The derivative takes the proxies as constants. The
    search of the proxies is too long to be repeated in each iteration of an attack: attackers search the proxies
    themselves (`relaxed`), together with the examples.
    """

    iterations: Annotated[Count, "Steps of the search for proxies, at most."] = 500
    lr: Annotated[Strength, "Step size of that search."] = 0.1
    distance: Annotated[Strength, "Rate a at which distance from the example pays off."] = 0.01
    outputs: Annotated[Strength, "Weight b of the difference to the model's outputs for the example."] = 0.01
    limit: Annotated[Strength, "Mean distance from the examples beyond which the search stops."] = 150.0
    share: Annotated[float, Range(0, 1), "Share of a proxy's label that is its own; the rest is its example's."] = 0.7
    mix: Annotated[bool, "Start proxies from public images mixed with the examples, or from the images alone."] = True
    project: Annotated[bool, "Turn an update that points away from the gradient back towards it."] = True
    label: ClassVar[str] = "dcs"
    needs_public: ClassVar[bool] = True
    needs: ClassVar[str] = "numbers"

    def directions(self, batch: Batch) -> NoiseSpec:
        """Declare a uniform number an example: the place of its public image."""
        dtype = batch.inputs.dtype
        return NoiseSpec({"place": Noise((len(batch.inputs),), Uniform(), dtype=dtype, lower=0.0, upper=1.0)})

    def relaxed(self, domain: Domain) -> Transform:
        """Return the transform with the proxies as named tensors."""
        return WithProxies(self.share, self.project, domain.classes)

    def apply(
        self, update: Tensors, state: Tensors, noise: Mapping[str, Tensor], context: Context
    ) -> tuple[Tensors, Tensors]:
        """Search the proxies, and add their gradients."""
        return self.with_proxies(update, self.proxies(update, noise["place"], context), context), state

    def proxies(self, update: Tensors, places: Tensor, context: Context) -> Proxies:
        """Search a proxy for each example."""
        if context.gradient is None or context.predict is None:
            problem = "needs gradients and outputs for a batch, and its context has none"
            raise fail("dcs", problem, "use it where the mean over the batch is defended, by a Client")
        gradient, predict = context.gradient, context.predict
        images, wanted, weights = context.batch.inputs.detach(), tmap(torch.detach, update), _weights(context)
        outputs, length, shares = predict(images).detach(), norm(wanted), weights / weights.sum().clamp_min(1)
        domain = _domain(context)
        assert domain.public is not None, "a client without public images is refused"
        index = (places.detach() * len(domain.public)).long().clamp(max=len(domain.public) - 1)
        own = index % domain.classes if domain.labels is None else domain.labels.to(index.device)[index]
        labels = (own.unsqueeze(-1) == torch.arange(domain.classes, device=own.device)).to(images.dtype)

        def objective(found: Tensor) -> tuple[Tensor, Tensor]:
            shown = gradient(Batch(found, labels * weights.unsqueeze(-1)))
            angle = 1 - _dot(shown, wanted) / (norm(shown) * length + torch.finfo(found.dtype).tiny)
            apart = (shares * _lengths(found - images)).sum()
            changed = (shares * _lengths(predict(found) - outputs) / _lengths(outputs).clamp_min(_TINY)).sum()
            return angle + torch.exp(-self.distance * apart) + self.outputs * changed, apart.detach()

        start = domain.public.to(images)[index]
        start = self.share * start + (1 - self.share) * images if self.mix else start
        return Proxies(self._searched(objective, start), labels)

    def _searched(self, objective: _Objective, found: Tensor) -> Tensor:
        """Descend by Adam, until the distance that the objective returns with its value exceeds the limit."""
        first, second = torch.zeros_like(found), torch.zeros_like(found)
        active = torch.ones_like(found.flatten()[0])
        drops = [int(part * self.iterations) for part in _DROPS]
        for step in range(1, self.iterations + 1):
            slope, apart = grad(objective, has_aux=True)(found)
            first = _MOMENTS[0] * first + (1 - _MOMENTS[0]) * slope
            second = _MOMENTS[1] * second + (1 - _MOMENTS[1]) * slope.square()
            scale = self.lr * 0.1 ** sum(step > drop for drop in drops) / (1 - _MOMENTS[0] ** step)
            moved = found - scale * first / ((second / (1 - _MOMENTS[1] ** step)).sqrt() + _TINY)
            found = torch.where(active > 0, moved, found).detach()
            active = active * (apart <= self.limit)
            if plain(active) and not bool(active):
                break
        return found


@dataclass(frozen=True)
class WithProxies(Concealed):
    """What `Dcs` sends, with the proxies and the logits of their labels as named tensors in place of its search."""

    share: float
    project: bool
    classes: int

    def directions(self, batch: Batch) -> NoiseSpec:
        """Declare an image and the logits of a label an example."""
        inputs = batch.inputs
        image = Noise(tuple(inputs.shape), Normal(), neutral=0.0, dtype=inputs.dtype)
        label = Noise((len(inputs), self.classes), Normal(), neutral=0.0, dtype=inputs.dtype)
        return NoiseSpec({"image": image, "label": label}).under("proxy")

    def apply(
        self, update: Tensors, state: Tensors, noise: Mapping[str, Tensor], context: Context
    ) -> tuple[Tensors, Tensors]:
        """Add the gradients of the given proxies."""
        proxies = Proxies(noise["proxy.image"], torch.softmax(noise["proxy.label"], -1))
        return self.with_proxies(update, proxies, context), state


def _domain(context: Context) -> Domain:
    if context.public is None:
        what = "needs public images and the number of classes"
        raise fail("dcs", what, "give Client(domain=Domain(..., public=images))")
    return context.public.domain


def _weights(context: Context) -> Tensor:
    """Return 1 [B] for each example that counts."""
    return torch.ones_like(context.batch.inputs.flatten(1)[:, 0]) if context.included is None else context.included


def _dot(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> Tensor:
    return torch.stack([(value * second[name]).sum() for name, value in first.items()]).sum()


def _lengths(rows: Tensor) -> Tensor:
    return root(rows.flatten(1).square().sum(1))


CONCEALING = (
    DefenceEntry(
        name="dcs",
        factory=Dcs,
        stage="dcs",
        description="DCS^2: add the gradient of proxy images that act on the model like the client's own",
        changes=("step",),
        cost="three gradients an iteration of the search for proxies; all bytes",
        traits=("adds proxies",),
        citation="Wu et al. 2024, Concealing Sensitive Samples against Gradient Leakage in Federated Learning (AAAI)",
    ),
)
