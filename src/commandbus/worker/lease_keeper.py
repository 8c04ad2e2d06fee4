"""The LeaseKeeper: work that must never wait: leases, cancels, and ending the database session of a stuck attempt.

It has its own thread and connection, never runs user code, and never waits for a row: renewals skip locked rows.
Work that is long or may meet a lock belongs to the Maintenance. A lease is renewed when a third of it has passed,
counted from when it was last *asked for*, while its attempt is within its deadline and grace. A lost lease is
marked, and the ladder stops the attempt. If another transaction holds the queue row, the lease is not renewed, and
is tried again at every tick. Orders (renew a lease now, cancel a query, fence a stuck attempt) are carried out at
once; while the database is unreachable they wait.

Fencing has three steps. The attempt gets no more connections (the ladder has done that). Its database session is
examined and ended, so that nothing it does can commit later. Only then its outcome goes to the settler.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import psycopg

from commandbus.clock import boottime, monotonic
from commandbus.db.service import DatabaseService
from commandbus.db.transient_errors import PassingError
from commandbus.flow.commands.claim import run_alone
from commandbus.flow.commands.database_session import (
    DatabaseSession,
    cancel_session,
    find_session,
    is_of_child,
    look_at_session,
    terminate_session,
)
from commandbus.flow.commands.renew import PendingCancel, pending_cancels, renew
from commandbus.logger import safe_logger
from commandbus.model.timeouts import MONITOR_TICK
from commandbus.settings import Settings
from commandbus.worker.deadlines.ladder import Document
from commandbus.worker.execution.attempt import Attempt
from commandbus.worker.execution.connections import Borrowed

logger = safe_logger("commandbus.worker")

PROGRESS_SECONDS = 1.0
IDLE_SECONDS = 1.0
MOST_TO_LOOK_AT = 1000


class LeaseKeeper(DatabaseService):
    """One thread that looks after what the others hold."""

    def __init__(
        self,
        settings: Settings,
        worker: str,
        *,
        held: Callable[[], set[Attempt]],
        on_cancel: Callable[[Attempt, PendingCancel], None],
        on_error: Callable[[BaseException], None],
        name: str,
    ) -> None:
        super().__init__(settings, name=name, part="lease keeper", on_end=on_error)
        self._settings = settings
        self._worker = worker
        self._held = held
        self._on_cancel = on_cancel
        self._looking = threading.Lock()
        self._to_look_at: set[tuple[str, int]] = set()  # messages whose commands are said to be canceled
        # A lease that was claimed while it sleeps is renewed at most this late.
        self._idle_tick = max(MONITOR_TICK, min(IDLE_SECONDS, settings.timeouts.renewal_interval / 10))
        self._skipped: list[Callable[[], None]] = []  # orders to renew whose queue row another transaction held

    def renew_now(self, attempt: Attempt) -> Future[bool]:
        """Renew an attempt's lease; the answer is False if it is lost. Called by handlers' contexts.

        While another transaction holds the queue row this is tried again; TimeoutError after a whole lease.
        """
        return self._ask_to_renew(attempt, lambda: 0.0)

    def hold(self, attempt: Attempt) -> Future[bool]:
        """Renew an attempt's lease beyond its deadline and grace, and leave its queue row alone until then.

        Its transaction is about to take a snapshot that it keeps: a later change of the row would be a conflict.
        `attempt.release_row` ends it.
        """
        grace = self._settings.cancel_grace
        return self._ask_to_renew(attempt, lambda: max(0.0, attempt.deadline_at - monotonic()) + grace)

    def _ask_to_renew(self, attempt: Attempt, longer: Callable[[], float]) -> Future[bool]:
        answer: Future[bool] = Future()
        until = boottime() + self._settings.visibility_timeout
        self.order(lambda: self._renew_now(attempt, answer, until, longer))
        return answer

    def run_alone(self, attempt: Attempt, then: Callable[[Attempt, bool], None]) -> None:
        """Record that a suspect starts now, then call `then`, with False if this worker may not hold it any
        more."""

        def note() -> None:
            noted = run_alone(attempt.domain, self._worker, attempt)
            is_held = False
            try:
                is_held = self._connection.run(noted)
            except PassingError:
                raise
            except Exception:
                then(attempt, is_held)
                raise
            then(attempt, is_held)

        self.order(note)

    def cancel_query(self, attempt: Attempt) -> None:
        """Cancel the SQL that an attempt is running; end its session if the attempt is fenced."""
        borrowed = attempt.borrowed
        if borrowed is not None:
            self.order(lambda: self._interrupt(borrowed, end=attempt.is_fenced))

    def fence(self, attempt: Attempt, taken: Document, then: Callable[[Document], None]) -> None:
        """Complete the autopsy, end the attempt's session, and go on with `then`."""
        borrowed = attempt.borrowed
        self.order(lambda: self._fence(borrowed, taken, then))

    def end_sessions(self, sessions: Sequence[Borrowed]) -> Future[None]:
        """End the sessions of a process that died."""
        answer: Future[None] = Future()

        def end() -> None:
            for borrowed in sessions:
                self._interrupt(borrowed, end=True)
            answer.set_result(None)

        self.order(end)
        return answer

    def look_for_cancel(self, domain: str, msg_id: int) -> None:
        """Somebody says that a command was canceled, perhaps one of ours. Anybody can send that, so it is
        checked."""
        with self._looking:
            is_first = not self._to_look_at
            if len(self._to_look_at) < MOST_TO_LOOK_AT:  # the next renewal tells about the others
                self._to_look_at.add((domain, msg_id))
        if is_first:
            self.order(self._ask_cancels)

    def round(self) -> None:
        self._orders.extend(self._skipped)
        self._skipped.clear()
        self.carry_out()
        self._renew()
        if not self._orders:
            is_idle = not self._skipped and not any(True for _ in self._held())
            self.sleep(self._idle_tick if is_idle else MONITOR_TICK)

    def finish(self) -> None:
        try:
            self.carry_out()
        except psycopg.Error as error:
            logger.info("the last orders of the ladder could not be carried out: %s", error)

    # --- leases ------------------------------------------------------------------------------------------------

    def _renew(self) -> None:
        now = boottime()
        due: dict[str, list[Attempt]] = {}
        interval = self._settings.timeouts.renewal_interval
        for attempt in self._held():
            age = now - attempt.renewed_at
            if (age >= interval or (age >= PROGRESS_SECONDS and attempt.has_progress)) and not attempt.is_lost:
                due.setdefault(attempt.domain, []).append(attempt)
        for domain, attempts in due.items():
            sent_at = boottime()
            told = {attempt.msg_id: text for attempt in attempts if (text := attempt.progress()) is not None}
            renewal = self._connection.run(
                renew(
                    domain,
                    self._worker,
                    attempts,
                    lease_seconds=self._settings.visibility_timeout,
                    progress=told or None,
                )
            )
            gone, skipped = set(renewal.lost), set(renewal.skipped)
            for attempt in attempts:
                if (attempt.msg_id, attempt.read_ct) in skipped:
                    continue  # still due: tried again at the next tick
                attempt.renewed_at = max(attempt.renewed_at, sent_at)
                if attempt.msg_id in told:
                    attempt.note_stored(told[attempt.msg_id])
                # It was settled since it was listed: its row is gone for a good reason.
                if (attempt.msg_id, attempt.read_ct) in gone and attempt in self._held():
                    attempt.is_lost = True
                    logger.warning(
                        "the lease of command %s (attempt number %d) was lost",
                        attempt.command_id,
                        attempt.number,
                        extra=attempt.log_fields,
                    )
            self._pass_on(attempts, renewal.canceled)

    def _renew_now(
        self, attempt: Attempt, answer: Future[bool], until: float, longer: Callable[[], float]
    ) -> None:
        if answer.cancelled():
            return  # the handler that asked does not wait any more
        lease, more = self._settings.visibility_timeout, longer()
        sent_at = boottime()
        try:
            renewal = self._connection.run(
                renew(attempt.domain, self._worker, attempt.each, lease_seconds=lease + more)
            )
        except PassingError:
            raise
        except Exception as error:
            _answer(answer, error=error)
            raise
        self._pass_on(attempt.each, renewal.canceled)
        if renewal.skipped and sent_at < until and not self._held().isdisjoint(attempt.each):
            self._skipped.append(lambda: self._renew_now(attempt, answer, until, longer))
        elif renewal.skipped:
            _answer(answer, error=TimeoutError(f"another transaction has held its queue row for {lease:g} s"))
        else:
            for each in attempt.each:
                if (each.msg_id, each.read_ct) in renewal.lost:
                    each.is_lost = True
                else:
                    each.renewed_at = max(each.renewed_at, sent_at + more)
            _answer(answer, is_held=not renewal.lost)

    def _ask_cancels(self) -> None:
        with self._looking:
            messages, self._to_look_at = self._to_look_at, set()
        by_domain: dict[str, list[Attempt]] = {}
        for attempt in self._held():
            if (attempt.domain, attempt.msg_id) in messages:
                by_domain.setdefault(attempt.domain, []).append(attempt)
        for domain, attempts in by_domain.items():
            self._pass_on(attempts, self._connection.run(pending_cancels(domain, self._worker, attempts)))

    def _pass_on(self, attempts: Sequence[Attempt], canceled: Sequence[PendingCancel]) -> None:
        for cancel in canceled:
            for attempt in attempts:
                if (attempt.msg_id, attempt.read_ct) == (cancel.msg_id, cancel.read_ct):
                    self._on_cancel(attempt, cancel)

    # --- sessions ----------------------------------------------------------------------------------------------

    def _interrupt(self, borrowed: Borrowed, *, end: bool) -> None:
        with borrowed.lock:  # the connection stays with this attempt until the cancel has arrived
            if borrowed.is_returned:
                return
            session = self._connection.run(find_session(borrowed.pid, borrowed.started, borrowed.key))
            if session is not None and self._may_end(borrowed, session):
                self._connection.run(terminate_session(session) if end else cancel_session(session))

    def _may_end(self, borrowed: Borrowed, session: DatabaseSession) -> bool:
        """May this session be ended? A child process named it. Behind PgBouncer the lock of its attempt proves
        it."""
        if borrowed.told_since is None or borrowed.key is not None:
            return True
        age = boottime() - borrowed.told_since
        is_its_own = self._connection.run(is_of_child(session, worker=self._worker, youngest_seconds=age))
        if not is_its_own:
            text = "a child process named the database session %d, which is not its own or has ended"
            logger.warning(text, session.pid)
        return is_its_own

    def _fence(self, borrowed: Borrowed | None, taken: Document, then: Callable[[Document], None]) -> None:
        if borrowed is not None:
            try:
                with borrowed.lock:
                    if not borrowed.is_returned:
                        self._end_session(borrowed, taken)
            except PassingError:
                raise  # the connection is lost: again, later
            except psycopg.Error:
                logger.exception("the database session of a stuck attempt could not be ended")
        then(taken)

    def _end_session(self, borrowed: Borrowed, taken: Document) -> None:
        session = self._connection.run(find_session(borrowed.pid, borrowed.started, borrowed.key))
        if session is None or not self._may_end(borrowed, session):
            borrowed.hang_up()
            return
        found = self._connection.run(look_at_session(session))
        if found is not None:
            taken["session"] = found
            is_ended = self._connection.run(terminate_session(session))
            if not is_ended and self._connection.run(look_at_session(session)) is not None:
                logger.error(
                    "the database session %d of a stuck attempt could not be ended: the worker and its handlers "
                    "must connect as one role",
                    session.pid,
                )


def _answer(answer: Future[bool], *, is_held: bool = False, error: Exception | None = None) -> None:
    """Answer the handler that asked, if it still waits."""
    if answer.set_running_or_notify_cancel():
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(is_held)
