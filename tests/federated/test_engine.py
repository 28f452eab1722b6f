"""Rounds of federated learning: against a loop written by hand, and what must not change them."""

import copy
import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradveil.client import Client, Local, speakers
from gradveil.core.errors import GradveilError
from gradveil.core.noise import Key
from gradveil.core.types import Batch
from gradveil.federated.aggregate import Server
from gradveil.federated.engine import ClientShare, Federation, train
from gradveil.federated.training_config import LocalConfig
from gradveil.federated.training_state import pack_standing, unpack_standing
from gradveil.federated.update_records import UpdateRecorder, read_recorded
from gradveil.wire.codec import encoded_size
from tests.federated.small_federations import blobs, federation, net


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def by_hand(experiment, rounds, optimiser):
    """Federated averaging as a loop over torch's own optimisers, with the engine's order of examples."""
    model = copy.deepcopy(experiment.client.model)
    total = sum(len(share.train.targets) for share in experiment.shares)
    for number in range(1, rounds + 1):
        before = [p.detach().clone() for p in model.parameters()]
        sums = [torch.zeros_like(p) for p in before]
        for i, share in enumerate(experiment.shares):
            own = copy.deepcopy(model)
            step = optimiser(own.parameters())
            key = experiment.key.child("client", i, "round", number)
            order = experiment.client.noise_parts(experiment.client.params(), share.train).once.sample(key)["schedule"]
            for rows in order:
                step.zero_grad()
                F.cross_entropy(own(share.train.inputs[rows]), share.train.targets[rows]).backward()
                step.step()
            for total_p, p in zip(sums, own.parameters(), strict=True):
                total_p += p.detach() * (len(share.train.targets) / total)
        for p, mean in zip(model.parameters(), sums, strict=True):
            p.data.copy_(mean)
    return dict(model.named_parameters())


@pytest.mark.parametrize(
    ("local", "optimiser"),
    [
        (Local(batch=5, lr=0.1, epochs=2, momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
        (
            Local(batch=5, lr=0.1, epochs=1, momentum=0.9, nesterov=True, weight_decay=0.01),
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        ),
        (Local(batch=5, lr=0.02, epochs=2, optimiser="adam"), lambda p: torch.optim.Adam(p, lr=0.02)),
    ],
)
def test_train_three_rounds_equal_a_manual_loop(local, optimiser):
    experiment = federation(local=local)
    result = train(experiment, 3).params
    expected = by_hand(experiment, 3, optimiser)
    for name, value in expected.items():
        torch.testing.assert_close(result[name], value.detach(), rtol=1e-9, atol=1e-9)


def test_train_pace_changes_the_clients_step_size():
    """Four clients a round, so the fifth of torch's optimisers is the first of the second round."""
    experiment = federation(local=Local(batch=5, lr=0.1, epochs=1, momentum=0.9), pace=((1, 0.1), (2, 0.5)))
    made = itertools.count()

    def optimiser(parameters):
        return torch.optim.SGD(parameters, lr=(0.1, 0.01, 0.05)[next(made) // 4], momentum=0.9)

    result, expected = train(experiment, 3).params, by_hand(experiment, 3, optimiser)
    for name, value in expected.items():
        torch.testing.assert_close(result[name], value.detach(), rtol=1e-9, atol=1e-9)
    assert same(train(experiment, 3, replace(train(experiment, 2), status="running")).params, result), (
        "a training that goes on"
    )
    assert not same(train(replace(experiment, pace=()), 3).params, result)


def test_train_pace_without_local_training_changes_the_servers_step_size():
    experiment = federation(local=None, server=Server(lr=0.5, momentum=0.9), pace=((1, 0.1),))
    first = replace(train(experiment, 1), status="running")
    slower = replace(experiment, server=Server(lr=0.05, momentum=0.9), pace=())
    assert same(train(experiment, 2, first).params, train(slower, 2, first).params)
    assert not same(train(experiment, 2, first).params, train(replace(experiment, pace=()), 2, first).params)


def test_record_has_the_step_size_of_its_round(tmp_path):
    local = LocalConfig(lr=0.1, batch=5, epochs=1)
    recorder = UpdateRecorder(tmp_path / "record", local=local, sends="difference", rounds=None, clients=("0",))
    train(federation(local=Local(batch=5, lr=0.1, epochs=1), pace=((1, 0.1),), recorder=recorder), 2)
    problem = [seen.facts.local for seen in read_recorded(tmp_path / "record")]
    assert [each.lr for each in problem] == pytest.approx([0.1, 0.01])
    assert problem[0] == local


def test_train_fedsgd_moves_by_the_weighted_mean_gradient():
    experiment = federation(local=None, server=Server(lr=0.5))
    after = train(experiment, 1).params
    whole = [share.train for share in experiment.shares]
    inputs, targets = (torch.cat([batch[i] for batch in whole]) for i in (0, 1))
    model = copy.deepcopy(experiment.client.model)
    F.cross_entropy(model(inputs), targets).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(after[name], (p - 0.5 * p.grad).detach())
    fewer = train(replace(experiment, batch=4), 1).params
    assert not same(after, fewer)


def test_train_measures_accuracy_on_test_examples():
    done = train(federation(), 12)
    accuracies = [record.accuracy for record in done.records]
    assert accuracies[-1] > 0.85 > accuracies[0]
    assert done.status == "finished"
    experiment = federation()
    model = copy.deepcopy(experiment.client.model)
    model.load_state_dict(done.params)
    outputs = model(experiment.test.inputs)
    assert accuracies[-1] == (outputs.argmax(1) == experiment.test.targets).double().mean().item()
    assert done.records[-1].loss == pytest.approx(F.cross_entropy(outputs, experiment.test.targets).item())


@pytest.mark.parametrize("text", ["none", 'dp(clip=1, sigma=0.1) + dropout(0.25, where="2")', "dgp", "adgp"])
def test_train_resumed_gives_the_same_bits(text):
    experiment = federation(text, participation=0.75, server=Server("yogi", lr=0.05))
    whole = train(experiment, 4)
    part = train(federation(text, participation=0.75, server=Server("yogi", lr=0.05)), 2)
    assert part.status == "finished"
    resumed = train(experiment, 4, replace(part, status="running"))
    assert same(whole.params, resumed.params)
    assert whole.clients.keys() == resumed.clients.keys()
    assert all(same(whole.clients[i], resumed.clients[i]) for i in whole.clients)
    assert not same(whole.params, train(replace(experiment, key=Key(8)), 4).params)


def test_train_draws_new_noise_per_client_and_round():
    experiment = federation("gaussian(0.1)", local=None)
    start = experiment.start()
    quiet = federation(local=None)
    noise = {}
    for client, number in ((0, 1), (1, 1), (0, 2)):
        sent, _ = experiment.local_update(start, client, number)
        plain, _ = quiet.local_update(start, client, number)
        noise[client, number] = (sent["1.weight"] - plain["1.weight"]).flatten()
    assert all(0.05 < value.std() < 0.2 for value in noise.values())
    for one, other in (((0, 1), (1, 1)), ((0, 1), (0, 2))):
        assert abs(torch.corrcoef(torch.stack([noise[one], noise[other]]))[0, 1]) < 0.4
    again, _ = experiment.local_update(start, 0, 1)
    assert torch.equal(again["1.weight"], experiment.local_update(start, 0, 1)[0]["1.weight"])


def test_train_error_feedback_keeps_a_residual_per_client():
    done = train(federation("topk(0.1, feedback=true)"), 2)
    assert sorted(done.clients) == [0, 1, 2, 3]
    residuals = [torch.cat([v.flatten() for v in state.values()]) for state in done.clients.values()]
    assert all(bool(residual.abs().sum() > 0) for residual in residuals)
    assert not torch.equal(residuals[0], residuals[1])


def test_chosen_selects_clients_of_which_some_are_absent():
    experiment = federation(clients=8, participation=0.5, absent=0.3)
    rounds = [experiment.chosen(number) for number in range(1, 60)]
    assert all(len(answers) + len(absent) == 4 for answers, absent in rounds)
    assert all(not set(answers) & set(absent) for answers, absent in rounds)
    assert {client for answers, _ in rounds for client in answers} == set(range(8))
    share = sum(len(absent) for _, absent in rounds) / (4 * len(rounds))
    assert 0.2 < share < 0.4
    done = train(experiment, 3)
    assert set(done.clients) == {client for record in done.records for client in record.clients}
    assert federation(clients=8, participation=0.01).chosen(1)[0]


def test_round_without_answers_changes_nothing():
    experiment = federation(clients=2, absent=0.9)
    empty = next(number for number in range(1, 200) if not experiment.chosen(number)[0])
    standing = experiment.start()
    standing = replace(standing, records=tuple(train(federation(), 1).records) * (empty - 1))
    after = experiment.round(standing)
    assert after.records[-1].clients == ()
    assert same(after.params, standing.params)
    assert after.records[-1].bytes_up == 0


def test_train_with_patience_stops_early_with_the_best_parameters():
    experiment = federation(local=Local(batch=5, lr=3.0, epochs=3), patience=2)
    done = train(experiment, 50)
    assert done.status == "stopped early"
    losses = [record.validation_loss for record in done.records]
    assert done.best_round == losses.index(min(losses)) + 1
    assert len(losses) == done.best_round + 2
    at_best = train(experiment, done.best_round)
    assert same(done.final, at_best.params)
    assert not same(done.final, done.params)


def test_train_patience_ignores_rounds_without_answers():
    done = train(federation(clients=1, absent=0.7, patience=2), 20)
    answered = [bool(record.clients) for record in done.records]
    assert "000" in "".join(str(int(one)) for one in answered), "more rounds on end than patience has"
    losses = [record.validation_loss for record in done.records]
    assert [after < before for before, after in itertools.pairwise(losses)] == answered[1:]
    assert (done.status, len(losses)) == ("finished", 20)
    worse = federation(clients=1, absent=0.7, patience=2, local=Local(batch=5, lr=3.0, epochs=1))
    stopped = train(worse, 20)
    assert stopped.status == "stopped early"
    assert sum(bool(record.clients) for record in stopped.records[stopped.best_round :]) == 2


def test_train_diverging_has_that_status():
    done = train(federation("gaussian(1e300)", server=Server(lr=1e10)), 5)
    assert done.status == "diverged"
    assert len(done.records) < 5


def test_round_bytes_are_those_of_the_encoded_updates():
    dense, sparse = (train(federation(text), 3) for text in ("none", "topk(0.1)"))
    values = 4 * sum(value.numel() for value in dense.params.values())
    # Deflating takes at most a sixth away; names and shapes do not travel.
    header, least = 25, 5 / 6 * values
    assert all(4 * least <= record.bytes_up <= 4 * (values + header) for record in dense.records)
    assert all(record.bytes_up <= 4 * (0.2 * values + header) for record in sparse.records)
    first, later = sparse.records[0].bytes_down, sparse.records[1].bytes_down
    assert 4 * least <= first <= 4 * (values + header), "the first time a client is sent the whole model"
    assert later <= 4 * (0.6 * values + header), "then what the round changed: no more than four times a tenth"


def test_round_sends_the_whole_model_only_to_new_clients(monkeypatch):
    """Everybody was there: the round encodes what each sends and what it changed, and nothing else."""
    experiment = federation(clients=3)
    standing = experiment.round(experiment.start())
    asked = []
    monkeypatch.setattr("gradveil.federated.engine.encoded_size", lambda update, *_: asked.append(update) or 7)
    after = experiment.round(standing)
    assert len(asked) == 3 + 1
    assert after.records[-1].bytes_down == 3 * standing.moved


def test_round_sends_the_last_change_to_absent_clients():
    experiment = federation(absent=0.5)
    standing = experiment.round(experiment.start())
    assert standing.records[0].absent
    assert standing.records[0].clients
    assert experiment.round(standing).records[-1].bytes_down == 4 * standing.moved


def test_round_bytes_include_public_messages():
    """One client's mask goes up, a bit an entry; everybody is sent it."""
    quiet, loud = (train(federation(text), 1).records[0] for text in ("dgp", "adgp"))
    experiment = federation("adgp")
    bits = sum(-(-value.numel() // 8) for value in experiment.client.params().values())
    assert speakers(experiment.client) == 1
    assert loud.bytes_down - quiet.bytes_down == 4 * bits
    sent = experiment.announced(experiment.start(), range(4), 1)
    assert sent[1] == bits
    updates = [experiment.local_update(experiment.start(), i, 1, sent[0])[0] for i in range(4)]
    selected = sum(int((value != 0).sum()) for update in updates for value in update.values())
    assert loud.bytes_up > bits + 4 * selected


def test_evaluate_is_deterministic_and_restores_the_model():
    experiment = federation('dropout(0.5, where="2")')
    experiment.client.model.train()
    params = experiment.client.params()
    assert experiment.evaluate(params, experiment.test, 1) == experiment.evaluate(params, experiment.test, 1)
    assert experiment.client.model.training
    outputs = net()(experiment.test.inputs)
    assert experiment.evaluate(params, experiment.test, 1)[0] == pytest.approx(
        F.cross_entropy(outputs, blobs(90, 5).targets).item()
    )


def test_evaluate_draws_the_noise_of_bottlenecks_alone_if_asked_to():
    text = 'dropout(0.5, where="2") + precode(k=4)'
    quiet, noisy = (federation(text, evaluation_noise=on) for on in (False, True))
    params = quiet.client.params()
    mean, drawn = quiet.evaluate(params, quiet.test, 1), noisy.evaluate(params, noisy.test, 1)
    assert quiet.evaluate(params, quiet.test, 2) == mean
    assert drawn == noisy.evaluate(params, noisy.test, 1)
    assert len({mean, drawn, noisy.evaluate(params, noisy.test, 2), noisy.evaluate(params, noisy.test, 1, 1)}) == 4
    plain = federation('dropout(0.5, where="2")', evaluation_noise=True)
    params = plain.client.params()
    assert plain.evaluate(params, plain.test, 1) == plain.evaluate(params, plain.test, 2)


class Louder(nn.Module):
    """A user's module that does something else while it is trained."""

    def forward(self, x):
        return 100 * x if self.training else x


def test_evaluate_sets_custom_modules_to_eval_mode():
    experiment = federation()
    loud = replace(experiment, client=Client(nn.Sequential(*net(), Louder()).train(), local=experiment.client.local))
    params = experiment.client.params()
    assert loud.evaluate(params, loud.test, 1) == experiment.evaluate(params, experiment.test, 1)


def test_round_validation_loss_is_the_mean_over_all_clients():
    experiment = federation(participation=0.5)
    after = experiment.round(experiment.start())
    problem = [experiment.evaluate(after.params, share.validation, 1) for share in experiment.shares]
    assert len({loss for loss, _ in problem}) == 4
    record = after.records[0]
    assert record.validation_loss == pytest.approx(sum(loss for loss, _ in problem) / 4)
    assert record.validation_accuracy == pytest.approx(sum(right for _, right in problem) / 4)


def test_federation_with_invalid_settings_raises_every_problem():
    with pytest.raises(GradveilError) as caught:
        federation(clients=0, participation=0.0, absent=1.0, patience=0, batch=0, pace=((3, 0.0),))
    assert len(caught.value.problems) == 7
    with pytest.raises(GradveilError, match="no validation loss"):
        federation(validation=False, patience=3)
    experiment = federation()
    none = Batch(experiment.test.inputs[:0], experiment.test.targets[:0])
    with pytest.raises(GradveilError, match=r"test: holds no examples.*\n.*shares\[0\].validation: holds no examples"):
        replace(experiment, test=none, shares=[replace(experiment.shares[0], validation=none), *experiment.shares[1:]])


def test_train_diverging_ends_with_its_best_parameters():
    experiment = federation()
    first = experiment.round(experiment.start())
    torn = tuple(
        replace(share, train=Batch(share.train.inputs * math.nan, share.train.targets)) for share in experiment.shares
    )
    done = replace(experiment, shares=torn).round(first)
    assert (done.status, done.best_round) == ("diverged", 1)
    assert same(done.final, first.params)


def test_train_never_ends_with_infinite_parameters():
    first = federation().round(federation().start())
    done = federation("gaussian(1000)", server=Server(lr=1e308)).round(first)
    assert (done.status, done.best_round, done.records[-1].refused) == ("diverged", 1, ())
    assert same(done.final, first.params)


def test_train_nan_validation_loss_is_worse_than_any():
    experiment = federation(patience=3)
    first = experiment.round(experiment.start())
    for odd in (math.nan, math.inf):
        standing = replace(first, records=(replace(first.records[0], validation_loss=odd),))
        assert experiment.round(standing).best_round == 2
    torn = [
        replace(share, validation=Batch(share.train.inputs * math.nan, share.train.targets))
        for share in experiment.shares
    ]
    assert replace(experiment, shares=torn).round(first).best_round == 1


def spoilt(experiment: Federation, *clients: int) -> Federation:
    """The same federation with images that hold NaN in the hands of these clients."""

    def torn(share: ClientShare) -> ClientShare:
        inputs = share.train.inputs.clone()
        inputs[:, 0, 0, 0] = math.nan
        return replace(share, train=Batch(inputs, share.train.targets))

    return replace(experiment, shares=[torn(s) if i in clients else s for i, s in enumerate(experiment.shares)])


def test_round_leaves_out_updates_that_are_not_finite():
    whole = federation("dgp", together=False)
    experiment = spoilt(whole, 1, 2)
    done = train(experiment, 2)
    assert done.status == "finished"
    assert [(record.clients, record.refused) for record in done.records] == [((0, 3), (1, 2))] * 2
    sent = {client: whole.local_update(whole.start(), client, 1)[0] for client in (0, 3)}
    counts = {client: len(whole.shares[client].train.targets) for client in sent}
    mean, _ = whole.server.mean(sent, counts, {})
    expected, _ = whole.server.step(whole.client.params(), mean, {})
    assert same(experiment.round(experiment.start()).params, expected)
    assert done.records[0].bytes_up == sum(encoded_size(update) for update in sent.values())
    assert all(bool(value.isfinite().all()) for state in done.clients.values() for value in state.values())
    assert same(done.clients[1], experiment.client.init(experiment.client.params())), "what it carries stays as it was"


def test_round_without_finite_updates_diverges():
    done = train(spoilt(federation(), 0, 1, 2, 3), 3)
    assert (done.status, len(done.records)) == ("diverged", 1)
    assert done.records[0].refused == (0, 1, 2, 3)
    assert done.records[0].bytes_up == 0


def test_checkpoint_stores_refused_clients():
    done = train(spoilt(federation(), 1), 1)
    assert unpack_standing(pack_standing(done, "this"), "this").records == done.records
