"""A worker process for the tests to kill: `python ledger_worker.py '{"database_url": …}'`.

Its handlers write every run into a table: `exact` and `option` (transaction=True) in the transaction that
completes the command, `plain` on a connection of its own. `note` writes its start into the file that its data
names. `killer` takes its process with it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from commandbus import HandlerRegistry, RetryPolicy, Settings, Worker

WORK_SECONDS = 0.01
INSERT = "INSERT INTO ledger (kind, command_id, attempt) VALUES (%s, %s, %s)"
handlers = HandlerRegistry()


@handlers.handler("orders", "exact")
def exact(command: Any, ctx: Any) -> None:
    with ctx.transaction() as tx:
        tx.execute(INSERT, ("exact", command.command_id, ctx.attempt_number))
        time.sleep(WORK_SECONDS)


@handlers.handler("orders", "exact_async")
async def exact_async(command: Any, ctx: Any) -> None:
    async with ctx.transaction() as tx:
        await tx.execute(INSERT, ("exact", command.command_id, ctx.attempt_number))
        await asyncio.sleep(WORK_SECONDS)


@handlers.handler("orders", "option", transaction=True)
def option(command: Any, ctx: Any, tx: Any) -> int:
    tx.execute(INSERT, ("exact", command.command_id, ctx.attempt_number))
    time.sleep(WORK_SECONDS)
    return int(ctx.attempt_number)


@handlers.handler("orders", "option_async", transaction=True)
async def option_async(command: Any, ctx: Any, tx: Any) -> int:
    await tx.execute(INSERT, ("exact", command.command_id, ctx.attempt_number))
    await asyncio.sleep(WORK_SECONDS)
    return int(ctx.attempt_number)


@handlers.handler("orders", "plain")
def plain(command: Any, ctx: Any) -> int:
    with ctx.connection() as conn:
        conn.execute(INSERT, ("plain", command.command_id, ctx.attempt_number))
    time.sleep(WORK_SECONDS)
    return int(ctx.attempt_number)


@handlers.handler("orders", "note")
def note(command: Any, ctx: Any) -> None:
    """It takes its time, so that its worker claims some dozens ahead and not hundreds."""
    time.sleep(0.002)
    with Path(command.data).open("a") as notes:
        notes.write(f"{command.command_id}\n")


@handlers.handler("orders", "note_async")
async def note_async(command: Any, ctx: Any) -> None:
    note(command, ctx)


@handlers.handler("orders", "killer")
def killer(ctx: Any) -> None:
    os._exit(1)


def main() -> None:
    settings = Settings(**json.loads(sys.argv[1]))
    policy = RetryPolicy(max_attempts=settings.max_attempts, backoff_schedule=[0.05], jitter=0)
    Worker(handlers, settings=settings, retry_policy=policy).run()


if __name__ == "__main__":
    main()
