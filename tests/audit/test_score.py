"""Scores against a hand calculation, and controls that cannot be beaten by luck."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from skimage.metrics import peak_signal_noise_ratio, structural_similarity
from torch import Tensor

from gradveil.audit import baselines
from gradveil.audit import score as scoring
from gradveil.audit.attack_check import examine
from gradveil.audit.attack_selection import trials
from gradveil.audit.baselines import expected_of, leaks
from gradveil.audit.experiment import Experiment
from gradveil.audit.preflight import open_experiment
from gradveil.audit.result_rows import BASELINES, Row, summarise
from gradveil.audit.run_directory import Trial
from gradveil.audit.score import TrialNames, controls_of, failure, score
from gradveil.audit.trial import Recovered, recover
from gradveil.audit.verdict import verdicts
from gradveil.client import BatchDefences
from gradveil.core.noise import Key
from gradveil.core.types import Batch
from gradveil.metrics import Missing, ssim
from tests.audit.runs import config

DIGITS = {"name": "digits", "size": 16}
NAMED = TrialNames("no defence", "an attack", ("A paper",))


def recovered(inputs: Tensor, targets: Tensor, **extra: Tensor) -> Recovered:
    target_clients = inputs.shape[0]
    ones = torch.ones(target_clients)
    names = ("objective", "initial", "at_truth", "distance", "cosine", "bytes_dense", "bytes_sent")
    names += ("first_order_utility", "second_order_utility")
    tensors = {"inputs": inputs, "targets": targets, **{name: ones.clone() for name in names}}
    tensors |= {"iterations": ones.long(), "restart": ones.long(), "objectives": ones[:, None]}
    facts = {
        "seconds": 2.0,
        "row_iterations": 10,
        "restarts": 1,
        "plan": [target_clients],
        "secrets": [],
        "remarks": [],
    }
    return Recovered(tensors | extra, facts, ("budget",) * target_clients)


def scored(change: Any = lambda inputs: inputs, **settings: Any) -> tuple[Experiment, Trial]:
    experiment = open_experiment(config(defences=["none"], **{"target_clients": 3, "client": {"batch": 2}, **settings}))
    truth = experiment.batch(experiment.examples(0, range(experiment.config.target_clients)))
    return experiment, score(
        experiment, trials(experiment.config)[0], recovered(change(truth.inputs), truth.targets), NAMED
    )


def test_the_truth_scores_perfectly_in_any_order() -> None:
    _, trial = scored(lambda inputs: inputs.flip(1))
    summary = summarise(trial)
    assert (summary["asr"], summary["target_clients"], summary["images"], summary["label_accuracy"]) == (1.0, 3, 6, 1.0)
    assert summary["ssim_mean"] == pytest.approx(1)
    assert [image["matched"] for image in trial.records[0]["per_image"]] == [1, 0]
    assert all(record["identified"] for record in trial.records)
    assert torch.equal(trial.kept["truth"], trial.kept["reconstruction"])


def test_scores_agree_with_scikit_image() -> None:
    noise = torch.randn(3, 2, 1, 16, 16, generator=torch.Generator().manual_seed(1)) * 0.5
    _, trial = scored(lambda inputs: inputs + noise)
    images = {name: value.double().numpy() for name, value in trial.kept.items()}
    for v, record in enumerate(trial.records):
        for b, image in enumerate(record["per_image"]):
            truth, found = images["truth"][v, b, 0], images["reconstruction"][v, b, 0]
            expected = structural_similarity(
                truth, found, data_range=1, gaussian_weights=True, sigma=1.5, use_sample_covariance=False
            )
            assert image["ssim"] == pytest.approx(expected, abs=1e-5)
            assert image["psnr"] == pytest.approx(peak_signal_noise_ratio(truth, found, data_range=1), abs=1e-4)
        assert record["ssim"] == pytest.approx(np.mean([image["ssim"] for image in record["per_image"]]))
        assert record["success"] == int(all(image["ssim"] > 0.5 for image in record["per_image"]))


def test_a_reconstruction_that_is_not_finite_fails_and_stays_in_the_results() -> None:
    def broken(inputs: Tensor) -> Tensor:
        inputs = inputs.clone()
        inputs[1] = torch.nan
        return inputs

    _, trial = scored(broken)
    assert [record["success"] for record in trial.records] == [1, 0, 1]
    assert summarise(trial)["asr"] == pytest.approx(4 / 6)
    assert bool(torch.isfinite(trial.kept["reconstruction"]).all())


def test_where_one_attack_began_with_no_number_the_others_tell_where_they_did() -> None:
    experiment = open_experiment(config(defences=["none"], target_clients=2))
    truth = experiment.batch(experiment.examples(0, range(2)))
    found = recovered(truth.inputs, truth.targets, initial=torch.tensor([torch.nan, 0.7]))
    health = score(experiment, trials(experiment.config)[0], found, NAMED).info["health"]
    assert health["objective_initial"] == pytest.approx(0.7)


def test_controls_are_exact_averages() -> None:
    experiment, trial = scored(target_clients=6, client={"batch": 1}, data=DIGITS)
    controls, public = trial.info["controls"], experiment.public
    assert public is not None
    places = experiment.examples(0, range(6)).flatten()
    truth, gallery = experiment.private.views.double()[places], experiment.private.views.double()
    labels = experiment.private.targets[places].tolist()
    mean = public.views.double().mean(0).expand_as(truth)
    assert controls["mean_image"]["ssim_mean"] == pytest.approx(float(ssim(mean, truth).mean()), abs=1e-2)
    few = [public.views.double()[public.targets == label] for label in labels]
    shares = [
        float((ssim(images, one.expand_as(images)) > 0.5).double().mean())
        for images, one in zip(few, truth, strict=True)
    ]
    assert controls["class_image"]["asr"] == pytest.approx(np.mean(shares), abs=0.1)
    # The truth as a reconstruction passes for others of its class as often as these are alike.
    alike = [gallery[(experiment.private.targets == label)] for label in labels]
    rates = [
        (float((ssim(images, one.expand_as(images)) > 0.5).sum()) - 1) / (len(images) - 1)
        for images, one in zip(alike, truth, strict=True)
    ]
    wrong = controls["wrong_target_client"]
    assert wrong["asr"] == pytest.approx(np.mean(rates), abs=0.1)
    assert wrong["identified"] == wrong["identifiable"] == 0


def test_all_copies_of_an_image_count_as_that_image_in_the_mismatch_control() -> None:
    """Client 0 answers with an image that clients 1 and 2 hold; client 3 answers with its own, which 4 holds too."""
    experiment = open_experiment(config(defences=["none"], target_clients=5, client={"batch": 1}, data=DIGITS))
    places, inputs = experiment.examples(0, range(5)).flatten(), experiment.private.inputs.clone()
    inputs[places[2]], inputs[places[4]] = inputs[places[1]], inputs[places[3]]
    few = dataclasses.replace(experiment.private.subset(places), inputs=inputs[places], targets=torch.zeros(5).long())
    copied = dataclasses.replace(experiment, private=few, public=None)
    truth = few.views[:, None]
    answers = truth[[1, 1, 1, 3, 3]]
    wrong = controls_of(None, copied, answers, torch.arange(5)[:, None])["wrong_target_client"]
    # An average over pairs: two of 4 for client 0; none of 3 for each of the others, whose copies are left out.
    assert wrong["identified"] == pytest.approx(2 / 16)
    assert wrong["identifiable"] == pytest.approx(2 / 16)


def test_the_baseline_is_the_best_of_the_guesses_that_see_no_update() -> None:
    """Digits are so alike that the mean of their class is a better guess than one of them, and than the mean of all."""
    experiment, trial = scored(target_clients=12, client={"batch": 1}, data=DIGITS)
    public, controls = experiment.public, trial.info["controls"]
    assert public is not None
    places = experiment.examples(0, range(12))
    targets, truth = experiment.private.targets[places], experiment.views(experiment.batch(places).inputs)
    means = torch.stack([public.views[public.targets == int(t)].double().mean(0)[None] for t in targets.flatten()])
    assert controls["class_mean"]["asr"] == pytest.approx(float((ssim(means, truth) > 0.5).double().mean()))
    rates = [controls[name]["asr"] for name in BASELINES]
    assert max(rates) == controls["class_mean"]["asr"] > max(rates[0], rates[2])
    assert (Row(0, trial).baseline, Row(0, trial).guess) == (max(rates), "class mean")
    best = max(controls[name]["ssim_mean"] for name in BASELINES)
    assert Row(0, trial).baseline_of("ssim_mean") == best


def test_a_class_without_a_public_image_is_guessed_as_the_mean_of_all() -> None:
    experiment, _ = scored(target_clients=1, client={"batch": 1})
    assert experiment.public is not None
    truth = experiment.batch(experiment.examples(0, range(1)))
    others = experiment.public.subset(
        (experiment.public.targets != int(truth.targets[0, 0])).nonzero().flatten().tolist()
    )
    fewer = dataclasses.replace(experiment, public=others)
    found = score(fewer, trials(experiment.config)[0], recovered(truth.inputs, truth.targets), NAMED).info["controls"]
    assert found["class_mean"] == found["mean_image"]


def test_controls_without_a_public_set_or_a_second_target_client() -> None:
    experiment, trial = scored(target_clients=1, client={"batch": 1})
    assert "wrong_target_client" in trial.info["controls"]
    lonely = dataclasses.replace(experiment, public=None, private=experiment.private.subset([0]))
    truth = lonely.batch(lonely.examples(0, range(1)))
    alone = score(lonely, trials(experiment.config)[0], recovered(truth.inputs, truth.targets), NAMED)
    assert alone.info["controls"] == {}
    assert alone.records[0]["identified"] is None


def test_a_batch_of_64_is_attacked_and_matched_one_to_one() -> None:
    digits = {
        "data": {"name": "digits"},
        "model": {"name": "scheliga-cnn"},
        "client": {"batch": 64},
        "target_clients": 1,
    }
    experiment = open_experiment(config(defences=["none"], attacks=["ig(iterations=15, labels=restore)"], **digits))
    trial = trials(experiment.config)[0]
    found = recover(experiment, trial, range(1), lambda step: None)
    assert found.tensors["inputs"].shape[:2] == (1, 64)
    assert bool((found.tensors["objective"] < 0.7 * found.tensors["initial"]).all())
    record = score(experiment, trial, found, NAMED).records[0]
    assert sorted(image["matched"] for image in record["per_image"]) == list(range(64))
    assert record["label_accuracy"] == 1


def test_labels_follow_their_images() -> None:
    experiment = open_experiment(config(defences=["none"], target_clients=1, client={"batch": 4}))
    truth = experiment.batch(experiment.examples(0, range(1)))
    order = torch.tensor([2, 0, 3, 1])
    found = recovered(truth.inputs[:, order], truth.targets[:, order])
    record = score(experiment, trials(experiment.config)[0], found, NAMED).records[0]
    assert record["predicted"] == record["label"] == truth.targets[0].tolist()


def test_scores_only_where_no_images_are_wanted() -> None:
    _, trial = scored(images=False)
    assert trial.images() is None
    assert len(trial.records) == 3


def test_transformed_truth_is_kept() -> None:
    experiment = open_experiment(config(defences=["none"], target_clients=2))
    truth = experiment.batch(experiment.examples(0, range(2)))
    found = recovered(truth.inputs, truth.targets, transformed=truth.inputs.flip(-1))
    kept = score(experiment, trials(experiment.config)[0], found, NAMED).kept
    torch.testing.assert_close(kept["truth_transformed"], kept["truth"].flip(-1))


def test_private_images_nearest_to_each_reconstruction_are_kept_the_nearest_first() -> None:
    experiment = open_experiment(config(defences=["none"], target_clients=2))
    truth = experiment.batch(experiment.examples(0, range(2)))
    kept = score(experiment, trials(experiment.config)[0], recovered(truth.inputs, truth.targets), NAMED).kept
    nearest, gallery = kept["nearest"], experiment.private.views
    assert nearest.shape[:2] == (2, 3)
    torch.testing.assert_close(nearest[:, 0], kept["truth"][:, 0])
    distances = (nearest - kept["truth"][:, :1]).flatten(2).norm(dim=2)
    every = (gallery[None] - kept["truth"]).flatten(2).norm(dim=2).sort().values[:, :3]
    torch.testing.assert_close(distances, every.float(), atol=1e-4, rtol=0)


def test_both_views_are_scored() -> None:
    """Success is what is recovered of the images, not of what a batch defence made of them."""
    experiment = open_experiment(config(defences=["none"], target_clients=1, client={"batch": 2}))
    truth = experiment.batch(experiment.examples(0, range(1)))
    turned = truth.inputs.flip(-1)
    found = recovered(turned.flip(1), truth.targets, transformed=turned)
    record = score(experiment, trials(experiment.config)[0], found, NAMED).records[0]
    assert record["ssim_transformed"] == pytest.approx(1)
    assert record["ssim"] < 0.9
    assert record["success"] == 0
    assert all(image["psnr_transformed"] > 60 > image["psnr"] for image in record["per_image"])
    plain = score(experiment, trials(experiment.config)[0], recovered(truth.inputs, truth.targets), NAMED)
    assert "ssim_transformed" not in plain.records[0]
    assert Row(0, plain).trained_on is None


def ats_experiment(**settings: Any) -> tuple[Experiment, Batch, Tensor]:
    """Open digits behind ATS; return the private examples and what the clients trained on."""
    experiment = open_experiment(
        config(**{"defences": ['ats(policy="0-3")'], "attacks": ["ig"], "target_clients": 2} | settings)
    )
    truth = experiment.batch(experiment.examples(0, range(experiment.config.target_clients)))
    client = experiment.client(0, experiment.config.defences[0], 0)
    batches = BatchDefences(client.batch, client.domain)
    one = [Batch(inputs, targets) for inputs, targets in zip(*truth, strict=True)]
    made = [batches.apply(batch, batches.spec(batch).sample(Key(5, (v,)))) for v, batch in enumerate(one)]
    return experiment, truth, torch.stack([each.inputs for each in made])


def test_images_trained_on_count_as_recovered_and_identified_in_their_own_view() -> None:
    experiment, truth, made = ats_experiment(client={"batch": 2})
    found = recovered(made.flip(1), truth.targets, transformed=made)
    trial = score(experiment, trials(experiment.config)[0], found, NAMED)
    assert Row(0, trial).recovered == 0
    assert Row(0, trial).trained_on == (4, 4, 4, 4)
    assert [image["identified_transformed"] for image in trial.records[0]["per_image"]] == [True, True]


def test_an_image_of_another_client_is_not_identified_among_those_trained_on() -> None:
    experiment, truth, made = ats_experiment(client={"batch": 2})
    trial = score(
        experiment, trials(experiment.config)[0], recovered(made.roll(1, 0), truth.targets, transformed=made), NAMED
    )
    counts = Row(0, trial).trained_on
    assert counts is not None
    assert counts.identified == counts.identifiable == 0


def test_images_trained_on_may_leave_the_range_of_pixels() -> None:
    experiment, truth, made = ats_experiment(defences=["tests.defences.custom_stages:Mixing"], client={"batch": 2})
    assert made.max() > experiment.private.space.bounds(made)[1].max()
    found = recovered(truth.inputs, truth.targets, transformed=made)
    assert Row(0, score(experiment, trials(experiment.config)[0], found, NAMED)).trained_on is not None


def test_the_gallery_of_images_trained_on_holds_other_private_images_after_the_same_transforms() -> None:
    """What is nearest to an image that no target client holds, transformed, is that image."""
    experiment, truth, made = ats_experiment(defences=['ats(policy="0")'])  # inversion, which draws nothing
    stranger = next(
        i for i in range(len(experiment.private)) if i not in experiment.examples(0, range(2)).flatten().tolist()
    )
    other = experiment.batch(torch.tensor([[stranger]])).inputs
    lower, upper = experiment.private.space.bounds(experiment.private.inputs)
    aimed = (lower + upper - other).expand_as(made)
    trial = score(experiment, trials(experiment.config)[0], recovered(aimed, truth.targets, transformed=made), NAMED)
    assert Row(0, trial).trained_on.identified == 0
    trial = score(experiment, trials(experiment.config)[0], recovered(made, truth.targets, transformed=made), NAMED)
    assert Row(0, trial).trained_on.identified == 2


def test_a_failure_is_a_status() -> None:
    experiment = open_experiment(config(defences=["none"]))
    trial = failure(experiment, trials(experiment.config)[0], NAMED, "out of memory")
    assert trial.failed == "out of memory"
    assert summarise(trial)["statuses"] == {"failed": 1}
    assert summarise(trial)["asr"] is None


def test_lpips_is_a_score_or_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def found(candidate: Tensor, truth: Tensor, net: str) -> Tensor:
        asked.append(net)
        return (candidate - truth).abs().mean((-1, -2, -3)) + 0.25

    _, without = scored()
    assert without.info["missing"] == {"lpips": 'not asked for: set lpips = "alex" (or "vgg") in the run file'}
    assert "lpips" not in without.records[0]
    monkeypatch.setattr(scoring, "lpips", found)
    _, trial = scored(lpips="vgg")
    assert (asked, trial.info["missing"]) == (["vgg"], {})
    assert [image["lpips"] for record in trial.records for image in record["per_image"]] == [0.25] * 6
    assert trial.records[0]["lpips"] == 0.25
    monkeypatch.setattr(scoring, "lpips", lambda *_: Missing("no weights here"))
    _, trial = scored(lpips="alex")
    assert trial.info["missing"] == {"lpips": "no weights here"}
    assert "lpips" not in trial.records[0]


def test_an_attack_that_answers_with_the_mean_of_the_class_recovers_most_digits_and_shows_nothing() -> None:
    """At 32x32 pixels the class mean alone recovers three quarters of the digits, which looked like a leak."""
    settings = {"target_clients": 32, "client": {"batch": 1}, "data": {"name": "digits"}}
    experiment = open_experiment(config(defences=["none"], **settings))
    public, targets = experiment.public, experiment.private.targets[experiment.examples(0, range(32))]
    assert public is not None
    means = torch.stack([public.inputs[public.targets == int(t)].mean(0)[None] for t in targets.flatten()])
    truth, trial = experiment.batch(experiment.examples(0, range(32))), trials(experiment.config)[0]
    guessed, honest = (
        Row(0, score(experiment, trial, recovered(answer, truth.targets), NAMED)) for answer in (means, truth.inputs)
    )
    assert guessed.asr > 0.5
    seven = guessed.info["best_guesses"]["7"]
    assert (seven["guess"], seven["images"], seven["of"]) == ("the mean of the class", 118, 118)
    assert expected_of(guessed, "recovered") >= guessed.recovered - 3
    assert not leaks(guessed)
    assert examine(guessed, [guessed]).label == "suspect"
    assert leaks(honest)
    assert examine(honest, [honest]).label == "effective"
    (doubted,), (broken,) = (verdicts([each]) for each in (guessed, honest))
    assert (doubted.level, broken.level) == ("inconclusive", "broken")
    assert doubted.baseline < 0.1 < doubted.recovered / doubted.images


def test_chances_without_auxiliary_data_and_without_a_gallery() -> None:
    experiment, _ = scored()
    truth = experiment.batch(experiment.examples(0, range(3)))
    found = recovered(truth.inputs, truth.targets)
    blind = score(dataclasses.replace(experiment, public=None), trials(experiment.config)[0], found, NAMED)
    expected = blind.records[0]["per_image"][0]["expected"]
    assert set(expected) == {"identified", "gallery", "aimed", "exact", "public_exact"}
    (verdict,) = verdicts([Row(0, blind)])
    assert [test.criterion for test in verdict.tests] == ["recovered almost exactly", "identified"]
    assert any("baseline of recovery is unknown" in reason for reason in verdict.reasons)


def test_guesses_that_look_like_what_was_trained_on_are_no_leak() -> None:
    """Public images of the right class, after the same transforms, pass as often as the expected chance says."""
    experiment, truth, made = ats_experiment(defences=["ats"], target_clients=8, data=DIGITS, client={"batch": 1})
    client = experiment.client(0, "ats", 0)
    batches = BatchDefences(client.batch, client.domain)
    guesses = torch.stack(
        [experiment.public.inputs[experiment.public.targets == label][:1] for label in truth.targets.flatten()]
    )
    drawn = [batches.spec(Batch(one, one)).sample(Key(7, (v,))) for v, one in enumerate(guesses)]
    guesses = torch.stack([batches.apply(Batch(one, one), n).inputs for one, n in zip(guesses, drawn, strict=True)])
    outcome = {}
    for name, images in (("guess", guesses), ("right", made)):
        found = recovered(images, truth.targets, transformed=made)
        row = Row(0, score(experiment, trials(experiment.config)[0], found, NAMED))
        outcome[name] = {
            test.criterion: test.leaks for test in baselines.tests_of([row]) if "trained" in test.criterion
        }
    assert outcome["guess"] == {"recovered as trained on": False, "identified as trained on": False}
    assert outcome["right"] == {"recovered as trained on": True, "identified as trained on": True}


@pytest.mark.parametrize("together", [1, 2])
@pytest.mark.parametrize("images", [0, 1, 5])
@pytest.mark.parametrize("defence", ["ats", "mixup"])
def test_images_are_transformed_alike_however_many_batches_go_together(
    monkeypatch: pytest.MonkeyPatch, defence: str, images: int, together: int
) -> None:
    experiment, _, _ = ats_experiment(defences=[defence])
    client = experiment.client(0, defence, 0)
    transformed = partial(scoring._made, BatchDefences(client.batch, client.domain), experiment.private.inputs[:images])
    whole = transformed(2, 0)
    monkeypatch.setattr(scoring, "_TOGETHER", together)
    assert torch.equal(transformed(2, 0), whole)
    assert len(whole) == images


@pytest.mark.parametrize(("defence", "mixes"), [("ats", False), ("mixup", True)])
def test_mixed_images_have_no_class_that_a_guess_could_be_of(defence: str, mixes: bool) -> None:
    experiment, truth, made = ats_experiment(defences=[defence], client={"batch": 2})
    found = recovered(made, truth.targets, transformed=made)
    expected = score(experiment, trials(experiment.config)[0], found, NAMED).records[0]["per_image"][0][
        "expected_transformed"
    ]
    assert set(expected) == {"identified", "recovered", "public"} | (set() if mixes else {"gallery"})
    if mixes:
        assert expected["identified"] == pytest.approx(2 / len(experiment.private), rel=0.01)


@pytest.mark.parametrize("public", [True, False])
def test_one_answer_for_all_is_no_leak_where_half_of_the_images_are_copies(public: bool) -> None:
    """A black image is identified as often as the private images have blank slices among them."""
    experiment = open_experiment(config(defences=["none"], target_clients=40, data=DIGITS, client={"batch": 1}))
    private, blank = experiment.private, torch.arange(len(experiment.private)) % 10 < 5
    inputs, targets = private.inputs.clone(), private.targets % 2
    inputs[blank] = private.space.bounds(private.inputs)[0]
    targets[blank] = torch.arange(len(private))[blank] // 2 % 2
    experiment = dataclasses.replace(experiment, private=dataclasses.replace(private, inputs=inputs, targets=targets))
    experiment = experiment if public else dataclasses.replace(experiment, public=None)
    truth = experiment.batch(experiment.examples(0, range(40)))
    black = torch.full_like(truth.inputs, float(private.space.bounds(private.inputs)[0]))
    guessed, honest = (
        Row(0, score(experiment, trials(experiment.config)[0], recovered(answer, truth.targets), NAMED))
        for answer in (black, truth.inputs)
    )
    assert guessed.identified >= 8
    tests = {test.criterion: test for test in baselines.tests_of([guessed])}
    assert not tests["identified"].leaks
    assert tests["identified"].expected >= guessed.identified - 8
    assert leaks(honest)


def test_ten_perfect_digits_are_a_leak_though_class_means_recover_as_many() -> None:
    """One digit of each class, and no other private image: each is named by its class, and passed for by its mean."""
    experiment = open_experiment(
        config(defences=["none"], target_clients=10, data={"name": "digits"}, client={"batch": 1})
    )
    private = experiment.private
    first = torch.tensor([int((private.targets == label).nonzero()[0]) for label in range(10)])
    experiment = dataclasses.replace(experiment, private=private.subset(first))
    truth = experiment.batch(experiment.examples(0, range(10)))
    means = torch.stack(
        [experiment.public.inputs[experiment.public.targets == t].mean(0)[None] for t in truth.targets.flatten()]
    )
    right, guessed = (
        Row(0, score(experiment, trials(experiment.config)[0], recovered(answer, truth.targets), NAMED))
        for answer in (truth.inputs, means)
    )
    found = {test.criterion: test for test in baselines.tests_of([right])}
    assert not found["recovered"].leaks
    assert not found["identified"].leaks
    assert found["recovered almost exactly"].observed == 10
    assert found["recovered almost exactly"].expected < 1
    assert [verdicts([row])[0].level for row in (right, guessed)] == ["broken", "inconclusive"]
    assert not leaks(guessed)
