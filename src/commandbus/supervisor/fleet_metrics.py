"""Metrics of domains, limits, breakers and schedules. Pure.

They describe the whole fleet, as the database knows it. Every supervisor reports the same values, so take `max by
(limit)`, not a sum. They are as old as the coroner's last look (3 s), and older while the database is unreachable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from commandbus.flow.commands.rescue import ClaimableWork
from commandbus.flow.limits.metrics import BreakerFigures, FleetFigures, LimitFigures, ScheduleFigures
from commandbus.supervisor.metrics import COUNTER, GAUGE, Metric, MetricKind, Sample


def domain_metrics(domains: Mapping[str, ClaimableWork]) -> list[Metric]:
    """What waits in each domain."""
    return [
        Metric("commandbus_ready", GAUGE, "Commands that could be claimed now, counted up to 10000.",
               [Sample(seen.ready, {"domain": domain}) for domain, seen in domains.items()]),
        Metric("commandbus_oldest_ready_seconds", GAUGE, "How long the first of them has been waiting.",
               [Sample(seen.oldest_seconds or 0.0, {"domain": domain}) for domain, seen in domains.items()]),
        Metric("commandbus_troubleshooting_queue", GAUGE, "Commands that need a person.",
               [Sample(seen.in_tsq, {"domain": domain}) for domain, seen in domains.items()]),
    ]  # fmt: skip


def shared_metrics(figures: FleetFigures) -> list[Metric]:
    """The metrics that the whole fleet shares."""

    def limit(name: str, kind: MetricKind, about: str, value: Callable[[LimitFigures], float | None]) -> Metric:
        found = [(item.name, value(item)) for item in figures.limits]
        samples = [Sample(number, {"limit": label}) for label, number in found if number is not None]
        return Metric(f"commandbus_limit_{name}", kind, about, samples)

    def breaker(name: str, about: str, value: Callable[[BreakerFigures], int]) -> Metric:
        samples = [
            Sample(value(item), {"domain": domain, "command_type": command_type})
            for (domain, command_type), item in figures.breakers.items()
        ]
        return Metric(f"commandbus_breaker_{name}", GAUGE, about, samples)

    def schedule(name: str, kind: MetricKind, about: str, value: Callable[[ScheduleFigures], float]) -> Metric:
        samples = [
            Sample(value(item), {"domain": domain, "schedule": label})
            for (domain, label), item in figures.schedules.items()
        ]
        return Metric(f"commandbus_schedule_{name}", kind, about, samples)

    return [
        limit("permits", GAUGE, "How many permits may be in use at once; absent if any number may.",
              lambda item: item.permits),
        limit("in_use", GAUGE, "Permits in use; for permits in Redis, at most so many.", lambda item: item.in_use),
        limit("parked", GAUGE, "Commands that wait for a permit, counted up to 10000.", lambda item: item.parked),
        limit("callers", GAUGE, "Callers inside programs that wait for a permit.", lambda item: item.callers),
        limit("backoff_seconds", GAUGE, "What is left of a back-off or an open breaker.",
              lambda item: item.backoff_seconds),
        limit("breaker_open", GAUGE, "1 while its breaker is open.", lambda item: int(item.breaker_open)),
        limit("degraded", GAUGE, "1 while its permits should be kept in Redis, but are not.",
              lambda item: int(item.is_degraded)),
        limit("granted_total", COUNTER, "Permits given.", lambda item: item.granted),
        limit("rate_limited_total", COUNTER, "Refusals by the API (429).", lambda item: item.rate_limited),
        limit("waits_total", COUNTER, "Finished waits for a permit.", lambda item: item.waits),
        limit("wait_seconds_total", COUNTER, "Total time of these waits.", lambda item: item.waited_seconds),
        breaker("open", "1 while the breaker of a command type is open or half open.",
                lambda item: int(item.breaker_open)),
        breaker("stuck", "Attempts of a command type that its breaker counts as stuck, within its window.",
                lambda item: item.stuck),
        breaker("parked", "Commands that wait until the breaker of their type closes, counted up to 10000.",
                lambda item: item.parked),
        schedule("late_seconds", GAUGE, "By how long the next firing of a schedule is late.",
                 lambda item: item.late_seconds),
        schedule("fired_total", COUNTER, "Commands that a schedule has sent.", lambda item: item.fired),
        schedule("skipped_total", COUNTER, "Firings that were skipped because the last command was unfinished.",
                 lambda item: item.skipped),
    ]  # fmt: skip
