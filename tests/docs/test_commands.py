"""Every command and code block of README.md and docs/ runs, shortened, or is listed with a reason."""

from __future__ import annotations

import re
import shlex
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from gradveil.audit import read, read_training, run_file
from gradveil.cli.app import run
from gradveil.data import load
from gradveil.nn import build
from tests.docs.test_pages import DOCS, ROOT, WRITE

PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md")]
PAGES += sorted(DOCS.rglob("*.md")) + sorted((ROOT / "examples").rglob("*.md"))
NOT_RUN = tomllib.loads((Path(__file__).parent / "not_run.toml").read_text("utf-8"))
STUDY = """
name = "study"
target_clients = 2
attacks = ["ig(iterations=2)"]
defences = ["none", "prune(0.9)"]
[data]
name = "digits"
[model]
name = "scheliga-cnn"
"""
MODEL = """
from gradveil.nn import build


def net(channels, size, classes, generator):
    return build("scheliga-cnn", channels=channels, size=size, classes=classes, generator=generator)
"""
UNDECIDED = {"--fail-above": {0, 1, 3}, "search": {0, 1}, "--received": {0, 1}, "check": {0, 1}}
"""Exit codes that a shortened command may have; 0 for all others."""
PRELUDES = {
    "how-to/audit-recorded-updates.md": """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Flatten(), nn.Linear(1024, 8), nn.Sigmoid(), nn.Linear(8, 10))
loss = nn.functional.cross_entropy(model(torch.rand(1, 1, 32, 32)), torch.tensor([3]))
names, params = zip(*model.named_parameters())
update = dict(zip(names, torch.autograd.grad(loss, params)))
params = {name: value.detach() for name, value in zip(names, params)}
""",
    "how-to/check-a-server.md": "from flwr.clientapp import ClientApp; app = ClientApp()",
    "reference/errors.md": "import torch; torch.save({'w': torch.ones(2)}, 'model.pt')",
}
"""What the code of a page takes for granted."""


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def fenced(page: Path, *languages: str) -> list[tuple[str, str]]:
    """Return the blocks of these languages, each with the text before it."""
    text = page.read_text("utf-8")
    found = re.finditer(rf"^```({'|'.join(languages)})\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [(text[: block.start()].rstrip().rpartition("\n\n")[2], block[2]) for block in found]


def commands(page: Path) -> list[str]:
    """Return the commands of a page, without comments.

    >>> commands(ROOT / "docs/how-to/run-on-gpu.md")[0]
    'gradveil audit digits --device cuda --out runs/gpu'
    """
    lines = "\n".join(block for _, block in fenced(page, "console")).replace("\\\n", " ").splitlines()
    typed = [re.sub(r"\s+# .*$", "", line.removeprefix("$ ")) for line in lines if line.startswith("$ ")]
    typed += [
        line for _, block in fenced(page, "console") for line in block.splitlines() if re.match(r"(make|python) ", line)
    ]
    return [
        " ".join(part.split()) if "'" not in part else part.strip() for line in typed for part in line.split(" && ")
    ]


def reason(page: Path, command: str) -> str | None:
    """Say why a command is not run; None if it is."""
    listed = [why for start, why in NOT_RUN["commands"].items() if command.startswith(start)]
    return NOT_RUN["pages"].get(named(page)) or next(iter(listed), None)


def shortened(words: list[str]) -> list[str]:
    """Let a command take seconds: few iterations, clients, rounds and candidates."""
    words = ["cdia" if word == "adaptive" else word for word in words]  # of the attacks that it expands to, one
    few = {"--iterations": "2", "--rounds": "1", "--target-clients": "2", "--budget": "30", "--candidates": "8"}
    for place, word in enumerate(words[:-1]):
        words[place + 1] = few.get(word, words[place + 1])
    words = [re.sub(r"(iterations|rounds|clients|epochs)=\d+", r"\1=2", word) for word in words]
    if "audit" in words[:1]:
        words += [] if "--budget" in words or "--fail-above" in words else ["--budget", "30"]
        words += ["--set", "train.images=40", "--set", "train.rounds=1"] if "--train" in words else []
    words += ["--images", "8"] if words[:2] == ["search", "ats"] else []
    return [*words, *(["--workers", "1"] if words[0] in ("audit", "train") else [])]


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that pages take for granted, in which bundled runs are short."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    whole: Callable[..., dict[str, str]] = run_file.bundled

    def short(*kinds: type) -> dict[str, str]:
        runs = {
            name: re.sub(r"(iterations|epochs|rounds) ?= ?\d+", r"\1=1", text) for name, text in whole(*kinds).items()
        }
        return {
            name: re.sub(r"^target_clients = \d+", "target_clients = 2", text, flags=re.M)
            for name, text in runs.items()
        }

    monkeypatch.setattr(run_file, "bundled", short)
    (tmp_path / "study.toml").write_text(STUDY)
    digits = load("digits").private
    for place, split in enumerate(("train", "test")):
        for label in range(2):
            folder = tmp_path / "scans" / split / str(label)
            folder.mkdir(parents=True)
            for index in range(10):
                pixels = digits.inputs[20 * place + 2 * index + label, 0]
                Image.fromarray(pixels.sub(pixels.min()).mul(50).clamp(0, 255).byte().numpy()).save(
                    folder / f"{index}.png"
                )
    net = build("scheliga-cnn", channels=1, size=32, classes=10, generator=torch.Generator().manual_seed(0))
    for name in ("trained", "round-6", "round-7"):
        save_file({key: value.detach() for key, value in net.named_parameters()}, tmp_path / f"{name}.safetensors")
    (tmp_path / "mypackage").mkdir()
    (tmp_path / "mypackage/models.py").write_text(MODEL)
    return tmp_path


def write_files(page: Path, folder: Path) -> None:
    """Write the blocks that a page names as files, and what is to be in `mine.py`."""
    for before, block in fenced(page, "python", "toml"):
        for name in re.findall(r"`(\w+\.(?:py|toml))`", before):
            (folder / name).write_text(re.sub(r"iterations=\d+", "iterations=2", block))
    if "mine:" in page.read_text("utf-8"):
        own = [block for _, block in fenced(page, "python") if "gv." not in block]
        (folder / "mine.py").write_text("\n".join(own))
    for name in ("mine", "my_models", "mypackage", "mypackage.models"):
        sys.modules.pop(name, None)


def needed_runs(page: Path) -> list[str]:
    """Name the commands that make the runs which a page takes for granted."""
    text = "\n".join(commands(page))
    needed = {
        "seen": "train digits --rounds 1 --defence none --set local= --set batch=4 --record seen --out r",
        "runs/study ": "audit study.toml --out runs/study",
    }
    return [command for name, command in needed.items() if name in f"{text} " and f"--record {name}" not in text]


@pytest.mark.processes
@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(reason(page, c) is None for c in commands(page))], ids=named
)
def test_commands_of_a_page_run(page: Path, workplace: Path) -> None:
    write_files(page, workplace)
    for command in needed_runs(page):
        assert run(shortened(shlex.split(command))) == 0, command
    for command in commands(page):
        if reason(page, command) is None:
            words = shlex.split(command)
            assert words[0] == "gradveil", f"{command}: run it, or say in not_run.toml why not"
            may = next((codes for word, codes in UNDECIDED.items() if word in words), {0})
            assert run(shortened(words[1:])) in may, command


def runs_here(page: Path) -> bool:
    elsewhere = {f"docs/{name}" for name in WRITE}  # `test_pages` runs them
    return bool(fenced(page, "python")) and named(page) not in {*NOT_RUN["code"], *NOT_RUN["pages"], *elsewhere}


@pytest.mark.parametrize("page", [page for page in PAGES if runs_here(page)], ids=named)
def test_code_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    space: dict = {"__name__": "docs"}
    exec(PRELUDES.get(named(page).removeprefix("docs/"), ""), space)
    for _, block in fenced(page, "python"):
        code = re.sub(r"iterations=\d+", "iterations=2", block)
        exec(compile(code, str(page), "exec"), space)
    assert len(space) > 2


SETTINGS = [(page, block) for page in PAGES for _, block in fenced(page, "toml") if named(page) not in NOT_RUN["pages"]]


@pytest.mark.parametrize(("page", "block"), SETTINGS, ids=[named(page) for page, _ in SETTINGS])
def test_settings_of_a_page_are_settings(page: Path, block: str, tmp_path: Path) -> None:
    settings, base = tomllib.loads(block), {} if "[data]" in block else tomllib.loads(STUDY)
    if "project" in settings:
        assert all(group.startswith("gradveil.") for group in settings["project"]["entry-points"])
        return
    file = tmp_path / "run.toml"
    file.write_text(block if "[data]" in block else STUDY + block)
    made = read(str(file), train="train" in settings) if "attacks" in settings | base else read_training(str(file))
    assert set(settings) <= set(made.resolved())


def test_no_page_is_left_out() -> None:
    known = {"python", "toml", "console", "text", "sh", "yaml", "pycon"}
    languages = {
        (named(page), block) for page in PAGES for block in re.findall(r"^```(\w*)$", page.read_text("utf-8"), re.M)
    }
    assert {language for _, language in languages} <= known | {""}
    shell = {page for page, language in languages if language in ("sh", "yaml")}
    assert shell <= set(NOT_RUN["pages"]) | set(NOT_RUN["code"])


def test_what_is_listed_as_not_run_is_there() -> None:
    typed = [command for page in PAGES for command in commands(page)]
    assert [start for start in NOT_RUN["commands"] if not any(c.startswith(start) for c in typed)] == []
    pages = {named(page) for page in PAGES}
    assert set(NOT_RUN["pages"]) | set(NOT_RUN["code"]) <= pages
