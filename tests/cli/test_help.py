"""Help pages: what stands in square brackets is shown, not taken for a style."""

import re
from collections.abc import Iterator

import click
import pytest
from typer.main import get_command

from gradveil.cli.app import app, run

STYLES = {"bold", "/bold"}
"""What help texts mean as a style."""


def commands(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Walk through a command and all below it."""
    yield path, command
    if isinstance(command, click.Group):
        for name, inner in command.commands.items():
            yield from commands(inner, (*path, name))


COMMANDS = dict(commands(get_command(app)))


def bracketed(command: click.Command) -> set[str]:
    """Find what the command's texts have in square brackets, as they are in the source."""
    texts = [command.help, command.epilog]
    for parameter in command.params:
        texts += [getattr(parameter, "help", None), parameter.metavar]
    return {found for text in texts for found in re.findall(r"\[([^\[\]]+)\]", text or "")} - STYLES


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_help_shows_text_in_brackets(
    path: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert run([*path, "--help"]) == 0
    out = capsys.readouterr().out
    assert [name for name in sorted(bracketed(COMMANDS[path])) if f"[{name}]" not in out] == []
    assert "\\" not in out


def test_there_are_such_names() -> None:
    assert bracketed(COMMANDS[("audit",)]) >= {"ray", "train", "RUN"}
    assert ("train",) in COMMANDS
