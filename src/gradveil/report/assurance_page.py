"""The assurance statement as one A4 page, as JSON, and as PDF where Chromium is installed."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gradveil.assurance.statement import Assurance, assurance_of
from gradveil.audit.defence_costs import joined
from gradveil.audit.run_directory import has_own_settings, load_run
from gradveil.core.errors import fail
from gradveil.core.formatting import interval
from gradveil.core.private_files import write_private
from gradveil.federated.training_run import load_training
from gradveil.report.page import templates

NAMES = {"html": "assurance.html", "json": "assurance.json", "pdf": "assurance.pdf"}
"""The files of a statement in its run directory."""
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
_SECONDS = 60


def write_assurance(
    run_dir: Path | str,
    out: Path | str | None = None,
    defence: str | None = None,
    *,
    trainings: Sequence[Path] = (),
    audited: Sequence[Mapping[str, Any]] = (),
    pdf: bool | None = None,
) -> list[Path]:
    """Write the assurance statement of a run as HTML and JSON, by default into its directory; return the paths.

    It speaks of one `defence`, by default the recommended one. `trainings` say what it costs, `audited` are results of
    `gradveil audit-epsilon --json`. With `pdf` None a PDF is written too if Chromium is installed, with True it must
    be.
    """
    folder = Path(run_dir)
    run = load_run(folder)
    if not has_own_settings(run.info):
        remedy = "restore the file, or make the audit again in another folder"
        raise fail(str(folder / "run.json"), "has other settings than those that its trials were made with", remedy)
    costs = joined([run], [load_training(each) for each in trainings])[0] if trainings else None
    statement = assurance_of(run, defence, costs, audited)
    place = folder if out is None else Path(out)
    browser = next((found for name in _BROWSERS if (found := shutil.which(name))), None)
    if pdf and browser is None:
        raise fail("pdf", "needs Chromium, which is not installed", "install it, or print the HTML page to PDF")
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise fail(str(place), f"cannot be written: {error.strerror}", "choose another folder with --out") from error
    page, values = place / NAMES["html"], place / NAMES["json"]
    write_private(page, assurance_page(statement).encode(), "choose another folder with --out")
    text = json.dumps(statement.plain(), indent=1, ensure_ascii=False)
    write_private(values, text.encode(), "choose another folder with --out")
    written = [page, values]
    if browser is not None and pdf is not False:
        written.append(_print(browser, page, place / NAMES["pdf"]))
    return written


def assurance_page(statement: Assurance) -> str:
    """Render a statement as HTML that needs no network. Every text of the run is escaped."""
    environment = templates()
    return environment.get_template("assurance_page.html.j2").render(statement=statement, interval=interval)


def _print(browser: str, page: Path, out: Path) -> Path:
    """Print a page to PDF with a browser, in a profile of its own."""
    flags = ["--headless", "--disable-gpu", "--no-sandbox", "--disable-dev-shm-usage", "--no-pdf-header-footer"]
    with tempfile.TemporaryDirectory() as profile:
        printed = Path(profile) / "page.pdf"
        command = [browser, *flags, f"--user-data-dir={profile}", f"--print-to-pdf={printed}", page.resolve().as_uri()]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=_SECONDS)
            content = printed.read_bytes()
        except (OSError, subprocess.SubprocessError) as error:
            raise fail(
                str(out), f"Chromium did not print it ({error})", "print the HTML page to PDF yourself"
            ) from error
    write_private(out, content, "choose another folder with --out")
    return out
