"""A worker in an application whose handlers close descriptors that are not theirs.

`python descriptor_worker.py SETTINGS HEALTH_FILE` runs it; a supervisor imports `handlers`. Every attempt of
`work` writes down when it begins and ends, in the file that its data names.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from commandbus import HandlerRegistry, Settings, Worker

MOST = 200
handlers = HandlerRegistry()
opened: list[int] = []


def note(command: Any, what: str) -> None:
    """One line, whole, though several processes write. Its descriptor may be closed, or be another file's, at any
    moment: then the line is written again, and may be there twice."""
    line = f"{command.command_id} {what} {os.getpid()} {time.monotonic_ns()}\n".encode()
    while True:
        try:
            notes = os.open(command.data, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            os.write(notes, line)
            was_ours = os.fstat(notes).st_ino == os.stat(command.data).st_ino
            os.close(notes)
        except OSError:
            continue
        if was_ours:
            return


@handlers.handler("orders", "work", timeout=10)
def work(command: Any, ctx: Any) -> None:
    note(command, "begins")
    try:
        with ctx.connection() as conn:
            conn.execute("SELECT 1")
        time.sleep(0.01)
    finally:
        note(command, "ends")


@handlers.handler("orders", "work_async", timeout=10)
async def work_async(command: Any, ctx: Any) -> None:
    note(command, "begins")
    try:
        async with ctx.transaction() as tx:
            await tx.execute("SELECT 1")
        await asyncio.sleep(0.01)
    finally:
        note(command, "ends")


@handlers.handler("orders", "close", timeout=3)
def close(command: Any, ctx: Any) -> None:
    os.closerange(3, MOST)


@handlers.handler("orders", "close_async", timeout=3)
async def close_async(command: Any, ctx: Any) -> None:
    os.closerange(3, MOST)


@handlers.handler("orders", "close_in_transaction", timeout=3)
def close_in_transaction(command: Any, ctx: Any) -> None:
    with ctx.transaction() as tx:
        tx.execute("SELECT 1")
        os.closerange(3, MOST)


@handlers.handler("orders", "close_and_fill", timeout=3)
def close_and_fill(command: Any, ctx: Any) -> None:
    """Soon the numbers are somebody else's: files that take everything and give nothing."""
    os.closerange(3, MOST)
    opened.extend(os.open(os.devnull, os.O_RDWR) for _ in range(MOST // 2))


@handlers.handler("orders", "close_and_connect", timeout=3)
def close_and_connect(command: Any, ctx: Any) -> None:
    """… or sockets, from which one may read."""
    import socket

    os.closerange(3, MOST)
    for _ in range(20):
        opened.extend(end.detach() for end in socket.socketpair())


def main() -> None:
    worker = Worker(handlers, settings=Settings(**json.loads(sys.argv[1])))
    shown = Path(sys.argv[2])

    def show() -> None:
        while True:
            shown.with_suffix(".new").write_text(json.dumps(worker.health_status.as_dict()))
            shown.with_suffix(".new").rename(shown)
            time.sleep(0.1)

    threading.Thread(target=show, daemon=True).start()
    worker.run()


if __name__ == "__main__":
    main()
