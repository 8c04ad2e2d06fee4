"""The hierarchy of time limits: its defaults, its arithmetic, and what it refuses."""

from __future__ import annotations

import math
from dataclasses import asdict

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from commandbus.model.timeouts import (
    FROZEN_MARGIN,
    MONITOR_TICK,
    STUCK_MARGIN,
    Phase,
    TimeoutOrderError,
    Timeouts,
    earliest,
    to_milliseconds,
)

instants = st.floats(min_value=0, max_value=1e7)
spans = st.floats(min_value=0, max_value=1e5)
remainders = st.none() | st.floats(min_value=-1e4, max_value=1e6)


@st.composite
def hierarchies(draw: st.DrawFn) -> Timeouts:
    visibility = draw(st.floats(min_value=0.4, max_value=10_000))
    grace = draw(st.floats(min_value=0, max_value=visibility + STUCK_MARGIN, exclude_max=True))
    return Timeouts(
        visibility_timeout=visibility,
        cancel_grace=grace,
        statement_timeout=draw(st.floats(min_value=0.001, max_value=visibility, exclude_max=True)),
        pool_timeout=draw(st.floats(min_value=0.001, max_value=10_000)),
        task_timeout=draw(st.none() | st.just(0.0) | st.floats(min_value=0.001, max_value=10_000)),
        heartbeat_timeout=draw(st.floats(min_value=2.6, max_value=10_000)),
        shutdown_timeout=draw(st.floats(min_value=grace, max_value=20_000, exclude_min=True)),
    )


def test_the_defaults_are_those_of_the_design() -> None:
    assert asdict(Timeouts()) == {
        "statement_timeout": 25,
        "pool_timeout": 30,
        "visibility_timeout": 30,
        "task_timeout": None,
        "cancel_grace": 10,
        "heartbeat_timeout": 15,
        "shutdown_timeout": 30,
    }
    assert MONITOR_TICK == 0.25
    assert Timeouts().doubts() == ()


def test_the_defaults_work_out_as_in_the_design() -> None:
    limits = Timeouts()
    assert limits.deadline_seconds() == 25
    assert limits.stuck_seconds() == 35
    assert limits.renewal_interval == 10
    assert limits.lock_timeout == 20
    assert limits.drain_seconds == 18


def test_an_unset_task_timeout_is_the_default_deadline_and_0_is_none_at_all() -> None:
    assert Timeouts(task_timeout=None).deadline_seconds() == 25
    assert Timeouts(task_timeout=0).deadline_seconds() is None
    assert Timeouts(task_timeout=0).stuck_seconds() is None
    assert Timeouts(task_timeout=7).deadline_seconds() == 7
    assert Timeouts(task_timeout=7).stuck_seconds() == 17


def test_the_most_specific_task_timeout_decides() -> None:
    limits = Timeouts(task_timeout=60)
    assert limits.deadline_seconds(5, 7) == 5
    assert limits.deadline_seconds(None, 7) == 7
    assert limits.deadline_seconds(None, None) == 60
    assert limits.deadline_seconds(0, 7) is None
    assert limits.deadline_at(100.0, 5) == 105
    assert limits.deadline_at(100.0, 0) is None


@given(hierarchies())
def test_without_a_task_timeout_an_attempt_is_stuck_just_after_its_visibility(limits: Timeouts) -> None:
    assume(limits.task_timeout is None)
    assert limits.stuck_seconds() == pytest.approx(limits.visibility_timeout + STUCK_MARGIN)
    assert (limits.deadline_seconds() or 0) > 0


@given(hierarchies(), instants, instants)
def test_the_phases_follow_each_other_in_order(limits: Timeouts, one: float, other: float) -> None:
    order = [Phase.RUNNING, Phase.GRACE, Phase.STUCK]
    earlier, later = sorted((one, other))
    deadline_at = limits.deadline_at(10.0)
    phases = [limits.phase(now, deadline_at=deadline_at) for now in (earlier, later)]
    assert order.index(phases[0]) <= order.index(phases[1])
    if deadline_at is None:
        assert phases == [Phase.RUNNING, Phase.RUNNING]


def test_the_phase_changes_at_the_deadline_and_at_the_end_of_the_grace() -> None:
    limits = Timeouts()
    assert limits.phase(24.999, deadline_at=25.0) is Phase.RUNNING
    assert limits.phase(25.0, deadline_at=25.0) is Phase.GRACE
    assert limits.phase(34.999, deadline_at=25.0) is Phase.GRACE
    assert limits.phase(35.0, deadline_at=25.0) is Phase.STUCK
    assert limits.phase(1e9, deadline_at=None) is Phase.RUNNING


@given(hierarchies(), remainders)
def test_server_limits_never_exceed_what_remains_and_are_never_0(
    limits: Timeouts, remaining: float | None
) -> None:
    session = limits.session_limits(remaining)
    assert 1 <= session.lock_timeout_ms <= session.statement_timeout_ms <= limits.statement_timeout * 1000
    assert session.idle_in_transaction_session_timeout_ms == session.statement_timeout_ms
    if remaining is not None and remaining > 0.001:
        assert session.statement_timeout_ms <= remaining * 1000


def test_server_limits_are_whole_milliseconds() -> None:
    session = Timeouts().session_limits(None)
    assert (session.statement_timeout_ms, session.lock_timeout_ms) == (25_000, 20_000)
    assert Timeouts().session_limits(1.5).statement_timeout_ms == 1_500
    assert Timeouts().session_limits(-3.0).statement_timeout_ms == 1


@given(st.floats(min_value=-1e12, max_value=1e12))
def test_milliseconds_fit_the_server(seconds: float) -> None:
    assert 1 <= to_milliseconds(seconds) <= 2**31 - 1


@given(hierarchies(), remainders)
def test_the_wait_for_a_connection_is_clipped_to_the_attempt(limits: Timeouts, remaining: float | None) -> None:
    wait = limits.pool_wait(remaining)
    assert 0 < wait <= limits.pool_timeout
    if remaining is not None:
        assert wait <= max(remaining, 0.001)


@given(hierarchies())
def test_a_lease_is_renewed_well_before_it_ends(limits: Timeouts) -> None:
    assert limits.renewal_interval + MONITOR_TICK < limits.visibility_timeout + 1e-6


@given(hierarchies())
def test_a_lease_is_late_before_it_ends_and_after_the_second_renewal_was_due(limits: Timeouts) -> None:
    assert limits.renewal_interval < limits.late_seconds <= limits.visibility_timeout
    assert limits.late_seconds >= min(2 * limits.renewal_interval, limits.visibility_timeout) - 1e-9


@pytest.mark.parametrize(("lease", "grace", "late"), [(30, 10, 20), (60, 10, 50), (30, 20, 20), (1, 0.4, 5 / 6)])
def test_a_worker_that_is_cut_off_leaves_its_attempts_their_grace_within_the_lease(
    lease: float, grace: float, late: float
) -> None:
    limits = Timeouts(visibility_timeout=lease, cancel_grace=grace, statement_timeout=lease / 2)
    assert limits.late_seconds == pytest.approx(late)


@given(hierarchies(), instants, st.lists(instants, max_size=5))
def test_a_silent_worker_is_killed_at_its_first_stuck_attempt_or_by_its_heartbeat(
    limits: Timeouts, beat_at: float, stuck_ats: list[float]
) -> None:
    kill_at = limits.kill_at(beat_at, stuck_ats)
    assert beat_at < kill_at <= beat_at + limits.heartbeat_timeout
    unseen = [stuck_at for stuck_at in stuck_ats if stuck_at > beat_at]
    assert all(kill_at <= stuck_at + FROZEN_MARGIN for stuck_at in unseen)


def test_a_stuck_attempt_that_the_worker_has_seen_itself_does_not_hasten_its_kill() -> None:
    assert Timeouts().kill_at(100.0, [99.0]) == 115
    assert Timeouts().kill_at(100.0, [99.0, 101.0]) == 101.5
    assert Timeouts().kill_at(100.0, []) == 115


@given(hierarchies())
def test_a_shutdown_fits_into_its_limit(limits: Timeouts) -> None:
    assert limits.drain_seconds >= 0
    assert limits.drain_seconds + limits.cancel_grace <= limits.shutdown_timeout + 1e-6


@given(st.lists(st.none() | instants))
def test_a_nested_deadline_can_only_shorten(deadlines: list[float | None]) -> None:
    first = earliest(*deadlines)
    assert first in deadlines or first is None
    assert all(deadline is None or (first is not None and first <= deadline) for deadline in deadlines)


@pytest.mark.parametrize(
    ("given_limits", "message", "settings"),
    [
        (
            {"statement_timeout": 30},
            "statement_timeout (30s) must be less than visibility_timeout (30s)",
            ("statement_timeout", "visibility_timeout"),
        ),
        (
            {"visibility_timeout": 20},
            "statement_timeout (25s) must be less than visibility_timeout (20s)",
            ("statement_timeout", "visibility_timeout"),
        ),
        (
            {"cancel_grace": 35, "shutdown_timeout": 60},
            "cancel_grace (35s) must be less than visibility_timeout (30s) + 5s",
            ("cancel_grace", "visibility_timeout"),
        ),
        (
            {"shutdown_timeout": 10},
            "cancel_grace (10s) must be less than shutdown_timeout (10s)",
            ("cancel_grace", "shutdown_timeout"),
        ),
        (
            {"visibility_timeout": 0.375, "statement_timeout": 0.1},
            "visibility_timeout (375ms) is too short: a lease is renewed after a third of it, seen up to "
            "250ms late, and would end before that; it must be more than 375ms",
            ("visibility_timeout",),
        ),
        (
            {"heartbeat_timeout": 2.5},
            "heartbeat_timeout (2.5s) must be more than 2.5s, 10 ticks of the monitor: a busy worker would "
            "be taken for a frozen one",
            ("heartbeat_timeout",),
        ),
        (
            {"statement_timeout": 0},
            "statement_timeout (0s) must be at least 1ms: to the server 0 means no limit at all",
            ("statement_timeout",),
        ),
        (
            {"pool_timeout": 0},
            "pool_timeout (0s) must be at least 1ms: with 0 no attempt would ever wait for a connection",
            ("pool_timeout",),
        ),
    ],
)
def test_a_misordered_hierarchy_is_refused_naming_both_values(
    given_limits: dict[str, float], message: str, settings: tuple[str, ...]
) -> None:
    with pytest.raises(TimeoutOrderError) as refused:
        Timeouts(**given_limits)
    assert str(refused.value) == message
    assert refused.value.settings == settings
    assert isinstance(refused.value, ValueError)


def test_a_limit_in_milliseconds_is_refused_with_a_guess() -> None:
    with pytest.raises(ValueError, match="statement_timeout") as refused:
        Timeouts(statement_timeout=25_000)
    assert str(refused.value) == (
        "statement_timeout (25000s = 6h56m40s) must be less than visibility_timeout (30s); "
        "25000 looks like milliseconds: did you mean 25s?"
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, -1, True, "x", None])
def test_a_limit_that_is_no_duration_is_refused_by_name(value: object) -> None:
    with pytest.raises(ValueError, match=r"^pool_timeout: "):
        Timeouts(pool_timeout=value)  # type: ignore[arg-type]


def test_limits_are_stored_as_seconds_whatever_they_were_written_as() -> None:
    assert Timeouts(visibility_timeout="1m").visibility_timeout == 60.0  # type: ignore[arg-type]
    assert isinstance(Timeouts(cancel_grace=5).cancel_grace, float)


@given(spans, spans, spans, spans, spans, spans)
def test_a_hierarchy_is_refused_exactly_when_a_rule_is_broken(
    statement: float, pool: float, visibility: float, grace: float, heartbeat: float, shutdown: float
) -> None:
    in_order = (
        0.001 <= statement < visibility
        and pool >= 0.001
        and visibility / 3 + MONITOR_TICK < visibility
        and grace < visibility + 5
        and grace < shutdown
        and heartbeat > 2.5
    )
    try:
        Timeouts(
            statement_timeout=statement,
            pool_timeout=pool,
            visibility_timeout=visibility,
            cancel_grace=grace,
            heartbeat_timeout=heartbeat,
            shutdown_timeout=shutdown,
        )
    except TimeoutOrderError:
        assert not in_order
    else:
        assert in_order


def test_a_consistent_hierarchy_in_milliseconds_is_doubted() -> None:
    limits = Timeouts(statement_timeout=25_000, visibility_timeout=30_000)
    assert [doubt.partition(" ")[0] for doubt in limits.doubts()] == [
        "statement_timeout",
        "visibility_timeout",
    ]
    assert "did you mean 25s?" in limits.doubts()[0]


@pytest.mark.parametrize("hours", [1, 2, 5, 10])
def test_whole_hours_are_not_doubted(hours: int) -> None:
    assert Timeouts(visibility_timeout=hours * 3600, task_timeout=hours * 3600).doubts() == ()


def test_a_frozen_worker_that_outlives_its_leases_is_doubted() -> None:
    (doubt,) = Timeouts(visibility_timeout=20, statement_timeout=15).doubts()
    assert "the leases of a frozen worker can end before it is killed" in doubt


def test_a_shutdown_without_time_to_drain_is_doubted() -> None:
    (doubt,) = Timeouts(shutdown_timeout=12).doubts()
    assert "running attempts are canceled at once" in doubt
