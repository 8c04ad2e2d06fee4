"""The handlers of the application."""

from __future__ import annotations

import threading
from typing import Any

from commandbus import BusinessRuleException, Command, HandlerContext, RetryPolicy
from commandbus.sync import SyncHandlerRegistry

DOMAIN = "e2e"
registry = SyncHandlerRegistry()


@registry.handler(DOMAIN, "place_order")
def place_order(command: Command, ctx: HandlerContext) -> Any:
    """The order is in the table if, and only if, the command is COMPLETED."""
    if command.data["quantity"] < 1:
        raise BusinessRuleException("an order needs at least one item", code="EMPTY_ORDER")
    with ctx.transaction() as tx:
        tx.execute(
            "INSERT INTO e2e_order (order_id, quantity) VALUES (%s, %s)",
            (command.command_id, command.data["quantity"]),
        )
        tx.complete({"ordered": command.data["quantity"]})


@registry.handler(DOMAIN, "hang", timeout=0.5, retry_policy=RetryPolicy(max_attempts=1))
def hang(ctx: HandlerContext) -> None:
    """A deadlock, to see what it does to /health/ready."""
    threading.Event().wait()
