"""How a limit stands with its API: back-off, probe and breaker; as properties, and as a fleet that is driven."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from commandbus.model.limit import BACKOFF_JITTER, BACKOFF_SECONDS, Limit
from commandbus.model.limit_state import (
    MOST_VAIN,
    ApiAnswer,
    LimitState,
    after_bad,
    after_good,
    after_unknown,
    caller_of,
    token_of,
)
from support.running import examples

NO_BREAKER = Limit("docai", concurrency=5, breaker_failures=0)
USUAL = Limit("docai", concurrency=5)
BAD = [ApiAnswer.RATE_LIMITED, ApiAnswer.BROKEN, ApiAnswer.TIMEOUT]
spreads = st.floats(0, 1, exclude_max=True)


def bad(
    limit_state: LimitState,
    now: float,
    *,
    token: str | None = "a",
    answer: ApiAnswer = ApiAnswer.RATE_LIMITED,
    retry_after: float | None = None,
    limit: Limit = NO_BREAKER,
    spread: float = 0.0,
    reason: str = "429 from docai",
    callers: tuple[str, ...] = (),
) -> LimitState:
    return after_bad(
        limit_state,
        limit,
        answer,
        token=token,
        reason=reason,
        retry_after=retry_after,
        now=now,
        spread=spread,
        callers=callers,
    )


def probed(limit_state: LimitState, token: str, now: float, lease: float = 120.0) -> LimitState:
    """As the back end notes it when it lets the probe in."""
    return replace(limit_state, probe=token, probe_until=now + lease)


# --- back-off --------------------------------------------------------------------------------------------------


@given(st.integers(1, 12), spreads)
def test_ac3_the_back_off_is_2_4_8_16_30_seconds(tries: int, spread: float) -> None:
    """One 429 after the other, each of a probe: every wait is that of the schedule, within the jitter."""
    limit_state, now = LimitState(), 1000.0
    for step in range(1, tries + 1):
        limit_state = bad(
            probed(limit_state, "p", now) if step > 1 else limit_state, now, token="p", spread=spread
        )
        planned = BACKOFF_SECONDS[min(step, len(BACKOFF_SECONDS)) - 1]
        assert limit_state.step == step
        assert limit_state.until is not None
        assert planned * (1 - BACKOFF_JITTER) - 1e-6 <= limit_state.until - now <= planned + 1e-6
        assert limit_state.blocked_until(now) == limit_state.until
        now = limit_state.until
        assert limit_state.blocked_until(now) is None
        assert limit_state.is_probing


@given(st.floats(0, 86_400), spreads)
def test_what_the_server_said_wins_over_the_schedule(retry_after: float, spread: float) -> None:
    limit_state = bad(LimitState(), 1000.0, retry_after=retry_after, spread=spread)
    assert limit_state.until == 1000.0 + retry_after
    assert limit_state.step == 1


@given(st.lists(st.tuples(st.floats(0, 1.7), spreads, st.sampled_from(BAD)), max_size=20))
def test_calls_that_were_under_way_add_no_steps(others: list[tuple[float, float, ApiAnswer]]) -> None:
    first = bad(LimitState(), 1000.0)
    limit_state = first
    for moment, spread, answer in others:
        limit_state = bad(limit_state, 1000.0 + moment, token="other", answer=answer, spread=spread, limit=USUAL)
    assert limit_state == first


@given(st.floats(0, 1.7), st.floats(0, 3600))
def test_a_longer_retry_after_of_one_that_was_under_way_extends_the_wait(
    moment: float, retry_after: float
) -> None:
    first = bad(LimitState(), 1000.0)
    limit_state = bad(first, 1000.0 + moment, token="other", retry_after=retry_after)
    assert limit_state.until == max(1002.0, 1000.0 + moment + retry_after)
    assert limit_state.step == 1
    assert limit_state.failures == 1


def test_good_answers_of_others_do_not_end_a_back_off() -> None:
    limit_state = bad(LimitState(), 1000.0)
    assert after_good(limit_state, token="other") == limit_state
    assert after_unknown(limit_state, token="other") == limit_state


def test_the_probes_good_answer_ends_it() -> None:
    limit_state = probed(bad(LimitState(), 1000.0), "p", 1002.0)
    assert limit_state.is_probed(1003.0)
    assert after_good(limit_state, token="p") == LimitState()


@pytest.mark.parametrize("answer", BAD)
def test_any_bad_answer_of_the_probe_is_the_next_step(answer: ApiAnswer) -> None:
    limit_state = bad(probed(bad(LimitState(), 1000.0), "p", 1002.0), 1003.0, token="p", answer=answer)
    assert (limit_state.step, limit_state.until, limit_state.probe) == (2, 1007.0, None)


def test_a_probe_of_which_nothing_is_known_leaves_room_for_another() -> None:
    limit_state = probed(bad(LimitState(), 1000.0), "p", 1002.0)
    after = after_unknown(limit_state, token="p")
    assert (after.step, after.until, after.probe, after.is_probed(1003.0)) == (1, 1002.0, None, False)
    assert after.is_probing


def test_a_probe_that_was_killed_counts_for_a_lease() -> None:
    limit_state = probed(bad(LimitState(), 1000.0), "p", 1002.0, lease=10.0)
    assert limit_state.is_probed(1011.9)
    assert not limit_state.is_probed(1012.0)


def test_it_says_what_it_is_for_people() -> None:
    limit_state = bad(probed(bad(LimitState(), 1000.0), "p", 1002.0), 1003.0, token="p")
    assert limit_state.explain("docai") == "429 from docai, step 2 of the back-off"


def test_a_limit_that_is_probing_does_not_say_that_its_breaker_is_open() -> None:
    limit_state = LimitState(breaker_open=True, open_reason="5 bad answers in a row")
    assert limit_state.explain("docai") == "the breaker of docai is open: 5 bad answers in a row"
    assert (
        limit_state.explain("docai", is_probing=True) == "the breaker of docai was opened: 5 bad answers in a row"
    )


# --- breaker ---------------------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from([ApiAnswer.BROKEN, ApiAnswer.TIMEOUT]), min_size=1, max_size=8), st.integers(1, 5))
def test_so_many_bad_answers_in_a_row_open_the_breaker_once(answers: list[ApiAnswer], needed: int) -> None:
    limit = Limit("docai", concurrency=5, breaker_failures=needed, breaker_reset=60)
    limit_state = LimitState()
    for count, answer in enumerate(answers, 1):
        now = 1000.0 + count
        limit_state = bad(limit_state, now, answer=answer, limit=limit, reason="HTTP 500")
        assert limit_state.breaker_open == (count >= needed)
        if count >= needed:  # what was under way then changes nothing
            assert limit_state.opened_at == 1000.0 + needed
            assert limit_state.open_until == 1000.0 + needed + 60
            assert limit_state.failures == needed


@given(st.lists(st.booleans(), max_size=40))
def test_a_good_answer_breaks_the_row(answers: list[bool]) -> None:
    limit_state, row = LimitState(), 0
    for number, is_good in enumerate(answers):
        if limit_state.breaker_open:
            break
        if is_good:
            limit_state, row = after_good(limit_state, token="a"), 0
        else:
            limit_state = bad(limit_state, 1000.0 + number, answer=ApiAnswer.BROKEN, limit=USUAL)
            row += 1
        assert limit_state.failures == row
        assert limit_state.breaker_open == (row >= 3)


def test_what_nobody_knows_neither_counts_nor_breaks_the_row() -> None:
    limit_state = bad(LimitState(), 1000.0, answer=ApiAnswer.BROKEN, limit=USUAL)
    assert after_unknown(limit_state, token="a") == limit_state


def test_a_bad_probe_opens_it_again_and_a_good_one_closes_it() -> None:
    limit_state = LimitState()
    for number in range(3):
        limit_state = bad(limit_state, 1000.0 + number, answer=ApiAnswer.BROKEN, limit=USUAL, reason="HTTP 500")
    assert limit_state.open_reason == "3 bad answers in a row, the last: HTTP 500"
    assert limit_state.blocked_until(1061.9) == 1062.0
    assert limit_state.blocked_until(1062.0) is None
    assert limit_state.is_probing
    again = bad(probed(limit_state, "p", 1062.0), 1063.0, token="p", answer=ApiAnswer.TIMEOUT, limit=USUAL)
    assert (again.breaker_open, again.opened_at, again.open_until, again.probe) == (True, 1002.0, 1123.0, None)
    assert after_good(probed(again, "q", 1123.0), token="q") == LimitState()


def test_a_limit_without_a_breaker_never_has_one() -> None:
    limit_state = LimitState()
    for number in range(50):
        limit_state = bad(limit_state, 1000.0 + number, answer=ApiAnswer.BROKEN)
    assert not limit_state.breaker_open


@given(st.sampled_from(BAD), st.one_of(st.none(), st.floats(0, 1e4)), st.floats(0, 1e9))
def test_what_a_person_has_closed_stays_closed_whatever_comes(
    answer: ApiAnswer, retry_after: float | None, now: float
) -> None:
    forced = LimitState(breaker_open=True, breaker_forced=True, opened_at=1000.0, open_reason="closed by ann")
    assert forced.blocked_until(now) == float("inf")
    for after in (
        bad(forced, now, answer=answer, retry_after=retry_after, limit=USUAL),
        bad(probed(forced, "p", now), now, token="p", answer=answer, retry_after=retry_after, limit=USUAL),
        after_good(forced, token="a"),
        after_good(probed(forced, "p", now), token="p"),
        after_unknown(probed(forced, "p", now), token="p"),
    ):
        assert after.breaker_forced
        assert after.blocked_until(now) == float("inf")


# --- callers ---------------------------------------------------------------------------------------------------


def test_a_token_tells_which_command_calls() -> None:
    assert caller_of(token_of("worker/orders/c#7/1f", 42)) == "42"
    assert caller_of(token_of("x" * 500, 42)) == "42"
    assert len(token_of("x" * 500, 42)) == 200
    block = token_of("host-1-bus/pid-7/1f", None)
    assert caller_of(block) == block


@pytest.mark.parametrize(
    ("failing", "others", "opens"),
    [
        ([1, 1, 1], [], True),  # alone
        ([1, 1, 1, 1, 1], [2], False),  # the other one is not to suffer
        ([1, 2, 1], [], True),  # both that call
        ([1, 1, 2], [3], False),
        ([1, 1, 2, 3], [4, 5, 6], True),
    ],
)
def test_different_commands_open_the_breaker_where_several_call(
    failing: list[int], others: list[int], opens: bool
) -> None:
    limit_state = LimitState()
    for number, command in enumerate(failing):
        assert not limit_state.breaker_open
        token, callers = f"t{number}#{command}", tuple(str(other) for other in others)
        limit_state = bad(limit_state, 1000.0, token=token, answer=ApiAnswer.BROKEN, limit=USUAL, callers=callers)
    assert limit_state.breaker_open == opens


def test_a_good_answer_forgets_who_failed() -> None:
    limit_state = bad(LimitState(), 1000.0, token="a#1", answer=ApiAnswer.BROKEN, limit=USUAL, callers=("2",))
    assert limit_state.blamed == ("1",)
    assert after_good(limit_state, token="b#2") == LimitState()


def test_vain_probes_are_counted_by_command_over_its_retries() -> None:
    limit_state = bad(LimitState(), 1000.0, token="x#9")
    for number, answer in enumerate([*BAD, None]):
        probing = probed(limit_state, f"try-{number}#7", limit_state.until or 0.0)
        now = limit_state.until or 0.0
        token = f"try-{number}#7"
        limit_state = (
            after_unknown(probing, token=token)
            if answer is None
            else bad(probing, now, token=token, answer=answer)
        )
    assert limit_state.vain == {"7": 4}
    never_began = probed(limit_state, "y#8", 5000.0)
    assert after_unknown(never_began, token="y#8", has_begun=False).vain == {"7": 4}
    assert after_good(probed(limit_state, "z#9", 5000.0), token="z#9").vain == {}


def test_vain_probes_of_very_many_begin_anew() -> None:
    limit_state = LimitState(step=1, vain={str(number): 1 for number in range(MOST_VAIN)})
    again = replace(limit_state, probe="x#5").without_probe()
    assert (len(again.vain), again.vain["5"]) == (MOST_VAIN, 2)
    assert replace(limit_state, probe=f"x#{MOST_VAIN}").without_probe().vain == {str(MOST_VAIN): 1}


@pytest.mark.parametrize("answer", BAD)
def test_an_hour_of_outage_refuses_none_of_forty_as_often_as_it_may_be(answer: ApiAnswer) -> None:
    """By the model's clock, with the usual settings."""
    limit_state, now, refused = LimitState(), 0.0, dict.fromkeys(map(str, range(40)), 0)
    for command in list(refused)[:5]:  # those who call when it begins
        limit_state = bad(limit_state, now, token=f"t#{command}", answer=ApiAnswer.RATE_LIMITED, limit=USUAL)
        refused[command] += 1
    while (now := limit_state.blocked_until(now) or now) < 3600:
        command = min(refused, key=lambda each: (limit_state.vain.get(each, 0), int(each)))
        token = f"t#{command}"
        limit_state = bad(probed(limit_state, token, now), now, token=token, answer=answer, limit=USUAL)
        refused[command] += 1
    assert sum(refused.values()) > 60
    assert max(refused.values()) < USUAL.tries
    vain = [limit_state.vain.get(each, 0) for each in refused]
    assert max(vain) - min(vain) <= 1


# --- a fleet ---------------------------------------------------------------------------------------------------


class Fleet(RuleBasedStateMachine):
    """Calls that begin when the standing lets them, and end in any order, at any time, in any way."""

    LEASE = 20.0

    def __init__(self) -> None:
        super().__init__()
        self.limit = USUAL
        self.limit_state = LimitState()
        self.now = 1000.0
        self.count = 0
        self.under_way: dict[str, float] = {}  # token → when it began

    def _begin(self) -> str | None:
        """As limits/take.sql does it."""
        limit_state = self.limit_state
        if limit_state.blocked_until(self.now) is not None:
            return None
        if limit_state.is_probing and limit_state.is_probed(self.now):
            return None
        self.count += 1
        token = f"t{self.count}"
        if limit_state.is_probing:
            self.limit_state = probed(limit_state, token, self.now, self.LEASE)
        self.under_way[token] = self.now
        return token

    @rule(seconds=st.floats(0.01, 30))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(many=st.integers(1, 4))
    def some_begin(self, many: int) -> None:
        was_probing, was_probed = self.limit_state.is_probing, self.limit_state.is_probed(self.now)
        begun = [token for _ in range(many) if (token := self._begin()) is not None]
        if was_probing:
            assert len(begun) <= (0 if was_probed else 1), "one probe in the fleet"

    @precondition(lambda self: self.under_way)
    @rule(data=st.data(), answer=st.sampled_from(BAD), retry_after=st.one_of(st.none(), st.floats(0, 100)))
    def one_ends_badly(self, data: st.DataObject, answer: ApiAnswer, retry_after: float | None) -> None:
        token = data.draw(st.sampled_from(sorted(self.under_way)))
        before, is_probe = self.limit_state, self.limit_state.probe == token
        began = self.under_way.pop(token)
        if answer is not ApiAnswer.RATE_LIMITED:
            retry_after = None
        after = bad(before, self.now, token=token, answer=answer, retry_after=retry_after, limit=self.limit)
        closed = before.blocked_until(self.now)
        if closed is not None and not is_probe:
            assert (after.step, after.failures, after.breaker_open) == (
                before.step,
                before.failures,
                before.breaker_open,
            )
            assert (after.blocked_until(self.now) or 0) >= closed, "nobody's answer shortens a wait"
            assert began <= closed
        else:
            assert after.failures == before.failures + 1
            assert after.step in (before.step, before.step + 1)
            if answer is ApiAnswer.RATE_LIMITED:
                assert after.step == before.step + 1
                assert after.until is not None
                assert after.until >= self.now
            if is_probe:
                assert after.probe is None
                assert after.is_probing
        self.limit_state = after

    @precondition(lambda self: self.under_way)
    @rule(data=st.data())
    def one_ends_well(self, data: st.DataObject) -> None:
        token = data.draw(st.sampled_from(sorted(self.under_way)))
        self.under_way.pop(token)
        before = self.limit_state
        self.limit_state = after_good(before, token=token)
        if before.probe == token:
            assert self.limit_state == LimitState()
        elif before.is_probing:
            assert self.limit_state == before, "only the probe ends it"

    @precondition(lambda self: self.under_way)
    @rule(data=st.data(), is_heard=st.booleans())
    def one_dies(self, data: st.DataObject, is_heard: bool) -> None:
        """Its worker is stopped (and says so), or killed."""
        token = data.draw(st.sampled_from(sorted(self.under_way)))
        self.under_way.pop(token)
        if is_heard:
            self.limit_state = after_unknown(self.limit_state, token=token)

    @invariant()
    def it_ends_some_day(self) -> None:
        """Whatever has happened: after the last wait and a lease, somebody may begin."""
        later = max(self.now, self.limit_state.blocked_until(self.now) or 0.0, self.limit_state.probe_until or 0.0)
        assert self.limit_state.blocked_until(later) is None
        assert not self.limit_state.is_probed(later)

    @invariant()
    def the_breaker_is_open_when_it_must_be(self) -> None:
        assert self.limit_state.breaker_open == (self.limit_state.failures >= self.limit.breaker_failures)

    @invariant()
    def only_a_limit_that_stands_badly_has_a_probe(self) -> None:
        assert self.limit_state.probe is None or self.limit_state.is_probing


TestFleet = Fleet.TestCase
TestFleet.settings = settings(max_examples=examples(80, thorough=400), stateful_step_count=40, deadline=None)
