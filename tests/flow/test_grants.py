"""The roles in real sessions: each can do its part, and not the others'."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from flow_harness import Bus, Roles, assert_refused, expire_leases, fail, one, raw, send_raw, sync_only

from commandbus import (
    BatchStatus,
    BusinessRuleException,
    CommandBus,
    CommandStatus,
    DuplicateCommandError,
    HandlerRegistry,
    InvalidCommandError,
    Limit,
    NewCommand,
    OnComplete,
    PermanentCommandError,
    RateLimitError,
    SchemaError,
    Settings,
    Worker,
)
from commandbus.flow.batches.fold_and_complete import fold
from commandbus.flow.batches.leftovers import leftovers
from commandbus.flow.breakers.breaker import Bad, advance, judge, report, watch
from commandbus.flow.commands.claim import announce, withdraw
from commandbus.flow.commands.claimed_row import Fence
from commandbus.flow.commands.operate import OperatorAction, operator_action, set_priority
from commandbus.flow.commands.prune import ASIDES, prune_excess
from commandbus.flow.commands.renew import pending_cancels
from commandbus.flow.commands.unpark import left_parked
from commandbus.flow.keys.operate import set_key_limit
from commandbus.flow.setup.roles import print_roles
from commandbus.flow.workers.figures import last_hour
from commandbus.flow.workers.post_mortems import post_mortems
from commandbus.flow.workers.registry import WorkerIdentity, beat
from commandbus.flow.workers.requests import ask_for_stack, ask_worker
from commandbus.flow.workers.slots import watch_slots
from commandbus.model.breaker import Breaker
from commandbus.model.key_limit import KeyLimit
from commandbus.model.roles import create_statements
from commandbus.sql import migrations
from support.waiting import until
from support.workers import quick_settings


def _look(bus: Bus) -> None:
    for look in _looking(bus):
        look()
    bus.list_domains()
    bus.schema_state()
    assert bus.get_outcome("orders", "waiting").status is CommandStatus.PENDING


def _looking(bus: Bus) -> list[Callable[[], Any]]:
    return [
        lambda: bus.get_command("orders", "waiting"),
        lambda: bus.query_commands(status="PENDING"),
        lambda: bus.get_audit_trail("orders", "waiting"),
        lambda: bus.get_attempts("orders", "waiting"),
        bus.list_stuck,
        bus.status,
        bus.workers,
        bus.pauses,
        bus.tsq.list,
        bus.tsq.count,
        bus.limits,
        bus.breakers,
        bus.query_batches,
        lambda: bus.run(watch_slots()),
        lambda: bus.run(last_hour()),
        lambda: bus.run(post_mortems(limit=5)),
        lambda: bus.run(ask_for_stack("orders", "running")),
    ]


def _setting_up(bus: Bus) -> list[Callable[[], Any]]:
    return [
        lambda: bus.create_domain("shipping"),
        lambda: bus.create_queue("more"),
        lambda: bus.create_roles("other"),
        lambda: bus.run(raw("DROP TABLE commandbus.command")),
        lambda: bus.run(raw("TRUNCATE commandbus.command")),
        lambda: bus.run(raw("UPDATE commandbus.setting SET value = 'x'")),
        lambda: bus.run(raw("DELETE FROM commandbus.migration")),
        lambda: bus.run(raw("DELETE FROM commandbus.domain")),
    ]


def _sending(bus: Bus) -> list[Callable[[], Any]]:
    return [
        lambda: bus.send("orders", "Ship"),
        lambda: bus.send("orders", "Ship", command_id="mine", delay=5),
        lambda: bus.send("orders", "Ship", unique="key"),
        lambda: bus.send("orders", "Ship", unique="key", on_conflict="replace"),
        lambda: bus.send("orders", "Ship", key_limit="tenant", key="17"),
        lambda: bus.send("orders", "Ship", priority="low"),
        lambda: bus.send_many("orders", [NewCommand("Ship"), NewCommand("Ship", command_id="two")]),
    ]


def _operating(bus: Bus) -> list[Callable[[], Any]]:
    return [
        lambda: bus.run(set_priority("orders", "waiting", "high", operator_action("ann"))),
        lambda: bus.cancel("orders", "running"),
        lambda: bus.cancel("orders", "waiting"),
        lambda: bus.tsq.operator_retry("orders", "t1"),
        lambda: bus.tsq.operator_cancel("orders", "t2"),
        lambda: bus.tsq.operator_complete("orders", "t3"),
        lambda: bus.tsq.retry_all("orders"),
        *_pausing(bus),
    ]


def _pausing(bus: Bus) -> list[Callable[[], Any]]:
    return [
        lambda: bus.pause("orders", "Ship"),
        lambda: bus.resume("orders", "Ship"),
        lambda: bus.pause("orders"),
        lambda: bus.resume("orders"),
    ]


@pytest.fixture
def work(orders: Bus) -> Bus:
    """Something for everybody to do."""
    orders.create_queue("answers")
    limit = KeyLimit.make("orders", "tenant", concurrency=2, ordered=False, on_failure=None)
    orders.run(set_key_limit(limit, OperatorAction("ann")))
    orders.send_many("orders", [NewCommand("Ship", command_id=f"t{n}", reply_to="answers") for n in range(1, 6)])
    attempts = orders.claim()
    orders.settle([fail(attempt, PermanentCommandError()) for attempt in attempts])
    orders.send("orders", "Long", command_id="running", reply_to="answers")
    orders.claim_one("elsewhere")
    orders.send("orders", "Ship", command_id="waiting", reply_to="answers")
    return orders


def test_a_reader_looks(work: Bus, acting: Roles) -> None:
    reader = acting("reader")
    _look(reader)
    for act in [*_sending(reader), *_operating(reader), *_setting_up(reader)]:
        assert_refused(act)
    assert_refused(reader.claim)
    assert_refused(lambda: reader.prune(age=0))
    assert_refused(lambda: reader.run(ask_worker("w", "PAUSE", operator_action("ann"))))
    assert_refused(
        lambda: reader.run(raw("INSERT INTO commandbus.worker_request (worker, kind) VALUES ('w', 'RECYCLE')"))
    )


def test_a_producer_sends(work: Bus, acting: Roles, db: psycopg.Connection[Any]) -> None:
    producer = acting("producer")
    for act in _sending(producer):
        act()
    assert not producer.send("orders", "Ship", command_id="mine").created
    with pytest.raises(DuplicateCommandError, match="data"):
        producer.send("orders", "Ship", {"other": 1}, command_id="mine")
    assert [item.created for item in producer.send_many("orders", [NewCommand("Ship", command_id="two")])] == [
        False
    ]
    assert producer.get_outcome("orders", "mine").status is CommandStatus.PENDING
    assert producer.get_outcome("orders", "t1").error_type == "PermanentCommandError"
    assert producer.get_outcome("orders", "nobody's") is None
    assert [domain.name for domain in producer.list_domains()] == ["orders"]
    assert producer.schema_state().is_current
    producer.run(
        raw("""SELECT pgmq.send('orders__commands', '{"command_type": "Ship", "command_id": "other"}')""")
    )
    work.claim()
    assert producer.get_outcome("orders", "other").status is CommandStatus.PENDING
    for act in [*_operating(producer), *_setting_up(producer), *_looking(producer)]:
        assert_refused(act)
    assert_refused(producer.claim)
    assert_refused(lambda: producer.prune(age=0))
    assert_refused(lambda: producer.run(raw("UPDATE commandbus.command SET status = 'COMPLETED'")))
    assert_refused(lambda: producer.run(raw("DELETE FROM pgmq.q_orders__commands")))


def test_a_worker_works(work: Bus, acting: Roles, db: psycopg.Connection[Any]) -> None:
    worker = acting("worker")
    _look(worker)
    for act in _sending(worker):
        act()
    worker.send("orders", "Pack", command_id="paused")
    work.pause("orders", "Pack")
    worker.run(announce(worker="w1", domains=["orders"], seconds=5))
    worker.run(withdraw("w1"))
    identity = WorkerIdentity("w1", "host", 123, ["orders"], 4, "0.1.0")
    worker.run(beat(identity, state="ACTIVE", running=2, settled=10, rates={}))
    send_raw(db, '{"command_type": "Ship", "command_id": "raw"}')
    send_raw(db, "[]")
    found = {attempt.command_id: attempt for attempt in worker.claim()}
    assert one(db, "SELECT count(*) FROM commandbus.rejected_message") == 1
    assert worker.get_command("orders", "paused").waiting_for == "pause"
    expire_leases(db)
    work.cancel("orders", "running")
    found = {attempt.command_id: attempt for attempt in worker.claim()}
    assert worker.get_command("orders", "running").status is CommandStatus.CANCELED
    assert found["waiting"].number == 2, "and the first was recorded as lost"
    assert "raw" in found
    assert worker.renew(list(found.values())) == []
    assert worker.run(pending_cancels("orders", "w1", [Fence("orders", 1, 1, 1, 1)])) == []
    db.execute("SELECT pgmq.create('theirs')")  # a reply queue that nobody granted
    worker.send("orders", "Ship", command_id="theirs", reply_to="theirs")
    theirs = worker.claim_one()
    assert worker.settle([theirs.complete(None), found["waiting"].complete("1")]) == {}
    assert one(db, "SELECT count(*) FROM pgmq.q_answers") == 2, "of what was canceled, too"
    assert one(db, "SELECT queue FROM commandbus.undelivered_reply") == "theirs"
    unnamed = next(attempt for name, attempt in found.items() if name not in ("raw", "two", "waiting"))
    assert worker.settle([fail(found["raw"], ValueError()), unnamed.give_back()]) == {}
    assert worker.settle(fail(found["two"], PermanentCommandError())) == {}
    db.execute("SELECT pgmq.archive('orders__commands', %s)", (send_raw(db, "[]"),))
    assert worker.prune(age=0).archived == 1
    for table in ASIDES:  # its maintenance thread does so every minute
        assert worker.run(prune_excess(table, 1000, 1 << 20)) == 0
    for act in [*_pausing(worker), *_setting_up(worker)]:
        assert_refused(act)


def test_an_operator_operates(work: Bus, acting: Roles, db: psycopg.Connection[Any]) -> None:
    operator = acting("operator")
    _look(operator)
    for act in _operating(operator):
        act()
    assert work.get_command("orders", "running").cancel_requested is not None
    assert one(db, "SELECT count(*) FROM pgmq.q_answers") == 3, "replies of cancel, cancel and complete"
    db.execute("SELECT pgmq.archive('orders__commands', msg_id) FROM pgmq.q_orders__commands")
    operator.prune()  # by the settings, which also bound what was put aside
    report = operator.prune(age=0)
    assert report.commands == 3
    assert report.archived > 0
    for act in _sending(operator):
        act()  # to send again what failed is to send
    for act in _setting_up(operator):
        assert_refused(act)
    identity = WorkerIdentity("w1", "host", 123, ["orders"], 4, "0.1.0")
    assert_refused(lambda: operator.run(beat(identity, state="ACTIVE", running=2, settled=10, rates={})))


def test_queues_that_come_later_are_granted(work: Bus, acting: Roles) -> None:
    producer, worker = acting("producer"), acting("worker")
    work.create_domain("later")
    work.create_queue("later_answers")
    producer.send("later", "Ship", reply_to="later_answers")
    attempt = worker.claim_one(domain="later")
    assert worker.settle(attempt.complete(None)) == {}
    with psycopg.connect(work.url) as conn:
        assert one(conn, "SELECT count(*) FROM pgmq.q_later_answers") == 1


@sync_only
def test_set_role_will_do(work: Bus, prefix: str) -> None:
    """The roles cannot log in; a session may take one on."""
    work.create_roles(prefix)
    with psycopg.connect(work.url, autocommit=True) as conn:
        assert one(conn, "SELECT bool_or(rolcanlogin) FROM pg_roles WHERE rolname LIKE %s", prefix + "%") is False
        conn.execute(f"SET ROLE {prefix}_reader".encode())
        assert work.get_command("orders", "waiting", conn=conn) is not None
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            work.send("orders", "Ship", conn=conn)


def test_tables_that_come_with_an_upgrade_are_granted(
    work: Bus, acting: Roles, prefix: str, db: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later migration makes a table anew, which nobody has rights on then."""
    worker = acting("worker")
    name = "has_table_privilege(%s, 'commandbus.waiting', 'SELECT')"
    renewed = (
        "CREATE TABLE commandbus.renewed (LIKE commandbus.waiting INCLUDING ALL); DROP TABLE commandbus.waiting; "
        "ALTER TABLE commandbus.renewed RENAME TO waiting"
    )
    db.execute(renewed)
    assert not one(db, f"SELECT {name}", f"{prefix}_worker")
    found = migrations() | {max(migrations()) + 1: ("later", renewed)}
    monkeypatch.setattr("commandbus.sql.migrations", lambda: found)
    work.migrate()
    assert one(db, f"SELECT {name}", f"{prefix}_worker")
    assert worker.claim_one() is not None


def test_again_and_by_script(work: Bus, prefix: str, db: psycopg.Connection[Any]) -> None:
    script = work.run(print_roles(prefix))
    assert one(db, "SELECT count(*) FROM pg_roles WHERE rolname LIKE %s", prefix + "%") == 0
    for _ in range(2):
        with psycopg.connect(work.url, autocommit=True) as conn:
            conn.execute(script.encode())
    assert one(db, "SELECT count(*) FROM pg_roles WHERE rolname LIKE %s", prefix + "%") == 5
    before = _grants(db, prefix)
    work.create_roles(prefix)
    work.create_roles(prefix)
    assert _grants(db, prefix) == before
    assert before


def _grants(db: psycopg.Connection[Any], prefix: str) -> list[Any]:
    return db.execute(
        "SELECT table_schema, table_name, grantee, privilege_type FROM information_schema.role_table_grants "
        "WHERE grantee LIKE %s ORDER BY 1, 2, 3, 4",
        (prefix + "%",),
    ).fetchall()


@sync_only
def test_roles_that_are_made_for_another_database_at_the_same_moment(
    work: Bus, prefix: str, db: psycopg.Connection[Any]
) -> None:
    with psycopg.connect(work.url) as other, ThreadPoolExecutor(1) as aside:
        for text in create_statements(prefix):
            other.execute(text.encode())
        made = aside.submit(work.create_roles, prefix)
        until(lambda: one(db, "SELECT pg_catalog.count(*) FROM pg_catalog.pg_locks WHERE NOT granted"))
        other.commit()
        assert made.result()["worker"] == f"{prefix}_worker"
    assert one(db, "SELECT pg_catalog.has_table_privilege(%s, 'commandbus.command', 'SELECT')", f"{prefix}_reader")


def test_a_hostile_prefix_makes_no_role(orders: Bus, db: psycopg.Connection[Any]) -> None:
    for hostile in ("x; drop table commandbus.command", "X", "", "a" * 42, None):
        with pytest.raises(InvalidCommandError, match="role prefix"):
            orders.create_roles(hostile)
    # Other tests make roles of their own at the same time.
    suspicious = "SELECT rolname FROM pg_roles WHERE rolname ~* '^(x.*|_?worker|a{40}.*|none.*|.*drop.*)$'"
    assert db.execute(suspicious.encode()).fetchall() == []


def test_who_may_not_create_roles_is_told(orders: Bus, acting: Roles, prefix: str) -> None:
    worker = acting("worker")
    with pytest.raises(SchemaError, match="may not"):
        worker.create_roles(f"{prefix}_x")
    with pytest.raises(SchemaError, match="may not create queue"):
        worker.create_domain("shipping")


@sync_only
def test_a_worker_process_for_an_unknown_domain_is_told(orders: Bus, acting: Roles) -> None:
    from commandbus import UnknownDomainError

    handlers = HandlerRegistry()

    @handlers.handler("shipping", "Ship")
    def ship(command: Any, ctx: Any) -> None:
        raise AssertionError

    with pytest.raises(UnknownDomainError):
        Worker(handlers, database_url=acting("worker").url).start()
    with CommandBus(orders.url) as bus:
        assert [domain.name for domain in bus.list_domains()] == ["orders"]


def test_batches(acting: Roles, orders: Bus, db: psycopg.Connection[Any]) -> None:
    """A producer creates, adds and closes; a worker settles, folds and sweeps; an operator cancels and retries."""
    producer, worker, operator, reader = (acting(kind) for kind in ("producer", "worker", "operator", "reader"))
    done = OnComplete("orders", "Done")
    producer.create_batch("orders", [NewCommand("Ship")] * 4, batch_id="b", is_open=True, on_complete=done)
    assert not producer.create_batch(
        "orders", [NewCommand("Ship")] * 4, batch_id="b", is_open=True, on_complete=done
    ).created
    producer.add_to_batch("orders", "b", [NewCommand("Ship")])
    producer.close_batch("orders", "b")
    producer.create_batch("orders", [], batch_id="empty", on_complete=done)
    for bus in (producer, worker, operator, reader):
        assert bus.get_batch("orders", "b").total == 5
    for bus in (worker, operator, reader):
        assert len(bus.query_batches().items) == 2
        assert bus.get_batch("orders", "b").on_complete["command_type"] == "Done"
    assert producer.get_batch("orders", "b").on_complete is None
    assert producer.get_batch("orders", "empty").status == BatchStatus.PENDING, "workers fold"
    worker.run(fold(worker.run(leftovers()).to_fold))
    assert producer.get_batch("orders", "empty").status == BatchStatus.COMPLETED
    made = [item for item in worker.claim() if item.command_type == "Ship"]
    worker.settle([fail(made[0], PermanentCommandError("no")), fail(made[1], BusinessRuleException("no"))])
    worker.settle(made[2].complete(None))
    worker.run(fold(worker.run(leftovers()).to_fold))
    for bus in (producer, reader):
        assert_refused(lambda bus=bus: bus.retry_failed("orders", "b"))
        assert_refused(lambda bus=bus: bus.run(raw("DELETE FROM commandbus.batch")))
    for act in (
        lambda: reader.create_batch("orders", [], batch_id="mine"),
        lambda: reader.close_batch("orders", "b"),
        lambda: reader.cancel_batch("orders", "b"),
    ):
        assert_refused(act)
    report = operator.retry_failed("orders", "b")
    assert (report.retried, report.sent_again) == (1, 1)
    report = operator.cancel_batch("orders", "b")
    assert (report.canceled, report.requested) == (1, 2)
    worker.settle([item.complete(None) for item in made[3:]])
    worker.run(fold(worker.run(leftovers()).to_fold))
    assert reader.get_batch("orders", "b").status == BatchStatus.CANCELED
    db.execute("UPDATE commandbus.batch SET finished_at = finished_at - interval '9 days'")
    assert worker.prune(age="1d").batches == 1, "the empty one"


def test_breakers(work: Bus, acting: Roles, db: psycopg.Connection[Any]) -> None:
    """Workers move them and park, operators open and close them, readers only look."""
    db.execute(
        "INSERT INTO commandbus.limits (name, environment, store, concurrency, lease, tries, backoff, "
        "breaker_failures, breaker_reset) VALUES ('docai', 'test', 'postgres', 5, 120, 4, '{2,4}', 3, 60)"
    )
    worker, operator = acting("worker"), acting("operator")
    work.send("orders", "Break", command_id="b")
    bad = [Bad(1, is_stuck=True, text="it hangs")]
    assert worker.run(report("orders", "Break", Breaker(stuck=1, reset=0.1), bad=bad)).state == "OPEN"
    worker.claim()
    assert worker.get_command("orders", "b").waiting_for == "breaker"
    db.execute("UPDATE commandbus.breaker SET until = now()")
    assert [item.command_type for item in worker.run(watch(["orders"])).due] == ["Break"]
    assert worker.run(advance("orders", "Break")).state == "HALF_OPEN"
    probe = worker.claim_one().id
    assert worker.run(report("orders", "Break", Breaker(), good=[probe])).state == "CLOSED"
    assert worker.run(report("orders", "Break", Breaker(), bad=bad)) is None
    assert worker.run(judge("orders", "Break", Breaker())).is_final
    assert worker.run(left_parked(["orders"])) == []
    for of in ({"domain": "orders", "command_type": "Break"}, {"limit": "docai"}):
        assert operator.open_breaker(**of)
        assert operator.close_breaker(**of) == 0
        assert operator.reset_breaker(**of) == 0
    assert len(acting("reader").breakers()) == 2
    for bus in (acting("producer"), acting("limiter")):
        assert_refused(lambda bus=bus: bus.open_breaker("orders", "Break"))
        assert_refused(lambda bus=bus: bus.open_breaker(limit="docai"))


def test_limits(orders: Bus, acting: Roles, db: psycopg.Connection[Any]) -> None:
    """An operator sets them, a worker declares them; a limiter and a reader can only look at what they allow."""
    operator, worker = acting("operator"), acting("worker")
    assert operator.set_limit("docai", concurrency=5, rate="120/m").concurrency == 5
    worker.declare_limit(Limit("docai", concurrency=7))
    worker.declare_limit(Limit("vision", concurrency=2))
    assert operator.unset_limit("docai").concurrency == 7
    operator.set_limit("spare", rate="2/s")
    assert operator.unset_limit("spare") is None
    for kind in ("limiter", "reader"):
        only_looks = acting(kind)
        assert [item.name for item in only_looks.limits()] == ["docai", "vision"]
        assert only_looks.estimate("docai").ahead == 0
        for act in (
            lambda bus=only_looks: bus.set_limit("docai", concurrency=9),
            lambda bus=only_looks: bus.unset_limit("docai"),
            lambda bus=only_looks: bus.declare_limit(Limit("mine", concurrency=1)),
            lambda bus=only_looks: bus.run(raw("DELETE FROM commandbus.limits")),
        ):
            assert_refused(act)
    assert_refused(lambda: worker.run(raw("DELETE FROM commandbus.limits")))
    assert one(db, "SELECT concurrency FROM commandbus.limits WHERE name = 'docai'") == 7


@sync_only
@pytest.mark.parametrize("store", ["postgres", "redis"])
def test_a_worker_runs_limited_commands_and_an_application_has_its_turn_among_them(
    orders: Bus, acting: Roles, db: psycopg.Connection[Any], redis_url: str, store: str
) -> None:
    """Each with its role alone. Who only sends may not touch queues: a worker wakes the command that is next."""
    redis = redis_url if store == "redis" else None
    url = acting("worker").url
    producer = CommandBus(settings=Settings(database_url=acting("limiter").url, redis_url=redis))
    handlers = HandlerRegistry()
    started = []

    @handlers.handler("orders", "Page", limits=[Limit("docai", concurrency=1, store=store)])
    def page(command: Any, ctx: Any) -> None:
        if command.data == "refused" and not started:
            started.append(command.data)
            raise RateLimitError(retry_after=0.2)
        started.append(command.data)

    settings = quick_settings(url, redis_url=redis)
    with producer, Worker(handlers, settings=settings, name="limited"):
        orders.send("orders", "Page", "refused", command_id="refused")
        until(lambda: orders.get_command("orders", "refused").status is CommandStatus.COMPLETED)
        for n in range(3):
            with producer.limit("docai", wait=30):
                orders.send("orders", "Page", n, command_id=f"p{n}")
                until(lambda n=n: orders.get_command("orders", f"p{n}").waiting_for == "limit")
            until(lambda n=n: orders.get_command("orders", f"p{n}").status is CommandStatus.COMPLETED)
        with producer.limit("docai"):  # callers wait behind each other, and behind commands
            orders.send("orders", "Page", "last", command_id="last")
            until(lambda: orders.get_command("orders", "last").waiting_for == "limit")
            behind = threading.Thread(target=lambda: started.append(_inside(producer)))
            behind.start()
            until(lambda: producer.get_limit("docai").callers == 1)
        behind.join(30)
        assert started == ["refused", "refused", 0, 1, 2, "last", "a caller"]
        with pytest.raises(RateLimitError), producer.limit("docai"):
            raise RateLimitError(retry_after=60)
        until(lambda: orders.get_limit("docai").state == "BACKING_OFF")
        assert orders.get_limit("docai").rate_limited == 2


def _inside(bus: CommandBus) -> str:
    with bus.limit("docai", wait=30):
        return "a caller"


@sync_only
def test_a_workers_role_parks_takes_and_gives_up_what_others_do_not_know(
    work: Bus, acting: Roles, db: psycopg.Connection[Any]
) -> None:
    worker, reader = acting("worker"), acting("reader")
    old, new = HandlerRegistry(), HandlerRegistry()
    old.register("orders", "Pack", lambda ctx: None)
    new.register("orders", "New", lambda ctx: None)
    for command_id in ("new", "stale"):
        work.send("orders", command_id.title(), command_id=command_id)
    with Worker(old, settings=quick_settings(worker.url), name="old"):
        until(lambda: reader.get_command("orders", "new").waiting_for == "handler")
        until(lambda: reader.get_command("orders", "stale").waiting_for == "handler")
        with Worker(new, settings=quick_settings(worker.url), name="new"):
            until(lambda: reader.get_command("orders", "new").status is CommandStatus.COMPLETED)
        assert "Stale" in [item.command_type for item in reader.status("orders")[0].unhandled]
        db.execute("UPDATE commandbus.parked SET parked_at = now() - interval '2 hours'")
        until(lambda: reader.get_command("orders", "stale").status is CommandStatus.IN_TROUBLESHOOTING_QUEUE)
    assert_refused(lambda: acting("producer").run(raw("SELECT * FROM commandbus.unhandled_types('{orders}', 1)")))
