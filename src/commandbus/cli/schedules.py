"""`schedules list|next|show|create|pause|resume|delete|run-now`: commands that are sent at certain times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

import click

from commandbus.cli.parameters import DURATION, JsonType, operator_options, page_options
from commandbus.cli.render import compact, print_fields, print_table, say, say_heading
from commandbus.cli.session import CliGroup, CliSession, check_known
from commandbus.cli.table import columns
from commandbus.errors import ScheduleNotFoundError
from commandbus.flow.commands.known_types import doubt_type
from commandbus.flow.limits.inspect import ControlAction
from commandbus.flow.schedules.operate import ScheduleRecord, list_actions
from commandbus.flow.schedules.timeline import ScheduleTimeline
from commandbus.model.durations import format_seconds
from commandbus.model.priority import PRIORITIES
from commandbus.model.schedule import text_of

FIRINGS = 5
ACTIONS = 10


@click.group(cls=CliGroup)
def schedules() -> None:
    """Schedules: commands that are sent by the clock."""


@schedules.command("list")
@click.argument("domain", required=False)
@page_options
@click.pass_obj
def list_schedules(session: CliSession, domain: str | None, limit: int, cursor: str | None) -> None:
    """List schedules, of one DOMAIN or of all: when they fire, when next, and what became of the last command.

    The source of a schedule that workers declare is `code`: it lives while such a worker runs. The others were
    created at run time, and live until somebody deletes them.
    """
    with session.bus() as bus:
        found = bus.schedules.list(domain, limit=limit, cursor=cursor)
        if not found:
            check_known(bus, domain)
    session.answer(
        found.items,
        lambda: print_table(
            columns("domain =name +times state next? last_fired?? last_command? source?? ~note???"),
            [(item.domain, item.name, item.times.text, _state(item), _at(item.next_at), _at(item.last_fired),
              _last(item), _source(item), item.note) for item in found],
            empty="there are no schedules",
        ),
    )  # fmt: skip
    session.say_more(found)


@schedules.command()
@click.argument("domain")
@click.argument("name")
@click.option("--firings", type=click.IntRange(0, 1000), default=FIRINGS, show_default=True,
              help="How many of the next firings to show.")  # fmt: skip
@click.option("--actions", type=click.IntRange(0, 1000), default=ACTIONS, show_default=True,
              help="How many of the last changes to show.")  # fmt: skip
@click.pass_obj
def show(session: CliSession, domain: str, name: str, firings: int, actions: int) -> None:
    """Show one schedule: what it sends and when, its next firings, and who changed it."""
    with session.bus() as bus:
        found = bus.schedules.get(domain, name)
        if found is None:
            check_known(bus, domain)
            raise ScheduleNotFoundError(domain, name)
        following = bus.schedules.next_firings(domain, name, count=firings) if firings else []
        done = bus.run(list_actions(domain, name, limit=actions))
    document = asdict(found) | {"next_firings": following, "actions": done}
    session.answer(document, lambda: _print_one(found, list(following), done))


@schedules.command()
@click.argument("domain")
@click.argument("name")
@click.option("--cron", metavar="'30 2 * * *'", help="Minute, hour, day of month, month, day of week.")
@click.option("--timezone", metavar="Europe/Berlin", help="The zone of --cron. [default: UTC]")
@click.option("--every", type=DURATION, metavar="15m", help="An interval instead of --cron.")
@click.option("--type", "command_type", metavar="TYPE", help="The command type. [default: the schedule's name]")
@click.option("--data", type=JsonType(), metavar="JSON", help="The data of each command.")
@click.option("--headers", type=JsonType(), metavar="JSON", help="The headers of each command.")
@click.option("--correlation-id", metavar="ID", help="The correlation id of each command.")
@click.option("--reply-to", metavar="QUEUE", help="Where the replies go.")
@click.option("--max-attempts", type=int, metavar="N", help="How often each command is tried.")
@click.option("--timeout", type=DURATION, metavar="60s", help="How long one attempt may take; 0: no deadline.")
@click.option("--expires", type=DURATION, metavar="10m", help="Cancel a command that has not started by then.")
@click.option("--priority", type=click.Choice(PRIORITIES), help="Which of the waiting commands start first.")
@click.option("--on-exhausted", type=click.Choice(["troubleshoot", "fail"]),
              help="What happens when the attempts of a command are used up.")  # fmt: skip
@click.option("--missed", type=click.Choice(["skip", "run_once", "run_all"]), default="run_once",
              show_default=True, help="What becomes of firings that nobody could make in time.")  # fmt: skip
@click.option("--most", type=int, metavar="N", default=100, show_default=True,
              help="How many missed firings run_all makes.")  # fmt: skip
@click.option("--overlap", type=click.Choice(["allow", "skip", "queue"]), default="allow", show_default=True,
              help="What becomes of a firing while the last command is unfinished.")  # fmt: skip
@click.option("--replace", is_flag=True, help="Replace a schedule of this name that has another definition.")
@operator_options
@click.pass_obj
def create(session: CliSession, /, domain: str, name: str, **options: Any) -> None:
    """Create a schedule. It lives until `schedules delete`. The same again changes nothing."""
    with session.bus() as bus:
        found = bus.schedules.create(domain, name, **options)
        doubt = bus.run(doubt_type(domain, found.command_type))
    session.warn(doubt)
    session.answer(
        asdict(found) | {"warning": doubt},
        lambda: say(f"schedule {domain}/{name} fires next at {_local(found, found.next_at)}"),
    )


@schedules.command("next")
@click.argument("domain", required=False)
@click.option(
    "--within", type=DURATION, metavar="1d", default="1d", show_default=True, help="How far to look ahead."
)
@click.pass_obj
def next_firings(session: CliSession, domain: str | None, within: float) -> None:
    """List the next firings of all schedules (or those of a DOMAIN) in their order, after those that were missed.

    At most 100 schedules, and 20 firings of each.
    """
    with session.bus() as bus:
        found = bus.schedules.timeline(domain, within=within)
        if not found.schedules:
            check_known(bus, domain)
    moments = sorted(_moments(found), key=lambda item: item[0])
    session.answer(
        found,
        lambda: print_table(
            columns("at what domain =name type?"),
            [(_at(at), what, item.domain, item.name, item.command_type) for at, what, item in moments],
            empty="no schedule fires within that time",
        ),
    )


def _moments(found: ScheduleTimeline) -> Iterator[tuple[datetime, str, ScheduleRecord]]:
    for item in found.schedules:
        yield from ((at, "missed", item.schedule) for at in item.missed)
        what = "paused" if item.schedule.is_paused else "fires"
        yield from ((at, what, item.schedule) for at in item.firings)


Act = Callable[..., tuple[dict[str, Any], str]]
"""A function that acts on one schedule. Returns a document, and a sentence for people."""


def _action(name: str, about: str) -> Callable[[Act], Act]:
    """Make a subcommand of such a function."""

    def decorate(act: Act) -> Act:
        @schedules.command(name, help=about)
        @click.argument("domain")
        @click.argument("name")
        @operator_options
        @click.pass_obj
        def command(session: CliSession, domain: str, name: str, operator: str | None, reason: str | None) -> None:
            with session.bus() as bus:
                document, text = act(bus.schedules, domain, name, operator=operator, reason=reason)
            session.answer({"schedule": f"{domain}/{name}"} | document, lambda: say(text))

        return act

    return decorate


@_action("pause", "Pause a schedule: nothing fires until somebody resumes it.")
def pause(schedules: Any, domain: str, name: str, **who: str | None) -> tuple[dict[str, Any], str]:
    """While the domain or the command type is paused, a schedule still fires, and its commands wait."""
    changed = schedules.pause(domain, name, **who)
    text = f"schedule {domain}/{name} is paused" if changed else f"schedule {domain}/{name} was paused already"
    return {"state": "PAUSED", "changed": changed}, text


@_action("resume", "Resume a paused schedule. What was due during the pause is not made up for.")
def resume(schedules: Any, domain: str, name: str, **who: str | None) -> tuple[dict[str, Any], str]:
    """Says when it fires next."""
    next_at = schedules.resume(domain, name, **who)
    return {"state": "ACTIVE", "next_at": next_at}, f"schedule {domain}/{name} fires next at {_at(next_at)}"


@_action("delete", "Delete a schedule that was created at run time. What it has sent stays.")
def delete(schedules: Any, domain: str, name: str, **who: str | None) -> tuple[dict[str, Any], str]:
    """Refuses a schedule that workers declare."""
    schedules.delete(domain, name, **who)
    return {"deleted": True}, f"schedule {domain}/{name} is deleted"


@_action("run-now", "Send a schedule's command now, whatever its state. Its firings stay as they are.")
def run_now(schedules: Any, domain: str, name: str, **who: str | None) -> tuple[dict[str, Any], str]:
    """Says the id of the command."""
    sent = schedules.run_now(domain, name, **who)
    return {"command_id": sent.command_id}, f"sent {sent.command_id}"


def _print_one(found: ScheduleRecord, following: list[datetime], done: list[ControlAction]) -> None:
    say(f"schedule {found.domain}/{found.name}")
    print_fields(
        {
            "times": found.times.text,
            "state": _state(found),
            "source": _source(found) + ", declared differently by live workers" * (found.declarations > 1),
            "command type": found.command_type,
            "data": None if found.data is None else compact(found.data),
            "headers": None if found.headers is None else compact(found.headers),
            "correlation id": found.correlation_id,
            "reply to": found.reply_to,
            "max attempts": found.max_attempts,
            "timeout": None if found.timeout is None else format_seconds(found.timeout),
            "expires": None if found.expires is None else format_seconds(found.expires),
            "on exhausted": found.on_exhausted,
            "priority": found.priority,
            "missed": f"{found.missed}, at most {found.most}" if found.missed == "run_all" else found.missed,
            "overlap": found.overlap,
            "last fired": None if found.last_fired is None else _local(found, found.last_fired),
            "last command": None if found.last_status is None else f"{found.last_command_id} {found.last_status}",
            "fired": found.fired,
            "skipped": found.skipped,
            "paused": None if found.paused_at is None else _paused(found),
            "note": None if found.note is None else f"{_at(found.noted_at)} {found.note}",
        }
    )
    if following:
        say_heading("next firings")
        for instant in following:
            say(_local(found, instant))
    if done:
        say()
        print_table(
            columns("at action by ~reason"),
            [(_at(item.performed_at), item.action, item.operator, item.reason) for item in done],
        )


def _paused(found: ScheduleRecord) -> str:
    why = f": {found.pause_reason}" if found.pause_reason else ""
    return f"{_at(found.paused_at)} by {found.paused_by}{why}"


def _state(found: ScheduleRecord) -> str:
    if found.is_paused:
        return "paused"
    return "waits" if found.waiting_since is not None else "active"


def _source(found: ScheduleRecord) -> str:
    return "code" if found.is_declared else "run time"


def _last(found: ScheduleRecord) -> str | None:
    return None if found.last_status is None else str(found.last_status)


def _at(instant: datetime | None) -> str | None:
    return None if instant is None else text_of(instant.replace(microsecond=0))


def _local(found: ScheduleRecord, instant: datetime | None) -> str:
    """An instant in UTC, and in the schedule's zone."""
    if instant is None:
        return "never"
    if found.timezone == "UTC":
        return text_of(instant)
    local = instant.astimezone(ZoneInfo(found.timezone))
    return f"{text_of(instant)} ({local:%a %H:%M %Z})"


COMMANDS = [schedules]
