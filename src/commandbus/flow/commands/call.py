"""Send a command whose caller waits, and tell the caller the outcome.

The `reply_to` of such a command is CALL, which no queue can have as its name. The transaction that settles the
command, or moves it to the troubleshooting queue, only notifies the id of its row (`flow/commands/reply.py`), and
the caller reads the row. A command that was sent without a caller and one with CALL have the same content
(`compare_commands`). So a call with the command_id and content of an earlier call or send waits for that command.
"""

from __future__ import annotations

from collections.abc import Sequence

from commandbus import sql
from commandbus.errors import (
    CommandCanceledError,
    CommandFailedError,
    CommandInTroubleshootingError,
    InvalidCommandError,
)
from commandbus.flow.commands import send
from commandbus.flow.commands.reply import CALL
from commandbus.flow.commands.settle import cancellation
from commandbus.flow.operation import Operation, Row, Statement, Steps, operation
from commandbus.model import names, payload
from commandbus.model.command import CommandStatus, NewCommand, SentCommand
from commandbus.model.json_values import Json
from commandbus.quick_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class CommandOutcome:
    """A command as its row was seen. PENDING: there is no outcome yet."""

    id: int
    domain: str
    command_id: str
    status: CommandStatus
    result_json: str | None = None
    error_type: str | None = None
    error_code: str | None = None
    error: str | None = None

    @property
    def result(self) -> Json:
        """What the handler returned."""
        return None if self.result_json is None else payload.loads(self.result_json)


def send_call(domain: str, new: NewCommand, *, max_bytes: int) -> Operation[SentCommand]:
    """Send a command, or find the one that was called before, so that the caller is told its outcome."""
    if new.reply_to is not None:
        raise InvalidCommandError("a call takes no reply_to: its caller is told the outcome")
    return send.send(names.check_domain(domain), send.prepare(new, max_bytes=max_bytes)._replace(reply_to=CALL))


@operation(atomic=False)
def outcomes(commands: Sequence[tuple[str, str]]) -> Steps[dict[int, CommandOutcome]]:
    """The outcomes of these commands (domain, command_id), by the ids of their rows; deleted commands are left
    out. A role that knows the id of a command may ask for it, but cannot list commands."""
    names_ = {"domains": [domain for domain, _ in commands], "command_ids": [id_ for _, id_ in commands]}
    rows = yield Statement(sql.text("commands/call_outcomes"), names_)
    return {row[0]: _outcome(row) for row in rows}


@operation(atomic=False)
def get_outcome(domain: str, command_id: str) -> Steps[CommandOutcome | None]:
    """The outcome of one command; None if there is no such command."""
    found = yield from outcomes([(names.check_domain(domain), names.to_id(command_id))]).steps
    return next(iter(found.values()), None)


def conclude(outcome: CommandOutcome) -> Json:
    """Returns the result of a command that has an outcome, or raises the error of that outcome."""
    match outcome.status:
        case CommandStatus.COMPLETED:
            return outcome.result
        case CommandStatus.CANCELED:
            raise CommandCanceledError(outcome.domain, outcome.command_id, outcome.error)
        case CommandStatus.FAILED:
            error: type[CommandFailedError | CommandInTroubleshootingError] = CommandFailedError
        case CommandStatus.IN_TROUBLESHOOTING_QUEUE:
            error = CommandInTroubleshootingError
        case _:
            raise AssertionError(f"command {outcome.command_id!r} is {outcome.status}: it has no outcome")
    raise error(
        outcome.domain,
        outcome.command_id,
        error_type=outcome.error_type,
        error_code=outcome.error_code,
        error=outcome.error,
    )


def _outcome(row: Row) -> CommandOutcome:
    id_, domain, command_id, status, result, error_type, error_code, error, operator, reason = row
    if operator is not None:
        why = cancellation(operator, reason)
        error_type, error_code, error = why.error_type, why.error_code, why.error
    return CommandOutcome(id_, domain, command_id, CommandStatus(status), result, error_type, error_code, error)
