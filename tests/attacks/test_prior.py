"""Image priors: BatchNorm statistics, group consistency, and registration."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from gradveil.attacks.attack_catalogue import make_attack
from gradveil.attacks.inversion.descent import Cosine, Descent
from gradveil.attacks.inversion.distances import Consensus, shifted_onto, statistics_distance
from gradveil.attacks.inversion.image_sources import INPUTS
from gradveil.attacks.inversion.inversion import Inversion
from gradveil.attacks.inversion.optimisers import Adam
from gradveil.attacks.inversion.problem import InversionProblem
from gradveil.attacks.inversion.solve import search_rows
from gradveil.attacks.knowledge import Known
from gradveil.attacks.protocol import in_words
from gradveil.audit.attack_selection import trials
from gradveil.audit.budgets import UNPLANNED
from gradveil.audit.observe import observe
from gradveil.audit.preflight import open_experiment
from gradveil.audit.trial import at_truth, attacked, recover
from gradveil.client import Client, Local, layer_statistics
from gradveil.core.noise import Key
from gradveil.core.types import Batch
from gradveil.nn.normalisation import BatchStatistics, FrozenNorm, running_statistics
from gradveil.nn.stochastic_layers import Dropout
from gradveil.nn.surgery import prepare
from tests.attacks.small_experiments import observed, psnr, tiny
from tests.audit.runs import config


def normed(examples=4, target_clients=2):
    """A network with frozen and batch normalisation, and the batches of its running statistics."""
    generator = Key(5).generator()
    frozen = FrozenNorm(4)
    frozen.running_mean += 0.3
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), frozen, nn.Sigmoid(), BatchStatistics(4), nn.Flatten(), nn.Linear(144, 4)
    ).double()  # fmt: skip
    for parameter in model.parameters():
        nn.init.normal_(parameter.data, std=0.3, generator=generator)
    inputs = torch.rand(target_clients, examples, 1, 6, 6, dtype=torch.float64, generator=generator)
    targets = torch.arange(examples).expand(target_clients, examples) % 4
    return observed(Client(model), Batch(inputs, targets), 4)


def test_statistics_are_those_that_enter_the_layers():
    scene = normed()
    found = layer_statistics(scene.client, scene.observation.params, scene.truth, {})
    assert list(found) == ["1.mean", "1.var", "3.mean", "3.var"]
    model = scene.client.model
    for target_client in range(2):
        first = model[0](scene.truth.inputs[target_client])
        second = model[:3](scene.truth.inputs[target_client])
        for name, x in (("1", first), ("3", second)):
            torch.testing.assert_close(found[f"{name}.mean"][target_client], x.mean((0, 2, 3)))
            torch.testing.assert_close(found[f"{name}.var"][target_client], x.var((0, 2, 3), unbiased=False))
    assert list(running_statistics(model)) == ["1.mean", "1.var"]


def test_statistics_of_a_group_include_all_members_and_masks():
    scene = normed()
    model = nn.Sequential(Dropout(0.5), *scene.client.model).double()
    client = replace(Client(model), members=2)
    one, params = Batch(*(value[0] for value in scene.truth)), client.params()
    noise = {name: value.unsqueeze(0) for name, value in client.noise_spec(params, one).sample(Key(8)).items()}
    (mask,) = noise.values()
    found = layer_statistics(client, params, Batch(*(value[:1] for value in scene.truth)), noise)
    x = model[1](scene.truth.inputs[0] * mask[0].flatten(0, 1) / 0.5)
    torch.testing.assert_close(found["2.mean"][0], x.mean((0, 2, 3)))
    torch.testing.assert_close(found["2.var"][0], x.var((0, 2, 3), unbiased=False))
    trained = replace(client, members=1, local=Local(batch=2, lr=0.1, steps=3))
    spec = trained.noise_spec(params, one).sample(Key(8))
    found = layer_statistics(trained, params, scene.truth, {n: v.expand(2, *v.shape) for n, v in spec.items()})
    torch.testing.assert_close(found["2.mean"][0], model[1](scene.truth.inputs[0]).mean((0, 2, 3)))


def test_the_first_layer_counts_ten_times():
    zero = {name: torch.zeros(2, 3) for name in ("a.mean", "a.var", "b.mean", "b.var")}
    for name, expected in (("a.mean", 10), ("a.var", 10), ("b.mean", 1), ("b.var", 1)):
        moved = {**zero, name: torch.tensor([[0.0, 0, 0], [3, 0, 4]])}
        torch.testing.assert_close(statistics_distance(moved, zero), torch.tensor([0.0, 5.0 * expected]))


def test_layers_that_do_not_run_have_no_statistics():
    """The first layer is the one that runs first, not the one defined first."""
    ran = {"b.mean": torch.ones(2, 1), "a.mean": torch.ones(2, 1)}
    wanted = {name: torch.zeros(2, 1) for name in ("unused.mean", "a.mean", "b.mean")}
    torch.testing.assert_close(statistics_distance(ran, wanted), torch.tensor([11.0, 11.0]))
    wanted["a.mean"] += 1
    torch.testing.assert_close(statistics_distance(ran, wanted), torch.tensor([10.0, 10.0]))


@pytest.mark.parametrize("defence", ["none", "ats"])
def test_granted_statistics_fit_only_the_true_batch(defence: str):
    settings = "tv=0, l2=0, group=0, labels=given, iterations=1, restarts=1"
    first_last_all = [f"gi-strong({settings}, rounds={rounds})" for rounds in ("first", "last", "all")]
    scene = open_experiment(
        config(
            data={"name": "faces", "size": 16}, model={"name": "convnet", "prepare": True, "options": {"width": 3}},
            client={"batch": 2}, attacks=first_last_all,
            defences=[defence], rounds=2, server_lr=1.0,
        )
    )  # fmt: skip
    for trial in trials(scene.config):
        client = scene.client(0, defence, 0)
        seen, truth = observe(scene, trial, client, range(2))
        made = attacked(scene, trial, client, seen, truth, range(2), lambda _: None, UNPLANNED)
        granted = [name for name in made.grants if name.startswith("statistics.")]
        assert granted
        assert all(isinstance(made.knowledge.tensors[name.partition(":")[0]], Known) for name in granted)
        right = at_truth(made, seen, truth)
        if defence == "none" or "last" in trial.attack:  # each round draws the transforms again
            assert bool((right < 1e-3).all())
        wrong = at_truth(made, seen, replace(truth, transformed=Batch(truth.raw.inputs.flip(0), truth.raw.targets)))
        assert bool((wrong > 0.1).all())


def test_prior_is_left_out_without_batchnorm():
    scene = tiny()
    plain = Inversion("plain", objective="l2", descent=Descent(Adam(0.1), iterations=20))
    found = [
        a([scene.observation], scene.client, scene.knowledge, Key(0)) for a in (plain, replace(plain, batchnorm=1))
    ]
    assert torch.equal(found[0].inputs, found[1].inputs)
    assert [in_words(each.remarks) for each in found] == [
        [],
        ["its BatchNorm prior is left out: the model has no running statistics"],
    ]


def test_running_statistics_enter_the_objective():
    scene = normed()
    dark = Batch(0.2 * scene.truth.inputs[:1], scene.truth.targets[:1])
    wanted = {n: v[0] for n, v in layer_statistics(scene.client, scene.observation.params, dark, {}).items()}
    frozen = scene.client.model[1]
    frozen.running_mean, frozen.running_var = wanted["1.mean"], wanted["1.var"]
    plain = Inversion("plain", objective="l2", start="uniform", descent=Descent(Adam(0.1), iterations=60))

    def distance(attack):
        result = attack([scene.observation], scene.client, scene.knowledge, Key(0))
        found = layer_statistics(scene.client, scene.observation.params, Batch(result.inputs, result.targets), {})
        return float((found["1.mean"] - wanted["1.mean"]).norm())

    assert distance(replace(plain, batchnorm=1000.0)) < 0.3 * distance(plain)
    assert not replace(plain, batchnorm=1.0)([scene.observation], scene.client, scene.knowledge, Key(0)).remarks


def test_prepared_model_keeps_running_statistics_for_the_server():
    """The layer uses the batch's statistics; an unused model has no running statistics."""
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 4))
    assert running_statistics(prepare(model)[0]) == {}
    model(torch.rand(8, 1, 6, 6, generator=Key(3).generator()))
    explicit, done = prepare(model)
    assert done
    found = running_statistics(explicit)
    assert torch.equal(found["1.mean"], model[1].running_mean)
    assert torch.equal(found["1.var"], model[1].running_var)
    x = torch.rand(5, 1, 6, 6, generator=Key(4).generator())
    kept = {name: value.clone() for name, value in found.items()}
    torch.testing.assert_close(explicit(x), model(x))
    assert all(torch.equal(value, kept[name]) for name, value in running_statistics(explicit).items())


@pytest.mark.parametrize("shift", [(0, 0), (2, 5), (-3, 1)])
def test_shifted_images_are_aligned(shift):
    image = torch.rand(1, 2, 3, 8, 10, generator=Key(1).generator())
    moved = image.roll(shift, (-2, -1))
    torch.testing.assert_close(shifted_onto(moved, image[0]), image)


def test_group_prior_uses_the_mean_of_the_same_target_client():
    x = torch.rand(5, 1, 1, 4, 4, generator=Key(2).generator())
    rows = torch.tensor([0, 1, 2, 4, 5])  # three restarts of the first target client, two of the second are left
    pull = Consensus(3, register=False)
    expected = torch.cat([x[:3] - x[:3].mean(0), x[3:] - x[3:].mean(0)]).square().flatten(1).mean(1)
    torch.testing.assert_close(pull(x, rows, 0), expected)
    later = torch.zeros_like(x)  # between two looks the means stay what they were
    means = torch.cat([x[:3].mean(0).expand(3, 1, 1, 4, 4), x[3:].mean(0).expand(2, 1, 1, 4, 4)])
    torch.testing.assert_close(pull(later, rows, 1), means.square().flatten(1).mean(1))
    torch.testing.assert_close(pull(later, rows, 50), torch.zeros(5))


def test_register_aligns_restarts_before_their_mean():
    """Two restarts hold the same image, a third one a shifted copy: registered, their mean is that image."""
    image = torch.rand(1, 1, 8, 8, generator=Key(6).generator())
    x = torch.stack([image, image, image.roll(2, -1)])
    rows = torch.arange(3)
    expected = (x - image).square().flatten(1).mean(1)
    torch.testing.assert_close(Consensus(3, register=True)(x, rows, 0), expected)
    assert bool((Consensus(3, register=False)(x, rows, 0)[:2] > 1e-3).all())
    assert make_attack("gi(register=true)").register


def test_dependent_restarts_stay_in_one_chunk():
    scene = tiny()
    attack = Inversion("group", group=0.1, restarts=4, descent=Descent(iterations=1))
    assert all(size % 4 == 0 for size in attack.plan([scene.observation], scene.client, scene.knowledge, Key(0)))


def test_stronger_group_prior_brings_restarts_closer():
    """Group consistency in the loop: if few entries are sent, restarts otherwise stay near their starts."""
    scene, spread = tiny(target_clients=1), []
    client = replace(scene.client, trainable=("3.bias",))
    seen = replace(scene.observation, update={"3.bias": scene.observation.update["3.bias"]})
    for weight in (0.0, 0.1, 10.0):
        descent = Descent(Adam(0.05), iterations=120, keep="last")
        attack = Inversion("group", group=weight, restarts=4, descent=descent)
        opened = InversionProblem(attack, [seen], client, scene.knowledge, Key(0))
        found = search_rows(attack, opened, range(4), None, None).variables[INPUTS]
        spread.append(float((found - found.mean(0)).square().mean()))
    assert spread[2] < 0.1 * spread[0], spread
    assert spread[1] < 0.9 * spread[0], spread


def test_langevin_noise_stays_in_the_box_and_depends_on_the_row():
    scene = tiny()
    quiet = Inversion("q", descent=Descent(Adam(0.1), iterations=20, keep="last"))
    noisy = replace(quiet, langevin=0.5)
    runs = {
        n: a([scene.observation], scene.client, scene.knowledge, Key(0)).inputs for n, a in (("q", quiet), ("n", noisy))
    }
    moved = (runs["q"] - runs["n"]).abs()
    assert 0.005 < float(moved.mean()) < 0.5
    assert bool(((runs["n"] >= 0) & (runs["n"] <= 1)).all())
    alone = noisy([scene.observation], scene.client, scene.knowledge, Key(0), plan=(1, 1, 1)).inputs
    torch.testing.assert_close(alone, runs["n"], rtol=1e-6, atol=1e-6)


def test_the_step_size_warms_up_and_falls_along_a_cosine():
    from gradveil.attacks.inversion.descent import _scale

    state = {"control.scale": torch.ones(1)}
    descent = Descent(schedule=Cosine(warmup=10), iterations=110)
    scales = [float(_scale(state, descent, i)) for i in range(110)]
    assert scales[:3] == pytest.approx([0.1, 0.2, 0.3])
    assert max(scales) == pytest.approx(1.0)
    assert scales[59] == pytest.approx(0.5)
    assert scales[-1] == pytest.approx(0.0, abs=1e-6)
    short = Descent(schedule=Cosine(warmup=10), iterations=20)
    assert float(_scale(state, short, 1)) == 1.0, "the warm-up takes at most a tenth of the iterations"


def test_halving_spends_less_and_keeps_the_best_restart():
    scene = tiny()
    descent = Descent(Adam(0.1), iterations=160, report=10)
    done = {}
    results = {}
    for halving in (False, True):
        attack = Inversion("h", restarts=8, descent=replace(descent, halving=halving))
        progress = []
        results[halving] = attack([scene.observation], scene.client, scene.knowledge, Key(0), progress.append)
        done[halving] = int(results[halving].objectives.numel() and sum(p.active for p in progress))
    assert done[True] < 0.45 * done[False]
    assert bool((results[True].objective <= 1.5 * results[False].objective + 1e-3).all())
    whole = results[True]
    assert bool((whole.iterations == 160).all())


def test_gradinversion_recovers_a_batch():
    scene = open_experiment(
        config(
            data={"name": "digits"}, model={"name": "scheliga-cnn"}, client={"batch": 2}, target_clients=1,
            attacks=["gi(iterations=400, restarts=1)"], defences=["none"], first_target_client=0,
        )
    )  # fmt: skip
    found = recover(scene, trials(scene.config)[0], range(1), lambda _: None).tensors
    batch = scene.batch(scene.examples(0, range(1)))
    assert torch.equal(found["targets"].sort().values, batch.targets.sort().values)
    lower, upper = scene.private.space.bounds(scene.private.inputs)
    order = batch.targets.argsort(1)
    truth = batch.inputs[torch.arange(1)[:, None], order]
    own = psnr(found["inputs"], truth, lower, upper)
    mean = psnr(truth.mean(1, keepdim=True).expand_as(truth), truth, lower, upper)
    assert bool((own > mean + 1).all()), (own, mean)


def test_presets_declare_their_statistics():
    assert "statistics.*" in make_attack("gi-strong").knowledge
    assert "statistics.*" not in make_attack("gi").knowledge
