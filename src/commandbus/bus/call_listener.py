"""The listener of a bus: one thread that learns which called commands have an outcome, and passes it to the
callers.

    call ──register──► waiting ──► looked at ──► PENDING: stays      (a notification: looked at again)
                                            └──► any other: its future is resolved, and it is forgotten

It LISTENs on its own connection, which is restored automatically, and reads rows on the same connection. So if a
look finds no outcome yet, a notification will follow. One statement looks at every command that was registered,
was notified, or was waiting when the connection was made (a notification may have been missed before that).
Between notifications the thread sleeps. It polls behind a pooler, which delivers no notifications.

Nobody notifies of a command that was sent without a caller (`bus.wait`, or `bus.call` with the id of an earlier
send). The listener looks at such a command again after a quarter of the time that it has been waited for, at
least after FIRST_AGAIN_SECONDS and at most after LAST_AGAIN_SECONDS. All that are due share one statement.

It knows nothing about timeouts: a caller leaves when its time is up, whether or not the database is reachable.
Both buses use it; the async one through `asyncio.wrap_future`, which resolves by `call_soon_threadsafe`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import psycopg
from psycopg import Connection

from commandbus.clock import monotonic
from commandbus.db.bus_pool import keep
from commandbus.db.database_address import Database
from commandbus.db.pool import lasting_conninfo
from commandbus.db.service import DatabaseService
from commandbus.errors import (
    BusClosedError,
    CallTimeoutError,
    CommandNotFoundError,
    ConfigurationError,
)
from commandbus.flow.operation import Operation
from commandbus.lazy import lazy
from commandbus.model.command import CommandStatus, SentCommand
from commandbus.settings import Settings

if TYPE_CHECKING:
    from commandbus.flow.commands import call as calls
    from commandbus.flow.commands.call import CommandOutcome
else:
    calls = lazy("commandbus.flow.commands.call")

Heard: TypeAlias = "Future[CommandOutcome | None]"
"""The outcome of a command; None if the listener's database has no such command."""

LOOKED_AT_ONCE = 200
PING_SECONDS = 3.0
POLL_SECONDS = 0.25
FIRST_AGAIN_SECONDS = 0.02
LAST_AGAIN_SECONDS = 1.0
AGAIN_FACTOR = 0.25
IDLE_SECONDS = 3600.0
CLOSE_SECONDS = 5.0
LAST_LOOK_SECONDS = 2.0  # how long a caller whose time is up may take to look once more
NOT_LIBPQ = frozenset({"autocommit", "prepare_threshold", "context", "row_factory", "cursor_factory"})


class CallListener(DatabaseService):
    """One thread, one connection, any number of waiters."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings, name="bus", part="listener", on_end=self._end)
        self._lock = threading.Lock()
        self._waiting: dict[int, dict[Heard, SentCommand]] = {}
        self._to_look_at: set[int] = set()
        self._again: dict[int, tuple[float, float]] = {}  # since when these are looked at, and when again
        self._over: BaseException | None = None  # why the listener has ended

    @property
    def is_serving(self) -> bool:
        """Can a caller wait here? Not after the listener has ended, and not in a forked process, which has no such
        thread."""
        return self._over is None and self._thread.is_alive()

    @contextmanager
    def awaiting(self, sent: SentCommand) -> Iterator[Heard]:
        """Wait for the outcome of a command that has been sent. If it was there before (`created` is False), it
        may have been sent without a caller."""
        heard: Heard = Future()
        now = monotonic()
        with self._lock:
            if self._over is not None:
                raise self._reason(sent)
            self._waiting.setdefault(sent.id, {})[heard] = sent
            self._to_look_at.add(sent.id)
            if not sent.created:
                self._again[sent.id] = now, now + FIRST_AGAIN_SECONDS
        self.wake()
        try:
            yield heard
        finally:
            self._forget(sent.id, heard)

    def end_soon(self) -> None:
        """End, and resolve every call that waits. Never blocks."""
        self._stopping.set()
        self.wake()

    def close(self) -> None:
        """End, and resolve every call that waits. The connection is closed when this returns."""
        self.end_soon()
        self.finish()  # at once: the thread may be busy with a server that does not answer
        self.join(CLOSE_SECONDS)

    # --- the thread --------------------------------------------------------------------------------------------

    def round(self) -> None:
        self.hear()
        seconds = self._look_again()
        if ids := self._take():
            self._look(ids)
        elif not self._waiting:
            self.sleep(IDLE_SECONDS)
        elif self.can_listen:
            self.sleep(seconds)  # then ping the server: a dead connection may give no sign
        else:
            self.sleep(POLL_SECONDS)
            self._look_at_all()

    def connected(self, conn: Connection[Any]) -> None:
        self.listen(conn, "commandbus_call")
        self._look_at_all()

    def heard(self, channel: str, payload: str) -> None:  # noqa: ARG002 - it listens on one
        ids = set(_ids_in(payload))
        with self._lock:
            self._to_look_at |= ids & self._waiting.keys()

    def lost(self, error: psycopg.Error) -> None:  # noqa: ARG002 - the base says why
        self._look_at_all()

    def finish(self) -> None:
        self._end(_Closed())

    def _take(self) -> list[int]:
        with self._lock:
            ids = sorted(self._to_look_at & self._waiting.keys())[:LOOKED_AT_ONCE]
            self._to_look_at.difference_update(ids)
            return ids

    def _look_again(self) -> float:
        """Look at those of which nobody notifies, if they are due. Returns the seconds until the next are due."""
        now, seconds = monotonic(), PING_SECONDS
        with self._lock:
            for id_, (since, due) in self._again.items():
                if due <= now:
                    self._to_look_at.add(id_)
                    pause = AGAIN_FACTOR * (now - since)
                    due = now + min(max(pause, FIRST_AGAIN_SECONDS), LAST_AGAIN_SECONDS)  # noqa: PLW2901
                    self._again[id_] = since, due
                seconds = min(seconds, due - now)
        return max(seconds, FIRST_AGAIN_SECONDS)

    def _look(self, ids: list[int]) -> None:
        seen = self._connection.run(calls.outcomes(self._named(ids)))
        told: list[tuple[Heard, CommandOutcome | None]] = []
        with self._lock:
            for id_ in ids:
                for heard, sent in list(self._waiting.get(id_, {}).items()):
                    outcome = _only_of(sent, seen.get(id_))
                    if outcome is None or outcome.status is not CommandStatus.PENDING:
                        del self._waiting[id_][heard]
                        told.append((heard, outcome))
        for heard, outcome in told:
            _resolve(heard, outcome)

    def _named(self, ids: list[int]) -> list[tuple[str, str]]:
        with self._lock:
            return list({sent[:2] for id_ in ids for sent in self._waiting.get(id_, {}).values()})

    def _look_at_all(self) -> None:
        with self._lock:
            self._to_look_at.update(self._waiting)

    def _forget(self, id_: int, heard: Heard) -> None:
        with self._lock:
            waiters = self._waiting.get(id_, {})
            waiters.pop(heard, None)
            if not waiters:
                self._waiting.pop(id_, None)
                self._to_look_at.discard(id_)
                self._again.pop(id_, None)

    def _end(self, why: BaseException) -> None:
        """End all waiting calls with this error, and accept no more."""
        with self._lock:
            self._over = self._over or why
            waiters = [waiter for waiters in self._waiting.values() for waiter in waiters.items()]
            self._waiting.clear()
            self._again.clear()
        for heard, sent in waiters:
            _resolve(heard, self._reason(sent))

    def _reason(self, sent: SentCommand) -> BaseException:
        assert self._over is not None  # noqa: S101 - asked for only after the end
        return BusClosedError(*sent[:2]) if isinstance(self._over, _Closed) else self._over


class Listening:
    """The listener of a bus: none before the first call, and a new one if the last one has ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listener: CallListener | None = None
        self._finalizer: weakref.finalize[..., Listening] | None = None

    def get(self, settings: Callable[[], Settings]) -> CallListener:
        """The listener. Starts one if there is none."""
        with self._lock:
            if self._listener is None or not self._listener.is_serving:
                self._listener = CallListener(settings())
                self._listener.start()
                if self._finalizer is not None:
                    self._finalizer.detach()
                self._finalizer = weakref.finalize(self, self._listener.end_soon)  # if nobody closes the bus
            return self._listener

    def leave_to_parent(self) -> None:
        """In a forked process: leave the listener to the parent. The next call starts another."""
        self._lock = threading.Lock()
        listener, self._listener = self._listener, None
        finalizer, self._finalizer = self._finalizer, None
        if finalizer is not None:
            finalizer.detach()
        if listener is not None:
            listener.leave_to_parent()
            keep(listener)

    def close(self) -> None:
        """End the listener, if there is one."""
        with self._lock:
            listener, self._listener = self._listener, None
            finalizer, self._finalizer = self._finalizer, None
        if finalizer is not None:
            finalizer.detach()
        if listener is not None:
            listener.close()


class WaitingCall:
    """One call: the command to send, and until when the caller waits for its outcome."""

    def __init__(self, send: Operation[SentCommand], listener: CallListener, *, seconds: float) -> None:
        self.send = send
        self.awaiting = listener.awaiting
        self._seconds = seconds
        self._until = monotonic() + seconds

    def seconds_to_send(self) -> float:
        """How long sending may take. Even a call with a very short wait is sent."""
        return max(self.remaining(), LAST_LOOK_SECONDS)

    def remaining(self) -> float:
        """Seconds that are left."""
        return max(0.0, self._until - monotonic())

    def conclude(self, sent: SentCommand, outcome: CommandOutcome | None) -> Any:
        """Returns the result, or raises the error of another outcome. `outcome` is the last one that was seen, if
        any."""
        if outcome is None:
            raise CommandNotFoundError(
                f"command {sent.command_id!r} of domain {sent.domain!r} is gone: it was sent, and removed (by the "
                f"retention, perhaps) before its outcome could be read"
            )
        if outcome.status is not CommandStatus.PENDING:
            return calls.conclude(outcome)
        if self.remaining():
            raise ConfigurationError(
                f"command {sent.command_id!r} was sent to the database of the pool that was lent to this bus, but "
                f"database_url, where the bus listens for outcomes, names another one; it must be the same"
            )
        raise self.timed_out(sent)

    def timed_out(self, sent: SentCommand) -> CallTimeoutError:
        """The error for a call whose time is up."""
        return CallTimeoutError(sent.domain, sent.command_id, self._seconds)


def address_of(database: Database, settings: Settings, pool: object) -> Settings:
    """Settings to listen with: their own database, or the database of the pool that was lent."""
    if pool is None or settings.database_url is not None:
        return database.resolve()
    conninfo, kwargs = getattr(pool, "conninfo", None), getattr(pool, "kwargs", None) or {}
    if not isinstance(conninfo, str) or not isinstance(kwargs, dict):
        raise ConfigurationError(
            "bus.call listens for outcomes on a connection of its own, and the pool that was lent does not say "
            "where to connect to (its conninfo or kwargs are computed); pass database_url as well"
        )
    given = {name: value for name, value in kwargs.items() if name not in NOT_LIBPQ}
    try:
        url = lasting_conninfo(
            conninfo or " ", **given
        )  # never empty, even if libpq's own variables contain the rest
    except psycopg.ProgrammingError:
        raise ConfigurationError(
            "bus.call listens for outcomes on a connection of its own, and cannot make one with the conninfo and "
            "kwargs of the pool that was lent; pass database_url as well"
        ) from None
    return replace(settings, database_url=url)


class _Closed(Exception):  # noqa: N818 - never raised: it marks the ordinary end
    """The bus was closed."""


def _only_of(sent: SentCommand, outcome: CommandOutcome | None) -> CommandOutcome | None:
    """The outcome, if it belongs to this command. Another database may have a command with the same number."""
    is_same = outcome is not None and (outcome.domain, outcome.command_id) == (sent.domain, sent.command_id)
    return outcome if is_same else None


def _ids_in(text: str) -> Iterable[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:  # not one of our notifications: anybody may notify
        return ()


def _resolve(heard: Heard, told: CommandOutcome | BaseException | None) -> None:
    if not heard.set_running_or_notify_cancel():
        return  # its caller has been canceled
    if isinstance(told, BaseException):
        heard.set_exception(told)
    else:
        heard.set_result(told)
