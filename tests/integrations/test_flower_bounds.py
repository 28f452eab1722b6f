"""Malicious replies neither exclude an honest client nor stop the training."""

import logging
import re

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
    FedMedian,
    Krum,
    QFedAvg,
)
from flwr.supercore.privacy_accounting import NeighboringRelation, PrivacyConfig, PrivacySpent, SamplingMethod

from gradveil.core.errors import GradveilError
from gradveil.core.noise import Key
from gradveil.integrations.flower import Protected
from gradveil.integrations.flower.flower_records import MARK, PACKED, STYPE, encoded, mark, packed, record, tensors
from tests.integrations.flower_in_process import Loopback, copied
from tests.integrations.test_flower_strategy import START, UPDATE, changed, good, server

EVERYBODY = {"fraction_evaluate": 0.0, "min_train_nodes": 3, "min_available_nodes": 3}
STATISTICS = {**START, "bn.running_mean": torch.ones(2), "bn.running_var": torch.ones(2)}


def aggregated(protected, asked, contents):
    replies = [Message(content, reply_to=message) for content, message in zip(contents, asked, strict=True)]
    return protected.aggregate_train(1, replies)


def moved(arrays) -> torch.Tensor:
    """How far each parameter went, all in one vector."""
    after = tensors(arrays)
    return torch.cat([(START[name] - after[name]).flatten() for name in START])


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(
    "liar",
    [
        good(loss=1.0),
        good(loss=[1.0, 2.0]),
        changed("more", MetricRecord({"extra": 1.0})),
        changed("more", ConfigRecord({"a": "b"})),
        changed("", MetricRecord()),
    ],
    ids=["one more", "a list", "a second record", "a configuration", "an empty name"],
)
def test_two_clients_with_different_records_are_both_aggregated_in_either_order(liar, order):
    protected, asked = server(nodes=2)
    arrays, metrics = aggregated(protected, asked, [good(), liar][::order])
    assert not protected.refusals
    torch.testing.assert_close(tensors(arrays)["w"], START["w"] - 0.5)
    assert metrics == MetricRecord()


def test_metrics_that_some_replies_lack_are_dropped_and_logged(caplog):
    protected, asked = server()
    with caplog.at_level(logging.WARNING, "flwr"):
        _, metrics = aggregated(protected, asked, [good(loss=1.0, time=2.0), good(time=4.0), good(loss=3.0, time=6.0)])
    assert metrics == MetricRecord({"time": 4.0})
    assert "dropped metrics that not all replies have: 'loss'" in caplog.text


def test_reply_without_a_metric_that_the_server_names_is_refused():
    protected, asked = server(metrics=["loss"])
    _, metrics = aggregated(protected, asked, [good(loss=1.0), good(), good(loss=3.0)])
    assert metrics == MetricRecord({"loss": 2.0})
    [refusal] = protected.refusals
    assert refusal.reason.startswith("reply: lacks the metric 'loss'")


def test_reply_with_two_values_of_a_metric_is_refused():
    protected, asked = server()
    aggregated(protected, asked, [good(), changed("more", MetricRecord({"num-examples": 5})), good()])
    assert [refusal.node for refusal in protected.refusals] == [2]
    assert "two values of 'num-examples'" in protected.refusals[0].reason


def test_reply_without_a_metric_that_the_strategy_needs_is_refused():
    quiet = {"noise_multiplier": 0.1, "num_sampled_clients": 3, "clipped_count_stddev": 1.0}
    for strategy, name, value in (
        (QFedAvg(client_learning_rate=0.1, **EVERYBODY), "train_loss", 0.5),
        (DifferentialPrivacyClientSideAdaptiveClipping(FedAvg(**EVERYBODY), **quiet), "norm_bit", 1),
    ):
        protected, asked = server(strategy=strategy)
        arrays, _ = aggregated(protected, asked, [good(**{name: value}), good(), good(**{name: -1.0})])
        assert [refusal.node for refusal in protected.refusals] == [2, 3]
        assert all(f"'{name}'" in refusal.reason for refusal in protected.refusals)
        assert arrays is not None


class Accountant:
    """Its presence is what makes Flower's strategy demand equal weights."""

    config = PrivacyConfig(1e-5, 3, NeighboringRelation.ADD_OR_REMOVE_ONE, SamplingMethod.NO_AMPLIFICATION)

    def compose(self, event): ...
    def get_privacy_spent(self):
        return PrivacySpent(1.0, 1e-5, 1, "none")


def test_a_weight_does_not_stop_flowers_privacy_accounting():
    inner = FedAvg(**EVERYBODY)
    accounted = DifferentialPrivacyServerSideFixedClipping(inner, 1e-9, 100.0, 3, accountant=Accountant())
    protected, asked = server(strategy=accounted)
    fourfold = good({"w": UPDATE["w"] * 4, "b": UPDATE["b"]})
    arrays, _ = aggregated(protected, asked, [good(weight=4), good(weight=5), fourfold])
    torch.testing.assert_close(tensors(arrays)["w"], START["w"] - 1.0)


BEYOND = {
    "3e38": (good({**UPDATE, "b": torch.full((2,), 3e38)}), {}, r"has the norm 4\.243e\+38, above"),
    "a norm": (good({**UPDATE, "b": torch.tensor([3.0, 4.0])}), {"max_norm": 5.0}, r"has the norm 5\.14.*, above 5"),
    "a ratio": (
        good({name: 12 * value for name, value in UPDATE.items()}),
        {"max_ratio": 10},
        "above 10 times the round",
    ),
}


@pytest.mark.parametrize("kind", BEYOND)
def test_an_update_beyond_a_bound_is_refused(kind):
    content, settings, reason = BEYOND[kind]
    protected, asked = server(**settings)
    arrays, _ = aggregated(protected, asked, [good(), content, good()])
    torch.testing.assert_close(tensors(arrays)["w"], START["w"] - 0.5)
    [refusal] = protected.refusals
    assert refusal.node == 2
    assert re.search(reason, refusal.reason)


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("factor", [1e-9, 1e9])
def test_norm_of_one_client_does_not_exclude_the_other(factor, order):
    protected, asked = server(nodes=2, max_ratio=10, max_norm=float("inf"))
    aggregated(protected, asked, [good(), good({name: factor * value for name, value in UPDATE.items()})][::order])
    excluded = [refusal.node for refusal in protected.refusals]
    assert excluded == []


def test_a_weight_is_capped():
    protected, asked = server(nodes=2, max_examples=12)
    arrays, _ = aggregated(protected, asked, [good(), good({"w": UPDATE["w"] * 3, "b": UPDATE["b"]}, weight=10**9)])
    assert not protected.refusals
    torch.testing.assert_close(tensors(arrays)["w"], START["w"] - (4 * 0.5 + 12 * 1.5) / 16)


def with_statistics(mean=0.0, variance=0.0) -> RecordDict:
    """A reply that moves a running mean by `-mean`, a running variance by `-variance`."""
    rest = {"bn.running_mean": torch.full((2,), mean), "bn.running_var": torch.full((2,), variance)}
    return good({**UPDATE, **rest})


WRONG_STATISTICS = {
    "a negative variance": (with_statistics(variance=1.5), "makes a variance negative"),
    "a mean": (with_statistics(mean=1e6), "moves a running statistic by"),
    "a variance": (with_statistics(variance=-1e12), "moves a running statistic by"),
    "a variance beyond all numbers": (with_statistics(variance=-3e38), "moves a running statistic by"),
}


@pytest.mark.parametrize("kind", WRONG_STATISTICS)
def test_running_statistics_are_bounded(kind):
    content, reason = WRONG_STATISTICS[kind]
    protected, asked = server(start=STATISTICS)
    arrays, _ = aggregated(protected, asked, [with_statistics(0.5), content, with_statistics(0.5)])
    torch.testing.assert_close(tensors(arrays)["bn.running_mean"], torch.full((2,), 0.5))
    [refusal] = protected.refusals
    assert refusal.node == 2
    assert reason in refusal.reason


def test_running_statistics_can_be_refused_or_accepted():
    for choice, nodes in (("refuse", [2, 3]), ("accept", [])):
        protected, asked = server(start=STATISTICS, statistics=choice)
        aggregated(protected, asked, [good(), with_statistics(0.1), with_statistics(variance=-1e12)])
        assert [refusal.node for refusal in protected.refusals] == nodes


def test_honest_noise_and_first_statistics_are_within_the_defaults():
    """Noise of user-dp(clip=1, sigma=100) on a fresh model, and the first statistics of pixels in [0, 255]."""
    start = {**STATISTICS, "w": torch.zeros(100, 100), "bn.running_mean": torch.zeros(2)}
    noise = 100 * torch.randn(100, 100, generator=Key(0).generator())
    update = {"w": noise, "b": UPDATE["b"], "bn.running_mean": torch.full((2,), -5000.0)}
    update["bn.running_var"] = torch.full((2,), -2.5e7)
    protected, asked = server(nodes=2, start=start)
    aggregated(protected, asked, [good(update), good(update)])
    refusals = protected.refusals
    assert refusals == []


def test_all_invalid_bounds_are_reported_at_once():
    wrong = {"max_norm": -1.0, "max_ratio": float("nan"), "max_examples": 0, "statistics": "some", "max_change": None}
    with pytest.raises(GradveilError) as caught:
        Protected(FedAvg(fraction_evaluate=0.0), **wrong)
    assert [problem.where for problem in caught.value.problems] == [f"Protected.{name}" for name in wrong]


def test_an_aggregate_that_is_not_finite_leaves_the_model():
    class Broken(FedAvg):
        def aggregate_train(self, server_round, replies):
            return record({name: value / 0 for name, value in START.items()}), MetricRecord()

    protected, asked = server(strategy=Broken(**EVERYBODY))
    arrays, _ = aggregated(protected, asked, [good(), good(), good()])
    assert arrays is None


def test_arrays_may_not_have_the_name_of_the_metrics():
    with pytest.raises(GradveilError, match="arrayrecord_key: is 'metrics'"):
        server(strategy=FedAvg(arrayrecord_key="metrics", **EVERYBODY))


@pytest.mark.parametrize("robust", [FedMedian, Krum])
def test_flowers_robust_strategies_can_be_wrapped(robust):
    """One of five replies is within the bounds and false; a mean follows it, a robust strategy does not."""
    replies = [*(good({**UPDATE, "b": UPDATE["b"] + 0.01 * i}) for i in range(4))]
    replies.insert(1, good({name: torch.full_like(value, -50.0) for name, value in UPDATE.items()}))
    found = {}
    for kind in (FedAvg, robust):
        more = {"num_malicious_nodes": 1} if kind is Krum else {}
        inner = kind(fraction_evaluate=0.0, min_train_nodes=5, min_available_nodes=5, **more)
        protected, asked = server(nodes=5, strategy=inner)
        arrays, _ = aggregated(protected, asked, replies)
        assert not protected.refusals
        found[kind] = (moved(arrays) - torch.cat([value.flatten() for value in UPDATE.values()])).norm()
    assert found[robust] < 0.05
    assert found[FedAvg] > 10


def test_false_evaluation_reply_is_refused_and_the_others_count():
    inner = FedAvg(min_train_nodes=3, min_available_nodes=3, min_evaluate_nodes=3)
    protected = Protected(inner)
    asked = list(protected.configure_evaluate(1, record(START), ConfigRecord(), Loopback(ClientApp(), 3)))
    contents = [RecordDict({"metrics": MetricRecord({"num-examples": 4, "accuracy": 0.5})}) for _ in range(2)]
    contents.append(RecordDict({"a": MetricRecord({"num-examples": float("nan")}), "b": MetricRecord({"x": 1})}))
    replies = [Message(content, reply_to=message) for content, message in zip(contents, asked, strict=True)]
    stranger = Message(contents[0], reply_to=Message(RecordDict(), dst_node_id=99, message_type="evaluate"))
    metrics = protected.aggregate_evaluate(1, [*replies, replies[0], stranger])
    assert metrics == MetricRecord({"accuracy": 0.5})
    assert len(protected.refusals) == 3


NUMBERS = [0, -1, 4, 2**63 - 1, -(2**63), 0.0, 5e-324, 1e308, -1e308, float("nan"), float("inf"), [], [1], [1.0, 2.0]]
NAMES = ["num-examples", "loss", "", "a\nb", "x" * 300, "metrics", "arrays", MARK, "\u202e", "round"]


def odd_record(draw: np.random.Generator):
    """A record of any kind, with any names and values that Flower's messages can hold."""
    names = draw.choice(NAMES, size=draw.integers(0, 4))
    pick = lambda among: among[int(draw.integers(len(among)))]  # noqa: E731
    kind = int(draw.integers(5))
    if kind == 0:
        return MetricRecord({str(name): pick(NUMBERS) for name in names})
    if kind == 1:
        return ConfigRecord({str(name): pick([1, "1", True, b"\0", [1], [], 1.5, -7]) for name in names})
    if kind == 2:
        data = bytes(draw.integers(0, 256, size=int(draw.integers(0, 60)), dtype=np.uint8))
        return ArrayRecord({PACKED: Array("uint8", (len(data),), STYPE, data)})
    if kind == 3:
        sent = bytearray(encoded(UPDATE))
        sent[int(draw.integers(len(sent)))] ^= 1 << int(draw.integers(8))
        return packed(bytes(sent))
    shape = tuple(int(size) for size in draw.integers(-2, 3, size=2))
    return ArrayRecord(
        {str(name): Array("float32", shape, pick(["numpy.ndarray", STYPE, ""]), b"abc") for name in names}
    )


def test_random_records_are_refused_without_other_errors():
    draw = np.random.default_rng(0)
    refused = 0
    for _ in range(400):
        content = good()
        for _ in range(int(draw.integers(1, 4))):
            content[str(draw.choice(NAMES))] = odd_record(draw)
        if draw.random() < 0.5 and MARK in content:
            del content[MARK]
            content[MARK] = mark(1)
        protected, asked = server(nodes=2)
        replies = [Message(c, reply_to=m) for c, m in zip([copied(content), good()], asked, strict=True)]
        arrays, _ = protected.aggregate_train(1, replies)
        assert arrays is not None
        assert bool(moved(arrays).isfinite().all())
        assert {refusal.node for refusal in protected.refusals} <= {1}
        refused += len(protected.refusals)
    assert 200 < refused < 400
