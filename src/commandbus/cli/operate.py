"""`cancel`, `priority`, `pause`, `resume`, `pauses`: what people do to commands that wait, or run."""

from __future__ import annotations

import time

import click

from commandbus.bus import CommandBus
from commandbus.cli import find_id
from commandbus.cli.exit_codes import ExitCode
from commandbus.cli.parameters import DURATION, operator_options
from commandbus.cli.render import print_table, say
from commandbus.cli.session import CliCommand, CliSession
from commandbus.cli.table import columns
from commandbus.errors import CommandNotFoundError
from commandbus.flow.commands.known_types import doubt_type
from commandbus.flow.commands.pause import PREFIX, list_actions
from commandbus.flow.limits.inspect import ControlAction
from commandbus.model.command import CancelResult, CommandRecord, CommandStatus
from commandbus.model.counting import counted
from commandbus.model.durations import format_seconds
from commandbus.model.priority import PRIORITIES, Priority

WAIT = "60s"
LOOK_SECONDS = 0.2


@click.command(cls=CliCommand)
@click.argument("domain")
@click.argument("command_id", metavar="ID")
@operator_options
@click.option(
    "--wait", type=DURATION, is_flag=False, flag_value=WAIT, metavar="[TIME]",
    help=f"Wait until a command that runs has ended, so long at most. [if given without TIME: {WAIT}]",
)  # fmt: skip
@click.pass_context
def cancel(
    ctx: click.Context,
    /,
    domain: str,
    command_id: str,
    operator: str | None,
    reason: str | None,
    wait: float | None,
) -> None:
    """Cancel a command. If it runs, ask its worker to stop it.

    A running command has its grace to clean up, and ends CANCELED unless it completes by then. With --wait the
    exit code is 1 if the command ended in another way, or did not end in time.
    """
    status, worker = CommandStatus.CANCELED, None
    with ctx.obj.bus() as bus:
        command_id = find_id.of_command(bus, domain, command_id)
        result = bus.cancel(domain, command_id, operator=operator, reason=reason)
        if result is CancelResult.REQUESTED:
            record = _wait_for_end(bus, domain, command_id, wait or 0.0)
            status, worker = record.status, record.worker
    ctx.obj.answer(
        {"domain": domain, "command_id": command_id, "result": result, "status": status},
        lambda: say(_outcome(f"{domain} {command_id}", status, worker, wait)),
    )
    if wait is not None and status is not CommandStatus.CANCELED:
        ctx.exit(ExitCode.NO)


def _wait_for_end(bus: CommandBus, domain: str, command_id: str, seconds: float) -> CommandRecord:
    """Returns the command as soon as it is final, or when the time is up."""
    until = time.monotonic() + seconds
    while True:
        record = bus.get_command(domain, command_id)
        if record is None:
            raise CommandNotFoundError(f"command {command_id!r} of domain {domain!r} was deleted meanwhile")
        left = until - time.monotonic()
        if record.status.is_final or left <= 0:
            return record
        time.sleep(min(LOOK_SECONDS, left))


def _outcome(name: str, status: CommandStatus, worker: str | None, wait: float | None) -> str:
    if status is CommandStatus.CANCELED:
        return f"canceled {name}"
    if status.is_final:
        return f"{name} is {status}: it ended before it could be stopped"
    asked = f"asked {f'worker {worker}' if worker else 'its worker'} to stop {name}"
    return asked if wait is None else f"{asked}; it has not ended after {format_seconds(wait)}"


@click.command(cls=CliCommand)
@click.argument("domain")
@click.argument("command_id", metavar="ID")
@click.argument("priority", type=click.Choice(PRIORITIES))
@operator_options
@click.pass_obj
def priority(
    session: CliSession,
    domain: str,
    command_id: str,
    priority: Priority,
    operator: str | None,
    reason: str | None,
) -> None:
    """Change the priority of a command that waits. If it runs, its retries have the new one."""
    with session.bus() as bus:
        command_id = find_id.of_command(bus, domain, command_id)
        before = bus.commands.set_priority(domain, command_id, priority, operator=operator, reason=reason)
    session.answer(
        {"domain": domain, "command_id": command_id, "priority": priority, "before": before},
        lambda: say(f"{domain} {command_id} has {priority} priority now (it had {before})"),
    )


@click.command(cls=CliCommand)
@click.argument("domain")
@click.argument("command_type", metavar="[TYPE]", required=False)
@operator_options
@click.pass_obj
def pause(
    session: CliSession, domain: str, command_type: str | None, operator: str | None, reason: str | None
) -> None:
    """Pause a domain, or one command type in it. Running attempts go on; nothing new starts.

    If no running worker handles the type and it has no recent command, it is paused, too, with a warning.
    """
    with session.bus() as bus:
        changed = bus.pause(domain, command_type, operator=operator, reason=reason)
        doubt = None if command_type is None else bus.run(doubt_type(domain, command_type))
    session.warn(doubt)
    session.answer(
        {"domain": domain, "command_type": command_type, "paused": True, "changed": changed, "warning": doubt},
        lambda: say(f"{_what(domain, command_type)} {'is' if changed else 'was already'} paused"),
    )


@click.command(cls=CliCommand)
@click.argument("domain")
@click.argument("command_type", metavar="[TYPE]", required=False)
@operator_options
@click.pass_obj
def resume(
    session: CliSession, domain: str, command_type: str | None, operator: str | None, reason: str | None
) -> None:
    """Resume a paused domain or command type. `pauses --actions 10` shows who did it."""
    with session.bus() as bus:
        released = bus.resume(domain, command_type, operator=operator, reason=reason)
    session.answer(
        {"domain": domain, "command_type": command_type, "paused": False, "released": released},
        lambda: say(
            f"{_what(domain, command_type)} goes on; {counted(released, 'parked command')} went back to the queue"
        ),
    )


@click.command(cls=CliCommand)
@click.option("--actions", type=click.IntRange(0, 1000), default=0, metavar="N",
              help="Show the last N pauses and resumes instead, with who did them.")  # fmt: skip
@click.pass_obj
def pauses(session: CliSession, actions: int) -> None:
    """List what is paused, who paused it, and why."""
    with session.bus() as bus:
        if actions:
            done = bus.run(list_actions(limit=actions))
            session.answer(done, lambda: _print_actions(done))
            return
        found = bus.pauses().items
    session.answer(
        found,
        lambda: print_table(
            columns("domain type since? operator +reason"),
            [(item.domain, item.command_type or "(all)", item.paused_at, item.operator, item.reason)
             for item in found],
            empty="nothing is paused",
        ),
    )  # fmt: skip


def _print_actions(done: list[ControlAction]) -> None:
    rows = []
    for item in done:
        domain, _, command_type = item.subject.removeprefix(PREFIX).partition("/")
        rows.append((item.performed_at, item.action, domain, command_type or "(all)", item.operator, item.reason))
    print_table(columns("at? action domain type operator +reason"), rows, empty="nothing was ever paused")


def _what(domain: str, command_type: str | None) -> str:
    return f"domain {domain}" if command_type is None else f"{command_type} of domain {domain}"


COMMANDS = [cancel, priority, pause, resume, pauses]
