"""PlanRepository and AsyncPlanRepository: retry, cancel or complete many commands, after a preview."""

from __future__ import annotations

from collections.abc import Sequence

from commandbus.bus.base import whoami
from commandbus.bus.one_body import awaited
from commandbus.bus.repositories.base import AsyncRepository, Repository
from commandbus.errors import InvalidCommandError
from commandbus.flow.commands.operate import OperatorAction, operator_action
from commandbus.flow.plans import operate
from commandbus.model import payload
from commandbus.model.durations import Duration, parse_seconds
from commandbus.model.json_values import JsonValue
from commandbus.model.page import Page
from commandbus.model.plan import PlanAction, PlannedCommand, PlanRecord, check_action, check_filter


class PlanRepository(Repository):
    """Plans: `bus.plans`, or `PlanRepository(pool)`."""

    def preview(
        self,
        domain: str,
        action: PlanAction,
        *,
        command_type: str | None = None,
        error_code: str | None = None,
        fingerprint: str | None = None,
        command_ids: Sequence[str] | None = None,
        result: JsonValue = None,
        over: Duration = 0,
        operator: str | None = None,
        reason: str | None = None,
        conn: object = None,
    ) -> PlanRecord:
        """Make a plan: "retry", "cancel" or "complete" the commands of a domain's troubleshooting queue that match
        all of `command_type`, `error_code`, `fingerprint` and `command_ids`. Nothing happens until `start`.

        The plan has exactly the commands that match now. It is carried out over this time (`over`; 0: as fast as
        the workers of the domain can). `result` is that of "complete".
        """
        if result is not None and action != "complete":
            raise InvalidCommandError(f"result is for a plan that completes commands, not one to {action!r}")
        text = payload.dump(result, what="result", max_bytes=self._bus.settings.max_payload_bytes)
        what = operator_action(operator or whoami(), reason, None, text if action == "complete" else None)
        preview = operate.preview(
            domain,
            check_action(action),
            check_filter(command_type, error_code, command_ids, fingerprint),
            parse_seconds(over, name="over", error=InvalidCommandError),
            what,
        )
        return self._bus.run(preview, conn)

    def start(
        self, plan_id: int, *, operator: str | None = None, reason: str | None = None, conn: object = None
    ) -> PlanRecord:
        """Start a plan: the workers of its domain carry it out, also after this program has ended.

        Raises PlanChangedError if its filter does not choose exactly the commands of the preview any more, and
        InvalidOperationError if somebody has started or stopped it. The audit trail of each command names the
        operator who started it.
        """
        return self._bus.run(operate.start(plan_id, _action(operator, reason)), conn)

    def stop(
        self, plan_id: int, *, operator: str | None = None, reason: str | None = None, conn: object = None
    ) -> PlanRecord:
        """Stop a plan, or drop one that was not started. What it has done stays; the rest stays in the
        troubleshooting queue."""
        return self._bus.run(operate.stop(plan_id, _action(operator, reason)), conn)

    def get(self, plan_id: int, *, conn: object = None) -> PlanRecord:
        """One plan, and how far it is. Raises PlanNotFoundError."""
        return self._bus.run(operate.get(plan_id), conn)

    def list(
        self, domain: str | None = None, *, limit: int = 50, cursor: str | None = None, conn: object = None
    ) -> Page[PlanRecord]:
        """Plans of a domain, or of all, newest first."""
        return self._bus.run(operate.list_plans(domain, limit=limit, cursor=cursor), conn)

    def commands(
        self, plan_id: int, *, limit: int = 50, cursor: str | None = None, conn: object = None
    ) -> Page[PlannedCommand]:
        """The commands of a plan, in the order in which it deals with them, and what became of each."""
        return self._bus.run(operate.list_commands(plan_id, limit=limit, cursor=cursor), conn)


class AsyncPlanRepository(AsyncRepository):
    """Plans for async code: `bus.plans`, or `AsyncPlanRepository(pool)`. The same methods, awaited."""

    preview = awaited(PlanRepository.preview)
    start = awaited(PlanRepository.start)
    stop = awaited(PlanRepository.stop)
    get = awaited(PlanRepository.get)
    list = awaited(PlanRepository.list)
    commands = awaited(PlanRepository.commands)


def _action(operator: str | None, reason: str | None) -> OperatorAction:
    return operator_action(operator or whoami(), reason)
