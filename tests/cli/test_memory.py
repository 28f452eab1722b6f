"""The programs keep what they freed: the command line and its workers, before they do anything else."""

from __future__ import annotations

import sys
from importlib import import_module

import pytest

from gradveil.audit import audit_run


class KeptError(Exception):
    """Raised in the place of the call."""


def kept() -> bool:
    raise KeptError


def test_the_command_line_keeps_freed_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    app = import_module("gradveil.cli.app")
    monkeypatch.setattr(app, "keep_freed_memory", lambda: calls.append("kept"))
    monkeypatch.setattr(app, "run", lambda *_: calls.append("run") or 0)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit):
        app.main()
    assert calls == ["kept", "run"]


def test_a_worker_keeps_freed_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_run, "keep_freed_memory", kept)
    with pytest.raises(KeptError):
        audit_run.open_work({})
