"""SVDefense: each layer's strongest directions are sent, and what is sent shows as much of an update as it can."""

import math

import pytest
import torch
from torch import nn

import gradveil
from gradveil.client import Client
from gradveil.core.errors import GradveilError
from gradveil.core.noise import Key
from gradveil.core.tree import squared_norm, tmap
from gradveil.core.types import Batch, Context
from gradveil.data import load
from gradveil.defences import parse
from gradveil.defences.low_rank import LowRank
from gradveil.nn.models import build

NOTHING = Context({}, Batch(torch.zeros(1, 1), torch.zeros(1, dtype=torch.long)))


def sent(update, noise=None, **settings):
    return LowRank(**settings).apply(update, {}, noise or {}, NOTHING)[0]


def with_values(values, outputs=6, inputs=9, seed=0):
    """Return a matrix of these singular values, and its left and right singular vectors."""
    generator = Key(seed).generator()
    left, right = (
        torch.linalg.qr(torch.randn(n, len(values), generator=generator, dtype=torch.float64)).Q
        for n in (outputs, inputs)
    )
    return left @ torch.diag(torch.tensor(values, dtype=torch.float64)) @ right.mT, left, right


def test_sent_layer_is_the_truncated_decomposition_of_least_rank():
    matrix, left, right = with_values([4.0, 3.0, 2.0, 1.0])
    for energy, rank in ((0.5, 1), (0.6, 2), (0.9, 3), (0.999, 4)):
        part = left[:, :rank] @ torch.diag(torch.tensor([4.0, 3.0, 2.0, 1.0][:rank]).double()) @ right[:, :rank].mT
        update = sent({"w": matrix.reshape(6, 3, 3)}, energy=energy, least=energy, channels="equal")["w"]
        torch.testing.assert_close(update.reshape(6, 9), part)


def test_weighted_directions_approximate_the_weighted_matrix():
    matrix = with_values([4.0, 3.0, 2.5, 2.0])[0] * torch.tensor([5.0, 0.1, 1.0, 1.0, 2.0, 0.3]).double()[:, None]
    weights = matrix.norm(dim=1, keepdim=True)
    u, s, vh = torch.linalg.svd(weights * matrix, full_matrices=False)
    update = sent({"w": matrix}, energy=0.8, least=0.8)["w"]
    rank = int(torch.linalg.matrix_rank(update))
    assert 1 <= rank < 4
    torch.testing.assert_close(update, (u[:, :rank] * s[:rank]) @ vh[:rank] / weights)
    energies = s.square().cumsum(0) / s.square().sum()
    assert energies[rank - 1] >= 0.8 > (energies[rank - 2] if rank > 1 else 0)
    equal = sent({"w": matrix}, energy=0.8, least=0.8, channels="equal")["w"]
    assert not torch.allclose(update, equal)


def test_threshold_follows_the_entropy_of_the_client():
    even = torch.eye(10, dtype=torch.float64)  # of ten equal values 90% of the energy are nine
    assert int(torch.linalg.matrix_rank(sent({"w": even}, energy=0.9, least=0.3)["w"])) == 9
    steep = torch.diag(torch.tensor([1.0, 1e-9, 1e-9])).double()
    # Next to a layer of a single direction, the mean entropy is about a half, and so is the share that is sent.
    both = sent({"w": even, "v": steep}, energy=0.9, least=0.2, channels="equal")
    assert int(torch.linalg.matrix_rank(both["w"])) == math.ceil(10 * (0.2 + 0.7 / 2))
    assert int(torch.linalg.matrix_rank(both["v"])) == 1


def test_one_image_leaves_a_linear_layer_as_it_is():
    client = Client(nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 3)).double())
    batch = Batch(torch.randn(1, 1, 4, 4, generator=Key(0).generator(), dtype=torch.float64), torch.tensor([1]))
    plain, defended = (c.update(c.params(), batch, {}, {})[0] for c in (client, parse("svdefense")(client)))
    torch.testing.assert_close(plain, defended)


@pytest.mark.parametrize("channels", ["norm", "equal"])
def test_true_update_shows_as_what_was_sent_and_no_other_does(channels):
    client = Client(build("scheliga-cnn", channels=1, size=32, classes=10, generator=Key(0).generator()))
    client = parse(f"svdefense(channels={channels})")(client)
    data, params = load("digits").private, client.params()
    true, wrong = (Batch(data.inputs[i : i + 1], data.targets[i : i + 1]) for i in (0, 1))
    update = client.update(params, true, {}, {})[0]
    evidence = client.evidence(update)
    client.noise_spec(params, true).check(evidence, client.intermediates(params))
    differences = [
        squared_norm(tmap(torch.sub, client.update(params, batch, evidence, {})[0], update)) for batch in (true, wrong)
    ]
    assert differences[0] < 1e-8 * squared_norm(update)
    assert differences[1] > 0.1 * squared_norm(update)


def test_what_was_cut_counts_where_it_lies_along_the_loads():
    """Of two updates that are equal along the sent direction, one has its other rows in proportion to the loads."""
    truth = torch.tensor([[3.0, 0.0, 0.0], [4.0, 0.0, 0.0]]).double()
    evidence = LowRank(channels="equal").evidence({"w": truth})
    along = truth + torch.tensor([[0.0, 3.0, 0.0], [0.0, 4.0, 0.0]]).double()
    across = truth + torch.tensor([[0.0, 4.0, 0.0], [0.0, -3.0, 0.0]]).double()
    torch.testing.assert_close(sent({"w": across}, evidence, channels="equal")["w"], truth)
    torch.testing.assert_close(sent({"w": along}, evidence, channels="equal")["w"], along)


def test_later_stages_hide_the_directions():
    client = Client(nn.Linear(4, 3))
    batch = Batch(torch.randn(2, 4, generator=Key(0).generator()), torch.tensor([0, 1]))
    for text, shown in (("svdefense", True), ("gaussian(0.1) + svdefense", True), ("svdefense + quantise", False)):
        defended = parse(text)(client)
        noise = defended.noise_spec(client.params(), batch).sample(Key(1))
        evidence = defended.evidence(defended.update(client.params(), batch, noise, {})[0])
        assert any(".directions." in name for name in evidence) == shown, text


def test_numbers_that_are_not_finite_or_large_are_sent():
    large = torch.tensor([[1e30, 0.0], [0.0, 1e-30]])
    torch.testing.assert_close(sent({"w": large})["w"], torch.tensor([[1e30, 0.0], [0.0, 0.0]]))
    assert sent({"w": torch.tensor([[torch.nan, 1.0], [1.0, torch.inf]])})["w"].isnan().any()
    assert not sent({"w": torch.zeros(3, 2), "b": torch.zeros(3)})["w"].any()


def test_lowest_threshold_above_the_highest_raises():
    with pytest.raises(GradveilError, match=r"svdefense\.least: is 0\.6, more than energy, 0\.5"):
        parse("svdefense(energy=0.5, least=0.6)")


def test_rounds_of_one_batch_show_what_lies_in_no_single_one():
    """Each round's directions lie in the span of the batch's images, and those of several rounds are others."""
    client = Client(build("mlp", channels=1, size=8, classes=10, width=64, generator=Key(0).generator()).double())
    client = parse("svdefense(energy=0.1, least=0.1)")(client)
    images = torch.randn(4, 1, 8, 8, generator=Key(1).generator(), dtype=torch.float64)
    params, batch, shown = client.params(), Batch(images, torch.arange(4)), []
    for _ in range(8):
        update = client.update(params, batch, {}, {})[0]
        shown.append(update["body.layer0.linear.weight"])
        params = {name: value - 0.5 * update[name] for name, value in params.items()}
    assert [int(torch.linalg.matrix_rank(of_round, rtol=1e-6)) for of_round in shown] == [1] * 8
    span = torch.linalg.svd(torch.cat(shown))[2][:4]
    outside = images.flatten(1) - images.flatten(1) @ span.mT @ span
    assert float(outside.norm()) < 1e-6 * float(images.norm())


def test_search_that_infers_the_directions_finds_more_than_one_that_ignores_them():
    model = build("scheliga-cnn", channels=1, size=32, classes=10, generator=Key(0).generator())
    digits = load("digits").private
    result = gradveil.audit(
        model,
        (digits.inputs[:2], digits.targets[:2]),
        attacks=["ig-scheliga(iterations=80)", "cdia(iterations=80)"],
        defences=["svdefense(energy=0.5, least=0.3)"],
        progress=False,
    )
    similarity = {row["attacker"]: row["ssim_mean"] for row in result.summary()}
    assert similarity["adaptive"] > similarity["naive"] + 0.1


def test_attack_that_fails_without_a_defence_leaves_the_verdict_open():
    model = build("scheliga-cnn", channels=1, size=32, classes=10, generator=Key(0).generator())
    digits = load("digits").private
    defences = ["none", "svdefense", "dcs(iterations=2)"]
    for attack, verdict in (("cdia(iterations=2)", "inconclusive"), ("ig(iterations=2)", "not tested")):
        result = gradveil.audit(
            model,
            (digits.inputs[:2], digits.targets[:2]),
            public=load("digits").public,
            attacks=[attack],
            defences=defences,
            progress=False,
        )
        assert {row["verdict"] for row in result.summary() if row["defence"] != "none"} == {verdict}
