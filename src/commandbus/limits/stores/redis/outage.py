"""Follows where the fleet keeps the permits of Redis limits now, and tells the fleet about this program.

A program learns about the others only through PostgreSQL (`flow/limits/redis_outage.py`), where it writes a
heartbeat every two seconds. Each heartbeat permits it to ask Redis for eight more seconds, by Redis' clock. So a
program that was stopped, or cut off from PostgreSQL, gets no permit from Redis while the others count it as dead
and share the limit without it.

Single-threaded. A Redis outage never raises here; a PostgreSQL outage does.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Final, TypeVar

from commandbus.clock import boottime
from commandbus.flow.limits import redis_outage
from commandbus.flow.limits.redis_outage import DEGRADED, JOINING, REDIS, HeartbeatPace, Held, Mode
from commandbus.limits.stores.redis.patient_connection import PatientConnection
from commandbus.limits.stores.redis.permit_ledger import HeldPermit, PermitLedger
from commandbus.limits.stores.redis.ping import Ping
from commandbus.limits.stores.redis.scripts import EpochError, Probe, RedisLostError, RedisScripts, StaleError
from commandbus.logger import safe_logger
from commandbus.model.limit_values import LimitValues

T = TypeVar("T")
logger = safe_logger("commandbus.limits")

LOST: Final = "lost"
SEARCH_SECONDS: Final = 0.05
_MICRO: Final = 1_000_000
NO_LEAVE: Final = 1  # a moment that has passed


class FleetFollower:
    """One program of the fleet."""

    def __init__(
        self,
        client: str,
        connection: PatientConnection,
        permits: RedisScripts,
        ledger: PermitLedger,
        pace: HeartbeatPace,
    ) -> None:
        self.id = f"{client} {secrets.token_hex(4)}"
        self._connection = connection
        self._permits = permits
        self._held_in_redis = ledger
        self._pace = pace
        self._seen: Mode | None = None
        self._lost: str | None = "not asked yet"  # why Redis is unreachable; None: it is reachable
        self.is_marked = False  # does PostgreSQL know that Redis is unreachable, and count our tokens?
        self.leave = NO_LEAVE  # until when, by Redis' clock, this program may ask Redis
        self._registered: str | None = None  # the epoch in which Redis knows all permits of this program
        self._due = 0.0
        self._search: Ping | None = None
        self._said: str | None = None

    @property
    def mode(self) -> str:
        """redis, lost, degraded or joining."""
        if self._seen is None:
            return LOST
        if self._lost is None:
            return self._seen.mode
        return DEGRADED if self._seen.mode == DEGRADED and self.is_marked else LOST

    @property
    def epoch(self) -> str:
        """The epoch of Redis. In a new epoch, Redis has forgotten what it was told before."""
        return (self._seen.epoch if self._seen else None) or ""

    def admits_newcomers(self, limit: LimitValues) -> bool:
        """May newcomers begin as soon as the fleet says so? If programs outside the fleet share the limit, they
        may not: Redis itself lets nobody begin before one lease has passed."""
        return self.mode == REDIS and not limit.shared

    @property
    def is_known(self) -> bool:
        """Has this program read the fleet's mode yet?"""
        return self._seen is not None

    @property
    def reaches_redis(self) -> bool:
        """Did Redis answer the last time?"""
        return self._lost is None

    @property
    def is_due(self) -> bool:
        """Is it time for a heartbeat?"""
        return boottime() >= self._due

    def hurry(self) -> None:
        """Note that the fleet's mode has changed: the next heartbeat is due now."""
        self._due = 0.0

    def ask(self, question: Callable[[str], T]) -> T | None:
        """Ask Redis. Returns None if the caller should ask again, because the fleet's mode has changed."""
        try:
            return question(self.epoch)
        except RedisLostError as error:
            self._lose(error)
            self._settle()
        except (EpochError, StaleError):
            self.beat()
        return None

    def beat(self) -> None:
        """One whole round: ask Redis and PostgreSQL, and do what follows from their answers."""
        now = boottime()
        self._due = now + (self._pace.beat if self._lost is None else self._pace.beat / 2)
        try:
            probe = self._probe()
        except RedisLostError as error:
            self._lose(error)
            self._settle()
            return
        was_lost = self._lost is not None
        most = self._held_in_redis.count()
        fleet = None if was_lost else self._connection.run(redis_outage.beat(self.id, self._as_held(most)))
        if (
            fleet is not None
            and not fleet.is_lost
            and fleet.epoch is not None
            and fleet.epoch == probe.epoch
            and fleet.mode == REDIS
        ):
            self._follow(fleet)
        elif not self._settle(reachable=True):
            return
        self._held_in_redis.note_told(most)
        self.leave = probe.now + round(self._pace.leave * _MICRO)
        if self._tell_redis(renews=was_lost) and self._registered != self.epoch:
            self._registered = self.epoch
            if self.mode == JOINING:  # the fleet may be waiting only for this program
                self._settle(reachable=True)

    def release_owed(self, limit: LimitValues, epoch: str) -> bool:
        """Tell Redis which permits were released."""
        owed = self._held_in_redis.owed[limit.name]
        if owed:
            self._permits.release(limit, list(owed), epoch=epoch)
            owed.clear()
        return True

    def sign_off(self) -> None:
        """Sign off: this program holds nothing any more, and need not be counted."""
        self._connection.run(redis_outage.leave(self.id))

    def close(self) -> None:
        """Close the connection to Redis. Nothing uses it after this."""
        if self._search is not None:
            self._search.join()

    def _probe(self) -> Probe:
        """Is Redis reachable? While it is not, another thread asks, because a stopped server does not answer
        before the timeout, and this thread must not wait for that again and again."""
        if self._lost is None or self._seen is None:
            return self._permits.probe()
        search = self._search = self._search or Ping(self._permits)
        if search.is_over(SEARCH_SECONDS):
            self._search = None
        return search.answer()

    def _settle(self, *, reachable: bool = False) -> bool:
        """Say under the fleet's lock whether Redis is reachable, and learn the mode. Returns False if Redis was
        lost just now."""
        redis = self._permits if reachable else None
        held = self._as_held(self._held_in_redis.count()) if reachable else self._held_in_redis.tokens()
        lease = max((limit.lease for limit in self._held_in_redis.limits.values()), default=0.0)
        operation = redis_outage.settle(
            self.id, held, lease=lease, pace=self._pace, redis=redis, epoch=self._registered
        )
        try:
            fleet = self._connection.run(operation)
        except RedisLostError as error:
            self._lose(error)
            if reachable:
                self._settle()
            return False
        if reachable:
            self._lost, self.is_marked = None, False
        else:
            self.is_marked = True
        self._follow(fleet)
        return True

    def _follow(self, fleet: Mode) -> None:
        self._seen = fleet
        if fleet.mode == JOINING and fleet.seconds is not None:
            self._due = min(self._due, boottime() + max(fleet.seconds, 0.0))
        if self.mode != self._said:
            self._say(fleet)

    def _lose(self, error: RedisLostError) -> None:
        self.leave = NO_LEAVE
        self._held_in_redis.begin_life()
        if self._lost is None or self._seen is None:
            self._lost = str(error)

    def _tell_redis(self, *, renews: bool) -> bool:
        """Tell Redis what it has forgotten or missed: which permits are held, and which were released. If Redis
        was unreachable, also renew the leases at once. Returns whether Redis knows all of it now."""
        try:
            for name, limit in self._held_in_redis.limits.items():
                self.release_owed(limit, self.epoch)
                for token, permit in list(self._held_in_redis.held[name].items()):
                    if (renews or permit.epoch != self.epoch) and permit.ends > boottime():
                        self._tell_of(limit, token, permit)
        except RedisLostError as error:
            self._lose(error)
            self._settle()
        except (EpochError, StaleError):
            self.hurry()
        else:
            return True
        return False

    def _tell_of(self, limit: LimitValues, token: str, permit: HeldPermit) -> None:
        """Tell Redis of a permit. A permit that was taken for a lease gets a new lease; one that is reserved for
        another program keeps its end."""
        began = boottime()
        seconds = limit.lease if permit.seconds >= limit.lease else permit.ends - began
        register = permit.epoch != self.epoch
        if self._permits.renew(
            limit,
            [token],
            epoch=self.epoch,
            leave=self.leave,
            register=register,
            seconds=seconds,
            admits_newcomers=self.admits_newcomers(limit),
        ):
            self._held_in_redis.lose(limit, [token])
        else:
            self._held_in_redis.held[limit.name][token] = HeldPermit(began + seconds, permit.seconds, self.epoch)

    def _say(self, fleet: Mode) -> None:
        """Log a change of mode, once."""
        before, self._said = self._said, self.mode
        if self.mode == LOST:
            logger.warning(
                "limits in Redis: %s cannot reach it (%s): this program gets no permits until it "
                "is back, or no program can reach it",
                self.id,
                self._lost,
            )
        elif self.mode == DEGRADED:
            logger.warning(
                "limits in Redis: none of %d programs can reach it (%s): each uses only its share (degraded)",
                fleet.programs,
                self._lost,
            )
        elif self.mode == JOINING:
            logger.warning(
                "limits in Redis: it is back, has lost its data, or is another one: holders register their "
                "permits, and nobody gets a new one meanwhile (joining, for %.0f s at most: %s)",
                fleet.seconds or 0.0,
                fleet.note,
            )
        elif before is None:
            logger.info("limits in Redis: %s takes part (epoch %s)", self.id, fleet.epoch)
        else:
            logger.info("limits in Redis: normal again, after %s", before)

    def _as_held(self, most: dict[str, int]) -> Held:
        """The most that this program may hold, and for how long these permits count after its death."""
        limits = self._held_in_redis.limits
        return {
            name: {"most": count, "lease": limits[name].lease} if name in limits else {"most": count}
            for name, count in most.items()
        }
