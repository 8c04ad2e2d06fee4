"""SharedRedis: what all semaphores of a program that use one Redis client share.

    take ──► held ──(renewed at a third of its lease)──► give
                └──► lost: Redis has given it away, because nobody could renew it in time

One connection for the scripts, one that listens for permits that were given back, and one thread, which renews
leases and wakes who waits. The thread lives while something is held or somebody waits. Who waits looks when it
registers, when it is woken, and when the next lease of another holder ends: what is told while nobody listens yet
is not missed, because everybody is woken once the thread listens.

A Redis that has lost its data has forgotten who holds a permit. A program that has known it before then begins a
new epoch, in which nobody gets a permit for one lease (`begin.lua`), and registers what it holds itself.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import field
from functools import partial
from typing import Any, Final
from weakref import WeakKeyDictionary

from commandbus.clock import monotonic
from commandbus.errors import ConfigurationError
from commandbus.limits.stores.redis.scripts import EpochError, RedisLostError, RedisScripts, make_pool
from commandbus.logger import safe_logger
from commandbus.quick_dataclass import dataclass

logger = safe_logger("commandbus.limits")

LISTEN_SECONDS: Final = 0.5
PAUSE_SECONDS: Final = 0.5
CHECK_SECONDS: Final = 1.0
"""How often who holds a permit looks whether Redis still has its data."""
_TRIES: Final = 3


@dataclass(frozen=True, slots=True)
class SemaphoreValues:
    """What the scripts must know of a semaphore; see `LimitValues`."""

    name: str
    environment: str
    concurrency: int
    lease: float
    per_second: float | None = None
    burst: int = 1
    shared: bool = True


@dataclass(slots=True)
class Permit:
    """One that is held, or waits to be given back. `is_local`: Redis was away, and knows nothing of it yet."""

    values: SemaphoreValues
    token: str
    ends: float
    is_local: bool = False
    is_given: bool = False
    on_lost: Callable[[], None] = field(default=lambda: None)


def check_client(client: Any) -> None:
    """Raise if this is no client of one Redis server."""
    kind = type(client).__name__
    pool = getattr(client, "connection_pool", None)
    if "Cluster" in kind:
        raise ConfigurationError(
            f"{kind}: a semaphore needs one Redis server, because all of its keys must be there; give it a "
            f"redis.Redis of one server"
        )
    if pool is None or not hasattr(pool, "connection_kwargs"):
        raise ConfigurationError(f"redis_client must be a client of redis-py such as redis.Redis, not {kind}")
    if "Sentinel" in type(pool).__name__:
        raise ConfigurationError(
            "a client of Redis Sentinel moves from server to server by itself, and a semaphore must know when: "
            "give it a redis.Redis of one server"
        )


class SharedRedis:
    """One per client and environment. Safe to share between threads; none of it waits for more than an answer."""

    def __init__(self, client: Any, environment: str) -> None:
        self._client_pool = make_pool(client)
        self._scripts = RedisScripts(client, environment, is_alone=True)
        self._pattern = f"*_semaphore:{environment}"
        self._asking = threading.Lock()  # one question at a time: one connection
        self._lock = threading.Lock()
        self._epoch: str | None = None
        self._permits: dict[str, Permit] = {}
        self._waiting: set[Callable[[], None]] = set()
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._check_at = 0.0
        self._lost: str | None = None  # why Redis could not be asked the last time

    @property
    def trouble(self) -> str:
        """Why there may have been no answer, for the end of a sentence."""
        return "" if self._lost is None else f": Redis cannot be used ({self._lost})"

    # --- permits ----------------------------------------------------------------------------------------------

    def take(self, values: SemaphoreValues, token: str, *, fallback: int, on_lost: Callable[[], None]) -> bool:
        """Take a permit; while Redis is away, one of the `fallback` that this program may have then."""
        began = monotonic()
        try:
            is_granted = bool(
                self._ask(values, lambda epoch: self._scripts.take(values, [token], values.lease, epoch=epoch))
            )
            is_local, self._lost = False, None
        except RedisLostError as error:
            self._lost = str(error)
            is_granted = is_local = self._held_locally(values) < fallback
            logger.warning(
                "the semaphore %s cannot reach Redis (%s): %s",
                values.name, error, "a permit of this program's own" if is_granted else "nothing begins",
            )  # fmt: skip
        if is_granted:
            with self._lock:
                self._permits[token] = Permit(values, token, began + values.lease, is_local, on_lost=on_lost)
            self._serve()
        return is_granted

    def release(self, token: str) -> None:
        """Give a permit back. If Redis cannot be told now, it is later, as long as the lease lasts."""
        with self._lock:
            permit = self._permits.get(token)
            if permit is not None:
                permit.is_given = True
        if permit is not None:
            self._give_all([permit])

    def keep_until_lease_ends(self, token: str) -> None:
        """Renew it no more: a call that was given up may still run at the other end."""
        with self._lock:
            self._permits.pop(token, None)

    def seconds_to_next(self, values: SemaphoreValues) -> float:
        """When the next permit may be free without anybody giving one back: a lease ends, or the epoch opens."""
        try:
            use = self._ask(values, lambda epoch: self._scripts.usage(values, epoch=epoch))
        except RedisLostError:
            return PAUSE_SECONDS
        return max(0.01, min(use.holders.values(), default=PAUSE_SECONDS))

    # --- waiting ----------------------------------------------------------------------------------------------

    def register(self, wake: Callable[[], None]) -> None:
        """Call this whenever a permit may be free; from another thread."""
        with self._lock:
            self._waiting.add(wake)
        self._serve()

    def unregister(self, wake: Callable[[], None]) -> None:
        with self._lock:
            self._waiting.discard(wake)

    # --- asking Redis -----------------------------------------------------------------------------------------

    def _ask(self, values: SemaphoreValues, ask: Callable[[str], Any]) -> Any:
        with self._asking:
            for _ in range(_TRIES):
                if self._epoch is None:
                    self._epoch = self._scripts.probe().epoch or self._scripts.begin_epoch(None, values.lease)
                try:
                    return ask(self._epoch)
                except EpochError:
                    self._epoch = self._scripts.begin_epoch(self._epoch, values.lease)
                    self._forget_epoch_of_permits()
        raise RedisLostError("its epoch changes with every question")

    def _check_epoch(self, lease: float) -> None:
        """If Redis has lost its data, newcomers must not begin before it knows what is held here."""
        with self._asking:
            if self._scripts.probe().epoch != self._epoch:
                self._epoch = self._scripts.begin_epoch(self._epoch, lease)
                self._forget_epoch_of_permits()

    def _forget_epoch_of_permits(self) -> None:
        """Redis is another one: it has to be told what we hold."""
        with self._lock:
            for permit in self._permits.values():
                permit.is_local = True
        self._wake.set()

    def _held_locally(self, values: SemaphoreValues) -> int:
        """How many permits of it this program holds, in Redis or without it."""
        with self._lock:
            return sum(permit.values.name == values.name for permit in self._permits.values())

    def _renew(self, permit: Permit) -> None:
        began = monotonic()
        lost = self._ask(
            permit.values,
            lambda epoch: self._scripts.renew(
                permit.values, [permit.token], epoch=epoch, register=permit.is_local
            ),
        )
        if lost:
            logger.error("a permit of %s was lost: it could not be renewed in time", permit.values.name)
            self.keep_until_lease_ends(permit.token)
            permit.on_lost()
        else:
            permit.ends, permit.is_local = began + permit.values.lease, False

    def _give_all(self, permits: list[Permit]) -> None:
        for permit in permits:
            try:
                self._ask(permit.values, partial(self._give_to_redis, permit))
            except RedisLostError as error:
                if monotonic() < permit.ends:
                    logger.warning(
                        "a permit of %s is given back when Redis is there: %s", permit.values.name, error
                    )
                    return
            self.keep_until_lease_ends(permit.token)

    def _give_to_redis(self, permit: Permit, epoch: str) -> None:
        self._scripts.release(permit.values, [permit.token], epoch=epoch)

    # --- the thread -------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="commandbus-semaphores", daemon=True)
                self._thread.start()

    def _is_over(self) -> bool:
        with self._lock:
            if self._permits or self._waiting:
                return False
            self._thread = None
            return True

    def _run(self) -> None:
        listener: Any = None
        while not self._is_over():
            try:
                listener = listener or self._listen()
                self._hear(listener)
            except Exception as error:  # noqa: BLE001 - of any kind: Redis is away, or its client says so in its own way
                logger.debug("semaphores cannot listen: %s", error)
                self._drop(listener)
                listener = None
                self._wake.wait(PAUSE_SECONDS)
            self._wake.clear()
            self._tend()
        self._drop(listener)

    def _listen(self) -> Any:
        import redis

        client: Any = redis.Redis(connection_pool=self._client_pool)
        listener = client.pubsub()
        listener.psubscribe(self._pattern)
        return listener

    def _hear(self, listener: Any) -> None:
        """Wait for a word. The first is that it listens; then everybody looks once more, too."""
        if listener.get_message(timeout=LISTEN_SECONDS) is not None:
            with self._lock:
                waiting = list(self._waiting)
            for wake in waiting:
                wake()

    def _drop(self, listener: Any) -> None:
        if listener is not None:
            with suppress(Exception):
                listener.close()

    def _tend(self) -> None:
        now = monotonic()
        with self._lock:
            permits = list(self._permits.values())
        try:
            if permits and now >= self._check_at:
                self._check_at = now + CHECK_SECONDS
                self._check_epoch(max(permit.values.lease for permit in permits))
            for permit in permits:
                is_due = permit.is_local or permit.ends - now < permit.values.lease * 2 / 3
                if is_due and not permit.is_given:
                    self._renew(permit)
        except RedisLostError as error:
            logger.warning("semaphores cannot renew their leases: %s", error)
            self._end_overdue(now)
        self._give_all([permit for permit in permits if permit.is_given])

    def _end_overdue(self, now: float) -> None:
        """Redis gives away what was not renewed in time; what only this program knows of stays."""
        with self._lock:
            ended = [each for each in self._permits.values() if each.ends <= now and not each.is_local]
            for permit in ended:
                del self._permits[permit.token]
        for permit in ended:
            logger.error("a permit of %s was lost: Redis could not be reached for a lease", permit.values.name)
            permit.on_lost()


_shared: WeakKeyDictionary[Any, dict[str, SharedRedis]] = WeakKeyDictionary()
_making = threading.Lock()


def shared_redis(client: Any, environment: str) -> SharedRedis:
    """The one of this client and environment; in a forked process another than its parent's."""
    with _making:
        made = _shared.setdefault(client, {})
        if environment not in made:
            made[environment] = SharedRedis(client, environment)
        return made[environment]


def _begin_anew() -> None:
    global _making  # it may have been held when the process was forked
    _making = threading.Lock()
    _shared.clear()


os.register_at_fork(after_in_child=_begin_anew)
