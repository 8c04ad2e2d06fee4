"""Waits for the end of a plan, and shows its progress."""

from __future__ import annotations

import sys
import threading

from commandbus.bus import CommandBus
from commandbus.cli.render import say
from commandbus.model.plan import PlanRecord

LOOK_SECONDS = 0.5


def wait_for_plan(bus: CommandBus, plan: PlanRecord, *, is_quiet: bool) -> PlanRecord:
    """Look at a plan until it has ended. A line says when it has moved, and when nobody carries it out."""
    shown: tuple[int, int] | None = None
    has_warned = is_quiet
    while not plan.state.is_final:
        if not is_quiet and (plan.moved, plan.skipped) != shown:
            shown = plan.moved, plan.skipped
            say(plan.progress_text)
            sys.stdout.flush()
        if not has_warned and not _is_anybody_there(bus, plan.domain):
            say(f"no worker of domain {plan.domain} runs; the plan goes on when one does", is_error=True)
            has_warned = True
        threading.Event().wait(LOOK_SECONDS)
        plan = bus.plans.get(plan.id)
    return plan


def _is_anybody_there(bus: CommandBus, domain: str) -> bool:
    return any(domain in worker.domains and worker.is_alive for worker in bus.workers())
