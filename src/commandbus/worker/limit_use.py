"""LimitUse: what one attempt has to do with limits. An attempt that has nothing to do with them has none.

    before_start   it has its permits: may it begin with them?
    finished       its handler has ended: its permits are free, and its limit may decide what becomes of it
    abandoned      it was abandoned: its calls may go on, so its permits stay taken until their leases end
    returned       it was given back, and never began

Between them: `acquire` and `release`, for blocks of its handler's code. If an API refused the call (a 429), the
command is parked until the back-off is over; at its cap it goes to the troubleshooting queue. If the call failed
in another way, the attempt is charged, unless it was the probe while others wait.

Threads: `granted` and the decisions are the limit client's, `abandoned` is the ladder's; all else is called where
the attempt runs, by its slot or any thread of its handler. Nothing here waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from commandbus.flow.commands.settle import Settlement
from commandbus.flow.limits.declare import LimitRow
from commandbus.flow.limits.permits import Turn
from commandbus.limits.requests import (
    Limited,
    Permit,
    PermitCall,
    PermitRequest,
    QueuedCommand,
    Refusal,
    Release,
    too_long,
)
from commandbus.limits.with_block import TIMED_OUT
from commandbus.logger import safe_logger
from commandbus.model.api_errors import ApiFailure
from commandbus.model.limit_state import ApiAnswer
from commandbus.model.outcome import Failure, Judgement, Verdict, exhausted, fate_of
from commandbus.model.suspects import GRAVE
from commandbus.worker.execution.attempt import Attempt, lost_text
from commandbus.worker.execution.execute import CallFailed, Ended, LimitDecides, RateLimited, Written

if TYPE_CHECKING:
    from commandbus.worker.limits import LimitedWork

logger = safe_logger("commandbus.limits")


class LimitUse:
    """The permits of one attempt, and what its calls say of the APIs that they protect."""

    __slots__ = (
        "_answer",
        "_api",
        "_attempt",
        "_blocks",
        "_failed_at",
        "_has_asked",
        "_has_told",
        "_is_waived",
        "_keeps",
        "_lent",
        "_lock",
        "_parks_at",
        "_told",
        "_work",
        "blamed",
        "permits",
    )

    def __init__(self, work: LimitedWork, attempt: Attempt) -> None:
        self._work = work
        self._attempt = attempt
        self._lock = threading.Lock()
        self.permits: list[Permit] = []  # of its handler's `limits`
        self.blamed: str | None = None  # the limit whose API has refused it
        self._blocks: list[Permit] = []  # of blocks of its handler's code
        self._lent: set[str] = set()  # tokens of its own permits that blocks use now
        self._answer = ApiAnswer.GOOD  # what its end says of the API
        self._api: ApiFailure | None = None
        self._keeps = False  # may the API still be working on its call?
        self._has_told = False  # has a block told the answer already?
        self._told: set[str] = set()  # limits that have heard that their API refused it
        self._failed_at: str | None = None  # the limit at which a call of it went badly, other than by a 429
        self._is_waived = False  # is it not charged for that? Decided by the limit client
        self._has_asked = False  # the token of the permit that was reserved for it
        self._parks_at: str | None = None  # the limit that it is about to be parked for

    # --- before it begins --------------------------------------------------------------------------------------

    def request(self) -> PermitRequest:
        """The request for the permits that its handler names."""
        attempt = self._attempt
        return PermitRequest(
            self._command,
            attempt.read_ct > 1,
            attempt.handler.options.limits if attempt.handler is not None else (),
            self._holder,
            self._granted,
            self._refused,
            self._lose,
            attempt,
        )

    @property
    def granted_at(self) -> float:
        """When (monotonic) its last permit was given."""
        return max((permit.taken_at for permit in self.permits), default=0.0)

    @property
    def lost_limit(self) -> str | None:
        """A limit of which it has lost its permit."""
        return next((permit.limit for permit in self.permits if permit.is_lost), None)

    def before_start(self) -> bool:
        """May it begin? If an API has refused calls since its permits were given, or another caller may have one
        of them by now, it asks for permits once more."""
        is_stale = self._work.limit_client.is_stale
        if any(not permit.is_sure or is_stale(permit) for permit in self.permits):
            self.returned()
            self._work.permit_request([self._attempt])
            return False
        return True

    def returned(self) -> None:
        """It never began, so it called nobody."""
        permits, self.permits = self.permits, []
        self._give_back([Release(permit, ApiAnswer.UNKNOWN, has_begun=False) for permit in permits])

    def _granted(self, permits: Sequence[Permit]) -> None:
        self.permits = list(permits)
        self._work.push(self._attempt)

    def _refused(self, refusal: Refusal) -> None:
        attempt = self._attempt
        failure = Failure("LimitTimeoutError" if refusal.gives_up else "Limit", refusal.code, refusal.note)
        if refusal.gives_up:
            self._settle(self._give_up(failure, refusal.note))
        else:
            self._parks_at = refusal.limit
            self._settle(attempt.park(refusal.limit, failure, refusal.note, until=refusal.until))

    def _lose(self, permit: Permit) -> None:
        # Otherwise it asks again before it begins; the ladder handles one that begins just now.
        if self._attempt.started_at:
            self._work.on_lost(self._attempt, lost_text(permit.limit))

    # --- how it ended ------------------------------------------------------------------------------------------

    @property
    def was_calling(self) -> bool:
        """Does it hold a permit, or did a call of it go badly?"""
        return bool(self.permits or self._blocks or self._failed_at)

    def note_stop(self, *, is_late: bool) -> None:
        """It was stopped from outside, or has lost its permit, so the result of its call is not known."""
        self._answer = ApiAnswer.TIMEOUT if is_late and not self._has_told else ApiAnswer.UNKNOWN
        self._api = TIMED_OUT if is_late else None
        self._keeps = True

    def note_api(self, api: ApiFailure, limit: str | None) -> None:
        """Its handler has raised what an API said."""
        self._api, self.blamed = api, limit
        self._answer = ApiAnswer.UNKNOWN if self._has_told else ApiAnswer(api.kind)
        self._keeps = api.kind == "timeout"

    def finished(self, ended: Ended) -> None:
        """It has ended by itself: report its API's answer, release its permits, and settle it."""
        releases = self._own_releases()
        if not isinstance(ended, LimitDecides):
            self._give_back(releases)
            self._settle(ended)
        elif isinstance(ended, RateLimited):
            self._ask_after_refusal(ended, releases)
        elif isinstance(ended, CallFailed):
            self._ask_after_failure(ended, releases)

    def abandoned(self, *, is_late: bool, reason: str) -> None:
        """It was given up: its calls may go on, so its permits, and those of its blocks, are taken until their
        leases end."""
        with self._lock:
            permits = [*self.permits, *self._blocks]
            self.permits, self._blocks = [], []
            for permit in permits:
                permit.is_left = True
        answer = ApiAnswer.TIMEOUT if is_late else ApiAnswer.UNKNOWN
        self._give_back([self._watched(Release(permit, answer, reason, keeps=True)) for permit in permits])

    def settled(self) -> None:
        """Its outcome is written; if it was parked, it is in line now."""
        if self._parks_at is not None:
            self._work.limit_client.note_parked(self._parks_at)

    def _own_releases(self) -> list[Release]:
        permits, self.permits = self.permits, []
        releases = []
        for permit in permits:
            answer = self._answer
            if answer is ApiAnswer.RATE_LIMITED and permit.limit != self.blamed:
                answer = ApiAnswer.UNKNOWN
            if answer is ApiAnswer.RATE_LIMITED:
                self._told.add(permit.limit)
            releases.append(self._watched(_release(permit, answer, self._api, keeps=self._keeps)))
        return releases

    def _ask_after_failure(self, failed: CallFailed, releases: Sequence[Release]) -> None:
        """It is charged, unless it was the probe while others wait. Then it waits, too, and is not charged."""
        if self._failed_at is None:  # no limit was told of it
            self._give_back(releases)
            self._settle(failed.charge())
            return

        def decide(row: LimitRow | None, _: Turn | None) -> Settlement:
            return failed.charge() if row is None or not self._is_waived else self._waive(failed.failure, row)

        self._ask(self._failed_at, releases, decide)

    def _ask_after_refusal(self, refused: RateLimited, releases: Sequence[Release]) -> None:
        """Its API has refused it: park it until the back-off is over, or hand it to a person at its cap."""
        untold = None
        if refused.limit not in self._told:
            untold = self._holder, refused.api.at(refused.limit), refused.api.retry_after

        def decide(row: LimitRow | None, turn: Turn | None) -> Settlement:
            return self._fate(refused, row, turn)

        self._ask(refused.limit, releases, decide, untold=untold, is_known=self._attempt.read_ct > 1)

    def _ask(
        self,
        limit: str,
        releases: Sequence[Release],
        decide: Callable[[LimitRow | None, Turn | None], Settlement],
        *,
        untold: tuple[str, str, float | None] | None = None,
        is_known: bool = False,
    ) -> None:
        """One request: its permits, what its API said, and the question what becomes of it."""

        def then(row: LimitRow | None, turn: Turn | None) -> bool:
            settlement = decide(row, turn)
            self._settle(settlement)
            return settlement.is_parked

        self._work.limit_client.judge(Limited(limit, self._command, is_known, then, releases, untold))

    def _waive(self, failure: Failure, row: LimitRow) -> Settlement:
        attempt = self._attempt
        note = f"not charged: it was the probe of limit {row.name}, and other commands wait"
        logger.info("%s %s: %s; %s", attempt.command_type, attempt.command_id, failure.error, note)
        failure = replace(failure, error=f"{failure.error} ({note})")
        if failure.rung in GRAVE:  # its next attempt runs in quarantine: the retry writes that mark
            return attempt.fail(Judgement(Verdict.RETRY, failure), is_waived=True)
        return self._park(row, replace(failure, error_code="LIMIT_PROBE"), row.limit_state.explain(row.name))

    def _fate(self, refused: RateLimited, row: LimitRow | None, turn: Turn | None) -> Settlement:
        failure = refused.failure
        if row is None:
            note = f"its API has refused it, and limit {refused.limit} is no longer declared"
            return self._give_up(replace(failure, error=f"{failure.error}; {note}"), note)
        failure = replace(failure, error_code="RATE_LIMITED")
        if (cap := _cap(row, turn)) is not None:
            return self._give_up(replace(failure, error=f"{failure.error} ({cap})"), cap)
        limit_state = row.limit_state
        note = limit_state.explain(row.name) if limit_state.is_probing else refused.api.at(row.name)
        return self._park(row, failure, note)

    def _park(self, row: LimitRow, failure: Failure, note: str) -> Settlement:
        self._parks_at = row.name
        until = None if row.limit_state.breaker_forced else row.limit_state.blocked_until(row.now)
        return self._attempt.park(row.name, failure, note, until=until)

    def _give_back(self, releases: Sequence[Release]) -> None:
        if releases:
            self._work.limit_client.release(releases)

    def _settle(self, ended: Written) -> None:
        self._work.settle(self._attempt, ended)

    # --- blocks of its handler's code --------------------------------------------------------------------------

    def acquire(self, name: str, wait: float) -> PermitCall:
        """Ask for a permit. One that the attempt has anyway, by its handler's `limits`, is used first."""
        attempt = self._attempt
        with self._lock:
            for permit in self.permits:
                if permit.limit == name and permit.token not in self._lent:
                    self._lent.add(permit.token)
                    lent = PermitCall(name, permit.token, 0, 0.0, 0.0, permit.holder, Future(), None)
                    lent.on_forgotten = partial(self._lent.discard, permit.token)
                    lent.answer.set_result(permit)
                    return lent
        command = None
        if attempt.read_ct > 1 and not self._has_asked:
            self._has_asked = True
            command = self._command
        call = self._work.limit_client.acquire(
            name,
            wait=wait,
            holder=self._holder,
            on_lost=self._lose,
            command=command,
            since=attempt.created_at,
            caller=attempt.id,
        )
        call.on_given_up = self._leave_block
        call.answer.add_done_callback(self._enter_block)
        return call

    def release(self, permit: Permit, answer: ApiAnswer, api: ApiFailure | None, *, keeps: bool) -> None:
        """The block is over."""
        if answer is ApiAnswer.RATE_LIMITED and api is not None and api.limit not in (None, permit.limit):
            answer = ApiAnswer.UNKNOWN  # it speaks of another limit, which is told when it leaves the handler
        release = _release(permit, answer, api, keeps=keeps)
        if permit.token in self._lent:
            self._lent.discard(permit.token)
            if not answer.is_bad:
                return
            release.keeps = release.stays = True
            self._has_told = True
        elif permit.is_left:
            return  # when the attempt was given up
        self._leave_block(permit)
        if answer is ApiAnswer.RATE_LIMITED:
            self.blamed = permit.limit
            self._told.add(permit.limit)
        self._give_back([self._watched(release)])

    def _enter_block(self, answer: Future[Permit]) -> None:
        if not answer.cancelled() and answer.exception() is None:
            with self._lock:
                self._blocks.append(answer.result())

    def _leave_block(self, permit: Permit) -> None:
        with self._lock:
            if permit in self._blocks:
                self._blocks.remove(permit)

    def _watched(self, release: Release) -> Release:
        """If the call failed, what the limit says of that is noted for the attempt's settlement."""
        if release.answer in (ApiAnswer.BROKEN, ApiAnswer.TIMEOUT):
            self._failed_at = release.permit.limit
            release.then = self._note_waived
        return release

    def _note_waived(self, release: Release) -> None:
        if release.is_waived:
            self._failed_at, self._is_waived = release.permit.limit, True

    def _give_up(self, failure: Failure, reason: str) -> Settlement:
        """Its attempts count as used up. Logged as an ERROR, as for all of those."""
        attempt = self._attempt
        judgement = exhausted(failure, attempt.on_exhausted(self._work.policy))
        what = (attempt.command_type, attempt.command_id, attempt.domain, reason, fate_of(judgement))
        text = "%s %s of domain %s: %s; %s"
        logger.error(text, *what, extra=attempt.log_fields, trace=failure.traceback)
        return attempt.fail(judgement)

    @property
    def _command(self) -> QueuedCommand:
        attempt = self._attempt
        return QueuedCommand(attempt.domain, attempt.msg_id, attempt.id, attempt.number - attempt.read_ct)

    @property
    def _holder(self) -> str:
        return f"{self._attempt.domain}/{self._attempt.command_id}"[:120]


def _release(permit: Permit, answer: ApiAnswer, api: ApiFailure | None, *, keeps: bool) -> Release:
    reason = str(answer) if api is None else api.at(permit.limit)
    return Release(permit, answer, reason, None if api is None else api.retry_after, keeps)


def _cap(row: LimitRow, turn: Turn | None) -> str | None:
    """Why a refused command does not wait for its limit any more; None: it does."""
    limit = row.limit
    tries = (turn.tries if turn is not None else 0) + 1
    waited = row.waited_in_vain(turn.waited_seconds if turn is not None else None)
    if tries >= limit.tries:
        return f"refused {tries} times, and tries of limit {limit.name} is {limit.tries}"
    if limit.max_wait_seconds is not None and waited >= limit.max_wait_seconds:
        return too_long(row, waited)
    return None
