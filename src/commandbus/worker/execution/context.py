"""HandlerContext: what a handler gets besides its command.

`connection()` is a plain connection: its writes may happen twice if the attempt is repeated. `transaction()` is a
connection whose transaction also commits the command's completion, so its writes happen exactly once. The
settlement is the last statement before COMMIT, under the attempt's fence. If the fence is gone, everything in the
block is rolled back.

`deadline`, `remaining()`, `canceled` and `raise_if_canceled()` tell how much time is left. `sleep()` ends early
when the attempt is asked to stop. `extend()` asks for more time. `child(timeout=…)` is a context with its own,
shorter deadline; it shares everything else with its parent.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, contextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Self, TypeVar
from uuid import UUID

import psycopg
from psycopg import AsyncConnection, Connection, IsolationLevel
from psycopg.pq import TransactionStatus

from commandbus import sql
from commandbus.clock import monotonic
from commandbus.db.drivers import UnreplicatedError, run, run_async
from commandbus.errors import (
    AttemptFencedError,
    ConnectionInUseError,
    DeadlineExceededError,
    InvalidCommandError,
    PermanentCommandError,
    TransactionUsedError,
    TransientCommandError,
)
from commandbus.flow.commands.settle import settle, settle_one
from commandbus.flow.effects.write import Checkpoint, Fenced, Write, Written
from commandbus.flow.operation import Operation, Statement, Steps, operation
from commandbus.lazy import lazy
from commandbus.model import payload
from commandbus.model.attempt_outcome import AttemptOutcome
from commandbus.model.command import Command
from commandbus.model.durations import Duration, format_seconds, parse_seconds
from commandbus.model.json_values import Json, JsonValue
from commandbus.model.limit import WAIT_SECONDS
from commandbus.model.retry import RetryPolicy
from commandbus.model.safe_text import escaped
from commandbus.model.snooze import Snooze
from commandbus.model.timeouts import SHORTEST
from commandbus.quick_dataclass import dataclass
from commandbus.worker.execution.attempt import CHILD_LATE, NEVER, Attempt, Scope, Stop
from commandbus.worker.execution.connections import HandlerConnections
from commandbus.worker.execution.effects import (
    AskWrite,
    AsyncEffectBlock,
    Effect,
    EffectBlock,
    EffectOptions,
    SyncEffectBlock,
    Verify,
)
from commandbus.worker.execution.handler_permits import AsyncBlock, HandlerPermits, PermitProvider
from commandbus.worker.execution.handlers import Handler
from commandbus.worker.execution.lifespan_declarations import WorkerState
from commandbus.worker.execution.one_transaction import OneTransaction
from commandbus.worker.execution.outcome_forecast import forecast

if TYPE_CHECKING:
    from commandbus.limits import with_block
    from commandbus.limits.with_block import Hold
else:
    with_block = lazy("commandbus.limits.with_block")  # most workers have no limits

C = TypeVar("C")
MAX_PROGRESS_BYTES = 4096
_REFUSED = (  # the server is there, and rolled back
    psycopg.errors.QueryCanceled,
    psycopg.errors.LockNotAvailable,
    psycopg.errors.SerializationFailure,
    psycopg.errors.DeadlockDetected,
)
_LOOK_SECONDS = 0.1  # a sync handler that waits for its lease notices a stop request within this time
_LONGEST_WAIT = 3600.0  # threading cannot wait for years at a time
logger = logging.getLogger("commandbus.handler")


@dataclass(frozen=True, slots=True)
class Services:
    """What contexts of one worker share."""

    worker: str
    connections: HandlerConnections
    max_payload_bytes: int
    default_max_attempts: int
    extend: Callable[[Attempt, float], Future[bool]]
    hold: Callable[[Attempt], Future[bool]]
    """Makes the lease last beyond the deadline, and keeps the queue row as it is until `release`."""
    release: Callable[[Attempt], None]
    extend_timeout: float
    max_extension: float
    progress: Callable[[Attempt, str], None]
    """Stores what `heartbeat` was told (JSON text), soon."""
    limits: PermitProvider
    """Permits of limits, for blocks of handlers' code."""
    state: WorkerState
    policy: RetryPolicy
    """The policy of handlers that have none of their own."""
    await_on_loop: Callable[[Attempt, Awaitable[Any]], tuple[Any, BaseException | None]]
    write: Callable[[Attempt, Write], Future[Written]]
    """Writes checkpoints and effects under the attempt's fence, on a connection of the worker's own."""


def dump_result(result: Any, max_bytes: int, handler: Handler | None = None) -> str:
    """The JSON text of a result. A result that is not JSON is a permanent error: a retry would repeat it."""
    default = None if handler is None else handler.json_default
    try:
        return payload.dump(result, what="result", max_bytes=max_bytes, default=default)
    except InvalidCommandError as error:
        raise PermanentCommandError(str(error), code="INVALID_RESULT") from error


class HandlerTransaction(Generic[C]):
    """The `tx` of ctx.transaction(): its connection, and `complete(result)`.

    It can be passed as `conn=` to a bus: what is sent in it is sent if, and only if, the command completes.
    """

    def __init__(self, connection: C, max_bytes: int, handler: Handler | None = None) -> None:
        self.connection = connection
        self.max_bytes = max_bytes
        self._handler = handler
        self._result: str | None = None

    def complete(self, result: JsonValue = None) -> None:
        """Set the command's result (JSON); without this call it is null."""
        self._result = dump_result(result, self.max_bytes, self._handler)

    @property
    def execute(self) -> Any:
        """`connection.execute` (to be awaited on an async connection)."""
        return self.connection.execute  # type: ignore[attr-defined]

    @property
    def cursor(self) -> Any:
        """`connection.cursor`."""
        return self.connection.cursor  # type: ignore[attr-defined]

    @property
    def commit(self) -> Callable[[], object]:
        """`connection.commit`, which raises TransactionEndedError: the block commits at its end."""
        return self.connection.commit  # type: ignore[attr-defined,no-any-return]

    @property
    def rollback(self) -> Callable[[], object]:
        """`connection.rollback`: only before an error. Otherwise the block raises TransactionEndedError."""
        return self.connection.rollback  # type: ignore[attr-defined,no-any-return]


class _Context:
    """What both contexts share."""

    __slots__ = ("_attempt", "_checkpoint", "_command", "_log", "_scope", "_services")

    def __init__(self, attempt: Attempt, services: Services, scope: Scope | None = None) -> None:
        self._attempt = attempt
        self._services = services
        self._scope = scope
        self._command: Command | None = None
        self._checkpoint: tuple[Any] | None = None
        self._log: logging.LoggerAdapter[logging.Logger] | None = None

    @property
    def command(self) -> Command:
        """The command."""
        if self._command is None:
            self._command = self._attempt.command()
        return self._command

    @property
    def attempt(self) -> int:
        """Which of the `max_attempts` this is: 1, 2, … Attempts that were not charged (parked, given back, stopped
        through no fault of their own) do not count. After an operator's retry it begins at 1 again."""
        return self._attempt.charge

    @property
    def attempt_number(self) -> int:
        """Its running number in the command's history, which counts all attempts, also over operators' retries."""
        return self._attempt.number

    @property
    def max_attempts(self) -> int:
        """How many attempts will be charged before a person must look."""
        handler = self._attempt.handler
        if self._attempt.max_attempts is not None:
            return self._attempt.max_attempts
        if handler is not None and handler.retry_policy is not None:
            return handler.retry_policy.max_attempts
        return self._services.default_max_attempts

    @property
    def internal_id(self) -> int:
        """The number of the command's row, as `commandbus show` tells it (#7)."""
        return self._attempt.id

    @property
    def worker(self) -> str:
        """The id of the worker that runs this."""
        return self._services.worker

    @property
    def state(self) -> WorkerState:
        """What the functions of `handlers.on_start` and `handlers.lifespan` made, for all attempts of this
        process."""
        return self._services.state

    def outcome_of(self, error: BaseException | None) -> AttemptOutcome:
        """Returns what will become of the command if this attempt raises `error` (None: if it returns), for
        middleware. Until the attempt has ended, a person, a deadline or a limit may still decide otherwise."""
        return forecast(self._attempt, error, self._services.policy)

    @property
    def log(self) -> logging.LoggerAdapter[logging.Logger]:
        """A logger whose records carry the command."""
        if self._log is None:
            attempt = self._attempt
            extra = {
                "domain": attempt.domain,
                "command_type": escaped(attempt.command_type),
                "command_id": escaped(attempt.command_id),
                "attempt": attempt.charge,
                "attempt_number": attempt.number,
            }
            self._log = logging.LoggerAdapter(logger, extra)
        return self._log

    @property
    def last_checkpoint(self) -> Json:
        """The last value that `checkpoint()` has stored for this command, in an earlier attempt or in this one;
        None if there is none. It came with the command: reading it asks nobody."""
        if self._checkpoint is None:
            self._checkpoint = (payload.loads_or_none(self._attempt.checkpoint),)
        return self._checkpoint[0]

    # --- time ------------------------------------------------------------------------------------------------

    @property
    def deadline(self) -> datetime | None:
        """The moment at which this is asked to stop, by this machine's clock; None if it never is."""
        left = self._left()
        return None if left == NEVER else datetime.now(UTC) + timedelta(seconds=left)

    def remaining(self) -> float | None:
        """Seconds until the deadline, to hand to sockets and clients as their timeout; None for no deadline.

        Never 0, which would switch a timeout off: at least a millisecond.
        """
        left = self._left()
        return None if left == NEVER else max(SHORTEST, left)

    @property
    def canceled(self) -> threading.Event:
        """Set when the handler is asked to stop: `ctx.canceled.is_set()`, `ctx.canceled.wait(…)`."""
        event = self._attempt.event() if self._scope is None else self._scope.event
        if not event.is_set() and self._left() <= 0:
            event.set()  # the ladder looks four times a second; a handler that asks in between is told at once
        return event

    def raise_if_canceled(self) -> None:
        """Raise AttemptCanceledError (DeadlineExceededError at the deadline) if asked to stop."""
        if (stop := self._stop()) is not None:
            raise stop.error()
        if self._left() <= 0:
            raise DeadlineExceededError(self._late())

    def snooze(self, delay: Duration, reason: str = "") -> NoReturn:
        """Leave the handler: the command is tried again after the delay, and this attempt is not charged.

        The same as `raise Snooze(delay, reason)`.
        """
        raise Snooze(delay, reason)

    def heartbeat(self, progress: JsonValue = None) -> None:
        """Report the progress (any JSON value), for `commandbus show` while it runs. Raises if asked to stop."""
        if progress is not None:
            text = payload.dump(
                progress, what="progress", max_bytes=MAX_PROGRESS_BYTES, remedy="say it in fewer words"
            )
            self._services.progress(self._attempt, text)
        self.raise_if_canceled()

    def _left(self) -> float:
        return self._deadline_at() - monotonic()

    def _deadline_at(self) -> float:
        own = self._attempt.deadline_at
        return own if self._scope is None else min(own, self._scope.deadline_at)

    def _permits(self) -> HandlerPermits:
        provider, attempt = self._services.limits, self._attempt
        return HandlerPermits(provider, attempt, deadline=self._deadline_at, check=self.raise_if_canceled)

    def _stop(self) -> Stop | None:
        return self._attempt.stop or (None if self._scope is None else self._scope.stop)

    def _late(self) -> str:
        attempt = self._attempt
        is_child = self._scope is not None and self._scope.deadline_at < attempt.deadline_at
        return CHILD_LATE if is_child else attempt.lateness()

    def _enter_child(self, timeout: Duration) -> Self:
        seconds = parse_seconds(timeout, name="timeout")
        if seconds == 0:
            raise ValueError("timeout of a child context must be more than 0: it can only shorten a deadline")
        scope = Scope(min(self._deadline_at(), monotonic() + seconds))
        self._attempt.extras.scopes.append(scope)
        if (stop := self._stop()) is not None:
            scope.stop = stop
            scope.event.set()
        return type(self)(self._attempt, self._services, scope)

    def _leave_child(self, child: Self) -> None:
        if child._scope is not None:
            self._attempt.extras.scopes.remove(child._scope)

    # --- the database ------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """An attempt has one transaction that completes its command."""
        command_id = self._attempt.command_id
        if self._attempt.has_committed:
            raise TransactionUsedError(
                f"command {command_id!r} was completed by an earlier ctx.transaction() of this attempt, and a "
                f"second one would complete it again: write everything in one block, or use ctx.connection() for "
                f"what may happen twice"
            )
        if self._attempt.extras.is_completing:
            raise TransactionUsedError(
                f"ctx.transaction() of command {command_id!r} is inside another one: use the tx of the outer "
                f"block; for a part that may fail alone, `with tx.connection.transaction():` is a savepoint"
            )

    def _refuse_beside_tx(self) -> None:
        handler = self._attempt.handler
        if handler is not None and handler.options.transaction:
            raise TransactionUsedError(
                f"handler {handler.name} has transaction=True, so it has its transaction already: use the "
                f"parameter tx instead of ctx.transaction()"
            )

    def _refuse_aborted(self, conn: Connection[Any] | AsyncConnection[Any]) -> None:
        """The handler has caught the error of a statement, and returned as if nothing had happened."""
        if conn.pgconn.transaction_status == TransactionStatus.INERROR:
            raise TransientCommandError(
                f"the handler of command {self._attempt.command_id!r} caught a database error and went on, but "
                f"PostgreSQL had aborted the transaction: nothing of it was committed. Let the error out, or put "
                f"the statement that may fail into a savepoint, `with tx.connection.transaction():`",
                code="TRANSACTION_ABORTED",
            )

    def _ask_to_extend(self, duration: Duration) -> tuple[float, Future[bool]]:
        """The lease keeper renews it on its own connection, because the handler's may be inside a transaction."""
        self.raise_if_canceled()
        attempt, most = self._attempt, self._services.max_extension
        wanted = parse_seconds(duration, name="duration")
        if attempt.extras.holds_row:
            raise ValueError(
                f"extend({format_seconds(wanted)}): the transaction keeps its snapshot, and a renewed lease would "
                f"conflict with it; extend before ctx.transaction() begins"
            )
        end = monotonic() + wanted
        if end - attempt.started_at > most:
            raise ValueError(
                f"extend({format_seconds(wanted)}): this attempt would run for "
                f"{format_seconds(end - attempt.started_at)}, more than max_extension ({format_seconds(most)})"
            )
        return end, self._services.extend(attempt, wanted)

    def _extended(self, is_held: bool, end: float) -> None:  # noqa: FBT001
        if not is_held:
            raise self._fenced()
        self._attempt.deadline_at = max(self._attempt.deadline_at, end)
        self.raise_if_canceled()

    def _not_extended(self, error: TimeoutError) -> Exception:
        if (stop := self._stop()) is not None:
            return stop.error()
        limit = format_seconds(self._services.extend_timeout)
        why = str(error) or f"the database has not answered for {limit}"
        return TimeoutError(
            f"the lease of command {self._attempt.command_id!r} could not be renewed: {why}; its deadline has not "
            f"moved"
        )

    def _ask_to_hold(self, level: IsolationLevel) -> Future[bool]:
        """The transaction keeps the snapshot that it is about to take: its queue row must stay as it is."""
        self.raise_if_canceled()
        if self._attempt.deadline_at == NEVER:
            raise PermanentCommandError(
                f"ctx.transaction() would be {_name_of(level)}, which needs a deadline: the lease is held until "
                f"then, because a renewal would be a conflict. Give the handler a timeout, or say "
                f'ctx.transaction(isolation="read committed")',
                code="NO_DEADLINE",
            )
        self._attempt.extras.holds_row = True
        return self._services.hold(self._attempt)

    def _release_row(self) -> None:
        if self._attempt.extras.holds_row:
            self._attempt.extras.holds_row = False
            self._services.release(self._attempt)

    def _refused(self, error: psycopg.OperationalError) -> Exception:
        """The settlement was refused. If the transaction keeps a snapshot, the error says what to do."""
        if not isinstance(error, psycopg.errors.SerializationFailure) or self._attempt.extras.holds_row:
            return error
        return TransientCommandError(
            f"the transaction could not complete the command, whose queue row has changed since its snapshot "
            f"({error}): say at its beginning that it keeps one, with ctx.transaction(isolation=…)",
            code="SERIALIZATION_FAILURE",
        )

    def _take_connection(self) -> None:
        if self._attempt.extras.has_connection:
            raise ConnectionInUseError(
                f"this attempt of command {self._attempt.command_id!r} already holds a connection: use that one "
                f"(in ctx.transaction() it is tx.connection), or leave its block first"
            )
        self._attempt.extras.has_connection = True

    def _transaction_on(self, conn: C) -> HandlerTransaction[C]:
        return HandlerTransaction(conn, self._services.max_payload_bytes, self._attempt.handler)

    def _settlement(self, tx: HandlerTransaction[Any]) -> Operation[dict[tuple[int, int], Any]]:
        attempt, worker, result = self._attempt, self._services.worker, tx._result
        if attempt.is_plain and attempt.spans is None:
            number, read_ct = attempt.number, attempt.read_ct
            return settle_one(attempt.domain, worker, attempt, read_ct=read_ct, number=number, result=result)
        return settle(attempt.domain, worker, [attempt.complete(result).only_of(attempt.sent)], waiting=True)

    # --- checkpoints and effects -------------------------------------------------------------------------------

    def _ask_checkpoint(self, value: JsonValue) -> Future[Written]:
        text = payload.dump(value, what="checkpoint", max_bytes=self._services.max_payload_bytes)
        self._check_may_write()
        return self._services.write(self._attempt, Checkpoint(text))

    def _note_checkpoint(self, value: JsonValue, written: Written) -> None:
        if written.fenced is not Fenced.HELD:
            raise self._lose("its checkpoint was not saved")
        self._checkpoint = (payload.loads(payload.dump(value, what="checkpoint", max_bytes=payload.COMPOSED)),)

    def _check_may_write(self) -> None:
        """Raise if the attempt has been asked to stop, has completed, or has lost its command."""
        if self._attempt.has_committed:
            raise TransactionUsedError(
                f"command {self._attempt.command_id!r} was completed by an earlier ctx.transaction(): it has no "
                f"next attempt"
            )
        self.raise_if_canceled()
        if self._attempt.is_fenced or self._attempt.is_lost:
            raise self._fenced()

    def _lose(self, what: str) -> AttemptFencedError:
        attempt = self._attempt
        attempt.is_lost = True
        return AttemptFencedError(
            f"attempt number {attempt.number} of command {attempt.command_id!r} no longer holds its lease; {what}"
        )

    def _unwritten(self, error: TimeoutError) -> Exception:
        """Nobody has answered in time."""
        if (stop := self._stop()) is not None:
            return stop.error()
        limit = format_seconds(self._services.extend_timeout)
        why = str(error) or f"the database has not answered for {limit}"
        return TimeoutError(f"a write for command {self._attempt.command_id!r} was not confirmed: {why}")

    def _check(self, unsettled: dict[tuple[int, int], Any]) -> None:
        if unsettled:
            self._attempt.is_lost = True
            raise self._fenced()

    def _note_commit(self, tx: HandlerTransaction[Any]) -> None:  # noqa: ARG002 - chunks need it
        self._attempt.has_committed = True

    def _ask_commit(self, tx: HandlerTransaction[Any]) -> Operation[bool]:  # noqa: ARG002 - chunks need it
        return has_committed(self._attempt, self._services.worker)

    def _fenced(self) -> AttemptFencedError:
        attempt = self._attempt
        return AttemptFencedError(
            f"attempt number {attempt.number} of command {attempt.command_id!r} no longer holds its lease; "
            f"nothing of it was committed"
        )

    def _uncertain(self, is_committed: bool, tx: HandlerTransaction[Any], error: psycopg.Error) -> None:  # noqa: FBT001
        """The connection broke in COMMIT: what the database says decides."""
        if not is_committed:
            raise TransientCommandError(
                f"the connection was lost in COMMIT and the transaction was not committed: {error}",
                code="COMMIT_LOST",
            ) from error
        self._note_commit(tx)


class _EffectPort:
    """What the blocks of effects need of their context."""

    __slots__ = ("_ctx",)

    def __init__(self, ctx: _Context) -> None:
        self._ctx = ctx

    @property
    def effect_attempt(self) -> Attempt:
        return self._ctx._attempt

    @property
    def max_payload_bytes(self) -> int:
        return self._ctx._services.max_payload_bytes

    def check_may_write(self) -> None:
        self._ctx._check_may_write()

    def lose(self, what: str) -> Exception:
        return self._ctx._lose(what)


def _level_of(isolation: IsolationLevel | str | None) -> IsolationLevel | None:
    """What a caller says of the isolation level: psycopg's own, or SQL's words."""
    if isolation is None or isinstance(isolation, IsolationLevel):
        return isolation
    known = {_name_of(level): level for level in IsolationLevel}
    words = isolation.lower().replace("_", " ") if isinstance(isolation, str) else ""
    if words not in known:
        raise ValueError(f"isolation must be one of {', '.join(map(repr, known))}, not {isolation!r}")
    return known[words]


def _name_of(level: IsolationLevel) -> str:
    return level.name.lower().replace("_", " ")


@operation(atomic=False)
def has_committed(attempt: Attempt, worker: str) -> Steps[bool]:
    """Has this attempt completed its command, by this worker?"""
    rows = yield Statement(
        sql.text("commands/has_committed"), {"id": attempt.id, "number": attempt.number, "worker": worker}
    )
    return bool(rows)


class HandlerContext(_Context):
    """The context of a `def` handler."""

    __slots__ = ()

    @contextmanager
    def connection(self) -> Iterator[Connection[Any]]:
        """A connection for the handler's own queries, one at a time; committed at the end of the block."""
        with self._connection() as conn:
            yield conn

    @contextmanager
    def _connection(self, **more: Any) -> Iterator[Connection[Any]]:
        self._take_connection()
        try:
            with self._services.connections.sync(self._attempt, deadline_at=self._deadline_at(), **more) as conn:
                yield conn
        finally:
            self._attempt.extras.has_connection = False

    def transaction(
        self, *, isolation: IsolationLevel | str | None = None
    ) -> AbstractContextManager[HandlerTransaction[Connection[Any]]]:
        """A transaction whose commit also completes the command. An attempt has one.

        The block commits and rolls back. A handler that does either itself gets TransactionEndedError, and its
        command goes to the troubleshooting queue. Savepoints are fine.

        `isolation`: "read committed", "repeatable read" or "serializable"; without it, the database's default. The
        latter two need a deadline: the lease is held until then, and progress is stored when the block has ended.
        """
        self._refuse_beside_tx()
        self._begin()
        return self._completing(isolation=isolation)

    @contextmanager
    def _completing(
        self, *, isolation: IsolationLevel | str | None = None
    ) -> Iterator[HandlerTransaction[Connection[Any]]]:
        """The block of `transaction()`, and of the tx of a handler with transaction=True."""
        self._begin()
        level, one = _level_of(isolation), OneTransaction(self._attempt.command_id)
        finishing = False
        try:
            with self._connection(isolation=level, before_snapshot=self._hold, one=one) as conn:
                tx = self._transaction_on(conn)
                self._attempt.extras.is_completing = True
                with one.judged(conn):
                    yield tx
                self._refuse_aborted(conn)
                finishing = True
                self._check(run(conn, self._settlement(tx)))
            self._note_commit(tx)
        except psycopg.OperationalError as error:
            if not finishing:
                raise
            if isinstance(error, UnreplicatedError):
                self._note_commit(tx)  # the completion is in that commit, too: nothing runs again
                raise
            if isinstance(error, _REFUSED):
                raise self._refused(error) from error
            with self.connection() as other:
                self._uncertain(run(other, self._ask_commit(tx)), tx, error)
        finally:
            self._attempt.extras.is_completing = False
            self._release_row()

    def _finish(self, awaitable: Awaitable[Any]) -> Any:
        """Run what its handler returned to its end, on the event loop, while this thread waits."""
        become_async(self)
        try:
            result, error = self._services.await_on_loop(self._attempt, awaitable)
        finally:
            self.__class__ = HandlerContext  # middleware goes on in this thread
        if error is not None:
            raise error
        return result

    def _hold(self, level: IsolationLevel) -> None:
        if not self._await_lease(self._ask_to_hold(level)):
            raise self._fenced()

    def extend(self, duration: Duration) -> None:
        """Move the deadline to at least this long from now, up to max_extension in all.

        The lease is renewed at once, for its usual time, and then as always. Raises AttemptFencedError if the
        command is lost, AttemptCanceledError if it was asked to stop, and TimeoutError if the lease could not be
        renewed within its own length; then the deadline has not moved.
        """
        end, asked = self._ask_to_extend(duration)
        self._extended(self._await_lease(asked), end)

    def _await_lease(self, asked: Future[bool]) -> bool:
        until = monotonic() + self._services.extend_timeout
        try:
            while not wait([asked], _LOOK_SECONDS).done and monotonic() < until and self._stop() is None:
                pass
            return asked.result(0)
        except TimeoutError as error:
            raise self._not_extended(error) from error
        finally:
            asked.cancel()  # the handler may have stopped waiting before the answer

    def checkpoint(self, value: JsonValue) -> None:
        """Store a JSON value for the next attempt (`ctx.last_checkpoint`). It is durable when this returns.

        Raises AttemptFencedError if the command is lost, AttemptCanceledError if the attempt was asked to stop,
        and TimeoutError if the database has not confirmed it.
        """
        self._note_checkpoint(value, self._await_written(self._ask_checkpoint(value)))

    def _write_effect(self, ask: AskWrite) -> Written:
        asked = self._services.write(self._attempt, ask.write)
        return self._await_written(asked, is_patient=ask.is_patient)

    def _await_written(self, asked: Future[Written], *, is_patient: bool = False) -> Written:
        until = monotonic() + self._services.extend_timeout
        try:
            while not wait([asked], _LOOK_SECONDS).done and monotonic() < until:
                if not is_patient and self._stop() is not None:
                    break
            return asked.result(0)
        except TimeoutError as error:
            raise self._unwritten(error) from error
        finally:
            if not is_patient:
                asked.cancel()  # it may have stopped waiting before the answer

    def effect(
        self,
        name: str,
        *,
        key: str | UUID | None = None,
        verify: Verify | None = None,
        settle_after: Duration | None = None,
        not_done_on: type[BaseException] | tuple[type[BaseException], ...] = (),
    ) -> AbstractContextManager[Effect]:
        """A call to the outside world that no attempt repeats without knowing what became of the last one:

            with ctx.effect("charge", verify=find_charge) as effect:
                effect.receipt = charge(idempotency_key=effect.key)

        The intent is committed before the block, and the receipt at its end. If an earlier attempt has stored a
        receipt, `effect.is_due` is False, and `effect.key` leaves the block. If an earlier attempt may have made
        the call, `verify(open_effect)` is asked: it returns the receipt, `NOT_DONE` or `UNKNOWN`. It is asked only
        if that attempt's process is dead, or `settle_after` has passed since that attempt ended. Without `verify`,
        or if nobody can tell, EffectUncertainError sends the command to the troubleshooting queue.

        `key`: the idempotency key; by default one is derived from the command and `name`. `not_done_on`:
        exceptions which prove that the call was not made.
        """
        options = EffectOptions.check(name, key, verify, settle_after, not_done_on)
        return SyncEffectBlock(EffectBlock(_EffectPort(self), options), options.verify, self._write_effect)

    def effect_once(
        self,
        name: str,
        call: Callable[[str], JsonValue],
        *,
        key: str | UUID | None = None,
        verify: Verify | None = None,
        settle_after: Duration | None = None,
        not_done_on: type[BaseException] | tuple[type[BaseException], ...] = (),
    ) -> Json:
        """`ctx.effect` in one call: returns `call(key)`, or the receipt that an earlier attempt has stored."""
        block = self.effect(name, key=key, verify=verify, settle_after=settle_after, not_done_on=not_done_on)
        with block as effect:
            if effect.is_due:
                effect.receipt = call(effect.key)
        return effect.receipt

    def sleep(self, duration: Duration) -> None:
        """Sleep, but raise as soon as the handler is asked to stop."""
        until = monotonic() + parse_seconds(duration, name="duration")
        while True:
            self.raise_if_canceled()
            left = until - monotonic()
            if left <= 0:
                return
            self.canceled.wait(max(0.0, min(left, self._left(), _LONGEST_WAIT)))

    def limit(
        self,
        name: str,
        *,
        wait: Duration = WAIT_SECONDS,
        timeout: Duration | None = None,
    ) -> AbstractContextManager[Hold]:
        """A permit of a limit for the block: `with ctx.limit("docai", timeout=60) as call: …`.

        Waits up to `wait` for it, then raises LimitTimeoutError. `timeout` is for the call in the block; without
        it the limit's `call_timeout` holds, and 0 is any time. After it, the attempt is asked to stop, and the
        ladder ends a handler that ignores that. A call that comes back later raises ApiTimeoutError at the end of
        the block. `call.remaining()` returns the time that is left.
        """
        return with_block.sync_block(self._permits(), name, *with_block.check_block_times(name, wait, timeout))

    @contextmanager
    def child(self, *, timeout: Duration) -> Iterator[HandlerContext]:
        """A context with a deadline of its own, never later than this one's: `with ctx.child(timeout=5) as c:`.

        Nothing interrupts Python code at a child's deadline: its `canceled` is set, its `sleep` and
        `raise_if_canceled` raise, and queries on its connections end soon after it.
        """
        child = self._enter_child(timeout)
        try:
            yield child
        finally:
            self._leave_child(child)


class AsyncHandlerContext(_Context):
    """The context of an `async def` handler."""

    __slots__ = ()

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[AsyncConnection[Any]]:
        """A connection for the handler's own queries, one at a time; committed at the end of the block."""
        async with self._connection() as conn:
            yield conn

    @asynccontextmanager
    async def _connection(self, **more: Any) -> AsyncIterator[AsyncConnection[Any]]:
        self._take_connection()
        try:
            lend = self._services.connections.asynchronous
            async with lend(self._attempt, deadline_at=self._deadline_at(), **more) as conn:
                yield conn
        finally:
            self._attempt.extras.has_connection = False

    def transaction(
        self, *, isolation: IsolationLevel | str | None = None
    ) -> AbstractAsyncContextManager[HandlerTransaction[AsyncConnection[Any]]]:
        """A transaction whose commit also completes the command. An attempt has one.

        The block commits and rolls back. A handler that does either itself gets TransactionEndedError, and its
        command goes to the troubleshooting queue. Savepoints are fine.

        `isolation`: "read committed", "repeatable read" or "serializable"; without it, the database's default. The
        latter two need a deadline: the lease is held until then, and progress is stored when the block has ended.
        """
        self._refuse_beside_tx()
        self._begin()
        return self._completing(isolation=isolation)

    @asynccontextmanager
    async def _completing(
        self, *, isolation: IsolationLevel | str | None = None
    ) -> AsyncIterator[HandlerTransaction[AsyncConnection[Any]]]:
        """The block of `transaction()`, and of the tx of a handler with transaction=True."""
        self._begin()
        level, one = _level_of(isolation), OneTransaction(self._attempt.command_id)
        finishing = False
        try:
            async with self._connection(isolation=level, before_snapshot=self._hold, one=one) as conn:
                tx = self._transaction_on(conn)
                self._attempt.extras.is_completing = True
                with one.judged(conn):
                    yield tx
                self._refuse_aborted(conn)
                finishing = True
                self._check(await run_async(conn, self._settlement(tx)))
            self._note_commit(tx)
        except psycopg.OperationalError as error:
            if not finishing:
                raise
            if isinstance(error, UnreplicatedError):
                self._note_commit(tx)  # the completion is in that commit, too: nothing runs again
                raise
            if isinstance(error, _REFUSED):
                raise self._refused(error) from error
            async with self.connection() as other:
                self._uncertain(await run_async(other, self._ask_commit(tx)), tx, error)
        finally:
            self._attempt.extras.is_completing = False
            self._release_row()

    async def _hold(self, level: IsolationLevel) -> None:
        if not await self._await_lease(self._ask_to_hold(level)):
            raise self._fenced()

    async def _await_lease(self, asked: Future[bool]) -> bool:
        try:
            return await asyncio.wait_for(asyncio.wrap_future(asked), self._services.extend_timeout)
        except TimeoutError as error:
            raise self._not_extended(error) from error

    async def extend(self, duration: Duration) -> None:
        """Move the deadline to at least this long from now, up to max_extension in all.

        The lease is renewed at once, for its usual time, and then as always. Raises AttemptFencedError if the
        command is lost, AttemptCanceledError if it was asked to stop, and TimeoutError if the lease could not be
        renewed within its own length; then the deadline has not moved.
        """
        end, asked = self._ask_to_extend(duration)
        self._extended(await self._await_lease(asked), end)

    async def checkpoint(self, value: JsonValue) -> None:
        """Store a JSON value for the next attempt (`ctx.last_checkpoint`). It is durable when this returns.

        Raises AttemptFencedError if the command is lost, AttemptCanceledError if the attempt was asked to stop,
        and TimeoutError if the database has not confirmed it.
        """
        self._note_checkpoint(value, await self._await_written(self._ask_checkpoint(value)))

    async def _write_effect(self, ask: AskWrite) -> Written:
        asked = self._services.write(self._attempt, ask.write)
        return await self._await_written(asked, is_patient=ask.is_patient)

    async def _await_written(self, asked: Future[Written], *, is_patient: bool = False) -> Written:
        answer: asyncio.Future[Written] = asyncio.wrap_future(asked)
        try:
            waited = asyncio.shield(answer) if is_patient else answer
            return await asyncio.wait_for(waited, self._services.extend_timeout)
        except TimeoutError as error:
            raise self._unwritten(error) from error

    def effect(
        self,
        name: str,
        *,
        key: str | UUID | None = None,
        verify: Verify | None = None,
        settle_after: Duration | None = None,
        not_done_on: type[BaseException] | tuple[type[BaseException], ...] = (),
    ) -> AbstractAsyncContextManager[Effect]:
        """A call to the outside world that no attempt repeats without knowing what became of the last one:

            async with ctx.effect("charge", verify=find_charge) as effect:
                effect.receipt = await charge(idempotency_key=effect.key)

        The intent is committed before the block, and the receipt at its end. If an earlier attempt has stored a
        receipt, `effect.is_due` is False, and `effect.key` leaves the block. If an earlier attempt may have made
        the call, `verify(open_effect)` is asked: it returns the receipt, `NOT_DONE` or `UNKNOWN`. It is asked only
        if that attempt's process is dead, or `settle_after` has passed since that attempt ended. Without `verify`,
        or if nobody can tell, EffectUncertainError sends the command to the troubleshooting queue.

        `key`: the idempotency key; by default one is derived from the command and `name`. `not_done_on`:
        exceptions which prove that the call was not made.
        """
        options = EffectOptions.check(name, key, verify, settle_after, not_done_on)
        return AsyncEffectBlock(EffectBlock(_EffectPort(self), options), options.verify, self._write_effect)

    async def effect_once(
        self,
        name: str,
        call: Callable[[str], Awaitable[JsonValue]],
        *,
        key: str | UUID | None = None,
        verify: Verify | None = None,
        settle_after: Duration | None = None,
        not_done_on: type[BaseException] | tuple[type[BaseException], ...] = (),
    ) -> Json:
        """`ctx.effect` in one call: returns `call(key)`, or the receipt that an earlier attempt has stored."""
        block = self.effect(name, key=key, verify=verify, settle_after=settle_after, not_done_on=not_done_on)
        async with block as effect:
            if effect.is_due:
                effect.receipt = await call(effect.key)
        return effect.receipt

    async def sleep(self, duration: Duration) -> None:
        """Sleep, but raise as soon as the handler is asked to stop."""
        self.raise_if_canceled()
        wanted, left = parse_seconds(duration, name="duration"), self._left()
        await asyncio.sleep(min(wanted, max(left, 0.0)))
        if wanted > left:
            raise DeadlineExceededError(self._late())
        self.raise_if_canceled()

    def limit(
        self,
        name: str,
        *,
        wait: Duration = WAIT_SECONDS,
        timeout: Duration | None = None,
    ) -> AbstractAsyncContextManager[Hold]:
        """A permit of a limit for the block: `async with ctx.limit("docai", timeout=60): …`.

        Waits up to `wait` for it, then raises LimitTimeoutError. After `timeout` (without it: the limit's
        `call_timeout`; 0 is any time) the block cancels what it awaits, and raises ApiTimeoutError: the handler
        may go on with its other calls.
        """
        times = with_block.check_block_times(name, wait, timeout)
        return AsyncBlock(with_block.async_block(self._permits(), name, *times))

    @asynccontextmanager
    async def child(self, *, timeout: Duration) -> AsyncIterator[AsyncHandlerContext]:
        """A context with a deadline of its own, never later than this one's.

        At its deadline the block cancels what it awaits, and raises DeadlineExceededError.
        """
        child = self._enter_child(timeout)
        left = child._left()
        try:
            async with asyncio.timeout(None if left == NEVER else left) as limit:
                yield child
        except TimeoutError as error:
            if limit.expired() and not isinstance(error, DeadlineExceededError):
                raise DeadlineExceededError(child._late()) from error
            raise
        finally:
            self._leave_child(child)


def become_async(ctx: HandlerContext) -> None:
    """Its handler is `def`, but returned an awaitable: on the event loop it needs what can be awaited."""
    ctx.__class__ = AsyncHandlerContext  # type: ignore[assignment]  # both hold the same
