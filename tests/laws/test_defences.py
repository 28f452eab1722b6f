"""Laws that every defence of the table keeps; a new entry of the table is covered by adding its settings to LAWS."""

from dataclasses import replace

import pytest
import torch
from torch.func import functional_call

from gradveil.client import Client, kept_direction
from gradveil.core.chain import split
from gradveil.core.noise import Key
from gradveil.core.tree import norm, select, squared_norm, stack, tmap
from gradveil.core.types import Batch, Context
from gradveil.defences import DEFENCES, Feedback, parse
from tests.laws.cases import CLIENTS, IDENTITY, LAWS, TEXTS, B, Tiny, V, draw, draw_batch

WITH_IDENTITY = [n for n, entry in DEFENCES.items() if entry.identity is not None and LAWS[n].of == "images"]
BOUNDED = [name for name, law in LAWS.items() if law.bound is not None]


def transforms(client: Client):
    return [each for slot in (client.step, client.send) if slot for _, each in slot]


def test_every_defence_has_law_settings():
    assert set(LAWS) == set(DEFENCES)
    for name, law in LAWS.items():
        assert law.texts
        assert all(text.startswith(name) for text in law.texts)


@pytest.mark.parametrize("text", TEXTS)
def test_setting_changes_what_is_sent(text: str):
    """Otherwise the other laws would hold for a defence that does nothing."""
    client = CLIENTS["gradient"]
    params, batch, noise, _ = draw(client)
    plain = client.update(params, batch, noise, {})[0]
    defended = parse(text)(client)
    sent = defended.update(*draw(defended))[0]
    same = sent.keys() == plain.keys() and all(torch.equal(sent[n], plain[n]) for n in plain)
    assert same == (text == "none")


@pytest.mark.parametrize("name", WITH_IDENTITY)
@pytest.mark.parametrize("kind", CLIENTS)
def test_zero_strength_is_the_identity(name: str, kind: str):
    client = CLIENTS[kind]
    defended = DEFENCES[name](**DEFENCES[name].identity)(replace(client, messages={}))
    params, batch, noise, _ = draw(defended)
    sent = defended.update(params, batch, noise, defended.init(params))[0]
    plain = client.update(params, batch, {n: v for n, v in noise.items() if n == "schedule"}, {})[0]
    torch.testing.assert_close(sent, plain, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", [name for name, law in LAWS.items() if not law.identity])
def test_what_has_no_identity_declares_none(name: str):
    client = parse(LAWS[name].texts[0])(CLIENTS["gradient"])
    assert DEFENCES[name].identity is None
    assert all(transform.identity_settings is None for transform in transforms(client))


@pytest.mark.parametrize("text", IDENTITY)
def test_smallest_settings_of_each_transform_are_the_identity(text: str):
    client = parse(text)(CLIENTS["gradient"])
    update = client.params()
    context = Context(update, draw_batch(Key(0)))
    for transform in transforms(client):
        settings = transform.identity_settings
        assert settings is not None
        neutral = replace(transform, **settings)
        sent, _ = neutral.apply(update, neutral.init(update), neutral.noise(update).sample(Key(1)), context)
        torch.testing.assert_close(sent, update, rtol=0, atol=0)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", CLIENTS)
def test_same_noise_gives_the_same_bits_and_other_noise_does_not(text: str, kind: str):
    client = parse(text)(CLIENTS[kind])
    params, batch, noise, state = draw(client)
    before = {name: value.clone() for name, value in {**params, **noise, **state}.items()}
    first, first_state = client.update(params, batch, noise, state)
    second, second_state = client.update(params, batch, noise, state)
    torch.testing.assert_close((first, first_state), (second, second_state), rtol=0, atol=0)
    torch.testing.assert_close({**params, **noise, **state}, before, rtol=0, atol=0)
    if noise:
        other, fresh = (
            client.noise_spec(params, batch).sample(Key(8)),
            client.init(params),
        )  # what is kept is drawn once
        drawn, changed = (client.update(params, batch, which, fresh)[0] for which in (noise, other))
        assert any(not torch.equal(drawn[name], changed[name]) for name in drawn)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", CLIENTS)
def test_batched_equals_looped(text: str, kind: str):
    client = parse(text)(CLIENTS[kind])
    rows = [draw(client, number) for number in range(V)]
    params = rows[0][0]
    batch = Batch(torch.stack([row[1].inputs for row in rows]), torch.stack([row[1].targets for row in rows]))
    batched = client.updates(params, batch, stack([row[2] for row in rows]), stack([row[3] for row in rows]))
    looped = [client.update(*row) for row in rows]
    # A bias before a normalisation has no gradient but rounding, which Adam blows up.
    allowed = 1e-8 if "keylock" in text and kind == "adam" else 1e-12
    for part in (0, 1):
        torch.testing.assert_close(batched[part], stack([one[part] for one in looped]), rtol=1e-12, atol=allowed)


@pytest.mark.parametrize("text", [text for text in TEXTS if "feedback=true" in text])
def test_residual_and_sent_are_what_was_accumulated(text: str):
    client = parse(text)(CLIENTS["gradient"])
    params, batch, noise, state = draw(client)
    stages = dict(client.send)
    name, feedback = next((name, stage) for name, stage in stages.items() if isinstance(stage, Feedback))
    assert all(not value.any() for value in feedback.init(params).values())
    incoming = replace(client, send=None).update(params, batch, noise, state)[0]
    sent, after = client.update(params, batch, noise, state)
    old, new = select(state, f"send.{name}.residual"), select(after, f"send.{name}.residual")
    # Pruning splits exactly; what a quantiser leaves is a difference, rounded.
    allowed = 1e-15 if "sign" in text or "quantise" in text else 0
    torch.testing.assert_close(tmap(torch.add, incoming, old), tmap(torch.add, sent, new), rtol=allowed, atol=allowed)
    assert squared_norm(new) > 0


@pytest.mark.parametrize("name", BOUNDED)
def test_clip_bound_holds(name: str):
    bound = LAWS[name].bound
    client = parse(LAWS[name].texts[0])(CLIENTS["gradient"])
    for number in range(3):
        params, batch, noise, state = draw(client, number)
        for one in (batch, *(Batch(batch.inputs[i : i + 1], batch.targets[i : i + 1]) for i in range(B))):
            plain = norm(CLIENTS["gradient"].update(params, one, {}, {})[0])
            length = norm(client.update(params, one, noise, state)[0])
            assert length <= bound * (1 + 1e-12)
            if one is not batch:
                torch.testing.assert_close(length, plain.clamp(max=bound))


@pytest.mark.parametrize("text", [text for text in TEXTS if parse(text).send and text.startswith("adgp")])
@pytest.mark.parametrize("kind", CLIENTS)
def test_messages_change_what_is_sent(text: str, kind: str):
    """Otherwise the laws would hold for a defence that does not listen."""
    client = parse(text)(CLIENTS[kind])
    given = draw(client)
    heard, deaf = client.update(*given)[0], replace(client, messages={}).update(*given)[0]
    assert all(not torch.equal(heard[name], deaf[name]) for name in heard if name.endswith("weight"))


def test_who_says_that_only_masks_are_applied_applies_nothing_else():
    """While the noise of its own is off, and with the masks that its update shows; some have none."""
    said: dict[str, bool] = {}
    for text in TEXTS:
        client = parse(text)(CLIENTS["gradient"])
        batch = Batch(*(value[:1] for value in draw_batch(Key(4))))
        params = client.params()
        spec, state = client.noise_spec(params, batch), client.init(params)
        off = [name for name in spec if name.startswith(("step.", "send."))]
        noise = {**spec.sample(Key(5)), **{name: spec[name].off() for name in off}}
        shown = client.evidence(client.update(params, batch, noise, state)[0])
        noise |= {name: value for name, value in shown.items() if ".mask." in name}
        masks = kept_direction(client, params, 1, noise, off)
        if masks is None or (client.step, client.send) == (None, None):
            continue
        bare = replace(client, step=None, send=None)
        on = {**noise, **{name: value for name, value in spec.sample(Key(5)).items() if name in off}}
        for drawn in (noise, on) if kept_direction(client, params, 1, noise) is not None else (noise,):
            g, sent = (c.update(params, batch, drawn, c.init(params))[0] for c in (bare, client))
            g = torch.cat([(value * masks.get(name, 1)).flatten() for name, value in g.items()])
            sent = torch.cat([value.flatten() for value in sent.values()])
            assert float(g @ sent / (g.norm() * sent.norm())) > 1 - 1e-12, text
        said[text] = bool(masks)
        each = split(client.step)[0] is not None
        assert (kept_direction(client, params, 2, noise, off) is not None) == (not each), text
    stay = {text for text, masked in said.items() if not masked}
    assert {"clip(norm=0.3)", "clip-example(norm=0.3)", "gaussian(std=0.1)", "laplace(scale=0.1)"} <= stay
    assert {
        "dp(clip=0.3, sigma=0.5)",
        "user-dp(clip=0.3, sigma=0.5)",
        "dp(clip=0.3, sigma=0.5) + cvb + dropout",
    } <= stay
    masked = set(said) - stay
    assert {"prune(ratio=0.7)", "topk(keep=0.2)", "dgp(top=0.1, bottom=0.5, feedback=false)"} <= masked
    assert "optimal-prune(ratio=0.7, mixed=true, std=0.05)" in masked


def test_surgeries_leave_the_given_model_alone():
    model = Tiny()
    expected = functional_call(model, dict(Tiny().named_parameters()), (torch.zeros(1, 1, 8, 8).double(),))
    for text in TEXTS:
        parse(text)(Client(model))
    assert [path for path, _ in model.named_modules()] == [path for path, _ in Tiny().named_modules()]
    torch.testing.assert_close(model(torch.zeros(1, 1, 8, 8).double()), expected, rtol=0, atol=0)
