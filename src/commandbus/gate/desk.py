"""The Desk: takes places of limits for this program, and knows which ones are held here.

    newcomer ──take──┐
                     ├──► held ──renew, after a third of its lease──► held, or lost
    kept ────adopt───┘      └──let_go──► (given back by `exits`)

A place is taken for a newcomer, or was kept for somebody whose turn has come and is adopted. Limits' rows are
remembered as last seen; what must be right is asked for. Used by the gate's thread alone, but for what says so.
While that thread waits for PostgreSQL, the hold clock ends what is held, and the backstop renews in Redis.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

from commandbus.clock import boottime, monotonic
from commandbus.errors import CommandBusError, UnknownLimitError
from commandbus.flow import places
from commandbus.flow.limits import LimitRow, get_limit
from commandbus.gate.backends import Backends
from commandbus.gate.hold_clock import HoldClock
from commandbus.gate.requests import Place
from commandbus.gate.row_link import LockedRowError, RowLink
from commandbus.logger import safe_logger
from commandbus.model.standing import Answer

logger = safe_logger("commandbus.limits")

TICK_SECONDS = 1.0
LONGEST_SECONDS = 30.0
LEAST_SECONDS = 0.05


class Desk:
    """The limits that this program uses, and the places of them that it holds."""

    def __init__(self, link: RowLink, backends: Backends, *, name: str) -> None:
        self.link = link
        self.backends = backends
        self.clock = HoldClock(name, self._lose)
        self.renew_at = 0.0
        self._rows: dict[str, LimitRow] = {}  # as last seen; what must be right is asked for
        self._held: dict[str, dict[str, Place]] = {}
        self._losing = threading.Lock()
        self.has_held = threading.Event()  # for the backstop: something is held

    # --- asked from other threads ------------------------------------------------------------------------------

    @property
    def modes(self) -> dict[str, str]:
        """Where the places of each limit that is used here are kept now."""
        mode = self.backends.mode_elsewhere
        return {name: "postgres" if row.backend == "postgres" else mode for name, row in list(self._rows.items())}

    @property
    def held(self) -> dict[str, int]:
        """How many places of each limit are held here."""
        return {name: len(own) for name, own in list(self._held.items()) if own}

    def late_elsewhere(self, part: float) -> Iterator[tuple[LimitRow, list[Place]]]:
        """What is held outside PostgreSQL and was not renewed for this part of its lease."""
        now = boottime()
        for name, held in list(self._held.items()):
            row = self._rows.get(name)
            own = [place for place in list(held.values()) if not place.is_lost]
            late = [place for place in own if now - place.renewed_at >= place.lease * part]
            if row is not None and row.backend != "postgres" and late:
                yield row, late

    def leases_elsewhere(self) -> list[float]:
        """The leases of what is held outside PostgreSQL."""
        return [place.lease for _, places in self.late_elsewhere(0.0) for place in places]

    # --- limits ------------------------------------------------------------------------------------------------

    def row(self, name: str) -> LimitRow:
        """The limit as it is now."""
        row = self._rows[name] = self.link.run(get_limit(name))
        return row

    def known(self, name: str) -> LimitRow:
        """The limit as last seen: for what does not change from moment to moment, as its lease."""
        return self._rows.get(name) or self.row(name)

    def remember(self, row: LimitRow) -> None:
        """A row that was read on another occasion."""
        self._rows[row.name] = row

    def knows(self, name: str) -> bool:
        """Is this a limit that is used here?"""
        return name in self._rows

    def forget(self, name: str) -> None:
        """It was changed, or is gone: it is asked for the next time."""
        self._rows.pop(name, None)

    # --- places ------------------------------------------------------------------------------------------------

    def take(self, name: str, tokens: Sequence[str], *, probes: bool = True) -> tuple[list[str], LimitRow | None]:
        """Take places for newcomers; `probes`: one of them may be the probe. If some get none: the limit's row,
        which says why."""
        if self.known(name).backend == "postgres":
            taken = self.link.run(places.take(name, tokens, probes=probes), limit=name)
            if len(taken) == len(tokens):
                return taken, None
            row = self.row(name)
            if row.backend == "postgres":
                return taken, row
        else:
            row = self.row(name)
        standing = row.standing
        if row.is_awaited or standing.closed_until(row.now) is not None:
            return [], row
        if not standing.is_probing:
            granted = self.backends.of(row).take(row, tokens, row.lease)
            return granted, None if len(granted) == len(tokens) else row
        if standing.is_probed(row.now) or not probes:
            return [], row
        granted = self.backends.of(row).take(row, tokens[:1], row.lease)
        if granted and not self.link.run(places.take_probe(name, granted[0]), limit=name):
            self.backends.of(row).give(row, granted)
            granted = []
        return granted, row

    def adopt(self, name: str, token: str) -> bool:
        """Is the place that was kept under this token still there? Then it is held from now on."""
        row = self.row(name)
        standing = row.standing
        backend = self.backends.of(row)
        if standing.closed_until(row.now) is not None or (standing.is_probing and standing.probe != token):
            backend.give(row, [token])  # it was kept before the API said no
            if standing.probe == token:
                # Another one may be it.
                unknown = places.answer(name, token, Answer.UNKNOWN, gives=False, has_begun=False)
                self.link.run(unknown, limit=name)
            return False
        is_held = not backend.renew(row, [token])
        if is_held and row.backend != "postgres" and standing.probe == token:
            self.link.run(places.renew(name, [token]), limit=name)  # that it is the probe is kept there
        return is_held

    def hold(self, place: Place) -> Place:
        """Renew this place from now on."""
        self._held.setdefault(place.limit, {})[place.token] = place
        self.clock.watch(place)
        self.has_held.set()
        self.renew_at = min(self.renew_at, monotonic() + place.lease / 3)
        return place

    def let_go(self, place: Place) -> None:
        """Renew it no more."""
        self.clock.forget(place)
        self._held.get(place.limit, {}).pop(place.token, None)

    def renew(self) -> None:
        """Renew what is due, tell whoever has lost a place, and find out when to do so again."""
        now, age_now = monotonic(), boottime()
        again = now + (TICK_SECONDS if self.backends.tick() else LONGEST_SECONDS)
        for name, held in list(self._held.items()):
            for place in [place for place in held.values() if place.is_lost]:
                self.let_go(place)  # the clock has ended it
            due = [place for place in held.values() if age_now - place.renewed_at >= place.lease / 3]
            for place in self._renew(name, due) if due else []:
                self._lose(place)
                self.let_go(place)
            next_at = [now + self._due_in(place, age_now) for place in held.values()]
            again = min(again, max(min(next_at, default=again), self.link.barred_until(name)))
        self.renew_at = max(again, now + LEAST_SECONDS)  # at the end: what fails on the way is done again at once

    @staticmethod
    def _due_in(place: Place, now: float) -> float:
        """Seconds until it is to be renewed; if that did not succeed just now, it is tried again soon."""
        left = place.renewed_at + place.lease / 3 - now
        return left if left > 0 else min(TICK_SECONDS, place.lease / 10)

    def _renew(self, name: str, own: Sequence[Place]) -> list[Place]:
        """Renew leases; answers what is lost."""
        sent_at = boottime()
        try:
            row = self.row(name)
            backend = self.backends.of(row)
            gone = set(backend.renew(row, [place.token for place in own]))
        except UnknownLimitError:
            for place in own:  # nobody counts any more who is inside
                self.let_go(place)
            return []
        except LockedRowError:
            return []  # again when the bar is over; said when it was put up
        except CommandBusError as error:
            logger.warning("places of limit %s cannot be renewed: %s", name, error)
            return []
        for place in own:
            if place.token not in gone:
                self._note_renewed(place, row, sent_at)
        return [place for place in own if place.token in gone]

    def _note_renewed(self, place: Place, row: LimitRow, sent_at: float) -> None:
        """A back end elsewhere may not have been reached: it knows when the lease was last asked for."""
        if row.backend != "postgres":
            sent_at = self.backends.elsewhere(row).renewed_at(row, place.token) or place.renewed_at
        place.lease = row.lease if sent_at > place.renewed_at else place.lease
        place.renewed_at = max(place.renewed_at, sent_at)

    def _lose(self, place: Place) -> None:
        """Called by the gate's thread, and by the clock's."""
        with self._losing:
            if place.is_lost:
                return
            place.is_lost = True
        logger.warning("%s has lost its place of limit %s", place.holder, place.limit)
        if place.on_lost is not None:
            place.on_lost(place)
