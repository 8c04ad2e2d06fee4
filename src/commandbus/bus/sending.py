"""`bus.send`: by names, or as an object that knows its own. The async bus awaits the same body."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, TypedDict, Unpack, cast, overload

from commandbus.bus.base import BusBase
from commandbus.bus.send_within import TimedSend
from commandbus.model.command import NewCommand, SentCommand
from commandbus.model.command_class import addressed
from commandbus.model.durations import Duration
from commandbus.model.json_values import JsonValue, PayloadObject
from commandbus.model.priority import Priority
from commandbus.model.retry import OnExhausted
from commandbus.model.unique_key import OnConflict

if TYPE_CHECKING:
    from commandbus.bus.repositories.commands import CommandRepository


class _Options(TypedDict, total=False):
    command_id: str | None
    correlation_id: str | None
    max_attempts: int | None
    headers: Mapping[str, JsonValue] | None
    timeout: Duration | None
    expires: Duration | datetime | None
    on_exhausted: OnExhausted | None
    priority: Priority | None
    conn: object


class CallOptions(_Options, total=False):
    """The options of `call`, for type checkers."""

    wait: Duration


class SendOptions(_Options, total=False):
    """The options of `send`, for type checkers."""

    reply_to: str | None
    delay: Duration | None
    at: datetime | None
    unique: str | None
    unique_while: Duration | None
    on_conflict: OnConflict | None
    debounce: Duration | None
    max_delay: Duration | None
    key_limit: str | None
    key: str | None
    within: Duration | None


class SendMethods(BusBase):
    """A bus that sends."""

    if TYPE_CHECKING:

        @property
        def commands(self) -> CommandRepository: ...

        def _send_one(
            self, domain: str, new: NewCommand, send: Callable[[NewCommand], SentCommand]
        ) -> SentCommand: ...

    @abstractmethod
    def _send_within(self, send: TimedSend, conn: object) -> SentCommand: ...

    @overload
    def send(
        self, domain: str, command_type: str, data: JsonValue = None, **options: Unpack[SendOptions]
    ) -> SentCommand: ...
    @overload
    def send(self, command: PayloadObject, /, **options: Unpack[SendOptions]) -> SentCommand: ...
    def send(
        self,
        domain: str | PayloadObject,
        command_type: str | None = None,
        data: JsonValue = None,
        *,
        command_id: str | None = None,
        correlation_id: str | None = None,
        reply_to: str | None = None,
        max_attempts: int | None = None,
        delay: Duration | None = None,
        at: datetime | None = None,
        headers: Mapping[str, JsonValue] | None = None,
        timeout: Duration | None = None,
        expires: Duration | datetime | None = None,
        on_exhausted: OnExhausted | None = None,
        unique: str | None = None,
        unique_while: Duration | None = None,
        on_conflict: OnConflict | None = None,
        debounce: Duration | None = None,
        max_delay: Duration | None = None,
        key_limit: str | None = None,
        key: str | None = None,
        priority: Priority | None = None,
        within: Duration | None = None,
        conn: object = None,
    ) -> SentCommand:
        """Send a command; with `conn` in the caller's transaction.

        Instead of `domain`, `command_type` and `data`, give one object whose class is marked with `@command`.

        `command_id` is an idempotency key. The same id with the same content returns the existing command
        (`created=False`); with other content it raises DuplicateCommandError. `delay` is how long it waits before
        it may run; it starts no earlier than `at`. `timeout` is how long one attempt may take (0: no deadline),
        instead of its handler's or its worker's. If it has not started by `expires` (a duration from now, or a
        datetime with a time zone), it is CANCELED with code EXPIRED. `on_exhausted`: what happens when its
        attempts are used up, "troubleshoot" or "fail", instead of what its handler says. Durations are seconds,
        text such as "2m", or a timedelta.

        `unique` is a key. If another command of the domain has it, `on_conflict` decides: "ignore" (the default)
        returns the receipt of that command, "replace" gives it this content, "raise" raises UniqueConflictError.
        A command has its key while it is "unfinished" (the default) or "waiting", or for a duration after it was
        sent (`unique_while`). `debounce="5s"`: of all that are sent with the key, the last one runs when none has
        been sent for 5 s, at most `max_delay` (else 10 times as long) after the first.

        `priority`: "high" ones start before all others that wait; "low" ones get a tenth of the room beside them.

        `within` is how long the send may take, even if the server stands still. Then SendFailedError says whether
        the command may have been sent, and carries its command_id. A `conn` that did not answer is closed.

        `key` puts the command into the line of that key. Its type's limit says how many of a key run at once, and
        whether in the order of sending; `key_limit` names another one (`bus.key_limits`).
        """
        if command_type is None:
            domain, command_type, data = addressed(domain)
        domain = cast(str, domain)  # checked when it is prepared
        new = NewCommand(
            command_type, data, command_id, correlation_id, reply_to, max_attempts, delay, at, headers,
            timeout, expires, on_exhausted, unique, unique_while, on_conflict, debounce, max_delay, key_limit, key,
            priority,
        )  # fmt: skip
        if within is None:
            return self.commands.save(domain, new, conn=conn)
        address, limit = domain, within

        def send(new: NewCommand) -> SentCommand:
            return self._send_within(TimedSend(address, *self._prepare(address, new), limit), conn)

        return send(new) if self._chain is None else self._send_one(address, new, send)
