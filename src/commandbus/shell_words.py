"""Command lines that people copy into a shell.

The names in them come from outside. Each name becomes one word of bash that runs nothing, in visible ASCII. This
module imports nothing of ours, because errors offer such lines, too.
"""

from __future__ import annotations

import re
from typing import Final

_PLAIN: Final = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")


def quoted(word: object) -> str:
    """One word for bash."""
    text = str(word)
    if _PLAIN.fullmatch(text):
        return text
    if text.isascii() and text.isprintable():
        return "'" + text.replace("'", "'\\''") + "'"
    return "$'" + "".join(_escaped(character) for character in text) + "'"


def arguments(*words: object) -> str:
    """The arguments at the end of a line. Behind `--`, none of them is an option; options stand before them."""
    ending = "-- " if any(str(word).startswith("-") for word in words) else ""
    return ending + " ".join(quoted(word) for word in words)


def _escaped(character: str) -> str:
    if character in "\\'":
        return f"\\{character}"
    if character.isascii() and character.isprintable():
        return character
    code = ord(character)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
