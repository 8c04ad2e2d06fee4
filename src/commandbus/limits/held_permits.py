"""HeldPermits: takes permits for this program, renews them, and knows which ones are held here.

    newcomer ──take──┐
                     ├──► held ──renew, after a third of its lease──► held, or lost
    reserved ─adopt──┘      └──let_go──► (given back by `releases`)

A permit is taken for a newcomer, or was reserved for the first in line and is adopted. The rows of limits are
remembered as last seen, and read again where they must be current. Only the limit client's thread uses this,
except where a method says otherwise. While that thread waits for PostgreSQL, the permit clock ends held permits,
and the backup renewer renews in Redis.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

from commandbus.clock import boottime, monotonic
from commandbus.errors import CommandBusError, UnknownLimitError
from commandbus.flow.limits import permits
from commandbus.flow.limits.declare import LimitRow, get_limit
from commandbus.limits.limit_connection import LimitConnection, LockedRowError
from commandbus.limits.permit_clock import PermitClock
from commandbus.limits.requests import Permit
from commandbus.limits.stores.choose import PermitStores
from commandbus.logger import safe_logger
from commandbus.model.limit_state import ApiAnswer

logger = safe_logger("commandbus.limits")

TICK_SECONDS = 1.0
LONGEST_SECONDS = 30.0
LEAST_SECONDS = 0.05


class HeldPermits:
    """The limits that this program uses, and the permits of them that it holds."""

    def __init__(self, connection: LimitConnection, stores: PermitStores, *, name: str) -> None:
        self.connection = connection
        self.stores = stores
        self.clock = PermitClock(name, self._lose)
        self.renew_at = 0.0
        self._rows: dict[str, LimitRow] = {}  # as last seen; values that must be exact are read again
        self._held: dict[str, dict[str, Permit]] = {}
        self._losing = threading.Lock()
        self.has_held = threading.Event()  # tells the backup renewer that a permit is held

    # --- called from other threads -----------------------------------------------------------------------------

    @property
    def modes(self) -> dict[str, str]:
        """Where the permits of each limit that is used here are kept now."""
        mode = self.stores.mode_external
        return {name: "postgres" if row.store == "postgres" else mode for name, row in list(self._rows.items())}

    @property
    def held(self) -> dict[str, int]:
        """How many permits of each limit are held here."""
        return {name: len(own) for name, own in list(self._held.items()) if own}

    def late_external(self, part: float) -> Iterator[tuple[LimitRow, list[Permit]]]:
        """Permits outside PostgreSQL that were last renewed more than this part of their lease ago."""
        now = boottime()
        for name, held in list(self._held.items()):
            row = self._rows.get(name)
            own = [permit for permit in list(held.values()) if not permit.is_lost]
            late = [permit for permit in own if now - permit.renewed_at >= permit.lease * part]
            if row is not None and row.store != "postgres" and late:
                yield row, late

    def leases_external(self) -> list[float]:
        """The leases of the permits that are held outside PostgreSQL."""
        return [permit.lease for _, permits in self.late_external(0.0) for permit in permits]

    # --- limits ------------------------------------------------------------------------------------------------

    def row(self, name: str) -> LimitRow:
        """The limit as it is now."""
        row = self._rows[name] = self.connection.run(get_limit(name))
        return row

    def known(self, name: str) -> LimitRow:
        """The limit as last seen, for values that rarely change, such as its lease."""
        return self._rows.get(name) or self.row(name)

    def remember(self, row: LimitRow) -> None:
        """Remember a row that was read for another purpose."""
        self._rows[row.name] = row

    def knows(self, name: str) -> bool:
        """Is this a limit that is used here?"""
        return name in self._rows

    def forget(self, name: str) -> None:
        """Forget a row that was changed or is gone, so that it is read again the next time."""
        self._rows.pop(name, None)

    # --- permits ------------------------------------------------------------------------------------------------

    def take(self, name: str, tokens: Sequence[str], *, probes: bool = True) -> tuple[list[str], LimitRow | None]:
        """Take permits for newcomers; `probes`: one of them may be the probe. If some of them get no permit, also
        returns the limit's row, which says why."""
        if self.known(name).store == "postgres":
            taken = self.connection.run(permits.take(name, tokens, probes=probes), limit=name)
            if len(taken) == len(tokens):
                return taken, None
            row = self.row(name)
            if row.store == "postgres":
                return taken, row
        else:
            row = self.row(name)
        limit_state = row.limit_state
        if row.is_awaited or limit_state.blocked_until(row.now) is not None:
            return [], row
        if not limit_state.is_probing:
            granted = self.stores.of(row).take(row, tokens, row.lease)
            return granted, None if len(granted) == len(tokens) else row
        if limit_state.is_probed(row.now) or not probes:
            return [], row
        granted = self.stores.of(row).take(row, tokens[:1], row.lease)
        if granted and not self.connection.run(permits.take_probe(name, granted[0]), limit=name):
            self.stores.of(row).release(row, granted)
            granted = []
        return granted, row

    def adopt(self, name: str, token: str) -> bool:
        """Take over the permit that is reserved for this token. Returns False if it is not there any more."""
        row = self.row(name)
        limit_state = row.limit_state
        store = self.stores.of(row)
        if limit_state.blocked_until(row.now) is not None or (
            limit_state.is_probing and limit_state.probe != token
        ):
            store.release(row, [token])  # it was reserved before the API refused a call
            if limit_state.probe == token:
                # It was to be the probe, but makes no call. So let another caller be the probe.
                unknown = permits.answer(name, token, ApiAnswer.UNKNOWN, gives=False, has_begun=False)
                self.connection.run(unknown, limit=name)
            return False
        is_held = not store.renew(row, [token])
        if is_held and row.store != "postgres" and limit_state.probe == token:
            self.connection.run(permits.renew(name, [token]), limit=name)  # its row says which token is the probe
        return is_held

    def hold(self, permit: Permit) -> Permit:
        """Renew this permit from now on."""
        self._held.setdefault(permit.limit, {})[permit.token] = permit
        self.clock.watch(permit)
        self.has_held.set()
        self.renew_at = min(self.renew_at, monotonic() + permit.lease / 3)
        return permit

    def let_go(self, permit: Permit) -> None:
        """Stop renewing this permit."""
        self.clock.forget(permit)
        self._held.get(permit.limit, {}).pop(permit.token, None)

    def renew(self) -> None:
        """Renew what is due, notify holders that have lost a permit, and compute when the next renewal is due."""
        now, age_now = monotonic(), boottime()
        again = now + (TICK_SECONDS if self.stores.tick() else LONGEST_SECONDS)
        for name, held in list(self._held.items()):
            for permit in [permit for permit in held.values() if permit.is_lost]:
                self.let_go(permit)  # the clock has ended it
            due = [permit for permit in held.values() if age_now - permit.renewed_at >= permit.lease / 3]
            for permit in self._renew(name, due) if due else []:
                self._lose(permit)
                self.let_go(permit)
            next_at = [now + self._due_in(permit, age_now) for permit in held.values()]
            again = min(again, max(min(next_at, default=again), self.connection.barred_until(name)))
        self.renew_at = max(again, now + LEAST_SECONDS)  # set last: after a failure, try again at once

    @staticmethod
    def _due_in(permit: Permit, now: float) -> float:
        """Seconds until the next renewal. If the last one has just failed, it is tried again soon."""
        left = permit.renewed_at + permit.lease / 3 - now
        return left if left > 0 else min(TICK_SECONDS, permit.lease / 10)

    def _renew(self, name: str, own: Sequence[Permit]) -> list[Permit]:
        """Renew leases. Returns the permits that are lost."""
        sent_at = boottime()
        try:
            row = self.row(name)
            store = self.stores.of(row)
            gone = set(store.renew(row, [permit.token for permit in own]))
        except UnknownLimitError:
            for permit in own:  # nobody counts these permits any more
                self.let_go(permit)
            return []
        except LockedRowError:
            return []  # tried again when the bar ends; the beginning of the bar was logged
        except CommandBusError as error:
            logger.warning("permits of limit %s cannot be renewed: %s", name, error)
            return []
        for permit in own:
            if permit.token not in gone:
                self._note_renewed(permit, row, sent_at)
        return [permit for permit in own if permit.token in gone]

    def _note_renewed(self, permit: Permit, row: LimitRow, sent_at: float) -> None:
        """Note when the lease was renewed. An external store is asked: the renewal may not have reached it."""
        permit.call_timeout = row.call_timeout
        if row.store != "postgres":
            sent_at = self.stores.external(row).renewed_at(row, permit.token) or permit.renewed_at
        permit.lease = row.lease if sent_at > permit.renewed_at else permit.lease
        permit.renewed_at = max(permit.renewed_at, sent_at)

    def _lose(self, permit: Permit) -> None:
        """Mark a permit as lost. The limit client's thread and the clock's thread call this."""
        with self._losing:
            if permit.is_lost:
                return
            permit.is_lost = True
        logger.warning("%s has lost its permit of limit %s", permit.holder, permit.limit)
        if permit.on_lost is not None:
            permit.on_lost(permit)
