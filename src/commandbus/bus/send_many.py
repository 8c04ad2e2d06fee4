"""`send_many`: the next chunk is prepared while the server works on the last one.

On a connection that the caller has lent, one chunk follows the other.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from commandbus.flow.commands.send import Outgoing, Sendable
from commandbus.model.command import SentCommand

if TYPE_CHECKING:
    from commandbus.bus.asynchronous import AsyncCommandBus
    from commandbus.bus.sync import CommandBus

AT_ONCE: Final = 100
"""So many commands are prepared (in less than a millisecond) before other tasks of the event loop run."""


def send_chunks(
    bus: CommandBus, domain: str, commands: Iterable[Sendable], chunk_size: int, conn: object
) -> list[SentCommand]:
    """Send commands in chunks; the caller's thread prepares them."""
    sent: list[SentCommand] = []
    chunks = bus._chunks(domain, commands, chunk_size)
    if conn is not None:
        for chunk in chunks:
            receipts = bus.run(chunk, conn)
            sent += receipts
        return sent
    with ThreadPoolExecutor(1, "commandbus-send") as sender:
        under_way: Future[list[SentCommand]] | None = None
        for chunk in chunks:
            sent += under_way.result() if under_way is not None else []
            under_way = sender.submit(bus.run, chunk)
        sent += under_way.result() if under_way is not None else []
    return sent


async def send_chunks_async(
    bus: AsyncCommandBus, domain: str, commands: Iterable[Sendable], chunk_size: int, conn: object
) -> list[SentCommand]:
    """Send commands in chunks; the caller's task prepares them."""
    sent: list[SentCommand] = []
    if conn is not None:
        for chunk in bus._chunks(domain, commands, chunk_size):
            receipts = await bus.run(chunk, conn)
            sent += receipts
        return sent
    outgoing = bus._outgoing(domain, commands, chunk_size)
    under_way: asyncio.Task[list[SentCommand]] | None = None
    try:
        while some := await _next(outgoing, chunk_size):
            chunk = bus._send_chunk(domain, some)
            sent += await under_way if under_way is not None else []
            under_way = asyncio.create_task(bus.run(chunk))
        sent += await under_way if under_way is not None else []
    finally:
        if under_way is not None:
            await _end(under_way)
    return sent


async def _next(outgoing: Iterator[Outgoing], size: int) -> list[Outgoing]:
    """The next commands, checked; before every few, other tasks of the event loop run."""
    chunk: list[Outgoing] = []
    while len(chunk) < size:
        await asyncio.sleep(0)
        some = list(islice(outgoing, min(size - len(chunk), AT_ONCE)))
        if not some:
            break
        chunk += some
    return chunk


async def _end(under_way: asyncio.Task[Any]) -> None:
    """Wait until no chunk is under way. If the caller was canceled, it is canceled, too."""
    if isinstance(sys.exception(), asyncio.CancelledError):
        under_way.cancel()
    await asyncio.wait({under_way})
    if not under_way.cancelled():
        under_way.exception()  # read it, because nobody else may, and asyncio would complain
