"""`stack`: where a running command is; `recycle`: have a worker replaced; `pause-worker`, `resume-worker`. All of
them ask the worker, and wait for its answer."""

from __future__ import annotations

import click

from commandbus.cli.exit_codes import ExitCode
from commandbus.cli.parameters import DURATION, operator_options
from commandbus.cli.render import age, say, say_heading
from commandbus.cli.session import CliCommand, CliSession
from commandbus.flow.workers.requests import LiveStack


@click.command(cls=CliCommand)
@click.argument("domain")
@click.argument("command_id", metavar="ID")
@click.option("--wait", type=DURATION, default="5s", show_default=True, help="How long its worker may take.")
@click.pass_context
def stack(ctx: click.Context, domain: str, command_id: str, wait: float) -> None:
    """Show where a running command is at this moment: files, lines and functions, the innermost last.

    Its worker is asked. The handler is not disturbed, and no values are read. If the command does not run, or its
    worker does not answer in time, that is said, and the exit code is 1.
    """
    session: CliSession = ctx.obj
    with session.bus() as bus:
        found = bus.request_stack(domain, command_id, wait=wait)
    session.answer(found, lambda: _print(found))
    if found.problem is not None:
        ctx.exit(ExitCode.NO)


def _print(found: LiveStack) -> None:
    if found.problem is not None:
        say(found.problem)
        return
    say(f"attempt {found.attempt} in worker {found.worker}, {age(found.seconds)} after its start")
    for item in found.stacks:
        say_heading(item.title)
        for frame in item.frames:
            say(f"  {frame.file}:{frame.line} in {frame.function}")


@click.command(cls=CliCommand)
@click.argument("worker")
@click.option("--wait", type=DURATION, default="5s", show_default=True, help="How long the worker may take.")
@operator_options
@click.pass_obj
def recycle(session: CliSession, worker: str, wait: float, operator: str | None, reason: str | None) -> None:
    """Have a worker replaced: it claims nothing more, and ends when what it runs has ended.

    Its supervisor starts a replacement at once. A worker without a supervisor is not recycled.
    """
    with session.bus() as bus:
        bus.recycle_worker(worker, wait=wait, operator=operator, reason=reason)
    session.answer({"worker": worker, "recycled": True}, lambda: say(f"worker {worker} drains and is replaced"))


@click.command("pause-worker", cls=CliCommand)
@click.argument("worker")
@click.option("--wait", type=DURATION, default="5s", show_default=True, help="How long the worker may take.")
@operator_options
@click.pass_obj
def pause_worker(session: CliSession, worker: str, wait: float, operator: str | None, reason: str | None) -> None:
    """Pause one worker: it claims nothing more, gives back what has not started, and finishes what it runs.

    The other workers go on. The pause lasts until `resume-worker`, at most as long as the worker process lives: a
    worker that is started again is not paused. `pause` is for a domain or a command type.
    """
    with session.bus() as bus:
        changed = bus.pause_worker(worker, wait=wait, operator=operator, reason=reason)
    text = f"worker {worker} {'is' if changed else 'was already'} paused"
    session.answer({"worker": worker, "paused": True, "changed": changed}, lambda: say(text))


@click.command("resume-worker", cls=CliCommand)
@click.argument("worker")
@click.option("--wait", type=DURATION, default="5s", show_default=True, help="How long the worker may take.")
@operator_options
@click.pass_obj
def resume_worker(session: CliSession, worker: str, wait: float, operator: str | None, reason: str | None) -> None:
    """Let a paused worker claim again."""
    with session.bus() as bus:
        changed = bus.resume_worker(worker, wait=wait, operator=operator, reason=reason)
    text = f"worker {worker} {'goes on' if changed else 'was not paused'}"
    session.answer({"worker": worker, "paused": False, "changed": changed}, lambda: say(text))


COMMANDS = [stack, recycle, pause_worker, resume_worker]
