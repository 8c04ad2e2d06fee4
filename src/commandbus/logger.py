"""A logger for threads that must survive an error in logging, and for text that came from outside.

A handler or filter of the application may raise (a closed socket, a bug), and `logging` passes that on to the code
that logs. The threads on which every lease and deadline depends say what they have to say, and go on.

What is logged names ids, types and error texts that strangers chose, and the application's own formatter writes
them as they are. So arguments, extras and tracebacks leave here escaped (`model/safe_text.py`): no text can fake
a line of the log or write to a terminal. The exception itself stays in `record.exc_info`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from contextlib import suppress
from types import TracebackType
from typing import Any, TypeAlias

from commandbus.model.safe_text import block, escaped

ExcInfo: TypeAlias = tuple[type[BaseException], BaseException, TracebackType | None]

_FORMATTER = logging.Formatter()
_UNTOUCHED = (bool, int, float, type(None))


class SafeLogger(logging.LoggerAdapter[logging.Logger]):
    """Logs, and never raises."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """`extra` is the caller's."""
        return msg, kwargs

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """As a logger does; the caller's line is the record's. `trace=` is a traceback that is text already."""
        with suppress(Exception):
            if self.logger.isEnabledFor(level):
                caller = self.logger.findCaller(stacklevel=kwargs.get("stacklevel", 1) + 1)
                self.logger.handle(self._record(level, msg, args, caller[:3], kwargs))

    def _record(
        self,
        level: int,
        msg: object,
        args: tuple[object, ...],
        caller: tuple[str, int, str],
        kwargs: dict[str, Any],
    ) -> logging.LogRecord:
        path, line, function = caller
        exc_info = _exc_info(kwargs.get("exc_info"))
        trace = kwargs.get("trace") if exc_info is None else _FORMATTER.formatException(exc_info)
        record = self.logger.makeRecord(
            self.logger.name, level, path, line, msg, tuple(map(safe, args)), exc_info, function,
            {name: safe(value) for name, value in (kwargs.get("extra") or {}).items()},
        )  # fmt: skip
        if trace is not None:
            record.exc_text = block(trace)
        return record


class OneLine(logging.Filter):
    """For a logger of a library's: what it says of objects of ours, whose names begin so, is one safe line.

    Errors of libpq have several lines. The records of others' objects are left as they are.
    """

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self._prefix = prefix

    def filter(self, record: logging.LogRecord) -> bool:
        """Keep it, with safe arguments."""
        if isinstance(record.args, tuple) and any(self._is_ours(value) for value in record.args):
            record.args = tuple(map(safe, record.args))
        return True

    def _is_ours(self, value: object) -> bool:
        return isinstance(value, str) and value.startswith(self._prefix)


def safe_logger(name: str) -> SafeLogger:
    """The logger of this name, for a thread that must go on."""
    return SafeLogger(logging.getLogger(name), {})


def safe(value: object) -> object:
    """A value as a log may show it: text is escaped now, other things when somebody makes text of them."""
    if isinstance(value, str):
        return escaped(value)
    return value if isinstance(value, _UNTOUCHED) else _Shown(value)


class _Shown:
    """A thing whose text is escaped; only formatters ask for it."""

    __slots__ = ("_value",)

    def __init__(self, value: object) -> None:
        self._value = value

    def __str__(self) -> str:
        return escaped(str(self._value))

    def __repr__(self) -> str:
        return escaped(repr(self._value))


def _exc_info(given: object) -> ExcInfo | None:
    if isinstance(given, BaseException):
        return type(given), given, given.__traceback__
    if isinstance(given, tuple):
        return given if given[1] is not None else None
    kind, error, trace = sys.exc_info() if given else (None, None, None)
    return None if kind is None or error is None else (kind, error, trace)
