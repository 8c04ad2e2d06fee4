"""Make the next commands of keys visible, as many as each key has places.

A worker locks keys with advisory locks, those that nobody else has locked. Its next statement has a snapshot that
is newer than these locks. So it sees every command that was released before, and never releases one too many
(docs/adr/0026-key-limits.md).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from commandbus import sql
from commandbus.flow.operation import Statement, Steps, operation

BITE = 1000


class LineKey(NamedTuple):
    """A key of a key limit."""

    key_limit: str
    key: str


class NewInLine(NamedTuple):
    """A command that has joined the line of its key."""

    command: int
    key: LineKey


class Released(NamedTuple):
    """How many commands were released, and the keys that are to be looked at again."""

    commands: int
    again: frozenset[LineKey]


class Freed(NamedTuple):
    """Where the next look begins (None: everything was looked at), and the keys to release, by domain."""

    after: int | None
    keys: dict[str, set[LineKey]]


@operation(atomic=False)
def find_new(domain: str) -> Steps[list[NewInLine]]:
    """Commands whose keys nobody has looked at since they were sent."""
    rows = yield Statement(sql.text("keys/find_new"), {"domain": domain, "bite": BITE})
    return [NewInLine(command, LineKey(key_limit, key)) for command, key_limit, key in rows]


@operation(atomic=True)
def release(domain: str, keys: Collection[LineKey], new: Sequence[NewInLine] = ()) -> Steps[Released]:
    """Release what these keys have places for, and note that the keys of `new` were looked at."""
    wanted = sorted(set(keys) | {item.key for item in new})
    rows = yield Statement(sql.text("keys/lock"), {"domain": domain, **_params(wanted)})
    locked = {LineKey(*row) for row in rows}
    again = {key for key in wanted if key not in locked}
    if not locked:
        return Released(0, frozenset(again))
    rows = yield Statement(
        sql.text("keys/release", domain=domain), {"domain": domain, **_params(sorted(locked))}, by_keys=True
    )
    again |= {LineKey(row[0], row[1]) for row in rows[1:]}
    if seen := [item.command for item in new if item.key not in again]:
        yield Statement(sql.text("keys/noted"), {"commands": seen}, by_keys=True)
    return Released(rows[0][2], frozenset(again))


@operation(atomic=False)
def freed(domains: Sequence[str], after: int) -> Steps[Freed]:
    """Look for places that nobody has freed, in a bite of all commands with keys."""
    rows = yield Statement(
        sql.text("keys/freed"), {"domains": list(domains), "after": after, "bite": BITE}, by_keys=True
    )
    found: dict[str, set[LineKey]] = {}
    for _, domain, key_limit, key in rows[1:]:
        found.setdefault(domain, set()).add(LineKey(key_limit, key))
    return Freed(rows[0][0], found)


@operation(atomic=False)
def forget(domains: Sequence[str], after: int) -> Steps[None]:
    """Remove commands from their lines that have ended before their turn came, in a bite."""
    yield Statement(
        sql.text("keys/forget"), {"domains": list(domains), "after": after, "bite": BITE}, by_keys=True
    )


def _params(keys: Sequence[LineKey]) -> dict[str, list[str]]:
    return {"limits": [item.key_limit for item in keys], "keys": [item.key for item in keys]}
