"""A portfolio tries its settings on simulated clients, and never looks at the target clients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gradveil.attacks.attack_catalogue import make_attack
from gradveil.attacks.inversion.inversion import Inversion
from gradveil.attacks.inversion.inversion_settings import Variant
from gradveil.attacks.inversion.optimisers import Adam
from gradveil.attacks.inversion.rehearsal import effort, further, iterations_within
from gradveil.attacks.knowledge import Known
from gradveil.attacks.protocol import Progress
from gradveil.core.errors import GradveilError
from gradveil.core.noise import Key
from gradveil.core.types import Batch
from gradveil.defences import parse
from tests.attacks.small_experiments import Scene, tiny

IDLE, SOUND = Variant(0.0, Adam(lr=1e-9)), Variant(0.0, Adam(lr=0.1))


def attacks(scene: Scene, public: int) -> tuple[Inversion, Scene]:
    """An attack with a variant that stays where it starts and one that works, and its scene with public examples."""
    attack = replace(make_attack("portfolio(iterations=200)"), variants=(IDLE, SOUND))
    truth = scene.truth
    batch = Batch(truth.inputs.flatten(0, 1).flip(-1)[:public], truth.targets.flatten()[:public])
    return attack, replace(scene, knowledge=replace(scene.knowledge, public=batch if public else None))


def scores(scene: Scene, attack: Inversion) -> tuple[int, ...]:
    return attack.rehearse([scene.observation], scene.client, scene.knowledge, Key(3))


def test_the_variant_that_finds_more_is_chosen() -> None:
    attack, scene = attacks(tiny(), public=6)
    idle, sound = scores(scene, attack)
    chosen, remark = attack.chosen((idle, sound))
    assert sound > idle
    assert (chosen.descent.stepper, chosen.variants) == (SOUND.stepper, ())
    assert "best on simulated clients" in remark.words


def test_of_variants_that_score_alike_the_one_with_the_weakest_last_variation_is_chosen() -> None:
    attack = make_attack("portfolio")
    falling = attack.variants[1]
    assert falling.tv_end == min(each.last_tv for each in attack.variants)
    for scores, expected in (((580, 560, 280, 240), falling), ((600, 560, 280, 240), attack.variants[0])):
        chosen, _ = attack.chosen(scores)
        assert (chosen.tv, chosen.tv_end) == (expected.tv, expected.tv_end)


def test_a_falling_variation_is_weighed_as_it_ends_in_the_attack_check() -> None:
    _, scene = attacks(tiny(), public=0)
    found = {
        end: make_attack(f"portfolio(tv=0.1, tv_end={end}, iterations=20)")(
            [scene.observation], scene.client, scene.knowledge, Key(3)
        )
        for end in ("none", "0.001")
    }
    assert (found["0.001"].initial < found["none"].initial).all()
    assert not torch.equal(found["0.001"].inputs, found["none"].inputs)
    with pytest.raises(GradveilError, match="tv_end"):
        make_attack("portfolio(tv=0, tv_end=0.001)")


def test_the_choice_does_not_depend_on_the_observed_updates() -> None:
    attack, scene = attacks(tiny(), public=6)
    other = {name: torch.randn_like(value) for name, value in scene.observation.update.items()}
    blind = replace(scene, observation=replace(scene.observation, update=other))
    assert scores(scene, attack) == scores(blind, attack)


def test_without_public_examples_or_with_secrets_the_first_variant_is_used() -> None:
    attack, scene = attacks(tiny(), public=0)
    assert scores(scene, attack) == ()
    assert attack.chosen(())[0].descent.stepper == IDLE.stepper
    attack, scene = attacks(tiny(), public=6)
    told = replace(scene.knowledge, tensors={"send.noise.w": Known(torch.zeros(1))})
    assert scores(replace(scene, knowledge=told), attack) == ()


def test_a_setting_by_hand_leaves_nothing_to_try() -> None:
    assert make_attack("portfolio").variants
    assert not make_attack("portfolio(tv=0.05)").variants
    assert make_attack("portfolio(lr=0.1)").tv == make_attack("portfolio").variants[0].tv


def test_progress_counts_rehearsals_with_the_attack() -> None:
    attack, scene = attacks(tiny(), public=6)
    seen = list[Progress]()
    attack([scene.observation], scene.client, scene.knowledge, Key(3), seen.append)
    done = [each.row_iterations for each in seen]
    assert done == sorted(done)
    assert {each.row_budget for each in seen} == {2 * 2 * 150 + 3 * 200}


def test_rehearsals_fit_into_the_budget() -> None:
    for allowed, targets, beside in ((300, 1, 0), (2000, 1, 1), (300, 4, 0), (300, 4, 1), (2000, 32, 1)):
        iterations = iterations_within(allowed, targets, 4, timed=bool(beside))
        clients, of_each = effort(iterations, targets, 4)
        spent, whole = iterations * (targets + beside) + 4 * (clients + beside) * of_each, allowed * (targets + beside)
        assert 0.9 * whole <= spent <= whole


def test_a_short_attack_of_few_targets_rehearses_less_than_it_attacks() -> None:
    for iterations in (100, 200, 400, 800):
        clients, of_each = effort(iterations, 4, 4)
        assert 4 * clients * of_each <= 4 * iterations


def test_behind_added_noise_other_lengths_are_tried_on_the_first_clients() -> None:
    attack, scene = attacks(tiny(target_clients=4), public=6)
    assert len(scores(scene, attack)) == 2
    noisy = replace(scene, client=parse("gaussian(0.01)")(scene.client, Key(0)))
    idle, sound, clients, *finals = scores(noisy, attack)
    assert sound > idle
    assert (clients, finals[:2], finals[3:5]) == (1, [1, 150], [1, 200])
    seen = list[Progress]()
    found = attack([noisy.observation], noisy.client, noisy.knowledge, Key(3), seen.append)
    length = int(found.remarks[-1].words.partition(" for ")[2].partition(" iterations")[0])
    assert seen[-1].row_budget == 2 * 2 * 150 + 200 + 4 * length


def test_where_rehearsals_are_short_the_two_best_are_tried_for_longer() -> None:
    attack, scene = attacks(tiny(target_clients=4), public=6)
    longer = replace(attack, descent=replace(attack.descent, iterations=700))
    found = scores(scene, longer)
    *_, clients, first, rehearsed, _, one, middle, _, other, again, _ = found
    assert (clients, first, rehearsed, middle, again, {one, other}) == (1, 1, 150, 324, 324, {0, 1})
    assert longer.rehearsed([scene.observation], found) == 2 * 3 * 150 + 2 * 324


def test_a_search_stops_early_only_if_that_finds_clearly_more() -> None:
    attack = make_attack("portfolio(iterations=1000)")
    tried = (600, 500, 400, 300)
    for finals, place, length in (
        ((), 0, 1000),
        ((1, 0, 150, 690, 0, 1000, 630), 0, 150),
        ((1, 0, 150, 690, 0, 1000, 670), 0, 1000),
        ((1, 0, 150, 520, 0, 387, 690, 1, 387, 500, 0, 1000, 400), 0, 387),
        ((1, 0, 150, 700, 0, 387, 500, 1, 387, 690, 1, 1000, 400), 1, 387),
        ((1, 0, 150, 700, 0, 387, 500, 1, 387, 600), 1, 1000),
    ):
        found = attack.chosen((*tried, *finals))[0]
        assert (found.tv, found.tv_end) == (attack.variants[place].tv, attack.variants[place].tv_end)
        assert found.descent.iterations == length


def test_rehearsals_behind_noise_fit_into_the_budget() -> None:
    for allowed, targets in ((2000, 1), (1000, 4), (2000, 32), (3125, 64)):
        rows, iterations = allowed * targets, iterations_within(allowed, targets, 4, noisy=True)
        clients, of_each = effort(iterations, targets, 4)
        few, finals = further(iterations, targets, 4, noisy=True)
        more = few * sum(count * length for count, length in finals)
        assert more <= 0.45 * targets * iterations
        assert 0.85 * rows <= iterations * targets + 4 * clients * of_each + more <= rows


def test_rehearsals_take_a_quarter_of_the_attack_and_at_most_its_length() -> None:
    for targets in (5, 16, 32, 48):
        clients, iterations = effort(4000, targets, 4)
        assert 4 * clients * iterations <= max(0.25 * targets * 4000, 4 * clients * 400) + 6
    assert effort(4000, 100, 4) == (3, 4000)
