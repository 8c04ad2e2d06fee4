"""Send commands with keys: each joins the line of its key in its own transaction."""

from __future__ import annotations

from collections.abc import Sequence

import psycopg
from psycopg import errors as pg

from commandbus import sql
from commandbus.errors import CommandBusError, InvalidCommandError, UnknownKeyLimitError
from commandbus.flow.commands.send import (
    Outgoing,
    explain_missing,
    find_existing,
    json_rows,
    note_rules,
    once_each,
)
from commandbus.flow.operation import Statement, Steps, operation
from commandbus.model.command import SentCommand

UNKNOWN_KEY_LIMIT = "CB002"
INVALID_KEY = "CB003"


@operation(atomic=True)
def send_keyed(domain: str, outgoing: Sequence[Outgoing]) -> Steps[list[SentCommand]]:
    """Send commands of which some may have keys, given by the caller or by the rule of their type; all or none."""
    unique = once_each(domain, outgoing)
    try:
        rows = yield Statement(
            sql.text("keys/send"), {"domain": domain, "rows": json_rows(unique.values())}, only_inserts=True
        )
    except (pg.UndefinedTable, pg.InvalidSchemaName, pg.UndefinedFunction) as error:
        raise explain_missing(domain, error) from None
    except pg.StatementTooComplex:
        raise InvalidCommandError(
            "the data is nested too deeply for the server to read (max_stack_depth)"
        ) from None
    except psycopg.Error as error:
        raise explain_key(domain, error) or error from None
    sent = {command_id: SentCommand(domain, command_id, id_) for command_id, id_, _ in rows}
    types = {item.command_id: item.command_type for item in unique.values()}
    note_rules(domain, {types[row[0]] for row in rows}, {types[row[0]] for row in rows if row[2]})
    if missing := [item for item in unique.values() if item.command_id not in sent]:
        sent |= yield from find_existing(domain, missing)
    return [sent[item.command_id] for item in outgoing]


def explain_key(domain: str, error: psycopg.Error) -> CommandBusError | None:
    """The error for a key that the server has refused; None if it is another error."""
    text = error.diag.message_primary or ""
    if error.sqlstate == INVALID_KEY:
        return InvalidCommandError(text)
    return UnknownKeyLimitError(domain, text) if error.sqlstate == UNKNOWN_KEY_LIMIT else None
