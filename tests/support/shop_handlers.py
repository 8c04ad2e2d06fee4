"""A shop whose label printer has no paper until somebody puts some in: a row in the table `paper`."""

from __future__ import annotations

from typing import Any

from commandbus import HandlerRegistry, PermanentCommandError

TABLES = "CREATE TABLE paper (sheets integer); CREATE TABLE shipment (command_id text PRIMARY KEY)"
handlers = HandlerRegistry()


@handlers.handler("shop", "ship")
def ship(command: Any, ctx: Any) -> None:
    with ctx.transaction() as tx:
        if not tx.execute("SELECT EXISTS (SELECT FROM paper)").fetchone()[0]:
            raise PermanentCommandError("the label printer has no paper", code="PAPER")
        tx.execute("INSERT INTO shipment (command_id) VALUES (%s)", [command.command_id])
