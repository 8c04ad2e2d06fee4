"""Process managers that people write: their state, their hooks, sync and async, and code that hangs or dies."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import psycopg
import pytest

from commandbus import (
    AsyncCommandBus,
    BaseProcessManager,
    BusinessRuleException,
    CommandBus,
    ConfigurationError,
    InvalidCommandError,
    PermanentCommandError,
    ProcessReplyRouter,
    ProcessView,
    RetryPolicy,
    Saga,
    StepCommand,
    StepReply,
    TroubleshootingQueue,
    Worker,
    step,
)
from support.isolated_saga import handlers as isolated_handlers
from support.sagas import BARE, ORDER, WIDE, Lab
from support.waiting import one, until
from support.workers import quick_settings


@dataclass
class Trip:
    """The state of a trip."""

    city: str
    booked: list[str] = field(default_factory=list)


class TripProcess(BaseProcessManager[Trip]):
    """Reserves and charges; writes down what happens in the transaction that moves it."""

    process_type = "trip"
    state_class = Trip

    def first_step(self, state: Trip) -> str:
        return "reserve"

    def build_command(self, step: str, state: Trip) -> StepCommand:
        return StepCommand("orders", step, {"city": state.city})

    def update_state(self, step: str, reply: StepReply, state: Trip) -> None:
        if reply.is_success:
            state.booked.append(step)

    def next_step(self, step: str, reply: StepReply, state: Trip) -> list[str] | str | None:
        return {"reserve": ["charge", "label"], "label": "ship", "charge": "ship"}.get(step)

    def compensation(self, step: str, state: Trip) -> StepCommand | None:
        undo = {"reserve": "release", "charge": "refund", "label": "unlabel"}.get(step)
        return None if undo is None else StepCommand("orders", undo, {"city": state.city})

    def on_started(self, process: ProcessView[Trip], tx: Any) -> None:
        tx.execute("INSERT INTO diary VALUES (%s, 'started')", (process.process_id,))

    def on_completed(self, process: ProcessView[Trip], tx: Any) -> None:
        tx.execute("INSERT INTO diary VALUES (%s, 'completed')", (process.process_id,))

    def on_compensating(self, process: ProcessView[Trip], tx: Any) -> None:
        tx.execute("INSERT INTO diary VALUES (%s, 'compensating')", (process.process_id,))

    def on_compensated(self, process: ProcessView[Trip], tx: Any) -> None:
        tx.execute("INSERT INTO diary VALUES (%s, 'compensated')", (process.process_id,))


class AsyncTrip(TripProcess):
    """The same, on the event loop."""

    process_type = "async_trip"

    async def first_step(self, state: Trip) -> str:  # type: ignore[override]
        await asyncio.sleep(0)
        return "reserve"

    async def on_started(self, process: ProcessView[Trip], tx: Any) -> None:  # type: ignore[override]
        await tx.execute("INSERT INTO diary VALUES (%s, 'started')", (process.process_id,))

    async def on_completed(self, process: ProcessView[Trip], tx: Any) -> None:  # type: ignore[override]
        await tx.execute("INSERT INTO diary VALUES (%s, 'completed')", (process.process_id,))

    async def on_compensating(self, process: ProcessView[Trip], tx: Any) -> None:  # type: ignore[override]
        await tx.execute("INSERT INTO diary VALUES (%s, 'compensating')", (process.process_id,))

    async def on_compensated(self, process: ProcessView[Trip], tx: Any) -> None:  # type: ignore[override]
        await tx.execute("INSERT INTO diary VALUES (%s, 'compensated')", (process.process_id,))


TRIPS = [TripProcess(), AsyncTrip()]


@pytest.fixture
def lab(bus: CommandBus, database: str, db: psycopg.Connection[Any]) -> Iterator[Lab]:
    db.execute("CREATE TABLE diary (process text, entry text)")
    lab = Lab(bus)
    for manager in TRIPS:
        lab.handlers.register_process(manager)
    with Worker(lab.handlers, settings=quick_settings(database)):
        yield lab


def diary(db: psycopg.Connection[Any]) -> list[str]:
    return [entry for (entry,) in db.execute("SELECT entry FROM diary")]


@pytest.mark.parametrize("manager", TRIPS, ids=lambda one: one.process_type)
def test_a_manager_with_a_dataclass_and_hooks(lab: Lab, db: psycopg.Connection[Any], manager: Any) -> None:
    manager.start(lab.bus, {"city": "Rome"}, process_id="p1")
    record = lab.until("p1", "COMPLETED")
    assert sorted(record.state["booked"]) == ["charge", "label", "reserve", "ship"]
    assert lab.world.did.count("ship") == 1
    assert diary(db) == ["started", "completed"]


@pytest.mark.parametrize("manager", TRIPS, ids=lambda one: one.process_type)
def test_it_is_undone(lab: Lab, db: psycopg.Connection[Any], manager: Any) -> None:
    lab.world.fails["ship"] = BusinessRuleException("no bus")
    manager.start(lab.bus, {"city": "Rome"}, process_id="p1")
    lab.until("p1", "COMPENSATED")
    assert sorted(lab.world.did[4:6]) == ["refund", "unlabel"]
    assert lab.world.did[6:] == ["release"]
    assert diary(db) == ["started", "compensating", "compensated"]


def test_an_async_bus_starts_looks_and_cancels(lab: Lab, database: str) -> None:
    lab.world.held["reserve"] = threading.Event()

    async def use() -> None:
        async with AsyncCommandBus(database) as bus:
            started = await TRIPS[0].start(bus, {"city": "Rome"}, process_id="p1")
            assert started.created
            found = await bus.get_process("processes", "p1")
            assert found is not None
            assert [record.process_id for record in await bus.query_processes(process_type="trip")] == ["p1"]
            await bus.cancel_process("processes", "p1", operator="ann")
            many = await bus.start_processes(TRIPS[0], [{"data": {"city": "Oslo"}}] * 3)
            assert len(many) == 3
            assert (await bus.stray_replies()).items == []

    asyncio.run(use())
    lab.until("p1", "CANCELED")


def test_what_it_cannot_begin_with_is_refused_at_the_start(lab: Lab) -> None:
    with pytest.raises(InvalidCommandError, match=r"'town' is no field of Trip.*known are booked, city"):
        TRIPS[0].start(lab.bus, {"town": "Rome"})
    with pytest.raises(InvalidCommandError, match=r"no Trip can be made of this: .*city"):
        TRIPS[0].start(lab.bus, {})
    with pytest.raises(InvalidCommandError, match="must be an object, not 7"):
        TRIPS[0].start(lab.bus, 7)
    with pytest.raises(InvalidCommandError, match="data is not JSON"):
        TRIPS[0].start(lab.bus, {"city": object()})
    with pytest.raises(InvalidCommandError, match="unknown field 'dta'"):
        lab.bus.start_processes(TRIPS[0], [{"dta": 1}])
    with pytest.raises(ConfigurationError, match=r"give an instance: TripProcess\(\)"):
        lab.bus.start_process(TripProcess, {"city": "Rome"})  # type: ignore[arg-type]
    assert len(lab.bus.query_processes()) == 0


class Nameless(BaseProcessManager[Any]):
    """Has no type."""


def test_a_manager_that_cannot_be_one_is_refused(lab: Lab) -> None:
    with pytest.raises(ConfigurationError, match="Nameless has no process_type"):
        lab.handlers.register_process(Nameless())
    with pytest.raises(ConfigurationError, match="a process manager is needed, not 7"):
        lab.handlers.register_process(7)  # type: ignore[arg-type]


class Silent(BaseProcessManager[dict[str, Any]]):
    """Says nothing of what it does."""

    process_type = "silent"


class Beginning(Silent):
    """Says what it begins with, and no more."""

    def first_step(self, state: Any) -> str:
        return "reserve"


class Endless(Beginning):
    """Says what a step is, and not what follows."""

    def build_command(self, step: str, state: Any) -> StepCommand:
        return StepCommand("orders", step)


class Seeing(Endless):
    """Says what follows in `next_steps`."""

    def next_steps(self, process: ProcessView[Any], step: str, reply: StepReply) -> None:
        return None


@pytest.mark.parametrize(
    ("manager", "missing"), [(Silent(), "first_step"), (Beginning(), "build_command"), (Endless(), "next_step")]
)
def test_a_manager_that_lacks_a_method_is_refused(lab: Lab, manager: Any, missing: str) -> None:
    said = rf"^{type(manager).__name__} has no {missing}: "
    with pytest.raises(ConfigurationError, match=said):
        lab.handlers.register_process(manager)
    with pytest.raises(ConfigurationError, match=said):
        lab.bus.start_process(manager, {})
    assert len(lab.bus.query_processes()) == 0


def test_next_steps_is_enough_without_next_step(bus: CommandBus, database: str) -> None:
    lab, manager = Lab(bus), Seeing()
    lab.handlers.register_process(manager)
    with Worker(lab.handlers, settings=quick_settings(database)):
        bus.start_process(manager, {}, process_id="p1")
        lab.until("p1", "COMPLETED")
    assert lab.world.did == ["reserve"]


class Hanging(BaseProcessManager[dict[str, Any]]):
    """Its code hangs once, then not."""

    process_type = "hanging"
    timeout = 0.3
    retry_policy = RetryPolicy(max_attempts=3, backoff_schedule=[0], jitter=0)

    def __init__(self) -> None:
        self.calls = 0
        self.go_on = threading.Event()

    def first_step(self, state: Any) -> str:
        self.calls += 1
        if self.calls == 1:
            self.go_on.wait(60)
        return "reserve"

    def build_command(self, step: str, state: Any) -> StepCommand:
        return StepCommand("orders", step)

    def next_step(self, step: str, reply: StepReply, state: Any) -> None:
        return None


def test_code_that_hangs_goes_down_the_ladder(bus: CommandBus, database: str) -> None:
    lab, manager = Lab(bus), Hanging()
    lab.handlers.register_process(manager)
    with Worker(lab.handlers, settings=quick_settings(database, cancel_grace=0.3)):
        bus.start_process(manager, {}, process_id="p1")
        lab.until("p1", "COMPLETED")
        manager.go_on.set()
    assert manager.calls == 2
    assert [stuck.error_type for stuck in bus.list_stuck("processes")] == ["ExecutionStuck"]
    assert lab.world.did == ["reserve"]


class Raising(BaseProcessManager[dict[str, Any]]):
    """Its code raises what it is told to."""

    process_type = "raising"
    error: BaseException | None = None
    retry_policy = RetryPolicy(max_attempts=1)

    def first_step(self, state: Any) -> str:
        if self.error is not None:
            raise self.error
        return "reserve"

    def build_command(self, step: str, state: Any) -> StepCommand:
        return StepCommand("orders", step)

    def next_step(self, step: str, reply: StepReply, state: Any) -> None:
        return None


class RaisingLater(Raising):
    """Its code raises when its first step has replied."""

    process_type = "raising_later"
    error: BaseException | None = ValueError("oops")

    def first_step(self, state: Any) -> str:
        return "reserve"

    def next_step(self, step: str, reply: StepReply, state: Any) -> None:
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize(
    "error",
    [ValueError("oops"), BusinessRuleException("oops"), StopIteration("oops"), SystemExit("oops")],
    ids=lambda error: type(error).__name__,
)
def test_code_that_raises_waits_for_a_person(bus: CommandBus, database: str, error: BaseException) -> None:
    lab, manager = Lab(bus), Raising()
    manager.error = error
    lab.handlers.register_process(manager)
    with Worker(lab.handlers, settings=quick_settings(database)):
        bus.start_process(manager, {}, process_id="p1")
        record = lab.until("p1", "WAITING_FOR_TSQ")
        assert record.waits_for is not None
        assert "oops" in record.waits_for
        manager.error = None
        TroubleshootingQueue(bus).retry_all("processes")
        lab.until("p1", "COMPLETED")


@pytest.mark.parametrize("data", [{"town": "Rome"}, [1]])
def test_what_cannot_begin_can_be_cancelled(bus: CommandBus, database: str, data: Any) -> None:
    lab = Lab(bus)
    bus.create_queue("answers")
    lab.handlers.register_process(TRIPS[0])
    with Worker(lab.handlers, settings=quick_settings(database)):
        bus.create_process_batch(
            "trip", [{"data": data, "process_id": "p1", "reply_to": "answers"}], batch_id="b1"
        )
        lab.until("p1", "WAITING_FOR_TSQ")
        bus.cancel_process("processes", "p1", operator="ann")
        record = lab.process("p1")
        assert record.status == "CANCELED"
        assert record.cancel is not None
        batch = bus.get_batch("processes", "b1")
        assert batch is not None
        assert (batch.status, batch.canceled, batch.in_tsq) == ("COMPLETED_WITH_FAILURES", 1, 0)
        assert TroubleshootingQueue(bus).count() == 0
    with psycopg.connect(database) as conn:
        assert one(conn, "SELECT message ->> 'outcome' FROM pgmq.q_answers") == "CANCELED"


def test_code_that_fails_and_is_tried_again_says_so(bus: CommandBus, database: str) -> None:
    lab, manager = Lab(bus), Raising()
    manager.error = ValueError("oops")
    manager.retry_policy = RetryPolicy(max_attempts=3, backoff_schedule=[60])  # type: ignore[misc]
    lab.handlers.register_process(manager)
    with Worker(lab.handlers, settings=quick_settings(database)):
        bus.start_process(manager, {}, process_id="p1")
        until(lambda: "attempt number 1 failed: oops" in (lab.process("p1").waits_for or ""))


def test_a_batch_of_processes_is_in_progress_when_one_has_begun(bus: CommandBus, database: str) -> None:
    lab = Lab(bus)
    lab.handlers.register_process(BARE)
    go_on = lab.world.held["reserve"] = threading.Event()
    with Worker(lab.handlers, settings=quick_settings(database)):
        bus.create_process_batch(BARE, [{"data": {}}] * 2, batch_id="b1")
        until(lambda: (found := bus.get_batch("processes", "b1")) and found.running == 2)
        found = bus.get_batch("processes", "b1")
        assert found is not None
        assert found.status == "IN_PROGRESS"
        assert [item.batch_id for item in bus.query_batches(status="IN_PROGRESS")] == ["b1"]
        go_on.set()
        until(lambda: (found := bus.get_batch("processes", "b1")) and found.status == "COMPLETED")


def test_a_state_can_be_given_to_start(lab: Lab) -> None:
    TRIPS[0].start(lab.bus, Trip("Rome"), process_id="p1", correlation_id="cart-9")
    record = lab.until("p1", "COMPLETED")
    assert record.data == {"city": "Rome", "booked": []}
    command = lab.bus.get_command("orders", record.steps[0].command_id)
    assert command is not None
    assert command.correlation_id == "cart-9"


def test_a_sagas_data_may_not_hide_a_result(lab: Lab) -> None:
    with pytest.raises(InvalidCommandError, match="keeps the result of step 'reserve' under that name"):
        lab.bus.start_process(ORDER, {"reserve": 3})


def test_a_cancel_gives_code_that_raised_another_chance(bus: CommandBus, database: str) -> None:
    lab, manager = Lab(bus), RaisingLater()
    lab.handlers.register_process(manager)
    with Worker(lab.handlers, settings=quick_settings(database)):
        bus.start_process(manager, {}, process_id="p1")
        lab.until_did("reserve")
        lab.until("p1", "WAITING_FOR_TSQ")
        manager.error = None
        bus.cancel_process("processes", "p1")
        lab.until("p1", "CANCELED")


def test_in_processes_of_their_own(bus: CommandBus, database: str) -> None:
    lab = Lab(bus, handlers=isolated_handlers)
    with Worker(isolated_handlers, settings=quick_settings(database)):
        bus.start_process("isolated", {"n": 1}, process_id="p1")
        record = lab.until("p1", "COMPLETED")
    assert record.state["pids"][0] != record.state["own"]


# --- the router alone ---------------------------------------------------------------------------------------


def test_a_router_alone_moves_processes_and_runs_no_steps(bus: CommandBus, database: str) -> None:
    lab = Lab(bus)
    with ProcessReplyRouter([ORDER], settings=quick_settings(database)):
        bus.start_process(ORDER, {}, process_id="p1")
        lab.until("p1", "WAITING_FOR_REPLY")
        assert lab.world.did == []
        with Worker(lab.handlers, settings=quick_settings(database)):
            lab.until("p1", "COMPLETED")


def test_a_worker_with_a_router_has_at_most_slots_and_six_connections(
    bus: CommandBus, database: str, db: psycopg.Connection[Any]
) -> None:
    lab = Lab(bus)
    lab.handlers.register_process(ORDER)
    most = 0
    query = (
        "SELECT count(*) FROM pg_stat_activity "
        "WHERE application_name LIKE 'commandbus counted%' AND datname = current_database()"
    )
    with Worker(lab.handlers, settings=quick_settings(database, concurrency=3), name="counted"):
        bus.start_processes(ORDER, [{"data": {}}] * 60)
        while len(bus.query_processes(status="COMPLETED", limit=100)) < 60:
            most = max(most, one(db, query))
    assert 0 < most <= 3 + 4 + 2


# --- batches of processes -------------------------------------------------------------------------------------


def test_a_batch_of_processes_is_counted_and_completed_once(bus: CommandBus, database: str) -> None:
    lab = Lab(bus)
    lab.handlers.register_process(BARE)
    ended: list[Any] = []
    lab.handlers.register("orders", "ended", lambda command, ctx: ended.append(command.data))
    lab.world.fails["charge"] = BusinessRuleException("no money")
    created = bus.create_process_batch(
        BARE,
        [{"data": {"n": n}} for n in range(5)],
        batch_id="b1",
        on_complete={"domain": "orders", "command_type": "ended"},
    )
    assert (created.total, created.created) == (5, True)
    with Worker(lab.handlers, settings=quick_settings(database)):
        until(lambda: ended)
        found = bus.get_batch("processes", "b1")
        assert found is not None
        assert (found.status, found.total, found.failed) == ("COMPLETED_WITH_FAILURES", 5, 5)
        assert {record.batch_id for record in bus.query_processes(batch_id="b1")} == {"b1"}
        del lab.world.fails["charge"]
        report = bus.retry_failed("processes", "b1")
        assert report.retried == 5
        until(lambda: (bus.get_batch("processes", "b1") or found).status == "COMPLETED")
    assert len(ended) == 1


def test_a_batch_of_processes_in_the_tsq_and_cancelled(bus: CommandBus, database: str) -> None:
    lab = Lab(bus)
    saga = Saga("one", step("reserve", "orders", undo="release"), step("charge", "orders"))
    lab.handlers.register_process(saga)
    lab.world.fails["charge"] = PermanentCommandError("card reader")
    with Worker(lab.handlers, settings=quick_settings(database)):
        bus.create_process_batch(saga, [{"data": {}}] * 4, batch_id="b1")

        def batch() -> Any:
            return bus.get_batch("processes", "b1")

        until(lambda: batch().in_tsq == 4)
        assert batch().status == "IN_PROGRESS"
        TroubleshootingQueue(bus).operator_cancel("orders", TroubleshootingQueue(bus).list("orders")[0].command_id)
        until(lambda: (batch().in_tsq, batch().failed) == (3, 1))
        bus.cancel_batch("processes", "b1", operator="ann")
        until(lambda: batch().is_finished)
        found = batch()
        assert (found.status, found.in_tsq, found.failed, found.canceled) == ("CANCELED", 0, 1, 3)
    assert lab.world.did.count("release") == 4


def test_a_retry_brings_back_every_reply_that_was_missed(
    bus: CommandBus, database: str, db: psycopg.Connection[Any]
) -> None:
    lab, settings = Lab(bus), quick_settings(database)
    bus.start_process(WIDE, {}, process_id="p1")
    with Worker(lab.handlers, settings=settings):
        with ProcessReplyRouter([WIDE], settings=settings):
            lab.world.held["charge"] = lab.world.held["label"] = threading.Event()
            lab.until_did("charge")
            lab.until_did("label")
        lab.world.held["charge"].set()  # both reply, and nobody handles it
        waiting = "SELECT array_agg(command_id) FROM commandbus.command WHERE step = 0 AND status = 'PENDING'"
        until(lambda: len(one(db, waiting) or []) == 2)
        bus.cancel("processes", one(db, waiting)[0], operator="ann", reason="by mistake")
        record = lab.process("p1")
        assert record.status == "FAILED"
        assert record.failure is not None
        assert "ann ended a message that this process had not handled: by mistake" in record.failure["message"]
        with ProcessReplyRouter([WIDE], settings=settings):
            until(lambda: lab.process("p1").strays)
            bus.retry_process("processes", "p1")
            lab.until("p1", "COMPLETED")


def test_under_the_workers_role_a_process_is_undone(
    bus: CommandBus, database: str, db: psycopg.Connection[Any]
) -> None:
    """Least privilege is enough to cancel what runs beside a failed step, and to end what a deadline has
    passed."""
    prefix = f"r{abs(hash(database)) % 10**8}"
    bus.create_roles(prefix)
    db.execute(f"CREATE ROLE {prefix}_user LOGIN IN ROLE {prefix}_worker".encode())
    lab = Lab(bus)
    late = Saga("late", step("reserve", "orders", undo="release"), step("ship", "orders", deadline=0.3))
    for saga in (WIDE, late):
        lab.handlers.register_process(saga)
    lab.world.held["label"] = lab.world.held["ship"] = threading.Event()
    lab.world.fails["charge"] = BusinessRuleException("no money")
    url = database.replace("//postgres@", f"//{prefix}_user@", 1)
    assert url != database
    try:
        with Worker(lab.handlers, settings=quick_settings(url)):
            bus.start_process(WIDE, {}, process_id="p1")
            bus.start_process(late, {}, process_id="p2")
            lab.until("p1", "COMPENSATED")
            lab.until("p2", "COMPENSATED")
    finally:
        for role in (
            f"{prefix}_user",
            *(f"{prefix}_{kind}" for kind in ("reader", "producer", "worker", "operator")),
        ):
            db.execute(f"DROP OWNED BY {role}".encode())
            db.execute(f"DROP ROLE {role}".encode())


def test_starting_many_is_all_or_nothing_in_a_lent_transaction(bus: CommandBus, database: str) -> None:
    with psycopg.connect(database) as conn:
        with pytest.raises(InvalidCommandError, match="unknown field"):
            bus.start_processes(BARE, [*({"data": {}} for _ in range(1500)), {"dta": 1}], conn=conn)
        bus.start_processes(BARE, [{"data": {}, "process_id": "p1"}], conn=conn)
        conn.commit()
        with pytest.raises(KeyboardInterrupt):
            bus.create_process_batch(BARE, _interrupted(), batch_id="b1", conn=conn)
        conn.commit()
    assert [record.process_id for record in bus.query_processes()] == ["p1"]
    assert bus.get_batch("processes", "b1") is None
    for wrong in (-1, True, "9999999d"):
        with pytest.raises(InvalidCommandError, match="deadline"):
            bus.start_process(BARE, {}, deadline=wrong)


def _interrupted() -> Iterator[dict[str, Any]]:
    for _ in range(1500):
        yield {"data": {}}
    raise KeyboardInterrupt


def test_what_was_undone_is_started_again_once(bus: CommandBus, database: str) -> None:
    lab = Lab(bus)
    lab.handlers.register_process(ORDER)
    lab.world.fails["ship"] = BusinessRuleException("no truck")
    with Worker(lab.handlers, settings=quick_settings(database)):
        bus.create_process_batch(ORDER, [{"data": {"n": n}} for n in range(3)], batch_id="b1")
        until(lambda: (found := bus.get_batch("processes", "b1")) and found.failed == 3)
        del lab.world.fails["ship"]
        first = bus.retry_failed("processes", "b1")
        assert (first.sent_again, first.sent_before) == (3, 0)
        assert first.new_batch_id is not None
        until(lambda: (found := bus.get_batch("processes", str(first.new_batch_id))) and found.completed == 3)
        second = bus.retry_failed("processes", "b1")
        assert (second.sent_again, second.sent_before, second.new_batch_id) == (0, 3, None)


class Numbered(BaseProcessManager[dict[str, Any]]):
    """Gives its commands ids of its own."""

    process_type = "numbered"

    def first_step(self, state: Any) -> str:
        return "reserve"

    def build_command(self, step: str, state: Any) -> StepCommand:
        return StepCommand("orders", step, command_id=f"{state['order']}-{step}")

    def next_step(self, step: str, reply: StepReply, state: Any) -> None:
        return None


def test_a_step_with_an_id_of_its_own_can_be_retried(bus: CommandBus, database: str) -> None:
    lab, manager = Lab(bus), Numbered()
    lab.handlers.register_process(manager)
    lab.world.fails["reserve"] = BusinessRuleException("sold out")
    with Worker(lab.handlers, settings=quick_settings(database)):
        bus.start_process(manager, {"order": "o7"}, process_id="p1")
        lab.until("p1", "FAILED")
        del lab.world.fails["reserve"]
        bus.retry_process("processes", "p1")
        record = lab.until("p1", "COMPLETED")
    assert [step.command_id for step in record.steps] == ["o7-reserve", "o7-reserve~2"]
