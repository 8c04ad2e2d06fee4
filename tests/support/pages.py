"""Pages of the documentation, taken apart: blocks of code, headings, links."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "examples").rglob("*.md"),
    *(ROOT / "deploy").rglob("*.md"),
    *(ROOT / ".github").rglob("*.md"),
]


class Pages:
    """Some pages as one text, in which each block of code is found by what it contains."""

    def __init__(self, *paths: Path) -> None:
        self.text = "\n".join(path.read_text("utf-8") for path in paths)
        self.blocks = re.findall(r"```(\w+)\n(.*?)```", self.text, re.DOTALL)

    def block(self, language: str, containing: str) -> str:
        """The one block of this language with these words."""
        found = [code for kind, code in self.blocks if kind == language and containing in code]
        assert len(found) == 1, f"there are {len(found)} {language} blocks with {containing!r}"
        return found[0]

    def unknown(self, *marks: str) -> list[str]:
        """Blocks with none of these words."""
        return [code for _, code in self.blocks if not any(mark in code for mark in marks)]


def anchors(page: Path) -> set[str]:
    """What can stand after `#` in a link to this page."""
    heads = re.findall(r"^#+ (.*)", re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL), re.M)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


def broken_links(page: Path) -> list[str]:
    """Links to files of this repository, or to headings in them, that do not exist."""
    text = re.sub(r"```.*?```|`[^`]*`", "", page.read_text("utf-8"), flags=re.DOTALL)
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        found = (page.parent / path).resolve() if path else page
        if not found.exists() or (anchor and anchor not in anchors(found)):
            broken.append(target)
    return broken
