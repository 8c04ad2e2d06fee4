"""Where the claims of each domain begin, and which of its priorities they ask for.

Used by the claimer's thread only.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from commandbus.flow.commands.claim import EARLY, LATE, MILLENNIUM, Claim
from commandbus.model.priority import HIGH, LOW

LARGEST_CLAIM = 1000
SWEEP_SECONDS = 1.0
SWEEP_SHARE = 0.05
"""So much of its time may a claimer spend on claims that begin at the beginning."""
LARGEST_SIEVE = 500
SMALLEST_SIEVE = 20
SIEVE_SECONDS = 0.25
SLOTLESS_FACTOR = 4
MARGIN = timedelta(milliseconds=5)
MILLENNIUM_SECONDS = MILLENNIUM.total_seconds()
HIGH_IS_DUE, LOW_IS_DUE = 1, 2
LOW_SHARE = 0.1
"""So much of the room do commands of low priority get while normal ones wait."""


class Band:
    """The commands of high or low priority in a domain: where the next claim of them begins, and whether it may
    find any. A claim of normal ones says so, a notification, and a look once a second."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.cursor: datetime | None = None
        self.may_have_some = True

    def start_over(self) -> None:
        """Look from the beginning."""
        self.cursor, self.may_have_some = None, True

    def rewind(self) -> None:
        """Look from the beginning, if there is something at all: a claim of normal ones will say so."""
        self.cursor = None

    def note(self, *, is_due: bool, at: datetime | None) -> None:
        """Something is due, or nothing was at that moment. Then nobody needs to look at what was before."""
        if is_due:
            self.may_have_some = True
        elif at is not None and self.cursor is None and not self.may_have_some:
            self.cursor = at - MARGIN

    def advance(self, found: Claim, before: datetime | None) -> None:
        """Begin the next claim where this one ended. If it found nothing, its own time is unknown, but that of an
        earlier claim of the domain (`before`) is not. Without it every look at this band would begin at the
        beginning, and walk over what an open transaction keeps."""
        known = self.cursor
        if before is not None:
            known = max(known or EARLY, before - MARGIN)
        self.cursor = _end_of(found, known)
        self.may_have_some = found.full

    def step_back(self, due: datetime) -> None:
        """A notification speaks of a message that was due then."""
        self.may_have_some = True
        if self.cursor is not None and due < self.cursor:
            self.cursor = due


class DomainCursors:
    """A domain's cursors."""

    def __init__(self, name: str, *, is_routed: bool) -> None:
        self.name = name
        self.is_routed = is_routed
        self.takes_first = False  # does `_take` come first in this round?
        self.cursor: datetime | None = None
        self.high, self.low = Band(HIGH), Band(LOW)
        self.claimed_at: datetime | None = (
            None  # the server's time of the last claim of normal ones that found some
        )
        self.low_credit = 0.0  # the part of their share that low ones have not had yet
        self.swept_at = 0.0
        self.sweep_seconds = SWEEP_SECONDS
        self.is_flooded = False
        self.slotless = 1  # claim this many times more: these commands need no slot
        self.raw_cursor: datetime | None = None
        self.sieve = LARGEST_CLAIM

    def start_over(self) -> None:
        """Begin the next claims at the beginning."""
        self.cursor = None
        self.high.start_over()
        self.low.start_over()

    def sweep(self, now: float) -> None:
        """Begin at the beginning, as once a second. The claim of normal ones says whether other priorities have
        something, and so does the look at what is due next: an idle claimer does not ask for each of them."""
        self.cursor, self.swept_at = None, now
        self.high.rewind()
        self.low.rewind()

    def note_others(self, due: int, at: datetime | None = None) -> None:
        """What is due of high or low priority; at this moment of the server, if it is known."""
        self.high.note(is_due=bool(due & HIGH_IS_DUE), at=at)
        self.low.note(is_due=bool(due & LOW_IS_DUE), at=at)

    def low_share(self, n: int) -> int:
        """How many of n commands may be of low priority while others wait: a tenth, over several claims."""
        if not self.low.may_have_some:
            self.low_credit = 0.0
            return 0
        self.low_credit += n * LOW_SHARE
        share = min(int(self.low_credit), n)
        self.low_credit -= share
        return share

    def note(self, found: Claim, slotted: int) -> None:
        """Is it a flood: of raw messages, of messages that only say that they are ours, or of suspects? So many of
        them have gone to slots."""
        raw = sum(row.id is None for row in found.odd)
        count = len(found.ready) + len(found.odd)
        suspects = sum(row.id is not None and bool(row.alone or row.before) for row in found.odd)
        is_slotless = found.full and raw + suspects == count and not slotted
        self.slotless = min(self.slotless * SLOTLESS_FACTOR, LARGEST_CLAIM) if is_slotless else 1
        if found.full and 2 * raw >= count and not self.is_flooded:
            self.is_flooded, self.raw_cursor = True, None

    def note_sweep(self, longer: float) -> None:
        """To begin at the beginning took so much longer than a claim: over a flood, or over what an open
        transaction keeps, it is a long walk. A walk of more than 50 ms is made less often."""
        self.sweep_seconds = max(SWEEP_SECONDS, longer / SWEEP_SHARE)

    def end_flood(self) -> None:
        """Its last message was claimed."""
        self.is_flooded, self.sweep_seconds = False, SWEEP_SECONDS
        self.start_over()

    def size_sieve(self, seconds: float) -> None:
        """Choose the size of the next bite of a flood by how long the last one took."""
        if seconds > SIEVE_SECONDS:
            self.sieve = max(SMALLEST_SIEVE, self.sieve // 2)
        elif seconds < SIEVE_SECONDS / 2:
            self.sieve = min(LARGEST_SIEVE, self.sieve * 2)

    def advance(self, found: Claim) -> None:
        """Begin the next claim where this one ended: at the last vt of a full one, else at its own time.

        A sender's vt is taken a moment before its commit. The margin leaves room for such messages.
        """
        self.cursor = _end_of(found, self.cursor)
        self.claimed_at = found.claimed_at or self.claimed_at

    def step_back(self, payload: str) -> None:
        """A notification speaks of a message that may be older than the cursor: its vt, or 0 for "anywhere"."""
        try:
            seconds = float(payload)
        except ValueError:
            seconds = 0.0
        if 0 < seconds < LATE.timestamp():
            vt = datetime.fromtimestamp(seconds, UTC) - MARGIN
            self.cursor = None if self.cursor is None else min(vt, self.cursor)
        elif -MILLENNIUM_SECONDS < seconds < EARLY.timestamp():
            self.high.step_back(datetime.fromtimestamp(seconds + MILLENNIUM_SECONDS, UTC) - MARGIN)
        elif LATE.timestamp() <= seconds < LATE.timestamp() + MILLENNIUM_SECONDS:
            self.low.step_back(datetime.fromtimestamp(seconds - MILLENNIUM_SECONDS, UTC) - MARGIN)
        else:
            self.start_over()


def _end_of(found: Claim, cursor: datetime | None) -> datetime | None:
    """Where the next claim begins."""
    if found.claimed_at is None:
        return cursor
    return found.last_vt if found.full and found.last_vt is not None else found.claimed_at - MARGIN
