"""A console that serves real HTTP on loopback, on a thread of the test's own process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from support.waiting import until


@contextmanager
def served(app: FastAPI) -> Iterator[int]:
    """The port of the application; it has ended, with its streams, when the block is left."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        until(lambda: server.started)
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()
