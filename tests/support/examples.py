"""Run a program of examples/ as a stranger would, and see what it leaves behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def start(name: str, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """In a session of its own, with a temporary folder of its own, so that what it leaves behind can be seen."""
    return subprocess.Popen(
        [sys.executable, str(EXAMPLES / name / "main.py"), *arguments],
        env={**os.environ, "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run(name: str, folder: Path, *arguments: str, timeout: float = 240.0) -> tuple[int, str, str]:
    """To its end: the exit code, and what it printed."""
    with start(name, folder, *arguments) as example:
        try:
            out, err = example.communicate(timeout=timeout)
        finally:
            if example.poll() is None:
                example.terminate()
    assert list(folder.iterdir()) == []
    assert survivors(example.pid, folder) == []
    return example.returncode, out, err


def survivors(session: int, folder: Path) -> list[str]:
    """Processes of its session, or with its folder on their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
                if os.getsid(int(entry.name)) == session or str(folder) in line:
                    found.append(f"{entry.name} {line}")
            except (ProcessLookupError, FileNotFoundError):
                continue
    return found
