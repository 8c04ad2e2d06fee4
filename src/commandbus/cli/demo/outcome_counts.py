"""The demo's counts: what was sent, how it ended, and whether both agree.

A group is one kind of outcome. The commands are counted in the database, by the ids that the sends returned, and
no message of these commands may be left in the queue.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from commandbus.cli.demo.handlers import DOMAIN
from commandbus.flow.operation import Statement, Steps, operation
from commandbus.model.command import CommandStatus, NewCommand
from commandbus.model.names import queue_of
from commandbus.quick_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class OutcomeGroup:
    """Commands of one kind: `share` of every ten are of this kind, each makes `attempts`, and `fate` is their
    status at the end."""

    command_type: str
    story: str
    share: int
    attempts: int
    fate: CommandStatus
    failures: int = 0

    def data(self, number: int) -> dict[str, Any]:
        """The data of a command of this kind."""
        everything: dict[str, dict[str, Any]] = {
            "greet": {"name": f"guest {number}"},
            "call_flaky_service": {"failures": self.failures, "request": number},
            "import_file": {"file": f"report-{number}.xls"},
            "withdraw": {"amount": 10 * number},
            "hang": {},
        }
        return everything[self.command_type]


GROUPS = (
    OutcomeGroup("greet", "succeeds", 6, 1, CommandStatus.COMPLETED),
    OutcomeGroup("call_flaky_service", "fails twice first", 2, 3, CommandStatus.COMPLETED, failures=2),
    OutcomeGroup("import_file", "never can succeed", 1, 1, CommandStatus.IN_TROUBLESHOOTING_QUEUE),
    OutcomeGroup("withdraw", "a rule says no", 1, 1, CommandStatus.FAILED),
    OutcomeGroup("hang", "never returns", 0, 1, CommandStatus.IN_TROUBLESHOOTING_QUEUE),
)
HANGING = 2  # hanging commands, if ten or more are sent: each costs a second of grace and a new worker
_IN_TURN = [group for group in GROUPS for _ in range(group.share)]


def make_commands(count: int, correlation_id: str) -> Iterator[NewCommand]:
    """Make so many commands, with their kinds mixed."""
    hanging = {number * count // HANGING for number in range(HANGING)} if count >= len(_IN_TURN) else set()
    for number in range(count):
        group = GROUPS[-1] if number in hanging else _IN_TURN[number * 7 % len(_IN_TURN)]
        yield NewCommand(group.command_type, group.data(number), correlation_id=correlation_id)


@dataclass(frozen=True, slots=True)
class OutcomeLine:
    """The figures of one group; `attempts` is how many attempts were made."""

    command_type: str
    found: int = 0
    completed: int = 0
    failed: int = 0
    in_tsq: int = 0
    attempts: int = 0

    @property
    def open(self) -> int:
        """How many have not ended yet."""
        return self.found - self.completed - self.failed - self.in_tsq


@dataclass(frozen=True, slots=True)
class OutcomeCounts:
    """All groups' figures, and how many of their messages are still in the queue."""

    lines: Sequence[OutcomeLine]
    queued: int

    @property
    def done(self) -> int:
        """How many commands have ended."""
        return sum(line.found - line.open for line in self.lines)

    @property
    def open(self) -> int:
        """How many commands have not ended."""
        return sum(line.open for line in self.lines)

    def sum(self, name: str) -> int:
        """A figure of all groups together."""
        return sum(getattr(line, name) for line in self.lines)


@operation(atomic=True)
def count(ids: Sequence[int]) -> Steps[OutcomeCounts]:
    """Count what became of these commands."""
    rows = yield Statement(
        b"SELECT command_type, pg_catalog.count(*), "
        b"pg_catalog.count(*) FILTER (WHERE status OPERATOR(pg_catalog.=) 'COMPLETED'), "
        b"pg_catalog.count(*) FILTER (WHERE status OPERATOR(pg_catalog.=) 'FAILED'), "
        b"pg_catalog.count(*) FILTER (WHERE status OPERATOR(pg_catalog.=) 'IN_TROUBLESHOOTING_QUEUE'), "
        b"pg_catalog.sum(coalesce(attempt, attempt_base)) "
        b"FROM commandbus.command WHERE id = ANY (%(ids)s::bigint[]) GROUP BY 1",
        {"ids": list(ids)},
    )
    found = {row[0]: OutcomeLine(*row) for row in rows}
    waiting = (
        f"SELECT pg_catalog.count(*) FROM pgmq.q_{queue_of(DOMAIN)} "
        f"WHERE (message ->> 'command'::text)::bigint = ANY (%(ids)s)"
    )
    queued = yield Statement(waiting.encode(), {"ids": list(ids)})
    return OutcomeCounts(
        [found.get(group.command_type, OutcomeLine(group.command_type)) for group in GROUPS], queued[0][0]
    )


def discrepancies(counts: OutcomeCounts, sent: Sequence[NewCommand]) -> list[str]:
    """The differences between what was sent and what was found; empty if nothing was lost."""
    wrong = []
    for group, line in zip(GROUPS, counts.lines, strict=True):
        expected = sum(command.command_type == group.command_type for command in sent)
        arrived = {
            CommandStatus.COMPLETED: line.completed,
            CommandStatus.FAILED: line.failed,
            CommandStatus.IN_TROUBLESHOOTING_QUEUE: line.in_tsq,
        }[group.fate]
        if line.found != expected:
            wrong.append(f"{group.command_type}: sent {expected}, found {line.found}")
        if arrived != expected:
            wrong.append(f"{group.command_type}: {arrived} of {expected} ended as {group.fate}")
        if line.attempts < expected * group.attempts:
            wrong.append(f"{group.command_type}: {line.attempts} attempts, {expected * group.attempts} expected")
    if counts.queued:
        wrong.append(f"messages still in the queue: {counts.queued}")
    return wrong
