"""Puts right claimed rows that cannot simply run. A bad row harms no other row.

If some rows cannot be put right together, they are halved until the bad one is found. If that one needs a row that
another transaction has locked, it is kept, and tried again until its lease is too old to start anything under it.
So it need not wait until its lease ends, and no attempt of it is counted as lost. Any other bad row is set aside,
with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from commandbus.clock import boottime, monotonic
from commandbus.db.service_connection import LastingConnection
from commandbus.db.transient_errors import CANCELED, is_locked, is_of_the_database, is_passing
from commandbus.flow.commands.claim import Room, put_right, set_aside
from commandbus.flow.commands.claimed_row import ClaimedRow
from commandbus.logger import safe_logger
from commandbus.settings import Settings
from commandbus.worker import running_file

logger = safe_logger("commandbus.worker")

AGAIN_SECONDS = 0.25
BUSY_SHARE = 0.1
"""So much of its time may a thread spend on rows that it tries again: others wait for it meanwhile."""


class ClaimedRows(NamedTuple):
    """Rows that one claim took, and when (boottime) it was sent."""

    domain: str
    claimed_at: float
    rows: list[ClaimedRow]


class OddRows:
    """Puts rows right on the connection of the thread that calls it."""

    def __init__(
        self,
        connection: LastingConnection,
        worker: str,
        settings: Settings,
        *,
        keeps_lock_timeout: Callable[[], bool],
        on_lost: Callable[[str, list[str]], None] | None = None,
    ) -> None:
        self._connection = connection
        self._worker = worker
        self._max_bytes = settings.max_payload_bytes
        self._late_seconds = settings.timeouts.late_seconds
        # Then the canceled statement did not wait for a lock: it was slow.
        self._keeps_lock_timeout = keeps_lock_timeout
        self._on_lost = on_lost
        self._left: list[ClaimedRows] = []
        self._again_at = 0.0

    @property
    def next_seconds(self) -> float | None:
        """Seconds until rows that were left should be tried again; None if none were left."""
        return max(0.0, self._again_at - monotonic()) if self._left else None

    def put_right(self, claimed: ClaimedRows, room: Room, *, until: float) -> tuple[list[ClaimedRow], int]:
        """Returns those that may run now, and how many raw messages have become commands. Rows that could not be
        put right until then are for `try_again`."""
        if not self._left:
            self._again_at = monotonic() + AGAIN_SECONDS
        if monotonic() > until:
            self._left.append(claimed)
            return [], 0
        return self._put_right(claimed, room, until=until)

    def try_again(
        self, put_right: Callable[[ClaimedRows, float], object], seconds: float, *, is_last: bool = False
    ) -> None:
        """Call `put_right` for rows that were left, if it is time for that, with the moment at which it should
        end."""
        if not self._left or (self.next_seconds and not is_last):
            return
        began = monotonic()
        for claimed in self._take_left():
            put_right(claimed, began + seconds)
        took = monotonic() - began
        self._again_at = began + took + max(AGAIN_SECONDS, took / BUSY_SHARE)

    def left_in(self, domain: str) -> set[int]:
        """The messages of a domain that were left."""
        return {row.msg_id for claimed in self._left if claimed.domain == domain for row in claimed.rows}

    def forget_left(self) -> None:
        """Somebody else looks after them now."""
        self._left.clear()

    def _take_left(self) -> list[ClaimedRows]:
        """One for each claim, without those whose leases end soon."""
        left: dict[tuple[str, float], list[ClaimedRow]] = {}
        for domain, claimed_at, rows in self._left:
            left.setdefault((domain, claimed_at), []).extend(rows)
        self._left.clear()
        late = boottime() - self._late_seconds
        for (domain, claimed_at), rows in left.items():
            if claimed_at <= late:
                text = "%d messages of domain %s needed rows that are locked: they return when their leases end"
                logger.warning(text, len(rows), domain)
        return [ClaimedRows(*key, rows) for key, rows in left.items() if rows and key[1] > late]

    def _put_right(self, claimed: ClaimedRows, room: Room, *, until: float) -> tuple[list[ClaimedRow], int]:
        odd, lost_types = claimed.rows, list[str]()
        try:
            operation = put_right(
                domain=claimed.domain,
                worker=self._worker,
                odd=odd,
                max_bytes=self._max_bytes,
                room=room,
                running_in=running_file.read,
                lost_types=lost_types,
            )
            answer = self._connection.run(operation)
        except Exception as error:
            if not is_locked(error) and is_of_the_database(error, is_lost=self._connection.conn_is_lost()):
                self._left.append(claimed)
                raise
            if len(odd) == 1:
                self._leave_or_set_aside(claimed, error)
                return [], 0
            return self._put_halves_right(claimed, room, until=until)
        if lost_types and self._on_lost is not None:
            self._on_lost(claimed.domain, lost_types)
        return answer

    def _put_halves_right(self, claimed: ClaimedRows, room: Room, *, until: float) -> tuple[list[ClaimedRow], int]:
        right: list[ClaimedRow] = []
        adopted, half = 0, len(claimed.rows) // 2
        halves = [claimed._replace(rows=claimed.rows[:half]), claimed._replace(rows=claimed.rows[half:])]
        while halves and monotonic() <= until:
            try:
                more, taken = self._put_right(halves.pop(0), room.without(right), until=until)
            except Exception:
                self._left += [*halves, claimed._replace(rows=right)]  # they are held, and none has begun
                raise
            right += more
            adopted += taken
        self._left += halves
        return right, adopted

    def _leave_or_set_aside(self, claimed: ClaimedRows, error: Exception) -> None:
        domain, (row,) = claimed.domain, claimed.rows
        if is_locked(error) and not self._is_too_slow(row, error):
            logger.info("message %d of domain %s needs a row that somebody has locked", row.msg_id, domain)
            self._left.append(claimed)
            return
        if row.id is not None and is_passing(error):
            logger.warning("message %d of domain %s stays leased for now: %s", row.msg_id, domain, error)
            self._left.append(claimed)
            return
        reason = f"it could not be read: {type(error).__name__}: {str(error).strip()}"
        logger.error("message %d of domain %s is set aside: %s", row.msg_id, domain, reason)
        try:
            self._connection.run(set_aside(domain=domain, worker=self._worker, row=row, reason=reason))
        except Exception as again:
            if is_of_the_database(again, is_lost=self._connection.conn_is_lost()):
                self._left.append(claimed)
                raise
            logger.exception("message %d of domain %s cannot be set aside; it stays leased", row.msg_id, domain)

    def _is_too_slow(self, row: ClaimedRow, error: Exception) -> bool:
        """Does this one message take the server longer to read than a statement may take?"""
        return row.id is None and self._keeps_lock_timeout() and getattr(error, "sqlstate", None) == CANCELED
