"""The Claimer: claims commands for the slots, on its own connection, which also LISTENs.

Under load it claims many commands at once, so that the slots always have work. It prefetches (leases and renews)
what the slots will start within the next 40 ms (`worker/claim_pacing.py`).

When idle, it announces that it waits (senders notify only then). It looks again at once and after 5, 20 and 100
ms, because a sender may have looked before the announcement and committed after it. Then it sleeps until a
notification, the next delayed message, or the poll interval. It withdraws the announcement after a second of work.

Messages of processes have additional slots (`spare`), so that a worker whose handlers are all busy still moves
processes. While only those slots are free, it asks only domains that contain nothing but processes.

Raw messages are claimed here and read elsewhere (`worker/raw_messages.py`). While some are being read, and after a
full claim of mostly raw messages, commands are claimed separately, past the raw ones. Raw messages are then
claimed in separate portions, each after the last one has been read.

A claim whose answer is lost may have been carried out all the same. When it is connected again, the claimer gives
back what this worker holds and has not heard of. Otherwise that would wait until its lease ends.

Each priority has a band of vt and a cursor of its own (ADR 27). Claims of high and low ones are made only if there
may be some.

The cursor: a long-open transaction elsewhere keeps dead index entries, and every claim would walk over all that
were settled since. So a claim begins where the last one ended. Once a second (less often if that takes long), and
when a message may have become visible before that point, it begins at the beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

import psycopg
from psycopg import Connection

from commandbus.clock import boottime, monotonic
from commandbus.db.drivers import UnreplicatedError
from commandbus.db.service import DatabaseService
from commandbus.errors import CommandBusError
from commandbus.flow.commands.claim import (
    ANY_ROOM,
    EVERY,
    OURS,
    RAW,
    UNHANDLED,
    Claim,
    announce,
    claim,
    next_due,
    withdraw,
)
from commandbus.flow.commands.claimed_row import ClaimedRow
from commandbus.flow.commands.rescue import held_by
from commandbus.logger import safe_logger
from commandbus.model.priority import HIGH, NORMAL
from commandbus.settings import Settings
from commandbus.worker.bad_rows import ClaimedRows, OddRows
from commandbus.worker.claim_cursors import LARGEST_CLAIM, Band, DomainCursors
from commandbus.worker.claim_pacing import ClaimPacing
from commandbus.worker.dispatcher import Dispatcher
from commandbus.worker.isolation.quarantine import Quarantine
from commandbus.worker.raw_messages import Adopter
from commandbus.worker.unhandled_types import UnhandledTypes
from commandbus.worker.wait_times import WaitTimes

logger = safe_logger("commandbus.worker")

LOOKS_SECONDS = (0.0, 0.005, 0.02, 0.1)
ANNOUNCEMENT_SECONDS = 60.0
BUSY_SECONDS = 1.0
HEAR_SECONDS = 0.25
ROOM_SECONDS = 0.25  # between two looks at what says nothing when it changes, such as a pause
LOCKED_SECONDS = 1.0
UNHEARD_SECONDS = 2.0
FULL_SECONDS = 0.25
CANCEL = "cancel "
LONG_ANSWER = b"SELECT pg_catalog.repeat('x', 200000)"
"""libpq reads 16 KB at a time until it has met a longer row, and keeps the larger buffer. After every piece the
thread needs the GIL again, and the slots may keep it for milliseconds: a claim of 800 came in 17 pieces."""


class Claimer(DatabaseService):
    """One thread that claims for all domains of a worker."""

    def __init__(
        self,
        settings: Settings,
        worker: str,
        domains: Sequence[str],
        *,
        dispatcher: Dispatcher,
        quarantine: Quarantine,
        adopter: Adopter,
        unhandled: UnhandledTypes,
        waits: WaitTimes,
        on_cancel: Callable[[str, int], None],
        on_joined: Callable[[], None],
        on_idle: Callable[[], bool],
        on_answered: Callable[[datetime], None],
        on_lost: Callable[[str, list[str]], None],
        on_error: Callable[[BaseException], None],
        name: str,
    ) -> None:
        super().__init__(settings, name=name, part="claimer", on_end=on_error, goes_by_keys=True)
        self._settings = settings
        self._worker = worker
        self._domains = [DomainCursors(name_, is_routed=name_ in dispatcher.routed) for name_ in domains]
        self._dispatcher = dispatcher
        dispatcher.on_room = self.wake
        self._quarantine = quarantine
        self._adopter = adopter
        self._unhandled = unhandled
        adopter.on_read = lambda domain, seconds: self.order(lambda: self._read(domain, seconds))
        self._odd = OddRows(
            self._connection,
            worker,
            settings,
            keeps_lock_timeout=lambda: self.can_listen,
            on_lost=on_lost,
        )
        self._waits = waits
        self._on_cancel = on_cancel
        self._on_joined = on_joined
        self._on_idle = on_idle
        self._on_answered = on_answered
        self.is_ended = False  # claim nothing more: the worker drains
        self.claimed = 0
        self._looks: list[float] = []  # when to look for what was claimed and not heard of
        self._asked_at = monotonic()  # when a claim was last answered, or there was no room for one
        self._heard_at = 0.0
        self._announced_until = 0.0
        self._busy_since: float | None = None
        self._pacing = ClaimPacing()
        self._asking_seconds = 0.0  # how long all claims have taken

    def end(self) -> None:
        """Claim nothing more; the thread goes on listening for cancels."""
        self.is_ended = True
        self.wake()

    @property
    def claimless_seconds(self) -> float:
        """For how long it should have asked for work, and could not."""
        usual = min(self._settings.poll_interval, ANNOUNCEMENT_SECONDS / 2)
        return max(0.0, monotonic() - self._asked_at - usual)

    def lost(self, error: psycopg.Error) -> None:
        if error.sqlstate is not None:
            self._asked_at = monotonic()  # a refusal is an answer: another worker would get the same
        if self._connection.conn_is_lost():
            self._looks = [0.0]
            self._odd.forget_left()  # `_return_unheard` finds them

    def connected(self, conn: Connection[Any]) -> None:
        conn.execute(LONG_ANSWER, prepare=False)
        self.listen(conn, *(f"commandbus_{domain.name}" for domain in self._domains))
        for domain in self._domains:
            domain.start_over()
        self._announced_until = 0.0
        if self._looks:
            self._looks = [0.0, monotonic() + UNHEARD_SECONDS]
        self._dispatcher.note_connected()

    def round(self) -> None:
        if self._looks and monotonic() >= self._looks[0]:
            self._return_unheard()
        room = self._wait_for_room()
        if self._stopping.is_set():
            return
        if self._claim_all(room, self._dispatcher.spare()):
            self._note_work()
        else:
            self._idle()

    def _wait_for_room(self) -> int:
        while True:
            self._odd.try_again(self._put_right, LOCKED_SECONDS)
            self._pacing.observe(self._dispatcher.finished, self._dispatcher.budget.busy_seconds)
            self._dispatcher.is_claimer_waiting = True
            room = 0 if self.is_ended else self._dispatcher.room(self._pacing.prefetch)
            if room > 0 or self._stopping.is_set() or (not self.is_ended and self._dispatcher.wants_more):
                self._dispatcher.is_claimer_waiting = False
                return room
            self._asked_at = monotonic()
            if not self.is_ended and self._dispatcher.spare() > 0:
                return 0  # and still waiting for room: a slot that becomes free wakes us, or the settler
            self.sleep(ROOM_SECONDS)

    def _claim_all(self, room: int, spare: int) -> int:
        """Ask every domain, the one served last at the end. Returns how many were claimed."""
        total = 0
        began = monotonic()
        for domain in list(self._domains):
            own = spare if domain.is_routed else 0
            rows = self._dispatcher.rows(domain.name, room)
            if rows + own <= 0 or self._adopter.is_full or self.is_ended:
                continue
            got = self._claim_or_take(domain, min(rows + own, LARGEST_CLAIM), own)
            if domain.is_flooded and not self._adopter.is_busy:
                total += self._sift(domain)
            if got:
                self._domains.remove(domain)
                self._domains.append(domain)
            total += got
            spare -= min(got, own)
            room -= self._dispatcher.chunks.slots_for(domain.name, got - min(got, own))
        self._asked_at = monotonic()
        self._pacing.claimed(self._asked_at - began)
        return total

    def _claim(self, domain: DomainCursors, n: int) -> int:
        """Claim commands of high priority, then normal ones, and leave a share to low ones, which also get what
        normal ones leave. If high ones came meanwhile, they need not wait for the next round: they start before
        what was claimed in this one."""
        now = monotonic()
        sweeps = now - domain.swept_at >= domain.sweep_seconds
        if sweeps:
            domain.sweep(now)
        before = self._asking_seconds
        got = self._claim_band(domain, domain.high, n)
        share = domain.low_share(n - got)
        if got + share < n:
            got += self._claim_normal(domain, n - got - share)
            got += self._claim_band(domain, domain.high, n)
        got += self._claim_band(domain, domain.low, max(n - got, share))
        if sweeps:
            domain.note_sweep(self._asking_seconds - before - self._pacing.claim_seconds)
        return got

    def _claim_band(self, domain: DomainCursors, band: Band, n: int) -> int:
        """Claim commands of high or low priority, if there may be some."""
        if n <= 0 or not band.may_have_some:
            return 0
        claimed_at = boottime()
        found = self._ask(domain, n, band.cursor, OURS if self._is_picky(domain) else EVERY, band.number)
        band.advance(found, domain.claimed_at)
        are_first = band.number == HIGH
        if found.odd:
            self._deliver_odd(domain, found, claimed_at, are_first=are_first)
        else:
            self._pass_on(domain.name, found.ready, claimed_at, are_first=are_first)
        return len(found.ready) + len(found.odd)

    def _is_picky(self, domain: DomainCursors) -> bool:
        return domain.is_flooded or self._adopter.is_busy

    def _claim_normal(self, domain: DomainCursors, n: int) -> int:
        claimed_at = boottime()
        n = min(n * domain.slotless, LARGEST_CLAIM)
        found = self._ask(domain, n, domain.cursor, OURS if self._is_picky(domain) else EVERY)
        domain.advance(found)
        domain.note_others(found.others, found.claimed_at)
        slotted = len(found.ready)
        if found.odd:
            slotted += self._deliver_odd(domain, found, claimed_at)
        elif found.ready:
            self._pass_on(domain.name, found.ready, claimed_at)
        domain.note(found, slotted)
        return len(found.ready) + len(found.odd)

    def _claim_or_take(self, domain: DomainCursors, n: int, own: int) -> int:
        """Claim, and take commands that others parked because they had no handler. Each of the two is first in
        turn."""
        if not self._unhandled.is_due(domain.name):
            return self._claim(domain, n)
        domain.takes_first = not domain.takes_first
        taken = self._take(domain, n, own) if domain.takes_first else 0
        claimed = self._claim(domain, n - taken) if taken < n else 0
        return taken + claimed + (0 if domain.takes_first else self._take(domain, n - claimed, own))

    def _take(self, domain: DomainCursors, n: int, own: int) -> int:
        """Only for slots that are free now. A command that waits for a slot may be given back, and others would
        see it."""
        n = min(n, self._dispatcher.room(0) + own)
        if n <= 0:
            return 0
        claimed_at = boottime()
        found = self._unhandled.take(self._connection, domain.name, n)
        if found.odd:
            self._deliver_odd(domain, found, claimed_at)
        else:
            self._pass_on(domain.name, found.ready, claimed_at)
        return len(found.ready) + len(found.odd)

    def _ask(self, domain: DomainCursors, n: int, cursor: datetime | None, kind: str, band: int = NORMAL) -> Claim:
        claimed_at = boottime()
        asked = claim(
            domain=domain.name,
            worker=self._worker,
            n=n,
            lease_seconds=self._settings.visibility_timeout,
            cursor=cursor,
            kind=kind,
            band=band,
            high_cursor=domain.high.cursor,
            low_cursor=domain.low.cursor,
        )
        began = monotonic()
        try:
            found = self._connection.run(asked)
        except UnreplicatedError as error:
            why = "a failover may lose its claim"
            self._dispatcher.return_unstarted(domain.name, error.result.ready, claimed_at, why)
            raise
        finally:
            self._asking_seconds += monotonic() - began
        if found.claimed_at is not None:
            self._on_answered(found.claimed_at)
        self._waits.add(domain.name, found)
        return found

    def _return_unheard(self) -> None:
        """Give back what a claim took whose answer was lost. Its session may be at it only now: a server that was
        frozen goes on where it was. So it looks once more, a moment later."""
        lease = self._settings.visibility_timeout
        for domain in self._domains:
            held = held_by(domain.name, self._worker, running=(), past_seconds=0.0, lease_seconds=lease)
            left = self._odd.left_in(domain.name)
            rows = [row for row, _ in self._connection.run(held) if row.before is None and row.msg_id not in left]
            commands = [row for row in rows if row.id is not None]
            self._dispatcher.return_unheard(domain.name, commands, boottime() - lease)
            if not self._adopter.is_busy and (raw := [row for row in rows if row.id is None]):
                self._adopter.take(domain.name, raw, boottime() - lease)
        self._looks.pop(0)

    def _sift(self, domain: DomainCursors) -> int:
        """A bite of a flood of raw messages. Returns how many it had. The last one ends the flood."""
        claimed_at = boottime()
        found = self._ask(domain, domain.sieve, domain.raw_cursor, RAW)
        domain.raw_cursor = found.last_vt
        if found.odd:
            self._adopter.take(domain.name, found.odd, claimed_at)
        if not found.full:
            domain.end_flood()
        return len(found.odd)

    def _read(self, name: str, seconds: float) -> None:
        """Raw messages of a domain were read. Some may be commands now, and the cursor may have passed others."""
        for domain in self._domains:
            domain.start_over()
            if domain.name == name:
                domain.size_sieve(seconds)

    def _deliver_odd(
        self, domain: DomainCursors, found: Claim, claimed_at: float, *, are_first: bool = False
    ) -> int:
        """Put right what is odd, and deliver the rest with it. Returns how many odd ones need a slot now."""
        self._pass_on(
            domain.name, found.ready, claimed_at, are_first=are_first
        )  # the odd ones do not hold them up
        if raw := [row for row in found.odd if row.id is None]:
            self._adopter.take(domain.name, raw, claimed_at)
        ours = self._unhandled.marked(domain.name, [row for row in found.odd if row.id is not None])
        if not ours:
            return 0
        return self._put_right(ClaimedRows(domain.name, claimed_at, ours), monotonic() + LOCKED_SECONDS)

    def _put_right(self, claimed: ClaimedRows, until: float) -> int:
        """Deliver what may run now. Returns how many of them need a slot now."""
        try:
            room = self._quarantine.room(claimed.domain, claimed.rows)
            right, _ = self._odd.put_right(claimed, room, until=until)
            self._note_joined(claimed.rows)
            self._pass_on(claimed.domain, list(right), claimed.claimed_at)
            return sum(not row.alone for row in right)
        finally:
            self._quarantine.admitted()

    def _pass_on(
        self, domain: str, rows: list[tuple[Any, ...]], claimed_at: float, *, are_first: bool = False
    ) -> None:
        if rows:
            self.claimed += len(rows)
            if unhandled := self._dispatcher.deliver(domain, rows, claimed_at, are_first=are_first):
                marked = ClaimedRows(domain, claimed_at, self._unhandled.marked(domain, unhandled))
                self._odd.put_right(marked, ANY_ROOM, until=monotonic() + LOCKED_SECONDS)
                self._note_joined(marked.rows)

    def _note_joined(self, rows: Sequence[ClaimedRow]) -> None:
        if any(row.line is not None for row in rows):
            self._on_joined()

    def _note_work(self) -> None:
        now = monotonic()
        if now - self._heard_at > HEAR_SECONDS:
            self._heard_at = now
            self.hear()  # so a cancel is noticed under load, too
        if self._busy_since is None:
            self._busy_since = now
        elif self._announced_until and now - self._busy_since > BUSY_SECONDS:
            self._connection.run(withdraw(self._worker))
            self._announced_until = 0.0

    def _idle(self) -> None:
        """Nothing was there. Announce, look again, sleep."""
        self._busy_since = None
        self._pacing.rest()
        if self._adopter.is_full:
            self.sleep(FULL_SECONDS)  # it wakes us when it has read some
            return
        if self._unhandled.is_any_due:
            self._dispatcher.is_claimer_waiting = True  # a slot that becomes free wakes us
            if self._dispatcher.room(0) <= 0:  # none has become free since we looked
                self.sleep(FULL_SECONDS)
            return
        if monotonic() > self._announced_until - ANNOUNCEMENT_SECONDS / 2:
            self._announce()
            for pause in LOOKS_SECONDS:
                if pause and self.sleep(pause):
                    return
                if self._claim_all(self._dispatcher.room(0), self._dispatcher.spare()):
                    return
        if self._on_idle():
            for domain in self._domains:
                domain.start_over()
            return
        # At most half of the announcement's time, so that it is renewed before it expires.
        longest = min(self._settings.poll_interval, ANNOUNCEMENT_SECONDS / 2)
        due = [self._next_due(domain, longest) for domain in self._domains]
        due.append(self._odd.next_seconds)
        soonest = min((seconds for seconds in due if seconds is not None), default=longest)
        self.sleep(min(max(soonest, 0.001), longest))

    def _next_due(self, domain: DomainCursors, within_seconds: float) -> float | None:
        asked = next_due(
            domain.name,
            within_seconds=within_seconds,
            high_cursor=domain.high.cursor,
            low_cursor=domain.low.cursor,
        )
        found = self._connection.run(asked)
        domain.note_others(found.others)
        return found.seconds

    def _announce(self) -> None:
        names = [domain.name for domain in self._domains]
        self._connection.run(announce(worker=self._worker, domains=names, seconds=ANNOUNCEMENT_SECONDS))
        self._announced_until = monotonic() + ANNOUNCEMENT_SECONDS
        for domain in self._domains:
            domain.start_over()  # a sender that saw no announcement may have committed a message below the cursor

    def heard(self, channel: str, payload: str) -> None:
        for domain in self._domains:
            if channel != f"commandbus_{domain.name}":
                continue
            msg_id = payload.removeprefix(CANCEL)
            if msg_id != payload and msg_id.isascii() and msg_id.isdigit() and len(msg_id) < 20:
                self._on_cancel(domain.name, int(msg_id))
            elif payload.startswith(UNHANDLED):
                self._unhandled.add(domain.name, payload.removeprefix(UNHANDLED))
            else:
                domain.step_back(payload)

    def finish(self) -> None:
        try:
            self._odd.try_again(self._put_right, LOCKED_SECONDS, is_last=True)
            self._connection.run(withdraw(self._worker))
        except (psycopg.Error, CommandBusError) as error:
            logger.info("what this worker announced or left is left to its end: %s", error)
