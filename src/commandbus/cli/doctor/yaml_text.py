"""Reads the part of YAML that manifests use, without a dependency. Reads JSON, too.

Block mappings and sequences, scalars and flow collections (`[a, b]`) on one line, `|` and `>` texts, comments,
several documents. Anything else (anchors, tags, scalars of several lines) is an UnreadableError that names the
line: a manifest that was misread would be worse than one that was not read.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Final

_QUOTED: Final = r""""(?:[^"\\]|\\.)*"|'(?:[^']|'')*'"""
_KEY: Final = re.compile(rf"""({_QUOTED}|[A-Za-z0-9_./$-](?:[^:#"']|:(?!\s|$)|(?<!\s)#)*?)\s*:(?:\s+|$)""")
_COMMENT: Final = re.compile(rf"""(?:{_QUOTED}|(?<=\S)#|[^#])*""")
_FLOW_WORD: Final = re.compile(rf"""\s*(?:({_QUOTED})|([^,:\[\]{{}}"'\s](?:[^,:\[\]{{}}]|:(?=\S))*))\s*""")
_INTEGER: Final = re.compile(r"[-+]?(?:0|[1-9][0-9]*)")
_FLOAT: Final = re.compile(r"[-+]?[0-9]+\.[0-9]*")
_WORDS: Final = {"": None, "~": None, "null": None, "true": True, "false": False}
_NOT_PLAIN: Final = tuple("&*!|>%@`?,[]{}\"'#:")


class UnreadableError(ValueError):
    """The text is no YAML, or more of it than this reads; the message names the line."""


def read_documents(text: str) -> list[Any]:
    """All documents of the text; empty ones are left out."""
    try:
        return [json.loads(text)]
    except ValueError:
        found = [_Reader(lines).read() for lines in _split(text)]
        return [document for document in found if document is not None]


@dataclass(frozen=True, slots=True)
class _Line:
    number: int
    indent: int
    text: str  # neither indentation nor line break


def _split(text: str) -> list[list[_Line]]:
    documents: list[list[_Line]] = [[]]
    for number, line in enumerate(re.split(r"\r?\n", text.removeprefix("\ufeff")), 1):
        content = line.lstrip(" ")
        if re.fullmatch(r"(---|\.\.\.)\s*(#.*)?", line):
            documents.append([])
        else:
            documents[-1].append(_Line(number, len(line) - len(content), content))
    return documents


class _Reader:
    """One document, read from its first line to its last."""

    def __init__(self, lines: list[_Line]) -> None:
        self._lines = lines
        self._at = 0

    def read(self) -> Any:
        value = self._node(above=-1)
        if (rest := self._next()) is not None:
            raise _unreadable(rest, "it does not fit the lines before it")
        return value

    def _next(self) -> _Line | None:
        """The next line that says something."""
        while self._at < len(self._lines):
            line = self._lines[self._at]
            if line.text.strip() and not line.text.startswith("#"):
                return line
            self._at += 1
        return None

    def _node(self, *, above: int, may_be_items: bool = False) -> Any:
        """What stands beneath a key or a dash at column `above`; items may stand as far left as their key."""
        line = self._next()
        if line is None:
            return None
        if _is_item(line.text) and (line.indent > above or (may_be_items and line.indent == above)):
            return self._items(line.indent)
        if line.indent <= above:
            return None
        if _KEY.match(line.text):
            return self._pairs(line.indent)
        self._at += 1
        return _value(line.text, line)

    def _items(self, indent: int) -> list[Any]:
        items = []
        while (line := self._next()) is not None and line.indent == indent and _is_item(line.text):
            rest = line.text[1:].lstrip(" ")
            if _without_comment(rest):  # the rest of the line is read as if it stood alone
                self._lines[self._at] = _Line(line.number, indent + len(line.text) - len(rest), rest)
                items.append(self._text(rest, indent) if _is_text_mark(rest) else self._node(above=indent))
            else:
                self._at += 1
                items.append(self._node(above=indent))
        return items

    def _pairs(self, indent: int) -> dict[str, Any]:
        pairs: dict[str, Any] = {}
        while (line := self._next()) is not None and line.indent == indent and not _is_item(line.text):
            match = _KEY.match(line.text)
            if match is None:
                raise _unreadable(line, "there is no key in it")
            key, rest = str(_value(match[1], line)), line.text[match.end() :]
            if key in pairs:
                raise _unreadable(line, f"{key} is given twice")
            if _is_text_mark(rest):
                pairs[key] = self._text(rest, indent)
                continue
            self._at += 1
            if _without_comment(rest):
                pairs[key] = _value(rest, line)
            else:
                pairs[key] = self._node(above=indent, may_be_items=True)
        return pairs

    def _text(self, mark: str, above: int) -> str:
        """What stands beneath `|` or `>`; line breaks and all, which is enough for what is looked at."""
        self._at += 1
        lines: list[_Line] = []
        while self._at < len(self._lines):
            line = self._lines[self._at]
            if line.text.strip() and line.indent <= above:
                break
            lines.append(line)
            self._at += 1
        indent = next((line.indent for line in lines if line.text.strip()), 0)
        text = "\n".join(" " * max(0, line.indent - indent) + line.text for line in lines).rstrip()
        return text if "-" in _without_comment(mark) or not text else text + "\n"


def _is_item(text: str) -> bool:
    return text == "-" or text.startswith("- ")


def _is_text_mark(text: str) -> bool:
    return bool(re.fullmatch(r"[|>][+-]?", _without_comment(text)))


def _without_comment(text: str) -> str:
    """A line up to a `#` that stands at its beginning or after a space, and not in quotes."""
    match = _COMMENT.match(text)
    return text[: match.end()].rstrip() if match else text.rstrip()


def _value(text: str, line: _Line) -> Any:
    """A scalar or a flow collection, all of it on one line."""
    text = _without_comment(text)
    if not text.startswith(("[", "{")):
        return _scalar(text, line)
    value, rest = _flow(text, line)
    if rest:
        raise _unreadable(line, f"after the bracket comes {rest}")
    return value


def _flow(text: str, line: _Line) -> tuple[Any, str]:
    """The value that the text begins with, and the text after it."""
    text = text.lstrip()
    if text[:1] not in ("[", "{"):
        match = _FLOW_WORD.match(text)
        if match is None:
            raise _unreadable(line, "a value or a bracket is missing")
        return _scalar((match[1] or match[2]).strip(), line), text[match.end() :]
    pairs: dict[str, Any] = {}
    items: list[Any] = []
    start, rest = text[0], text[1:].lstrip()
    end = "]" if start == "[" else "}"
    while not rest.startswith(end):
        value, rest = _flow(rest, line)
        if start == "{":
            if not rest.startswith(":"):
                raise _unreadable(line, f"{value} has no value")
            pairs[str(value)], rest = _flow(rest[1:], line)
        else:
            items.append(value)
        rest = rest.lstrip()
        if rest.startswith(","):
            rest = rest[1:].lstrip()
        elif not rest.startswith(end):
            raise _unreadable(line, f"a comma or {end} is missing")
    return (items if start == "[" else pairs), rest[1:].lstrip()


def _scalar(text: str, line: _Line) -> Any:
    if re.fullmatch(_QUOTED, text):
        if text[0] == "'":
            return text[1:-1].replace("''", "'")
        try:
            return json.loads(text, strict=False)
        except ValueError:
            raise _unreadable(line, f"{text} has an escape that JSON does not have") from None
    is_odd = text.startswith(_NOT_PLAIN) or text.endswith(":") or any(mark in text for mark in (": ", " #"))
    if is_odd or text.startswith("- "):
        raise _unreadable(line, f"{text!r} is YAML that this check cannot read")
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if _FLOAT.fullmatch(text) else text


def _unreadable(line: _Line, why: str) -> UnreadableError:
    return UnreadableError(f"line {line.number} cannot be read: {why}")
