"""An answer that goes on while its visitor is there, and ends with them."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send


class EventStream(StreamingResponse):
    """Server-sent events from a generator, which is closed at the end of the answer.

    A visitor who does not read may leave while the generator waits for its last event to be sent. Nobody else
    would close it then, and it would count as a watcher until the garbage collector finds it.
    """

    def __init__(self, events: AsyncGenerator[str, None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until the visitor leaves."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()
