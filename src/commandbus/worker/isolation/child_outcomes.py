"""What is recorded about an attempt whose child process died, or could not start."""

from __future__ import annotations

from commandbus.clock import epoch
from commandbus.model import payload
from commandbus.model.crash_attribution import parse_dump, signal_name
from commandbus.model.outcome import Failure
from commandbus.worker.deadlines import autopsy
from commandbus.worker.execution.attempt import Attempt, Stop, Why
from commandbus.worker.isolation.attempt_in_child import ChildFate, Dead


def no_process(text: str, trace: object = None) -> Failure:
    """There was no child process for it, or one that sent nonsense: a retry may help."""
    return Failure(
        "IsolationFailed",
        "ISOLATION_FAILED",
        payload.clean_text(text, longest=8192),
        payload.clean_text(trace) if isinstance(trace, str) else None,
    )


def never_began(attempt: Attempt, stop: Stop) -> Failure:
    """It was asked to stop before it began."""
    is_canceled = stop.why is Why.CANCEL
    kind, code = ("OperatorCancel", "CANCELED") if is_canceled else ("AttemptCanceledError", stop.why.upper())
    return Failure(kind, code, stop.text, rung=stop.why, duration_ms=attempt.elapsed_ms())


def failure_of(attempt: Attempt, dead: Dead) -> Failure:
    """The failure of an attempt whose process is dead."""
    stop = attempt.stop
    if dead.cause is ChildFate.KILLED and stop is None:
        kind, code, rung = "AttemptCanceledError", "SHUTDOWN", "kill"
        text = f"its process was killed: {dead.reason or 'the worker stopped'}"
    elif dead.cause is ChildFate.KILLED and stop is not None:
        kind, code, rung = "ExecutionStuck", "EXECUTION_STUCK", "kill"
        grace = f"{max(0.0, stop.until - stop.asked_at):.3g} seconds"
        text = f"did not respond to cancellation within {grace}: {stop.text}; its process was killed"
    elif dead.cause is ChildFate.MEMORY:
        kind, code, rung = "MemoryLimitExceeded", "MEMORY_LIMIT", "kill"
        text = f"{dead.reason}, and was killed"
    elif dead.cause is ChildFate.CONFUSED:
        kind, code, rung = "WorkerLost", "WORKER_LOST", "kill"
        text = f"its process was killed: {dead.reason}"
    else:
        kind, code, rung = "WorkerLost", "WORKER_LOST", "crash"
        text = f"its process {how(dead.exit_code)}"
    return Failure(
        kind,
        code,
        payload.clean_text(text, longest=8192),
        rung=rung,
        autopsy=_autopsy_of(dead),
        duration_ms=attempt.elapsed_ms(),
    )


def how(code: int | None) -> str:
    """How a process ended, after "its process"; by its exit code, None if it does not even die."""
    if code is None:
        return "does not die"
    if code >= 0:
        return f"ended with exit code {code}"
    return f"died of {signal_name(-code)}" + (" (out of memory, or somebody killed it)" if code == -9 else "")


def _autopsy_of(dead: Dead) -> str:
    found = parse_dump(dead.dump)
    stacks = [
        {
            "title": f"thread {ident:#x}" + (" (current)" if ident == found.current else ""),
            "frames": list(reversed(frames)),  # innermost last, as in a traceback
        }
        for ident, frames in found.stacks.items()
    ]
    code = dead.exit_code
    process = {
        "signal": signal_name(-code) if code is not None and code < 0 else None,
        "exit_code": code if code is not None and code >= 0 else None,
        "dump": dead.dump or None,
    }
    return autopsy.to_json({"taken_at": round(epoch(), 3), "stacks": stacks, "process": process})
