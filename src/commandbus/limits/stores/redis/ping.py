"""Asks Redis, on a separate thread, whether it is reachable. A stopped server does not answer before the timeout,
and the caller must not wait for that.
"""

from __future__ import annotations

import threading

from commandbus.limits.stores.redis.scripts import Probe, RedisLostError, RedisScripts


class Ping(threading.Thread):
    """Asks Redis once. Nothing else uses the connection meanwhile."""

    def __init__(self, permits: RedisScripts) -> None:
        super().__init__(name="commandbus-redis-search", daemon=True)
        self._permits = permits
        self._answer: Probe | RedisLostError = RedisLostError("no answer yet")
        self.start()

    def run(self) -> None:
        """Ask."""
        try:
            self._answer = self._permits.probe()
        except RedisLostError as error:
            self._answer = error

    def is_over(self, seconds: float) -> bool:
        """Is there an answer? Waits for it for so many seconds."""
        self.join(seconds)
        return not self.is_alive()

    def answer(self) -> Probe:
        """Returns the answer, or raises RedisLostError."""
        if isinstance(self._answer, RedisLostError):
            raise self._answer
        return self._answer
