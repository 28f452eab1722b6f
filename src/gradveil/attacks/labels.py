"""Label restoration: the classes of a batch, and their counts, from the last layer of an update.

One gradient shows sums over the classes that are linear in the counts; local training is simulated and corrected.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from gradveil.attacks.knowledge import Knowledge
from gradveil.attacks.protocol import Observation, Prospect
from gradveil.client import Client
from gradveil.core.errors import Problem, fail
from gradveil.core.noise import Key
from gradveil.core.streams import Stream
from gradveil.core.tree import Tensors
from gradveil.core.types import Batch
from gradveil.nn.module_paths import last_layer

_GROUPS, _PROBES, _IMAGES = 8, 8, 800
"""The attacker learns what a class causes from so many updates of so many images; fewer where that exceeds so many
images a group over all classes."""
_ROUNDS, _TWINS = 4, 4
"""How often the counts of a client that trained locally are simulated and corrected, and on how many sets of images."""
_SPREAD = 0.1
"""What the rank-one completion of a pruned layer leaves open, as a share of its largest sum."""
_CLIPPED = 10.0
"""A clipped update is believed in where scaling makes the misfit so many times, and so much, smaller."""


def row_sums(update: Mapping[str, Tensor], last: str) -> Tensor:
    """Sum the last layer's gradient for each class: the bias gradient where it was sent, else the weight's row sums."""
    bias = update.get(f"{last}.bias")
    if bias is not None:
        return bias
    weight = update.get(f"{last}.weight")
    if weight is None:
        remedy = "grant the labels, or optimise them jointly (labels=joint)"
        raise fail("attack.labels", f"the last layer '{last}' was not sent", remedy)
    return weight.flatten(2).sum(-1)


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

    A batch's row sums are the mean of its examples' own. The attacker runs the simulated client, without its defences,
    on images of each class to learn their mean R[:, c] and their variance: on public images where he has them, else on
    random ones, whose outputs are like the target clients' in an untrained net only. He takes the counts n that
    minimise

        sum_c (o_c - f (R n / B)_c)^2 / (2 variance_c) + sum_c log n_c!

    where the last term is minus the log prior of labels that are drawn evenly; what the sums cannot tell is thus spread
    over the classes. The factor f is 1; it is free without a bias (the size of the features is unknown), and at most 1
    where that explains the sums ten times as well (the client clipped). Counts that signs prove come first. Sums that
    pruning set to zero are completed from the weight's other entries.
    """
    observed = row_sums(update, last).double()
    if simulated_client.local is None:
        counts = _of_gradient(update, last, examples, simulated_client, params, knowledge, key.child(Stream.LABELS))
    else:
        counts = _of_training(observed, last, examples, simulated_client, params, knowledge, key.child(Stream.LABELS))
    return _labels(counts)


@dataclass(frozen=True)
class Fit:
    """How well counts explain sums: weighted squares of o - f A n, row by row."""

    observed: Tensor
    """o [V, K]"""
    response: Tensor
    """A [K, K]: column c is what one example of class c adds."""
    weight: Tensor
    """[V, K] one over the variance; zero where a sum is unknown."""

    def fill(self, counts: Tensor, examples: int, largest: float | None = None) -> tuple[Tensor, Tensor]:
        """Add labels one by one, each where it costs least, up to `examples`. Returns the counts and the misfit [V].

        `largest` frees the factor f up to a bound; without it f = 1.
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
            one_more = misfit(product + cross, size + 2 * (w * explained) @ a + square)
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
    biased = f"{last}.bias" in update
    layer = _layer(update, last)
    sums, known, pruned = _complete(layer, biased)
    noise = torch.where(pruned, 0.0, (layer.sum(1).square().mean(1) / layer.shape[1]).sqrt())
    error = noise * (1 if biased else layer.shape[2] ** 0.5) + pruned * _SPREAD * sums.abs().amax(1)
    baseline = variance.clamp_min(1e-3 * float(variance.mean())) / examples + 1e-10
    fit = Fit(sums, response / examples, known / (baseline + error.square().unsqueeze(1)))
    least = _proved(layer, examples, noise, signs, biased)
    if not biased:
        return fit.fill(least, examples, largest=torch.inf)[0]
    (whole, misfit), (scaled, smaller) = fit.fill(least, examples), fit.fill(least, examples, largest=1.0)
    clipped = (smaller * _CLIPPED < misfit) & (smaller + _CLIPPED < misfit)
    return torch.where(clipped.unsqueeze(1), scaled, whole)


def _layer(update: Mapping[str, Tensor], last: str) -> Tensor:
    """Put what was sent of the last layer side by side: [V, K, D], the bias last."""
    parts = (update.get(f"{last}.weight"), update.get(f"{last}.bias"))
    wide = [part.flatten(2) if part.ndim > 2 else part.unsqueeze(2) for part in parts if part is not None]
    return torch.cat(wide, 2).double()


def _complete(layer: Tensor, biased: bool, steps: int = 10) -> tuple[Tensor, Tensor, Tensor]:
    """Return the row sums [V, K], which of them are known [V, K], and which target clients pruned [V].

    A single zero in a column that has other entries was pruned. As every example's gradient of the layer is (p - y) h',
    the batch's is close to a product of rank one, a_c mu_j: it is fitted to the entries that were sent, in turns, and a
    is brought to the scale of the sums that were sent.
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
    seen = a * (sums != 0)
    scale = (seen * sums).sum(1) / seen.square().sum(1).clamp_min(1e-300)
    chosen = pruned.unsqueeze(1)
    return torch.where(chosen, a * scale.unsqueeze(1), sums), torch.where(chosen, known, 1.0), pruned


def _proved(layer: Tensor, examples: int, noise: Tensor, signs: Tensor, biased: bool) -> Tensor:
    """Count the labels [V, K] that signs prove, where probes showed that a label lowers its own row only.

    Bias: mean(p_c) = b_c + n_c / B is not negative. Weight: with features that are not negative, a negative entry in a
    class's row proves one label. What exceeds B labels (noise) proves nothing.
    """
    weight = layer[..., :-1] if biased else layer
    counts = torch.zeros_like(layer[..., 0])
    proofs: list[Tensor] = []
    if biased and bool(signs[-1]):
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
    """Learn what one example of a class causes, from images of his own: one gradient of the last layer a group.

    Returns the mean row sums [K, K] (a column a class), one example's variance [K], and for each column of the layer
    [D] whether every group lowered its own class's row only.
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
        variances.append(probes * sums.var(0))
        own = torch.arange(knowledge.classes, device=layer.device) == label
        lowered = torch.where(own.unsqueeze(1), layer <= 0, layer >= 0)
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

    What they send is no longer linear in the counts n. So the attacker trains on images of his own with counts n', sees
    by how much the sums miss the observed ones, and corrects: o = simulated(n') - gain (n - n'), where the gain, how
    much a label lowers its own sum, comes from random labels. The counts whose simulation came closest are taken.
    """
    plain, classes = simulated_client.undefended_update(), knowledge.classes
    target_clients = len(observed)

    def simulated(labels: Tensor, *address: str | int) -> Tensor:
        own = key.child(*address)
        order = torch.rand(labels.shape, generator=own.child(Stream.ORDER).generator()).argsort(1)
        shuffled = labels.cpu().gather(1, order)
        parts = shuffled.split(_TWINS)
        sums = [row_sums(_simulate(plain, params, part, knowledge, own.child(i)), last) for i, part in enumerate(parts)]
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
        counts, _ = Fit(observed - sums - gain * counts, response, weight).fill(torch.zeros_like(counts), examples)
        again = simulated(_labels(counts).repeat_interleave(_TWINS, 0), Stream.REPEAT, number)
        sums = again.view(target_clients, _TWINS, classes).mean(1)
        distance = (observed - sums).square().sum(1)
        closer = (distance < least) | torch.isinf(least)
        best, least = torch.where(closer.unsqueeze(1), counts, best), torch.where(closer, distance, least)
    return best


def _simulate(client: Client, params: Tensors, labels: Tensor, knowledge: Knowledge, key: Key) -> Tensors:
    """Let the client send updates [S, ...] for labels [S, B], on images of the attacker's."""
    example = next(iter(params.values()))
    images = _images(knowledge, labels.flatten(), key.child(Stream.IMAGES).generator()).to(example)
    batch = Batch(images.unflatten(0, labels.shape), labels.to(example.device))
    spec = client.noise_spec(params, Batch(batch.inputs[0], batch.targets[0]))
    off = {n: v.to(example.device).expand(len(labels), *v.shape) for n, v in spec.neutral().items()}
    state = {n: v.to(example.device).expand(len(labels), *v.shape) for n, v in client.init(params).items()}
    return client.updates(params, batch, off, state)[0]


def _images(knowledge: Knowledge, labels: Tensor, generator: torch.Generator) -> Tensor:
    """Take a public image of each label's class (of any class where there is none), or else draw random ones."""
    public = knowledge.public
    if public is None:
        draw = torch.rand((len(labels), *knowledge.space.shape), generator=generator)
        lower, upper = knowledge.space.bounds(draw)
        return lower + (upper - lower) * draw
    fits = labels.unsqueeze(1) == public.targets.cpu()
    fits = fits | ~fits.any(1, keepdim=True)
    chosen = torch.where(fits, torch.rand(fits.shape, generator=generator), -1.0).argmax(1)
    return public.inputs[chosen.to(public.inputs.device)]


def _labels(counts: Tensor) -> Tensor:
    """Write counts [V, K] out as labels [V, B], sorted."""
    classes = torch.arange(counts.shape[1])
    rows = [torch.repeat_interleave(classes, row.long().cpu()) for row in counts]
    return torch.stack(rows).to(counts.device)


Labels = Literal["given", "idlg", "unique", "restore", "joint"]
"""Where labels come from: told, read off the update (three ways), or optimised with the inputs."""


def find_labels(
    way: Labels, observation: Observation, simulated_client: Client, knowledge: Knowledge, key: Key
) -> Tensor | None:
    """Return [V, B] labels, or None where they are to be optimised."""
    if way == "joint":
        return None
    if way == "given":
        if knowledge.targets is None:
            remedy = "grant them, or choose labels: idlg, unique, restore, joint"
            raise fail("knowledge.targets", "were never granted", remedy)
        return knowledge.targets.to(next(iter(observation.params.values())).device)
    examples = observation.examples
    blank = next(iter(observation.params.values())).new_zeros((examples, *knowledge.space.shape))
    last = last_layer(simulated_client.model, blank)
    if way == "idlg" and examples == 1:
        return smallest_row(observation.update, last)
    if way == "unique":
        return smallest_entries(observation.update, last, examples)
    return restore_labels(observation.update, last, examples, simulated_client, observation.params, knowledge, key)


def label_problems(way: Labels, prospect: Prospect) -> Iterator[Problem]:
    """Find out before an attack why labels cannot be read off this client's updates."""
    if way in ("given", "joint"):
        return
    simulated_client, examples, classes = prospect.simulated_client, prospect.examples, prospect.classes
    blank = next(iter(simulated_client.params().values())).new_zeros((examples, *prospect.shape))
    last, sent = last_layer(simulated_client.model, blank), set(simulated_client.trained())
    if not {f"{last}.weight", f"{last}.bias"} & sent:
        what = f"is {way}, and the last layer '{last}' is not trained: nothing of it is sent"
        yield Problem("labels", what, "train it, or choose labels=given or labels=joint")
    if way == "unique" and examples > classes:
        what = f"is unique, and {examples} examples cannot have different labels among {classes} classes"
        yield Problem("labels", what, "choose labels=restore, which allows repeated labels")


def smallest_row(update: Mapping[str, Tensor], last: str) -> Tensor:
    """IDLG (Zhao et al. 2020): one example's label is the class with the smallest row sum. Returns [V, 1].

    The gradient of cross-entropy is p_c - 1 < 0 for the true class and p_c > 0 for the others; with features that are
    not negative the weight's row has the same sign.
    """
    weight = update.get(f"{last}.weight")
    rows = row_sums(update, last) if weight is None else weight.flatten(2).sum(-1)
    return rows.argmin(1, keepdim=True)


def smallest_entries(update: Mapping[str, Tensor], last: str, examples: int) -> Tensor:
    """GradInversion (Yin et al. 2021): the B classes whose weight rows hold the smallest entries. Returns [V, B].

    It presumes that no label repeats, and features that are not negative.
    """
    weight = update.get(f"{last}.weight")
    smallest = row_sums(update, last) if weight is None else weight.flatten(2).amin(-1)
    if examples > smallest.shape[1]:
        what = f"{examples} examples cannot have different labels among {smallest.shape[1]} classes"
        raise fail("attack.labels", what, "choose labels=restore, which allows repeated labels")
    return smallest.topk(examples, largest=False).indices.sort(1).values
