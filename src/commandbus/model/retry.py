"""When a failed attempt is tried again, and what happens when no attempt is left.

The schedule's last value repeats; jitter spreads a herd. Charge, not number, is compared with max_attempts: a
waived attempt costs nothing (DESIGN: attempt). Randomness comes in as an argument, so that this stays pure.

`retry_on`, `give_up_on` and `delay_from` look at exceptions that the handler itself raised. A timeout, a canceled
attempt and the loss of a worker are not such exceptions: they are retried while attempts are left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, cast

from commandbus.model.durations import Duration, parse_seconds
from commandbus.quick_dataclass import dataclass

DEFAULT_SCHEDULE: tuple[float, ...] = (10.0, 60.0, 300.0)
OnExhausted = Literal["troubleshoot", "fail"]
ExceptionTypes = type[BaseException] | Sequence[type[BaseException]]


class Ruling(NamedTuple):
    """What a policy says about an exception: give the command up, or retry it after its own delay.

    `problem`: what was wrong with the answer of `delay_from`; then the schedule decides.
    """

    gives_up: bool = False
    delay_seconds: float | None = None
    problem: str | None = None


NO_RULING = Ruling()


def check_on_exhausted(value: object, error: type[Exception] = ValueError) -> OnExhausted:
    """Returns what is to happen when the attempts are used up. Raises an error that names a bad value."""
    if value not in ("troubleshoot", "fail"):
        raise error(f'on_exhausted must be "troubleshoot" or "fail", not {value!r:.80}')
    return value


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often, and after how long. `jitter=0.1` spreads each delay by up to 10% either way.

    `backoff_schedule` is a list of durations: `[1, "10s", timedelta(minutes=5)]`.

    `retry_on`: only these exceptions are retried, if it is given. `give_up_on`: these are not, and win over
    `retry_on`. Where a command is not retried, its attempts count as used up. `delay_from` is called with the
    exception and returns the delay before the next attempt, or None for the schedule's.

    `on_exhausted`: when the attempts are used up, "troubleshoot" sends the command to the troubleshooting queue,
    and "fail" makes it FAILED for good.

    `max_snoozes`, `max_snooze_time`: how often a command may be snoozed, and until how long after its first
    snooze. Beyond that its attempts count as used up.
    """

    max_attempts: int = 3
    backoff_schedule: Sequence[Duration] = DEFAULT_SCHEDULE
    jitter: float = 0.1
    retry_on: ExceptionTypes | None = None
    give_up_on: ExceptionTypes = ()
    delay_from: Callable[[BaseException], Duration | None] | None = None
    on_exhausted: OnExhausted = "troubleshoot"
    max_snoozes: int = 1000
    max_snooze_time: Duration = 7 * 86400.0

    def __post_init__(self) -> None:
        _check_count("max_attempts", self.max_attempts, least=1)
        _check_count("max_snoozes", self.max_snoozes, least=0)
        if isinstance(self.backoff_schedule, str) or not isinstance(self.backoff_schedule, Sequence):
            raise ValueError(  # noqa: TRY004 - one kind of error for a bad policy
                f'backoff_schedule must be a list of durations such as [1, "10s"], not {self.backoff_schedule!r}'
            )
        if not isinstance(self.jitter, int | float) or not 0 <= self.jitter <= 1:
            raise ValueError(f"jitter must be between 0 and 1, not {self.jitter!r}")
        if self.delay_from is not None and not callable(self.delay_from):
            raise ValueError(f"delay_from must be a function of the exception, not {self.delay_from!r:.80}")
        check_on_exhausted(self.on_exhausted)
        seconds = tuple(parse_seconds(delay, name="backoff_schedule") for delay in self.backoff_schedule)
        object.__setattr__(self, "backoff_schedule", seconds)
        object.__setattr__(self, "max_snooze_time", parse_seconds(self.max_snooze_time, name="max_snooze_time"))
        if self.retry_on is not None:
            object.__setattr__(self, "retry_on", _exception_types("retry_on", self.retry_on))
        object.__setattr__(self, "give_up_on", _exception_types("give_up_on", self.give_up_on))

    @property
    def backoff_seconds(self) -> tuple[float, ...]:
        """The schedule in seconds, as a type checker knows it."""
        return cast("tuple[float, ...]", self.backoff_schedule)

    def may_retry(self, charge: int, *, max_attempts: int | None = None) -> bool:
        """May another attempt follow the one that was the `charge`-th to be charged?"""
        return charge < (max_attempts or self.max_attempts)

    def delay_seconds(self, charge: int, *, spread: float = 0.5) -> float:
        """Seconds until the next attempt; `spread` in [0, 1) is the draw for the jitter."""
        schedule = self.backoff_seconds
        if not schedule:
            return 0.0
        base = schedule[min(max(charge, 1), len(schedule)) - 1]
        return base * (1 + self.jitter * (2 * spread - 1))


def may_snooze(policy: RetryPolicy, *, snoozes: int, since_seconds: float, delay_seconds: float) -> bool:
    """May a command be snoozed that was snoozed so often, for the first time so long ago?"""
    most = cast(float, policy.max_snooze_time)
    return snoozes < policy.max_snoozes and since_seconds + delay_seconds <= most


def rule_on(policy: RetryPolicy, error: BaseException) -> Ruling:
    """What the policy says about an exception that a handler raised. Never raises."""
    give_up, only = cast("tuple[type[BaseException], ...]", policy.give_up_on), policy.retry_on
    if isinstance(error, give_up):
        return Ruling(gives_up=True)
    if only is not None and not isinstance(error, cast("tuple[type[BaseException], ...]", only)):
        return Ruling(gives_up=True)
    return NO_RULING if policy.delay_from is None else _ask(policy.delay_from, error)


def _ask(delay_from: Callable[[BaseException], Duration | None], error: BaseException) -> Ruling:
    try:
        delay = delay_from(error)
        return NO_RULING if delay is None else Ruling(delay_seconds=parse_seconds(delay, name="delay_from"))
    except Exception as broken:  # noqa: BLE001 - a bad function must not cost us the outcome
        return Ruling(problem=f"delay_from failed ({type(broken).__name__}: {str(broken)[:200]})")


def _check_count(name: str, value: object, *, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, not {value!r}")


def _exception_types(name: str, value: object) -> tuple[type[BaseException], ...]:
    found = (value,) if isinstance(value, type) else value
    if isinstance(found, str) or not isinstance(found, Sequence):
        raise ValueError(f"{name} must be exception types such as [ConnectionError], not {value!r:.80}")  # noqa: TRY004
    for kind in found:
        if not isinstance(kind, type) or not issubclass(kind, BaseException):
            raise ValueError(f"{name} must be exception types such as [ConnectionError], not {kind!r:.80}")  # noqa: TRY004
    return tuple(found)
