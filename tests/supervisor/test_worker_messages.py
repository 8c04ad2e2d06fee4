"""What a worker says to its supervisor: whatever bytes come, they are messages or nonsense, and nothing else."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commandbus.cli.exit_codes import ExitCode, code_for, sentence_for
from commandbus.supervisor.start_message import LONGEST_TEXT
from commandbus.supervisor.worker_messages import (
    BURST_MESSAGES,
    LONGEST_HELLO,
    LONGEST_LINE,
    MESSAGES_A_SECOND,
    ControlReader,
    Doing,
    Failed,
    Hello,
    NonsenseError,
    Said,
    StateMessage,
    plain,
)
from commandbus.worker.stop_report import StopReport
from support.running import examples

PID = 4711
RULE = {
    "max_attempts": 3,
    "backoff_schedule": [1, 2],
    "jitter": 0.1,
    "on_timeout": "retry",
    "isolation": "process",
}
HELLO = {
    "say": "hello",
    "id": f"host-{PID}-0a1b2c3d",
    "domains": ["orders"],
    "policies": {"": RULE, "orders": {"charge": RULE}},
}
REPORT = {
    "say": "report", "is_clean": True, "reason": "SIGTERM", "settled": 7, "given_back": 1, "abandoned": 0,
    "unwritten": 0,
}  # fmt: skip


def line(document: Any) -> bytes:
    return json.dumps(document).encode() + b"\n"


def reader() -> ControlReader:
    return ControlReader(PID, 0.0)


def test_messages_come_whole_however_they_were_cut() -> None:
    text = line({"say": "doing", "doing": "importing app"}) + line(HELLO) + line(REPORT)
    for size in (1, 7, 100, len(text)):
        told, found = reader(), []
        for at in range(0, len(text), size):
            found += told.take(text[at : at + size], 0.0)
        doing, hello, report = found
        assert doing == Doing("importing app")
        assert isinstance(hello, Hello)
        assert (hello.id, hello.domains) == (HELLO["id"], ["orders"])
        assert hello.rule("orders", "charge").isolation == "process"
        assert report == StopReport("SIGTERM", 7, 1, 0, 0)


def test_words_of_a_newer_worker_are_passed_over() -> None:
    assert reader().take(line({"say": "temperature", "value": 5}), 0.0) == []


def test_a_failure_keeps_its_lines_and_shows_its_odd_characters() -> None:
    message = "bad\nsettings \x1b[31m\ud800" + "x" * 20_000
    (failed,) = reader().take(line({"say": "failed", "module": "m", "kind": "K", "message": message}), 0.0)
    assert isinstance(failed, Failed)
    assert failed.message.startswith("bad\nsettings \\x1b[31m\\ud800x")
    assert len(failed.message) < LONGEST_TEXT + 100
    failed.message.encode()
    assert isinstance(failed.rebuilt(), RuntimeError)


@pytest.mark.parametrize(
    ("module", "kind", "code"),
    [
        ("psycopg.errors", "InsufficientPrivilege", ExitCode.REFUSED),
        ("psycopg", "OperationalError", ExitCode.DATABASE),
        ("commandbus.errors", "UnknownDomainError", ExitCode.NOT_FOUND),
        ("commandbus.errors", "MissingPrivilegeError", ExitCode.REFUSED),
        ("app", "OperationalError", ExitCode.BUG),
    ],
)
def test_a_failure_is_rebuilt_as_an_error_that_has_a_sentence_and_an_exit_code(
    module: str, kind: str, code: ExitCode
) -> None:
    error = Failed(module, kind, "no such thing").rebuilt()
    assert "no such thing" in sentence_for(error)
    assert code_for(error) is code


@pytest.mark.parametrize(
    "change",
    [
        {"id": "host-1-0a1b2c3d"}, {"id": 5}, {"id": ""}, {"id": f"x\n-{PID}-{'0' * 80}"},
        {"id": f"host-{PID}-\u200b"},
        {"domains": "orders"}, {"domains": [5]}, {"domains": ["Orders; DROP"]}, {"domains": ["a"] * 2000},
        {"policies": {}}, {"policies": []}, {"policies": {"": 5}}, {"policies": {"": RULE, "orders": [1]}},
        {"policies": {"": RULE | {"max_attempts": 10**400}}}, {"policies": {"": RULE | {"max_attempts": "3"}}},
        {"policies": {"": RULE | {"backoff_schedule": [math.nan]}}}, {"policies": {"": RULE | {"jitter": None}}},
        {"policies": {"": RULE | {"isolation": ["x"]}}}, {"policies": {"": RULE | {"on_timeout": 5}}},
    ],
)  # fmt: skip
def test_a_hello_that_cannot_be_true_is_nonsense(change: dict[str, Any]) -> None:
    with pytest.raises(NonsenseError, match="wrote nonsense into its control socket"):
        reader().take(line(HELLO | change), 0.0)


@pytest.mark.parametrize("change", [{"settled": -1}, {"settled": 1.5}, {"settled": 10**30}, {"reason": None}])
def test_a_report_that_cannot_be_true_is_nonsense(change: dict[str, Any]) -> None:
    with pytest.raises(NonsenseError, match="nonsense"):
        reader().take(line(REPORT | change), 0.0)


def test_nobody_says_twice_who_it_is() -> None:
    with pytest.raises(NonsenseError, match="introduced itself twice"):
        reader().take(line(HELLO) * 2, 0.0)


def test_a_line_has_a_longest_length_which_is_shorter_after_the_hello() -> None:
    told = reader()
    told.take(b"x" * (LONGEST_LINE + 1), 0.0)
    with pytest.raises(NonsenseError, match=f"more than {LONGEST_HELLO} bytes"):
        told.take(b"x" * LONGEST_HELLO, 0.0)
    told = reader()
    told.take(line(HELLO), 0.0)
    with pytest.raises(NonsenseError, match=f"more than {LONGEST_LINE} bytes"):
        told.take(b"x" * (LONGEST_LINE + 1), 0.0)


def test_a_worker_may_say_so_much_a_second() -> None:
    told, word = reader(), line({"say": "state", "state": "DRAINING"})
    assert told.take(word * BURST_MESSAGES, 0.0) == [StateMessage("DRAINING")] * BURST_MESSAGES
    assert len(told.take(word * MESSAGES_A_SECOND, 1.0)) == MESSAGES_A_SECOND
    with pytest.raises(NonsenseError, match="messages a second"):
        told.take(word * 2, 1.01)


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
DOCUMENTS = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
)
WORDS = st.sampled_from(["doing", "hello", "state", "report", "failed", "?"]) | DOCUMENTS
FIELDS = ["id", "domains", "policies", "reason", "settled", "module", "kind", "message", "state", "doing"]
MESSAGES = st.builds(
    lambda base, word, more: base | {"say": word} | more,
    st.sampled_from([{}, HELLO, REPORT]),
    WORDS,
    st.dictionaries(st.sampled_from(FIELDS), DOCUMENTS, max_size=6),
).map(line)
PIECES = st.lists(st.binary(max_size=200) | MESSAGES | DOCUMENTS.map(line), max_size=8)


@settings(max_examples=examples(300, thorough=5000), deadline=None)
@given(pieces=PIECES)
def test_whatever_comes_is_a_message_or_nonsense(pieces: list[bytes]) -> None:
    told = reader()
    for piece in pieces:
        messages, nonsense = heard(told, piece)
        for message in messages:
            assert isinstance(message, Doing | Hello | StateMessage | StopReport | Failed)
            repr(message).encode()
            if isinstance(message, Failed):
                assert isinstance(message.rebuilt(), Exception)
        assert len(nonsense) < 500
        assert nonsense.isprintable()
        if nonsense:
            return


def heard(told: ControlReader, piece: bytes) -> tuple[list[Said], str]:
    try:
        return told.take(piece, 0.0), ""
    except NonsenseError as nonsense:
        return [], str(nonsense)


@settings(max_examples=examples(100, thorough=2000), deadline=None)
@given(text=st.text())
def test_plain_text_can_be_stored_and_shown(text: str) -> None:
    shown = plain(text)
    shown.encode()
    assert all(char.isprintable() or char == "\n" for char in shown)
