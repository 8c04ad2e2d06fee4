"""Processes on the command line: started, listed, shown with their trail, canceled and retried."""

from __future__ import annotations

import json
import re
import threading

import pytest
from cli_harness import Program, run

from commandbus import (
    BusinessRuleException,
    HandlerRegistry,
    PermanentCommandError,
    Saga,
    Worker,
    nested,
    sleep,
    wait_for,
)
from commandbus.cli.exit_codes import ExitCode
from commandbus.flow.processes.move import set_aside
from support.sagas import BARE, ORDER, TYPES, World
from support.waiting import until
from support.workers import quick_settings

EVIL = "p\x9b31m\u202e\u2028q"


@pytest.fixture
def sagas(orders, bus):
    """The command line, with a domain `processes` too, and nobody at work."""
    bus.create_domain("processes")
    return orders


@pytest.fixture
def world():
    return World()


@pytest.fixture
def working(sagas, world, database):
    """A worker for the sagas `order` and `bare`, whose handlers do as `world` says."""
    handlers = HandlerRegistry()
    for name in TYPES:
        handlers.register("orders", name, world.handle)
    handlers.register_process(ORDER)
    handlers.register_process(BARE)
    with Worker(handlers, settings=quick_settings(database)):
        yield sagas


def ends(bus, process_id, status):
    return until(
        lambda: (found := bus.get_process("processes", process_id)).status == status and found,
    )


def test_start_and_its_receipt(sagas, bus):
    words = ["process", "start", "order", "--data", '{"n": 1}', "--process-id", "p1", "--correlation-id", "c"]
    answer = sagas(*words, "--deadline", "1h")
    assert (answer.code, answer.out) == (0, "started: processes p1\n")
    assert sagas(*words).out == "was there already: processes p1\n"
    receipt = sagas(*words, "--json").document
    assert (receipt["process_id"], receipt["created"]) == ("p1", False)
    record = bus.get_process("processes", "p1")
    assert (record.data, record.correlation_id, record.process_type) == ({"n": 1}, "c", "order")
    assert round((record.deadline_at - record.created_at).total_seconds()) == 3600
    refused = sagas("process", "start", "order", "--data", '{"n": 2}', "--process-id", "p1")
    assert refused.code == ExitCode.REFUSED
    assert "'p1' already exists" in refused.err
    own = sagas("process", "start", "order").out.split()[-1]
    assert bus.get_process("processes", own).data is None


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ([], ExitCode.USAGE),
        (["order", "--data", "{bad"], ExitCode.USAGE),
        (["order", "--data", "NaN"], ExitCode.USAGE),
        (["order", "--deadline", "soon"], ExitCode.USAGE),
        (["order", "--process-id", ""], ExitCode.USAGE),
        (["order", "--process-id", "a\n\x1b[31mb"], ExitCode.USAGE),
        (["order", "--process-id", "x" * 300], ExitCode.USAGE),
        (["or\nder"], ExitCode.USAGE),
        (["order", "--reply-to", "No Queue"], ExitCode.USAGE),
        (["order", "--domain", "No!"], ExitCode.USAGE),
        (["order", "--domain", "nowhere"], ExitCode.NOT_FOUND),
        (["order", "--batch-id", "b"], ExitCode.USAGE),
        (["order", "--name", "b"], ExitCode.USAGE),
        (["order", "--batch-data", "1"], ExitCode.USAGE),
        (["order", "--on-complete", "orders/tell"], ExitCode.USAGE),
        (["order", "--from", "-", "--data", "{}"], ExitCode.USAGE),
        (["order", "--from", "-", "--process-id", "p"], ExitCode.USAGE),
        (["order", "--from", "-", "--deadline", "1h"], ExitCode.USAGE),
        (["order", "--from", "-", "--correlation-id", "c"], ExitCode.USAGE),
        (["order", "--from", "-", "--on-complete", "tell"], ExitCode.USAGE),
        (["order", "--from", "-", "--on-complete", "nowhere/tell"], ExitCode.NOT_FOUND),
        (["order", "--from", "-", "--on-complete", "orders/tell", "--reply-to", "q"], ExitCode.USAGE),
        (["order", "--from", "-", "--reply-to", "nobody"], ExitCode.USAGE),
        (["order", "--from", "-", "--domain", "nowhere"], ExitCode.NOT_FOUND),
        (["order", "--from", "/nowhere/at.all"], ExitCode.USAGE),
        (["or\nder", "--from", "-"], ExitCode.USAGE),
    ],
)
def test_what_cannot_be_started_is_refused(sagas, bus, words, code):
    answer = sagas("process", "start", *words)
    assert (answer.code, answer.out) == (code, "")
    assert answer.err.startswith("commandbus: error: ")
    assert answer.err.count("\n") == 1
    assert "\x1b" not in answer.err
    assert bus.query_processes().items == []
    assert bus.query_batches().items == []


def lines(*items):
    return "".join(json.dumps(item) + "\n" for item in items)


def test_start_many_as_one_batch(sagas, bus, tmp_path):
    file = tmp_path / "many.jsonl"
    file.write_text(
        lines(
            {"process_id": "p1", "data": {"n": 1}, "deadline": "1h", "correlation_id": "c"},
            {"process_id": "p2", "deadline": 0},
            {},
        )
        + "\r\n\n"
    )
    words = ["process", "start", "order", "--from", str(file), "--batch-id", "b1", "--name", "night run"]
    words += ["--batch-data", '{"by": "me"}', "--on-complete", "orders/tell"]
    answer = sagas(*words)
    assert (answer.code, answer.out) == (0, "started: batch processes b1 (3 processes)\n")
    assert sagas(*words).out == "was there already: batch processes b1 (3 processes)\n"
    receipt = sagas(*words, "--json").document
    assert (receipt["batch_id"], receipt["total"], receipt["created"]) == ("b1", 3, False)
    record = bus.get_batch("processes", "b1")
    assert (record.name, record.custom_data, record.holds, record.total) == (
        "night run", {"by": "me"}, "processes", 3
    )  # fmt: skip
    assert (record.on_complete["domain"], record.on_complete["command_type"]) == ("orders", "tell")
    first, second = (bus.get_process("processes", name) for name in ("p1", "p2"))
    assert (first.data, first.correlation_id, first.batch_id) == ({"n": 1}, "c", "b1")
    assert round((first.deadline_at - first.created_at).total_seconds()) == 3600
    assert (second.data, second.deadline_at) == (None, None)
    other = sagas(*words, "--name", "other")
    assert other.code == ExitCode.REFUSED
    assert "batch_id 'b1' already exists" in other.err


def test_the_end_of_a_batch_of_processes_is_told_to_a_queue(sagas, bus, working):
    bus.create_queue("answers")
    text = lines({"process_id": "p1", "data": {}})
    words = ["process", "start", "order", "--from", "-", "--batch-id", "b1", "--reply-to", "answers"]
    assert sagas(*words, stdin=text).out == "started: batch processes b1 (1 process)\n"
    assert sagas("batch", "watch", "b1", "--wait", "20s").code == 0
    with bus.connect() as conn:
        ((told,),) = conn.execute("SELECT message FROM pgmq.q_answers").fetchall()
    assert (told["event"], told["status"], told["completed"]) == ("batch_completed", "COMPLETED", 1)
    assert bus.get_process("processes", "p1").reply_to is None


@pytest.mark.parametrize(
    "bad",
    [
        "{",
        "[]",
        "5",
        "null",
        '"text"',
        '{"colour": "red"}',
        '{"data": NaN}',
        '{"process_id": "a\\nb"}',
        '{"process_id": ""}',
        '{"process_id": 7}',
        '{"process_id": "fine-2"}',
        '{"deadline": "soon"}',
        '{"deadline": []}',
        '{"reply_to": "No Queue"}',
        '{"correlation_id": ""}',
        "{} {}",
        "[" * 100_000,
        '{"data": "' + "x" * 3_000_000 + '"}',
        "\ufeff{}",
    ],
    ids=lambda text: text[:40],
)
def test_a_bad_line_is_named_and_nothing_is_started(sagas, bus, bad):
    text = lines(*({"process_id": f"fine-{number}"} for number in range(20))) + "\n" + bad + "\n{}\n"
    answer = sagas("process", "start", "order", "--from", "-", stdin=text)
    assert (answer.code, answer.out) == (ExitCode.USAGE, "")
    assert answer.err.startswith("commandbus: error: -, line 22: ")
    assert answer.err.endswith("nothing was started\n")
    assert len(answer.err) < 500
    assert bus.query_processes().items == []
    assert bus.query_batches().items == []


def test_a_process_that_exists_is_named_by_its_line(sagas, bus):
    bus.start_process("order", {}, process_id="known")
    text = lines({"process_id": "a"}, {"process_id": "known"})
    answer = sagas("process", "start", "order", "--from", "-", stdin=text)
    assert answer.code == ExitCode.REFUSED
    assert answer.err.startswith(
        "commandbus: error: -, line 2: process_id 'known' already exists in domain 'processes'"
    )
    assert bus.get_process("processes", "a") is None
    assert bus.query_batches().items == []


def test_the_trail_of_one_that_was_undone(working, bus, world):
    world.fails["ship"] = BusinessRuleException("no truck\n\x1b[31m", code="NO_TRUCK")
    working("process", "start", "order", "--data", '{"order": 7}', "--process-id", "p1")
    record = ends(bus, "p1", "COMPENSATED")
    answer = working("process", "show", "p1")
    fields, trail = answer.out.split("\n\ntrail\n")
    shown = dict(re.split(r"  +", line, maxsplit=1) for line in fields.splitlines())
    assert shown["process"] == "processes p1"
    assert (shown["type"], shown["status"]) == ("order", "COMPENSATED")
    assert "[NO_TRUCK]: step 3 (ship) failed: no truck\\n\\x1b[31m" in shown["failure"]
    assert shown["data"] == '{"order": 7}'
    assert '"reserve": {"by": "reserve"}' in shown["state"]
    assert "waits for" not in shown
    head, *lines = trail.splitlines()
    assert re.sub(" +", " ", head) == "NO STEP UNDOES DOMAIN COMMAND ID TYPE SENT TOOK OUTCOME ERROR"
    cells = [line.split() for line in lines]
    assert [line[:2] for line in cells] == [
        ["1", "reserve"], ["2", "charge"], ["3", "ship"], ["4", "charge"], ["5", "reserve"]
    ]  # fmt: skip
    assert cells[3][2:6] == ["2", "orders", record.steps[3].command_id, "refund"]
    assert cells[4][2:6] == ["1", "orders", record.steps[4].command_id, "release"]
    assert "FAILED" in lines[2]
    assert lines[2].endswith("[NO_TRUCK]: no truck\\n\\x1b[31m")
    assert re.search(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d +[\d.]+m?s +COMPLETED$", lines[4])
    document = working("process", "show", "p1", "--json").document
    assert [step["undoes"] for step in document["steps"]] == [None, None, None, 2, 1]
    assert document["steps"][0]["result"] == {"by": "reserve"}
    assert document["failure"]["code"] == "NO_TRUCK"
    refused = working("process", "retry", "p1")
    assert refused.code == ExitCode.REFUSED
    assert "only a FAILED process can be retried" in refused.err
    assert working("process", "cancel", "p1").code == ExitCode.REFUSED


def test_what_one_waits_for(sagas, bus):
    sagas("process", "start", "order", "--process-id", "p1")
    text = sagas("process", "show", "p1").out
    assert re.search(r"^status +PENDING$", text, re.MULTILINE)
    assert re.search(r"^waits for +a worker of domain 'processes'", text, re.MULTILINE)
    assert text.endswith("\ntrail\nnothing was sent yet\n")
    assert "a worker of domain 'processes'" in sagas("process", "list").out


def test_a_running_command_is_in_progress_in_its_process(working, bus, world):
    world.held["charge"] = threading.Event()
    working("process", "start", "order", "--process-id", "p1")
    until(lambda: "charge" in world.did)
    charge = bus.get_process("processes", "p1").steps[1]
    assert (charge.name, charge.command_status) == ("charge", "IN_PROGRESS")
    assert "SENT (IN_PROGRESS)" in working("process", "show", "p1").out
    world.held["charge"].set()


def test_one_in_the_troubleshooting_queue_says_who_decides(working, bus, world):
    world.fails["charge"] = PermanentCommandError("card reader is \x1bdown", code="DOWN")
    working("process", "start", "order", "--process-id", "p1")
    record = ends(bus, "p1", "WAITING_FOR_TSQ")
    charge = record.steps[1].command_id
    text = working("process", "show", "p1").out
    assert "\x1b" not in text
    assert re.search(rf"^waits for +command '{charge}' in the troubleshooting queue of 'orders': card", text, re.M)
    assert "SENT (IN_TROUBLESHOOTING_QUEUE)" in text
    assert re.search(rf"^orders +{charge} +charge +charge +DOWN +card reader is \\x1bdown$", text, re.MULTILINE)
    assert f"`commandbus tsq retry|cancel|complete orders {charge}` decides" in text
    assert re.search(r" so far ", text)
    command = working("show", charge)
    assert re.search(r"^process +processes p1 \(step 2, charge\)$", command.out, re.MULTILINE)
    part = working("show", charge, "--json").document["process"]
    assert (part["process_id"], part["step"], part["is_compensation"]) == ("p1", 2, False)
    assert working("tsq", "cancel", "orders", charge).code == 0
    ends(bus, "p1", "COMPENSATED")
    undone = bus.get_process("processes", "p1").steps[-1].command_id
    assert re.search(r"^process +processes p1 \(compensation 3, reserve\)$", working("show", undone).out, re.M)
    start = bus.query_commands(domain="processes").items[-1]
    assert "p1 (a message to it)" in working("show", start.command_id).out
    other = working("send", "orders", "ship", "--id", "alone")
    assert other.code == 0
    assert "process" not in working("show", "alone").out
    assert working("show", "alone", "--json").document["process"] is None


def test_cancel_and_retry(working, bus, world):
    world.fails["reserve"] = BusinessRuleException("sold out")
    working("process", "start", "bare", "--process-id", "p1")
    ends(bus, "p1", "FAILED")
    assert "sold out" in working("process", "list", "--status", "failed").out
    del world.fails["reserve"]
    assert working("process", "retry", "p1").out == "process p1 of domain processes goes on\n"
    ends(bus, "p1", "COMPLETED")
    world.fails["charge"] = PermanentCommandError("down")
    working("process", "start", "order", "--process-id", "p2")
    ends(bus, "p2", "WAITING_FOR_TSQ")
    answer = working("process", "cancel", "p2", "--reason", "customer\ncalled", "--operator", "ann")
    assert answer.out == "asked process p2 of domain processes to stop; it was WAITING_FOR_TSQ\n"
    ends(bus, "p2", "CANCELED")
    assert re.search(r"^cancel +asked for by ann: customer\\ncalled$", working("process", "show", "p2").out, re.M)
    assert world.did[-1] == "release"
    working("process", "start", "order", "--process-id", "p3")
    ends(bus, "p3", "WAITING_FOR_TSQ")
    done = working("process", "cancel", "p3", "--json").document
    assert done == {"domain": "processes", "process_id": "p3", "was": "WAITING_FOR_TSQ"}


def test_list_and_its_filters(sagas, bus):
    for number in range(3):
        bus.start_process("order", {}, process_id=f"o{number}")
    bus.create_domain("other")
    bus.start_process("bare", {}, process_id="b", domain="other")

    def found(*words):
        return [item["process_id"] for item in sagas("process", "list", *words, "--json").document]

    assert found() == ["b", "o2", "o1", "o0"]
    assert found("--type", "bare") == ["b"]
    assert found("--domain", "processes") == ["o2", "o1", "o0"]
    assert found("--status", "pending", "--limit", "2") == ["b", "o2"]
    assert found("--status", "COMPLETED") == []
    page = sagas("process", "list", "--limit", "2").out
    head, first, *_ = page.splitlines()
    assert re.sub(" +", " ", head.strip()) == "# DOMAIN TYPE PROCESS ID STATUS STARTED NOTE"
    assert first.split()[:4] == [str(bus.get_process("other", "b").id), "other", "bare", "b"]
    (more,) = re.findall(r"^more: add --cursor (\d+)$", page, re.MULTILINE)
    assert found("--cursor", more) == ["o1", "o0"]
    assert "more:" not in sagas("process", "list", "--limit", "4").out
    assert sagas("process", "list", "--status", "FAILED").out == "no processes\n"
    assert sagas("process", "list", "--domain", "nope").code == ExitCode.NOT_FOUND
    assert sagas("process", "list", "--status", "LOST").code == ExitCode.USAGE
    assert sagas("process", "list", "--limit", "0").code == ExitCode.USAGE
    missing = sagas("process", "list", "--batch", "nope")
    assert missing.code == ExitCode.NOT_FOUND
    assert "no batch 'nope' in any domain" in missing.err


def test_an_id_alone_is_enough_if_it_is_unique(sagas, bus):
    bus.create_domain("other")
    for domain in ("processes", "other"):
        bus.start_process("order", {}, process_id="p1", domain=domain)
    bus.start_process("order", {}, process_id="p2", domain="other")
    assert sagas("process", "show", "p2").code == 0
    for verb in ("show", "cancel", "retry"):
        answer = sagas("process", verb, "p1")
        assert (answer.code, answer.out) == (ExitCode.REFUSED, "")
        assert "2 domains have a process 'p1': other, processes; choose one with --domain" in answer.err
        assert sagas("process", verb, "nobody").code == ExitCode.NOT_FOUND
        assert "no process 'nobody' in domain 'other'" in sagas("process", verb, "nobody", "--domain", "other").err
        assert sagas("process", verb, "a\nb").code == ExitCode.NOT_FOUND
    assert "other p1" in sagas("process", "show", "p1", "--domain", "other").out
    unknown = sagas("process", "show", "p1", "--domain", "nope")
    assert unknown.code == ExitCode.NOT_FOUND
    assert "unknown domain 'nope'" in unknown.err


def test_strays(sagas, bus):
    assert sagas("process", "strays").out == "no stray replies\n"
    bus.start_process("order", {}, process_id="p1")
    id_ = bus.get_process("processes", "p1").id
    bus.run(set_aside("processes", id_, {"event": "re\x1bply"}, "the step had ended\nbefore"))
    bus.run(set_aside("processes", None, {"much": "x" * 500}, "no such process"))
    head, second, first = sagas("process", "strays").out.splitlines()
    assert head.split() == ["ID", "DOMAIN", "PROCESS", "AT", "REASON", "MESSAGE"]
    assert re.search(r'processes +p1 .* the step had ended\\nbefore +\{"event": "re\\u001bply"\}$', first)
    assert re.search(r"processes +- ", second)
    assert len(second) < 200
    assert len(sagas("process", "strays", "--limit", "1", "--json").document) == 1
    bus.start_process("order", {}, process_id="p2")
    (only,) = sagas("process", "strays", "--process", "p1", "--json").document
    assert (only["process_id"], only["reason"]) == ("p1", "the step had ended\nbefore")
    assert sagas("process", "strays", "--process", "p2").out == "no stray replies\n"
    assert "no process 'p3' in any domain" in sagas("process", "strays", "--process", "p3").err
    assert sagas("process", "strays", "--process", "a\nb").code == ExitCode.NOT_FOUND
    text = sagas("process", "show", "p1").out
    assert "replies that moved nothing" in text
    assert "the step had ended\\nbefore" in text
    assert sagas("process", "strays", "--domain", "nope").code == ExitCode.NOT_FOUND


def test_nothing_that_it_prints_can_write_to_the_terminal(sagas, bus):
    started = sagas("process", "start", "or\u202eder", "--process-id", EVIL)
    assert started.code == 0
    texts = [started.out]
    texts += [sagas("process", *words).out for words in (["list"], ["show", EVIL], ["cancel", EVIL])]
    texts += [sagas("process", "retry", EVIL).err]
    for text in texts:
        assert "p\\x9b31m\\u202e\\u2028q" in text or repr(EVIL) in text or ascii(EVIL) in text
        assert not set("\x9b\u202e\u2028\x1b") & set(text)


def test_a_reader_that_goes_away_is_no_error(sagas, bus, database):
    bus.start_processes("order", [{"process_id": f"{number:0200}"} for number in range(1000)])
    with Program("process", "list", "--limit", "1000", "--database", database) as program:
        assert program.process.stdout.readline().split()[0] == "#"
        program.process.stdout.close()
        assert program.process.wait(20) == ExitCode.BROKEN_PIPE
        assert program.process.stderr.read() == ""


def test_a_database_without_the_schema_is_told(empty_database):
    for words in (["process", "list"], ["process", "show", "p1"], ["process", "start", "order"]):
        answer = run("--database", empty_database, *words)
        assert answer.code == ExitCode.DATABASE
        assert "commandbus migrate" in answer.err


# --- processes that wait ----------------------------------------------------------------------------------------


INNER = Saga("inner", sleep("3d"))
OUTER = Saga("outer", wait_for("approval", deadline="2d"), nested("delivery", INNER))


@pytest.fixture
def waiting(sagas, bus, database):
    """A worker for a process that waits for a signal, and then for a nested process that sleeps."""
    handlers = HandlerRegistry()
    for saga in (INNER, OUTER):
        handlers.register_process(saga)
    bus.start_process(OUTER, {}, process_id="p1")
    with Worker(handlers, settings=quick_settings(database)):
        until(lambda: bus.get_process("processes", "p1").status == "WAITING_FOR_REPLY")
        yield sagas


def test_a_signal_is_sent_and_shown(waiting, bus):
    assert re.search(r"the signal 'approval' since .* UTC until .* UTC", waiting("process", "list").out)
    words = ["process", "signal", "p1", "approval", "--data", '{"yes": true}', "--signal-id", "s1"]
    answer = waiting(*words, "--operator", "ann")
    assert (answer.code, answer.out) == (0, "sent: signal approval to process p1 of domain processes\n")
    until(lambda: bus.get_process("processes", "p1/delivery") is not None)
    assert waiting(*words, "--json").document == {
        "domain": "processes", "process_id": "p1", "name": "approval", "signal_id": "s1", "created": False,
    }  # fmt: skip
    until(lambda: "its sleep" in str(bus.get_process("processes", "p1/delivery").waits_for))
    shown = waiting("process", "show", "p1").out
    assert "waits for" in shown
    assert "the end of the nested process 'p1/delivery'" in re.sub(r"\s+", " ", shown)
    assert re.search(r"approval +s1 .* ann +approval +\{.yes.: ?true\}", shown), shown
    inner = waiting("process", "show", "p1/delivery").out
    assert re.search(r"nested in +processes p1 \(step 2\)", inner), inner
    assert re.search(r"sleep .*until 20", inner), inner


def test_signals_that_cannot_be_sent(waiting, bus):
    missing = waiting("process", "signal", "nobody", "approval")
    assert (missing.code, "nobody" in missing.err) == (ExitCode.NOT_FOUND, True)
    assert waiting("process", "signal", "p1", "approval", "--data", "{").code == ExitCode.USAGE
    assert waiting("process", "signal", "p1", "x", "--signal-id", "s").code == 0
    other = waiting("process", "signal", "p1", "y", "--signal-id", "s")
    assert other.code == ExitCode.REFUSED
    assert "signal_id 's' was already sent" in other.err
    bus.cancel_process("processes", "p1")
    ends(bus, "p1", "CANCELED")
    refused = waiting("process", "signal", "p1", "approval")
    assert (refused.code, "it is CANCELED" in refused.err) == (ExitCode.REFUSED, True)
