"""What a worker does with limits.

Claimed commands whose handler names limits go through the limit client before they reach a slot. When an attempt
ends, its permits are released, and its end tells how the API is. If the API refused the call (a 429), the command
is parked until the back-off is over; after `tries` refusals it goes to the troubleshooting queue. If the call
failed in another way, the attempt is charged, unless it was the probe while others wait. An attempt that does not
stop, or was stopped from outside, keeps its permit until the lease ends, because the API may still be working on
its call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial

from commandbus.db.service import DatabaseService
from commandbus.db.service_connection import LastingConnection
from commandbus.errors import ConfigurationError, UnknownLimitError
from commandbus.flow.commands.settle import Settlement
from commandbus.flow.limits.declare import LimitRow, declare, home_of, is_awaited, list_limits
from commandbus.flow.limits.permits import Turn
from commandbus.limits.client import LimitClient
from commandbus.limits.make_client import make_limit_client, settle_limits
from commandbus.limits.requests import Limited, Permit, PermitCall, PermitRequest, Refusal, Release, too_long
from commandbus.logger import safe_logger
from commandbus.model.api_errors import ApiFailure
from commandbus.model.limit import Limit
from commandbus.model.limit_state import ApiAnswer
from commandbus.model.outcome import Failure, Judgement, Verdict
from commandbus.model.suspects import GRAVE
from commandbus.settings import Settings
from commandbus.worker.execution.attempt import Attempt, lost_text
from commandbus.worker.execution.handlers import HandlerRegistry
from commandbus.worker.exhaustion import ExhaustedError, is_exhaustion

logger = safe_logger("commandbus.limits")

LIMITS_DEGRADED = "limits_degraded"
"""The reason under which a worker's health says so."""


@dataclass(frozen=True, slots=True)
class RateLimited:
    """How an attempt ended whose API has refused it."""

    attempt: Attempt
    limit: str
    failure: Failure
    api: ApiFailure


@dataclass(frozen=True, slots=True)
class CallFailed:
    """How an attempt ended whose call to a limited API failed: a 5xx, or no answer in time. `charge` makes the
    settlement if it is charged for that."""

    attempt: Attempt
    failure: Failure
    charge: Callable[[], Settlement]


def check_limits(link: LastingConnection, settings: Settings, handlers: HandlerRegistry) -> bool:
    """Declare the limits of settings and handlers, and see that every limit that a handler names is known. Answers
    whether there are any: somebody may be parked since the last worker stopped."""
    declared = settle_limits([*settings.limits, *handlers.limits], settings)
    for note in link.run(declare(declared, home_of(settings))):
        logger.warning("%s", note)
    rows: dict[str, LimitRow] = {row.name: row for row in link.run(list_limits())}
    for handler in handlers:
        for name in handler.options.limits:
            if name not in rows:
                raise ConfigurationError(f"handler {handler.name}: {UnknownLimitError(name, list(rows))}")
            if rows[name].backend == "redis" and settings.redis_url is None:
                raise ConfigurationError(
                    f"handler {handler.name}: limit {name!r} is kept in Redis, and redis_url is not set; set "
                    f'COMMANDBUS_REDIS_URL, or give the limit backend = "postgres"'
                )
    return bool(rows) or link.run(is_awaited())


class LimitedWork:
    """The worker's side of its limit client. The limit client is made on first use: who uses no limit has no
    thread for it.
    """

    def __init__(
        self,
        settings: Settings,
        worker: str,
        *,
        push: Callable[[Attempt], None],
        settle: Callable[[Attempt, Settlement], None],
        on_lost: Callable[[Attempt, str], None],
        on_error: Callable[[BaseException], None],
    ) -> None:
        self._settings = settings
        self._worker = worker
        self._push = push
        self._settle = settle
        self._on_lost = on_lost
        self._on_error = on_error
        self._making = threading.Lock()
        self._lending = threading.Lock()
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
    def waiting(self) -> int:
        """How many commands are at the limit client."""
        return 0 if self._limit_client is None else self._limit_client.waiting

    @property
    def is_busy(self) -> bool:
        """May a command begin soon that is parked now?"""
        return self._limit_client is not None and self._limit_client.is_busy

    @property
    def is_degraded(self) -> bool:
        """Does somebody have to make do without Redis?"""
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

    def permit_request(self, attempts: Iterable[Attempt]) -> None:
        """Ask for the permits of attempts before they may begin."""
        self.limit_client.permit_request([self._permit_request(attempt) for attempt in attempts])

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

    # --- the end of attempts -----------------------------------------------------------------------------------

    def ended(self, attempt: Attempt) -> None:
        """It has ended by itself: what it said of its API is told, and its permits are free."""
        permits, attempt.extras.permits = attempt.extras.permits, []
        answer, api = attempt.extras.answer, attempt.extras.api
        keeps = attempt.extras.keeps
        leaves = []
        for permit in permits:
            own = answer
            if answer is ApiAnswer.RATE_LIMITED and permit.limit != attempt.extras.blamed:
                own = ApiAnswer.UNKNOWN
            reason = str(own) if api is None else api.at(permit.limit)
            leave = Release(permit, own, reason, None if api is None else api.retry_after, keeps)
            if own is ApiAnswer.RATE_LIMITED:
                attempt.extras.told.add(permit.limit)
            leaves.append(_watched(attempt, leave))
        self.limit_client.leave(leaves)

    def is_stale(self, attempt: Attempt) -> bool:
        """Has an API said no since its permits were given, or may one of them be somebody else's by now?"""
        return any(not permit.is_sure or self.limit_client.is_stale(permit) for permit in attempt.permits)

    def turn_back(self, attempt: Attempt) -> None:
        """To the limit client once more, before it begins."""
        self.never_began(attempt)
        self.permit_request([attempt])

    def never_began(self, attempt: Attempt) -> None:
        """It had its permits, and was given back before it began."""
        permits, attempt.extras.permits = attempt.extras.permits, []
        if permits:
            self.limit_client.leave([Release(permit, ApiAnswer.UNKNOWN, has_begun=False) for permit in permits])

    def abandoned(self, attempt: Attempt, answer: ApiAnswer, reason: str) -> None:
        """It was given up: its calls may go on, so its permits, and those of its blocks, are taken until their
        leases end."""
        with self._lending:
            permits = [*attempt.extras.permits, *attempt.extras.blocks]
            attempt.extras.permits, attempt.extras.blocks = [], []
            for permit in permits:
                permit.is_left = True
        if permits:
            self.limit_client.leave(
                [_watched(attempt, Release(permit, answer, reason, keeps=True)) for permit in permits]
            )

    def judge(self, ended: RateLimited | CallFailed) -> None:
        """A call of it went badly: its limit decides what becomes of it."""
        if isinstance(ended, RateLimited):
            self._judge_refused(ended)
        else:
            self._judge_failed(ended)

    def _judge_failed(self, failed: CallFailed) -> None:
        """It is charged, unless it was the probe for all who wait. Then it waits, too, and pays nothing."""
        attempt = failed.attempt
        name = attempt.extras.failed_at
        if name is None:  # no limit was told of it
            self._settle(attempt, failed.charge())
            return

        def decide(row: LimitRow | None, _: Turn | None) -> bool:
            if row is not None and attempt.extras.is_waived:
                settlement = self._waive(failed, row)
            else:
                settlement = failed.charge()
            self._settle(attempt, settlement)
            return settlement.is_parked

        claimed = attempt.row
        self.limit_client.judge(Limited(name, attempt.domain, claimed[0], claimed[2], claimed[6], False, decide))

    def _waive(self, failed: CallFailed, row: LimitRow) -> Settlement:
        attempt, limit_state = failed.attempt, row.limit_state
        note = f"not charged: it was the probe of limit {row.name}, and other commands wait"
        logger.info("%s %s: %s; %s", attempt.command_type, attempt.command_id, failed.failure.error, note)
        failure = replace(failed.failure, error=f"{failed.failure.error} ({note})")
        if failure.rung in GRAVE:  # its next attempt runs in quarantine: that mark is the retry's
            return attempt.fail(Judgement(Verdict.RETRY, failure), is_waived=True)
        attempt.extras.parks_at = row.name
        until = None if limit_state.is_forced else limit_state.closed_until(row.now)
        failure = replace(failure, error_code="LIMIT_PROBE")
        return attempt.park(row.name, failure, limit_state.explain(row.name), until=until)

    def _judge_refused(self, limited: RateLimited) -> None:
        """Its API has refused it: park it until the back-off is over, or hand it to a person at its cap."""
        attempt = limited.attempt

        def decide(row: LimitRow | None, turn: Turn | None) -> bool:
            settlement = self._fate(limited, row, turn)
            self._settle(attempt, settlement)
            return settlement.is_parked

        row = attempt.row
        if limited.limit not in attempt.extras.told:
            said = limited.api.at(limited.limit)
            self.limit_client.tell(
                limited.limit, _holder(attempt), said, limited.api.retry_after, caller=attempt.id
            )
        self.limit_client.judge(
            Limited(limited.limit, attempt.domain, row[0], row[2], row[6], row[1] > 1, decide),
        )

    def settled(self, attempt: Attempt) -> None:
        """Its outcome is written; if it was parked, it is in line now."""
        name = attempt.parks_at
        if name is not None:
            self.limit_client.note_parked(name)

    # --- inside handlers ---------------------------------------------------------------------------------------

    def acquire(self, attempt: Attempt, name: str, wait: float) -> PermitCall:
        """Ask for a permit, for a block of a handler's code. One that the attempt has anyway, by its handler's
        `limits`, is used first."""
        extras = attempt.extras
        with self._lending:
            for permit in extras.permits:
                if permit.limit == name and permit.token not in extras.lent:
                    extras.lent.add(permit.token)
                    lent = PermitCall(name, permit.token, 0, 0.0, 0.0, permit.holder, Future(), None)
                    lent.on_forgotten = partial(extras.lent.discard, permit.token)
                    lent.answer.set_result(permit)
                    return lent
        command = None
        if attempt.row[1] > 1 and not extras.has_asked:
            extras.has_asked = True
            command = (attempt.domain, attempt.msg_id, attempt.id, attempt.row[6])
        call = self.limit_client.acquire(
            name,
            wait=wait,
            holder=_holder(attempt),
            on_lost=self._losing(attempt),
            command=command,
            since=attempt.created_at,
            caller=attempt.id,
        )
        call.on_given_up = partial(self._leave_block, attempt)
        call.answer.add_done_callback(partial(self._enter_block, attempt))
        return call

    def forget(self, call: PermitCall) -> None:
        """Who asked waits no more."""
        if call.on_forgotten is not None:
            call.on_forgotten()
            return
        self.limit_client.forget(call)
        answer = call.answer
        is_given = answer.done() and not answer.cancelled() and answer.exception() is None
        if is_given and call.on_given_up is not None:
            call.on_given_up(answer.result())

    def _enter_block(self, attempt: Attempt, answer: Future[Permit]) -> None:
        if not answer.cancelled() and answer.exception() is None:
            with self._lending:
                attempt.extras.blocks.append(answer.result())

    def _leave_block(self, attempt: Attempt, permit: Permit) -> None:
        with self._lending:
            if permit in attempt.extras.blocks:
                attempt.extras.blocks.remove(permit)

    def note_deadline(self, attempt: Attempt) -> None:
        """The ladder reads it where it was changed."""

    def leave(
        self, attempt: Attempt, permit: Permit, answer: ApiAnswer, api: ApiFailure | None, *, keeps: bool = False
    ) -> None:
        """The block is over."""
        text = api.at(permit.limit) if api else str(answer)
        if answer is ApiAnswer.RATE_LIMITED and api is not None and api.limit not in (None, permit.limit):
            answer = ApiAnswer.UNKNOWN  # it speaks of another limit, which is told when it leaves the handler
        leave = Release(permit, answer, text, api.retry_after if api else None, keeps)
        if permit.token in attempt.extras.lent:
            attempt.extras.lent.discard(permit.token)
            if not answer.is_bad:
                return
            leave.keeps = leave.stays = True
            attempt.extras.has_told = True
        elif permit.is_left:
            return  # when the attempt was given up
        self._leave_block(attempt, permit)
        if answer is ApiAnswer.RATE_LIMITED:
            attempt.extras.blamed = permit.limit
            attempt.extras.told.add(permit.limit)
        self.limit_client.leave([_watched(attempt, leave)])

    # --- the limit client's answers
    # ------------------------------------------------------------------------------------

    def _permit_request(self, attempt: Attempt) -> PermitRequest:
        row = attempt.row
        handler = attempt.handler
        return PermitRequest(
            attempt.domain,
            row[0],
            row[2],
            row[6],
            row[1] > 1,
            handler.options.limits if handler is not None else (),
            _holder(attempt),
            lambda permits: self._granted(attempt, permits),
            lambda refusal: self._refused(attempt, refusal),
            self._losing(attempt),
            attempt,
        )

    def _granted(self, attempt: Attempt, permits: Sequence[Permit]) -> None:
        attempt.extras.permits = list(permits)
        self._push(attempt)

    def _refused(self, attempt: Attempt, refusal: Refusal) -> None:
        failure = Failure("LimitTimeoutError" if refusal.gives_up else "Limit", refusal.code, refusal.note)
        if refusal.gives_up:
            _say_given_up(attempt, refusal.note)
            self._settle(attempt, attempt.fail(Judgement(Verdict.EXHAUSTED, failure)))
            return
        attempt.extras.parks_at = refusal.limit
        self._settle(
            attempt,
            attempt.park(refusal.limit, failure, refusal.note, until=refusal.until),
        )

    def _losing(self, attempt: Attempt) -> Callable[[Permit], None]:
        def lose(permit: Permit) -> None:
            if attempt.started_at:  # else it asks again before it begins; the ladder sees one that begins just now
                self._on_lost(attempt, lost_text(permit.limit))

        return lose

    def _fate(self, limited: RateLimited, row: LimitRow | None, turn: Turn | None) -> Settlement:
        attempt, failure = limited.attempt, limited.failure
        if row is None:
            note = f"its API has refused it, and limit {limited.limit} is no longer declared"
            _say_given_up(attempt, note, failure.traceback)
            return attempt.fail(Judgement(Verdict.EXHAUSTED, replace(failure, error=f"{failure.error}; {note}")))
        tries = (turn.tries if turn is not None else 0) + 1
        waited = row.waited_in_vain(turn.waited_seconds if turn is not None else None)
        limit: Limit = row.limit
        cap = None
        if tries >= limit.tries:
            cap = f"refused {tries} times, and tries of limit {limit.name} is {limit.tries}"
        elif limit.max_wait_seconds is not None and waited >= limit.max_wait_seconds:
            cap = too_long(row, waited)
        if cap is not None:
            _say_given_up(attempt, cap, failure.traceback)
            told = replace(failure, error_code="RATE_LIMITED", error=f"{failure.error} ({cap})")
            return attempt.fail(Judgement(Verdict.EXHAUSTED, told))
        attempt.extras.parks_at = limited.limit
        limit_state = row.limit_state
        until = None if limit_state.is_forced else limit_state.closed_until(row.now)
        note = limit_state.explain(limit.name) if limit_state.is_probing else limited.api.at(limit.name)
        return attempt.park(limited.limit, replace(failure, error_code="RATE_LIMITED"), note, until=until)


def _watched(attempt: Attempt, leave: Release) -> Release:
    """If the call failed, what the limit says of that is noted for the attempt's settlement."""
    if leave.answer in (ApiAnswer.BROKEN, ApiAnswer.TIMEOUT):
        attempt.extras.failed_at = leave.permit.limit
        leave.then = partial(_note_waived, attempt)
    return leave


def _note_waived(attempt: Attempt, leave: Release) -> None:
    if leave.is_waived:
        attempt.extras.failed_at, attempt.extras.is_waived = leave.permit.limit, True


def _say_given_up(attempt: Attempt, reason: str, trace: str | None = None) -> None:
    """It needs a person: an ERROR, as for all whose attempts are used up."""
    text = "%s %s of domain %s: %s; to the troubleshooting queue"
    what = (attempt.command_type, attempt.command_id, attempt.domain)
    logger.error(text, *what, reason, extra=attempt.log_fields, trace=trace)


def _holder(attempt: Attempt) -> str:
    return f"{attempt.domain}/{attempt.command_id}"[:120]
