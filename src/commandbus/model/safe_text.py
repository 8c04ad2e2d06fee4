"""Makes text from outside harmless for a log or a terminal.

An error text, an id or the name of a worker may hold characters that do something instead of being seen: line
breaks that fake a line of the log, escape sequences, characters that turn the reading direction around, characters
that nobody sees. `escaped` shows each of them as an escape (`\\n`, `\\x1b`, `\\u202e`, `\\U000e0041`), and leaves
all else as it is. Everything that is printed or logged goes through here, at the place where it is written.

`unescaped` is for the way back: the id that somebody copied from a terminal.
"""

from __future__ import annotations

import re

# Unicode's categories Cc, Cf, Cs, Zl and Zp, and the whole block of tag characters.
UNSAFE = (
    r"\x00-\x1f\x7f-\x9f\xad\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u180e\u200b-\u200f\u2028-\u202e"
    r"\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb\U000110bd\U000110cd\U00013430-\U0001343f"
    r"\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e007f"
)
INDENT = "    "

_UNSAFE = re.compile(f"[{UNSAFE}]")
_UNSAFE_IN_JSON = re.compile(f"(?!\n)[{UNSAFE}]")
_ESCAPE = re.compile(r"\\(?:[nrt]|x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8})")
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
_LONG = {text: char for char, text in _SHORT.items()}


def escaped(text: str) -> str:
    """The text as one line in which every character is seen and does nothing."""
    return _UNSAFE.sub(_escape, text)


def unescaped(text: str) -> str:
    """What `escaped` has made this of. A backslash that begins none of its escapes is left as it is."""
    return _ESCAPE.sub(_unescape, text)


def escaped_lines(text: str, *, indent: str = "") -> list[str]:
    """The lines of a text whose line breaks are meant (a traceback, a stack), each of them escaped."""
    return [indent + escaped(line.expandtabs(4)) for line in text.split("\n")]


def block(text: str) -> str:
    """Such a text for a log: no line of it begins where a record of the log does."""
    return "\n".join(escaped_lines(text.rstrip("\n"), indent=INDENT))


def escaped_json(document: str) -> str:
    """The same JSON value without an unsafe character: JSON's own escapes stand for them.

    Line breaks stay: within a string JSON has escaped them already.
    """
    return _UNSAFE_IN_JSON.sub(_escape_in_json, document)


def _escape(match: re.Match[str]) -> str:
    char, code = match[0], ord(match[0])
    if code < 0x100:
        return _SHORT.get(char) or f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _unescape(match: re.Match[str]) -> str:
    text = match[0]
    code = ord(_LONG[text]) if text in _LONG else int(text[2:], 16)
    char = chr(code) if code < 0x110000 else ""
    return char if char and _UNSAFE.match(char) else text


def _escape_in_json(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x10000:
        return f"\\u{code:04x}"
    return f"\\u{0xD7C0 + (code >> 10):04x}\\u{0xDC00 + (code & 0x3FF):04x}"
