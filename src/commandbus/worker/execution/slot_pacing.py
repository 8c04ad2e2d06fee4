"""SlotPacing: how many slots should be awake while work waits for them.

A handler that computes gains nothing from a second thread: the two pass the GIL back and forth, and everything
gets slower. A handler that waits needs every slot. Nobody tells us which kind it is. The time that a command takes
does not tell either, because a thread that waits for the GIL looks like one that waits for a server.

So it is found by trial. While work waits, the number of awake slots is halved or doubled for a moment. It stays so
if the rate confirms it: fewer slots must be about as fast, more slots must be faster. Otherwise the old number
returns, and nothing is tried for a second. If a command keeps its slot for more than a millisecond, no trial is
needed: the number is doubled at once, and again a millisecond later, until every slot is awake.

The number is kept when the work ends: a burst on an idle worker starts with as many slots as the last one needed.

It has no clock and no threads: `worker/execution/slots.py` calls it.
"""

from __future__ import annotations

from typing import Final, NamedTuple

WINDOW_SECONDS: Final = 0.02
"""How long a rate is measured."""
SOON_SECONDS: Final = 0.001
REST_SECONDS: Final = 1.0
"""How long nothing is tried after a trial that was wrong."""
FULL_SECONDS: Final = 0.25
"""How long to wait where every slot is awake and needed."""
LONG_SECONDS: Final = 0.001
SHORT_SECONDS: Final = 0.00006
"""A command that keeps its slot for less than this would gain nothing from a second one."""
AS_FAST: Final = 0.85
FASTER: Final = 1.15


class Trial(NamedTuple):
    """What there was before the number of awake slots was changed."""

    awake: int
    rate: float


class SlotPacing:
    """The level of one lane with `total` slots."""

    def __init__(self, total: int) -> None:
        self.level = 1
        self._total = total
        self._trial: Trial | None = None
        self._rests_until = 0.0
        self._goes_down = True
        self._began = 0.0
        self._finished = 0

    def begin(self, now: float, finished: int) -> float:
        """Work has begun to wait; returns after how many seconds to look."""
        self._trial = None
        self._restart(now, finished)
        return SOON_SECONDS

    def look(self, now: float, finished: int, awake: int) -> float:
        """Set the level by what was finished since; returns after how many seconds to look again."""
        window, done = now - self._began, finished - self._finished
        if window * awake > LONG_SECONDS * done:
            return self._wake_more(now, finished, awake)
        if window < WINDOW_SECONDS:
            return max(SOON_SECONDS, WINDOW_SECONDS - window)
        rate = done / window
        if self._trial is not None:
            self._judge(self._trial, now, awake, rate)
        elif now >= self._rests_until:
            self._try(awake, rate)
        self._restart(now, finished)
        return WINDOW_SECONDS

    def _wake_more(self, now: float, finished: int, awake: int) -> float:
        """Commands take long: whatever is awake is not enough."""
        self._trial = None
        self.level = min(self._total, 2 * max(awake, 1))
        self._restart(now, finished)
        return SOON_SECONDS if awake < self._total else FULL_SECONDS

    def _try(self, awake: int, rate: float) -> None:
        if awake > 1 and (self._goes_down or awake >= self._total):
            self._trial, self._goes_down = Trial(awake, rate), True
            self.level = awake // 2
        elif rate * SHORT_SECONDS < awake < self._total:
            self._trial, self._goes_down = Trial(awake, rate), False
            self.level = min(self._total, 2 * awake)

    def _judge(self, trial: Trial, now: float, awake: int, rate: float) -> None:
        self._trial = None
        if rate < trial.rate * (AS_FAST if awake < trial.awake else FASTER):
            self.level = trial.awake
            self._rests_until = now + REST_SECONDS
            self._goes_down = not self._goes_down

    def _restart(self, now: float, finished: int) -> None:
        self._began, self._finished = now, finished
