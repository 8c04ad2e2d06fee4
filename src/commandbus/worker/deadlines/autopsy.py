"""What a stuck attempt was doing, in Python and in the database, as one JSON document.

The ladder takes it (stacks, in memory), and the lease keeper completes it (the database session, from the server).
"""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from types import FrameType
from typing import Any

from commandbus.clock import epoch
from commandbus.model import payload

MAX_FRAMES = 60
MAX_BYTES = 256 * 1024


def of_thread(ident: int) -> dict[str, Any]:
    """The stack of a thread."""
    name = next((thread.name for thread in threading.enumerate() if thread.ident == ident), "?")
    frame = sys._current_frames().get(ident)
    stacks = [] if frame is None else [{"title": f"thread {name}", "frames": _lines(frame)}]
    return {"taken_at": round(epoch(), 3), "thread": {"name": name, "ident": ident}, "stacks": stacks}


def of_task(task: asyncio.Task[Any] | None, loop_ident: int | None, *, is_blocked: bool) -> dict[str, Any]:
    """The stack of a task, and of its loop's thread if that is where it hangs."""
    if is_blocked and loop_ident:
        return of_thread(loop_ident)
    found: dict[str, Any] = {"taken_at": round(epoch(), 3), "stacks": []}
    if task is not None:
        # Read from another thread while the loop runs: a frame may move on meanwhile, so a line may be wrong.
        frames = [line for frame in awaited_frames(task.get_coro()) for line in _lines(frame, limit=1)]
        found["stacks"] = [{"title": f"task {task.get_name()}", "frames": frames}]
    return found


def awaited_frames(coroutine: Any) -> list[FrameType]:
    """The frames of a suspended coroutine and of what it awaits, innermost last."""
    frames: list[FrameType] = []
    while coroutine is not None and len(frames) < MAX_FRAMES:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
        if frame is None:
            break
        frames.append(frame)
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)
    return frames


def to_json(document: dict[str, Any]) -> str:
    """Storable text, whatever was found."""
    try:
        return payload.dump(_cleaned(document), what="autopsy", max_bytes=MAX_BYTES)
    except ValueError as error:
        return payload.dump({"taken_at": document.get("taken_at"), "left_out": str(error)[:500]}, what="autopsy")


def _cleaned(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _cleaned(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_cleaned(item) for item in value]
    return payload.clean_text(value, longest=8192) if isinstance(value, str) else value


def _lines(frame: FrameType, limit: int = MAX_FRAMES) -> list[str]:
    """Innermost last, as in a traceback."""
    return [line.rstrip() for line in traceback.format_list(traceback.extract_stack(frame, limit))]
