"""Probes: /health/live, /health/ready and /metrics over HTTP, for Kubernetes, Prometheus and people.

    200  {"status": "healthy" | "degraded", "reasons": [...], …}
    503  {"status": "critical", "reasons": [...], …}

It knows nothing of workers: three callables say what to answer, and one that raises is a 503. They run on the
server's threads, so they must be safe there and quick: look at memory, not at the database.

Invariants: a client that is slow, silent or gone costs one of THREADS threads for no longer than READ_SECONDS to
say what it wants and SEND_SECONDS to take the answer; when all are taken, the next one gets a 503 at once.
"""

from __future__ import annotations

import contextlib
import errno
import json
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from socketserver import ThreadingMixIn
from types import TracebackType
from typing import Any, Final, Self

from commandbus.errors import ConfigurationError
from commandbus.logger import safe_logger
from commandbus.supervisor.metrics import CONTENT_TYPE

logger = safe_logger("commandbus.supervisor")

LIVE: Final = "/health/live"
READY: Final = "/health/ready"
METRICS: Final = "/metrics"
THREADS: Final = 16
READ_SECONDS: Final = 2.0
SEND_SECONDS: Final = 2.0
_LOOK_SECONDS: Final = 0.1
_JSON: Final = "application/json; charset=utf-8"
_OVERFLOW: Final = (
    b"HTTP/1.0 503 Service Unavailable\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n"
    b'{"status": "critical", "reasons": ["too many probes at once"]}\n'
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a probe found. `document` is its answer; a missing `status` or `reasons` is filled in."""

    ok: bool
    document: dict[str, Any] = field(default_factory=dict)


class Probes:
    """The server. `port` 0 takes any free one; `port` tells which, once it has started."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        live: Callable[[], Verdict],
        ready: Callable[[], Verdict],
        metrics: Callable[[], str],
    ) -> None:
        self.host = host
        self._asked_port = port
        self._routes: dict[str, Callable[[], _Answer]] = {
            LIVE: lambda: _judged(LIVE, live),
            READY: lambda: _judged(READY, ready),
            METRICS: lambda: _scraped(metrics),
        }
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._asked_port if self._server is None else int(self._server.server_address[1])

    def start(self) -> None:
        """Listen, and answer from now on; a ConfigurationError if the address cannot be had."""
        if self._server is not None:
            raise RuntimeError("the probes have been started already")
        try:
            self._server = _Server(self.host, self._asked_port, self._routes)
        except (OSError, OverflowError, UnicodeError) as error:
            raise ConfigurationError(_refusal(self.host, self._asked_port, error)) from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_LOOK_SECONDS,), name="probes", daemon=True
        )
        self._thread.start()
        logger.info("probes: http://%s:%d%s, %s, %s", self._shown_host, self.port, LIVE, READY, METRICS)

    def stop(self) -> None:
        """Listen no more. What is being answered goes on."""
        server, self._server = self._server, None
        if server is None or self._thread is None:
            return
        self._asked_port = int(server.server_address[1])
        server.shutdown()
        server.server_close()
        self._thread.join()

    @property
    def _shown_host(self) -> str:
        return f"[{self.host}]" if ":" in self.host else self.host


def _refusal(host: str, port: int, error: Exception) -> str:
    """What is wrong with the address, and which settings say it."""
    code = getattr(error, "errno", None)
    if code == errno.EADDRINUSE:
        problem = f"health_port {port} on {host} is in use by another program: choose another one"
    elif code == errno.EACCES:
        problem = f"health_port {port} on {host} is not permitted to this user: choose one above 1023"
    else:
        problem = f"cannot listen on health_host {host}, health_port {port}: {error}"
    return f"{problem} (WORKER_HEALTH_PORT, WORKER_HEALTH_HOST)"


# --- what is answered ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Answer:
    code: int
    body: bytes
    content_type: str = _JSON


def _as_json(code: int, document: dict[str, Any]) -> _Answer:
    text = json.dumps(document, default=str)
    return _Answer(code, text.encode() + b"\n")


def _judged(path: str, probe: Callable[[], Verdict]) -> _Answer:
    try:
        verdict = probe()
        document = {"status": "healthy" if verdict.ok else "critical", "reasons": [], **verdict.document}
        return _as_json(HTTPStatus.OK if verdict.ok else HTTPStatus.SERVICE_UNAVAILABLE, document)
    except Exception as error:  # noqa: BLE001 - it is logged and answered
        return _broken(path, error)


def _scraped(metrics: Callable[[], str]) -> _Answer:
    try:
        return _Answer(HTTPStatus.OK, metrics().encode(errors="backslashreplace"), CONTENT_TYPE)
    except Exception as error:  # noqa: BLE001 - it is logged and answered
        return _broken(METRICS, error)


def _broken(path: str, error: Exception) -> _Answer:
    logger.exception("%s could not be answered", path)
    reason = f"{path} could not be answered: {type(error).__name__}: {error}"
    return _as_json(HTTPStatus.SERVICE_UNAVAILABLE, {"status": "critical", "reasons": [reason]})


# --- how ---------------------------------------------------------------------------------------------------------


class _Server(ThreadingMixIn, HTTPServer):
    """A thread for each connection, up to THREADS; who does not finish asking in time is hung up on."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, host: str, port: int, routes: dict[str, Callable[[], _Answer]]) -> None:
        self.routes = routes
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._places = threading.BoundedSemaphore(THREADS)
        self._asking: dict[socket.socket, float] = {}
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """As HTTPServer, which then asks the DNS for this machine's name: that can take seconds."""
        if self.allow_reuse_address:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._places.acquire(blocking=False):
            request.settimeout(0)
            with contextlib.suppress(OSError):
                request.send(_OVERFLOW)
            self.shutdown_request(request)
            return
        self._asking[request] = time.monotonic() + READ_SECONDS
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self.has_asked(request)
            self._places.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.has_asked(request)
            self._places.release()

    def has_asked(self, request: Any) -> None:
        """The request is complete: its time is no longer the client's."""
        self._asking.pop(request, None)

    def service_actions(self) -> None:
        """Called about every _LOOK_SECONDS. A time-out of the socket would begin anew with every byte."""
        now = time.monotonic()
        for request, end_at in list(self._asking.items()):
            if now >= end_at:
                self.has_asked(request)
                with contextlib.suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 - socketserver's signature
        logger.debug("a probe's connection from %s broke off", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    """One request on one connection: HTTP/1.0, so that nobody keeps a thread by keeping a connection."""

    timeout = SEND_SECONDS
    server: _Server

    def do_GET(self) -> None:
        self.server.has_asked(self.request)
        path = self.path.partition("?")[0]
        if path in self.server.routes:
            self._answer(self.server.routes[path]())
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    do_HEAD = do_GET  # noqa: N815 - the base's name

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:  # noqa: ARG002
        """In JSON, as all else here; a method that there is no `do_` for is not allowed."""
        self.server.has_asked(self.request)
        if code == HTTPStatus.NOT_IMPLEMENTED:
            code = HTTPStatus.METHOD_NOT_ALLOWED
        reason = message or HTTPStatus(code).phrase
        if code == HTTPStatus.NOT_FOUND:
            reason = f"there is only {', '.join(self.server.routes)}"
        elif code == HTTPStatus.METHOD_NOT_ALLOWED:
            reason = "only GET and HEAD"
        self._answer(_as_json(code, {"status": HTTPStatus(code).phrase.lower(), "reasons": [reason]}))

    def version_string(self) -> str:
        return "commandbus"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base's signature
        logger.debug("probe from %s: %s", self.address_string(), format % args)

    def _answer(self, answer: _Answer) -> None:
        self.send_response(answer.code)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(answer.body)))
        self.send_header("Cache-Control", "no-store")
        if answer.code == HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET, HEAD")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)
