"""What the tests of back ends share: limits that are declared in a line, clients in threads, and who is inside."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import psycopg

from commandbus.clock import boottime
from commandbus.db.drivers import run
from commandbus.flow.limits.declare import LimitLocation, LimitRow, declare, get_limit
from commandbus.flow.limits.redis_outage import HeartbeatPace
from commandbus.limits.permit_clock import PermitClock
from commandbus.limits.requests import Permit
from commandbus.model.limit import Limit

QUICK = HeartbeatPace(beat=0.2, live=6.0, patience=0.5)
"""Programs that look often, and are counted out late: a busy machine must not make one look dead."""


def declare_limit(database: str, *, store: str = "redis", name: str = "docai", **options: Any) -> LimitRow:
    """Declare a limit, or change it, and read its row."""
    with psycopg.connect(database, autocommit=True) as conn:
        run(conn, declare([Limit(name, **options)], LimitLocation("test", store)))
        return run(conn, get_limit(name))


def tokens(count: int) -> list[str]:
    """So many new tokens."""
    return [uuid.uuid4().hex for _ in range(count)]


@dataclass(frozen=True)
class Maker:
    """Back ends of one kind, and limits for them."""

    store: Callable[..., Any]
    limit: Callable[..., LimitRow]
    kind: str

    def __call__(self, name: str = "client") -> Any:
        return self.store(name)


class Inside:
    """Who is inside at any time, as the resource itself would see it."""

    def __init__(self, most: int) -> None:
        self._lock = threading.Lock()
        self._now: set[str] = set()
        self.most = most
        self.peak = 0
        self.entries = 0

    def enter(self, token: str) -> None:
        with self._lock:
            self._now.add(token)
            self.entries += 1
            self.peak = max(self.peak, len(self._now))

    def leave(self, token: str) -> None:
        with self._lock:
            self._now.discard(token)

    @property
    def now(self) -> int:
        with self._lock:
            return len(self._now)

    def assert_never_above(self) -> None:
        """Never were more inside than may be."""
        assert self.peak <= self.most, f"{self.peak} were inside, {self.most} may be"


class Client:
    """A program: a thread that owns a back end, ticks, and does what it is asked, as a limit client does.

    `work(limit, inside)` makes it enter and leave without end, with up to `width` permits at once: most for a few
    hundredths of a second, every eighth for two leases. What is lost is left at once.
    """

    def __init__(self, store: Any) -> None:
        self.store = store
        self._orders: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._labour: Callable[[], None] | None = None
        self._worker: _Labour | None = None
        self._is_frozen = threading.Event()
        self.modes: list[str] = []
        self._thread = threading.Thread(target=self._live, name="limit-client", daemon=True)
        self._thread.start()

    def ask(self, what: Callable[[], Any]) -> Any:
        """Do something on its thread."""
        future: Future[Any] = Future()
        self._orders.put((what, future))
        return future.result(60)

    def take(self, limit: Any, count: int = 1, seconds: float | None = None) -> list[str]:
        wanted = tokens(count)
        granted = self.ask(lambda: self.store.take(limit, wanted, seconds or limit.lease))
        assert granted == wanted[: len(granted)]
        return list(granted)

    def renew(self, limit: Any, held: list[str]) -> list[str]:
        return list(self.ask(lambda: self.store.renew(limit, held)))

    def release(self, limit: Any, held: list[str]) -> None:
        self.ask(lambda: self.store.release(limit, held))

    def usage(self, limit: Any) -> Any:
        return self.ask(lambda: self.store.usage(limit))

    @property
    def mode(self) -> str:
        return str(self.store.mode)

    def work(self, limit: Any, inside: Inside, *, width: int = 10) -> None:
        """Begin to enter and leave."""
        self._worker = _Labour(self.store, limit, inside, width)
        self._labour = self._worker.step

    def freeze(self) -> None:
        """Be as a process that was stopped: nothing is said or done, until `thaw`."""
        self._is_frozen.set()

    def thaw(self) -> None:
        self._is_frozen.clear()

    def stop(self, *, kill: bool = False) -> None:
        """End in order, or without a word."""
        if self._thread.is_alive():
            if kill:
                self._labour = None
                self.store.close = self._drop
            self._is_frozen.clear()
            self._orders.put(None)
            self._thread.join(30)
            if self._worker is not None:
                self._worker.end()

    def die(self) -> None:
        """Be killed at work: its calls go on until the leases of their permits end."""
        assert self._worker is not None
        self.stop(kill=True)
        self._worker.die()

    def _drop(self) -> None:
        """What the kernel does with the connections of a process that was killed."""
        self.store._connection.close()
        self.store._permits.close()

    def _live(self) -> None:
        while True:
            if self._is_frozen.is_set():
                time.sleep(0.01)
                continue
            with contextlib.suppress(queue.Empty):
                order = self._orders.get(timeout=0.005 if self._labour else 0.05)
                if order is None:
                    self.store.close()
                    return
                self._do(*order)
            if self._is_frozen.is_set():
                continue
            self.store.tick()
            if not self.modes or self.modes[-1] != self.mode:
                self.modes.append(self.mode)
            if self._labour:
                self._labour()

    def _do(self, what: Callable[[], Any], future: Future[Any]) -> None:
        try:
            future.set_result(what())
        except BaseException as error:
            future.set_exception(error)


class _Labour:
    """Enters and leaves. As in a worker, a permit clock ends what was not renewed in time, however long the thread
    of the permit store waits for PostgreSQL or Redis."""

    def __init__(self, store: Any, limit: Any, inside: Inside, width: int) -> None:
        self._backend = store
        self._limit = limit
        self._inside = inside
        self._width = width
        self._entries = 0
        self._held: dict[str, _Stay] = {}
        self._clock = PermitClock("labour", self._end)
        self._clock.start()

    def die(self) -> None:
        """After its end, its calls go on until the leases of their permits end."""
        for stay in self._held.values():
            left = stay.permit.renewed_at + stay.permit.lease - boottime()
            threading.Timer(left, self._inside.leave, [stay.permit.token]).start()

    def end(self) -> None:
        """It enters and leaves no more."""
        for stay in self._held.values():
            self._clock.forget(stay.permit)
        self._clock.stop()

    def step(self) -> None:
        now = boottime()
        for token in [token for token, stay in self._held.items() if stay.permit.is_lost]:
            del self._held[token]
        done = [token for token, stay in self._held.items() if stay.ends_at <= now]
        for token in done:
            self._leave(token)
        if done:
            self._backend.release(self._limit, done)
        self._renew([token for token, stay in self._held.items() if stay.renew_at <= now])
        room = self._width - len(self._held)
        if room > 0:
            self._enter(tokens(room))

    def _renew(self, due: list[str]) -> None:
        if not due:
            return
        for token in self._backend.renew(self._limit, due):
            self._leave(token)
        lease, again_at = self._limit.lease, boottime() + self._limit.lease / 10
        for token in due:
            if (stay := self._held.get(token)) is not None:
                stay.permit.renewed_at = self._backend.renewed_at(self._limit, token) or stay.permit.renewed_at
                stay.renew_at = max(stay.permit.renewed_at + lease / 3, again_at)

    def _enter(self, wanted: list[str]) -> None:
        lease, asked_at = self._limit.lease, boottime()
        for token in self._backend.take(self._limit, wanted, lease):
            # Some stay for long, over whatever happens meanwhile.
            stays = 2 * lease if self._entries % 8 == 0 else 0.03
            self._entries += 1
            permit = Permit(self._limit.name, token, lease, holder="a labour", asked_at=asked_at)
            if permit.is_sure:  # otherwise its thread stood still for so long that nobody may begin
                self._inside.enter(token)
                self._clock.watch(permit)
            else:
                stays = 0.0
            self._held[token] = _Stay(permit, asked_at + stays, asked_at + lease / 3)

    def _leave(self, token: str) -> None:
        permit = self._held.pop(token).permit
        self._clock.forget(permit)
        self._inside.leave(token)

    def _end(self, permit: Permit) -> None:
        permit.is_lost = True
        self._inside.leave(permit.token)


@dataclass
class _Stay:
    """A permit, when its holder leaves, and when it is renewed (by `boottime`)."""

    permit: Permit
    ends_at: float
    renew_at: float
