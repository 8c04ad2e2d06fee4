"""The command line in tests: inside this process where that is enough, as a process of its own where it matters.

Processes are found by a mark in their environment, which their children inherit: so nobody can hide. An embedded
server inherits nothing, and is asked for by its folder.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import struct
import subprocess
import sys
import termios
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.polling import readable

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


class Terminal:
    """`commandbus …` (or `python …`) on a terminal of its own."""

    def __init__(self, *words: str, columns: int = 80, python: tuple[str, ...] = ("-m", "commandbus.cli")) -> None:
        self.master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        environment = {name: value for name, value in os.environ.items() if not name.startswith("COMMANDBUS_")}
        for name in ("COLUMNS", "LINES"):
            environment.pop(name, None)
        self.process = subprocess.Popen(
            [sys.executable, *python, *words],
            stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
            env=environment | {"PYTHONPATH": SOURCES},
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(slave)
        self.seen = ""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.master)

    def read_until(self, pattern: str, seconds: float = 20.0) -> str:
        """All that it has shown, when this is among it."""
        deadline = time.monotonic() + seconds
        while not re.search(pattern, self.seen):
            left = deadline - time.monotonic()
            assert left > 0, f"not seen: {pattern}: {self.seen!r}"
            if not readable([self.master], left):
                continue
            self._read()
        return self.seen

    def read_all(self) -> str:
        """All that it shows, to its end."""
        while self._read():
            pass
        return self.seen

    def end(self) -> int:
        """Its exit code."""
        code = self.process.wait(20)
        while readable([self.master], 0) and self._read():
            pass
        return code

    def _read(self) -> bytes:
        try:
            data = os.read(self.master, 65536)
        except OSError:  # EIO: nobody has it open any more
            data = b""
        self.seen += data.decode()
        return data


def run(*arguments: str, **more: Any) -> Answer:
    """Run a command line as a process, to its end."""
    with Program(*arguments, **more) as program:
        return program.end()
