"""`stuck` and `show --autopsy`: what had to be stopped and what it hung in, whatever the autopsy looks like."""

from __future__ import annotations

import json
import re

import pytest

from commandbus.cli import autopsy
from commandbus.cli.exits import ExitCode
from commandbus.flow.claim import claim
from commandbus.flow.settle import settle
from commandbus.model.outcome import Failure, judge
from commandbus.model.retry import RetryPolicy
from commandbus.runtime.attempt import Attempt

POLICY = RetryPolicy(max_attempts=3, backoff_schedule=[0], jitter=0)
USERS = 'File "/srv/app/ship.py", line 12, in ship\n    conn.execute(query)'
FULL = {
    "taken_at": 1_767_225_600.5,
    "thread": {"name": "test-slot-3", "ident": 1234},
    "stacks": [
        {
            "title": "slot thread test-slot-3",
            "frames": [
                'File "/usr/lib/python3.11/threading.py", line 1002, in _bootstrap\n    self._bootstrap_inner()',
                'File "/opt/commandbus/runtime/slots.py", line 80, in _serve\n    run()',
                USERS,
                'File "/venv/lib/python3.11/site-packages/psycopg/cursor.py", line 97, in execute\n    wait()',
            ],
        },
        {"title": "a thread it left \x1b[31mbehind", "frames": ['File "<string>", line 1, in spin']},
    ],
    "backend": {
        "pid": 4711,
        "state": "active",
        "query": "UPDATE stock\n   SET n = n - 1 \x1b[2J",
        "wait_event_type": "Lock",
        "wait_event": "transactionid",
        "xact_seconds": 41.25,
        "blocked_by": [{"pid": 815, "query": "LOCK stock", "application_name": "psql"}, {"pid": 816}],
    },
    "process": {"signal": "SIGSEGV", "exit_code": None, "dump": "Fatal Python error\n\tThread 0x1"},
}


@pytest.fixture
def stuck(orders, bus):
    """Two commands that were stopped: `a` with a full autopsy, `b` with none."""

    def stop(command_id, command_type, rung, found, duration_ms):
        bus.send("orders", command_type, command_id=command_id)
        row = bus.run(claim(domain="orders", worker="w1", n=1, lease_seconds=60, cursor=None)).ready[0]
        attempt = Attempt("orders", row, None, 0.0)
        attempt.started = 1.0
        failure = Failure(
            "ExecutionStuck",
            "EXECUTION_STUCK",
            "did not respond\x1b[2J",
            rung=rung,
            autopsy=None if found is None else json.dumps(found),
            duration_ms=duration_ms,
        )
        fate = judge(failure, charge=1, policy=POLICY, max_attempts=1)
        assert bus.run(settle("orders", "w1", [attempt.fail(fate)])) == {}

    stop("a", "ship", "stuck", FULL, 40_123)
    stop("b", "bill", "deadline", None, None)
    return orders


def test_the_table(stuck):
    head, second, first = stuck("stuck").out.splitlines()
    assert head.split() == [
        "WHEN",
        "DOMAIN",
        "TYPE",
        "COMMAND",
        "ID",
        "ATTEMPT",
        "RUNG",
        "AFTER",
        "WORKER",
        "WHAT",
    ]
    assert re.search(
        r"orders +ship +a +1 +stuck +40\.1s +w1 +ship\.py:12 in ship; its backend waits for Lock ", first
    )
    assert first.endswith("Lock transactionid, blocked by pid 815 (psql), pid 816; SIGSEGV")
    assert re.search(r"orders +bill +b +1 +deadline +w1 +did not respond\\u001b\[2J$", second)


def test_filters(stuck):
    def found(*words):
        return [item["command_id"] for item in stuck("stuck", *words, "--json").document]

    assert found() == ["b", "a"]
    assert found("--limit", "1") == ["b"]
    assert found("--type", "ship", "--domain", "orders") == ["a"]
    assert found("--since", "1h") == ["b", "a"]
    assert stuck("stuck", "--since", "2099-01-01T00:00:00Z").out == "no attempt had to be stopped\n"
    assert stuck("stuck", "--limit", "0").code == ExitCode.USAGE
    assert stuck("stuck", "--domain", "No").code == ExitCode.USAGE


def test_json_has_the_autopsy_on_demand(stuck):
    _, short = stuck("stuck", "--json").document
    assert "autopsy" not in short
    assert (short["rung"], short["duration_ms"], short["worker"]) == ("stuck", 40_123, "w1")
    assert short["what"].startswith("ship.py:12 in ship")
    _, full = stuck("stuck", "--json", "--autopsy").document
    assert full["autopsy"] == FULL


@pytest.mark.parametrize("words", [["stuck", "--autopsy"], ["show", "a", "--autopsy"]])
def test_the_whole_autopsy(stuck, words):
    text = stuck(*words).out
    assert "\x1b" not in text
    for line in (
        "  stack of slot thread test-slot-3",
        '    File "/srv/app/ship.py", line 12, in ship',
        "        conn.execute(query)",
        "  stack of a thread it left \\u001b[31mbehind",
        "  backend 4711, active, in a transaction for 41.2s, waiting for Lock transactionid",
        "    query: UPDATE stock",
        "              SET n = n - 1 \\u001b[2J",
        "    blocked by pid 815 (psql)",
        "      query: LOCK stock",
        "    blocked by pid 816",
        "  process: SIGSEGV",
        "    Fatal Python error",
    ):
        assert line in text.splitlines(), text


def test_show_tells_of_the_rung_and_the_time(stuck):
    text = stuck("show", "a").out
    assert "rung=stuck, after=40.1s" in text
    assert "--autopsy shows what it hung in" in text
    assert "--autopsy" not in stuck("show", "b").out
    assert "stack of" not in text
    (attempt,) = stuck("show", "a", "--json").document["failed_attempts"]
    assert (attempt["rung"], attempt["duration_ms"]) == ("stuck", 40_123)
    assert "autopsy" not in attempt
    (attempt,) = stuck("show", "a", "--json", "--autopsy").document["failed_attempts"]
    assert attempt["autopsy"] == FULL


# --- autopsies of any shape ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "what"),
    [
        ({"stacks": [{"frames": [USERS]}]}, "ship.py:12 in ship"),
        ({"stacks": [{"frames": []}, {"frames": [USERS]}]}, "ship.py:12 in ship"),
        (
            {"stacks": [{"frames": ['File "/usr/lib/python3.11/socket.py", line 7, in recv']}]},
            "socket.py:7 in recv",
        ),
        ({"backend": {"wait_event_type": "Client", "wait_event": "ClientRead"}}, ""),
        (
            {"backend": {"wait_event_type": "Timeout", "wait_event": "PgSleep"}},
            "its backend waits for Timeout PgSleep",
        ),
        ({"backend": {"blocked_by": [{"pid": 5}]}}, "its backend waits, blocked by pid 5"),
        ({"process": {"exit_code": 1}}, "exit code 1"),
        ({"process": {"exit_code": 0}}, "exit code 0"),
        ({}, ""),
    ],
)
def test_the_headline(found, what):
    assert autopsy.headline(found) == what


@pytest.mark.parametrize(
    "found",
    [
        None, [], "text", 5, {}, {"stacks": 5}, {"stacks": [5, None, {"frames": "x"}, {"frames": [None, {}, 5]}]},
        {"backend": []}, {"backend": {"blocked_by": {"pid": 1}}}, {"backend": {"blocked_by": [None, 5, {}]}},
        {"backend": {"xact_seconds": "long", "query": 5}}, {"process": "gone"}, {"process": {"signal": {}}},
        {"taken_at": "now"}, {"taken_at": 1e300}, {"thread": "t"}, {"thread": {}}, {"process": {"signal": 9}},
        {"thread": {"name": "x\x1by"}}, {"process": {"signal": "S", "dump": None}}, {"backend": {"pid": "\x1b"}},
    ],
)  # fmt: skip
def test_any_shape_is_printable(found):
    text = "\n".join([autopsy.headline(found), *autopsy.lines(found)])
    assert text.replace("\n", "").isprintable()
