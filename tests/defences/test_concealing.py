"""DCS: proxies that act on the model like the examples, and attackers that search them together with the images."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from gradveil.attacks.inversion.inversion import Inversion
from gradveil.attacks.inversion.problem import InversionProblem
from gradveil.attacks.inversion_presets import cdia
from gradveil.attacks.knowledge import Knowledge, Optimise
from gradveil.attacks.protocol import Observation
from gradveil.audit.attackers.attacker_table import aimed_by
from gradveil.cli.app import run
from gradveil.client import Client
from gradveil.core.chain import chain, relaxed
from gradveil.core.errors import GradveilError
from gradveil.core.noise import Key
from gradveil.core.tree import norm, tmap
from gradveil.core.types import Batch, Context, Domain
from gradveil.defences import Clip, parse
from gradveil.defences.concealing import Dcs, Proxies, WithProxies
from gradveil.spaces import ImageSpace

B, K, SPACE = 2, 3, ImageSpace.between(-4, 5, (1, 8, 8))


def drawn(*shape, name=""):
    return torch.randn(*shape, generator=Key(0, (name,)).generator(), dtype=torch.float64)


def public_images():
    return drawn(7, 1, 8, 8, name="public")


def small():
    """Return a client with public images, and a batch of two."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(4 * 36, K)).double()
    domain = Domain(SPACE, K, public_images(), torch.arange(7) % K)
    batch = Batch(drawn(B, 1, 8, 8, name="inputs"), torch.tensor([0, 2]))
    return Client(net, domain=domain), batch


def cosine(first, second):
    return float(sum((value * second[name]).sum() for name, value in first.items()) / (norm(first) * norm(second)))


def searched(settings, client, batch, places=(0.1, 0.6)):
    """Return the proxies of a batch, their gradient and the plain one."""
    context = client.pipeline.gradient.context(client.params(), batch, {})
    assert context.gradient is not None
    plain = client.update(client.params(), batch, {}, {})[0]
    found = settings.proxies(plain, torch.tensor(places, dtype=torch.float64), context)
    return found, context.gradient(Batch(found.images, found.labels)), plain


def test_search_turns_the_gradient_of_proxies_and_moves_their_images_away():
    client, batch = small()
    start = searched(Dcs(iterations=1, lr=0), client, batch)
    wanted = 0.7 * public_images()[[0, 4]] + 0.3 * batch.inputs
    torch.testing.assert_close(start[0].images, wanted)
    assert start[0].labels.argmax(1).tolist() == [0, 1]
    torch.testing.assert_close(
        searched(Dcs(iterations=1, lr=0, mix=False), client, batch)[0].images, public_images()[[0, 4]]
    )
    found, gradient, plain = searched(Dcs(iterations=100, distance=0.1), client, batch)
    assert cosine(gradient, plain) > cosine(start[1], plain) + 0.1
    apart = [(each.images - batch.inputs).flatten(1).norm(dim=1).mean() for each in (start[0], found)]
    assert apart[1] > apart[0]


def test_search_stops_beyond_the_limit_alone_or_with_others():
    client, batch = small()
    length = float(
        (searched(Dcs(iterations=1, lr=0), client, batch)[0].images - batch.inputs).flatten(1).norm(dim=1).mean()
    )
    limit = length + 0.5
    found = searched(Dcs(iterations=300, limit=limit), client, batch)[0].images
    more = searched(Dcs(iterations=301, limit=limit), client, batch)[0].images
    torch.testing.assert_close(found, more, rtol=0, atol=0)
    assert float((found - batch.inputs).flatten(1).norm(dim=1).mean()) > limit
    together = parse(f"dcs(iterations=60, limit={limit})")(client)
    params = client.params()
    noise = {"step.dcs.place": torch.tensor([0.1, 0.6], dtype=torch.float64)}
    alone = together.update(params, batch, noise, {})[0]
    both = together.updates(
        params, Batch(*(torch.stack([v, v.flip(0)]) for v in batch)), {n: v.expand(2, B) for n, v in noise.items()}, {}
    )[0]
    torch.testing.assert_close(tmap(lambda value: value[0], both), alone, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("share", "divisor"), [(0.7, 3), (0.0, 2), (1.0, 2)])
def test_sent_update_is_the_mean_of_both_gradients_with_mixed_labels(share, divisor):
    client, batch = small()
    settings = Dcs(iterations=5, share=share, project=False)
    found, _, plain = searched(settings, client, batch)
    context = client.pipeline.gradient.context(client.params(), batch, {})
    own = torch.nn.functional.one_hot(batch.targets, K).double()
    added = client.update(client.params(), Batch(found.images, share * found.labels + (1 - share) * own), {}, {})[0]
    sent = settings.with_proxies(plain, found, context)
    torch.testing.assert_close(sent, {name: (value + added[name]) / divisor for name, value in plain.items()})


def test_update_that_points_away_is_turned_back():
    client, batch = small()
    context = client.pipeline.gradient.context(client.params(), batch, {})
    plain = client.update(client.params(), batch, {}, {})[0]
    away = replace(context, gradient=lambda examples: {name: -2 * value for name, value in plain.items()})
    proxies = Proxies(batch.inputs, torch.nn.functional.one_hot(batch.targets, K).double())
    for factor, wanted in ((1.0, -1 / 3 + 0.5), (100.0, None)):
        own = {name: factor * value for name, value in plain.items()}
        far = replace(away, gradient=lambda examples, f=factor: {n: -2 * f * v for n, v in plain.items()})
        sent = WithProxies(0.7, project=True, classes=K).with_proxies(own, proxies, far)
        share = float(sent["0.weight"].flatten()[0] / own["0.weight"].flatten()[0])
        square = float(norm(own)) ** 2
        assert share == pytest.approx(-1 / 3 + max(0.5, square / 3 / (square + 1e-3)))
        assert wanted is None or share == pytest.approx(wanted)
    kept = WithProxies(0.7, project=False, classes=K).with_proxies(plain, proxies, away)
    torch.testing.assert_close(kept, {name: -value / 3 for name, value in plain.items()})


def test_context_without_public_images_raises():
    client, batch = small()
    bare = client.pipeline.gradient.context(client.params(), batch, {})
    plain, places = client.update(client.params(), batch, {}, {})[0], torch.zeros(B).double()
    for context, what in (
        (replace(bare, public=None), "needs public images"),
        (Context(client.params(), batch), "needs gradients and outputs"),
    ):
        with pytest.raises(GradveilError, match=what):
            Dcs(iterations=1).proxies(plain, places, context)


def opened(attack: Inversion, *, judges: bool) -> InversionProblem:
    client, batch = small()
    defended = parse("dcs(iterations=5)")(client)
    params = client.params()
    noise = defended.noise_spec(params, batch).sample(Key(1))
    update = {name: value.unsqueeze(0) for name, value in defended.update(params, batch, noise, {})[0].items()}
    seen = Observation(params=params, update=update, examples=B, target_clients=(0,))
    told = Knowledge(SPACE, K, attack.knowledge, batch.targets.unsqueeze(0))
    return InversionProblem(attack, [seen], defended, told, Key(2), judges=judges)


def test_attacks_search_the_proxies_and_judges_repeat_their_search():
    attack = cdia()
    searching, judging = opened(attack, judges=False), opened(attack, judges=True)
    assert {name for name, how in searching.how.items() if isinstance(how, Optimise)} == {
        "step.dcs.proxy.image",
        "step.dcs.proxy.label",
    }
    assert list(judging.how) == ["step.dcs.place"]
    client, batch = small()
    noise = parse("dcs(iterations=5)")(client).noise_spec(client.params(), batch).sample(Key(1))
    own = {name: value.unsqueeze(0) for name, value in noise.items()}
    match = judging.match_at([0], batch.inputs.unsqueeze(0), own)
    assert float(match.flatten()[0]) < 1e-10
    assert float(judging.match_at([0], batch.inputs.flip(0).unsqueeze(0), own).flatten()[0]) > 1e-3


def test_relaxed_client_sends_the_same_for_the_proxies_that_were_found():
    client, batch = small()
    defended = parse("dcs(iterations=5)")(client)
    noise = {"step.dcs.place": torch.tensor([0.1, 0.6], dtype=torch.float64)}
    sent = defended.update(client.params(), batch, noise, {})[0]
    found = searched(Dcs(iterations=5), client, batch)[0]
    logits = torch.log(found.labels.clamp_min(1e-300))
    known = {"step.dcs.proxy.image": found.images, "step.dcs.proxy.label": logits}
    searching = replace(defended, step=relaxed(defended.step, client.domain))
    assert set(searching.noise_spec(client.params(), batch)) == set(known)
    torch.testing.assert_close(searching.update(client.params(), batch, known, {})[0], sent)
    assert relaxed(defended.step, None) is defended.step
    assert relaxed(chain(clip=Clip(1.0)), client.domain) == chain(clip=Clip(1.0))


def test_attackers_that_would_repeat_the_search_are_left_out():
    assert aimed_by("curious", "dcs") == ["portfolio"]
    assert "fishing" in aimed_by("malicious", "dcs")


def test_texts_raise(capsys):
    assert run(["check", "reviews", "--defence", "dcs"]) == 1
    assert "defence dcs: needs numbers, and the data are" in capsys.readouterr().out.replace("\n", " ")
