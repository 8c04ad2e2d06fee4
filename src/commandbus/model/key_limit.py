"""Key limits: how many commands with the same key run at once, and in which order. Checks, no I/O."""

from __future__ import annotations

import re
from datetime import datetime
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias, get_args

from commandbus.errors import ConfigurationError, InvalidCommandError
from commandbus.model import names
from commandbus.model.durations import roughly
from commandbus.quick_dataclass import dataclass

if TYPE_CHECKING:
    from commandbus.model.command import NewCommand

OnFailure: TypeAlias = Literal["block", "step_aside"]
ON_FAILURE: Final[tuple[str, ...]] = get_args(OnFailure)
MOST_PLACES: Final = 1_000_000
MOST_COUNTED: Final = 100_000
"""So many commands in line are counted, and no more."""
LONGEST_PATH: Final = 200
NO_KEY: Final = "(no key)"
_PATH = re.compile(r"(data|headers)(\.[^.\x00-\x1f]+)*\Z")


@dataclass(frozen=True, slots=True)
class KeyLimit:
    """How many commands of one key may be released at once.

    `ordered`: strictly one after the other, in the order of sending, also across retries. `on_failure` says what a
    command in the troubleshooting queue does to its key: it keeps its place until a person has decided ("block"),
    or gives it up ("step_aside").
    """

    domain: str
    name: str
    concurrency: int
    ordered: bool
    on_failure: OnFailure

    @classmethod
    def make(
        cls, domain: str, name: str, *, concurrency: int, ordered: bool, on_failure: OnFailure | None
    ) -> KeyLimit:
        """Returns a key limit whose values were checked. Without `on_failure`, an ordered one blocks."""
        names.check_domain(domain)
        names.check_id(name, "key_limit")
        check_places(concurrency, ordered, on_failure, error=InvalidCommandError)
        return cls(domain, name, concurrency, ordered, on_failure or default_of(ordered=ordered))


class KeyRule(NamedTuple):
    """The key limit of a command type, and where a command of this type has its key: "data.tenant_id"."""

    key_limit: str
    key_path: str


class KeyLine(NamedTuple):
    """One key with unfinished commands. `released` is how many of them have a place, `waiting` how many wait for
    one (counted up to 100,000). `blocked_by` is a command in the troubleshooting queue that keeps a place;
    `override_ends_at` is when another concurrency of this key ends; `next_seconds` is about when the next place
    becomes free, if that is known. The key "" is of commands that have nothing at the path of the key."""

    domain: str
    key_limit: str
    key: str
    concurrency: int
    released: int
    waiting: int
    blocked_by: str | None
    override_ends_at: datetime | None
    next_seconds: float | None = None

    def __str__(self) -> str:
        name = f"{self.key_limit} {self.key or NO_KEY}"
        waiting = f"{self.waiting:,}{'+' if self.waiting >= MOST_COUNTED else ''} waiting"
        return f"{name}: {self.released} of {self.concurrency}, {waiting}{next_text(self.next_seconds)}"


class KeyOverride(NamedTuple):
    """Another concurrency of one key, until a moment. The key None stands for all keys that have none of their
    own."""

    domain: str
    key_limit: str
    key: str | None
    concurrency: int
    ends_at: datetime


def next_text(seconds: float | None) -> str:
    """The end of a sentence: when the next command of a key begins."""
    if seconds is None:
        return ""
    return f", next in about {roughly(seconds)}"


def check_path(path: object, *, of: str) -> str:
    """Returns the path of a key in a command. ConfigurationError names what is wrong."""
    if isinstance(path, str) and len(path) <= LONGEST_PATH and _PATH.match(path):
        return path
    raise ConfigurationError(
        f"{of}: key must be a path in a command such as 'data.tenant_id' or 'headers.tenant', "
        f"not {names.shown(path)}"
    )


def check_places(
    concurrency: object,
    ordered: object,
    on_failure: object,
    *,
    of: str = "",
    error: type[ValueError] = ConfigurationError,
) -> None:
    """Raise an error that names the value if a key limit cannot be like that."""
    prefix = f"{of}: " if of else ""
    is_number = isinstance(concurrency, int) and not isinstance(concurrency, bool)
    if not is_number or not 1 <= concurrency <= MOST_PLACES:  # type: ignore[operator]
        raise error(
            f"{prefix}concurrency must be a whole number from 1 to {MOST_PLACES}, not {names.shown(concurrency)}"
        )
    if not isinstance(ordered, bool):
        raise error(f"{prefix}ordered must be True or False, not {names.shown(ordered)}")
    if ordered and concurrency != 1:
        raise error(
            f"{prefix}ordered needs concurrency=1, not {concurrency}: commands that run at once have no order"
        )
    if on_failure is not None and on_failure not in ON_FAILURE:
        raise error(f"{prefix}on_failure must be one of {', '.join(ON_FAILURE)}, not {names.shown(on_failure)}")


def default_of(*, ordered: bool) -> OnFailure:
    """What a command in the troubleshooting queue does to its key, if nothing is said."""
    return "block" if ordered else "step_aside"


def check_key(new: NewCommand) -> None:
    """Raise InvalidCommandError if a command's key cannot be used."""
    if new.key is None and new.key_limit is None:
        return
    if new.key is None:
        raise InvalidCommandError(f"key_limit ({names.shown(new.key_limit)}) needs key")
    names.check_id(new.key, "key")
    if new.key_limit is not None:
        names.check_id(new.key_limit, "key_limit")
