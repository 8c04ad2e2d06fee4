"""Handlers that are rehearsed: they write, send, call an API, hang, and try to commit."""

from __future__ import annotations

import os
import time
import urllib.request
from typing import Any

from commandbus import CommandBus, HandlerRegistry, PermanentCommandError

handlers = HandlerRegistry()
bus = CommandBus(os.environ.get("REHEARSED_DATABASE", "postgresql://nowhere"))


@handlers.handler("orders", "ship", limits=["docai"])
def ship(command: Any, ctx: Any) -> object:
    print("shipping", command.data)
    with ctx.limit("carrier", timeout=5) as call:
        assert call.remaining() == 5
    receipt = ctx.effect_once("charge", lambda key: visit(command.data["api"]))
    with ctx.effect("mail") as effect:
        visit(f"{command.data['api']}?{effect.key}")
    ctx.checkpoint({"page": 2})
    ctx.heartbeat({"done": 1})
    with ctx.connection() as conn:
        conn.execute("INSERT INTO shipped (id) VALUES (%s)", [command.command_id])
        conn.commit()
    with ctx.connection() as conn:
        conn.execute("UPDATE shipped SET id = id || '!'")
        bus.send("orders", "bill", {"of": command.command_id}, command_id="by-conn", conn=conn)
    bus.send("orders", "bill", {}, command_id="by-bus")
    return {"receipt": receipt, "seen": ctx.last_checkpoint}


@handlers.handler("orders", "tx", transaction=True)
def in_transaction(command: Any, ctx: Any, tx: Any) -> object:
    tx.execute("INSERT INTO shipped (id) VALUES ('tx')")
    return {"by": "tx"}


@handlers.handler("orders", "async")
async def asynchronous(command: Any, ctx: Any) -> object:
    async with ctx.limit("carrier"), ctx.transaction() as tx:
        await tx.execute("INSERT INTO shipped (id) VALUES ('async')")
        tx.complete({"by": "async"})


@handlers.handler("orders", "call")
def call(command: Any, ctx: Any) -> object:
    return visit(command.data["api"])


@handlers.handler("orders", "declared", rehearsable=True)
def declared(command: Any, ctx: Any) -> object:
    return "fine"


@handlers.handler("orders", "commits")
def commits(command: Any, ctx: Any) -> None:
    with ctx.connection() as conn:
        conn.execute("INSERT INTO shipped (id) VALUES ('committed')")
        try:
            conn.execute("COMMIT")
        finally:
            try:
                conn.execute("INSERT INTO shipped (id) VALUES ('after')")
                conn.execute("COMMIT")
            except Exception as error:
                raise PermanentCommandError(f"refused: {error}") from error


@handlers.handler("orders", "hangs")
def hangs(command: Any, ctx: Any) -> None:
    with ctx.connection() as conn:
        conn.execute("INSERT INTO shipped (id) VALUES ('hung')")
        time.sleep(3600)


@handlers.handler("orders", "waits")
def waits(command: Any, ctx: Any) -> None:
    with ctx.connection() as conn:
        conn.execute("LOCK TABLE shipped")


def visit(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as answer:
        return str(answer.read())
