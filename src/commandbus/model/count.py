"""Count: a number that knows whether counting went to the end.

Pages count at most so many rows, whatever the table holds. What they show is then "10,000+".
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

MOST_COUNTED: Final = 10_000


class Count(int):
    """An int. If `is_capped`, there are at least so many, and its text ends with a plus sign."""

    is_capped: bool

    def __new__(cls, value: int, *, is_capped: bool = False) -> Count:
        made = super().__new__(cls, value)
        made.is_capped = is_capped
        return made

    def __str__(self) -> str:
        return f"{int(self):,}+" if self.is_capped else int.__repr__(self)

    def __format__(self, spec: str) -> str:
        return str(self) if not spec else int.__format__(self, spec)

    def __getnewargs_ex__(self) -> tuple[tuple[int], dict[str, Any]]:
        return (int(self),), {"is_capped": self.is_capped}


def capped(found: int, most: int = MOST_COUNTED) -> Count:
    """A count of something of which at most `most` + 1 were looked at."""
    return Count(min(found, most), is_capped=found > most)


def added(counts: Iterable[int]) -> Count:
    """The sum. It is capped if one of the counts is."""
    found = list(counts)
    return Count(sum(found), is_capped=any(is_capped(one) for one in found))


def is_capped(count: int) -> bool:
    """Are there perhaps more than this count says?"""
    return isinstance(count, Count) and count.is_capped
