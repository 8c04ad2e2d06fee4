"""What `top` shows, as text: from one look at the fleet to rows. Text of others is escaped here, once for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from commandbus.flow.commands.inspect import DomainStatus
from commandbus.flow.workers.slots import SlotInfo
from commandbus.flow.workers.view import WorkerView, supervisors
from commandbus.model.counting import counted
from commandbus.model.ledger_bar import how_long
from commandbus.model.minute_figures import HourFigures
from commandbus.model.safe_text import escaped
from commandbus.troubleshooting import TroubleshootingQueue
from commandbus.web.attention import Fleet, concerns, headline

if TYPE_CHECKING:
    from commandbus.bus import CommandBus

UNKNOWN: Final = "-"
BAR: Final = 10
_LEVELS: Final = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class DomainRow:
    """A line of the table of domains."""

    domain: str
    cells: tuple[str, ...]
    details: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SlotRow:
    """A line of the table of slots. `command` is (domain, id) of what runs there, as it is; None if nothing
    does."""

    worker: str
    cells: tuple[str, ...]
    details: tuple[str, ...]
    command: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class TopView:
    """One screen."""

    headline: str
    concerns: list[str]
    domains: list[DomainRow]
    slots: list[SlotRow]


def look(bus: CommandBus) -> Fleet:
    """One look at everything. Workers publish their slots from now on, for some seconds."""
    in_tsq = TroubleshootingQueue(bus).count_by_type()
    return Fleet(
        bus.status().items,
        bus.workers().items,
        bus.limits().items,
        bus.breakers().items,
        in_tsq,
        bus.watch_slots().items,
        bus.last_hour().items,
        bus.list_failures(in_troubleshooting=True).items if in_tsq else [],
    )


def view_of(fleet: Fleet, wanted: str = "") -> TopView:
    """What is shown of it. `wanted` must be in a line, or the line is left out."""
    found = concerns(fleet)
    hours = {hour.domain: hour for hour in fleet.hours}
    domains = [
        _domain(item, hours.get(item.domain), is_served=item.domain in fleet.served) for item in fleet.domains
    ]
    live = [worker for worker in fleet.workers if worker.state != "STOPPED"]
    views = [view for group in supervisors(live, fleet.slots) for view in group.workers]
    slots = [row for view in views for row in _slots(view)]
    return TopView(
        escaped(headline(found)),
        [escaped(item.text) for item in found],
        [row for row in domains if _has(row.cells, wanted)],
        [row for row in slots if _has(row.cells, wanted)],
    )


def _has(cells: Sequence[str], wanted: str) -> bool:
    return wanted.lower() in " ".join(cells).lower()


def _domain(item: DomainStatus, hour: HourFigures | None, *, is_served: bool) -> DomainRow:
    name = escaped(item.domain) + (" (paused)" if item.is_paused else "")
    waits = (None, None) if hour is None else (hour.wait_p50, hour.wait_p99)
    rate = f"{item.settled_per_second:.1f}/s" if is_served else UNKNOWN
    cells = (
        name, str(item.ready), _time(item.oldest_seconds), str(item.delayed), str(item.parked), str(item.running),
        str(item.in_tsq), *map(_time, waits), rate, sparkline(hour),
    )  # fmt: skip
    marks = () if hour is None else tuple(hour.marks)
    details = (
        f"{name}: {counted(item.ready, 'command')} could run now, the oldest for {_time(item.oldest_seconds)}",
        f"delayed {item.delayed}, parked {item.parked}, running {item.running}, in troubleshooting {item.in_tsq}",
        f"wait until claimed, last 5 minutes: 50% {_time(waits[0])}, 99% {_time(waits[1])}",
        f"settled {rate}" + ("" if is_served else " (no live worker serves it)"),
        *(f"paused type: {escaped(kind)}" for kind in item.paused_types),
        *(f"version {escaped(mark.version)} since {mark.at.astimezone():%H:%M:%S}" for mark in marks),
    )
    return DomainRow(item.domain, cells, details)


def sparkline(hour: HourFigures | None) -> str:
    """What was settled in the last hour, a character for two minutes; `·` where nobody knows."""
    values = [] if hour is None else [minute.settled for minute in hour.minutes]
    known = [value for value in values if value is not None]
    if not known:
        return "no figures yet"
    pairs = [[value for value in values[at : at + 2] if value is not None] for at in range(0, len(values), 2)]
    return "".join("·" if not pair else _level(max(pair), max(known)) for pair in pairs)


def _level(value: int, most: int) -> str:
    return _LEVELS[0 if not most else round(value / most * (len(_LEVELS) - 1))]


def _slots(view: WorkerView) -> list[SlotRow]:
    worker = escaped(view.info.id)
    if view.slots is None:
        text = f"silent for {_time(view.info.heartbeat_age_seconds)}" if view.is_silent else "not known yet"
        return [SlotRow(view.info.id, (text, "", "", "", "", worker), _worker_details(view))]
    rows = [_slot(slot, worker, view) for slot in view.slots.slots]
    if view.slots.left_out:
        rows.append(SlotRow(view.info.id, ("busy", f"{view.slots.left_out} more", "", "", "", worker), ()))
    if view.slots.idle:
        text = f"{counted(view.slots.idle, 'slot')}"
        rows.append(SlotRow(view.info.id, (view.rest, text, "", "", "", worker), _worker_details(view)))
    return rows


def _slot(slot: SlotInfo, worker: str, view: WorkerView) -> SlotRow:
    sign = {"STUCK": "!! STUCK", "STOPPING": "! stopping"}.get(slot.phase, slot.phase.lower())
    chunk = f" (chunk of {slot.commands})" if slot.commands > 1 else ""
    cells = (
        sign, escaped(f"{slot.domain}/{slot.command_type}") + chunk, escaped(slot.command_id), _time(slot.seconds),
        _share(slot), worker,
    )  # fmt: skip
    kind = "for processes" if slot.kind == "messages" else slot.kind
    details = (
        f"{escaped(slot.domain)}/{escaped(slot.command_type)} {escaped(slot.command_id)}, attempt {slot.attempt}",
        f"{slot.phase.lower()} for {_time(slot.seconds)} ({kind}), may take {_time(slot.timeout_seconds)}",
        *([escaped(slot.reason)] if slot.reason else []),
        *_worker_details(view),
    )
    return SlotRow(view.info.id, cells, details, (slot.domain, slot.command_id))


def _share(slot: SlotInfo) -> str:
    if slot.share is None:
        return "no deadline" if slot.phase == "RUNNING" else ""
    full = round(slot.share * BAR)
    return f"[{'#' * full}{'.' * (BAR - full)}] of {_time(slot.timeout_seconds)}"


def _worker_details(view: WorkerView) -> tuple[str, ...]:
    info, slots = view.info, view.slots
    found = [
        f"worker {escaped(info.id)} on {escaped(info.host)}, process {info.pid}, {info.state.lower()}",
        f"health {view.health or 'not known'}" + "".join(f"; {escaped(reason)}" for reason in view.reasons),
    ]
    if slots is not None and slots.memory_mb is not None:
        found.append(f"memory {slots.memory_mb:.0f} MB, replaced at {slots.max_memory_mb or 'no limit'}")
    return tuple(found)


def _time(seconds: float | None) -> str:
    return UNKNOWN if seconds is None else how_long(max(0.0, seconds))
