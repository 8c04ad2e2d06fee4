"""examples/ocr_pipeline, run as a stranger would: the document is whole, the API saw no more than it allows, and
an operator could see what happened. And it would have told if it had been otherwise.
"""

from __future__ import annotations

import http.client
import json
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.examples import EXAMPLES, run, start, survivors
from support.redis_server import RedisServer
from support.running import make_temporary_folder
from support.waiting import until

NAME = "ocr_pipeline"
STUB = EXAMPLES / NAME / "api_stub.py"
PAGE = (EXAMPLES.parent / "docs" / "limits.md").read_text("utf-8")
RECORD = re.compile(
    r"The API's own record: (\d+) calls, at most (\d+) at once \(it allows 5\), (\d+) within 5 s \(10\), "
    r"(\d+) within a minute \(120\)\."
)


def figures(out: str) -> list[int]:
    found = RECORD.search(out)
    assert found, out
    return [int(figure) for figure in found.groups()]


def table(out: str) -> dict[str, str]:
    """The last table: chunk → how it ended."""
    return dict(re.findall(r"^(chunk-\d+)  (\w+)", out, re.MULTILINE))


def assert_whole(out: str, chunks: int) -> None:
    assert_sentences(out, chunks)
    assert table(out) == {f"chunk-{number:02}": "COMPLETED" for number in range(1, chunks + 1)}


def assert_sentences(out: str, chunks: int) -> None:
    calls, at_once, _, _ = figures(out)
    assert f"The document is whole: {chunks * 400} letters, each as in the original, merged once.\n" in out
    assert "WRONG" not in out
    assert at_once >= 3, "several workers called at once"
    assert calls > chunks, "some were tried again"
    for sentence in (
        rf"chunk \d+/{chunks} done",
        r"limit     docai \d of 5 permits in use, at most 100/m",
        r"limit     docai until [\d:]{8} \(in about \d+ ?s\): 429 from docai, step \d of the back-off",
        r"estimate  one that is sent now would wait about \d+ s \(\d+ ahead at docai\)",
        r"parked    chunk-\d+ and \d+ more: waits for a permit of docai \(5 at once, 100/m\)",
        r"parked    chunk-\d+ and \d+ more: .*429 from docai, step \d of the back-off",
        r"failed    chunk-\d+: no answer from docai within 5 s \(limit call timeout\); it is tried again",
        r"kill -9 of the API",
    ):
        assert re.search(sentence, out), f"{sentence} is nowhere in\n{out}"


@dataclass(frozen=True)
class Ended:
    """How a run of the example ended."""

    code: int
    out: str
    err: str


RUNS: dict[str, list[str]] = {
    "postgres": [],
    "redis": ["--seed", "2"],
    "too much": ["--concurrency", "9", "--rate", "400/m", "--chunks", "12"],
}


@pytest.fixture(scope="module")
def runs() -> Iterator[dict[str, Ended]]:
    """Each takes half a minute and waits for most of it, so that all of them run at once."""
    with ExitStack() as stack:
        redis = RedisServer()
        stack.callback(redis.close)
        redis.start()

        def play(name: str) -> Ended:
            more = ["--redis", redis.url] if name == "redis" else []
            folder = make_temporary_folder()
            try:
                return Ended(*run(NAME, folder, *RUNS[name], *more))
            finally:
                shutil.rmtree(folder, ignore_errors=True)

        pool = stack.enter_context(ThreadPoolExecutor(len(RUNS)))
        yield dict(zip(RUNS, pool.map(play, RUNS), strict=True))


@pytest.mark.slow
@pytest.mark.shared_setup
@pytest.mark.waits
@pytest.mark.parametrize(("name", "store"), [("postgres", "PostgreSQL"), ("redis", "Redis")])
def test_the_document_is_whole_and_the_api_saw_no_more_than_it_allows(
    runs: dict[str, Ended], name: str, store: str
) -> None:
    ended = runs[name]
    assert (ended.code, ended.err) == (0, ""), ended.out + ended.err
    assert f"permits are kept in {store}" in ended.out
    assert_whole(ended.out, 17)


@pytest.mark.slow
@pytest.mark.shared_setup
@pytest.mark.waits
def test_it_fails_when_the_workers_call_more_than_the_api_allows(runs: dict[str, Ended]) -> None:
    """The record can tell: without this, the two above would prove little."""
    ended = runs["too much"]
    assert (ended.code, ended.err) == (1, ""), ended.out + ended.err
    assert re.search(r"WRONG: the API saw \d+ calls (at once|within 5 s), and allows (5|10)\n", ended.out)
    assert re.search(r"WRONG: \d+ calls were refused because a limit was exceeded\n", ended.out)
    assert "The document is whole" in ended.out, "what was refused was tried again all the same"


def test_it_cleans_up_when_it_is_interrupted(folder: Path) -> None:
    with start(NAME, folder) as example:
        assert example.stdout is not None
        example.stdout.readline()
        example.send_signal(signal.SIGTERM)
        example.communicate(timeout=60)
    assert example.returncode == 128 + signal.SIGTERM
    assert list(folder.iterdir()) == []
    until(lambda: not survivors(example.pid, folder), what=lambda: survivors(example.pid, folder))


def test_the_docs_show_what_it_prints() -> None:
    (shown,) = (code for code in re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL) if "The document is" in code)
    assert_sentences(shown, 17)


# --- the API on its own -----------------------------------------------------------------------------------------


class Stub:
    """The API's process."""

    def __init__(self, folder: Path) -> None:
        self.record = folder / "calls.jsonl"
        self.port = 0
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        words = ["--port", self.port, "--record", self.record, "--chunks", 1000, "--seed", 1]
        self._process = subprocess.Popen(
            [sys.executable, STUB, *map(str, words)], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    def kill(self) -> None:
        if self._process is not None:
            with self._process:
                self._process.kill()
            self._process = None

    def call(self, chunk: int, answers: list[tuple[int, str | None, bytes]]) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        connection.request("POST", "/recognize", zlib.compress(b"text"), {"Chunk": str(chunk)})
        answer = connection.getresponse()
        answers.append((answer.status, answer.getheader("Retry-After"), answer.read()))
        connection.close()

    def lines(self, event: str) -> list[dict[str, Any]]:
        found = (json.loads(line) for line in self.record.read_text("utf-8").splitlines())
        return [line for line in found if line["event"] == event]


@pytest.fixture
def stub(tmp_path: Path) -> Iterator[Stub]:
    stub = Stub(tmp_path)
    stub.start()
    yield stub
    stub.kill()


def audit(stub: Stub) -> str:
    code = "import sys, pathlib, api_stub; print(api_stub.read_record(pathlib.Path(sys.argv[1])).exceeded)"
    return subprocess.run(
        [sys.executable, "-c", code, stub.record], cwd=STUB.parent, capture_output=True, text=True, check=True
    ).stdout


def test_the_api_refuses_more_than_five_at_once_and_writes_it_down(stub: Stub) -> None:
    answers: list[tuple[int, str | None, bytes]] = []
    callers = [threading.Thread(target=stub.call, args=(number, answers)) for number in range(1, 13)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert (200, None, b"text") in answers
    assert (429, "2", b"exceeds: at once") in answers
    assert len(stub.lines("came")) == len(stub.lines("went")) == len(answers) == 12
    assert re.search(r"the API saw \d+ calls at once, and allows 5", audit(stub))


def test_the_api_keeps_its_rate_over_a_restart(stub: Stub) -> None:
    """Its record is what it remembers: ten calls within five seconds, whoever served them."""
    now = time.monotonic()
    stub.kill()
    with stub.record.open("a") as file:
        for call in range(1, 12):
            line = {"event": "came", "at": now, "call": call, "chunk": 1, "verdict": "served"}
            file.write(json.dumps(line) + "\n")
    stub.start()
    answers: list[tuple[int, str | None, bytes]] = []
    stub.call(1, answers)
    assert answers == [(429, "2", b"exceeds: rate")]
    told = audit(stub)
    assert "12 calls within 5 s, and allows 10" in told
    assert "11 calls at once, and allows 5" in told, "those went with the one that was killed"
