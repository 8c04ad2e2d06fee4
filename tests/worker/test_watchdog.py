"""WorkerWatchdog: one recovery at a time, with a cool-down, and a watch that nothing ends."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from commandbus.settings import Settings, load_settings
from commandbus.worker import watchdog as module
from commandbus.worker.health import HealthState, HealthStatus
from commandbus.worker.watchdog import WorkerWatchdog
from support.waiting import Stopwatch, until

LOOK = 0.02


class SmallWorker:
    """A worker with a loop of its own that beats, and nothing else."""

    def __init__(self) -> None:
        self.settings: Settings = load_settings({"heartbeat_timeout": 3.0}, environ={})
        self.health_status = HealthStatus()
        self.is_running = True
        self.stops = 0
        self.on_stop: Callable[[], None] = lambda: None
        self.beat_at: float | None = time.monotonic()
        self.looks = 0

    @property
    def beat_age(self) -> float | None:
        self.looks += 1
        return None if self.beat_at is None else time.monotonic() - self.beat_at

    def stop(self) -> None:
        self.stops += 1
        self.on_stop()
        self.is_running = False

    def break_down(self) -> None:
        for _ in range(3):
            self.health_status.record_stuck_thread()

    def wait_for_looks(self, count: int = 3) -> None:
        """Until the watchdog has looked so many times more."""
        self.beat_at = time.monotonic()
        wanted = self.looks + count
        until(lambda: self.looks >= wanted)


@pytest.fixture
def worker() -> SmallWorker:
    return SmallWorker()


@pytest.fixture
def watch(worker: SmallWorker) -> Iterator[Callable[..., WorkerWatchdog]]:
    """Starts a watchdog; stopped at the end of the test."""
    started: list[WorkerWatchdog] = []

    def start(restart: Callable[[], object] | None = None, cooldown: float = 60.0) -> WorkerWatchdog:
        watchdog = WorkerWatchdog(worker, LOOK, restart, cooldown)
        watchdog.start()
        started.append(watchdog)
        return watchdog

    yield start
    for watchdog in started:
        watchdog.stop()


def told(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == level]


def test_a_healthy_worker_is_left_alone(worker: SmallWorker, watch: Callable[..., WorkerWatchdog]) -> None:
    calls: list[int] = []
    watch(lambda: calls.append(1))
    worker.wait_for_looks(5)
    assert (calls, worker.stops) == ([], 0)


def test_a_critical_worker_is_restarted_once_and_the_figures_are_logged(
    worker: SmallWorker, watch: Callable[..., WorkerWatchdog], caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[int] = []
    watch(lambda: calls.append(1))
    worker.break_down()
    until(lambda: calls)
    worker.wait_for_looks(10)
    assert (calls, worker.stops) == ([1], 0), "within the cool-down there is no second one"
    (critical,) = told(caplog, logging.CRITICAL)
    assert "CRITICAL" in critical
    assert "stuck_threads=3, pool_exhaustions=0" in critical


def test_without_a_callback_the_worker_is_stopped_and_then_left_alone(
    worker: SmallWorker, watch: Callable[..., WorkerWatchdog]
) -> None:
    watchdog = watch(cooldown=0)
    worker.break_down()
    until(lambda: worker.stops)
    until(lambda: not watchdog.is_recovering)
    seen = worker.looks
    assert watchdog.is_running
    worker.is_running = True
    worker.health_status = HealthStatus()
    until(lambda: worker.looks > seen + 3)
    assert worker.stops == 1


def test_after_the_cool_down_it_is_tried_again_while_it_is_critical(
    worker: SmallWorker, watch: Callable[..., WorkerWatchdog]
) -> None:
    calls: list[float] = []
    cooldown = 0.3
    watch(lambda: calls.append(time.monotonic()), cooldown)
    worker.break_down()
    until(lambda: len(calls) >= 3)
    worker.health_status = HealthStatus()
    assert all(later - earlier >= cooldown for earlier, later in itertools.pairwise(calls))


def test_two_recoveries_never_overlap_and_the_watch_goes_on_while_one_blocks(
    worker: SmallWorker, watch: Callable[..., WorkerWatchdog], caplog: pytest.LogCaptureFixture
) -> None:
    go_on, running, most = threading.Event(), 0, 0

    def block() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        go_on.wait(20)
        running -= 1

    watchdog = watch(block, cooldown=0)
    worker.break_down()
    until(lambda: running)
    worker.wait_for_looks(10)
    assert (most, watchdog.is_recovering) == (1, True)
    until(lambda: any("has not ended after" in line for line in told(caplog, logging.CRITICAL)))
    worker.health_status = HealthStatus()
    go_on.set()
    until(lambda: not watchdog.is_recovering)
    assert most == 1


@pytest.mark.parametrize("error", [RuntimeError("cannot restart"), SystemExit(1)])
def test_an_error_in_the_callback_is_logged_and_tried_again(
    worker: SmallWorker,
    watch: Callable[..., WorkerWatchdog],
    caplog: pytest.LogCaptureFixture,
    error: BaseException,
) -> None:
    calls: list[int] = []

    def restart() -> None:
        calls.append(1)
        if len(calls) == 1:
            raise error
        worker.health_status = HealthStatus()

    watchdog = watch(restart, cooldown=0.05)
    worker.break_down()
    until(lambda: len(calls) == 2)
    worker.wait_for_looks()
    assert (len(calls), watchdog.is_running) == (2, True)
    assert any(
        "recovery of the worker" in line for line in told(caplog, logging.ERROR) + told(caplog, logging.CRITICAL)
    )


def test_a_worker_whose_stop_raises_is_asked_again(
    worker: SmallWorker, watch: Callable[..., WorkerWatchdog]
) -> None:
    def refuse() -> None:
        if worker.stops < 3:
            raise RuntimeError("not now")

    worker.on_stop = refuse
    watchdog = watch(cooldown=0.05)
    worker.break_down()
    until(lambda: not worker.is_running)
    assert worker.stops == 3
    assert watchdog.is_running


def test_a_degraded_worker_is_a_warning_said_once_and_so_is_its_end(
    worker: SmallWorker, watch: Callable[..., WorkerWatchdog], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    calls: list[int] = []
    watch(lambda: calls.append(1))
    for _ in range(10):
        worker.health_status.record_failure(ValueError("no"))
    until(lambda: told(caplog, logging.WARNING))
    worker.wait_for_looks(5)
    (warning,) = told(caplog, logging.WARNING)
    assert "consecutive_failures=10" in warning
    worker.health_status.record_success()
    until(lambda: any("the worker is healthy again" in line for line in told(caplog, logging.INFO)))
    assert calls == []


def test_a_frozen_worker_is_critical_whatever_its_counters_say(
    worker: SmallWorker, watch: Callable[..., WorkerWatchdog], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOK_AGAIN_SECONDS", 0.05)
    called = threading.Event()
    worker.health_status.record_success()
    worker.beat_at = time.monotonic() - 100
    watch(called.set)
    assert called.wait(60)
    assert worker.health_status.critical_reasons == ["frozen"]
    assert "has not ticked for 1m40" in worker.health_status.reasons[0]
    assert "heartbeat_timeout (3s)" in worker.health_status.reasons[0]
    worker.beat_at = time.monotonic()
    until(lambda: worker.health_status.state is HealthState.HEALTHY)


def test_a_beat_that_is_late_because_all_were_is_no_frost(
    worker: SmallWorker, watch: Callable[..., WorkerWatchdog]
) -> None:
    """As after a SIGSTOP: the watchdog wakes first, and the worker beats a moment later."""
    calls: list[int] = []
    worker.beat_at = time.monotonic() - 100
    watch(lambda: calls.append(1))
    until(lambda: worker.looks)
    worker.beat_at = time.monotonic()
    worker.wait_for_looks(5)
    assert calls == []


def test_a_worker_that_is_not_running_is_left_alone(
    worker: SmallWorker, watch: Callable[..., WorkerWatchdog]
) -> None:
    worker.is_running = False
    worker.break_down()
    calls: list[int] = []
    watchdog = watch(lambda: calls.append(1))
    worker.health_status = HealthStatus()
    worker.is_running = True
    worker.wait_for_looks()
    assert (calls, worker.stops, watchdog.is_running) == ([], 0, True)


def test_a_worker_that_cannot_be_looked_at_does_not_end_the_watch(
    worker: SmallWorker, watch: Callable[..., WorkerWatchdog], caplog: pytest.LogCaptureFixture
) -> None:
    status = worker.health_status
    del worker.health_status
    watchdog = watch()
    until(lambda: told(caplog, logging.ERROR))
    worker.health_status = status
    worker.wait_for_looks()
    assert watchdog.is_running


def test_it_can_be_stopped_by_its_own_callback_and_started_again(worker: SmallWorker) -> None:
    calls: list[int] = []

    def restart() -> None:
        calls.append(1)
        watchdog.stop()

    watchdog = WorkerWatchdog(worker, LOOK, restart, cooldown=0)
    watchdog.start()
    with pytest.raises(RuntimeError, match="started already"):
        watchdog.start()
    worker.break_down()
    until(lambda: calls and not watchdog.is_running and not watchdog.is_recovering)
    assert calls == [1]
    worker.health_status = HealthStatus()
    with watchdog:
        assert watchdog.is_running
    assert not watchdog.is_running


def test_stopping_does_not_wait_for_the_next_look(worker: SmallWorker) -> None:
    watchdog = WorkerWatchdog(worker, check_interval=600)
    watchdog.start()
    stopwatch = Stopwatch()
    watchdog.stop()
    assert stopwatch.seconds() < 2


def test_its_threads_do_not_keep_a_process_alive(
    worker: SmallWorker, watch: Callable[..., WorkerWatchdog]
) -> None:
    go_on = threading.Event()
    watch(lambda: go_on.wait(20))
    worker.break_down()
    names = {"worker-watchdog", "worker-recovery"}
    until(lambda: names <= {thread.name for thread in threading.enumerate()})
    assert all(thread.daemon for thread in threading.enumerate() if thread.name in names)
    worker.health_status = HealthStatus()
    go_on.set()


@pytest.mark.parametrize(
    ("interval", "cooldown"),
    [(0, 60), (-1, 60), (10, -1), (float("nan"), 60), (float("inf"), 60), (10, float("nan"))],
)
def test_limits_that_make_no_sense_are_refused(worker: SmallWorker, interval: float, cooldown: float) -> None:
    with pytest.raises(ValueError, match=r"check_interval|cooldown"):
        WorkerWatchdog(worker, interval, cooldown=cooldown)


def test_a_callback_that_cannot_be_called_is_named(worker: SmallWorker) -> None:
    with pytest.raises(TypeError, match="restart_callback is 5: it must be callable"):
        WorkerWatchdog(worker, restart_callback=5)  # type: ignore[arg-type]
