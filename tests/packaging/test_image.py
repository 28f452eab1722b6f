"""The Dockerfile copies what its context holds, and installs by the constraints."""

import re
import tomllib

from tests.packaging.conftest import ROOT

STEPS = (ROOT / "Dockerfile").read_text("utf-8").replace("\\\n", " ").splitlines()
CONTEXT = {line[1:] for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines() if line.startswith("!")}


def test_every_copied_file_is_in_the_context() -> None:
    copied = [name for step in STEPS if step.startswith("COPY") for name in step.split()[1:-1]]
    assert set(copied) == CONTEXT
    assert all((ROOT / name).exists() for name in copied)


def test_torch_is_installed_first_and_everything_by_the_constraints() -> None:
    installs = [step for step in STEPS if "pip install" in step]
    assert all("-c /src/constraints.txt" in step for step in installs)
    assert installs[0].endswith("${TORCH_ARGS} torch")
    (extras,) = re.findall(r"/src\[([\w,]+)\]", installs[1])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert set(extras.split(",")) <= set(project["optional-dependencies"])


def test_the_image_runs_as_an_ordinary_user() -> None:
    (user,) = (step.split()[1] for step in STEPS if step.startswith("USER"))
    assert not user.startswith(("0", "root"))
    assert STEPS.index(f"USER {user}") > max(place for place, step in enumerate(STEPS) if step.startswith("RUN"))
