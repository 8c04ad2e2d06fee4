"""The Maintenance: what a worker does for the fleet. The registry, breakers, commands without a
handler, sweeping, retention.

It works on a thread and a connection of its own, so that whatever it waits for (a locked batch, a long prune)
holds up no lease and no outcome. It never runs user code.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import psycopg
from psycopg import Connection

from commandbus.clock import monotonic
from commandbus.db.service import DatabaseService
from commandbus.db.service_connection import LastingConnection
from commandbus.db.transient_errors import PassingError, is_locked
from commandbus.errors import CommandBusError
from commandbus.flow.batches.fold_and_complete import fold
from commandbus.flow.batches.leftovers import leftovers
from commandbus.flow.commands.prune import Retention, prune_all
from commandbus.flow.commands.unpark import Parked, left_parked, wake_rest
from commandbus.flow.keys.exist import CHANNEL as KEYS_CHANNEL
from commandbus.flow.operation import Operation, Plan
from commandbus.flow.plans.carry_out import CHANNEL as PLANS_CHANNEL
from commandbus.flow.schedules.exist import CHANNEL
from commandbus.flow.workers.registry import WorkerIdentity, beat
from commandbus.flow.workers.slots import CHANNEL as FLEET_CHANNEL
from commandbus.lazy import lazy
from commandbus.logger import safe_logger
from commandbus.model.safe_text import escaped
from commandbus.settings import Settings
from commandbus.worker.batch_folding import Refused
from commandbus.worker.breakers import WorkerBreakers
from commandbus.worker.expiry import ExpirySweep
from commandbus.worker.fleet_reports import FleetReports
from commandbus.worker.health import HealthStatus
from commandbus.worker.key_releaser_on_demand import KeyReleaserOnDemand
from commandbus.worker.plan_runner import PlanRunner
from commandbus.worker.scheduler_on_demand import SchedulerOnDemand
from commandbus.worker.unhandled_types import UnhandledTypes

if TYPE_CHECKING:
    from commandbus.flow.batches import operate as batch_operate
else:
    batch_operate = lazy("commandbus.flow.batches.operate")  # few workers ever go on with a cancellation

logger = safe_logger("commandbus.worker")
T = TypeVar("T")

BEAT_SECONDS = 3.0
COUNTING_BEAT_SECONDS = 1.0  # while a breaker needs the counts: if a worker dies, its last counts are lost
SWEEP_SECONDS = 2.0
PRUNE_SECONDS = 60.0
BITE_PAUSE_SECONDS = 0.02
SLICE_SECONDS = 0.5
TICK_SECONDS = 0.5
IDLE_TICK_SECONDS = 1.0
LOCKED_SECONDS = 10.0


class Duty:
    """Something that the maintenance thread does in each round."""

    def __init__(self, name: str, do: Callable[[], None]) -> None:
        self.name = name
        self.do = do
        self.rests_until = 0.0


class Work(Generic[T]):
    """A plan that is followed in slices."""

    def __init__(self, plan: Plan[T]) -> None:
        self._plan = plan
        self._operation: Operation[Any] | None = next(plan, None)

    def step(self, connection: LastingConnection) -> bool:
        """Run one operation; False if that was the last one."""
        if self._operation is None:
            return False
        try:
            try:
                answer = connection.run(self._operation)
            except CommandBusError as error:
                self._operation = self._plan.throw(error)
            else:
                self._operation = self._plan.send(answer)
        except StopIteration:
            return False
        return True


class MaintenanceFigures:
    """What a heartbeat reports."""

    def __init__(self, running: Callable[[], int], settled: Callable[[], dict[str, int]]) -> None:
        self.running = running
        self.settled = settled


class Maintenance(DatabaseService):
    """One thread for what may wait."""

    def __init__(
        self,
        settings: Settings,
        identity: WorkerIdentity,
        *,
        figures: MaintenanceFigures,
        health: HealthStatus,
        breakers: WorkerBreakers,
        unhandled: UnhandledTypes,
        scheduling: SchedulerOnDemand,
        key_releasing: KeyReleaserOnDemand,
        reports: FleetReports,
        on_error: Callable[[BaseException], None],
        name: str,
    ) -> None:
        super().__init__(settings, name=name, part="maintenance", on_end=on_error, prepares=False)
        self._settings = settings
        self._identity = identity
        self._figures = figures
        self._health = health
        self._breakers = breakers
        self._unhandled = unhandled
        self._scheduling = scheduling
        self._key_releasing = key_releasing
        self._reports = reports
        self._expiry = ExpirySweep(identity.domains)
        self._plans = PlanRunner(identity.domains)
        self._duties = [
            Duty("breakers", lambda: breakers.sweep(self._connection, lambda: self._beat(self.state))),
            Duty("commands without a handler", lambda: unhandled.sweep(self._connection)),
            Duty("schedules", lambda: scheduling.look(self._connection)),
            Duty("keys", lambda: key_releasing.look(self._connection)),
            Duty("expiry", lambda: self._expiry.sweep(self._connection)),
            Duty("parked commands", self._unpark),
            Duty("canceled batches", self._go_on),
            Duty("plans", lambda: self._plans.sweep(self._connection, self._look_after)),
        ]
        breakers.on_report = lambda: self.order(lambda: breakers.write(self._connection))
        self.state = "ACTIVE"
        self._beat_at = 0.0
        self._pruned_at = monotonic() - random.random() * PRUNE_SECONDS  # noqa: S311 - workers spread out
        self._sweep_at = monotonic() + random.random() * SWEEP_SECONDS  # noqa: S311
        self._refused = Refused(PRUNE_SECONDS, PRUNE_SECONDS)
        self._resumed: dict[int, Work[batch_operate.Canceled]] = {}
        self._unparked: dict[Parked, Work[int]] = {}
        self._unpark_at = self._sweep_at
        self._rates: dict[str, float] = {}
        self._last: dict[str, int] = {}
        self._last_at = monotonic()

    def connected(self, conn: Connection[Any]) -> None:
        self.listen(conn, CHANNEL, KEYS_CHANNEL, FLEET_CHANNEL, PLANS_CHANNEL)
        self._scheduling.look_soon()
        self._key_releasing.look_soon()
        self._plans.look_soon()

    def heard(self, channel: str, payload: str) -> None:
        if channel == FLEET_CHANNEL:
            self._reports.heard(payload)
        elif payload in self._identity.domains and channel == PLANS_CHANNEL:
            self._plans.look_soon()
        elif payload in self._identity.domains:
            (self._scheduling if channel == CHANNEL else self._key_releasing).look_soon()

    def round(self) -> None:
        self._tick()
        if not self._orders and not self._resumed and not self._unparked and not self._plans.has_more:
            self.sleep(self._pause())

    def _pause(self) -> float:
        """Nothing else is looked at more often than once a second. The breakers say themselves when."""
        if self._breakers.is_counting or self._reports.is_watched:
            return TICK_SECONDS
        return min(max(self._breakers.sweep_at - monotonic(), TICK_SECONDS), IDLE_TICK_SECONDS)

    def finish(self) -> None:
        try:
            self.carry_out()
            self._breakers.sweep_now(self._connection, lambda: None)  # the counts of this worker are still needed
            self._reports.finish(self._connection)
            self._beat("STOPPED")
        except psycopg.Error as error:
            logger.info("the stop could not be recorded in the registry: %s", error)

    def _tick(self) -> None:
        self._look_after()
        self._reports.look(self._connection)
        now = monotonic()
        if now >= self._sweep_at:
            self._sweep_at = now + SWEEP_SECONDS + self._sweep() * 20
        for duty in self._duties:
            self._do(duty)
        if now - self._pruned_at >= PRUNE_SECONDS:
            self._pruned_at = now
            self._do(Duty("retention", self._prune))

    def _do(self, duty: Duty) -> None:
        """A duty that somebody's lock holds up rests for a while, so that those after it have their turn."""
        if monotonic() < duty.rests_until:
            return
        try:
            duty.do()
        except PassingError as error:
            if not is_locked(error) or self._connection.conn_is_lost():
                raise
            duty.rests_until = monotonic() + LOCKED_SECONDS
            text = "maintenance (%s) needs a row that somebody has locked, trying again in %.0f s: %s"
            logger.warning(text, duty.name, LOCKED_SECONDS, error)

    def _look_after(self) -> None:
        """What comes between any two bites: orders and the heartbeat."""
        self.moved_at = monotonic()
        self.carry_out()
        pause = COUNTING_BEAT_SECONDS if self._breakers.is_counting else BEAT_SECONDS
        if self.moved_at - self._beat_at >= pause:
            self._beat(self.state)

    def tell_state(self, state: str) -> None:
        """The worker's state has changed, and people are to see it at once. Called by this thread."""
        self.state = state
        self._beat(state)

    def _beat(self, state: str) -> None:
        now = self._beat_at = monotonic()
        settled = self._figures.settled()
        elapsed = max(now - self._last_at, 1e-3)
        if elapsed >= COUNTING_BEAT_SECONDS or not self._rates:
            self._rates = {
                domain: round((count - self._last.get(domain, 0)) / elapsed, 3)
                for domain, count in settled.items()
            }
            self._last, self._last_at = dict(settled), now
        watchers = self._connection.run(
            beat(
                self._identity,
                state=state,
                running=self._figures.running(),
                settled=sum(settled.values()),
                rates=self._rates,
                health={
                    "state": self._health.state.value,
                    "reasons": [escaped(reason) for reason in self._health.reasons],  # a NUL cannot be stored
                },
                counts=self._breakers.counts(),
            )
        )
        self._reports.note(watchers)

    def _sweep(self) -> float:
        """Fold what nobody has folded, and go on with cancellations that a crash interrupted.

        Returns how long it took, without refused batches, which are left alone for a minute.
        """
        began = monotonic()
        try:
            found = self._connection.run(leftovers(but=self._refused.resting()))
        except Exception as error:
            if self._connection.conn_is_lost():
                raise
            logger.warning("batches cannot be checked now, trying again in a minute: %s", error)
            return PRUNE_SECONDS / 20
        seconds = monotonic() - began
        for batch in found.to_fold:
            began = monotonic()
            try:
                self._connection.run(fold([batch]))
            except Exception as error:  # noqa: BLE001 - raised again if the connection is lost
                self._refuse(batch, error)
            else:
                seconds += monotonic() - began
            self._look_after()
            if self._stopping.is_set():
                return seconds
        for canceling in found.to_cancel:
            if canceling.id not in self._resumed:
                self._resumed[canceling.id] = Work(batch_operate.resume(canceling))
        self._refused.forget_old()
        return seconds

    def _go_on(self) -> None:
        """Go on with the cancellations, for a moment: everything else must have its turn."""
        until = monotonic() + SLICE_SECONDS
        while self._resumed and monotonic() < until and not self._stopping.is_set():
            batch, work = self._resumed.popitem()  # taken up again by the next sweep if this fails
            try:
                goes_on = work.step(self._connection)
            except Exception as error:  # noqa: BLE001 - raised again if the connection is lost
                self._refuse(batch, error)
                goes_on = False
            if goes_on:
                self._resumed[batch] = work
            self._look_after()

    def _unpark(self) -> None:
        """Wake commands that nothing keeps parked any more, for a moment. If there were many, only the first were
        woken at once."""
        now = monotonic()
        try:
            if now >= self._unpark_at:
                self._unpark_at = now + SWEEP_SECONDS
                for parked in self._connection.run(left_parked(self._identity.domains)):
                    self._unparked.setdefault(parked, Work(wake_rest(parked)))
            until = monotonic() + SLICE_SECONDS
            while self._unparked and monotonic() < until and not self._stopping.is_set():
                parked, work = self._unparked.popitem()  # found again by the next look if this fails
                if work.step(self._connection):
                    self._unparked[parked] = work
                self._look_after()
        except PassingError:
            raise
        except Exception as error:  # noqa: BLE001 - everything else must have its turn
            self._unparked.clear()
            self._unpark_at = now + PRUNE_SECONDS
            logger.warning("parked commands cannot be woken now, trying again in a minute: %s", error)

    def _refuse(self, batch: int, error: Exception) -> None:
        """In the handling of an error."""
        if self._connection.conn_is_lost():
            raise error
        pause = self._refused.add(batch)
        logger.warning("batch %d cannot be checked now, trying again in %.0f s: %s", batch, pause, error)

    def _prune(self) -> None:
        plan = prune_all(Retention.of(self._settings))
        report = self._follow(plan)
        if report is not None and report.commands:
            logger.info("retention: %d finished commands were deleted", report.commands)
        for kind, count in ({} if report is None else report.dropped).items():
            text = "retention: the oldest %d %s were dropped: over asides_count (%d) or asides_bytes (%d)"
            most = (self._settings.retention_asides_count, self._settings.retention_asides_bytes)
            logger.warning(text, count, kind, *most)

    def _follow(self, plan: Plan[T]) -> T | None:
        """Long work in small bites, and the heartbeat in between; None if the worker stops on the way."""
        try:
            operation = next(plan)
            while not self._stopping.wait(BITE_PAUSE_SECONDS):
                try:
                    answer = self._connection.run(operation)
                except CommandBusError as error:
                    operation = plan.throw(error)
                else:
                    operation = plan.send(answer)
                self._look_after()
        except StopIteration as stop:
            return cast(T, stop.value)
        return None
