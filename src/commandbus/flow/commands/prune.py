"""Delete finished commands by age or by count, and old archives, in small portions.

Each portion is one short transaction. The caller goes on until `is_done`, or stops between two portions.
Unfinished commands are never deleted, however old, nor are commands of an unfinished batch or process. Batches and
processes themselves are deleted when none of their commands is left.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import field
from datetime import datetime
from typing import Final, NamedTuple

from commandbus import sql
from commandbus.errors import InvalidCommandError
from commandbus.flow.commands.operate import OperatorAction
from commandbus.flow.limits.declare import note_action
from commandbus.flow.operation import Plan, Statement, Steps, operation
from commandbus.flow.setup.domains import list_domains
from commandbus.model.count import MOST_COUNTED, Count, added, capped
from commandbus.model.counting import counted
from commandbus.model.json_values import Json
from commandbus.model.names import queue_of, shown
from commandbus.model.page import MAX_ID
from commandbus.quick_dataclass import dataclass
from commandbus.settings import Settings

BITE = 1000
SUBJECT: Final = "retention"
LONGEST_PLACE: Final = 2000
PREVIEW_WALK: Final = 12_000
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
    go_on_from: str | None = None
    """Where to go on, if `portion` ended the prune; None: nothing is left to look at."""

    @property
    def text(self) -> str:
        """What was deleted, as a sentence."""
        return (
            f"deleted: {counted(self.commands, 'command')}, {counted(self.archived, 'archived message')}, "
            f"{counted(self.asides + sum(self.dropped.values()), 'thing')} put aside"
        )


class Place(NamedTuple):
    """How far a prune is: its stage, the newest id that `count` does not keep, and where the stage goes on."""

    stage: str
    through: int | None = None
    after: int = 0
    name: str = ""
    key: str = ""

    def next_stage(self) -> Place | None:
        """The beginning of the next stage; None after the last."""
        stages = list(_STAGES)
        index = stages.index(self.stage) + 1
        return Place(stages[index], self.through) if index < len(stages) else None

    def __str__(self) -> str:
        return json.dumps(self)


_Step = tuple[int, Place | None]


def prune_all(
    retention: Retention, *, portion: int | None = None, go_on_from: str | None = None
) -> Plan[PruneReport]:
    """Prune portion by portion until nothing is left to delete, or until about `portion` rows were looked at."""
    place: Place | None = Place(next(iter(_STAGES))) if go_on_from is None else _place(go_on_from)
    removed: dict[str, int] = {}
    dropped: dict[str, int] = {}
    bites = None if portion is None else -(-portion // BITE)
    while place is not None and bites != 0:
        stage, table = place.stage, place.name
        gone, place = yield from _STAGES[stage](retention, place)
        removed[stage] = removed.get(stage, 0) + gone
        if stage == "excess" and gone:
            kind = ASIDES[table or next(iter(ASIDES))]
            dropped[kind] = dropped.get(kind, 0) + gone
        if bites is not None and (gone or (place is not None and place.stage == stage)):
            bites -= 1  # the last look of a stage, which finds nothing, does not count
    return PruneReport(
        removed.get("commands", 0),
        removed.get("archives", 0),
        removed.get("asides", 0),
        removed.get("batches", 0),
        removed.get("processes", 0),
        dropped=dropped,
        go_on_from=None if place is None else str(place),
    )


def prune_for_operator(
    retention: Retention, what: OperatorAction, *, portion: int | None = None, go_on_from: str | None = None
) -> Plan[PruneReport]:
    """Prune for a person. The audit names the person before anything is deleted, and then what was deleted."""
    if go_on_from is None:
        yield note_prune("PRUNE", what, {"age_seconds": retention.age_seconds, "count": retention.count})
    report = yield from prune_all(retention, portion=portion, go_on_from=go_on_from)
    yield note_prune("PRUNED", what, {**_counts(report), "is_last": report.go_on_from is None})
    return report


def _counts(report: PruneReport) -> dict[str, int]:
    names = ("commands", "archived", "asides", "batches", "processes")
    return {name: getattr(report, name) for name in names} | {"dropped": sum(report.dropped.values())}


# --- the stages: each takes one bite, and returns how many rows it removed and where to go on --------------------


def _excess(retention: Retention, place: Place) -> Plan[_Step]:
    """The oldest rows of each kind of things set aside, where there are too many rows or bytes."""
    if retention.asides_count is None or retention.asides_bytes is None:
        return 0, place.next_stage()
    tables = list(ASIDES)
    table = place.name or tables[0]
    gone = yield prune_excess(table, retention.asides_count, retention.asides_bytes)
    rest = tables[tables.index(table) + 1 :]
    if gone:
        return gone, place._replace(name=table)
    return gone, place._replace(name=rest[0]) if rest else place.next_stage()


def _plans(retention: Retention, place: Place) -> Plan[_Step]:
    """Old plans. Previews that nobody started go as things set aside do, also if commands are kept."""
    gone = 0
    if not retention.is_off or retention.asides_count is not None:
        gone = yield prune_plans(retention)
    if gone:
        return gone, place
    return gone, None if retention.is_off else place.next_stage()


def _commands(retention: Retention, place: Place) -> Plan[_Step]:
    if place.through is None or retention.count is None:
        place = place._replace(through=(yield through_id(retention)))
    bite = yield prune(retention, through=place.through or 0, after_id=place.after)
    return bite.removed, place.next_stage() if bite.is_done else place._replace(after=bite.after_id)


def _keys(_retention: Retention, place: Place) -> Plan[_Step]:
    """Keys of commands (`unique`) that nobody needs any more, whatever their age."""
    last = yield prune_keys(place.name, place.key)
    return 0, place.next_stage() if last is None else place._replace(name=last[0], key=last[1])


def _processes(retention: Retention, place: Place) -> Plan[_Step]:
    return (yield from _groups("processes/prune_processes", retention, place))


def _batches(retention: Retention, place: Place) -> Plan[_Step]:
    return (yield from _groups("batches/prune_batches", retention, place))


def _groups(name: str, retention: Retention, place: Place) -> Plan[_Step]:
    bite = yield prune_groups(name, retention, after_id=place.after)
    return bite.removed, place.next_stage() if bite.is_done else place._replace(after=bite.after_id)


def _archives(retention: Retention, place: Place) -> Plan[_Step]:
    """The archive of one domain after the other."""
    if retention.age_seconds is None:
        return 0, None
    names = sorted(domain.name for domain in (yield list_domains()))
    rest = [name for name in names if name >= place.name]
    if not rest:
        return 0, place.next_stage()
    gone = yield prune_archive(rest[0], retention.age_seconds)
    if gone:
        return gone, place._replace(name=rest[0])
    return gone, place._replace(name=rest[1]) if len(rest) > 1 else place.next_stage()


def _asides(retention: Retention, place: Place) -> Plan[_Step]:
    if retention.age_seconds is None:
        return 0, None
    gone = yield prune_set_aside(retention.age_seconds)
    return gone, place if gone else None


_STAGES: Final[dict[str, Callable[[Retention, Place], Plan[_Step]]]] = {
    "excess": _excess,
    "plans": _plans,
    "commands": _commands,
    "keys": _keys,
    "processes": _processes,
    "batches": _batches,
    "archives": _archives,
    "asides": _asides,
}


def _place(given: str) -> Place:
    found = _read(given) if isinstance(given, str) and len(given) <= LONGEST_PLACE else None
    if not isinstance(found, list) or len(found) != len(Place._fields):
        raise _no_place(given)
    stage, through, after, name, key = found
    is_good = (
        stage in list(_STAGES)
        and (through is None or _is_id(through))
        and _is_id(after)
        and isinstance(name, str)
        and isinstance(key, str)
        and not (stage == "excess" and name not in ("", *ASIDES))
        and "\0" not in name + key
    )
    if not is_good:
        raise _no_place(given)
    return Place(stage, through, after, name, key)


def _read(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _no_place(given: object) -> InvalidCommandError:
    return InvalidCommandError(f"go_on_from {shown(given)} is not of a prune: give report.go_on_from, or None")


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_ID


# --- preview -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PrunePreview:
    """What a prune would delete now. Nothing is deleted, and no row is locked.

    Counts stop at 10,000; `capped` names those that did. `commands` are counted among the oldest 12,000 commands:
    if `is_partial`, newer ones may follow. `batches` and `processes` had finished by then; each of them goes when
    none of its commands is left.
    `before`: what finished earlier is deleted; None: only `count` decides. A `count` over 12,000 is not counted,
    nor one beyond the newest 12,000 commands because many have not finished: `about` is then how many are beyond
    it by the server's statistics (None: the server has none).
    """

    before: datetime | None
    keeps: int | None
    commands: int
    by_status: Mapping[str, int]
    oldest: datetime | None
    newest: datetime | None
    is_partial: bool
    archived: int
    batches: int
    processes: int
    asides: Mapping[str, int]
    capped: list[str]
    about: int | None = None


@operation(atomic=True)
def preview_prune(retention: Retention) -> Steps[PrunePreview]:
    """What a prune by age or by count would delete now."""
    about = None
    through = yield from _through_id_nearby(retention.count)
    if through is None and retention.count is not None:
        about = yield from _beyond(retention.count)
    rows = yield Statement(
        sql.text("commands/preview_prune"),
        {"age": retention.age_seconds, "through_id": through or 0, "walk": PREVIEW_WALK, "most": MOST_COUNTED + 1},
    )
    before, completed, failed, canceled, oldest, newest, seen, young, batches, processes, *asides = rows[0]
    archived = []
    if retention.age_seconds is not None:
        for domain in (yield from list_domains().steps):
            queue = queue_of(domain.name)
            counted_rows = yield Statement(
                sql.text("commands/count_archived", queue=queue), {"before": before, "most": MOST_COUNTED + 1}
            )
            archived.append(capped(counted_rows[0][0]))
    kinds: dict[str, Count] = dict(zip(_PREVIEWED_ASIDES, map(capped, asides), strict=True))
    totals = {
        "commands": capped(completed + failed + canceled),
        "archived": added(archived),
        "batches": capped(batches),
        "processes": capped(processes),
    }
    return PrunePreview(
        before=before,
        keeps=retention.count,
        by_status={"COMPLETED": completed, "FAILED": failed, "CANCELED": canceled},
        oldest=oldest,
        newest=newest,
        is_partial=seen >= PREVIEW_WALK and not young,
        asides=kinds,
        about=about,
        capped=[name for name, count in (totals | kinds).items() if count.is_capped],
        **totals,
    )


def _through_id_nearby(count: int | None) -> Steps[int | None]:
    """`through_id` by a look at the newest commands only: a million that have not finished may come first. None if
    that does not say it."""
    if count is None:
        return 0
    if count > PREVIEW_WALK:
        return None
    rows = yield Statement(
        b"WITH newest AS MATERIALIZED ("
        b"SELECT id, status FROM commandbus.command ORDER BY id DESC LIMIT %(walk)s) "
        b"SELECT (SELECT id FROM newest WHERE status OPERATOR(pg_catalog.=) ANY ('{COMPLETED,FAILED,CANCELED}') "
        b"ORDER BY id DESC OFFSET %(count)s LIMIT 1), (SELECT pg_catalog.count(*) FROM newest)",
        {"walk": PREVIEW_WALK + 1, "count": count},
    )
    found, seen = rows[0]
    if found is None and seen <= PREVIEW_WALK:
        return 0
    return None if found is None else int(found)


def _beyond(count: int) -> Steps[int | None]:
    """About how many commands are beyond the newest `count`, by the server's statistics."""
    rows = yield Statement(
        b"SELECT reltuples::bigint FROM pg_catalog.pg_class "
        b"WHERE oid OPERATOR(pg_catalog.=) 'commandbus.command'::pg_catalog.regclass::oid"
    )
    return None if rows[0][0] < 0 else max(0, rows[0][0] - count)


_PREVIEWED_ASIDES: Final = (*ASIDES.values(), "recorded actions", "bad answers of limits")


@operation(atomic=False)
def note_prune(action: str, what: OperatorAction, details: Mapping[str, Json]) -> Steps[None]:
    """Record who prunes, and what was deleted."""
    yield note_action(SUBJECT, action, what, details=dict(details))


@operation(atomic=False)
def through_id(retention: Retention) -> Steps[int]:
    """The newest id that `count` does not keep (0: none)."""
    if retention.count is None:
        return 0  # and no statement
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
