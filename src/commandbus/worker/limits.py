"""LimitedWork: what a worker does with limits: its limit client, and how limited commands reach it.

Claimed commands whose handler names limits go through the limit client before they reach a slot. What one attempt
does with its permits is in worker/limit_use.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING

from commandbus.db.service import DatabaseService
from commandbus.db.service_connection import LastingConnection
from commandbus.errors import ConfigurationError, UnknownLimitError
from commandbus.flow.commands.declare_priorities import declare_priorities
from commandbus.flow.keys.declare import declare_keys
from commandbus.flow.limits.declare import LimitRow, declare, is_awaited, list_limits, location_of
from commandbus.lazy import lazy
from commandbus.limits.make_client import make_limit_client, settle_limits
from commandbus.logger import safe_logger
from commandbus.model.api_errors import ApiFailure
from commandbus.model.limit_state import ApiAnswer
from commandbus.model.retry import RetryPolicy
from commandbus.settings import Settings
from commandbus.worker.execution.attempt import Attempt
from commandbus.worker.execution.execute import Ended, LimitDecides, Written
from commandbus.worker.execution.handlers import HandlerRegistry
from commandbus.worker.execution.key_rules import key_limits, name_keys, rules
from commandbus.worker.exhaustion import ExhaustedError, is_exhaustion

if TYPE_CHECKING:
    from commandbus.limits.client import LimitClient
    from commandbus.limits.requests import Permit, PermitCall
    from commandbus.worker import limit_use
    from commandbus.worker.limit_use import LimitUse
else:
    limit_use = lazy("commandbus.worker.limit_use")  # most workers have no limits

logger = safe_logger("commandbus.limits")

LIMITS_DEGRADED = "limits_degraded"
"""The reason under which a worker's health says so."""


def check_limits(
    connection: LastingConnection, settings: Settings, handlers: HandlerRegistry, domains: Collection[str]
) -> bool:
    """Declare the limits of settings and handlers and the priorities of handlers, and check that every limit that
    a handler names is known. Returns whether there are any limits: commands may be parked since the last worker
    stopped."""
    declared = settle_limits([*settings.limits, *handlers.limits], settings)
    name_keys(handlers, declared)
    keys = declare_keys(key_limits(handlers, declared, domains), rules(handlers, domains))
    shared = declare([limit for limit in declared if limit.key is None], location_of(settings))
    priorities = declare_priorities(_priorities(handlers, domains))
    for note in [*connection.run(shared), *connection.run(keys), *connection.run(priorities)]:
        logger.warning("%s", note)
    rows: dict[str, LimitRow] = {row.name: row for row in connection.run(list_limits())}
    for handler in handlers:
        for name in handler.options.limits:
            if name not in rows:
                raise ConfigurationError(f"handler {handler.name}: {UnknownLimitError(name, list(rows))}")
            if rows[name].store == "redis" and settings.redis_url is None:
                raise ConfigurationError(
                    f"handler {handler.name}: limit {name!r} is kept in Redis, and redis_url is not set; set "
                    f'COMMANDBUS_REDIS_URL, or give the limit store = "postgres"'
                )
    return bool(rows) or connection.run(is_awaited())


def _priorities(handlers: HandlerRegistry, domains: Collection[str]) -> dict[tuple[str, str], int | None]:
    return {(item.domain, item.command_type): item.options.priority for item in handlers if item.domain in domains}


class LimitedWork:
    """The worker's side of its limit client. The client is made on first use: a worker without limits has no
    thread for it.
    """

    def __init__(
        self,
        settings: Settings,
        worker: str,
        policy: RetryPolicy,
        *,
        push: Callable[[Attempt], None],
        settle: Callable[[Attempt, Written], None],
        on_lost: Callable[[Attempt, str], None],
        on_error: Callable[[BaseException], None],
    ) -> None:
        self._settings = settings
        self._worker = worker
        self.policy = policy
        self.push = push
        self.settle = settle
        self.on_lost = on_lost
        self._on_error = on_error
        self._making = threading.Lock()
        self._making_use = threading.Lock()
        self._limit_client: LimitClient | None = None

    @property
    def limit_client(self) -> LimitClient:
        """The limit client, made on first use."""
        with self._making:
            if self._limit_client is None:
                self._limit_client = self._open_limit_client()
            return self._limit_client

    def _open_limit_client(self) -> LimitClient:
        limit_client = make_limit_client(self._settings, self._worker, on_error=self._on_error)
        try:
            limit_client.start()
        except RuntimeError as error:
            if not is_exhaustion(error):
                raise
            raise ExhaustedError(f"the thread of the limit client could not be started: {error}") from error
        return limit_client

    @property
    def services(self) -> list[DatabaseService]:
        """The limit client, if there is one: its worker watches it."""
        return [] if self._limit_client is None else [self._limit_client]

    @property
    def has_ended(self) -> bool:
        """Has the clock of the held permits ended by itself?"""
        return self._limit_client is not None and self._limit_client.has_lost_its_clock

    @property
    def waiting(self) -> int:
        """How many commands are at the limit client."""
        return 0 if self._limit_client is None else self._limit_client.waiting

    @property
    def is_busy(self) -> bool:
        """May a command begin soon that is parked now?"""
        return self._limit_client is not None and self._limit_client.is_busy

    @property
    def is_degraded(self) -> bool:
        """Must the fleet work without Redis now?"""
        return self._limit_client is not None and any(
            mode in ("degraded", "lost") for mode in self._limit_client.modes.values()
        )

    @property
    def trouble(self) -> str:
        """What that means, for people."""
        modes = {} if self._limit_client is None else self._limit_client.modes
        lost = sorted(name for name, mode in modes.items() if mode in ("degraded", "lost"))
        return f"{LIMITS_DEGRADED.replace('_', ' ')}: {', '.join(lost)}: Redis is unreachable"

    def start(self) -> None:
        """Look after those who wait, before anybody asks for a permit."""
        _ = self.limit_client

    def use_of(self, attempt: Attempt) -> LimitUse:
        """What the attempt has to do with limits, made on first use."""
        with self._making_use:  # threads of its handler may come at once
            if attempt.limit_use is None:
                attempt.limit_use = limit_use.LimitUse(self, attempt)
            return attempt.limit_use

    def permit_request(self, attempts: Iterable[Attempt]) -> None:
        """Ask for the permits of attempts before they may begin."""
        self.limit_client.permit_request([self.use_of(attempt).request() for attempt in attempts])

    def finished(self, attempt: Attempt, ended: Ended) -> None:
        """It has ended. If its limit decides the outcome, it is settled after that decision."""
        if attempt.limit_use is None and not isinstance(ended, LimitDecides):
            self.settle(attempt, ended)
        else:
            self.use_of(attempt).finished(ended)

    def take_back(self) -> list[Attempt]:
        """Everything at the limit client."""
        if self._limit_client is None:
            return []
        return [
            permit_request.payload
            for permit_request in self._limit_client.take_back()
            if isinstance(permit_request.payload, Attempt)
        ]

    def flush(self, timeout: float) -> None:
        """Wait until what has ended so far has its outcome."""
        if self._limit_client is not None and self._limit_client.is_serving:
            self._limit_client.flush(timeout)

    def stop(self, timeout: float) -> None:
        """Give back what is left, and end."""
        if self._limit_client is not None:
            self._limit_client.stop(timeout)

    # --- for blocks of handlers' code ---------------------------------------------------------------------------

    def acquire(self, attempt: Attempt, name: str, wait: float) -> PermitCall:
        """Ask for a permit."""
        return self.use_of(attempt).acquire(name, wait)

    def forget(self, call: PermitCall) -> None:
        """The caller does not wait any more."""
        if call.on_forgotten is not None:
            call.on_forgotten()
            return
        self.limit_client.forget(call)
        answer = call.answer
        is_given = answer.done() and not answer.cancelled() and answer.exception() is None
        if is_given and call.on_given_up is not None:
            call.on_given_up(answer.result())

    def release(
        self, attempt: Attempt, permit: Permit, answer: ApiAnswer, api: ApiFailure | None, *, keeps: bool = False
    ) -> None:
        """The block is over."""
        self.use_of(attempt).release(permit, answer, api, keeps=keeps)

    def note_deadline(self, attempt: Attempt) -> None:
        """The ladder reads it where it was changed."""
