"""TroubleshootingQueue and AsyncTroubleshootingQueue: commands that need a person, and what that person can do.

Every action is recorded with the name of its operator. If two operators act on one command, one wins
and the other gets InvalidOperationError.
"""

from __future__ import annotations

from commandbus.bus import AsyncCommandBus, CommandBus, whoami
from commandbus.bus.one_body import awaited, short
from commandbus.bus.repositories.commands import AsyncCommandRepository, CommandRepository
from commandbus.flow.commands import operate, tsq
from commandbus.flow.commands.operate import OperatorAction, Selection
from commandbus.flow.operation import then
from commandbus.model import names, payload
from commandbus.model.count import Count
from commandbus.model.json_values import JsonValue


def _complete(operator: str | None, result: JsonValue, reason: str | None, max_bytes: int) -> OperatorAction:
    text = payload.dump(result, what="result", max_bytes=max_bytes)
    return operate.operator_action(operator or whoami(), reason, "COMPLETE", text)


def _selection(domain: str, command_type: str | None, error_code: str | None) -> Selection:
    if command_type is not None:
        names.check_type(command_type)
    if error_code is not None:
        names.check_id(error_code, "error_code")
    return Selection(names.check_domain(domain), command_type=command_type, error_code=error_code)


class TroubleshootingQueue:
    """The troubleshooting queue for sync code."""

    def __init__(self, bus: CommandBus) -> None:
        self._bus = bus
        self._commands = bus.commands

    list = short("_commands", CommandRepository.list_in_tsq)
    operator_retry = short("_commands", CommandRepository.operator_retry)
    operator_cancel = short("_commands", CommandRepository.operator_cancel)
    operator_complete = short("_commands", CommandRepository.operator_complete)

    def count(
        self,
        domain: str | None = None,
        command_type: str | None = None,
        *,
        error_code: str | None = None,
        fingerprint: str | None = None,
    ) -> int:
        """How many commands need a person, exactly. With a hundred thousand of them this takes a while."""
        found = tsq.count_tsq(
            domain=domain, command_type=command_type, error_code=error_code, fingerprint=fingerprint, most=None
        )
        return self._bus.run(then(found, lambda counts: sum(counts.values())))

    def count_by_type(
        self,
        domain: str | None = None,
        command_type: str | None = None,
        *,
        error_code: str | None = None,
        fingerprint: str | None = None,
    ) -> dict[tuple[str, str], Count]:
        """How many commands need a person, by (domain, command_type). Of each type, up to 10,000 are counted: a
        `Count` that `is_capped` is shown as "10,000+"."""
        found = tsq.count_tsq(
            domain=domain, command_type=command_type, error_code=error_code, fingerprint=fingerprint
        )
        return self._bus.run(found)

    def retry_all(
        self,
        domain: str,
        command_type: str | None = None,
        *,
        error_code: str | None = None,
        operator: str | None = None,
        reason: str | None = None,
    ) -> int:
        """Retry all that match. Returns how many."""
        operator_action = operate.operator_action(operator or whoami(), reason, "RETRY")
        return self._bus.follow(operate.act_on_all(_selection(domain, command_type, error_code), operator_action))

    def cancel_all(
        self,
        domain: str,
        command_type: str | None = None,
        *,
        error_code: str | None = None,
        operator: str | None = None,
        reason: str | None = None,
    ) -> int:
        """Cancel all that match. Returns how many."""
        operator_action = operate.operator_action(operator or whoami(), reason, "CANCEL")
        return self._bus.follow(operate.act_on_all(_selection(domain, command_type, error_code), operator_action))

    def complete_all(
        self,
        domain: str,
        command_type: str | None = None,
        *,
        result: JsonValue = None,
        error_code: str | None = None,
        operator: str | None = None,
        reason: str | None = None,
    ) -> int:
        """Complete all that match with one result. Returns how many."""
        operator_action = _complete(operator, result, reason, self._bus.settings.max_payload_bytes)
        return self._bus.follow(operate.act_on_all(_selection(domain, command_type, error_code), operator_action))


class AsyncTroubleshootingQueue:
    """The troubleshooting queue for async code: the same methods, awaited."""

    def __init__(self, bus: AsyncCommandBus) -> None:
        self._bus = bus
        self._commands = bus.commands

    list = short("_commands", AsyncCommandRepository.list_in_tsq)
    operator_retry = short("_commands", AsyncCommandRepository.operator_retry)
    operator_cancel = short("_commands", AsyncCommandRepository.operator_cancel)
    operator_complete = short("_commands", AsyncCommandRepository.operator_complete)
    count = awaited(TroubleshootingQueue.count)
    count_by_type = awaited(TroubleshootingQueue.count_by_type)
    retry_all = awaited(TroubleshootingQueue.retry_all)
    cancel_all = awaited(TroubleshootingQueue.cancel_all)
    complete_all = awaited(TroubleshootingQueue.complete_all)
