from dataclasses import replace

import pytest
import torch
from torch import nn

from gradveil.attacks.attack_catalogue import ATTACKS, InversionEntry, make_attack
from gradveil.attacks.inversion.descent import Descent
from gradveil.attacks.inversion.inversion import Inversion
from gradveil.attacks.inversion.optimisers import LBFGS, Adam
from gradveil.attacks.knowledge import Knowledge, Optimise, Sample
from gradveil.attacks.labels import restore_labels, smallest_row
from gradveil.attacks.protocol import Active, Progress
from gradveil.client import Client, Local
from gradveil.core.errors import GradveilError
from gradveil.core.noise import Key
from gradveil.core.tree import stack
from gradveil.core.types import Batch
from gradveil.nn.module_paths import last_layer
from gradveil.nn.stochastic_layers import VariationalBottleneck
from gradveil.spaces import ImageSpace
from tests.attacks.small_experiments import observed, pictures, tiny

ZERO = Key(0)
SHORT = Inversion("short", tv=1e-3, descent=Descent(Adam(lr=0.1), iterations=50, report=10), restarts=2)


def run(scene, attack, plan=(), key=ZERO, progress=None):
    knowledge = scene.knowledge
    if "public" in attack.knowledge:
        shape, draw = knowledge.space.shape, Key(9).generator()
        knowledge = replace(knowledge, public=Batch(torch.rand(6, *shape, generator=draw), torch.arange(6) % 4))
    return attack([scene.observation], scene.client, knowledge, key, progress, plan)


def test_same_plan_is_bit_identical_and_another_plan_agrees():
    scene = tiny()
    first, again = run(scene, SHORT, (4, 2)), run(scene, SHORT, (4, 2))
    assert torch.equal(first.inputs, again.inputs)
    assert torch.equal(first.objectives, again.objectives)
    assert first.plan == (4, 2)
    for plan in ((6,), (1,) * 6, (3, 3)):
        other = run(scene, SHORT, plan)
        torch.testing.assert_close(other.objectives, first.objectives, rtol=1e-6, atol=1e-12)
        torch.testing.assert_close(other.inputs, first.inputs, rtol=1e-6, atol=1e-6)


def test_draws_depend_on_the_target_client_not_its_place():
    scene = tiny()
    whole = run(scene, SHORT)
    last = replace(
        scene.observation, update={n: v[2:] for n, v in scene.observation.update.items()}, target_clients=(2,)
    )
    knowledge = replace(scene.knowledge, targets=scene.truth.targets[2:])
    alone = SHORT([last], scene.client, knowledge, Key(0))
    torch.testing.assert_close(alone.inputs[0], whole.inputs[2], rtol=1e-6, atol=1e-6)
    other = run(scene, SHORT, key=Key(1))
    assert not torch.allclose(other.inputs, whole.inputs, atol=1e-2)


def test_draws_of_each_iteration_depend_on_the_row_only():
    """Noise of each iteration is the same with any plan, and after other rows leave the batch."""
    scene = tiny()
    bottleneck = nn.Sequential(*scene.client.model[:3], VariationalBottleneck(144, 8), nn.Linear(144, 4)).double()
    nn.init.normal_(bottleneck[-1].weight, std=0.3, generator=Key(2).generator())
    client = Client(bottleneck)
    spec = client.noise_spec(client.params(), Batch(scene.truth.inputs[0], scene.truth.targets[0]))
    noise = stack([spec.sample(Key(5, (target_client,))) for target_client in range(3)])
    params = client.params()
    sent, _ = client.updates(params, scene.truth, noise, {})
    observation = replace(scene.observation, params=params, update=sent)
    knowledge = replace(scene.knowledge, tensors={"model.*": Sample()})
    # Two reports in, rows whose noise was kind have stalled and left.
    attack = replace(SHORT, descent=replace(SHORT.descent, patience=8, report=5))
    whole = attack([observation], client, knowledge, Key(0), plan=(6,))
    assert len(set(whole.iterations.tolist())) > 1
    for plan in ((1,) * 6, (4, 2)):
        other = attack([observation], client, knowledge, Key(0), plan=plan)
        torch.testing.assert_close(other.objectives, whole.objectives, rtol=1e-6, atol=1e-12)
        assert torch.equal(other.iterations, whole.iterations)


def test_the_loop_agrees_with_a_plain_loop_over_one_target_client():
    scene = tiny(target_clients=2)
    attack = replace(SHORT, restarts=1, box=False)
    ours = run(scene, attack)
    for target_client in range(2):
        start = attack_start(scene, attack, target_client)
        x = start.clone().requires_grad_()
        optimiser = torch.optim.Adam([x], lr=0.1)
        best = float("inf")
        for _ in range(50):
            optimiser.zero_grad()
            value = plain_objective(scene, x, target_client)
            best = min(best, value.item())
            value.backward()
            optimiser.step()
        assert abs(ours.objective[target_client].item() - best) < 1e-6 * best


def attack_start(scene, attack, target_client):
    key = Key(0).child(target_client, 0).child("inputs")
    return torch.randn(scene.truth.inputs.shape[1:], dtype=torch.float64, generator=key.generator())


def plain_objective(scene, x, target_client):
    """The published recipe: double backward through an ordinary forward, cosine by its formula, TV by differences."""
    model = scene.client.model
    loss = nn.functional.cross_entropy(model(x), scene.truth.targets[target_client])
    grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    ours = torch.cat([g.flatten() for g in grads])
    theirs = torch.cat([v[target_client].flatten() for v in scene.observation.update.values()])
    distance = 1 - ours @ theirs / (ours.norm() * theirs.norm())
    variation = (x[..., 1:, :] - x[..., :-1, :]).abs().mean() + (x[..., 1:] - x[..., :-1]).abs().mean()
    return distance + 1e-3 * variation


def test_restarts_are_chosen_by_the_attackers_objective():
    scene = tiny()
    found = run(scene, replace(SHORT, restarts=4))
    assert found.objectives.shape == (3, 4)
    assert torch.equal(found.objective, found.objectives.min(1).values)
    assert torch.equal(found.restart, found.objectives.argmin(1))


def test_the_plan_does_not_choose_the_restart_of_a_solved_target_client():
    scene = tiny()
    attack = replace(
        ATTACKS["dlg"].make(), descent=Descent(LBFGS(), iterations=300, tolerance=1e-6, patience=100, report=10)
    )
    whole, single = run(scene, attack, (12,)), run(scene, attack, (1,) * 12)
    assert set(whole.status) == {"converged"}
    assert torch.equal(whole.restart, single.restart)
    torch.testing.assert_close(single.objective, whole.objective, rtol=1e-3, atol=0)


def quick(name):
    """Make a preset, with the smallest of generators."""
    small = {"grnn": "grnn(width=1)", "gias": "gias(width=1, lessons=9)", "ggl": "ggl(width=1, lessons=9)"}
    return make_attack(small.get(name, name))


MADE = {name: entry.make() for name, entry in ATTACKS.items() if isinstance(entry, InversionEntry)}
INVERSIONS = [n for n, made in MADE.items() if n != "glaus" and not isinstance(made, Active)]  # it needs public images


@pytest.mark.parametrize("name", INVERSIONS)
def test_every_preset_diverges_on_nan_weights(name):
    scene = tiny(target_clients=2)
    with torch.no_grad():
        scene.client.model[0].weight[0] = torch.nan
    broken = observed(scene.client, scene.truth, 4, scene.knowledge.space)
    attack = quick(name)
    attack = replace(attack, descent=replace(attack.descent, iterations=5), restarts=2)
    found = run(broken, attack)
    assert found.status == ("diverged", "diverged")
    assert bool(torch.isinf(found.objective).all())
    assert bool(torch.isfinite(found.inputs).all())


def test_every_preset_moves_its_dummies_and_lowers_its_objective():
    scene = tiny(target_clients=2)
    for name in INVERSIONS:
        if name == "right-angles":  # it is made for updates that are turned
            continue
        attack = quick(name)
        attack = replace(attack, descent=replace(attack.descent, iterations=25), restarts=8 if attack.evolves else 1)
        found = run(scene, attack)
        assert bool((found.objective < 0.9 * found.initial).all()), name


def test_progress_counts_up_to_the_budget():
    seen: list[Progress] = []
    run(tiny(), SHORT, (4, 2), progress=seen.append)
    counts = [p.row_iterations for p in seen]
    assert counts == sorted(counts)
    assert counts[-1] == seen[-1].row_budget == 6 * 50
    assert seen[-1].target_clients == 3


def test_missing_labels_raise():
    scene = tiny()
    with pytest.raises(GradveilError, match="never granted"):
        SHORT([scene.observation], scene.client, replace(scene.knowledge, targets=None), Key(0))


def test_plan_of_another_attack_raises():
    with pytest.raises(GradveilError, match="covers 5 rows of 6"):
        run(tiny(), SHORT, (5,))


def test_optimising_a_discrete_tensor_raises():
    with pytest.raises(GradveilError) as caught:
        Knowledge(ImageSpace((1, 4, 6)), 1)
    assert [p.where for p in caught.value.problems] == ["knowledge.classes"]


def test_optimising_the_order_of_examples_raises():
    scene = tiny(target_clients=1, examples=2)
    client = Client(scene.client.model, local=Local(batch=1, lr=0.1, steps=2))
    knowledge = replace(scene.knowledge, tensors={"schedule": Optimise()})
    with pytest.raises(GradveilError, match="discrete"):
        SHORT([scene.observation], client, knowledge, Key(0))


def test_simulated_client_trains_locally():
    """The update of three local steps is inverted by an attacker who simulates them."""
    scene = tiny(target_clients=1)
    client = Client(scene.client.model, local=Local(batch=1, lr=0.1, steps=3))
    params = client.params()
    noise = {"schedule": torch.zeros(1, 3, 1, dtype=torch.long)}
    sent, _ = client.updates(params, scene.truth, noise, {})
    observation = replace(scene.observation, update=sent)
    attack = Inversion("local", objective="l2", descent=Descent(LBFGS(), iterations=200, tolerance=1e-20), restarts=2)
    found = attack([observation], client, scene.knowledge, Key(0))
    assert (found.inputs - scene.truth.inputs).abs().max() < 1e-2


@pytest.mark.parametrize("bias", [True, False])
def test_idlg_reads_single_labels(bias):
    scene = tiny(target_clients=8)
    model = scene.client.model
    if not bias:
        model[3] = nn.Linear(144, 4, bias=False).double()
        nn.init.normal_(model[3].weight, std=0.3, generator=Key(3).generator())
    scene = observed(Client(model), scene.truth, 4, scene.knowledge.space)
    assert torch.equal(smallest_row(scene.observation.update, "3"), scene.truth.targets)


@pytest.mark.parametrize("examples", [1, 4, 8])
def test_labels_of_a_batch_are_restored_with_repeats(examples):
    scene = pictures("lenet-zhu", "digits", 6, examples)
    found = restore_labels(
        scene.observation.update,
        last_layer(scene.client.model),
        examples,
        scene.client,
        scene.observation.params,
        scene.knowledge,
        Key(0),
    )
    truth = scene.truth.targets.sort(1).values
    hits = sum(
        min((f == c).sum().item(), (t == c).sum().item()) for f, t in zip(found, truth, strict=True) for c in range(10)
    )
    assert any(len(set(row.tolist())) < examples for row in truth) or examples == 1, "no repeated label to restore"
    assert hits / truth.numel() >= 0.9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("idg", "did you mean"),
        ("ig(", "never closed"),
        ("ig(steps=3)", "unknown argument"),
        ("ig(iterations='many')", "a whole number"),
        ("ig(iterations=0)", "at least 1"),
        ("ig + dlg", "2 attacks"),
    ],
)
def test_invalid_attack_texts_raise_with_a_fix(text, message):
    with pytest.raises(GradveilError, match=message):
        make_attack(text)


def test_an_attack_is_named_by_its_canonical_text():
    attack = make_attack("ig( restarts = 2,iterations=500 )")
    assert attack.name == "ig(iterations=500, restarts=2)"
    assert make_attack(attack.name) == attack
    assert (attack.restarts, attack.descent.iterations) == (2, 500)


def test_trace_equals_an_earlier_end():
    scene = tiny()
    attack = replace(SHORT, descent=replace(SHORT.descent, iterations=64, report=7))
    whole = run(scene, attack)
    assert list(whole.trace) == [1, 2, 4, 8, 16, 32]
    for count in (8, 32):
        short = run(scene, replace(attack, descent=replace(attack.descent, iterations=count)))
        assert torch.equal(whole.trace[count], short.inputs)
    for plan in ((1,) * 6, (4, 2)):
        again = run(scene, attack, plan)
        torch.testing.assert_close(again.trace[16], whole.trace[16], rtol=1e-6, atol=1e-6)


def test_trace_after_the_end_is_the_result():
    scene = tiny()
    easy = replace(SHORT, descent=replace(SHORT.descent, iterations=64, tolerance=1e9, report=2))
    found = run(scene, easy)
    assert set(found.status) == {"converged"}
    assert all(torch.equal(value, found.inputs) for count, value in found.trace.items() if count > 1)
