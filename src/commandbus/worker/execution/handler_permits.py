"""HandlerPermits: a permit of a limit for a part of a handler's code, `with ctx.limit("docai"): …`.

The block itself is in limits/with_block.py. Waiting for the permit keeps the slot and counts against the deadline.
`timeout` is for the one call in the block. In an `async with` it cancels what is awaited there, and that raises
ApiTimeoutError; the handler may go on. In a `with` it is the attempt's own deadline as long as the block lasts:
the ladder asks, waits for the grace, and gives it up.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from commandbus.model.api_errors import ApiFailure
from commandbus.model.limit_state import ApiAnswer
from commandbus.worker.execution.attempt import Attempt, Scope

if TYPE_CHECKING:
    from commandbus.limits.requests import Permit, PermitCall
    from commandbus.limits.with_block import Hold


class PermitProvider(Protocol):
    """Where handlers get permits: from the worker's limits or, in a child process, by asking the worker."""

    def acquire(self, attempt: Attempt, name: str, wait: float) -> PermitCall:
        """Ask for a permit."""

    def forget(self, call: PermitCall) -> None:
        """The caller does not wait any more."""

    def release(
        self, attempt: Attempt, permit: Permit, answer: ApiAnswer, api: ApiFailure | None, *, keeps: bool = False
    ) -> None:
        """The block is over."""

    def note_deadline(self, attempt: Attempt) -> None:
        """Tell others that the attempt's deadline was changed here."""


class HandlerPermits:
    """The permit of one block of a handler."""

    def __init__(
        self,
        provider: PermitProvider,
        attempt: Attempt,
        *,
        deadline: Callable[[], float],
        check: Callable[[], None],
    ) -> None:
        self._provider = provider
        self._attempt = attempt
        self._deadline = deadline
        self.check = check
        self._before: tuple[float, str | None] | None = None  # the deadline outside the block, and its name

    @property
    def deadline_at(self) -> float:
        """When the attempt, or the child context, is asked to stop."""
        return self._deadline()

    @contextmanager
    def waking(self) -> Iterator[threading.Event]:
        """The ladder sets the event when it asks the attempt to stop."""
        scopes, scope = self._attempt.extras.scopes, Scope(self._deadline())
        scopes.append(scope)
        try:
            yield scope.event
        finally:
            scopes.remove(scope)

    def acquire(self, name: str, wait: float) -> PermitCall:
        """Ask for a permit."""
        return self._provider.acquire(self._attempt, name, wait)

    def forget(self, call: PermitCall) -> None:
        """Nobody waits for it any more."""
        self._provider.forget(call)

    def why_in_vain(self) -> str | None:
        """The ladder and the lease keeper look after a worker without its database."""
        return None

    def begin_call(self, until: float, late_text: str) -> bool:
        """The call's deadline is the attempt's, if it is nearer."""
        attempt = self._attempt
        if until >= attempt.deadline_at:
            return False
        self._before = attempt.deadline_at, attempt.extras.late_text
        attempt.extras.late_text, attempt.deadline_at = late_text, until
        self._provider.note_deadline(attempt)
        return True

    def end_call(self) -> None:
        """The attempt has its own deadline again."""
        attempt = self._attempt
        if self._before is not None and attempt.stop is None:
            before, attempt.extras.late_text = self._before
            attempt.deadline_at = max(before, attempt.deadline_at)  # it may have been extended meanwhile
            self._provider.note_deadline(attempt)

    def watch(self, permit: Permit, timer: asyncio.Timeout) -> None:
        """If the permit is lost, the ladder asks the attempt to stop."""

    def release(self, permit: Permit, answer: ApiAnswer, api: ApiFailure | None, *, keeps: bool = False) -> None:
        """The block is over."""
        self._provider.release(self._attempt, permit, answer, api, keeps=keeps)


class AsyncBlock(AbstractAsyncContextManager["Hold"]):
    """The block of an `async def` handler. A plain `with` raises an error that says so."""

    def __init__(self, inner: AbstractAsyncContextManager[Hold]) -> None:
        self._inner = inner

    async def __aenter__(self) -> Hold:
        return await self._inner.__aenter__()

    async def __aexit__(self, *what: Any) -> bool | None:
        return await self._inner.__aexit__(*what)

    def __enter__(self) -> NoReturn:
        raise TypeError("in an `async def`, write `async with ctx.limit(…)`, not `with`")

    def __exit__(self, *what: object) -> None:
        """Never reached: `with` asks for it first."""
