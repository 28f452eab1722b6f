"""What an extra installs is imported on demand; where it is missing, the error says which command installs it."""

import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from gradveil.core.errors import GradveilError
from gradveil.core.extras import Extra, needs
from gradveil.core.secure_noise import CipherStream
from gradveil.data import bundled, hub
from gradveil.metrics import ssim_torchmetrics
from gradveil.theory import Participation, epsilon

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))["project"]
NEEDED: list[tuple[Extra, str, Callable[[], Any]]] = [
    ("demo", "sklearn.datasets", bundled.digits),
    ("demo", "skimage.data", bundled.faces),
    ("demo", "skimage", bundled.patches),
    ("dp", "dp_accounting", lambda: epsilon(1.25, Participation(steps=3, delta=1e-5))),
    ("flower", "cryptography.hazmat.primitives.ciphers", lambda: CipherStream(bytes(32))),
    ("hub", "PIL", lambda: hub.decode(b"", "a.png")),
    (
        "metrics",
        "torchmetrics.functional.image",
        lambda: ssim_torchmetrics(torch.zeros(1, 16, 16), torch.zeros(1, 16, 16)),
    ),
]


@pytest.mark.parametrize(("extra", "module", "call"), NEEDED, ids=[module for _, module, _ in NEEDED])
def test_a_missing_package_names_its_extra(
    extra: Extra, module: str, call: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    command = re.escape(f'pip install "gradveil[{extra}]"')
    with pytest.raises(GradveilError, match=f"needs the package '{module.partition('.')[0]}' -> {command}"):
        call()


def test_a_package_that_cannot_be_imported_is_not_called_missing() -> None:
    with pytest.raises(GradveilError, match=r"data: cannot import what it needs .libGL"), needs("demo", "data"):
        raise ImportError("libGL.so.1 is missing")


def test_every_extra_of_an_error_can_be_installed() -> None:
    assert set(get_args(Extra)) <= set(PROJECT["optional-dependencies"])


def test_the_core_installs_nothing_that_an_extra_has() -> None:
    names = {re.split(r"[^\w-]", text)[0] for text in PROJECT["dependencies"]}
    extras = PROJECT["optional-dependencies"]
    assert not names & {re.split(r"[^\w-]", text)[0] for extra in get_args(Extra) for text in extras[extra]}
