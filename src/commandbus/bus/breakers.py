"""Breakers on the bus: the methods of both shells."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, TypeVar

from commandbus.bus.base import BusBase, whoami
from commandbus.bus.one_body import awaited
from commandbus.errors import InvalidOperationError
from commandbus.flow.operation import Operation, Plan, then
from commandbus.lazy import lazy
from commandbus.model import names
from commandbus.model.limit import check_limit_name
from commandbus.model.page import Page

if TYPE_CHECKING:
    from commandbus.flow.breakers import operate as breaker_operate
    from commandbus.flow.breakers.operate import BreakerInfo
    from commandbus.flow.commands import operate
    from commandbus.flow.commands.operate import OperatorAction
else:
    breaker_operate = lazy("commandbus.flow.breakers.operate")
    operate = lazy("commandbus.flow.commands.operate")

T = TypeVar("T")


class _BreakerOperations(BusBase):
    """Operations made from arguments. A command type's breaker is named by domain and type, a limit's by
    `limit`."""

    def _opening(
        self, domain: str | None, command_type: str | None, limit: str | None, who: str | None, why: str | None
    ) -> Operation[bool]:
        what = _operator_action(who, why)
        if limit is not None:
            return breaker_operate.open_limit(_limit(domain, command_type, limit), what)
        name, kind = _type(domain, command_type)
        return breaker_operate.open_type(name, kind, self.settings.breaker_of(name, kind), what)

    def _closing(
        self, domain: str | None, command_type: str | None, limit: str | None, who: str | None, why: str | None
    ) -> Plan[int]:
        what = _operator_action(who, why)
        if limit is not None:
            return _one(breaker_operate.close_limit(_limit(domain, command_type, limit), what))
        return breaker_operate.close_type(*_type(domain, command_type), what)

    def _resetting(
        self, domain: str | None, command_type: str | None, limit: str | None, who: str | None, why: str | None
    ) -> Plan[int]:
        what = _operator_action(who, why)
        if limit is not None:
            return _one(breaker_operate.reset_limit(_limit(domain, command_type, limit), what))
        return breaker_operate.reset_type(*_type(domain, command_type), what)


class BreakerMethods(_BreakerOperations):
    """What CommandBus can do with breakers."""

    @abstractmethod
    def run(self, operation: Operation[T], conn: object = None) -> T: ...

    @abstractmethod
    def follow(self, plan: Plan[T], conn: object = None) -> T: ...

    def breakers(self) -> Page[BreakerInfo]:
        """The breakers of command types that have counted something, and the breakers of all limits."""
        return self.run(then(breaker_operate.list_breakers(), Page))

    def open_breaker(
        self,
        domain: str | None = None,
        command_type: str | None = None,
        *,
        limit: str | None = None,
        operator: str | None = None,
        reason: str | None = None,
    ) -> bool:
        """Open the breaker of a command type, or of a limit, until a person closes it. Returns False if a person
        had opened it already.

        Running attempts go on; a waiting command is parked when a worker claims it.
        """
        return self.run(self._opening(domain, command_type, limit, operator, reason))

    def close_breaker(
        self,
        domain: str | None = None,
        command_type: str | None = None,
        *,
        limit: str | None = None,
        operator: str | None = None,
        reason: str | None = None,
    ) -> int:
        """Close an open breaker. Returns how many parked commands go on (for a limit: as permits become free)."""
        return self.follow(self._closing(domain, command_type, limit, operator, reason))

    def reset_breaker(
        self,
        domain: str | None = None,
        command_type: str | None = None,
        *,
        limit: str | None = None,
        operator: str | None = None,
        reason: str | None = None,
    ) -> int:
        """Clear the counts of a breaker, and close it if it is open. Returns the same as `close_breaker`."""
        return self.follow(self._resetting(domain, command_type, limit, operator, reason))


class AsyncBreakerMethods(_BreakerOperations):
    """What AsyncCommandBus can do with breakers: the same, awaited."""

    breakers = awaited(BreakerMethods.breakers)
    open_breaker = awaited(BreakerMethods.open_breaker)
    close_breaker = awaited(BreakerMethods.close_breaker)
    reset_breaker = awaited(BreakerMethods.reset_breaker)


def _operator_action(operator: str | None, reason: str | None) -> OperatorAction:
    return operate.operator_action(operator or whoami(), reason)


def _one(operation: Operation[T]) -> Plan[T]:
    result: T = yield operation
    return result


def _type(domain: str | None, command_type: str | None) -> tuple[str, str]:
    if domain is None or command_type is None:
        raise InvalidOperationError("no breaker is named; give a domain and a command_type, or limit=NAME")
    return names.check_domain(domain), names.check_type(command_type)


def _limit(domain: str | None, command_type: str | None, limit: str) -> str:
    if domain is not None or command_type is not None:
        raise InvalidOperationError("give a domain and a command_type, or limit=NAME, not both")
    return check_limit_name(limit)
