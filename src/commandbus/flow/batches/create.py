"""Create a batch of commands, all or none; add to an open batch; close it.

All members are sent in one transaction, chunk by chunk as the caller's iterable yields them. So a hundred thousand
members need no more memory than a thousand. In a lent transaction, a savepoint makes it all or none.

`batch_id` is an idempotency key, and the unique constraint decides. The second sender compares fingerprints: of
the definition and of every command's content, without generated ids and without the time at which it is to run.

Adding holds the batch row FOR KEY SHARE until its commit, and closing takes it FOR UPDATE. So the transaction that
closes the batch sees every member, and when a fold finds a batch closed, its total is final. That needs READ
COMMITTED, in which every statement sees what has been committed.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import psycopg
from psycopg import errors as pg

from commandbus import sql
from commandbus.errors import (
    BatchNotFoundError,
    DuplicateBatchError,
    DuplicateMemberError,
    InvalidCommandError,
    InvalidOperationError,
    UnknownDomainError,
)
from commandbus.flow.batches import membership
from commandbus.flow.batches.fold_and_complete import fold_now
from commandbus.flow.commands import send
from commandbus.flow.commands.operate import OperatorAction
from commandbus.flow.commands.send import Outgoing
from commandbus.flow.keys.send import explain_key
from commandbus.flow.operation import Statement, Steps, operation
from commandbus.model import names, payload
from commandbus.model.batch import COMPLETE_WHEN, CreatedBatch, completion_of, dump_json
from commandbus.model.command import NewCommand, new_command_id
from commandbus.model.priority import to_number
from commandbus.model.retry import OnExhausted, check_on_exhausted
from commandbus.quick_dataclass import dataclass

T = TypeVar("T")
CHUNK_ROWS = 1000
_NEW = {"column": "", "value": ""}
_RETRIES = {"column": ", retry_of", "value": ", %(retry_of)s"}  # only operators may write this column
CHUNK_CHARACTERS = 8 << 20


@dataclass(frozen=True, slots=True)
class Definition:
    """A checked batch, without its members; JSON is dumped."""

    domain: str
    batch_id: str
    has_own_id: bool  # the caller chose the batch_id, so it may exist already
    name: str | None = None
    custom_data: str | None = None
    on_complete: str | None = None
    is_open: bool = False
    holds: str = "commands"
    retry_of: int | None = None
    completes_early: bool = False
    on_exhausted: OnExhausted | None = None
    priority: int | None = None


def define(
    domain: str,
    *,
    batch_id: object = None,
    name: object = None,
    custom_data: object = None,
    on_complete: object = None,
    is_open: object = False,
    holds: str = "commands",
    retry_of: int | None = None,
    complete_when: object = "finished",
    on_exhausted: object = None,
    priority: object = None,
    max_bytes: int = payload.DEFAULT_MAX_BYTES,
) -> Definition:
    """Check a batch's definition before anything is sent. InvalidCommandError names what is wrong."""
    if not isinstance(is_open, bool):
        raise InvalidCommandError(f"is_open must be True or False, not {names.shown(is_open)}")
    if complete_when not in COMPLETE_WHEN:
        raise InvalidCommandError(
            f"complete_when must be one of {', '.join(COMPLETE_WHEN)}, not {names.shown(complete_when)}"
        )
    return Definition(
        names.check_domain(domain),
        new_command_id() if batch_id is None else names.to_new_id(batch_id, "batch_id"),
        batch_id is not None,
        None if name is None else names.check_id(name, "name"),
        dump_json(custom_data, "custom_data", max_bytes),
        dump_json(completion_of(on_complete), "on_complete", max_bytes),
        is_open,
        holds,
        retry_of,
        complete_when == "only_troubleshooting_left",
        None if on_exhausted is None else check_on_exhausted(on_exhausted, InvalidCommandError),
        to_number(priority, InvalidCommandError),
    )


def prepare_all(
    commands: Iterable[send.Sendable],
    *,
    max_bytes: int = payload.DEFAULT_MAX_BYTES,
    domain: str | None = None,
    plain: Callable[[NewCommand], NewCommand] | None = None,
) -> Iterator[Outgoing]:
    """Check commands one by one as they come. The error says which command is wrong."""
    return send.prepare_all(commands, max_bytes=max_bytes, of="the batch", domain=domain, plain=plain)


@operation(atomic=True, whole=True)
def create(definition: Definition, outgoing: Iterator[Outgoing]) -> Steps[CreatedBatch]:
    """Create a batch and send its commands, all or nothing. Returns the existing one if it is the same."""
    return (yield from _create(definition, outgoing))


@operation(atomic=True, whole=True)
def add(domain: str, batch_id: str, outgoing: Iterator[Outgoing]) -> Steps[int]:
    """Send commands as members of an open batch, all or nothing. Returns how many."""
    return (yield from _add(domain, batch_id, outgoing))


@operation(atomic=True)
def close(domain: str, batch_id: str, what: OperatorAction | None = None) -> Steps[bool]:
    """Close a batch, so that it can end; `what`: the operator who does that, if it is not a program that has sent
    all. Returns False if it was closed already."""
    found = yield from lock(domain, batch_id, "UPDATE")
    if found.is_open:
        found.check_isolation("close_batch")
        yield from _fold_if_told(
            b"SELECT commandbus.close_batch(%(domain)s, %(id)s, %(operator)s::text, %(reason)s::text)",
            found.id,
            {
                "domain": domain,
                "id": found.id,
                "operator": None if what is None else what.operator,
                "reason": None if what is None else what.reason,
            },
        )
    return found.is_open


# --- the parts that batches of commands and batches of processes share ------------------------------------------


@dataclass(frozen=True, slots=True)
class Locked:
    """A batch whose row is locked. `cancel` is JSON text."""

    domain: str
    batch_id: str
    id: int
    is_open: bool
    status: str
    is_finished: bool
    holds: str
    cancel: str | None
    sees_all: bool

    def refuse(self, verb: str, why: str | None = None) -> InvalidOperationError:
        """The error for an operation that the batch's state does not allow."""
        state = why or (f"it is {self.status}, and that is final" if self.is_finished else f"it is {self.status}")
        return InvalidOperationError(f"cannot {verb} batch {self.batch_id!r} of domain {self.domain!r}: {state}")

    def check_isolation(self, what: str) -> None:
        """Raise an error unless this transaction sees every member that was added: closing a batch needs that."""
        if not self.sees_all:
            raise InvalidOperationError(
                f"{what} needs a READ COMMITTED transaction, to see every member that was added to batch "
                f"{self.batch_id!r}; this one is REPEATABLE READ or SERIALIZABLE: use another transaction"
            )


def lock(domain: str, batch_id: str, locking: str) -> Steps[Locked]:
    """Lock a batch's row, or raise BatchNotFoundError."""
    names.check_domain(domain)
    batch_id = names.to_id(batch_id, "batch_id")
    rows = yield Statement(sql.text("batches/lock"), {"domain": domain, "batch_id": batch_id, "locking": locking})
    if not rows:
        raise BatchNotFoundError(domain, batch_id)
    return Locked(domain, batch_id, *rows[0])


def check_targets(definition: Definition) -> Steps[None]:
    """Check that the batch's domain exists, and the domain or queue of its `on_complete`."""
    wanted = None if definition.on_complete is None else payload.loads(definition.on_complete)
    queues = {names.queue_of(definition.domain): definition.domain}
    if wanted is not None:
        queues.setdefault(wanted.get("reply_to") or names.queue_of(wanted["domain"]), wanted.get("domain"))
    rows = yield Statement(
        b"SELECT queue FROM pg_catalog.unnest(%(queues)s::text[]) AS queue "
        b"WHERE pg_catalog.to_regclass('pgmq.q_' || queue) IS NOT NULL",
        {"queues": list(queues)},
    )
    missing = [queue for queue in queues if (queue,) not in rows]
    if missing:  # if there is no schema at all, this raises the right error
        yield Statement(b"SELECT FROM commandbus.batch LIMIT 0")
    for queue in missing:
        if queues[queue] is None:
            raise InvalidCommandError(
                f"on_complete: there is no queue {queue!r} for the reply; bus.create_queue({queue!r}) makes one"
            )
        raise UnknownDomainError(queues[queue])


def insert(definition: Definition) -> Steps[int | None]:
    """The new batch's id; None if the batch_id is taken."""
    rows = yield Statement(
        sql.text("batches/create", **(_RETRIES if definition.retry_of is not None else _NEW)),
        {
            "domain": definition.domain,
            "batch_id": definition.batch_id,
            "name": definition.name,
            "holds": definition.holds,
            "is_open": definition.is_open,
            "custom_data": definition.custom_data,
            "on_complete": definition.on_complete,
            "retry_of": definition.retry_of,
            "completes_early": definition.completes_early,
            "on_exhausted": definition.on_exhausted,
            "priority": definition.priority,
        },
    )
    return rows[0][0] if rows else None


def finish(definition: Definition, id_: int, *, total: int, fingerprint: str | None) -> Steps[CreatedBatch]:
    """Write down that all members of a new batch are sent. A closed and empty batch is complete at once."""
    yield from _fold_if_told(
        b"SELECT commandbus.fill_batch(%(id)s, %(total)s, %(fingerprint)s)",
        id_,
        {"id": id_, "total": total, "fingerprint": fingerprint},
    )
    return CreatedBatch(definition.domain, definition.batch_id, id_, total)


def existing(definition: Definition, fingerprint: str) -> Steps[CreatedBatch]:
    """Returns the batch that has this batch_id if its content is the same; otherwise raises."""
    rows = yield Statement(
        sql.text("batches/existing"),
        {"domain": definition.domain, "batch_id": definition.batch_id, "fingerprint": fingerprint},
    )
    if not rows or not rows[0][2]:
        raise DuplicateBatchError(definition.domain, definition.batch_id)
    return CreatedBatch(definition.domain, definition.batch_id, rows[0][0], rows[0][1], created=False)


def _fold_if_told(text: bytes, id_: int, params: Mapping[str, Any]) -> Steps[None]:
    """Note that a batch may be complete. If this role may fold, fold it now; otherwise a worker's sweep does."""
    rows = yield Statement(text, params)
    if rows[0][0]:
        yield from fold_now([id_])


def ask_to_fold(id_: int) -> Steps[None]:
    """Note that a batch may be complete, and fold it now."""
    yield from membership.count({id_: Counter()})


class Fingerprint:
    """A digest of a batch's definition and of what is in it, in order."""

    def __init__(self, definition: Definition) -> None:
        self._digest = hashlib.sha256()
        self.add(
            definition.holds, definition.name, definition.is_open, send.canonical(definition.custom_data),
            send.canonical(definition.on_complete), definition.completes_early, definition.on_exhausted,
        )  # fmt: skip

    def add(self, *content: object) -> None:
        """Add one value to the digest."""
        self._digest.update(json.dumps(content).encode())

    def of_each(self, outgoing: Iterable[Outgoing]) -> Iterator[Outgoing]:
        """Digest commands as they pass."""
        for item in outgoing:
            self.add(
                item.command_id if item.has_own_id else None, item.command_type, send.canonical(item.data),
                send.content_of_headers(item.headers), item.correlation_id, item.reply_to, item.max_attempts,
                item.timeout_seconds, item.on_exhausted,
            )  # fmt: skip
            yield item

    def text(self) -> str:
        """The digest."""
        return self._digest.hexdigest()


# --- commands ---------------------------------------------------------------------------------------------------


def _create(definition: Definition, outgoing: Iterator[Outgoing]) -> Steps[CreatedBatch]:
    yield from check_targets(definition)
    fingerprint = Fingerprint(definition) if definition.has_own_id else None
    if fingerprint is not None:
        outgoing = fingerprint.of_each(outgoing)
    id_ = yield from insert(definition)
    if id_ is None and fingerprint is not None:
        for _ in outgoing:
            pass
        return (yield from existing(definition, fingerprint.text()))
    if id_ is None:
        raise DuplicateBatchError(definition.domain, definition.batch_id)
    total = yield from _send_all(definition.domain, id_, outgoing, counts=False)
    return (
        yield from finish(
            definition, id_, total=total, fingerprint=None if fingerprint is None else fingerprint.text()
        )
    )


def _add(domain: str, batch_id: str, outgoing: Iterator[Outgoing]) -> Steps[int]:
    found = yield from lock(domain, batch_id, "KEY SHARE")
    if found.holds != "commands":
        raise found.refuse("add commands to", f"it holds {found.holds}")
    if not found.is_open:
        raise found.refuse("add to", None if found.is_finished else "it is closed")
    return (yield from _send_all(domain, found.id, outgoing, counts=True))


def _send_all(domain: str, batch: int, outgoing: Iterator[Outgoing], *, counts: bool) -> Steps[int]:
    """Send members. `counts`: add them to the total of the batch now."""
    total = 0
    for chunk in _chunks(outgoing):
        yield from _send(domain, batch, chunk, counts=counts)
        total += len(chunk)
    return total


def _send(domain: str, batch: int, chunk: list[Outgoing], *, counts: bool) -> Steps[None]:
    try:
        rows = yield Statement(
            sql.text("batches/send"),
            {
                "domain": domain,
                "batch": batch,
                "rows": send.json_rows(chunk),
                "own_ids": any(item.has_own_id for item in chunk),
                "counts": counts,
            },
        )
    except (pg.UndefinedTable, pg.InvalidSchemaName) as error:
        raise send.explain_missing(domain, error) from None
    except pg.StatementTooComplex:
        raise InvalidCommandError(
            "the data of a command is nested too deeply for the server to read (max_stack_depth)"
        ) from None
    except psycopg.Error as error:
        raise explain_key(domain, error) or error from None
    sent, exists = rows[0]
    if sent < len(chunk):
        raise DuplicateMemberError(domain, exists)


def _chunks(outgoing: Iterator[Outgoing]) -> Iterator[list[Outgoing]]:
    chunk: list[Outgoing] = []
    characters = 0
    for item in outgoing:
        chunk.append(item)
        characters += len(item.data)
        if len(chunk) == CHUNK_ROWS or characters > CHUNK_CHARACTERS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk
