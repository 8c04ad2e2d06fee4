"""A plan: what an operator wants to do to a set of commands in the troubleshooting queue, and how far it is.

    preview ──► PREVIEWED ──start──► RUNNING ──► DONE
                    └──────stop──────────┴─────► STOPPED

The preview stores the set. A plan starts only if its filter still chooses exactly this set, and only once.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from enum import StrEnum
from typing import Final, Literal

from commandbus.errors import InvalidCommandError
from commandbus.model import names
from commandbus.model.counting import counted
from commandbus.model.durations import format_seconds
from commandbus.model.fingerprint import check_fingerprint
from commandbus.model.json_values import Json
from commandbus.quick_dataclass import dataclass

MOST: Final = 1_000_000
"""Commands of one plan."""
MOST_IDS: Final = 1000
"""Commands that a plan may name one by one."""

PlanAction = Literal["retry", "cancel", "complete"]
ACTIONS: Final[tuple[PlanAction, ...]] = ("retry", "cancel", "complete")


class PlanState(StrEnum):
    """How far a plan is."""

    PREVIEWED = "PREVIEWED"
    RUNNING = "RUNNING"
    DONE = "DONE"
    STOPPED = "STOPPED"

    @property
    def is_final(self) -> bool:
        """Nothing moves a plan out of this state."""
        return self in (PlanState.DONE, PlanState.STOPPED)


@dataclass(frozen=True, slots=True)
class PlanGroup:
    """How many commands of a plan have this type and this error code."""

    command_type: str
    error_code: str | None
    count: int


@dataclass(frozen=True, slots=True)
class PlanFilter:
    """How the commands of a plan were chosen in their domain's troubleshooting queue. All conditions hold."""

    command_type: str | None = None
    error_code: str | None = None
    command_ids: tuple[str, ...] | None = None
    fingerprint: str | None = None


@dataclass(frozen=True, slots=True)
class PlannedCommand:
    """One command of a plan. `state`: WAITING, MOVED (the plan did it), SKIPPED (the command had left the
    troubleshooting queue), or LOCKED (another session had locked it: the plan comes back to it). The error is that
    of a command that still needs a person."""

    id: int
    command_id: str | None
    command_type: str | None
    entered_at: datetime
    state: Literal["WAITING", "MOVED", "SKIPPED", "LOCKED"]
    error_type: str | None
    error_code: str | None
    error: str | None


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """A plan at the moment of asking. `groups` has the twenty largest groups of its commands. `over_seconds` is
    over how long it is spread; 0: as fast as the workers can. `locked` counts those whose turn has come, but that
    another session had locked then. `note` says why it stopped."""

    id: int
    domain: str
    action: PlanAction
    filter: PlanFilter
    result: Json
    over_seconds: float
    state: PlanState
    total: int
    moved: int
    skipped: int
    locked: int
    groups: list[PlanGroup]
    previewed_by: str
    reason: str | None
    created_at: datetime
    started_by: str | None
    started_at: datetime | None
    stopped_by: str | None
    note: str | None
    finished_at: datetime | None

    @property
    def left(self) -> int:
        """How many commands it has not dealt with."""
        return self.total - self.moved - self.skipped

    @property
    def progress(self) -> float:
        """The share that it has dealt with."""
        return 1 - self.left / self.total

    @property
    def text(self) -> str:
        """What it does, as a sentence without its end."""
        return f"{_EFFECTS[self.action].format(counted(self.total, 'command'))} of {self._subject}, {self._pace}"

    @property
    def progress_text(self) -> str:
        """How far it is, as a sentence without its end."""
        done = f"{self.moved} of {self.total} {_DONE[self.action]}"
        if self.skipped:
            done += f", {self.skipped} skipped because somebody else had moved them"
        return f"{done}, {self.left} left{self._locked_text}"

    @property
    def _locked_text(self) -> str:
        if not self.locked:
            return ""
        follow = "it follows" if self.locked == 1 else "they follow"
        return f" (another session has locked {self.locked} of them: {follow})"

    @property
    def _subject(self) -> str:
        chosen = self.filter
        text = self.domain if chosen.command_type is None else f"{self.domain}/{chosen.command_type}"
        if chosen.error_code is not None:
            text += f" with error code {chosen.error_code}"
        if chosen.fingerprint is not None:
            text += f" with failure {chosen.fingerprint}"
        return text

    @property
    def _pace(self) -> str:
        if not self.over_seconds:
            return "as fast as the workers of the domain can"
        per_minute = self.total * 60 / self.over_seconds
        return f"evenly over {format_seconds(self.over_seconds)} (about {per_minute:.3g} a minute)"


_EFFECTS: Final = {
    "retry": "put {} into the queue again, attempts counted from 1,",
    "cancel": "end {} as CANCELED",
    "complete": "end {} as COMPLETED, with the result given here,",
}
_DONE: Final = {"retry": "retried", "cancel": "canceled", "complete": "completed"}


def check_action(action: object) -> PlanAction:
    """The action of a plan."""
    for known in ACTIONS:
        if action == known:
            return known
    raise InvalidCommandError(f"action {names.shown(action)} is not one of a plan: use {', '.join(ACTIONS)}")


def check_filter(
    command_type: object, error_code: object, command_ids: Sequence[object] | None, fingerprint: object = None
) -> PlanFilter:
    """How the set is chosen. What is not valid is named."""
    ids: tuple[str, ...] | None = None
    if command_ids is not None:
        if isinstance(command_ids, str) or not 0 < len(command_ids) <= MOST_IDS:
            raise InvalidCommandError(f"command_ids must be a list of 1 to {MOST_IDS} ids")
        ids = tuple(dict.fromkeys(names.to_id(id_) for id_ in command_ids))
    return PlanFilter(
        None if command_type is None else names.check_type(command_type),
        None if error_code is None else names.check_id(error_code, "error_code"),
        ids,
        check_fingerprint(fingerprint),
    )
