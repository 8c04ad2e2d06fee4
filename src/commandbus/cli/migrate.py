"""`migrate`: bring the database's schema to this release, say what is missing, or print the SQL for a DBA."""

from __future__ import annotations

from typing import Any

import click

from commandbus.bus import CommandBus
from commandbus.cli.exit_codes import ExitCode
from commandbus.cli.parameters import DURATION
from commandbus.cli.render import print_json, say
from commandbus.cli.session import CliCommand, CliSession
from commandbus.flow.setup import migrate as migrate_flow
from commandbus.flow.setup.schema_state import SchemaState
from commandbus.model.counting import counted
from commandbus.model.timeouts import MIGRATION_WAIT_SECONDS
from commandbus.shell_words import arguments


@click.command(cls=CliCommand)
@click.option("--print", "print_sql", is_flag=True, help="Print the SQL and do nothing else; needs no database.")
@click.option("--check", is_flag=True, help="Change nothing; exit code 1 if something is missing.")
@click.option("--domain", "domains", multiple=True, metavar="NAME", help="Also create this domain; repeatable.")
@click.option(
    "--wait", type=DURATION, default=MIGRATION_WAIT_SECONDS, metavar="DURATION", show_default="5m",
    help="How long to keep trying while another transaction is in the way.",
)  # fmt: skip
@click.pass_context
def migrate(
    ctx: click.Context,
    *,
    print_sql: bool,
    check: bool,
    domains: tuple[str, ...],
    wait: float,
) -> None:
    """Create the schema, or upgrade it to this release.

    Safe to run again, and by any number of programs at once. PGMQ is installed by its extension if the server has
    it, else by its published SQL. If a long transaction is in the way, `migrate` steps back so that nobody waits
    behind it, says whose transaction that is, and tries again.

    Workers of an older release can start on a newer schema if each newer migration is compatible. `migrate` names
    those that are not: running workers of older releases may then fail, and cannot be started again.
    """
    session: CliSession = ctx.obj
    if print_sql and check:
        raise click.UsageError("--print and --check exclude each other; give one of them")
    if print_sql:
        if domains:
            raise click.UsageError("--print prints the schema only; use `commandbus domain create` for domains")
        script = migrate_flow.script()
        session.answer({"sql": script}, lambda: click.echo(script, nl=False))
        return
    with session.bus() as bus:
        if check:
            _check(ctx, bus, domains)
        else:
            _migrate(session, bus, domains, wait)


def _migrate(session: CliSession, bus: CommandBus, domains: tuple[str, ...], wait: float) -> None:
    before = bus.migrate(domains=domains, wait=wait)
    now = bus.schema_state()
    if session.as_json:
        print_json(_document(now) | {"newly_applied": before.missing, "domains": domains})
        return
    if before.missing:
        say(f"applied {counted(len(before.missing), 'migration')}: {_numbers(before.missing)}")
    else:
        say(f"nothing to apply: the schema is at migration {max(now.applied)}{_newer(now)}")
    if before.applied and before.incompatible:
        _warn_of_workers(bus, before)
    say(_pgmq(now))
    for domain in domains:
        say(f"domain {domain} is there")


def _warn_of_workers(bus: CommandBus, before: SchemaState) -> None:
    """Workers that run now began before this: they may not know what has changed."""
    alive = [worker for worker in bus.workers() if worker.is_alive]
    if alive:
        say(
            f"{_incompatible(before)}: restart {counted(len(alive), 'running worker')} with this release "
            f"({', '.join(worker.id for worker in alive[:3])}{', …' if len(alive) > 3 else ''})"
        )


def _incompatible(state: SchemaState) -> str:
    verb = "is" if len(state.incompatible) == 1 else "are"
    return f"{_numbers(state.incompatible)} {verb} not compatible with programs of older releases"


def _newer(state: SchemaState) -> str:
    return ", newer than this release knows, and compatible with it" if state.newer else ""


def _check(ctx: click.Context, bus: CommandBus, domains: tuple[str, ...]) -> None:
    state = bus.schema_state()
    known = {domain.name for domain in bus.list_domains()} if state.applied else set()
    absent = [domain for domain in domains if domain not in known]
    if ctx.obj.as_json:
        print_json(_document(state) | {"missing_domains": absent})
    else:
        if state.missing:
            what = counted(len(state.missing), "migration")
            say(f"missing {what}: {_numbers(state.missing)}; run `commandbus migrate`")
            if state.applied and state.incompatible:
                say(f"{_incompatible(state)}: stop their workers first, or restart them right after it")
        else:
            say(f"the schema is at migration {max(state.applied)}{_newer(state) or ', as this release needs it'}")
            say(_pgmq(state))
        for domain in absent:
            say(f"missing domain {domain}; run `commandbus domain create {arguments(domain)}`")
    if state.missing or absent:
        ctx.exit(ExitCode.NO)


def _document(state: SchemaState) -> dict[str, Any]:
    return {
        "is_current": state.is_current,
        "applied": state.applied,
        "missing": state.missing,
        "newer": state.newer,
        "incompatible": state.incompatible,
        "pgmq_version": state.pgmq_version,
        "pgmq_way": state.pgmq_way,
    }


def _pgmq(state: SchemaState) -> str:
    way = {"extension": "by its extension", "sql": "by its SQL"}.get(state.pgmq_way or "", "in an unknown way")
    return f"PGMQ {state.pgmq_version or '(unknown version)'}, installed {way}"


def _numbers(numbers: tuple[int, ...]) -> str:
    return ", ".join(f"{number:04d}" for number in numbers)


COMMANDS = [migrate]
