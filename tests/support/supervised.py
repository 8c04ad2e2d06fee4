"""A supervisor with its workers as real processes: start it, signal it, look inside, and leave nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from pathlib import Path
from typing import Any

from support.waiting import until

SOURCES = str(Path(__file__).parents[2] / "src")
MARK = "SUPERVISED_TEST_MARK"
QUICK = {
    "visibility_timeout": "1.5s",
    "statement_timeout": "1s",
    "cancel_grace": "0.5s",
    "task_timeout": "1s",
    "heartbeat_timeout": "5s",
    "shutdown_timeout": "8s",
    "poll_interval": "0.1s",
    "backoff_schedule": "0",
    "backoff_jitter": "0",
    "breakers_enabled": "false",
    "health_port": "0",
}


def on_host(name: str) -> list[str]:
    """The beginning of a command line whose program believes that its machine has this name."""
    allowed = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return ["unshare", *allowed, "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', name]


class Supervised:
    """A running `commandbus worker`. Its log is a file, its processes carry a mark that their children inherit.
    With `host`, it runs on a machine of that name, as far as it can tell."""

    def __init__(
        self, folder: Path, database: str, reference: str = "tasks:handlers", *, host: str = "", **options: Any
    ) -> None:
        self.mark = uuid.uuid4().hex
        self.log_file = folder / f"supervisor-{self.mark}.log"
        chosen = {"database_url": database, "handlers": reference, **QUICK, **options}
        environment = {name: value for name, value in os.environ.items() if not name.startswith("COMMANDBUS_")}
        environment |= {"PYTHONPATH": SOURCES, "PYTHONUNBUFFERED": "1", MARK: self.mark}
        from commandbus.settings import SETTINGS

        environment |= {SETTINGS[name].env: str(value) for name, value in chosen.items()}
        with self.log_file.open("wb") as log:
            self.process = subprocess.Popen(
                [*(on_host(host) if host else []), sys.executable, "-m", "commandbus.worker", "--json"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                cwd=folder,
                text=True,
                start_new_session=True,
            )

    @property
    def log(self) -> str:
        """What it and its workers have said."""
        return self.log_file.read_text()

    def until_said(self, text: str, seconds: float = 20.0, *, times: int = 1) -> str:
        """Until the log says so."""

        def said() -> str:
            assert self.process.poll() is None or self.log.count(text) >= times, self.log
            return self.log if self.log.count(text) >= times else ""

        return until(said, seconds, what=lambda: f"{text!r} in:\n{self.log}")

    def until_ready(self, workers: int = 1) -> Supervised:
        """Until so many workers have been ready."""
        self.until_said("is ready (process", times=workers)
        return self

    def workers(self) -> dict[int, str]:
        """Its worker processes: pid to command line."""
        return {pid: line for pid, line in self.processes().items() if "commandbus.supervisor.child_main" in line}

    def processes(self) -> dict[int, str]:
        """All living processes that carry its mark: itself and whatever it started, and they."""
        wanted = f"{MARK}={self.mark}".encode()
        found = {}
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue  # it ended while we looked
        return found

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self, seconds: float = 30.0) -> tuple[int, Any]:
        """Wait for it; answers its exit code and its report, if it gave one."""
        out, _ = self.process.communicate(timeout=seconds)
        lines = out.strip()
        report = (
            json.loads(lines[lines.index("{\n") if "{\n" in lines else lines.index("{") :])
            if "{" in lines
            else None
        )
        return self.process.returncode, report

    def stop(self, seconds: float = 30.0) -> tuple[int, Any]:
        """SIGTERM, and its end."""
        self.signal(signal.SIGTERM)
        return self.end(seconds)

    def ask(self, path: str) -> tuple[int, Any]:
        """A probe's answer: code and document, or text for /metrics."""
        said = until(lambda: [line for line in self.log.splitlines() if "health checks: http://" in line])
        base = said[0].split("health checks: ")[1].split("/health")[0]
        try:
            with urllib.request.urlopen(base + path, timeout=5) as answer:
                body, code = answer.read().decode(), answer.status
        except urllib.error.HTTPError as error:
            body, code = error.read().decode(), error.code
        return code, body if path == "/metrics" else json.loads(body)

    def clear_away(self) -> None:
        """Kill what is left of it."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()
        deadline = time.monotonic() + 5
        while (left := self.processes()) and time.monotonic() < deadline:
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.02)
