"""Effects outside the database: what is stored about one, and what an attempt may do with what it finds.

    begin ──► INTENT ──► DONE          the call returned; its receipt is kept, and no attempt calls again
                │  └───► NOT_DONE      the call was not made: the next attempt calls, with the same key
                └──────► UNCERTAIN     nobody can tell: a person must find out

INTENT and UNCERTAIN are *open*: the call may have been made, and may even arrive later. An attempt that finds an
open effect never calls before it knows. It may ask `verify` only when the process of the attempt that called is
dead, or `settle_after` has passed since that attempt ended, because a call that was given up may still arrive.
"""

from __future__ import annotations

import hashlib
from datetime import datetime
from enum import Enum, StrEnum
from typing import Any, Final, NamedTuple
from uuid import UUID

from commandbus.errors import InvalidCommandError
from commandbus.model import names
from commandbus.model.durations import Duration, format_seconds, parse_seconds
from commandbus.model.json_values import Json
from commandbus.quick_dataclass import dataclass

MAX_NAME: Final = 200


class EffectState(StrEnum):
    """What is known about an effect."""

    INTENT = "INTENT"
    DONE = "DONE"
    NOT_DONE = "NOT_DONE"
    UNCERTAIN = "UNCERTAIN"


_OPEN: Final = (EffectState.INTENT, EffectState.UNCERTAIN)


class EffectAnswer(Enum):
    """What `verify` returns if it has no receipt to return."""

    NOT_DONE = "not done"
    UNKNOWN = "unknown"


NOT_DONE: Final = EffectAnswer.NOT_DONE
"""Returned by `verify`: the call was not made. It is made again, with the same key."""
UNKNOWN: Final = EffectAnswer.UNKNOWN
"""Returned by `verify`: it cannot be told whether the call was made. A person must find out."""


@dataclass(frozen=True, slots=True)
class OpenEffect:
    """What `verify` is told about a call that may have been made: its name and key, the number of the attempt
    that made it, and when that attempt wrote its intent."""

    name: str
    key: str
    attempt_number: int
    begun_at: datetime


@dataclass(frozen=True, slots=True)
class EffectRecord:
    """An effect of a command, for people. `attempt` is the number of the attempt that wrote the intent last, and
    `calls` how many times an intent was written. `note` says why the state is what it is."""

    id: int
    domain: str
    command_id: str
    command_type: str
    name: str
    key: str
    state: EffectState
    attempt: int
    calls: int
    worker: str
    begun_at: datetime
    ended_at: datetime | None
    receipt: Json
    note: str | None

    @property
    def is_open(self) -> bool:
        """May the call have been made, without anybody knowing?"""
        return self.state in _OPEN


@dataclass(frozen=True, slots=True)
class CheckpointRecord:
    """The last checkpoint of a command: its value, the number of the attempt that stored it, and when."""

    value: Json
    attempt: int
    at: datetime


class FoundEffect(NamedTuple):
    """The row of an effect as an attempt finds it (sql/effects/begin.sql). `receipt` is JSON text. `is_dead`: the
    process of the attempt is known to be dead. `ended_ago`: seconds since that attempt ended."""

    state: EffectState
    key: str
    receipt: str | None
    attempt: int
    worker: str
    process: str | None
    begun_at: datetime
    is_dead: bool
    ended_ago: float

    @property
    def is_open(self) -> bool:
        """May the call have been made, without anybody knowing?"""
        return self.state in _OPEN


class Step(StrEnum):
    """What an attempt does with an open effect that it has found."""

    VERIFY = "verify"
    WAIT = "wait"
    PARK = "park"


class Decision(NamedTuple):
    """What to do, why, and for how long to wait."""

    step: Step
    why: str
    seconds: float = 0.0


def decide(found: FoundEffect, *, can_verify: bool, settle_after: float | None, is_dead: bool) -> Decision:
    """What an attempt does with an open effect. It never calls without knowing more."""
    if not can_verify:
        return Decision(Step.PARK, "there is no verify to ask")
    if is_dead:
        return Decision(Step.VERIFY, "the process of the earlier attempt is dead")
    if settle_after is None:
        return Decision(
            Step.PARK, "the process of the earlier attempt may be alive, and no settle_after says how long to wait"
        )
    left = settle_after - found.ended_ago
    if left > 0:
        return Decision(
            Step.WAIT, f"its call may still arrive until settle_after ({format_seconds(settle_after)})", left
        )
    return Decision(Step.VERIFY, f"settle_after ({format_seconds(settle_after)}) has passed")


def default_key(domain: str, command_id: str, id_: int, name: str) -> str:
    """The key of an effect for which the handler gives none: a UUID, the same in all attempts of the command."""
    digest = hashlib.sha256("\0".join((domain, command_id, str(id_), name)).encode("utf-8", "surrogatepass"))
    return str(UUID(bytes=digest.digest()[:16], version=5))


def check_effect_name(name: object) -> str:
    """A valid name of an effect: printable text of 1 to 200 characters."""
    checked = names.check_id(name, "the name of an effect")
    if len(checked) > MAX_NAME:
        raise InvalidCommandError(f"the name of an effect has {len(checked)} characters, more than {MAX_NAME}")
    return checked


def check_effect_key(key: object) -> str | None:
    """A valid idempotency key: printable text of 1 to 255 characters, or a UUID; None for the default key."""
    return None if key is None else names.to_new_id(key, "the key of an effect")


def check_settle_after(value: Duration | None) -> float | None:
    """How many seconds after the end of an attempt its call cannot arrive any more; None: nobody can say."""
    return None if value is None else parse_seconds(value, name="settle_after")


def check_verify(verify: Any) -> Any:
    """A function, or None."""
    if verify is not None and not callable(verify):
        raise TypeError(f"verify must be a function that takes an OpenEffect, not {type(verify).__name__}")
    return verify
