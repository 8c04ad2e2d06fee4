"""`run(until_idle=True)` ends when nothing could run any more, and that includes what the last ones have sent."""

from __future__ import annotations

from typing import Any

from commandbus import CommandBus, Worker
from support.sagas import ORDER, Lab
from support.workers import quick_settings


def test_it_sees_processes_to_their_end(bus: CommandBus, database: str) -> None:
    lab = Lab(bus)
    lab.handlers.register_process(ORDER)
    for number in range(10):
        bus.start_process(ORDER, {}, process_id=f"p{number}")
        Worker(lab.handlers, settings=quick_settings(database)).run(until_idle=True)
        assert lab.process(f"p{number}").status == "COMPLETED"


def test_it_runs_what_a_command_has_sent(bus: CommandBus, database: str) -> None:
    lab = Lab(bus)
    seen = []

    @lab.handlers.handler("orders", "chain")
    def chain(command: Any, ctx: Any) -> None:
        with ctx.transaction() as tx:
            seen.append(command.data)
            if command.data:
                bus.send("orders", "chain", command.data - 1, conn=tx)

    bus.send("orders", "chain", 30)
    Worker(lab.handlers, settings=quick_settings(database)).run(until_idle=True)
    assert seen == list(range(30, -1, -1))
