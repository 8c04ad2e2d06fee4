"""Every error that commandbus raises on purpose.

Two families: errors *of* commandbus (`CommandBusError`), which name the offending value and what to do, and
errors that a *handler* raises to say what should happen to its command (`CommandFailure` and its kinds).
The exit codes of the command line follow the first family (see `cli/exit_codes.py`).
"""

from __future__ import annotations

from datetime import timedelta

from commandbus.shell_words import arguments, quoted


class CommandBusError(Exception):
    """Base of everything that commandbus itself raises."""


class ConfigurationError(CommandBusError, ValueError):
    """A setting is missing, malformed or contradicts another one."""


class WorkerStartError(CommandBusError):
    """A function that runs at the start of a worker (`on_start`, `lifespan`) has failed. The worker has claimed
    nothing."""


class EmbeddedPostgresError(CommandBusError):
    """The embedded PostgreSQL could not be found, initialized, started or stopped."""


class DatabaseUnavailableError(CommandBusError, ConnectionError):
    """The database cannot be reached, or has no connection left. The message has the server's own reason.

    Unless the message says otherwise, the server was not asked to do anything.
    """


class SendFailedError(DatabaseUnavailableError):
    """A send with `within` had no confirmation in time. `may_be_sent` says whether the command may be there all
    the same. To send it again with this `command_id` never makes a second one."""

    def __init__(self, domain: str, command_id: str, reason: str, *, may_be_sent: bool) -> None:
        state = "may have been sent" if may_be_sent else "was not sent"
        super().__init__(
            f"command {command_id!r} of domain {domain!r} {state}: {reason}; send it again with this command_id"
        )
        self.domain = domain
        self.command_id = command_id
        self.may_be_sent = may_be_sent


class InvalidCommandError(CommandBusError, ValueError):
    """The command is not valid: a bad name, payload, delay or header. Nothing was sent."""


class InvalidScheduleError(InvalidCommandError):
    """The schedule is not valid: a bad name, cron expression, time zone, interval or policy."""


class ScheduleNotFoundError(CommandBusError, LookupError):
    """There is no such schedule."""

    def __init__(self, domain: str, name: str) -> None:
        super().__init__(
            f"there is no schedule {name!r} in domain {domain!r}; `commandbus schedules list` shows all"
        )
        self.domain = domain
        self.name = name


class DuplicateScheduleError(CommandBusError):
    """The name is taken by another schedule."""


class UnknownDomainError(CommandBusError):
    """The domain has no queue. `commandbus domain create NAME` creates it."""

    def __init__(self, domain: str) -> None:
        super().__init__(
            f"unknown domain {domain!r}: it has no queue in this database; "
            f"create it with `commandbus domain create {arguments(domain)}` (or `bus.create_domain({domain!r})`)"
        )
        self.domain = domain


class UnknownQueueError(CommandBusError, LookupError):
    """There is no PGMQ queue of this name."""

    def __init__(self, queue: str) -> None:
        super().__init__(
            f"unknown queue {queue!r}: this database has no PGMQ queue of that name; create it with "
            f"`bus.create_queue({queue!r})`"
        )
        self.queue = queue


class DuplicateCommandError(CommandBusError):
    """The command_id is taken by a command with other content."""

    def __init__(self, domain: str, command_id: str, difference: str) -> None:
        super().__init__(
            f"command_id {command_id!r} already exists in domain {domain!r} with other content ({difference}); "
            f"use a new command_id, or send the same content to get the existing command"
        )
        self.domain = domain
        self.command_id = command_id
        self.difference = difference


class UniqueConflictError(CommandBusError):
    """Another command has the key (`unique`)."""

    def __init__(self, domain: str, key: str, command_id: str, why: str) -> None:
        super().__init__(f"unique key {key!r} of domain {domain!r} is taken by command {command_id!r}: {why}")
        self.domain = domain
        self.key = key
        self.command_id = command_id


class UniqueKeyLockedError(CommandBusError, TimeoutError):
    """Another transaction has sent with the same key and is not committed yet."""

    def __init__(self, domain: str, key: str) -> None:
        super().__init__(
            f"unique key {key!r} of domain {domain!r} is locked by another transaction that has not ended within "
            f"the lock_timeout; nothing was sent: send again, or keep transactions that send with this key short"
        )
        self.domain = domain
        self.key = key


class UnknownKeyLimitError(CommandBusError, LookupError):
    """A domain has no key limit of this name."""

    def __init__(self, domain: str, name: str) -> None:
        super().__init__(
            f"domain {domain!r} has no key limit {name!r}: create it with bus.key_limits.set, or with "
            f"`commandbus keys set`"
        )
        self.domain = domain
        self.key_limit = name


class DuplicateProcessError(CommandBusError):
    """The process_id is taken by a process with other content."""

    def __init__(self, domain: str, process_id: str, difference: str) -> None:
        super().__init__(
            f"process_id {process_id!r} already exists in domain {domain!r} with other content ({difference}); "
            f"use a new process_id, or start it with the same content to get the existing process"
        )
        self.domain = domain
        self.process_id = process_id
        self.difference = difference


class DuplicateSignalError(CommandBusError):
    """The signal_id is taken by another signal to the same process."""

    def __init__(self, domain: str, process_id: str, signal_id: str, difference: str) -> None:
        super().__init__(
            f"signal_id {signal_id!r} was already sent to process {process_id!r} of domain {domain!r} with other "
            f"content ({difference}); use a new signal_id, or the same content to get the existing signal"
        )
        self.domain = domain
        self.process_id = process_id
        self.signal_id = signal_id
        self.difference = difference


class ProcessNotFoundError(CommandBusError, LookupError):
    """No such process."""


class ProcessMovedError(CommandBusError):
    """Another worker moved the process meanwhile; the message is handled again."""


class DuplicateMemberError(DuplicateCommandError):
    """A command of a new batch exists already, in the batch or outside it."""

    def __init__(self, domain: str, command_id: str) -> None:
        self.domain = domain
        self.command_id = command_id
        self.difference = "a batch has only new commands"
        Exception.__init__(
            self,
            f"command_id {command_id!r} already exists in domain {domain!r}, and a batch has only new commands, "
            f"each once; nothing was sent: use a new command_id, or leave that command out",
        )


class DuplicateBatchError(CommandBusError):
    """The batch_id is taken by a batch with other content."""

    def __init__(self, domain: str, batch_id: str) -> None:
        super().__init__(
            f"batch_id {batch_id!r} already exists in domain {domain!r} with other content (definition or "
            f"commands); use a new batch_id, or create the same again to get the existing batch"
        )
        self.domain = domain
        self.batch_id = batch_id


class BatchNotFoundError(CommandBusError, LookupError):
    """No such batch: in this domain, or in any (None)."""

    def __init__(self, domain: str | None, batch_id: str) -> None:
        where = "any domain" if domain is None else f"domain {domain!r}"
        super().__init__(f"no batch {batch_id!r} in {where}")
        self.domain = domain
        self.batch_id = batch_id


class BatchTimeoutError(CommandBusError, TimeoutError):
    """`wait_for_batch` has waited long enough; the batch goes on."""


class CommandNotFoundError(CommandBusError, LookupError):
    """No such command."""


class PlanNotFoundError(CommandBusError, LookupError):
    """There is no such plan."""

    def __init__(self, plan_id: int) -> None:
        super().__init__(f"there is no plan {plan_id}; `commandbus plan` lists them, and old ones are deleted")
        self.plan_id = plan_id


class InvalidOperationError(CommandBusError):
    """The command is not in a state that allows the operation; somebody else may have been faster."""


class RehearsalRefusedError(InvalidOperationError):
    """A command was not rehearsed. The message says why, and what would allow it."""


class PlanChangedError(InvalidOperationError):
    """Since the preview of a plan, commands that it chooses came or went. Nothing was done; look again."""


class SchemaError(CommandBusError):
    """The database's commandbus schema is missing, older or newer than this release expects."""


class MissingPrivilegeError(SchemaError):
    """The role may not do this. The message says which privilege is missing and which role has it."""


class CallError(CommandBusError):
    """What `bus.call` and `bus.wait` raise instead of returning a result. The command was sent; `command_id` names
    it."""

    def __init__(self, message: str, domain: str, command_id: str) -> None:
        super().__init__(message)
        self.domain = domain
        self.command_id = command_id


class CommandFailedError(CallError):
    """The called command is FAILED for good: by a business rule, or by a timeout with `on_timeout="fail"`."""

    def __init__(
        self, domain: str, command_id: str, *, error_type: str | None, error_code: str | None, error: str | None
    ) -> None:
        why = _why(error_type, error_code, error)
        super().__init__(f"command {command_id!r} of domain {domain!r} failed{why}", domain, command_id)
        self.error_type = error_type
        self.error_code = error_code
        self.error = error


class CommandCanceledError(CallError):
    """The command that was called was canceled; `reason` says who canceled it and why, if that is known."""

    def __init__(self, domain: str, command_id: str, reason: str | None) -> None:
        why = "" if reason is None else f": {reason}"
        super().__init__(f"command {command_id!r} of domain {domain!r} was canceled{why}", domain, command_id)
        self.reason = reason


class CommandInTroubleshootingError(CallError):
    """The called command needs a person. Nobody knows how long that takes, so the call does not wait."""

    def __init__(
        self, domain: str, command_id: str, *, error_type: str | None, error_code: str | None, error: str | None
    ) -> None:
        super().__init__(
            f"command {command_id!r} of domain {domain!r} is in the troubleshooting queue"
            f"{_why(error_type, error_code, error)}; an operator will retry, cancel or complete it "
            f"(`commandbus tsq`), and a call with the same command_id then waits for the outcome",
            domain,
            command_id,
        )
        self.error_type = error_type
        self.error_code = error_code
        self.error = error


class CallTimeoutError(CallError, TimeoutError):
    """The outcome did not come in time. The command is still there and goes on."""

    def __init__(self, domain: str, command_id: str, seconds: float) -> None:
        super().__init__(
            f"command {command_id!r} of domain {domain!r} had no outcome after {seconds:g} s; it is still there "
            f"and goes on: look with bus.get_command({domain!r}, {command_id!r}), wait on with "
            f"bus.wait({domain!r}, {command_id!r}), or stop it with bus.cancel",
            domain,
            command_id,
        )
        self.seconds = seconds


class BusClosedError(CallError):
    """The bus was closed while the call waited. The command is still there and goes on."""

    def __init__(self, domain: str, command_id: str) -> None:
        super().__init__(
            f"the bus was closed before command {command_id!r} of domain {domain!r} had an outcome; it is still "
            f"there and goes on",
            domain,
            command_id,
        )


class AttemptFencedError(CommandBusError):
    """This attempt no longer holds its command: its lease was lost, and another attempt may be running.

    The transaction in which this is raised is rolled back. A handler should let the error through.
    """


class AttemptCanceledError(CommandBusError):
    """This attempt was asked to stop: by a person, by its worker's shutdown, or because its lease was lost.

    Raised by the context's `raise_if_canceled()`, `sleep()`, `connection()` and `transaction()`; a handler should
    clean up and let it through, within its grace.
    """


class DeadlineExceededError(AttemptCanceledError, TimeoutError):
    """The attempt's deadline, or that of a child context, has passed."""


class LimitLostError(AttemptCanceledError):
    """The permit of a limit is lost: its lease could not be renewed in time, and somebody else may have it now.

    Code in a `limit` block that gets this error must make no more calls in the block. In a handler the attempt is
    asked to stop, and is not charged.
    """

    def __init__(self, message: str, *, limit: str | None = None) -> None:
        super().__init__(message)
        self.limit = limit


class ApiTimeoutError(DeadlineExceededError):
    """The one call in a block of a limit (`ctx.limit`, `bus.limit`) took longer than its timeout."""

    def __init__(self, message: str = "timeout") -> None:
        super().__init__(message)


class UnknownLimitError(CommandBusError, LookupError):
    """Nobody has declared a limit with this name."""

    def __init__(self, name: str, known: object = ()) -> None:
        names = ", ".join(sorted(known)) if isinstance(known, list | tuple | set | frozenset) and known else "none"
        super().__init__(
            f"unknown limit {name!r} (known: {names}); declare it with [limits.{name}] in commandbus.toml, with "
            f"Limit({name!r}, concurrency=…) in code, or with "
            f"`commandbus limits set {quoted(name)} --concurrency N`"
        )
        self.name = name


class BreakerOpenError(CommandBusError):
    """The breaker of a command type is open, and is configured to refuse commands. Nothing was sent."""

    def __init__(self, domain: str, command_type: str, reason: str) -> None:
        super().__init__(
            f"the breaker of command_type {command_type!r} of domain {domain!r} is open: {reason}; nothing was "
            f"sent. See `commandbus breakers`"
        )
        self.domain = domain
        self.command_type = command_type
        self.reason = reason


class ConnectionInUseError(CommandBusError):
    """An attempt has one connection at a time, because there are only as many connections as slots.

    If an attempt could take a second one, slots could wait for each other until they time out.
    """


class DuplicateHandlerError(CommandBusError, ValueError):
    """A handler for this (domain, command_type) is registered already."""


class UnknownCommandTypeError(CommandBusError, LookupError):
    """No handler is registered for this (domain, command_type)."""

    def __init__(self, domain: str, command_type: str) -> None:
        super().__init__(
            f"no handler for command_type {command_type!r} in domain {domain!r} is registered in this worker"
        )
        self.domain = domain
        self.command_type = command_type


class CommandFailure(Exception):  # noqa: N818 - it is what happened to a command, not an error of the bus
    """Raised by handlers; `code` is a short machine-readable reason, `details` any JSON value."""

    default_code = "FAILED"

    def __init__(self, message: str = "", *, code: str | None = None, details: object = None) -> None:
        super().__init__(message)
        self.code = code if code is not None else self.default_code
        self.details = details


class TransientCommandError(CommandFailure):
    """Retry by the retry policy; to the troubleshooting queue when the attempts are used up."""

    default_code = "TRANSIENT"


class RateLimitError(TransientCommandError):
    """An external API said "not now" (HTTP 429). The command waits and spends no attempt. Everybody else who uses
    the limit waits, too.

    `retry_after`: a duration, or the value of a `Retry-After` header, if the API said how long. `limit`: the
    name of the limit; by default the limit of the `ctx.limit` block that raises this, or the handler's own.
    """

    def __init__(
        self,
        message: str = "rate limited",
        *,
        retry_after: float | str | timedelta | None = None,
        limit: str | None = None,
        code: str = "RATE_LIMITED",
        details: object = None,
    ) -> None:
        super().__init__(message, code=code, details=details)
        self.retry_after = retry_after
        self.limit = limit


class LimitTimeoutError(TransientCommandError, TimeoutError):
    """No permit of a limit became free in time. That is not a 429: nobody called the API."""

    def __init__(self, message: str, *, limit: str | None = None) -> None:
        super().__init__(message, code="LIMIT_TIMEOUT")
        self.limit = limit


class PermanentCommandError(CommandFailure):
    """A retry would not help: a person must look (troubleshooting queue)."""

    default_code = "PERMANENT"


class InvalidPayloadError(PermanentCommandError):
    """The payload of a command is not what its handler's type says. The handler was not called.

    `details` is a list of what is wrong: `{"path": "data.items[3].price", "problem": "must be a number"}`.
    """

    default_code = "INVALID_PAYLOAD"


class TransactionUsedError(PermanentCommandError, CommandBusError):
    """The transaction that completes a command was used wrongly: an attempt has only one, and one result.

    If nothing is committed yet, the command goes to the troubleshooting queue.
    """

    default_code = "TRANSACTION_USED"


class MiddlewareError(PermanentCommandError):
    """A middleware breaks a rule: it calls `call_next` twice, or without `await`, or not at all around a send. A
    command whose attempt it was around goes to the troubleshooting queue."""

    default_code = "MIDDLEWARE"


class TransactionEndedError(PermanentCommandError):
    """A handler has ended the transaction of ctx.transaction() itself, or tried to.

    Its writes may be committed without the command's completion, and a retry would write them again. So a person
    must look.
    """

    def __init__(self, command_id: str, how: str) -> None:
        super().__init__(
            f"the handler of command {command_id!r} has ended the transaction of ctx.transaction() with {how}: "
            f"its writes and the command's completion are no longer one commit. Leave COMMIT and ROLLBACK to the "
            f"block, which commits at its end and rolls back on an error. Savepoints are fine; for transactions "
            f"of its own a handler has ctx.connection()",
            code="TRANSACTION_ENDED",
        )
        self.command_id = command_id


class EffectUncertainError(PermanentCommandError):
    """An earlier attempt may have made the call of an effect (`ctx.effect`), and nobody can tell. The command goes
    to the troubleshooting queue. A person finds out, and says it with `commandbus effect resolve`."""

    default_code = "EFFECT_UNCERTAIN"


class EffectMisuseError(PermanentCommandError):
    """A handler uses an effect in a way that could repeat its call: with another key than before, or in a block
    that does not ask whether the call is due."""

    default_code = "EFFECT_MISUSE"


class BusinessRuleException(CommandFailure):
    """A business rule says no: the command is FAILED for good, and nobody needs to look."""

    default_code = "BUSINESS_RULE"


def _why(error_type: str | None, error_code: str | None, error: str | None) -> str:
    text = ": ".join(part for part in (error_type, error) if part)
    code = f" [{error_code}]" if error_code else ""
    return f"{code}: {text}" if text else code
