"""A FastAPI application on the native sync components, with health endpoints, from its start to its end.

    ./dev example e2e_app

It starts `app.py` under uvicorn, sends it requests, and prints what it answers. Three handlers that hang make its
worker CRITICAL, and `/health/ready` says so, while `/health/live` does not. Then `worker.py`, another process,
does the work. In the end SIGTERM ends both in order. The database is the one that COMMANDBUS_DATABASE_URL names,
else an embedded PostgreSQL in a temporary folder.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from commandbus import embedded

HERE = Path(__file__).parent
PATIENCE_SECONDS = 60.0
QUICK = {"CANCEL_GRACE_SECONDS": "0.5", "WORKER_SHUTDOWN_TIMEOUT": "10"}


def main() -> int:
    """Play it on a database."""
    if os.environ.get("COMMANDBUS_DATABASE_URL"):
        return play()
    with tempfile.TemporaryDirectory(prefix="e2e-app-") as name:
        Path(name).chmod(0o755)  # where root runs this, the server is another user's
        with embedded.start(Path(name) / "postgres") as server:
            os.environ["COMMANDBUS_DATABASE_URL"] = server.dsn
            return play()


def play() -> int:
    """One visit after the other."""
    port = free_port()
    site = Site(f"http://127.0.0.1:{port}")
    with program("-m", "uvicorn", "app:app", "--port", str(port), "--log-level", "warning"):
        until(lambda: site.get("/health/live")[0] == 200)
        say("live", *site.get("/health/live"))
        say("ready", *site.get("/health/ready"))
        say("sent", *site.post("/commands/place_order?command_id=first", {"quantity": 2}))
        say("sent again", *site.post("/commands/place_order?command_id=first", {"quantity": 2}))
        say("other content", site.post("/commands/place_order?command_id=first", {"quantity": 3})[0])
        say("looked at", *site.settled("first"))
        site.post("/commands/place_order?command_id=empty", {"quantity": 0})
        say("refused", *site.settled("empty"))
        for _ in range(3):
            site.post("/commands/hang")
        until(lambda: site.get("/health/ready")[0] == 503)
        say("three handlers hang", *site.get("/health/ready"))
        say("still live", *site.get("/health/live"))
        with program("worker.py"):
            site.post("/commands/place_order?command_id=last", {"quantity": 5})
            say("looked at", *site.settled("last"))
    say("both ended in order")
    return 0


class Site:
    """A visitor of the application."""

    def __init__(self, url: str) -> None:
        self._url = url

    def get(self, path: str) -> tuple[int, Any]:
        """Status code and document."""
        return self._ask(urllib.request.Request(self._url + path))

    def post(self, path: str, document: Any = None) -> tuple[int, Any]:
        """Status code and document."""
        body = json.dumps(document).encode()
        headers = {"Content-Type": "application/json"}
        return self._ask(urllib.request.Request(self._url + path, body, headers))

    def settled(self, command_id: str) -> tuple[int, Any]:
        """What became of a command, as soon as that is known."""
        path = f"/commands/{command_id}"
        until(lambda: self.get(path)[1].get("status") in ("COMPLETED", "FAILED"))
        return self.get(path)

    def _ask(self, request: urllib.request.Request) -> tuple[int, Any]:
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)
        except OSError:
            return 0, {}  # it has not started yet


@contextmanager
def program(*arguments: str) -> Iterator[None]:
    """A process of its own, which ends in order."""
    process = subprocess.Popen([sys.executable, *arguments], cwd=HERE, env=os.environ | QUICK)
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait(30)
    if code not in (0, 1, -signal.SIGTERM):  # 1: hanging handlers were left behind
        raise RuntimeError(f"{arguments} ended with {code}")


def free_port() -> int:
    """A port that nobody uses at this moment."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def until(condition: Callable[[], object]) -> None:
    """Wait until it is so."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {PATIENCE_SECONDS:g} s in vain")
        time.sleep(0.05)


def say(what: str, *answer: object) -> None:
    """Print at once, also into a pipe."""
    print(f"{what}:" if answer else what, *answer, flush=True)


if __name__ == "__main__":
    sys.exit(main())
