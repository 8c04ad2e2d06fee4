"""What needs a person now, as sentences with links. Pure: from what was read to what is said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final
from urllib.parse import urlencode

from commandbus.flow.breakers.operate import BreakerInfo
from commandbus.flow.commands.failures import FailureGroup
from commandbus.flow.commands.inspect import DomainStatus, WorkerInfo
from commandbus.flow.limits.inspect import LimitInfo
from commandbus.flow.workers.slots import WorkerSlots
from commandbus.model.counting import counted
from commandbus.model.durations import roughly, without_clock
from commandbus.model.minute_figures import HourFigures

_STATES: Final = {
    "BACKING_OFF": "is backing off",
    "BREAKER_OPEN": "has its breaker open",
    "PROBING": "is probing",
    "JOINING": "is joining its permits",
}


@dataclass(frozen=True, slots=True)
class Concern:
    """One thing that needs a person. `link` leads to the page where they can act. If it is known since when, the
    text says that moment in UTC (`clock_of`), and a page shows it in the zone of its reader."""

    text: str
    link: str
    since: datetime | None = None


@dataclass(frozen=True, slots=True)
class Fleet:
    """What one look at the fleet found. `in_tsq` counts commands by (domain, command type). `slots` are known of
    workers that have published them. `failures` are those of commands that need a person."""

    domains: Sequence[DomainStatus]
    workers: Sequence[WorkerInfo]
    limits: Sequence[LimitInfo]
    breakers: Sequence[BreakerInfo]
    in_tsq: Mapping[tuple[str, str], int]
    slots: Sequence[WorkerSlots] = ()
    hours: Sequence[HourFigures] = ()
    failures: Sequence[FailureGroup] = ()

    @property
    def served(self) -> set[str]:
        """The domains that a live worker serves."""
        return {domain for worker in self.workers if worker.is_alive for domain in worker.domains}


def concerns(fleet: Fleet) -> list[Concern]:
    """What needs a person, the most urgent first: what stands still, then what waits for somebody."""
    return [
        *_workers(fleet),
        *_stuck(fleet.slots),
        *_limits(fleet.limits),
        *_breakers(fleet.breakers),
        *_troubles(fleet.in_tsq, fleet.failures),
        *_unhandled(fleet.domains),
        *_pauses(fleet.domains),
        *_rejected(fleet.domains),
    ]


def headline(found: Sequence[Concern]) -> str:
    """The first sentence of the page."""
    if not found:
        return "Nothing needs you."
    return f"{counted(len(found), 'thing')} {'needs' if len(found) == 1 else 'need'} you:"


def _workers(fleet: Fleet) -> list[Concern]:
    found = []
    live = [worker for worker in fleet.workers if worker.is_alive and worker.state != "STOPPED"]
    served = {domain for worker in live if worker.state != "PAUSED" for domain in worker.domains}
    resting = {domain for worker in live if worker.state == "PAUSED" for domain in worker.domains}
    for domain in fleet.domains:
        if domain.ready and domain.domain not in served:
            why = "all of its workers are paused" if domain.domain in resting else "no worker serves it"
            waits = f"{counted(domain.ready, 'command')} of {domain.domain} could run, but {why}"
            found.append(Concern(waits, "workers"))
    for worker in fleet.workers:
        if worker.state == "STOPPED":
            continue
        if not worker.is_alive:
            silent = f"worker {worker.id} has been silent for {roughly(worker.heartbeat_age_seconds)}"
            found.append(Concern(silent, "workers"))
        elif worker.state == "PAUSED":
            found.append(Concern(f"worker {worker.id} is {_pause_of(worker)}", "workers"))
        elif worker.health is not None and str(worker.health.get("state")).upper() == "CRITICAL":
            reasons = "; ".join(map(str, worker.health.get("reasons") or [])) or "it gives no reason"
            found.append(Concern(f"worker {worker.id} is critical: {reasons}", "workers"))
    return found


def _pause_of(worker: WorkerInfo) -> str:
    reasons = map(str, (worker.health or {}).get("reasons") or [])
    return next((reason for reason in reasons if reason.startswith("paused by ")), "paused")


def _stuck(slots: Sequence[WorkerSlots]) -> list[Concern]:
    return [
        Concern(
            f"{slot.domain}/{slot.command_type} hangs in worker {worker.worker}: {slot.command_id} was given up, "
            f"and its thread does not end",
            "command?" + urlencode({"domain": slot.domain, "id": slot.command_id}),
        )
        for worker in slots
        for slot in worker.slots
        if slot.phase == "STUCK"
    ]


def _limits(limits: Sequence[LimitInfo]) -> list[Concern]:
    return [
        Concern(
            f"limit {limit.name} {_state(limit)}{_waiting(limit.parked)}",
            "limit?" + urlencode({"name": limit.name}),
        )
        for limit in limits
        if limit.state != "AVAILABLE"
    ]


def _state(limit: LimitInfo) -> str:
    """Without a time of day: the reader may be in another zone."""
    text = without_clock(limit.text)
    return f"{_STATES.get(limit.state, limit.state)}{' ' if text != limit.text else ': '}{text}"


def _waiting(parked: int) -> str:
    return f", {counted(parked, 'command')} parked" if parked else ""


def _breakers(breakers: Sequence[BreakerInfo]) -> list[Concern]:
    return [
        Concern(
            f"the breaker of {item.name} is open: {item.reason}{_waiting(item.parked)}",
            "breaker?" + urlencode({"name": item.name}),
        )
        for item in breakers
        if item.kind == "type" and item.state != "CLOSED"
    ]


def _troubles(in_tsq: Mapping[tuple[str, str], int], failures: Sequence[FailureGroup]) -> list[Concern]:
    found = []
    for (domain, kind), count in sorted(in_tsq.items(), key=lambda item: -item[1]):
        most = _commonest(domain, kind, failures)
        found.append(
            Concern(
                f"{counted(count, 'command')} of {domain}/{kind} {'is' if count == 1 else 'are'} in the "
                f"troubleshooting queue{'' if most is None else _since(most)}",
                "troubleshooting?" + urlencode({"domain": domain, "command_type": kind}),
                None if most is None else most.first_seen,
            )
        )
    return found


def _commonest(domain: str, kind: str, failures: Sequence[FailureGroup]) -> FailureGroup | None:
    own = [item for item in failures if (item.domain, item.command_type) == (domain, kind)]
    return max(own, key=lambda item: item.in_troubleshooting, default=None)


def _since(most: FailureGroup) -> str:
    """Since when, and since which version of the code, commands of a type fail as most of them do."""
    version = "" if most.since_version is None else f", version {most.since_version}"
    new = version.replace(",", ", new in", 1) if most.is_new else version
    return f", since {clock_of(most.first_seen)}{new}"


def clock_of(moment: datetime) -> str:
    """A moment as the texts have it."""
    return f"{moment.astimezone(UTC):%b %d, %H:%M} UTC"


def _unhandled(domains: Sequence[DomainStatus]) -> list[Concern]:
    return [
        Concern(
            f"{counted(item.waiting, 'command')} of {item.domain}/{item.command_type} "
            f"{'waits' if item.waiting == 1 else 'wait'} for a worker that handles that type",
            "workers",
        )
        for domain in domains
        for item in domain.unhandled
        if not item.workers
    ]


def _pauses(domains: Sequence[DomainStatus]) -> list[Concern]:
    found = []
    for domain in domains:
        if domain.is_paused:
            found.append(Concern(f"{domain.domain} is paused: all of it", "domains"))
        elif domain.paused_types:
            paused = ", ".join(f"{domain.domain}/{kind}" for kind in domain.paused_types)
            found.append(Concern(f"{paused} {'is' if len(domain.paused_types) == 1 else 'are'} paused", "domains"))
    return found


def _rejected(domains: Sequence[DomainStatus]) -> list[Concern]:
    return [
        Concern(f"{counted(item.rejected, 'message')} to {item.domain} {'was' if item.rejected == 1 else 'were'} "
                f"no command", "rejected?" + urlencode({"domain": item.domain}))
        for item in domains
        if item.rejected
    ]  # fmt: skip
