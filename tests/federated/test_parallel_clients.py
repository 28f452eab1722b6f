"""Rounds of clients that compute in parallel equal the same rounds one client after the other."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from gradveil.client import Client, Local
from gradveil.core.noise import Key
from gradveil.core.types import Batch, Domain
from gradveil.defences import parse
from gradveil.federated import parallel_clients
from gradveil.federated.aggregate import Server
from gradveil.federated.engine import ClientShare, Federation, train
from gradveil.federated.parallel_clients import FEWEST, MOST_EXAMPLES, groups
from gradveil.federated.training_state import pack_standing, unpack_standing
from gradveil.federated.update_records import UpdateRecorder, read_recorded
from gradveil.spaces import ImageSpace
from tests.federated.small_federations import federation

LOCALS = {
    "gradient": None,
    "sgd": Local(batch=4, lr=0.1, epochs=2, momentum=0.9),
    "adam": Local(batch=4, lr=0.01, epochs=1, optimiser="adam"),
    "poisson": Local(batch=4, lr=0.1, steps=3, sampling="poisson"),
}
DEFENCES = (
    "none",
    "dp(clip=1, sigma=0.1)",
    "dgp",
    'dropout(0.3, where="1")',
    "standin",
    "dgc(keep=0.2, momentum=0.5)",
    "topk(0.2, feedback=true)",
    'mixup(alpha=1) + dropout(0.3, where="1") + dp(clip=1, sigma=0.1)',
)


def images(count: int, *address: str | int, dtype: torch.dtype = torch.float64) -> Batch:
    key = Key(4, address)
    inputs = torch.randn(count, 1, 8, 8, generator=key.generator(), dtype=dtype)
    return Batch(inputs, torch.randint(3, (count,), generator=key.child("labels").generator()))


def experiment(
    text: str = "none",
    local: Local | None = None,
    sizes: tuple[int, ...] = (12, 12, 12, 12, 12),
    dtype: torch.dtype = torch.float64,
    **settings: object,
) -> Federation:
    """Clients with a small convolutional network, and as many images each as `sizes` says."""
    net = nn.Sequential(nn.Conv2d(1, 3, 3, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(27, 3)).to(dtype)
    for parameter in net.parameters():
        nn.init.normal_(parameter.data, std=0.3, generator=Key(0).generator())
    shares = [ClientShare(images(size, "client", i, dtype=dtype)) for i, size in enumerate(sizes)]
    domain = Domain(ImageSpace.between(-4, 4, shares[0].train.inputs.shape[1:]), 3)
    client = parse(text)(Client(net, local=local, domain=domain), Key(3))
    arguments: dict[str, object] = {"key": Key(7), "server": Server(lr=0.5), "together": True, **settings}
    return Federation(client, shares, images(9, "test", dtype=dtype), **arguments)  # pyright: ignore[reportArgumentType]


def grouped(federation: Federation) -> list[tuple[int, ...]]:
    """How the clients of a first round are grouped."""
    batches = {i: share.train for i, share in enumerate(federation.shares)}
    return groups(federation.client, federation.client.params(), batches, federation.together)


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("text", DEFENCES)
@pytest.mark.parametrize("kind", LOCALS)
def test_train_at_once_equals_one_client_after_the_other(text: str, kind: str):
    sizes = (9, 14, 12, 11, 17) if kind in ("sgd", "adam") else (12,) * 5
    at_once = experiment(text, LOCALS[kind], sizes)
    assert max(len(group) for group in grouped(at_once)) == len(sizes)
    result, expected = train(at_once, 3), train(replace(at_once, together=False), 3)
    torch.testing.assert_close(result.params, expected.params, rtol=1e-9, atol=1e-9)
    assert list(result.clients) == list(expected.clients)
    torch.testing.assert_close(result.clients, expected.clients, rtol=1e-9, atol=1e-9)
    for one, other in zip(result.records, expected.records, strict=True):
        assert one.clients == other.clients
        assert one.accuracy == other.accuracy
        assert one.loss == pytest.approx(other.loss)
        assert one.bytes_up == pytest.approx(other.bytes_up, rel=0.02)  # deflating sees other last bits


@pytest.mark.parametrize("kind", LOCALS)
def test_train_at_once_refuses_the_same_clients(kind: str):
    whole = experiment("topk(0.2, feedback=true)", LOCALS[kind], dtype=torch.float32)
    shares = list(whole.shares)
    for client in (1, 3):
        torn = shares[client].train.inputs.clone()
        torn[:, 0, 0, 0] = math.nan
        shares[client] = ClientShare(Batch(torn, shares[client].train.targets))
    spoilt = replace(whole, shares=shares)
    result, expected = (train(replace(spoilt, together=which), 2) for which in (True, False))
    assert [(r.clients, r.refused) for r in result.records] == [((0, 2, 4), (1, 3))] * 2
    torch.testing.assert_close(result.params, expected.params, rtol=1e-4, atol=1e-5)
    assert all(bool((value == 0).all()) for value in result.clients[1].values()), "the round does not count for it"


def test_groups_sort_by_steps_and_are_about_equal(monkeypatch):
    long = experiment(local=LOCALS["sgd"], sizes=(8, 20, 12, 16, 9, 30, 11))
    assert grouped(long) == [(5, 1, 3, 2, 0, 4, 6)]
    each = parallel_clients._written(long.client, long.client.params(), images(4, "client", 0))
    monkeypatch.setitem(
        parallel_clients._BUDGET, "cpu", 5 * (each + 8 * 8 * sum(p.numel() for p in long.client.params().values()))
    )
    assert [len(group) for group in grouped(long)] == [4, 3]
    monkeypatch.setitem(parallel_clients._BUDGET, "cpu", each)
    assert grouped(long) == [(i,) for i in (5, 1, 3, 2, 0, 4, 6)], "each alone where two would be too many"


def test_groups_separate_shapes():
    assert grouped(experiment(sizes=(12, 9, 12, 9, 12, 10, 12))) == [(0, 2, 4, 6), (1,), (3,), (5,)]
    poisson = experiment(local=LOCALS["poisson"], sizes=(12, 9, 12, 9, 12, 9, 9, 12))
    assert grouped(poisson) == [(0, 2, 4, 7), (1, 3, 5, 6)]
    assert grouped(experiment(sizes=(12,) * (FEWEST - 1))) == [(0,), (1,), (2,)]


def test_groups_with_private_layers_have_one_client():
    lenet = experiment('keylock(act=tanh, width=8, position="0")', LOCALS["sgd"])
    assert grouped(lenet) == [(i,) for i in range(5)]
    assert train(lenet, 1).status == "finished"


def test_groups_auto_is_for_few_small_images(monkeypatch):
    few, many = (Local(batch=size, lr=0.1, epochs=1) for size in (MOST_EXAMPLES, MOST_EXAMPLES + 1))
    assert len(grouped(experiment(local=few, sizes=(40,) * 4, together="auto"))) == 1
    assert len(grouped(experiment(local=many, sizes=(40,) * 4, together="auto"))) == 4
    assert len(grouped(experiment(local=many, sizes=(40,) * 4, together=True))) == 1
    assert len(grouped(experiment(local=few, sizes=(40,) * 4, together=False))) == 4
    monkeypatch.setattr(parallel_clients, "MOST_WRITTEN", 1000)
    assert len(grouped(experiment(local=few, sizes=(40,) * 4, together="auto"))) == 4


@pytest.mark.parametrize("text", ["none", "dgp", "standin", "dgc"])
@pytest.mark.parametrize("kind", LOCALS)
def test_train_at_once_resumed_gives_the_same_bits(text: str, kind: str):
    """From the bytes of its checkpoint, as another process with another model object would."""
    settings = {"participation": 0.8, "absent": 0.2, "sizes": (12,) * 8, "dtype": torch.float32}
    whole = train(experiment(text, LOCALS[kind], **settings), 4)
    part = train(experiment(text, LOCALS[kind], **settings), 2)
    read = unpack_standing(pack_standing(part, "same"), "same")
    resumed = train(experiment(text, LOCALS[kind], **settings), 4, replace(read, status="running"))
    assert same(whole.params, resumed.params)
    assert all(same(whole.clients[i], resumed.clients[i]) for i in whole.clients)


def test_compute_divides_seconds_within_a_group(monkeypatch):
    ticks = iter(range(0, 1000, 10))
    monkeypatch.setattr(parallel_clients, "working_time", lambda device: next(ticks))
    at_once = experiment(local=LOCALS["sgd"])
    tasks = {i: at_once.task(at_once.start(), i, 1, at_once.client) for i in range(5)}
    result = list(parallel_clients.compute(at_once.client, at_once.client.params(), tasks, True))
    assert [(sent.client, sent.seconds) for sent in result] == [(i, 2.0) for i in range(5)]


def test_train_at_once_records_each_clients_update(tmp_path):
    at_once = experiment(
        "topk(0.2)", LOCALS["sgd"], recorder=UpdateRecorder(tmp_path / "seen", rounds=None, sends="difference")
    )
    start = at_once.start()
    at_once.round(start)
    result = {int(seen.facts.client): seen for seen in read_recorded(tmp_path / "seen")}
    assert sorted(result) == list(range(5))
    for client, seen in result.items():
        sent, _ = at_once.local_update(start, client, 1)
        torch.testing.assert_close(seen.update, sent, rtol=1e-9, atol=1e-9)


def test_groups_of_invalid_examples_raise_with_the_reason():
    whole = federation(clients=4, together=True)
    shares = [replace(s, train=Batch(s.train.inputs, s.train.targets + 7)) for s in whole.shares]
    with pytest.raises(Exception, match="class") as caught:
        replace(whole, shares=shares).round(whole.start())
    alone = replace(whole, shares=shares, together=False)
    with pytest.raises(type(caught.value), match="class"):
        alone.round(whole.start())
