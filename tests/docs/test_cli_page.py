"""docs/cli.md is complete: every command and every exit code is in it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click

from commandbus.cli.entry import root
from commandbus.cli.exit_codes import ExitCode

PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text("utf-8")


def command_paths(group: click.Group, before: str = "") -> Iterator[str]:
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        if isinstance(command, click.Group):
            yield from command_paths(command, f"{before}{name} ")
        else:
            yield before + name


def test_every_command_is_on_the_page() -> None:
    paths = list(command_paths(root))
    assert len(paths) > 20
    assert [path for path in paths if f"`{path}" not in PAGE] == []


def test_every_exit_code_is_on_the_page() -> None:
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE)}
    assert listed == {int(code) for code in ExitCode}
