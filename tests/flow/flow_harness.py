"""What the tests of `flow` share: a bus of either driver, and short words for claiming and settling."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import psycopg
import pytest

from commandbus.errors import SchemaError
from commandbus.flow.commands.claim import (
    ANY_ROOM,
    Claim,
    Room,
    RunningIn,
    claim,
    nobody_knows,
    put_right,
    run_alone,
)
from commandbus.flow.commands.claimed_row import ClaimedRow
from commandbus.flow.commands.renew import renew
from commandbus.flow.commands.settle import Settlement, settle
from commandbus.flow.operation import Operation, Statement
from commandbus.model.outcome import judge_failure
from commandbus.model.priority import NORMAL
from commandbus.model.retry import RetryPolicy
from commandbus.worker.execution.attempt import Attempt

T = TypeVar("T")
POLICY = RetryPolicy(max_attempts=3, backoff_schedule=[0], jitter=0)
MEBIBYTE = 1024 * 1024

# For races between sessions of the server, and for connections that exist in one colour only.
sync_only = pytest.mark.parametrize("connect", ["sync"], indirect=True)
async_only = pytest.mark.parametrize("connect", ["async"], indirect=True)


class Bus:
    """A bus of either driver with sync manners, and a worker's doings on it."""

    def __init__(self, bus: Any, tsq: Any, driver: str, url: str, runner: asyncio.Runner) -> None:
        self.bus = bus
        self.tsq = tsq
        self.driver = driver
        self.url = url
        self.runner = runner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.bus, name)

    def claim_raw(
        self,
        worker: str = "w1",
        n: int = 100,
        *,
        lease: float = 30,
        cursor: Any = None,
        domain: str = "orders",
        band: int = NORMAL,
    ) -> Claim:
        """The claim alone."""
        found: Claim = self.bus.run(
            claim(domain=domain, worker=worker, n=n, lease_seconds=lease, cursor=cursor, band=band)
        )
        return found

    def put_right(
        self,
        found: Claim,
        worker: str = "w1",
        *,
        domain: str = "orders",
        room: Room = ANY_ROOM,
        running_in: RunningIn = nobody_knows,
    ) -> tuple[list[Any], int]:
        """What a claimer does about the odd ones."""
        answer: tuple[list[Any], int] = self.bus.run(
            put_right(
                domain=domain,
                worker=worker,
                odd=found.odd,
                max_bytes=MEBIBYTE,
                room=room,
                running_in=running_in,
            )
        )
        return answer

    def run_alone(self, row: ClaimedRow, worker: str, *, domain: str = "orders") -> bool:
        """What a worker does before a suspect starts."""
        noted: bool = self.bus.run(run_alone(domain, worker, row))
        return noted

    def claim(
        self, worker: str = "w1", n: int = 100, *, lease: float = 30, domain: str = "orders"
    ) -> list[Attempt]:
        """Claim as a worker does, and answer what is to be run."""
        found = self.claim_raw(worker, n, lease=lease, domain=domain)
        rows = list(found.ready)
        if found.odd:
            right, _ = self.put_right(found, worker, domain=domain)
            rows += right
            for row in right:
                if row.alone:
                    assert self.run_alone(row, worker, domain=domain)
        return [started(Attempt(domain, tuple(row), None, 0.0)) for row in sorted(rows)]

    def claim_one(self, worker: str = "w1", *, lease: float = 30, domain: str = "orders") -> Attempt:
        """Claim exactly one."""
        (attempt,) = self.claim(worker, 1, lease=lease, domain=domain)
        return attempt

    def settle(
        self,
        settlements: Settlement | Iterable[Settlement],
        worker: str = "w1",
        *,
        waiting: bool = False,
        conn: object = None,
    ) -> dict[tuple[int, int], str]:
        """What was not settled, and why."""
        items = [settlements] if isinstance(settlements, Settlement) else list(settlements)
        answer: dict[tuple[int, int], str] = self.bus.run(
            settle(items[0].domain, worker, items, waiting=waiting), conn
        )
        return answer

    def renew(
        self, attempts: Sequence[Attempt], worker: str = "w1", *, lease: float = 30
    ) -> list[tuple[int, int]]:
        """Those whose lease was lost."""
        lost: list[tuple[int, int]] = self.bus.run(renew("orders", worker, attempts, lease_seconds=lease)).lost
        return lost


Roles = Callable[[str], Bus]
"""A bus of a login user that has the role of this kind."""


def assert_refused(act: Callable[[], Any]) -> None:
    """The server, or we before it, refuse this for lack of rights."""
    with pytest.raises((psycopg.errors.InsufficientPrivilege, SchemaError)):
        act()


def raw(statement: str) -> Operation[list[Any]]:
    """Any SQL, as an operation."""

    def steps() -> Any:
        return (yield Statement(statement.encode()))

    return Operation(steps(), atomic=False)


def started(attempt: Attempt) -> Attempt:
    """Started when it was claimed, by the server's clock: this test's tables have one clock."""
    claimed_at: int = attempt.row[17]
    attempt.started = claimed_at / 1e6
    return attempt


def fail(attempt: Attempt, error: BaseException, *, policy: RetryPolicy = POLICY) -> Settlement:
    """The settlement of an attempt that raised this."""
    return attempt.fail(
        judge_failure(error, charge=attempt.charge, policy=policy, max_attempts=attempt.max_attempts)
    )


def at_once(jobs: Sequence[Callable[[], T]]) -> list[T | BaseException]:
    """Run these in threads that begin together; an exception is an answer too."""
    barrier = threading.Barrier(len(jobs))

    def run(job: Callable[[], T]) -> T | BaseException:
        barrier.wait()
        try:
            return job()
        except BaseException as error:
            return error

    with ThreadPoolExecutor(len(jobs)) as threads:
        return list(threads.map(run, jobs))


def expire_leases(db: psycopg.Connection[Any], domain: str = "orders") -> None:
    """As if the time of every lease had passed."""
    db.execute(
        f"UPDATE pgmq.q_{domain}__commands SET vt = vt - (commandbus.due_at(vt) - now()) - interval '1 ms' "
        "WHERE headers ? 'held_by'".encode()
    )


def send_raw(
    db: psycopg.Connection[Any], message: str, headers: str | None = None, *, domain: str = "orders"
) -> int:
    """What another PGMQ client does; answers the msg_id."""
    row = db.execute(
        "SELECT pgmq.send(%s, %s::jsonb, %s::jsonb)", (f"{domain}__commands", message, headers)
    ).fetchone()
    assert row is not None
    msg_id: int = row[0]
    return msg_id


def one(db: psycopg.Connection[Any], query: str, *params: Any) -> Any:
    """The single value of a query."""
    row = db.execute(query.encode(), params).fetchone()
    assert row is not None
    return row[0]


def queue_length(db: psycopg.Connection[Any], domain: str = "orders") -> int:
    """How many messages are in a domain's queue."""
    length: int = one(db, f"SELECT count(*) FROM pgmq.q_{domain}__commands")
    return length


def snapshot(db: psycopg.Connection[Any], domain: str = "orders") -> dict[str, list[Any]]:
    """Everything that is stored about commands, to show that nothing changed."""
    tables = ["command", "attempt", "tsq", "operator_action", "parked", "pause", "rejected_message",
              "undelivered_reply"]  # fmt: skip
    found = {
        name: db.execute(f"SELECT t::text FROM commandbus.{name} t ORDER BY 1".encode()).fetchall()
        for name in tables
    }
    found["queue"] = db.execute(f"SELECT q::text FROM pgmq.q_{domain}__commands q ORDER BY 1".encode()).fetchall()
    return found


def wait_until_blocked(db: psycopg.Connection[Any]) -> None:
    """Until some session of this database waits for a lock: a condition of the server, looked at repeatedly."""
    blocked = False
    while not blocked:
        blocked = one(
            db,
            "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() "
            "AND wait_event_type = 'Lock')",
        )
