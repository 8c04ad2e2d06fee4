"""The small examples: each one runs to its end, prints what it is about, and is in the index.

They share the run's PostgreSQL. With `--thorough` each runs twice on one database, as for a reader who runs it
again.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.running import examples

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[2] / "examples"
INDEX = (FOLDER / "README.md").read_text("utf-8")
SMALL = sorted(FOLDER.glob("*.py"))

# What each prints, as regular expressions, one a line.
PRINTED = {
    "approval": [
        *(rf"  {name}" for name in ("reserve", "pack", "send_parcel", "ask_for_a_review")),
        r"Ann: COMPLETED, None",
        *(rf"  {name}" for name in ("reserve", "release")),
        r"Bob: COMPENSATED, step 2 \(approval\) failed: no signal 'approval' came in time",
    ],
    "async_handlers": [r"ten attempts ran at once: \['PAGE 0', 'PAGE 1', 'PAGE 2'\] …"],
    "batch": [
        r"sent: 500",
        r"the batch sent: COMPLETED_WITH_FAILURES, letters\.csv",
        r"COMPLETED_WITH_FAILURES: 495 printed, 5 failed",
    ],
    "breaker": [
        r"the breaker opened after [3-6] calls, with 20 commands to run",
        r"20 payments were made; the breaker is CLOSED",
    ],
    "call": [
        r"12 / 3 = 4\.0",
        r"12 / 0 failed: cannot divide by zero \[ZERO\]",
        r"no result within 0\.2 s; waiting again",
        r"12 / 4 = 3\.0",
    ],
    "cancel": [
        r"one that waits: CANCELED",
        r"one that runs: REQUESTED",
        r"the handler was asked to stop, and cleans up",
        r"its outcome: CANCELED, canceled by .+: not needed any more",
    ],
    "chunks": [
        r"a chunk of 100",
        r"99 of 100 completed",
        r"a chunk of 3",
        *(r"page [012] by itself" for _ in range(3)),
        r"2 of 3 completed",
    ],
    "deadline": [
        r"small file: 2 pages",
        r"asked to stop after \d pages; closing the file",
        r"large file: TIMEOUT",
        r"more time: 8 pages",
    ],
    "delayed_send": [
        r"waiting in the queue: 2",
        r"sent with (delay|at)=: due after 1 s, started after [1-9] s",
        r"sent with (delay|at)=: due after 1 s, started after [1-9] s",
    ],
    "hang": [
        r"ended: did not respond to cancellation within 0\.5 seconds: .*",
        r"the slot is back: hello",
        r"loop: ExecutionStuck after \d\.\d s",
        r"it was here: .*hang\.py\", line 1[34], in loop",
        r"    (time|while).*",
    ],
    "isolation": [
        r"in another process: True",
        r"broken\.png: WorkerLost its process died of SIGABRT",
        r"the worker goes on: next\.png resized",
    ],
    "keys": [r"at most 2 of tenant a at once; booked in order: \[0, 1, 2, 3, 4\]"],
    "middleware": [r"bill in trace 4711", r"ship in trace 4711"],
    "limit": [r"12 pages were read with 8 slots, at most 2 at once", r"charged attempts: \{1\}"],
    "replies": [r"30 EUR: SUCCESS \{'left': 70\}", r"300 EUR: FAILED None, because of NO_FUNDS"],
    "retry_policy": [
        *(rf"good\.csv: attempt {n} of 4" for n in (1, 2, 3)),
        r"good\.csv: uploaded",
        *(rf"bad\.csv: attempt {n} of 2" for n in (1, 2)),
        r"bad\.csv: in the troubleshooting queue: the server is busy",
    ],
    "saga": [
        *(rf"  {name} for Ann" for name in ("book_flight", "book_hotel", "rent_car")),
        r"Ann: COMPLETED",
        *(rf"  {name} for Bob" for name in ("book_flight", "book_hotel", "rent_car")),
        *(rf"  {name} for Bob" for name in ("cancel_hotel", "cancel_flight")),
        r"Bob: COMPENSATED",
    ],
    "schedule": [
        r"two workers, and each firing is made once: True",
        r"next: Monday",
        r"run now: a report of eu",
    ],
    "send_in_transaction": [
        r"order 2 was rolled back: the card was refused",
        r"shipping order 1",
        r"orders in the table: \[\(1,\)\]",
    ],
    "typed_payload": [
        r"the good one: \{'paid': '9\.90'\}",
        r"the bad one: the payload is not a valid Pay: data\.order_no: must be a whole number, not '18'",
    ],
    "troubleshooting": [
        r"needs a person: deliver \[NO_ADDRESS\] nobody knows the address of Ann",
        r"result: delivered to Main St 1",
        r"history: SENT, RECEIVED, FAILED, MOVED_TO_TSQ, OPERATOR_RETRY, RECEIVED, COMPLETED",
    ],
}


@pytest.mark.parametrize("path", SMALL, ids=lambda path: path.stem)
def test_it_prints_what_it_is_about(path: Path, database: str, tmp_path: Path) -> None:
    for _ in range(examples(1, thorough=2)):
        done = subprocess.run(
            [sys.executable, str(path)],
            env={**os.environ, "COMMANDBUS_DATABASE_URL": database},
            cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        expected = PRINTED[path.stem]
        assert len(lines) == len(expected), done.stdout
        assert [pair for pair in zip(expected, lines, strict=True) if not re.fullmatch(*pair)] == []


def test_each_is_small_and_in_the_index() -> None:
    assert len(SMALL) >= 12
    assert {path.stem for path in SMALL} == PRINTED.keys()
    sizes = {path.name: len(path.read_text("utf-8").splitlines()) for path in SMALL}
    assert {name: lines for name, lines in sizes.items() if not 15 <= lines <= 40} == {}
    programs = {path.name for path in SMALL} | {path.parent.name for path in FOLDER.glob("*/main.py")}
    linked = re.findall(r"^\| \[`?([\w.]+)`?\]\(([\w./]+)\)", INDEX, re.MULTILINE)
    assert {name for name, _ in linked} == programs
    assert all((FOLDER / target).exists() for _, target in linked)
