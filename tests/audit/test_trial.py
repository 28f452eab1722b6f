"""How a trial's updates are made, and what its attack is told."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from gradveil.attacks.inversion.inversion import Inversion
from gradveil.attacks.knowledge import How, Knowledge, Known, Neutral, Sample
from gradveil.attacks.protocol import Observation, Progress, Reconstruction, Remark
from gradveil.audit import observe as observing
from gradveil.audit.attack_selection import trials
from gradveil.audit.experiment import Experiment
from gradveil.audit.grants import told
from gradveil.audit.observe import Truth, observe, updates
from gradveil.audit.preflight import open_experiment
from gradveil.audit.score import TrialNames, score
from gradveil.audit.trial import Recovered, merge, recover
from gradveil.client import Client
from gradveil.core.errors import GradveilError
from gradveil.core.noise import Key
from gradveil.core.types import Batch
from gradveil.wire.codec import Layout, decode, encode
from tests.audit.runs import config


@dataclass
class Recorder:
    """An attack that remembers what it was given and answers with grey images."""

    knowledge: Mapping[str, How] = field(default_factory=dict)
    simulated_client: Literal["naive", "full"] = "naive"
    name: str = "recorder"
    calls: list[dict[str, Any]] = field(default_factory=list)

    def __call__(
        self,
        observations: Sequence[Observation],
        simulated_client: Client,
        knowledge: Knowledge,
        key: Key,
        progress: Callable[[Progress], None] | None = None,
        plan: Sequence[int] = (),
    ) -> Reconstruction:
        self.calls.append(
            {"seen": observations, "simulated_client": simulated_client, "knowledge": knowledge, "key": key}
        )
        target_clients, examples = len(observations[-1].target_clients), observations[-1].examples
        assert progress is not None
        progress(Progress(0, target_clients, 5 * target_clients, 10 * target_clients, 0.5))
        zeros = torch.zeros(target_clients)
        return Reconstruction(
            torch.zeros(target_clients, examples, *knowledge.space.shape),
            torch.zeros(target_clients, examples, dtype=torch.long),
            zeros,
            ("budget",) * target_clients,
            zeros.long(),
            0.1,
            zeros.long(),
            zeros[:, None],
            zeros,
            (target_clients,),
        )


def experiment_with(attack: Recorder, **changes: Any) -> Experiment:
    experiment = open_experiment(config(**changes))
    return dataclasses.replace(experiment, attacks=dict.fromkeys(experiment.attacks, attack))


def attacked(attack: Recorder, defence: str = "none", target_clients: int = 2, **changes: Any) -> Recovered:
    experiment = experiment_with(attack, defences=[defence], target_clients=target_clients, **changes)
    return recover(experiment, trials(experiment.config)[0], range(target_clients), lambda step: None)


def holds_truth(value: Any, truth: Tensor) -> bool:
    """Search arguments for the private images."""
    if isinstance(value, Truth):
        return True
    if isinstance(value, Tensor):
        return value.numel() == truth.numel() and torch.equal(value.flatten().float(), truth.flatten().float())
    if isinstance(value, Mapping):
        return any(holds_truth(item, truth) for item in value.values())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return any(holds_truth(item, truth) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return any(holds_truth(getattr(value, f.name), truth) for f in dataclasses.fields(value))
    return False


def test_a_search_that_chooses_to_stop_early_is_not_stopped_by_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = (900, 0, 0, 0)
    for finals, ran in (((1, 0, 2, 900, 0, 4, 100), 2), ((), 4)):
        monkeypatch.setattr(Inversion, "rehearse", lambda *_, found=(*scores, *finals): found)
        experiment = open_experiment(
            config(defences=["gaussian(0.1)"], attacks=["portfolio(iterations=4)"], target_clients=2)
        )
        found = recover(experiment, trials(experiment.config)[0], range(2), lambda step: None)
        assert found.facts["target_iterations"] == 2 * ran
        assert found.facts["budget_share"] is None


def test_no_attack_receives_the_truth() -> None:
    attack = Recorder(simulated_client="full")
    experiment = experiment_with(attack, defences=["gaussian(0.1)"])
    address = trials(experiment.config)[0]
    recover(experiment, address, range(2), lambda step: None)
    truth = experiment.batch(experiment.examples(0, range(2))).inputs
    assert holds_truth({"a": [truth.clone()]}, truth)
    assert not holds_truth(attack.calls[0], truth)
    client = experiment.client(0, address.defence, 0)
    noise = observe(experiment, address, client, range(2))[1].noise
    assert not any(holds_truth(attack.calls[0], value) for value in noise.values())
    assert attack.calls[0]["knowledge"].targets is None


def test_observation_is_the_defended_update_of_the_target_clients() -> None:
    attack = Recorder()
    experiment = experiment_with(attack, defences=["gaussian(0.1)"], first_target_client=3)
    address = trials(experiment.config)[0]
    recover(experiment, address, range(2), lambda step: None)
    (seen,) = attack.calls[0]["seen"]
    client = experiment.client(0, "gaussian(0.1)", 0)
    params = client.params()
    spec = client.noise_spec(params, Batch(experiment.private.inputs[:1], experiment.private.targets[:1]))
    for row, target_client in enumerate((3, 4)):
        example = Batch(
            experiment.private.inputs[target_client : target_client + 1],
            experiment.private.targets[target_client : target_client + 1],
        )
        expected, _ = client.update(
            params, example, spec.sample(Key(0, ("client", target_client))), client.init(params)
        )
        for name, value in expected.items():
            torch.testing.assert_close(seen.update[name][row], value, rtol=1e-5, atol=1e-6)
    assert (seen.target_clients, seen.examples) == ((3, 4), 1)


@pytest.mark.parametrize(("simulated_client", "sends"), [("naive", False), ("full", True)])
def test_simulated_client_decides_whether_the_attacker_simulates_the_defence(
    simulated_client: Any, sends: bool
) -> None:
    attack = Recorder(simulated_client=simulated_client)
    found = attacked(attack, "prune(0.9)")
    assert (attack.calls[0]["simulated_client"].send is not None) == sends
    assert found.facts["simulated_client"] == simulated_client


def test_grants_are_given_and_named() -> None:
    attack = Recorder({"targets": Known(), "model.*": Known(), "send.*": Neutral()}, simulated_client="full")
    found = attacked(attack, "dropout(0.5)")
    knowledge: Knowledge = attack.calls[0]["knowledge"]
    masks = [name for name in found.facts["grants"] if name.startswith("model.")]
    assert found.facts["grants"][0] == "targets: the true labels"
    assert masks
    assert all(name.endswith("its true value") for name in masks)
    granted = [way for way in knowledge.tensors.values() if isinstance(way, Known)]
    assert all(way.value is not None and way.value.shape[0] == 2 for way in granted)
    assert knowledge.targets is not None
    assert found.facts["knowledge"] == {"targets": "known", "model.*": "known", "send.*": "neutral"}


def test_what_was_not_asked_for_is_not_granted() -> None:
    attack = Recorder({"model.*": Sample()})
    found = attacked(attack, "dropout(0.5)")
    assert found.facts["grants"] == []
    assert attack.calls[0]["knowledge"].tensors == {"model.*": Sample()}
    assert told(attack) == {"targets": "neutral", "model.*": "sample"}


def test_an_intermediate_cannot_be_granted() -> None:
    with pytest.raises(GradveilError, match="intermediate"):
        attacked(Recorder({"send.prune.*": Known()}, simulated_client="full"), "prune(0.9)")
    for everything in ("*", "send.*"):  # whatever is random, and here nothing is
        attacked(Recorder({everything: Known()}, simulated_client="full"), "clip(norm=1)")


def test_shares_of_the_target_clients_make_the_same_updates() -> None:
    attack = Recorder()
    experiment = experiment_with(attack, defences=["dp(clip=1, sigma=0.1)"], target_clients=3)
    address = trials(experiment.config)[0]
    whole = recover(experiment, address, range(3), lambda step: None)
    parts = [recover(experiment, address, numbers, lambda step: None) for numbers in (range(2), range(2, 3))]
    both = merge(parts)
    full, first, second = (call["seen"][0] for call in attack.calls)
    for name, value in full.update.items():
        torch.testing.assert_close(torch.cat([first.update[name], second.update[name]]), value, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(both.tensors["distance"], whole.tensors["distance"], rtol=1e-5, atol=1e-8)
    assert both.statuses == whole.statuses
    assert both.facts["row_iterations"] == whole.facts["row_iterations"] == 15
    assert both.facts["plan"] == [2, 1]


def test_shares_of_the_target_clients_say_what_is_true_of_all() -> None:
    """What a closed form leaves open differs from target to target: one share's number is not another's."""

    class Talker(Recorder):
        def __call__(self, observations, *args, **kwargs):
            numbers = tuple(float(number) for number in observations[-1].target_clients)
            found = super().__call__(observations, *args, **kwargs)
            return dataclasses.replace(
                found, remarks=(Remark("{} values are open", numbers), Remark("{} twice", numbers, 0))
            )

    experiment = experiment_with(Talker(), target_clients=3)
    address = trials(experiment.config)[0]
    parts = [recover(experiment, address, numbers, lambda step: None) for numbers in (range(1), range(1, 3))]
    whole = recover(experiment, address, range(3), lambda step: None)
    for some in (parts, [whole]):
        info = score(experiment, address, merge(some), TrialNames("", "", ())).info
        assert info["remarks"] == ["0 to 2 values are open", "0 to 2 twice"]


def test_distance_is_that_of_the_noise() -> None:
    """Gaussian noise of std s on P numbers has norm about s sqrt(P), and none without it."""
    assert float(attacked(Recorder()).tensors["distance"].max()) == 0
    attack = Recorder()
    experiment = experiment_with(attack, defences=["gaussian(0.5)"], target_clients=1)
    found = recover(experiment, trials(experiment.config)[0], range(1), lambda step: None)
    client = experiment.client(0, "gaussian(0.5)", 0).undefended_update()
    raw = client.update(client.params(), Batch(experiment.private.inputs[:1], experiment.private.targets[:1]), {}, {})[
        0
    ]
    norm = sum(float(value.square().sum()) for value in raw.values()) ** 0.5
    entries = sum(value.numel() for value in raw.values())
    assert float(found.tensors["distance"][0]) == pytest.approx(0.5 * entries**0.5 / norm, rel=0.05)


@pytest.mark.parametrize("defence", ["none", "prune(0.9)", "sign"])
def test_bytes_are_what_the_wire_makes_of_each_target_clients_update(defence: str) -> None:
    attack = Recorder()
    found = attacked(attack, defence)
    sent = attack.calls[0]["seen"][0].update
    rows = [{name: value[row] for name, value in sent.items()} for row in range(2)]
    encoded = [encode(row, deflate=True) for row in rows]
    assert found.tensors["bytes_sent"].tolist() == [len(data) for data in encoded]
    for row, data in zip(rows, encoded, strict=True):
        assert all(torch.equal(value, row[name]) for name, value in decode(data, Layout.of(row)).items())
    dense = 4 * sum(value.numel() for value in rows[0].values())
    assert found.tensors["bytes_dense"].tolist() == [dense] * 2
    low, high = {"none": (0.8, 1.0), "prune(0.9)": (0.09, 0.13), "sign": (1 / 32, 2 / 32)}[defence]
    assert all(low < len(data) / dense < high for data in encoded)


def test_a_public_mask_makes_updates_smaller() -> None:
    attack = Recorder()
    found = attacked(attack, "adgp(feedback=false)")
    seen = attack.calls[0]["seen"][0]
    masks = {name.removeprefix("send.prune.mask."): mask for name, mask in seen.messages.items()}
    for row, size in enumerate(found.tensors["bytes_sent"].tolist()):
        sent = {name: value[row] for name, value in seen.update.items()}
        assert size == len(encode(sent, mask=masks, deflate=True)) < len(encode(sent, deflate=True))


def test_updates_that_are_not_finite_have_their_bytes_too() -> None:
    assert float(attacked(Recorder(), "gaussian(1e39)").tensors["bytes_sent"].min()) > 1000


def test_seeds_change_weights_and_noise_but_not_target_clients() -> None:
    attack = Recorder()
    experiment = experiment_with(attack, defences=["none"], seeds=[0, 1])
    for address in trials(experiment.config):
        recover(experiment, address, range(2), lambda step: None)
    first, second = (call["seen"][0] for call in attack.calls)
    assert all(not torch.equal(first.params[name], second.params[name]) for name in first.params)
    assert [call["key"] for call in attack.calls] == [Key(0, ("attack",)), Key(1, ("attack",))]


def test_trials_are_distinct_and_follow_the_run_file() -> None:
    planned = trials(config(seeds=[0, 1], client=[{"batch": 1}, {"batch": 2}], attacks=["ig", "gi"]))
    assert len({address.id for address in planned}) == len(planned) == 16
    assert [address.defence for address in planned[:2]] == ["none", "gaussian(0.01)"]
    assert all(address.id.startswith("lenet-zhu-faces-s") for address in planned)


def test_precision_reaches_model_noise_and_data() -> None:
    attack = Recorder()
    attacked(attack, "gaussian(0.1)", precision="float64")
    seen = attack.calls[0]["seen"][0]
    assert {value.dtype for value in [*seen.params.values(), *seen.update.values()]} == {torch.float64}


def test_large_models_are_updated_a_few_target_clients_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = open_experiment(config(defences=["none"], target_clients=3))
    client = experiment.client(0, "none", 0)
    raw = experiment.batch(experiment.examples(0, range(3)))
    whole = updates(client, client.params(), raw, {}, {})[0]
    monkeypatch.setattr(observing, "_UPDATE_VALUES", 1)
    for name, value in updates(client, client.params(), raw, {}, {})[0].items():
        torch.testing.assert_close(value, whole[name], rtol=1e-5, atol=1e-6)


def test_clients_that_train_locally_keep_their_schedule_in_the_raw_update() -> None:
    """Without a defence the sent update is the raw one, although the order of examples is drawn."""
    local = {"lr": 0.1, "epochs": 2, "batch": 1, "momentum": 0.5}
    attack = Recorder({"schedule": Known()})
    found = attacked(attack, client={"batch": 3, "local": local})
    assert float(found.tensors["distance"].max()) == 0
    assert found.facts["grants"] == ["schedule: its true value"]
    granted = attack.calls[0]["knowledge"].tensors["schedule"]
    assert tuple(granted.value.shape) == (2, 6, 1)


@pytest.mark.parametrize(
    ("change", "in_parts"),
    [({}, False), ({"batch": 3}, False), ({"batch": 2}, True), ({"batch": 3, "sampling": "poisson"}, True)],
)
def test_a_trial_says_whether_local_steps_took_the_examples_in_parts(change: dict[str, Any], in_parts: bool) -> None:
    local = {"local": {"lr": 0.1, "steps": 2, **change}} if change else {}
    assert attacked(Recorder({}), client={"batch": 3, **local}).facts["in_parts"] is in_parts


@pytest.mark.parametrize("labels", ["given", "restore", "joint"])
def test_the_objective_at_the_truth_is_at_the_true_labels(labels: str) -> None:
    """Labels that were read off are sorted, and the examples are not; who optimises them starts from random ones."""
    experiment = open_experiment(
        config(
            data={"name": "digits", "size": 16}, client={"batch": 3}, defences=["none"],
            attacks=[f"ig(iterations=1, tv=0, labels={labels})"], precision="float64",
        )
    )  # fmt: skip
    truth = experiment.batch(experiment.examples(0, range(2)))
    assert not torch.equal(truth.targets, truth.targets.sort(1).values)
    found = recover(experiment, trials(experiment.config)[0], range(2), lambda step: None).tensors
    assert bool((found["at_truth"] < 1e-9).all())
    assert bool((found["objective"] > 1e-3).all())
