"""A node's operator demands a guarantee: an app that promises less is refused before it trains."""

import pytest
import torch

from gradveil.client import Local
from gradveil.core.errors import GradveilError
from gradveil.core.noise import Key
from gradveil.integrations.flower import answer, protect
from tests.integrations.flower_in_process import BATCH, asked, bits, client, context, ledger
from tests.integrations.test_flower_training import idles

DP, USER, HEURISTIC = "dp(clip=1, sigma=16)", "user-dp(clip=1, sigma=32)", "topk(0.5)"
LIMIT = {"epsilon": 8.0, "training": "lungs"}
REFUSED = [
    ({"gradveil-require": "dp"}, HEURISTIC, {}, "defence"),
    ({"gradveil-require": "example-dp"}, USER, {}, "defence"),
    ({"gradveil-require": "user-dp"}, DP, {}, "defence"),
    ({"gradveil-epsilon": 8}, HEURISTIC, {}, "privacy.epsilon"),
    ({"gradveil-epsilon": 8}, USER, {}, "privacy.epsilon"),
    ({"gradveil-epsilon": 8}, USER, {**LIMIT, "epsilon": 8.1}, "privacy.epsilon"),
    ({"gradveil-epsilon": 8}, USER, {**LIMIT, "delta": 0.01}, "privacy.delta"),
    ({"gradveil-epsilon": 8, "gradveil-delta": 1e-7}, USER, LIMIT, "privacy.delta"),
    ({"gradveil-delta": 1e-5}, USER, {}, "privacy.epsilon"),
    ({"gradveil-training": "lungs"}, USER, {"training": "lungs-2"}, "training"),
    ({"gradveil-training": "lungs"}, USER, {}, "training"),
    ({"gradveil-guard": "refuse"}, USER, {"guard": "warn"}, "guard"),
    ({"gradveil-guard": "warn"}, USER, {"guard": "ignore"}, "guard"),
    ({"gradveil-require": "dp"}, USER, {"key": Key(0)}, "key"),
    ({"gradveil-requires": "dp"}, USER, {}, "node-config.gradveil-requires"),
    ({"gradveil-require": "privacy"}, USER, {}, "node-config.gradveil-require"),
    ({"gradveil-epsilon": "8"}, USER, {}, "node-config.gradveil-epsilon"),
    ({"gradveil-guard": "ignore"}, USER, {}, "node-config.gradveil-guard"),
]


def never(message, context):
    raise AssertionError("trained")


@pytest.mark.parametrize(("demands", "text", "settings", "where"), REFUSED)
def test_an_app_that_promises_less_is_refused_before_it_trains(demands, text, settings, where, tmp_path):
    own = client(text, local=None if text == USER else Local(batch=2, lr=0.1, epochs=1))
    node = context(**demands, **{"gradveil-folder": str(tmp_path)})
    with pytest.raises(GradveilError) as caught:
        answer(asked(1, own), node, own, BATCH, **settings)
    assert where in {problem.where for problem in caught.value.problems}
    if text != DP:
        with pytest.raises(GradveilError) as caught:
            protect(text, **settings)(asked(1, own), node, never)
        assert where in {problem.where for problem in caught.value.problems}
    assert not list(tmp_path.rglob("answer-*"))


def test_an_app_that_promises_enough_is_answered(tmp_path):
    demands = {"gradveil-require": "user-dp", "gradveil-epsilon": 8, "gradveil-delta": 1e-5, "gradveil-guard": "warn"}
    for number, name in enumerate(("lungs", "hearts")):
        node = context(number, **demands, **{"gradveil-training": name, "gradveil-folder": str(tmp_path)})
        for place in (number, number + 2):
            ledger(tmp_path, place, name)
        own, settings = client(USER), {**LIMIT, "training": name, "guard": "refuse"}
        assert bits(answer(asked(1, own), node, own, BATCH, **settings)) is not None
        other = context(number + 2, **demands, **{"gradveil-training": name, "gradveil-folder": str(tmp_path)})
        assert bits(protect(USER, **settings)(asked(1, own), other, idles)) is not None


def test_app_cannot_move_its_files_if_the_node_has_demands(tmp_path):
    own = client(USER)
    with pytest.raises(GradveilError, match="folder: replaces the node's folder"):
        answer(asked(1, own), context(**{"gradveil-require": "dp"}), own, BATCH, folder=tmp_path)


def test_undefended_statistics_do_not_meet_a_demanded_guarantee(tmp_path):
    own = client(USER, model=torch.nn.Linear(4, 2))
    node = context(**{"gradveil-require": "user-dp", "gradveil-folder": str(tmp_path)})
    with pytest.raises(GradveilError, match="running statistics are sent"):
        protect(USER, statistics="send")(asked(1, own), node, never)
