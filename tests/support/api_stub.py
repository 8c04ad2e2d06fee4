"""A real HTTP API on loopback that counts who is inside.

A call is inside from its request until its work is done *and* its answer is sent, or its connection is gone. The
work goes on when the client is killed, as it does at a real API: `peak` is what the API itself has seen.

What it answers: `plan(…)` is used up first, then `usual`. A call may say who it is, and ask for its own time:
`/call?n=7&who=123&seconds=0.2`. With `gathers = 5` nobody leaves before five were inside at once, so how busy the
machine is has no say in the peak.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from types import TracebackType
from urllib.parse import parse_qs, urlsplit


@dataclass(frozen=True)
class Reply:
    """What the API says: a status, how long it takes, and headers such as Retry-After. `hangs`: nothing, ever."""

    status: int = 200
    seconds: float = 0.0
    headers: dict[str, str] = field(default_factory=dict)
    hangs: bool = False


@dataclass
class Visit:
    """One call: who, when, what was said, and how many were inside with it."""

    name: str
    began: float
    inside: int
    who: str = ""
    status: int | None = None
    ended: float | None = None


def too_many(retry_after: str | None = None) -> Reply:
    """A 429."""
    return Reply(429, headers={} if retry_after is None else {"Retry-After": retry_after})


class ApiStub:
    """The API, on an event loop of its own thread: `with ApiStub() as api: …`."""

    def __init__(self, usual: Reply | None = None) -> None:
        self.usual = usual or Reply()
        self.gathers = 0
        self.visits: list[Visit] = []
        self.inside = 0
        self.peak = 0
        self._planned: deque[Reply] = deque()
        self._gathered = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._stop: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._serve, name="api-stub", daemon=True)
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def plan(self, *replies: Reply) -> None:
        """What the next calls are told, in order."""
        self._planned.extend(replies)

    @property
    def began(self) -> list[str]:
        """The names of all calls, in the order in which they came."""
        return [visit.name for visit in list(self.visits)]

    def callers(self) -> set[str]:
        """Who is inside now, as they call themselves (`who=…`)."""
        return {visit.who for visit in list(self.visits) if visit.ended is None}

    def counted(self) -> dict[str, int]:
        """How often each name has called."""
        found: dict[str, int] = {}
        for name in self.began:
            found[name] = found.get(name, 0) + 1
        return found

    def __enter__(self) -> ApiStub:
        self._thread.start()
        assert self._ready.wait(60)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stop = self._stop
        if stop is not None:
            self._loop.call_soon_threadsafe(stop.set)
        self._thread.join(10)
        assert not self._thread.is_alive()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._main())
        finally:
            self._loop.close()

    async def _main(self) -> None:
        self._stop = asyncio.Event()
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0, backlog=256)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        server.close()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await asyncio.sleep(0)  # in which what they have closed is gone

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                await self._call(head.split(" ", 2)[1], reader, writer)
        finally:
            writer.close()

    async def _call(self, target: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = {key: values[-1] for key, values in parse_qs(urlsplit(target).query).items()}
        reply = self._planned.popleft() if self._planned else self.usual
        self.inside += 1
        self.peak = max(self.peak, self.inside)
        visit = Visit(asked.get("n", ""), time.monotonic(), self.inside, asked.get("who", ""))
        self.visits.append(visit)
        try:
            if reply.hangs:
                await reader.read(1)  # until the client has gone
                return
            await asyncio.sleep(float(asked.get("seconds", reply.seconds)))
            if self.peak >= self.gathers:
                self._gathered.set()
            await self._gathered.wait()
            visit.status = reply.status
            # Out before the client can know that it is: it may give its place back at once.
            self.inside -= 1
            body = json.dumps({"n": asked.get("n"), "inside": visit.inside}).encode()
            lines = [f"HTTP/1.1 {reply.status} x", f"Content-Length: {len(body)}", "Connection: close"]
            lines += [f"{name}: {value}" for name, value in reply.headers.items()]
            writer.write("\r\n".join([*lines, "", ""]).encode() + body)
            await writer.drain()
        finally:
            visit.ended = time.monotonic()
            if visit.status is None:
                self.inside -= 1
