"""Where commands stand in the lines of their keys, for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from commandbus import sql
from commandbus.flow.operation import Statement, Steps
from commandbus.model.key_limit import MOST_COUNTED, NO_KEY, next_text

LEAST_COUNTED = 1000


class Position(NamedTuple):
    """A command that waits for its turn: a row of keys/positions.sql."""

    command: int
    key_limit: str
    key: str
    before: int
    concurrency: int
    released: int
    blocked_by: str | None
    next_seconds: float | None
    run_seconds: float | None

    @property
    def seconds(self) -> float | None:
        """In about how many seconds its turn comes; None: nobody can say."""
        if self.next_seconds is None or self.run_seconds is None:
            return None
        return self.next_seconds + self.before // self.concurrency * self.run_seconds

    @property
    def text(self) -> str:
        """Why it waits, as a sentence."""
        places = f"{self.key_limit} {self.key or NO_KEY}, {self.released} of {self.concurrency} running"
        if self.blocked_by is not None:
            places += f", blocked by {self.blocked_by}, which is in the troubleshooting queue"
        before = f"{self.before:,} before it" if self.before else "it is the next one"
        return f"waits for its turn: {places}, {before}{next_text(self.next_seconds)}"


def positions(commands: Sequence[int]) -> Steps[dict[int, Position]]:
    """Those of these commands that wait for their turn, by their ids."""
    most = max(LEAST_COUNTED, MOST_COUNTED // len(commands))
    rows = yield Statement(sql.text("keys/positions"), {"commands": list(commands), "most": most})
    return {row[0]: Position(*row) for row in rows}
