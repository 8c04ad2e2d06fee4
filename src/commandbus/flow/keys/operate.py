"""Key limits at run time: set, override, delete, look."""

from __future__ import annotations

from collections.abc import Sequence

from commandbus import sql
from commandbus.errors import InvalidOperationError, UnknownKeyLimitError
from commandbus.flow.keys.exist import CHANNEL
from commandbus.flow.operation import Statement, Steps, operation
from commandbus.model.key_limit import KeyLimit, KeyLine


@operation(atomic=True)
def set_key_limit(limit: KeyLimit) -> Steps[KeyLimit]:
    """Create a key limit, or change it. What is released already stays released."""
    yield Statement(
        sql.text("keys/set"),
        {
            "domain": limit.domain,
            "name": limit.name,
            "concurrency": limit.concurrency,
            "ordered": limit.ordered,
            "aside": limit.on_failure == "step_aside",
        },
    )
    yield from _look_again(limit.domain, limit.name, None)
    return limit


@operation(atomic=True)
def delete_key_limit(domain: str, name: str) -> Steps[None]:
    """Delete a key limit that no unfinished command uses."""
    rows = yield Statement(sql.text("keys/delete"), {"domain": domain, "name": name})
    is_used, was_there = rows[0]
    if is_used:
        raise InvalidOperationError(
            f"key limit {name!r} of domain {domain!r} has unfinished commands; wait for them or cancel them first"
        )
    if not was_there:
        raise UnknownKeyLimitError(domain, name)


@operation(atomic=True)
def override(domain: str, name: str, key: str, concurrency: int, seconds: float) -> Steps[None]:
    """Give one key another concurrency for some time."""
    rows = yield Statement(
        sql.text("keys/override"),
        {"domain": domain, "name": name, "key": key, "concurrency": concurrency, "seconds": seconds},
    )
    if not rows:
        raise UnknownKeyLimitError(domain, name)
    yield from _look_again(domain, name, key)


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
    """The keys of a limit that have unfinished commands: those with the most waiting first."""
    rows = yield Statement(
        sql.text("keys/lines"),
        {"domain": domain, "name": name, "keys": None if keys is None else list(keys), "limit": limit},
    )
    return [KeyLine(*row) for row in rows]


def _look_again(domain: str, name: str, key: str | None) -> Steps[None]:
    """Let workers look at the lines again: there may be more places now."""
    yield Statement(sql.text("keys/look_again"), {"domain": domain, "name": name, "key": key, "channel": CHANNEL})
