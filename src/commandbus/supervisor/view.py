"""What the supervisor's loop last saw, and what that means for health checks and metrics. Pure.

live    fails when the supervisor's loop does not run, or all workers are frozen.
ready   fails when no worker can take work, all are critical, the database is unreachable, or commands wait and
        no worker claims them. If it is only degraded, the code is 200, and the document says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import field
from typing import Any, Final

from commandbus.model.attempt_counts import AttemptCounts
from commandbus.quick_dataclass import dataclass
from commandbus.supervisor.attempt_metrics import attempt_metrics
from commandbus.supervisor.coroner import CoronerLook
from commandbus.supervisor.fleet_metrics import domain_metrics, shared_metrics
from commandbus.supervisor.health_server import HealthVerdict
from commandbus.supervisor.metrics import COUNTER, GAUGE, Metric, Sample, render
from commandbus.supervisor.worker_process import WorkerProcess
from commandbus.worker.board import State

STALL_SECONDS: Final = 5.0
FROZEN_SECONDS: Final = 5.0
SILENT_PART: Final = 0.6
"""A part of heartbeat_timeout: health checks name a worker that is silent for longer. At the whole it is
killed."""
LOST_SECONDS: Final = 2.0
UNCLAIMED_SECONDS: Final = 10.0
HEALTHY, DEGRADED, CRITICAL = 0, 1, 2
NOTHING: Final = AttemptCounts()
_WORDS: Final = ("healthy", "degraded", "critical")


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker at the last turn of the loop."""

    id: str
    pid: int
    state: State
    health: int
    note: str
    running: int
    free: int
    stuck: int
    rss_mb: float
    silent_seconds: float


@dataclass(frozen=True, slots=True)
class View:
    """Everything at the last turn of the loop. Counters begin at the supervisor's start and include dead workers.
    `waits_for` says what prevents the start of the first worker, and `reload_error` says why the last reload
    failed."""

    at: float
    phase: str
    workers: tuple[WorkerView, ...] = ()
    settled: int = 0
    stuck: int = 0
    restarts: int = 0
    reloads: Mapping[str, int] = field(default_factory=dict)
    reload_error: str = ""
    ends_by_cause: Mapping[str, int] = field(default_factory=dict)
    postmortems: int = 0
    open_postmortems: int = 0
    claimed_at: float = 0.0
    look: CoronerLook = field(default_factory=CoronerLook)
    waits_for: str = ""
    trouble: str = ""


def of_worker(worker: WorkerProcess, now: float, *, heartbeat_timeout: float) -> WorkerView:
    """What can be seen of a worker now."""
    shown = worker.snapshot
    health, note = shown.health, shown.note
    silent_seconds = now - shown.beat_at if shown.beat_at else 0.0
    if worker.ready_at is None:
        note = worker.start.note(now, worker.doing)
    elif silent_seconds > SILENT_PART * heartbeat_timeout:  # the worker cannot report this itself
        health, note = CRITICAL, f"the ladder has not moved for {silent_seconds:.0f} s, or the process is frozen"
    return WorkerView(
        worker.name,
        worker.pid,
        worker.state,
        health,
        note,
        running=shown.running,
        free=shown.free,
        stuck=shown.stuck,
        rss_mb=shown.rss_mb,
        silent_seconds=silent_seconds,
    )


def live(view: View, now: float) -> HealthVerdict:
    """Does the loop run, and is at least one worker not frozen?"""
    reasons = []
    if now - view.at > STALL_SECONDS:
        reasons.append(f"the supervisor's loop has not run for {now - view.at:.1f} s")
    beating = [worker for worker in view.workers if State.STARTING < worker.state < State.EXITING]
    if beating and all(worker.silent_seconds > FROZEN_SECONDS for worker in beating):
        reasons.append("all workers are frozen")
    return HealthVerdict(
        not reasons, {"reasons": reasons, "phase": view.phase} if reasons else {"phase": view.phase}
    )


def ready(view: View, now: float) -> HealthVerdict:
    """Can this supervisor's workers take work?"""
    serving = [worker for worker in view.workers if worker.state in (State.ACTIVE, State.PAUSED)]
    reasons = list(_failures(view, serving, now))
    document: dict[str, Any] = {"phase": view.phase, "workers": [_shown(worker) for worker in view.workers]}
    if reasons:
        return HealthVerdict(False, document | {"status": "critical", "reasons": reasons})
    doubts = [
        f"worker {worker.id} is {_WORDS[min(worker.health, 2)]}" + (f": {worker.note}" if worker.note else "")
        for worker in serving
        if worker.health > HEALTHY
    ] + _slow_starts(view)
    if view.reload_error:
        doubts.append(f"the last reload failed, and the old workers stay: {view.reload_error}")
    return HealthVerdict(True, document | {"status": "degraded" if doubts else "healthy", "reasons": doubts})


def is_unclaimed(view: View, now: float) -> bool:
    """Does work wait while slots are free and no worker claims it?"""
    oldest = max((seen.oldest_seconds or 0.0 for seen in view.look.domains.values()), default=0.0)
    # The work that was seen may have been claimed since then, so the claims are compared with the time of the
    # look.
    waits = oldest > UNCLAIMED_SECONDS and view.look.at - view.claimed_at > UNCLAIMED_SECONDS
    is_free = any(worker.free > 0 for worker in view.workers if worker.state is State.ACTIVE)
    return waits and is_free and now - view.claimed_at > UNCLAIMED_SECONDS


def metrics(view: View, counts: AttemptCounts = NOTHING) -> str:
    """The answer to a scrape. `counts` are of all workers since the supervisor's start, the dead ones too."""
    states = Counter(worker.state for worker in view.workers)
    health = Counter(min(worker.health, 2) for worker in view.workers if worker.state is not State.STARTING)
    free = sum(worker.free for worker in view.workers if worker.state is State.ACTIVE)
    return render([
        Metric("commandbus_workers", GAUGE, "Worker processes by state.",
               [Sample(states[state], {"state": state.name.lower()}) for state in State]),
        Metric("commandbus_workers_health", GAUGE, "Worker processes by health.",
               [Sample(health[level], {"health": word}) for level, word in enumerate(_WORDS)]),
        Metric("commandbus_running", GAUGE, "Attempts that run now.",
               [Sample(sum(worker.running for worker in view.workers))]),
        Metric("commandbus_slots_free", GAUGE, "Slots of active workers that commands can use.", [Sample(free)]),
        Metric("commandbus_settled_total", COUNTER, "Attempts settled by workers.", [Sample(view.settled)]),
        Metric("commandbus_stuck_total", COUNTER, "Attempts that did not stop within their grace.",
               [Sample(view.stuck)]),
        Metric("commandbus_worker_restarts_total", COUNTER, "Workers started in place of others.",
               [Sample(view.restarts)]),
        Metric("commandbus_reloads_total", COUNTER, "Reloads (SIGHUP) by outcome.",
               [Sample(view.reloads.get(outcome, 0), {"outcome": outcome}) for outcome in ("done", "failed")]),
        Metric("commandbus_reload_failed", GAUGE, "1 if the last reload failed, and the old workers stay.",
               [Sample(1 if view.reload_error else 0)]),
        Metric("commandbus_worker_ends_total", COUNTER, "Ends of workers by cause.",
               [Sample(count, {"cause": cause}) for cause, count in sorted(view.ends_by_cause.items())]),
        Metric("commandbus_postmortems_total", COUNTER, "Dead workers whose commands were settled.",
               [Sample(view.postmortems)]),
        Metric("commandbus_postmortems_open", GAUGE, "Dead workers whose commands are not settled yet.",
               [Sample(view.open_postmortems)]),
        Metric("commandbus_database_up", GAUGE, "1 while the supervisor's connection answers.",
               [Sample(0 if view.look.lost_since is not None or view.waits_for else 1)]),
        Metric("commandbus_worker_memory_bytes", GAUGE, "Resident memory of worker processes, together.",
               [Sample(round(sum(worker.rss_mb for worker in view.workers) * 1_048_576))]),
        *attempt_metrics(counts),
        *domain_metrics(view.look.domains),
        *shared_metrics(view.look.figures),
    ])  # fmt: skip


def _failures(view: View, serving: list[WorkerView], now: float) -> list[str]:
    found = []
    if view.phase == "STOPPING":
        found.append("it is stopping")
    elif view.waits_for:
        found.append(view.waits_for)
    elif not serving:
        slow = _slow_starts(view)
        found.append("no worker is ready" + (f": {'; '.join(slow)}" if slow else ""))
    elif all(worker.health >= CRITICAL for worker in serving):
        notes = "; ".join(sorted({worker.note for worker in serving if worker.note}))
        found.append("all workers are critical" + (f": {notes}" if notes else ""))
    if now - view.at > STALL_SECONDS:
        found.append(f"the supervisor's loop has not run for {now - view.at:.1f} s")
    if view.trouble:
        found.append(view.trouble)
    lost_since = view.look.lost_since
    if lost_since is not None and now - lost_since > LOST_SECONDS:
        found.append(f"the database has not answered for {now - lost_since:.0f} s")
    if is_unclaimed(view, now):
        found.append("work waits, slots are free, and nothing is being claimed")
    return found


def _slow_starts(view: View) -> list[str]:
    """The workers that have been starting for long."""
    starting = [worker for worker in view.workers if worker.state is State.STARTING and worker.note]
    return [f"worker {worker.id} {worker.note}" for worker in starting]


def _shown(worker: WorkerView) -> dict[str, Any]:
    return {
        "id": worker.id,
        "pid": worker.pid,
        "state": worker.state.name,
        "health": _WORDS[min(worker.health, 2)],
        "note": worker.note,
        "running": worker.running,
        "free": worker.free,
    }
