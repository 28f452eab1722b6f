"""With a guarantee, a failed training sends no error: its update counts as zeros, to which the noise is added."""

import json

import pytest
import torch
from flwr.app import Error, Message, MetricRecord, RecordDict
from torch import nn

from gradveil.client import Client, Local
from gradveil.core.errors import GradveilError
from gradveil.core.types import Batch
from gradveil.defences import Defence, chain, parse
from gradveil.defences.additive_noise import Gaussian
from gradveil.defences.deployed_noise import LatticeGaussian
from gradveil.defences.dp import Clip
from gradveil.integrations.flower import answer, protect
from gradveil.integrations.flower.flower_records import record, tensors, unpacked
from gradveil.wire.codec import Layout, decode
from tests.integrations.flower_in_process import bits, client, context, ledger, train_message

OWN = client("none", model=nn.Linear(4, 3).double())
USER = "user-dp(clip=1, sigma=8)"


def app(change=lambda value: value + 0.1, metrics=None):
    """An app that trains and reports its number of examples."""

    def train(message, _context):
        arrays = {name: change(value) for name, value in tensors(message.content["arrays"]).items()}
        numbers = MetricRecord({"num-examples": 7, "loss": 0.25} if metrics is None else metrics)
        return Message(RecordDict({"arrays": record(arrays), "numbers": numbers}), reply_to=message)

    return train


def raising(_message, _context):
    raise RuntimeError("all elements of input should be between 0 and 1, example 3")


def erring(message, _context):
    return Message(Error(3, "example 3"), reply_to=message)


FAILING = {
    "raises": raising,
    "an error reply": erring,
    "not finite": app(lambda value: value * torch.nan),
    "another model": app(lambda value: value[..., :1]),
    "no number of examples": app(metrics={"loss": 0.1}),
    "nothing": lambda *_: None,
}


def size(reply):
    update = decode(unpacked(reply.content), Layout.of(OWN.params()))
    return torch.cat([value.flatten() for value in update.values()]).norm()


@pytest.mark.parametrize("case", FAILING)
def test_failing_app_is_counted_and_answered_like_any_other(case, tmp_path, caplog):
    file = ledger(tmp_path)
    mod = protect(USER, folder=tmp_path, training="lungs", epsilon=20)
    good = mod(train_message(1, OWN), context(), app())
    bad = mod(train_message(2, OWN), context(), FAILING[case])
    assert bad.has_content()
    assert dict(bad.content["numbers"]) == dict(good.content["numbers"]) == {"num-examples": 7, "loss": 0.25}
    assert list(bad.content) == list(good.content)
    assert size(bad) > 1, "it has noise"
    assert "counts as zeros" in caplog.text
    assert json.loads(file.read_text())["rounds"] == 2
    assert bits(mod(train_message(2, OWN), context(), app())) == bits(bad)


@pytest.mark.parametrize("kind", ["a mod", "an answer"])
def test_zeros_that_replace_a_failed_update_get_new_noise(kind, tmp_path, monkeypatch):
    """The same noise twice, once on the update and once on zeros, is no function of the noisy update."""
    drawn = []
    apply = LatticeGaussian.apply

    def failing(self, update, state, noise, seen):
        drawn.append(torch.cat([value.flatten() for value in noise.values()]))
        sent = apply(self, update, state, noise, seen)
        if len(drawn) == 1:
            raise RuntimeError("a stage behind the noise")
        return sent

    monkeypatch.setattr(LatticeGaussian, "apply", failing)
    if kind == "a mod":
        protect(USER, folder=tmp_path)(train_message(1, OWN), context(), app())
    else:
        local_client = client(USER, model=nn.Linear(4, 3).double())
        answer(
            train_message(1, local_client),
            context(),
            local_client,
            Batch(torch.zeros(3, 4).double(), torch.arange(3)),
            folder=tmp_path,
        )
    assert len(drawn) == 2
    assert not torch.equal(*drawn)


def test_the_ledger_counts_before_the_app_runs(tmp_path):
    file, seen = ledger(tmp_path), []

    def looking(message, arguments):
        seen.append(json.loads(file.read_text())["rounds"])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        protect(USER, folder=tmp_path, training="lungs", epsilon=20)(train_message(1, OWN), context(), looking)
    assert seen == [1]


@pytest.mark.parametrize("train", [app(), raising])
def test_metrics_that_are_known_before_are_all_that_a_reply_says(train, tmp_path):
    mod = protect(USER, folder=tmp_path, metrics={"num-examples": 12})
    content = mod(train_message(1, OWN), context(), train).content
    assert [dict(values) for values in content.metric_records.values()] == [{"num-examples": 12}]
    with pytest.raises(GradveilError, match="has no 'num-examples'"):
        protect(USER, metrics={"loss": 1.0})


def test_noise_that_depends_on_what_the_app_tells_is_refused_when_the_mod_is_made():
    with pytest.raises(GradveilError, match="too late to count"):
        protect(Defence("own", send=chain(clip=Clip(1.0), noise=Gaussian(0.5, on="sum"))))
    protect(Defence("own", send=chain(noise=Gaussian(0.5, on="sum"))))


def test_without_a_guarantee_an_app_fails_as_it_did(tmp_path):
    mod = protect("topk(0.5)", folder=tmp_path)
    with pytest.raises(RuntimeError, match="example 3"):
        mod(train_message(1, OWN), context(), raising)
    assert mod(train_message(1, OWN), context(), erring).has_error()


D = 16


def network():
    return nn.Sequential(nn.Linear(D, 8), nn.ReLU(), nn.Linear(8, 2), nn.Linear(2, 1), nn.Sigmoid())


def overflowing(star):
    """Weights of a server: two outputs are infinite for one example, small for others; their difference is no number.

    A difference of products would be one on processors that round only after the last sum.
    """
    model = network()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.1)
        aim = star - 0.5
        model[0].weight[:2] = aim * 25
        model[0].bias[:2] = -25 * (aim @ star - 0.2 * aim.square().sum())
        model[2].weight[:, :2] = 3e38
        model[3].weight.copy_(torch.tensor([[1.0, -1.0]]))
    return Client(model)


def entropy(outputs, targets):
    """A loss that raises for what is no number."""
    return nn.BCELoss()(outputs.squeeze(-1), targets.float())


@pytest.mark.parametrize("text", [USER, "dp(clip=1, sigma=8)"])
@pytest.mark.parametrize("sampling", ["batches", "poisson"])
@pytest.mark.parametrize("inside", [True, False])
def test_a_loss_that_fails_for_one_example_tells_no_server_that_it_is_there(text, sampling, inside, tmp_path, caplog):
    draw = torch.Generator().manual_seed(3)
    inputs, star = torch.rand(32, D, generator=draw), torch.rand(D, generator=draw)
    if inside:
        inputs[3] = star
    local = Local(batch=32, lr=0.1, steps=1, sampling=sampling)
    local_client = parse(text)(Client(network(), entropy, local=local))
    batch, file = Batch(inputs, torch.arange(32) % 2), ledger(tmp_path)
    settings = {"folder": tmp_path, "training": "lungs", "epsilon": 200, "guard": "ignore"}
    assert answer(train_message(1, overflowing(star)), context(), local_client, batch, **settings).has_content()
    assert ("cannot be computed" in caplog.text) == inside
    assert json.loads(file.read_text())["rounds"] == 1


@pytest.mark.parametrize("text", [USER, "dp(clip=1, sigma=8)", "user-dp(clip=1, sigma=8) + topk(0.5, feedback=true)"])
@pytest.mark.parametrize("local", [None, Local(batch=8, lr=0.1, steps=2)])
def test_a_label_that_the_model_has_no_class_for_is_no_message(text, local, tmp_path, caplog):
    local_client = parse(text)(Client(nn.Linear(4, 3), local=local))
    labels = torch.tensor([0, 1, 2, 77, 0, 1, 2, 0])
    reply = answer(
        train_message(1, local_client),
        context(),
        local_client,
        Batch(torch.ones(8, 4), labels),
        folder=tmp_path,
        guard="ignore",
    )
    assert reply.has_content()
    assert "77" in caplog.text


def test_removed_run_folder_starts_empty_with_a_warning(tmp_path, caplog):
    mod = protect("topk(0.5, feedback=true)", folder=tmp_path, training="lungs")
    mod(train_message(1, OWN), context(), app())
    assert "is lost" not in caplog.text
    for file in (tmp_path / "partition-0" / "run-77").iterdir():
        file.unlink()
    (tmp_path / "partition-0" / "run-77").rmdir()
    mod(train_message(1, OWN), context(), app())
    assert "run-77 is missing" in caplog.text
