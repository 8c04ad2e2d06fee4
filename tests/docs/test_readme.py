"""README is a front page, and true: what it names exists, and its links lead somewhere.

Its code runs in tests/docs/test_wheel.py: the twenty lines and the demo, as a stranger would run them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from xml.etree import ElementTree

import pytest

from support.pages import PAGES, ROOT, Pages, broken_links

README = Pages(ROOT / "README.md")
PICTURES = ROOT / "docs" / "pictures"


def test_it_is_a_front_page() -> None:
    assert len(README.text.splitlines()) <= 200
    assert README.unknown("./dev demo", "Worker(handlers") == []
    assert len(README.block("python", "Worker(handlers").strip().splitlines()) <= 24
    first_screen = README.text.split("## Twenty lines")[0]
    assert "requirements.md" not in first_screen


def test_every_link_leads_somewhere() -> None:
    assert len(PAGES) > 40
    found = {str(page.relative_to(ROOT)): broken_links(page) for page in PAGES}
    assert {page: broken for page, broken in found.items() if broken} == {}


def test_every_page_of_the_docs_is_in_their_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text("utf-8")
    pages = [page.relative_to(ROOT / "docs") for page in (ROOT / "docs").rglob("*.md")]
    unlisted = [str(page) for page in pages if page.parts[0] != "adr" and f"({page})" not in index]
    assert unlisted == ["README.md"]


def test_the_extras_that_are_to_be_installed_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    text = README.text + (ROOT / "docs" / "guide" / "installing.md").read_text("utf-8")
    extras = re.findall(rf"{project['name']}\[(\w+)\]", text)
    assert set(extras) == project["optional-dependencies"].keys()
    assert not re.search(r"commandbus\[|pip install '?commandbus(?!-pg)", text)


def test_the_examples_that_are_named_exist() -> None:
    pages = Pages(*PAGES)
    named = set(re.findall(r"\./dev example (\w+)", pages.text)) - {"NAME"}
    assert {"hang", "order_saga", "ocr_pipeline"} <= named
    folder = ROOT / "examples"
    assert [name for name in named if not any((folder / path).exists() for path in (f"{name}.py", name))] == []


def test_the_picture_says_what_the_readme_says_of_it() -> None:
    tree = ElementTree.parse(PICTURES / "hang.svg")
    said = " ".join(" ".join(tree.getroot().itertext()).split())
    for words in (
        "while True:",
        "is asked to stop",
        "ExecutionStuck",
        "drains",
        "app.py:7 in import_file",
        "greet-8",
    ):
        assert words in said


@pytest.mark.slow
def test_the_picture_can_be_made_anew(folder: Path) -> None:
    target = folder / "hang.svg"
    done = subprocess.run(
        [sys.executable, str(PICTURES / "draw.py"), "--out", str(target)],
        env={**os.environ, "TMPDIR": str(folder)}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert typed_in(target) == typed_in(PICTURES / "hang.svg")


def typed_in(picture: Path) -> list[str]:
    """The command lines of the terminal that it shows."""
    texts = ("".join(element.itertext()) for element in ElementTree.parse(picture).getroot())
    return [text for text in texts if text.startswith("$ ")]


def test_every_file_that_the_docs_name_exists() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    named = {
        (page.name, path)
        for page in pages
        for path in re.findall(
            r"`((?:tests|runtime|flow|model|db|sql|settings|bench)/[\w/]+\.(?:py|sql))`", page.read_text()
        )
    }
    assert len(named) > 20
    missing = {
        (page, path)
        for page, path in named
        if not any((root / path).exists() for root in (ROOT, ROOT / "src" / "commandbus"))
    }
    assert missing == set()
    assert not [page.name for page in pages if re.search(r"\b[A-Z]+_TABLE\b|TODO", page.read_text())]
