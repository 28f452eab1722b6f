"""The mod `protect`, which defends the update of an app that trains on its own."""

from dataclasses import replace

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import fixedclipping_mod
from flwr.serverapp.strategy import DifferentialPrivacyClientSideFixedClipping, FedAvg
from torch import nn

from gradveil.core.errors import GradveilError
from gradveil.core.noise import Key
from gradveil.federated.engine import train as run
from gradveil.integrations.flower import Protected, protect
from gradveil.integrations.flower.flower_records import MARK, mark, record, tensors, unpacked
from gradveil.wire.codec import Layout, decode
from tests.federated.small_federations import federation, net
from tests.integrations.flower_in_process import Loopback, context, copied, examples

START = {"w": torch.arange(1.0, 9.0), "b": torch.zeros(2)}


def train_message(number=1, arrays=START, kind="train") -> Message:
    return Message(RecordDict({"arrays": record(arrays), MARK: mark(number)}), dst_node_id=1, message_type=kind)


def app(after, count=5):
    """The rest of the app: it returns these parameters."""

    def train(message, _context):
        metrics = MetricRecord({"num-examples": count, "loss": 0.5})
        return Message(RecordDict({"arrays": record(after), "numbers": metrics}), reply_to=message)

    return train


def sent(reply, arrays=START):
    return decode(unpacked(copied(reply.content)), Layout.of(arrays))


MOVED = {"w": START["w"] - torch.tensor([8.0, 0, 0, 1, 0, 0, 0, 2]), "b": torch.tensor([0.0, -3.0])}


def test_the_update_is_what_was_received_minus_what_was_returned(tmp_path):
    reply = protect("none", folder=tmp_path)(train_message(), context(), app(MOVED))
    update = sent(reply)
    assert torch.equal(update["w"], START["w"] - MOVED["w"])
    assert torch.equal(update["b"], -MOVED["b"])
    assert dict(reply.content["numbers"]) == {"num-examples": 5, "loss": 0.5}
    assert reply.content[MARK]["round"] == 1


def test_residual_is_sent_in_the_next_round(tmp_path):
    """Of ten entries the two largest are sent; the next round sends what was left, though nothing new came."""
    mod = protect("prune(0.8, scope='global', feedback=true)", folder=tmp_path)
    first = sent(mod(train_message(1), context(), app(MOVED)))
    assert (first["w"][0], first["b"][1]) == (8.0, 3.0)
    assert sum(int(value.count_nonzero()) for value in first.values()) == 2
    second = sent(mod(train_message(2), context(), app(START)))
    assert (second["w"][7], second["w"][3]) == (2.0, 1.0)
    assert sum(int(value.count_nonzero()) for value in second.values()) == 2


def test_nonfinite_update_is_not_sent_and_leaves_the_state(tmp_path):
    mods = [protect("dgp(top=0, bottom=0.8)", folder=tmp_path / name) for name in ("spoilt", "spared")]
    for mod in mods:
        mod(train_message(1), context(), app(MOVED))
    with pytest.raises(GradveilError, match="not finite"):
        mods[0](train_message(2), context(), app({**MOVED, "b": torch.tensor([0.0, torch.nan])}))
    after = [sent(mod(train_message(3), context(), app(START))) for mod in mods]
    torch.testing.assert_close(*after, rtol=0, atol=0)
    assert after[0]["w"].any()


def test_overflowing_state_of_a_finite_update_is_not_kept(tmp_path):
    mod = protect("standin(optimiser=adagrad)", folder=tmp_path)
    far = {**START, "w": START["w"] - 1e25}
    assert all(bool(value.isfinite().all()) for value in sent(mod(train_message(1), context(), app(far))).values())
    assert sent(mod(train_message(2), context(), app(MOVED)))["w"].any()


def own_training(engine, folder):
    """A user's own training: what the engine's undefended client does, written as an app that knows no Gradveil."""
    flower = ClientApp()
    protected = protect("user-dp(clip=0.5, sigma=0.01) + topk(0.2, feedback=true)", folder=folder)

    def with_the_engines_key(message, ctx, call_next):
        local_client = engine.key.child("client", ctx.node_config["partition-id"])
        return replace(protected, key=local_client)(message, ctx, call_next)

    @flower.train(mods=[with_the_engines_key])
    def train(message, ctx):
        params = {name: value.clone() for name, value in tensors(message.content["arrays"]).items()}
        model, batch = net(), examples(ctx)
        model.load_state_dict(params)
        number = message.content["config"]["server-round"]
        key = engine.key.child("client", ctx.node_config["partition-id"], "round", number)
        order = engine.client.noise_parts(params, batch).once["schedule"].sample(key.child("schedule"))
        for some in order:
            model.zero_grad()
            nn.functional.cross_entropy(model(batch.inputs[some]), batch.targets[some]).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
        metrics = MetricRecord({"num-examples": len(batch.targets)})
        return Message(RecordDict({"arrays": record(model.state_dict()), "metrics": metrics}), reply_to=message)

    return flower


def test_an_app_with_the_mod_ends_with_the_engines_parameters(tmp_path):
    engine = federation("user-dp(clip=0.5, sigma=0.01) + topk(0.2, feedback=true)", validation=False)
    expected = run(engine, 5).params
    grid = Loopback(own_training(engine, tmp_path), 4)
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=4, min_available_nodes=4)
    result = Protected(strategy).start(grid, record(engine.client.params()), num_rounds=5)
    assert not grid.errors
    for name, value in tensors(result.arrays).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-12)


def test_flowers_own_mods_can_follow_protect(tmp_path):
    """They accept a message with one configuration only, so they must not see the mark."""
    flower = ClientApp()

    @flower.train(mods=[protect("none", folder=tmp_path), fixedclipping_mod])
    def train(message, ctx):
        return app(MOVED)(message, ctx)

    grid = Loopback(flower, 2)
    inner = FedAvg(fraction_evaluate=0.0, weighted_by_key="num-examples")
    strategy = Protected(DifferentialPrivacyClientSideFixedClipping(inner, 0.0, 0.1, 2))
    result = strategy.start(grid, record(START), num_rounds=1)
    assert not grid.errors
    moved = torch.cat([(START[name] - value).flatten() for name, value in tensors(result.arrays).items()])
    torch.testing.assert_close(moved.norm(), torch.tensor(0.1), rtol=1e-3, atol=0)


def test_outer_mod_finds_the_message_unchanged(tmp_path):
    message = train_message()
    protect("none", folder=tmp_path)(message, context(), app(MOVED))
    assert message.content[MARK]["round"] == 1


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("dp", "acts on the single gradients"),
        ("dropout + topk(0.1)", "acts on the model"),
        ("mixup", "acts on the batch"),
        ("optimal-noise(0.1)", "uses the examples in its stage 'noise'"),
        ("optimal-prune(0.5)", "uses the examples in its stage 'prune'"),
        ("optimal-prune(0.5, feedback=true)", "uses the examples in its stage 'prune'"),
        ("adgp", "needs public messages"),
        ("adgp(selection=previous)", "needs public messages"),
    ],
)
def test_defence_that_cannot_act_on_an_update_is_refused_when_the_mod_is_created(text, problem):
    with pytest.raises(GradveilError, match=problem) as refused:
        protect(text)
    assert "answer(" in str(refused.value) or "gradveil train" in str(refused.value)


def test_misspelt_choice_is_refused_when_the_mod_is_created():
    """Statistics that are not refused would be sent undefended, and a guard that refuses would only warn."""
    with pytest.raises(GradveilError) as refused:
        protect("topk(0.1)", statistics="kept", guard="refused")  # type: ignore[arg-type]
    assert [problem.where for problem in refused.value.problems] == ["protect.guard", "protect.statistics"]


def test_all_problems_are_reported_at_once():
    with pytest.raises(GradveilError) as refused:
        protect("dp + mixup + dropout")
    assert len(refused.value.problems) == 3


def test_evaluation_message_passes_unchanged(tmp_path):
    mod = protect("topk(0.1)", folder=tmp_path)
    for kind in ("evaluate", "query"):
        reply = mod(train_message(kind=kind), context(), app(MOVED))
        assert torch.equal(tensors(reply.content["arrays"])["w"], MOVED["w"])
    assert not list(tmp_path.iterdir())


def test_unmarked_message_is_refused(tmp_path):
    message = train_message()
    del message.content[MARK]
    with pytest.raises(GradveilError, match="Protected"):
        protect("topk(0.1)", folder=tmp_path)(message, context(), app(MOVED))


WITH_STATISTICS = {**START, "n.running_mean": torch.zeros(2), "n.num_batches_tracked": torch.tensor(0)}
TRAINED = {**MOVED, "n.running_mean": torch.tensor([0.25, 0.5]), "n.num_batches_tracked": torch.tensor(9)}


def test_changed_statistics_are_refused_unless_configured(tmp_path):
    with pytest.raises(GradveilError, match="running_mean: was changed: it is a mean over private examples"):
        protect("none", folder=tmp_path)(train_message(arrays=WITH_STATISTICS), context(), app(TRAINED))
    selected = protect("none", folder=tmp_path, statistics="keep")
    assert sent(selected(train_message(1, WITH_STATISTICS), context(), app(TRAINED))).keys() == START.keys()
    sending = protect("topk(0.1)", folder=tmp_path / "other", statistics="send")
    with_mean = {**START, "n.running_mean": torch.zeros(2)}
    update = sent(sending(train_message(2, WITH_STATISTICS), context(), app(TRAINED)), with_mean)
    assert torch.equal(update["n.running_mean"], torch.tensor([-0.25, -0.5]))
    assert int(update["w"].count_nonzero()) == 1


def test_frozen_parameters_may_not_change(tmp_path):
    mod = protect("none", folder=tmp_path, trainable=["w"])
    with pytest.raises(GradveilError, match=r"arrays\.b: was changed, but is not trained"):
        mod(train_message(), context(), app(MOVED))
    assert list(sent(mod(train_message(), context(), app({**MOVED, "b": START["b"]})), {"w": START["w"]})) == ["w"]


def test_another_model_than_the_received_one_is_refused(tmp_path):
    with pytest.raises(GradveilError, match="expected float32"):
        protect("none", folder=tmp_path)(train_message(), context(), app({**MOVED, "w": torch.ones(3)}))


def test_values_that_are_not_finite_are_not_sent(tmp_path):
    """The message names no setting of the encoding, which Flower apps cannot set."""
    with pytest.raises(GradveilError, match=r"^update\.b: is not finite -> lower the step size"):
        protect("none", folder=tmp_path)(
            train_message(), context(), app({**MOVED, "b": torch.tensor([0.0, torch.nan])})
        )
    assert not list((tmp_path / "partition-0" / "run-77").iterdir())


def test_noise_comes_from_the_clients_key(tmp_path):
    key = Key(5)
    mod = protect("gaussian(0.5)", folder=tmp_path, key=key)
    noise = sent(mod(train_message(), context(), app(START)))["w"]
    drawn = torch.randn(8, generator=key.child("round", 1, "send.noise.w").generator())
    torch.testing.assert_close(noise, 0.5 * drawn)


def test_repeated_reply_keeps_the_apps_records(tmp_path):
    more = {"tag": "x", "rounds": [1, 2], "blob": b"\x00\xff", "parts": [b"a", b"b"], "yes": True}

    def train(message, ctx):
        reply = app(MOVED)(message, ctx)
        reply.content["more"] = ConfigRecord(more)
        return reply

    mod = protect("topk(0.5)", folder=tmp_path)
    for _ in range(2):
        content = mod(train_message(), context(), train).content
        assert dict(content["more"]) == more
        assert dict(content["numbers"]) == {"num-examples": 5, "loss": 0.5}
        assert len(content) == 4


def test_an_app_that_fails_sends_its_error_and_the_round_stays_open(tmp_path):
    def broken(message, _context):
        return Message(Error(3, "no data"), reply_to=message)

    mod = protect("topk(0.5)", folder=tmp_path)
    assert mod(train_message(), context(), broken).error.reason == "no data"
    assert mod(train_message(), context(), app(MOVED)).has_content()


def test_reply_without_number_of_examples_is_refused(tmp_path):
    def silent(message, _context):
        return Message(RecordDict({"arrays": record(MOVED), "metrics": MetricRecord({"n": 3})}), reply_to=message)

    with pytest.raises(GradveilError, match="put 'num-examples' into the metrics"):
        protect("topk(0.5)", folder=tmp_path)(train_message(), context(), silent)


@pytest.mark.parametrize("count", [0, -3, float("nan"), float("inf"), [5]])
def test_invalid_number_of_examples_is_refused(tmp_path, count):
    with pytest.raises(GradveilError, match=r"num-examples: is .* at least 1"):
        protect("topk(0.5)", folder=tmp_path)(train_message(), context(), app(MOVED, count))


def test_model_without_trained_parameters_is_refused(tmp_path):
    with pytest.raises(GradveilError, match="hold nothing that is trained"):
        protect("topk(0.5)", folder=tmp_path)(
            train_message(arrays={"n": torch.zeros(2, dtype=torch.long)}), context(), app({})
        )


def test_creating_a_mod_leaves_the_global_generator_unchanged():
    before = torch.random.get_rng_state()
    protect("user-dp(clip=1, sigma=1) + topk(0.1, feedback=true)")
    assert torch.equal(torch.random.get_rng_state(), before)


def test_guard_inspects_before_the_app_trains(tmp_path):
    """At its layers, with a model or without, and at jumps; where it refuses, the app is not called."""

    def never(*_):
        pytest.fail("the app was called")

    model = nn.Linear(4, 2)
    traces = {"weight": torch.tensor([[1e3] * 4, [0.0] * 4]), "bias": torch.zeros(2)}
    with pytest.raises(GradveilError, match="fishing"):
        protect("none", model, folder=tmp_path / "a", guard="refuse")(train_message(arrays=traces), context(), never)
    traps = {"body.weight": torch.ones(16, 20), "body.bias": torch.arange(16.0), "head.weight": torch.eye(16)[:2]}
    with pytest.raises(GradveilError, match=r"body\.weight: imprint"):
        protect("none", folder=tmp_path / "c", guard="refuse")(train_message(arrays=traps), context(), never)
    blind = protect("none", folder=tmp_path / "b", guard="refuse")
    blind(train_message(1), context(), app({**START, "w": START["w"] - 0.01}))
    far = {**START, "w": START["w"] + 100}
    with pytest.raises(GradveilError, match="jump: moved"):
        blind(train_message(2, far), context(), never)


def test_unreadable_arrays_are_refused(tmp_path):
    message = train_message()
    message.content["arrays"] = ArrayRecord({"w": Array("float32", (1,), "unknown", b"x")})
    with pytest.raises(GradveilError, match=r"arrays\.w: cannot be read"):
        protect("none", folder=tmp_path)(message, context(), app(MOVED))
