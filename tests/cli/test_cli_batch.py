"""Batches on the command line: created from files, watched in a terminal and in a pipe, looked at and operated."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest
from cli_harness import SOURCES, Program, Terminal, run

from commandbus import BusinessRuleException, CommandStatus, HandlerRegistry, PermanentCommandError, Worker
from commandbus.cli import batch_progress as watching
from commandbus.cli.exit_codes import ExitCode
from support.waiting import until
from support.workers import quick_settings

EVIL = "b\x9b31m\u202e\u2028q"


def lines(*items):
    return "".join(json.dumps(item) + "\n" for item in items)


def commands(*ids, **more):
    return lines(*({"command_type": "ship", "command_id": name, **more} for name in ids))


@pytest.fixture
def make(orders):
    """Create a batch of commands with these ids."""

    def make(batch_id, *ids, words=(), **more):
        text = commands(*ids, **more)
        answer = orders("batch", "create", "orders", "--batch-id", batch_id, "--from", "-", *words, stdin=text)
        assert (answer.code, answer.err) == (0, "")
        return answer

    return make


class Shop:
    """A worker that does as told: by command_id it fails for good, needs a person, or waits for a limit client."""

    def __init__(self, database):
        self.fails = set()
        self.troubles = set()
        self.held = {}
        handlers = HandlerRegistry()
        handlers.register("orders", "ship", self.ship)
        handlers.register("orders", "tell", lambda command, ctx: None)
        self.worker = Worker(handlers, settings=quick_settings(database))

    def ship(self, command, ctx):
        if (go_on := self.held.get(command.command_id)) is not None:
            while not go_on.wait(0.02):
                ctx.raise_if_canceled()
        if command.command_id in self.fails:
            raise BusinessRuleException("sold\n\x1bout", code="SOLD_OUT")
        if command.command_id in self.troubles:
            raise PermanentCommandError("no such \x1bstreet", code="BAD_ADDRESS")


@pytest.fixture
def shop(orders, database):
    return Shop(database)


@contextmanager
def at_work(shop):
    with shop.worker:
        yield shop


def ends(bus, batch_id, status="COMPLETED"):
    return until(lambda: (found := bus.get_batch("orders", batch_id)).status == status and found)


# --- create, add, close ----------------------------------------------------------------------------------------


def test_create_from_a_file(orders, bus, tmp_path):
    file = tmp_path / "many.jsonl"
    file.write_text(
        lines(
            {"command_type": "ship", "data": {"n": 1}, "command_id": "a", "headers": {"k": "v"}},
            {"command_type": "bill", "command_id": "b", "delay": "5m"},
        )
        + "\r\n\n"
    )
    words = ["batch", "create", "orders", "--from", str(file), "--batch-id", "b1", "--name", "night run"]
    words += ["--data", '{"by": "me"}', "--on-complete", "orders/tell/all"]
    answer = orders(*words)
    assert (answer.code, answer.out) == (0, "created: orders b1 (2 commands)\n")
    assert orders(*words).out == "was there already: orders b1 (2 commands)\n"
    receipt = orders(*words, "--json").document
    assert (receipt["batch_id"], receipt["total"], receipt["created"]) == ("b1", 2, False)
    record = bus.get_batch("orders", "b1")
    assert (record.name, record.custom_data, record.total) == ("night run", {"by": "me"}, 2)
    assert record.on_complete["command_type"] == "tell/all"
    assert bus.get_command("orders", "a").data == {"n": 1}
    assert re.search(r"^batch +b1$", orders("show", "a").out, re.MULTILINE)
    assert orders("show", "a", "--json").document["batch_id"] == "b1"
    other = orders(*words, "--name", "other")
    assert other.code == ExitCode.REFUSED
    assert "batch_id 'b1' already exists" in other.err


def test_an_open_batch_is_added_to_and_closed(orders, bus):
    answer = orders("batch", "create", "orders", "--open", "--batch-id", "b1")
    assert (answer.code, answer.out) == (0, "created: orders b1 (0 commands, open)\n")
    added = orders("batch", "add", "b1", "--from", "-", stdin=commands("a", "b"))
    assert (added.code, added.out) == (0, "added 2 commands to batch b1 of domain orders\n")
    more = orders("batch", "add", "b1", "--from", "-", "--json", stdin=commands("c")).document
    assert more == {"domain": "orders", "batch_id": "b1", "added": 1}
    assert re.search(r"^status +PENDING, open$", orders("batch", "show", "b1").out, re.MULTILINE)
    assert orders("batch", "close", "b1").out == "batch b1 of domain orders is closed\n"
    assert orders("batch", "close", "b1").out == "batch b1 of domain orders was already closed\n"
    assert orders("batch", "close", "b1", "--json").document["changed"] is False
    late = orders("batch", "add", "b1", "--from", "-", stdin=commands("d"))
    assert late.code == ExitCode.REFUSED
    assert "it is closed" in late.err
    assert bus.get_batch("orders", "b1").total == 3


def test_an_empty_file_is_an_empty_batch(orders, bus):
    answer = orders("batch", "create", "orders", "--batch-id", "b1", "--from", "-", stdin="\n \n")
    assert (answer.code, answer.out) == (0, "created: orders b1 (0 commands)\n")
    watched = orders("batch", "watch", "b1", "--wait", "10s")
    assert watched.code == 0
    assert "is COMPLETED" in watched.out


@pytest.mark.parametrize(
    "bad",
    [
        "{",
        "[]",
        "5",
        "null",
        '"text"',
        '{"data": 1}',
        '{"command_type": ""}',
        '{"command_type": "ship", "colour": "red"}',
        '{"command_type": "ship", "data": NaN}',
        '{"command_type": "ship", "command_id": "a\\nb"}',
        '{"command_type": "ship", "command_id": "fine-2"}',
        '{"command_type": "ship", "delay": "soon"}',
        '{"command_type": "ship", "at": "2099-01-01"}',
        '{"command_type": "ship"} {"command_type": "ship"}',
        '{"command_type": "ship", "data": ' + "9" * 5000 + "}",
        "[" * 100_000,
        '{"command_type": "ship", "data": "' + "x" * 3_000_000 + '"}',
        "\ufeff{}",
    ],
    ids=lambda text: text[:40],
)
@pytest.mark.parametrize("verb", [["create", "orders", "--batch-id", "b2"], ["add", "b1"]], ids=["create", "add"])
def test_a_bad_line_is_named_and_nothing_is_sent(orders, bus, verb, bad):
    assert orders("batch", "create", "orders", "--open", "--batch-id", "b1").code == 0
    text = commands(*(f"fine-{number}" for number in range(20))) + "\n" + bad + "\n" + commands("after")
    answer = orders("batch", *verb, "--from", "-", stdin=text)
    assert (answer.code, answer.out) == (ExitCode.USAGE, "")
    assert answer.err.startswith("commandbus: error: -, line 22: ")
    assert answer.err.endswith("nothing was sent\n")
    assert len(answer.err) < 500
    assert bus.query_commands(domain="orders").items == []
    assert [item.batch_id for item in bus.query_batches().items] == ["b1"]


def test_a_command_that_exists_is_named_by_its_line(orders, bus):
    bus.send("orders", "ship", command_id="known")
    answer = orders("batch", "create", "orders", "--from", "-", stdin=commands("a", "b", "known"))
    assert answer.code == ExitCode.REFUSED
    assert answer.err.startswith(
        "commandbus: error: -, line 3: command_id 'known' already exists in domain 'orders'"
    )
    assert bus.get_command("orders", "a") is None
    assert bus.query_batches().items == []


@pytest.mark.parametrize("content", [None, "folder", b"\xff\xfe\x00\x80", b"\x7fELF\x02\x01\x01\x00"])
def test_an_unreadable_file_is_a_usage_error(orders, bus, tmp_path, content):
    file = tmp_path / "evil\n\x1b[31mname"
    if content == "folder":
        file.mkdir()
    elif content is not None:
        file.write_bytes(content)
    answer = orders("batch", "create", "orders", "--from", str(file))
    assert (answer.code, answer.out) == (ExitCode.USAGE, "")
    assert answer.err.count("\n") == 1
    assert "\x1b" not in answer.err
    assert bus.query_batches().items == []


def test_a_closed_standard_input_is_told(orders, database):
    command = f"{sys.executable} -m commandbus.cli --database {database!r} batch create orders --from - <&-"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COMMANDBUS_")}
    done = subprocess.run(
        ["sh", "-c", command],
        capture_output=True,
        text=True,
        env=environment | {"PYTHONPATH": SOURCES},
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (ExitCode.USAGE, "")
    assert "standard input is closed" in done.stderr


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["create"], ExitCode.USAGE),
        (["create", "orders"], ExitCode.USAGE),
        (["create", "Orders!", "--open"], ExitCode.USAGE),
        (["create", "nowhere", "--open"], ExitCode.NOT_FOUND),
        (["create", "orders", "--open", "--batch-id", ""], ExitCode.USAGE),
        (["create", "orders", "--open", "--batch-id", "a\n\x1b[31m"], ExitCode.USAGE),
        (["create", "orders", "--open", "--name", "a\nb"], ExitCode.USAGE),
        (["create", "orders", "--open", "--data", "{bad"], ExitCode.USAGE),
        (["create", "orders", "--open", "--on-complete", "tell"], ExitCode.USAGE),
        (["create", "orders", "--open", "--on-complete", "/tell"], ExitCode.USAGE),
        (["create", "orders", "--open", "--on-complete", "orders/"], ExitCode.USAGE),
        (["create", "orders", "--open", "--on-complete", "nowhere/tell"], ExitCode.NOT_FOUND),
        (["create", "orders", "--open", "--reply-to", "No Queue"], ExitCode.USAGE),
        (["create", "orders", "--open", "--reply-to", "nobody"], ExitCode.USAGE),
        (["create", "orders", "--open", "--reply-to", "q", "--on-complete", "orders/tell"], ExitCode.USAGE),
        (["add", "b1"], ExitCode.USAGE),
        (["add", "b1", "--from", "/nowhere/at.all"], ExitCode.USAGE),
        (["add", "b1", "--from", "-"], ExitCode.NOT_FOUND),
        (["list", "--status", "DONE"], ExitCode.USAGE),
        (["list", "--limit", "0"], ExitCode.USAGE),
        (["list", "--domain", "nope"], ExitCode.NOT_FOUND),
        (["watch", "b1", "--wait", "soon"], ExitCode.USAGE),
        (["watch", "b1", "--wait", "-1s"], ExitCode.USAGE),
    ],
)
def test_what_makes_no_sense_is_refused(orders, bus, words, code):
    answer = orders("batch", *words)
    assert (answer.code, answer.out) == (code, "")
    assert answer.err.startswith("commandbus: error: ")
    assert answer.err.count("\n") == 1
    assert "\x1b" not in answer.err
    assert bus.query_batches().items == []


# --- list and show ---------------------------------------------------------------------------------------------


def test_list_and_its_pages(orders, bus, make):
    bus.create_domain("other")
    for number in range(3):
        make(f"b{number}", f"c{number}")
    orders("batch", "create", "other", "--open", "--batch-id", "o", "--name", "na\u202eme")

    def found(*words):
        return [item["batch_id"] for item in orders("batch", "list", *words, "--json").document]

    assert found() == ["o", "b2", "b1", "b0"]
    assert found("--domain", "orders") == ["b2", "b1", "b0"]
    assert found("--status", "pending", "--limit", "2") == ["o", "b2"]
    assert found("--status", "COMPLETED") == []
    page = orders("batch", "list", "--limit", "2").out
    assert re.search(r"^ *# +DOMAIN +BATCH ID +STATUS +DONE ", page)
    assert "na\\u202eme" in page
    assert re.search(r" other +o +PENDING, open +0% +0 +0 +0 +0 +0 +0\.0/s +\? ", page)
    (more,) = re.findall(r"^more: add --cursor (\d+)$", page, re.MULTILINE)
    assert found("--cursor", more) == ["b1", "b0"]
    assert orders("batch", "list", "--status", "CANCELED").out == "no batches\n"
    document = orders("batch", "list", "--limit", "1", "--json").document[0]
    assert (document["progress"], document["remaining"], document["eta_seconds"]) == (0.0, 0, None)


def test_show_tells_who_failed_and_how_to_see_the_rest(orders, bus, make, shop):
    shop.fails = {f"f{number}" for number in range(4)}
    shop.troubles = {"t1"}
    make("b 1", *sorted(shop.fails), "t1", "ok", words=["--on-complete", "orders/tell", "--data", '{"n": 1}'])
    with at_work(shop):
        until(lambda: (found := bus.get_batch("orders", "b 1")).finished == 5 and found.in_tsq == 1)
    text = orders("batch", "show", "b 1", "--limit", "3").out
    assert "\x1b" not in text
    fields, rest = text.split("\n\n")
    shown = dict(re.split(r"  +", line, maxsplit=1) for line in fields.splitlines())
    assert (shown["batch"], shown["status"], shown["progress"]) == ("orders b 1", "IN_PROGRESS", "83% (5 of 6)")
    assert [shown[name] for name in ("completed", "failed", "canceled", "in the TSQ", "running", "waiting")] == [
        "1", "4", "0", "1", "0", "0"
    ]  # fmt: skip
    assert (shown["on complete"], shown["data"]) == ("send tell to orders", '{"n": 1}')
    assert (shown["ETA"], shown["holds"]) == ("?", "commands")
    title, head, *members, more = rest.splitlines()
    assert (title, head.split()) == ("failed, or in need of a person", ["ID", "TYPE", "STATUS", "ERROR"])
    assert re.search(r"^t1 +ship +IN_TROUBLESHOOTING_QUEUE +no such \\x1bstreet$", members[0])
    assert len(members) == 4
    assert re.search(r"^f3 +ship +FAILED +sold\\n\\x1bout$", members[1])
    assert more == "more: `commandbus commands --domain orders --batch 'b 1' --status FAILED`"
    everything = orders("batch", "show", "b 1", "--json").document
    assert (everything["failed"], everything["in_tsq"], everything["progress"]) == (4, 1, 5 / 6)
    assert [item["id"] for item in everything["troubled"]] == ["t1", "f3", "f2", "f1", "f0"]
    assert "more:" not in orders("batch", "show", "b 1").out
    assert orders("batch", "show", "b 1", "--limit", "0").out.count("more: ") == 2
    members = orders("commands", "--batch", "b 1", "--status", "FAILED", "--json").document
    assert [item["command_id"] for item in members] == ["f3", "f2", "f1", "f0"]
    assert orders("commands", "--batch", "nope").code == ExitCode.NOT_FOUND


def test_a_finished_one_says_how_long_it_took(orders, bus, make, shop):
    make("b1", "a")
    bus.create_queue("answers")
    orders("batch", "create", "orders", "--open", "--batch-id", "b2", "--reply-to", "answers")
    with at_work(shop):
        ends(bus, "b1")
    text = orders("batch", "show", "b1").out
    assert re.search(r"^finished +\d{4}-.* \(after [\d.]+m?s\)$", text, re.MULTILINE)
    assert not re.search(r"^(rate|ETA|running|waiting|cancel|name|retry of|data) ", text, re.MULTILINE)
    assert re.search(r"^on complete +reply to answers$", orders("batch", "show", "b2").out, re.MULTILINE)


def test_a_batch_of_processes(orders, bus, shop):
    bus.create_domain("processes")
    bus.create_process_batch("order", [{"process_id": "p1"}, {"process_id": "p2"}], batch_id="b1")
    assert re.search(r"^holds +processes$", orders("batch", "show", "b1").out, re.MULTILINE)
    found = orders("process", "list", "--batch", "b1", "--json").document
    assert [item["process_id"] for item in found] == ["p2", "p1"]
    assert re.search(r"^batch +b1$", orders("process", "show", "p1").out, re.MULTILINE)
    refused = orders("batch", "add", "b1", "--from", "-", stdin=commands("a"))
    assert refused.code == ExitCode.REFUSED
    assert "holds processes" in refused.err
    asked = orders("batch", "cancel", "b1")
    assert (asked.code, asked.out) == (0, "batch b1 of domain processes: asked 2 processes to stop\n")


def test_an_id_alone_is_enough_if_it_is_unique(orders, bus, make):
    bus.create_domain("other")
    make("b1", "a")
    orders("batch", "create", "other", "--open", "--batch-id", "b1")
    orders("batch", "create", "other", "--open", "--batch-id", "b2")
    assert orders("batch", "show", "b2").code == 0
    for words in (["show"], ["watch"], ["close"], ["cancel"], ["retry-failed"], ["add", "--from", "-"]):
        answer = orders("batch", words[0], "b1", *words[1:])
        assert (answer.code, answer.out) == (ExitCode.REFUSED, "")
        assert "2 domains have a batch 'b1': orders, other; choose one with --domain" in answer.err
        missing = orders("batch", words[0], "nobody", *words[1:])
        assert missing.code == ExitCode.NOT_FOUND
        assert "no batch 'nobody' in any domain" in missing.err
        assert orders("batch", words[0], "nobody", *words[1:], "--domain", "other").code == ExitCode.NOT_FOUND
        assert orders("batch", words[0], "a\n\x1b[31m", *words[1:]).code == ExitCode.NOT_FOUND
    assert orders("batch", "close", "b1", "--domain", "other").code == 0
    unknown = orders("batch", "show", "b1", "--domain", "nope")
    assert unknown.code == ExitCode.NOT_FOUND
    assert "unknown domain 'nope'" in unknown.err


# --- cancel and retry ------------------------------------------------------------------------------------------


def test_cancel_says_what_ended_and_what_was_asked_to_stop(orders, bus, make, shop):
    shop.held = {"runs": threading.Event()}
    make("b1", "runs")
    orders("batch", "create", "orders", "--batch-id", "b2", "--from", "-", stdin=commands("x", "y", delay="1h"))
    answer = orders("batch", "cancel", "b2", "--reason", "wrong\nfile", "--operator", "ann")
    assert (answer.code, answer.out) == (0, "canceled 2 of batch b2 of domain orders\n")
    text = orders("batch", "show", "b2").out
    assert re.search(r"^status +CANCELED$", text, re.MULTILINE)
    assert re.search(r"^cancel +asked for by ann at \d{4}-.*: wrong\\nfile$", text, re.MULTILINE)
    assert orders("batch", "cancel", "b2").code == ExitCode.REFUSED
    with at_work(shop):
        until(lambda: bus.get_command("orders", "runs").status is CommandStatus.IN_PROGRESS)
        asked = orders("batch", "cancel", "b1")
        assert asked.out == "canceled 0 of batch b1 of domain orders; asked 1 that runs to stop\n"
        ends(bus, "b1", "CANCELED")
    watched = orders("batch", "watch", "b1")
    assert watched.code == ExitCode.NO
    assert "is CANCELED" in watched.out
    assert "0 of 1 completed, 1 canceled" in watched.out


def test_retry_failed_says_what_it_did(orders, bus, make, shop):
    shop.fails = {"f1", "f2"}
    shop.troubles = {"t1"}
    make("b1", "f1", "f2", "t1", "ok")
    with at_work(shop):
        until(lambda: (found := bus.get_batch("orders", "b1")).finished == 3 and found.in_tsq == 1)
        shop.troubles = set()
        answer = orders("batch", "retry-failed", "b1", "--on-complete", "orders/tell")
        ends(bus, "b1", "COMPLETED_WITH_FAILURES")
    said = re.fullmatch(
        r"batch b1 of domain orders: retried 1 that needed a person; "
        r"sent 2 failed ones again, in batch (\S+)\n",
        answer.out,
    )
    assert said is not None, answer.out
    text = orders("batch", "show", said[1]).out
    assert re.search(r"^retry of +b1$", text, re.MULTILINE)
    assert re.search(r"^on complete +send tell to orders$", text, re.MULTILINE)
    again = orders("batch", "retry-failed", "b1")
    assert again.out == "batch b1 of domain orders: 2 failed ones were sent again before\n"
    report = orders("batch", "retry-failed", "b1", "--json").document
    assert (report["retried"], report["sent_again"], report["sent_before"], report["new_batch_id"]) == (
        0,
        0,
        2,
        None,
    )
    make("b2", "new")
    assert orders("batch", "retry-failed", "b2").out == "batch b2 of domain orders: nothing to retry\n"
    wrong = orders("batch", "retry-failed", "b1", "--on-complete", "tell")
    assert wrong.code == ExitCode.USAGE
    assert orders("batch", "retry-failed", "b1", "--name", "a\nb").code == ExitCode.USAGE


def test_the_batch_of_a_retry_has_a_name(orders, bus, make, shop):
    shop.fails = {"f1", "f2"}
    make("b1", "f1")
    make("b2", "f2")
    with at_work(shop):
        for name in ("b1", "b2"):
            ends(bus, name, "COMPLETED_WITH_FAILURES")
    named = orders("batch", "retry-failed", "b1", "--name", "second try", "--json").document
    assert bus.get_batch("orders", named["new_batch_id"]).name == "second try"
    unnamed = orders("batch", "retry-failed", "b2", "--json").document
    assert bus.get_batch("orders", unnamed["new_batch_id"]).name == "retry of b2"


# --- watch -----------------------------------------------------------------------------------------------------


def test_watch_in_a_pipe_prints_a_line_per_change(orders, bus, make, shop, database):
    gates = {name: threading.Event() for name in ("a", "b", "c")}
    shop.held = gates
    make("b1", *gates)
    with at_work(shop), Program("batch", "watch", "b1", "--database", database) as program:
        first = program.read_until("0/3")
        assert re.search(r"^(PENDING|IN_PROGRESS)  0%  0/3  0\.0/s  ETA \?$", first, re.MULTILINE)
        gates["a"].set()
        assert re.search(r"^IN_PROGRESS  33%  1/3  [\d.]+/s  ETA \S+$", program.read_until("1/3"), re.MULTILINE)
        gates["b"].set()
        assert "66%" in program.read_until("2/3")
        gates["c"].set()
        rest = program.end()
    *_, last, ending = rest.out.splitlines()
    assert (rest.code, rest.err) == (0, "")
    assert last == "COMPLETED  100%  3/3"
    assert re.fullmatch(r"batch b1 of domain orders is COMPLETED after [\d.]+m?s: 3 of 3 completed", ending)


def test_watch_with_json_and_what_failed(orders, bus, make, shop):
    shop.fails = {"f"}
    make("b1", "f", "ok")
    with at_work(shop):
        answer = orders("batch", "watch", "b1", "--json", "--wait", "20s")
    assert answer.code == ExitCode.NO
    documents = [json.loads(line) for line in answer.out.splitlines()]
    assert documents[-1]["status"] == "COMPLETED_WITH_FAILURES"
    assert (documents[-1]["completed"], documents[-1]["failed"], documents[-1]["progress"]) == (1, 1, 1.0)
    assert "1 of 2 completed, 1 failed" in orders("batch", "watch", "b1").out


def test_watch_ends_when_its_time_is_up(orders, bus, make):
    make("b1", "a")
    answer = orders("batch", "watch", "b1", "--wait", "100ms")
    assert answer.code == ExitCode.NO
    assert answer.out == "PENDING  0%  0/1  0.0/s  ETA ?\n"
    assert "batch 'b1' of domain 'orders' was not finished within 100ms" in answer.err
    assert bus.get_command("orders", "a").status is CommandStatus.PENDING


def test_watch_ends_when_its_reader_goes_away(orders, bus, make, shop, database):
    shop.held = {"a": threading.Event()}
    make("b1", "a", "b")
    with Program("batch", "watch", "b1", "--database", database) as program:
        assert program.process.stdout.readline().startswith("PENDING")
        program.process.stdout.close()
        with at_work(shop):
            assert program.process.wait(20) == ExitCode.BROKEN_PIPE
            assert program.process.stderr.read() == ""
            shop.held["a"].set()


def test_watch_on_a_terminal_redraws_a_bar(orders, bus, make, shop, database):
    gates = {f"c{number}": threading.Event() for number in range(4)}
    shop.held = gates
    shop.fails = {"c0"}
    make("b1", *gates)
    with at_work(shop), Terminal("batch", "watch", "b1", "--database", database) as terminal:
        terminal.read_until(r"\r\[-{40}\]    0%  0/4  0\.0/s  ETA \?")
        gates["c0"].set()
        terminal.read_until(r"\r\[#{9,10}-{29,31}\]   25%  1/4  [\d.]+/s  ETA \S+  1 failed")
        assert "\n" not in terminal.seen
        for go_on in gates.values():
            go_on.set()
        terminal.read_until("is COMPLETED_WITH_FAILURES")
        assert terminal.end() == ExitCode.NO
    drawn, ending = terminal.seen.rstrip().split("\r\n")
    frames = drawn.split("\r")[1:]
    assert frames[-1].rstrip() == f"[{'#' * 40}]  100%  4/4  1 failed"
    assert max(map(len, frames)) < 80
    assert "\x1b" not in terminal.seen
    assert len(frames[-1]) >= len(frames[-2].rstrip()), "what stood there before is overwritten"
    assert re.fullmatch(
        r"batch b1 of domain orders is COMPLETED_WITH_FAILURES after .*: 3 of 4 completed, 1 failed", ending
    )


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_the_terminal_in_order(orders, bus, make, database, number, code):
    make("b1", "a")
    with Terminal("batch", "watch", "b1", "--database", database) as terminal:
        terminal.read_until("0/1")
        if number == signal.SIGINT:
            os.write(terminal.master, b"\x03")
        else:
            terminal.process.send_signal(number)
        assert terminal.end() == code
    assert terminal.seen.endswith("\n")
    assert terminal.seen.count("\n") == 1
    assert "Traceback" not in terminal.seen
    assert bus.get_command("orders", "a").status is CommandStatus.PENDING


def test_a_narrow_terminal_has_no_room_for_a_bar(orders, bus, make, database):
    make("b1", *(f"c{number}" for number in range(12)))
    with Terminal("batch", "watch", "b1", "--wait", "300ms", "--database", database, columns=20) as terminal:
        terminal.read_until("was not finished")
        assert terminal.end() == ExitCode.NO
    frames = terminal.seen.split("\r\n")[0].split("\r")[1:]
    assert {frame.rstrip() for frame in frames} == {"  0%  0/12  0.0/s"}


def test_a_line_fits_whatever_the_room(orders, bus, make):
    make("b1", "a", "b")
    record = bus.get_batch("orders", "b1")
    for room in range(200):
        line = watching.bar_line(record, room)
        assert 0 < len(line) <= max(room, 1)
        assert line.count("[") == line.count("]")


def test_nothing_that_it_prints_can_write_to_the_terminal(orders, bus, make):
    verbs = ("show", "close", "retry-failed", "cancel", "watch")
    texts = [make(EVIL, "a").out, orders("batch", "list").out]
    texts += [orders("batch", verb, EVIL).out for verb in verbs]
    texts += [orders("batch", "cancel", EVIL).err, orders("batch", "add", EVIL, "--from", "-").err]
    texts += [orders("show", "a").out]
    for text in texts:
        assert "b\\x9b31m\\u202e\\u2028q" in text or repr(EVIL) in text, text
        assert not set("\x9b\u202e\u2028\x1b") & set(text)


def test_a_large_file_is_one_batch(orders, bus, tmp_path):
    file = tmp_path / "large.jsonl"
    file.write_text("".join(f'{{"command_type": "ship", "data": {number}}}\n' for number in range(20_000)))
    answer = orders("batch", "create", "orders", "--from", str(file), "--json").document
    assert answer["total"] == 20_000
    assert bus.get_batch("orders", answer["batch_id"]).total == 20_000


def test_a_database_without_the_schema_is_told(empty_database):
    for words in (["list"], ["show", "b1"], ["create", "orders", "--open"]):
        answer = run("--database", empty_database, "batch", *words)
        assert answer.code == ExitCode.DATABASE
        assert "commandbus migrate" in answer.err
