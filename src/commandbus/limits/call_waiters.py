"""CallWaiters: calls inside programs (`ctx.limit`, `bus.limit`), and those of them that wait in line.

    call ──► its command's turn has come, or a permit is free ──► permit
      └────► in line, in the database ──► told by its token that its turn has come ──► permit
                                     └──► its time is up, or nobody waits for it any more ──► out of line

Each call gets one reply: a permit or an error. The caller may cancel at every step; a permit that was given at
that moment is released. Only the limit client's thread uses this; other threads fill `calls`.
"""

from __future__ import annotations

import math
from collections import deque
from contextlib import suppress

from commandbus.clock import boottime, monotonic
from commandbus.errors import CommandBusError, LimitTimeoutError
from commandbus.flow.limits import permits
from commandbus.limits.held_permits import HeldPermits
from commandbus.limits.limit_connection import LockedRowError
from commandbus.limits.releases import Releases
from commandbus.limits.requests import Permit, PermitCall, QueuedCommand, refuse, waited_in_vain
from commandbus.limits.waker import Waker


class CallWaiters:
    """The callers that wait for a permit inside this program."""

    def __init__(self, held_permits: HeldPermits, waker: Waker, releases: Releases) -> None:
        self._held_permits = held_permits
        self._waker = waker
        self._releases = releases
        self.calls: deque[PermitCall] = deque()
        self._waiting: dict[str, PermitCall] = {}
        self._later: list[tuple[float, PermitCall]] = []  # calls that found a locked row, and when they ask again

    @property
    def soonest(self) -> float:
        """When (monotonic) the first wait ends, or a call that found a locked row asks again."""
        times = [call.until for call in self._waiting.values()] + [at for at, _ in self._later]
        return min(times, default=math.inf)

    def answer_calls(self) -> None:
        """Give permits to callers, or put them in line."""
        now = monotonic()
        self.calls.extend(call for at, call in self._later if at <= now)
        self._later = [item for item in self._later if item[0] > now]
        while self.calls:
            call = self.calls[0]
            if not call.answer.done():
                self._begin(call)
            self.calls.popleft()

    def hear(self, token: str) -> None:
        """Handle the notification that a caller was woken; the caller may belong to another program."""
        call = self._waiting.get(token)
        if call is not None:
            self._take_turn(call)

    def take_turns(self) -> None:
        """Find callers that were woken, including those whose notification was missed."""
        for call in list(self._waiting.values()):
            self._take_turn(call)

    def give_up_late(self, now: float) -> None:
        """Give up the calls whose time is up."""
        for call in [call for call in self._waiting.values() if call.until <= now]:
            self._give_up(call)

    def forget(self, call: PermitCall) -> None:
        """Forget a call whose caller no longer waits. A permit that was given meanwhile is released."""
        if call.answer.done() and not call.answer.cancelled():
            if call.answer.exception() is None:
                self._releases.hand_back([call.answer.result()])
            return
        self._waiting.pop(call.token, None)
        if call.is_in_line and self._held_permits.connection.run(permits.step_out(call.number)):
            with suppress(CommandBusError):  # the limit is gone, and so are its permits
                row = self._held_permits.known(call.name)
                self._held_permits.stores.of(row).release(row, [call.token])
            self._waker.look_at(call.name)

    def step_out(self) -> None:
        """Leave all lines, because the program ends."""
        for call in list(self._waiting.values()):
            self._held_permits.connection.run(permits.step_out(call.number))

    def fail_all(self, error: BaseException) -> None:
        """Fail all calls, because the limit client has ended."""
        for call in [*self.calls, *self._waiting.values(), *(call for _, call in self._later)]:
            _fail(call, error)

    def _begin(self, call: PermitCall) -> None:
        asked_at = boottime()
        try:
            if call.command is not None and self._has_turn(call, call.command):
                return
            granted, _ = self._held_permits.take(call.name, [call.token])
        except LockedRowError as error:
            if monotonic() < call.until:
                self._later.append((min(error.until, call.until), call))
            else:
                _fail(call, waited_in_vain(call.name, call.wait, str(error)))
            return
        except CommandBusError as error:
            self._held_permits.forget(call.name)
            _fail(call, error)
            return
        if granted:
            self._resolve(call, asked_at)
            return
        left = call.until - monotonic()
        if left <= 0:
            _fail(call, self._in_vain(call))
            return
        self._held_permits.connection.run(
            permits.line_up(
                call.name,
                call.token,
                number=call.number,
                seconds=left,
                who=call.holder,
                since=call.since,
                command=call.caller,
            )
        )
        call.is_in_line = True
        self._waiting[call.token] = call
        self._waker.look_at(call.name)

    def _has_turn(self, call: PermitCall, command: QueuedCommand) -> bool:
        """Is a permit reserved for the command that calls? Its handler names no limits, so nobody has asked
        before."""
        turns = self._held_permits.connection.run(permits.turns(command.domain, [command.key]))
        turn = turns.get(command.msg_id)
        if turn is None or turn.token is None or turn.limit != call.name:
            return False
        asked_at = boottime()
        if not self._held_permits.adopt(call.name, turn.token):
            return False
        call.token = turn.token
        self._resolve(call, asked_at)
        return True

    def _take_turn(self, call: PermitCall) -> None:
        """Take the permit of a caller that was woken, or that may have missed its notification."""
        asked_at = boottime()
        try:
            is_held = self._held_permits.adopt(call.name, call.token)
        except LockedRowError:
            return  # the next sweep looks again
        except CommandBusError as error:
            self._waiting.pop(call.token, None)
            _fail(call, error)
            return
        if is_held:
            self._held_permits.connection.run(permits.step_out(call.number))
            self._waiting.pop(call.token, None)
            self._resolve(call, asked_at)
        elif self._held_permits.connection.run(permits.stand_again(call.number)):
            self._waker.look_at(call.name)  # its turn came, but the reserved permit is gone

    def _give_up(self, call: PermitCall) -> None:
        """End a call whose wait is over. If it was woken at this very moment, it gets its permit."""
        asked_at = boottime()
        try:
            is_held = self._held_permits.connection.run(
                permits.step_out(call.number)
            ) and self._held_permits.adopt(call.name, call.token)
        except CommandBusError:
            is_held = False
        self._waiting.pop(call.token, None)
        if is_held:
            self._resolve(call, asked_at)
        else:
            _fail(call, self._in_vain(call))

    def _in_vain(self, call: PermitCall) -> LimitTimeoutError:
        try:
            why = refuse(self._held_permits.row(call.name), waited_seconds=None).note
        except CommandBusError as error:
            why = str(error)
        return waited_in_vain(call.name, call.wait, why)

    def _resolve(self, call: PermitCall, asked_at: float) -> None:
        row = self._held_permits.known(call.name)
        permit = Permit(
            call.name,
            call.token,
            row.lease,
            holder=call.holder,
            call_timeout=row.call_timeout,
            on_lost=call.on_lost,
            asked_at=asked_at,
        )
        self._held_permits.hold(permit)
        if not call.answer.set_running_or_notify_cancel():
            self._releases.hand_back([permit])
        else:
            call.answer.set_result(permit)


def _fail(call: PermitCall, error: BaseException) -> None:
    if not call.answer.done() and call.answer.set_running_or_notify_cancel():
        call.answer.set_exception(error)
