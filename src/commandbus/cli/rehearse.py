"""`rehearse`: what would today's handler do with this command?"""

from __future__ import annotations

from dataclasses import asdict

import click

from commandbus.cli import find_id
from commandbus.cli.exit_codes import ExitCode
from commandbus.cli.parameters import DURATION
from commandbus.cli.render import compact, print_fields, print_table, printable_lines, say, say_heading
from commandbus.cli.session import CliCommand, CliSession
from commandbus.cli.table import columns
from commandbus.model.rehearsal import Rehearsal


@click.command(cls=CliCommand)
@click.argument("handlers", metavar="MODULE:REGISTRY")
@click.argument("domain")
@click.argument("command_id", metavar="ID")
@click.option("--timeout", type=DURATION, default="30s", show_default=True, metavar="TIME",
              help="Kill it after this time.")  # fmt: skip
@click.option("--no-isolation", is_flag=True,
              help="Keep the network; only for handlers that are declared with rehearsable=True.")  # fmt: skip
@click.pass_context
def rehearse(
    ctx: click.Context, /, handlers: str, domain: str, command_id: str, *, timeout: float, no_isolation: bool
) -> None:
    """Run the handler of a command and roll everything back, to see what it would do.

    It runs in a child process without a network, in one transaction. Limits, effects and checkpoints are recorded,
    not done. The exit code is 1 if the handler failed.
    """
    from commandbus.worker.rehearsal.rehearse import rehearse as run

    session: CliSession = ctx.obj
    with session.bus() as bus:
        name = find_id.of_command(bus, domain, command_id)
    with session.reachable() as settings:
        found = run(handlers, domain, name, timeout=timeout, isolate=not no_isolation, settings=settings)
    session.answer(asdict(found) | {"text": found.text}, lambda: _print(found))
    if found.outcome != "COMPLETED":
        ctx.exit(ExitCode.NO)


def _print(found: Rehearsal) -> None:
    say(f"{found.text}; nothing of it was kept")
    say()
    print_fields(
        {
            "result": compact(found.result) if found.outcome == "COMPLETED" else None,
            "error": None if found.error is None else f"{found.error_type or ''}: {found.error}".lstrip(": "),
            "took": f"{found.seconds:.2f} s",
            "network": "none" if found.is_isolated else "as it is",
            "statements": found.statement_count,
        }
    )
    if found.tables:
        say_heading("rows written")
        print_table(columns("table :inserted :updated :deleted"), found.tables)
    if found.sends:
        say_heading("commands sent")
        print_table(columns("domain type =command_id"), found.sends)
    if found.calls:
        say_heading("asked for, and not done")
        print_table(columns("kind name ~details?"), [(kind, name, compact(d)) for kind, name, d in found.calls])
    for title, lines in (
        ("notes", found.notes),
        ("statements", found.statements),
        ("traceback", (found.traceback or "").splitlines()),
        ("output", found.output.splitlines()),
    ):
        if lines:
            say_heading(title)
            for line in printable_lines("\n".join(lines)):
                say(f"  {line}")


COMMANDS = [rehearse]
