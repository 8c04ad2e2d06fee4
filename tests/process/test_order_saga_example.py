"""examples/order_saga, run as a stranger would: it prints what the docs promise, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from support.waiting import until

ROOT = Path(__file__).parents[2]
MAIN = ROOT / "examples" / "order_saga" / "main.py"
PAGE = (ROOT / "docs" / "processes.md").read_text("utf-8")


def start(folder: Path) -> subprocess.Popen[str]:
    """In a session of its own, with a temporary folder of its own, so that what it leaves behind can be seen."""
    return subprocess.Popen(
        [sys.executable, str(MAIN)],
        env={**os.environ, "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


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


def test_it_ends_as_the_docs_say(folder: Path) -> None:
    with start(folder) as example:
        try:
            out, err = example.communicate(timeout=240)
        finally:
            if example.poll() is None:
                example.terminate()
    (promised,) = (
        code for code in re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL) if "The books balance" in code
    )
    assert (example.returncode, out, err) == (0, promised, "")
    assert list(folder.iterdir()) == []
    assert survivors(example.pid, folder) == []


def test_it_cleans_up_when_it_is_interrupted(folder: Path) -> None:
    with start(folder) as example:
        assert example.stdout is not None
        example.stdout.readline()
        example.send_signal(signal.SIGTERM)
        example.communicate(timeout=60)
    assert example.returncode == 128 + signal.SIGTERM
    assert list(folder.iterdir()) == []
    until(lambda: not survivors(example.pid, folder), what=lambda: survivors(example.pid, folder))
