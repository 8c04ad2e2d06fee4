"""How a worker process writes its log to stderr: text for people, or one JSON object per line.

What a record carries in `extra` (the command's id, its domain …) is part of the line in both. Only processes that
are ours are set up like this; a worker inside an application uses the application's logging.

Whatever a record says is escaped (`model/safe_text.py`), also one of a library's, and a warning of Python's. A
record is one line, and only a traceback has more. Its lines are indented, so that nothing in the text of an error
looks like a record of its own.
"""

from __future__ import annotations

import json
import logging
import sys
import textwrap
from datetime import UTC, datetime
from typing import Any

from commandbus.model.safe_text import block, escaped, escaped_json
from commandbus.settings import Settings

_KNOWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def set_up_logging(settings: Settings) -> None:
    """Make stderr the log of this process, as the settings say; what was set up before is replaced."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if settings.log_format == "json" else TextFormatter())
    logging.basicConfig(level=settings.log_level, handlers=[handler], force=True)
    logging.captureWarnings(True)  # Python's own way to show one is two lines on stderr


def extras(record: logging.LogRecord) -> dict[str, Any]:
    """What the caller put into `extra`."""
    return {name: value for name, value in vars(record).items() if name not in _KNOWN}


class TextFormatter(logging.Formatter):
    """`2026-01-31T09:30:00.123Z INFO commandbus.worker: message (domain=orders)`."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, and the traceback beneath it."""
        more = ", ".join(f"{name}={value}" for name, value in extras(record).items())
        line = f"{_moment(record)} {record.levelname} {record.name}: {record.getMessage()}"
        shown = escaped(f"{line} ({more})" if more else line)
        return "\n".join([shown, *(block(trace) for trace in _traceback(self, record))])


class JsonFormatter(logging.Formatter):
    """One object a line: at, level, logger, message, the extras, and exception where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """One line; what JSON has no word for is written as text."""
        document = {
            "at": _moment(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **extras(record),
        }
        if trace := _traceback(self, record):
            document["exception"] = "\n".join(trace)
        return escaped_json(json.dumps(document, default=str, ensure_ascii=False))


def _moment(record: logging.LogRecord) -> str:
    at = datetime.fromtimestamp(record.created, UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _traceback(formatter: logging.Formatter, record: logging.LogRecord) -> list[str]:
    found = []
    if record.exc_info:
        found.append(formatter.formatException(record.exc_info))
    elif record.exc_text:
        found.append(textwrap.dedent(record.exc_text))
    if record.stack_info:
        found.append(formatter.formatStack(record.stack_info))
    return found
