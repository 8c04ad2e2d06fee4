"""Key limits: how many commands with the same key run at once, and in which order. Checks, no I/O."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias, get_args

from commandbus.errors import InvalidCommandError
from commandbus.model import names

if TYPE_CHECKING:
    from commandbus.model.command import NewCommand

OnFailure: TypeAlias = Literal["block", "step_aside"]
ON_FAILURE: Final[tuple[str, ...]] = get_args(OnFailure)


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
        names.check_count(concurrency, "concurrency", most=1_000_000)
        if not isinstance(ordered, bool):
            raise InvalidCommandError(f"ordered must be True or False, not {names.shown(ordered)}")
        if ordered and concurrency != 1:
            raise InvalidCommandError(
                f"ordered needs concurrency=1, not {concurrency}: commands that run at once have no order"
            )
        if on_failure is None:
            on_failure = "block" if ordered else "step_aside"
        if on_failure not in ON_FAILURE:
            raise InvalidCommandError(
                f"on_failure must be one of {', '.join(ON_FAILURE)}, not {names.shown(on_failure)}"
            )
        return cls(domain, name, concurrency, ordered, on_failure)


class KeyLine(NamedTuple):
    """One key with unfinished commands. `blocked_by` is a command in the troubleshooting queue that keeps a place;
    `override_ends_at` is when another concurrency of this key ends."""

    domain: str
    key_limit: str
    key: str
    concurrency: int
    released: int
    waiting: int
    blocked_by: str | None
    override_ends_at: datetime | None


def check_key(new: NewCommand, *, is_accepted: bool) -> None:
    """Raise InvalidCommandError if a command's key cannot be used."""
    if new.key is None and new.key_limit is None:
        return
    if new.key is None:
        raise InvalidCommandError(f"key_limit ({names.shown(new.key_limit)}) needs key")
    if new.key_limit is None:
        raise InvalidCommandError(f"key ({names.shown(new.key)}) needs key_limit: the name of a key limit")
    if not is_accepted:
        raise InvalidCommandError(f"key ({names.shown(new.key)}) is for send and send_many; leave it out here")
    names.check_id(new.key, "key")
    names.check_id(new.key_limit, "key_limit")
    for name in ("delay", "at", "unique"):
        if (value := getattr(new, name)) is not None:
            raise InvalidCommandError(
                f"{name} ({names.shown(value)}) cannot be given with key: the line of the key decides when the "
                f"command runs; leave one of them out"
            )
