"""Problems of model, data and attack are reported before the first trial, with their place."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn

import gradveil
from gradveil.audit.preflight import open_experiment
from gradveil.core.errors import GradveilError
from gradveil.core.types import Stage, Transform
from tests.audit.runs import config


def problems(**changes):
    with pytest.raises(GradveilError) as caught:
        open_experiment(config(**changes))
    return [str(problem) for problem in caught.value.problems]


def test_labels_that_nothing_shows_are_told_at_once():
    client = {"batch": 1, "trainable": ["body.*"]}
    found = problems(attacks=["idlg", "gi", "sapag", "ig"], client=client, defences=["none"])
    assert len(found) == 3
    assert all("is not trained" in problem for problem in found)
    assert found[0].startswith("attack 'idlg' on 'none', client: labels:")


@pytest.mark.parametrize("attack", ["ig", "ig(labels=restore)", "adaptive"])
def test_a_model_of_another_image_size_is_told_whatever_attacks_it(attack: str):
    """Attacks are asked first, and some of them run the model."""
    (found,) = problems(
        model={"name": f"{__name__}:for_sixteen"}, attacks=[attack], data={"name": "digits", "size": 32}
    )
    assert "module '1' (Linear): its forward pass fails for inputs of shape (1, 1, 32, 32)" in found


def for_sixteen(classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(256, classes))


def test_more_examples_than_classes_cannot_all_differ():
    (found,) = problems(attacks=["gi"], client={"batch": 3}, defences=["none"])
    assert "3 examples cannot have different labels among 2 classes" in found


def test_an_attack_on_a_linear_first_layer_needs_one():
    (found,) = problems(attacks=["analytic", "ig"], defences=["none"])
    assert "begins with a Conv2d" in found
    assert "choose another attack" in found


def test_learning_needs_public_images():
    model = nn.Sequential(nn.Flatten(), nn.Linear(144, 3))
    batch = torch.rand(2, 1, 12, 12, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 2])
    with pytest.raises(GradveilError, match="attack 'learned' on 'dp', client: data: there are no public images"):
        gradveil.audit(model, batch, defences=["dp"], attacks=["learned"])


def test_learning_needs_the_public_images_of_two_updates():
    run = {"attacks": ["learned", "ig"], "client": {"batch": 4}, "defences": ["none"]}
    (found,) = problems(data={"name": "faces", "size": 16, "public": 7}, budget="100", **run)
    assert "too few public images to learn from: 7, and an update is made from 4 -> give at least 8" in found
    open_experiment(config(data={"name": "faces", "size": 16, "public": 8}, **run))


def test_who_asked_for_all_that_aim_at_a_defence_may_leave_out_one_that_cannot():
    run = {"client": {"trainable": ["head.*"]}, "defences": ["precode"], "data": {"name": "faces"}}
    run["model"] = {"name": "scheliga-cnn"}
    (found,) = problems(attacks=["adaptive"], **run)
    assert found.startswith("attack 'pig' on 'precode', client: ignore: leaves out")
    assert found.endswith("name the attacks that you want, in the place of adaptive and malicious")
    (named,) = problems(attacks=["pig"], **run)
    assert "adaptive" not in named


@dataclass(frozen=True)
class Flipped(Transform):
    """Send every parameter's entries from the last to the first, which is no map of single entries."""

    stage: ClassVar[Stage] = Stage.QUANTISE

    def apply(self, update, state, noise, context):
        return {name: value.flatten().flip(0).view_as(value) for name, value in update.items()}, state


def test_of_the_attacks_on_an_unknown_defence_those_that_do_not_fit_are_left_out():
    own = f"{__name__}:Flipped"
    experiment = open_experiment(config(attacks=["adaptive"], defences=["none", own], data={"name": "faces"}))
    assert ["undo_entries" in attack for _, _, attack in experiment.unfit] == [True]
    assert "no map of the gradient's single entries" in next(iter(experiment.unfit.values()))
    assert problems(attacks=["portfolio(undo_entries=true)"], defences=[own], data={"name": "faces"})


def test_only_an_attack_that_was_named_may_fit_some_clients_and_not_others():
    """A verdict counts on all attackers that stand for `adaptive`."""
    run = {"client": [{"trainable": ["head.*"]}, {}], "defences": ["precode"], "data": {"name": "faces"}}
    run["model"] = {"name": "scheliga-cnn"}
    assert problems(attacks=["adaptive"], **run)
    experiment = open_experiment(config(attacks=["pig"], **run))
    ((meeting, why),) = experiment.unfit.items()
    assert meeting == (0, "precode", "pig")
    assert "leaves out" in why
    assert " -> " in why
    assert len(problems(attacks=["pig"], **run | {"client": {"trainable": ["head.*"]}})) == 1
