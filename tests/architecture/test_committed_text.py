"""No committed file names a machine's folders or a package host, or leaves work for later."""

import re
import subprocess
from pathlib import Path

from tests.architecture.source import ROOT

# Built from pieces, so that this file itself holds none of them.
FOLDERS = "|".join(["wo" + "rk", "t" + "mp", "ro" + "ot", r"ho" + r"me/\w+", r"Us" + r"ers/\w+"])
MACHINE_PATH = re.compile(rf"(?<![\w.)\]}}>*])/(?:{FOLDERS})(?:/|\b(?!\.))|\bsha" + "red/data")
PACKAGE_HOST = re.compile(r"\b(?:py" + r"pi\.org|python" + r"hosted\.|npm" + r"js\.|deb\." + r"debian\.)")
UNFINISHED = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME)\b")
PATTERNS = {"a machine's path": MACHINE_PATH, "a package host": PACKAGE_HOST, "unfinished work": UNFINISHED}


def committed_files() -> list[Path]:
    """Files that git tracks; outside a checkout, every file of the usual folders."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode == 0 and listed.stdout:
        paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    else:
        folders = ("src", "tests", "docs", "examples", "benchmarks", ".ci")
        paths = [p for folder in folders for p in (ROOT / folder).rglob("*") if "__pycache__" not in p.parts]
        paths += ROOT.iterdir()
    return [path for path in paths if path.is_file()]


def offences(name: str, text: str) -> list[str]:
    """Where a text offends: file, line and the kind of offence."""
    return [
        f"{name}:{number}: {kind}: {line.strip()[:100]}"
        for number, line in enumerate(text.splitlines(), start=1)
        for kind, pattern in PATTERNS.items()
        if pattern.search(line)
    ]


def test_committed_text_is_clean() -> None:
    paths = committed_files()
    assert len(paths) > 20
    found: list[str] = []
    for path in paths:
        content = path.read_bytes()
        if b"\0" not in content:
            found += offences(str(path.relative_to(ROOT)), content.decode("utf-8"))
    assert found == []


def test_offences_are_found() -> None:
    bad = [
        "open('/" + "work/main/x')",
        "cd /" + "tmp",
        "see /" + "root/.cache",
        "/" + "home/ann/data",
        "--data-dir ../sha" + "red/data",
        "https://py" + "pi.org/simple",
        "# TO" + "DO later",
        "FIX" + "ME",
    ]
    assert [len(offences("x", text)) for text in bad] == [1] * len(bad)


def test_innocent_text_passes() -> None:
    good = ["the network/work/ratio", "models/home/page", "a/tmp_file", "/usr/bin/chromium", "TODOS", "e.g. work/tmp"]
    assert [offences("x", text) for text in good] == [[]] * len(good)
