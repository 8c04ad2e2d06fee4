"""Command lines that pages offer: a name from outside is a word in them, and runs nothing."""

from __future__ import annotations

import html
import re
import subprocess
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from commandbus import CommandBus
from commandbus.cli.entry import main
from web.conftest import Serve

TEMPLATES = files("commandbus.web").joinpath("templates")
NAMES = [str(item.name) for item in TEMPLATES.iterdir() if item.name.endswith(".html")]
LINE = re.compile(r"commandbus [a-z][^<]*")
VALUE = re.compile(r"\{\{(.*?)\}\}")
SHOWN = re.compile(r"<code>(commandbus [^<]*)</code>")


@pytest.mark.parametrize("name", NAMES)
def test_every_value_in_a_command_line_is_quoted(name: str) -> None:
    text = TEMPLATES.joinpath(name).read_text()
    values = [value.strip() for line in LINE.findall(text) for value in VALUE.findall(line)]
    unquoted = [value for value in values if not value.endswith(("|shell", "|shell_value"))]
    assert unquoted == [], "a name in a command line goes through the filter `shell` (an option: `shell_value`)"


def test_the_templates_have_such_lines() -> None:
    texts = [TEMPLATES.joinpath(name).read_text() for name in NAMES]
    assert sum(len(VALUE.findall(line)) for text in texts for line in LINE.findall(text)) >= 8


def words_of(line: str, folder: Path) -> list[str]:
    """What bash makes of it."""
    ran = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {line}"],
        capture_output=True, check=True, env={"LC_ALL": "C.UTF-8", "PATH": "/usr/bin:/bin"}, cwd=folder,
    )  # fmt: skip
    return ran.stdout.decode().split("\0")[:-1]


@pytest.mark.parametrize("id_", ["x; touch pwn #", "$(touch pwn)", "--all", "it's <b>"])
def test_the_line_on_the_page_of_a_command_shows_that_command(
    serve: Serve, bus: CommandBus, tmp_path: Path, id_: str
) -> None:
    bus.send("orders", "ship", {"ok": 1}, command_id=id_)
    page = serve().get("/command", domain="orders", id=id_).text
    lines = [html.unescape(line) for line in SHOWN.findall(page)]
    assert lines
    for line in lines:
        words = words_of(line, tmp_path)
        assert words[:2] in (["commandbus", "show"], ["commandbus", "rehearse"]), line
        assert words[-2:] == ["orders", id_]
        assert ("--" in words) == id_.startswith("-")
    assert list(tmp_path.iterdir()) == []


def test_a_line_for_an_id_that_begins_with_a_hyphen_is_understood(
    serve: Serve, bus: CommandBus, database: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    bus.send("orders", "ship", {"ok": 1}, command_id="--all")
    page = serve().get("/command", domain="orders", id="--all").text
    (line,) = [html.unescape(line) for line in SHOWN.findall(page) if "commandbus show" in line]
    monkeypatch.setenv("COMMANDBUS_DATABASE_URL", database)
    with pytest.raises(SystemExit) as ended:
        main(words_of(line, tmp_path)[1:])
    assert not ended.value.code
    assert "--all" in capsys.readouterr().out


def test_the_other_pages_quote_the_names_that_they_show(serve: Serve, bus: CommandBus, tmp_path: Path) -> None:
    evil = "x; touch pwn #"
    bus.key_limits.set("orders", evil, concurrency=1)
    bus.send("orders", "ship", command_id=evil)
    visit = serve()
    for path, more in (("/key", {"name": evil}), ("/stack", {"id": evil})):
        page = visit.get(path, domain="orders", **more)
        assert page.status == 200, page.text
        (line,) = [html.unescape(line) for line in SHOWN.findall(page.text)]
        assert evil in words_of(line, tmp_path)
    assert list(tmp_path.iterdir()) == []
