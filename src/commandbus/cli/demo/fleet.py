"""The demo's workers: real processes that run `commandbus worker`, each with a log file of its own.

Invariant: after the `with` block no process is left, unless told to keep them. The workers are in their own Unix
sessions, so that Ctrl-C reaches only the demo, which stops them cleanly.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from commandbus.cli.demo import handlers
from commandbus.cli.signals import deferred

STOP_SECONDS = 15.0
OPTIONS = {
    "concurrency": "4",
    "processes": "1",
    "max-messages": "off",
    "max-memory-mb": "off",
    "poll-interval": "1s",
    "log-level": "INFO",
    "log-format": "text",
}


class DemoFleet:
    """Some worker processes."""

    def __init__(self, database_url: str, logs: Path, *, size: int, keep: bool) -> None:
        self._database_url = database_url
        self._logs = logs
        self._size = size
        self.keep = keep
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        try:
            for number in range(1, self._size + 1):
                with deferred():
                    self._processes.append(self._start(number))
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None or not self.keep:
            self.stop()

    @property
    def pids(self) -> list[int]:
        """Their process ids."""
        return [process.pid for process in self._processes]

    @property
    def log_files(self) -> list[Path]:
        """Their log files."""
        return [self._log_file(number) for number in range(1, self._size + 1)]

    def obituary(self) -> str | None:
        """The last log lines of workers that ended by themselves; None if all are alive."""
        dead = [
            f"worker {number} ended with code {process.returncode}: {_last_line(self._log_file(number))}"
            for number, process in enumerate(self._processes, start=1)
            if process.poll() is not None
        ]
        return "; ".join(dead) or None

    def last_words(self) -> str:
        """The last line of each log."""
        return "; ".join(f"{file}: {_last_line(file)}" for file in self.log_files)

    def stop(self) -> None:
        """Send SIGTERM to all, then SIGKILL to those that do not end. Signals to the demo wait until that is
        done."""
        with deferred(forget=True):
            for process in self._processes:
                with contextlib.suppress(ProcessLookupError):
                    process.terminate()
            deadline = time.monotonic() + STOP_SECONDS
            for process in self._processes:
                try:
                    process.wait(max(0.1, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
            self._processes.clear()

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        options = [word for name, value in OPTIONS.items() for word in (f"--{name}", value)]
        reference = f"{handlers.__name__}:registry"
        # The address is passed in the environment, because every user can read the arguments of a process.
        environment = dict(os.environ, COMMANDBUS_DATABASE_URL=self._database_url, CANCEL_GRACE_SECONDS="1s")
        program = ["commandbus.cli"] if self.keep else [f"{__package__}.ends_with_parent", str(os.getpid())]
        with self._log_file(number).open("wb") as log:
            return subprocess.Popen(  # noqa: S603 - our own program, no shell
                [
                    sys.executable,
                    "-m",
                    *program,
                    "worker",
                    reference,
                    "--domain",
                    handlers.DOMAIN,
                    *options,
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
                restore_signals=True,
            )

    def _log_file(self, number: int) -> Path:
        return self._logs / f"demo-worker-{number}.log"


def _last_line(file: Path) -> str:
    lines = file.read_text("utf-8", "replace").splitlines()
    return lines[-1] if lines else f"no word in {file}"


def stop_line(pids: list[int]) -> str:
    """How to stop them by hand."""
    return f"kill -{signal.SIGTERM.name.removeprefix('SIG')} {' '.join(map(str, pids))}"
