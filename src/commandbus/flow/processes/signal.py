"""Signals: what somebody tells a process while it runs.

A signal is a message to the process (ADR 31). A step that waits for it takes it, once. If no step waits for it
yet, it is kept until one does. `signal_id` is an idempotency key: the command_id of the message is made from it.
"""

from __future__ import annotations

import uuid
from typing import Final

from psycopg import errors as pg

from commandbus import sql
from commandbus.errors import DuplicateSignalError, InvalidOperationError, ProcessNotFoundError
from commandbus.flow.commands.operate import OperatorAction
from commandbus.flow.commands.send import explain_missing
from commandbus.flow.operation import Statement, Steps, operation
from commandbus.model import names, payload
from commandbus.model.command import new_command_id
from commandbus.model.process import SentSignal

_SPACE: Final = uuid.UUID("6f0f6c1e-6f6e-4a7a-9d0e-7369676e616c")


@operation(atomic=False)
def signal(
    domain: str,
    process_id: str,
    name: str,
    data: object,
    *,
    signal_id: str | None,
    by: OperatorAction | None,
    max_bytes: int,
) -> Steps[SentSignal]:
    """Send a signal to a process that has not ended. Raises ProcessNotFoundError, InvalidOperationError, or
    DuplicateSignalError if the signal_id is taken by another signal."""
    names.check_domain(domain)
    process_id = names.to_id(process_id, "process_id")
    names.check_id(name, "signal")
    text = payload.dump(data, what="data", max_bytes=max_bytes)
    own = new_command_id() if signal_id is None else names.to_new_id(signal_id, "signal_id")
    fields = {"name": name, "signal_id": own}
    if by is not None:
        fields |= {"by": by.operator} | ({} if by.reason is None else {"reason": by.reason})
    command_id = own if signal_id is None else str(uuid.uuid5(_SPACE, f"{process_id}\n{own}"))
    try:
        rows = yield Statement(
            sql.text("processes/signal"),
            {
                "domain": domain,
                "process_id": process_id,
                "command_id": command_id,
                "signal": payload.dump(fields, what="signal")[:-1] + f',"data":{text}}}',
            },
        )
    except (pg.UndefinedTable, pg.InvalidSchemaName) as error:
        raise explain_missing(domain, error) from None
    refusal = rows[0][1]
    if refusal not in (None, "exists"):
        raise _error(domain, process_id, name, own, refusal)
    return SentSignal(domain, process_id, name, own, created=refusal is None)


def _error(domain: str, process_id: str, name: str, signal_id: str, refusal: str) -> Exception:
    if refusal == "missing":
        return ProcessNotFoundError(f"no process {process_id!r} in domain {domain!r}")
    if refusal == "unseen":
        text = "content that this transaction cannot see yet (retry the transaction)"
        return DuplicateSignalError(domain, process_id, signal_id, text)
    if refusal.startswith("other: "):
        return DuplicateSignalError(domain, process_id, signal_id, refusal.removeprefix("other: "))
    if refusal == "undone":
        why = "it is being undone"
    else:
        why = f"it is {refusal}" + ("; retry it first" if refusal == "FAILED" else "")
    return InvalidOperationError(
        f"cannot send signal {name!r} to process {process_id!r} of domain {domain!r}: {why}"
    )
