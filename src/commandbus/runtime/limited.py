"""Limited work: what a worker does with limits.

Claimed commands whose handler names limits pass the gate before they reach a slot. When an attempt ends, its
places are given back with what its end says of the API. One that the API has refused (a 429) is parked until the
back-off of the limit is over; at its cap it goes to the troubleshooting queue. One whose call failed otherwise is
charged, unless it was the probe for all who wait. An attempt that does not stop, or was stopped from outside,
keeps its place until the lease ends: its call may still be under way on the other side.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial

from commandbus.db.link import Link
from commandbus.db.service import DatabaseService
from commandbus.errors import ConfigurationError, UnknownLimitError
from commandbus.flow.limits import LimitRow, declare, home_of, is_awaited, list_limits
from commandbus.flow.places import Turn
from commandbus.flow.settle import Settlement
from commandbus.gate.build import make_gate, settle_limits
from commandbus.gate.gate import Gate
from commandbus.gate.requests import Call, Leave, Limited, Place, Refusal, Visit, too_long
from commandbus.logger import safe_logger
from commandbus.model.http import ApiFailure
from commandbus.model.limit import Limit
from commandbus.model.outcome import Failure, Judgement, Verdict
from commandbus.model.standing import Answer
from commandbus.model.suspects import GRAVE
from commandbus.runtime.attempt import Attempt, lost_text
from commandbus.runtime.exhaustion import ExhaustedError, is_exhaustion
from commandbus.runtime.handlers import HandlerRegistry
from commandbus.settings import Settings

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


def check_limits(link: Link, settings: Settings, handlers: HandlerRegistry) -> bool:
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
    """The worker's side of its gate. The gate is made on first use: who uses no limit has no thread for it."""

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
        self._gate: Gate | None = None

    @property
    def gate(self) -> Gate:
        """The gate, made on first use."""
        with self._making:
            if self._gate is None:
                self._gate = self._open_gate()
            return self._gate

    def _open_gate(self) -> Gate:
        gate = make_gate(self._settings, self._worker, on_error=self._on_error)
        try:
            gate.start()
        except RuntimeError as error:
            if not is_exhaustion(error):
                raise
            raise ExhaustedError(f"the limits' thread could not be started: {error}") from error
        return gate

    @property
    def services(self) -> list[DatabaseService]:
        """The gate, if there is one: its worker watches it."""
        return [] if self._gate is None else [self._gate]

    @property
    def waiting(self) -> int:
        """How many commands are at the gate."""
        return 0 if self._gate is None else self._gate.waiting

    @property
    def is_busy(self) -> bool:
        """May a command begin soon that is parked now?"""
        return self._gate is not None and self._gate.is_busy

    @property
    def is_degraded(self) -> bool:
        """Does somebody have to make do without Redis?"""
        return self._gate is not None and any(mode in ("degraded", "lost") for mode in self._gate.modes.values())

    @property
    def trouble(self) -> str:
        """What that means, for people."""
        modes = {} if self._gate is None else self._gate.modes
        lost = sorted(name for name, mode in modes.items() if mode in ("degraded", "lost"))
        return f"{LIMITS_DEGRADED.replace('_', ' ')}: {', '.join(lost)}: Redis is out of reach"

    def start(self) -> None:
        """Look after those who wait, before anybody asks for a place."""
        _ = self.gate

    def visit(self, attempts: Iterable[Attempt]) -> None:
        """Ask for the places of attempts before they may begin."""
        self.gate.visit([self._visit(attempt) for attempt in attempts])

    def take_back(self) -> list[Attempt]:
        """Everything at the gate."""
        if self._gate is None:
            return []
        return [visit.payload for visit in self._gate.take_back() if isinstance(visit.payload, Attempt)]

    def flush(self, timeout: float) -> None:
        """Wait until what has ended so far has its outcome."""
        if self._gate is not None and self._gate.is_serving:
            self._gate.flush(timeout)

    def stop(self, timeout: float) -> None:
        """Give back what is left, and end."""
        if self._gate is not None:
            self._gate.stop(timeout)

    # --- the end of attempts -----------------------------------------------------------------------------------

    def ended(self, attempt: Attempt) -> None:
        """It has ended by itself: what it said of its API is told, and its places are free."""
        places, attempt.extras.places = attempt.extras.places, []
        answer, api = attempt.extras.answer, attempt.extras.api
        keeps = attempt.extras.keeps
        leaves = []
        for place in places:
            own = answer
            if answer is Answer.RATE_LIMITED and place.limit != attempt.extras.blamed:
                own = Answer.UNKNOWN
            reason = str(own) if api is None else api.at(place.limit)
            leave = Leave(place, own, reason, None if api is None else api.retry_after, keeps)
            if own is Answer.RATE_LIMITED:
                attempt.extras.told.add(place.limit)
            leaves.append(_watched(attempt, leave))
        self.gate.leave(leaves)

    def is_stale(self, attempt: Attempt) -> bool:
        """Has an API said no since its places were given, or may one of them be somebody else's by now?"""
        return any(not place.is_sure or self.gate.is_stale(place) for place in attempt.places)

    def turn_back(self, attempt: Attempt) -> None:
        """To the gate once more, before it begins."""
        self.never_began(attempt)
        self.visit([attempt])

    def never_began(self, attempt: Attempt) -> None:
        """It had its places, and was given back before it began."""
        places, attempt.extras.places = attempt.extras.places, []
        if places:
            self.gate.leave([Leave(place, Answer.UNKNOWN, has_begun=False) for place in places])

    def abandoned(self, attempt: Attempt, answer: Answer, reason: str) -> None:
        """It was given up: its calls may go on, so its places, and those of its blocks, are taken until their
        leases end."""
        with self._lending:
            places = [*attempt.extras.places, *attempt.extras.blocks]
            attempt.extras.places, attempt.extras.blocks = [], []
            for place in places:
                place.is_left = True
        if places:
            self.gate.leave([_watched(attempt, Leave(place, answer, reason, keeps=True)) for place in places])

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
        self.gate.judge(Limited(name, attempt.domain, claimed[0], claimed[2], claimed[6], False, decide))

    def _waive(self, failed: CallFailed, row: LimitRow) -> Settlement:
        attempt, standing = failed.attempt, row.standing
        note = f"not charged: it was the probe of limit {row.name}, for all who wait"
        logger.info("%s %s: %s; %s", attempt.command_type, attempt.command_id, failed.failure.error, note)
        failure = replace(failed.failure, error=f"{failed.failure.error} ({note})")
        if failure.rung in GRAVE:  # its next attempt runs in quarantine: that mark is the retry's
            return attempt.fail(Judgement(Verdict.RETRY, failure), is_waived=True)
        attempt.extras.parks_at = row.name
        until = None if standing.is_forced else standing.closed_until(row.now)
        failure = replace(failure, error_code="LIMIT_PROBE")
        return attempt.park(row.name, failure, standing.explain(row.name), until=until)

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
            self.gate.tell(limited.limit, _holder(attempt), said, limited.api.retry_after, caller=attempt.id)
        self.gate.judge(
            Limited(limited.limit, attempt.domain, row[0], row[2], row[6], row[1] > 1, decide),
        )

    def settled(self, attempt: Attempt) -> None:
        """Its outcome is written; if it was parked, it is in line now."""
        name = attempt.parks_at
        if name is not None:
            self.gate.note_parked(name)

    # --- inside handlers ---------------------------------------------------------------------------------------

    def acquire(self, attempt: Attempt, name: str, wait: float) -> Call:
        """Ask for a place, for a block of a handler's code. One that the attempt has anyway, by its handler's
        `limits`, is used first."""
        extras = attempt.extras
        with self._lending:
            for place in extras.places:
                if place.limit == name and place.token not in extras.lent:
                    extras.lent.add(place.token)
                    lent = Call(name, place.token, 0, 0.0, 0.0, place.holder, Future(), None)
                    lent.on_forgotten = partial(extras.lent.discard, place.token)
                    lent.answer.set_result(place)
                    return lent
        command = None
        if attempt.row[1] > 1 and not extras.has_asked:
            extras.has_asked = True
            command = (attempt.domain, attempt.msg_id, attempt.id, attempt.row[6])
        call = self.gate.acquire(
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

    def forget(self, call: Call) -> None:
        """Who asked waits no more."""
        if call.on_forgotten is not None:
            call.on_forgotten()
            return
        self.gate.forget(call)
        answer = call.answer
        is_given = answer.done() and not answer.cancelled() and answer.exception() is None
        if is_given and call.on_given_up is not None:
            call.on_given_up(answer.result())

    def _enter_block(self, attempt: Attempt, answer: Future[Place]) -> None:
        if not answer.cancelled() and answer.exception() is None:
            with self._lending:
                attempt.extras.blocks.append(answer.result())

    def _leave_block(self, attempt: Attempt, place: Place) -> None:
        with self._lending:
            if place in attempt.extras.blocks:
                attempt.extras.blocks.remove(place)

    def note_deadline(self, attempt: Attempt) -> None:
        """The ladder reads it where it was changed."""

    def leave(
        self, attempt: Attempt, place: Place, answer: Answer, api: ApiFailure | None, *, keeps: bool = False
    ) -> None:
        """The block is over."""
        text = api.at(place.limit) if api else str(answer)
        if answer is Answer.RATE_LIMITED and api is not None and api.limit not in (None, place.limit):
            answer = Answer.UNKNOWN  # it speaks of another limit, which is told when it leaves the handler
        leave = Leave(place, answer, text, api.retry_after if api else None, keeps)
        if place.token in attempt.extras.lent:
            attempt.extras.lent.discard(place.token)
            if not answer.is_bad:
                return
            leave.keeps = leave.stays = True
            attempt.extras.has_told = True
        elif place.is_left:
            return  # when the attempt was given up
        self._leave_block(attempt, place)
        if answer is Answer.RATE_LIMITED:
            attempt.extras.blamed = place.limit
            attempt.extras.told.add(place.limit)
        self.gate.leave([_watched(attempt, leave)])

    # --- the gate's answers ------------------------------------------------------------------------------------

    def _visit(self, attempt: Attempt) -> Visit:
        row = attempt.row
        handler = attempt.handler
        return Visit(
            attempt.domain,
            row[0],
            row[2],
            row[6],
            row[1] > 1,
            handler.options.limits if handler is not None else (),
            _holder(attempt),
            lambda places: self._granted(attempt, places),
            lambda refusal: self._refused(attempt, refusal),
            self._losing(attempt),
            attempt,
        )

    def _granted(self, attempt: Attempt, places: Sequence[Place]) -> None:
        attempt.extras.places = list(places)
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

    def _losing(self, attempt: Attempt) -> Callable[[Place], None]:
        def lose(place: Place) -> None:
            if attempt.started_at:  # else it asks again before it begins; the ladder sees one that begins just now
                self._on_lost(attempt, lost_text(place.limit))

        return lose

    def _fate(self, limited: RateLimited, row: LimitRow | None, turn: Turn | None) -> Settlement:
        attempt, failure = limited.attempt, limited.failure
        if row is None:
            note = f"its API has refused it, and limit {limited.limit} is declared no more"
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
        standing = row.standing
        until = None if standing.is_forced else standing.closed_until(row.now)
        note = standing.explain(limit.name) if standing.is_probing else limited.api.at(limit.name)
        return attempt.park(limited.limit, replace(failure, error_code="RATE_LIMITED"), note, until=until)


def _watched(attempt: Attempt, leave: Leave) -> Leave:
    """If the call failed, what the limit says of that is noted for the attempt's settlement."""
    if leave.answer in (Answer.BROKEN, Answer.TIMEOUT):
        attempt.extras.failed_at = leave.place.limit
        leave.then = partial(_note_waived, attempt)
    return leave


def _note_waived(attempt: Attempt, leave: Leave) -> None:
    if leave.is_waived:
        attempt.extras.failed_at, attempt.extras.is_waived = leave.place.limit, True


def _say_given_up(attempt: Attempt, reason: str, trace: str | None = None) -> None:
    """It needs a person: an ERROR, as for all whose attempts are used up."""
    text = "%s %s of domain %s: %s; to the troubleshooting queue"
    what = (attempt.command_type, attempt.command_id, attempt.domain)
    logger.error(text, *what, reason, extra=attempt.log_fields, trace=trace)


def _holder(attempt: Attempt) -> str:
    return f"{attempt.domain}/{attempt.command_id}"[:120]
