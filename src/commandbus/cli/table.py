"""Rows as aligned text, in as many columns as the reader's terminal has.

Nothing that somebody may want to type again is ever cropped: ids, names, numbers and instants are shown whole. If
a table is too wide, these steps are tried in turn, until it fits:

1. columns of text wrap at words, then heads, too; of free text (errors, messages) three lines are shown;
2. columns that are marked as less important are left out, and the reader is told which; the more important ones
   stay, if there is room for them;
3. names and states wrap in their own column, at the ends of words;
4. ids wrap, too;
5. words break.

A table that goes to a file or a pipe has all columns, and a row is one line.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Sequence

from commandbus.quick_dataclass import dataclass

GAP = "  "
TEXT_WIDTH = 24  # a column of text is never narrower
NAME_WIDTH = 8  # any other column is never narrower
MOST_LINES = 3
ELLIPSIS = "…"
KINDS = ":=+~"
BREAKS = " _-/,"  # a line may end after these


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: its head, and what may be done to it if room is short.

    `rank` says how early it is left out: 0 is never, and a higher rank is left out before a lower one.
    """

    head: str
    kind: str = ""
    rank: int = 0

    @property
    def is_number(self) -> bool:
        """Is it a column of numbers? They are aligned to the right, and never wrap."""
        return self.kind == ":"

    @property
    def is_text(self) -> bool:
        """Is it a column of text? Text wraps before anything else does."""
        return self.kind in ("~", "+")

    @property
    def is_id(self) -> bool:
        """Is it a column of ids? An id wraps only if nothing else helps."""
        return self.kind == "="

    @property
    def most_lines(self) -> int | None:
        """How many lines of a cell are shown; None: all."""
        return MOST_LINES if self.kind == "~" else None


def columns(text: str) -> list[Column]:
    """Columns from their heads, each with its mark: `":# =command_id type sent?? ~error?"`.

    `:` numbers, `=` ids, `+` text, `~` free text, of which a few lines are enough; without a mark: names and
    states. A column whose mark ends in `?` may be left out if room is short; the more question marks, the earlier.
    """
    return [_column(word) for word in text.split()]


def _column(word: str) -> Column:
    name = word.rstrip("?")
    kind = name[0] if name[0] in KINDS else ""
    return Column(name.removeprefix(kind).replace("_", " "), kind, len(word) - len(name))


def lay_out(
    heads: Sequence[Column], rows: Sequence[Sequence[str]], room: int | None
) -> tuple[list[str], list[str]]:
    """The lines of a table, its heads first, in `room` columns; and the heads that were left out."""
    titles = [column.head.upper() for column in heads]
    widths = _widths(heads, [titles, *rows])
    if room is not None and _total(widths) > room:
        longest_words = [max(title.split(), key=len) for title in titles]
        words = [[_longest_word(cell) for cell in row] for row in rows]
        least = [max(width, NAME_WIDTH) for width in _widths(heads, [longest_words, *words])]
        widths = _fit(heads, widths, _widths(heads, [longest_words, *rows]), least, room)
    lines = [text for row in (titles, *rows) for text in _row(heads, row, widths)]
    return lines, [title for title, width in zip(titles, widths, strict=True) if not width]


def fitted(parts: Sequence[str], room: int, *, gap: str = GAP) -> str:
    """As many parts of a line as there is room for. A part is left out as a whole, never cut."""
    for count in range(len(parts), 0, -1):
        line = gap.join(parts[:count])
        if width_of(line) <= room:
            marked = line if count == len(parts) else f"{line}{gap}{ELLIPSIS}"
            return marked if width_of(marked) <= room else line
    return ELLIPSIS


def width_of(text: str) -> int:
    """How many columns of a terminal a text takes."""
    return len(text) if text.isascii() else sum(map(_width_of_char, text))


def _width_of_char(char: str) -> int:
    return 0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1


def _widths(heads: Sequence[Column], lines: Sequence[Sequence[str]]) -> list[int]:
    return [max(width_of(line[index]) for line in lines) for index in range(len(heads))]


def _total(widths: Sequence[int]) -> int:
    shown = [width for width in widths if width]
    return sum(shown) + len(GAP) * (len(shown) - 1)


def _longest_word(text: str) -> str:
    """The longest part of a text in which a line can only end by breaking a word."""
    for mark in BREAKS.strip():
        text = text.replace(mark, f"{mark} ")
    return max(text.split(), key=width_of, default="")


def _fit(heads: Sequence[Column], natural: list[int], narrow: list[int], words: list[int], room: int) -> list[int]:
    """A width for each column, 0 if the column is left out. `narrow` are the widths if heads wrap, `words` those
    if every line has one word."""
    texts = [index for index, column in enumerate(heads) if column.is_text]
    names = [index for index, column in enumerate(heads) if not column.is_number]
    others = [index for index in names if not heads[index].is_id]
    ids = [index for index in names if heads[index].is_id]
    wide, least = [TEXT_WIDTH] * len(heads), [NAME_WIDTH] * len(heads)
    if _total(widths := _shrunk(natural, texts, wide, room)) <= room:
        return widths
    kept = [0 if column.rank else width for column, width in zip(heads, narrow, strict=True)]
    for index in sorted(range(len(heads)), key=lambda i: heads[i].rank):
        wider = [*kept[:index], narrow[index], *kept[index + 1 :]]
        if _total(_shrunk(wider, texts, wide, room)) <= room:
            kept = wider
    for which, floor in ((texts, wide), (others, words), (ids, wide), (others, least), (names, least)):
        kept = _shrunk(kept, which, floor, room)
    return kept


def _shrunk(widths: Sequence[int], which: Iterable[int], least: Sequence[int], room: int) -> list[int]:
    """The widths after making these columns narrower, the widest first, until all fit or have their least
    width."""
    found = list(widths)
    excess = _total(found) - room
    while excess > 0 and (wider := [index for index in which if found[index] > least[index]]):
        found[max(wider, key=lambda index: found[index])] -= 1
        excess -= 1
    return found


def _row(heads: Sequence[Column], cells: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
    """The lines of one row: each cell wraps within its own column."""
    shown = [
        (column, width, _wrapped(cell, width, column.most_lines))
        for column, cell, width in zip(heads, cells, widths, strict=True)
        if width
    ]
    for number in range(max(len(pieces) for _, _, pieces in shown)):
        padded = []
        for column, width, pieces in shown:
            piece = pieces[number] if number < len(pieces) else ""
            space = " " * (width - width_of(piece))
            padded.append(space + piece if column.is_number else piece + space)
        yield GAP.join(padded).rstrip()


def _wrapped(text: str, width: int, most: int | None) -> list[str]:
    """A text in lines of this width, broken between words where possible; at most `most` lines."""
    if width_of(text) <= width:
        return [text]
    pieces: list[str] = []
    while text:
        if most is not None and len(pieces) == most - 1 and width_of(text) > width:
            return [*pieces, text[: _end(text, width - 1)] + ELLIPSIS]
        end = _end(text, width)
        if end < len(text):
            end = max(text.rfind(mark, 0, end + (mark == " ")) for mark in BREAKS) + 1 or end
        pieces.append(text[:end].rstrip(" "))
        text = text[end:]
    return pieces


def _end(text: str, width: int) -> int:
    """How many characters of the text fit; at least one."""
    used = 0
    for index, char in enumerate(text):
        used += _width_of_char(char)
        if used > width:
            return max(index, 1)
    return len(text)
