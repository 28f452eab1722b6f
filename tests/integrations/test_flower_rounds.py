"""Whole trainings through Flower's strategies, held against the engine."""

import random
from functools import partial

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideFixedClipping,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedMedian,
    FedProx,
)
from torch import nn
from torch.utils.data import DataLoader

from gradveil.client import Client
from gradveil.core.errors import GradveilError
from gradveil.core.types import Batch
from gradveil.federated.engine import train
from gradveil.integrations.flower import Protected, answer
from gradveil.integrations.flower.flower_records import record, tensors
from tests.federated.small_federations import federation
from tests.integrations.flower_in_process import Loopback, context, helping

ALL = {"fraction_evaluate": 0.0, "min_train_nodes": 4, "min_available_nodes": 4}


def through_flower(engine, folder, strategy=FedAvg, rounds=5, **settings):
    grid = Loopback(helping(engine.client, folder, key=engine.key, **settings), len(engine.shares))
    protected = Protected(strategy(**ALL))
    result = protected.start(grid, record(engine.client.params()), num_rounds=rounds)
    assert not grid.errors
    assert not protected.refusals
    return tensors(result.arrays), grid


@pytest.mark.parametrize(
    "text",
    [
        "none",
        "topk(0.1, feedback=true)",
        "dp(clip=1, sigma=1e-3) + topk(0.1, feedback=true)",
        "user-dp(clip=1, sigma=0.01)",
        "dropout(0.3, where='2') + sign(feedback=true)",
        "standin",
        "precode(k=4)",
    ],
)
def test_five_rounds_end_with_the_engines_parameters(text, tmp_path):
    engine = federation(text, validation=False)
    expected = train(engine, 5).params
    found, _ = through_flower(engine, tmp_path)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12)


def test_clients_without_a_key_draw_secret_noise(tmp_path):
    """Without a key it is not the engine's, and not the same in another folder."""
    engine = federation("user-dp(clip=1, sigma=0.1)", validation=False)
    ends = []
    for folder in ("one", "two"):
        grid = Loopback(helping(engine.client, tmp_path / folder), 4)
        result = Protected(FedAvg(**ALL)).start(grid, record(engine.client.params()), num_rounds=1)
        ends.append(torch.cat([value.flatten() for value in tensors(result.arrays).values()]))
    known = torch.cat([value.flatten() for value in train(engine, 1).params.values()])
    assert min((ends[0] - ends[1]).norm(), (ends[0] - known).norm(), (ends[1] - known).norm()) > 0.05


@pytest.mark.parametrize(
    ("client", "batch", "problem"),
    [
        (nn.Linear(2, 2), Batch(torch.ones(1, 2), torch.zeros(1)), "client: is Linear -> give gradveil.client.Client"),
        (Client(nn.Linear(2, 2)), [torch.ones(1, 2), [0]], "batch: is list of Tensor, list -> give .*Batch\\(images"),
        (Client(nn.Linear(2, 2)), DataLoader([1]), "batch: is DataLoader -> give .*torch.cat of a loader's batches"),
    ],
)
def test_arguments_of_other_types_are_refused(client, batch, problem, tmp_path):
    message = Message(RecordDict({}), dst_node_id=1, message_type="train")
    with pytest.raises(GradveilError, match=problem):
        answer(message, context(), client, batch, folder=tmp_path)


def test_global_generators_are_left_alone(tmp_path):
    engine = federation("dp(clip=1, sigma=1e-3) + minmax(0.5)", validation=False)
    grid = Loopback(helping(engine.client, tmp_path), 4)
    arrays, config = record(engine.client.params()), ConfigRecord()
    message = next(iter(Protected(FedAvg(**ALL)).configure_train(1, arrays, config, grid)))
    before = drawn_globally()
    assert not grid.ask(message).has_error()
    assert drawn_globally() == before


def drawn_globally():
    """The states of the generators that everybody shares."""
    numpy = np.random.get_state()[1].tolist()  # noqa: NPY002
    return torch.random.get_rng_state().tolist(), numpy, random.getstate()


@pytest.mark.parametrize("strategy", [FedAdam, FedAvgM, FedMedian])
def test_any_strategy_aggregates_and_dtypes_stay(strategy, tmp_path):
    engine = federation("topk(0.5, feedback=true)", validation=False)
    before = {name: value.float() for name, value in engine.client.params().items()}
    engine.client.model.float()
    grid = Loopback(helping(engine.client, tmp_path, dtype=torch.float32), 4)
    protected = Protected(strategy(**ALL))
    result = protected.start(grid, ArrayRecord(before), num_rounds=3)
    after = tensors(result.arrays)
    assert not grid.errors
    assert not protected.refusals
    assert all(value.dtype == torch.float32 for value in after.values())
    assert all(not torch.equal(value, before[name]) for name, value in after.items())


@pytest.mark.parametrize(
    ("strategy", "setting"),
    [
        (lambda: FedProx(proximal_mu=0.1, **ALL), "proximal-mu: asks for a proximal term"),
        (lambda: DifferentialPrivacyClientSideFixedClipping(FedAvg(**ALL), 1.0, 1.0, 4), "clipping_norm: asks for"),
    ],
)
def test_unsupported_strategy_setting_is_refused(strategy, setting, tmp_path):
    """FedProx without its term is FedAvg, and noise for a clip that nobody made proves nothing."""
    engine = federation("none", validation=False)
    grid = Loopback(helping(engine.client, tmp_path, key=engine.key), 4)
    Protected(strategy()).start(grid, record(engine.client.params()), num_rounds=1)
    assert len(grid.errors) == 4
    assert all(setting in error for error in grid.errors)


def test_proximal_term_of_weight_zero_is_accepted(tmp_path):
    engine = federation("none", validation=False)
    through_flower(engine, tmp_path, partial(FedProx, proximal_mu=0.0), rounds=1)


def test_a_sparse_update_travels_in_one_array_of_its_size(tmp_path):
    engine = federation("topk(0.1, feedback=true)", validation=False)
    _, sparse = through_flower(engine, tmp_path / "sparse", rounds=2)
    _, dense = through_flower(federation("none", validation=False), tmp_path / "dense", rounds=2)
    assert sparse.bytes_up < 0.4 * dense.bytes_up
