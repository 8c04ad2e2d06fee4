"""Where a running attempt is at this moment: files, lines and functions, innermost last. It is not disturbed.

The means are those of the ladder: the stack of a thread, what a task awaits, or the dump of a child process. No
source text and no values are read.
"""

from __future__ import annotations

import re
import sys
from types import FrameType
from typing import Any, Final

from commandbus.clock import epoch
from commandbus.model.crash_attribution import parse_dump
from commandbus.model.safe_text import escaped
from commandbus.worker.deadlines.autopsy import MAX_FRAMES, awaited_frames
from commandbus.worker.execution.async_slots import AsyncSlot
from commandbus.worker.execution.attempt import Attempt
from commandbus.worker.execution.slots import Slot

DUMP_SECONDS: Final = 1.0
MOST_STACKS: Final = 8
_LONGEST_NAME: Final = 500
_FRAME: Final = re.compile(r'File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')

Frame = dict[str, Any]


def take(attempt: Attempt, slot: Slot | AsyncSlot) -> dict[str, Any]:
    """Its stacks now, or what is wrong."""
    try:
        if attempt.child is not None:
            stacks = _of_child(attempt.child.sample(DUMP_SECONDS))
        elif isinstance(slot, AsyncSlot):
            stacks = _of_task(attempt, slot)
        elif slot.guest is not None:
            stacks = _of_task(attempt, slot.guest)
        else:
            stacks = _of_thread(slot.ident, "thread of the slot")
    except Exception as error:  # noqa: BLE001 - the one who asked is told
        return {"problem": escaped(f"its stack could not be taken: {type(error).__name__}: {error}")[:500]}
    if not stacks:
        return {"problem": "its stack could not be taken: it has just ended"}
    return {"taken_at": round(epoch(), 3), "stacks": stacks}


def _of_thread(ident: int | None, title: str) -> list[dict[str, Any]]:
    frame = sys._current_frames().get(ident or 0)
    if frame is None:
        return []
    frames: list[Frame] = []
    while frame is not None and len(frames) < MAX_FRAMES:
        frames.append(_frame(frame))
        frame = frame.f_back
    return [{"title": title, "frames": frames[::-1]}]


def _of_task(attempt: Attempt, slot: AsyncSlot) -> list[dict[str, Any]]:
    if slot.loop.blocker() is attempt:  # its own code runs at this moment
        return _of_thread(slot.loop.thread.ident, "thread of the event loop")
    if slot.task is None:
        return []
    frames = [_frame(frame) for frame in awaited_frames(slot.task.get_coro())]
    return [{"title": "task", "frames": frames}] if frames else []


def _frame(frame: FrameType) -> Frame:
    code = frame.f_code
    return _named(code.co_filename, frame.f_lineno or 0, getattr(code, "co_qualname", code.co_name))


def _named(file: str, line: int, function: str) -> Frame:
    return {
        "file": escaped(file)[:_LONGEST_NAME],
        "line": line,
        "function": escaped(function)[:_LONGEST_NAME],
    }


def _of_child(dump: str) -> list[dict[str, Any]]:
    """What faulthandler wrote, the thread that got the signal first: that is the main thread, as a rule."""
    found = parse_dump(dump)
    idents = sorted(found.stacks, key=lambda ident: ident != found.current)
    stacks = []
    for ident in idents[:MOST_STACKS]:
        frames = [_read(text) for text in reversed(found.stacks[ident])]
        stacks.append({"title": f"thread {ident:#x} of the child process", "frames": frames})
    return stacks


def _read(text: str) -> Frame:
    found = _FRAME.match(text)
    if found is None:
        return _named(text, 0, "?")
    return _named(found["file"], int(found["line"]), found["function"])
