"""What people do to breakers, of command types and of limits, and what senders ask of them.

A breaker that a person has opened stays open until a person closes it. Everything is recorded in control_action.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import datetime
from typing import TypeVar

from commandbus import sql
from commandbus.errors import BreakerOpenError, InvalidOperationError, UnknownDomainError
from commandbus.flow.breakers.breaker import Row, explain, lock, make, move
from commandbus.flow.commands.operate import OperatorAction
from commandbus.flow.commands.send import Outgoing
from commandbus.flow.commands.unpark import Parked, UnparkBite, wake_rest
from commandbus.flow.limits.declare import CHANGED, note_action, tell, unknown_limit
from commandbus.flow.operation import Operation, Plan, Statement, Steps, operation
from commandbus.model import names
from commandbus.model.breaker import Breaker
from commandbus.model.count import MOST_COUNTED, capped
from commandbus.quick_dataclass import dataclass

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BreakerInfo:
    """A breaker for people. `kind` is "type" (`name` is "DOMAIN/COMMAND_TYPE") or "limit" (`name` is the limit's).

    `until` is when a probe follows. It is None while the breaker is closed, or after a person has opened it
    (`is_forced`). `probe` is the command_id of the probe, or the token of its permit. `stuck` and `failures` are
    the attempts that the breaker has counted within its window. `others` are attempts of the type that have ended
    in another way since the first of these began, as the workers last reported. `parked` is how many commands
    wait.
    """

    kind: str
    name: str
    state: str
    reason: str | None
    opened_at: datetime | None
    until: datetime | None
    probe: str | None
    stuck: int
    failures: int
    others: int
    parked: int
    is_forced: bool


@operation(atomic=False)
def list_breakers() -> Steps[list[BreakerInfo]]:
    """The breakers of all limits, and those of command types that have ever counted an attempt or been opened."""
    rows = yield Statement(sql.text("breakers/list"), {"most": MOST_COUNTED + 1})
    return [BreakerInfo(*(*head, capped(parked), is_forced)) for *head, parked, is_forced in rows]


@operation(atomic=True)
def open_type(domain: str, command_type: str, rule: Breaker, what: OperatorAction) -> Steps[bool]:
    """Open it until a person closes it. Returns False if a person had opened it before."""
    names.check_type(command_type)
    known = yield Statement(b"SELECT 1 FROM commandbus.domain WHERE name = %(domain)s", {"domain": domain})
    if not known:
        raise UnknownDomainError(domain)
    row = yield from make(domain, command_type, rule)
    if row.is_forced:
        return False
    forced = replace(row.opened(_by(what)), is_forced=True, until=None)
    yield from move(forced, what=what)
    return True


def close_type(domain: str, command_type: str, what: OperatorAction) -> Plan[int]:
    """Close it, even if a person opened it. Returns how many parked commands went back to the queue."""
    return (yield from _wake(domain, command_type, _close(domain, command_type, what)))


def reset_type(domain: str, command_type: str, what: OperatorAction) -> Plan[int]:
    """Clear the counts, and close it if it is open. Returns how many commands went back to the queue."""
    return (yield from _wake(domain, command_type, _reset(domain, command_type, what)))


def _wake(domain: str, command_type: str, closing: Operation[UnparkBite]) -> Plan[int]:
    return (yield from wake_rest(Parked("breaker", domain, command_type), closing))


@operation(atomic=True)
def _close(domain: str, command_type: str, what: OperatorAction) -> Steps[UnparkBite]:
    row = yield from _known(domain, command_type)
    if row.state == "CLOSED":
        raise InvalidOperationError(
            f"the breaker of command_type {command_type!r} of domain {domain!r} is not open"
        )
    moved = yield from move(row.closed(), _by(what), what=what)
    return UnparkBite(moved.released, moved.rest_after)


@operation(atomic=True)
def _reset(domain: str, command_type: str, what: OperatorAction) -> Steps[UnparkBite]:
    row = yield from _known(domain, command_type)
    moved = yield from move(row.closed(), _by(what), what=what, action="RESET")
    return UnparkBite(moved.released, moved.rest_after)


@operation(atomic=True)
def open_limit(name: str, what: OperatorAction) -> Steps[bool]:
    """Open a limit's breaker until a person closes it. Returns False if a person had opened it before."""
    is_forced, _ = yield from _limit(name)
    if is_forced:
        return False
    yield Statement(
        b"UPDATE commandbus.limits SET breaker_open = true, breaker_forced = true, "
        b"opened_at = pg_catalog.clock_timestamp(), "
        b"open_until = NULL, open_reason = %(reason)s, probe = NULL, probe_until = NULL WHERE name = %(name)s",
        {"name": name, "reason": _by(what)},
    )
    yield note_action(f"breaker {name}", "OPEN", what)
    yield tell(CHANGED + name)
    return True


@operation(atomic=True)
def close_limit(name: str, what: OperatorAction) -> Steps[int]:
    """Close a limit's breaker. Returns how many wait for the limit; each of them continues when it gets a
    permit."""
    _, is_open = yield from _limit(name)
    if not is_open:
        raise InvalidOperationError(f"the breaker of limit {name!r} is not open")
    return (yield from _close_limit(name, what, "CLOSE"))


@operation(atomic=True)
def reset_limit(name: str, what: OperatorAction) -> Steps[int]:
    """Close a limit's breaker and end its back-off, as if its API had never failed."""
    yield from _limit(name)
    yield Statement(
        b"UPDATE commandbus.limits SET step = 0, until = NULL, reason = NULL WHERE name = %(name)s", {"name": name}
    )
    return (yield from _close_limit(name, what, "RESET"))


def _limit(name: str) -> Steps[tuple[bool, bool]]:
    rows = yield Statement(
        b"SELECT breaker_forced, breaker_open FROM commandbus.limits WHERE name = %(name)s FOR UPDATE",
        {"name": name},
    )
    if not rows:
        raise (yield from unknown_limit(name))
    return rows[0][0], rows[0][1]


def _close_limit(name: str, what: OperatorAction, action: str) -> Steps[int]:
    yield Statement(
        b"UPDATE commandbus.limits SET breaker_open = false, breaker_forced = false, opened_at = NULL, "
        b"open_until = NULL, open_reason = NULL, failures = 0, blamed = '{}', vain = '{}', probe = NULL, "
        b"probe_until = NULL WHERE name = %(name)s",
        {"name": name},
    )
    yield note_action(f"breaker {name}", action, what)
    yield tell(CHANGED + name)
    rows = yield Statement(
        b"SELECT pg_catalog.count(*) FROM commandbus.parked WHERE limit_name = %(name)s AND woken_at IS NULL",
        {"name": name},
    )
    waiting: int = rows[0][0]
    return waiting


def _known(domain: str, command_type: str) -> Steps[Row]:
    names.check_type(command_type)
    row = yield from lock(domain, command_type)
    if row is None:
        known = yield Statement(b"SELECT 1 FROM commandbus.domain WHERE name = %(domain)s", {"domain": domain})
        if not known:
            raise UnknownDomainError(domain)
        raise InvalidOperationError(f"{_name(domain, command_type)} has counted nothing and was never opened")
    return row


def _name(domain: str, command_type: str) -> str:
    return f"the breaker of command_type {command_type!r} of domain {domain!r}"


def _by(what: OperatorAction) -> str:
    return f"by {what.operator}" + (f": {what.reason}" if what.reason else "")


# --- what senders ask -------------------------------------------------------------------------------------------


class Guard:
    """Refuses commands whose breaker is open, for the command types for which the sender has configured that.

    After `reset`, commands are accepted again: one of them is the probe.
    """

    def __init__(self, domain: str, refuses: Callable[[str], bool]) -> None:
        self._domain = domain
        self._refuses = refuses
        self._open: dict[str, str] = {}

    def may_refuse(self, command_type: str) -> bool:
        """Does the sender refuse commands of this type while its breaker is open?"""
        return self._refuses(command_type)

    def before(self, sending: Operation[T], types: Iterable[str] = ()) -> Operation[T]:
        """Returns the sending, preceded by a look at the breakers in the same transaction."""

        def steps() -> Steps[T]:
            rows = yield Statement(sql.text("breakers/refusing"), {"domain": self._domain})
            self._open = {
                command_type: explain(state, is_forced=is_forced, until=until, reason=reason, now=now)
                for command_type, state, is_forced, until, reason, now in rows
                if self._refuses(command_type)
            }
            for command_type in types:
                self._check(command_type)
            return (yield from sending.steps)

        return Operation(steps(), sending.atomic, sending.whole)

    def watch(self, outgoing: Iterable[Outgoing]) -> Iterator[Outgoing]:
        """Pass on commands as they are sent. Raises BreakerOpenError at the first that is refused."""
        for item in outgoing:
            self._check(item.command_type)
            yield item

    def _check(self, command_type: str) -> None:
        if command_type in self._open:
            raise BreakerOpenError(self._domain, command_type, self._open[command_type])
