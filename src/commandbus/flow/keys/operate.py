"""Key limits at run time: set, override, delete, look."""

from __future__ import annotations

from collections.abc import Sequence

from commandbus import sql
from commandbus.errors import InvalidOperationError, UnknownKeyLimitError
from commandbus.flow.keys.exist import CHANNEL
from commandbus.flow.keys.release import look_again
from commandbus.flow.operation import Statement, Steps, operation
from commandbus.model import names
from commandbus.model.key_limit import MOST_COUNTED, KeyLimit, KeyLine

KEYS_LOOKED_AT = 2000
COUNTED_IN_LIST = 1000


@operation(atomic=True)
def set_key_limit(limit: KeyLimit) -> Steps[KeyLimit]:
    """Create a key limit, or change it. What is released already stays released."""
    yield set_statement(limit)
    yield from look_again(limit.domain, limit.name, None)
    return limit


def set_statement(limit: KeyLimit, *, declared: str | None = None) -> Statement:
    """Store a key limit; `declared` is what a worker declares, and stays as it was if a person sets it."""
    values = {
        "domain": limit.domain,
        "name": limit.name,
        "concurrency": limit.concurrency,
        "ordered": limit.ordered,
        "aside": limit.on_failure == "step_aside",
        "declared": declared,
    }
    return Statement(sql.text("keys/set"), values)


@operation(atomic=True)
def delete_key_limit(domain: str, name: str) -> Steps[None]:
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


@operation(atomic=True)
def override(domain: str, name: str, key: str | None, concurrency: int, seconds: float) -> Steps[None]:
    """Give one key, or all (None), another concurrency for some time."""
    rows = yield Statement(
        sql.text("keys/override"),
        {"domain": domain, "name": name, "key": key or "", "concurrency": concurrency, "seconds": seconds},
    )
    if not rows:
        raise UnknownKeyLimitError(domain, name)
    yield from look_again(domain, name, key)


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


def tell(domain: str) -> Statement:
    """Let workers look whether this domain has key limits."""
    return Statement(
        b"SELECT pg_catalog.pg_notify(%(channel)s, %(domain)s)", {"channel": CHANNEL, "domain": domain}
    )
