"""Unmix a batch: all images of an update, from the gradient of a fully connected first layer.

Passive, and without a search over pixels: the batch's images span the rows of the gradient (`independent_images`), and
independent component analysis finds them there, as in the cocktail-party attack (Kariyappa et al. 2023). The bias's
gradient, the sum of the errors, gives each image's scale and sign. Behind a ReLU, the zeros of the errors make the
images exact and certify them (`activation_zeros`). Rows of a table are the vectors of the span whose categories are
one-hot (`rows_in_span`). It needs neither labels nor public images, and holds for sums of
clients and for local steps: their updates mix the same images. What a defence adds is separated too, and then left out
(`added_inputs`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from gradveil.attacks.closed_form.activation_zeros import ReluLayer, ZeroSearch, scaled
from gradveil.attacks.closed_form.added_inputs import mixed_inputs, read_targets, strangeness
from gradveil.attacks.closed_form.independent_images import (
    Span,
    completed,
    differences,
    independent,
    ranks,
    spanned,
    whitening,
)
from gradveil.attacks.closed_form.likeliest_batch import NoisyBatch
from gradveil.attacks.closed_form.rows_in_span import proven_rows, rows_in_span
from gradveil.attacks.inversion.inversion import Inversion
from gradveil.attacks.knowledge import How, Infer, Knowledge, Optimise
from gradveil.attacks.protocol import Observation, Progress, Prospect, Reconstruction, Remark, in_closed_form
from gradveil.attacks.simulated_updates import Simulated
from gradveil.attacks.undo_batch_defence import prior_of
from gradveil.client import Client
from gradveil.core.errors import Problem, refuse
from gradveil.core.noise import Key
from gradveil.core.settings import Checked
from gradveil.core.space import ExampleWords, Space
from gradveil.core.streams import Stream
from gradveil.core.tree import Tensors, qualified
from gradveil.nn.first_layer_equations import InputEquations, shown
from gradveil.nn.module_paths import at, call_on, caught_inputs, evaluating, last_layer
from gradveil.spaces import TableSpace

_STARTS = 3
"""Random starts of a separation, of which the one with the least outside of the valid values is kept."""
_PROBES = 8
_VALUES = 2**26
"""Largest number of values that are separated at once."""
_FAR, _FAINT = 0.1, 0.02
"""Share of an image outside of the valid values, and contrast, from which its scale does not fit the bias."""


@dataclass(frozen=True)
class Unmix(Checked):
    """Separate a batch's images in the gradient of the first layer."""

    name: str = "unmix"
    exact: Annotated[
        Literal["auto", "never"],
        "Make images exact by the zeros of their errors, where a ReLU follows the first layer; or never.",
    ] = "auto"

    @property
    def simulated_client(self) -> Literal["naive", "full"]:
        """The defended client: it says whether zeros were pruned."""
        return "full"

    @property
    def knowledge(self) -> Mapping[str, How]:
        """Masks are read off zeros."""
        return {"send.*mask.*": Infer()}

    def problems(self, prospect: Prospect) -> Iterator[Problem]:
        """Refuse single images, and models whose first layer is not fully connected or too narrow."""
        client = prospect.simulated_client
        layer, problems = shown(client.model, client.params(), prospect.shape, client.trained())
        yield from (replace(problem, remedy=_FEATURES) for problem in problems)
        if layer is not None:
            mixed = mixed_inputs(client, prospect.examples)
            yield from _layer_problems(layer, client.params(), mixed, prospect.shape)

    def __call__(
        self,
        observations: Sequence[Observation],
        simulated_client: Client,
        knowledge: Knowledge,
        key: Key,
        progress: Callable[[Progress], None] | None = None,
        plan: Sequence[int] = (),
    ) -> Reconstruction:
        """Separate every target client's images in the last round's update."""
        began, seen = time.perf_counter(), observations[-1]
        client = seen.believed(simulated_client)
        layer, problems = shown(client.model, seen.params, knowledge.space.shape, client.trained())
        refuse(problems)
        assert layer is not None
        mixed = mixed_inputs(client, seen.examples)
        refuse(list(_layer_problems(layer, seen.params, mixed, knowledge.space.shape)))
        mixture = _MixedGradients(layer, seen, client, knowledge.space)
        relu = self.exact == "auto" and _zeros_where_negative(client, seen.params, layer, knowledge.space.shape)
        images, certified, count = mixture.separated(relu, key)
        remarks = _remarks(relu, certified, count, (seen.examples, mixed), knowledge.space.words)
        if mixed > seen.examples:
            inputs, targets, match = mixture.without_added(images, count, knowledge.classes, key)
            result = in_closed_form(inputs, targets, match[:, 0], mixture.finite, began, progress)
            return replace(result, remarks=remarks, match=match)
        inputs = mixture.inputs(images)
        targets = _labels(inputs, seen, client, knowledge.classes)
        if client.local is None and not mixture.masked:  # errors of local steps are sums over changing models
            unproven = [place for place in range(len(count)) if certified[place] < count[place]]
            unproven = [place for place in unproven if place not in mixture.exact]
            for place in unproven:
                images[place] = mixture.likeliest(place, images[place], targets[place], knowledge)
            inputs = mixture.inputs(images)
            targets = _labels(inputs, seen, client, knowledge.classes)
        objective = self.evaluate(observations, client, replace(knowledge, targets=targets), key, inputs, {})
        result = in_closed_form(inputs, targets, objective, mixture.finite, began, progress)
        match = self.match(observations, client, replace(knowledge, targets=targets), key, inputs, {})
        return replace(result, remarks=remarks, match=match)

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
        known = _with_places(knowledge)
        distance = self._inversion().evaluate(observations, simulated_client, known, key, inputs, noise)
        return distance / _squares(observations[-1])

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
        known = _with_places(knowledge)
        match = self._inversion().match(observations, simulated_client, known, key, inputs, noise)
        return torch.cat([match[:, :1] / _squares(observations[-1]).unsqueeze(1), match[:, 1:]], 1)

    def _inversion(self) -> Inversion:
        return Inversion(self.name, objective="l2", simulated_client="full", knowledge=self.knowledge)


_FEATURES = (
    "choose a search (portfolio, cdia); a fully connected layer behind convolutions mixes features, not images: "
    "portfolio unmixes those of the last layer and searches for images that have them"
)


def _layer_problems(layer: InputEquations, params: Tensors, mixed: int, shape: tuple[int, ...]) -> Iterator[Problem]:
    """Refuse patches, single images, and batches with more images than the layer has rows."""
    if len(layer.pixels) > 1:
        problem = (
            f"begins with '{layer.path}' on {len(layer.pixels)} patches of an image, not on its {prod(shape)} pixels"
        )
        yield Problem("model", problem, _FEATURES)
        return
    if mixed == 1:
        yield Problem("client.batch", "one image is mixed with none", "choose analytic, or give a batch of 2 or more")
    elif mixed >= (most := min(params[layer.weight].shape)):
        problem = f"{mixed} images are mixed, and the first layer has {most} rows: it takes fewer images than rows"
        yield Problem("client.batch", problem, "lower the batch, or choose a search (ig, cdia)")


def _with_places(knowledge: Knowledge) -> Knowledge:
    """Let the search of proxies start where it did, in judging given images: the attack itself never repeats it."""
    return replace(knowledge, tensors={**knowledge.tensors, "step.*.place": Optimise()})


class _MixedGradients:
    """The first layer's gradients of V target clients, with the pixels in the order of an image."""

    def __init__(self, layer: InputEquations, seen: Observation, client: Client, space: Space) -> None:
        self.seen, self.space, self.client, self.layer = seen, space, client, layer
        self.mixed = mixed_inputs(client, seen.examples)
        self.masked = False
        self.exact: set[int] = set()
        """Clients whose rows of a table were found by their categories."""
        sent = seen.update[layer.weight].flatten(2).double()
        self.gradient = torch.zeros_like(sent).index_copy_(2, layer.pixels[0], sent)
        self.bias = layer.read(seen.update[layer.errors])[:, 0].double()
        self.finite = self.gradient.isfinite().flatten(1).all(1) & self.bias.isfinite().all(1)
        known = self.finite.view(-1, 1, 1)
        self.gradient, self.bias = torch.where(known, self.gradient, 0.0), torch.where(known[..., 0], self.bias, 0.0)
        weight, name = seen.params[layer.weight].flatten(1).double(), qualified(layer.path, "bias")
        self.weight = torch.zeros_like(weight).index_copy_(1, layer.pixels[0], weight)
        self.offset = seen.params[name].double() if name in seen.params else torch.zeros_like(self.weight[:, 0])
        lower, upper = space.bounds(self.gradient)
        self.lower, self.upper = (value.expand(space.shape).flatten() for value in (lower, upper))
        self._complete(layer, client)

    def _complete(self, layer: InputEquations, client: Client) -> None:
        """Fill pruned entries in from a product of low rank, where the client is known to prune."""
        masks = {
            name: value for name, value in client.evidence(self.seen.update).items() if ".mask." in name
        }  # zeros of a client that does not prune are values
        of_weight = next((v for n, v in masks.items() if n.endswith(f".mask.{layer.weight}")), None)
        of_bias = next((v for n, v in masks.items() if n.endswith(f".mask.{layer.errors}")), None)
        if of_weight is not None:
            known = torch.zeros_like(self.gradient).index_copy_(2, layer.pixels[0], of_weight.flatten(2).double())
            self.gradient, self.masked = completed(self.gradient, known > 0, self.mixed), True
        if of_bias is not None:
            self.bias = torch.where(layer.read(of_bias)[:, 0] > 0, self.bias, torch.nan)

    def clamp(self, images: Tensor) -> Tensor:
        """Cut images [..., n] to valid values."""
        return torch.clamp(images.nan_to_num(0.0), self.lower, self.upper)

    def inputs(self, images: Tensor) -> Tensor:
        """Return images [V, B, n] as valid inputs of the model."""
        like = next(iter(self.seen.params.values()))
        return self.clamp(images).unflatten(2, self.space.shape).to(like)

    def likeliest(self, place: int, images: Tensor, targets: Tensor, knowledge: Knowledge) -> Tensor:
        """Return the likeliest images [B, n] of one client behind noise, starting from separated ones."""
        rank = min(self.mixed, *(side - 1 for side in self.gradient.shape[1:]))
        noise = float(spanned(self.gradient[place : place + 1], rank).noise)

        def errors(flat: Tensor) -> Tensor:
            return _errors(self.client, self.seen.params, self.layer, self.inputs(flat.unsqueeze(0))[0], targets)

        prior = prior_of(replace(knowledge, public=None), images)
        batch = NoisyBatch(self.gradient[place], noise, errors, prior, self.lower, self.upper, self.space.shape)
        return batch.likeliest(images)

    def features(self, rows: Tensor) -> Tensor:
        """Return the pixel differences of rows [..., n], in units of the range of valid values."""
        return differences(rows / (self.upper - self.lower), self.space.shape)

    def separated(self, relu: bool, key: Key) -> tuple[Tensor, list[int], list[int]]:
        """Return all mixed images [V, M, n], and of every client the numbers of certified and of separated ones.

        Fewer images than there are mixed are found where errors depend on each other; their mean stands for the others.
        """
        clients = len(self.gradient)
        found = ((self.lower + self.upper) / 2).expand(clients, self.mixed, -1).clone()
        certified, counts = [0] * clients, [0] * clients
        rank = ranks(self.gradient, self.mixed)
        for count in sorted(set(rank.tolist()) - {0}):
            places = (rank == count).nonzero().squeeze(1)
            size = max(1, _VALUES // (_STARTS * count * 3 * self.gradient.shape[2]))
            for part in places.split(size):
                span = spanned(self.gradient[part], count)
                unmixing = self._independent(span, part, key)
                for row, place in enumerate(part.tolist()):
                    one = Span(span.left[row], span.sizes[row], span.right[row], span.noise[row])
                    images, proven = self._images(place, one, unmixing[row], relu, key)
                    found[place] = self.clamp(images).mean(0)
                    found[place, :count] = images
                    certified[place], counts[place] = proven, count
        return found, certified, counts

    def without_added(
        self, images: Tensor, counts: Sequence[int], classes: int, key: Key
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the client's own of the mixed images [V, M, n] as inputs [V, B, ...], with their labels and the match.

        The match is that of all mixed inputs with their read class probabilities: one undefended gradient, to scale.
        """
        like = next(iter(self.seen.params.values()))
        inputs = images.unflatten(2, self.space.shape).to(like)
        answers, errors = _output_errors(inputs, self.seen, self.client)
        targets = torch.softmax(answers, -1) if errors is None else read_targets(answers, errors).to(like)
        strange = [
            strangeness(own, self.lower, self.upper, self.space.shape, None if errors is None else read.double())
            for own, read in zip(images, targets, strict=True)
        ]
        spare = torch.arange(self.mixed) >= torch.tensor(counts).unsqueeze(1)  # the mean image stands for these
        order = torch.where(spare.to(images.device), torch.inf, torch.stack(strange)).argsort(dim=1, stable=True)
        own = order[:, : self.seen.examples]
        plain = replace(self.client.undefended_update(), local=None, members=1)
        match = Simulated(plain, [self.seen]).match(inputs, targets, key)
        kept = images.gather(1, own.unsqueeze(2).expand(-1, -1, images.shape[2]))
        return self.inputs(kept), targets[..., :classes].argmax(2).gather(1, own), match

    def _independent(self, span: Span, places: Tensor, key: Key) -> Tensor:
        """Separate spans from several starts; keep the images with the least outside of the valid values."""
        features = self.features(span.right)
        white = whitening(features)
        keys = [key.child(Stream.FIRST, self.seen.target_clients[place]) for place in places.tolist()]
        best, least = torch.zeros_like(white), torch.full_like(white[:, 0, 0], torch.inf)
        for number in range(_STARTS):
            shape = white.shape[1:]
            draws = [torch.randn(shape, generator=k.child(number).generator(), dtype=torch.float64) for k in keys]
            unmixing = independent(white @ features, torch.stack(draws).to(white)) @ white
            errors = span.left @ torch.linalg.pinv(unmixing)
            images = unmixing @ span.right / scaled(errors, self.bias[places]).unsqueeze(2)
            outside = ((images - self.clamp(images)) / (self.upper - self.lower)).abs().mean((1, 2))
            better = (outside < least) | (number == 0)
            least = torch.where(better, outside, least)
            best = torch.where(better.view(-1, 1, 1), unmixing, best)
        return best

    def _images(self, place: int, span: Span, unmixing: Tensor, relu: bool, key: Key) -> tuple[Tensor, int]:
        """Return the images [k, n] of one client, and the number of certified ones."""
        if isinstance(self.space, TableSpace) and (found := self._rows(place, span, self.space, relu)):
            return found
        clamp = self.clamp if self.mixed == self.seen.examples else torch.nan_to_num  # proxies keep to no values
        layer = ReluLayer(self.weight, self.offset, self.bias[place], clamp, self.features)
        if not relu:
            return self._fitting(layer.separated(span, unmixing).images), 0
        generator = key.child(Stream.REPEAT, self.seen.target_clients[place]).generator()
        result = ZeroSearch(layer, span, unmixing).run(generator)
        return self._fitting(result.images), int(result.certified.sum())

    def _rows(self, place: int, span: Span, space: TableSpace, relu: bool) -> tuple[Tensor, int] | None:
        """Return rows [k, n] with one-hot categories, proven ones first, and the number of these; None if too few."""
        rows = rows_in_span(span.right, space.columns)
        if len(rows) < len(span.right):
            return None
        proven = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
        if relu:
            active = rows @ self.weight.mT + self.offset > 0
            proven = proven_rows(rows, span.right, self.gradient[place], active.mT)
        outside = ((rows - self.clamp(rows)) / (self.upper - self.lower)).abs().amax(1)
        order = torch.where(proven, -1.0, outside).argsort(stable=True)[: len(span.right)]
        self.exact.add(place)
        return rows[order], int(proven.sum())

    def _fitting(self, images: Tensor) -> Tensor:
        """Scale images to the valid values, if the bias's gradient gives scales at which most do not fit."""
        width = self.upper - self.lower
        outside = ((images - self.clamp(images)) / width).abs().mean(1)
        contrast = (images / width).std(1)
        fitting = int(((outside <= _FAR) & (contrast >= _FAINT)).sum())
        if fitting > min(len(images), self.seen.examples) / 2:
            return images
        bound = torch.where(images > 0, self.upper, self.lower).abs()
        bound = torch.where(bound > 0, bound, torch.inf)
        largest = (images.abs() / bound).kthvalue(max(1, round(0.99 * images.shape[1])), 1).values
        return images / largest.clamp_min(torch.finfo(images.dtype).tiny).unsqueeze(1)


def _zeros_where_negative(client: Client, params: Tensors, layer: InputEquations, shape: tuple[int, ...]) -> bool:
    """Return whether the errors at the layer's outputs are zero exactly where the outputs are negative: a ReLU."""
    weight = params[layer.weight]
    probes = torch.linspace(-1, 1, _PROBES * prod(shape)).mul(997.0).sin().view(_PROBES, *shape).to(weight)
    errors, outputs = _backward(client, params, layer, probes, lambda answers: answers.flatten(1).logsumexp(1))
    negative = outputs < 0
    return bool(negative.any()) and bool(((errors == 0) == negative).double().mean() > 0.99)


def _errors(client: Client, params: Tensors, layer: InputEquations, images: Tensor, targets: Tensor) -> Tensor:
    """Return the errors [h, B] that images [B, ...] cause at the first layer's outputs."""
    errors, _ = _backward(client, params, layer, images, lambda answers: client.loss(answers, targets))
    return errors.mT.double()


def _backward(
    client: Client, params: Tensors, layer: InputEquations, images: Tensor, loss: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the gradient of a summed loss at the first layer's outputs, and the outputs: [B, h] each."""
    caught: list[Tensor] = []

    def catch(_module: nn.Module, _inputs: object, output: Tensor) -> None:
        caught.append(output)

    hook = at(client.model, layer.path).register_forward_hook(catch)
    weight = params[layer.weight].detach().clone().requires_grad_()
    try:
        with evaluating(client.model), torch.enable_grad():
            answers = call_on(client.model, {**client.objective.buffers(), **params, layer.weight: weight}, images)
            (errors,) = torch.autograd.grad(loss(answers).sum(), caught[0])
    finally:
        hook.remove()
    return errors.flatten(1), caught[0].detach().flatten(1)


def _labels(inputs: Tensor, seen: Observation, client: Client, classes: int) -> Tensor:
    """Read the labels [V, B] of separated images off the last layer's gradient: the error of the label is negative."""
    answers, errors = _output_errors(inputs, seen, client)
    return answers[..., :classes].argmax(2) if errors is None else errors[..., :classes].argmin(2)


def _output_errors(inputs: Tensor, seen: Observation, client: Client) -> tuple[Tensor, Tensor | None]:
    """Return the model's outputs at separated images [V, B, ...], and their errors in the update: [V, B, K] each.

    The last layer's gradient is E^T A, with A the inputs of the layer at the images and E the errors of its outputs.
    """
    last = last_layer(client.model, inputs[:1, :1].flatten(0, 1))
    sent = seen.update.get(qualified(last, "weight"))
    tensors = {**client.objective.buffers(), **seen.params}
    with torch.no_grad(), evaluating(client.model), caught_inputs(client.model, last) as caught:
        answers = call_on(client.model, tensors, inputs.flatten(0, 1)).unflatten(0, inputs.shape[:2])
    if sent is None or caught[0].ndim != 2:
        return answers, None
    features = nn.functional.pad(caught[0], (0, 1), value=1.0).unflatten(0, inputs.shape[:2]).double()
    bias = seen.update.get(qualified(last, "bias"), torch.zeros_like(sent[:, :, 0]))
    rows = torch.cat([sent, bias.unsqueeze(2)], 2).nan_to_num(0.0, 0.0, 0.0).double()
    return answers, torch.linalg.pinv(features.mT, rtol=1e-6) @ rows.mT


def _remarks(
    relu: bool, certified: Sequence[int], counts: Sequence[int], sizes: tuple[int, int], kind: ExampleWords
) -> tuple[Remark, ...]:
    """Return remarks on certified images, and on images that could not be told apart; of its own, and of all mixed."""
    examples, mixed = sizes
    whose = f"{{}} of {mixed} {kind.plural} of a client"
    if mixed > examples:
        whose = f"{{}} of {mixed} {kind.plural} ({examples} of a client and {mixed - examples} that its defence adds)"
    proof = Remark(f"{whose} are certified by the zeros of their errors", tuple(certified))
    words = f"{whose} have errors of their own; the mean {kind.noun} stands for the others"
    return (*((proof,) if relu else ()), Remark(words, tuple(counts), mixed))


def _squares(seen: Observation) -> Tensor:
    """Return the squared length [V] of the observed updates."""
    sizes = [value.flatten(1).square().sum(1) for value in seen.update.values()]
    return torch.stack(sizes).sum(0).clamp_min(torch.finfo(sizes[0].dtype).tiny)
