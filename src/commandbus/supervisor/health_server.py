"""Health checks: /health/live, /health/ready and /metrics over HTTP, for Kubernetes, Prometheus and people.

    200  {"status": "healthy" | "degraded", "reasons": [...], …}
    503  {"status": "critical", "reasons": [...], …}

It knows nothing about workers: three callables return the answers. If one raises, the answer is a 503. They run on
the server's threads, so they must be thread-safe and quick: they read memory, not the database.

The server's own thread answers the liveness check, so silent connections or slow scrapes cannot delay it
(`supervisor/http_server.py`).
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from dataclasses import field
from http import HTTPStatus
from types import TracebackType
from typing import Any, Final, Self

from commandbus.errors import ConfigurationError
from commandbus.logger import safe_logger
from commandbus.quick_dataclass import dataclass
from commandbus.supervisor.http_server import HttpAnswer, HttpServer
from commandbus.supervisor.metrics import CONTENT_TYPE

logger = safe_logger("commandbus.supervisor")

LIVE: Final = "/health/live"
READY: Final = "/health/ready"
METRICS: Final = "/metrics"
_JSON: Final = "application/json; charset=utf-8"


@dataclass(frozen=True, slots=True)
class HealthVerdict:
    """The result of a health check. `document` is its body; a missing `status` or `reasons` is filled in."""

    ok: bool
    document: dict[str, Any] = field(default_factory=dict)


class HealthServer:
    """The server. With `port` 0 it takes any free port; once it has started, `port` says which."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        live: Callable[[], HealthVerdict],
        ready: Callable[[], HealthVerdict],
        metrics: Callable[[], str],
    ) -> None:
        self.host = host
        self._asked_port = port
        self._urgent: dict[str, Callable[[], HttpAnswer]] = {LIVE: lambda: _judged(LIVE, live)}
        self._others: dict[str, Callable[[], HttpAnswer]] = {
            READY: lambda: _judged(READY, ready),
            METRICS: lambda: _scraped(metrics),
        }
        self._server: HttpServer | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def port(self) -> int:
        """The address at which it listens."""
        return self._asked_port if self._server is None else self._server.port

    def start(self) -> None:
        """Listen and answer. Raises ConfigurationError if the address cannot be used."""
        if self._server is not None:
            raise RuntimeError("the health checks have been started already")
        try:
            server = HttpServer(
                self.host, self._asked_port, urgent=self._urgent, others=self._others, refusal=_refused
            )
        except (OSError, OverflowError, UnicodeError) as error:
            raise ConfigurationError(_refusal(self.host, self._asked_port, error)) from error
        server.start()
        self._server = server
        logger.info("health checks: http://%s:%d%s, %s, %s", self._shown_host, self.port, LIVE, READY, METRICS)

    def stop(self) -> None:
        """Stop listening. Answers that have begun may go on for a moment."""
        server, self._server = self._server, None
        if server is not None:
            self._asked_port = server.port
            server.stop()

    @property
    def _shown_host(self) -> str:
        return f"[{self.host}]" if ":" in self.host else self.host


def _refusal(host: str, port: int, error: Exception) -> str:
    """What is wrong with the address, and which settings contain it."""
    code = getattr(error, "errno", None)
    if code == errno.EADDRINUSE:
        problem = f"health_port {port} on {host} is in use by another program: choose another one"
    elif code == errno.EACCES:
        problem = f"health_port {port} on {host} is not permitted to this user: choose one above 1023"
    else:
        problem = f"cannot listen on health_host {host}, health_port {port}: {error}"
    return f"{problem} (WORKER_HEALTH_PORT, WORKER_HEALTH_HOST)"


# --- the answers -----------------------------------------------------------------------------------------------


def _as_json(code: int, document: dict[str, Any]) -> HttpAnswer:
    text = json.dumps(document, default=str)
    return HttpAnswer(code, text.encode() + b"\n", _JSON)


def _refused(code: HTTPStatus, reason: str) -> HttpAnswer:
    return _as_json(code, {"status": code.phrase.lower(), "reasons": [reason]})


def _judged(path: str, probe: Callable[[], HealthVerdict]) -> HttpAnswer:
    try:
        verdict = probe()
        well = "alive" if path == LIVE else "healthy"
        document = {"status": well if verdict.ok else "critical", "reasons": [], **verdict.document}
        return _as_json(HTTPStatus.OK if verdict.ok else HTTPStatus.SERVICE_UNAVAILABLE, document)
    except Exception as error:  # noqa: BLE001 - it is logged and answered
        return _broken(path, error)


def _scraped(metrics: Callable[[], str]) -> HttpAnswer:
    try:
        return HttpAnswer(HTTPStatus.OK, metrics().encode(errors="backslashreplace"), CONTENT_TYPE)
    except Exception as error:  # noqa: BLE001 - it is logged and answered
        return _broken(METRICS, error)


def _broken(path: str, error: Exception) -> HttpAnswer:
    logger.exception("%s could not be answered", path)
    reason = f"{path} could not be answered: {type(error).__name__}: {error}"
    return _as_json(HTTPStatus.SERVICE_UNAVAILABLE, {"status": "critical", "reasons": [reason]})
