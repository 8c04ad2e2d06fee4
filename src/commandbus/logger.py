"""logger: a logger for threads that must not die of a log.

A handler or filter of the application may raise (a closed socket, a bug), and `logging` passes that on to whoever
logs. The threads on which every lease and deadline depends say what they have to say, and go on.
"""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from contextlib import suppress
from typing import Any


class SafeLogger(logging.LoggerAdapter[logging.Logger]):
    """Logs, and never raises."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """`extra` is the caller's."""
        return msg, kwargs

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """As a logger does; the caller's line is the record's."""
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
        with suppress(Exception):
            self.logger.log(level, msg, *args, **kwargs)


def safe_logger(name: str) -> SafeLogger:
    """The logger of this name, for a thread that must go on."""
    return SafeLogger(logging.getLogger(name), {})
