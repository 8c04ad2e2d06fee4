"""HealthStatus: what it counts, for how long, and what it says."""

from __future__ import annotations

import json
import sys
import threading
import tracemalloc

import pytest

from commandbus.errors import BusinessRuleException, PermanentCommandError, TransientCommandError
from commandbus.worker.health import HealthState, HealthStatus


class Clock:
    """A monotonic clock that the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def status(clock: Clock) -> HealthStatus:
    return HealthStatus(clock=clock)


def fail(status: HealthStatus, times: int) -> None:
    for _ in range(times):
        status.record_failure(ValueError("no"))


def test_it_begins_healthy_with_nothing_to_say(status: HealthStatus) -> None:
    assert (status.state, status.reasons, status.last_success) == (HealthState.HEALTHY, [], None)


def test_the_thresholds_are_those_of_the_requirements() -> None:
    assert (HealthStatus.FAILURE_THRESHOLD, HealthStatus.STUCK_THRESHOLD, HealthStatus.EXHAUSTION_THRESHOLD) == (
        10, 3, 5
    )  # fmt: skip


def test_ten_failures_in_a_row_degrade_it_and_one_success_ends_the_row(status: HealthStatus) -> None:
    fail(status, 9)
    assert (status.state, status.consecutive_failures) == (HealthState.HEALTHY, 9)
    fail(status, 1)
    assert status.state is HealthState.DEGRADED
    assert status.reasons == ["10 attempts in a row failed within 5m (limit 10), the last with ValueError: no"]
    status.record_success()
    assert (status.state, status.consecutive_failures) == (HealthState.HEALTHY, 0)
    assert status.last_success is not None
    assert status.last_success.tzinfo is not None


def test_a_settled_batch_without_a_success_changes_nothing(status: HealthStatus) -> None:
    fail(status, 10)
    status.record_success(0)
    assert (status.state, status.last_success) == (HealthState.DEGRADED, None)
    status.record_success(200)
    assert status.state is HealthState.HEALTHY


@pytest.mark.parametrize("error", [BusinessRuleException("no"), PermanentCommandError("never")])
def test_what_a_handler_says_about_its_command_does_not_count(status: HealthStatus, error: Exception) -> None:
    for _ in range(50):
        status.record_failure(error)
    assert (status.state, status.consecutive_failures) == (HealthState.HEALTHY, 0)


def test_transient_errors_count(status: HealthStatus) -> None:
    for _ in range(10):
        status.record_failure(TransientCommandError("later"))
    assert status.state is HealthState.DEGRADED


def test_a_failure_of_another_process_is_told_as_text(status: HealthStatus) -> None:
    for _ in range(10):
        status.record_failure("WorkerLost: killed by\nSIGSEGV")
    assert status.reasons[0].endswith("the last with WorkerLost: killed by SIGSEGV")


def test_three_stuck_threads_are_critical(status: HealthStatus) -> None:
    status.record_stuck_thread()
    status.record_stuck_thread()
    assert status.state is HealthState.HEALTHY
    status.record_stuck_thread()
    assert (status.state, status.stuck_threads) == (HealthState.CRITICAL, 3)
    assert status.reasons == ["3 attempts got stuck within 5m (limit 3)"]
    status.record_success()
    assert status.state is HealthState.CRITICAL, "a success somewhere else frees no slot"


def test_five_exhaustions_are_critical(status: HealthStatus) -> None:
    for _ in range(5):
        status.record_pool_exhaustion()
    assert (status.state, status.pool_exhaustions) == (HealthState.CRITICAL, 5)
    assert "exhausted 5 times" in status.reasons[0]


def test_everything_that_is_counted_ends_by_itself(status: HealthStatus, clock: Clock) -> None:
    fail(status, 20)
    for _ in range(5):
        status.record_stuck_thread()
        status.record_pool_exhaustion()
    clock.now += 299.9
    assert status.state is HealthState.CRITICAL
    clock.now += 0.1
    assert (status.state, status.reasons) == (HealthState.HEALTHY, [])
    assert (status.consecutive_failures, status.stuck_threads, status.pool_exhaustions) == (0, 0, 0)


def test_the_window_slides(status: HealthStatus, clock: Clock) -> None:
    for _ in range(4):
        status.record_stuck_thread()
        clock.now += 100
    assert status.stuck_threads == 2  # of 0, 100, 200 and 300 s, seen at 400 s
    status.record_stuck_thread()
    assert status.state is HealthState.CRITICAL
    clock.now += 100
    assert status.state is HealthState.HEALTHY


def test_a_named_reason_stays_until_it_is_cleared_by_its_name(status: HealthStatus, clock: Clock) -> None:
    status.set_critical("database_unreachable")
    status.set_critical("disk", "the disk is full")
    clock.now += 3600
    assert status.reasons == ["database unreachable (for 1h)", "the disk is full (for 1h)"]
    status.record_success(10)
    status.clear("something else")
    assert (status.state, status.critical_reasons) == (HealthState.CRITICAL, ["database_unreachable", "disk"])
    status.clear("database_unreachable")
    assert status.reasons == ["the disk is full (for 1h)"]
    status.clear("disk")
    assert status.state is HealthState.HEALTHY


def test_a_named_reason_may_be_a_lesser_one(status: HealthStatus, clock: Clock) -> None:
    status.set_degraded("limits_degraded", "limits degraded: Redis is unreachable")
    clock.now += 60
    assert (status.state, status.degraded_reasons) == (HealthState.DEGRADED, ["limits_degraded"])
    assert status.reasons == ["limits degraded: Redis is unreachable (for 1m)"]
    assert status.critical_reasons == []
    status.set_critical("database_unreachable")
    assert status.state is HealthState.CRITICAL
    assert [reason.split()[0] for reason in status.reasons] == ["database", "limits"]
    status.clear("database_unreachable")
    status.clear("limits_degraded")
    assert (status.state, status.reasons) == (HealthState.HEALTHY, [])


def test_a_reason_that_is_set_again_keeps_its_beginning(status: HealthStatus, clock: Clock) -> None:
    status.set_critical("frozen", "for 15 s")
    clock.now += 30
    status.set_critical("frozen", "for 45 s")
    assert status.reasons == ["for 45 s (for 30s)"]


def test_the_worst_comes_first(status: HealthStatus) -> None:
    fail(status, 10)
    status.set_critical("database_unreachable")
    assert [reason.split()[0] for reason in status.reasons] == ["database", "10"]
    assert status.state is HealthState.CRITICAL


def test_thresholds_and_window_can_be_set(clock: Clock) -> None:
    status = HealthStatus(failure_threshold=2, stuck_threshold=1, exhaustion_threshold=1, window=10, clock=clock)
    fail(status, 2)
    assert status.state is HealthState.DEGRADED
    status.record_pool_exhaustion()
    assert status.state is HealthState.CRITICAL
    clock.now += 10
    assert status.state is HealthState.HEALTHY


@pytest.mark.parametrize(
    "wrong",
    [{"failure_threshold": 0}, {"stuck_threshold": 0}, {"exhaustion_threshold": -1}, {"window": 0}],
)
def test_thresholds_that_make_no_sense_are_refused(wrong: dict[str, int]) -> None:
    (name,) = wrong
    with pytest.raises(ValueError, match=name):
        HealthStatus(**wrong)  # type: ignore[arg-type]


def test_all_of_it_is_ready_for_json(status: HealthStatus) -> None:
    fail(status, 1)
    status.record_success()
    fail(status, 2)
    status.record_stuck_thread()
    document = json.loads(json.dumps(status.as_dict()))
    assert document["last_success"].endswith("+00:00")
    assert {**document, "last_success": None} == {
        "status": "healthy", "reasons": [], "last_success": None,
        "consecutive_failures": 2, "stuck_threads": 1, "pool_exhaustions": 0,
    }  # fmt: skip


def test_an_error_that_cannot_be_printed_or_is_endless_is_still_counted(status: HealthStatus) -> None:
    class HostileError(Exception):
        def __str__(self) -> str:
            raise KeyboardInterrupt

    for _ in range(10):
        status.record_failure(HostileError())
    assert "HostileError: <__str__ raised KeyboardInterrupt>" in status.reasons[0]
    status.record_failure(ValueError("a\nb " * 10_000))
    assert "\n" not in status.reasons[0]
    assert len(status.reasons[0]) < 400


def test_many_threads_lose_no_count(status: HealthStatus) -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [
            threading.Thread(target=lambda: [status.record_stuck_thread() for _ in range(2000)]) for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            status.as_dict()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert status.stuck_threads == 16_000


def test_a_storm_of_failures_takes_no_memory(status: HealthStatus, clock: Clock) -> None:
    error = ValueError("no")
    tracemalloc.start()
    try:
        for _ in range(100_000):
            clock.now += 0.01
            status.record_failure(error)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 200_000
    assert 29_800 <= status.consecutive_failures <= 30_000  # of 300 s, one each 10 ms


def test_its_repr_says_how_it_is_and_why(status: HealthStatus) -> None:
    assert repr(status) == "<HealthStatus healthy>"
    status.set_critical("database_unreachable")
    assert repr(status) == "<HealthStatus critical: database unreachable (for 0s)>"
