"""A hostile server against the noise of a deployed client: it searches seeds, repeats run ids, and finds nothing."""

import hashlib
import json
import logging
import os
import shutil
from functools import cache

import pytest
import torch
from torch import nn

from gradveil.client import Local
from gradveil.core.errors import GradveilError
from gradveil.core.noise import Key, Noise, NoiseSpec
from gradveil.core.secure_noise import SecretKey
from gradveil.core.types import Domain
from gradveil.defences import chain
from gradveil.defences.additive_noise import Gaussian
from gradveil.defences.composition import Defence
from gradveil.integrations.flower import answer, protect
from gradveil.nn.stochastic_layers import Dropout
from gradveil.spaces import ImageSpace
from gradveil.wire.codec import Layout, decode
from tests.core.test_secure_noise import Own
from tests.integrations.flower_in_process import BATCH, asked, bits, client, context
from tests.integrations.test_flower_training import trains

SEEDS = 1 << 12
"""As many as the server tries: of 2^32, a search that takes 90 seconds of a processor."""
USER = "user-dp(clip=1, sigma=1)"


def net():
    return nn.Sequential(nn.Linear(4, 40), nn.Tanh(), nn.Linear(40, 2))


def sent(reply, own):
    return decode(bits(reply), Layout.of(own.params()))


@cache
def of_seeds(shape: torch.Size) -> torch.Tensor:
    """What torch draws from generators that keep 32 bits of their seeds, for each seed that the server tries."""
    return torch.stack([torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in range(SEEDS)])


def found(values: torch.Tensor) -> int:
    """Count the seeds whose noise leaves no more of a tensor than the clip does."""
    return int(((values - of_seeds(values.shape)).flatten(1).norm(dim=1) <= 1.01).sum())


def short(key: Key) -> torch.Generator:
    """The generator of a key as it was, in a smaller space: of a digest remained what torch keeps."""
    digest = hashlib.sha256(json.dumps([key.seed, *key.path]).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest) % SEEDS)


def test_server_that_searches_seeds_finds_only_short_ones(tmp_path, monkeypatch):
    """The control is the client as it was: noise of norm 13 on a clipped update, and one of 4096 seeds takes it off."""
    own = client(USER, net())
    with monkeypatch.context() as patched:
        patched.setattr(Key, "generator", short)
        before = sent(answer(asked(1, own), context(), own, BATCH, folder=tmp_path / "old", key=Key(2**100)), own)
    assert before["0.weight"].norm() > 9
    assert found(before["0.weight"]) == 1

    now = sent(answer(asked(1, own), context(), own, BATCH, folder=tmp_path / "new"), own)
    mod = sent(protect(USER, folder=tmp_path / "mod")(asked(1, own), context(), trains), own)
    for reply in (now, mod):
        assert reply["0.weight"].norm() > 9
        assert not found(reply["0.weight"])


@pytest.mark.parametrize("text", [USER, "dp(clip=1, sigma=1)"])
def test_repeated_run_id_gets_new_noise(text, tmp_path):
    """The owner removes the folders of a run that is over, and the server gives a new one its id.

    With the same noise the difference of two answers is that of two updates; here it is as long as two noises.
    """
    own = client(text, net())
    other = BATCH._replace(inputs=BATCH.inputs + 0.1)
    std = 1 / len(BATCH.targets) if text.startswith("dp") else 1.0

    def apart(**settings):
        replies = []
        for batch in (BATCH, other):
            replies.append(sent(answer(asked(1, own), context(), own, batch, folder=tmp_path, **settings), own))
            shutil.rmtree(tmp_path / "partition-0")
        return torch.cat([(value - replies[1][name]).flatten() for name, value in replies[0].items()])

    fixed, fresh = apart(key=Key(0)), apart()
    assert fixed.norm() < 2
    assert fresh.std().item() == pytest.approx(2**0.5 * std, rel=0.2)


def test_all_draws_come_from_the_secret_of_the_answer(tmp_path, monkeypatch):
    """Noise, masks, Poisson inclusion, mixtures: all that is declared; and another answer has another secret."""
    own = client(
        "mixup + dp(clip=1, sigma=1) + user-dp(clip=1, sigma=1)",
        nn.Sequential(nn.Linear(4, 5), Dropout(0.5), nn.Linear(5, 3)),
        local=Local(batch=2, lr=0.1, steps=2, sampling="poisson"),
        domain=Domain(ImageSpace.between(-2, 2, (1, 1, 4)), 3),
    )
    drawn, streams, genuine = set(), {}, SecretKey.draw

    def draw(self, law, shape, dtype):
        drawn.add(self._path)
        streams[number, self._path] = self.stream().words(2).tobytes()  # the guard looks at the first step again
        return genuine(self, law, shape, dtype)

    monkeypatch.setattr(SecretKey, "draw", draw)
    for number in (1, 2):
        answer(asked(number, own), context(), own, BATCH, folder=tmp_path)
    names = {path[-1] for path in drawn}
    declared = own.noise_spec(own.params(), BATCH)
    assert names == set(declared)
    assert {"inclusion", "model.1.mask", "step.noise.0.weight", "send.noise.0.weight"} <= names
    assert any("lambda" in name or "partner" in name or name.startswith("batch") for name in names)
    assert len(set(streams.values())) == len(streams) == 2 * len(drawn)


def test_no_secret_is_in_a_file_a_log_or_a_record(tmp_path, monkeypatch, caplog):
    roots, genuine = [], os.urandom

    def recorded(count):
        roots.append(genuine(count))
        return roots[-1]

    monkeypatch.setattr("gradveil.core.secure_noise.os.urandom", recorded)
    own = client(f"{USER} + topk(0.3, feedback=true)")
    with caplog.at_level(logging.DEBUG):
        replies = [answer(asked(number, own), context(), own, BATCH, folder=tmp_path) for number in (1, 2)]
        again = answer(asked(2, own), context(), own, BATCH, folder=tmp_path)
    assert bits(again) == bits(replies[1])
    roots = [root for root in roots if len(root) == 32]
    assert len(set(roots)) == len(roots) == 2, "one for each answer, none for one that is repeated"
    left = [file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()]
    left += [bits(reply) for reply in replies] + [caplog.text.encode()]
    for root in roots:
        number = int.from_bytes(root)
        for form in (root, root.hex().encode(), str(number).encode(), root[:8], root[-8:]):
            assert not any(form in content for content in left)


def test_law_that_needs_torchs_generator_is_refused_only_in_a_deployment(tmp_path):
    class Theirs(Gaussian):
        def noise(self, params):
            return NoiseSpec({name: Noise(tuple(p.shape), Own(), dtype=p.dtype) for name, p in params.items()})

    own = Defence("mine", send=chain(mine=Theirs(1.0)))(client("none"))
    with pytest.raises(GradveilError, match=r"noise\.send\.mine\.0\.weight: its law Own cannot draw from a crypto"):
        answer(asked(1, own), context(), own, BATCH, folder=tmp_path)
    assert not list(tmp_path.rglob("answer-*"))
    answer(asked(1, own), context(), own, BATCH, folder=tmp_path, key=Key(0))


def test_sent_values_are_multiples_of_the_grid_step(tmp_path):
    """Also through the mod, whose client is a stand-in; a power of two is a step of every finer grid."""
    own = client("user-dp(clip=1, sigma=1)")
    for reply in (
        answer(asked(1, own), context(), own, BATCH, folder=tmp_path / "a"),
        protect(USER, folder=tmp_path / "b")(asked(1, own), context(), trains),
    ):
        values = torch.cat([value.flatten() for value in sent(reply, own).values()]).double()
        steps = values * 2**12  # 23 entries: 2^-9 / sqrt(23) is above 2^-12
        assert torch.equal(steps, steps.round())
        assert not torch.equal(values * 2**8, (values * 2**8).round())
