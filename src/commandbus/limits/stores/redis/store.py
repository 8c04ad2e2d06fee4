"""Permits kept in Redis, and what happens to them when Redis is unreachable, or has lost its data.

    mode        whose permits               take              renew
    redis       Redis'                     Redis             Redis
    lost        Redis', out of my reach    nothing           fails until Redis is back or the lease ends
    degraded    PostgreSQL's, in shares    up to my share    PostgreSQL
    joining     Redis', being told         nothing           Redis, which is told of what it has forgotten

A limit that programs outside the fleet share (`shared`) has no shares: nobody knows what those programs hold.

`outage.py` follows the mode, which is the fleet's; `permit_ledger.py` knows what this program holds and owes.

Single-threaded. It has its own connection to PostgreSQL, because `take` is called in the middle of the limit
client's transactions, and neither their locks nor their rollback may affect it. An outage of Redis or PostgreSQL
never raises here: during an outage nobody gets a permit. Another thread calls `renew_beside`, with its own
connection to Redis, so that a lease does not run out there while this thread waits for PostgreSQL.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from commandbus.clock import boottime
from commandbus.errors import ConfigurationError
from commandbus.flow.limits import redis_outage
from commandbus.flow.limits.metrics import count_granted
from commandbus.flow.limits.redis_outage import DEGRADED, REDIS, HeartbeatPace
from commandbus.limits.stores.redis.outage import NO_LEAVE, FleetFollower
from commandbus.limits.stores.redis.patient_connection import PatientConnection
from commandbus.limits.stores.redis.permit_ledger import PermitLedger
from commandbus.limits.stores.redis.scripts import EpochError, RedisLostError, RedisScripts, StaleError
from commandbus.model.limit import PermitUsage
from commandbus.model.limit_values import LimitValues
from commandbus.settings import Settings

_TRIES: Final = 3


class RedisPermitStore:
    """Permits of limits in Redis, for one program."""

    def __init__(self, settings: Settings, client: str, *, pace: HeartbeatPace | None = None) -> None:
        if settings.redis_url is None:
            raise ConfigurationError(
                "limits are kept in Redis, but redis_url is not set; set COMMANDBUS_REDIS_URL"
            )
        self._permits = RedisScripts(settings.redis_url, settings.environment)
        self._permits_beside = RedisScripts(settings.redis_url, settings.environment)
        self._connection = PatientConnection(settings, name=f"{client} limits")
        self._pace = pace or HeartbeatPace()
        self._held_in_redis = PermitLedger()
        self._fleet = FleetFollower(client, self._connection, self._permits, self._held_in_redis, self._pace)
        # Permits that were given here, but not reported to PostgreSQL yet.
        self._granted: defaultdict[str, int] = defaultdict(int)

    @property
    def mode(self) -> str:
        """redis, lost, degraded or joining."""
        return self._fleet.mode

    # ── What the limit client asks
    # ──────────────────────────────────────────────────────────────────────────────────────

    def take(self, limit: LimitValues, tokens: Sequence[str], seconds: float) -> list[str]:
        """Take permits for some seconds. Returns the tokens that have one, which are the first of those given."""
        self._held_in_redis.limits[limit.name] = limit
        granted: list[str] = (
            self._connection.safely(lambda: self._take(limit, tokens, seconds), []) if tokens else []
        )
        self._granted[limit.name] += len(granted)
        return granted

    def keep_for_others(self, limit: LimitValues, tokens: Sequence[str], seconds: float) -> list[str]:
        """Take permits that others will adopt. This program does not count them. When Redis is lost, the program
        that has adopted one counts it, and a permit that nobody has adopted is void."""
        granted = self.take(limit, tokens, seconds)
        if self.mode == REDIS:
            self._held_in_redis.lose(limit, granted)
        return granted

    def renew(self, limit: LimitValues, tokens: Sequence[str]) -> list[str]:
        """Renew leases. Returns the tokens that hold no permit any more."""
        self._held_in_redis.limits[limit.name] = limit
        if not tokens:
            return []
        lost = self._connection.safely(lambda: self._renew(limit, tokens), None)
        if lost is None:
            # Redis could not be asked. The next try comes after a third of a lease, which must not be too late.
            lost = self._held_in_redis.ending(limit, tokens, limit.lease * 0.4)
        self._held_in_redis.lose(limit, lost)
        return lost

    def renewed_at(self, limit: LimitValues, token: str) -> float | None:
        """When the lease of this token was last renewed successfully; None: this program does not hold it."""
        permit = self._held_in_redis.held[limit.name].get(token)
        return None if permit is None else permit.ends - permit.seconds

    def renew_beside(self, limit: LimitValues, tokens: Sequence[str]) -> list[str]:
        """Renew leases without PostgreSQL, as long as Redis allows it. Returns the tokens that were renewed."""
        life, epoch, leave = self._held_in_redis.lives, self._fleet.epoch, self._fleet.leave
        held = self._held_in_redis.held[limit.name]
        known = [token for token in tokens if (permit := held.get(token)) is not None and permit.epoch == epoch]
        if not known or leave == NO_LEAVE:
            return []
        began = boottime()
        try:
            lost = self._permits_beside.renew(limit, known, epoch=epoch, leave=leave)
        except (RedisLostError, EpochError, StaleError):
            return []
        renewed = [token for token in known if token not in lost]
        return self._held_in_redis.renewed_beside(limit, renewed, began, epoch, life)

    def close_backstop(self) -> None:
        """Close the other thread's connection, on that thread."""
        self._permits_beside.close()

    def release(self, limit: LimitValues, tokens: Sequence[str]) -> None:
        """Release permits. If Redis is unreachable, it is told later."""
        self._held_in_redis.limits[limit.name] = limit
        if not tokens:
            return
        self._held_in_redis.release(limit, tokens)
        self._connection.safely(lambda: self._give(limit, tokens), None)

    def usage(self, limit: LimitValues) -> PermitUsage:
        """Who holds a permit, and how fast permits are given."""
        self._held_in_redis.limits[limit.name] = limit
        return self._connection.safely(lambda: self._look(limit), PermitUsage(mode=self.mode))

    def tick(self) -> None:
        """Send a heartbeat, check Redis, and follow the fleet. Call it about every second; it does nothing while
        that is not due."""
        if self._fleet.is_due:
            self._connection.safely(self._fleet.beat, None)
            self._held_in_redis.forget_old()
            self._connection.safely(self._tell_granted, None)

    def hurry(self) -> None:
        """Note that the fleet's mode has changed: the next tick looks at it."""
        self._fleet.hurry()

    def close(self) -> None:
        """Sign off, unless permits are still held: then their leases go on."""
        self._held_in_redis.forget_old()
        self._connection.safely(self._tell_granted, None)
        if not self._held_in_redis:
            self._connection.safely(self._fleet.sign_off, None)
        self._fleet.close()
        self._permits.close()
        self._connection.close()

    # ── Permits ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _take(self, limit: LimitValues, tokens: Sequence[str], seconds: float) -> list[str]:
        for _ in range(_TRIES):
            self._prepare(limit, len(tokens))
            if not self._fleet.reaches_redis:
                has_share = self.mode == DEGRADED and not limit.shared
                return self._take_share(limit, tokens, seconds) if has_share else []
            if self.mode != REDIS:
                return []
            began = boottime()
            granted = self._fleet.ask(partial(self._take_at_redis, limit, tokens, seconds))
            if granted is not None:
                self._held_in_redis.keep(limit, granted, began, seconds, self._fleet.epoch)
                return granted
        return []

    def _take_at_redis(self, limit: LimitValues, tokens: Sequence[str], seconds: float, epoch: str) -> list[str]:
        admits_newcomers = self._fleet.admits_newcomers(limit)
        return self._permits.take(
            limit, tokens, seconds, epoch=epoch, leave=self._fleet.leave, admits_newcomers=admits_newcomers
        )

    def _take_share(self, limit: LimitValues, tokens: Sequence[str], seconds: float) -> list[str]:
        began = boottime()
        mode, granted = self._connection.run(
            redis_outage.take_share(self._fleet.id, limit, tokens, seconds, pace=self._pace)
        )
        if mode != DEGRADED:
            self._fleet.hurry()  # the fleet has changed its mode
        self._held_in_redis.keep(limit, granted, began, seconds, None)
        return granted

    def _renew(self, limit: LimitValues, tokens: Sequence[str]) -> list[str] | None:
        held = self._held_in_redis.held[limit.name]
        for _ in range(_TRIES):
            self._prepare(limit, sum(1 for token in tokens if token not in held))
            if not self._fleet.reaches_redis:
                has_share = self.mode == DEGRADED and not limit.shared
                return self._renew_share(limit, tokens) if has_share else None
            began = boottime()
            lost = self._fleet.ask(partial(self._renew_at_redis, limit, tokens))
            if lost is not None:
                kept = [token for token in tokens if token not in lost]
                self._held_in_redis.keep(limit, kept, began, limit.lease, self._fleet.epoch)
                return lost
        return None

    def _renew_at_redis(self, limit: LimitValues, tokens: Sequence[str], epoch: str) -> list[str]:
        """Register permits again that Redis knows only from another epoch, if their lease has not ended
        meanwhile."""
        forgotten = self._held_in_redis.forgotten(limit, tokens, epoch)
        known = [token for token in tokens if token not in forgotten]
        lost: list[str] = []
        ask = partial(self._permits.renew, limit, epoch=epoch, leave=self._fleet.leave)
        if forgotten:
            lost += ask(forgotten, register=True, admits_newcomers=self._fleet.admits_newcomers(limit))
        return lost + (ask(known) if known else [])

    def _renew_share(self, limit: LimitValues, tokens: Sequence[str]) -> list[str] | None:
        began = boottime()
        mode, lost = self._connection.run(redis_outage.renew_share(self._fleet.id, limit, tokens))
        if mode != DEGRADED:
            self._fleet.hurry()
            return None
        self._held_in_redis.keep(limit, [token for token in tokens if token not in lost], began, limit.lease, None)
        return lost

    def _give(self, limit: LimitValues, tokens: Sequence[str]) -> None:
        for _ in range(_TRIES):
            self._prepare(limit, 0)
            if not self._fleet.reaches_redis:
                if self._fleet.is_marked:
                    self._connection.run(redis_outage.release_share(limit.name, tokens))
                return
            if self._fleet.ask(partial(self._fleet.release_owed, limit)):
                return

    def _look(self, limit: LimitValues) -> PermitUsage:
        self._prepare(limit, 0)
        if self._fleet.reaches_redis:
            found = self._fleet.ask(lambda epoch: self._permits.usage(limit, epoch=epoch))
            if found is not None:
                return replace(found, mode=self.mode)
        return PermitUsage(self._connection.run(redis_outage.share_in_use(limit.name)), None, self.mode)

    def _prepare(self, limit: LimitValues, more: int) -> None:
        """Before more permits are taken: tell PostgreSQL of at least as many as this program will hold. If this
        program is killed while Redis is lost, they count as used for one lease."""
        if not self._fleet.is_known:
            self._fleet.beat()
        if self._fleet.reaches_redis and more and self._held_in_redis.plan(limit, more):
            self._fleet.beat()

    def _tell_granted(self) -> None:
        """Tell PostgreSQL how many permits were given here, for the metrics of the fleet."""
        granted = {name: count for name, count in self._granted.items() if count}
        if granted:
            self._connection.run(count_granted(granted, self._pace.beat))
            self._granted.clear()
