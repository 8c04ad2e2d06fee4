"""Replay: send a new command like an old one, with data that an operator has edited.

The new command has the old one's type, headers, correlation id, key, timeout and attempts. It belongs to no batch
and no process, and nobody gets a reply: the old command has been answered, or is still to be answered. The audit
trails of both name the other one. Everything happens in one transaction.
"""

from __future__ import annotations

from typing import Any

from commandbus import sql
from commandbus.errors import CommandNotFoundError, InvalidOperationError
from commandbus.flow.commands.operate import OperatorAction, act_on
from commandbus.flow.commands.send import prepare, send
from commandbus.flow.operation import Statement, Steps, operation
from commandbus.model import names, payload
from commandbus.model.command import AuditEvent, NewCommand, SentCommand
from commandbus.model.json_values import JsonValue
from commandbus.model.mask import Mask
from commandbus.model.priority import name_of

_ENDED = ("COMPLETED", "FAILED", "CANCELED", "IN_TROUBLESHOOTING_QUEUE")


@operation(atomic=True, whole=True)
def replay(
    domain: str,
    command_id: str,
    data: JsonValue,
    what: OperatorAction,
    *,
    new_id: str | None,
    cancels: bool,
    mask: Mask,
    max_bytes: int,
    bus: object = None,
) -> Steps[SentCommand]:
    """Send it again with other data. `cancels`: an old one that needs a person is canceled."""
    old_id = names.to_id(command_id)
    rows = yield Statement(
        sql.text("commands/replayed"), {"domain": names.check_domain(domain), "command_id": old_id}
    )
    if not rows:
        raise CommandNotFoundError(f"no command {old_id!r} in domain {domain!r}")
    _, command_type, old, headers, correlation_id, max_attempts, timeout, on_exhausted, priority, *rest = rows[0]
    key_limit, key, status = rest
    if status not in _ENDED:
        raise InvalidOperationError(
            f"command {old_id!r} of domain {domain!r} has not ended: it waits or runs. Cancel it first, or wait"
        )
    if cancels and status != "IN_TROUBLESHOOTING_QUEUE":
        raise InvalidOperationError(f"command {old_id!r} is {status}: there is nothing to cancel")
    new = NewCommand(
        command_type,
        mask.restore("data", data, payload.loads_or_none(old)),
        command_id=new_id,
        correlation_id=correlation_id,
        max_attempts=max_attempts,
        headers=payload.loads_or_none(headers),
        timeout=timeout,
        on_exhausted=on_exhausted,
        key_limit=key_limit,
        key=key,
        priority=None if priority is None else name_of(priority),
    )
    sent = yield from send(domain, prepare(new, max_bytes=max_bytes), bus).steps
    if not sent.created:
        raise InvalidOperationError(f"there is a command {sent.command_id!r} in domain {domain!r} already")
    yield from _note(domain, old_id, sent.command_id, what)
    if cancels:
        why = f"replayed as {sent.command_id}" if what.reason is None else what.reason
        yield from act_on(domain, old_id, OperatorAction(what.operator, why, "CANCEL")).steps
    return sent


def _note(domain: str, old_id: str, new_id: str, what: OperatorAction) -> Steps[None]:
    said: dict[str, Any] = {"operator": what.operator, "reason": what.reason}
    yield Statement(
        b"SELECT command_id FROM commandbus.log_events(%(domain)s, %(command_ids)s, %(events)s, %(details)s)",
        {
            "domain": domain,
            "command_ids": [old_id, new_id],
            "events": [AuditEvent.REPLAYED.value, AuditEvent.REPLAY.value],
            "details": [
                payload.dump({"as": new_id, **said}, what="details"),
                payload.dump({"of": old_id, **said}, what="details"),
            ],
        },
    )
