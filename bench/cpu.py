"""`./dev bench --cpu`: what `commandbus worker` costs, as CPU: one and two that drain, and one that is idle.

CPU, because it says the same on a busy machine, where wall time says nothing. Beside it: what the sessions of the
claimers and the settlers wait for (samples of pg_stat_activity, as a part of all samples), and how often the
threads of an idle supervisor and its worker wake up.
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import psycopg

from bench import installed
from bench.ground import Ground

COUNT = 30_000
IDLE_SECONDS = 30.0
SAMPLE_SECONDS = 0.01
MOST_SHOWN = 6
SESSIONS = (
    "SELECT pid, split_part(application_name, ' ', -1) FROM pg_stat_activity "
    "WHERE application_name ~ %s AND application_name ~ ' (claimer|settler)$'"
)
WAITS = "SELECT pid, coalesce(wait_event, 'CPU') FROM pg_stat_activity WHERE pid = ANY (%s)"


def run(base: Ground, rounds: int) -> None:
    """Measure and print."""
    figures: dict[str, list[float]] = defaultdict(list)
    for size in (1, 2):
        base.domain(f"cpu_{size}")
    for _ in range(rounds):
        for size in (1, 2):
            for name, value in _drained(base, f"cpu_{size}", size).items():
                figures[f"{size} worker{'s' if size == 2 else ''}, {name}"].append(value)
    for name, value in _idle(base).items():
        figures[f"idle, {name}"].append(value)
    for name, values in figures.items():
        print(f"{name:50s} {median(values):10.2f}")


def _drained(base: Ground, domain: str, size: int) -> dict[str, float]:
    """CPU in µs a command, by process and session, and the shares of what sessions wait for."""
    with installed.fleet(base, domain, size) as processes:
        installed.drain(base, domain, installed.WARM_UP * size)
        base.fill(domain, COUNT)
        workers = [pid for process in processes for pid in installed._children(process.pid)]
        named = "|".join(f"-{pid}-" for pid in workers)
        kinds = dict(base.admin.execute(SESSIONS, (named,)).fetchall()) | dict.fromkeys(workers, "worker")
        before = {pid: _cpu(pid) for pid in kinds}
        with _sampled(base, kinds) as waits:
            base.bus.resume(domain)
            installed._until(
                lambda: not installed._is_left(base, domain), installed.DRAINED_SECONDS, "not drained"
            )
        used: Counter[str] = Counter()
        for pid, kind in kinds.items():
            used[f"µs of a {kind}"] += (_cpu(pid) - before[pid]) / COUNT
        base.bus.pause(domain, operator="bench")
    return {**used, "µs in all": sum(used.values()), **waits}


@contextmanager
def _sampled(base: Ground, kinds: dict[int, str]) -> Iterator[dict[str, float]]:
    """What sessions of a kind wait for; filled in at the end."""
    seen: Counter[str] = Counter()
    shares: dict[str, float] = {}
    ended = threading.Event()

    def look() -> None:
        with psycopg.connect(base.url, autocommit=True) as conn:
            while not ended.wait(SAMPLE_SECONDS):
                for pid, event in conn.execute(WAITS, (list(kinds),)).fetchall():
                    seen[f"{kinds[pid]} in {event}"] += 1

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield shares
    finally:
        ended.set()
        looking.join()
        shares |= {name: count / max(1, seen.total()) for name, count in seen.most_common(MOST_SHOWN)}


def _idle(base: Ground) -> dict[str, float]:
    """Milliseconds of CPU and wake-ups a second of a supervisor and its worker."""
    base.domain("cpu_idle")
    with installed.fleet(base, "cpu_idle", 1) as processes:
        time.sleep(3)  # the announcement, and the looks after it
        before = _of_fleet(processes[0])
        time.sleep(IDLE_SECONDS)
        after = _of_fleet(processes[0])
    return {name: (after[name] - before[name]) / IDLE_SECONDS for name in after}


def _of_fleet(process: subprocess.Popen[bytes]) -> dict[str, float]:
    (worker,) = installed._children(process.pid)
    parts = {"supervisor": process.pid, "worker": worker}
    used = {f"ms a second of a {name}": _cpu(pid) / 1000 for name, pid in parts.items()}
    return used | {f"wake-ups a second of a {name}": _wake_ups(pid) for name, pid in parts.items()}


def _cpu(pid: int) -> float:
    """Microseconds of all its threads."""
    return sum(int(file.read_text().split()[0]) for file in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1000


def _wake_ups(pid: int) -> float:
    found = 0
    for file in Path(f"/proc/{pid}/task").glob("*/status"):
        found += sum(
            int(line.split()[1]) for line in file.read_text().splitlines() if line.startswith("voluntary")
        )
    return found
