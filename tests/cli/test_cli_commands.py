"""status, commands, show, cancel, pause, resume, prune, rejected, workers: the daily life."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from cli_harness import run

from commandbus import CommandStatus, HandlerRegistry, TransientCommandError, Worker
from commandbus.cli.exit_codes import ExitCode
from commandbus.flow.commands.claim import claim
from commandbus.flow.commands.renew import renew
from commandbus.flow.commands.settle import cancellation, settle
from commandbus.flow.workers.registry import WorkerIdentity, beat
from commandbus.model.outcome import Judgement, Verdict
from commandbus.model.retry import RetryPolicy
from commandbus.worker.execution.attempt import Attempt
from support.waiting import until

# --- looking ------------------------------------------------------------------------------------------------


def test_status(orders):
    orders("send", "orders", "ship")
    orders("send", "orders", "ship", "--delay", "1h")
    head, row = orders("status", "orders").out.splitlines()
    assert dict(zip(head.split()[:6], row.split()[:6], strict=True)) == {
        "DOMAIN": "orders", "READY": "1", "DELAYED": "1", "RUNNING": "0", "PARKED": "0", "TSQ": "0"
    }  # fmt: skip
    (document,) = orders("status", "--json").document
    assert (document["ready"], document["delayed"], document["is_paused"]) == (1, 1, False)
    assert document["oldest_seconds"] >= 0
    assert orders("status", "nowhere").code == ExitCode.NOT_FOUND


def test_commands_are_filtered_and_paged(orders, bus):
    for number in range(5):
        bus.send("orders", "ship" if number % 2 else "bill", number, command_id=f"c{number}", correlation_id="all")
    first = orders("commands", "--domain", "orders", "--limit", "3")
    (more,) = re.findall(r"--cursor (\d+)", first.out)
    second = orders("commands", "--limit", "3", "--cursor", more, "--json").document
    assert [item["command_id"] for item in second] == ["c1", "c0"]
    ships = orders("commands", "--type", "ship", "--correlation-id", "all", "--since", "1h", "--json").document
    assert [item["command_id"] for item in ships] == ["c3", "c1"]
    assert orders("commands", "--since", "2099-01-01T00:00:00Z").out == "no commands\n"
    assert orders("commands", "--status", "completed").out == "no commands\n"
    assert len(orders("commands", "--status", "PENDING", "--json").document) == 5
    assert orders("commands", "--status", "sleeping").code == ExitCode.USAGE


def test_show_tells_a_life_as_a_timeline(orders, bus, database):
    registry = HandlerRegistry()

    @registry.handler("orders", "ship", retry_policy=RetryPolicy(2, [0.05]))
    def ship(command, ctx):
        if ctx.attempt == 1:
            raise TransientCommandError("the road\x1b[2J is closed", code="ROAD")
        return {"ok": True}

    bus.send("orders", "ship", {"n": 1}, command_id="a")
    with Worker(registry, database_url=database):
        until(lambda: bus.get_command("orders", "a").status is CommandStatus.COMPLETED)
    text = orders("show", "orders", "a").out
    timeline = text.partition("timeline")[2]
    events = [event for event in ("SENT", "FAILED", "RETRY_SCHEDULED", "COMPLETED") if event in timeline]
    assert events == sorted(events, key=timeline.index)
    assert len(events) == 4
    assert "+0.000s" in text
    assert re.search(r"^where the time went .*\n  \[[.#b]{60}\]$", text, re.MULTILINE)
    assert "  b backing off: " in text
    assert '{"ok": true}' in text
    assert "\x1b" not in text
    assert "--traceback shows" in text
    assert "raise TransientCommandError" not in text
    assert "raise TransientCommandError" in orders("show", "orders", "a", "--traceback").out
    document = orders("show", "a", "--json", "--traceback").document
    assert (document["status"], document["attempts"], document["result"]) == ("COMPLETED", 2, {"ok": True})
    assert document["audit"][0]["event"] == "SENT"
    assert "backing_off" in [part["state"] for part in document["ledger"]["intervals"]]
    assert "TransientCommandError" in document["failed_attempts"][0]["traceback"]
    assert "traceback" not in orders("show", "a", "--json").document["failed_attempts"][0]


def test_show_and_tables_tell_charged_attempts_from_their_numbers(orders, bus):
    """Attempts 1 and 2 were given back, 3 runs: it is the first that is charged."""
    bus.send("orders", "ship", command_id="a", max_attempts=2)
    for _ in range(2):
        attempt = claim_one(bus)
        bus.run(settle("orders", "w1", [attempt.give_back()]))
    claim_one(bus)
    bus.send("orders", "ship", command_id="b", max_attempts=2)
    fields, _, timeline = orders("show", "orders", "a").out.partition("timeline")
    assert re.search(r"^attempts +1 of 2 charged, number 3$", fields, re.MULTILINE)
    assert "ATTEMPT NUMBER" in timeline
    document = orders("show", "a", "--json").document
    assert (document["charged_attempts"], document["attempts"]) == (1, 3)
    table = orders("commands").out
    assert "1 charged, number 3" in table
    assert re.search(r"orders +ship +b +PENDING +0 ", table)
    assert "0 of 2" in orders("show", "orders", "b").out


@pytest.mark.parametrize(
    ("marks", "apart", "said"),
    [
        ("quarantine = true", "quarantine", "an attempt of it got stuck or crashed its worker"),
        ("suspect = 1", "suspect", "the cause is not known"),
        ("suspect = 1, alone = true, quarantine = true", "alone", "one such command at a time"),
    ],
)
def test_show_says_why_a_command_runs_in_a_child_process(orders, bus, database, marks, apart, said):
    bus.send("orders", "ship", command_id="a")
    assert orders("show", "a", "--json").document["apart"] is None
    with psycopg.connect(database) as conn:
        conn.execute(f"UPDATE commandbus.command SET {marks}")
    text = orders("show", "orders", "a").out
    assert re.search(rf"^runs +in a child process,.* {said}", text, re.MULTILINE)
    assert orders("show", "a", "--json").document["apart"] == apart
    bus.cancel("orders", "a", operator="ann")
    assert bus.get_command("orders", "a").apart is None


def test_show_finds_a_command_by_any_of_its_names(orders, bus):
    bus.create_domain("bills")
    sent = bus.send("orders", "ship", command_id="a")
    assert orders("show", "a", "--json").document["id"] == sent.id
    assert orders("show", f"#{sent.id}", "--json").document["command_id"] == "a"
    bus.send("bills", "pay", command_id="a")
    ambiguous = orders("show", "a")
    assert ambiguous.code == ExitCode.REFUSED
    assert "`show bills a`, `show orders a`" in ambiguous.err
    for words in (["b"], ["orders", "b"], ["#999999"], ["nowhere", "a"]):
        assert orders("show", *words).code == ExitCode.NOT_FOUND
    assert orders("show", "one", "two", "three").code == ExitCode.USAGE


def test_workers(orders, bus, database):
    assert orders("workers").out.startswith("no workers")
    registry = HandlerRegistry()
    registry.register("orders", "ship", lambda command, ctx: None)
    with Worker(registry, database_url=database) as worker:
        until(bus.workers)
        assert worker.id in orders("workers").out
        (document,) = orders("workers", "--json").document
        assert (document["id"], document["is_alive"], document["domains"]) == (worker.id, True, ["orders"])
    assert orders("workers", "--json").document == []
    assert [item["state"] for item in orders("workers", "--all", "--json").document] == ["STOPPED"]


def test_workers_say_how_they_are_and_who_watches_them(orders, bus):
    healths = {
        "one": None,
        "two": {"state": "HEALTHY", "reasons": []},
        "three": {"state": "DEGRADED", "reasons": ["1 attempt is stuck", "\x1b[2J"]},
        "four": {},
    }
    for name, health in healths.items():
        identity = WorkerIdentity(
            name, "host", 1, ["orders"], 4, "0.1.0", supervisor=f"of-{name}" if health else None
        )
        state = "DRAINING" if name == "three" else "EXITING" if name == "four" else "ACTIVE"
        bus.run(beat(identity, state=state, running=0, settled=0, rates={}, health=health))
    lines = {line.split()[0]: line for line in orders("workers").out.splitlines()}
    assert re.search(r"SUPERVISOR +STATE +HEALTH", lines["WORKER"])
    assert re.search(r" - +ACTIVE +- ", lines["one"])
    assert re.search(r" of-two +ACTIVE +HEALTHY ", lines["two"])
    assert re.search(r" of-three +DRAINING +DEGRADED \(1 attempt is stuck; \\x1b\[2J\) ", lines["three"])
    assert re.search(r" - +EXITING +- ", lines["four"])
    documents = {item["id"]: item for item in orders("workers", "--json").document}
    assert documents["three"]["health"] == healths["three"]
    assert (documents["three"]["supervisor"], documents["one"]["supervisor"]) == ("of-three", None)


def test_nobody_knows_how_a_silent_worker_is(orders, bus, database):
    for name, state in (("killed", "ACTIVE"), ("ended", "STOPPED"), ("alive", "ACTIVE")):
        identity = WorkerIdentity(name, "host", 1, ["orders"], 4, "0.1.0", supervisor="s")
        health = {"state": "healthy", "reasons": []}
        bus.run(beat(identity, state=state, running=0, settled=0, rates={}, health=health))
    with psycopg.connect(database, autocommit=True) as conn:
        conn.execute("UPDATE commandbus.worker SET heartbeat_at = now() - interval '1 minute' WHERE id <> 'alive'")
    lines = {line.split()[0]: line for line in orders("workers", "--all").out.splitlines()}
    assert re.search(r" ACTIVE, silent +\? +orders ", lines["killed"])
    assert re.search(r" STOPPED +healthy ", lines["ended"])
    assert re.search(r" ACTIVE +healthy ", lines["alive"])
    assert "worker killed on host has been silent for 1m" in orders("doctor").out
    with psycopg.connect(database, autocommit=True) as conn:
        conn.execute("DELETE FROM commandbus.worker WHERE id = 'killed'")
        conn.execute("UPDATE commandbus.worker SET heartbeat_at = now() - interval '9 seconds' WHERE id = 'alive'")
    assert re.search(r"workers: 1 worker alive, heard from within the last (9|1\d)(\.\ds|s)", orders("doctor").out)


def test_rejected_messages(orders, bus, database):
    with psycopg.connect(database, autocommit=True) as conn:
        conn.execute("""SELECT pgmq.send('orders__commands', '{"not": "an envelope"}')""")
    registry = HandlerRegistry()
    registry.register("orders", "ship", lambda command, ctx: None)
    with Worker(registry, database_url=database):
        until(lambda: bus.status("orders")[0].rejected)
    (document,) = orders("rejected", "--domain", "orders", "--json").document
    assert document["message"] == {"not": "an envelope"}
    text = orders("rejected").out
    assert document["reason"] in text
    assert '{"not": "an envelope"}' in text
    assert orders("rejected", "--cursor", str(document["id"])).out == "no rejected messages\n"


# --- acting -------------------------------------------------------------------------------------------------


def test_priority(orders):
    for name in ("a", "b"):
        orders("send", "orders", "ship", "--id", name, "--priority", "low")
    changed = orders("priority", "orders", "a", "high", "--operator", "ann", "--reason", "the boss calls")
    assert changed.out == "orders a has high priority now (it had low)\n"
    assert "2 (1 high, 1 low)" in orders("status", "orders").out
    assert orders("status", "--json").document[0]["ready_low"] == 1
    (found,) = orders("commands", "--priority", "high", "--json").document
    assert (found["command_id"], found["priority"]) == ("a", "high")
    assert "PENDING (low)" in orders("commands", "--priority", "low").out
    shown = orders("show", "orders", "a").out
    assert "the boss calls" in shown
    assert re.search(r"priority +high", shown)
    assert orders("priority", "orders", "b", "normal", "--json").document["before"] == "low"
    assert orders("priority", "orders", "a", "urgent").code == ExitCode.USAGE
    assert orders("priority", "orders", "nobody", "low").code == ExitCode.NOT_FOUND
    orders("cancel", "orders", "a")
    assert orders("priority", "orders", "a", "low").code == ExitCode.REFUSED


def test_cancel(orders, status_of):
    orders("send", "orders", "ship", "--id", "a")
    orders("send", "orders", "ship", "--id", "b")
    assert orders("cancel", "orders", "a", "--operator", "ann", "--reason", "why not").out == "canceled orders a\n"
    assert orders("cancel", "orders", "b", "--json").document["status"] == "CANCELED"
    assert status_of("a") is CommandStatus.CANCELED
    assert "operator=ann, reason=why not" in orders("show", "orders", "a").out
    assert orders("cancel", "orders", "a").code == ExitCode.REFUSED
    assert orders("cancel", "orders", "nobody").code == ExitCode.NOT_FOUND


def test_a_locked_row_is_not_waited_for_without_end(orders, database, monkeypatch, status_of):
    monkeypatch.setattr("commandbus.cli.session.LOCK_SECONDS", 1)
    orders("send", "orders", "ship", "--id", "a")
    with psycopg.connect(database) as holder:
        holder.execute("SELECT FROM commandbus.command WHERE command_id = 'a' FOR UPDATE")
        answer = orders("cancel", "orders", "a")
        assert answer.code == ExitCode.REFUSED
        assert "another transaction holds a lock that this command needs" in answer.err
    assert orders("cancel", "orders", "a").code == ExitCode.OK
    assert status_of("a") is CommandStatus.CANCELED


def claim_one(bus, worker="w1"):
    found = bus.run(claim(domain="orders", worker=worker, n=1, lease_seconds=60, cursor=None))
    return Attempt("orders", found.ready[0], None, 0.0)


def test_cancel_what_runs(orders, bus):
    bus.send("orders", "ship", command_id="a")
    attempt = claim_one(bus)
    for _ in range(2):
        answer = orders("cancel", "orders", "a", "--operator", "ann", "--reason", "why\x1b[2J")
        assert (answer.code, answer.out) == (ExitCode.OK, "asked worker w1 to stop orders a\n")
    document = orders("cancel", "orders", "a", "--json").document
    assert (document["result"], document["status"]) == ("REQUESTED", "IN_PROGRESS")
    bus.run(renew("orders", "w1", [attempt], lease_seconds=60, progress={attempt.msg_id: '{"done": 3}'}))
    text = orders("show", "a").out
    assert re.search(r"^cancel +asked for by ann at .*: why\\x1b\[2J$", text, re.MULTILINE), text
    assert re.search(r'^progress +\{"done": 3\}$', text, re.MULTILINE), text
    assert 'asked to stop by ann; progress {"done": 3}' in orders("commands").out
    (document,) = orders("commands", "--json").document
    assert (document["progress"], document["cancel_requested"]["by"]) == ({"done": 3}, "ann")
    waited = orders("cancel", "orders", "a", "--wait", "50ms")
    assert waited.code == ExitCode.NO
    assert waited.out == "asked worker w1 to stop orders a; it has not ended after 50ms\n"
    assert orders("cancel", "orders", "a", "--wait", "soon").code == ExitCode.USAGE


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        ("CANCELED", ExitCode.OK, "canceled orders a\n"),
        ("COMPLETED", ExitCode.NO, "orders a is COMPLETED: it ended before it could be stopped\n"),
    ],
)
def test_cancel_waits_for_the_end(orders, bus, status, code, said):
    bus.send("orders", "ship", command_id="a")
    attempt = claim_one(bus)
    attempt.started = 1.0
    outcomes = {
        "COMPLETED": attempt.complete(None),
        "CANCELED": attempt.fail(Judgement(Verdict.CANCELED, cancellation("ann", None))),
    }

    def end_it_when_asked():
        until(lambda: bus.get_command("orders", "a").cancel_requested)
        return bus.run(settle("orders", "w1", [outcomes[status]]))

    with ThreadPoolExecutor(1) as threads:
        settled = threads.submit(end_it_when_asked)
        answer = orders("cancel", "orders", "a", "--wait")
        assert settled.result() == {}
    assert (answer.code, answer.out) == (code, said)


def test_pause_and_resume(orders):
    assert orders("pauses").out == "nothing is paused\n"
    assert orders("pause", "orders", "ship", "--reason", "stocktaking").out == "ship of domain orders is paused\n"
    assert orders("pause", "orders", "ship", "--json").document["changed"] is False
    assert orders("pause", "orders").out == "domain orders is paused\n"
    assert "stocktaking" in orders("pauses").out
    assert {item["command_type"] for item in orders("pauses", "--json").document} == {None, "ship"}
    assert orders("status").out.splitlines()[1].endswith("all")
    assert orders("resume", "orders").code == 0
    assert orders("status").out.splitlines()[1].endswith("ship")
    assert orders("resume", "orders", "ship", "--json").document["released"] == 0
    assert orders("resume", "orders").code == ExitCode.REFUSED
    assert orders("pause", "nowhere").code == ExitCode.NOT_FOUND


def test_prune(orders, bus):
    for number in range(3):
        bus.send("orders", "ship", command_id=f"c{number}")
        bus.cancel("orders", f"c{number}")
    assert "would delete 1 commands" not in orders("prune", "--preview").out
    previewed = orders("prune", "--count", "2", "--preview", "--json").document
    assert previewed["commands"] == 1
    assert orders("prune").out.startswith("deleted: 0 commands")
    assert orders("prune", "--count", "2", "--json").document["commands"] == 1
    assert orders("prune", "--age", "0s").out.startswith("deleted: 2 commands")
    assert orders("prune", "--age", "long").code == ExitCode.USAGE


def test_a_whole_day_as_processes(database):
    for words in (["domain", "create", "orders"], ["send", "orders", "ship", "1", "--id", "x"], ["status"],
                  ["commands"], ["show", "x"], ["cancel", "orders", "x"]):  # fmt: skip
        answer = run(*words, "--database", database)
        assert (answer.code, answer.err) == (0, "")
        assert answer.out


def test_an_idle_domain_has_no_oldest_command(orders):
    assert orders("status", "--json").document[0]["oldest_seconds"] is None


def test_a_delayed_command_says_when_it_is_ready(orders, bus):
    bus.send("orders", "ship", command_id="later", delay=3600)
    bus.send("orders", "ship", command_id="now")
    lines = {line.split()[3]: line for line in orders("commands").out.splitlines()[1:]}
    assert re.search(r"ready from \d{4}-\d\d-\d\d \d\d:\d\d:\d\d \(in (1h|60m|59m\d*s?)\)$", lines["later"]), (
        lines["later"]
    )
    assert "ready from" not in lines["now"]


def test_a_command_that_is_tried_again_later_says_when_and_why(orders, bus, database):
    handlers = HandlerRegistry()

    def fail(command, ctx):
        raise ValueError("no street")

    handlers.register("orders", "ship", fail, retry_policy=RetryPolicy(max_attempts=3, backoff_schedule=[900]))
    bus.send("orders", "ship", command_id="a")
    Worker(handlers, database_url=database).run(until_idle=True)
    assert re.search(r"tried again at .* \(in 1[3-6]m.*\): no street$", orders("commands").out, re.MULTILINE)


def test_more_charged_than_allowed_reads_right(orders, bus, database):
    """Crashes are waived at first, and charged together once the command is convicted of them."""
    bus.send("orders", "ship", command_id="a", max_attempts=1)
    claim_one(bus)
    with psycopg.connect(database, autocommit=True) as db:
        db.execute("UPDATE pgmq.q_orders__commands SET read_ct = 3")
    fields = orders("show", "orders", "a").out
    assert re.search(r"^attempts +all 1 used up \(3 charged, .*\), number 3$", fields, re.MULTILINE)
    assert "3 of 1" not in fields


def test_who_paused_and_resumed_can_be_listed(orders):
    assert orders("pauses", "--actions", "5").out == "nothing was ever paused\n"
    orders("pause", "orders", "ship", "--operator", "ann", "--reason", "stocktaking")
    orders("resume", "orders", "ship", "--operator", "bob", "--reason", "done")
    lines = orders("pauses", "--actions", "5").out.splitlines()
    assert re.search(r"RESUME +orders +ship +bob +done$", lines[1])
    assert re.search(r"PAUSE +orders +ship +ann +stocktaking$", lines[2])
    assert [item["action"] for item in orders("pauses", "--actions", "1", "--json").document] == ["RESUME"]
