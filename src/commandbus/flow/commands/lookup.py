"""lookup: commands by the names that a caller gives, one or many. Reads only, locks nothing."""

from __future__ import annotations

from collections.abc import Iterable

from commandbus import sql
from commandbus.flow.commands.query import CommandQuery, query_commands, records
from commandbus.flow.commands.query_sources import held
from commandbus.flow.operation import Row, Statement, Steps, operation
from commandbus.model import names
from commandbus.model.command import CommandRecord, CommandStatus


@operation(atomic=False)
def get_command(domain: str, command_id: str) -> Steps[CommandRecord | None]:
    """What is known of a command; None if there is none."""
    query = CommandQuery(domain=names.check_domain(domain), command_id=names.to_id(command_id))
    page = yield from query_commands(query, limit=1).steps
    return page.items[0] if page.items else None


@operation(atomic=False)
def get_commands(domain: str, command_ids: Iterable[str]) -> Steps[dict[str, CommandRecord]]:
    """What is known of commands, by their command_ids; those that do not exist are left out."""
    rows = yield from _rows(domain, command_ids)
    found = yield from records([id_ for id_, _ in rows])
    return {record.command_id: record for record in found}


@operation(atomic=False)
def existing(domain: str, command_ids: Iterable[str]) -> Steps[set[str]]:
    """Which of these commands exist."""
    rows = yield from _rows(domain, command_ids)
    return {command_id for _, command_id in rows}


@operation(atomic=False)
def count_by_status(domain: str, command_type: str | None = None) -> Steps[dict[CommandStatus, int]]:
    """How many commands of a domain, or of a type in it, have each status. A status without commands is left
    out."""
    held_now = yield from held(names.check_domain(domain))
    params = {
        "domain": domain,
        "command_type": None if command_type is None else names.check_type(command_type),
        "held": held_now,
    }
    rows = yield Statement(sql.text("commands/count_by_status"), params)
    counts: dict[CommandStatus, int] = {}
    for status, count, running in rows:
        counts[CommandStatus(status)] = count - running
        if running:
            counts[CommandStatus.IN_PROGRESS] = running
    return {status: count for status, count in counts.items() if count}


def _rows(domain: str, command_ids: Iterable[str]) -> Steps[list[Row]]:
    params = {"domain": names.check_domain(domain), "command_ids": [names.to_id(each) for each in command_ids]}
    return (
        yield Statement(
            b"SELECT id, command_id FROM commandbus.command "
            b"WHERE domain = %(domain)s AND command_id = ANY (%(command_ids)s::text[])",
            params,
        )
    )
