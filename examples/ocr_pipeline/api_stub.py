"""An API for OCR, as one meets them: it allows 5 calls at once and 120 a minute, and it is not always well.

    python api_stub.py --port 0 --record calls.jsonl --chunks 17 --seed 1

`POST /recognize` with a scan as the body and its number in the header `Chunk` answers the text. More calls than
are allowed get a 429 with `Retry-After`. By a script that follows from the seed, it is busy for a while (429 for
everybody), two calls hang, and one connection is reset.

Everything goes into the record, one line of JSON for each call that comes and goes: written at once, so that it
survives kill -9, and read at the next start, so that a restart forgets nothing. `read_record` is for auditors.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import struct
import threading
import time
import zlib
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

AT_ONCE = 5
A_MINUTE = 120
METER_SECONDS = 5  # it does not wait for a minute to be over: 120 a minute are 10 within any 5 seconds
METER_CALLS = A_MINUTE * METER_SECONDS // 60

BUSY_SECONDS = 3.0
HANG_SECONDS = 8.0  # after which the API itself drops a call that hangs; its caller has left long before
WORK_SECONDS = (1.8, 3.0)
UNLUCKY = ("reset", "hangs", "hangs")


class Script:
    """What goes wrong, and when."""

    def __init__(self, seed: int, chunks: int) -> None:
        draw = random.Random(seed)  # noqa: S311 - a script
        unlucky = draw.sample(range(1, chunks + 1), k=min(len(UNLUCKY), chunks))
        self.trouble = dict(zip(unlucky, UNLUCKY, strict=False))  # of a chunk; it happens once
        self.busy_from = max(1, min(6, chunks // 2))  # the call with which the busy time begins


class Api:
    """The limits, the script and the record; every method that changes something holds the lock."""

    def __init__(self, record: Path, script: Script) -> None:
        self._lock = threading.Lock()
        self._script = script
        self._file = os.open(record, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._came: list[float] = []
        self._inside: set[int] = set()
        self._had_it: set[int] = set()  # chunks whose trouble is behind them
        self._busy_until: float | None = None
        for line in _lines(record):
            if line["event"] == "came":
                self._came.append(line["at"])
                if line["verdict"] in UNLUCKY:
                    self._had_it.add(line["chunk"])
                elif line["verdict"] == "busy" and self._busy_until is None:
                    self._busy_until = line["at"] + BUSY_SECONDS
        self._write({"event": "up", "at": time.monotonic()})

    def enter(self, chunk: int) -> tuple[int, str]:
        """A call comes: its number, and what becomes of it: served, hangs, reset, busy, or what it exceeds."""
        with self._lock:
            now = time.monotonic()
            self._came.append(now)
            call = len(self._came)
            self._inside.add(call)
            verdict = self._judge(call, chunk, now)
            if verdict in UNLUCKY:
                self._had_it.add(chunk)
            self._write({"event": "came", "at": now, "call": call, "chunk": chunk, "verdict": verdict})
            return call, verdict

    def leave(self, call: int) -> None:
        """It goes. Told before its answer is on the way: who has the answer may send the next call at once."""
        with self._lock:
            self._inside.discard(call)
            self._write({"event": "went", "at": time.monotonic(), "call": call})

    def _judge(self, call: int, chunk: int, now: float) -> str:
        if len(self._inside) > AT_ONCE:
            return "exceeds: at once"
        if _within(self._came, METER_SECONDS) > METER_CALLS or _within(self._came, 60) > A_MINUTE:
            return "exceeds: rate"
        if call >= self._script.busy_from and self._busy_until is None:
            self._busy_until = now + BUSY_SECONDS
        if self._busy_until is not None and now < self._busy_until:
            return "busy"
        return "served" if chunk in self._had_it else self._script.trouble.get(chunk, "served")

    def _write(self, line: dict[str, object]) -> None:
        os.write(self._file, json.dumps(line).encode() + b"\n")


class Handler(BaseHTTPRequestHandler):
    """One connection, one call."""

    api: Api

    def do_POST(self) -> None:
        """Take a scan, answer its text, or behave badly."""
        scan = self.rfile.read(int(self.headers["Content-Length"]))
        call, verdict = self.api.enter(int(self.headers["Chunk"]))
        try:
            if verdict == "served":
                time.sleep(random.uniform(*WORK_SECONDS))  # noqa: S311 - it reads
            elif verdict == "hangs":
                time.sleep(HANG_SECONDS)
        finally:
            self.api.leave(call)
        if verdict == "served":
            self._answer(200, zlib.decompress(scan))
        elif verdict == "busy" and call % 2:
            self._answer(
                429, b"busy", retry_after=formatdate(time.time() + 3, usegmt=True)
            )  # both forms are in use
        elif verdict == "busy" or verdict.startswith("exceeds"):
            self._answer(429, verdict.encode(), retry_after="2")
        elif verdict == "reset":
            # Closed without lingering, a connection ends with a reset.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def _answer(self, status: int, body: bytes, *, retry_after: str | None = None) -> None:
        self.send_response(status)
        if retry_after is not None:
            self.send_header("Retry-After", retry_after)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """The record is enough."""


# --- for who audits it ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Record:
    """What the record says. It is added up anew from who came and went when, whatever the API thought of it."""

    calls: int
    most_at_once: int
    most_in_meter: int
    most_in_minute: int
    starts: int
    verdicts: Counter[str]
    inside: int

    @property
    def exceeded(self) -> list[str]:
        """Which limits were exceeded, and by how much."""
        found = [
            f"the API saw {most} calls {what}, and allows {allowed}"
            for most, allowed, what in (
                (self.most_at_once, AT_ONCE, "at once"),
                (self.most_in_meter, METER_CALLS, f"within {METER_SECONDS} s"),
                (self.most_in_minute, A_MINUTE, "within a minute"),
            )
            if most > allowed
        ]
        refused = sum(count for verdict, count in self.verdicts.items() if verdict.startswith("exceeds"))
        return found + ([f"{refused} calls were refused because a limit was exceeded"] if refused else [])


def read_record(path: Path) -> Record:
    """Add it up."""
    came: list[float] = []
    inside: set[int] = set()
    verdicts: Counter[str] = Counter()
    most_at_once = starts = 0
    for line in _lines(path):
        if line["event"] == "up":
            starts += 1
            inside.clear()  # they died with the process that served them
        elif line["event"] == "came":
            came.append(line["at"])
            inside.add(line["call"])
            verdicts[line["verdict"]] += 1
            most_at_once = max(most_at_once, len(inside))
        else:
            inside.discard(line["call"])
    most = [
        max((_within(came[: n + 1], window) for n in range(len(came))), default=0)
        for window in (METER_SECONDS, 60)
    ]
    return Record(len(came), most_at_once, most[0], most[1], starts, verdicts, len(inside))


def _within(came: list[float], seconds: float) -> int:
    """How many calls came within so many seconds before the last one, that one included."""
    return len(came) - bisect_right(came, came[-1] - seconds)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def main() -> None:
    """Serve until killed; prints the port."""
    parser = argparse.ArgumentParser(description="A stub of an OCR API.")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--chunks", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    options = parser.parse_args()
    server = ThreadingHTTPServer(("127.0.0.1", options.port), Handler)
    Handler.api = Api(options.record, Script(options.seed, options.chunks))
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
