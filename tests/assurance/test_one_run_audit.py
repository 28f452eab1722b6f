"""The one-run audit finds a client that adds too little noise from a single update."""

import pytest
import torch

from gradveil.assurance.one_run_audit import one_run_audit, rehearsed_run
from gradveil.client import Client, Local
from gradveil.core.errors import GradveilError
from gradveil.core.noise import Key
from gradveil.core.types import Batch
from gradveil.defences import parse
from tests.laws.cases import Tiny, draw_batch

pytest.importorskip("dp_accounting", reason="the environment is older than pyproject.toml: make")

BATCH = draw_batch(Key(0))


def test_honest_update_is_consistent() -> None:
    found = rehearsed_run(parse("dp(clip=1, sigma=0.5)")(Client(Tiny())), BATCH, 40)
    assert not found.violated
    assert found.method == "canaries in one run"


def test_update_with_hardly_any_noise_violates_its_claim() -> None:
    found = rehearsed_run(parse("dp(clip=0.1, sigma=1e-5)")(Client(Tiny())), BATCH, 40, claimed=1.0)
    assert found.violated
    assert found.found > 1.2


LOCAL = Local(batch=12, lr=0.05, steps=10, sampling="poisson")


def test_canaries_in_a_clients_own_training_are_found_and_honest_noise_is_consistent() -> None:
    honest = rehearsed_run(parse("dp(clip=1, sigma=0.5)")(Client(Tiny(), local=LOCAL)), BATCH, 80)
    faulty = rehearsed_run(parse("dp(clip=0.1, sigma=1e-5)")(Client(Tiny(), local=LOCAL)), BATCH, 80, claimed=0.5)
    assert not honest.violated
    assert faulty.violated


def test_local_training_with_fixed_batches_is_refused() -> None:
    client = parse("dp(clip=1, sigma=1)")(Client(Tiny(), local=Local(batch=2, lr=0.1, steps=2)))
    with pytest.raises(GradveilError) as caught:
        rehearsed_run(client, BATCH, 40)
    assert caught.value.problems[0].where == "client"


def test_local_training_without_a_step_is_refused() -> None:
    client = parse("dp(clip=1, sigma=1)")(Client(Tiny(), local=Local(batch=500, lr=0.1, epochs=1, sampling="poisson")))
    update = {name: torch.zeros_like(value) for name, value in client.params().items()}
    canaries = Batch(*(value[:2] for value in BATCH))
    with pytest.raises(GradveilError) as caught:
        one_run_audit(client, update, canaries, torch.ones(2), BATCH, guesses=2)
    assert [problem.where for problem in caught.value.problems] == ["client.local"]


def test_surest_guesses_say_more_of_honest_noise_than_all() -> None:
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4096, 2))
    client = parse("dp(clip=1, sigma=0.5)")(Client(model))
    count, dim = 200, 4096
    rows = torch.randn(count, 1, 64, 64, generator=torch.Generator().manual_seed(0)) * dim
    canaries = Batch(rows, torch.zeros(count, dtype=torch.long))
    included = torch.arange(count) % 2 == 0
    kept = Batch(*(value[included] for value in canaries))
    params = client.params()
    noise = client.noise_spec(params, kept).sample(Key(0))
    update = {
        name: value.detach() for name, value in client.update(params, kept, noise, client.init(params))[0].items()
    }
    every = one_run_audit(client, update, canaries, included, guesses=count)
    usual = one_run_audit(client, update, canaries, included)
    assert every.found < usual.found < usual.claimed


def test_wrong_arguments_are_reported_together() -> None:
    client, flags = parse("dp(clip=1, sigma=1)")(Client(Tiny())), torch.ones(3)
    with pytest.raises(GradveilError) as caught:
        one_run_audit(client, {}, Batch(*(value[:2] for value in BATCH)), flags, guesses=1)
    assert [problem.where for problem in caught.value.problems] == ["update", "included", "guesses"]
