"""Whether there are schedules at all. A worker without schedules imports no more than this."""

from __future__ import annotations

from collections.abc import Sequence

from commandbus.flow.operation import Statement, Steps, operation

CHANNEL = "commandbus_schedules"
"""The channel on which every change of a schedule is notified, with the domain."""


@operation(atomic=False)
def exist(domains: Sequence[str]) -> Steps[bool]:
    """Has any of these domains a schedule? Index: schedule_pkey."""
    rows = yield Statement(
        b"SELECT EXISTS (SELECT FROM commandbus.schedule WHERE domain = ANY (%(domains)s::text[]))",
        {"domains": list(domains)},
    )
    found: bool = rows[0][0]
    return found
