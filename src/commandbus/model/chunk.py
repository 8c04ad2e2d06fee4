"""Chunks: the options of a chunk handler, and what the handler says about its commands.

A chunk handler gets a list of commands. It returns None (all have completed), a list with one outcome per command
in the same order, or a mapping from command_id to outcome. An outcome is a result (any JSON value; None is no
result), or an exception: the failure of that command.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from commandbus.errors import PermanentCommandError
from commandbus.model.durations import Duration, format_seconds, parse_seconds
from commandbus.quick_dataclass import dataclass

LARGEST_CHUNK: Final = 1000
LONGEST_WAIT: Final = 60.0
USUAL_WAIT: Final = 0.05
INVALID_OUTCOMES: Final = "INVALID_OUTCOMES"


@dataclass(frozen=True, slots=True)
class ChunkOptions:
    """The handler gets up to `size` commands at once. An incomplete chunk starts `wait` seconds after its first
    command came."""

    size: int
    wait: float = USUAL_WAIT


def check_chunk(chunk: object, chunk_wait: Duration | None) -> ChunkOptions | None:
    """Check the options `chunk` and `chunk_wait` of a handler; None if it is no chunk handler."""
    if chunk is None:
        if chunk_wait is not None:
            raise ValueError(
                f"chunk_wait={chunk_wait!r} needs chunk=…: how many commands the handler gets at most"
            )
        return None
    if not isinstance(chunk, int) or isinstance(chunk, bool):
        raise TypeError(f"chunk must be a number of commands, such as 100, not {chunk!r:.80}")
    if not 1 <= chunk <= LARGEST_CHUNK:
        raise ValueError(f"chunk must be from 1 to {LARGEST_CHUNK}, not {chunk}")
    wait = USUAL_WAIT if chunk_wait is None else parse_seconds(chunk_wait, name="chunk_wait")
    if wait > LONGEST_WAIT:
        raise ValueError(
            f"chunk_wait must be at most {format_seconds(LONGEST_WAIT)}, not {format_seconds(wait)}: the commands "
            f"are leased meanwhile, and no other worker can run them"
        )
    return ChunkOptions(chunk, wait)


def read_outcomes(returned: object, command_ids: Sequence[str]) -> list[Any]:
    """One outcome per command, in order. What cannot be read as that is a permanent error, so that no command is
    completed by mistake."""
    if returned is None:
        return [None] * len(command_ids)
    if isinstance(returned, Mapping):
        return _by_id(returned, command_ids)
    if not isinstance(returned, list | tuple):
        raise _invalid(f"returned {type(returned).__name__}", len(command_ids))
    if len(returned) != len(command_ids):
        raise _invalid(f"returned {len(returned)} outcomes", len(command_ids))
    return list(returned)


def _by_id(returned: Mapping[Any, Any], command_ids: Sequence[str]) -> list[Any]:
    found = {str(key): outcome for key, outcome in returned.items()}
    missing = [command_id for command_id in command_ids if command_id not in found]
    if missing:
        raise _invalid(f"returned no outcome for command {missing[0]!r}", len(command_ids), len(missing))
    unknown = found.keys() - set(command_ids)
    if unknown:
        raise _invalid(f"returned an outcome for {min(unknown)!r:.200}, which is none of them", len(command_ids))
    return [found[command_id] for command_id in command_ids]


def _invalid(what: str, count: int, missing: int = 1) -> PermanentCommandError:
    others = f" and {missing - 1} more" if missing > 1 else ""
    return PermanentCommandError(
        f"the chunk handler got {count} commands and {what}{others}: it must return None (all have completed), a "
        f"list with one outcome per command in their order, or a mapping from every command_id to its outcome",
        code=INVALID_OUTCOMES,
    )
