"""A traceback for people: the frames of libraries are folded, those of the application are open.

The reader may be on another machine than the worker, so a frame is told by its path alone.
"""

from __future__ import annotations

import re
from itertools import groupby
from typing import Final, NamedTuple

_FRAME: Final = re.compile(r'^[ |+-]*File "(.+?)", line \d+')
_LIBRARY: Final = re.compile(r"/(?:site|dist)-packages/|/lib/python\d|/commandbus/|^<")


class Part(NamedTuple):
    """Some lines. `is_folded`: they are frames of libraries; `frames` says how many."""

    text: str
    is_folded: bool
    frames: int


def folded(text: str, own_file: str | None = None) -> list[Part]:
    """The lines of a traceback or a stack in parts, in their order. `own_file`: what the worker called the
    application's file in which it failed; it is open, wherever it is."""
    marked: list[tuple[bool, bool, str]] = []
    is_library = False
    for line in text.rstrip("\n").split("\n"):  # not at the other characters that end a line for `splitlines`
        found = _FRAME.match(line)
        if found is not None:
            is_own = own_file is not None and found[1].endswith(f"/{own_file}")
            is_library = _LIBRARY.search(found[1]) is not None and not is_own
        elif not line.startswith((" ", "|", "+")):
            is_library = False  # a headline, or the exception itself
        marked.append((is_library, found is not None, line))
    return [
        Part("\n".join(line for _, _, line in lines), is_folded, sum(is_frame for _, is_frame, _ in lines))
        for is_folded, lines in ((key, list(group)) for key, group in groupby(marked, key=lambda item: item[0]))
    ]
