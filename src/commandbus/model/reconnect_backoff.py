"""Backoff: a pause that doubles every time, from the first to the longest. Everything of ours that tries again and
again, and counts for itself how often, waits like this."""

from __future__ import annotations


class Backoff:
    """One row of tries. `seconds` is the pause that was taken last; 0 before the first."""

    __slots__ = ("_first", "_longest", "seconds")

    def __init__(self, first: float, longest: float) -> None:
        self._first = first
        self._longest = longest
        self.seconds = 0.0

    def next(self) -> float:
        """The next pause, in seconds."""
        self.seconds = min(2 * self.seconds or self._first, self._longest)
        return self.seconds

    def reset(self) -> None:
        """It went well: the next pause is the first one again."""
        self.seconds = 0.0
