"""The probes over real HTTP: what is answered, and what bad clients can and cannot do."""

from __future__ import annotations

import http.client
import json
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from commandbus.errors import ConfigurationError
from commandbus.supervisor import http_server as module
from commandbus.supervisor.health_server import HealthServer, HealthVerdict
from support.running import drawn
from support.waiting import Stopwatch, until

ESTABLISHED = "01"


class Supervised:
    """What the probes ask; a test changes it."""

    def __init__(self) -> None:
        self.live: Callable[[], Any] = lambda: HealthVerdict(True)
        self.ready: Callable[[], Any] = lambda: HealthVerdict(True)
        self.metrics: Callable[[], Any] = lambda: "commandbus_slots 4\n"


@pytest.fixture
def supervised() -> Supervised:
    return Supervised()


@pytest.fixture
def served(supervised: Supervised) -> Iterator[HealthServer]:
    probes = HealthServer(
        "127.0.0.1", 0,
        live=lambda: supervised.live(), ready=lambda: supervised.ready(), metrics=lambda: supervised.metrics(),
    )  # fmt: skip
    with probes:
        yield probes
    until(lambda: probe_threads() == 0)  # an answer that is being made when the server stops is finished


class Reply:
    def __init__(self, probes: HealthServer, path: str, method: str = "GET", host: str = "127.0.0.1") -> None:
        with closing(http.client.HTTPConnection(host, probes.port, timeout=10)) as conn:
            conn.request(method, path)
            answer = conn.getresponse()
            self.code, self.headers, self.body = answer.status, answer.headers, answer.read()

    @property
    def document(self) -> Any:
        assert self.headers["Content-Type"] == "application/json; charset=utf-8"
        return json.loads(self.body)


def connected(probes: HealthServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", probes.port), timeout=10)


def probe_threads() -> int:
    return sum(thread.name.startswith("probes") for thread in threading.enumerate())


def open_connections(probes: HealthServer) -> int:
    """How many connections to the server are open here."""
    wanted = f":{probes.port:04X}"
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(fields[1].endswith(wanted) and fields[3] == ESTABLISHED for fields in lines)


def test_port_zero_takes_a_free_one_and_tells_it(served: HealthServer) -> None:
    assert served.port > 0
    assert Reply(served, "/health/live").document == {"status": "alive", "reasons": []}


@pytest.mark.parametrize("path", ["live", "ready"])
@pytest.mark.parametrize(
    ("verdict", "code", "document"),
    [
        (HealthVerdict(True), 200, {"status": "healthy", "reasons": []}),
        (
            HealthVerdict(True, {"status": "degraded", "reasons": ["10 failures"], "workers": 2}),
            200,
            {"status": "degraded", "reasons": ["10 failures"], "workers": 2},
        ),
        (HealthVerdict(False), 503, {"status": "critical", "reasons": []}),
        (
            HealthVerdict(False, {"status": "critical", "reasons": ["the database cannot be reached"]}),
            503,
            {"status": "critical", "reasons": ["the database cannot be reached"]},
        ),
    ],
)
def test_a_verdict_is_a_code_and_a_document(
    served: HealthServer,
    supervised: Supervised,
    path: str,
    verdict: HealthVerdict,
    code: int,
    document: dict[str, Any],
) -> None:
    setattr(supervised, path, lambda: verdict)
    reply = Reply(served, f"/health/{path}?verbose=1")
    if path == "live" and document["status"] == "healthy":
        document = document | {"status": "alive"}
    assert (reply.code, reply.document) == (code, document)
    assert reply.headers["Cache-Control"] == "no-store"
    other = "ready" if path == "live" else "live"
    assert Reply(served, f"/health/{other}").code == 200


def test_metrics_are_text_for_prometheus(served: HealthServer, supervised: Supervised) -> None:
    supervised.metrics = lambda: 'commandbus_x{name="ü\udc80"} 1\n'
    reply = Reply(served, "/metrics")
    assert (reply.code, reply.headers["Content-Type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert reply.body.decode() == 'commandbus_x{name="ü\\udc80"} 1\n'


@pytest.mark.parametrize("path", ["/", "/health", "/health/live/", "/HEALTH/LIVE", "/metrics/../etc/passwd", "//"])
def test_anything_else_is_not_found(served: HealthServer, path: str) -> None:
    reply = Reply(served, path)
    assert reply.code == 404
    assert reply.document == {
        "status": "not found", "reasons": ["there is only /health/live, /health/ready, /metrics"]
    }  # fmt: skip


def test_head_is_get_without_a_body(served: HealthServer, supervised: Supervised) -> None:
    supervised.ready = lambda: HealthVerdict(False)
    for path, code in (("/health/live", 200), ("/health/ready", 503), ("/metrics", 200), ("/other", 404)):
        head, get = Reply(served, path, "HEAD"), Reply(served, path)
        assert (head.code, head.body) == (code, b"")
        assert head.headers["Content-Length"] == str(len(get.body))


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE", "NONSENSE"])
def test_other_methods_are_not_allowed(served: HealthServer, method: str) -> None:
    reply = Reply(served, "/health/live", method)
    assert (reply.code, reply.headers["Allow"]) == (405, "GET, HEAD")
    assert reply.document["reasons"] == ["only GET and HEAD"]


@pytest.mark.parametrize("path", ["/health/live", "/health/ready", "/metrics"])
def test_an_error_in_what_is_asked_is_a_503_that_says_it_and_is_logged(
    served: HealthServer, supervised: Supervised, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    def break_down() -> Any:
        raise LookupError("no board")

    setattr(supervised, path.rpartition("/")[2], break_down)
    reply = Reply(served, path)
    assert reply.code == 503
    assert reply.document == {
        "status": "critical", "reasons": [f"{path} could not be answered: LookupError: no board"]
    }  # fmt: skip
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.exc_info


@pytest.mark.parametrize("answer", [None, HealthVerdict(True, {"loop": None}), 5])
def test_an_answer_that_makes_no_sense_is_a_503(served: HealthServer, supervised: Supervised, answer: Any) -> None:
    if isinstance(answer, HealthVerdict):
        answer.document["loop"] = answer.document  # JSON has no word for it
    supervised.live = lambda: answer
    assert Reply(served, "/health/live").code == 503


def test_what_json_has_no_word_for_is_written_as_text(served: HealthServer, supervised: Supervised) -> None:
    supervised.live = lambda: HealthVerdict(True, {"error": LookupError("x")})
    assert Reply(served, "/health/live").document["error"] == "x"


def test_a_port_in_use_is_named_with_its_setting(served: HealthServer) -> None:
    second = HealthServer("127.0.0.1", served.port, live=HealthVerdict, ready=HealthVerdict, metrics=str)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError) as refused:
        second.start()
    for expected in ("127.0.0.1", str(served.port), "WORKER_HEALTH_PORT", "in use"):
        assert expected in str(refused.value)
    second.stop()


@pytest.mark.parametrize(
    ("host", "port"), [("192.0.2.1", 0), ("no such host", 0), ("127.0.0.1", 99_999), ("x" * 300, 0)]
)
def test_an_address_that_cannot_be_had_is_named_with_its_settings(host: str, port: int) -> None:
    with pytest.raises(ConfigurationError) as refused:
        HealthServer(host, port, live=HealthVerdict, ready=HealthVerdict, metrics=str).start()  # type: ignore[arg-type]
    assert host in str(refused.value)
    assert "WORKER_HEALTH_HOST" in str(refused.value)


def test_it_listens_on_ipv6_too() -> None:
    if not socket.has_ipv6:
        pytest.skip("this Python has no IPv6")
    try:
        with closing(socket.socket(socket.AF_INET6)) as trial:
            trial.bind(("::1", 0))
    except OSError:
        pytest.skip("this machine has no IPv6")
    with HealthServer(
        "::1", 0, live=lambda: HealthVerdict(True), ready=lambda: HealthVerdict(True), metrics=str
    ) as probes:
        assert Reply(probes, "/health/live", host="::1").code == 200


def test_after_the_stop_the_port_is_free_and_it_can_start_again(served: HealthServer) -> None:
    port = served.port
    served.stop()
    served.stop()
    with pytest.raises(ConnectionRefusedError):
        connected(served)
    served.start()
    assert served.port == port
    assert Reply(served, "/health/live").code == 200
    with pytest.raises(RuntimeError, match="started already"):
        served.start()


# --- bad clients -----------------------------------------------------------------------------------------------


def hung_up(client: socket.socket) -> bool:
    try:
        return client.recv(4096) == b""
    except ConnectionResetError:
        return True


def test_a_silent_client_is_hung_up_on(served: HealthServer) -> None:
    with closing(connected(served)) as client:
        stopwatch = Stopwatch()
        assert Reply(served, "/health/live").code == 200
        assert hung_up(client)
        assert stopwatch.seconds(waits=module.READ_SECONDS) < module.READ_SECONDS + 2
    until(lambda: open_connections(served) == 0)


def test_a_client_that_sends_a_byte_at_a_time_is_hung_up_on(served: HealthServer) -> None:
    """A time-out of the socket would begin anew with every byte."""
    stopwatch = Stopwatch()
    with closing(connected(served)) as client:
        client.settimeout(0.2)
        text = iter(b"GET /health/live HTTP/1.1\r\nX-Slow: " + b"x" * 10_000)
        with pytest.raises((ConnectionError, StopIteration)):  # noqa: PT012 - the loop is what raises
            while True:
                client.send(bytes([next(text)]))
                try:
                    if client.recv(1) == b"":
                        raise ConnectionResetError
                except TimeoutError:
                    continue
    assert stopwatch.seconds(waits=module.READ_SECONDS) < module.READ_SECONDS + 3


@pytest.mark.parametrize("silent", [16, 200])
def test_silent_clients_keep_nobody_waiting(served: HealthServer, silent: int) -> None:
    """A connection costs no thread, and one too many closes the one that has been silent for longest."""
    with ExitStack() as stack:
        clients = [stack.enter_context(closing(connected(served))) for _ in range(silent)]
        for client in clients:
            with suppress(ConnectionError):
                client.send(b"G")
        for path in ("/health/live", "/health/ready", "/metrics"):
            stopwatch = Stopwatch()
            assert Reply(served, path).code == 200
            assert stopwatch.seconds() < 1.0
        assert probe_threads() == 3
        until(lambda: open_connections(served) == 0)


def test_when_full_the_one_that_was_silent_for_longest_is_closed(
    served: HealthServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "READ_SECONDS", 60.0)  # nobody is closed for being slow before all are here
    with ExitStack() as stack:
        eldest, second, *_ = [stack.enter_context(closing(connected(served))) for _ in range(module.CONNECTIONS)]
        until(lambda: open_connections(served) == module.CONNECTIONS)
        eldest.send(b"GET /health/live HTTP/1.1\r\n")
        until_heard(served)
        stack.enter_context(closing(connected(served)))
        assert hung_up(second)
        eldest.send(b"\r\n")
        assert eldest.recv(4096).startswith(b"HTTP/1.0 200 OK")


def until_heard(probes: HealthServer) -> None:
    """Until the server has read all that was sent to it."""
    wanted = f":{probes.port:04X}"

    def nothing_waits() -> bool:
        lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        found = [fields[4] for fields in lines if fields[1].endswith(wanted) and fields[3] == ESTABLISHED]
        return all(int(queues.partition(":")[2], 16) == 0 for queues in found)

    until(nothing_waits)


def test_a_flood_of_connections_is_borne(served: HealthServer) -> None:
    """Every one that asks is answered, though hundreds that do not come and go at the same time."""
    is_over = threading.Event()

    def flood() -> None:
        held: deque[socket.socket] = deque()
        while not is_over.is_set():
            held.append(connected(served))
            with suppress(OSError):
                held[-1].send(b"G")
            if len(held) > 300:
                held.popleft().close()
        for client in held:
            client.close()

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        for _ in range(20):
            for path in ("/health/live", "/health/ready", "/metrics"):
                stopwatch = Stopwatch()
                assert Reply(served, path).code == 200
                assert stopwatch.seconds() < 2.0
    finally:
        is_over.set()
        thread.join()


def test_a_slow_scrape_keeps_nobody_else_waiting(served: HealthServer, supervised: Supervised) -> None:
    go_on, begun = threading.Event(), threading.Event()

    def slow() -> str:
        begun.set()
        go_on.wait(20)
        return "# x\n"

    supervised.metrics = slow
    with ExitStack() as stack:
        clients = [stack.enter_context(closing(connected(served))) for _ in range(20)]
        for client in clients:
            client.send(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert begun.wait(60)
        for path in ("/health/live", "/health/ready"):
            assert Reply(served, path).code == 200
        go_on.set()
        for client in clients:
            assert client.recv(4096).startswith(b"HTTP/1.0 200 OK")


def everything(client: socket.socket) -> bytes:
    """What it is sent until it is hung up on."""
    found = b""
    with suppress(ConnectionError):
        while chunk := client.recv(65536):
            found += chunk
    return found


HOSTILE = {
    "empty lines": b"\r\n\r\n",
    "a word": b"GET\r\n",
    "HTTP/0.9": b"GET /health/live\r\n\r\n",
    "HTTP/9.9": b"GET / HTTP/9.9\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01" * 20,
    "binary": bytes(range(256)) * 100,
    "a long line": b"GET /" + b"x" * 70_000,
    "a long header": b"GET / HTTP/1.0\r\nA: " + b"b" * 1_000_000,
    "many headers": b"GET / HTTP/1.0\r\n" + b"A: b\r\n" * 200_000,
    "a body": b"POST /health/live HTTP/1.1\r\nContent-Length: 5000000\r\n\r\n" + b"x" * 100_000,
    "pipelined": b"GET /health/live HTTP/1.1\r\n\r\n" * 1000,
    "odd target": b"GET /\xff\x00\x1b[31m HTTP/1.1\r\n\r\n",
    "odd version": b"GET / HTTP/1.9999999999999999999999\r\n\r\n",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_request_gets_an_answer_or_a_close(
    served: HealthServer, name: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with closing(connected(served)) as client:
        with suppress(ConnectionError):
            client.sendall(HOSTILE[name])
        answer = everything(client)
    assert answer.count(b"HTTP/1.0 ") <= 1
    assert answer == b"" or b'"reasons"' in answer
    until(lambda: open_connections(served) == 0)
    assert Reply(served, "/health/live").code == 200
    ours = [record for record in caplog.records if record.name.startswith("commandbus")]
    assert not [record for record in ours if record.levelno > logging.INFO]
    assert capfd.readouterr().err == ""


def test_of_pipelined_requests_the_first_is_answered(served: HealthServer) -> None:
    with closing(connected(served)) as client:
        client.sendall(HOSTILE["pipelined"])
        assert everything(client).startswith(b"HTTP/1.0 200 OK")


def test_whatever_is_sent_and_broken_off_the_next_one_is_answered(served: HealthServer) -> None:
    line = st.binary(max_size=60).map(lambda line: b"GET /" + line + b"\r\n\r\n")
    for text in drawn(st.binary(max_size=300) | line, 50, thorough=1000):
        client = connected(served)
        client.send(text)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset, not a good-bye
        client.close()
        assert Reply(served, "/health/live").code == 200, text


@pytest.mark.parametrize(
    "text", [b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET / HTTP/1.0\r\n" + b"A: b\r\n" * 200 + b"\r\n"]
)
def test_nonsense_is_answered_in_json(served: HealthServer, text: bytes) -> None:
    with closing(connected(served)) as client:
        client.send(text)
        answer = b""
        while chunk := client.recv(4096):
            answer += chunk
    assert b'"reasons"' in answer
    assert b"<html" not in answer.lower()


def test_a_client_that_does_not_take_its_answer_is_hung_up_on(
    served: HealthServer, supervised: Supervised
) -> None:
    supervised.metrics = lambda: "# x\n" * 5_000_000
    with closing(connected(served)) as client:
        client.send(b"GET /metrics HTTP/1.0\r\n\r\n")
        before = time.monotonic()
        assert client.recv(100).startswith(b"HTTP/1.0 200 OK")
        until(lambda: open_connections(served) == 0, module.SEND_SECONDS + 5)
        assert time.monotonic() - before > module.SEND_SECONDS / 2
    assert Reply(served, "/health/live").code == 200


def test_a_client_that_takes_its_answer_a_little_at_a_time_is_hung_up_on(
    served: HealthServer, supervised: Supervised, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TAKE_SECONDS", 3.0)
    whole = "# x\n" * 20_000_000
    supervised.metrics = lambda: whole
    with closing(connected(served)) as client, suppress(ConnectionError):
        client.send(b"GET /metrics HTTP/1.0\r\n\r\n")
        taken, before = 0, time.monotonic()
        while open_connections(served) or time.monotonic() - before < 1.0:
            taken += len(client.recv(300_000))
            time.sleep(0.05)
    assert taken < len(whole) / 2, "it would have had the whole answer after 13 s"
    assert Reply(served, "/health/live").code == 200


def test_what_is_asked_may_take_longer_than_a_client_may(served: HealthServer, supervised: Supervised) -> None:
    """The limit is on the client's asking, not on our answering."""
    go_on = threading.Event()

    def look() -> HealthVerdict:
        go_on.wait(module.READ_SECONDS + 0.5)
        return HealthVerdict(True)

    supervised.ready = look
    assert Reply(served, "/health/ready").code == 200
