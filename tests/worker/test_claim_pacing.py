"""How many attempts are prefetched, by what the slots have shown."""

from __future__ import annotations

from commandbus.worker.claim_cursors import SWEEP_SECONDS, DomainCursors
from commandbus.worker.claim_pacing import GROWTH, LARGEST_PREFETCH, ClaimPacing

FAST = 1 / 60_000


def test_a_burst_of_fast_commands_needs_four_claims_to_reach_the_largest_prefetch() -> None:
    pacing, finished, busy = ClaimPacing(), 0, 0.0
    seen = []
    for _ in range(5):
        claimed = 4 + pacing.prefetch
        finished, busy = finished + claimed, busy + claimed * FAST
        pacing.observe(finished, busy)  # the slots were idle during the claim itself: that does not count
        seen.append(pacing.prefetch)
    assert seen[:3] == [32, 288, LARGEST_PREFETCH]
    assert seen[-1] == LARGEST_PREFETCH


def test_with_slow_handlers_nothing_is_prefetched() -> None:
    pacing = ClaimPacing()
    for second in range(1, 6):
        pacing.observe(10 * second, float(second))
    assert pacing.prefetch == 0


def test_what_is_prefetched_starts_within_forty_milliseconds() -> None:
    pacing = ClaimPacing()
    for look in range(1, 11):
        pacing.observe(100 * look, 0.05 * look)
    assert round(pacing.per_second) == 2000
    assert pacing.prefetch in (79, 80)


def test_handlers_that_become_slow_end_the_prefetch_within_a_moment() -> None:
    pacing = ClaimPacing()
    pacing.observe(1000, 0.016)
    assert pacing.prefetch == LARGEST_PREFETCH
    pacing.observe(1004, 0.04)
    assert pacing.prefetch < 10


def test_after_idleness_a_fast_past_is_no_reason_to_take_hundreds() -> None:
    pacing = ClaimPacing()
    pacing.observe(1000, 0.016)
    pacing.rest()
    assert pacing.prefetch == 0
    pacing.observe(1003, 0.01605)
    assert pacing.prefetch == 3 * GROWTH


def test_if_claims_are_slow_the_prefetch_is_for_the_time_of_two_claims() -> None:
    pacing = ClaimPacing()
    pacing.observe(100, 0.05)
    for _ in range(30):
        pacing.claimed(0.1)
    assert 390 <= pacing.prefetch <= 400
    for _ in range(30):
        pacing.claimed(60.0)
    assert pacing.prefetch == 800  # the longest is 0.4 s


def test_a_look_at_slots_that_were_idle_changes_nothing() -> None:
    pacing = ClaimPacing()
    pacing.observe(100, 0.05)
    before = pacing.prefetch, pacing.per_second
    pacing.observe(100, 0.05)
    assert (pacing.prefetch, pacing.per_second) == before


def test_a_long_walk_to_the_oldest_message_is_made_less_often() -> None:
    domain = DomainCursors("orders", is_routed=False)
    domain.note_sweep(-0.001)
    assert domain.sweep_seconds == SWEEP_SECONDS
    domain.note_sweep(0.04)
    assert domain.sweep_seconds == SWEEP_SECONDS
    domain.note_sweep(0.5)
    assert domain.sweep_seconds == 10.0
    domain.note_sweep(0.0)
    assert domain.sweep_seconds == SWEEP_SECONDS
