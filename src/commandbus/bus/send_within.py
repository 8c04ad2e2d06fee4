"""A send that ends in its own time: `bus.send(…, within="200ms")`.

A server that stands still enforces no timeout, so the limit is the client's. The wait for a connection ends by
itself, and the answer clock cuts a connection whose server does not answer (`db/answer_clock.py`). The error says
whether the command may be there all the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
from psycopg import errors as pg

from commandbus.clock import monotonic
from commandbus.db.answer_clock import NoAnswerError
from commandbus.db.wait_for_server import reason_of
from commandbus.errors import DatabaseUnavailableError, InvalidCommandError, SendFailedError
from commandbus.flow.operation import Operation, explain_absence
from commandbus.model.command import SentCommand
from commandbus.model.durations import Duration, parse_seconds


class TimedSend:
    """One send, and until when it must be confirmed."""

    def __init__(self, domain: str, command_id: str, sending: Operation[SentCommand], within: Duration) -> None:
        self.seconds = parse_seconds(within, name="within", error=InvalidCommandError)
        if not self.seconds:
            raise InvalidCommandError("within must be longer than 0: how long the send may take, such as 200ms")
        self.sending = sending
        self.until = monotonic() + self.seconds
        self._domain = domain
        self._command_id = command_id

    @contextmanager
    def explained(self, *, is_transaction: bool = False) -> Iterator[None]:
        """What goes wrong with the database becomes SendFailedError. `is_transaction`: it is part of a transaction
        of the caller, which nobody can commit once its connection is gone."""
        try:
            yield
        except (pg.UndefinedTable, pg.InvalidSchemaName) as error:
            raise explain_absence(error) from None
        except (psycopg.OperationalError, DatabaseUnavailableError) as error:
            raise SendFailedError(
                self._domain,
                self._command_id,
                str(error) if isinstance(error, DatabaseUnavailableError) else reason_of(error),
                may_be_sent=_may_be_done(error) and not is_transaction,
            ) from error


def _may_be_done(error: psycopg.OperationalError | DatabaseUnavailableError) -> bool:
    """Was the server asked, and has it not refused? A lost connection has no SQLSTATE, or one of class 08."""
    if isinstance(error, psycopg.OperationalError):
        return error.sqlstate is None or error.sqlstate.startswith("08")
    return isinstance(error, NoAnswerError)
