"""What the death of a worker, or the loss of a lease, costs the commands that ran there.

When a supervisor sees its worker die, it gives a verdict (`crash_attribution`). A loss without a verdict (kill -9
of the supervisor, the end of a whole container) names nobody. So:

    lost                         waived, and a suspect from now on: it runs isolated and alone, that is, one such
                                 command at a time per supervisor
    held by a worker that lives  waived, and no suspect: its lease ran out because the database was unreachable, or
                                 the machine stood still
    lost again while it ran so   charged. Earlier waivers stay: somebody may have killed it again from outside
    stuck, or crashed something  charged; a suspect is also charged for what was waived before. Quarantine: its
                                 next attempts run in a child process
    failed in another way        charged; it is no longer a suspect
    its chunk killed its worker  waived, and a suspect from now on. A verdict that names the chunk names many
                                 commands, so they run alone, one after the other, as after a loss

Nothing here reads a clock or a database.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from commandbus.model.outcome import Failure
from commandbus.quick_dataclass import dataclass

GRAVE: Final = frozenset({"stuck", "kill", "crash"})
"""Rungs of attempts that did not end by themselves: their slot, or the process around them, was taken away."""

FIRST_DELAY: Final = 0.1
DELAY_GROWTH: Final = 1.6
LONGEST_DELAY: Final = 4.0


@dataclass(frozen=True, slots=True)
class Marks:
    """What the row of a command says about earlier trouble.

    `suspect` is None for a command that is not a suspect. Otherwise it counts the crashes and losses that were
    waived for it. They are charged when a verdict convicts it: it is seen to get stuck, or to crash its process.
    `alone`: it was lost without a verdict, or in a chunk.
    """

    waived: int = 0
    suspect: int | None = None
    quarantine: bool = False
    alone: bool = False

    def after_loss(self, *, ran_alone: bool, unstarted: int = 0) -> Marks:
        """Its holder vanished without a verdict, and after it `unstarted` holders that never started it."""
        waived = self.waived + unstarted
        if not self.alone:
            return replace(self, waived=waived + 1, suspect=(self.suspect or 0) + 1, alone=True)
        return replace(self, waived=waived + (not ran_alone))

    def after_outage(self, times: int) -> Marks:
        """Its holder is alive but could not renew the lease: this many attempts are waived."""
        return replace(self, waived=self.waived + times)

    def after_suspicion(self, *, in_chunk: bool = False) -> Marks:
        """Its worker died, and nobody can be named: this attempt is waived."""
        alone = self.alone or in_chunk
        return replace(self, waived=self.waived + 1, suspect=(self.suspect or 0) + 1, alone=alone)

    def after_failure(self, failure: Failure) -> Marks:
        """This attempt is charged."""
        if failure.rung not in GRAVE:
            return replace(self, suspect=None, alone=False)
        return Marks(self.waived - (self.suspect or 0), None, quarantine=True)


def delay_apart(waived: int, *, spread: float = 0.5, longest: float = LONGEST_DELAY) -> float:
    """Seconds until a command that found no room to run apart can be claimed again; `spread` is from 0 to 1."""
    return min(LONGEST_DELAY, longest, FIRST_DELAY * DELAY_GROWTH ** min(waived, 10)) * (0.5 + spread)
