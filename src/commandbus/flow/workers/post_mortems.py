"""Workers that died: how, and which attempts were charged for it and which were not. Reads only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from datetime import datetime
from typing import Final

from commandbus import sql
from commandbus.flow.operation import Statement, Steps, operation
from commandbus.model import names
from commandbus.model.outcome import Verdict
from commandbus.quick_dataclass import dataclass

MOST_ATTEMPTS: Final = 2000
_NOT_CHARGED: Final = (Verdict.WAIVED, Verdict.GIVEN_BACK)


@dataclass(frozen=True, slots=True)
class AttemptInDeath:
    """An attempt that ran in a worker when it died. `is_charged`: it counts against max_attempts. `text` says
    what it had to do with the death."""

    domain: str
    command_type: str
    command_id: str
    attempt: int
    is_charged: bool
    text: str | None


@dataclass(frozen=True, slots=True)
class PostMortem:
    """A worker that died. `death` says how, after "the worker process". Commands that it held and had not started
    were given back, and are not listed."""

    worker: str
    host: str
    supervisor: str | None
    died_at: datetime
    death: str
    attempts: list[AttemptInDeath] = field(default_factory=list)


@operation(atomic=False)
def post_mortems(*, limit: int) -> Steps[list[PostMortem]]:
    """The last workers that died, newest first."""
    dead = yield Statement(sql.text("workers/post_mortems"), {"most": names.check_count(limit, "limit", most=200)})
    if not dead:
        return []
    ran = yield Statement(
        sql.text("workers/in_dead_workers"),
        {"workers": [row[0] for row in dead], "since": dead[-1][3], "most": MOST_ATTEMPTS},
    )
    return [
        PostMortem(worker, host, supervisor, died_at, death, _ran_in(worker, ran))
        for worker, host, supervisor, died_at, death in dead
    ]


def _ran_in(worker: str, rows: Sequence[tuple[object, ...]]) -> list[AttemptInDeath]:
    return [
        AttemptInDeath(domain, kind, command_id, number, verdict not in _NOT_CHARGED, error)  # type: ignore[arg-type]
        for of_worker, domain, kind, command_id, number, verdict, error in rows
        if of_worker == worker
    ]
