"""A limit: how much of an external resource the whole fleet may use at once, and how fast.

`Limit` is a declaration, checked: one that exists is valid, its durations are seconds and its rate is a `Rate`.
The arithmetic of its parts is here, pure: rates (`allowance`: a bucket that leaks, kept as one moment in time),
shares of a fleet that lost its Redis (`share`), and the wait after a 429 (`backoff`). The permit stores do the
same sums in SQL and Lua; tests hold all of them against these. What a limit leaves open (`store`, `environment`)
follows from the settings; see `Settings.backend_of`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, fields, replace
from decimal import Decimal
from typing import Any, Final, Literal, TypedDict, Unpack, cast

from commandbus.errors import ConfigurationError
from commandbus.model.durations import Duration, format_seconds, parse_seconds
from commandbus.model.json_values import Json
from commandbus.model.key_limit import OnFailure, check_path, check_places
from commandbus.model.names import shown
from commandbus.quick_dataclass import dataclass

StoreName = Literal["postgres", "redis"]
BACKOFF_SECONDS: Final = (2.0, 4.0, 8.0, 16.0, 30.0)
BACKOFF_JITTER: Final = 0.1
LEASE_SECONDS: Final = 120.0
WAIT_SECONDS: Final = 30.0
CALL_TIMEOUT_SECONDS: Final = 60.0
MAX_WAIT_SECONDS: Final = 86_400.0
TRIES: Final = 4
GRAIN_SECONDS: Final = 1e-6
FLOW_SECONDS: Final = 60.0
SLOWEST_FLOW: Final = 0.0008
"""Permits a second. A smaller flow means that none was given for minutes, and says nothing about the next."""
"""Over which time the measured rate is an average."""

KEY_OPTIONS: Final = ("key", "ordered", "on_failure")
_NAME = re.compile(r"[a-z][a-z0-9_]{0,47}\Z")
_ENVIRONMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}\Z")
_NUMBER = r"(\d+(?:\.\d+)?)"
_RATE = re.compile(rf"\s*{_NUMBER}\s*/\s*(.+?)\s*\Z", re.ASCII)
_PERIOD = re.compile(rf"(?:{_NUMBER}\s*)?(s|secs?|seconds?|m|mins?|minutes?|h|hours?|d|days?)\Z", re.ASCII)
_UNITS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_MOST: Final = 1_000_000
_FASTEST: Final = 10_000.0  # calls a second; as epoch seconds, the moments of faster ones are not exact enough
_SLOWEST: Final = 3e-8  # about one a year
_LONGEST_BACKOFF: Final = 100


def is_limit_name(name: object) -> bool:
    """Can a limit have this name?"""
    return isinstance(name, str) and _NAME.match(name) is not None


def check_limit_name(name: object) -> str:
    """Return the name of a limit, or say what is wrong with it."""
    if isinstance(name, str) and _NAME.match(name):
        return name
    raise ConfigurationError(
        f"{shown(name)} is not the name of a limit: use a lower-case letter followed by lower-case letters, "
        f"digits and underscores, at most 48 characters"
    )


@dataclass(frozen=True, slots=True)
class Rate:
    """So many calls in so many seconds: `Rate.parse("120/m")`. Its text can be parsed again."""

    count: float
    seconds: float

    def __post_init__(self) -> None:
        for name, lowest in (("count", 0.0), ("seconds", 0.001)):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not 0 < value <= 1e15 or value < lowest:
                wanted = f"at least {lowest}" if lowest else "more than 0"
                raise ConfigurationError(
                    f"a rate's {name} must be a number of {wanted}, not {shown(value)}; write 2/s or 120/m"
                )
            object.__setattr__(self, name, float(value))
        if not _SLOWEST <= self.per_second <= _FASTEST:
            raise ConfigurationError(
                f"{self} is not a possible rate: write one from 1/365d to {_FASTEST:.0f}/s, such as 120/m"
            )

    @classmethod
    def parse(cls, value: object, *, name: str = "rate") -> Rate:
        """From text such as `2/s`, `120/m`, `1000/h`, `5/10s`, `10/1m30s`."""
        if isinstance(value, Rate):
            return value
        found = _RATE.match(value) if isinstance(value, str) and len(value) < 64 else None
        seconds = _period(found[2]) if found else None
        if found is None or not seconds:
            raise ConfigurationError(f"{name}: {shown(value)} is not a rate; write 2/s, 120/m, 1000/h or 5/10s")
        try:
            return cls(float(found[1]), seconds)
        except ConfigurationError as error:
            raise ConfigurationError(f"{name}: {error}") from None

    @property
    def per_second(self) -> float:
        """Calls a second."""
        return self.count / self.seconds

    def __str__(self) -> str:
        unit, size = next(
            item for item in reversed(_UNITS.items()) if self.seconds % item[1] == 0 or item[0] == "s"
        )
        periods = self.seconds / size
        return f"{_plain(self.count)}/{'' if periods == 1 else _plain(periods)}{unit}"


class LimitOptions(TypedDict, total=False):
    """The options of a `Limit`, each by its name; see there."""

    concurrency: int | None
    rate: Rate | str | None
    burst: int
    lease: Duration
    call_timeout: Duration | None
    max_wait: Duration | None
    tries: int
    backoff: Sequence[Duration]
    breaker_failures: int
    breaker_reset: Duration
    store: StoreName | None
    environment: str | None
    shared: bool


@dataclass(frozen=True, slots=True)
class Limit:
    """A named limit that all workers of a deployment share.

    `concurrency`: how many calls at once. `rate`: how many calls may begin per time (`"120/m"`), `burst` of them
    at the same moment. At least one of the two is required. `lease`: how long a permit is kept for a silent
    holder. `call_timeout`: how long the call in a block (`ctx.limit`, `bus.limit`) may take, unless the block says
    otherwise; None or 0 is any time. `max_wait`: how long a command waits before it needs a person; only time in
    which no call succeeds counts, so a line that moves never expires. None or 0 is for ever. `tries`: how many
    429s a command may get.

    `backoff`: seconds that everybody waits after the first 429, the second and so on; the last one repeats.
    `breaker_failures`: how many 429s, 5xx and timeouts in a row open the breaker for `breaker_reset` seconds; 0
    for never. If several commands call, they must belong to that many different commands.

    `store`: "redis" or "postgres"; None is Redis if `redis_url` is set. `environment`: part of the key's name;
    None is the deployment's. `shared`: programs outside the fleet (`commandbus.rate_limiter`) use its permits in
    Redis, too. Then nobody calls while Redis is away, and for one lease after it has lost its data.

    `key`: the path of a key in a command, such as "data.tenant_id". Then the limit is for the commands of its
    handlers: `concurrency` of one key at once, in all workers together. `ordered` (with concurrency 1): strictly
    one after the other, in the order of sending. `on_failure`: a command in the troubleshooting queue keeps its
    place ("block", the default if ordered) or gives it up ("step_aside"). Such a limit takes no other option.
    """

    name: str
    concurrency: int | None = None
    rate: Rate | str | None = None
    burst: int = 1
    lease: Duration = LEASE_SECONDS
    call_timeout: Duration | None = CALL_TIMEOUT_SECONDS
    max_wait: Duration | None = MAX_WAIT_SECONDS
    tries: int = TRIES
    backoff: Sequence[Duration] = BACKOFF_SECONDS
    breaker_failures: int = 3
    breaker_reset: Duration = 60.0
    store: StoreName | None = None
    environment: str | None = None
    shared: bool = False
    key: str | None = None
    ordered: bool = False
    on_failure: OnFailure | None = None

    def __post_init__(self) -> None:
        check_limit_name(self.name)
        self._check_key()
        for name, lowest, value in (
            ("concurrency", 1, self.concurrency),
            ("burst", 1, self.burst),
            ("tries", 1, self.tries),
            ("breaker_failures", 0, self.breaker_failures),
        ):
            if value is None and name == "concurrency":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= _MOST:
                raise self._wrong(name, value, f"a whole number from {lowest} to {_MOST}")
        if self.concurrency is None and self.rate is None:
            raise ConfigurationError(
                f"limit {self.name!r} limits nothing: give concurrency=5, rate='120/m', or both"
            )
        if self.rate is not None:
            self._set("rate", Rate.parse(self.rate, name=f"limit {self.name!r}: rate"))
        self._set("lease", self._seconds("lease", self.lease, lowest=1.0))
        self._set("breaker_reset", self._seconds("breaker_reset", self.breaker_reset, lowest=0.1))
        for name, duration in (("call_timeout", self.call_timeout), ("max_wait", self.max_wait)):
            if duration is not None:
                self._set(name, self._seconds(name, duration, lowest=0.0) or None)
        items = self.backoff
        if isinstance(items, str | bytes | bytearray) or not isinstance(items, Sequence) or not items:
            raise self._wrong("backoff", items, "a list of durations such as [2, 4, 8, 16, 30]")
        if len(items) > _LONGEST_BACKOFF:
            raise self._wrong("backoff", items, f"a list of at most {_LONGEST_BACKOFF} durations")
        self._set("backoff", tuple(self._seconds("backoff", item, lowest=0.0) for item in items))
        if not (self.store is None or (isinstance(self.store, str) and self.store in ("postgres", "redis"))):
            raise self._wrong("store", self.store, '"redis" or "postgres"')
        if not (
            self.environment is None
            or (isinstance(self.environment, str) and _ENVIRONMENT.match(self.environment))
        ):
            raise self._wrong("environment", self.environment, "up to 63 letters, digits and any of _ . -")

        if not isinstance(self.shared, bool):
            raise self._wrong("shared", self.shared, "true or false")
        if self.shared and self.store == "postgres":
            raise self._wrong("store", self.store, '"redis" if the limit is shared')

    def _check_key(self) -> None:
        """A limit with a key has no permits, so it takes no option that is about permits."""
        if self.key is None:
            for name, value, nothing in (("ordered", self.ordered, False), ("on_failure", self.on_failure, None)):
                if value is not nothing:
                    raise ConfigurationError(
                        f"limit {self.name!r}: {name} ({shown(value)}) needs key, such as key='data.tenant_id'"
                    )
            return
        for item in fields(self):
            if item.name not in ("name", "concurrency", *KEY_OPTIONS) and getattr(self, item.name) != item.default:
                raise ConfigurationError(
                    f"limit {self.name!r}: {item.name} ({shown(getattr(self, item.name))}) cannot be given with "
                    f"key; leave it out, or use two limits: limits=[tenant, docai]"
                )
        check_path(self.key, of=f"limit {self.name!r}")
        check_places(self.concurrency, self.ordered, self.on_failure, of=f"limit {self.name!r}")

    @property
    def per_second(self) -> float | None:
        """Its rate in calls a second."""
        return self.rate.per_second if isinstance(self.rate, Rate) else None

    def to_json(self) -> dict[str, Json]:
        """What differs from a bare `Limit`, in JSON's types; `from_json` reads it."""
        plain = {item.name: item.default for item in fields(self)}
        found: dict[str, Any] = {}
        for name in OPTIONS:
            value = getattr(self, name)
            if value != plain[name]:
                found[name] = (
                    str(value) if isinstance(value, Rate) else list(value) if isinstance(value, tuple) else value
                )
        return found

    @classmethod
    def from_json(cls, name: str, *layers: Mapping[str, Json] | None) -> Limit:
        """From what was declared, and what was changed at run time: later layers win."""
        given: dict[str, Any] = {}
        for layer in layers:
            given |= layer or {}
        _check_options(name, given)
        return cls(name, **given)

    def changed(self, **options: Unpack[LimitOptions]) -> Limit:
        """With some options changed."""
        _check_options(self.name, options)
        return replace(self, **options)

    @property
    def lease_seconds(self) -> float:
        """The lease, as a type checker knows it."""
        return cast(float, self.lease)

    @property
    def call_timeout_seconds(self) -> float | None:
        """How long a call may take, likewise; None: any time."""
        return cast("float | None", self.call_timeout)

    @property
    def max_wait_seconds(self) -> float | None:
        """The longest wait of a command, likewise."""
        return cast("float | None", self.max_wait)

    @property
    def backoff_seconds(self) -> tuple[float, ...]:
        """The schedule, likewise."""
        return cast("tuple[float, ...]", self.backoff)

    @property
    def breaker_reset_seconds(self) -> float:
        """How long the breaker stays open, likewise."""
        return cast(float, self.breaker_reset)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _seconds(self, name: str, value: Duration, *, lowest: float) -> float:
        seconds = parse_seconds(value, name=f"limit {self.name!r}: {name}", error=ConfigurationError)
        if seconds < lowest:
            raise self._wrong(name, value, f"at least {format_seconds(lowest)}")
        return seconds

    def _wrong(self, name: str, value: object, wanted: str) -> ConfigurationError:
        return ConfigurationError(f"limit {self.name!r}: {name} must be {wanted}, not {shown(value)}")


OPTIONS: Final = tuple(item.name for item in fields(Limit) if item.name != "name")
PERMIT_OPTIONS: Final = tuple(name for name in OPTIONS if name not in KEY_OPTIONS)


@dataclass(frozen=True, slots=True)
class PermitUsage:
    """How a limit's permits are used at this moment, as its permit store says."""

    holders: Mapping[str, float] = field(default_factory=dict)  # token → seconds until its lease ends
    flow: float | None = None  # permits given a second, of late; None if none was
    mode: str = "postgres"  # where they are kept: postgres, redis, degraded, joining, lost
    why_unknown: str | None = None  # if nobody here can say who holds them
    blocked_seconds: float | None = None  # for how long nobody begins, because Redis has lost its data
    note: str | None = None  # why


def allowance(now: float, tat: float, per_second: float, burst: int, wanted: int) -> tuple[int, float]:
    """How many of the wanted calls may begin now, and the new `tat`.

    `tat`, the "theoretical arrival time", is when the bucket will be empty again. In any time t at most
    `burst + t * per_second` calls begin. A full bucket is empty after `burst / per_second`, so a `tat` later than
    that is of another rate, or of a clock that was set back: it is brought down, lest a limit that was 1/h a
    moment ago stays shut for an hour. A microsecond is not counted: epoch seconds are not exact to less.
    """
    tat = min(tat, now + burst / per_second)
    ahead = max(tat - now - GRAIN_SECONDS, 0.0)
    free = math.floor(burst - ahead * per_second + 1e-6)
    granted = max(0, min(wanted, free))
    return granted, max(tat, now) + granted / per_second if granted else tat


def until_next(now: float, tat: float, per_second: float, burst: int) -> float:
    """Seconds until one call may begin; never more than one call's worth."""
    return min(max(0.0, tat - now - (burst - 1) / per_second), 1 / per_second)


def share(limit: int, rank: int, workers: int) -> int:
    """How many permits the `rank`-th (from 0) of so many workers may have without asking anybody.

    The sum over all never exceeds the limit: each has limit ÷ workers, rounded down. With more workers than
    permits, the first ones have one each. A program that is not among the workers has none.
    """
    workers = max(workers, 1)
    if not 0 <= rank < workers:
        return 0
    return limit // workers if workers <= limit else int(rank < limit)


def backoff(schedule: Sequence[float], step: int, *, spread: float = 0.5) -> float:
    """Seconds to wait after the `step`-th 429 in a row (from 1). `spread` in [0, 1) is the draw for the jitter,
    which only shortens: nobody waits longer than the schedule says."""
    base = schedule[min(max(step, 1), len(schedule)) - 1]
    return base * (1 - BACKOFF_JITTER * spread)


def _check_options(name: str, given: Iterable[str]) -> None:
    for key in given:
        if key not in OPTIONS:
            raise ConfigurationError(
                f"limit {name!r}: there is no option {shown(key)}; there are {', '.join(OPTIONS)}"
            )


def _period(text: str) -> float | None:
    """The seconds in what stands after a rate's slash: `m`, `10s`, `1m30s`. A bare number would be ambiguous."""
    found = _PERIOD.match(text)
    if found:
        return float(found[1] or 1) * _UNITS[found[2][0]]
    if text[-1:].isdigit():
        return None
    try:
        return parse_seconds(text, name="rate")
    except ValueError:
        return None


def _plain(number: float) -> str:
    """All of its digits, and no exponent."""
    text = format(Decimal(repr(number)), "f")
    return text.removesuffix(".0")
