"""send: one command, or a file of them, all or none; what makes no sense is refused before anything is sent."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta

import pytest

from commandbus.cli.exit_codes import ExitCode

TOMORROW = datetime.now(UTC) + timedelta(days=1)

# --- send ---------------------------------------------------------------------------------------------------


def test_send_with_a_priority(orders, bus):
    assert orders("send", "orders", "ship", "--id", "a", "--priority", "high").code == 0
    assert bus.get_command("orders", "a").priority == "high"
    assert re.search("^priority +high$", orders("show", "a").out, re.MULTILINE)
    refused = orders("send", "orders", "ship", "--priority", "urgent")
    assert refused.code == ExitCode.USAGE
    assert "'urgent' is not one of 'high', 'normal', 'low'" in refused.err


def test_send_and_its_receipt(orders, bus):
    options = [
        "--id",
        "a",
        "--correlation-id",
        "c",
        "--max-attempts",
        "5",
        "--timeout",
        "2m",
        "--header",
        "by=me",
        "--header",
        "eq=a=b",
    ]
    answer = orders("send", "orders", "ship", '{"n": 1}', *options)
    assert (answer.code, answer.out) == (0, "sent: orders a\n")
    record = bus.get_command("orders", "a")
    assert (record.data, record.correlation_id, record.max_attempts) == ({"n": 1}, "c", 5)
    assert record.headers == {"by": "me", "eq": "a=b"}
    assert record.timeout == 120
    assert re.search("^timeout +2m$", orders("show", "a").out, re.MULTILINE)
    refused = orders("send", "orders", "ship", "--timeout", "soon")
    assert refused.code == ExitCode.USAGE
    assert "Invalid value for '--timeout': 'soon' is not a duration; give seconds" in refused.err
    assert orders("send", "orders", "ship", "--timeout", "0", "--id", "b").code == ExitCode.OK
    assert bus.get_command("orders", "b").timeout == 0


def test_the_same_id_is_sent_once_and_other_content_is_refused(orders):
    for created in (True, False):
        receipt = orders("send", "orders", "ship", "1", "--id", "a", "--json").document
        assert (receipt["command_id"], receipt["created"]) == ("a", created)
    assert orders("send", "orders", "ship", "1", "--id", "a").out == "was there already: orders a\n"
    assert orders("send", "orders", "ship", "2", "--id", "a").code == ExitCode.REFUSED


def test_send_with_a_key(orders, bus):
    sent = orders("send", "orders", "ship", "1", "--unique", "k", "--json").document
    command_id = sent["command_id"]
    assert (sent["created"], sent["replaced"]) == (True, False)
    ignored = orders("send", "orders", "ship", "2", "--unique", "k")
    assert ignored.out == f"was there already: orders {command_id}\n"
    replacing = ["--unique", "k", "--unique-while", "waiting", "--on-conflict", "replace"]
    assert orders("send", "orders", "ship", "3", *replacing).out == f"replaced: orders {command_id}\n"
    assert bus.get_command("orders", command_id).data == 3
    refused = orders("send", "orders", "ship", "--unique", "k", "--unique-while", "1h", "--on-conflict", "raise")
    assert (refused.code, command_id in refused.err) == (ExitCode.REFUSED, True)
    debounced = ["--unique", "d", "--debounce", "5m", "--max-delay", "1h"]
    assert orders("send", "orders", "ship", *debounced, "--json").document["created"]
    assert orders("send", "orders", "ship", *debounced, "--json").document["replaced"]
    bad = orders("send", "orders", "ship", "--debounce", "5m")
    assert (bad.code, "needs unique" in bad.err) == (ExitCode.USAGE, True)
    bad = orders("send", "orders", "ship", "--unique", "k", "--unique-while", "soon")
    assert (bad.code, "'soon' is not a duration" in bad.err) == (ExitCode.USAGE, True)


def test_data_comes_from_a_file_or_the_standard_input(orders, bus, tmp_path):
    file = tmp_path / "data.json"
    file.write_text('{"from": "file"}')
    orders("send", "orders", "ship", "--data-file", str(file), "--id", "f")
    orders("send", "orders", "ship", "-", "--id", "s", stdin='{"from": "stdin"}')
    orders("send", "orders", "ship", "--id", "none")
    found = {name: bus.get_command("orders", name).data for name in ("f", "s", "none")}
    assert found == {"f": {"from": "file"}, "s": {"from": "stdin"}, "none": None}


def test_later(orders, bus):
    orders("send", "orders", "ship", "--id", "d", "--delay", "1h")
    orders("send", "orders", "ship", "--id", "t", "--at", TOMORROW.isoformat())
    assert bus.status("orders")[0].delayed == 2
    assert bus.get_command("orders", "t").visible_at == TOMORROW


@pytest.mark.parametrize(
    "words",
    [
        ["orders"],
        ["orders", "ship", "{bad"],
        ["orders", "ship", "hello"],
        ["orders", "ship", "NaN"],
        ["orders", "ship", '"a\\u0000b"'],
        ["orders", "ship", "1", "--data-file", "x"],
        ["orders", "ship", "--data-file", "/nowhere"],
        ["orders", "ship", "--delay", "soon"],
        ["orders", "ship", "--delay", "-5s"],
        ["orders", "ship", "--at", "2099-01-01T00:00:00"],
        ["orders", "ship", "--delay", "1s", "--at", "2099-01-01T00:00:00Z"],
        ["orders", "ship", "--header", "novalue"],
        ["orders", "ship", "--max-attempts", "0"],
        ["orders", "ship", "--reply-to", "Not A Queue"],
        ["Orders!", "ship"],
        ["orders", "ship", "--from", "x"],
    ],
)
def test_what_makes_no_sense_is_refused_and_nothing_is_sent(orders, bus, words):
    answer = orders("send", *words)
    assert answer.code == ExitCode.USAGE
    assert answer.err.startswith("commandbus: error: ")
    assert bus.query_commands(domain="orders").items == []


def test_an_unknown_domain_is_not_found(orders):
    assert orders("send", "nowhere", "ship").code == ExitCode.NOT_FOUND


# --- send --from --------------------------------------------------------------------------------------------


def lines(*items):
    return "".join(json.dumps(item) + "\n" for item in items)


def test_a_file_of_lines_is_sent(orders, bus, tmp_path):
    file = tmp_path / "many.jsonl"
    file.write_text(
        lines(
            {"command_type": "ship", "data": {"n": 1}, "command_id": "a", "headers": {"k": "v"}},
            {"command_type": "ship", "command_id": "b", "delay": "5m"},
            {"command_type": "bill", "command_id": "c", "at": TOMORROW.isoformat()},
        )
        + "\n\n"
    )
    assert orders("send", "orders", "--from", str(file)).out == "sent 3 commands to orders\n"
    assert orders("send", "orders", "--from", str(file)).out == "sent 0 commands to orders; 3 were there\n"
    one = lines({"command_type": "ship", "data": {"n": 1}, "command_id": "a", "headers": {"k": "v"}})
    assert orders("send", "orders", "--from", "-", stdin=one).out == "sent 0 commands to orders; 1 was there\n"
    assert {record.command_id for record in bus.query_commands(domain="orders").items} == {"a", "b", "c"}
    assert bus.status("orders")[0].delayed == 2
    receipts = orders("send", "orders", "--from", "-", "--json", stdin=lines({"command_type": "x"})).document
    assert [receipt["created"] for receipt in receipts] == [True]


@pytest.mark.parametrize(
    "bad",
    [
        "{oops\n",
        "[1]\n",
        lines({"data": 1}),
        lines({"command_type": ""}),
        lines({"command_type": "x", "surprise": 1}),
        lines({"command_type": "x", "delay": "soon"}),
        lines({"command_type": "x", "at": "yesterday"}),
        lines({"command_type": "x", "data": "a\u0000b"}),
        lines({"command_type": "x", "max_attempts": "3"}),
        lines({"command_type": "x", "timeout": "soon"}),
        lines({"command_type": "x", "data": "y" * 2_000_000}),
    ],
)
def test_a_bad_line_is_named_and_nothing_is_sent(orders, bus, bad):
    good = lines({"command_type": "x"})
    answer = orders("send", "orders", "--from", "-", stdin=good * 1500 + bad + good)
    assert answer.code == ExitCode.USAGE
    assert "line 1501" in answer.err
    assert bus.query_commands(domain="orders").items == []


def test_a_file_is_sent_whole_or_not_at_all(orders, bus):
    bus.send("orders", "ship", 1, command_id="taken")
    content = lines(*({"command_type": "x"} for _ in range(1500)), {"command_type": "ship", "command_id": "taken"})
    assert orders("send", "orders", "--from", "-", stdin=content).code == ExitCode.REFUSED
    assert len(bus.query_commands(domain="orders", limit=10).items) == 1


@pytest.mark.parametrize("content", [b"\xff\xfe", None])
def test_an_unreadable_file_is_a_usage_error(orders, tmp_path, content):
    file = tmp_path / "many.jsonl"
    if content is not None:
        file.write_bytes(content)
    assert orders("send", "orders", "--from", str(file)).code == ExitCode.USAGE


def test_key_limits(orders, bus):
    assert orders("keys", "list").out == "there are no key limits\n"
    assert orders("keys", "set", "orders", "tenant", "--concurrency", "3", "--json").document["concurrency"] == 3
    assert orders("send", "orders", "ship", "1", "--key-limit", "tenant", "--key", "17").code == ExitCode.OK
    assert orders("keys", "override", "orders", "tenant", "17", "--concurrency", "5", "--until", "2h").code == 0
    (line,) = orders("keys", "show", "orders", "tenant", "--json").document
    assert (line["key"], line["concurrency"], line["waiting"]) == ("17", 5, 1)
    assert "0 of 5" in orders("keys", "show", "orders", "tenant", "17").out
    assert "tenant" in orders("keys", "list", "orders").out
    refused = orders("keys", "delete", "orders", "tenant")
    assert (refused.code, "unfinished" in refused.err) == (ExitCode.REFUSED, True)
    assert orders("send", "orders", "ship", "--key", "17").code == ExitCode.USAGE


def test_show_says_the_unique_key(orders, bus):
    sent = bus.send("orders", "ship", unique="invoice-17", unique_while="waiting", on_conflict="replace")
    assert "invoice-17 (unique while it waits; another one replaces it)" in orders("show", sent.command_id).out
    assert orders("show", sent.command_id, "--json").document["unique"]["key"] == "invoice-17"
