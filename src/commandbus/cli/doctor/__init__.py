"""`doctor`: checks the installation, and says what to do. Exit code 1 if something failed.

The checks run in this order, because each needs the one before it: configuration → the service manager's unit or
manifest, if one is given → server → schema → privileges → the fleet. If a check fails, the checks that need it are
left out. Limits come last, because they may need Redis.
"""

from __future__ import annotations

import time
from typing import TextIO

import click
import psycopg

from commandbus.cli import installation
from commandbus.cli.doctor import (
    configuration,
    fleet,
    limits,
    manifest,
    privileges,
    schedules,
    schema,
    server,
    unit,
)
from commandbus.cli.doctor.findings import Conn, Finding, Findings, Level, fail, ok, warn
from commandbus.cli.exit_codes import ExitCode, one_line, sentence_for
from commandbus.cli.render import print_json, say, say_heading
from commandbus.cli.session import CliCommand, CliSession, connect_as_the_role
from commandbus.cli.version import release
from commandbus.db.database_address import Database, embedded_folder
from commandbus.errors import CommandBusError, ConfigurationError
from commandbus.model.counting import counted
from commandbus.settings import Settings, mask_database_url

LOCK_SECONDS = 5

WIDTH = 5
FILE = click.File("r", encoding="utf-8", errors="replace")


@click.command(cls=CliCommand)
@click.option(
    "--unit",
    "unit_file",
    type=FILE,
    metavar="FILE",
    help="Check the timeouts of a systemd unit; - reads `systemctl cat NAME`.",
)
@click.option(
    "--manifest",
    "manifest_file",
    type=FILE,
    metavar="FILE",
    help="Check the timeouts and probes of a Kubernetes manifest; - reads `kubectl get … -o json`.",
)
@click.pass_context
def doctor(ctx: click.Context, unit_file: TextIO | None, manifest_file: TextIO | None) -> None:
    """Check configuration, server, schema, rights, clock and workers, and say what to do.

    OK is fine, WARN is worth a look, FAIL will not work; exit code 1 if anything fails.
    """
    session: CliSession = ctx.obj
    found = []
    for finding in examine(session, unit_file, manifest_file):
        found.append(finding)
        if not session.as_json:
            _print(finding)
    if session.as_json:
        print_json(found)
    else:
        counts = {level: sum(item.level is level for item in found) for level in Level}
        say_heading(
            f"{counts[Level.OK]} ok, {counted(counts[Level.WARN], 'warning')}, "
            f"{counted(counts[Level.FAIL], 'failure')}"
        )
    if any(item.level is Level.FAIL for item in found):
        ctx.exit(ExitCode.NO)


def examine(session: CliSession, unit_file: TextIO | None = None, manifest_file: TextIO | None = None) -> Findings:
    """All findings, one by one, as the checks make them."""
    yield from _installation()
    settings, findings = configuration.load(session)
    yield from findings
    if settings is None:
        return
    if unit_file is not None:
        yield from unit.examine(unit_file.read(), settings)
    if manifest_file is not None:
        yield from manifest.examine(manifest_file.read(), settings)
    database = Database(settings)
    try:
        started = time.monotonic()
        try:
            resolved = database.resolve()
            conn = connect_as_the_role(resolved)
        except (CommandBusError, psycopg.Error) as error:
            yield fail("server", one_line(error), _remedy(settings, error))
            return
        with conn:
            yield ok("server", f"{_address(resolved)} answers in {(time.monotonic() - started) * 1000:.0f} ms")
            yield from _on_server(conn, resolved, is_embedded=embedded_folder(settings) is not None)
    finally:
        database.close()


def _installation() -> Findings:
    problems = [fail("installation", text, remedy) for text, remedy in installation.findings()]
    alone = ok("installation", f"{installation.DISTRIBUTION} {release()}, and no other package in its folder")
    yield from problems or [alone]


def _on_server(conn: Conn, settings: Settings, *, is_embedded: bool) -> Findings:
    yield from _guarded("server", server.examine(conn, settings, is_embedded=is_embedded))
    if settings.prepared_statements:  # otherwise it is a pooler's session, which must be left unchanged
        conn.execute(f"SET lock_timeout = '{LOCK_SECONDS}s'".encode())
    state, findings = schema.examine_schema(conn)
    yield from findings
    yield from _guarded("privileges", privileges.examine(conn))
    if state is None:
        return
    yield from _guarded("domains", schema.examine_domains(conn))
    if state.is_current:
        yield from _guarded("fleet", fleet.examine(conn, settings))
        yield from _guarded("schedules", schedules.examine(conn))
        yield from _guarded("limits", limits.examine(conn, settings))


def _guarded(check: str, findings: Findings) -> Findings:
    """If the role may not read something, make that a finding instead of an error."""
    try:
        yield from findings
    except psycopg.errors.InsufficientPrivilege as error:
        yield warn(
            check,
            f"could not be checked: {error.diag.message_primary}",
            "run `commandbus doctor` as a reader or the owner",
        )
    except (CommandBusError, psycopg.Error) as error:
        yield fail(check, sentence_for(error))


def _remedy(settings: Settings, error: Exception) -> str:
    if settings.database_url is None:
        return "set it: COMMANDBUS_DATABASE_URL=postgresql://…, or `embedded` if you have no PostgreSQL"
    if isinstance(error, ConfigurationError):
        return f"correct database_url (from {settings.origins['database_url']})"
    return "is the address right, and the server up? `commandbus config` shows the address and where it is from"


def _address(settings: Settings) -> str:
    return mask_database_url(settings.database_url or "")


def _print(finding: Finding) -> None:
    say(f"{finding.level.value:<{WIDTH}} {finding.check}: {finding.message}")
    if finding.remedy is not None:
        say(f"{'':<{WIDTH}} → {finding.remedy}")


COMMANDS = [doctor]
