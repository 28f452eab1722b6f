"""What a sent update says about labels before any optimisation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from torch import Tensor

from gradveil.attacks.base import Observation, Prospect
from gradveil.attacks.knowledge import Knowledge
from gradveil.attacks.restore import restore_labels, row_sums
from gradveil.client import Client
from gradveil.core.errors import Problem, fail
from gradveil.core.noise import Key
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
    examples = observation.examples
    blank = next(iter(observation.params.values())).new_zeros((examples, *knowledge.shape))
    last = last_layer(belief.model, blank)
    if way == "idlg" and examples == 1:
        return smallest_row(observation.update, last)
    if way == "unique":
        return smallest_entries(observation.update, last, examples)
    return restore_labels(observation.update, last, examples, belief, observation.params, knowledge, key)


def label_problems(way: Labels, prospect: Prospect) -> Iterator[Problem]:
    """Find out before an attack why labels cannot be read off this client's updates."""
    if way in ("given", "joint"):
        return
    belief, examples, classes = prospect.belief, prospect.examples, prospect.classes
    blank = next(iter(belief.params().values())).new_zeros((examples, *prospect.shape))
    last, sent = last_layer(belief.model, blank), set(belief.trained())
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
