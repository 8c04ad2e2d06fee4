"""Places kept in Redis, and what becomes of them when Redis is gone, or is not the one that it was.

    mode        whose places               take              renew
    redis       Redis'                     Redis             Redis
    lost        Redis', out of my reach    nothing           fails until Redis is back or the lease ends
    degraded    PostgreSQL's, in shares    up to my share    PostgreSQL
    joining     Redis', being told         nothing           Redis, which is told of what it has forgotten

One program is told nothing of the others but through PostgreSQL (`flow/limit_mode.py`), where it says every two
seconds that it is alive. That is also its leave to ask Redis, for eight seconds on Redis' clock: who was stopped,
or cut off from PostgreSQL, gets no place from Redis while the others believe that it is dead and have shared out
the limit.

Called by one thread. It has a connection of its own: `take` is called in the middle of the gate's transactions,
and neither their locks nor their rollback may reach what is said here. Neither Redis nor PostgreSQL being away
raises anything: then nobody gets a place.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, TypeVar

import psycopg

from commandbus.db.drive import Runnable
from commandbus.db.link import Link
from commandbus.errors import ConfigurationError
from commandbus.flow import limit_mode
from commandbus.flow.limit_figures import count_granted
from commandbus.flow.limit_mode import DEGRADED, JOINING, REDIS, Held, Mode, Pace
from commandbus.limits.redis_places import EpochError, Probe, RedisLostError, RedisPlaces, StaleError
from commandbus.limits.terms import Terms
from commandbus.logger import safe_logger
from commandbus.model.limit import Look
from commandbus.settings import Settings

T = TypeVar("T")
logger = safe_logger("commandbus.limits")

LOST: Final = "lost"
SEARCH_SECONDS: Final = 0.05
_TRIES: Final = 3
_MICRO: Final = 1_000_000
_NO_LEAVE: Final = 1  # a moment that has passed


@dataclass(slots=True)
class _Place:
    """A place that this program has: when its lease ends at the earliest, and how long that was. `epoch`: in which
    Redis knows of it; None: only PostgreSQL does."""

    ends: float
    seconds: float
    epoch: str | None


class RedisBackend:
    """Places of limits in Redis, for one program."""

    def __init__(self, settings: Settings, client: str, *, pace: Pace | None = None) -> None:
        if settings.redis_url is None:
            raise ConfigurationError(
                "limits are to be kept in Redis, and redis_url is not set: COMMANDBUS_REDIS_URL"
            )
        self._places = RedisPlaces(settings.redis_url, settings.environment)
        self._link = Link(settings, name=f"{client} limits")
        self._id = f"{client} {secrets.token_hex(4)}"
        self._pace = pace or Pace()
        self._limits: dict[str, Terms] = {}
        self._held: defaultdict[str, dict[str, _Place]] = defaultdict(dict)
        # What was given back and Redis does not know yet, and until when that matters.
        self._owed: defaultdict[str, dict[str, float]] = defaultdict(dict)
        self._most: dict[str, int] = {}  # what PostgreSQL knows that we may hold, by limit
        self._peak: defaultdict[str, int] = defaultdict(int)  # what we did hold since it was told
        self._granted: defaultdict[str, int] = defaultdict(int)  # and not counted in PostgreSQL yet
        self._fleet: Mode | None = None
        self._lost: str | None = "not asked yet"  # why Redis is out of reach; None: it is not
        self._is_marked = False  # does PostgreSQL know that, and count our tokens?
        self._is_unwell = False  # is PostgreSQL out of reach?
        self._leave = _NO_LEAVE
        self._due = 0.0
        self._search: _Search | None = None
        self._said: str | None = None

    @property
    def mode(self) -> str:
        """redis, lost, degraded or joining."""
        if self._fleet is None:
            return LOST
        if self._lost is None:
            return self._fleet.mode
        return DEGRADED if self._fleet.mode == DEGRADED and self._is_marked else LOST

    # ── What the gate asks ──────────────────────────────────────────────────────────────────────────────────────

    def take(self, limit: Terms, tokens: Sequence[str], seconds: float) -> list[str]:
        """Take places for some seconds; answers the tokens that have one, which are the first of those given."""
        self._limits[limit.name] = limit
        granted: list[str] = self._safely(lambda: self._take(limit, tokens, seconds), []) if tokens else []
        self._granted[limit.name] += len(granted)
        return granted

    def renew(self, limit: Terms, tokens: Sequence[str]) -> list[str]:
        """Renew leases; answers the tokens that hold no place any more."""
        self._limits[limit.name] = limit
        if not tokens:
            return []
        lost = self._safely(lambda: self._renew(limit, tokens), None)
        if lost is None:
            # Nobody could be asked. The next time is in a third of a lease: it must not be too late by then.
            soon, held = _clock() + limit.lease * 0.4, self._held[limit.name]
            lost = [token for token in tokens if token not in held or held[token].ends <= soon]
        for token in lost:
            self._held[limit.name].pop(token, None)
        return lost

    def give(self, limit: Terms, tokens: Sequence[str]) -> None:
        """Give places back. If nobody can be told now, Redis is when it is back."""
        self._limits[limit.name] = limit
        if not tokens:
            return
        ends, held = _clock() + limit.lease, self._held[limit.name]
        for token in tokens:
            place = held.pop(token, None)
            if place is None or place.epoch is not None:
                self._owed[limit.name][token] = ends
        self._safely(lambda: self._give(limit, tokens), None)

    def look(self, limit: Terms) -> Look:
        """Who holds a place, and how fast they are given."""
        self._limits[limit.name] = limit
        return self._safely(lambda: self._look(limit), Look(mode=self.mode))

    def tick(self) -> None:
        """Say that this program is alive, see whether Redis is, and follow the fleet. To be called every second or
        so; it does nothing while that is not due."""
        if _clock() >= self._due:
            self._safely(self._beat, None)
            self._forget_old()
            self._safely(self._tell_granted, None)

    def close(self) -> None:
        """Say good-bye, unless something is still held: then its leases count on."""
        self._forget_old()
        self._safely(self._tell_granted, None)
        if not any(self._held.values()):
            self._safely(lambda: self._run(limit_mode.leave(self._id)), None)
        if self._search is not None:
            self._search.join()
        self._places.close()
        self._link.close()

    # ── Places ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _take(self, limit: Terms, tokens: Sequence[str], seconds: float) -> list[str]:
        for _ in range(_TRIES):
            self._prepare(limit, len(tokens))
            if self._lost is not None:
                return self._take_share(limit, tokens, seconds) if self.mode == DEGRADED else []
            if self.mode != REDIS:
                return []
            began = _clock()
            granted = self._asked(partial(self._take_at_redis, limit, tokens, seconds))
            if granted is not None:
                self._keep(limit, granted, began, seconds, self._epoch)
                return granted
        return []

    def _take_at_redis(self, limit: Terms, tokens: Sequence[str], seconds: float, epoch: str) -> list[str]:
        return self._places.take(limit, tokens, seconds, epoch=epoch, leave=self._leave)

    def _take_share(self, limit: Terms, tokens: Sequence[str], seconds: float) -> list[str]:
        began = _clock()
        mode, granted = self._run(limit_mode.take_share(self._id, limit, tokens, seconds, pace=self._pace))
        if mode != DEGRADED:
            self._due = 0.0  # the fleet has gone on
        self._keep(limit, granted, began, seconds, None)
        return granted

    def _renew(self, limit: Terms, tokens: Sequence[str]) -> list[str] | None:
        held = self._held[limit.name]
        for _ in range(_TRIES):
            self._prepare(limit, sum(1 for token in tokens if token not in held))
            if self._lost is not None:
                return self._renew_share(limit, tokens) if self.mode == DEGRADED else None
            began = _clock()
            lost = self._asked(partial(self._renew_at_redis, limit, tokens))
            if lost is not None:
                kept = [token for token in tokens if token not in lost]
                self._keep(limit, kept, began, limit.lease, self._epoch)
                return lost
        return None

    def _renew_at_redis(self, limit: Terms, tokens: Sequence[str], epoch: str) -> list[str]:
        """What Redis was told in another epoch it is told again, if the lease has not run out meanwhile."""
        now, held = _clock(), self._held[limit.name]
        forgotten = [
            token for token in tokens if token in held and held[token].epoch != epoch and held[token].ends > now
        ]
        known = [token for token in tokens if token not in forgotten]
        lost: list[str] = []
        for group, register in ((forgotten, True), (known, False)):
            if group:
                lost += self._places.renew(limit, group, epoch=epoch, leave=self._leave, register=register)
        return lost

    def _renew_share(self, limit: Terms, tokens: Sequence[str]) -> list[str] | None:
        began = _clock()
        mode, lost = self._run(limit_mode.renew_share(self._id, limit, tokens))
        if mode != DEGRADED:
            self._due = 0.0
            return None
        self._keep(limit, [token for token in tokens if token not in lost], began, limit.lease, None)
        return lost

    def _give(self, limit: Terms, tokens: Sequence[str]) -> None:
        for _ in range(_TRIES):
            self._prepare(limit, 0)
            if self._lost is not None:
                if self._is_marked:
                    self._run(limit_mode.give_share(limit.name, tokens))
                return
            if self._asked(partial(self._give_at_redis, limit)):
                return

    def _give_at_redis(self, limit: Terms, epoch: str) -> bool:
        owed = self._owed[limit.name]
        if owed:
            self._places.give(limit, list(owed), epoch=epoch)
            owed.clear()
        return True

    def _look(self, limit: Terms) -> Look:
        self._prepare(limit, 0)
        if self._lost is None:
            found = self._asked(lambda epoch: self._places.look(limit, epoch=epoch))
            if found is not None:
                return replace(found, mode=self.mode)
        return Look(self._run(limit_mode.look_share(limit.name)), None, self.mode)

    def _prepare(self, limit: Terms, more: int) -> None:
        """Before so many more places are asked for: PostgreSQL knows at least as much as we hold before we hold
        it. Should this program be killed, and Redis be lost too, that counts as used for a lease."""
        if self._fleet is None:
            self._beat()
        if self._lost is not None or not more or limit.concurrency is None:
            return
        known, held = self._most.get(limit.name, 0), len(self._held[limit.name])
        needed = min(held + more, max(held, limit.concurrency))
        if needed > known:
            self._peak[limit.name] = max(needed, min(2 * known, limit.concurrency))
            self._beat()

    def _keep(self, limit: Terms, tokens: Sequence[str], began: float, seconds: float, epoch: str | None) -> None:
        """Remember what we have: from before it was asked for, so that our own lease never ends last."""
        held = self._held[limit.name]
        for token in tokens:
            held[token] = _Place(began + seconds, seconds, epoch)
        self._peak[limit.name] = max(self._peak[limit.name], len(held))

    def _tell_granted(self) -> None:
        """What was given here is counted in PostgreSQL too, for who measures the fleet."""
        granted = {name: count for name, count in self._granted.items() if count}
        if granted:
            self._run(count_granted(granted, self._pace.beat))
            self._granted.clear()

    def _forget_old(self) -> None:
        """Places whose lease has ended, such as those that were kept for another program."""
        now = _clock()
        for held in self._held.values():
            for token in [token for token, place in held.items() if place.ends <= now]:
                del held[token]
        for owed in self._owed.values():
            for token in [token for token, ends in owed.items() if ends <= now]:
                del owed[token]

    # ── The fleet ───────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _epoch(self) -> str:
        return (self._fleet.epoch if self._fleet else None) or ""

    def _asked(self, question: Callable[[str], T]) -> T | None:
        """Ask Redis; None if it is to be asked again, now that the fleet's mode is known better."""
        try:
            return question(self._epoch)
        except RedisLostError as error:
            self._lose(error)
            self._settle()
        except (EpochError, StaleError):
            self._beat()
        return None

    def _beat(self) -> None:
        """The whole round: Redis, PostgreSQL, and whatever follows from what they say."""
        now = _clock()
        self._due = now + (self._pace.beat if self._lost is None else self._pace.beat / 2)
        try:
            probe = self._probe()
        except RedisLostError as error:
            self._lose(error)
            self._settle()
            return
        was_lost = self._lost is not None
        most = self._count()
        fleet = None if was_lost else self._run(limit_mode.beat(self._id, _as_held(most)))
        joins = fleet is not None and fleet.mode == JOINING and (fleet.seconds or 0.0) > 0
        if (
            fleet is not None
            and not fleet.is_lost
            and fleet.epoch is not None
            and fleet.epoch == probe.epoch
            and (fleet.mode == REDIS or joins)
        ):
            self._follow(fleet)
        elif not self._settle(reachable=True):
            return
        self._most = most
        self._peak.clear()
        self._leave = probe.now + round(self._pace.leave * _MICRO)
        self._tell_redis(renews=was_lost)

    def _probe(self) -> Probe:
        """Is Redis there? While it is known not to be, that is asked on another thread: of a server that is
        stopped nothing is heard before the time-out, and nobody must wait for that again and again."""
        if self._lost is None or self._fleet is None:
            return self._places.probe()
        search = self._search = self._search or _Search(self._places)
        if search.is_over(SEARCH_SECONDS):
            self._search = None
        return search.answer()

    def _settle(self, *, reachable: bool = False) -> bool:
        """Say under the fleet's lock whether Redis is in reach, and learn what the mode is; False: it was lost
        just now."""
        redis = self._places if reachable else None
        held = _as_held(self._count()) if reachable else self._tokens()
        lease = max((limit.lease for limit in self._limits.values()), default=0.0)
        operation = limit_mode.settle(self._id, held, lease=lease, pace=self._pace, redis=redis)
        try:
            fleet = self._run(operation)
        except RedisLostError as error:
            self._lose(error)
            if reachable:
                self._settle()
            return False
        if reachable:
            self._lost, self._is_marked = None, False
        else:
            self._is_marked = True
        self._follow(fleet)
        return True

    def _follow(self, fleet: Mode) -> None:
        self._fleet = fleet
        if fleet.mode == JOINING and fleet.seconds is not None:
            self._due = min(self._due, _clock() + max(fleet.seconds, 0.0))
        if self.mode != self._said:
            self._say(fleet)

    def _lose(self, error: RedisLostError) -> None:
        self._leave = _NO_LEAVE
        if self._lost is None or self._fleet is None:
            self._lost = str(error)

    def _tell_redis(self, *, renews: bool) -> None:
        """Tell Redis what it has forgotten or could not be told: who has a place, and who has given his back.
        After a time out of reach leases are renewed at once, too."""
        try:
            for name, limit in self._limits.items():
                self._give_at_redis(limit, self._epoch)
                for token, place in list(self._held[name].items()):
                    if (renews or place.epoch != self._epoch) and place.ends > _clock():
                        self._tell_of(limit, token, place)
        except RedisLostError as error:
            self._lose(error)
            self._settle()
        except (EpochError, StaleError):
            self._due = 0.0

    def _tell_of(self, limit: Terms, token: str, place: _Place) -> None:
        """A place that was taken for a lease is renewed; one that is kept for another program is not."""
        began = _clock()
        seconds = limit.lease if place.seconds >= limit.lease else place.ends - began
        register = place.epoch != self._epoch
        if self._places.renew(
            limit, [token], epoch=self._epoch, leave=self._leave, register=register, seconds=seconds
        ):
            del self._held[limit.name][token]
        else:
            self._held[limit.name][token] = _Place(began + seconds, place.seconds, self._epoch)

    def _count(self) -> dict[str, int]:
        """The most that we hold, or have held since it was told last."""
        names = {*self._held, *self._peak}
        counted = {name: max(len(self._held[name]), self._peak[name]) for name in names}
        return {name: count for name, count in counted.items() if count}

    def _tokens(self) -> Held:
        """What we hold, and what is left of each lease."""
        now = _clock()
        return {
            name: {"left": {token: place.ends - now for token, place in held.items() if place.ends > now}}
            for name, held in self._held.items()
            if held
        }

    # ── Small things ────────────────────────────────────────────────────────────────────────────────────────────

    def _run(self, operation: Runnable[T]) -> T:
        result = self._link.run(operation)
        if self._is_unwell:
            self._is_unwell = False
            logger.info("limits in Redis: the database is back")
        return result

    def _safely(self, action: Callable[[], T], otherwise: T) -> T:
        """Without PostgreSQL nothing can be decided: Redis is asked for as long as our leave lasts."""
        try:
            return action()
        except psycopg.OperationalError as error:
            if not self._is_unwell:
                self._is_unwell = True
                logger.warning("limits in Redis: no word from the database: %s", str(error).strip())
            return otherwise

    def _say(self, fleet: Mode) -> None:
        """Log a change of mode, once."""
        before, self._said = self._said, self.mode
        if self.mode == LOST:
            logger.warning(
                "limits in Redis: it is out of reach of %s (%s): nothing that needs a place begins here until it "
                "is back, or out of reach of all programs",
                self._id,
                self._lost,
            )
        elif self.mode == DEGRADED:
            logger.warning(
                "limits in Redis: it is out of reach of all %d programs (%s): each keeps to its share (degraded)",
                fleet.programs,
                self._lost,
            )
        elif self.mode == JOINING:
            logger.warning(
                "limits in Redis: it is back, has lost its data, or is another one: whoever has a place registers "
                "it, and nobody gets a new one for %.0f s (joining)",
                fleet.seconds or 0.0,
            )
        elif before is None:
            logger.info("limits in Redis: %s takes part (epoch %s)", self._id, fleet.epoch)
        else:
            logger.info("limits in Redis: as usual again, after %s", before)


class _Search(threading.Thread):
    """Asks Redis once. Nothing else uses the connection meanwhile."""

    def __init__(self, places: RedisPlaces) -> None:
        super().__init__(name="commandbus-redis-search", daemon=True)
        self._places = places
        self._answer: Probe | RedisLostError = RedisLostError("no answer yet")
        self.start()

    def run(self) -> None:
        """Ask."""
        try:
            self._answer = self._places.probe()
        except RedisLostError as error:
            self._answer = error

    def is_over(self, seconds: float) -> bool:
        """Is there an answer, or will there be one within so many seconds?"""
        self.join(seconds)
        return not self.is_alive()

    def answer(self) -> Probe:
        """What it said, if it has."""
        if isinstance(self._answer, RedisLostError):
            raise self._answer
        return self._answer


def _as_held(most: dict[str, int]) -> Held:
    return {name: {"most": count} for name, count in most.items()}


def _clock() -> float:
    """Goes on while the machine sleeps, where that can be had."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()
