"""Twenty orders, two workers, one kill -9, two people who interfere, and books that must balance.

    ./dev example order_saga

Everything happens on an embedded PostgreSQL in a temporary folder, and nothing of it is left behind. The exit code
is 1 if an order did not end as it should, or if the books do not balance.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import app

from commandbus import CommandBus, CommandRecord, ProcessRecord, TroubleshootingQueue, embedded

T = TypeVar("T")
PROCESSES = app.order.domain
BATCH = "today"
LAMPS = 100
PATIENCE_SECONDS = 90.0

ODD = {
    4: {"item": "piano"},  # costs more than any card is good for
    5: {"card": "slow bank"},  # its worker is killed while it is charged
    8: {"address": "Atlantis"},
    11: {"card": "new card"},  # which the bank has not heard of yet
    13: {"item": "piano"},
    15: {"address": "Island"},  # somebody does not want to wait for the ferry
    17: {"address": "Atlantis"},
    19: {"item": "unicorn"},
}
ENDS = {4: "COMPENSATED", 8: "COMPENSATED", 13: "COMPENSATED", 15: "CANCELED", 17: "COMPENSATED", 19: "FAILED"}


def order_of(number: int) -> dict[str, Any]:
    """An order. Its number is also its process's id: who orders twice by mistake gets one."""
    plain = {"order_no": f"order-{number:02}", "item": "lamp", "count": 1 + number % 3}
    return plain | {"card": "good card", "address": "Main Street"} | ODD.get(number, {})


ORDERS = [order_of(number) for number in range(1, 21)]
EXPECTED = {item["order_no"]: ENDS.get(number, "COMPLETED") for number, item in enumerate(ORDERS, start=1)}


def main() -> int:
    """Open the shop, let things happen, close it, and look at the books."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # noqa: ARG005 - and clean up
    with tempfile.TemporaryDirectory(prefix="order-saga-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # where root runs this, the server is another user's
        with embedded.start(folder / "postgres") as server, CommandBus(server.dsn) as bus:
            open_shop(bus)
            with workers(server.dsn, folder / "workers.log") as supervisor:
                take_orders(bus)
                kill_a_worker(bus, supervisor)
                enter_a_card(bus)
                cancel_an_order(bus)
                bus.wait_for_batch(PROCESSES, BATCH, wait=PATIENCE_SECONDS)
                until(lambda: rows(bus, "SELECT FROM closed"), "the batch's on_complete to run")
            return tell(bus)


def open_shop(bus: CommandBus) -> None:
    """The schema, the tables, and something to sell."""
    bus.migrate(domains=[PROCESSES, "stock", "billing", "shipping"])
    with bus.connect() as conn:
        conn.execute(app.TABLES)
        conn.execute("INSERT INTO stock VALUES ('lamp', 40, %s), ('piano', 9000, 9), ('unicorn', 1, 0)", [LAMPS])
        conn.execute("INSERT INTO card VALUES ('good card', 500), ('slow bank', 500)")


@contextmanager
def workers(dsn: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A supervisor with two workers, as on any machine that runs the shop."""
    words = ["worker", "app:handlers", "--processes", "2", "--concurrency", "4"]
    with log.open("wb") as out:
        supervisor = subprocess.Popen(
            [sys.executable, "-m", "commandbus", *words],
            cwd=Path(__file__).parent,
            env={**os.environ, "COMMANDBUS_DATABASE_URL": dsn},
            stdout=out,
            stderr=out,
        )
        try:
            yield supervisor
        except BaseException:
            sys.stderr.write(log.read_text("utf-8", "replace"))
            raise
        finally:
            supervisor.terminate()
            supervisor.wait(60)


# --- what happens -----------------------------------------------------------------------------------------------


def take_orders(bus: CommandBus) -> None:
    """All or none, in one transaction; when the last one has ended, the batch sends its own command, once."""
    new = [{"process_id": item["order_no"], "data": item} for item in ORDERS]
    bus.create_process_batch(app.order, new, batch_id=BATCH, on_complete=app.close)
    say(f"{len(new)} orders in one batch; a supervisor with two workers")


def kill_a_worker(bus: CommandBus, supervisor: subprocess.Popen[bytes]) -> None:
    """While it has written the charge into the ledger and not committed it."""
    charge = until(lambda: running(bus, "order-05", "charge", told=True), "order-05 to be charged")
    (pid,) = (worker.pid for worker in bus.workers() if worker.id == charge.worker)
    if parent_of(pid) != supervisor.pid:
        raise RuntimeError(f"process {pid} is none of ours")
    os.kill(pid, signal.SIGKILL)
    say("order-05: kill -9 of the worker that is charging it")


def enter_a_card(bus: CommandBus) -> None:
    """An operator finds out what is wrong, puts it right, and lets the command run again."""
    record = until_is(bus, "order-11", "WAITING_FOR_TSQ")
    (trouble,) = record.troubles
    say(f"order-11: {record.status}, because {trouble['error']}; ann enters the card and retries the command")
    with bus.connect() as conn:
        conn.execute("INSERT INTO card VALUES ('new card', 500)")
    TroubleshootingQueue(bus).operator_retry(trouble["domain"], trouble["command_id"], operator="ann")


def cancel_an_order(bus: CommandBus) -> None:
    """What runs is asked to stop, what was done is undone."""
    until(lambda: running(bus, "order-15", "ship"), "order-15 to be shipped")
    say("order-15: it waits for the ferry; ben cancels it")
    bus.cancel_process(PROCESSES, "order-15", operator="ben", reason="the ferry takes too long")


# --- what became of it ------------------------------------------------------------------------------------------


def tell(bus: CommandBus) -> int:
    """Print it. Returns the exit code."""
    records = {name: look(bus, name) for name in EXPECTED}
    say("\norder     ended        because")
    for name, record in records.items():
        say(f"{name}  {record.status:<11}  {reason(record)}".rstrip())
    say("\norder-17, step by step")
    for step in records["order-17"].steps:
        what = step.name if step.undoes is None else f"undo {step.undoes}"
        say(f"  {step.number}  {what:<8} {step.domain:<9} {step.command_type:<8} {step.status}")
    wrong = [
        f"{name} is {records[name].status}, not {status}"
        for name, status in EXPECTED.items()
        if records[name].status != status
    ]
    wrong += audit(bus, {name for name, record in records.items() if record.status == "COMPLETED"})
    for problem in wrong:
        say(f"WRONG: {problem}")
    return 1 if wrong else 0


def reason(record: ProcessRecord) -> str:
    """Why it did not complete."""
    if record.cancel is not None:
        return f"{record.cancel['by']}: {record.cancel['reason']}"
    return "" if record.failure is None else str(record.failure["message"])


def audit(bus: CommandBus, sold: set[str]) -> list[str]:
    """Do stock, ledger and parcels say the same as the processes? What they disagree about."""
    wrong = []
    items = {item["order_no"]: item for item in ORDERS}
    entries: list[tuple[str, str, int]] = rows(bus, "SELECT order_no, entry, amount FROM ledger")
    for name, item in items.items():
        booked = sorted((entry, amount) for order_no, entry, amount in entries if order_no == name)
        due = 40 * item["count"] if name in sold else 0
        if sum(amount for _, amount in booked) != due or len({entry for entry, _ in booked}) < len(booked):
            wrong.append(f"{name} owes {due}, but the ledger has {booked}")
    parcels = sorted(order_no for (order_no,) in rows(bus, "SELECT order_no FROM parcel"))
    if parcels != sorted(sold):
        wrong.append(f"parcels went to {parcels}")
    ((lamps,), (pianos,)) = rows(bus, "SELECT on_hand FROM stock WHERE item <> 'unicorn' ORDER BY item")
    taken = sum(items[name]["count"] for name in sold)
    if (lamps, pianos) != (LAMPS - taken, 9):
        wrong.append(f"{taken} lamps were sold, but {lamps} of {LAMPS} are left, and {pianos} pianos of 9")
    closed = rows(bus, "SELECT completed, failed, canceled FROM closed")
    if closed != [(len(sold), 5, 1)]:
        wrong.append(f"the batch said {closed} at its end")
    if not wrong:
        income = sum(amount for _, _, amount in entries)
        booked = f"{income} in the till, {len(entries)} entries"
        say(f"\nThe books balance: {len(sold)} orders, {taken} lamps, {booked}.")
    return wrong


# --- small things -----------------------------------------------------------------------------------------------


def look(bus: CommandBus, process_id: str) -> ProcessRecord:
    """A process and its trail."""
    found = bus.get_process(PROCESSES, process_id)
    if found is None:
        raise LookupError(f"there is no process {process_id}")
    return found


def running(bus: CommandBus, process_id: str, name: str, *, told: bool = False) -> CommandRecord | None:
    """The command of this step, if it runs at this moment (and has told how far it is)."""
    for step in look(bus, process_id).steps:
        if step.name == name and step.undoes is None:
            found = bus.get_command(step.domain, step.command_id)
            if found is not None and found.status == "IN_PROGRESS" and (found.progress is not None or not told):
                return found
    return None


def until_is(bus: CommandBus, process_id: str, status: str) -> ProcessRecord:
    """Wait for a process to be in this state."""
    until(lambda: look(bus, process_id).status == status, f"{process_id} to be {status}")
    return look(bus, process_id)


def until(condition: Callable[[], T | None], what: str) -> T:
    """The first true answer."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (answer := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {PATIENCE_SECONDS:g} s for {what}")
        time.sleep(0.02)
    return answer


def rows(bus: CommandBus, query: str) -> list[tuple[Any, ...]]:
    """What a query answers."""
    with bus.connect() as conn:
        return conn.execute(query.encode()).fetchall()


def parent_of(pid: int) -> int:
    """The process that started this one."""
    return int(Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[1])


def say(line: str) -> None:
    """Print at once, also into a pipe."""
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
