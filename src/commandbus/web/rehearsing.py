"""Rehearsals in the console: one at a time, if it was started with the application's handlers."""

from __future__ import annotations

import asyncio
from typing import Final

from commandbus.errors import RehearsalRefusedError
from commandbus.model.rehearsal import Rehearsal
from commandbus.web.console import Console
from commandbus.worker.rehearsal.rehearse import rehearse

SECONDS: Final = 20
_one_at_a_time: Final = asyncio.Semaphore(1)


async def rehearse_here(console: Console, domain: str, command_id: str) -> Rehearsal:
    """Rehearse a command with the handlers of this console."""
    if console.handlers is None:
        raise RehearsalRefusedError(
            "this console has no handlers: start it with `commandbus console --app MODULE:REGISTRY`, or use "
            "`commandbus rehearse` where the handlers are"
        )
    if _one_at_a_time.locked():
        raise RehearsalRefusedError("somebody rehearses a command at this moment: try again")
    async with _one_at_a_time:
        return await asyncio.to_thread(
            rehearse, console.handlers, domain, command_id, timeout=SECONDS, settings=console.settings
        )
