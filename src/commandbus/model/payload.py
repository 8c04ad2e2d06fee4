"""JSON in and out, once, with errors that name the place.

What is stored is the exact text that was dumped; what a handler gets is that text parsed. A size limit protects
the queue, NUL and lone surrogates are refused because PostgreSQL cannot hold them as text. So are keys of dicts
that are not text: JSON would make text of them, and a reader would find other keys than were written. Objects such
as datetimes and dataclasses are made plain JSON first (`model/to_json.py`). Nesting has a limit far from that of
any Python's or server's stack: whatever is composed of such values (a reply, a summary) is readable.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from commandbus.errors import InvalidCommandError

DEFAULT_MAX_BYTES = 1024 * 1024
MAX_NESTING = 200
COMPOSED = 1 << 30  # `max_bytes` of what is made of values that were checked when they came in: no limits again

_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
_scan = json.JSONDecoder().scan_once  # type: ignore[attr-defined]
_CONTAINERS = (dict, list, tuple)
_LEAVES = frozenset({str, int, float, bool, type(None)})

# What a key that is not text becomes: 1, -1.5, true, null. Text may look like that, too, so a match is checked.
_ODD_KEY = re.compile(r'"(?:-?[0-9][^"]*|true|false|null|NaN|-?Infinity)":')


def loads(text: str) -> Any:
    """The value of a JSON text, without what json.loads does for text from anywhere: a third of its time."""
    try:
        value, end = _scan(text, 0)
    except StopIteration:
        return json.loads(text)
    return value if end == len(text) else json.loads(text)


def loads_or_none(text: str | None) -> Any:
    """The value of a JSON text; None if there is none."""
    return None if text is None else loads(text)


_REMEDY = "store it elsewhere and send a reference, or raise COMMANDBUS_MAX_PAYLOAD_BYTES"


def dump(
    value: object,
    *,
    what: str,
    max_bytes: int = DEFAULT_MAX_BYTES,
    remedy: str = _REMEDY,
    max_nesting: int = MAX_NESTING,
    default: Callable[[Any], Any] | None = None,
) -> str:
    """The JSON text of a value; `what` names it in the error (`data`, `headers`, `result`).

    `default`: the application's function that makes JSON of its own types.
    """
    try:
        text = _encode(value)
    except (TypeError, ValueError, RecursionError):
        value, text = _encode_objects(value, what, default)
    if _ODD_KEY.search(text) and (key := _find_odd_key(value)) is not None:
        raise InvalidCommandError(
            f"{what} has a key that is not text ({key}), and JSON would change it; make it text: str(key)"
        )
    if not text.isascii():
        _check_encodable(text, what)
    size = len(text) if text.isascii() else len(text.encode())
    if size > max_bytes:
        raise InvalidCommandError(f"{what} is {size} bytes of JSON, over the limit of {max_bytes}; {remedy}")
    # Few texts have enough brackets to need a closer look. The usual payload costs one comparison.
    if (
        size > 2 * max_nesting
        and text.count("[") + text.count("{") > max_nesting
        and max_bytes < COMPOSED
        and is_nested_beyond(max_nesting, value)
    ):
        raise InvalidCommandError(
            f"{what} is nested more than {max_nesting} levels deep; make it flatter, or send it as text"
        )
    if "\\u0000" in text and (path := _find_nul(value)) is not None:
        raise InvalidCommandError(f"{what} contains a NUL character at {path}, which PostgreSQL cannot store")
    return text


def _encode_objects(value: object, what: str, default: Callable[[Any], Any] | None) -> tuple[object, str]:
    """The value as plain JSON, and its text. Few payloads have anything else in them."""
    from commandbus.model.to_json import to_json

    try:
        value = to_json(value, default)
        return value, _encode(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidCommandError(f"{what} is not JSON: {error}{_where(value)}") from None


def plain(value: object, *, what: str, default: Callable[[Any], Any] | None) -> Any:
    """The value with its objects made JSON; what cannot be is left for `dump` to refuse."""
    from commandbus.model.to_json import to_json

    try:
        return to_json(value, default)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidCommandError(f"{what} is not JSON: {error}{_where(value)}") from None


def is_nested_beyond(most: int, value: object) -> bool:
    """Has a value more levels of lists and dicts? Level by level: recursion ends where the stack does."""
    level: list[Any] = [value] if isinstance(value, _CONTAINERS) else []
    for _ in range(most):
        if not level:
            return False
        level = [
            child
            for item in level
            for child in (item.values() if isinstance(item, dict) else item)
            if type(child) not in _LEAVES and isinstance(child, _CONTAINERS)
        ]
    return bool(level)


def clean_text(text: str, *, longest: int = 65536) -> str:
    """Text from outside (an error message, a traceback) made storable: NUL and surrogates shown, length bounded.

    The end of a long text is kept: a traceback names its error there.
    """
    if len(text) > longest:
        text = f"[… {len(text) - longest} characters left out]\n{text[-longest:]}"
    if "\x00" in text:
        text = text.replace("\x00", "\\x00")
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _check_encodable(text: str, what: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        bad = text[error.start : error.start + 1]
        raise InvalidCommandError(
            f"{what} contains the lone surrogate {bad!a}, which is not text; decode the bytes it came from "
            f"with their real encoding"
        ) from None


def _find_odd_key(value: object) -> str | None:
    """Where a dict has a key that JSON makes text of. Level by level: recursion ends where the stack does."""
    level: list[tuple[str, Any]] = [("$", value)]
    while level:
        below = []
        for path, item in level:
            if isinstance(item, dict):
                for key in item:
                    if not isinstance(key, str):
                        return f"{key!r} of type {type(key).__name__} at {path}"
                below += [(f"{path}.{key}", child) for key, child in item.items()]
            elif isinstance(item, list | tuple):
                below += [(f"{path}[{index}]", child) for index, child in enumerate(item)]
        level = [(path, child) for path, child in below if isinstance(child, _CONTAINERS)]
    return None


def _find_nul(value: object) -> str | None:
    try:
        return next((path for path, leaf in _leaves(value, "$") if isinstance(leaf, str) and "\x00" in leaf), None)
    except RecursionError:  # looking takes more stack than dumping did
        return "$… (nested too deeply to say where)"


def _where(value: object) -> str:
    """Name the first leaf that JSON has no word for."""
    try:
        for path, leaf in _leaves(value, "$"):
            try:
                _encode(leaf)
            except (TypeError, ValueError):
                return _named(path, leaf)
    except RecursionError:
        return " (nested too deeply, or it contains itself)"
    return ""


def _named(path: str, leaf: object) -> str:
    from commandbus.model.to_json import advice

    return f" (at {path}: {type(leaf).__name__}); {advice(leaf)}"


def _leaves(value: Any, path: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield f"{path} (key)", key if isinstance(key, str) else str(key)
            yield from _leaves(item, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]")
    else:
        yield path, value


def quote(text: str) -> str:
    """A JSON string literal."""
    return _encode(text)


def compact(value: object) -> str:
    """The JSON text of a value that was parsed from JSON, without the checks of `dump`."""
    return _encode(value)
