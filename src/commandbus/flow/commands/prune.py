"""Delete finished commands by age or by count, and old archives, in small portions.

Each portion is one short transaction. The caller goes on until `is_done`, or stops between two portions.
Unfinished commands are never deleted, however old, nor are commands of an unfinished batch or process. Batches and
processes themselves are deleted when none of their commands is left.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from commandbus import sql
from commandbus.flow.operation import Plan, Statement, Steps, operation
from commandbus.flow.setup.domains import list_domains
from commandbus.model.names import queue_of
from commandbus.quick_dataclass import dataclass
from commandbus.settings import Settings

BITE = 1000
ASIDES = {
    "rejected_message": "rejected messages",
    "undelivered_reply": "undelivered replies",
    "stray_reply": "stray replies",
}
"""Tables that programs without commandbus can fill, and the names of their contents for people."""


@dataclass(frozen=True, slots=True)
class Retention:
    """What is kept: commands that finished within `age_seconds`, and the newest `count` in all. Of rejected
    messages, undelivered replies and stray replies, the newest `asides_count` each, and at most `asides_bytes`."""

    age_seconds: float | None = None
    count: int | None = None
    asides_count: int | None = None
    asides_bytes: int | None = None

    @classmethod
    def of(cls, settings: Settings) -> Retention:
        """What the settings say."""
        return cls(
            settings.retention_age, settings.retention_count,
            settings.retention_asides_count, settings.retention_asides_bytes,
        )  # fmt: skip

    @property
    def is_off(self) -> bool:
        """Is everything kept?"""
        return self.age_seconds is None and self.count is None


@dataclass(frozen=True, slots=True)
class PruneBite:
    """What one bite did, and where the next one begins."""

    removed: int
    after_id: int
    is_done: bool


@dataclass(frozen=True, slots=True)
class PruneReport:
    """How much was deleted: commands, archived messages, things set aside (rejected messages …), and batches and
    processes whose commands were all gone."""

    commands: int = 0
    archived: int = 0
    asides: int = 0
    batches: int = 0
    processes: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Things put aside that were dropped because there were too many, by their kind."""


def prune_all(retention: Retention) -> Plan[PruneReport]:
    """Prune portion by portion until nothing is left to delete."""
    dropped = yield from _prune_excess(retention)
    yield from _prune_plans(retention)
    if retention.is_off:
        return PruneReport(dropped=dropped)
    through = yield through_id(retention)
    bite = PruneBite(0, 0, False)
    commands = archived = asides = 0
    while not bite.is_done:
        bite = yield prune(retention, through=through, after_id=bite.after_id)
        commands += bite.removed
    yield from _prune_keys()
    processes = yield from _prune_walk("processes/prune_processes", retention)
    batches = yield from _prune_walk("batches/prune_batches", retention)
    if retention.age_seconds is not None:
        for domain in (yield list_domains()):
            while gone := (yield prune_archive(domain.name, retention.age_seconds)):
                archived += gone
        while gone := (yield prune_set_aside(retention.age_seconds)):
            asides += gone
    return PruneReport(commands, archived, asides, batches, processes, dropped)


def _prune_excess(retention: Retention) -> Plan[dict[str, int]]:
    """Delete the oldest rows of each kind of things set aside, where there are too many rows or bytes."""
    dropped: dict[str, int] = {}
    if retention.asides_count is None or retention.asides_bytes is None:
        return dropped
    for table, kind in ASIDES.items():
        while gone := (yield prune_excess(table, retention.asides_count, retention.asides_bytes)):
            dropped[kind] = dropped.get(kind, 0) + gone
    return dropped


def _prune_plans(retention: Retention) -> Plan[None]:
    """Delete old plans. Previews that nobody started go as things set aside do, also if commands are kept."""
    if retention.is_off and retention.asides_count is None:
        return
    while (yield prune_plans(retention)):
        pass


def _prune_keys() -> Plan[None]:
    """Over all keys of commands (`unique`): those that nobody needs any more go, whatever their age."""
    last: tuple[str, str] | None = ("", "")
    while last is not None:
        last = yield prune_keys(*last)


def _prune_walk(name: str, retention: Retention) -> Plan[int]:
    """Prune all batches, or all processes. Returns how many were deleted."""
    removed, bite = 0, PruneBite(0, 0, False)
    while not bite.is_done:
        bite = yield prune_groups(name, retention, after_id=bite.after_id)
        removed += bite.removed
    return removed


@operation(atomic=False)
def through_id(retention: Retention) -> Steps[int]:
    """The newest id that `count` does not keep (0: none)."""
    if retention.count is None:
        return 0
    rows = yield Statement(
        b"SELECT id FROM commandbus.command "
        b"WHERE status OPERATOR(pg_catalog.=) ANY ('{COMPLETED,FAILED,CANCELED}') "
        b"ORDER BY id DESC OFFSET %(count)s LIMIT 1",
        {"count": retention.count},
    )
    return rows[0][0] if rows else 0


@operation(atomic=False)
def prune(retention: Retention, *, through: int, after_id: int = 0, bite: int = BITE) -> Steps[PruneBite]:
    """One bite of commands."""
    rows = yield Statement(
        sql.text("commands/prune"),
        {"after_id": after_id, "bite": bite, "through_id": through, "age": retention.age_seconds},
    )
    removed, last_id, seen, all_young = rows[0]
    return PruneBite(removed, last_id or after_id, seen < bite or all_young)


@operation(atomic=False)
def prune_groups(name: str, retention: Retention, *, after_id: int = 0, bite: int = BITE) -> Steps[PruneBite]:
    """One bite of batches (`prune_batches`) or processes (`prune_processes`)."""
    rows = yield Statement(sql.text(name), {"after_id": after_id, "bite": bite, "age": retention.age_seconds})
    removed, seen, last_id = rows[0]
    return PruneBite(removed, last_id or after_id, seen < bite)


@operation(atomic=False)
def prune_keys(after_domain: str, after_key: str, *, bite: int = BITE) -> Steps[tuple[str, str] | None]:
    """One bite of the keys of commands. Returns where the next one begins; None: this was the last."""
    rows = yield Statement(
        sql.text("commands/prune_keys"), {"domain": after_domain, "key": after_key, "bite": bite}
    )
    _, seen, last_domain, last_key = rows[0]
    return None if seen < bite else (last_domain, last_key)


@operation(atomic=False)
def prune_plans(retention: Retention, *, bite: int = BITE) -> Steps[int]:
    """One bite of old plans. Previews that nobody started within a day go even if everything else is kept."""
    rows = yield Statement(sql.text("plans/prune_plans"), {"age": retention.age_seconds, "bite": bite})
    count: int = rows[0][0]
    return count


@operation(atomic=False)
def prune_archive(domain: str, age_seconds: float, *, bite: int = BITE) -> Steps[int]:
    """One bite of a domain's PGMQ archive (we archive nothing; other clients may)."""
    rows = yield Statement(
        sql.text("commands/prune_archive", queue=queue_of(domain)), {"age": age_seconds, "bite": bite}
    )
    return len(rows)


@operation(atomic=False)
def prune_excess(table: str, count: int, size: int, *, bite: int = BITE) -> Steps[int]:
    """One bite of the oldest rows of a table of things set aside, if it has too many."""
    rows = yield Statement(
        sql.text("commands/prune_excess", table=table), {"count": count, "bytes": size, "bite": bite}
    )
    return len(rows)


@operation(atomic=False)
def prune_set_aside(age_seconds: float, *, bite: int = BITE) -> Steps[int]:
    """One bite of rejected messages, undelivered replies and workers that ended long ago."""
    rows = yield Statement(sql.text("commands/prune_set_aside"), {"age": age_seconds, "bite": bite})
    count: int = rows[0][0]
    return count
