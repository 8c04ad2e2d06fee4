"""The fleet as people see it: supervisors, their workers and the slots of each, from what was read. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from commandbus.flow.commands.inspect import WorkerInfo
from commandbus.flow.workers.slots import WorkerSlots
from commandbus.quick_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker, and its slots; None while they are not known."""

    info: WorkerInfo
    slots: WorkerSlots | None

    @property
    def is_silent(self) -> bool:
        """Has it not said anything for too long, though it has not stopped?"""
        return self.info.state != "STOPPED" and not self.info.is_alive

    @property
    def health(self) -> str | None:
        """HEALTHY, DEGRADED or CRITICAL, as it last said."""
        return None if self.info.health is None else str(self.info.health.get("state"))

    @property
    def reasons(self) -> list[str]:
        """Why its health is not good."""
        found = None if self.info.health is None else self.info.health.get("reasons")
        return [str(reason) for reason in found] if isinstance(found, list) else []

    @property
    def size(self) -> int:
        """How many slots it has for commands."""
        return self.info.concurrency if self.slots is None else self.slots.size

    @property
    def busy(self) -> int:
        """How many of them run something. Until its slots are known, messages of processes count, too."""
        return min(self.info.running, self.size) if self.slots is None else self.slots.busy

    @property
    def rest(self) -> str:
        """What its free slots are called: idle only if the worker takes commands."""
        return "idle" if self.info.state == "ACTIVE" else self.info.state.lower()

    @property
    def stuck(self) -> int:
        """How many attempts were given up, and still hang there."""
        return 0 if self.slots is None else sum(slot.phase == "STUCK" for slot in self.slots.slots)


@dataclass(frozen=True, slots=True)
class SupervisorView:
    """A supervisor and its workers. `supervisor` is None for workers inside applications."""

    host: str
    supervisor: str | None
    workers: list[WorkerView]


def supervisors(workers: Sequence[WorkerInfo], slots: Sequence[WorkerSlots]) -> list[SupervisorView]:
    """Workers by host and supervisor: live ones first, those that stopped last."""
    by_worker: Mapping[str, WorkerSlots] = {item.worker: item for item in slots}
    groups: dict[tuple[str, str], list[WorkerView]] = {}
    for info in sorted(workers, key=lambda item: (item.state == "STOPPED", item.started_at)):
        view = WorkerView(info, by_worker.get(info.id) if info.is_alive else None)
        groups.setdefault((info.host, info.supervisor or ""), []).append(view)
    found = [SupervisorView(host, name or None, views) for (host, name), views in groups.items()]
    return sorted(found, key=_order)


def _order(group: SupervisorView) -> tuple[bool, str, bool, str]:
    is_over = all(view.info.state == "STOPPED" for view in group.workers)
    return is_over, group.host, group.supervisor is None, group.supervisor or ""
