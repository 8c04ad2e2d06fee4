"""Renew the leases of attempts that are alive, and learn which are lost or should be canceled.

The progress that a handler reports is stored with the renewal: it is a field of the queue row's headers and costs
no write of its own. A row that another transaction has locked is skipped. It is neither renewed nor lost, and the
caller tries again. A request to cancel such a row is still returned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any, NamedTuple, Protocol

from commandbus import sql
from commandbus.flow.operation import Statement, Steps, operation
from commandbus.quick_dataclass import dataclass


class Held(Protocol):
    """What a renewal needs to know about an attempt; a `Fence` has it, too."""

    @property
    def msg_id(self) -> int: ...
    @property
    def read_ct(self) -> int: ...
    @property
    def id(self) -> int | None: ...


class PendingCancel(NamedTuple):
    """Somebody asked to cancel this attempt's command."""

    msg_id: int
    read_ct: int
    by: str
    reason: str | None


@dataclass(frozen=True, slots=True)
class Renewal:
    """What a renewal learned: the attempts (msg_id, read_ct) whose fence is gone, those that should be canceled,
    and those whose queue row another transaction has locked. The leases of these locked rows were not renewed."""

    lost: list[tuple[int, int]]
    canceled: list[PendingCancel]
    skipped: list[tuple[int, int]] = field(default_factory=list)


@operation(atomic=False)
def renew(
    domain: str,
    worker: str,
    held: Sequence[Held],
    *,
    lease_seconds: float,
    progress: Mapping[int, str] | None = None,
) -> Steps[Renewal]:
    """Extend these leases, and store the progress of their attempts: JSON text by msg_id.

    Every renewal returns a request to cancel once more, until the attempt is settled.
    """
    told = None if not progress else "{" + ",".join(f'"{key:d}":{text}' for key, text in progress.items()) + "}"
    rows = yield Statement(
        sql.text("commands/renew", domain=domain),
        _fences(worker, held) | {"lease": lease_seconds, "progress": told},
    )
    return Renewal(
        lost=[(msg_id, read_ct) for msg_id, read_ct, answer, *_ in rows if answer == "lost"],
        canceled=[
            PendingCancel(msg_id, read_ct, by, reason)
            for msg_id, read_ct, _, is_canceled, by, reason in rows
            if is_canceled
        ],
        skipped=[(msg_id, read_ct) for msg_id, read_ct, answer, *_ in rows if answer == "skipped"],
    )


@operation(atomic=False)
def pending_cancels(domain: str, worker: str, held: Sequence[Held]) -> Steps[list[PendingCancel]]:
    """Which of these attempts should be canceled. Reads only."""
    rows = yield Statement(sql.text("commands/pending_cancels", domain=domain), _fences(worker, held))
    return [PendingCancel(*row) for row in rows]


def _fences(worker: str, held: Sequence[Held]) -> dict[str, Any]:
    return {
        "worker": worker,
        "msg_ids": [each.msg_id for each in held],
        "read_cts": [each.read_ct for each in held],
        "commands": [each.id for each in held],
    }
