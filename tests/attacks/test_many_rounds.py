"""Many rounds of one model as one: their mean, and estimates from the choices of a sampling defence."""

from dataclasses import replace

import pytest
import torch

from gradveil.attacks.attack_catalogue import make_attack
from gradveil.attacks.many_rounds import Pooled
from gradveil.attacks.protocol import Prospect
from gradveil.core.errors import GradveilError
from gradveil.core.noise import Key
from gradveil.core.types import Batch
from gradveil.data import load
from gradveil.defences import parse
from tests.attacks.small_experiments import pictures, tiny

DIGITS = load("digits")
PUBLIC = Batch(DIGITS.public.inputs, DIGITS.public.targets)


def watched(scene, defence, rounds):
    """Compute the clients' updates of many rounds from the same parameters."""
    client = parse(defence)(scene.client)
    params, target_clients = client.params(), len(scene.truth.targets)
    spec = client.noise_spec(params, Batch(scene.truth.inputs[0], scene.truth.targets[0]))
    state = {n: v.expand(target_clients, *v.shape) for n, v in client.init(params).items()}
    seen = []
    for number in range(rounds):
        drawn = [spec.sample(Key(0, ("client", target_client, number))) for target_client in range(target_clients)]
        noise = {n: torch.stack([each[n] for each in drawn]) for n in spec}
        with torch.no_grad():
            sent, _ = client.updates(params, scene.truth, noise, state)
        seen.append(replace(scene.observation, update=sent, round=number))
    return client, seen


def angle(scene, attack, client, seen):
    """The cosine between the estimate and the undefended gradient, of the worst target client."""
    knowledge = replace(scene.knowledge, public=PUBLIC)
    found = attack.pooled(seen, client, knowledge, Key(0)).update
    pair = [torch.cat([v.flatten(1) for v in update.values()], 1) for update in (found, scene.observation.update)]
    return float(torch.cosine_similarity(*pair).min())


def test_mean_of_one_round_is_its_update():
    scene = tiny()
    plain, pooled = make_attack("ig-scheliga(iterations=5)"), make_attack("averaging(iterations=5)")
    given = [scene.observation], scene.client, scene.knowledge, Key(0)
    assert torch.equal(pooled(*given).inputs, plain(*given).inputs)
    assert pooled.plan(*given) == plain.plan(*given)
    assert float(pooled.evaluate(*given, scene.truth.inputs, {}).max()) < 0.01
    matches = (attack.match(*given, scene.truth.inputs, {}) for attack in (pooled, plain))
    torch.testing.assert_close(*matches, rtol=0, atol=0, equal_nan=True)


def test_noise_of_mean_zero_is_averaged_away():
    scene, averaging = tiny(), make_attack("averaging")
    client, seen = watched(scene, "gaussian(0.05)", 400)
    assert angle(scene, averaging, client, seen) > 0.99 > angle(scene, averaging, client, seen[:1])
    moved = [replace(each, params={n: v + each.round for n, v in each.params.items()}) for each in seen[:3]]
    whole = averaging.pooled(moved, client, scene.knowledge, Key(0))
    assert all(torch.allclose(value, seen[0].params[name] + 1) for name, value in whole.params.items())


def test_right_angles_of_many_rounds_leave_the_gradients_own_line():
    scene, attack = tiny(), make_attack("right-angles(iterations=5)")
    client, seen = watched(scene, "censor(trials=1)", 40)
    pooled = attack.pooled(seen, client, scene.knowledge, Key(0)).update
    for name, truth in scene.observation.update.items():
        rows, (own, size) = pooled[name].flatten(2)[0], (truth[0].flatten(), truth[0].norm())
        assert len(rows) == min(40, max(1, own.numel() - 1))
        if own.numel() > 1:
            torch.testing.assert_close(
                rows @ rows.T, size.square() * torch.eye(len(rows)).to(rows), atol=1e-4, rtol=1e-3
            )
            assert float((rows @ own).abs().max()) < 1e-4 * float(size.square())
    given = seen, client, scene.knowledge, Key(0)
    truths = attack.match(*given, scene.truth.inputs, {})[:, 0]
    others = attack.match(*given, torch.rand_like(scene.truth.inputs), {})[:, 0]
    assert float(truths.max()) < 1e-4
    assert float(others.min()) > 0.05
    assert attack(*given).objective.isfinite().all()


def test_ranks_use_hits_for_magnitudes_and_observed_signs():
    attack, scene = Pooled("x", estimate="ranks"), pictures("scheliga-cnn", "digits", 1)
    client, seen = watched(scene, "minmax(0.9)", 5)
    knowledge = replace(scene.knowledge, public=PUBLIC)
    found = attack.pooled(seen, client, knowledge, Key(0)).update["head.bias"][0]
    size, mean = (each["head.bias"] for each in attack._public_gradients(seen[0], client, knowledge, Key(0)))
    sent = torch.stack([each.update["head.bias"][0] for each in seen])
    hits = (sent != 0).sum(0).tolist()
    places = sorted(range(10), key=lambda place: -hits[place])
    for place in range(10):
        ties = [float(size[rank]) for rank, other in enumerate(places) if hits[other] == hits[place]]
        assert abs(float(found[place])) == pytest.approx(sum(ties) / len(ties), rel=1e-5)
        sign = sent[:, place].sum().sign() if hits[place] else mean[place].sign()
        assert float(found[place].sign()) == float(sign)


def test_ranks_and_thresholds_reduce_the_angle_to_the_gradient():
    scene = pictures("scheliga-cnn", "digits", 2)
    client, seen = watched(scene, "minmax(0.95)", 30)
    mean, ranks, thresholds = (
        [angle(scene, Pooled("x", estimate=estimate), client, seen[:count]) for count in (1, 10, 30)]
        for estimate in ("mean", "ranks", "thresholds")
    )
    assert ranks[0] == thresholds[0] > mean[0] + 0.05
    assert ranks[1] > mean[1] + 0.05
    assert thresholds[2] > 0.97 > ranks[2] > 0.94 > mean[2]


def test_glaus_by_dlg_searches_labels_with_the_magnitudes_of_one_other_client():
    """The paper's attacker is a client: magnitudes are those of its own gradient, in the order of the victim's hits."""
    attack, scene = make_attack("glaus(search=dlg, magnitudes=client)"), pictures("scheliga-cnn", "digits", 1)
    assert (attack.objective, attack.labels, type(attack.descent.stepper).__name__) == ("l2", "joint", "LBFGS")
    client, seen = watched(scene, "standin + minmax(0.9)", 3)
    knowledge = replace(scene.knowledge, public=PUBLIC)
    own, mean = (
        replace(attack, magnitudes=kind).pooled(seen, client, knowledge, Key(0)).update["head.weight"]
        for kind in ("client", "mean")
    )
    assert torch.equal(own.sign(), mean.sign())
    assert not torch.equal(own.abs(), mean.abs())
    few = replace(attack, descent=replace(attack.descent, iterations=3), restarts=1)
    assert few(seen, client, knowledge, Key(0)).inputs.shape == scene.truth.inputs.shape


@pytest.mark.parametrize("estimate", ["mean", "ranks", "thresholds"])
def test_estimates_do_not_depend_on_other_target_clients(estimate):
    """One target client sends too few entries of a layer to estimate its threshold."""
    scene, attack = pictures("scheliga-cnn", "digits", 2), Pooled("x", estimate=estimate)
    client, seen = watched(scene, "minmax(0.95)", 4)
    for each in seen:
        each.update["head.weight"][1, :, 8:] = 0
    knowledge = replace(scene.knowledge, public=PUBLIC)
    both = attack.pooled(seen, client, knowledge, Key(0)).update
    for row in range(2):
        own = [
            replace(s, update={n: v[row : row + 1] for n, v in s.update.items()}, target_clients=(row,)) for s in seen
        ]
        alone = attack.pooled(own, client, knowledge, Key(0)).update
        assert all(torch.equal(alone[name][0], value[row]) for name, value in both.items())


def test_ranks_without_public_images_raise():
    scene = tiny()
    glaus, prospect = make_attack("glaus"), Prospect(scene.client, (1, 6, 6), 2, 4, public=1)
    assert [p.where for p in glaus.problems(prospect)] == ["data.public"]
    assert not list(make_attack("averaging").problems(prospect))
    with pytest.raises(GradveilError, match="too few public images"):
        glaus([scene.observation], scene.client, scene.knowledge, Key(0))
