"""Who did it? Every kind of death, by table; and dumps as faulthandler writes them."""

from __future__ import annotations

import faulthandler
import json
import signal
import tempfile
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commandbus.model.crash_attribution import (
    CRASHES,
    Cause,
    Death,
    Dump,
    Role,
    Running,
    decide,
    examine,
    is_whole_dump,
    parse_dump,
    signal_name,
)

# Threads by ident and native id; "x" and "y" run on the event loop's thread.
A = Running("a", 0x7000_0001, 11)
B = Running("b", 0x7000_0002, 12)
X = Running("x", 0x7000_0003, 13)
Y = Running("y", 0x7000_0003, 13)
SUSPECT = Running("s", 0x7000_0004, 14, is_suspect=True, is_isolated=True)
ISOLATED = Running("i", 0x7000_0005, 15, is_isolated=True)
GONE = frozenset({(0x7000_0009, 19)})


def crash(ident: int | None = None, number: int = signal.SIGSEGV) -> Death:
    return Death(Cause.SIGNALED, signal=number, dump=Dump(ident), gone=GONE)


def frozen(cpu: dict[int, float] | None = None, **more: Any) -> Death:
    return Death(Cause.FROZEN, silent_seconds=2.0, cpu_seconds=cpu or {}, gone=GONE, **more)


killed = Death(Cause.SIGNALED, signal=signal.SIGKILL)
exited = Death(Cause.EXITED, exit_code=1)
memory = Death(Cause.OVER_MEMORY, "it used 900 MB")
stopped = Death(Cause.STOPPED, "SIGTERM")


@pytest.mark.parametrize(
    ("death", "running", "roles"),
    [
        # a crash
        (crash(A.ident), [A, B], "a:culprit b:bystander"),
        (crash(A.ident), [A], "a:culprit"),
        (crash(), [A], "a:culprit"),
        (crash(), [A, B], "a:suspect b:suspect"),
        (crash(X.ident), [A, X], "a:bystander x:culprit"),
        (crash(X.ident), [A, X, Y], "a:bystander x:suspect y:suspect"),
        (crash(0x7000_0009), [A, B], "a:bystander b:bystander"),  # a thread that was replaced as stuck
        (crash(0x7000_0009), [A], "a:bystander"),
        (crash(0x7000_0042), [A, B], "a:suspect b:suspect"),  # a thread that nobody knows
        (crash(0x7000_0042), [A], "a:culprit"),
        (crash(A.ident, signal.SIGABRT), [A, B], "a:culprit b:bystander"),
        (crash(A.ident, signal.SIGBUS), [A, B], "a:culprit b:bystander"),
        # from outside
        (killed, [A], "a:suspect"),
        (killed, [A, B], "a:suspect b:suspect"),
        (killed, [SUSPECT], "s:culprit"),
        (killed, [A, SUSPECT], "a:suspect s:bystander"),
        (crash(A.ident, signal.SIGTERM), [A], "a:suspect"),
        (memory, [A], "a:suspect"),
        (memory, [A, B], "a:suspect b:suspect"),
        (memory, [SUSPECT], "s:culprit"),
        (frozen({11: 2.0}, was_stopped=True), [A], "a:suspect"),
        # from inside
        (exited, [A], "a:culprit"),
        (exited, [A, B], "a:suspect b:suspect"),
        (exited, [A, X, Y], "a:suspect x:suspect y:suspect"),
        (exited, [A, ISOLATED], "a:culprit i:bystander"),
        (exited, [ISOLATED, SUSPECT], "i:suspect s:suspect"),
        (exited, [SUSPECT], "s:culprit"),
        (exited, [], ""),
        # frozen
        (frozen({11: 1.4, 12: 0.01}), [A, B], "a:culprit b:bystander"),
        (frozen({11: 0.7, 12: 0.7}), [A, B], "a:suspect b:suspect"),
        (frozen({11: 0.01}), [A, B], "a:suspect b:suspect"),
        (frozen(), [A, B], "a:suspect b:suspect"),
        (frozen(), [A], "a:culprit"),
        (frozen({13: 1.4}), [A, X], "a:bystander x:culprit"),
        (frozen({13: 1.4}), [A, X, Y], "a:bystander x:suspect y:suspect"),
        (frozen({19: 1.4}), [A], "a:bystander"),
        (frozen({77: 1.4}), [A, B], "a:suspect b:suspect"),
        # the supervisor's own doing
        (stopped, [A, SUSPECT], "a:bystander s:bystander"),
    ],
)  # fmt: skip
def test_who_did_it(death: Death, running: list[Running[str]], roles: str) -> None:
    found = decide(death, running)
    assert " ".join(f"{key}:{role}" for key, role in sorted(found.items())) == roles


everybody = st.lists(st.sampled_from([A, B, X, Y, SUSPECT, ISOLATED]), unique=True)
deaths = st.sampled_from([
    crash(), crash(A.ident), crash(X.ident), killed, exited, memory, stopped, frozen(), frozen({11: 1.0}),
    frozen({13: 1.0}), frozen({11: 1.0}, was_stopped=True),
])  # fmt: skip


@given(deaths, everybody)
def test_everybody_has_a_role_and_at_most_one_is_charged(death: Death, running: list[Running[str]]) -> None:
    found = examine(death, running)
    assert found.keys() == {attempt.key for attempt in running}
    assert sum(finding.role is Role.CULPRIT for finding in found.values()) <= 1
    if any(finding.role is Role.CULPRIT for finding in found.values()):
        assert all(finding.role is not Role.SUSPECT for finding in found.values())
    for finding in found.values():
        json.loads(finding.failure.autopsy or "{}")


def test_what_is_written_down_about_a_frozen_worker() -> None:
    stuck = Running("a", A.ident, A.native_id, ran_for=2.0137)
    dump = Dump(None, {A.ident: ['File "t.py", line 2 in inner', 'File "t.py", line 9 in outer']})
    found = examine(frozen({11: 1.42}, dump=dump), [stuck, B])
    failure = found["a"].failure
    assert (failure.error_type, failure.error_code, failure.rung) == ("ExecutionStuck", "EXECUTION_STUCK", "kill")
    assert failure.duration_ms == 2014
    assert failure.error == (
        "the worker process froze: no heartbeat for 2.0 s, so it was killed; this attempt's thread used 1.4 s of "
        "CPU time meanwhile and let no other thread run"
    )
    autopsy = json.loads(failure.autopsy or "")
    assert autopsy["stacks"][0]["frames"][-1] == 'File "t.py", line 2 in inner'
    assert autopsy["cpu_seconds"] == 1.42
    other = found["b"].failure
    assert (other.error_type, other.error_code) == ("WorkerLost", "WORKER_LOST")
    assert "did not cause it: not charged" in other.error


@pytest.mark.parametrize(
    ("death", "said"),
    [
        (crash(A.ident), "the worker process died of SIGSEGV in this attempt's thread"),
        (exited, "the worker process ended with exit code 1; this attempt was the only one that ran"),
        (
            killed,
            "the worker process died of SIGKILL (sent by somebody, or by the kernel when memory runs out); this "
            "attempt, the only one that ran, may have caused it",
        ),
        (memory, "the worker process was killed: it used 900 MB;"),
        (stopped, "the worker process was stopped: SIGTERM; this attempt had not finished: not charged"),
    ],
)
def test_the_words(death: Death, said: str) -> None:
    assert examine(death, [A])["a"].failure.error.startswith(said)


def test_rungs() -> None:
    rungs = {death.cause: examine(death, [A])["a"].failure.rung for death in (exited, killed, memory, stopped)}
    assert rungs == {
        Cause.EXITED: "crash",
        Cause.SIGNALED: "crash",
        Cause.OVER_MEMORY: "kill",
        Cause.STOPPED: None,
    }


def test_signals_have_names_and_the_fatal_ones_are_known() -> None:
    assert (signal_name(11), signal_name(77), signal_name(None)) == ("SIGSEGV", "signal 77", "signal None")
    assert signal.SIGKILL not in CRASHES


# --- dumps ---------------------------------------------------------------------------------------------------

CRASH = """Fatal Python error: Segmentation fault

Thread 0x00007f2a3bfff640 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait
  File "/app/worker.py", line 12 in serve

Current thread 0x00007f2a40800640 (most recent call first):
  File "/usr/lib/python3.11/ctypes/__init__.py", line 519 in string_at
  File "/app/tasks.py", line 5 in segfault

Thread 0x00007f2a4105b640 (most recent call first):
  File "/usr/lib/python3.11/selectors.py", line 468 in select

Extension modules: psycopg_binary._psycopg (total: 1)
"""


def test_a_crash_as_it_is_written() -> None:
    dump = parse_dump(CRASH)
    assert dump.current == 0x7F2A40800640
    assert dump.stacks[0x7F2A40800640][1] == 'File "/app/tasks.py", line 5 in segfault'
    assert len(dump.stacks[0x7F2A3BFFF640]) == 2


def test_newer_pythons_name_the_threads() -> None:
    dump = parse_dump('Current thread 0x00007f00 [slot-1] (most recent call first):\n  File "a", line 1 in f\n')
    assert dump == Dump(0x7F00, {0x7F00: ['File "a", line 1 in f']})


def test_of_two_dumps_the_last_counts() -> None:
    assert parse_dump(CRASH + CRASH.replace("00007f2a40800640", "00007f2a40800999")).current == 0x7F2A40800999


def test_the_real_faulthandler_is_understood() -> None:
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        dump = parse_dump(file.read())
    assert dump.current == threading.get_ident()
    assert any("test_the_real_faulthandler_is_understood" in line for line in dump.stacks[threading.get_ident()])


@given(st.text())
def test_no_text_is_too_odd(text: str) -> None:
    """Whatever a program wrote before it crashed, the dump that follows is found."""
    assert isinstance(parse_dump(text), Dump)
    dump = parse_dump(f"{text}\n{CRASH}")
    assert dump.current == 0x7F2A40800640
    assert dump.stacks.items() >= parse_dump(CRASH).stacks.items()


def test_a_dump_is_whole_when_its_last_thread_is() -> None:
    last = b'  File "<frozen runpy>", line 198 in _run_module_as_main\n'
    other = b'Thread 0x00007f01 (most recent call first):\n  File "a", line 1 in f\n'
    first = b'\nCurrent thread 0x00007f00 (most recent call first):\n  File "b", line 2 in hang\n'
    text = other + first + last
    assert is_whole_dump(text)
    assert not any(is_whole_dump(text[:end]) for end in range(len(text)))
    assert is_whole_dump(text + b"what the program itself prints later")
    assert is_whole_dump(other + first + b"  ...\n"), "a deep stack is cut"
    assert not is_whole_dump(other + b"  ...\n" + first)
