"""Examples as callers have them: every form gives the same tensors, and bytes become pixels with a warning."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import gradveil
from gradveil.core.errors import GradveilError
from gradveil.data import Dataset
from gradveil.data.given_examples import tensors_of
from gradveil.nn.models import build

X = torch.rand(6, 1, 12, 12, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, 2, 0, 1, 2])


class Rows:
    """Rows as dictionaries, and slices as dictionaries of lists, as a data set of Hugging Face has them."""

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> dict:
        return {"pixel_values": X[index].numpy(), "label": int(Y[index])}


FORMS = {
    "tensors": (X, Y),
    "arrays": (X.numpy(), Y.numpy()),
    "list-of-labels": [X, Y.tolist()],
    "dictionary": {"pixel_values": X, "labels": Y},
    "short-names": {"x": X.numpy().astype(np.float64), "y": Y.numpy().astype(np.int32)},
    "lists": {"image": list(X), "label": Y.tolist()},
    "rows-of-tuples": list(zip(X, Y, strict=True)),
    "rows-of-dictionaries": Rows(),
    "torch-data-set": TensorDataset(X, Y),
    "loader": DataLoader(TensorDataset(X, Y), batch_size=4),
    "loader-of-dictionaries": DataLoader(Rows(), batch_size=4),  # type: ignore[arg-type]
    "data-set": Dataset("own", X, Y, ("a", "b", "c")),
}


@pytest.mark.parametrize("given", FORMS.values(), ids=FORMS)
def test_every_form_gives_the_same_tensors(given: object) -> None:
    inputs, targets = tensors_of(given, "batch")
    assert torch.equal(inputs, X)
    assert torch.equal(targets, Y)
    assert targets.dtype == torch.int64


@pytest.mark.parametrize("form", ["torch-data-set", "loader", "rows-of-dictionaries", "data-set"])
def test_only_as_many_rows_are_read_as_wanted(form: str) -> None:
    assert len(tensors_of(FORMS[form], "batch", 3)[1]) == 3


@pytest.mark.parametrize(
    ("shape", "layout"),
    [((2, 8, 8, 3), "channels"), ((2, 3, 8, 8), "channels first"), ((2, 8, 8), "height x width")],
)
def test_bytes_become_pixels_with_a_warning(shape: tuple[int, ...], layout: str) -> None:
    pixels = np.full(shape, 51, dtype=np.uint8)
    with pytest.warns(UserWarning, match=rf"batch: bytes of shape .*{layout}.*divided by 255, then normalised by"):
        inputs, _ = tensors_of((pixels, [0, 1]), "batch", mean=(0.1,), std=(0.5,))
    assert inputs.shape[-2:] == (8, 8)
    torch.testing.assert_close(inputs, torch.full_like(inputs, 0.2))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"picture": X, "labels": Y}, "batch: has no inputs: its keys are 'picture', 'labels'"),
        ({"x": X}, "batch: has no targets"),
        ([(X[0], 0), (X[0, :, 1:], 1), (X[0], 2)], "holds inputs of different sizes, 1 x 11 x 12 and 1 x 12 x 12"),
        (DataLoader(TensorDataset(X)), "yields list of 1 parts"),
    ],
    ids=["inputs", "targets", "sizes", "loader"],
)
def test_what_is_wrong_with_examples_is_named(given: object, message: str) -> None:
    with pytest.raises(GradveilError, match=message):
        tensors_of(given, "batch")


def test_an_audit_takes_a_loader_and_a_training_a_dictionary() -> None:
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(144, 3))
    settings = {"attacks": ["ig(iterations=1)"], "target_clients": 2, "progress": False}
    result = gradveil.audit(model, FORMS["loader"], bounds="unit", **settings)
    assert result.config["target_clients"] == 2
    trained = gradveil.train(model, {"x": X, "y": Y}, FORMS["rows-of-dictionaries"], rounds=1, clients=2)
    assert trained.accuracy["none"] is not None


@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_a_missing_library_is_named_with_the_command_that_installs_it(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (library, f"{library}.models"):
        monkeypatch.setitem(__import__("sys").modules, module, None)
    with pytest.raises(GradveilError, match=f"needs {library}, which is not installed -> pip install {library}"):
        build(f"{library}:resnet18", channels=3, size=32, classes=2, generator=torch.Generator())
