"""A search from the analytic solution: exact if that is exact, better than both against a defence."""

import pytest
import torch
from torch import nn

from gradveil.attacks.attack_catalogue import make_attack
from gradveil.attacks.knowledge import Known
from gradveil.attacks.protocol import Prospect
from gradveil.client import Client
from tests.attacks.test_analytic import attack, dense
from tests.attacks.test_analytic_with_prior import mean_error, sent_by


def test_solved_start_is_exact_when_undefended():
    scene = dense(nn.Linear(36, 50), nn.ReLU(), nn.Linear(50, 4))
    found = attack(scene, "ig(start=solved, iterations=2, tv=0)")
    torch.testing.assert_close(found.inputs, scene.truth.inputs, rtol=1e-6, atol=1e-6)
    assert bool((found.objective < 1e-9).all())
    assert bool((found.initial > 0.01).all())
    torch.testing.assert_close(found.initial, attack(scene, "ig(iterations=1, tv=0)").initial)


def test_other_restarts_start_at_random():
    scene = dense(nn.Linear(36, 50), nn.ReLU(), nn.Linear(50, 4))
    text = "ig(iterations=1, restarts=2, tolerance=0{})"
    solved, drawn = (attack(scene, text.format(more)).objectives for more in (", start=solved", ""))
    torch.testing.assert_close(solved[:, 1], drawn[:, 1])
    assert bool((solved[:, 0] < drawn[:, 0]).all())


@pytest.mark.parametrize("defence", ["prune(0.3)", "dp(clip=20, sigma=1e-3)"])
def test_solved_start_beats_the_analytic_attack_and_the_search_on_a_defence(defence):
    scene = sent_by(defence)
    search = "cdia({}iterations=100, lr=0.01, tv=1e-4)"
    both = mean_error(scene, search.format("start=solved, "))
    assert both < 0.9 * mean_error(scene, "analytic(prior=public)")
    assert both < 0.9 * mean_error(scene, search.format(""))


def test_only_adaptive_solved_starts_know_public_images():
    assert isinstance(make_attack("cdia(start=solved)").knowledge["public"], Known)
    assert "public" not in make_attack("ig(start=solved)").knowledge
    assert make_attack("ig(start=solved)").solver.prior == "none"
    assert make_attack("dlg(start=solved)").solver.labels == "restore"


def test_unsuitable_model_raises():
    client = Client(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(32, 4)))
    (problem,) = make_attack("ig(start=solved)").problems(Prospect(client, (1, 6, 6), 1, 4, False))
    assert problem.where.startswith("start=solved")
