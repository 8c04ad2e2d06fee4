"""Send commands with keys: each joins the line of its key in its own transaction."""

from __future__ import annotations

from collections.abc import Sequence

import psycopg
from psycopg import errors as pg

from commandbus import sql
from commandbus.errors import InvalidCommandError, UnknownKeyLimitError
from commandbus.flow.commands.send import Outgoing, explain_missing, find_existing, json_rows, once_each
from commandbus.flow.operation import Statement, Steps, operation
from commandbus.model.command import SentCommand

UNKNOWN_KEY_LIMIT = "CB002"


@operation(atomic=True)
def send_keyed(domain: str, outgoing: Sequence[Outgoing]) -> Steps[list[SentCommand]]:
    """Send commands of which some or all have keys, all or none."""
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
        if error.sqlstate != UNKNOWN_KEY_LIMIT:
            raise
        raise UnknownKeyLimitError(domain, error.diag.message_primary or "") from None
    sent = {command_id: SentCommand(domain, command_id, id_) for command_id, id_ in rows}
    if missing := [item for item in unique.values() if item.command_id not in sent]:
        sent |= yield from find_existing(domain, missing)
    return [sent[item.command_id] for item in outgoing]
