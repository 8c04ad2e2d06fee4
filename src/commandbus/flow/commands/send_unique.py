"""Send a command with a key (`unique`, `debounce`): the row of the key decides among concurrent senders.

The database function `commandbus.send_unique` locks the row, looks at the command that it names, and sends,
replaces or leaves it (docs/adr/0025-unique-keys.md). Nothing happens to a key when its command ends.
"""

from __future__ import annotations

from psycopg import errors as pg

from commandbus import sql
from commandbus.errors import InvalidCommandError, UniqueConflictError, UniqueKeyLockedError
from commandbus.flow.commands.send import Outgoing, explain_missing, find_existing, json_rows
from commandbus.flow.operation import Statement, Steps, operation
from commandbus.model.command import SentCommand
from commandbus.model.unique_key import UniqueRule

_WHY = {
    "waiting": "it waits to be started",
    "unfinished": "it has not ended",
    "window": "it was sent within the time that unique_while says",
}


@operation(atomic=False)
def send_unique(domain: str, outgoing: Outgoing, rule: UniqueRule) -> Steps[SentCommand]:
    """Send one command if its key is free. Returns the receipt of the command that has the key now."""
    try:
        rows = yield _statement(domain, outgoing, rule)
    except (pg.UndefinedTable, pg.InvalidSchemaName, pg.UndefinedFunction) as error:
        raise explain_missing(domain, error) from None
    except pg.LockNotAvailable:
        raise UniqueKeyLockedError(domain, rule.key) from None
    except pg.StatementTooComplex:
        raise InvalidCommandError(
            "the data is nested too deeply for the server to read (max_stack_depth)"
        ) from None
    outcome, id_, command_id = rows[0]
    if outcome == "EXISTS":
        existing = yield from find_existing(domain, [outgoing])
        return existing[outgoing.command_id]
    if outcome == "CONFLICT":
        raise UniqueConflictError(domain, rule.key, command_id, _WHY[rule.held_while])
    if outcome == "STARTED":
        why = "it has been started, or has ended, so it cannot be replaced; nothing was sent"
        raise UniqueConflictError(domain, rule.key, command_id, why)
    return SentCommand(domain, command_id, id_, created=outcome == "CREATED", replaced=outcome == "REPLACED")


def _statement(domain: str, outgoing: Outgoing, rule: UniqueRule) -> Statement:
    return Statement(
        sql.text("commands/send_unique"),
        {
            "domain": domain,
            "key": rule.key,
            "held_while": rule.held_while,
            "window": rule.window_seconds,
            "on_conflict": rule.on_conflict,
            "max_delay": rule.max_delay_seconds,
            "own_id": outgoing.command_id if outgoing.has_own_id else None,
            "row": json_rows([outgoing])[1:-1],
        },
        only_inserts=True,
    )
