"""Visits: claimed commands whose handlers need places of limits; they hold no slot while they ask.

    visit ──► limit by limit, all visits at once ──► has all its places ──► granted
                                             └─────► has not            ──► hands back what it got ──► refused

For each limit, a command for which a place is kept adopts that one; newcomers take one unless others wait. Who
was refused, and whom the worker has not parked yet, is on the way into the line (`Parking`) and counts as one who
waits: nobody may overtake in that moment. Used by the gate's thread alone; `asking` is filled from others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import psycopg

from commandbus.clock import boottime, monotonic
from commandbus.db.passing import is_locked
from commandbus.errors import CommandBusError
from commandbus.flow import places
from commandbus.flow.limits import LimitRow
from commandbus.flow.places import Turn
from commandbus.gate.desk import Desk
from commandbus.gate.exits import Exits
from commandbus.gate.requests import Limited, Place, Refusal, Visit, no_such, refuse
from commandbus.gate.waker import Waker
from commandbus.logger import safe_logger

logger = safe_logger("commandbus.limits")

PARKING_SECONDS = 5.0


class Visits:
    """Commands at the gate."""

    def __init__(self, desk: Desk, waker: Waker, exits: Exits, *, make_token: Callable[[str, int], str]) -> None:
        self._desk = desk
        self._waker = waker
        self._exits = exits
        self._make_token = make_token
        self.asking: deque[Visit] = deque()
        self.parking = Parking()

    def let_in(self) -> None:
        """Answer all who have come."""
        batch = list(self.asking)
        if not batch:
            return
        got: dict[Visit, list[Place]] = {visit: [] for visit in batch}
        try:
            refused = self._ask_for(batch, got)
        except BaseException:
            # All of it is asked again later, under other tokens.
            self._exits.hand_back(place for own in got.values() for place in own)
            raise
        for visit in batch:
            try:
                self.asking.remove(visit)
            except ValueError:  # taken back meanwhile: the worker stops
                self._exits.hand_back(got[visit])
                continue
            if visit in refused:
                self._exits.hand_back(got[visit])
                if not refused[visit].gives_up:
                    self.parking.begin(refused[visit].limit)
                visit.on_refused(refused[visit])
            else:
                visit.on_granted(got[visit])

    def note_parked(self, name: str) -> None:
        """A command that was refused is parked now: it is in line."""
        self.parking.end(name)
        self._waker.look_at(name)

    def judge(self, limited: Limited) -> None:
        """Find out what becomes of a command whose call went badly."""
        try:
            row = self._desk.row(limited.limit)
            turn = None
            if limited.is_known:
                who = [(limited.msg_id, limited.id, limited.attempt_base)]
                turn = self._desk.link.run(places.turns(limited.domain, who)).get(limited.msg_id)
        except CommandBusError:  # it is gone, or its row cannot be used
            limited.then(None, None)
            return
        if limited.then(row, turn):
            self.parking.begin(limited.limit)

    def _ask_for(self, batch: Sequence[Visit], got: dict[Visit, list[Place]]) -> dict[Visit, Refusal]:
        """Limit by limit, all visits at once; answers who does not get all that it needs."""
        turns = self._turns_of(batch)
        refused: dict[Visit, Refusal] = {}
        for stage in range(max(len(visit.names) for visit in batch)):
            by_name: dict[str, list[Visit]] = {}
            for visit in batch:
                if visit not in refused and stage < len(visit.names):
                    by_name.setdefault(visit.names[stage], []).append(visit)
            for name, group in by_name.items():
                self._let_in_to(name, group, turns, got, refused)
        return refused

    def _turns_of(self, batch: Sequence[Visit]) -> dict[Visit, Turn]:
        by_domain: dict[str, list[Visit]] = {}
        for visit in batch:
            if visit.is_known:
                by_domain.setdefault(visit.domain, []).append(visit)
        found: dict[Visit, Turn] = {}
        for domain, visits in by_domain.items():
            who = [(visit.msg_id, visit.id, visit.attempt_base) for visit in visits]
            try:
                answer = self._desk.link.run(places.turns(domain, who))
            except (CommandBusError, psycopg.OperationalError) as error:
                if isinstance(error, psycopg.Error) and not is_locked(error):
                    raise
                logger.warning("turns of commands of domain %s cannot be read: %s", domain, error)
                continue
            found |= {visit: answer[visit.msg_id] for visit in visits if visit.msg_id in answer}
        return found

    def _let_in_to(
        self,
        name: str,
        group: Sequence[Visit],
        turns: dict[Visit, Turn],
        got: dict[Visit, list[Place]],
        refused: dict[Visit, Refusal],
    ) -> None:
        """One limit: first those for whom a place is kept, then newcomers, unless others wait."""
        try:
            self._ask_at(name, group, turns, got, refused)
        except CommandBusError as error:  # it is gone, locked by somebody, or cannot be used from here
            self._desk.forget(name)
            for visit in group:
                if all(place.limit != name for place in got[visit]):
                    refused[visit] = no_such(name, error)

    def _ask_at(
        self,
        name: str,
        group: Sequence[Visit],
        turns: dict[Visit, Turn],
        got: dict[Visit, list[Place]],
        refused: dict[Visit, Refusal],
    ) -> None:
        newcomers = []
        for visit in group:
            asked_at = boottime()
            turn = turns.get(visit)
            token = turn.token if turn is not None and turn.limit == name else None
            if token is not None and self._adopt(name, token, visit):
                got[visit].append(self._place(name, token, visit, asked_at))
            else:
                newcomers.append(visit)
        if not newcomers:
            return
        tokens = {self._make_token(visit.holder, visit.id): visit for visit in newcomers}
        granted: list[str] = []
        row: LimitRow | None = None
        asked_at = boottime()
        if not self.parking.is_under_way(name):
            with self._sure_of(name, tokens):
                # Not as the probe: that is chosen among those in line.
                granted, row = self._desk.take(name, list(tokens), probes=False)
        for token in granted:
            visit = tokens.pop(token)
            got[visit].append(self._place(name, token, visit, asked_at))
        if tokens:
            row = row or self._desk.row(name)
            for visit in tokens.values():
                turn = turns.get(visit)
                refused[visit] = refuse(row, waited_seconds=turn.waited_seconds if turn is not None else None)

    def _adopt(self, name: str, token: str, visit: Visit) -> bool:
        with self._sure_of(name, {token: visit}):
            return self._desk.adopt(name, token)

    @contextmanager
    def _sure_of(self, name: str, tokens: Mapping[str, Visit]) -> Iterator[None]:
        """If the answer is lost, a place may be lost with it, which nobody else would get for a whole lease. So
        what may be held under these tokens is given back."""
        try:
            yield
        except psycopg.OperationalError:
            self._exits.hand_back(Place(name, token, 0.0, holder=visit.holder) for token, visit in tokens.items())
            raise

    def _place(self, name: str, token: str, visit: Visit, asked_at: float) -> Place:
        lease = self._desk.known(name).lease
        place = Place(name, token, lease, holder=visit.holder, on_lost=visit.on_lost, asked_at=asked_at)
        return self._desk.hold(place)


class Parking:
    """Who was refused and is not parked yet: by limit, how many, and since when."""

    def __init__(self) -> None:
        self._by_name: dict[str, tuple[int, float]] = {}

    def __bool__(self) -> bool:
        return bool(self._by_name)

    def begin(self, name: str) -> None:
        """One more is on the way into the line."""
        self._by_name[name] = (self._by_name.get(name, (0, 0.0))[0] + 1, monotonic())

    def end(self, name: str) -> None:
        """One has arrived."""
        count, since = self._by_name.get(name, (0, 0.0))
        if count > 1:
            self._by_name[name] = (count - 1, since)
        else:
            self._by_name.pop(name, None)

    def is_under_way(self, name: str) -> bool:
        """Is somebody on the way into the line? Then newcomers come after that one."""
        count, since = self._by_name.get(name, (0, 0.0))
        return count > 0 and monotonic() - since < PARKING_SECONDS
