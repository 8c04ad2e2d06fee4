"""Messages to processes, now or later: timers, requests to cancel or undo, an operator's retry."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

from commandbus import sql
from commandbus.flow.operation import Statement, Steps
from commandbus.model import payload
from commandbus.model.command import new_command_id

if TYPE_CHECKING:
    from commandbus.processes.manager import ProcessView


def send_message(
    domain: str, view: ProcessView[Any], id_: int, data: dict[str, Any], *, delay: float = 0.0
) -> Steps[int]:
    """A message to a process, now or later. Returns its command's row id."""
    rows = yield Statement(
        sql.text("processes/message", domain=domain),
        {
            "domain": domain,
            "command_id": new_command_id(),
            "process_type": view.process_type,
            "process_id": view.process_id,
            "process": id_,
            "data": dump({"process": view.process_id} | data),
            "delay": delay,
        },
    )
    message: int = rows[0][0]
    return message


def seconds_until(at: datetime | None) -> Steps[float]:
    """The seconds until an instant, by the server's clock; 0 if it has passed."""
    rows = yield Statement(
        b"SELECT greatest(extract(epoch FROM %(at)s::timestamptz - pg_catalog.clock_timestamp()), 0)::float8",
        {"at": at},
    )
    seconds: float = rows[0][0]
    return seconds


def dump(value: Any) -> str:
    """The JSON text of what is made of values that were checked when they came in."""
    return payload.dump(value, what="rows", max_bytes=payload.COMPOSED)
