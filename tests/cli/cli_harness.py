"""The command line in tests: inside this process where that is enough, as a process of its own where it matters.

Processes are found by a mark in their environment, which their children inherit: so nobody can hide. An embedded
server inherits nothing, and is asked for by its folder.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOURCES = str(Path(__file__).parents[2] / "src")
MARK = "CLI_TEST_MARK"


@dataclass(frozen=True)
class Answer:
    """What a run of the command line said."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """Its output as JSON."""
        return json.loads(self.out)


class Program:
    """A running `commandbus …` (or another module), with its children marked."""

    def __init__(
        self, *arguments: str, module: str = "commandbus.cli", cwd: Path | None = None, **more: str
    ) -> None:
        self.mark = uuid.uuid4().hex
        path = os.pathsep.join([SOURCES, os.environ.get("PYTHONPATH", "")])
        # The tests' own variables look like misspelt settings.
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("COMMANDBUS_TEST_")
        }
        environment |= {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", MARK: self.mark}
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment | more,
            cwd=cwd,
            text=True,
        )

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def read_until(self, text: str, *, stream: str = "stdout") -> str:
        """Its lines up to the first that holds this text."""
        source = getattr(self.process, stream)
        lines = ""
        while text not in lines:
            line = source.readline()
            assert line, f"it ended without {text!r}: {lines}"
            lines += line
        return lines

    def end(self, seconds: float = 60.0) -> Answer:
        """Wait for it."""
        out, err = self.process.communicate(timeout=seconds)
        return Answer(self.process.returncode, out, err)

    def survivors(self) -> dict[int, str]:
        """Living processes that carry its mark: itself and whatever it started."""
        wanted = f"{MARK}={self.mark}".encode()
        found = {}
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue  # it ended while we looked, or is not ours to look at
        return found


def run(*arguments: str, **more: Any) -> Answer:
    """Run a command line as a process, to its end."""
    with Program(*arguments, **more) as program:
        return program.end()
