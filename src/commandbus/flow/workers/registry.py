"""A worker's row in the registry: its heartbeat every few seconds, and what the worker learns there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from commandbus import sql
from commandbus.flow.operation import Statement, Steps, operation
from commandbus.model import payload
from commandbus.quick_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """What never changes about a worker; `types` are the command types that it has handlers for
    ("orders/ship")."""

    id: str
    host: str
    pid: int
    domains: Sequence[str]
    concurrency: int
    version: str
    supervisor: str | None = None
    types: Callable[[], Sequence[str]] = tuple
    code_version: str | None = None


@dataclass(frozen=True, slots=True)
class Watchers:
    """What people want of a worker: for how many seconds somebody watches its slots, and whether it was asked
    something."""

    seconds: float
    has_requests: bool


@operation(atomic=False)
def beat(
    identity: WorkerIdentity,
    *,
    state: str,
    running: int,
    settled: int,
    rates: Mapping[str, float],
    health: Mapping[str, Any] | None = None,
    counts: Mapping[str, Any] | None = None,
) -> Steps[Watchers]:
    """Write the worker's row, and learn what people want of it.

    `health` has the form `{"state": "HEALTHY", "reasons": []}`.

    `counts` are the counts for breakers, by 'DOMAIN/COMMAND_TYPE' (model/breaker_rule.py); usually None.
    """
    rows = yield Statement(
        sql.text("workers/beat"),
        {
            "id": identity.id,
            "host": identity.host,
            "pid": identity.pid,
            "domains": list(identity.domains),
            "concurrency": identity.concurrency,
            "version": identity.version,
            "code_version": identity.code_version,
            "supervisor": identity.supervisor,
            "state": state,
            "running": running,
            "settled": settled,
            "rates": payload.dump(dict(rates), what="rates"),
            "types": sorted(identity.types()),
            "health": None if health is None else payload.dump(dict(health), what="health"),
            "counts": None if not counts else payload.dump(dict(counts), what="counts"),
        },
    )
    return Watchers(*rows[0])
