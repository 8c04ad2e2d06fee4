"""A registry whose process manager runs in processes of its own: module-level, so that they can find it."""

from __future__ import annotations

import os
from typing import Any

from commandbus import BaseProcessManager, HandlerRegistry, StepCommand, StepReply

handlers = HandlerRegistry()


class Isolated(BaseProcessManager[dict[str, Any]]):
    """Notes where its code ran."""

    process_type = "isolated"
    isolation = "process"

    def first_step(self, state: dict[str, Any]) -> str:
        return "where"

    def build_command(self, step: str, state: dict[str, Any]) -> StepCommand:
        return StepCommand("orders", step)

    def update_state(self, step: str, reply: StepReply, state: dict[str, Any]) -> None:
        state["pids"] = [os.getpid()]
        state["own"] = reply.result

    def next_step(self, step: str, reply: StepReply, state: dict[str, Any]) -> None:
        return None


handlers.register_process(Isolated())


@handlers.handler("orders", "where")
def where(command: Any, ctx: Any) -> int:
    """The worker's own process."""
    return os.getpid()
