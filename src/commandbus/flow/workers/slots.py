"""The slots of workers: workers publish them while somebody watches, and people see them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import field
from datetime import datetime
from typing import Any, Final

from psycopg import errors as pg

from commandbus import sql
from commandbus.flow.operation import Statement, Steps, no_schema, operation
from commandbus.model import payload
from commandbus.model.payload import loads_or_none
from commandbus.quick_dataclass import dataclass

CHANNEL: Final = "commandbus_fleet"
FRESH_SECONDS: Final = 6.0
ALIVE_SECONDS: Final = 15.0
WATCH_SECONDS: Final = 10.0
MOST_WORKERS: Final = 500


@dataclass(frozen=True, slots=True)
class SlotInfo:
    """What one slot runs.

    `phase` is RUNNING; STARTING (it waits for a child process); STOPPING (it was asked to stop, for `reason`,
    and has `grace_seconds` left); or STUCK (it was given up, and its thread still hangs there). `seconds` is how
    long it has been running, and `timeout_seconds` how long it may; None if it has no deadline. `kind` is
    'thread', 'async', 'process', or 'messages': a slot that only messages of processes use. `commands` is more
    than 1 if a chunk runs there; the command is then its first.
    """

    index: int
    phase: str
    domain: str
    command_type: str
    command_id: str
    attempt: int
    seconds: float
    timeout_seconds: float | None
    kind: str
    commands: int = 1
    reason: str | None = None
    grace_seconds: float | None = None

    @property
    def share(self) -> float | None:
        """How much of its time is used, from 0 to 1; None without a deadline."""
        if self.timeout_seconds is None:
            return None
        return 1.0 if self.timeout_seconds <= 0 else min(1.0, self.seconds / self.timeout_seconds)


@dataclass(frozen=True, slots=True)
class WorkerSlots:
    """What the slots of a worker ran `age_seconds` ago. `size` is how many commands it runs at once; slots for
    messages of processes are not in it, and are listed only while they run something. `left_out` slots are busy
    and not listed, because there are too many. `memory_mb` is what its process uses, and it is replaced at
    `max_memory_mb`, or after `max_messages` (None: never)."""

    worker: str
    taken_at: datetime
    age_seconds: float
    size: int
    slots: list[SlotInfo] = field(default_factory=list)
    left_out: int = 0
    memory_mb: float | None = None
    max_memory_mb: int | None = None
    max_messages: int | None = None

    @property
    def idle(self) -> int:
        """How many slots for commands run nothing."""
        return max(0, self.size - self.busy)

    @property
    def busy(self) -> int:
        """How many slots for commands run something. Those that are stuck have been replaced, and do not count."""
        return sum(slot.phase != "STUCK" and slot.kind != "messages" for slot in self.slots) + self.left_out


@operation(atomic=False)
def publish(worker: str, domains: Sequence[str], state: Mapping[str, Any]) -> Steps[float]:
    """Write what a worker's slots run. Returns for how many more seconds somebody watches."""
    text = payload.dump(dict(state), what="slots")
    rows = yield Statement(
        sql.text("workers/publish_slots"), {"worker": worker, "domains": list(domains), "state": text}
    )
    seconds: float = rows[0][0]
    return seconds


@operation(atomic=False)
def watch_slots(seconds: float = WATCH_SECONDS) -> Steps[list[WorkerSlots]]:
    """What live workers published in the last seconds; they go on for so long."""
    try:
        with suppress(pg.ReadOnlySqlTransaction, pg.InsufficientPrivilege):  # then others' watching must do
            yield Statement(b"SELECT commandbus.watch_slots(%(seconds)s::float8)", {"seconds": seconds})
        rows = yield Statement(
            sql.text("workers/list_slots"), {"alive": ALIVE_SECONDS, "fresh": FRESH_SECONDS, "most": MOST_WORKERS}
        )
    except (pg.UndefinedTable, pg.UndefinedFunction, pg.InvalidSchemaName):
        raise no_schema() from None
    return [_worker_slots(worker, taken_at, age, loads_or_none(state)) for worker, taken_at, age, state in rows]


def _worker_slots(worker: str, taken_at: datetime, age: float, state: Any) -> WorkerSlots:
    return WorkerSlots(
        worker,
        taken_at,
        age,
        state["size"],
        [SlotInfo(**slot) for slot in state["slots"]],
        state["left_out"],
        state["memory_mb"],
        state["max_memory_mb"],
        state["max_messages"],
    )
