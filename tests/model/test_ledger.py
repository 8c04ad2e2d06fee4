"""ledger: the intervals of any history add up to the whole, and each second is where it belongs."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from commandbus.model.ledger import (
    CommandHistory,
    CurrentAttempt,
    Ledger,
    LedgerState,
    PastAttempt,
    Span,
    ledger_of,
)
from commandbus.model.ledger_bar import bar, describe, legend
from commandbus.model.outcome import Verdict

START = datetime(2026, 1, 1, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


moments = st.integers(-100, 1000).map(at)
maybe = st.none() | moments
spans = st.lists(
    st.builds(
        Span,
        st.sampled_from(["connection", "grace", "of a newer release"]),
        st.integers(-5, 10**12),
        st.none() | st.integers(-5, 10**15),
    ),
    max_size=4,
)
past = st.builds(
    PastAttempt,
    number=st.integers(0, 9),
    verdict=st.sampled_from([*Verdict, "OF_A_NEWER_RELEASE"]),
    finished_at=moments,
    started_at=maybe,
    retry_at=maybe,
    error_code=st.sampled_from([None, "PAUSED", "KEY_LIMIT", "RATE_LIMITED"]),
    limit=st.sampled_from([None, "docai"]),
    spans=spans,
)
current = st.none() | st.builds(
    CurrentAttempt, number=st.integers(1, 9), started_at=moments, ended_at=maybe, spans=spans
)
histories = st.builds(
    CommandHistory,
    sent_at=moments,
    until=moments,
    is_open=st.booleans(),
    due_at=maybe,
    attempts=st.lists(past, max_size=6),
    retries=st.lists(moments, max_size=3),
    current=current,
    line=st.sampled_from([None, "tenants"]),
    is_cut=st.booleans(),
)


@given(histories)
def test_the_intervals_of_any_history_add_up_to_the_whole_without_gap_or_overlap(history: CommandHistory) -> None:
    ledger = ledger_of(history)
    assert ledger.sent_at == history.sent_at
    assert ledger.until == max(history.sent_at, history.until)
    edge = ledger.sent_at
    for item in ledger.intervals:
        assert item.start == edge
        assert item.end > item.start
        assert item.seconds == (item.end - item.start).total_seconds()
        edge = item.end
    assert edge == ledger.until
    assert abs(sum(ledger.totals.values()) - ledger.seconds) < 1e-6
    for attempt in ledger.attempts:
        assert ledger.sent_at <= attempt.start <= attempt.end <= ledger.until
    assert len(bar(ledger, 60)) == (60 if ledger.intervals else 0)
    assert len(legend(ledger)) == len(ledger.totals)


def states(ledger: Ledger) -> list[tuple[str, float]]:
    return [(item.label, item.seconds) for item in ledger.intervals]


def history(until: float, **more: Any) -> CommandHistory:
    return CommandHistory(START, at(until), is_open=False, **more)


def test_a_life_with_everything_in_it() -> None:
    ledger = ledger_of(
        history(
            300,
            due_at=at(10),
            attempts=[
                PastAttempt(1, "PARKED", at(20), error_code="PAUSED", retry_at=at(40)),
                PastAttempt(2, "PARKED", at(50), at(45), error_code="RATE_LIMITED", limit="docai"),
                PastAttempt(
                    3,
                    "RETRY",
                    at(90),
                    at(60),
                    at(100),
                    spans=[Span("connection", 2000, 7000), Span("grace", 25000, None)],
                ),
                PastAttempt(4, "LOST", at(140), at(110)),
                PastAttempt(5, "EXHAUSTED", at(160), at(150)),
            ],
            retries=[at(200)],
            current=CurrentAttempt(6, at(290), "w", at(300)),
        )
    )
    assert states(ledger) == [
        ("delayed by its sender", 10), ("in the queue", 10), ("parked for pause", 20), ("in the queue", 5),
        ("running", 5), ("parked for limit docai", 10), ("running", 2), ("waiting for a connection", 5),
        ("running", 18), ("asked to stop, in its grace", 5), ("backing off", 10), ("in the queue", 10),
        ("with a worker that vanished", 30), ("in the queue", 10), ("running", 10),
        ("with a person (troubleshooting)", 40), ("in the queue", 90), ("running", 10),
    ]  # fmt: skip
    assert [(item.number, item.verdict, item.start, item.end) for item in ledger.attempts] == [
        (2, "PARKED", at(45), at(50)),
        (3, "RETRY", at(60), at(90)),
        (4, "LOST", at(110), at(140)),
        (5, "EXHAUSTED", at(150), at(160)),
        (6, "COMPLETED", at(290), at(300)),
    ]
    drawn = bar(ledger, 30)
    assert drawn == "d.pp#pc#gb.xxx.#@@@@.........#"
    assert legend(ledger)[0].text == ". in the queue: 2m5s (42%)"
    assert describe(ledger.intervals[7]) == "waiting for a connection (attempt 3), 5s"


def test_what_really_happened_ends_a_plan() -> None:
    """Canceled in its back-off, and before its time had come."""
    canceled = ledger_of(history(30, attempts=[PastAttempt(1, "RETRY", at(10), at(5), at(500))]))
    assert states(canceled) == [("in the queue", 5), ("running", 5), ("backing off", 20)]
    assert states(ledger_of(history(30, due_at=at(400)))) == [("delayed by its sender", 30)]


def test_a_wrong_clock_of_a_worker_moves_nothing_else() -> None:
    early = ledger_of(history(30, current=CurrentAttempt(1, at(-50), None, at(30))))
    assert states(early) == [("running", 30)]
    late = ledger_of(history(30, attempts=[PastAttempt(1, "RETRY", at(10), at(99), at(20))]))
    assert states(late) == [("in the queue", 10), ("backing off", 10), ("in the queue", 10)]


def test_of_two_waits_that_begin_together_the_one_that_has_not_ended_is_the_last() -> None:
    waits = [Span("connection", 0, None), Span("connection", 0, 0)]
    both = ledger_of(history(30, current=CurrentAttempt(1, at(10), None, None, waits)))
    assert states(both) == [("in the queue", 10), ("waiting for a connection", 20)]


def test_a_command_in_the_line_of_its_key_is_parked() -> None:
    ledger = ledger_of(CommandHistory(START, at(9), is_open=True, line="tenants"))
    assert states(ledger) == [("parked for its turn at key limit tenants", 9)]
    assert ledger.intervals[0].state is LedgerState.PARKED


def test_a_history_that_was_cut_says_so() -> None:
    ledger = ledger_of(history(30, is_cut=True, attempts=[PastAttempt(7, "RETRY", at(20), at(10), at(30))]))
    assert states(ledger)[0] == ("before the attempts that are listed", 10)
