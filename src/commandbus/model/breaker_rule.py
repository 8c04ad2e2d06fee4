"""When a command type is in trouble: many of its attempts, of several commands, end badly, and few end well.

If a few commands hang among many that end well, these commands are in trouble, and their type is not. So three
things must be true of the attempts that ended badly within the window, or of those among them that began last:

- there are at least `stuck` of them (or `failures`)
- they belong to at least three different commands
- they are at least half of all attempts of the type that ended in the fleet since the first of them *began*

The start counts, not the end: a stuck attempt ends long after the good attempts that ran at the same time.

Pure. The breaker's row has the bad attempts; each worker counts the other attempts (`AttemptCounts`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from commandbus.model.breaker import Breaker
from commandbus.model.counting import counted

LEAST_COMMANDS: Final = 3
MOST_MOMENTS: Final = 50
LEAST_KEPT: Final = 100


class BadAttempt(NamedTuple):
    """An attempt that ended badly. `began` and `ended` are epoch seconds of the server's clock."""

    command: int
    is_stuck: bool
    began: float
    ended: float


class AttemptCounts(NamedTuple):
    """What one worker has counted: how many attempts ended without being stuck since each of these moments.

    The moments ascend. None means "more than this worker remembers". `told_at` is when the last attempt ended that
    the worker knew to be bad. So a reader can tell whether these counts are older than what the breaker knows.
    """

    told_at: float
    since: Sequence[float]
    others: Sequence[int | None]

    def after(self, moment: float) -> float | None:
        """How many ended since this moment, at most; None if these counts begin later."""
        known = [count for since, count in zip(self.since, self.others, strict=True) if since <= moment]
        return None if not known else math.inf if known[-1] is None else known[-1]

    def to_json(self) -> dict[str, Any]:
        """As it is stored with the worker."""
        return {"told_at": self.told_at, "since": list(self.since), "others": list(self.others)}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> AttemptCounts:
        """As it was stored."""
        return cls(found["told_at"], found["since"], found["others"])


class Trouble(NamedTuple):
    """How many attempts were stuck (or failed), of how many commands, of how many that ended since a moment."""

    how: str
    bad: int
    commands: int
    ended: int
    since: float

    def text(self, clock: str) -> str:
        """In words; `clock` is `since` as people read it."""
        commands = counted(self.commands, "command")
        return f"{self.bad} of {counted(self.ended, 'attempt')} {self.how} since {clock} ({commands})"


def kept(rule: Breaker, bad: Sequence[BadAttempt], now: float) -> list[BadAttempt]:
    """The bad attempts within the window, ordered by their ends, and no more than a row should hold."""
    recent = sorted((item for item in bad if item.ended > now - rule.window_seconds), key=lambda item: item.ended)
    stuck = [item for item in recent if item.is_stuck][-max(LEAST_KEPT, 4 * rule.stuck) :]
    failed = [item for item in recent if not item.is_stuck][-max(LEAST_KEPT, 4 * rule.failures) :]
    return sorted(stuck + failed, key=lambda item: item.ended)


def moments(bad: Sequence[BadAttempt]) -> list[float]:
    """The moments since which workers count: the starts of bad attempts; if there are very many, some of them."""
    began = sorted({item.began for item in bad})
    step = max(1, math.ceil(len(began) / MOST_MOMENTS))
    return began[::-1][::step][::-1]  # the last one is among them


def find_trouble(
    rule: Breaker, bad: Sequence[BadAttempt], others: Callable[[float], float] = lambda _: 0.0
) -> Trouble | None:
    """Returns the trouble of the type. `others` says how many attempts ended without being stuck since a moment.

    Without `others`, it is the trouble if nothing else ended.
    """
    for how, enough in (("stuck", rule.stuck), ("failed", rule.failures)):
        counting = [item for item in bad if item.is_stuck or how == "failed"]
        for since in reversed(moments(counting)) if enough else ():
            found = _since(how, counting, since, others)
            if found.bad >= enough and found.commands >= min(LEAST_COMMANDS, enough) and _is_half(found):
                return found
    return None


def _since(how: str, bad: Sequence[BadAttempt], since: float, others: Callable[[float], float]) -> Trouble:
    some = [item for item in bad if item.began >= since]
    ended = others(since) + sum(item.is_stuck for item in some)
    return Trouble(
        how,
        len(some),
        len({item.command for item in some}),
        # A failure is told before its worker's count includes it.
        len(some) if ended < len(some) else 2 * len(some) + 1 if math.isinf(ended) else int(ended),
        since,
    )


def _is_half(found: Trouble) -> bool:
    return 2 * found.bad >= found.ended
