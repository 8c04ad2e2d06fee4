"""A tenant's roles: the whole work in their own domain, and nothing of another's. Row security is on only where
there is a tenant, and full roles do not notice it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from flow_harness import Bus, Roles, assert_refused, fail, one, raw, sync_only

from commandbus import (
    BatchStatus,
    BusinessRuleException,
    CommandStatus,
    HandlerRegistry,
    InvalidCommandError,
    Limit,
    NewCommand,
    OnComplete,
    PermanentCommandError,
    Saga,
    UnknownDomainError,
    Worker,
    nested,
    sleep,
    step,
    wait_for,
)
from commandbus.flow.batches.fold_and_complete import fold
from commandbus.flow.batches.leftovers import leftovers
from commandbus.flow.breakers.breaker import Bad, report
from commandbus.flow.commands.claim import announce, withdraw
from commandbus.flow.commands.operate import operator_action
from commandbus.flow.setup.roles import print_roles
from commandbus.flow.workers.figures import add_figures, last_hour
from commandbus.flow.workers.registry import WorkerIdentity, beat
from commandbus.flow.workers.requests import ask_for_stack, ask_worker, open_requests
from commandbus.flow.workers.slots import publish, watch_slots
from commandbus.model.breaker import Breaker
from commandbus.model.minute_figures import BUCKETS
from commandbus.model.roles import TENANT_KINDS
from commandbus.sql import migrations
from support.waiting import until
from support.workers import quick_settings

SHARED = (
    "command", "attempt", "tsq", "operator_action", "parked", "pause", "rejected_message", "batch", "batch_delta",
    "process", "process_step", "stray_reply", "breaker", "waiting",
)  # fmt: skip


@pytest.fixture
def tenants(orders: Bus, prefix: str, connect: Callable[..., Bus], db: psycopg.Connection[Any]) -> Roles:
    """A login of the tenant who has `orders` and the reply queue `answers`; `billing` is full of other things."""
    orders.create_domain("billing")
    orders.create_queue("answers")
    _fill(orders, "billing")
    name = f"{prefix}_t"
    made = orders.create_roles(name, domains=["orders"], queues=["answers"])
    assert made == {kind: f"{name}_{kind}" for kind in TENANT_KINDS}

    def acting(kind: str) -> Bus:
        user = f"{name}_{kind}_user"
        db.execute(f"CREATE ROLE {user} LOGIN IN ROLE {name}_{kind}".encode())
        return connect(orders.url.replace("//postgres@", f"//{user}@", 1))

    return acting


def test_a_tenant_watches_its_own_workers_and_no_others(orders: Bus, tenants: Roles) -> None:
    state = {"size": 1, "slots": [], "left_out": 0, "memory_mb": 1.0, "max_memory_mb": None, "max_messages": None}
    for domain in ("orders", "billing"):
        identity = WorkerIdentity(f"w-{domain}", "host", 1, [domain], 1, "1")
        orders.run(beat(identity, state="ACTIVE", running=0, settled=0, rates={}))
        orders.run(publish(identity.id, [domain], state))
        orders.run(add_figures(domain, settled=5, waits=[1] * BUCKETS, counts_ready=False))
    reader, operator = tenants("reader"), tenants("operator")
    assert [item.worker for item in reader.run(watch_slots())] == ["w-orders"]
    assert {hour.domain for hour in reader.run(last_hour())} == {"orders"}
    assert_refused(lambda: reader.run(ask_for_stack("billing", "t0")))
    assert_refused(lambda: operator.run(ask_worker("w-billing", "RECYCLE", operator_action("ann"))))
    assert operator.run(ask_worker("w-orders", "RECYCLE", operator_action("ann"))).id is not None
    worker = tenants("worker")
    assert worker.run(open_requests("w-orders"))[0].kind == "RECYCLE"
    assert worker.run(publish("w-orders", ["orders"], state)) > 0
    worker.run(add_figures("orders", settled=5, waits=[1] * BUCKETS, counts_ready=True))


def _fill(bus: Bus, domain: str) -> None:
    """A bit of everything."""
    bus.send_many(domain, [NewCommand("Ship", {"secret": n}, command_id=f"t{n}") for n in range(3)])
    attempts = bus.claim(domain=domain)
    bus.settle([fail(attempts[0], PermanentCommandError()), fail(attempts[1], BusinessRuleException("no"))])
    bus.create_batch(domain, [NewCommand("Ship")], batch_id="b", is_open=True)
    bus.start_process("order", {"secret": 1}, process_id="p", domain=domain)
    bus.tsq.operator_cancel(domain, "t0")
    bus.run(report(domain, "Ship", Breaker(stuck=1, reset=60), bad=[Bad(1, is_stuck=True, text="it hangs")]))
    bus.run(announce(worker=f"w-{domain}", domains=[domain], seconds=500))
    bus.pause(domain, "Pack")
    identity = WorkerIdentity(f"w-{domain}", "host", 123, [domain], 4, "0.1.0")
    bus.run(beat(identity, state="ACTIVE", running=2, settled=10, rates={}))


def _foreign(bus: Bus) -> list[Callable[[], Any]]:
    """All that is of another domain, by the API."""
    return [
        lambda: bus.send("billing", "Ship"),
        lambda: bus.send("billing", "Ship", command_id="mine"),
        lambda: bus.send_many("billing", [NewCommand("Ship")]),
        lambda: bus.create_batch("billing", [NewCommand("Ship")], batch_id="mine"),
        lambda: bus.create_batch("billing", [], batch_id="b"),
        lambda: bus.add_to_batch("billing", "b", [NewCommand("Ship")]),
        lambda: bus.close_batch("billing", "b"),
        lambda: bus.start_process("order", {}, process_id="mine", domain="billing"),
        lambda: bus.signal("billing", "p", "approval"),
        lambda: bus.get_batch("billing", "b"),
        lambda: bus.claim(domain="billing"),
        lambda: bus.status("billing"),
        lambda: bus.cancel("billing", "t2"),
        lambda: bus.create_domain("mine"),
        lambda: bus.run(raw("SELECT * FROM pgmq.q_billing__commands")),
        lambda: bus.run(raw("SELECT * FROM commandbus.audit")),
        lambda: bus.run(raw("INSERT INTO commandbus.command (domain, command_id, command_type) "
                            "VALUES ('billing', 'x', 'Ship')")),
        lambda: bus.run(raw("INSERT INTO commandbus.batch (domain, batch_id) VALUES ('billing', 'x')")),
        lambda: bus.run(raw("DELETE FROM commandbus.attempt")),
    ]  # fmt: skip


def test_no_tenants_role_touches_or_sees_anything_of_another_domain(
    orders: Bus, tenants: Roles, db: psycopg.Connection[Any]
) -> None:
    orders.declare_limit(Limit("docai", concurrency=2))
    before = {table: db.execute(f"SELECT * FROM commandbus.{table}".encode()).fetchall() for table in SHARED}
    for kind in TENANT_KINDS:
        bus = tenants(kind)
        for act in _foreign(bus):
            assert_refused(act)
        with pytest.raises((psycopg.errors.InsufficientPrivilege, UnknownDomainError)):
            bus.pause("billing")
        assert bus.get_outcome("billing", "t1") is None
        if kind != "worker":  # which declares limits, that all domains share
            assert_refused(lambda bus=bus: bus.set_limit("docai", concurrency=99))
        if kind != "producer":
            for table in SHARED:
                assert bus.run(raw(f"SELECT * FROM commandbus.{table}")) == [], table
            assert [bus.query_commands().items, bus.query_batches().items, bus.workers().items] == [[], [], []]
            assert [bus.tsq.list().items, bus.pauses().items, bus.list_stuck().items] == [[], [], []]
            assert [item.kind for item in bus.breakers()] == ["limit"], "limits are everybody's"
            assert [item.domain for item in bus.status()] == ["orders"]
        assert [item.name for item in bus.list_domains()] == ["orders"]
    for table, rows in before.items():
        assert db.execute(f"SELECT * FROM commandbus.{table}".encode()).fetchall() == rows, table


def test_writing_reaches_no_row_of_another_domain(tenants: Roles, db: psycopg.Connection[Any]) -> None:
    """Without a condition a statement is about all rows that there are, for whoever writes it."""
    for kind in ("worker", "operator"):
        bus = tenants(kind)
        bus.run(raw("UPDATE commandbus.command SET status = 'COMPLETED', result = '1'"))
        bus.run(raw("UPDATE commandbus.batch SET total = 99"))
        bus.run(raw("UPDATE commandbus.process SET status = 'FAILED'"))
        bus.run(raw("UPDATE commandbus.breaker SET state = 'CLOSED'"))
        bus.run(raw("DELETE FROM commandbus.tsq"))
        bus.run(raw("DELETE FROM commandbus.batch_delta"))
        bus.run(raw("SELECT commandbus.prune_commands(0, 1000, 9223372036854775807, 0)"))
        bus.run(raw("SELECT commandbus.prune_set_aside(0, 1000)"))
        command = one(db, "SELECT min(id) FROM commandbus.command")
        assert_refused(lambda bus=bus, command=command: bus.run(
            raw("INSERT INTO commandbus.operator_action (command, action, operator) "
                f"VALUES ({command}, 'RETRY', 'x')")
        ))  # fmt: skip
    assert one(db, "SELECT count(*) FROM commandbus.command WHERE status = 'COMPLETED'") == 0
    assert one(db, "SELECT count(*) FROM commandbus.command WHERE status IN ('FAILED', 'CANCELED')") == 2
    assert one(db, "SELECT total FROM commandbus.batch") == 1
    assert one(db, "SELECT status FROM commandbus.process") == "PENDING"
    assert one(db, "SELECT state FROM commandbus.breaker") == "OPEN"
    assert one(db, "SELECT count(*) FROM commandbus.operator_action") == 1


def test_a_tenant_does_its_whole_work(tenants: Roles, db: psycopg.Connection[Any]) -> None:
    producer, worker, operator, reader = (tenants(kind) for kind in ("producer", "worker", "operator", "reader"))
    producer.send("orders", "Ship", {"n": 1}, command_id="one", reply_to="answers")
    assert not producer.send("orders", "Ship", {"n": 1}, command_id="one", reply_to="answers").created
    producer.send_many("orders", [NewCommand("Ship", command_id=f"c{n}") for n in range(4)])
    producer.create_batch("orders", [NewCommand("Ship", command_id="m")], batch_id="b", is_open=True,
                          on_complete=OnComplete("orders", "Done"))  # fmt: skip
    producer.add_to_batch("orders", "b", [NewCommand("Ship", command_id="m2")])
    producer.close_batch("orders", "b")
    worker.run(announce(worker="w1", domains=["orders"], seconds=5))
    identity = WorkerIdentity("w1", "host", 123, ["orders"], 4, "0.1.0")
    worker.run(beat(identity, state="ACTIVE", running=2, settled=10, rates={}))
    found = {attempt.command_id: attempt for attempt in worker.claim()}
    assert worker.renew(list(found.values())) == []
    assert worker.settle([found[name].complete('"ok"') for name in ("one", "c0", "m")]) == {}
    assert (
        worker.settle([fail(found["c1"], PermanentCommandError()), fail(found["m2"], BusinessRuleException())])
        == {}
    )
    assert worker.settle([fail(found["c2"], ValueError()), found["c3"].give_back()]) == {}
    worker.run(fold(worker.run(leftovers()).to_fold))
    worker.run(withdraw("w1"))
    assert one(db, "SELECT count(*) FROM pgmq.q_answers") == 1
    assert producer.get_outcome("orders", "one").result == "ok"
    for bus in (producer, worker, operator, reader):
        assert bus.get_batch("orders", "b").status is BatchStatus.COMPLETED_WITH_FAILURES
    for bus in (worker, operator, reader):
        assert bus.get_command("orders", "one").status is CommandStatus.COMPLETED
        assert bus.get_audit_trail("orders", "c1")[-1].event == "MOVED_TO_TSQ"
        assert len(bus.get_attempts("orders", "c2")) == 1
        assert [item.id for item in bus.workers()] == ["w1"]
        assert [item.in_tsq for item in bus.status()] == [1]
    operator.tsq.operator_retry("orders", "c1")
    operator.cancel("orders", "c3")
    operator.pause("orders", "Ship")
    operator.resume("orders", "Ship")
    assert operator.retry_failed("orders", "b").sent_again == 1
    assert operator.prune(age=0).commands == 5, "and of billing nothing"
    assert one(db, "SELECT count(*) FROM commandbus.command WHERE domain = 'billing' AND status = 'FAILED'") == 1


@sync_only
def test_a_tenants_worker_runs_a_saga_and_limited_commands(
    orders: Bus, tenants: Roles, db: psycopg.Connection[Any]
) -> None:
    producer = tenants("producer")
    handlers = HandlerRegistry()
    did: list[str] = []
    for name in ("reserve", "release", "charge", "refund", "ship"):
        handlers.register("orders", name, lambda command, ctx: did.append(command.command_type))
    handlers.register(
        "orders", "Page", lambda command, ctx: did.append("page"), limits=[Limit("docai", concurrency=1)]
    )
    inner = Saga("inner", step("charge", "orders"), sleep("10ms"), domain="orders")
    saga = Saga(
        "order", step("reserve", "orders", undo="release"), wait_for("ok"), nested("in", inner), domain="orders"
    )
    handlers.register_process(saga)
    handlers.register_process(inner)
    with Worker(handlers, settings=quick_settings(tenants("worker").url), name="tenants"):
        producer.send_many("orders", [NewCommand("Page", command_id=f"p{n}") for n in range(3)])
        until(lambda: did.count("page") == 3, what=lambda: f"{did}")
        assert producer.bus.call("orders", "ship", wait=30) is None
        producer.start_process(saga, {}, process_id="p1")
        assert producer.signal("orders", "p1", "ok", {"by": "ann"}).created
        until(lambda: orders.get_process("orders", "p1").status == "COMPLETED", what=lambda: f"{did}")
    assert orders.get_command("orders", "p0").status is CommandStatus.COMPLETED


@sync_only
def test_a_tenants_worker_declares_and_moves_lines_of_keys(orders: Bus, tenants: Roles) -> None:
    """The producer may read no line and no path, but its sends follow them; the rest joins later."""
    producer, reader, operator = tenants("producer"), tenants("reader"), tenants("operator")
    handlers = HandlerRegistry()
    did: list[int] = []
    account = Limit("account", concurrency=1, ordered=True, key="data.account")
    handlers.register("orders", "book", lambda command, ctx: did.append(command.data["n"]), limits=[account])
    with Worker(handlers, settings=quick_settings(tenants("worker").url), name="tenants"):
        operator.bus.key_limits.override("orders", "account", "7", concurrency=0, until="1h")
        producer.send_many("orders", [NewCommand("book", {"account": 7, "n": n}) for n in range(3)])
        producer.send("orders", "book", {"account": 7, "n": 3}, unique="u")
        producer.send("orders", "book", {"account": 7, "n": 4}, command_id="last")
        until(lambda: [line.waiting for line in reader.bus.key_limits.lines("orders", "account")] == [5])
        assert "4 before it" in reader.get_command("orders", "last").waiting_text
        assert not reader.bus.key_limits.list("billing")
        operator.bus.key_limits.override("orders", "account", "7", concurrency=1, until="1h")
        until(lambda: did == [0, 1, 2, 3, 4], what=lambda: f"{did}")


def test_full_roles_and_other_grants_do_not_notice(
    orders: Bus, tenants: Roles, acting: Roles, prefix: str, db: psycopg.Connection[Any]
) -> None:
    assert one(db, "SELECT relrowsecurity FROM pg_class WHERE oid = 'commandbus.command'::regclass")
    reader, worker = acting("reader"), acting("worker")
    for domain in ("orders", "billing"):
        orders.send(domain, "Pick", command_id="pick")
    assert {item.domain for item in reader.query_commands().items} == {"orders", "billing"}
    attempt = next(item for item in worker.claim(domain="billing") if item.command_id == "pick")
    assert worker.settle(attempt.complete(None)) == {}
    db.execute(f"CREATE ROLE {prefix}_report LOGIN; GRANT USAGE ON SCHEMA commandbus TO {prefix}_report; "
               f"GRANT SELECT ON commandbus.command TO {prefix}_report".encode())  # fmt: skip
    with psycopg.connect(orders.url.replace("//postgres@", f"//{prefix}_report@", 1)) as conn:
        assert one(conn, "SELECT count(DISTINCT domain) FROM commandbus.command") == 2


def test_without_tenants_there_is_no_row_security(orders: Bus, acting: Roles, db: psycopg.Connection[Any]) -> None:
    acting("worker")
    secured = "SELECT count(*) FROM pg_class WHERE relnamespace = 'commandbus'::regnamespace AND relrowsecurity"
    assert one(db, secured) == 0


def test_set_role_counts_and_not_the_login(orders: Bus, tenants: Roles, prefix: str) -> None:
    """A login that may take on the role of a tenant acts within it, in functions of the owner, too."""
    with psycopg.connect(orders.url, autocommit=True) as conn:
        conn.execute(f"SET ROLE {prefix}_t_operator".encode())
        assert one(conn, "SELECT count(*) FROM commandbus.command") == 0
        assert one(conn, "SELECT count(*) FROM commandbus.outcomes('{billing}', '{t1}')") == 0
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="domain billing"):
            conn.execute("SELECT commandbus.audit_trail('billing', 't1')")
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="domain billing"):
            conn.execute("SELECT commandbus.lock_batch('billing', 'b', 'UPDATE')")


def test_two_domains_and_again_and_by_script(orders: Bus, prefix: str, db: psycopg.Connection[Any]) -> None:
    orders.create_domain("billing")
    orders.create_domain("shipping")
    for domain in ("orders", "billing", "shipping"):
        orders.send(domain, "Ship")
    script = orders.run(print_roles(prefix, domains=["orders", "billing"]))
    for _ in range(2):
        db.execute(script.encode())
    with psycopg.connect(orders.url, autocommit=True) as conn:
        conn.execute(f"SET ROLE {prefix}_reader".encode())
        rows = conn.execute("SELECT DISTINCT domain FROM commandbus.command ORDER BY 1").fetchall()
    assert rows == [("billing",), ("orders",)]
    orders.create_roles(prefix, domains=["orders"])  # one less
    with psycopg.connect(orders.url, autocommit=True) as conn:
        conn.execute(f"SET ROLE {prefix}_reader".encode())
        assert one(conn, "SELECT count(*) FROM commandbus.command") == 1
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            conn.execute("SELECT FROM pgmq.q_billing__commands")


def test_an_upgrade_grants_a_tenants_roles_again(
    orders: Bus, tenants: Roles, prefix: str, db: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = tenants("worker")
    for kind in ("TABLES", "FUNCTIONS"):
        db.execute(f"REVOKE ALL ON ALL {kind} IN SCHEMA commandbus FROM {prefix}_t_worker".encode())
    assert_refused(worker.claim)
    found = migrations() | {max(migrations()) + 1: ("later", "-- Compatible: yes\nSELECT 1")}
    monkeypatch.setattr("commandbus.sql.migrations", lambda: found)
    orders.migrate()
    orders.send("orders", "Ship")
    assert len(worker.claim()) == 1
    assert worker.query_commands(domain="billing").items == []


def test_what_cannot_be_a_tenant(orders: Bus, prefix: str) -> None:
    with pytest.raises(UnknownDomainError):
        orders.create_roles(prefix, domains=["nowhere"])
    with pytest.raises(InvalidCommandError, match="no queue 'nowhere'"):
        orders.create_roles(prefix, domains=["orders"], queues=["nowhere"])
    with pytest.raises(InvalidCommandError, match="give its domains"):
        orders.create_roles(prefix, queues=["answers"])
    for hostile in ("orders'; drop table x; --", "", None, 5):
        with pytest.raises(InvalidCommandError):
            orders.create_roles(prefix, domains=[hostile])
    orders.create_roles(prefix, domains=["orders"])
    with pytest.raises(InvalidCommandError, match="another prefix"):
        orders.create_roles(prefix)


@sync_only
def test_a_tenants_worker_knows_of_workers_that_it_cannot_see(
    orders: Bus, tenants: Roles, db: psycopg.Connection[Any]
) -> None:
    """A worker for all domains handles the type. The tenant's worker does not see that worker's row, and yet must
    not give its commands up."""
    for table in ("command", "parked"):
        db.execute(f"DELETE FROM commandbus.{table}".encode())
    db.execute("DELETE FROM pgmq.q_orders__commands")
    handlers = HandlerRegistry()
    handlers.register("orders", "Known", lambda ctx: None)
    reader = tenants("reader")
    everybodys = WorkerIdentity(
        "everybodys", "host", 1, ["orders", "billing"], 4, "0.1.0", types=lambda: ["billing/New", "orders/New"]
    )
    orders.run(beat(everybodys, state="ACTIVE", running=0, settled=0, rates={}))
    orders.send("orders", "New", command_id="n")
    with Worker(handlers, settings=quick_settings(tenants("worker").url), name="tenants"):
        until(lambda: reader.get_command("orders", "n").waiting_for == "handler")
        assert "everybodys" not in [item.id for item in reader.workers()]
        db.execute("UPDATE commandbus.parked SET parked_at = now() - interval '2 hours'")
        orders.run(beat(everybodys, state="ACTIVE", running=0, settled=0, rates={}))
        (item,) = reader.status("orders")[0].unhandled
        assert (item.workers, item.seconds) == (1, 0.0)
        orders.run(beat(everybodys, state="STOPPED", running=0, settled=0, rates={}))
        db.execute(
            "UPDATE commandbus.worker SET heartbeat_at = now() - interval '2 hours' WHERE id = 'everybodys'"
        )
        until(lambda: reader.get_command("orders", "n").status is CommandStatus.IN_TROUBLESHOOTING_QUEUE)
    found = reader.run(raw("SELECT * FROM commandbus.unhandled_types('{billing}', 1)"))
    assert found == [], "of a domain that is not the tenant's nothing is told"
