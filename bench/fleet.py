"""Worker processes that the benchmark drives: each tells its figures through a small shared file."""

from __future__ import annotations

import asyncio
import mmap
import os
import struct
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

from bench import chunks
from bench.ground import Ground
from commandbus import HandlerRegistry, Worker
from commandbus.worker.board import Board
from commandbus.worker.memory import resident_megabytes
from commandbus.worker.worker_options import Supervision

_LAYOUT = struct.Struct("qdd")  # settled, when the last handler began, resident megabytes


class Member:
    """One worker process with one kind of handler."""

    def __init__(self, ground: Ground, domain: str, kind: str, *, concurrency: int = 8) -> None:
        self._file = tempfile.NamedTemporaryFile(prefix="commandbus-bench-")  # noqa: SIM115 - lives with us
        self._file.truncate(_LAYOUT.size)
        self._board = mmap.mmap(self._file.fileno(), _LAYOUT.size)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.fleet", ground.url, domain, kind, str(concurrency), self._file.name],
            stdin=subprocess.PIPE,
        )
        while self.read()[2] == 0.0:
            if self._process.poll() is not None:
                raise RuntimeError(f"the worker for {domain} ended at its start")
            time.sleep(0.01)

    @property
    def pid(self) -> int:
        return self._process.pid

    def read(self) -> tuple[int, float, float]:
        found: tuple[int, float, float] = _LAYOUT.unpack_from(self._board)
        return found

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        if self._process.wait(timeout=30) != 0:
            raise RuntimeError("a worker process failed")
        self._board.close()
        self._file.close()


def drain(ground: Ground, domain: str, members: list[Member], count: int) -> float:
    """Commands per second from the resume of a filled domain to the last settlement."""
    before = sum(member.read()[0] for member in members)
    started = time.perf_counter()
    ground.bus.resume(domain)
    while sum(member.read()[0] for member in members) - before < count:
        time.sleep(0.001)
        if time.perf_counter() - started > 120:
            raise RuntimeError(f"{domain} did not drain within two minutes")
    elapsed = time.perf_counter() - started
    ground.bus.pause(domain, operator="bench")
    return count / elapsed


def pickup(ground: Ground, domain: str, member: Member, count: int) -> list[float]:
    """Milliseconds from the call of send to the start of the handler, on an idle worker."""
    ground.bus.resume(domain)
    found = []
    for _ in range(count):
        time.sleep(0.04)
        before = member.read()[1]
        sent_at = time.time()
        ground.bus.send(domain, "work", {"n": 1})
        ground.sent[domain] = ground.sent.get(domain, 0) + 1
        while member.read()[1] == before:
            time.sleep(0.0002)
        found.append((member.read()[1] - sent_at) * 1000)
    return found


def handlers_of(kind: str, domain: str, began: Any) -> HandlerRegistry:
    """The handler of a kind: nothing, or a wait of 1 ms, or a query; sync or async."""
    handlers = HandlerRegistry()

    def noop(command: Any, ctx: Any) -> None:
        pass

    async def async_noop(command: Any, ctx: Any) -> None:
        pass

    def wait(command: Any, ctx: Any) -> None:
        time.sleep(0.001)

    async def async_wait(command: Any, ctx: Any) -> None:
        await asyncio.sleep(0.001)

    def stamp(command: Any, ctx: Any) -> None:
        began(time.time())

    def query(command: Any, ctx: Any) -> None:
        with ctx.connection() as conn:
            conn.execute("SELECT pg_sleep(0.005)")

    def insert(command: Any, ctx: Any) -> None:
        with ctx.transaction() as tx:
            tx.execute("INSERT INTO public.bare (command_type) VALUES (%s)", ("work",))

    async def async_insert(command: Any, ctx: Any) -> None:
        async with ctx.transaction() as tx:
            await tx.execute("INSERT INTO public.bare (command_type) VALUES (%s)", ("work",))

    functions: dict[str, Any] = {
        "sync": noop,
        "async": async_noop,
        "sync_1ms": wait,
        "async_1ms": async_wait,
        "sync_insert": insert,
        "async_insert": async_insert,
        "stamp": stamp,
        "query": query,
    }
    if kind == "parked":
        handlers.register(domain, "work", noop)
        handlers.register(domain, "limited", noop, limits=["bench_full"])
    elif kind in chunks.KINDS:
        chunks.register(handlers, domain, kind)
    elif kind == "no_deadline":
        handlers.register(domain, "work", noop, timeout=0)
    else:
        handlers.register(domain, "work", functions["sync" if kind == "supervised" else kind])
    return handlers


def _member(url: str, domain: str, kind: str, concurrency: int, path: str) -> None:
    with open(path, "r+b") as file:
        board = mmap.mmap(file.fileno(), _LAYOUT.size)
    stamped = [0.0]

    def began(at: float) -> None:
        stamped[0] = at
        _LAYOUT.pack_into(board, 0, worker.settled, at, 1.0)

    supervision = None
    if kind == "supervised":
        supervision = Supervision(Board.create(2 * concurrency), "bench", lambda state, reason: None)
    registry = handlers_of(kind, domain, began)
    worker = Worker(registry, database_url=url, concurrency=concurrency, supervision=supervision)
    threading.Thread(target=_tell, args=(worker, board, stamped), daemon=True).start()
    worker.run()


def _tell(worker: Worker, board: mmap.mmap, stamped: list[float]) -> None:
    """Writes the figures down, until the benchmark closes the pipe. Then the worker stops."""
    os.set_blocking(0, False)
    before, memory = -1, 0.0
    while True:
        settled = worker.settled
        if worker.is_running and (settled != before or not memory):
            memory = resident_megabytes()
        _LAYOUT.pack_into(board, 0, settled, stamped[0], memory)
        try:
            if os.read(0, 1) == b"":
                break
        except BlockingIOError:
            time.sleep(0.005 if settled != before else 0.05)  # it takes the GIL from the slots
        before = settled
    worker.request_stop("the benchmark ends")


if __name__ == "__main__":
    _member(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5])
