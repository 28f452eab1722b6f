"""What a sent update says about labels before any optimisation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor

from gradveil.attacks.base import Observation
from gradveil.attacks.knowledge import Knowledge
from gradveil.client import Client
from gradveil.core.errors import Problem, fail
from gradveil.core.noise import Key
from gradveil.core.tree import Tensors
from gradveil.core.types import Batch
from gradveil.nn.paths import last_layer

Labels = Literal["given", "idlg", "unique", "restore", "joint"]
"""Where labels come from: told, read off the update (three ways), or optimised with the inputs."""


def find_labels(way: Labels, observation: Observation, belief: Client, knowledge: Knowledge, key: Key) -> Tensor | None:
    """Return [V, B] labels, or None where they are to be optimised."""
    if way == "joint":
        return None
    if way == "given":
        if knowledge.targets is None:
            remedy = "grant them, or choose labels: idlg, unique, restore, joint"
            raise fail("knowledge.targets", "were never granted", remedy)
        return knowledge.targets.to(next(iter(observation.params.values())).device)
    last, examples = last_layer(belief.model), observation.examples
    if way == "idlg" and examples == 1:
        return smallest_row(observation.update, last)
    if way == "unique":
        return smallest_entries(observation.update, last, examples)
    return restore_labels(observation.update, last, examples, belief, observation.params, knowledge, key)


def label_problems(way: Labels, belief: Client, examples: int, classes: int) -> Iterator[Problem]:
    """Find out before an attack why labels cannot be read off this client's updates."""
    if way in ("given", "joint"):
        return
    last, sent = last_layer(belief.model), set(belief.trained())
    if not {f"{last}.weight", f"{last}.bias"} & sent:
        what = f"is {way}, and the last layer '{last}' is not trained: nothing of it is sent"
        yield Problem("labels", what, "train it, or choose labels=given or labels=joint")
    if way == "unique" and examples > classes:
        what = f"is unique, and {examples} examples cannot have different labels among {classes} classes"
        yield Problem("labels", what, "choose labels=restore, which allows repeated labels")


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


def restore_labels(
    update: Mapping[str, Tensor],
    last: str,
    examples: int,
    belief: Client,
    params: Tensors,
    knowledge: Knowledge,
    key: Key,
) -> Tensor:
    """Restore the labels of a batch, repeated ones too. Returns [V, B], sorted.

    The last layer's row sums of a batch are the mean of its examples' row sums. The attacker runs the believed client
    on random images of each class to learn the row sums R[:, c] that class c causes (an untrained net's outputs
    hardly depend on the image), and then picks B labels, one at a time, that explain the observed sums best, where no
    bias was sent up to one positive factor for the unknown size of the features.
    """
    observed = row_sums(update, last).double()
    response = _class_response(last, belief, params, knowledge, key)
    victims, classes = observed.shape
    biased = f"{last}.bias" in update
    # What local steps add up to is no mean of p - y: it proves nothing.
    counts = _certain(observed, examples) if biased and belief.local is None else observed.new_zeros(victims, classes)
    for _ in range(examples):
        missing = counts.sum(1) < examples
        options = counts.unsqueeze(1) + torch.eye(classes, dtype=counts.dtype, device=counts.device)
        explained = options @ response.T / examples
        factor = (explained * observed.unsqueeze(1)).sum(-1) / explained.square().sum(-1).clamp_min(1e-300)
        factor = torch.ones_like(factor) if biased else factor
        rest = (observed.unsqueeze(1) - factor.clamp_min(0).unsqueeze(-1) * explained).square().sum(-1)
        counts[torch.arange(victims), rest.argmin(1)] += missing.to(counts.dtype)
    labels = [torch.repeat_interleave(torch.arange(classes), row.long().cpu()) for row in counts]
    return torch.stack(labels).to(observed.device)


def _certain(observed: Tensor, examples: int) -> Tensor:
    """Count the labels that the bias gradient proves: mean(p_c) = observed_c + n_c / B is not negative.

    A tolerance of 5% of an example absorbs rounding; a victim whose sums prove more than B labels (noise was added)
    or are NaN has none proved.
    """
    counts = torch.ceil(-observed * examples - 0.05).clamp_min(0)
    return torch.where(counts.sum(1, keepdim=True) <= examples, counts, 0.0)


def _class_response(
    last: str, belief: Client, params: Tensors, knowledge: Knowledge, key: Key, least: int = 16
) -> Tensor:
    """Return R [K, K]: column c holds the row sums that one example of class c causes, averaged over random images."""
    plain = belief.undefended_update()
    probes = max(least, plain.local.batch) if plain.local else least
    dtype, device = next(iter(params.values())).dtype, next(iter(params.values())).device
    draw = torch.rand((probes, *knowledge.shape), dtype=dtype, generator=key.child("labels").generator()).to(device)
    lower, upper = knowledge.lower.to(draw), knowledge.upper.to(draw)
    columns: list[Tensor] = []
    for label in range(knowledge.classes):
        batch = Batch(lower + (upper - lower) * draw, torch.full((probes,), label, device=device))
        spec = plain.noise_spec(params, batch)
        noise = {name: value.to(device) for name, value in spec.neutral().items()}
        sent, _ = plain.update(params, batch, noise, plain.init(params))
        columns.append(row_sums({name: value.unsqueeze(0) for name, value in sent.items()}, last)[0].double())
    return torch.stack(columns, 1)
