"""Optimal noise and pruning fitted to public images: the global forms, what they look at, and what is known of them."""

from dataclasses import replace

import pytest
import torch

from gradveil.client import Client, Local
from gradveil.core.errors import GradveilError
from gradveil.core.noise import Key
from gradveil.core.tree import tmap
from gradveil.core.types import Batch
from gradveil.defences import parse
from gradveil.defences.fisher_information import information, obstacle, sight
from gradveil.defences.guarantees import NOTHING, examine, stages
from gradveil.defences.privacy_warnings import suspicions
from gradveil.defences.pruning import rest
from gradveil.defences.stage_probes import data_dependent
from gradveil.gradients.fused import written_bytes
from gradveil.theory.first_order_utility import global_masks, global_ratio
from gradveil.theory.input_jacobian import exact_squared_row_norms, jacobian, squared_row_norms
from tests.laws.cases import DOMAIN, Tiny, draw, draw_batch

TEXT = "optimal-noise(std=0.1, probes=4000, form=global, batches=3)"
PUBLIC = torch.rand(14, 1, 8, 8, generator=Key(0, ("more",)).generator(), dtype=torch.float64)
LABELS = torch.randint(0, 3, (14,), generator=Key(1).generator())
LABELLED = replace(DOMAIN, public=PUBLIC, labels=LABELS)


def deviations(client: Client, number: int = 0):
    """The noise's standard deviations: what a normal number of 1 everywhere adds."""
    params, batch, noise, state = draw(client, number)
    made = (
        {name: torch.full_like(value, size) if ".normal." in name else value for name, value in noise.items()}
        for size in (1.0, 0.0)
    )
    noisy, plain = (client.update(params, batch, examples, state)[0] for examples in made)
    return tmap(torch.sub, noisy, plain)


@pytest.mark.parametrize("clamp", ["", ", clamp=0.2"])
def test_optimal_public_variances_follow_the_theorem(clamp: str):
    client = parse(f"{TEXT[:-1]}{clamp})")(Client(Tiny(), domain=LABELLED))
    plain, params = Client(Tiny()), client.params()

    def gradient(batch: Batch):
        return plain.update(params, batch, {}, {})[0]

    batches = [Batch(PUBLIC[i : i + 4], LABELS[i : i + 4]) for i in (0, 4, 8)]
    rows, result = [exact_squared_row_norms(gradient, each) for each in batches], [gradient(each) for each in batches]
    ratio = global_ratio(rows, result, 0.2 if clamp else float("inf"))
    flat = torch.cat([value.flatten() for value in ratio.values()])
    filled = torch.where(flat > 0, flat, flat.sum() / (flat > 0).sum())
    params, batch, noise, state = draw(client)
    loud = {name: torch.ones_like(value) if ".normal." in name else value for name, value in noise.items()}
    sent, least = client.update(params, batch, loud, state)[0], 0.2 if clamp else float("inf")
    added = tmap(lambda noisy, value: noisy - value.clamp(-least, least), sent, gradient(batch))
    std = torch.cat([value.flatten() for value in added.values()])
    torch.testing.assert_close(std, (0.01 * filled / filled.mean()).sqrt(), rtol=0.05, atol=0)
    torch.testing.assert_close(std.square().mean(), torch.tensor(0.01).double())
    assert float(std.max() / std.min()) > 3


def test_optimal_public_variances_are_shared_and_depend_on_labels():
    client = parse("optimal-noise(std=0.1, form=global)")(Client(Tiny(), domain=LABELLED))
    first, second = deviations(client, 0), deviations(client, 1)
    for name, value in first.items():
        torch.testing.assert_close(value, second[name], rtol=1e-9, atol=1e-12)
    turns = replace(client, domain=replace(LABELLED, labels=torch.arange(14) % 3))
    unlabelled = replace(client, domain=replace(LABELLED, labels=None))
    for name, value in deviations(unlabelled).items():
        torch.testing.assert_close(value, deviations(turns)[name])
        assert not torch.equal(value, first[name])


@pytest.mark.parametrize("model", ["dropout(0.4)", "cvb(beta=0.1)", "keylock(width=4)"])
@pytest.mark.parametrize("local", [None, Local(batch=2, lr=0.3, steps=2)])
def test_optimal_public_ignores_model_noise_and_state(model: str, local: Local | None):
    """A lock that was trained on private examples would be."""
    client = parse(f"{model} + optimal-noise(std=0.1, form=global)")(Client(Tiny(), local=local, domain=LABELLED))
    first, second = deviations(client, 0), deviations(client, 1)
    for name, value in first.items():
        torch.testing.assert_close(value, second[name], rtol=1e-9, atol=1e-12)


def masks(client: Client, number: int = 0):
    sent = client.update(*draw(client, number))[0]
    return tmap(lambda value: value != 0, sent)


@pytest.mark.parametrize("mixed", [False, True])
def test_optimal_public_masks_follow_the_theorem(mixed: bool):
    text = f"optimal-prune(0.7, probes=6, form=global, batches=3, mixed={str(mixed).lower()})"
    client = parse(text)(Client(Tiny(), domain=LABELLED))
    plain, (params, batch, noise, state) = Client(Tiny()), draw(client)

    def gradient(examples: Batch):
        return plain.update(params, examples, {}, {})[0]

    batches = [Batch(PUBLIC[i : i + 4], LABELS[i : i + 4]) for i in (0, 4, 8)]
    rows = [squared_row_norms(gradient, each, noise["send.prune.probe"]) for each in batches]
    entries = sum(value.numel() for value in params.values())
    for coin, one_more in ((0.0, mixed), (1.0, False)):
        drawn = {**noise, "send.prune.coin": torch.tensor(coin).double()} if mixed else noise
        sent, _ = client.update(params, batch, drawn, state)
        result = global_masks(rows, [gradient(each) for each in batches], int(0.7 * entries) + one_more)
        for name, value in gradient(batch).items():
            torch.testing.assert_close(sent[name], value * result[name], rtol=0, atol=0)


def test_optimal_public_masks_are_shared():
    client = parse("cvb(beta=0.1) + optimal-prune(0.7, form=global)")(Client(Tiny(), domain=LABELLED))
    selected = masks(client, 0)
    assert all(torch.equal(selected[name], mask) for name, mask in masks(client, 1).items())
    examples = parse("optimal-prune(0.7)")(Client(Tiny()))
    assert any(not torch.equal(mask, masks(examples, 1)[name]) for name, mask in masks(examples, 0).items())
    other = replace(client, domain=replace(LABELLED, public=PUBLIC.flip(0)))
    assert any(not torch.equal(selected[name], mask) for name, mask in masks(other).items())


GLOBAL = ["optimal-noise(0.1, form=global)", "optimal-prune(0.5, form=global)"]
GLOBAL += ["optimal-prune(0.5, form=global, feedback=true)", "optimal-prune(0.5, form=global, std=0.1)"]


@pytest.mark.parametrize("text", GLOBAL)
def test_optimal_public_has_no_guarantee_and_uses_no_private_data(text: str):
    client = parse(f"dp(clip=1, sigma=2) + {text}")(Client(Tiny(), domain=LABELLED))
    batch = draw_batch(Key(0))
    (_, stage) = stages(client.send)[0]
    assert not data_dependent(stage, client, batch)
    assert "differential privacy of each example" in examine(client, batch).promise()
    assert not list(suspicions(client, batch))
    alone = parse(text)(Client(Tiny(), domain=LABELLED))
    assert examine(alone, batch).promise() == NOTHING
    (_, local) = stages(parse(text.replace(", form=global", ""))(alone).send)[1]
    assert data_dependent(local, alone, batch)


@pytest.mark.parametrize("text", GLOBAL[:2])
def test_optimal_public_fit_is_computed_once(text: str):
    """Twenty times as many clients at once do not write twenty times as much."""
    client = parse(text)(Client(Tiny(), domain=LABELLED))

    def written(count: int) -> int:
        params, batch, noise, _ = draw(client)
        rows = Batch(*(torch.stack([value] * count) for value in batch))
        drawn = {name: torch.stack([value] * count) for name, value in noise.items()}
        return written_bytes(lambda: client.updates(params, rows, drawn, {}))

    written(2)
    assert written(40) < 8 * written(2)


def test_optimal_public_pruning_with_noise_has_a_bound():
    client = parse("clip(2) + optimal-prune(0.5, std=0.3, form=global)")(Client(Tiny(), domain=LABELLED))
    assert obstacle(client, draw_batch(Key(0))) is None
    seen = sight(client, 4)
    assert seen.variance == seen.normal == pytest.approx(0.09)
    examples = parse("optimal-prune(0.5, std=0.3)")(Client(Tiny(), domain=LABELLED))
    assert "does not depend on the data" in (obstacle(examples, draw_batch(Key(0))) or "")


def test_optimal_public_information_equals_the_formula():
    client = parse("clip(2) + optimal-noise(std=0.1, clamp=0.3, form=global) + prune(0.5)")(
        Client(Tiny(), domain=LABELLED)
    )
    params, batch, noise, _ = draw(client)
    assert obstacle(client, batch) is None
    probes = torch.randn(3, *batch.inputs.shape, generator=Key(1).generator(), dtype=torch.float64)
    mean = torch.full((1, 8, 8), 0.5).double()
    result = information(sight(client, len(batch.targets)), params, batch, noise, probes, mean)
    std = deviations(parse("clip(2) + optimal-noise(std=0.1, clamp=0.3, form=global)")(Client(Tiny(), domain=LABELLED)))
    clean = parse("clip(2)")(Client(Tiny()))

    def divided(examples: Batch):
        sent = clean.update(params, examples, {}, {})[0]
        return {name: value.clamp(-0.3, 0.3) / std[name] for name, value in sent.items()}

    products = jacobian(divided, batch) @ probes.flatten(1).mT
    torch.testing.assert_close(result.along, products.square().sum(0))
    away = tmap(torch.sub, divided(batch), divided(Batch(mean.expand_as(batch.inputs), batch.targets)))
    torch.testing.assert_close(result.nats, sum(value.square().sum() for value in away.values()) / 2)


@pytest.mark.parametrize(
    "text",
    [
        "optimal-prune(0.7, std=0.3, form=global)",
        "optimal-prune(0.95, std=0.3, form=global)",
        "optimal-prune(0.705, std=0.3, form=global, mixed=true)",
        "optimal-prune(0.7, std=0.3, form=global, mixed=true, scope=layer)",
        "gaussian(0.3) + optimal-prune(0.7, form=global)",
    ],
)
def test_information_behind_public_masks_is_that_of_the_kept_rows(text: str):
    """Lemma A.4 and Eq. 2 of the paper: E tr J = sum (1 - p_i) ||dg_i/dx||^2 / s^2."""
    client = parse(text)(Client(Tiny(), domain=LABELLED))
    params, batch, noise, _ = draw(client)
    probes = torch.randn(3, *batch.inputs.shape, generator=Key(1).generator(), dtype=torch.float64)
    mean = torch.full((1, 8, 8), 0.5).double()
    result = information(sight(client, len(batch.targets)), params, batch, noise, probes, mean)

    sizes = []
    for coin in (0.0, 1.0):  # the entry at the border goes with the lower one, and stays with the higher
        coins = {n: torch.full_like(v, coin) for n, v in noise.items() if ".coin" in n}
        rest_of = {n: v for n, v in noise.items() if ".probe" in n} | coins
        one, none = ({n: rest_of.get(n, torch.full_like(v, size)) for n, v in noise.items()} for size in (1.0, 0.0))
        sent = (client.update(params, batch, each, {})[0] for each in (one, none))
        sizes.append(tmap(lambda loud, quiet: ((loud - quiet).abs() > 0.1).double(), *sent))
    whole, ratio = sum(value.numel() for value in params.values()), float(text.split("prune(")[1].partition(",")[0])
    chance = {n: rest(ratio, value.numel() if "layer" in text else whole) for n, value in params.items()}
    kept = {n: chance[n] * low + (1 - chance[n]) * sizes[1][n] for n, low in sizes[0].items()}
    assert any(not torch.equal(*pair) for pair in zip(*(s.values() for s in sizes), strict=True)) == ("mixed" in text)
    plain = Client(Tiny())

    def shown(examples: Batch):
        sent = plain.update(params, examples, {}, {})[0]
        return {name: value * kept[name].sqrt() / 0.3 for name, value in sent.items()}

    products = jacobian(shown, batch) @ probes.flatten(1).mT
    torch.testing.assert_close(result.along, products.square().sum(0))
    away = tmap(torch.sub, shown(batch), shown(Batch(mean.expand_as(batch.inputs), batch.targets)))
    torch.testing.assert_close(result.nats, sum(value.square().sum() for value in away.values()) / 2)
    everything = information(sight(parse("gaussian(0.3)")(plain), 4), params, batch, {}, probes, mean)
    assert bool((result.along < everything.along).all())


def test_optimal_public_sums_and_later_noise_are_obstacles():
    client = parse("optimal-noise(0.1, form=global)")(replace(Client(Tiny(), domain=LABELLED), members=2))
    assert "summed" in (obstacle(client, draw_batch(Key(0))) or "")
    coins = parse("optimal-prune(0.705, std=0.1, form=global, mixed=true)")
    assert "coins" in (obstacle(coins(replace(Client(Tiny(), domain=LABELLED), members=2)), draw_batch(Key(0))) or "")
    both = parse("gaussian(0.2) + optimal-noise(0.1, form=global)")(Client(Tiny(), domain=LABELLED))
    assert obstacle(both, draw_batch(Key(0))) is None
    assert sight(both, 4).variance == pytest.approx(0.04)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optimal-noise(0.1, form=global, layerwise=true, every=2)", "2 problems"),
        ("optimal-noise(0.1, form=global, of=example)", "optimal-noise.of"),
        ("optimal-noise(0.1, form=both)", "form"),
        ("optimal-prune(0.5, form=global, memory=0.5, of=example)", "2 problems"),
    ],
)
def test_optimal_public_with_private_settings_raises(text: str, message: str):
    with pytest.raises(GradveilError) as caught:
        parse(text)
    assert message in f"{len(caught.value.problems)} problems: {caught.value}"


@pytest.mark.parametrize("text", GLOBAL[:2])
def test_optimal_public_without_public_images_raises(text: str):
    for domain, message in ((None, "there are none"), (replace(DOMAIN, public=None), "0 public images")):
        client = parse(text)(Client(Tiny(), domain=domain))
        with pytest.raises(GradveilError, match=message):
            draw_and_send(client)


def draw_and_send(client: Client):
    params, batch, noise, state = draw(client)
    return client.update(params, batch, noise, state)
