"""Page: a part of a list, and where the next part begins. Every method that lists something returns one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import Generic, TypeVar

from commandbus.errors import InvalidCommandError
from commandbus.model.names import shown
from commandbus.quick_dataclass import dataclass

T = TypeVar("T")
MAX_ID = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """Items in order. If `has_more`, the same method with `cursor=page.next_cursor` returns the next page.

    A method without `limit` and `cursor` returns everything in one page. If a page `is_partial`, the search has
    looked at as many rows as one call may, and has not reached the end: even an empty page may have a next one.
    `reached_at` is how far back it has looked, if that is known.
    """

    items: list[T]
    next_cursor: str | None = None
    is_partial: bool = False
    reached_at: datetime | None = None

    @property
    def has_more(self) -> bool:
        """Is there a next page?"""
        return self.next_cursor is not None

    def __iter__(self) -> Iterator[T]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> T:
        return self.items[index]


def cut(found: Sequence[T], limit: int, cursor_of: Callable[[T], object]) -> Page[T]:
    """The page of the first `limit` that were found. One more was asked for, to know if there is a next page."""
    items = list(found[:limit])
    return Page(items, str(cursor_of(items[-1])) if len(found) > limit else None)


def id_of(cursor: object) -> int | None:
    """The internal id that a cursor stands for; None for the first page."""
    if cursor is None:
        return None
    if isinstance(cursor, str) and cursor.isascii() and cursor.isdigit() and 0 < int(cursor[:20]) <= MAX_ID:
        return int(cursor)
    raise no_cursor(cursor)


def no_cursor(cursor: object) -> InvalidCommandError:
    """The error for a cursor of another list, or for text that is no cursor."""
    return InvalidCommandError(f"cursor {shown(cursor)} is not one of this list: give page.next_cursor, or None")
