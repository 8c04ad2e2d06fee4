"""Which claimed commands must join the line of their key before they run."""

from __future__ import annotations

from typing import Any

from commandbus.flow.commands.claimed_row import OPTIONS, Line, RareOptions
from commandbus.worker.execution.handlers import Handler

RELEASED = "RELEASED"


def line_of(handler: Handler | None, row: tuple[Any, ...]) -> Line | None:
    """The line that a claimed command must join now. None: it has no key, or its turn has come."""
    options = RareOptions.read(row[OPTIONS])
    if options.key is not None and options.key_limit is not None:
        return None if options.key_state == RELEASED else Line(options.key_limit, options.key, None)
    rule = None if handler is None else handler.options.key
    return None if rule is None else Line(rule.key_limit, None, rule.key_path)
