"""LimitClient: one thread, with its own connection, that does all work concerning limits in one program.

    commands ──request──► granted ──► a slot            calls inside programs ──acquire──► a future
                    └───► refused ──► parked                                        └────► in line, woken by name
    ends ────release────► the permit is free ──► reserved for the first in line, who is woken

One thread asks for many permits at once: ten commands that need a permit of one limit cost one statement. The
thread waits only for the database and Redis. A command that waits for a permit waits in line, in the database.

The line of a limit is in the database, like everything that the fleet must agree on: back-off, breaker, and the
order of the line. A program that releases a permit reserves it for the first in line, under a lease of a few
seconds, and wakes that command or caller. So nobody can overtake. If a worker is killed between two statements,
the sweep finds what is left.

This module has the thread, its round, and what others may ask of it. The parts of a round are in separate modules,
each using only those before it: `held_permits`, `waker` (who is next), `releases`, `admission` (commands) and
`call_waiters` (calls inside programs).
"""

from __future__ import annotations

import itertools
import random
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import datetime
from typing import Any

import psycopg
from psycopg import Connection

from commandbus.clock import monotonic
from commandbus.db.service import DatabaseService
from commandbus.errors import CommandBusError
from commandbus.flow.limits.declare import CHANGED, CHANNEL, CLOSED, TOKEN, WAKE, LimitRow
from commandbus.flow.limits.redis_outage import MODE
from commandbus.flow.operation import explain_absence
from commandbus.limits.admission import Admission
from commandbus.limits.call_waiters import CallWaiters
from commandbus.limits.held_permits import HeldPermits
from commandbus.limits.limit_connection import LimitConnection
from commandbus.limits.releases import Releases
from commandbus.limits.requests import Limited, Permit, PermitCall, PermitRequest, QueuedCommand, Release
from commandbus.limits.stores.choose import ExternalStore, PermitStores
from commandbus.limits.stores.redis.backup_renewer import BackupRenewer
from commandbus.limits.waker import Waker
from commandbus.logger import safe_logger
from commandbus.model.limit import PermitUsage
from commandbus.model.limit_state import token_of
from commandbus.settings import Settings

logger = safe_logger("commandbus.limits")

SWEEP_SECONDS = 2.0
LONGEST_SLEEP = 1.0


class LimitClient(DatabaseService):
    """Permits of limits, for one worker or one bus."""

    def __init__(
        self,
        settings: Settings,
        owner: str,
        *,
        external: Callable[[], ExternalStore] | None = None,
        on_error: Callable[[BaseException], None] | None = None,
    ) -> None:
        super().__init__(settings, name=owner, part="limit client", on_end=self._end_with)
        self._owner = owner
        self._on_error = on_error
        connection = LimitConnection(self._connection)
        self._stores = PermitStores(connection, external, on_external=self._renew_beside)
        self._held_permits = HeldPermits(connection, self._stores, name=owner)
        self._backstop = BackupRenewer(owner, self._held_permits)
        self._waker = Waker(self._held_permits)
        self._releases = Releases(self._held_permits, self._waker)
        self._admission = Admission(self._held_permits, self._waker, self._releases, make_token=self._make_token)
        self._call_waiters = CallWaiters(self._held_permits, self._waker, self._releases)
        self._shut: dict[str, float] = {}  # when (monotonic) an API last refused a call
        self._told_blocked: dict[str, float] = {}  # the same, from notifications that are not handled yet
        self._sweep_at = monotonic() + random.random() * SWEEP_SECONDS  # noqa: S311 - they spread out
        self._numbers = itertools.count(secrets.randbits(40) << 20)
        self._must_ask_line = False
        self._is_at_work = True
        self._closing = False
        self._over: BaseException | None = None

    # --- called from other threads; none of these waits --------------------------------------------------------

    @property
    def is_serving(self) -> bool:
        """Can callers ask? Not after the thread has ended, and not in a forked process, which has no such
        thread."""
        return self._over is None and not self._closing and self._thread.is_alive()

    @property
    def is_busy(self) -> bool:
        """Is there something that may let a command begin soon?"""
        if (
            self._is_at_work
            or self._admission.asking
            or self._releases.pending
            or self._orders
            or self._admission.parking
        ):
            return True
        return self._waker.is_due_within(LONGEST_SLEEP)

    @property
    def waiting(self) -> int:
        """How many commands have asked and wait for a reply."""
        return len(self._admission.asking)

    @property
    def modes(self) -> dict[str, str]:
        """Where the permits of each limit that is used here are kept now."""
        return self._held_permits.modes

    @property
    def held(self) -> dict[str, int]:
        """How many permits of each limit are held here."""
        return self._held_permits.held

    def permit_request(self, permit_requests: Sequence[PermitRequest]) -> None:
        """Ask for the permits of commands."""
        self._admission.asking.extend(permit_requests)
        self.wake()

    def take_back(self) -> list[PermitRequest]:
        """Take back all requests that have no reply yet."""
        back = []
        while True:
            try:
                back.append(self._admission.asking.popleft())
            except IndexError:
                return back

    def release(self, releases: Sequence[Release]) -> None:
        """Release permits that are no longer needed."""
        self._releases.pending.extend(releases)
        self.wake()

    def note_parked(self, name: str) -> None:
        """Note that a refused command is parked now: it is in line."""
        self.order(lambda: self._admission.note_parked(name))

    def acquire(
        self,
        name: str,
        *,
        wait: float,
        holder: str,
        on_lost: Callable[[Permit], None] | None = None,
        command: QueuedCommand | None = None,
        since: datetime | None = None,
        caller: int | None = None,
    ) -> PermitCall:
        """Ask for a permit inside a program; `call.answer` is resolved with it, or with an error.

        `command`: a permit may be reserved for it, because it was parked. `since`: the moment that decides its
        position in line; None is now. `caller`: the id of the command whose handler asks.
        """
        number = next(self._numbers)
        token = token_of(f"{self._owner}/{holder}/{number:x}", caller)
        until = monotonic() + wait
        call = PermitCall(name, token, number, until, wait, holder, Future(), on_lost, command, since, caller)
        if not self.is_serving:
            call.answer.set_exception(self._over or CommandBusError("the limit client of this program is closed"))
            return call
        self._call_waiters.calls.append(call)
        self.wake()
        return call

    def forget(self, call: PermitCall) -> None:
        """Forget a call whose caller no longer waits. A permit that was given meanwhile is released."""
        call.answer.cancel()  # orders come before calls, so a call that was not handled yet gets no permit
        self.order(lambda: self._call_waiters.forget(call))

    def is_stale(self, permit: Permit) -> bool:
        """Was the permit given before the API refused a call? Then no call may begin with it."""
        return permit.taken_at < self._shut.get(permit.limit, 0.0)

    def judge(self, limited: Limited) -> None:
        """Handle a command whose call failed: release its permits, tell the limit what the API said, and let the
        worker decide about the command, given the state of the limit."""
        self._releases.pending.extend(limited.releases)

        def judge() -> None:
            if limited.untold is not None:
                self._releases.tell(limited.limit, *limited.untold, str(limited.command.id))
                limited.untold = None  # the order may be carried out again, but a refusal counts only once
            self._releases.let_out()  # its releases come first, because they begin the back-off
            self._admission.judge(limited)

        self.order(judge)

    def usage(self, name: str) -> Future[tuple[LimitRow, PermitUsage]]:
        """The state of a limit, and who holds its permits."""
        answer: Future[tuple[LimitRow, PermitUsage]] = Future()

        def find() -> None:
            try:
                row = self._held_permits.row(name)
                answer.set_result((row, self._stores.of(row).usage(row)))
            except CommandBusError as error:
                answer.set_exception(error)

        self.order(find)
        return answer

    def stop(self, timeout: float) -> None:
        """Release what must still be released, then end."""
        self._closing = True
        self.join(timeout)
        self._stopping.set()
        self._stop_beside()

    # --- the thread --------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread, and the clock of the permits that it holds."""
        self._held_permits.clock.start()
        try:
            super().start()
        except BaseException:
            self._stop_beside()
            raise

    def _renew_beside(self, external: ExternalStore) -> None:
        self._backstop.start(external)

    def _stop_beside(self) -> None:
        """Stop the helper threads. Permits that are still held end with their leases."""
        self._backstop.stop()
        self._held_permits.clock.stop()

    @property
    def has_lost_its_clock(self) -> bool:
        """Has the clock of the held permits ended although nobody stopped it?"""
        return self._held_permits.clock.has_ended

    def _make_token(self, holder: str, command: int) -> str:
        return token_of(f"{self._owner}/{holder}/{next(self._numbers):x}", command)

    def connected(self, conn: Connection[Any]) -> None:
        self.listen(conn, CHANNEL)
        self._must_ask_line = True  # callers whose turn came before this were not notified

    @property
    def is_done(self) -> bool:
        return self._stopping.is_set() or (self._closing and not self._releases.pending and not self._orders)

    def lost(self, error: psycopg.Error) -> None:  # noqa: ARG002
        if self._closing:
            self._stopping.set()  # permits that were not released in time end with their leases

    def _end_with(self, error: BaseException) -> None:
        """The thread has ended with an error: pass it to the callers and to the worker."""
        if isinstance(error, psycopg.errors.UndefinedTable | psycopg.errors.InvalidSchemaName):
            error = explain_absence(error)
        self._over = error
        self._stop_beside()
        self._call_waiters.fail_all(error)
        if self._on_error is not None:
            self._on_error(error)
        elif not isinstance(error, CommandBusError):  # a CommandBusError reaches the callers, which is enough
            logger.error("the limit client has ended", exc_info=error)

    def round(self) -> None:
        self._rest()
        self._releases.let_out()
        self.carry_out()
        self._admission.let_in()
        self._call_waiters.answer_calls()
        now = monotonic()
        self._call_waiters.give_up_late(now)
        self._waker.wake_due(now)
        if now >= self._held_permits.renew_at or self._stores.is_untended:
            self._held_permits.renew()
        if now >= self._sweep_at:
            self._sweep_at = now + SWEEP_SECONDS * (0.75 + random.random() / 2)  # noqa: S311
            self._waker.sweep()
            self._call_waiters.take_turns()

    def _rest(self) -> None:
        self.hear()  # notifications that came during our own statements do not wake the poll
        self._look_who_is_shut()
        self._take_turns_if_reconnected()
        if (
            self._orders
            or self._admission.asking
            or self._call_waiters.calls
            or self._releases.pending
            or self._closing
        ):
            return
        parts = (self._waker.soonest, self._call_waiters.soonest, self._releases.soonest)
        soonest = min(*parts, self._sweep_at, self._held_permits.renew_at)
        self._is_at_work = False
        self.sleep(min(soonest - monotonic(), LONGEST_SLEEP) + 0.001)
        self._is_at_work = True
        self._look_who_is_shut()

    def heard(self, channel: str, payload: str) -> None:  # noqa: ARG002 - there is one channel
        """Anybody may notify, so a notification is only a reason to look. Limits that are not used here are
        ignored: the sweep finds commands that wait for a limit that this program does not know."""
        if payload.startswith(TOKEN):
            self._call_waiters.hear(payload.removeprefix(TOKEN))
            return
        if payload.startswith(MODE):
            self._stores.hurry()
            self._held_permits.renew_at = 0.0
            return
        kind, name = next(
            ((kind, payload.removeprefix(kind)) for kind in (CLOSED, CHANGED, WAKE) if payload.startswith(kind)),
            ("", ""),
        )
        if not self._held_permits.knows(name):
            return
        if kind == CLOSED:
            self._told_blocked[name] = monotonic()
        elif kind == CHANGED:
            self._held_permits.forget(name)
            self._waker.look_at(name)
        elif not self._waker.is_barred:
            self._waker.look_at(name)

    def _look_who_is_shut(self) -> None:
        told, self._told_blocked = self._told_blocked, {}
        for name, at in told.items():
            try:
                limit_state = self._held_permits.row(name).limit_state
            except CommandBusError:
                continue  # it is gone
            if limit_state.is_probing:
                self._shut[name] = at

    def _take_turns_if_reconnected(self) -> None:
        if self._must_ask_line:
            self._must_ask_line = False
            self._call_waiters.take_turns()

    def finish(self) -> None:
        self._over = self._over or CommandBusError("the limit client of this program is closed")
        try:
            self._call_waiters.step_out()
            self._stores.close()
        except (psycopg.Error, CommandBusError) as error:
            logger.info("the limit client was not told of the end: %s", error)
        self._call_waiters.fail_all(self._over)
