"""PNGs against an independent decoder, contact sheets against a naive loop, pairs in order."""

import io

import numpy as np
import pytest
import torch
from imageio.v3 import imread

from gradveil.audit.result_rows import Row
from gradveil.audit.run_directory import Trial
from gradveil.report.pictures import Album, contact_sheet, pairs, png
from tests.report.images import faces
from tests.report.runs import ATTACKS, CASES, trial


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


def test_contact_sheet_places_every_tile(generator: torch.Generator) -> None:
    tiles = torch.rand(11, 3, 4, 6, generator=generator)
    sheet = contact_sheet(tiles, columns=4)
    assert sheet.shape == (3, 12, 24)
    for number, tile in enumerate(tiles):
        y, x = 4 * (number // 4), 6 * (number % 4)
        assert torch.equal(sheet[:, y : y + 4, x : x + 6], tile)
    assert sheet[:, 8:, 18:].sum() == 0


def test_equal_sheets_are_kept_once() -> None:
    album = Album()
    truth = faces(3)
    assert [album.add(truth, "a"), album.add(1 - truth, "b"), album.add(truth.clone(), "a")] == [0, 1, 0]
    assert [sheet.caption for sheet in album.sheets] == ["a", "b"]


def rows(batch: int = 1) -> list[Row]:
    truth = faces(4 * batch).reshape(4, batch, 1, 32, 32)
    made = [trial(case, ATTACKS[1], "naive", 0, truth) for case in CASES[:3]]
    return [Row(n, Trial(m["info"], m["records"], None, m["images"])) for n, m in enumerate(made)]


def test_pairs_show_the_worst_leak_first_with_its_own_tile_and_score() -> None:
    played = rows(batch=2)
    found = pairs(played, Album())
    similarities = [pair["ssim"] for pair in found]
    assert similarities == sorted(similarities, reverse=True)
    assert len(found) == 24
    for pair in found:
        target_client, place = divmod(pair["tile"], 2)
        record = played[pair["row"]].trial.records[target_client]
        assert pair["ssim"] == record["per_image"][place]["ssim"]
        assert pair["recovered"] == (pair["ssim"] > 0.5)
        assert pair["target_client"] == f"{target_client}.{place}"


def test_truths_are_shared_and_transformed_truths_are_shown() -> None:
    played = rows()
    album = Album()
    found = pairs(played, album)
    assert len({pair["truth"] for pair in found}) == 1
    assert len(album.sheets) == 4
    assert {pair["trained"] for pair in found} == {None}
    kept = dict(played[0].trial.kept)
    changed = Row(
        0, Trial(played[0].trial.info, played[0].trial.records, None, kept | {"truth_transformed": 1 - kept["truth"]})
    )
    assert None not in {pair["trained"] for pair in pairs([changed], Album())}


def test_trials_without_images_give_no_pairs() -> None:
    bare = rows()[0]
    assert pairs([Row(0, Trial(bare.trial.info, bare.trial.records))], Album()) == []
