"""Label restoration: the classes of a batch, and their counts, from the last layer of an update.

The row sums of one gradient are linear in the counts. For local training, counts are simulated and corrected.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from torch import Tensor

from gradveil.attacks.knowledge import Knowledge
from gradveil.attacks.protocol import Observation, Prospect
from gradveil.client import Client, is_cross_entropy
from gradveil.core.errors import Problem, fail
from gradveil.core.noise import Key
from gradveil.core.streams import Stream
from gradveil.core.tree import Tensors, qualified
from gradveil.core.types import Batch
from gradveil.nn.module_paths import last_layer, logits_bias

_GROUPS, _PROBES, _IMAGES = 8, 8, 800
"""Simulated updates per class, images per update, and the largest number of images of one update of all classes."""
_ROUNDS, _TWINS = 4, 4
"""Corrections of the counts of a client that trained locally, and the sets of images for each simulation."""
_SPREAD = 0.1
"""Error of the rank-one completion of a pruned layer, as a share of its largest sum."""
_UNBALANCED = 0.01
"""Largest sum of a bias gradient over the classes, as a share of its absolute values, that counts as zero."""
_CLIPPED = 10.0
"""An update counts as clipped if scaling lowers the misfit by this factor and by this amount."""


def row_sums(update: Mapping[str, Tensor], last: str) -> Tensor:
    """Sum the last layer's gradient for each class: the bias gradient if it was sent, else the weight's row sums."""
    bias = update.get(qualified(last, "bias"))
    if bias is not None:
        return bias
    weight = update.get(qualified(last, "weight"))
    if weight is None:
        remedy = "grant the labels, or optimise them jointly (labels=joint)"
        raise fail("attack.labels", f"the last layer '{last}' was not sent", remedy)
    return weight.flatten(2).sum(-1)


def class_signs(client: Client, update: Mapping[str, Tensor], example: Tensor) -> tuple[str, Tensor] | None:
    """Return the name of the logits' bias, and the signs [V, K] of its gradient, zero where noise may have made them.

    Of cross-entropy a class that no example has is above zero, and the classes add up to zero. Where they don't, as
    behind pruning, where the loss is another one, weights decay, or no linear layer with a bias gives the logits, the
    signs say nothing: None.
    """
    decays = client.local is not None and client.local.weight_decay
    last = "" if decays or not is_cross_entropy(client.loss) else logits_bias(client.model, example)
    if last not in update:
        return None
    layer = _layer(update, last.removesuffix("bias").removesuffix("."))
    sums = layer[..., -1]
    if bool((sums.sum(1).abs() > _UNBALANCED * sums.abs().sum(1)).any()):
        return None
    # Of K entries of noise one in a thousand times one is beyond so many deviations.
    beyond = (2 * torch.tensor(1000.0 * sums.shape[1]).log()).sqrt() * _noise(layer)
    return last, torch.where(sums.abs() > beyond.unsqueeze(1), sums.sign(), 0.0)


def sign_is_turned(signs: Tensor, examples: int) -> bool:
    """Say if `class_signs` of one client [K] can only be those of new minus old parameters, or of a negative gradient.

    More classes are below zero than the client has examples, and no more are above.
    """
    return int((signs > 0).sum()) <= examples < int((signs < 0).sum())


def restore_labels(
    update: Mapping[str, Tensor],
    last: str,
    examples: int,
    simulated_client: Client,
    params: Tensors,
    knowledge: Knowledge,
    key: Key,
) -> Tensor:
    """Restore the labels of a batch. Returns [V, B], sorted.

    A batch's row sums are the mean of its examples' row sums. The attacker runs the simulated client, without its
    defences, on images of each class to estimate their mean R[:, c] and their variance. It uses public images if there
    are any, else random images, whose outputs resemble the target clients' only in an untrained network. The counts n
    minimise

        sum_c (o_c - f (R n / B)_c)^2 / (2 variance_c) + sum_c log n_c!

    where the last term is minus the log prior of uniform labels. It spreads labels that the sums do not determine over
    the classes. The factor f is 1. Without a bias it is free, since the size of the features is unknown. It is at most
    1 if that explains the sums ten times as well, since the client clipped. Counts that signs prove come first. Sums
    that pruning set to zero are completed from the weight's other entries.
    """
    observed = row_sums(update, last).double()
    if simulated_client.local is None:
        counts = _of_gradient(update, last, examples, simulated_client, params, knowledge, key.child(Stream.LABELS))
    else:
        counts = _of_training(observed, last, examples, simulated_client, params, knowledge, key.child(Stream.LABELS))
    return _labels(counts)


@dataclass(frozen=True)
class Fit:
    """The fit of counts to row sums: weighted squares of o - f A n."""

    observed: Tensor
    """o [V, K]"""
    response: Tensor
    """A [K, K]: column c is the contribution of one example of class c."""
    weight: Tensor
    """[V, K] one over the variance, or zero if a sum is unknown."""

    def fill(self, counts: Tensor, examples: int, largest: float | None = None) -> tuple[Tensor, Tensor]:
        """Add labels one by one, each at the least cost, up to `examples`. Returns the counts and the misfit [V].

        `largest` is the bound of a free factor f. Without it, f = 1.
        """
        o, a, w = self.observed, self.response, self.weight
        counts, target_clients = counts.clone(), torch.arange(len(counts), device=counts.device)
        energy, cross, square = (w * o * o).sum(1, keepdim=True), (w * o) @ a, w @ a.square()

        def misfit(product: Tensor, size: Tensor) -> Tensor:
            f = torch.ones_like(size) if largest is None else (product / size.clamp_min(1e-300)).clamp(0, largest)
            return (energy - 2 * f * product + f * f * size) / 2

        for _ in range(examples + 1):
            explained = counts @ a.T
            product = (w * o * explained).sum(1, keepdim=True)
            size = (w * explained * explained).sum(1, keepdim=True)
            missing = counts.sum(1) < examples
            if not bool(missing.any()):
                break
            # For every class c at once: one more example of c adds column c of A to A n, in both products.
            one_more = misfit(product + cross, size + 2 * (w * explained) @ a + square)
            # log (n_c + 1)! - log n_c! = log (n_c + 1).
            chosen = (one_more + torch.log1p(counts)).argmin(1)
            counts[target_clients, chosen] += missing.to(counts.dtype)
        return counts, misfit(product, size).squeeze(1)


def _of_gradient(
    update: Mapping[str, Tensor],
    last: str,
    examples: int,
    simulated_client: Client,
    params: Tensors,
    knowledge: Knowledge,
    key: Key,
) -> Tensor:
    """Count the labels [V, K] of one gradient."""
    response, variance, signs = _responses(last, simulated_client, params, knowledge, key)
    biased = qualified(last, "bias") in update
    layer = _layer(update, last)
    sums, known, pruned = _complete(layer, biased)
    noise = torch.where(pruned, 0.0, _noise(layer))  # pruning breaks the sums
    # Without a bias, a sum is over the D entries of a row.
    error = noise * (1 if biased else layer.shape[2] ** 0.5) + pruned * _SPREAD * sums.abs().amax(1)
    baseline = variance.clamp_min(1e-3 * float(variance.mean())) / examples + 1e-10
    fit = Fit(sums, response / examples, known / (baseline + error.square().unsqueeze(1)))
    least = _proved(layer, examples, noise, signs, biased)
    if not biased:
        return fit.fill(least, examples, largest=torch.inf)[0]
    (unscaled, misfit), (scaled, smaller) = fit.fill(least, examples), fit.fill(least, examples, largest=1.0)
    clipped = (smaller * _CLIPPED < misfit) & (smaller + _CLIPPED < misfit)
    return torch.where(clipped.unsqueeze(1), scaled, unscaled)


def _layer(update: Mapping[str, Tensor], last: str) -> Tensor:
    """Concatenate the sent parameters of the last layer: [V, K, D], the bias last."""
    stem = f"{last}." if last else ""
    parts = (update.get(f"{stem}weight"), update.get(f"{stem}bias"))
    wide = [part.flatten(2) if part.ndim > 2 else part.unsqueeze(2) for part in parts if part is not None]
    return torch.cat(wide, 2).double()


def _noise(layer: Tensor) -> Tensor:
    """Return the deviation [V] of an entry's noise.

    The errors p - y of an example add up to 0 over the classes: column sums are the sum of K entries' noise.
    """
    return (layer.sum(1).square().mean(1) / layer.shape[1]).sqrt()


def _complete(layer: Tensor, biased: bool, steps: int = 10) -> tuple[Tensor, Tensor, Tensor]:
    """Return the row sums [V, K], masks of the known ones [V, K], and of the target clients that pruned [V].

    A zero in a column with other entries was pruned. An example's gradient of the layer is (p - y) h', so that of the
    batch is close to a product of rank one, a_c mu_j. Alternating least squares fit it to the sent entries, and a is
    brought to the scale of the sent sums.
    """
    sums = layer[..., -1] if biased else layer.sum(-1)
    sent = (layer != 0).to(layer.dtype)
    partial = (layer == 0) & (layer != 0).any(1, keepdim=True)
    pruned = (sums == 0).any(1) if biased else partial.flatten(1).any(1)
    known = sent.amax(-1)
    if not bool(pruned.any()):
        return sums, torch.ones_like(known), pruned
    a = torch.copysign(layer.square().sum(-1).sqrt(), layer.sum(-1))
    for _ in range(steps):
        rows = sent * a.unsqueeze(2)
        mu = (rows * layer).sum(1) / rows.square().sum(1).clamp_min(1e-300)
        columns = sent * mu.unsqueeze(1)
        a = (columns * layer).sum(2) / columns.square().sum(2).clamp_min(1e-300)
    # a and mu are known up to a factor: the sums that were sent give it.
    of_sent = a * (sums != 0)
    scale = (of_sent * sums).sum(1) / of_sent.square().sum(1).clamp_min(1e-300)
    chosen = pruned.unsqueeze(1)
    return torch.where(chosen, a * scale.unsqueeze(1), sums), torch.where(chosen, known, 1.0), pruned


def _proved(layer: Tensor, examples: int, noise: Tensor, signs: Tensor, biased: bool) -> Tensor:
    """Count the labels [V, K] that signs prove, if probes showed that a label lowers only the row of its class.

    Bias: mean(p_c) = b_c + n_c / B is not negative. Weight: if no feature is negative, a negative entry in a class's
    row proves one label. Proofs of more than B labels come from noise and do not count.
    """
    weight = layer[..., :-1] if biased else layer
    counts = torch.zeros_like(layer[..., 0])
    proofs: list[Tensor] = []
    if biased and bool(signs[-1]):
        # n_c = B (mean(p_c) - b_c) >= -B b_c, less three deviations of noise, and rounding.
        proofs.append(torch.ceil(-examples * (layer[..., -1] + 3 * noise.unsqueeze(1)) - 1e-4).clamp_min(0))
    if weight.shape[2] and bool(signs[: weight.shape[2]].all()):
        present = weight.amin(-1) < -5 * noise.unsqueeze(1)
        proofs.append(torch.maximum(present.to(layer.dtype), proofs[0]) if proofs else present.to(layer.dtype))
    for proof in proofs:
        counts = torch.where(proof.sum(1, keepdim=True) <= examples, proof, counts)
    return counts


def _responses(
    last: str, simulated_client: Client, params: Tensors, knowledge: Knowledge, key: Key
) -> tuple[Tensor, Tensor, Tensor]:
    """Estimate the contribution of one example of each class from gradients of other images.

    Returns the mean row sums [K, K] (one column per class), one example's variance [K], and for each column of the
    layer [D] whether every update lowered only the row of its class.
    """
    plain = simulated_client.undefended_update()
    plain = replace(
        plain, members=1, trainable=tuple(name for name in plain.trained() if name.rpartition(".")[0] == last)
    )
    probes = max(1, min(_PROBES, _IMAGES // knowledge.classes))
    columns: list[Tensor] = []
    variances: list[Tensor] = []
    signs: list[Tensor] = []
    for label in range(knowledge.classes):
        labels = torch.full((_GROUPS, probes), label)
        sent = _simulate(plain, params, labels, knowledge, key)
        sums, layer = row_sums(sent, last).double(), _layer(sent, last)
        columns.append(sums.mean(0))
        # The sums are means over the probes: the variance of one example is that many times larger.
        variances.append(probes * sums.var(0))
        of_class = torch.arange(knowledge.classes, device=layer.device) == label
        lowered = torch.where(of_class.unsqueeze(1), layer <= 0, layer >= 0)
        signs.append(lowered.flatten(0, 1).all(0))
    return torch.stack(columns, 1), torch.stack(variances).mean(0), torch.stack(signs).all(0)


def _of_training(
    observed: Tensor,
    last: str,
    examples: int,
    simulated_client: Client,
    params: Tensors,
    knowledge: Knowledge,
    key: Key,
) -> Tensor:
    """Count the labels [V, K] of clients that trained locally.

    Their updates are not linear in the counts n. The attacker trains on other images with counts n' and corrects these
    by the difference to the observed sums: o = simulated(n') - gain (n - n'). The gain is by how much a label lowers
    its class's sum, and is estimated from random labels. The result is the counts with the closest simulation.
    """
    plain, classes = simulated_client.undefended_update(), knowledge.classes
    target_clients = len(observed)

    def simulated(labels: Tensor, *address: str | int) -> Tensor:
        keys = key.child(*address)
        order = torch.rand(labels.shape, generator=keys.child(Stream.ORDER).generator()).argsort(1)
        parts = enumerate(labels.cpu().gather(1, order).split(_TWINS))
        sums = [row_sums(_simulate(plain, params, part, knowledge, keys.child(i)), last) for i, part in parts]
        return torch.cat(sums).double()

    labels = torch.randint(classes, (4 * _TWINS, examples), generator=key.child(Stream.FIRST).generator())
    counts = torch.nn.functional.one_hot(labels, classes).sum(1).to(observed)
    sums = simulated(labels, Stream.FIRST)
    more, fell = counts - counts.mean(0), sums.mean(0) - sums
    gain = (more * fell).sum() / more.square().sum()
    variance = (fell - gain * more).square().mean() + 1e-300
    counts, sums = counts.mean(0).expand(target_clients, -1), sums.mean(0).expand(target_clients, -1)
    best, least = torch.zeros_like(counts), torch.full_like(counts[:, 0], torch.inf)
    response, weight = -gain * torch.eye(classes).to(observed), (1 / variance).expand_as(observed)
    for number in range(_ROUNDS):
        # o - simulated(n') - gain n' = -gain n is solved for n.
        counts, _ = Fit(observed - sums - gain * counts, response, weight).fill(torch.zeros_like(counts), examples)
        again = simulated(_labels(counts).repeat_interleave(_TWINS, 0), Stream.REPEAT, number)
        sums = again.view(target_clients, _TWINS, classes).mean(1)
        distance = (observed - sums).square().sum(1)
        closer = (distance < least) | torch.isinf(least)
        best, least = torch.where(closer.unsqueeze(1), counts, best), torch.where(closer, distance, least)
    return best


def _simulate(client: Client, params: Tensors, labels: Tensor, knowledge: Knowledge, key: Key) -> Tensors:
    """Simulate updates [S, ...] for labels [S, B], on the attacker's images."""
    example = next(iter(params.values()))
    images = _images(knowledge, labels.flatten(), key.child(Stream.IMAGES).generator()).to(example)
    batch = Batch(images.unflatten(0, labels.shape), labels.to(example.device))
    spec = client.noise_spec(params, Batch(batch.inputs[0], batch.targets[0]))
    off = {n: v.to(example.device).expand(len(labels), *v.shape) for n, v in spec.neutral().items()}
    state = {n: v.to(example.device).expand(len(labels), *v.shape) for n, v in client.init(params).items()}
    return client.updates(params, batch, off, state)[0]


def _images(knowledge: Knowledge, labels: Tensor, generator: torch.Generator) -> Tensor:
    """Choose a public image of each label's class, or of any class if it has none. Without public images, draw them."""
    public = knowledge.public
    if public is None:
        draw = torch.rand((len(labels), *knowledge.space.shape), generator=generator)
        lower, upper = knowledge.space.bounds(draw)
        return lower + (upper - lower) * draw
    fits = labels.unsqueeze(1) == public.targets.cpu()
    fits = fits | ~fits.any(1, keepdim=True)
    # The largest of random numbers at the fitting places is a fair choice among them.
    chosen = torch.where(fits, torch.rand(fits.shape, generator=generator), -1.0).argmax(1)
    return public.inputs[chosen.to(public.inputs.device)]


def _labels(counts: Tensor) -> Tensor:
    """Convert counts [V, K] to sorted labels [V, B]."""
    classes = torch.arange(counts.shape[1])
    rows = [torch.repeat_interleave(classes, row.long().cpu()) for row in counts]
    return torch.stack(rows).to(counts.device)


Labels = Annotated[
    Literal["given", "idlg", "unique", "restore", "joint"],
    "Source of the labels: granted, read off the update in one of three ways, or optimised with the images.",
]
FoundLabels = Annotated[
    Literal["given", "idlg", "unique", "restore"],
    "Source of the labels: granted, or read off the update in one of three ways.",
]


def find_labels(
    source: Labels, observation: Observation, simulated_client: Client, knowledge: Knowledge, key: Key
) -> Tensor | None:
    """Return labels [V, B], or None if they are to be optimised."""
    if source == "joint":
        return None
    if source == "given":
        if knowledge.targets is None:
            remedy = "grant them, or choose labels: idlg, unique, restore, joint"
            raise fail("knowledge.targets", "were never granted", remedy)
        return knowledge.targets.to(next(iter(observation.params.values())).device)
    examples = observation.examples
    blank = next(iter(observation.params.values())).new_zeros((examples, *knowledge.space.shape))
    last = last_layer(simulated_client.model, blank)
    if source == "idlg" and examples == 1:
        return smallest_row(observation.update, last)
    if source == "unique":
        return smallest_entries(observation.update, last, examples)
    return restore_labels(observation.update, last, examples, simulated_client, observation.params, knowledge, key)


def label_problems(source: Labels, prospect: Prospect) -> Iterator[Problem]:
    """Yield the reasons why labels cannot be read off this client's updates, before an attack."""
    if source in ("given", "joint"):
        return
    simulated_client, examples, classes = prospect.simulated_client, prospect.examples, prospect.classes
    blank = next(iter(simulated_client.params().values())).new_zeros((examples, *prospect.shape))
    last, sent = last_layer(simulated_client.model, blank), set(simulated_client.trained())
    if not {qualified(last, "weight"), qualified(last, "bias")} & sent:
        problem = f"is {source}, and the last layer '{last}' is not trained, so that updates do not contain it"
        yield Problem("labels", problem, "train it, or choose labels=given or labels=joint")
    if source == "unique" and examples > classes:
        problem = f"is unique, and {examples} examples cannot have different labels among {classes} classes"
        yield Problem("labels", problem, "choose labels=restore, which allows repeated labels")


def smallest_row(update: Mapping[str, Tensor], last: str) -> Tensor:
    """IDLG (Zhao et al. 2020): one example's label is the class with the smallest row sum. Returns [V, 1].

    The gradient of cross-entropy is p_c - 1 < 0 for the true class and p_c > 0 for the others. If no feature is
    negative, the weight's row has the same sign.
    """
    weight = update.get(qualified(last, "weight"))
    rows = row_sums(update, last) if weight is None else weight.flatten(2).sum(-1)
    return rows.argmin(1, keepdim=True)


def smallest_entries(update: Mapping[str, Tensor], last: str, examples: int) -> Tensor:
    """GradInversion (Yin et al. 2021): the B classes whose weight rows hold the smallest entries. Returns [V, B].

    This assumes that no label repeats and no feature is negative.
    """
    weight = update.get(qualified(last, "weight"))
    smallest = row_sums(update, last) if weight is None else weight.flatten(2).amin(-1)
    if examples > smallest.shape[1]:
        problem = f"{examples} examples cannot have different labels among {smallest.shape[1]} classes"
        raise fail("attack.labels", problem, "choose labels=restore, which allows repeated labels")
    return smallest.topk(examples, largest=False).indices.sort(1).values
