"""The bundled data sets: what they hold, in which order, and that nothing is shared between splits."""

import pytest
import torch

from gradveil.core.errors import GradveilError
from gradveil.data import DATASETS, load

BUNDLED = [name for name, entry in DATASETS.items() if entry.bundled and entry.kind == "images"]
COUNTS = {"digits": (1197, 600), "faces": (100, 100), "patches": (405, 139)}


@pytest.mark.parametrize("name", BUNDLED)
def test_counts_sizes_and_labels(name: str) -> None:
    public, private = load(name)
    assert (len(public), len(private)) == COUNTS[name]
    assert private.inputs.shape[1:] == ((3 if name == "patches" else 1), 32, 32)
    for split in (public, private):
        assert len(split.targets.unique()) == len(split.classes)
        assert split.task == (name != "patches")
        assert split.source == DATASETS[name].source
    assert str(sum(COUNTS[name])) in DATASETS[name].description or name == "faces"


@pytest.mark.parametrize("name", BUNDLED)
def test_splits_are_disjoint_and_first_private_images_not_flat(name: str) -> None:
    public, private = load(name, size=None, normalise="none")
    distance = torch.cdist(
        private.inputs.flatten(1), public.inputs.flatten(1), compute_mode="donot_use_mm_for_euclid_dist"
    )
    assert distance.min() > 0.05
    assert private.inputs[:32].flatten(1).std(1).min() > 0.1
    held = private.targets[: DATASETS[name].targets][:32].unique()
    assert len(held) == (1 if name == "faces" else len(private.classes))


def test_faces_come_first_and_are_labelled_as_scikit_image_orders_them() -> None:
    from skimage.data import lfw_subset

    public, private = load("faces", size=None, normalise="none")
    originals = torch.from_numpy(lfw_subset()).float()
    for split in (public, private):
        for image, label in zip(split.inputs[:, 0], split.targets, strict=True):
            place = (originals - image).abs().amax((1, 2)).argmin()
            assert split.classes[label] == ("face" if place < 100 else "background")
    assert public.targets[:8].tolist() == [0, 0, 0, 1, 0, 0, 0, 1]
    assert private.targets.tolist() == [0] * 50 + [1] * 50
    assert DATASETS["faces"].targets == 50


def test_patches_take_turns_over_photographs() -> None:
    from skimage.data import astronaut

    private = load("patches", size=None, normalise="none").private
    tiles = torch.from_numpy(astronaut().copy()).permute(2, 0, 1)[:, :480, :480].float() / 255
    tiles = tiles.unfold(1, 80, 80).unfold(2, 80, 80).permute(1, 2, 0, 3, 4).reshape(-1, 3, 80, 80)
    cut_from_it = [bool((tiles == crop).flatten(1).all(1).any()) for crop in private.inputs[:8]]
    assert cut_from_it == [True, False, False, False, True, False, False, False]


@pytest.mark.parametrize("name", BUNDLED)
def test_statistics_come_from_the_whole_public_split(name: str) -> None:
    public, private = load(name)
    torch.testing.assert_close(public.inputs.mean((0, 2, 3)), torch.zeros(public.channels), atol=1e-3, rtol=0)
    torch.testing.assert_close(public.inputs.std((0, 2, 3)), torch.ones(public.channels), atol=1e-3, rtol=0)
    few = load(name, limit_public=3, limit_private=2)
    assert torch.equal(few.public.inputs, public.inputs[:3])
    assert torch.equal(few.private.inputs, private.inputs[:2])


@pytest.mark.parametrize("size", [8, 28, 64])
@pytest.mark.parametrize("channels", [1, 3])
def test_load_resizes_and_recolours(size: int, channels: int) -> None:
    private = load("faces", size=size, channels=channels, limit_private=2, limit_public=1).private
    assert private.inputs.shape == (2, channels, size, size)
    assert (private.inputs >= private.space.bounds(private.inputs)[0] - 1e-5).all()
    assert (private.inputs <= private.space.bounds(private.inputs)[1] + 1e-5).all()


def test_load_uses_given_statistics() -> None:
    private = load("digits", normalise=((0.5,), (0.25,)), limit_private=4).private
    assert [bound.flatten().tolist() for bound in private.space.bounds(private.inputs)] == [[-2.0], [2.0]]
    raw = load("digits", normalise="none", limit_private=4).private
    torch.testing.assert_close(private.views, raw.inputs)


@pytest.mark.parametrize(("settings", "message"), [
    ({"name": "face"}, "did you mean 'faces'"),
    ({"name": "imagenet"}, "known: digits, faces, patches, mnist, cifar10, cifar100, census"),
    ({"name": "hf:"}, "no data set is called 'hf:'"),
    ({"size": 0}, "at least 1 pixel"),
    ({"channels": 2}, "choose 1 (grey), 3 (colour)"),
    ({"normalise": "imagenet"}, "choose dataset, none"),
    ({"normalise": ((0.5,), (0.0,))}, "every std above 0"),
    ({"normalise": 0.5}, "give a pair"),
    ({"limit_private": 0}, "keep at least 1 image"),
    ({"limit_public": -1}, "keep at least 1 image"),
])  # fmt: skip
def test_wrong_setting_raises(settings: dict, message: str) -> None:
    with pytest.raises(GradveilError) as caught:
        load(**{"name": "faces", **settings})
    assert message in str(caught.value)


def test_all_wrong_settings_are_reported() -> None:
    with pytest.raises(GradveilError) as caught:
        load("nothing", size=-1, channels=4, normalise="x", limit_public=0, limit_private=0)
    named = [problem.where for problem in caught.value.problems]
    assert named == ["data", "size", "channels", "normalise", "limit_public", "limit_private"]
