"""A worker process died: which of the attempts that ran in it caused that?

    CULPRIT     it is charged and counts as a failure: ExecutionStuck if it froze the worker, else WorkerLost
    BYSTANDER   another attempt did it: waived
    SUSPECT     nobody can be named: waived, and its next attempt runs in a child process of its own, where the
                next crash convicts exactly one

Evidence, in this order: the thread that the dump of a crash names, or that took nearly all CPU time of a frozen
worker; then which attempts could have done it at all. A death from outside (a SIGKILL by somebody, a SIGSTOP, the
memory of all attempts together) convicts nobody, except a suspect that was alone again. An isolated attempt cannot
have killed its worker from inside. Nothing here reads a clock, a process or a database.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import field
from enum import StrEnum
from typing import Final, Generic, TypeVar

from commandbus.model import payload
from commandbus.model.outcome import Failure
from commandbus.quick_dataclass import dataclass

K = TypeVar("K", bound=Hashable)

CRASHES: Final = frozenset({signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL})
DOMINANT_SHARE: Final = 0.7
LEAST_CPU_SECONDS: Final = 0.05
_FRAMES_KEPT: Final = 60
_IN_ITS_THREAD: Final = " in this attempt's thread"


class Cause(StrEnum):
    """Why a worker process is dead."""

    FROZEN = "frozen"  # its heartbeat stopped, and its supervisor killed it
    SIGNALED = "signaled"
    EXITED = "exited"
    OVER_MEMORY = "over memory"  # its supervisor killed it
    NONSENSE = "nonsense"  # its board or its messages made no sense, and its supervisor killed it
    STOPPED = "stopped"  # its supervisor stopped it, or it failed by itself: no attempt caused it


class Role(StrEnum):
    """What an attempt had to do with the death."""

    CULPRIT = "culprit"
    BYSTANDER = "bystander"
    SUSPECT = "suspect"


@dataclass(frozen=True, slots=True)
class Dump:
    """What faulthandler wrote: the thread in which it happened, and every thread's stack, innermost first."""

    current: int | None = None
    stacks: Mapping[int, list[str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Death:
    """What is known of a worker's end. `cpu_seconds`, by native thread id, were used while it was frozen."""

    cause: Cause
    reason: str = ""
    signal: int | None = None
    exit_code: int | None = None
    was_stopped: bool = False  # by SIGSTOP or a debugger, when it was frozen
    silent_seconds: float = 0.0
    cpu_seconds: Mapping[int, float] = field(default_factory=dict)
    dump: Dump = field(default_factory=Dump)
    gone: frozenset[tuple[int, int]] = frozenset()  # (ident, native id) of threads that were replaced as stuck

    @property
    def sentence(self) -> str:
        """How it died, after "the worker process"."""
        match self.cause:
            case Cause.FROZEN:
                how = "was stopped from outside" if self.was_stopped else "froze"
                return f"{how}: no heartbeat for {self.silent_seconds:.1f} s, so it was killed"
            case Cause.SIGNALED:
                hint = " (sent by somebody, or by the kernel when memory runs out)"
                return f"died of {signal_name(self.signal)}" + (hint if self.signal == signal.SIGKILL else "")
            case Cause.EXITED:
                return f"ended with exit code {self.exit_code}"
            case Cause.OVER_MEMORY | Cause.NONSENSE:
                return f"was killed: {self.reason}"
            case Cause.STOPPED:
                return f"was stopped: {self.reason}"


@dataclass(frozen=True, slots=True)
class Running(Generic[K]):
    """An attempt that ran when it died. `ran_for` are seconds; `is_isolated`: in a process of its own."""

    key: K
    ident: int
    native_id: int
    ran_for: float = 0.0
    is_suspect: bool = False
    is_isolated: bool = False


@dataclass(frozen=True, slots=True)
class Finding:
    """An attempt's role, and the text that is recorded. `evidence` is the part about this attempt."""

    role: Role
    failure: Failure
    evidence: str = ""


def examine(death: Death, running: Sequence[Running[K]]) -> dict[K, Finding]:
    """The finding for every attempt that ran."""
    roles = decide(death, running)
    return {attempt.key: _finding(death, attempt, roles) for attempt in running}


def decide(death: Death, running: Sequence[Running[K]]) -> dict[K, Role]:
    """Who did it."""
    if death.cause is Cause.STOPPED:
        return {attempt.key: Role.BYSTANDER for attempt in running}
    named = _named(death)
    if named is not None:
        there = [attempt for attempt in running if named in (attempt.ident, attempt.native_id)]
        if there:
            return _roles(running, there)
        if any(named in thread for thread in death.gone):
            return {attempt.key: Role.BYSTANDER for attempt in running}
    inside = [attempt for attempt in running if not attempt.is_isolated] or list(running)
    if _is_from_outside(death) and not (len(running) == 1 and running[0].is_suspect):
        return {attempt.key: Role.SUSPECT if attempt in inside else Role.BYSTANDER for attempt in running}
    return _roles(running, inside)


def parse_dump(text: str) -> Dump:
    """What faulthandler wrote; of several dumps the last one's thread counts, as an abort follows its cause."""
    current: int | None = None
    stacks: dict[int, list[str]] = {}
    stack: list[str] | None = None
    for line in text.splitlines():
        if found := _THREAD.match(line):
            ident = int(found["ident"], 16)
            stack = stacks[ident] = []
            if found["current"]:
                current = ident
        elif stack is not None and (frame := _FRAME.match(line)):
            if len(stack) < _FRAMES_KEPT:
                stack.append(frame["frame"])
        elif line.strip() and not line.startswith(" "):
            stack = None
    return Dump(current, stacks)


def is_whole_dump(data: bytes) -> bool:
    """Has faulthandler written all stacks of a program that was started with `python -m`?

    The first thread comes last, and its outermost frame is that of `-m`. Of a deep stack only a part is written,
    which ends with three dots. The stack of another thread may end so, too: a caller waits until no more comes.
    """
    return _LAST_FRAME.search(data) is not None or data.rstrip().endswith(b"\n  ...")


_LAST_FRAME = re.compile(rb" in _run_module_as_main\n")
_THREAD = re.compile(r"(?:(?P<current>Current thread)|Thread) 0x(?P<ident>[0-9a-fA-F]{1,16})\b")
_FRAME = re.compile(r"  (?P<frame>File .*)")


def signal_name(number: int | None) -> str:
    """SIGSEGV for 11."""
    try:
        return signal.Signals(number or 0).name
    except ValueError:
        return f"signal {number}"


def _named(death: Death) -> int | None:
    """The thread (ident or native id) that the evidence points at."""
    if death.cause is Cause.SIGNALED and death.signal in CRASHES:
        return death.dump.current
    if death.cause is Cause.FROZEN and not death.was_stopped and death.cpu_seconds:
        total = sum(death.cpu_seconds.values())
        thread, most = max(death.cpu_seconds.items(), key=lambda item: item[1])
        if most >= LEAST_CPU_SECONDS and most >= DOMINANT_SHARE * total:
            return thread
    return None


def _is_from_outside(death: Death) -> bool:
    match death.cause:
        case Cause.FROZEN:
            return death.was_stopped
        case Cause.SIGNALED:
            return death.signal not in CRASHES
        case _:
            return death.cause is Cause.OVER_MEMORY


def _roles(running: Sequence[Running[K]], candidates: Sequence[Running[K]]) -> dict[K, Role]:
    """A single candidate is convicted, several are suspects, the others are bystanders."""
    role = Role.CULPRIT if len(candidates) == 1 else Role.SUSPECT
    return {attempt.key: role if attempt in candidates else Role.BYSTANDER for attempt in running}


def _finding(death: Death, attempt: Running[K], roles: Mapping[K, Role]) -> Finding:
    role, part = roles[attempt.key], _part(death, attempt, roles)
    evidence = "it happened in this attempt's thread" if part == _IN_ITS_THREAD else part.lstrip("; ")
    return Finding(role, _failure(death, attempt, role, part), evidence)


def _failure(death: Death, attempt: Running[K], role: Role, part: str) -> Failure:
    is_stuck = role is Role.CULPRIT and death.cause is Cause.FROZEN
    killed = death.cause in (Cause.FROZEN, Cause.OVER_MEMORY, Cause.NONSENSE)
    return Failure(
        error_type="ExecutionStuck" if is_stuck else "WorkerLost",
        error_code="EXECUTION_STUCK" if is_stuck else "WORKER_LOST",
        error=payload.clean_text(f"the worker process {death.sentence}{part}"),
        rung=None if death.cause is Cause.STOPPED else "kill" if killed else "crash",
        autopsy=_autopsy(death, attempt),
        duration_ms=max(0, round(attempt.ran_for * 1000)),
    )


def _part(death: Death, attempt: Running[K], roles: Mapping[K, Role]) -> str:
    match roles[attempt.key]:
        case Role.SUSPECT:
            which = "the only one" if len(roles) == 1 else f"one of {len(roles)}"
            return (
                f"; this attempt, {which} that ran, may have caused it: not charged, and its next attempt runs in "
                f"a child process"
            )
        case Role.BYSTANDER if death.cause is Cause.STOPPED:
            return "; this attempt had not finished: not charged"
        case Role.BYSTANDER:
            return "; this attempt did not cause it: not charged"
    cpu = death.cpu_seconds.get(attempt.native_id, 0.0)
    if death.cause is Cause.FROZEN and cpu >= LEAST_CPU_SECONDS:
        return f"; this attempt's thread used {cpu:.1f} s of CPU time meanwhile and let no other thread run"
    if death.cause is Cause.SIGNALED and death.dump.current == attempt.ident:
        return _IN_ITS_THREAD
    return "; this attempt was the only one that ran" if len(roles) == 1 else "; this attempt caused it"


def _autopsy(death: Death, attempt: Running[K]) -> str:
    found: dict[str, object] = {"worker": payload.clean_text(f"the worker process {death.sentence}")}
    if stack := death.dump.stacks.get(attempt.ident):
        frames = [payload.clean_text(frame, longest=400) for frame in reversed(stack)]
        found["stacks"] = [{"title": f"thread 0x{attempt.ident:x}", "frames": frames}]
    if death.cause is Cause.FROZEN:
        found["cpu_seconds"] = round(death.cpu_seconds.get(attempt.native_id, 0.0), 3)
    return json.dumps(found, ensure_ascii=False)
