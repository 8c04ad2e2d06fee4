"""Warns about a command type that nobody knows: a misspelled name is accepted, and then nothing runs the command.
A new name is not an error: its workers, or its first command, may come later."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches

from psycopg import errors as pg

from commandbus import sql
from commandbus.flow.commands.inspect import WORKER_ALIVE_SECONDS
from commandbus.flow.operation import Statement, Steps, operation

NEWEST = 10_000  # how many commands are looked at
MOST_NAMES = 5


@operation(atomic=False)
def doubt_type(domain: str, command_type: str, *, what: str = "command type") -> Steps[str | None]:
    """Returns a warning if no live worker handles this type and it has no recent command; otherwise None.

    A role that may not read gets no warning. `what` may be "process type", because the messages to a process are
    commands of its type.
    """
    params = {"domain": domain, "alive": WORKER_ALIVE_SECONDS, "most": NEWEST}
    try:
        rows = yield Statement(sql.text("commands/known_types"), params)
    except pg.InsufficientPrivilege:
        return None
    known = {name for (name,) in rows}
    if command_type in known:
        return None
    return (
        f"nobody knows {what} {command_type!r} of domain {domain!r}: no running worker handles it, and it has "
        f"no recent command; {_similar(command_type, known)}"
    )


def doubt_limit(name: str, others: Collection[str]) -> str:
    """The warning about a limit that no program declares and nobody has used."""
    return f"nobody knows limit {name!r}: no program declares it, and it was never used; {_similar(name, others)}"


def _similar(name: str, known: Collection[str]) -> str:
    if close := get_close_matches(name, known, n=1):
        return f"did you mean {close[0]!r}?"
    few = sorted(known)[:MOST_NAMES]
    more = f", and {len(known) - len(few)} more" if len(known) > len(few) else ""
    return f"known are {', '.join(few)}{more}" if few else "none is known yet"
