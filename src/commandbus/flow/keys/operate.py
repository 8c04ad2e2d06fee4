"""Key limits at run time: set, override, delete, look.

control_action records each change, with who did it and why: 'key_limit orders/tenant'.
"""

from __future__ import annotations

from collections.abc import Sequence

from commandbus import sql
from commandbus.errors import InvalidOperationError, UnknownKeyLimitError
from commandbus.flow.commands.operate import OperatorAction
from commandbus.flow.keys.declare import set_statement
from commandbus.flow.keys.release import look_again
from commandbus.flow.limits.declare import note_action
from commandbus.flow.limits.inspect import ControlAction, actions_on
from commandbus.flow.operation import Statement, Steps, operation
from commandbus.model import names
from commandbus.model.key_limit import MOST_COUNTED, KeyLimit, KeyLine, KeyOverride

KEYS_LOOKED_AT = 2000
COUNTED_IN_LIST = 1000


@operation(atomic=True)
def set_key_limit(limit: KeyLimit, what: OperatorAction) -> Steps[KeyLimit]:
    """Create a key limit, or change it. What is released already stays released."""
    yield set_statement(limit)
    options = {"concurrency": limit.concurrency, "ordered": limit.ordered, "on_failure": limit.on_failure}
    yield note_action(subject(limit.domain, limit.name), "SET", what, details=options)
    yield from look_again(limit.domain, limit.name, None)
    return limit


def subject(domain: str, name: str) -> str:
    """What the audit calls a key limit."""
    return f"key_limit {domain}/{name}"


@operation(atomic=True)
def delete_key_limit(domain: str, name: str, what: OperatorAction) -> Steps[None]:
    """Delete a key limit that no unfinished command uses."""
    rows = yield Statement(sql.text("keys/delete"), {"domain": domain, "name": name})
    is_used, types, was_there = rows[0]
    if types:
        raise InvalidOperationError(
            f"handlers of {domain} declare key limit {name!r} for {', '.join(types)}; remove it from them and "
            f"start a worker first"
        )
    if is_used:
        raise InvalidOperationError(
            f"key limit {name!r} of domain {domain!r} has unfinished commands; wait for them or cancel them first"
        )
    if not was_there:
        raise UnknownKeyLimitError(domain, name)
    yield note_action(subject(domain, name), "DELETE", what)


@operation(atomic=True)
def override(
    domain: str, name: str, key: str | None, concurrency: int, seconds: float, what: OperatorAction
) -> Steps[None]:
    """Give one key, or all (None), another concurrency for some time."""
    rows = yield Statement(
        sql.text("keys/override"),
        {"domain": domain, "name": name, "key": key or "", "concurrency": concurrency, "seconds": seconds},
    )
    if not rows:
        raise UnknownKeyLimitError(domain, name)
    details = {"key": key, "concurrency": concurrency, "seconds": seconds}
    yield note_action(subject(domain, name), "OVERRIDE", what, details=details)
    yield from look_again(domain, name, key)


@operation(atomic=True)
def end_override(domain: str, name: str, key: str | None, what: OperatorAction) -> Steps[bool]:
    """End the override of one key, or that of all (None), before its time. Returns False if there is none."""
    rows = yield Statement(
        b"DELETE FROM commandbus.key_override WHERE domain = %(domain)s AND key_limit = %(name)s "
        b"AND key = %(key)s AND until > pg_catalog.now() RETURNING key",
        {"domain": domain, "name": name, "key": key or ""},
    )
    if rows:
        yield note_action(subject(domain, name), "END_OVERRIDE", what, details={"key": key})
        yield from look_again(domain, name, key)
    elif name not in {item.name for item in (yield from list_key_limits(domain).steps)}:
        raise UnknownKeyLimitError(domain, name)
    return bool(rows)


@operation(atomic=False)
def list_actions(domain: str, name: str, *, limit: int) -> Steps[list[ControlAction]]:
    """Who did what to a key limit, newest first."""
    return (yield from actions_on([subject(domain, name)], limit))


@operation(atomic=False)
def list_overrides(domain: str, name: str, *, limit: int) -> Steps[list[KeyOverride]]:
    """The keys that have another concurrency now; the key None stands for all others. Index: key_override_pkey."""
    rows = yield Statement(
        b"SELECT nullif(key, ''), concurrency, until FROM commandbus.key_override "
        b"WHERE domain = %(domain)s AND key_limit = %(name)s AND until > pg_catalog.now() ORDER BY key "
        b"LIMIT %(limit)s",
        {"domain": domain, "name": name, "limit": names.check_count(limit, "limit")},
    )
    return [KeyOverride(domain, name, *row) for row in rows]


@operation(atomic=False)
def list_key_limits(domain: str | None) -> Steps[list[KeyLimit]]:
    """The key limits of a domain, or of all."""
    rows = yield Statement(sql.text("keys/list"), {"domain": domain})
    return [
        KeyLimit(of, name, concurrency, ordered, "step_aside" if aside else "block")
        for of, name, concurrency, ordered, aside in rows
    ]


@operation(atomic=False)
def list_lines(domain: str, name: str, *, keys: Sequence[str] | None, limit: int) -> Steps[list[KeyLine]]:
    """The keys of a limit that have unfinished commands: those with the most waiting first, of the first 2,000."""
    lines = yield from _lines(domain, name, keys, limit)
    if not lines and name not in {item.name for item in (yield from list_key_limits(domain).steps)}:
        raise UnknownKeyLimitError(domain, name)
    return lines


def _lines(domain: str, name: str, keys: Sequence[str] | None, limit: int) -> Steps[list[KeyLine]]:
    rows = yield Statement(
        sql.text("keys/lines"),
        {
            "domain": domain,
            "name": name,
            "keys": None if keys is None else list(keys),
            "limit": names.check_count(limit, "limit"),
            "keys_most": KEYS_LOOKED_AT,
            "most": MOST_COUNTED if keys is not None else COUNTED_IN_LIST,
        },
    )
    lines = [KeyLine(*row) for row in rows]
    if keys is None and (full := [line.key for line in lines if line.waiting >= COUNTED_IN_LIST]):
        counted = yield from _lines(domain, name, full, len(full))
        lines = sorted(
            [*counted, *(line for line in lines if line.key not in full)],
            key=lambda line: (-line.waiting, line.key),
        )
    return lines
