"""The probes over real HTTP: what is answered, and what bad clients can and cannot do."""

from __future__ import annotations

import http.client
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest

from commandbus.errors import ConfigurationError
from commandbus.supervisor import probes as module
from commandbus.supervisor.probes import Probes, Verdict
from support.waiting import until


class Supervised:
    """What the probes ask; a test changes it."""

    def __init__(self) -> None:
        self.live: Callable[[], Any] = lambda: Verdict(True)
        self.ready: Callable[[], Any] = lambda: Verdict(True)
        self.metrics: Callable[[], Any] = lambda: "commandbus_slots 4\n"


@pytest.fixture
def supervised() -> Supervised:
    return Supervised()


@pytest.fixture
def served(supervised: Supervised) -> Iterator[Probes]:
    probes = Probes(
        "127.0.0.1", 0,
        live=lambda: supervised.live(), ready=lambda: supervised.ready(), metrics=lambda: supervised.metrics(),
    )  # fmt: skip
    with probes:
        yield probes


class Reply:
    def __init__(self, probes: Probes, path: str, method: str = "GET", host: str = "127.0.0.1") -> None:
        with closing(http.client.HTTPConnection(host, probes.port, timeout=10)) as conn:
            conn.request(method, path)
            answer = conn.getresponse()
            self.code, self.headers, self.body = answer.status, answer.headers, answer.read()

    @property
    def document(self) -> Any:
        assert self.headers["Content-Type"] == "application/json; charset=utf-8"
        return json.loads(self.body)


def connected(probes: Probes) -> socket.socket:
    return socket.create_connection(("127.0.0.1", probes.port), timeout=10)


def probe_threads() -> int:
    return sum("process_request_thread" in thread.name for thread in threading.enumerate())


def test_port_zero_takes_a_free_one_and_tells_it(served: Probes) -> None:
    assert served.port > 0
    assert Reply(served, "/health/live").document == {"status": "healthy", "reasons": []}


@pytest.mark.parametrize("path", ["live", "ready"])
@pytest.mark.parametrize(
    ("verdict", "code", "document"),
    [
        (Verdict(True), 200, {"status": "healthy", "reasons": []}),
        (
            Verdict(True, {"status": "degraded", "reasons": ["10 failures"], "workers": 2}),
            200,
            {"status": "degraded", "reasons": ["10 failures"], "workers": 2},
        ),
        (Verdict(False), 503, {"status": "critical", "reasons": []}),
        (
            Verdict(False, {"status": "critical", "reasons": ["the database cannot be reached"]}),
            503,
            {"status": "critical", "reasons": ["the database cannot be reached"]},
        ),
    ],
)
def test_a_verdict_is_a_code_and_a_document(
    served: Probes, supervised: Supervised, path: str, verdict: Verdict, code: int, document: dict[str, Any]
) -> None:
    setattr(supervised, path, lambda: verdict)
    reply = Reply(served, f"/health/{path}?verbose=1")
    assert (reply.code, reply.document) == (code, document)
    assert reply.headers["Cache-Control"] == "no-store"
    other = "ready" if path == "live" else "live"
    assert Reply(served, f"/health/{other}").code == 200


def test_metrics_are_text_for_prometheus(served: Probes, supervised: Supervised) -> None:
    supervised.metrics = lambda: 'commandbus_x{name="ü\udc80"} 1\n'
    reply = Reply(served, "/metrics")
    assert (reply.code, reply.headers["Content-Type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert reply.body.decode() == 'commandbus_x{name="ü\\udc80"} 1\n'


@pytest.mark.parametrize("path", ["/", "/health", "/health/live/", "/HEALTH/LIVE", "/metrics/../etc/passwd", "//"])
def test_anything_else_is_not_found(served: Probes, path: str) -> None:
    reply = Reply(served, path)
    assert reply.code == 404
    assert reply.document == {
        "status": "not found", "reasons": ["there is only /health/live, /health/ready, /metrics"]
    }  # fmt: skip


def test_head_is_get_without_a_body(served: Probes, supervised: Supervised) -> None:
    supervised.ready = lambda: Verdict(False)
    for path, code in (("/health/live", 200), ("/health/ready", 503), ("/metrics", 200), ("/other", 404)):
        head, get = Reply(served, path, "HEAD"), Reply(served, path)
        assert (head.code, head.body) == (code, b"")
        assert head.headers["Content-Length"] == str(len(get.body))


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE", "NONSENSE"])
def test_other_methods_are_not_allowed(served: Probes, method: str) -> None:
    reply = Reply(served, "/health/live", method)
    assert (reply.code, reply.headers["Allow"]) == (405, "GET, HEAD")
    assert reply.document["reasons"] == ["only GET and HEAD"]


@pytest.mark.parametrize("path", ["/health/live", "/health/ready", "/metrics"])
def test_an_error_in_what_is_asked_is_a_503_that_says_it_and_is_logged(
    served: Probes, supervised: Supervised, caplog: pytest.LogCaptureFixture, path: str
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


@pytest.mark.parametrize("answer", [None, Verdict(True, {"loop": None}), 5])
def test_an_answer_that_makes_no_sense_is_a_503(served: Probes, supervised: Supervised, answer: Any) -> None:
    if isinstance(answer, Verdict):
        answer.document["loop"] = answer.document  # JSON has no word for it
    supervised.live = lambda: answer
    assert Reply(served, "/health/live").code == 503


def test_what_json_has_no_word_for_is_written_as_text(served: Probes, supervised: Supervised) -> None:
    supervised.live = lambda: Verdict(True, {"error": LookupError("x")})
    assert Reply(served, "/health/live").document["error"] == "x"


def test_a_port_in_use_is_named_with_its_setting(served: Probes) -> None:
    second = Probes("127.0.0.1", served.port, live=Verdict, ready=Verdict, metrics=str)  # type: ignore[arg-type]
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
        Probes(host, port, live=Verdict, ready=Verdict, metrics=str).start()  # type: ignore[arg-type]
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
    with Probes("::1", 0, live=lambda: Verdict(True), ready=lambda: Verdict(True), metrics=str) as probes:
        assert Reply(probes, "/health/live", host="::1").code == 200


def test_after_the_stop_the_port_is_free_and_it_can_start_again(served: Probes) -> None:
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


def test_a_silent_client_is_hung_up_on(served: Probes) -> None:
    with closing(connected(served)) as client:
        before = time.monotonic()
        assert Reply(served, "/health/live").code == 200
        assert hung_up(client)
        assert time.monotonic() - before < module.READ_SECONDS + 2
    until(lambda: probe_threads() == 0)


def test_a_client_that_sends_a_byte_at_a_time_is_hung_up_on(served: Probes) -> None:
    """A time-out of the socket would begin anew with every byte."""
    before = time.monotonic()
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
    assert time.monotonic() - before < module.READ_SECONDS + 3


def test_many_silent_clients_take_no_more_than_their_threads_and_it_recovers(served: Probes) -> None:
    with ExitStack() as stack:
        clients = [stack.enter_context(closing(connected(served))) for _ in range(module.THREADS + 20)]
        refused = [client.recv(4096) for client in clients[-4:]]
        assert all(b"503" in text and b"too many probes" in text for text in refused)
        assert probe_threads() <= module.THREADS
        until(lambda: probe_threads() == 0)
        assert Reply(served, "/health/ready").code == 200


def test_a_client_that_goes_away_or_talks_nonsense_harms_nobody(
    served: Probes, capfd: pytest.CaptureFixture[str]
) -> None:
    for text in (b"", b"\r\n\r\n", b"GET\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00\x01" * 20,
                 b"GET /" + b"x" * 70_000, b"GET / HTTP/1.0\r\n" + b"A: b\r\n" * 200 + b"\r\n",
                 b"GET /health/live HTTP/1.0\r\n\r\n"):  # fmt: skip
        client = connected(served)
        client.send(text)
        client.setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0"
        )  # a reset instead of a good-bye
        client.close()
    until(lambda: probe_threads() == 0)
    assert Reply(served, "/health/live").code == 200
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "text", [b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET / HTTP/1.0\r\n" + b"A: b\r\n" * 200 + b"\r\n"]
)
def test_nonsense_is_answered_in_json(served: Probes, text: bytes) -> None:
    with closing(connected(served)) as client:
        client.send(text)
        answer = b""
        while chunk := client.recv(4096):
            answer += chunk
    assert b'"reasons"' in answer
    assert b"<html" not in answer.lower()


def test_a_client_that_does_not_take_its_answer_is_hung_up_on(served: Probes, supervised: Supervised) -> None:
    supervised.metrics = lambda: "# x\n" * 5_000_000
    with closing(connected(served)) as client:
        client.send(b"GET /metrics HTTP/1.0\r\n\r\n")
        until(lambda: probe_threads() == 1)
        until(lambda: probe_threads() == 0, module.SEND_SECONDS + 5)
    assert Reply(served, "/health/live").code == 200


def test_what_is_asked_may_take_longer_than_a_client_may(served: Probes, supervised: Supervised) -> None:
    """The limit is on the client's asking, not on our answering."""
    gate = threading.Event()

    def look() -> Verdict:
        gate.wait(module.READ_SECONDS + 0.5)
        return Verdict(True)

    supervised.ready = look
    assert Reply(served, "/health/ready").code == 200
