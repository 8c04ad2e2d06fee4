"""The Scheduler: fires the schedules of a worker's domains, and says which of them its code declares.

Every worker of a domain may fire. Each sleeps until the next firing is due by the server's clock, or until it is
notified that a schedule has changed. Then all of them decide the same, and one of them moves the row
(`flow/schedules/fire.py`). There is no leader, and nobody waits for a lock.

It works on a thread and a connection of its own, so that no lease and no heartbeat waits for it, nor it for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, Final

import psycopg
from psycopg import Connection

from commandbus.clock import monotonic
from commandbus.db.service import DatabaseService
from commandbus.db.transient_errors import PassingError, is_locked
from commandbus.errors import CommandBusError
from commandbus.flow.schedules.declare import declare, forget, put_into_effect, undecided, undeclared
from commandbus.flow.schedules.exist import CHANNEL
from commandbus.flow.schedules.fire import Decided, DueRow, fire, look, put_off
from commandbus.logger import safe_logger
from commandbus.model.schedule import Schedule, decide
from commandbus.settings import Settings

logger = safe_logger("commandbus.worker")

BITE: Final = 100
SLICE_SECONDS: Final = 0.5  # for deciding: what is decided is fired before more is
DECLARE_SECONDS: Final = 5.0
FORGET_SECONDS: Final = 15.0
BLIND_SECONDS: Final = 1.0  # behind a pooler, where nobody can be notified
TAKEN_SECONDS: Final = 0.2  # until the next look, if somebody else holds what is due
ALMOST_SECONDS: Final = 0.002  # later than the server said: its clock and ours do not tick alike
TROUBLED_SECONDS: Final = 3.0
PUT_OFF_SECONDS: Final = 60.0
ASIDE_SECONDS: Final = 5.0


class Scheduler(DatabaseService):
    """One thread for schedules."""

    def __init__(
        self,
        settings: Settings,
        domains: Sequence[str],
        declared: Sequence[Schedule],
        *,
        on_error: Callable[[BaseException], None],
        name: str,
    ) -> None:
        super().__init__(settings, name=name, part="scheduler", on_end=on_error)
        self._domains = list(domains)
        self._declared = list(declared)
        self._grace = settings.schedule_grace
        self._declare_at = 0.0
        self._forget_at = 0.0
        self._connected_at = monotonic()
        self._aside: dict[tuple[str, str], float] = {}
        self._undeclared: set[tuple[str, str]] = set()
        self._said: set[str] = set()

    @property
    def _longest(self) -> float:
        return DECLARE_SECONDS if self.can_listen else BLIND_SECONDS

    def connected(self, conn: Connection[Any]) -> None:
        self.listen(conn, CHANNEL)
        self._connected_at = monotonic()
        self._declare_at = 0.0

    def round(self) -> None:
        try:
            self._tend_declarations()
            seconds = self._fire_due()
        except PassingError:
            raise
        except Exception:
            logger.exception("a round of the scheduler failed")
            seconds = TROUBLED_SECONDS
        self.sleep(min(seconds, self._longest, max(0.0, self._declare_at - monotonic())))

    # --- firing -----------------------------------------------------------------------------------------------

    def _fire_due(self) -> float:
        """Fire what is due. Returns in how many seconds to look again."""
        rows = self._connection.run(look(self._domains, n=BITE))
        rows = [row for row in rows if not self._aside or not self._is_aside(row)]
        due = [row for row in rows if row.seconds <= 0]
        if not due:
            return rows[0].seconds + ALMOST_SECONDS if rows else self._longest
        self._aside = {key: until for key, until in self._aside.items() if monotonic() < until}
        moved, until = 0, monotonic() + SLICE_SECONDS
        due.sort(key=lambda row: row.domain)
        for domain, of_domain in groupby(due, key=lambda row: row.domain):
            decided = [self._decide(row) for row in of_domain if monotonic() < until]
            moved += self._fire(domain, [item for item in decided if item is not None])
        return 0.0 if moved else TAKEN_SECONDS

    def _decide(self, row: DueRow) -> Decided | None:
        try:
            return Decided(row.name, row.version, decide(row.to_due()))
        except Exception as error:  # noqa: BLE001 - somebody wrote the row with SQL; the others must fire
            self._put_off(row.domain, row.name, row.version, error)
            return None

    def _fire(self, domain: str, decided: Sequence[Decided]) -> int:
        """Make what was decided. Returns how many schedules moved: the others were fired by somebody else."""
        if not decided:
            return 0
        try:
            moved = {item.name: item.commands for item in self._connection.run(fire(domain, decided))}
        except (CommandBusError, psycopg.Error) as error:
            if isinstance(error, PassingError) and not is_locked(error):
                raise
            if len(decided) > 1:  # one of them is to blame
                return sum(self._fire(domain, [item]) for item in decided)
            self._set_aside(domain, decided[0], error)
            return 0
        for item in decided:
            if item.name in moved:
                self._say(domain, item, moved[item.name])
        return len(moved)

    def _say(self, domain: str, item: Decided, commands: int) -> None:
        made = item.decision
        extra = {"domain": domain, "schedule": item.name}
        if made.warns or (made.note and not made.skipped and made.waiting_since is None):
            logger.warning("schedule %s/%s: %s", domain, item.name, made.note, extra=extra)
        elif made.note:
            logger.debug("schedule %s/%s: %s", domain, item.name, made.note, extra=extra)
        if commands < len(made.firings):
            logger.warning(
                "schedule %s/%s: %d of %d firings had been made before, and were not made again",
                *(domain, item.name, len(made.firings) - commands, len(made.firings)),
                extra=extra,
            )

    def _set_aside(self, domain: str, item: Decided, error: Exception) -> None:
        """If somebody's transaction holds the id of its command, this worker leaves it alone for a moment, because
        each try waits, and the others must fire. Any other error is noted in the row."""
        if isinstance(error, PassingError):
            logger.warning("schedule %s/%s waits for another transaction: %s", domain, item.name, error)
            self._aside[domain, item.name] = monotonic() + ASIDE_SECONDS
        else:
            self._put_off(domain, item.name, item.version, error)

    def _is_aside(self, row: DueRow) -> bool:
        return monotonic() < self._aside.get((row.domain, row.name), 0.0)

    def _put_off(self, domain: str, name: str, version: int, error: Exception) -> None:
        text = f"cannot be fired, the next try is in a minute: {error}"
        logger.error("schedule %s/%s %s", domain, name, text, extra={"domain": domain, "schedule": name})
        self._connection.run(put_off(domain, name, version=version, seconds=PUT_OFF_SECONDS, note=text))

    # --- what code declares -------------------------------------------------------------------------------------

    def _tend_declarations(self) -> None:
        now = monotonic()
        if now < self._declare_at:
            return
        if self._declared:
            self._connection.run(declare(self._declared))
        for found in self._connection.run(undecided(self._domains)):
            shown = f"{found.domain}/{found.name}"
            if found.is_taken:
                self._say_once(f"schedule {shown} was created at run time, so what code declares is not in effect")
                continue
            try:
                if self._connection.run(put_into_effect(found)):
                    logger.info("schedule %s is in effect as a worker declares it", shown)
            except (CommandBusError, TypeError) as error:
                self._say_once(f"schedule {shown} is declared in a way that this release does not know: {error}")
        if now >= self._forget_at:
            self._forget_at = now + FORGET_SECONDS
            self._forget(now)
        self._declare_at = monotonic() + DECLARE_SECONDS

    def _forget(self, now: float) -> None:
        """Remove what nobody declares any more. After an outage of all workers each has the grace to declare its
        own first. What one look finds counts only if the next one finds it, too: the server's clock may step."""
        if now - self._connected_at < self._grace:
            return
        found = self._connection.run(undeclared(self._domains, grace_seconds=self._grace))
        for domain, name in found & self._undeclared:
            if self._connection.run(forget(domain, name, grace_seconds=self._grace)):
                logger.info("schedule %s/%s is removed: no worker declares it any more", domain, name)
        self._undeclared = found

    def _say_once(self, text: str) -> None:
        if text not in self._said and len(self._said) < BITE:
            self._said.add(text)
            logger.warning("%s", text)
