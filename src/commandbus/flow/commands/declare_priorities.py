"""What workers declare when they start: the priorities of their handlers' command types.

A sender must know the priority of a command, because a worker learns a command's type only when it has claimed it.
So the priorities are rules in the database, which the send statements apply. The last worker to start wins, and
what changes is logged.
"""

from __future__ import annotations

from collections.abc import Mapping

from commandbus import sql
from commandbus.flow.operation import Statement, Steps, operation
from commandbus.model.priority import name_of

Priorities = Mapping[tuple[str, str], int | None]


@operation(atomic=True)
def declare_priorities(wanted: Priorities) -> Steps[list[str]]:
    """Store the priorities of command types, by domain and type (None: it has none). Returns lines for the log."""
    rows = yield Statement(sql.text("commands/rule_priorities"), _addresses(wanted))
    stored: Priorities = {(domain, command_type): number for domain, command_type, number in rows}
    changed = {address: number for address, number in wanted.items() if stored.get(address) != number}
    if not changed:
        return []
    yield Statement(
        sql.text("commands/store_rule_priorities"), _addresses(changed) | {"priorities": list(changed.values())}
    )
    return [
        f"command type {domain}/{command_type} was declared with {name_of(stored[domain, command_type])} priority "
        f"before, now with {'none' if number is None else name_of(number)}"
        for (domain, command_type), number in changed.items()
        if (domain, command_type) in stored
    ]


def _addresses(wanted: Priorities) -> dict[str, list[str] | list[int | None]]:
    return {"domains": [domain for domain, _ in wanted], "types": [command_type for _, command_type in wanted]}
