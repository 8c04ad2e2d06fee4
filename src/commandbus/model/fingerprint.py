"""Which failures are alike: those of one command type with the same error type, error code, and innermost frame of
the application's own code.

Frames are read from the text of a traceback or a stack. So the failure of a child process and the autopsy of a
stuck attempt are read in the same way. A frame has no line number here: an edit above it does not make another
failure of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from hashlib import blake2b
from typing import Final

from commandbus.errors import InvalidCommandError
from commandbus.model.json_values import Json
from commandbus.model.names import shown
from commandbus.model.outcome import Failure
from commandbus.model.payload import clean_text, loads_or_none

LONGEST_FRAME: Final = 300
_FORM: Final = re.compile("[0-9a-f]{12}")
_FRAME: Final = re.compile(r'^[ |+-]*File "(.+?)", line \d+, in (.+)$', re.MULTILINE)
_SECTION: Final = re.compile(
    r"^\s*(?:During handling of the above exception|The above exception was the direct cause)[^\n]*$", re.MULTILINE
)
NameOf = Callable[[str], str | None]
"""Returns how a file of the application's own code is called; None if the file is not its own."""


def fingerprint_of(domain: str, command_type: str, failure: Failure) -> str:
    """Returns twelve hexadecimal digits."""
    parts = (domain, command_type, failure.error_type, failure.error_code, failure.own_frame or "")
    return blake2b("\0".join(parts).encode("utf-8", "replace"), digest_size=6).hexdigest()


def check_fingerprint(value: object) -> str | None:
    """A fingerprint that a caller gives; None is none."""
    if value is None or (isinstance(value, str) and _FORM.fullmatch(value)):
        return value
    raise InvalidCommandError(
        f"fingerprint must be the twelve hexadecimal digits that `commandbus failures` shows, not {shown(value)}"
    )


def own_frame_of(failure: Failure, name_of: NameOf) -> str | None:
    """Returns the innermost frame of the application's own code, as "shop/shipping.py: ship"; None if there is
    none."""
    if failure.traceback is not None:
        return own_frame(failure.traceback, name_of)
    if failure.autopsy is not None:
        return own_frame("\n".join(_stack_lines(loads_or_none(failure.autopsy))), name_of)
    return None


def own_frame(text: str, name_of: NameOf) -> str | None:
    """The innermost own frame of a traceback. Of chained exceptions, the one that was raised last counts first."""
    for section in reversed(_SECTION.split(text)):
        for file, function in reversed(_FRAME.findall(section)):
            if (name := name_of(file)) is not None:
                return clean_text(f"{name}: {function}", longest=LONGEST_FRAME)
    return None


def _stack_lines(autopsy: Json) -> Iterable[str]:
    stacks = autopsy.get("stacks") if isinstance(autopsy, dict) else None
    for stack in stacks if isinstance(stacks, list) else ():
        frames = stack.get("frames") if isinstance(stack, dict) else None
        yield from (str(frame) for frame in (frames if isinstance(frames, list) else ()))
