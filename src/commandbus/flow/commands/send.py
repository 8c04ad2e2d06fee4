"""Send a command: its row and its queue message in one statement, in the caller's transaction if one is lent.

`command_id` is an idempotency key, and the unique constraint decides. Of several concurrent senders one inserts
the row; the others find it and compare. With the same content they get the existing command, with other content
DuplicateCommandError. When it runs (`delay`, `at`, `expires`, `priority`) is not content: a second send never
changes it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from datetime import datetime
from operator import attrgetter, is_
from typing import Any, NamedTuple, TypeAlias, cast
from uuid import UUID

from psycopg import errors as pg

from commandbus import sql
from commandbus.errors import (
    CommandBusError,
    DuplicateCommandError,
    InvalidCommandError,
    UnknownDomainError,
)
from commandbus.flow.operation import Operation, Row, Statement, Steps, no_schema, operation
from commandbus.model import envelope, names, payload, priority, unique_key
from commandbus.model.command import NewCommand, SentCommand, new_command_id
from commandbus.model.command_class import addressed, class_address
from commandbus.model.durations import Duration, parse_seconds
from commandbus.model.handle import given_by
from commandbus.model.json_values import PayloadObject
from commandbus.model.key_limit import check_key

TRACE_HEADERS = frozenset({"traceparent", "tracestate", "baggage"})  # of W3C Trace Context and Baggage
_FIELDS = frozenset(field.name for field in fields(NewCommand))
_OPTIONS = _FIELDS - {"command_type", "data"}
_options_of = attrgetter(*_OPTIONS)
_NO_OPTIONS = (None,) * len(_OPTIONS)


# Left out if we generated the ids: the speculative insertion costs a third of a bulk send.
# It names no columns, because that needs the right to read them, and a producer may not read the ids of others.
ON_CONFLICT = "ON CONFLICT DO NOTHING"
CALLERS_IDS = {
    "conflict": ON_CONFLICT,
    "by_id": "ORDER BY i",
    "by_turn": "ORDER BY msg_id",
    "answer": "i, id, (SELECT pg_catalog.count(*) FROM woken) FROM sent JOIN input USING (msg_id)",
}
OUR_IDS = {
    "conflict": "",
    "by_id": "",
    "by_turn": "",
    # Without the join, which costs a twentieth of the send, and in one row: reading many takes longer.
    "answer": "pg_catalog.array_agg(id ORDER BY msg_id), (SELECT pg_catalog.count(*) FROM woken) FROM sent",
}


Sendable: TypeAlias = NewCommand | Mapping[str, object] | PayloadObject
"""What `send_many` and batches take."""


MOST_RULED = 10_000
_ruled: set[tuple[str, str]] = set()
"""Command types (domain, type) that had a rule when this program last sent one: the next send asks for it at once.
It is a hint, and never wrong in its effect: `commandbus.send_keyed` applies the rule that there is, or none."""


def may_have_rule(domain: str, command_type: str) -> bool:
    """Had this type a rule when this program last sent a command of it?"""
    return bool(_ruled) and (domain, command_type) in _ruled


def note_rules(domain: str, sent: set[str], ruled: set[str]) -> None:
    """Of the types that were sent, these have a rule."""
    _ruled.difference_update((domain, command_type) for command_type in sent - ruled)
    if len(_ruled) < MOST_RULED:
        _ruled.update((domain, command_type) for command_type in ruled)


class Outgoing(NamedTuple):
    """A checked command, its JSON dumped: what is compared and stored."""

    command_id: str
    command_type: str
    data: str
    headers: str | None
    correlation_id: str | None
    reply_to: str | None
    max_attempts: int | None
    delay_seconds: float
    at: str | None
    timeout_seconds: float | None
    expires: float | str | None  # seconds, or a moment as ISO text
    on_exhausted: str | None
    key_limit: str | None
    key: str | None
    priority: int | None  # 1 is high, 0 normal, -1 low; None: its handler decides
    has_own_id: bool  # the caller chose the command_id, so it may exist already


_NOTHING_MORE: list[Any] = [None, None, None, None, 0.0, None, None, None, None, None, None, None]
_NOTHING_BUT_DATA: tuple[Any, ...] = (*_NOTHING_MORE, False)


def prepare(new: NewCommand, *, max_bytes: int = payload.DEFAULT_MAX_BYTES) -> Outgoing:
    """Check a command and dump its JSON before anything is sent. InvalidCommandError names what is wrong."""
    if all(map(is_, _options_of(new), _NO_OPTIONS)):  # the usual command
        names.check_type(new.command_type)
        data = payload.dump(new.data, what="data", max_bytes=max_bytes)
        return Outgoing(new_command_id(), new.command_type, data, *_NOTHING_BUT_DATA)
    if isinstance(new.command_id, UUID) or isinstance(new.correlation_id, UUID):
        new = _with_text_ids(new)
    envelope.check(new)
    unique_key.refuse(new)
    check_key(new)
    return Outgoing(
        command_id=new_command_id() if new.command_id is None else new.command_id,
        command_type=new.command_type,
        data=payload.dump(new.data, what="data", max_bytes=max_bytes),
        headers=None if new.headers is None else payload.dump(new.headers, what="headers", max_bytes=max_bytes),
        correlation_id=new.correlation_id,
        reply_to=new.reply_to,
        max_attempts=new.max_attempts,
        delay_seconds=_seconds_of(new.delay, at=new.at),
        at=None if new.at is None else envelope.instant(new.at, name="at"),
        timeout_seconds=envelope.timeout_seconds(new.timeout),
        expires=_expiry_of(new),
        on_exhausted=new.on_exhausted,
        key_limit=new.key_limit,
        key=new.key,
        priority=priority.to_number(new.priority),
        has_own_id=new.command_id is not None,
    )


def prepare_all(
    commands: Iterable[Sendable],
    *,
    max_bytes: int,
    of: str = "send_many",
    domain: str | None = None,
    plain: Callable[[NewCommand], NewCommand] | None = None,
) -> Iterator[Outgoing]:
    """Check commands one by one as they come. The error names the number of the bad one, counted from 1.

    `domain`: where they are sent to, if objects of marked classes are among them. `plain` makes JSON of the
    application's own types.
    """
    for number, item in enumerate(commands, 1):
        try:
            new = to_new_command(item, domain)
            prepared = prepare(new if plain is None else plain(new), max_bytes=max_bytes)
        except InvalidCommandError as error:
            raise InvalidCommandError(f"command {number} of {of}: {error}") from None
        yield prepared


@operation(atomic=False)
def send(domain: str, outgoing: Outgoing, bus: object = None) -> Steps[SentCommand]:
    """Send one command. Returns the existing one if it was sent before with the same content. `bus`: whose receipt
    it is."""
    if outgoing.key is not None or may_have_rule(domain, outgoing.command_type):
        return (yield from _send_by_rule(domain, [outgoing], bus))[0]
    rows = yield from _explained(domain, _statement(domain, outgoing))
    if rows:
        return given_by(bus, SentCommand(domain, outgoing.command_id, int(rows[0][0])))
    if outgoing.has_own_id and (existing := (yield from _existing(domain, [outgoing]))):
        return given_by(bus, existing[outgoing.command_id])
    return (yield from _send_by_rule(domain, [outgoing], bus))[0]


def send_chunk(domain: str, outgoing: Sequence[Outgoing], bus: object = None) -> Operation[list[SentCommand]]:
    """Send many commands, all or none. `bus`: whose receipts they are.

    If we generated all ids, one statement is all, and needs no transaction around it. It is made at once, so that
    the thread which sends the chunk before it does not wait for that.
    """
    has_rule = any(
        may_have_rule(domain, command_type) for command_type in {item.command_type for item in outgoing}
    )
    if has_rule or any(item.key is not None for item in outgoing):
        return Operation(_send_by_rule(domain, outgoing, bus), atomic=True)
    if any(item.has_own_id for item in outgoing):
        return Operation(_send_callers(domain, outgoing, bus), atomic=True)
    return Operation(_send_ours(domain, outgoing, _many(domain, outgoing), bus), atomic=False)


def _send_ours(
    domain: str, outgoing: Sequence[Outgoing], statement: Statement, bus: object
) -> Steps[list[SentCommand]]:
    """Send commands with ids that we generated: no two are the same, and none exists."""
    [[ids, _]] = yield from _explained(domain, statement)
    if ids is None:
        return (yield from _send_by_rule(domain, outgoing, bus))
    sent = [_receipt(domain, item[0], id_) for item, id_ in zip(outgoing, ids, strict=True)]
    for receipt in sent:
        receipt._bus = bus
    return sent


def _send_callers(domain: str, outgoing: Sequence[Outgoing], bus: object) -> Steps[list[SentCommand]]:
    """Send commands of which some may exist, because the caller chose their ids."""
    unique = once_each(domain, outgoing)
    rows = yield from _explained(domain, _many_as_json(domain, unique.values(), CALLERS_IDS))
    if not rows:
        return (yield from _send_by_rule(domain, outgoing, bus))
    sent = {command_id: _receipt(domain, command_id, id_) for command_id, id_, _ in rows}
    if len(sent) < len(unique):
        missing = [item for item in unique.values() if item.command_id not in sent]
        sent |= yield from find_existing(domain, missing)
    for receipt in sent.values():
        receipt._bus = bus
    return [sent[item.command_id] for item in outgoing]


def _explained(domain: str, statement: Statement) -> Steps[list[Row]]:
    """The rows of a statement that sends, or an error that says what is missing or wrong."""
    try:
        return (yield statement)
    except (pg.UndefinedTable, pg.InvalidSchemaName) as error:
        raise explain_missing(domain, error) from None
    except pg.StatementTooComplex:
        raise InvalidCommandError(
            "the data is nested too deeply for the server to read (max_stack_depth)"
        ) from None


def _receipt(domain: str, command_id: str, id_: int) -> SentCommand:
    """The receipt of a new command: in half the time that its constructor takes."""
    return tuple.__new__(SentCommand, (domain, command_id, id_, True, False))


def to_new_command(item: Sendable, domain: str | None = None) -> NewCommand:
    """A NewCommand from what a caller of send_many wrote."""
    if isinstance(item, NewCommand):
        return item
    if not isinstance(item, Mapping):
        return _of_object(item, domain)
    if not item.keys() <= _FIELDS:
        unknown = sorted(str(key) for key in item if key not in _FIELDS)
        raise InvalidCommandError(
            f"unknown field {unknown[0]!r} of a command; known are {', '.join(sorted(_FIELDS))}"
        )
    if "command_type" not in item:
        raise InvalidCommandError("it has no command_type")
    return NewCommand(**cast(Any, item))  # its values are checked when it is prepared


def _of_object(item: object, domain: str | None) -> NewCommand:
    """A command from an object whose class is marked with @command."""
    if class_address(type(item)) is None and not hasattr(item, "__dict__") and not hasattr(item, "__slots__"):
        raise InvalidCommandError(f"{names.shown(item)} is not a command; give NewCommand or dicts")
    own, command_type, data = addressed(item)
    if domain is not None and own != domain:
        raise InvalidCommandError(
            f"{type(item).__name__} is a command of domain {own!r}, and these are sent to {domain!r}"
        )
    return NewCommand(command_type, data)


def explain_missing(domain: str, error: Exception) -> CommandBusError:
    """The error for an undefined table or schema: is the domain missing, or was commandbus never migrated?"""
    if f"q_{names.queue_of(domain)}" in str(error):
        return UnknownDomainError(domain)
    return no_schema()


def _statement(domain: str, outgoing: Outgoing) -> Statement:
    command_id, command_type, data, *rest, has_own_id = outgoing
    conflict = ON_CONFLICT if has_own_id else ""
    if rest == _NOTHING_MORE:
        statement = sql.text("commands/send_plain", domain=domain, conflict=conflict)
        return Statement(statement, (command_id, command_type, data, command_type), only_inserts=True, quick=True)
    return Statement(
        sql.text("commands/send", domain=domain, conflict=conflict),
        {
            "domain": domain,
            "command_id": command_id,
            "command_type": command_type,
            "data": data,
            "headers": outgoing.headers,
            "correlation_id": outgoing.correlation_id,
            "reply_to": outgoing.reply_to,
            "max_attempts": outgoing.max_attempts,
            "delay": outgoing.delay_seconds,
            "at": outgoing.at,
            "timeout": outgoing.timeout_seconds,
            "on_exhausted": outgoing.on_exhausted,
            "priority": outgoing.priority,
            **expiry_params(outgoing),
        },
        only_inserts=True,
    )


def _many_as_json(domain: str, outgoing: Collection[Outgoing], parts: Mapping[str, str]) -> Statement:
    text = sql.text("commands/send_many", domain=domain, **parts)
    kinds = _array({item.command_type for item in outgoing})
    return Statement(text, {"domain": domain, "rows": json_rows(outgoing), "kinds": kinds}, only_inserts=True)


def _many(domain: str, outgoing: Sequence[Outgoing]) -> Statement:
    """What sends commands with ids that we generated."""
    if not outgoing or any(item[3:] != _NOTHING_BUT_DATA for item in outgoing):
        return _many_as_json(domain, outgoing, OUR_IDS)
    quoted = {item.command_type: "" for item in outgoing}
    for command_type in quoted:
        quoted[command_type] = _quoted(command_type)
    return Statement(
        sql.text("commands/send_many_plain", domain=domain),
        {
            "domain": domain,
            "ids": "{" + ",".join([item[0] for item in outgoing]) + "}",
            "types": "{" + ",".join([quoted[item[1]] for item in outgoing]) + "}",
            "kinds": "{" + ",".join(quoted.values()) + "}",
            "data": "{" + ",".join([_quoted(item[2]) for item in outgoing]) + "}",
        },
        only_inserts=True,
    )


def _array(texts: Iterable[str]) -> str:
    """PostgreSQL's text of an array. (psycopg takes three times as long to convert a list.)"""
    return "{" + ",".join([_quoted(text) for text in texts]) + "}"


def _quoted(text: str) -> str:
    """An element of an array."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def expiry_params(outgoing: Outgoing) -> dict[str, float | str | None]:
    """When a command expires: after so many seconds, or at a moment."""
    expires = outgoing.expires
    is_moment = isinstance(expires, str)
    return {"expires_in": None if is_moment else expires, "expires_at": expires if is_moment else None}


def _send_by_rule(domain: str, outgoing: Sequence[Outgoing], bus: object) -> Steps[list[SentCommand]]:
    """Some have keys, or nothing was sent because a type has a rule: the server applies the rules."""
    from commandbus.flow.keys.send import send_keyed  # it needs us

    sent = yield from send_keyed(domain, outgoing).steps
    return [given_by(bus, receipt) for receipt in sent]


def find_existing(domain: str, wanted: Sequence[Outgoing]) -> Steps[dict[str, SentCommand]]:
    """Returns commands that were sent before, if their content is the same; else raises DuplicateCommandError."""
    existing = yield from _existing(domain, wanted)
    for item in wanted:
        if item.command_id not in existing:
            raise DuplicateCommandError(
                domain,
                item.command_id,
                "content that this transaction cannot see yet (retry the transaction)",
            )
    return existing


def _existing(domain: str, wanted: Sequence[Outgoing]) -> Steps[dict[str, SentCommand]]:
    rows = yield Statement(sql.text("commands/find_existing"), {"domain": domain, "rows": json_rows(wanted)})
    for command_id, _, difference in rows:
        if difference is not None:
            raise DuplicateCommandError(domain, command_id, difference)
    return {command_id: SentCommand(domain, command_id, id_, created=False) for command_id, id_, _ in rows}


def _difference(item: Outgoing, other: Outgoing) -> str | None:
    """Which field differs between two commands of one call. (Between two calls, the server compares.)"""
    pairs = {
        "command_type": (item.command_type, other.command_type),
        "data": (canonical(item.data), canonical(other.data)),
        "correlation_id": (item.correlation_id, other.correlation_id),
        "reply_to": (item.reply_to, other.reply_to),
        "max_attempts": (item.max_attempts, other.max_attempts),
        "timeout": (item.timeout_seconds, other.timeout_seconds),
        "on_exhausted": (item.on_exhausted, other.on_exhausted),
        "headers": (content_of_headers(item.headers), content_of_headers(other.headers)),
    }
    return next((name for name, (ours, theirs) in pairs.items() if ours != theirs), None)


def canonical(text: str | None) -> str:
    """JSON for comparison. The order of keys does not matter, but 1, 1.0 and true differ (in Python they are
    equal)."""
    return "null" if text is None else json.dumps(payload.loads(text), sort_keys=True)


def content_of_headers(text: str | None) -> str:
    """The headers for comparison, as `commandbus.content_of_headers` has them: without those that say where a send
    came from. A sender that tries again may do so in another span of its trace."""
    if text is None:
        return "null"
    found = {name: value for name, value in payload.loads(text).items() if name not in TRACE_HEADERS}
    return json.dumps(found, sort_keys=True) if found else "null"


def once_each(domain: str, outgoing: Iterable[Outgoing]) -> dict[str, Outgoing]:
    """Returns the commands of one call by their ids. The same id with other content is DuplicateCommandError."""
    unique: dict[str, Outgoing] = {}
    for item in outgoing:
        first = unique.setdefault(item.command_id, item)
        if first is not item and (difference := _difference(item, first)):
            raise DuplicateCommandError(domain, item.command_id, difference)
    return unique


def json_rows(outgoing: Iterable[Outgoing]) -> str:
    """One JSON array with the payloads as they were dumped: parsing and dumping them again would cost as much
    as the rest of the send."""
    quote = payload.quote
    parts = []
    for item in outgoing:
        row = f'{{"i":{quote(item.command_id)},"t":{quote(item.command_type)},"d":{item.data}'
        if item.correlation_id is not None:
            row += f',"c":{quote(item.correlation_id)}'
        if item.reply_to is not None:
            row += f',"r":{quote(item.reply_to)}'
        if item.headers is not None:
            row += f',"h":{item.headers}'
        if item.max_attempts is not None:
            row += f',"m":{item.max_attempts}'
        if item.timeout_seconds is not None:
            row += f',"o":{item.timeout_seconds!r}'
        if item.on_exhausted is not None:
            row += f',"f":"{item.on_exhausted}"'
        if item.key is not None:
            row += f',"k":{quote(item.key)}'
        if item.key_limit is not None:
            row += f',"l":{quote(item.key_limit)}'
        if item.priority is not None:
            row += f',"p":{item.priority}'
        if isinstance(item.expires, str):
            row += f',"z":"{item.expires}"'
        elif item.expires is not None:
            row += f',"e":{item.expires!r}'
        if item.at is not None:
            row += f',"a":{quote(item.at)}'
        elif item.delay_seconds:
            row += f',"s":{item.delay_seconds}'
        parts.append(row + "}")
    return "[" + ",".join(parts) + "]"


def _seconds_of(delay: Duration | None, *, at: object) -> float:
    if delay is None:
        return 0.0
    if at is not None:
        raise InvalidCommandError("give delay or at, not both")
    return parse_seconds(delay, name="delay", error=InvalidCommandError)


def _expiry_of(new: NewCommand) -> float | str | None:
    expires = envelope.expiry(new.expires)
    if isinstance(expires, float) and new.delay is not None and expires <= _seconds_of(new.delay, at=None):
        raise InvalidCommandError(
            f"expires ({names.shown(new.expires)}) must be longer than delay ({names.shown(new.delay)}): both "
            f"count from the sending, and the command would expire before it may run"
        )
    if isinstance(new.expires, datetime) and new.at is not None and new.expires <= new.at:
        raise InvalidCommandError(
            f"expires ({new.expires.isoformat()}) must be later than at ({new.at.isoformat()}): the command would "
            f"expire before it may run"
        )
    return expires


def _with_text_ids(new: NewCommand) -> NewCommand:
    values = {field.name: getattr(new, field.name) for field in fields(new)}
    for name in ("command_id", "correlation_id"):
        if isinstance(values[name], UUID):
            values[name] = str(values[name])
    return NewCommand(**values)
