"""A bus of either kind that any number of threads can call, and a look at its listener from the server's side."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import psycopg

from commandbus import AsyncCommandBus, CommandBus
from support.waiting import one, until

LISTENER = "commandbus bus listener"
LISTENERS = f"datname = current_database() AND application_name = '{LISTENER}'"


class Caller:
    """`call` answers a future. The async bus lives on an event loop in a thread of its own."""

    def __init__(self, driver: str, url: str | None, **options: Any) -> None:
        self.driver = driver
        self._threads = ThreadPoolExecutor(250)
        self._loop = asyncio.new_event_loop()
        self._looping = threading.Thread(target=self._loop.run_forever)
        self._looping.start()
        self.bus: Any = (CommandBus if driver == "sync" else AsyncCommandBus)(url, **options)

    def call(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call, without waiting."""
        return self._do(self.bus.call, *args, **kwargs)

    def send(self, *args: Any, **kwargs: Any) -> Any:
        """Send, and wait for the receipt."""
        return self._do(self.bus.send, *args, **kwargs).result()

    def close(self) -> None:
        """Close the bus; it can be used again."""
        self._do(self.bus.close).result()

    def end(self) -> None:
        """Close everything."""
        self.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._looping.join()
        self._loop.close()
        self._threads.shutdown()

    def _do(self, method: Any, *args: Any, **kwargs: Any) -> Future[Any]:
        if self.driver == "sync":
            return self._threads.submit(method, *args, **kwargs)
        return asyncio.run_coroutine_threadsafe(method(*args, **kwargs), self._loop)


@contextmanager
def caller_of(driver: str, url: str | None, **options: Any) -> Iterator[Caller]:
    """A caller that is closed at the end."""
    caller = Caller(driver, url, **options)
    try:
        yield caller
    finally:
        caller.end()


def until_listening(db: psycopg.Connection[Any], *, not_pid: int = 0) -> int:
    """Until one listener has looked at what it waits for; answers the pid of its store."""
    query = f"SELECT pid FROM pg_stat_activity WHERE {LISTENERS} AND state = 'idle' AND query LIKE '%%attempt%%'"
    found = until(lambda: [pid for (pid,) in db.execute(query.encode()) if pid != not_pid])
    assert len(found) == 1
    return int(found[0])


def listeners(db: psycopg.Connection[Any]) -> int:
    """How many listeners are connected."""
    return int(one(db, f"SELECT count(*) FROM pg_stat_activity WHERE {LISTENERS}"))
