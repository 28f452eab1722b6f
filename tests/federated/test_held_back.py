"""What error feedback holds back in a round: against sums of the gradients that were not sent."""

from dataclasses import replace

import pytest
import torch

from gradveil.core.tree import norm, squared_norm, stack, tmap
from gradveil.federated.held_back import Compressed, held_back
from gradveil.federated.training_state import pack_standing, unpack_standing
from gradveil.report.training_table import ROUNDS
from tests.federated.small_federations import federation


@pytest.mark.parametrize("text", ["dgp", "adgp", "topk(0.3, feedback=true)", "clip(1) + dgp"])
def test_the_gradients_that_were_not_sent_add_up_to_the_residual(text):
    """|| sum_t (G_t - g_t) ||^2 = ||e_T||^2, with means over the clients."""
    of = federation(text)
    standing, missing = of.start(), {}
    for number in range(1, 4):
        clients = of.chosen(number)[0]
        heard, _ = of.announced(standing, clients, number)
        plain = replace(heard, send=None, messages={})
        sent = [of.local_update(standing, client, number, heard)[0] for client in clients]
        own = [of.local_update(replace(standing, clients={}), client, number, plain)[0] for client in clients]
        if text.startswith("clip"):
            own = [{name: v / max(1.0, float(norm(g))) for name, v in g.items()} for g in own]
        apart = [tmap(torch.sub, g, s) for g, s in zip(own, sent, strict=True)]
        mean = tmap(lambda v: v.mean(0), stack(apart))
        missing = tmap(torch.add, missing, mean) if missing else mean
        standing = of.round(standing)
        held = standing.records[-1].held_back
        assert held.residual == pytest.approx(float(squared_norm(missing)), rel=1e-4)
        sizes = [float(squared_norm(g)) for g in own]
        assert held.largest == pytest.approx(max(sizes), rel=1e-4)
        assert held.full + held.variance == pytest.approx(sum(sizes) / len(sizes), rel=1e-4)
        assert held.full == pytest.approx(float(squared_norm(tmap(lambda v: v.mean(0), stack(own)))), rel=1e-4)
        if number == 1:
            lost = sum(float(squared_norm(each)) for each in apart)
            assert held.gamma == pytest.approx(lost / sum(sizes), rel=1e-4)
    again = unpack_standing(pack_standing(standing, "x"), "x")
    assert again.records == standing.records


@pytest.mark.parametrize("text", ["none", "dgp(feedback=false)", "standin", "dgp + quantise(bits=3)"])
def test_without_feedback_as_the_last_stage_nothing_is_measured(text):
    of = federation(text)
    assert of.round(of.start()).records[-1].held_back is None


def test_nothing_is_told_of_a_round_that_diverged():
    large = {"w": torch.full((4,), 1e20)}
    assert held_back([Compressed(large, tmap(torch.zeros_like, large), large)]) is None


def test_the_csv_of_rounds_has_what_was_held_back():
    assert {"gamma", "residual_squared", "gradient_squared_largest", "gradient_variance"} <= {*ROUNDS}
