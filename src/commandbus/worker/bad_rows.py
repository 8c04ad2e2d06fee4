"""Puts right claimed rows that cannot simply run. A bad row harms no other row.

If some rows cannot be put right together, they are halved until the bad one is found. If that one needs a row that
another transaction has locked, it stays leased until its lease runs out. Any other bad row is set aside, with the
reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from commandbus.clock import monotonic
from commandbus.db.service_connection import LastingConnection
from commandbus.db.transient_errors import CANCELED, is_locked, is_of_the_database, is_passing
from commandbus.flow.commands.claim import Room, put_right, set_aside
from commandbus.flow.commands.claimed_row import ClaimedRow
from commandbus.logger import safe_logger
from commandbus.worker import running_file

logger = safe_logger("commandbus.worker")


class OddRows:
    """Puts rows right on the connection of the thread that calls it."""

    def __init__(
        self, connection: LastingConnection, worker: str, *, max_bytes: int, keeps_lock_timeout: Callable[[], bool]
    ) -> None:
        self._connection = connection
        self._worker = worker
        self._max_bytes = max_bytes
        # Then the canceled statement did not wait for a lock: it was slow.
        self._keeps_lock_timeout = keeps_lock_timeout

    def put_right(
        self, domain: str, odd: Sequence[ClaimedRow], room: Room, *, until: float
    ) -> tuple[list[ClaimedRow], int]:
        """Returns those that may run now, and how many raw messages have become commands. Rows that are left at
        `until` are claimed again when their leases have ended."""
        try:
            operation = put_right(
                domain=domain,
                worker=self._worker,
                odd=odd,
                max_bytes=self._max_bytes,
                room=room,
                running_in=running_file.read,
            )
            return self._connection.run(operation)
        except Exception as error:
            if not is_locked(error) and is_of_the_database(error, is_lost=self._connection.conn_is_lost()):
                raise
            if len(odd) == 1:
                self._leave_or_set_aside(domain, odd[0], error)
                return [], 0
        right: list[ClaimedRow] = []
        adopted, half = 0, len(odd) // 2
        for some in (odd[:half], odd[half:]):
            if monotonic() > until:
                break
            more, taken = self.put_right(domain, some, room.without(right), until=until)
            right += more
            adopted += taken
        return right, adopted

    def _leave_or_set_aside(self, domain: str, row: ClaimedRow, error: Exception) -> None:
        if is_locked(error) and not self._is_too_slow(row, error):
            logger.warning("message %d of domain %s needs a row that somebody has locked", row.msg_id, domain)
            return
        if row.id is not None and is_passing(error):
            logger.warning("message %d of domain %s stays leased for now: %s", row.msg_id, domain, error)
            return
        reason = f"it could not be read: {type(error).__name__}: {str(error).strip()}"
        logger.error("message %d of domain %s is set aside: %s", row.msg_id, domain, reason)
        try:
            self._connection.run(set_aside(domain=domain, worker=self._worker, row=row, reason=reason))
        except Exception as again:
            if is_of_the_database(again, is_lost=self._connection.conn_is_lost()):
                raise
            logger.exception("message %d of domain %s cannot be set aside; it stays leased", row.msg_id, domain)

    def _is_too_slow(self, row: ClaimedRow, error: Exception) -> bool:
        """Does this one message take the server longer to read than a statement may take?"""
        return row.id is None and self._keeps_lock_timeout() and getattr(error, "sqlstate", None) == CANCELED
