"""The Waker finds the first command or caller in line, reserves a permit for it, and wakes it.

`look_at` only notes when to look. However often it is called, the round looks once. It is called when a permit is
released, when a command or caller joins the line, and when a back-off ends. If a worker was killed between two
statements, nobody has called it: the sweep finds such limits.

Only the limit client's thread uses it, except `is_due_within`.
"""

from __future__ import annotations

import math
import secrets

import psycopg

from commandbus.clock import monotonic
from commandbus.errors import CommandBusError, UnknownLimitError
from commandbus.flow.limits import permits
from commandbus.limits.held_permits import HeldPermits
from commandbus.limits.limit_connection import LockedRowError
from commandbus.logger import safe_logger

logger = safe_logger("commandbus.limits")

RESERVE_SECONDS = 15.0
MOST_AT_ONCE = 20


class Waker:
    """Wakes the first in line, for the limits that this program uses."""

    def __init__(self, held_permits: HeldPermits) -> None:
        self._held_permits = held_permits
        self._due: dict[str, float] = {}
        self._unreachable: dict[str, str] = {}  # limits that this program cannot serve, and why
        self.is_barred = False  # from queues, as a role that only sends: then other programs wake commands

    @property
    def soonest(self) -> float:
        """When (monotonic) to look next."""
        return min(self._due.values(), default=math.inf)

    def is_due_within(self, seconds: float) -> bool:
        """Will it look within so many seconds? Other threads may call this."""
        return any(at < monotonic() + seconds for at in list(self._due.values()))

    def look_at(self, name: str, seconds: float = 0.0) -> None:
        """Look, in so many seconds, for the first in line."""
        at = monotonic() + max(0.0, seconds)
        self._due[name] = min(self._due.get(name, at), at)

    def wake_due(self, now: float) -> None:
        """Look at all limits whose time has come."""
        for name in [name for name, at in self._due.items() if at <= now]:
            del self._due[name]
            self._wake_next(name)

    def sweep(self) -> None:
        """Find what was missed: limits for which somebody waits, and commands that have waited too long."""
        try:
            found = self._held_permits.connection.run(permits.sweep())
        except CommandBusError as error:
            self._say_once("", error)
            return
        for name in found.limits:
            if name not in self._due:
                self._wake_next(name)
        for domain in [] if self.is_barred else found.domains:
            try:
                self._held_permits.connection.run(permits.wake_overdue(domain))
            except psycopg.errors.InsufficientPrivilege:
                self.is_barred = True
                break
            except psycopg.errors.UndefinedTable:
                logger.warning("domain %s is gone, and commands of it are parked", domain)
            except CommandBusError as error:
                self._say_once(domain, error)

    def _wake_next(self, name: str) -> None:
        grant, release = None, None
        try:
            row = self._held_permits.known(name)
            if row.store != "postgres":
                store = self._held_permits.stores.external(row)
                grant, release = store.keep_for_others, store.release
        except UnknownLimitError:
            pass  # the limit is gone, and those who waited for it are told so
        except CommandBusError as error:
            self._say_once(name, error)
            return
        mark, barred = f"turn/{secrets.token_hex(4)}/", self.is_barred
        waking = permits.wake(
            name,
            most=MOST_AT_ONCE,
            seconds=RESERVE_SECONDS,
            grant=grant,
            release=release,
            mark=mark,
            is_barred=barred,
        )
        try:
            woken = self._held_permits.connection.run(waking, limit=name)
        except LockedRowError as error:
            self.look_at(name, error.until - monotonic())
            return
        except psycopg.errors.InsufficientPrivilege:
            if barred:
                raise
            self.is_barred = True
            self.look_at(name)
            return
        except psycopg.errors.UndefinedTable as error:
            logger.warning("no command of limit %s can be woken, the domain of one is gone: %s", name, error)
            return
        except CommandBusError as error:
            self._say_once(name, error)
            return
        self._unreachable.pop(name, None)
        if woken.again_seconds is not None:
            self.look_at(name, woken.again_seconds)
        elif woken.count == MOST_AT_ONCE:
            self.look_at(name)

    def _say_once(self, name: str, error: CommandBusError) -> None:
        if self._unreachable.get(name) != str(error):
            self._unreachable[name] = str(error)
            logger.warning("this program cannot wake commands that wait for limit %s: %s", name or "(any)", error)
