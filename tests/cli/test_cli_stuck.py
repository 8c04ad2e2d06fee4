"""`stuck` and `show --autopsy`: what had to be stopped and what it hung in, whatever the autopsy looks like."""

from __future__ import annotations

import json
import re

import pytest

from commandbus.cli import autopsy
from commandbus.cli.exit_codes import ExitCode
from commandbus.flow.commands.claim import claim
from commandbus.flow.commands.settle import settle
from commandbus.model.outcome import Failure, Judgement, Verdict, judge
from commandbus.model.retry import RetryPolicy
from commandbus.worker.execution.attempt import Attempt

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
                'File "/opt/commandbus/worker/execution/slots.py", line 80, in _serve\n    run()',
                USERS,
                'File "/venv/lib/python3.11/site-packages/psycopg/cursor.py", line 97, in execute\n    wait()',
            ],
        },
        {"title": "a thread it left \x1b[31mbehind", "frames": ['File "<string>", line 1, in spin']},
    ],
    "session": {
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


OUR_READER = 'File "/srv/commandbus/worker/isolation/child_main.py", line 285 in _read'
DUMP = """Fatal Python error: Segmentation fault

Thread 0x00007f94fabff6c0 (most recent call first):
  File "/srv/commandbus/worker/isolation/child_main.py", line 285 in _read
  ...

Current thread 0x00007f94ff1c9b80 (most recent call first):
  File "/usr/lib/python3.11/ctypes/__init__.py", line 519 in string_at
  File "/srv/app/ship.py", line 12 in ship

Extension modules: psycopg_binary.pq (total: 1)
Traceback (most recent call last):
  File "/srv/app/ship.py", line 99, in printed
"""
# As an attempt in a process of its own leaves it: faulthandler's frames, our own reader's thread first.
ISOLATED = {
    "taken_at": 1_767_225_600.5,
    "stacks": [
        {
            "title": "thread 0x7f94fabff6c0",
            "frames": ['File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap', OUR_READER],
        },
        {"title": "thread 0x7f94fabff6c1", "frames": ['File "/srv/app/metrics.py", line 7 in count']},
        {
            "title": "thread 0x7f94ff1c9b80 (current)",
            "frames": [
                'File "/srv/commandbus/worker/isolation/child_main.py", line 219 in _run_sync',
                'File "/srv/app/ship.py", line 12 in ship',
                'File "/usr/lib/python3.11/ctypes/__init__.py", line 519 in string_at',
            ],
        },
    ],
    "process": {"signal": "SIGSEGV", "exit_code": None, "dump": DUMP},
}
AWAITING = [
    *ISOLATED["stacks"][:2],
    {"title": "thread 0x1 (current)", "frames": ['File "/usr/lib/python3.11/selectors.py", line 468 in select']},
]


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


@pytest.fixture
def uncharged(stuck, bus):
    """A bystander, and those that gave in to a shutdown, to an operator, and not even to an operator."""

    def attempt(command_id):
        bus.send("orders", "ship", command_id=command_id)
        row = bus.run(claim(domain="orders", worker="w1", n=1, lease_seconds=60, cursor=None)).ready[0]
        attempt = Attempt("orders", row, None, 0.0)
        attempt.started = 1.0
        return attempt

    def failure(rung, text, found=None):
        return Failure("X", "X", text, rung=rung, autopsy=None if found is None else json.dumps(found))

    bystander = failure(
        "crash", "the worker process died of SIGSEGV; this attempt did not cause it: not charged", FULL
    )
    shutdown = failure("shutdown", "the worker stops")
    canceled = Judgement(Verdict.CANCELED, failure("cancel", "asked to stop by ann"))
    deaf = Judgement(Verdict.CANCELED, failure("stuck", "did not respond", FULL))
    settlements = [
        attempt("bystander").waive(bystander), attempt("shutdown").waive(shutdown),
        attempt("canceled").fail(canceled), attempt("deaf").fail(deaf),
    ]  # fmt: skip
    for settlement in settlements:
        assert bus.run(settle("orders", "w1", [settlement])) == {}
    return stuck


def test_the_table(stuck):
    head, second, first = stuck("stuck").out.splitlines()
    assert head.split() == [
        "WHEN",
        "DOMAIN",
        "TYPE",
        "COMMAND",
        "ID",
        "ATTEMPT",
        "NUMBER",
        "RUNG",
        "AFTER",
        "WORKER",
        "WHAT",
    ]
    assert re.search(
        r"orders +ship +a +1 +stuck +40\.1s +w1 +ship\.py:12 in ship; its database session waits for Lock ", first
    )
    assert first.endswith("Lock transactionid, blocked by pid 815 (psql), pid 816; SIGSEGV")
    assert re.search(r"orders +bill +b +1 +deadline +w1 +did not respond\\x1b\[2J$", second)


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


def test_those_that_were_not_charged_are_told_on_demand(uncharged):
    def found(*words):
        return [item["command_id"] for item in uncharged("stuck", *words, "--json").document]

    assert found() == ["deaf", "b", "a"], "one that did not heed its operator was stuck, whoever asked"
    assert found("--all") == ["deaf", "canceled", "shutdown", "bystander", "b", "a"]
    what = {
        line.split()[4]: line.split("w1 ", 1)[1].strip()
        for line in uncharged("stuck", "--all").out.splitlines()[1:]
    }
    assert what["bystander"] == "the worker process died of SIGSEGV; this attempt did not cause it: not charged"
    assert what["shutdown"] == "not charged: the worker stops"
    assert what["canceled"] == "canceled: asked to stop by ann"
    assert what["deaf"].startswith("canceled: ship.py:12 in ship; ")
    assert what["a"].startswith("ship.py:12 in ship; ")


@pytest.mark.parametrize(
    "words", [["stuck"], ["stuck", "--all"], ["commands"], ["tsq", "list"], ["tsq", "count"], ["rejected"]]
)
def test_nothing_in_a_domain_is_not_the_same_as_no_such_domain(orders, words):
    answer = orders(*words, "--domain", "nope")
    assert (answer.code, answer.out) == (ExitCode.NOT_FOUND, "")
    assert "unknown domain 'nope'" in answer.err
    assert orders(*words, "--domain", "orders").code == ExitCode.OK


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
        "  stack of a thread it left \\x1b[31mbehind",
        "  database session 4711, active, in a transaction for 41.2s, waiting for Lock transactionid",
        "    query: UPDATE stock",
        "              SET n = n - 1 \\x1b[2J",
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
    assert "autopsy" not in stuck("show", "b").out
    assert stuck("show", "b", "--autopsy").out.endswith("\nno autopsy\n")
    assert "no autopsy" not in stuck("show", "a", "--autopsy").out
    assert "\norders b, attempt number 1: no autopsy\n" in stuck("stuck", "--autopsy").out
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
        ({"session": {"wait_event_type": "Client", "wait_event": "ClientRead"}}, ""),
        (
            {"session": {"wait_event_type": "Timeout", "wait_event": "PgSleep"}},
            "its database session waits for Timeout PgSleep",
        ),
        ({"session": {"blocked_by": [{"pid": 5}]}}, "its database session waits, blocked by pid 5"),
        ({"process": {"exit_code": 1}}, "exit code 1"),
        ({"process": {"exit_code": 0}}, "exit code 0"),
        (
            {"stacks": [{"frames": [USERS, OUR_READER.replace("worker/isolation/child_main", "bus/sync")]}]},
            "ship.py:12 in ship",
        ),
        (
            {"stacks": [{"frames": [USERS, OUR_READER.replace("worker/isolation/child_main", "testing/hang")]}]},
            "ship.py:12 in ship",
        ),
        ({"stacks": [{"title": "thread 0x1", "frames": [OUR_READER]}, {"frames": [USERS]}]}, "ship.py:12 in ship"),
        ({"stacks": [{"frames": [OUR_READER]}], "process": {"signal": "SIGKILL"}}, "SIGKILL"),
        (ISOLATED, "ship.py:12 in ship; SIGSEGV"),
        (ISOLATED | {"stacks": AWAITING}, "selectors.py:468 in select; SIGSEGV"),
        ({}, ""),
    ],
)
def test_the_headline(found, what):
    assert autopsy.headline(found) == what


def test_a_dump_does_not_tell_the_stacks_again():
    told = list(autopsy.lines(ISOLATED))
    assert told[-5:] == [
        "process: SIGSEGV",
        "  Fatal Python error: Segmentation fault",
        "  Extension modules: psycopg_binary.pq (total: 1)",
        "  Traceback (most recent call last):",
        '    File "/srv/app/ship.py", line 99, in printed',
    ]
    assert sum('ship.py", line 12' in line for line in told) == 1
    alone = list(autopsy.lines(ISOLATED | {"stacks": []}))
    assert '    File "/srv/app/ship.py", line 12 in ship' in alone, (
        "a dump that nobody could read is told as it is"
    )


def test_the_autopsy_of_a_dead_worker():
    found = {"worker": "the worker process froze\x1b", "cpu_seconds": 4.25, "left_out": "too long\x1b"}
    assert list(autopsy.lines(found)) == [
        "the worker process froze\\x1b",
        "CPU time of its thread meanwhile: 4.2s",
        "left out: too long\\x1b",
    ]


@pytest.mark.parametrize(
    "found",
    [
        None, [], "text", 5, {}, {"stacks": 5}, {"stacks": [5, None, {"frames": "x"}, {"frames": [None, {}, 5]}]},
        {"session": []}, {"session": {"blocked_by": {"pid": 1}}}, {"session": {"blocked_by": [None, 5, {}]}},
        {"session": {"xact_seconds": "long", "query": 5}}, {"process": "gone"}, {"process": {"signal": {}}},
        {"worker": 5}, {"worker": ["\x1b"], "cpu_seconds": "x"}, {"left_out": {}}, {"cpu_seconds": float("nan")},
        {"stacks": [{"title": 5}, {"title": None, "frames": ["x"]}], "process": {"signal": 1, "dump": [1]}},
        {"taken_at": "now"}, {"taken_at": 1e300}, {"thread": "t"}, {"thread": {}}, {"process": {"signal": 9}},
        {"thread": {"name": "x\x1by"}}, {"process": {"signal": "S", "dump": None}}, {"session": {"pid": "\x1b"}},
    ],
)  # fmt: skip
def test_any_shape_is_printable(found):
    text = "\n".join([autopsy.headline(found), *autopsy.lines(found)])
    assert text.replace("\n", "").isprintable()


def test_by_frame(stuck, orders):
    found = stuck("stuck", "--by-frame", "--json").document
    assert sum(group["count"] for group in found) == len(stuck("stuck", "--json").document)
    assert "nobody saw" in stuck("stuck", "--by-frame").out
    assert stuck("stuck", "--by-frame", "--domain", "nowhere").code == ExitCode.NOT_FOUND
    assert stuck("stuck", "--by-frame", "--type", "never").out == "no attempt had to be stopped\n"
