"""Chunk: several attempts of one type that one call of their handler runs.

The slot, the ladder and the board take it for one attempt: it has one start, one deadline, one stop, one
connection. Its members are attempts of their own: each has its queue row, lease, fence and outcome, and is held
and renewed by itself. A chunk is late when the lease of one of its members is, and lost when one of them is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from commandbus.clock import monotonic
from commandbus.worker.execution.attempt import Attempt


class Chunk(Attempt):
    """Two or more attempts. The numbers of its first member stand for it in texts and on the board."""

    def __init__(self, members: Sequence[Attempt]) -> None:
        self.ready_at = monotonic()  # since then it has waited for a slot
        self.keep(members)

    def keep(self, members: Sequence[Attempt]) -> None:
        """Only these are left."""
        first = members[0]
        self.members = tuple(members)
        self.domain, self.row, self.handler = first.domain, first.row, first.handler
        self.msg_id, self.read_ct, self.id = first.msg_id, first.read_ct, first.id
        self.command_type = first.command_type

    @property
    def each(self) -> tuple[Attempt, ...]:
        return self.members

    @property
    def renewed_at(self) -> float:
        """When the oldest lease was last asked for."""
        return min(member.renewed_at for member in self.members)

    @renewed_at.setter
    def renewed_at(self, value: float) -> None:
        for member in self.members:
            member.renewed_at = value

    @property
    def is_lost(self) -> bool:
        """Is the lease of a member lost? The renewal marks the member itself."""
        return any(member.is_lost for member in self.members)

    @is_lost.setter
    def is_lost(self, value: bool) -> None:
        raise AttributeError(f"a member of a chunk is lost ({value}), not the chunk: mark that one")

    @property
    def timeout(self) -> float | None:
        """The shortest of what the senders gave, if one gave any."""
        own = [member.timeout for member in self.members if member.timeout is not None]
        return min((seconds for seconds in own if seconds), default=0.0) if own else None

    @property
    def command_id(self) -> str:
        """What texts call it."""
        return f"{self.members[0].command_id} and {len(self.members) - 1} more in its chunk"

    @property
    def log_fields(self) -> dict[str, Any]:
        return self.members[0].log_fields | {"chunk": len(self.members)}
