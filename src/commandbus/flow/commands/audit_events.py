"""audit_events: an application's own events in the audit trails of its commands, kept and pruned with them.

The events of commandbus itself are derived from its tables (`commandbus.audit`), and nobody can write those. So an
application's event cannot have the name of one of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from commandbus.errors import CommandNotFoundError, InvalidCommandError
from commandbus.flow.operation import Statement, Steps, operation
from commandbus.model import names, payload
from commandbus.model.command import AuditEvent
from commandbus.model.json_values import JsonValue


class NewAuditEvent(NamedTuple):
    """One event for `log_many`."""

    command_id: str
    event: str
    details: Mapping[str, JsonValue] | None = None


@operation(atomic=True, whole=True)
def log(domain: str, events: Iterable[NewAuditEvent], *, max_bytes: int) -> Steps[int]:
    """Write events, all or none. Returns how many. Raises CommandNotFoundError if a command does not exist."""
    names.check_domain(domain)
    checked = [_check(NewAuditEvent(*each), max_bytes) for each in events]
    if not checked:
        return 0
    rows = yield Statement(
        b"SELECT command_id FROM commandbus.log_events(%(domain)s, %(command_ids)s, %(events)s, %(details)s)",
        {
            "domain": domain,
            "command_ids": [command_id for command_id, _, _ in checked],
            "events": [event for _, event, _ in checked],
            "details": [details for _, _, details in checked],
        },
    )
    known = {command_id for (command_id,) in rows}
    for command_id, _, _ in checked:
        if command_id not in known:
            raise CommandNotFoundError(f"no command {command_id!r} in domain {domain!r}")
    return len(checked)


def _check(new: NewAuditEvent, max_bytes: int) -> tuple[str, str, str | None]:
    event = names.check_id(new.event, "event")
    if event.upper() in list(AuditEvent):
        raise InvalidCommandError(f"event {event!r} is told by commandbus itself: choose another name")
    if new.details is None:
        return names.to_id(new.command_id), event, None
    if not isinstance(new.details, Mapping):
        raise InvalidCommandError(f"details must be a dict, not {names.shown(new.details)}")
    details = payload.dump(dict(new.details), what="details", max_bytes=max_bytes)
    return names.to_id(new.command_id), event, details
