"""Metrics of attempts: outcomes, waits and runs by command type, lease losses and waits for connections. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate

from commandbus.model.attempt_counts import BOUNDS, OUTCOMES, AttemptCounts, Histogram
from commandbus.model.safe_text import escaped
from commandbus.supervisor.metrics import COUNTER, HISTOGRAM, Metric, Sample

_ENDS = (*(f"{bound:g}" for bound in BOUNDS), "+Inf")


def attempt_metrics(counts: AttemptCounts) -> list[Metric]:
    """The metrics of what workers have counted."""
    by_type = [
        ({"domain": escaped(domain), "command_type": escaped(command_type)}, found)
        for (domain, command_type), found in sorted(counts.by_type.items())
    ]
    return [
        Metric("commandbus_attempts_total", COUNTER, "Attempts by domain, command type and outcome.",
               [Sample(count, {**labels, "outcome": outcome}) for labels, found in by_type
                for outcome, count in zip(OUTCOMES, found.outcomes, strict=True) if count]),
        histogram("wait_seconds", "From the moment a command was sent until its first attempt started.",
                  ((labels, found.waits) for labels, found in by_type)),
        histogram("run_seconds", "How long attempts ran.", ((labels, found.runs) for labels, found in by_type)),
        histogram("connection_wait_seconds", "How long handlers waited for a database connection.",
                  [({}, counts.connection_waits)]),
        Metric("commandbus_connection_timeouts_total", COUNTER,
               "Waits for a database connection that were given up.", [Sample(counts.connection_timeouts)]),
        Metric("commandbus_lease_losses_total", COUNTER,
               "Attempts that lost their lease: what they did was not written.", [Sample(counts.lease_losses)]),
    ]  # fmt: skip


def histogram(name: str, about: str, found: Iterable[tuple[Mapping[str, str], Histogram]]) -> Metric:
    """A histogram in Prometheus' manner: each bucket counts all values up to its end."""
    samples = [sample for labels, one in found for sample in _samples(labels, one)]
    return Metric(f"commandbus_{name}", HISTOGRAM, about, samples)


def _samples(labels: Mapping[str, str], found: Histogram) -> Iterator[Sample]:
    count = 0
    for end, count in zip(_ENDS, accumulate(found.buckets), strict=True):
        yield Sample(count, {**labels, "le": end}, "_bucket")
    yield Sample(found.total, labels, "_sum")
    yield Sample(count, labels, "_count")
