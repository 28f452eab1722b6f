"""Scores of ATS policies against a plain loop and NumPy, and what they rank first."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cosine_similarity, cross_entropy

from gradveil.client import Client
from gradveil.core.errors import GradveilError
from gradveil.core.noise import Key
from gradveil.core.types import Batch, Domain
from gradveil.data import load
from gradveil.defences import Ats, ats_scores, parse
from gradveil.defences.ats_scores import POINTS, judge, privacy_score, random_policies, utility_score
from gradveil.nn.models import build

NOTHING = "28-39-28"
"""Solarise from a level that there is not, and colour by nothing."""


def experiment(count: int = 8):
    public = load("digits").public
    net = build("scheliga-cnn", channels=1, size=32, classes=10, generator=Key(0).generator())
    return Client(net, domain=Domain(public.space, 10)), Batch(public.inputs[:count], public.targets[:count])


def gradient(model: nn.Module, x: torch.Tensor, y: torch.Tensor):
    return torch.autograd.grad(cross_entropy(model(x[None]), y[None]), list(model.parameters()))


def test_privacy_score_is_the_area_under_the_similarity():
    client, batch = experiment(2)
    key, (lower, upper) = Key(4), client.domain.space.bounds(batch.inputs)
    result = privacy_score(client, Ats("3-1-7"), batch, key)
    noise = Ats("3-1-7").noise(batch).sample(key.child("policy"))
    goals = Ats("3-1-7").apply(batch, noise, client.domain).inputs
    u = torch.rand(batch.inputs.shape, generator=key.child("start").generator())
    for start, goal, target, score in zip(lower + (upper - lower) * u, goals, batch.targets, result, strict=True):
        wanted = gradient(client.model, goal, target)
        heights = []
        for t in np.linspace(0, 1, POINTS):
            seen = gradient(client.model, float(1 - t) * start + float(t) * goal, target)
            pairs = zip(seen, wanted, strict=True)
            heights.append(np.mean([float(cosine_similarity(a.flatten(), b.flatten(), 0)) for a, b in pairs]))
        assert heights[-1] == pytest.approx(1, abs=1e-5)
        assert float(score) == pytest.approx(np.trapezoid(heights, dx=1 / 20), abs=1e-4)


def test_scores_of_a_large_network_use_small_groups(monkeypatch):
    client, batch = experiment(3)
    whole = privacy_score(client, Ats("3-1-7"), batch, Key(4))
    for rows in (50, 5):  # two images at once, and parts of one
        monkeypatch.setattr(ats_scores, "_ROWS", rows)
        torch.testing.assert_close(privacy_score(client, Ats("3-1-7"), batch, Key(4)), whole, rtol=1e-4, atol=1e-5)


def test_utility_score_follows_the_correlations():
    client, batch = experiment()
    rows = []
    for x in Ats("0").apply(batch, {}, client.domain).inputs:
        x = x[None].clone().requires_grad_()
        (slope,) = torch.autograd.grad(client.model(x).sum(), x)
        rows.append(slope.flatten().double().numpy())
    values = np.clip(np.linalg.eigvalsh(np.corrcoef(rows)), 0, None) + 1e-5
    expected = -np.sum(np.log(values) + 1 / values)
    assert utility_score(client, Ats("0"), batch, Key(0)) == pytest.approx(expected, rel=1e-3)


def test_utility_of_nearly_equal_examples_is_lower():
    client, batch = experiment()
    same = Batch(batch.inputs[:1] + 1e-3 * batch.inputs, batch.targets)
    assert utility_score(client, Ats(NOTHING), same, Key(0)) < utility_score(client, Ats(NOTHING), batch, Key(0)) - 100


def test_search_ranks_hiding_policies_above_unchanged_images():
    client, batch = experiment()
    result = judge(client, client, [NOTHING, "3-1-7"], batch, Key(0), least=-1e9)
    assert [each.policy for each in result] == ["3-1-7", NOTHING]
    assert result[0].privacy < result[1].privacy - 0.03


def test_search_excludes_policies_of_low_utility():
    client, batch = experiment(4)
    utilities = {policy: utility_score(client, Ats(policy), batch, Key(0)) for policy in (NOTHING, "3-1-7")}
    worse, better = sorted(utilities, key=lambda policy: utilities[policy])
    middle = sum(utilities.values()) / 2
    assert [each.policy for each in judge(client, client, [worse, better], batch, Key(0), least=middle)] == [better]


def test_scores_switch_model_noise_off():
    client, batch = experiment(3)
    dropped = parse("dropout(0.5) + ats")(client)
    plain, off = (privacy_score(each, Ats("3"), batch, Key(1)) for each in (client, dropped))
    torch.testing.assert_close(off, plain, rtol=1e-4, atol=1e-5)
    assert utility_score(dropped, Ats("3"), batch, Key(1)) == pytest.approx(
        utility_score(client, Ats("3"), batch, Key(1)), rel=1e-3
    )


def test_random_policies_parse():
    drawn = list(random_policies(50, Key(3)))
    assert len(set(drawn)) == 50
    assert all(len(Ats(policy).policies[0]) == 3 for policy in drawn)
    assert drawn != list(random_policies(50, Key(4)))
    assert list(random_policies(60, Key(3)))[:50] == drawn


def test_random_policies_have_distinct_effects():
    every = list(random_policies(29, Key(0), length=1))
    assert len({"8", "23", "31", "36", "41", "44", "49"} & set(every)) == 1  # autocontrast at any level
    with pytest.raises(GradveilError, match="29 policies of 1 transforms differ"):
        next(random_policies(30, Key(0), length=1))


def test_scores_without_a_domain_raise():
    client, batch = experiment(2)
    with pytest.raises(GradveilError, match="domain"):
        privacy_score(Client(client.model), Ats("3"), batch, Key(0))
