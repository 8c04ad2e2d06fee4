"""The ledger of a command as a bar of characters, and its legend. Nothing depends on color."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from commandbus.model.durations import format_seconds, roughly
from commandbus.model.ledger import Ledger, LedgerInterval
from commandbus.quick_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class LegendLine:
    """What a character of the bar stands for, how long that was in all, and how much of the whole."""

    mark: str
    label: str
    seconds: float
    share: float

    @property
    def text(self) -> str:
        """The line for people."""
        return f"{self.mark} {self.label}: {how_long(self.seconds)} ({self.share:.0%})"


def bar(ledger: Ledger, width: int = 60) -> str:
    """Returns a bar of so many characters; an interval that is too short for one is only in the legend."""
    if not ledger.intervals:
        return ""
    cells = _cells([item.seconds for item in ledger.intervals], width)
    return "".join(item.state.mark * count for item, count in zip(ledger.intervals, cells, strict=True))


def legend(ledger: Ledger) -> list[LegendLine]:
    """Returns one line for each kind of interval, the longest first."""
    marks = {item.label: item.state.mark for item in ledger.intervals}
    whole = ledger.seconds or 1.0
    return [LegendLine(marks[label], label, seconds, seconds / whole) for label, seconds in ledger.totals.items()]


def how_long(seconds: float) -> str:
    """A duration for people, exact if it is short: `35ms`, `12.3s`, `4m10s`, `3h5m`."""
    if seconds >= 60:
        return roughly(seconds)
    return format_seconds(round(seconds, 3 if seconds < 1 else 1))


def describe(item: LedgerInterval) -> str:
    """One interval as a phrase, for titles: "parked for limit docai, 4m10s"."""
    whose = "" if item.attempt is None else f" (attempt {item.attempt})"
    return f"{item.label}{whose}, {how_long(item.seconds)}"


def _cells(seconds: Sequence[float], width: int) -> list[int]:
    """How many characters each gets: their ends are rounded, so the sum is the width."""
    whole = sum(seconds)
    ends = [round(width * end / whole) for end in accumulate(seconds)] if whole else [width] * len(seconds)
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]
