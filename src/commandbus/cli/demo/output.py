"""What the demo shows: steps, live progress, the table at the end, and the command lines to try next.

On a terminal the progress is one line that is overwritten; elsewhere it is one line per second. Everything goes to
stdout. With --json it goes to stderr, and stdout gets the document.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from pathlib import Path

import click

from commandbus.cli.demo.outcome_counts import GROUPS, OutcomeCounts
from commandbus.cli.render import print_table
from commandbus.cli.table import columns, fitted

BAR = 10
PLAIN_SECONDS = 1.0


class DemoOutput:
    """The output of the demo."""

    def __init__(self, *, as_json: bool) -> None:
        self._err = as_json
        self._is_terminal = (sys.stderr if as_json else sys.stdout).isatty()
        self._last_at = 0.0
        self._line_is_open = False

    def say(self, text: str = "") -> None:
        """Print a line."""
        self.close_line()
        click.echo(text, err=self._err)

    def progress(self, counts: OutcomeCounts, total: int, seconds: float, *, running: int) -> None:
        """Show the progress."""
        parts = [
            f"{counts.done}/{total} done", f"{running} running", f"{counts.sum('completed')} completed",
            f"{counts.sum('failed')} failed", f"{counts.sum('in_tsq')} in TSQ", f"{seconds:.1f} s",
        ]  # fmt: skip
        if self._is_terminal:
            filled = BAR * counts.done // max(total, 1)
            bar = f"  {'█' * filled}{'░' * (BAR - filled)} "
            text = fitted(parts, shutil.get_terminal_size().columns - 1 - len(bar), gap=", ")
            click.echo(f"\r\x1b[K{bar}{text}", nl=False, err=self._err)
            self._line_is_open = True
        elif time.monotonic() - self._last_at >= PLAIN_SECONDS or counts.done == total:
            self._last_at = time.monotonic()
            click.echo(f"  {', '.join(parts)}", err=self._err)

    def close_line(self) -> None:
        """End the line that is overwritten with progress."""
        if self._line_is_open:
            click.echo("", err=self._err)
            self._line_is_open = False

    def table(self, counts: OutcomeCounts) -> None:
        """What happened to each group."""
        self.say()
        rows: list[tuple[object, ...]] = [
            (line.command_type, line.found, line.completed, line.failed, line.in_tsq, line.attempts, group.story)
            for group, line in zip(GROUPS, counts.lines, strict=True)
        ]
        names = ("found", "completed", "failed", "in_tsq", "attempts")
        rows.append(("total", *(counts.sum(name) for name in names), ""))
        print_table(columns("type :sent :completed :failed :in_TSQ :attempts? +its_handler"), rows)


def program() -> str:
    """How this program is called from the reader's shell."""
    called = Path(sys.argv[0])
    if called.name in ("__main__.py", "worker.py") or not called.exists():
        return f"{_from_here(Path(sys.executable))} -m commandbus.cli"
    path = Path(os.path.abspath(called))
    environment = os.environ.get("VIRTUAL_ENV")
    found = shutil.which(called.name)
    is_everywhere = found is not None and os.path.abspath(found) == str(path)
    if is_everywhere and not (environment and path.is_relative_to(environment)):
        return called.name
    return _from_here(path)


def folder_word(folder: Path) -> str:
    """A folder as the reader would type it."""
    return _from_here(folder)


def _from_here(path: Path) -> str:
    """A path relative to the folder of the reader's shell, because `./dev` may have changed the working
    directory."""
    here = Path(os.environ.get("PWD") or os.getcwd())
    path = Path(os.path.abspath(path))
    return shlex.quote(str(path.relative_to(here)) if path.is_relative_to(here) else str(path))
