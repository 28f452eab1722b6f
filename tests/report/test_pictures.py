"""Pictures: PNGs against an independent decoder, outcomes in words, the same images under every defence."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from imageio.v3 import imread

from gradveil.audit.result_rows import Row
from gradveil.audit.run_directory import Trial, load_run
from gradveil.audit.verdict import verdicts
from gradveil.report import audit_page
from gradveil.report.exhibits import exhibits, halls, most_telling
from gradveil.report.identical_trials import identical, named, short_names
from gradveil.report.pictures import SIDE, outcome, picture_uri, pictures_of, png, room_of_each
from tests.report.images import faces
from tests.report.parsed_page import read
from tests.report.runs import ATTACKS, CASES, played, trial, write_run
from tests.report.trials import BARE, row


@pytest.mark.parametrize("channels", [1, 3])
def test_png_decodes_to_the_same_pixels(channels: int, generator: torch.Generator) -> None:
    image = torch.rand(channels, 7, 5, generator=generator)
    decoded = imread(io.BytesIO(png(image)), extension=".png")
    expected = (image.permute(1, 2, 0).numpy() * 255).round().astype(np.uint8)
    np.testing.assert_array_equal(decoded, expected[..., 0] if channels == 1 else expected)
    assert decoded.std() > 0


def test_png_of_values_out_of_range() -> None:
    image = torch.tensor([[[float("nan"), -3.0, 2.0, 1.0]]])
    assert imread(io.BytesIO(png(image)), extension=".png").tolist() == [[0, 0, 255, 255]]


@pytest.mark.parametrize(("shape", "shown"), [((1, 20, 10), (20, 10)), ((3, 4 * SIDE, 2 * SIDE), (SIDE, SIDE // 2, 3))])
def test_large_images_are_averaged_down_and_small_ones_kept(shape: tuple[int, ...], shown: tuple[int, ...]) -> None:
    content = base64.b64decode(picture_uri(torch.full(shape, 0.5)).partition(",")[2])
    decoded = imread(io.BytesIO(content), extension=".png")
    assert decoded.shape == shown
    assert set(decoded.ravel()) == {128}


@pytest.mark.parametrize(
    ("scores", "status", "expected"),
    [
        ({"success": 1, "identified": True}, "budget", "identifiable"),
        ({"success": 1, "identified": None}, "budget", "identifiable"),
        ({"success": 1, "identified": False}, "budget", "recovered"),
        ({"success": 0, "identified": True}, "diverged", "identified"),
        ({"success": 0, "identified": False}, "budget", "neither"),
        ({"success": 0}, "diverged", "diverged"),
    ],
)
def test_outcome_is_of_recovery_and_identification(scores: dict[str, Any], status: str, expected: str) -> None:
    assert outcome(scores, status) == expected


def rows(*cases: int, batch: int = 1, seeds: tuple[int, ...] = (0,)) -> list[Row]:
    made = [
        trial(
            CASES[case],
            ATTACKS[1],
            "naive",
            seed,
            faces(4 * batch * (seed + 1))[-4 * batch :].view(4, batch, 1, 32, 32),
        )
        for seed in seeds
        for case in cases
    ]
    return [Row(n, Trial(m["info"], m["records"], None, m["images"])) for n, m in enumerate(made)]


def shots(played_rows: list[Row]) -> dict[int, Any]:
    return {each.number: found for each in played_rows if (found := pictures_of(each, 99)) is not None}


def test_pictures_of_a_batch_are_in_order_with_their_own_score() -> None:
    (one,) = rows(2, batch=2)
    found = pictures_of(one, 99)
    assert found is not None
    images = [image for record in one.trial.records for image in record["per_image"]]
    assert found.ssims == tuple(image["ssim"] for image in images)
    assert [picture.outcome for picture in found.reconstructions] == [outcome(image) for image in images]
    assert found.ssims[found.worst] == max(found.ssims)
    assert sorted(found.ssims, reverse=True)[len(images) // 2] == found.ssims[found.median]
    assert found.truths[2].uri == picture_uri(one.trial.images()["truth"][1, 0])  # type: ignore[index]


def test_trials_without_images_have_no_pictures() -> None:
    bare = rows(0)[0]
    assert pictures_of(Row(0, Trial(bare.trial.info, bare.trial.records)), 99) is None
    assert room_of_each([Row(0, Trial(bare.trial.info, bare.trial.records))]) == 0


def test_many_trials_share_the_room_of_the_page() -> None:
    one = rows(0)[0]
    few, many = room_of_each([one]), room_of_each([one] * 300)
    assert few > 1000 > many >= 6
    assert len(pictures_of(one, 2).truths) == 2  # type: ignore[union-attr]


def test_identical_reconstructions_are_one_entry_of_both_attacks() -> None:
    first, second, other = rows(1, 1, 2)
    other = Row(
        2, Trial(first.info | {"attack": "cdia", "preset": "cdia"}, first.trial.records, None, second.trial.kept)
    )
    different = Row(
        3, Trial(first.info | {"attack": "dlg", "preset": "dlg"}, first.trial.records, None, rows(3)[0].trial.kept)
    )
    played_rows = [first, other, different]
    groups = identical(played_rows, shots(played_rows))
    assert [len(group) for group in groups] == [2, 1]
    names = short_names(played_rows)
    assert named(groups[0], names) == "ig, cdia (identical)"
    assert named(groups[1], names) == "dlg, non-adaptive"


def test_without_images_equal_scores_of_every_image_are_identical() -> None:
    first, second = rows(1, 1)
    assert len(identical([first, second], {})) == 1
    plain = [row(3, number=0), row(3, number=1)]
    assert len(identical(plain, {})) == 2, "no score tells them apart"


def test_attacks_of_one_preset_keep_their_whole_names() -> None:
    two = [row(1, attack="ig"), row(1, attack="ig(lr=1)"), row(1, attack="cdia(iterations=9)")]
    assert list(short_names(two).values()) == ["ig", "ig(lr=1)", "cdia"]


def test_pictures_are_of_the_same_private_images_where_the_strongest_seeds_differ() -> None:
    played_rows = rows(0, 1, 2, seeds=(0, 1))
    # The verdict on one defence quotes the other seed, which attacked other images.
    for record in played_rows[4].trial.records:
        record["per_image"][0] |= {"success": 1, "identified": True}
    for record in played_rows[1].trial.records:
        record["per_image"][0]["success"] = 0
    judged = verdicts(played_rows)
    shown = exhibits(judged, shots(played_rows), short_names(played_rows))
    (hall,) = halls(shown)
    assert len(hall.exhibits) == 3
    assert {each.pictures.truth_digest for each in hall.exhibits if each.pictures} == {
        hall.exhibits[0].pictures.truth_digest  # type: ignore[union-attr]
    }
    assert [each.other_seed is not None for each in shown].count(True) == 1


def test_first_screen_has_no_defence_the_worst_and_the_best() -> None:
    tried = [BARE, row(20, defence="prune"), row(16, defence="gaussian"), row(4, defence="clip"), row(0, defence="dp")]
    shown = exhibits(verdicts(tried), {}, short_names(tried))
    assert [each.verdict.defence for each in most_telling(shown)] == ["none", "prune", "dp"]
    assert [each.verdict.defence for each in most_telling(shown, "clip")] == ["none", "prune", "clip"]
    assert len(most_telling(shown[:2])) == 2


def test_of_equal_rates_the_cheapest_defence_is_the_best() -> None:
    def best(*offers: tuple[str, float, float]) -> str:
        tried = [row(0, defence=name, bytes_sent=sent, distance=moved) for name, sent, moved in offers]
        shown = exhibits(verdicts([*tried, BARE, row(20, defence="prune")]), {}, short_names([*tried, BARE]))
        return most_telling(shown)[-1].verdict.defence

    assert best(("dp", 20.0, 0.1), ("dgp", 10.0, 0.9), ("clip(1)", 20.0, 0.05)) == "dgp"
    assert best(("dp", 10.0, 0.1), ("dgp", 10.0, 0.9), ("clip(1)", 10.0, 0.05)) == "clip(1)"


def test_every_picture_of_the_page_has_a_text_and_private_images_come_once_a_band(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path / "run", played(target_clients=10, cases=CASES[:3])))
    html = audit_page(run)
    images = html.count("<img")
    assert images == html.count('alt="Private image') + html.count('alt="Reconstruction')
    text = read(html).text
    assert "Private images 1–8" in text
    assert "Private images 9–10" in text
    assert text.count("Worst") == 1 + 3
