"""A child process between its start and its first attempt, while it imports the handlers.

    importing (stacks can be dumped from now on) → log … → ready
                                                         ↘ cannot_start, with the error
    it dies, hangs up, talks nonsense or takes too much memory: it is of no use, and killed

No attempt is charged for the time and memory of the import, because none has begun yet.
"""

from __future__ import annotations

import re
from typing import Final

from commandbus.clock import monotonic
from commandbus.model import payload
from commandbus.model.crash_attribution import parse_dump
from commandbus.worker.isolation.attempt_in_child import DUMP_SECONDS, log_record
from commandbus.worker.isolation.channel import ChannelError, Message
from commandbus.worker.isolation.child_outcomes import how
from commandbus.worker.isolation.child_process import ChildProcess
from commandbus.worker.isolation.child_setup import DUMP_SIGNAL

_HANG_UP_SECONDS: Final = 0.5
_LAST_LINES: Final = 20
_FRAME: Final = re.compile(r'File "(?P<file>[^"]*)", line (?P<line>\d+)')


class StartError(Exception):
    """A process is of no use: it will never be ready. `trace` is the error's own.

    `is_exhaustion`: the machine has nothing left for it, which is no fault of the handlers that it imports.
    """

    def __init__(self, text: str, trace: object = None, *, is_exhaustion: bool = False) -> None:
        super().__init__(text)
        self.trace = trace
        self.is_exhaustion = is_exhaustion


def attend_start(process: ChildProcess, seconds: float, *, max_memory_mb: int | None = None) -> bool:
    """Listen to a process that is starting, for this time. Returns whether it is ready. One thread calls it.

    StartError if it will never be. The caller ends the process then.
    """
    if process.is_ready:
        return True
    is_dead = process.wait(seconds)
    _listen(process, to_the_end=is_dead)
    if is_dead:
        last = "\n".join(process.dump_since(process.looked_to).strip().splitlines()[-_LAST_LINES:])
        raise StartError(f"its process could not start: it {how(process.reap())}" + (f": {last}" if last else ""))
    if process.is_ready:
        return True
    if process.channel.is_at_end and not process.is_dead(_HANG_UP_SECONDS):
        raise StartError("its process could not start: it closed its connection to the worker")
    if max_memory_mb is not None and (used := process.memory_mb()) > max_memory_mb:
        raise StartError(
            f"its process could not start: it used {used:.0f} MB before it was ready, more than max_memory_mb "
            f"({max_memory_mb})"
        )
    return False


def place_of(process: ChildProcess) -> str:
    """Where a process is at this moment in its import, in brackets; nothing if it does not tell."""
    if process.importer is None:  # the signal would end it
        return ""
    before = process.mark()
    process.signal(DUMP_SIGNAL)
    process.wait_for_dump(before, monotonic() + DUMP_SECONDS)
    frames = parse_dump(process.dump_since(before)).stacks.get(process.importer, [])
    process.looked_to = process.mark()
    for frame in frames:
        found = _FRAME.match(frame)
        if found is not None and not found["file"].startswith("<"):  # the import system's own
            return payload.clean_text(f" (at {found['file']}:{found['line']})")
    return ""


def _listen(process: ChildProcess, *, to_the_end: bool) -> None:
    while True:
        try:
            messages = process.channel.receive()
            for message in messages:
                _hear(process, message)
        except (ChannelError, KeyError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
            text = f"it sent a message that makes no sense: {type(error).__name__}: {error}"
            raise StartError(f"its process could not start: {text}") from None
        if not to_the_end or process.channel.is_at_end or not messages:
            return


def _hear(process: ChildProcess, message: Message) -> None:
    match message["k"]:
        case "log":
            log_record(message, process.pid)
        case "importing":
            process.importer = int(message["thread"])
        case "ready":
            process.is_ready = True
        case "cannot_start":
            raise StartError(
                f"its process could not start: {message.get('text')}",
                message.get("trace"),
                is_exhaustion=message.get("exhausted") is True,
            )
        case kind:
            raise ChannelError(f"a message of the kind {kind!r}")
