"""A long document through an OCR API that allows 5 calls at once and 120 a minute, and is not always well.

    ./dev example ocr_pipeline [--chunks 17] [--seed 1] [--redis redis://localhost:6379/0]

The document is cut into chunks, one command each, all in one batch; three worker processes send them to the API
(`api_stub.py`, a process of its own that speaks HTTP), and when the last one has ended, the batch merges them. On
the way the API is busy (429), two calls hang, a connection is reset, and the API is killed and started again.
Meanwhile this program shows what an operator sees. Read `commandbus.toml` and `handlers.py` first: they are the
example, all else is its stage.

At the end it compares the merged document with the original, letter by letter, and adds up the API's own record of
its calls. The exit code is 1 if the document is wrong or was merged more than once, or if the workers exceeded
what the API allows. To see that it would: `--concurrency 9 --rate 400/m` lets them call more than that.

Everything happens on an embedded PostgreSQL in a temporary folder, and nothing of it is left behind.
"""

from __future__ import annotations

import argparse
import base64
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import zip_longest
from pathlib import Path
from typing import Any

import api_stub
import handlers

from commandbus import BatchRecord, CommandBus, CommandRecord, NewCommand, embedded, load_settings

HERE = Path(__file__).parent
DOMAIN, DOCUMENT, LIMIT = "ocr", "contract", "docai"
LETTERS_A_CHUNK = 400
MOST_CHUNKS = 200
WORKERS = 3
VIEW_SECONDS = 2.0
PATIENCE_SECONDS = 180.0
FAILURES = ("RETRY", "TIMED_OUT", "LOST", "EXHAUSTED")  # not: parked, or given back by a worker that stops


def main() -> int:
    """Set the stage, send the document through, and audit what came out."""
    options = read_options()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # noqa: ARG005 - and clean up
    with tempfile.TemporaryDirectory(prefix="ocr-pipeline-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # where root runs this, the server is another user's
        with embedded.start(folder / "postgres") as server, Api(folder / "calls.jsonl", options) as api:
            os.environ["COMMANDBUS_DATABASE_URL"] = server.dsn  # for this process, and the workers that it starts
            os.environ["COMMANDBUS_ENVIRONMENT"] = f"ocr-{os.getpid()}"  # a Redis may be others', too
            os.environ["OCR_API"] = api.url
            if options.redis:
                os.environ["COMMANDBUS_REDIS_URL"] = options.redis
            with CommandBus(settings=load_settings(config_file=HERE / "commandbus.toml")) as bus:
                text = write_document(options)
                prepare(bus, options)
                with workers(folder / "workers.log"):
                    until(lambda: len(bus.workers()) == WORKERS, "the workers to start")
                    send(bus, text)
                    bus.wait_for_batch(
                        DOMAIN, DOCUMENT, wait=PATIENCE_SECONDS, on_progress=Operator(bus, api).look
                    )
                    until(lambda: merges(bus), "the document to be merged")
                return audit(bus, api, text)


def read_options() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description="OCR of a long document, within the limits of an API.")
    parser.add_argument("--chunks", type=int, default=17, help="how many chunks the document has (17)")
    parser.add_argument("--seed", type=int, default=1, help="of the document, and of what goes wrong (1)")
    parser.add_argument("--redis", metavar="URL", help="keep the permits of the limit there, not in PostgreSQL")
    parser.add_argument("--concurrency", type=int, help="let the workers make so many calls at once")
    parser.add_argument("--rate", help="let the workers call as often as this, such as 400/m")
    options = parser.parse_args()
    if not 1 <= options.chunks <= MOST_CHUNKS:
        parser.error(f"--chunks is from 1 to {MOST_CHUNKS}")
    return options


def write_document(options: argparse.Namespace) -> str:
    """Something to read."""
    draw = random.Random(options.seed)  # noqa: S311 - a text
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyzäöüß", k=draw.randint(2, 9))) for _ in range(300)]
    text = ""
    while len(text) < options.chunks * LETTERS_A_CHUNK:
        text += " ".join(draw.choices(words, k=draw.randint(4, 12))).capitalize() + ".\n"
    return text[: options.chunks * LETTERS_A_CHUNK]


def prepare(bus: CommandBus, options: argparse.Namespace) -> None:
    """The schema, the tables, and the limit, if it is to be another one than that of commandbus.toml."""
    bus.migrate(domains=[DOMAIN])
    with bus.connect() as conn:
        conn.execute(handlers.TABLES)
    (declared,) = bus.settings.limits
    bus.declare_limit(declared)  # the workers do so, too; the operator wants to see it before they are up
    wanted = {"concurrency": options.concurrency, "rate": options.rate}
    if any(wanted.values()):
        bus.set_limit(LIMIT, operator="you", **{name: value for name, value in wanted.items() if value})


def send(bus: CommandBus, text: str) -> None:
    """One command a chunk, all or none; the batch's own command is sent once, when the last of them has ended."""
    pieces = [text[start : start + LETTERS_A_CHUNK] for start in range(0, len(text), LETTERS_A_CHUNK)]
    commands = (
        NewCommand(
            "recognize",
            {"document": DOCUMENT, "number": number, "scan": scan(piece)},
            command_id=f"chunk-{number:02}",
        )
        for number, piece in enumerate(pieces, start=1)
    )
    bus.create_batch(DOMAIN, commands, batch_id=DOCUMENT, on_complete=handlers.merge)
    say(f"{len(text)} letters in {len(pieces)} chunks; {WORKERS} workers; permits are kept in {where(bus)}\n")


def scan(piece: str) -> str:
    """A picture of a text, as far as this API is concerned."""
    return base64.b64encode(zlib.compress(piece.encode())).decode()


# --- the processes ----------------------------------------------------------------------------------------------


class Api:
    """The API's process, which can be killed and started again."""

    def __init__(self, record: Path, options: argparse.Namespace) -> None:
        self._record = record
        self._options = options
        self._port = 0
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Api:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def url(self) -> str:
        """Where it takes scans."""
        return f"http://127.0.0.1:{self._port}/recognize"

    @property
    def record(self) -> api_stub.Record:
        """What it has written down."""
        return api_stub.read_record(self._record)

    def start(self) -> None:
        """Start it, on the port that it had before."""
        words = {
            "port": self._port,
            "record": self._record,
            "chunks": self._options.chunks,
            "seed": self._options.seed,
        }
        self._process = subprocess.Popen(
            [sys.executable, HERE / "api_stub.py", *(f"--{name}={value}" for name, value in words.items())],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None  # noqa: S101 - for the type checker
        self._port = int(self._process.stdout.readline())

    def kill(self) -> None:
        """With SIGKILL: whoever waits for an answer hears that his connection is gone."""
        if self._process is not None:
            with self._process:
                self._process.kill()
            self._process = None


@contextmanager
def workers(log: Path) -> Iterator[None]:
    """A supervisor with three workers, as on any machine; it finds commandbus.toml in its folder."""
    with log.open("wb") as out:
        supervisor = subprocess.Popen(
            [sys.executable, "-m", "commandbus", "worker", "--processes", str(WORKERS)],
            cwd=HERE,
            stdout=out,
            stderr=out,
        )
        try:
            yield
        except Exception:
            sys.stderr.write(log.read_text("utf-8", "replace"))
            raise
        finally:
            supervisor.terminate()
            supervisor.wait(60)


# --- what an operator sees --------------------------------------------------------------------------------------


class Operator:
    """Looks every other second, and does the API some harm half-way."""

    def __init__(self, bus: CommandBus, api: Api) -> None:
        self._bus = bus
        self._api = api
        self._looks_at = 0.0
        self._has_killed = False
        self._told: set[tuple[int, int]] = set()

    def look(self, batch: BatchRecord) -> None:
        """Called with every look at the batch, twice a second."""
        if not self._has_killed and batch.completed * 2 >= batch.total and self._api.record.inside:
            self._has_killed = True
            self._api.kill()
            self._api.start()
            say(f"{datetime.now(UTC):%H:%M:%S}  kill -9 of the API, with calls inside; it is started again")
        if time.monotonic() >= self._looks_at or batch.is_finished:
            self._looks_at = time.monotonic() + VIEW_SECONDS
            self._show(batch)

    def _show(self, batch: BatchRecord) -> None:
        limit, estimate = self._bus.get_limit(LIMIT), self._bus.estimate(LIMIT)
        say(f"{datetime.now(UTC):%H:%M:%S}  chunk {batch.completed}/{batch.total} done")
        tell("limit", f"{LIMIT} {limit.text}")
        chunks = chunks_of(self._bus)
        self._tell_news(chunks)
        if batch.is_finished:
            return
        wait = "nobody knows how long" if estimate.seconds is None else f"about {estimate.seconds:.0f} s"
        tell("estimate", f"one that is sent now would wait {wait} ({estimate.text})")
        running = [chunk.command_id for chunk in chunks if chunk.status == "IN_PROGRESS"]
        parked = [chunk for chunk in chunks if chunk.waiting_for]
        if running:
            tell("running", ", ".join(running))
        if parked:
            others = f" and {len(parked) - 1} more" if len(parked) > 1 else ""
            tell("parked", f"{parked[0].command_id}{others}: {parked[0].waiting_note}")

    def _tell_news(self, chunks: list[CommandRecord]) -> None:
        """What failed since the last look; the history of a command has every attempt."""
        for chunk in chunks:
            for attempt in self._bus.get_attempts(DOMAIN, chunk.command_id):
                if attempt.verdict in FAILURES and (chunk.id, attempt.number) not in self._told:
                    self._told.add((chunk.id, attempt.number))
                    fate = "" if attempt.retry_at is None else "; it is tried again"
                    tell("failed", f"{chunk.command_id}: {attempt.error}{fate}")


# --- what became of it ------------------------------------------------------------------------------------------


def audit(bus: CommandBus, api: Api, text: str) -> int:
    """Print it. Returns the exit code."""
    say("\nchunk     ended      attempts  429s  time-outs  broken")
    for chunk in chunks_of(bus):
        tries = bus.get_attempts(DOMAIN, chunk.command_id)
        refused = sum((item.error_code or "").startswith("RATE_LIMITED") for item in tries)
        late = sum(item.error_code == "TIMEOUT" for item in tries)
        broken = sum(item.verdict in FAILURES for item in tries) - late
        made = broken + late + (chunk.status == "COMPLETED")
        figures = f"{made:>8}  {refused or '':>4}  {late or '':>9}  {broken or '':>6}"
        say(f"{chunk.command_id}  {chunk.status:<9}  {figures}".rstrip())
    record = api.record
    say(
        f"\nThe API's own record: {record.calls} calls, at most {record.most_at_once} at once (it allows "
        f"{api_stub.AT_ONCE}), {record.most_in_meter} within {api_stub.METER_SECONDS} s ({api_stub.METER_CALLS}), "
        f"{record.most_in_minute} within a minute ({api_stub.A_MINUTE})."
    )
    seen = record.verdicts
    say(
        f"What went wrong: {seen['busy']} were told 429, {seen['hangs']} hung, {seen['reset']} was reset, "
        f"and the API itself was killed {'once' if record.starts == 2 else f'{record.starts - 1} times'}."
    )
    wrong = record.exceeded + read_proof(bus, text)
    for problem in wrong:
        say(f"WRONG: {problem}")
    return 1 if wrong else 0


def read_proof(bus: CommandBus, text: str) -> list[str]:
    """Is the merged document the original? What is wrong with it."""
    merged = rows(bus, "SELECT content FROM document")
    if len(merged) != 1:
        return [f"the document was merged {len(merged)} times"]
    content: str = merged[0][0]
    if content != text:
        letter = next(n for n, pair in enumerate(zip_longest(text, content), start=1) if pair[0] != pair[1])
        return [
            f"the document ({len(content)} letters) differs from the original ({len(text)}) at letter {letter}"
        ]
    say(f"The document is whole: {len(content)} letters, each as in the original, merged once.")
    return []


# --- small things -----------------------------------------------------------------------------------------------


def chunks_of(bus: CommandBus) -> list[CommandRecord]:
    """All of them, in their order."""
    found = bus.query_commands(domain=DOMAIN, batch_id=DOCUMENT, limit=MOST_CHUNKS)
    return sorted(found, key=lambda record: record.data["number"])


def merges(bus: CommandBus) -> list[CommandRecord]:
    """The command that the batch sent with its end, if it has run, however it ended."""
    sent = bus.query_commands(domain=DOMAIN, command_type="merge")
    return [record for record in sent if record.status.is_final]


def until(condition: Callable[[], object], what: str) -> None:
    """Wait for it."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {PATIENCE_SECONDS:g} s for {what}")
        time.sleep(0.05)


def where(bus: CommandBus) -> str:
    """Where the permits of the limit are kept."""
    return "Redis" if bus.get_limit(LIMIT).store == "redis" else "PostgreSQL"


def rows(bus: CommandBus, query: str) -> list[tuple[Any, ...]]:
    """What a query answers."""
    with bus.connect() as conn:
        return conn.execute(query.encode()).fetchall()


def tell(what: str, line: str) -> None:
    """A line of the operator's view."""
    say(f"          {what:<9} {line}")


def say(line: str) -> None:
    """Print at once, also into a pipe."""
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
