"""Make the next commands of keys visible, as many as each key has places.

A worker locks keys with advisory locks, those that nobody else has locked. Its next statement has a snapshot that
is newer than these locks. So it sees every command that was released before, and never releases one too many
(docs/adr/0026-key-limits.md).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from commandbus import sql
from commandbus.flow.keys.exist import CHANNEL
from commandbus.flow.operation import Statement, Steps, operation

BITE = 1000
KEYS = 400
"""So many keys are looked at in one transaction."""
EACH = 100
"""So many new commands of a key are noted at once."""


class LineKey(NamedTuple):
    """A key of a key limit."""

    key_limit: str
    key: str


FIRST = LineKey("", "")


class NewInLine(NamedTuple):
    """A key, and commands that have joined its line."""

    key: LineKey
    commands: list[int]


class Released(NamedTuple):
    """How many commands were released, the keys that are to be looked at again, and by key limit, for how many
    seconds commands that have completed had their places."""

    commands: int
    again: frozenset[LineKey]
    seconds: dict[str, float]


class Ended(NamedTuple):
    """Where the next look begins (None: everything was looked at), and the keys to release."""

    after: tuple[str, str, int] | None
    keys: set[LineKey]


class Freed(NamedTuple):
    """Where the next look begins (None: everything was looked at), and the keys to release, by domain."""

    after: int | None
    keys: dict[str, set[LineKey]]


@operation(atomic=False)
def find_new(domain: str, after: LineKey = FIRST) -> Steps[list[NewInLine]]:
    """The next keys that nobody has looked at since commands joined their lines."""
    rows = yield Statement(
        sql.text("keys/find_new"),
        {"domain": domain, "after_limit": after.key_limit, "after_key": after.key, "bite": KEYS, "each": EACH},
        by_keys=True,
    )
    return [NewInLine(LineKey(key_limit, key), commands) for key_limit, key, commands in rows]


@operation(atomic=True)
def release(domain: str, keys: Collection[LineKey], new: Sequence[NewInLine] = ()) -> Steps[Released]:
    """Release what these keys have places for, and note that the keys of `new` were looked at."""
    wanted = sorted(set(keys) | {item.key for item in new})
    rows = yield Statement(sql.text("keys/lock"), {"domain": domain, **_params(wanted)})
    locked = {LineKey(*row) for row in rows}
    again = {key for key in wanted if key not in locked}
    if not locked:
        return Released(0, frozenset(again), {})
    rows = yield Statement(
        sql.text("keys/release", domain=domain), {"domain": domain, **_params(sorted(locked))}, by_keys=True
    )
    again |= {LineKey(row[0], row[1]) for row in rows[1:] if row[1] is not None}
    if seen := [command for item in new if item.key not in again for command in item.commands]:
        yield Statement(sql.text("keys/noted"), {"commands": seen}, by_keys=True)
    return Released(int(rows[0][2]), frozenset(again), {row[0]: row[2] for row in rows[1:] if row[1] is None})


@operation(atomic=False)
def ended(domain: str, after: tuple[str, str, int] | None) -> Steps[Ended]:
    """Look for places that nobody has freed, in a bite of the released commands."""
    after_limit, after_key, after_command = after or ("", "", 0)
    rows = yield Statement(
        sql.text("keys/ended"),
        {
            "domain": domain,
            "after_limit": after_limit,
            "after_key": after_key,
            "after": after_command,
            "bite": BITE,
        },
        by_keys=True,
    )
    last = next((row[:3] for row in rows if row[3]), None)
    return Ended(last, {LineKey(row[0], row[1]) for row in rows if not row[3]})


@operation(atomic=True)
def end_overrides(domains: Sequence[str]) -> Steps[dict[str, set[LineKey]]]:
    """Remove overrides that are over. Returns their keys, by domain; those of all keys mark their lines as new."""
    rows = yield Statement(sql.text("keys/over"), {"domains": list(domains)})
    found: dict[str, set[LineKey]] = {}
    for domain, key_limit, key in rows:
        if key:
            found.setdefault(domain, set()).add(LineKey(key_limit, key))
        else:
            yield from look_again(domain, key_limit, None)
    return found


@operation(atomic=False)
def note_seconds(domain: str, key_limit: str, seconds: float) -> Steps[None]:
    """Note for how long commands of a key limit have kept their places of late."""
    yield Statement(sql.text("keys/note_seconds"), {"domain": domain, "name": key_limit, "seconds": seconds})


def look_again(domain: str, name: str, key: str | None) -> Steps[None]:
    """Let workers look at the lines of a key limit again, or of one key: there may be more places now."""
    yield Statement(sql.text("keys/look_again"), {"domain": domain, "name": name, "key": key, "channel": CHANNEL})


@operation(atomic=False)
def freed(domains: Sequence[str], after: int) -> Steps[Freed]:
    """Look for lines that nobody moves, in a bite of all commands with keys."""
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
