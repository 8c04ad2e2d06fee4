"""hang.svg: in a terminal a handler hangs, and its worker ends the hang. `./dev picture` makes it from a real run.

Everything in the picture was printed by the programs that it shows. Of the worker's log it keeps the lines that
match SHOWN, without date, level, logger and fields: a picture has no room for more.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

from commandbus import CommandBus, embedded

COLUMNS = 104
PATIENCE_SECONDS = 60.0
APP = """\
from commandbus import HandlerRegistry

handlers = HandlerRegistry()

@handlers.handler("orders", "import", timeout="2s")
def import_file(command, ctx):
    while True:                      # hangs, and ignores every request to stop
        pass

@handlers.handler("orders", "greet")
def greet(command, ctx):
    return "hello"
"""
SHOWN = ("asked to stop", "is stuck after", "to the troubleshooting queue", " drains: ", "is ready")
LOG_LINE = re.compile(r"\S+T(?P<time>[\d:]+)\.\d+Z (?P<level>\w+) \S+: (?P<text>.*?)(?: \(domain=.*)?")
SETTINGS = {"CANCEL_GRACE_SECONDS": "1", "COLUMNS": str(COLUMNS), "NO_COLOR": "1"}

COLORS = {"prompt": "#7ee787", "typed": "#ffffff", "plain": "#c9d1d9", "bad": "#ff9d94"}
CHARACTER, LINE, MARGIN, BAR = 7.85, 19, 18, 30


class Line(NamedTuple):
    """A line of the terminal, and its style: a key of COLORS."""

    style: str
    text: str


def main() -> None:
    """Run it, and write the picture."""
    parser = argparse.ArgumentParser(description="Draw a hang that is ended.")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("hang.svg"))
    target = parser.parse_args().out
    with tempfile.TemporaryDirectory(prefix="commandbus-picture-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # where root runs this, the server is another user's
        (folder / "app.py").write_text(APP, "utf-8")
        with embedded.start(folder / "postgres") as server, CommandBus(server.dsn) as bus:
            bus.migrate(domains=["orders"])
            environment = {**os.environ, **SETTINGS, "COMMANDBUS_DATABASE_URL": server.dsn}
            lines = list(record(bus, Terminal(folder, environment)))
    target.write_text(svg(lines), "utf-8")
    print(target)


class Terminal:
    """Runs command lines as a reader would, in the folder of app.py."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._folder = folder
        self._environment = environment

    def start(self, line: str) -> subprocess.Popen[str]:
        """A program whose output is read."""
        program, *words = line.split()
        found = [sys.executable, "-m", "commandbus"] if program == "commandbus" else [program]
        return subprocess.Popen(
            [*found, *words],
            cwd=self._folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, line: str) -> Iterator[Line]:
        """The command line, and what it printed."""
        with self.start(line) as program:
            said, _ = program.communicate(timeout=PATIENCE_SECONDS)
        if program.returncode:
            raise SystemExit(f"{line} failed: {said}")
        yield Line("prompt", f"$ {line}")
        yield from (Line("plain", text) for text in said.rstrip().splitlines())


def record(bus: CommandBus, terminal: Terminal) -> Iterator[Line]:
    """The lines of the picture, in the order in which they were printed."""
    yield from terminal.run("sed -n 5,8p app.py")
    yield from terminal.run("commandbus send orders import --id import-7 --max-attempts 1")
    yield from terminal.run("commandbus send orders greet --id greet-8")
    line = "commandbus worker app:handlers --processes 1"
    yield Line("prompt", f"$ {line}")
    with worker_log(terminal, line) as log:
        yield from log
        if bus.get_command("orders", "greet-8").status != "COMPLETED":
            raise SystemExit("the neighbor of the hang did not complete")
        yield from terminal.run("commandbus stuck")
        yield from terminal.run("commandbus commands --domain orders")


@contextmanager
def worker_log(terminal: Terminal, line: str) -> Iterator[list[Line]]:
    """What a worker logs until its replacement is ready; it runs until the end of the block."""
    with terminal.start(line) as supervisor:
        overdue = threading.Timer(PATIENCE_SECONDS, supervisor.kill)
        overdue.start()
        try:
            yield list(until_replaced(supervisor))
        finally:
            overdue.cancel()
            supervisor.terminate()
            supervisor.communicate(timeout=PATIENCE_SECONDS)


def until_replaced(supervisor: subprocess.Popen[str]) -> Iterator[Line]:
    """The first worker is ready; its handler hangs; the second worker is ready."""
    ready = 0
    assert supervisor.stdout is not None  # noqa: S101 - for the type checker
    for said in supervisor.stdout:
        found = LOG_LINE.fullmatch(said.rstrip())
        if found and any(words in found["text"] for words in SHOWN):
            yield Line("bad" if found["level"] == "ERROR" else "plain", f"{found['time']}  {found['text']}")
            ready += "is ready" in found["text"]
        if ready == 2:
            return
    raise SystemExit("the worker ended before it was replaced")


# --- the drawing ------------------------------------------------------------------------------------------------


def svg(lines: list[Line]) -> str:
    """A terminal with its own dark background, so that it reads the same on a light and on a dark page."""
    rows = [row for line in lines for row in wrapped(line)]
    width, height = round(COLUMNS * CHARACTER + 2 * MARGIN), len(rows) * LINE + 2 * MARGIN + BAR
    dots = "".join(
        f'<circle cx="{MARGIN + 4 + 18 * n}" cy="{BAR / 2}" r="5" fill="{color}"/>'
        for n, color in enumerate(("#ff5f56", "#ffbd2e", "#27c93f"))
    )
    size = f'width="{width}" height="{height}"'
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {width} {height}" role="img" '
        'font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, monospace" font-size="13">',
        "<title>A handler hangs; its worker ends it, is replaced, and says what it was doing</title>",
        f'<rect {size} rx="8" fill="#0d1117" stroke="#57606a"/>',
        dots,
        *(drawn(row, BAR + MARGIN + (n + 0.7) * LINE) for n, row in enumerate(rows)),
        "</svg>\n",
    ])  # fmt: skip


def wrapped(line: Line) -> list[Line]:
    """A long line goes on below, set in."""
    if len(line.text) <= COLUMNS:
        return [line]
    indent = " " * (10 if line.text[:2].isdigit() else 4)
    return [Line(line.style, text) for text in textwrap.wrap(line.text, COLUMNS, subsequent_indent=indent)]


def drawn(row: Line, y: float) -> str:
    """One row; `textLength` keeps its columns where they are in whatever font there is."""
    if not row.text.strip():
        return ""
    length = f'textLength="{len(row.text) * CHARACTER:.1f}" lengthAdjust="spacingAndGlyphs" xml:space="preserve"'
    if row.style == "prompt":
        typed = f'<tspan fill="{COLORS["prompt"]}">$</tspan>{escape(row.text[1:])}'
        return f'<text x="{MARGIN}" y="{y:.1f}" fill="{COLORS["typed"]}" font-weight="600" {length}>{typed}</text>'
    return f'<text x="{MARGIN}" y="{y:.1f}" fill="{COLORS[row.style]}" {length}>{escape(row.text)}</text>'


if __name__ == "__main__":
    main()
