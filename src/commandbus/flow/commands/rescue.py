"""The supervisor settles what a dead worker held, at once and under the dead worker's fence.

    terminate_backends → held_by → put_right (lost predecessors, raw messages) → settle with worker=<the dead one>

The fence decides, as everywhere: commands that the worker settled before it died are no longer held, and for
commands that another worker has claimed since, the settlement is refused. A requested cancel is carried out. A
command that was held but did not run (it waited for a slot, or its outcome waited for the settler) is given back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from psycopg import errors as pg

from commandbus import sql
from commandbus.flow.commands.claimed_row import ClaimedRow, RareOptions
from commandbus.flow.commands.database_session import DatabaseSession
from commandbus.flow.commands.settle import Settlement, cancellation, given_back, of_row, waived
from commandbus.flow.operation import Statement, Steps, operation
from commandbus.model.client_sockets import ClientSession
from commandbus.model.crash_attribution import Finding, Role
from commandbus.model.outcome import Failure, Judgement, Verdict, judge
from commandbus.model.retry import RetryPolicy
from commandbus.quick_dataclass import dataclass

MOST_COUNTED = 10_000
_CLAIMED = len(ClaimedRow._fields)


class Held(NamedTuple):
    """A queue row that a dead worker holds; `cancel` says who asked to cancel it and why."""

    row: ClaimedRow
    cancel: Failure | None


@dataclass(frozen=True, slots=True)
class Rule:
    """How failures of one command type are judged, as a worker tells its supervisor about its handlers."""

    policy: RetryPolicy
    on_timeout: str = "retry"
    isolation: str = "thread"

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Rule:
        """Reads one from the worker's message."""
        policy = RetryPolicy(
            document["max_attempts"],
            tuple(document["backoff_schedule"]),
            document["jitter"],
            on_exhausted=document.get("on_exhausted", "troubleshoot"),
        )
        return cls(policy, document.get("on_timeout", "retry"), document.get("isolation", "thread"))


@dataclass(frozen=True, slots=True)
class ClaimableWork:
    """What could be claimed in a domain, up to MOST_COUNTED; `oldest_seconds` is how long the first command
    waits."""

    ready: int
    oldest_seconds: float | None
    in_tsq: int


@operation(atomic=False)
def terminate_backends(worker: str, sessions: Sequence[DatabaseSession] = ()) -> Steps[tuple[int, int]]:
    """End a worker's database sessions. Returns how many were ended, and how many this role may not end.

    `sessions` are known to be the worker's own, whatever their names. Call it until nothing is left, because an
    ended session stays in the list until it is gone.
    """
    try:
        rows = yield Statement(
            sql.text("commands/terminate_sessions"),
            {
                "prefix": f"commandbus {worker} ",
                "pids": [session.pid for session in sessions],
                "started": [session.started for session in sessions],
            },
        )
    except pg.InsufficientPrivilege:
        return 0, 1
    ended = sum(answer is not None for _, answer in rows)
    return ended, len(rows) - ended


@operation(atomic=False)
def client_sessions(
    worker: str, ports: Sequence[int]
) -> Steps[tuple[tuple[str, int] | None, list[ClientSession]]]:
    """This server's address, and the sessions that have the worker's name or come from one of these client
    ports."""
    rows = yield Statement(
        sql.text("commands/client_sessions"),
        {
            "prefix": f"commandbus {worker} ",
            "isolated": f"commandbus {worker} isolated",
            "ports": list(ports),
        },
    )
    server = rows[0][-2:] if rows and rows[0][-2] is not None else None
    return server, [ClientSession(*row[:-2]) for row in rows]


@operation(atomic=False)
def held_by(
    domain: str, worker: str, *, running: Sequence[int], past_seconds: float, lease_seconds: float
) -> Steps[list[Held]]:
    """What a worker holds in a domain; `running` are the msg_ids that its board shows."""
    rows = yield Statement(
        sql.text("commands/held_by", domain=domain),
        {
            "domain": domain,
            "worker": worker,
            "running": list(running),
            "past": past_seconds,
            "lease": lease_seconds,
        },
    )
    return [
        Held(ClaimedRow(*row[:_CLAIMED]), cancellation(row[-2] or "somebody", row[-1]) if row[-3] else None)
        for row in rows
    ]


@operation(atomic=False)
def note_death(worker: str, death: str | None = None) -> Steps[None]:
    """Record that the process of a worker is dead, and how it died. What it held is settled after that."""
    yield Statement(sql.text("commands/note_death"), {"worker": worker, "death": death})


@operation(atomic=False)
def mark_worker_dead(worker: str) -> Steps[None]:
    """Record in the registry that a worker is dead."""
    yield Statement(sql.text("commands/mark_worker_dead"), {"worker": worker})


@operation(atomic=False)
def claimable_work(domain: str) -> Steps[ClaimableWork]:
    """How much work could be claimed now, and for how long it has waited."""
    rows = yield Statement(
        sql.text("commands/claimable_work", domain=domain), {"domain": domain, "most": MOST_COUNTED}
    )
    return ClaimableWork(*rows[0])


def outcome(
    domain: str,
    held: Held,
    finding: Finding | None,
    rule: Rule,
    *,
    started: float | None,
    spread: float,
    in_chunk: bool = False,
) -> Settlement:
    """The settlement of a command that a dead worker held. Without a finding, the command did not run. `started`
    is an epoch second."""
    row, cancel = held
    if cancel is not None:
        return of_row(domain, row, Judgement(Verdict.CANCELED, cancel), started=started)
    if finding is None:
        return given_back(row.fence(domain), why="its worker ended")
    if finding.role is not Role.CULPRIT:
        is_suspect = finding.role is Role.SUSPECT
        failure = finding.failure
        return waived(domain, row, started=started, failure=failure, suspect=is_suspect, in_chunk=in_chunk)
    judgement = judge(
        finding.failure,
        charge=row.charge_after(finding.failure),
        policy=rule.policy,
        max_attempts=row.max_attempts,
        is_final=rule.on_timeout == "fail" and finding.failure.error_type == "ExecutionStuck",
        on_exhausted=RareOptions.read(row.options).on_exhausted,
        spread=spread,
    )
    return of_row(domain, row, judgement, started=started)
