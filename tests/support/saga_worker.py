"""A worker process for tests to kill: `python -m support.saga_worker KIND '{"database_url": …}'`.

KIND is `steps` (it runs the commands), `router` (it moves the processes) or `all`. Every handler writes one line
into the ledger, in the transaction that completes its command. Who fails, and how, is decided by the process and
the step alone: so it is the same in every run, whoever is killed.
"""

from __future__ import annotations

import json
import sys
import zlib
from typing import Any

from commandbus import (
    BusinessRuleException,
    HandlerRegistry,
    PermanentCommandError,
    ProcessReplyRouter,
    RetryPolicy,
    Saga,
    Settings,
    Worker,
    nested,
    parallel,
    sleep,
    step,
    wait_for,
)

LEDGER = (
    "CREATE TABLE ledger (id bigint GENERATED ALWAYS AS IDENTITY, process_id text, entry text, account text, "
    "amount integer)"
)
ENTRIES = {
    "reserve": ("stock", -1),
    "release": ("stock", 1),
    "charge": ("money", -7),
    "refund": ("money", 7),
    "label": ("labels", -1),
    "unlabel": ("labels", 1),
    "ship": ("parcels", -1),
    "recall": ("parcels", 1),
}
UNDONE_BY = {"reserve": "release", "charge": "refund", "label": "unlabel", "ship": "recall"}
prepare = Saga(
    "prepare", parallel(step("charge", "orders", undo="refund"), step("label", "orders", undo="unlabel"))
)
order = Saga(
    "order",
    step("reserve", "orders", undo="release"),
    wait_for("ok", deadline="1h"),
    nested("prepare", prepare),
    sleep("10ms"),
    step("ship", "orders", undo="recall"),
)


def fate(process_id: str, name: str) -> str:
    """What happens to a step of a process: it is refused, it needs a person first, it stumbles, or nothing."""
    number = zlib.crc32(f"{process_id}/{name}".encode()) % 100
    if name in UNDONE_BY:
        return "refused" if number < 12 else "troubled" if number < 17 else "stumbles" if number < 25 else ""
    return "troubled" if number < 10 else "stumbles" if number < 20 else ""  # a compensation is never refused


def handle(command: Any, ctx: Any) -> None:
    name = command.command_type
    found = fate(command.correlation_id, name)
    with ctx.transaction() as tx:
        tx.execute(
            "INSERT INTO ledger (process_id, entry, account, amount) VALUES (%s, %s, %s, %s)",
            (command.correlation_id, name, *ENTRIES[name]),
        )
        if found == "refused":
            raise BusinessRuleException(f"{name} is refused")
        if found == "troubled" and ctx.attempt_number == 1:
            raise PermanentCommandError(f"{name} needs a person")
        if found == "stumbles" and ctx.attempt_number == 1:
            raise ValueError(f"{name} stumbles")


def main() -> None:
    kind, settings = sys.argv[1], Settings(**json.loads(sys.argv[2]))
    policy = RetryPolicy(max_attempts=settings.max_attempts, backoff_schedule=[0.05], jitter=0)
    if kind == "router":
        ProcessReplyRouter([order, prepare], settings=settings, retry_policy=policy).run()
        return
    handlers = HandlerRegistry()
    for name in ENTRIES:
        handlers.register("orders", name, handle)
    if kind == "all":
        handlers.register_process(order)
        handlers.register_process(prepare)
    Worker(handlers, settings=settings, retry_policy=policy).run()


if __name__ == "__main__":
    main()
