"""The speed of a worker while the console is open: three pages of *Now* that change by themselves, and one visitor
who opens a page each second. The console and its visitors are processes of their own, as in real life.

`console_cpu_percent` is what the console and its sessions in the server use of one processor meanwhile. On a busy
machine it says more than the ratio of the two speeds.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.__main__ import Run

STREAMS = 3
SECONDS = 1.0
PAGES = ("/", "/commands", "/troubleshooting", "/workers", "/domains", "/commands?search=status:failed", "/limits")


def measure(run: Run, rounds: int) -> None:
    """Drain with and without an open console, in turn; which comes first changes each time."""
    count = run.count * 2
    others = _sessions(run)
    with _console(run.base.url) as (address, pid):
        for number in range(rounds):
            print(f"round {number + 1} of {rounds}", file=sys.stderr)
            for is_open in (True, False) if number % 2 else (False, True):
                if not is_open:
                    run.drain("drain_without_console_per_s", "console", "sync", count=count)
                    continue
                with _visitors(address):
                    own = [pid, *(_sessions(run) - others)]
                    began, used = time.monotonic(), _cpu_seconds(own)
                    run.drain("drain_beside_console_per_s", "console", "sync", count=count)
                    share = (_cpu_seconds(own) - used) / (time.monotonic() - began)
                run.note("console_cpu_percent", 100 * share)


def _sessions(run: Run) -> set[int]:
    """The processes of the server that work for a bus: those of the console are among them."""
    rows = run.base.admin.execute("SELECT pid FROM pg_stat_activity WHERE application_name = 'commandbus bus'")
    return {pid for (pid,) in rows.fetchall()}


def _cpu_seconds(pids: list[int]) -> float:
    """Processor time that these processes have used."""
    ticks = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


@contextmanager
def _console(url: str) -> Iterator[tuple[str, int]]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "commandbus.cli", "console", "--port", str(port)]
    environment = {**os.environ, "COMMANDBUS_DATABASE_URL": url}
    with _running(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)) as process:
        address = f"http://127.0.0.1:{port}"
        _until_it_answers(address)
        yield address, process.pid


@contextmanager
def _visitors(address: str) -> Iterator[None]:
    command = [sys.executable, "-m", "bench.console_drain", address]
    with _running(subprocess.Popen(command, stdout=subprocess.PIPE)) as process:
        assert process.stdout is not None
        process.stdout.readline()  # all pages are open
        yield


@contextmanager
def _running(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    try:
        yield process
    finally:
        process.terminate()
        process.wait(30)


def _until_it_answers(address: str) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(f"{address}/health/ready"):
                return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _visit(address: str) -> None:
    """The visitors' own process."""
    opened = threading.Barrier(STREAMS + 1)

    def watch() -> None:
        with urllib.request.urlopen(f"{address}/now/events") as stream:
            stream.readline()
            opened.wait()
            while stream.readline():
                pass

    for _ in range(STREAMS):
        threading.Thread(target=watch, daemon=True).start()
    opened.wait()
    print("open", flush=True)
    for page in itertools.cycle(PAGES):
        with urllib.request.urlopen(address + page) as answer:
            answer.read()
        time.sleep(SECONDS)


if __name__ == "__main__":
    _visit(sys.argv[1])
