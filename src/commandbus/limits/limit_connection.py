"""The limit client's connection. A bad or locked row is an error only for the callers of that limit.

Nearly every question of the limit client is about one limit. If somebody has written nonsense into that limit's
row, only the callers of that limit get an error, and the limit client goes on for all others.

The same holds for a row that another transaction has locked. The limit client waits for the lock once (2 s, the
session's `lock_timeout`). Then the limit is *barred* for a growing time, and its callers get a `LockedRowError` at
once: commands are parked, and calls inside programs and releases are tried again later. When the bar ends, the
limit client first checks the row with a statement that hardly waits.
"""

from __future__ import annotations

from typing import Final, TypeVar

from commandbus.clock import monotonic
from commandbus.db.drivers import Runnable
from commandbus.db.service_connection import LastingConnection
from commandbus.db.transient_errors import is_locked, is_of_a_row
from commandbus.errors import CommandBusError
from commandbus.flow.limits.permits import wait_for_row
from commandbus.logger import safe_logger
from commandbus.model.reconnect_backoff import Backoff

T = TypeVar("T")
logger = safe_logger("commandbus.limits")

FIRST_BAR_SECONDS: Final = 0.5
LONGEST_BAR_SECONDS: Final = 10.0


class UnusableRowError(CommandBusError):
    """A row of ours has a value that cannot be used."""


class LockedRowError(CommandBusError):
    """Another transaction holds the row of a limit. `until` is when (monotonic) to ask again."""

    def __init__(self, limit: str, until: float) -> None:
        super().__init__(
            f"another transaction holds the row of limit {limit!r} in commandbus.limits; end it "
            f"(`commandbus doctor` names the oldest)"
        )
        self.until = until


class _Bar:
    """A limit whose row is locked, and until when no statement asks for it."""

    def __init__(self) -> None:
        self._backoff = Backoff(FIRST_BAR_SECONDS, LONGEST_BAR_SECONDS)
        self.until = 0.0

    def extend(self) -> float:
        """Note that the row is still locked. Returns when (monotonic) to ask again."""
        self.until = monotonic() + self._backoff.next()
        return self.until


class LimitConnection:
    """Runs operations on a connection."""

    def __init__(self, connection: LastingConnection) -> None:
        self._connection = connection
        self._bars: dict[str, _Bar] = {}  # limits whose rows are locked

    def run(self, operation: Runnable[T], *, limit: str | None = None) -> T:
        """Like `LastingConnection.run`. Raises UnusableRowError if a value in a row is to blame.

        `limit`: the operation writes to that limit's row. Raises LockedRowError if another transaction holds it.
        """
        if limit is not None and limit in self._bars:
            self._look_at_bar(limit)
        return self._run(operation, limit)

    def barred_until(self, limit: str) -> float:
        """Until when (monotonic) callers of this limit are refused; 0 if they are not refused."""
        bar = self._bars.get(limit)
        return bar.until if bar is not None and bar.until > monotonic() else 0.0

    def _look_at_bar(self, limit: str) -> None:
        if until := self.barred_until(limit):
            raise LockedRowError(limit, until)
        self._run(wait_for_row(limit), limit)
        del self._bars[limit]
        logger.info("the row of limit %s is free again", limit)

    def _run(self, operation: Runnable[T], limit: str | None) -> T:
        try:
            return self._connection.run(operation)
        except CommandBusError:
            raise
        except Exception as error:
            if self._connection.conn_is_lost():
                raise
            if limit is not None and is_locked(error):
                raise LockedRowError(limit, self._bar(limit)) from error
            if not is_of_a_row(error):
                raise
            reason = str(error).strip().partition("\n")[0]
            raise UnusableRowError(
                f"a row of commandbus.limits or commandbus.parked cannot be used ({type(error).__name__}: "
                f"{reason}); correct the value, or delete the row: workers that start declare their limits again"
            ) from error

    def _bar(self, limit: str) -> float:
        if limit not in self._bars:
            self._bars[limit] = _Bar()
            logger.warning(
                "another transaction holds the row of limit %s: that limit waits, the other limits go on", limit
            )
        return self._bars[limit].extend()
