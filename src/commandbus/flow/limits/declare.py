"""Limits: what programs declare, what people have changed, and the row of each limit.

A program that declares a limit (a worker at its start, a bus on first use) creates its row, which all programs
share. A value that a person sets at run time overrides the declared one, also after a new deployment, until a
person unsets it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from commandbus import sql
from commandbus.errors import ConfigurationError, InvalidOperationError, UnknownLimitError
from commandbus.flow.commands.operate import OperatorAction
from commandbus.flow.operation import Row, Statement, Steps, operation
from commandbus.model import payload
from commandbus.model.limit import (
    KEY_OPTIONS,
    PERMIT_OPTIONS,
    Limit,
    PermitUsage,
    Rate,
    check_limit_name,
    is_limit_name,
)
from commandbus.model.limit_state import LimitState
from commandbus.quick_dataclass import dataclass
from commandbus.settings import Settings

ITSELF = "commandbus"
"""The operator of an action that no person did."""

CHANNEL = "commandbus_limits"
CHANGED = "limit "
CLOSED = "closed "
WAKE = "wake "  # a role without rights on queues asks other programs to wake the next in line
TOKEN = "token "  # noqa: S105 - the token of a permit, not a secret


@dataclass(frozen=True, slots=True)
class LimitRow:
    """A limit, and its state at `now` (the database's clock, in epoch seconds)."""

    limit: Limit
    environment: str
    store: str
    limit_state: LimitState
    now: float
    tat: float
    usage: PermitUsage
    granted: int
    rate_limited: int
    waits: int
    waited_seconds: float
    declared: Mapping[str, Any] | None
    override: Mapping[str, Any] | None
    changed_at: datetime
    is_awaited: bool
    good_at: float | None = None  # when a call last succeeded
    # For how long no call has succeeded although somebody waited and permits were being given.
    stalled_seconds: float | None = None

    def waited_in_vain(self, seconds: float | None) -> float:
        """How many of these seconds of waiting count against `max_wait`: only those in which no call succeeded."""
        return min(seconds or 0.0, self.stalled_seconds or 0.0)

    @property
    def name(self) -> str:
        """Its name."""
        return self.limit.name

    @property
    def concurrency(self) -> int | None:
        """How many at once; None: any number."""
        return self.limit.concurrency

    @property
    def per_second(self) -> float | None:
        """Its rate; None: any."""
        return self.limit.per_second

    @property
    def burst(self) -> int:
        """How many calls may begin at the same moment."""
        return self.limit.burst

    @property
    def shared(self) -> bool:
        """May programs outside the fleet (stand-alone semaphores) hold permits of it, too?"""
        return self.limit.shared

    @property
    def lease(self) -> float:
        """How long a permit is kept for a silent holder."""
        return self.limit.lease_seconds

    @property
    def call_timeout(self) -> float | None:
        """How long a call may take; None: any time."""
        return self.limit.call_timeout_seconds


@dataclass(frozen=True, slots=True)
class LimitLocation:
    """The defaults of limits: this deployment's name, and its usual permit store."""

    environment: str
    store: str


def location_of(settings: Settings) -> LimitLocation:
    """The defaults of a program's limits."""
    return LimitLocation(settings.environment, "redis" if settings.redis_url else "postgres")


def read_rows(rows: Sequence[Row]) -> list[LimitRow]:
    """The rows of limits/rows.sql."""
    return [_read(row) for row in rows]


def select_limits(name: str | None, *, locking: bool = False) -> Statement:
    """The statement for `read_rows`; `locking` locks the row, for callers that are about to change it."""
    text = sql.text(
        "limits/rows", claimable=sql.part("limits/claimable"), locking="FOR NO KEY UPDATE OF l" if locking else ""
    )
    return Statement(text, {"name": name})


@operation(atomic=False)
def list_limits(name: str | None = None) -> Steps[list[LimitRow]]:
    """All limits, or one."""
    return read_rows((yield select_limits(name)))


@operation(atomic=False)
def is_awaited() -> Steps[bool]:
    """Does anybody wait for a limit, even for one that no longer exists?"""
    rows = yield Statement(
        b"SELECT EXISTS (SELECT FROM commandbus.parked WHERE limit_name IS NOT NULL AND woken_at IS NULL)"
    )
    return bool(rows[0][0])


@operation(atomic=False)
def get_limit(name: str) -> Steps[LimitRow]:
    """Returns one limit. UnknownLimitError names the known ones."""
    found = read_rows((yield select_limits(name))) if is_limit_name(name) else []
    if not found:
        raise (yield from unknown_limit(name))
    return found[0]


def unknown_limit(name: str) -> Steps[UnknownLimitError]:
    """The error for a limit that nobody has declared. It names the declared limits."""
    rows = yield Statement(b"SELECT name FROM commandbus.limits ORDER BY name")
    return UnknownLimitError(name, [known for (known,) in rows])


@operation(atomic=True)
def declare(limits: Sequence[Limit], location: LimitLocation) -> Steps[list[str]]:
    """Store what code and configuration declare. Values that a person has set still override it.

    The permit store and environment of a limit stay as they are, unless the declaration names others, or Redis has
    been configured since. They do not change while the limit is in use, because the new permit store would not
    count the held permits. Returns lines for the log: which declarations changed, and which limits did not move.
    """
    notes = []
    for limit in sorted(limits, key=lambda item: item.name):
        _refuse_key(limit.name, limit.to_json())
        yield _lock(limit.name)
        rows = yield Statement(
            b"SELECT declared, override, environment, store FROM commandbus.limits WHERE name = %(name)s "
            b"FOR UPDATE",
            {"name": limit.name},
        )
        declared, override, *permit = rows[0] if rows else (None, None)
        effective = Limit.from_json(limit.name, limit.to_json(), override)
        where = _location_of(effective, location, permit)
        if permit and where != tuple(permit) and not (yield from _is_idle(limit.name, permit[1])):
            notes.append(
                f"limit {limit.name} is in use, so it stays in {permit[1]} ({permit[0]}): start again when nobody "
                f"uses it"
            )
            where = (permit[0], permit[1])
        if rows and declared == limit.to_json() and where == tuple(permit):
            continue
        if declared is not None and declared != limit.to_json():
            notes.append(
                f"limit {limit.name} was declared differently before: {difference(declared, limit.to_json())}"
            )
            yield note_action(f"limit {limit.name}", "DECLARE", OperatorAction(ITSELF), details=limit.to_json())
        yield _store(effective, where, declared=limit.to_json(), override=override)
        yield tell(CHANGED + limit.name)
    return notes


def _location_of(limit: Limit, location: LimitLocation, permit: Sequence[str]) -> tuple[str, str]:
    """The permit store and environment of a limit: as declared; else Redis if it is configured; else as before."""
    if not permit:
        return limit.environment or location.environment, limit.store or location.store
    store = limit.store or ("redis" if "redis" in (location.store, permit[1]) else permit[1])
    return limit.environment or permit[0], store


def _is_idle(name: str, store: str) -> Steps[bool]:
    """Is the limit unused: does nobody hold a permit or wait for one?"""
    rows = yield Statement(sql.text("limits/idle"), {"name": name, "is_here": store == "postgres"})
    return bool(rows and rows[0][0])


def difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """What two declarations of a limit differ in, for people."""
    names = [name for name in PERMIT_OPTIONS if before.get(name) != after.get(name)]
    return ", ".join(f"{name} was {before.get(name)!r}, is {after.get(name)!r}" for name in names)


@operation(atomic=True)
def set_limit(
    name: str, options: Mapping[str, Any], location: LimitLocation, what: OperatorAction
) -> Steps[LimitRow]:
    """Change a limit for all workers at once, or create one that nobody has declared."""
    check_limit_name(name)
    _refuse_key(name, options)
    yield _lock(name)
    rows = yield Statement(
        b"SELECT declared, override, environment, store FROM commandbus.limits WHERE name = %(name)s FOR UPDATE",
        {"name": name},
    )
    declared, override, *where = rows[0] if rows else (None, None)
    if not options:
        raise ConfigurationError(f"limit {name!r}: nothing to set; there are {', '.join(PERMIT_OPTIONS)}")
    if rows and (fixed := {"store", "environment"} & options.keys()) and not (yield from _is_idle(name, where[1])):
        raise InvalidOperationError(
            f"{' and '.join(sorted(fixed))} of limit {name!r} cannot be changed while it is in use: permits that "
            f"are held would not be counted; try again when nobody uses it"
        )
    wanted = {**(override or {}), **options}
    effective = Limit.from_json(name, declared, wanted)
    if where:
        location = LimitLocation(*where)  # the operator need not know where it is kept
    yield _store(
        effective,
        (effective.environment or location.environment, effective.store or location.store),
        declared=declared,
        override=_in_json(effective, wanted),
    )
    yield note_action(f"limit {name}", "SET", what, details=_in_json(effective, options))
    yield tell(CHANGED + name)
    return read_rows((yield select_limits(name)))[0]


@operation(atomic=True)
def unset_limit(
    name: str, options: Sequence[str], location: LimitLocation, what: OperatorAction
) -> Steps[LimitRow | None]:
    """Go back to the declared values, for some options or, if none is named, for all. Returns None if nobody
    declares the limit: then it is deleted."""
    check_limit_name(name)
    for option in options:
        if option not in PERMIT_OPTIONS:
            raise ConfigurationError(
                f"limit {name!r}: there is no option {option!r:.80}; there are {', '.join(PERMIT_OPTIONS)}"
            )
    yield _lock(name)
    rows = yield Statement(
        b"SELECT declared, override, environment, store FROM commandbus.limits WHERE name = %(name)s FOR UPDATE",
        {"name": name},
    )
    if not rows:
        raise (yield from unknown_limit(name))
    declared, override, *where = rows[0]
    rest = {key: value for key, value in (override or {}).items() if options and key not in options}
    yield note_action(f"limit {name}", "UNSET", what, details=list(options) or None)
    if declared is None and not rest:
        used = yield Statement(
            b"SELECT 1 FROM commandbus.parked WHERE limit_name = %(name)s AND woken_at IS NULL LIMIT 1",
            {"name": name},
        )
        if used:
            raise InvalidOperationError(
                f"limit {name!r} is declared nowhere else, and commands wait for it: declare it, or cancel them"
            )
        yield Statement(b"DELETE FROM commandbus.limits WHERE name = %(name)s", {"name": name})
        yield tell(CHANGED + name)
        return None
    effective = Limit.from_json(name, declared, rest)
    location = LimitLocation(*where)
    kept = (effective.environment or location.environment, effective.store or location.store)
    yield _store(effective, kept, declared=declared, override=rest or None)
    yield tell(CHANGED + name)
    return read_rows((yield select_limits(name)))[0]


def note_action(subject: str, action: str, what: OperatorAction, *, details: object = None) -> Statement:
    """Record what was done to a limit or a breaker."""
    return Statement(
        b"INSERT INTO commandbus.control_action (subject, action, operator, reason, details) "
        b"VALUES (%(subject)s, %(action)s, %(operator)s, %(reason)s, %(details)s::json)",
        {
            "subject": subject,
            "action": action,
            "operator": what.operator,
            "reason": what.reason,
            "details": None if details is None else payload.dump(details, what="details"),
        },
    )


def tell(text: str) -> Statement:
    """Notify all limit clients when this transaction commits."""
    return Statement(b"SELECT pg_catalog.pg_notify(%(channel)s, %(text)s)", {"channel": CHANNEL, "text": text})


def _refuse_key(name: str, options: Iterable[str]) -> None:
    for option in options:
        if option in KEY_OPTIONS:
            raise ConfigurationError(
                f"limit {name!r}: {option} is for limits of handlers, handler(…, limits=[…]), not for permits; "
                f"`commandbus keys` changes such a limit at run time"
            )


def _store(
    limit: Limit, where: tuple[str, str], *, declared: Mapping[str, Any] | None, override: Mapping[str, Any] | None
) -> Statement:
    if limit.shared and where[1] != "redis":
        raise ConfigurationError(
            f"limit {limit.name!r} is shared with programs that have only Redis, and its permits are in "
            f"{where[1]}: set COMMANDBUS_REDIS_URL, or leave shared out"
        )
    return Statement(
        sql.text("limits/store"),
        {
            "name": limit.name,
            "environment": where[0],
            "store": where[1],
            "concurrency": limit.concurrency,
            "per_second": limit.per_second,
            "burst": limit.burst,
            "lease": limit.lease,
            "max_wait": limit.max_wait,
            "tries": limit.tries,
            "backoff": list(limit.backoff),
            "breaker_failures": limit.breaker_failures,
            "breaker_reset": limit.breaker_reset,
            "declared": None if declared is None else payload.dump(dict(declared), what="declared"),
            "override": None if not override else payload.dump(dict(override), what="override"),
        },
    )


def _lock(name: str) -> Statement:
    """Let one transaction at a time change this limit, even if the limit does not exist yet."""
    return Statement(
        b"SELECT pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtext('commandbus limit'), "
        b"pg_catalog.hashtext(%(name)s))",
        {"name": name},
    )


def _in_json(limit: Limit, names: Iterable[str]) -> dict[str, Any]:
    """Some options of a limit, as they are stored."""
    found = {}
    for name in names:
        value = getattr(limit, name)
        found[name] = str(value) if isinstance(value, Rate) else list(value) if isinstance(value, tuple) else value
    return found


def _read(row: Row) -> LimitRow:
    """A row of limits/rows.sql: the limit, 13 columns of its state, and values that are computed from them."""
    name, environment, store, *state_and_rest = row
    *moved, blamed, vain = state_and_rest[:13]
    now, tat, flow, holders, granted, rate_limited, waits, waited_seconds, *rest = state_and_rest[13:]
    declared, override, changed_at, is_awaited, good_at, stalled = rest
    limit_state = replace(LimitState(*moved), blamed=tuple(blamed), vain=vain)
    return LimitRow(
        limit=Limit.from_json(name, declared, override),
        environment=environment,
        store=store,
        limit_state=limit_state,
        now=now,
        tat=tat,
        usage=PermitUsage(holders, flow, "postgres"),
        granted=granted,
        rate_limited=rate_limited,
        waits=waits,
        waited_seconds=waited_seconds,
        declared=declared,
        override=override,
        changed_at=changed_at,
        is_awaited=is_awaited,
        good_at=good_at,
        stalled_seconds=stalled,
    )
