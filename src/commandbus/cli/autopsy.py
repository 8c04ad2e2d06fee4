"""Prints an autopsy: what was seen of an attempt when it was stopped.

It is JSON that a worker or a supervisor wrote: stacks of Python threads, what the attempt's database session did
and which session blocked it, how a process ended. Any part may be missing, and its text comes from outside. So
nothing here relies on its shape, and every line is made printable.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from commandbus.cli.render import age, moment, printable, printable_lines

# Code that the user did not write: this package (except its demo), the standard library, installed packages.
_OURS = re.compile(
    r"/commandbus/(?:bus|db|embedded|flow|limits|processes|supervisor|testing|troubleshooting|worker)\b"
)
_FOREIGN = re.compile(rf"<frozen |/site-packages/|/dist-packages/|/lib/python\d|{_OURS.pattern}")
# A frame, as a traceback prints it (`line 5, in f`) or as faulthandler prints it (`line 5 in f`).
_FRAME = re.compile(r'File "(?P<path>[^"]*)", line (?P<line>\d+)(?:,? in (?P<name>\S+))?')
_DUMPED_THREAD = re.compile(r"(?:Current thread|Thread) 0x[0-9a-fA-F]+\b")
_CURRENT = "(current)"
_IDLE = ("Client", "Activity")


def headline(autopsy: Any) -> str:
    """Where the attempt hung, in one line: the handler's own frame, what its session waited for, how its process
    ended."""
    found = _object(autopsy)
    return "; ".join(filter(None, (_place(found), _wait(_object(found.get("session"))), _end(found))))


def lines(autopsy: Any) -> Iterator[str]:
    """The whole autopsy, line by line."""
    found = _object(autopsy)
    if isinstance(found.get("taken_at"), int | float):
        yield f"taken at {_instant(found['taken_at'])}"
    if found.get("worker"):
        yield from printable_lines(str(found["worker"]))
    if isinstance(found.get("cpu_seconds"), int | float):
        yield f"CPU time of its thread meanwhile: {age(found['cpu_seconds'])}"
    stacks = [_object(stack) for stack in _array(found.get("stacks"))]
    thread = _object(found.get("thread"))
    if thread and not stacks:
        yield f"thread {printable(thread.get('name', '?'))}"
    for stack in stacks:
        yield f"stack of {printable(stack.get('title', 'a thread'))}"
        for frame in _array(stack.get("frames")):
            yield from (f"  {line}" for line in printable_lines(str(frame)))
    yield from _database_session(_object(found.get("session")))
    if end := _end(found):
        yield f"process: {end}"
        dump = str(_object(found["process"]).get("dump") or "")
        yield from (f"  {line}" for line in printable_lines(_without_stacks(dump) if stacks else dump))
    if found.get("left_out"):
        yield f"left out: {printable(found['left_out'])}"


def _without_stacks(dump: str) -> str:
    """The rest of a dump without the stacks of its threads, which are printed already."""
    kept = []
    in_stack = False
    for line in dump.splitlines():
        in_stack = bool(_DUMPED_THREAD.match(line)) or (in_stack and line.startswith(" "))
        if line.strip() and not in_stack:
            kept.append(line)
    return "\n".join(kept)


def _database_session(session: dict[str, Any]) -> Iterator[str]:
    if not session:
        return
    parts = [f"database session {printable(session.get('pid', '?'))}"]
    if session.get("state"):
        parts.append(printable(session["state"]))
    if isinstance(session.get("xact_seconds"), int | float):
        parts.append(f"in a transaction for {age(session['xact_seconds'])}")
    if session.get("wait_event_type") or session.get("wait_event"):
        parts.append(f"waiting for {_event(session)}")
    yield ", ".join(parts)
    if session.get("query"):
        yield from _query(session["query"])
    for blocker in map(_object, _array(session.get("blocked_by"))):
        yield f"  blocked by {_blocker(blocker)}"
        if blocker.get("query"):
            yield from (f"  {line}" for line in _query(blocker["query"]))


def _query(query: object) -> Iterator[str]:
    first, *rest = printable_lines(str(query)) or [""]
    yield f"  query: {first}"
    yield from (f"         {line}" for line in rest)


def _place(found: dict[str, Any]) -> str:
    """The innermost frame of the user's own code, or else the innermost frame. Threads that run our code do not
    count.

    The dump of a child process has all its threads. The interrupted thread, which runs the handler, comes first.
    """
    stacks = [_object(stack) for stack in _array(found.get("stacks"))]
    stacks.sort(key=lambda stack: _CURRENT not in str(stack.get("title")))
    for stack in stacks:
        frames = [frame for frame in map(str, _array(stack.get("frames"))) if _FRAME.search(frame)]
        own = [frame for frame in frames if not _FOREIGN.search(frame)]
        if own or (frames and not _OURS.search(frames[-1])):
            return _short(_FRAME.search((own or frames)[-1]))
    return ""


def _short(frame: re.Match[str] | None) -> str:
    if frame is None:
        return ""
    where = f"{frame['path'].rpartition('/')[2]}:{frame['line']}"
    return f"{where} in {frame['name']}" if frame["name"] else where


def _wait(session: dict[str, Any]) -> str:
    blockers = [_blocker(blocker) for blocker in map(_object, _array(session.get("blocked_by")))]
    is_waiting = session.get("wait_event") and session.get("wait_event_type") not in _IDLE
    if not blockers and not is_waiting:
        return ""
    text = f"its database session waits for {_event(session)}" if is_waiting else "its database session waits"
    return f"{text}, blocked by {', '.join(blockers)}" if blockers else text


def _event(session: dict[str, Any]) -> str:
    return " ".join(
        printable(session[name]) for name in ("wait_event_type", "wait_event") if session.get(name) is not None
    )


def _blocker(blocker: dict[str, Any]) -> str:
    name = blocker.get("application_name")
    return f"pid {printable(blocker.get('pid', '?'))}" + (f" ({printable(name)})" if name else "")


def _end(found: dict[str, Any]) -> str:
    process = _object(found.get("process"))
    if process.get("signal") is not None:
        return printable(process["signal"])
    return f"exit code {printable(process['exit_code'])}" if process.get("exit_code") is not None else ""


def _instant(epoch: float) -> str:
    try:
        return moment(datetime.fromtimestamp(epoch, UTC))
    except (OverflowError, OSError, ValueError):
        return printable(epoch)


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _array(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
