"""docs/processes.md is true: its code and command lines run, and its table of moves is that of the model.

That the example prints what the page says is tested in tests/processes/test_order_saga_example.py.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg_pool import NullConnectionPool

from commandbus import (
    BaseProcessManager,
    BusinessRuleException,
    CommandBus,
    HandlerRegistry,
    PermanentCommandError,
    ProcessRecord,
    ProcessStatus,
    Saga,
    TroubleshootingQueue,
    Worker,
    step,
)
from commandbus.model.process import MOVES
from support.waiting import one, until

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "processes.md").read_text("utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL)
DOMAINS = ("processes", "stock", "billing", "shipping", "travel", "office", "claims")


def block(language: str, containing: str) -> str:
    found = [code for kind, code in BLOCKS if kind == language and containing in code]
    assert len(found) == 1, f"the page has {len(found)} {language} blocks with {containing!r}"
    return found[0]


SAGA = block("python", "order = Saga(").partition("with CommandBus()")[0]


class Shop:
    """A bus, a registry whose handlers do as they are told, and the names that the page's code finds."""

    def __init__(self, bus: CommandBus, database: str) -> None:
        self.bus = bus
        self.database = database
        self.did: list[str] = []
        self.fails: dict[str, BaseException] = {}
        self.names: dict[str, Any] = {"bus": bus, "pool": NullConnectionPool(database, open=True)}
        exec(SAGA, self.names)
        self.handlers: HandlerRegistry = self.names["handlers"]
        self.order: Saga = self.names["order"]

    def serve(self, domain: str, *command_types: str, result: Any = None) -> None:
        def handle(command: Any, ctx: Any) -> Any:
            self.did.append(command.command_type)
            if (error := self.fails.get(command.command_type)) is not None:
                raise error
            return result

        for command_type in command_types:
            self.handlers.register(domain, command_type, handle)

    def run(self, code: str) -> None:
        exec(compile(code, "processes.md", "exec"), self.names)

    def work(self) -> None:
        Worker(self.handlers, database_url=self.database).run(until_idle=True)

    def process(self, process_id: str, domain: str = "processes") -> ProcessRecord:
        found = self.bus.get_process(domain, process_id)
        assert found is not None
        return found


@pytest.fixture
def shop(database: str, db: psycopg.Connection[Any]) -> Iterator[Shop]:
    db.execute("CREATE TABLE orders (order_no int)")
    db.execute("CREATE TABLE ledger (order_no int, amount int)")
    db.execute("CREATE TABLE paid_claim (number int, process_id text)")
    with CommandBus(database) as bus:
        for domain in DOMAINS:
            bus.create_domain(domain)
        yield Shop(bus, database)


def serve_orders(shop: Shop) -> None:
    shop.serve("stock", "reserve", "release", result={"price": 40})
    shop.serve("billing", "charge", "refund", result={"paid": 40})
    shop.serve("shipping", "ship")


# --- the page as such -------------------------------------------------------------------------------------------


def test_every_block_of_the_page_is_run_by_a_test_here() -> None:
    known = (
        "order = Saga(", "def charge(", "conn.execute(", "trip = Saga(", "purchase = Saga(", "class ClaimProcess",
        "TroubleshootingQueue", "commandbus worker", "ProcessReplyRouter", "create_process_batch",
        "commandbus process", "The books balance",
    )  # fmt: skip
    assert [code for _, code in BLOCKS if not any(mark in code for mark in known)] == []


def test_the_links_lead_somewhere() -> None:
    heads = {
        re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in re.findall(r"^## (.*)", PAGE, re.M)
    }
    linked = set(re.findall(r"\]\(#([\w-]+)\)", PAGE))
    assert linked == heads
    for path in re.findall(r"\]\(([^#)]+)[#)]", PAGE):
        assert (ROOT / "docs" / path).exists(), path


def test_the_table_of_moves_is_that_of_the_model() -> None:
    names = "|".join(ProcessStatus)
    listed = re.findall(rf"^\| ({names}) \| ({names}) \| .+ \|$", PAGE, re.MULTILINE)
    assert len(listed) == len(set(listed))
    assert set(listed) == {(before, after) for before, moves in MOVES.items() for after in moves}


def test_the_table_of_states_is_whole() -> None:
    names = "|".join(ProcessStatus)
    assert sorted(re.findall(rf"^\| ({names}) \| [^|]+ \|$", PAGE, re.MULTILINE)) == sorted(ProcessStatus)
    for status in ProcessStatus:
        (text,) = re.findall(rf"^\| {status} \| ([^|]+) \|$", PAGE, re.MULTILINE)
        assert ("final" in text) == status.is_final


def test_every_hook_is_named() -> None:
    hooks = {name for name in vars(BaseProcessManager) if name.startswith("on_")}
    assert {hook for hook in hooks if f"`{hook}`" in PAGE} == hooks


# --- its code ---------------------------------------------------------------------------------------------------


def test_the_fifteen_lines_run(shop: Shop, database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMANDBUS_DATABASE_URL", database)
    code = block("python", "order = Saga(")
    assert len(code.strip().splitlines()) <= 15
    shop.run(code)
    assert shop.process("order-17").status == "PENDING"


@pytest.mark.parametrize("fails", [False, True])
def test_the_handlers_keep_the_ledger(shop: Shop, db: psycopg.Connection[Any], *, fails: bool) -> None:
    shop.run(block("python", "def charge("))
    shop.serve("stock", "reserve", "release", result={"price": 40})
    shop.serve("shipping", "ship")
    if fails:
        shop.fails["ship"] = BusinessRuleException("no truck")
    shop.bus.start_process(shop.order, {"order_no": 17}, process_id="order-17")
    shop.work()
    record = shop.process("order-17")
    assert record.status == ("COMPENSATED" if fails else "COMPLETED")
    assert record.state["charge"] == {"paid": 40}
    assert one(db, "SELECT sum(amount) FROM ledger") == (0 if fails else 40)


def test_starting_and_looking(shop: Shop, db: psycopg.Connection[Any], capsys: pytest.CaptureFixture[str]) -> None:
    code = block("python", "conn.execute(")
    serve_orders(shop)
    shop.run(code)
    said = capsys.readouterr().out.strip()
    assert f"# {said}\n" in code, "the comment is what is printed"
    assert one(db, "SELECT count(*) FROM orders") == 1
    shop.work()
    shop.run(code[code.index("record =") :])
    assert [line.split()[:4] for line in capsys.readouterr().out.splitlines()[1:]] == [
        ["1", "reserve", "None", "COMPLETED"],
        ["2", "charge", "None", "COMPLETED"],
        ["3", "ship", "None", "COMPLETED"],
    ]


def test_the_reply_to_a_starter_has_the_fields_that_are_named(shop: Shop, db: psycopg.Connection[Any]) -> None:
    serve_orders(shop)
    shop.bus.create_queue("answers")
    shop.bus.start_process(shop.order, {}, reply_to="answers")
    shop.work()
    reply = one(db, "SELECT message FROM pgmq.q_answers")
    (described,) = re.findall(r"told how the process ended: `(.*?)`", PAGE, re.DOTALL)
    assert set(re.findall(r'"([a-z_]+)"', described)) == reply.keys()


@pytest.mark.parametrize(("price", "did"), [(100, []), (2000, ["approve"])])
def test_the_trip_goes_its_ways(shop: Shop, price: int, did: list[str]) -> None:
    shop.run(block("python", "trip = Saga("))
    trip = shop.names["trip"]
    shop.handlers.register_process(trip)
    shop.serve("travel", "book_flight", "book_hotel", "book_table", result={"price": price})
    shop.serve("office", "approve", "invoice")
    trip.start(shop.bus, {}, process_id="t1")
    shop.work()
    record = shop.process("t1")
    assert record.status == "COMPLETED"
    assert record.state["is_expensive"] == bool(did)
    assert shop.did[3:] == [*did, "invoice"]
    assert shop.did.index("book_hotel") < shop.did.index("book_table")
    assert record.steps[-1].data == {"total": 2 * price}
    assert record.deadline_at is not None


def test_the_purchase_waits_sleeps_and_is_delivered(shop: Shop, db: psycopg.Connection[Any]) -> None:
    serve_orders(shop)
    shop.serve("shipping", "pack", "hand_over")
    shop.serve("office", "invoice")
    shop.run(block("python", "purchase = Saga("))
    shop.work()
    assert "the end of its sleep" in str(shop.process("purchase-60").waits_for)
    db.execute("UPDATE pgmq.q_processes__commands SET vt = now()")
    shop.work()
    record = shop.process("purchase-60")
    assert (record.status, shop.did) == ("COMPLETED", ["reserve", "pack", "hand_over", "invoice"])
    assert record.state["approval"] == {"by": "ann"}
    assert record.signals[0].signal_id == "mail-4711"
    assert shop.process("purchase-60/delivery").status == "COMPLETED"


def test_the_claim_is_paid(shop: Shop, db: psycopg.Connection[Any]) -> None:
    shop.serve("claims", "assess", result={"experts": ["ann"]})
    shop.serve("claims", "inspect", "call_police", "pay", "take_back")
    shop.run(block("python", "class ClaimProcess"))
    shop.work()
    record = shop.process("claim-7", "claims")
    assert record.status == "COMPLETED"
    assert record.state == {"number": 7, "amount": 20_000, "experts": ["ann"]}
    assert sorted(shop.did[1:3]) == ["call_police", "inspect"]
    assert shop.did[3:] == ["pay"]
    assert one(db, "SELECT process_id FROM paid_claim") == "claim-7"


def test_what_people_can_do(shop: Shop, capsys: pytest.CaptureFixture[str]) -> None:
    code = block("python", "TroubleshootingQueue")
    serve_orders(shop)
    bare = Saga("bare", step("ship", "shipping"))
    shop.handlers.register_process(bare)
    shop.fails |= {"charge": PermanentCommandError("no such card"), "ship": BusinessRuleException("no money")}
    shop.bus.start_process(shop.order, {}, process_id="order-18")
    shop.bus.start_process(bare, {}, process_id="order-19")
    shop.work()
    assert (shop.process("order-18").status, shop.process("order-19").status) == ("WAITING_FOR_TSQ", "FAILED")
    shop.fails.clear()
    shop.run(code)
    assert re.fullmatch(
        r"command '.*' in the troubleshooting queue of 'billing': no such card\n", capsys.readouterr().out
    )
    shop.work()
    assert (shop.process("order-18").status, shop.process("order-19").status) == ("CANCELED", "COMPLETED")


def test_a_message_that_a_person_ends_fails_its_process_until_it_is_retried(shop: Shop) -> None:
    assert "`MESSAGE_ENDED`" in PAGE
    lost = Saga("lost", step("search", "nowhere"))
    shop.handlers.register_process(lost)
    shop.bus.start_process(lost, {}, process_id="p1")
    shop.work()
    assert shop.process("p1").status == "WAITING_FOR_TSQ"
    (entry,) = TroubleshootingQueue(shop.bus).list("processes")
    TroubleshootingQueue(shop.bus).operator_cancel("processes", entry.command_id)
    assert (shop.process("p1").failure or {})["code"] == "MESSAGE_ENDED"
    shop.bus.create_domain("nowhere")
    shop.bus.retry_process("processes", "p1")
    shop.work()
    assert shop.process("p1").status == "WAITING_FOR_REPLY"


def test_a_type_of_process_is_paused_between_two_steps(shop: Shop) -> None:
    serve_orders(shop)
    shop.bus.pause("processes", "order")
    shop.bus.start_process(shop.order, {}, process_id="p1")
    shop.work()
    assert (shop.process("p1").status, shop.did) == ("PENDING", [])
    shop.bus.resume("processes", "order")
    shop.work()
    assert shop.process("p1").status == "COMPLETED"


def test_a_retried_process_has_no_deadline_any_more(shop: Shop, db: psycopg.Connection[Any]) -> None:
    bare = Saga("bare", step("ship", "shipping"), deadline="1h")
    shop.handlers.register_process(bare)
    shop.serve("shipping", "ship")
    shop.fails["ship"] = BusinessRuleException("no")
    bare.start(shop.bus, {}, process_id="p1")
    shop.work()
    shop.bus.pause("shipping")
    shop.bus.retry_process("processes", "p1")
    shop.work()
    assert shop.process("p1").status == "WAITING_FOR_REPLY"
    assert one(db, "SELECT count(*) FROM pgmq.q_processes__commands") == 0


def test_a_router_alone_runs(shop: Shop, database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMANDBUS_DATABASE_URL", database)
    shop.run(block("python", "trip = Saga("))

    def wait() -> None:
        until(lambda: shop.process("order-19").status == "WAITING_FOR_REPLY")

    shop.names["wait_for_the_end_of_the_day"] = wait
    shop.run(block("python", "ProcessReplyRouter"))
    assert [one.name for one in shop.process("order-19").steps] == ["reserve"]


def test_the_batch_runs(shop: Shop, capsys: pytest.CaptureFixture[str]) -> None:
    serve_orders(shop)
    closed = threading.Event()
    shop.handlers.register("billing", "close_day", lambda command, ctx: closed.set())
    with Worker(shop.handlers, database_url=shop.database):
        shop.run(block("python", "create_process_batch"))
        assert closed.wait(60)
    assert capsys.readouterr().out == "COMPLETED 10 0 0 0\n"


# --- its command lines ------------------------------------------------------------------------------------------


def commandbus(line: str, database: str, folder: Path) -> subprocess.Popen[str]:
    words = shlex.split(line, comments=True)
    assert words[0] == "commandbus"
    return subprocess.Popen(
        [sys.executable, "-m", "commandbus.cli", *words[1:]],
        cwd=folder, env={**os.environ, "COMMANDBUS_DATABASE_URL": database},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_the_workers_run(shop: Shop, database: str, tmp_path: Path) -> None:
    """The first line alone brings a process to its end, and so do the other two together."""
    app = SAGA + "".join(
        f"\n@handlers.handler({domain!r}, {name!r})\ndef {name}(command, ctx): return {{}}\n"
        for domain, name in (("stock", "reserve"), ("billing", "charge"), ("shipping", "ship"))
    )
    (tmp_path / "app.py").write_text(app)
    whole, *parts = block("sh", "commandbus worker").splitlines()
    for number, lines in enumerate(([whole], parts)):
        workers = [commandbus(line, database, tmp_path) for line in lines]
        try:
            shop.bus.start_process("order", {}, process_id=f"p{number}")
            until(lambda name=f"p{number}": shop.process(name).status == "COMPLETED", 30)  # type: ignore[misc]
        finally:
            for worker in workers:
                worker.send_signal(signal.SIGTERM)
            ended = [(*worker.communicate(timeout=60), worker.returncode) for worker in workers]
        assert [code for _, _, code in ended] == [0] * len(workers), ended


@pytest.mark.long
def test_the_command_lines_run(shop: Shop, database: str, tmp_path: Path) -> None:
    bare = Saga("bare", step("ship", "shipping"))
    shop.handlers.register_process(bare)
    shop.serve("shipping", "ship")
    shop.fails["ship"] = BusinessRuleException("no")
    shop.bus.start_process(bare, {}, process_id="order-41")
    shop.work()
    (tmp_path / "orders.jsonl").write_text('{"data": {"order_no": 50}, "process_id": "order-50"}\n')
    for line in block("sh", "commandbus process").splitlines():
        with commandbus(line, database, tmp_path) as program:
            out, err = program.communicate(timeout=60)
        assert program.returncode == 0, (line, out, err)
        if line.startswith("commandbus process start order --data"):  # no worker of the page runs here
            assert err.startswith("warning: nobody knows process type 'order'"), line
        else:
            assert err == "", line
    assert shop.process("order-40").cancel is not None
    assert shop.process("order-50").batch_id is not None
    assert shop.process("order-41").status == "IN_PROGRESS"
