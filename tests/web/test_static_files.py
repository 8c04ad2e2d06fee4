"""The console's own script and stylesheet, which no build step checks."""

from __future__ import annotations

import re
from pathlib import Path

import commandbus.web

STATIC = Path(commandbus.web.__file__).parent / "static"


def test_every_rule_of_the_stylesheet_ends() -> None:
    """A rule that does not end swallows all that follow; a browser says nothing."""
    text = re.sub(r"/\*.*?\*/", "", (STATIC / "console.css").read_text("utf-8"), flags=re.DOTALL)
    depth, inside_media = 0, False
    for number, line in enumerate(text.splitlines(), 1):
        inside_media = line.startswith("@") if depth == 0 else inside_media
        depth += line.count("{") - line.count("}")
        assert 0 <= depth <= (2 if inside_media else 1), f"line {number} without comments: {line}"
    assert depth == 0


def test_nothing_asks_another_host_or_needs_an_exception_of_the_security_policy() -> None:
    for path in [*STATIC.iterdir(), *(STATIC.parent / "templates").iterdir()]:
        text = path.read_text("utf-8")
        hosts = set(re.findall(r"(?:https?:)?//([a-z0-9.-]+\.[a-z]{2,})", text)) - {"www.w3.org"}
        assert not hosts, path.name
        if path.suffix == ".html":
            assert not re.search(r"\son[a-z]+=|\sstyle=|<style|<script(?! src=)|javascript:", text), path.name
