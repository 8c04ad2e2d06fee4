"""The Keeper: what the ladder needs from the database. Leases, cancels, fences, breakers, the registry, sweeping,
retention.

It works on a thread and a connection of its own, and never runs user code. A lease is renewed when a third of it
has passed, counted from when it was last *asked for*, while its attempt is within its limits; a lost one is
marked, and the ladder stops the attempt. Orders (extend a lease, cancel a query, fence a stuck attempt) are worked
off at once; while the database is away they wait.

Fencing, in order: the attempt gets no connection any more (the ladder saw to that), its backend is looked at and
terminated, so that nothing it does can commit later, and only then is its outcome handed to the settler.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, Generic, TypeVar, cast

import psycopg

from commandbus.db.link import Link
from commandbus.errors import CommandBusError
from commandbus.flow import batch_operate
from commandbus.flow.backend import cancel_backend, find_backend, look_at_backend, terminate_backend
from commandbus.flow.fold import fold
from commandbus.flow.prune import Retention, prune_all
from commandbus.flow.register import WorkerIdentity, beat
from commandbus.flow.renew import PendingCancel, pending_cancels, renew
from commandbus.flow.statement import Operation, Plan
from commandbus.logger import safe_logger
from commandbus.model.timeouts import MONITOR_TICK
from commandbus.runtime.attempt import Attempt
from commandbus.runtime.breakers import Breakers
from commandbus.runtime.connections import Borrowed
from commandbus.runtime.folder import Refused
from commandbus.runtime.health import HealthStatus
from commandbus.runtime.ladder import Document
from commandbus.settings import Settings

logger = safe_logger("commandbus.worker")
T = TypeVar("T")

BEAT_SECONDS = 3.0
SWEEP_SECONDS = 2.0
PRUNE_SECONDS = 60.0
BITE_PAUSE_SECONDS = 0.02
PROGRESS_SECONDS = 1.0
SLICE_SECONDS = 0.5
UNREACHABLE = "database_unreachable"


class Work(Generic[T]):
    """A plan that is followed in slices."""

    def __init__(self, plan: Plan[T]) -> None:
        self._plan = plan
        self._operation: Operation[Any] | None = next(plan, None)

    def step(self, link: Link) -> bool:
        """Run one operation; False if that was the last one."""
        if self._operation is None:
            return False
        try:
            try:
                answer = link.run(self._operation)
            except CommandBusError as error:
                self._operation = self._plan.throw(error)
            else:
                self._operation = self._plan.send(answer)
        except StopIteration:
            return False
        return True


class Figures:
    """What a heartbeat reports."""

    def __init__(self, running: Callable[[], int], settled: Callable[[], dict[str, int]]) -> None:
        self.running = running
        self.settled = settled


class Keeper:
    """One thread that looks after what the others hold."""

    def __init__(
        self,
        settings: Settings,
        identity: WorkerIdentity,
        *,
        held: Callable[[], Iterable[Attempt]],
        figures: Figures,
        health: HealthStatus,
        on_cancel: Callable[[Attempt, PendingCancel], None],
        breakers: Breakers,
        name: str,
    ) -> None:
        self._settings = settings
        self._identity = identity
        self._held = held
        self._figures = figures
        self._health = health
        self._on_cancel = on_cancel
        self._breakers = breakers
        breakers.on_word = lambda: self._order(lambda: breakers.write(self._link))
        self._link = Link(settings, name=f"{name} keeper")
        self._stopping = threading.Event()
        self.state = "ACTIVE"
        self._beat_at = 0.0
        self._pruned_at = time.monotonic() - random.random() * PRUNE_SECONDS  # noqa: S311 - workers spread out
        self._sweep_at = time.monotonic() + random.random() * SWEEP_SECONDS  # noqa: S311
        self._refused = Refused(PRUNE_SECONDS, PRUNE_SECONDS)
        self._resumed: dict[int, Work[batch_operate.Canceled]] = {}
        self._last: dict[str, int] = {}
        self._last_at = time.monotonic()
        self.first_beat = threading.Event()
        self.down_since: float | None = None
        self._wake = threading.Event()
        self._orders: deque[Callable[[], None]] = deque()
        self._at_work = False
        self._thread = threading.Thread(target=self._serve, name=f"{name}-keeper", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout: float) -> None:
        """Say good-bye in the registry and end."""
        self._stopping.set()
        self._wake.set()
        self._thread.join(timeout)

    def extend(self, attempt: Attempt, seconds: float) -> Future[bool]:
        """Extend an attempt's lease; the answer is False if it is lost. Called by handlers' contexts."""
        answer: Future[bool] = Future()
        self._order(lambda: self._extend(attempt, seconds, answer))
        return answer

    def cancel_query(self, attempt: Attempt) -> None:
        """Cancel the SQL that an attempt is running; end its session if the attempt is fenced."""
        borrowed = attempt.borrowed
        if borrowed is not None:
            self._order(lambda: self._interrupt(borrowed, end=attempt.is_fenced))

    def fence(self, attempt: Attempt, taken: Document, then: Callable[[Document], None]) -> None:
        """Complete the autopsy, end the attempt's session, and go on with `then`."""
        borrowed = attempt.borrowed
        self._order(lambda: self._fence(borrowed, taken, then))

    def end_sessions(self, sessions: Sequence[Borrowed]) -> Future[None]:
        """End the sessions of a process that died."""
        answer: Future[None] = Future()

        def end() -> None:
            for borrowed in sessions:
                self._interrupt(borrowed, end=True)
            answer.set_result(None)

        self._order(end)
        return answer

    def look_for_cancel(self, domain: str, msg_id: int) -> None:
        """Somebody asked to cancel a command, perhaps one of ours."""
        self._order(lambda: self._ask_cancels(domain, msg_id))

    def flush(self, timeout: float) -> bool:
        """Wait until all orders are carried out."""
        done = threading.Event()
        self._order(done.set)
        return done.wait(timeout)

    def wake(self) -> None:
        """There is something to store."""
        self._wake.set()

    def _order(self, order: Callable[[], None]) -> None:
        self._orders.append(order)
        self._wake.set()

    def _serve(self) -> None:
        while not self._stopping.is_set():
            if self.first_beat.is_set() and not self._orders and not self._resumed:
                self._wake.wait(MONITOR_TICK)
            self._wake.clear()
            try:
                self._tick()
                self._note_up()
            except psycopg.OperationalError as error:
                self._note_down()
                self._link.recover(self._stopping, error, on_wait=self._note_down)
            except Exception:
                logger.exception("the keeper's tick failed")
                self._stopping.wait(BEAT_SECONDS)
        self._leave()

    def _tick(self) -> None:
        self._look_after()
        now = time.monotonic()
        if now >= self._sweep_at:
            self._sweep_at = now + SWEEP_SECONDS + self._sweep() * 20
        self._breakers.sweep(self._link)
        self._go_on()
        if now - self._pruned_at >= PRUNE_SECONDS:
            self._pruned_at = now
            self._prune()

    def _look_after(self) -> None:
        """What cannot wait: orders, leases, the heartbeat."""
        self._carry_out()
        self._renew()
        now = time.monotonic()
        if now - self._beat_at >= BEAT_SECONDS:
            self._beat_at = now
            self._beat(self.state)
            self.first_beat.set()

    def _carry_out(self) -> None:
        """Work off the orders; one that met a lost connection is tried again."""
        while self._orders:
            order = self._orders[0]
            try:
                order()
            except psycopg.OperationalError:
                raise
            except Exception:
                logger.exception("the keeper could not carry out an order")
            self._orders.popleft()

    def _note_up(self) -> None:
        if self.down_since is not None:
            self.down_since = None
            self._health.clear(UNREACHABLE)

    def _note_down(self) -> None:
        """Out of reach for longer than the pool may take to reconnect: critical, until it is back."""
        now = time.monotonic()
        if self.down_since is None:
            self.down_since = now
        if now - self.down_since >= self._settings.pool_reconnect_timeout:
            self._health.set_critical(UNREACHABLE)

    # --- leases ------------------------------------------------------------------------------------------------

    def _renew(self) -> None:
        now = time.monotonic()
        due: dict[str, list[Attempt]] = {}
        interval = self._settings.timeouts.renewal_interval
        for attempt in self._held():
            age = now - attempt.renewed_at
            if (age >= interval or (age >= PROGRESS_SECONDS and attempt.has_progress)) and not attempt.is_lost:
                due.setdefault(attempt.domain, []).append(attempt)
        for domain, attempts in due.items():
            sent_at = time.monotonic()
            told = {attempt.msg_id: text for attempt in attempts if (text := attempt.progress()) is not None}
            renewal = self._link.run(
                renew(
                    domain,
                    self._identity.id,
                    [(attempt.msg_id, attempt.read_ct) for attempt in attempts],
                    lease_seconds=self._settings.visibility_timeout,
                    progress=told or None,
                )
            )
            gone = set(renewal.lost)
            for attempt in attempts:
                attempt.renewed_at = max(attempt.renewed_at, sent_at)
                if attempt.msg_id in told:
                    attempt.note_stored(told[attempt.msg_id])
                # Settled since it was listed: its row is gone because all is well.
                if (attempt.msg_id, attempt.read_ct) in gone and attempt in self._held():
                    attempt.is_lost = True
                    logger.warning(
                        "the lease of command %s (attempt %d) was lost",
                        attempt.command_id,
                        attempt.number,
                        extra={"domain": domain, "command_id": attempt.command_id},
                    )
            self._pass_on(attempts, renewal.canceled)

    def _extend(self, attempt: Attempt, seconds: float, answer: Future[bool]) -> None:
        if not answer.running() and not answer.set_running_or_notify_cancel():
            return  # whoever asked was cancelled meanwhile
        held, sent_at = [(attempt.msg_id, attempt.read_ct)], time.monotonic()
        lease = max(seconds, self._settings.visibility_timeout)
        try:
            renewal = self._link.run(renew(attempt.domain, self._identity.id, held, lease_seconds=lease))
        except psycopg.OperationalError:
            raise
        except Exception as error:
            answer.set_exception(error)
            raise
        if renewal.lost:
            attempt.is_lost = True
        else:
            # A longer lease counts as if it had been asked for later.
            attempt.renewed_at = sent_at + lease - self._settings.visibility_timeout
        answer.set_result(not renewal.lost)
        self._pass_on([attempt], renewal.canceled)

    def _ask_cancels(self, domain: str, msg_id: int) -> None:
        attempts = [item for item in self._held() if item.msg_id == msg_id and item.domain == domain]
        if attempts:
            held = [(attempt.msg_id, attempt.read_ct) for attempt in attempts]
            self._pass_on(attempts, self._link.run(pending_cancels(domain, self._identity.id, held)))

    def _pass_on(self, attempts: Sequence[Attempt], canceled: Sequence[PendingCancel]) -> None:
        for cancel in canceled:
            for attempt in attempts:
                if (attempt.msg_id, attempt.read_ct) == (cancel.msg_id, cancel.read_ct):
                    self._on_cancel(attempt, cancel)

    # --- sessions ----------------------------------------------------------------------------------------------

    def _interrupt(self, borrowed: Borrowed, *, end: bool) -> None:
        with borrowed.lock:  # it stays this attempt's connection until the cancel has arrived
            if borrowed.is_returned:
                return
            session = self._link.run(find_backend(borrowed.pid, borrowed.started, borrowed.key))
            if session is not None:
                self._link.run(terminate_backend(session) if end else cancel_backend(session))

    def _fence(self, borrowed: Borrowed | None, taken: Document, then: Callable[[Document], None]) -> None:
        if borrowed is not None:
            try:
                with borrowed.lock:
                    if not borrowed.is_returned:
                        self._end_session(borrowed, taken)
            except psycopg.OperationalError:
                raise  # the connection is lost: again, later
            except psycopg.Error:
                logger.exception("the database session of a stuck attempt could not be ended")
        then(taken)

    def _end_session(self, borrowed: Borrowed, taken: Document) -> None:
        session = self._link.run(find_backend(borrowed.pid, borrowed.started, borrowed.key))
        if session is None:
            borrowed.hang_up()
            return
        found = self._link.run(look_at_backend(session))
        if found is not None:
            taken["backend"] = found
            is_ended = self._link.run(terminate_backend(session))
            if not is_ended and self._link.run(look_at_backend(session)) is not None:
                logger.error(
                    "the database session %d of a stuck attempt could not be ended: the worker and its handlers "
                    "must connect as one role",
                    session.pid,
                )

    def _beat(self, state: str) -> None:
        now = time.monotonic()
        settled = self._figures.settled()
        elapsed = max(now - self._last_at, 1e-3)
        rates = {
            domain: round((count - self._last.get(domain, 0)) / elapsed, 3) for domain, count in settled.items()
        }
        self._last, self._last_at = dict(settled), now
        self._link.run(
            beat(
                self._identity,
                state=state,
                running=self._figures.running(),
                settled=sum(settled.values()),
                rates=rates,
                health={"state": self._health.state.value, "reasons": list(self._health.reasons)},
            )
        )

    def _sweep(self) -> float:
        """Fold what nobody has folded, take up cancellations that nobody carries out: a crash left them.

        Answers how long it took, without what was refused: each batch that was is left alone for a minute.
        """
        began = time.monotonic()
        try:
            found = self._link.run(batch_operate.leftovers(but=self._refused.resting()))
        except Exception as error:
            if self._link.conn_is_lost():
                raise
            logger.warning("batches cannot be looked after now, trying again in a minute: %s", error)
            return PRUNE_SECONDS / 20
        seconds = time.monotonic() - began
        for batch in found.to_fold:
            began = time.monotonic()
            try:
                self._link.run(fold([batch]))
            except Exception as error:  # noqa: BLE001 - raised again if the connection is lost
                self._refuse(batch, error)
            else:
                seconds += time.monotonic() - began
            self._look_after()
            if self._stopping.is_set():
                return seconds
        for canceling in found.to_cancel:
            if canceling.id not in self._resumed:
                self._resumed[canceling.id] = Work(batch_operate.resume(canceling))
        self._refused.forget_old()
        return seconds

    def _go_on(self) -> None:
        """Go on with the cancellations, for a moment: everything else must have its turn."""
        until = time.monotonic() + SLICE_SECONDS
        while self._resumed and time.monotonic() < until and not self._stopping.is_set():
            batch, work = self._resumed.popitem()  # taken up again by the next sweep if this fails
            try:
                goes_on = work.step(self._link)
            except Exception as error:  # noqa: BLE001 - raised again if the connection is lost
                self._refuse(batch, error)
                goes_on = False
            if goes_on:
                self._resumed[batch] = work
            self._look_after()

    def _refuse(self, batch: int, error: Exception) -> None:
        """In the handling of an error."""
        if self._link.conn_is_lost():
            raise error
        pause = self._refused.add(batch)
        logger.warning("batch %d cannot be looked after now, trying again in %.0f s: %s", batch, pause, error)

    def _prune(self) -> None:
        plan = prune_all(Retention(self._settings.retention_age, self._settings.retention_count))
        report = self._follow(plan)
        if report is not None and report.commands:
            logger.info("retention: %d finished commands were forgotten", report.commands)

    def _follow(self, plan: Plan[T]) -> T | None:
        """Long work in small bites, and the leases in between; None if the worker stops on the way."""
        try:
            operation = next(plan)
            while not self._stopping.wait(BITE_PAUSE_SECONDS):
                try:
                    answer = self._link.run(operation)
                except CommandBusError as error:
                    operation = plan.throw(error)
                else:
                    operation = plan.send(answer)
                self._look_after()
        except StopIteration as stop:
            return cast(T, stop.value)
        return None

    def _leave(self) -> None:
        try:
            self._carry_out()
            self._beat("STOPPED")
        except psycopg.Error as error:
            logger.info("the registry could not be told of the stop: %s", error)
        self._link.close()
