"""Admission: claimed commands whose handlers name limits ask for permits. They hold no slot while they ask.

    request ──► limit by limit, all requests at once ──► has all its permits ──► granted
                                                    └──► has not ──► gives back what it got ──► refused

For each limit, a command with a reserved permit adopts it; newcomers take one unless others wait. A command that
was refused but is not parked yet (`Parking`) already counts as waiting, so a newcomer cannot overtake it. Only the
limit client's thread uses this; other threads fill `asking`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from commandbus.clock import boottime, monotonic
from commandbus.db.transient_errors import PassingError, is_locked
from commandbus.errors import CommandBusError
from commandbus.flow.limits import permits
from commandbus.flow.limits.declare import LimitRow
from commandbus.flow.limits.permits import Turn
from commandbus.limits.held_permits import HeldPermits
from commandbus.limits.releases import Releases
from commandbus.limits.requests import Limited, Permit, PermitRequest, Refusal, no_such, refuse
from commandbus.limits.waker import Waker
from commandbus.logger import safe_logger

logger = safe_logger("commandbus.limits")

PARKING_SECONDS = 5.0


class Admission:
    """Commands at the limit client."""

    def __init__(
        self, held_permits: HeldPermits, waker: Waker, releases: Releases, *, make_token: Callable[[str, int], str]
    ) -> None:
        self._held_permits = held_permits
        self._waker = waker
        self._releases = releases
        self._make_token = make_token
        self.asking: deque[PermitRequest] = deque()
        self.parking = Parking()

    def let_in(self) -> None:
        """Grant or refuse every request that has come in."""
        batch = list(self.asking)
        if not batch:
            return
        got: dict[PermitRequest, list[Permit]] = {permit_request: [] for permit_request in batch}
        try:
            refused = self._ask_for(batch, got)
        except BaseException:
            # The commands of all these requests ask again later, under other tokens.
            self._releases.hand_back(permit for own in got.values() for permit in own)
            raise
        for permit_request in batch:
            try:
                self.asking.remove(permit_request)
            except ValueError:  # the worker stops, and has taken the request back
                self._releases.hand_back(got[permit_request])
                continue
            if permit_request in refused:
                self._releases.hand_back(got[permit_request])
                if not refused[permit_request].gives_up:
                    self.parking.begin(refused[permit_request].limit)
                permit_request.on_refused(refused[permit_request])
            else:
                permit_request.on_granted(got[permit_request])

    def note_parked(self, name: str) -> None:
        """Note that a refused command is parked now: it is in line."""
        self.parking.end(name)
        self._waker.look_at(name)

    def judge(self, limited: Limited) -> None:
        """Let the worker decide about a command whose call failed, given the state of the limit."""
        try:
            row = self._held_permits.row(limited.limit)
            turn = None
            if limited.is_known:
                command = limited.command
                turns = self._held_permits.connection.run(permits.turns(command.domain, [command.key]))
                turn = turns.get(command.msg_id)
        except CommandBusError:  # the limit is gone, or its row cannot be used
            limited.then(None, None)
            return
        if limited.then(row, turn):
            self.parking.begin(limited.limit)

    def _ask_for(
        self, batch: Sequence[PermitRequest], got: dict[PermitRequest, list[Permit]]
    ) -> dict[PermitRequest, Refusal]:
        """Ask limit by limit, for all permit requests at once. Returns the requests that do not get all their
        permits."""
        turns = self._turns_of(batch)
        refused: dict[PermitRequest, Refusal] = {}
        for stage in range(max(len(permit_request.names) for permit_request in batch)):
            by_name: dict[str, list[PermitRequest]] = {}
            for permit_request in batch:
                if permit_request not in refused and stage < len(permit_request.names):
                    by_name.setdefault(permit_request.names[stage], []).append(permit_request)
            for name, group in by_name.items():
                self._let_in_to(name, group, turns, got, refused)
        return refused

    def _turns_of(self, batch: Sequence[PermitRequest]) -> dict[PermitRequest, Turn]:
        by_domain: dict[str, list[PermitRequest]] = {}
        for permit_request in batch:
            if permit_request.is_known:
                by_domain.setdefault(permit_request.command.domain, []).append(permit_request)
        found: dict[PermitRequest, Turn] = {}
        for domain, permit_requests in by_domain.items():
            who = [permit_request.command.key for permit_request in permit_requests]
            try:
                answer = self._held_permits.connection.run(permits.turns(domain, who))
            except (CommandBusError, PassingError) as error:
                if isinstance(error, PassingError) and not is_locked(error):
                    raise
                logger.warning("the positions in line of commands of domain %s cannot be read: %s", domain, error)
                continue
            found |= {
                permit_request: answer[permit_request.command.msg_id]
                for permit_request in permit_requests
                if permit_request.command.msg_id in answer
            }
        return found

    def _let_in_to(
        self,
        name: str,
        group: Sequence[PermitRequest],
        turns: dict[PermitRequest, Turn],
        got: dict[PermitRequest, list[Permit]],
        refused: dict[PermitRequest, Refusal],
    ) -> None:
        """Ask one limit: first for commands with a reserved permit, then for newcomers, unless others wait."""
        try:
            self._ask_at(name, group, turns, got, refused)
        except (
            CommandBusError
        ) as error:  # the limit is gone, somebody has locked it, or it cannot be used from here
            self._held_permits.forget(name)
            for permit_request in group:
                if all(permit.limit != name for permit in got[permit_request]):
                    refused[permit_request] = no_such(name, error)

    def _ask_at(
        self,
        name: str,
        group: Sequence[PermitRequest],
        turns: dict[PermitRequest, Turn],
        got: dict[PermitRequest, list[Permit]],
        refused: dict[PermitRequest, Refusal],
    ) -> None:
        newcomers = []
        for permit_request in group:
            asked_at = boottime()
            turn = turns.get(permit_request)
            token = turn.token if turn is not None and turn.limit == name else None
            if token is not None and self._adopt(name, token, permit_request):
                got[permit_request].append(self._permit(name, token, permit_request, asked_at))
            else:
                newcomers.append(permit_request)
        if not newcomers:
            return
        tokens = {
            self._make_token(permit_request.holder, permit_request.command.id): permit_request
            for permit_request in newcomers
        }
        granted: list[str] = []
        row: LimitRow | None = None
        asked_at = boottime()
        if not self.parking.is_under_way(name):
            with self._sure_of(name, tokens):
                # A newcomer cannot be the probe: the probe is chosen among those in line.
                granted, row = self._held_permits.take(name, list(tokens), probes=False)
        for token in granted:
            permit_request = tokens.pop(token)
            got[permit_request].append(self._permit(name, token, permit_request, asked_at))
        if tokens:
            row = row or self._held_permits.row(name)
            for permit_request in tokens.values():
                turn = turns.get(permit_request)
                refused[permit_request] = refuse(
                    row, waited_seconds=turn.waited_seconds if turn is not None else None
                )

    def _adopt(self, name: str, token: str, permit_request: PermitRequest) -> bool:
        with self._sure_of(name, {token: permit_request}):
            return self._held_permits.adopt(name, token)

    @contextmanager
    def _sure_of(self, name: str, tokens: Mapping[str, PermitRequest]) -> Iterator[None]:
        """If a reply is lost, a permit may have been taken, and nobody could use it for a whole lease. So release
        whatever may be held under these tokens."""
        try:
            yield
        except PassingError:
            self._releases.hand_back(
                Permit(name, token, 0.0, holder=permit_request.holder) for token, permit_request in tokens.items()
            )
            raise

    def _permit(self, name: str, token: str, permit_request: PermitRequest, asked_at: float) -> Permit:
        row = self._held_permits.known(name)
        permit = Permit(
            name,
            token,
            row.lease,
            holder=permit_request.holder,
            call_timeout=row.call_timeout,
            on_lost=permit_request.on_lost,
            asked_at=asked_at,
        )
        return self._held_permits.hold(permit)


class Parking:
    """Commands that were refused and are not parked yet: how many per limit, and since when."""

    def __init__(self) -> None:
        self._by_name: dict[str, tuple[int, float]] = {}

    def __bool__(self) -> bool:
        return bool(self._by_name)

    def begin(self, name: str) -> None:
        """Count one more command that is about to join the line."""
        self._by_name[name] = (self._by_name.get(name, (0, 0.0))[0] + 1, monotonic())

    def end(self, name: str) -> None:
        """Count one less: the command has joined the line."""
        count, since = self._by_name.get(name, (0, 0.0))
        if count > 1:
            self._by_name[name] = (count - 1, since)
        else:
            self._by_name.pop(name, None)

    def is_under_way(self, name: str) -> bool:
        """Is a command about to join the line? Then newcomers come after it."""
        count, since = self._by_name.get(name, (0, 0.0))
        return count > 0 and monotonic() - since < PARKING_SECONDS
