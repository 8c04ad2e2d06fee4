"""`commandbus worker` as it is installed: a supervisor and its child, with default settings, on a full queue.

The rate counts from the moment at which the domain is resumed to the moment at which its queue is empty.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from bench.ground import Ground

HANDLERS = """
from commandbus import HandlerRegistry

handlers = HandlerRegistry()


@handlers.handler("{domain}", "work")
def work(command, ctx):
    pass
"""
WARM_UP = 2_000
READY_SECONDS = 30.0
DRAINED_SECONDS = 120.0


@contextmanager
def fleet(ground: Ground, domain: str, size: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """So many `commandbus worker`, idle and announced."""
    with tempfile.TemporaryDirectory(prefix="commandbus-bench-") as folder:
        with open(os.path.join(folder, "bench_app.py"), "w") as file:
            file.write(HANDLERS.format(domain=domain))
        command = [
            sys.executable,
            "-m",
            "commandbus.cli",
            "worker",
            "bench_app:handlers",
            "--database",
            ground.url,
        ]
        environment = os.environ | {"COMMANDBUS_LOG_LEVEL": "WARNING"}
        started = [subprocess.Popen(command, cwd=folder, env=environment) for _ in range(size)]
        try:
            _until(lambda: _waiting(ground, domain) >= size, READY_SECONDS, "the workers are not ready")
            yield started
        finally:
            for process in started:
                process.terminate()
            for process in started:
                process.wait(timeout=30)


def drain(ground: Ground, domain: str, count: int) -> float:
    """Commands a second of a full queue."""
    ground.fill(domain, count)
    started = time.perf_counter()
    ground.bus.resume(domain)
    _until(lambda: not _is_left(ground, domain), DRAINED_SECONDS, f"{domain} was not drained")
    elapsed = time.perf_counter() - started
    ground.bus.pause(domain, operator="bench")
    return count / elapsed


def _is_left(ground: Ground, domain: str) -> bool:
    """The newest first: a look from the oldest on would walk over all that is done, and slow the drain down."""
    newest = f"SELECT msg_id FROM pgmq.q_{domain}__commands ORDER BY msg_id DESC LIMIT 1"
    return ground.admin.execute(newest).fetchone() is not None


def _waiting(ground: Ground, domain: str) -> int:
    return int(
        ground.one("SELECT count(*) FROM commandbus.waiting WHERE domain = %s AND expires_at > now()", domain)
    )


def _until(is_so: Callable[[], bool], seconds: float, complaint: str) -> None:
    ends_at = time.perf_counter() + seconds
    while not is_so():
        if time.perf_counter() > ends_at:
            raise RuntimeError(f"{complaint} within {seconds:.0f} s")
        time.sleep(0.005)


def resident(process: subprocess.Popen[bytes]) -> float:
    """Megabytes of a supervisor and its child in memory (RSS); pages of files that both use count twice."""
    return sum(_memory(pid)["Rss"] for pid in [process.pid, *_children(process.pid)])


def needed(process: subprocess.Popen[bytes]) -> float:
    """Megabytes that would be free without a supervisor and its child: what each has alone, and the pages of
    programs and libraries once."""
    found = [_memory(pid) for pid in [process.pid, *_children(process.pid)]]
    files = max(each["Rss"] - each["Anonymous"] for each in found)
    return files + sum(each["Anonymous"] for each in found)


def idle_share(processes: list[subprocess.Popen[bytes]], seconds: float) -> float:
    """Share of a core that idle supervisors and their children use together."""
    pids = [pid for process in processes for pid in [process.pid, *_children(process.pid)]]
    before = sum(_cpu_seconds(pid) for pid in pids)
    time.sleep(seconds)
    return (sum(_cpu_seconds(pid) for pid in pids) - before) / seconds


def _children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(word) for word in file.read().split()]


def _memory(pid: int) -> dict[str, float]:
    """Megabytes by the kernel's names of them."""
    with open(f"/proc/{pid}/smaps_rollup") as file:
        lines = [line.split() for line in file.readlines()[1:]]
    return {words[0].rstrip(":"): int(words[1]) / 1024 for words in lines}


def _cpu_seconds(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
