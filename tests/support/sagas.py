"""A laboratory for processes: handlers that do as they are told and remember what they did, and ways to wait."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

from commandbus import CommandBus, HandlerRegistry, ProcessRecord, Saga, parallel, step
from support.waiting import until

TYPES = ("reserve", "release", "charge", "refund", "ship", "label", "unlabel")

ORDER = Saga(
    "order",
    step("reserve", "orders", undo="release"),
    step("charge", "orders", undo="refund"),
    step("ship", "orders"),
)
WIDE = Saga(
    "wide",
    step("reserve", "orders", undo="release"),
    parallel(step("charge", "orders", undo="refund"), step("label", "orders", undo="unlabel")),
    step("ship", "orders"),
)
BARE = Saga("bare", step("reserve", "orders"), step("charge", "orders"))


class World:
    """What the handlers did, and what they are to do."""

    def __init__(self) -> None:
        self.did: list[str] = []
        self.fails: dict[str, BaseException] = {}
        self.held: dict[str, threading.Event] = {}

    def handle(self, command: Any, ctx: Any) -> Any:
        """Do as told: wait, raise, or answer."""
        self.did.append(command.command_type)
        if (go_on := self.held.get(command.command_type)) is not None:
            while not go_on.wait(0.02):
                ctx.raise_if_canceled()
        if (error := self.fails.get(command.command_type)) is not None:
            raise error
        return {"by": command.command_type}


@dataclass
class Lab:
    """A bus, a world, and a registry with both."""

    bus: CommandBus
    world: World = field(default_factory=World)
    handlers: HandlerRegistry = field(default_factory=HandlerRegistry)

    def __post_init__(self) -> None:
        for name in TYPES:
            self.handlers.register("orders", name, self.world.handle)

    def process(self, process_id: str, domain: str = "processes") -> ProcessRecord:
        """What is known of a process that exists."""
        found = self.bus.get_process(domain, process_id)
        assert found is not None
        return found

    def until(self, process_id: str, status: str, domain: str = "processes") -> ProcessRecord:
        """Wait until a process is in this state."""

        def look() -> ProcessRecord | None:
            found = self.process(process_id, domain)
            return found if found.status == status else None

        return until(look, what=lambda: f"{self.process(process_id, domain)}")

    def until_did(self, command_type: str, times: int = 1) -> None:
        """Wait until a handler has begun so often."""
        until(lambda: self.world.did.count(command_type) >= times, what=lambda: f"{self.world.did}")
