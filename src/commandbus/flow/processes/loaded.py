"""A process as the code that moves it has read it."""

from __future__ import annotations

from typing import Any, NamedTuple

from commandbus.processes.manager import ProcessView


class Loaded(NamedTuple):
    """A process as it was read; `view.state` is still JSON."""

    id: int
    domain: str
    version: int
    batch: int | None
    reply_to: str | None
    correlation_id: str | None
    timer: int | None
    has_state: bool
    is_its_message: bool
    parent: int | None
    root: int | None
    depth: int
    view: ProcessView[Any]
