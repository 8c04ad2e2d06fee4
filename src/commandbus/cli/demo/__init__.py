"""`demo`: a PostgreSQL, two workers, a few hundred commands that end in all kinds of ways, and a table of them.

It ends by itself. At its end, also after Ctrl-C or SIGTERM, it stops what it started: first the workers, then the
server (its data stays). With `--keep`, both stay up, and the demo says how to stop them.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import click

from commandbus.bus import CommandBus
from commandbus.cli.demo import outcome_counts
from commandbus.cli.demo.fleet import DemoFleet, stop_line
from commandbus.cli.demo.handlers import DOMAIN
from commandbus.cli.demo.outcome_counts import GROUPS, OutcomeCounts
from commandbus.cli.demo.output import DemoOutput, folder_word, program
from commandbus.cli.exit_codes import ExitCode
from commandbus.cli.render import print_json
from commandbus.cli.session import CliCommand, CliSession
from commandbus.db.database_address import DEFAULT_FOLDER, embedded_folder
from commandbus.embedded import EmbeddedPostgres
from commandbus.model.command import CommandStatus, new_command_id
from commandbus.model.counting import counted
from commandbus.quick_dataclass import dataclass
from commandbus.settings import Settings, mask_database_url

WORKERS = 2
TICK_SECONDS = 0.1
LIMIT_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class DemoDatabase:
    """The demo's database: its address, how to name it on a command line, and where logs may be written."""

    settings: Settings
    option: str | None
    logs: Path
    folder: Path | None


@click.command(cls=CliCommand)
@click.option("--keep", is_flag=True, help="Leave workers and server up at the end.")
@click.option("--commands", "count", type=click.IntRange(1, 100_000), default=300, show_default=True)
@click.option(
    "--folder", type=click.Path(path_type=Path), help=f"Of the embedded server. [default: {DEFAULT_FOLDER}]"
)
@click.pass_context
def demo(ctx: click.Context, keep: bool, count: int, folder: Path | None) -> None:  # noqa: FBT001
    """Show everything at work, in about ten seconds.

    Uses the server of --database, else an embedded PostgreSQL in a folder. The commands go to a domain `demo`;
    each run reports only its own.
    """
    session: CliSession = ctx.obj
    output = DemoOutput(as_json=session.as_json)
    correlation_id = f"demo-{new_command_id()}"
    with (
        _demo_database(session, folder, output, keep=keep) as database,
        CommandBus(settings=database.settings) as bus,
    ):
        _prepare(bus, output)
        with DemoFleet(database.settings.database_url or "", database.logs, size=WORKERS, keep=keep) as fleet:
            counts, wrong, seconds = _play(bus, fleet, output, count, correlation_id)
            if session.as_json:
                print_json(_document(counts, wrong, correlation_id, database, fleet))
            else:
                output.table(counts)
                _conclude(output, counts, wrong, seconds)
                _point_on(bus, output, database, correlation_id)
                if keep:
                    _say_kept(output, database, fleet)
                elif database.folder is not None:
                    output.say(
                        f"\nThe server stops now. Its data stays in {database.folder}; these lines start it again."
                    )
    if wrong:
        ctx.exit(ExitCode.NO)


# --- set-up --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _demo_database(
    session: CliSession, folder: Path | None, output: DemoOutput, *, keep: bool
) -> Iterator[DemoDatabase]:
    if folder is not None and session.database is not None:
        raise click.UsageError("--folder is for the embedded server: it does not go with --database")
    if session.database is None:
        session.database = "embedded" if folder is None else f"embedded:{folder}"
    asked = embedded_folder(session.settings())
    if asked is None:
        with session.reachable() as settings, _scratch_folder(keep=keep) as logs:
            address = settings.database_url or ""
            shown = mask_database_url(address)
            output.say(f"using {shown}")
            yield DemoDatabase(settings, None if shown != address else address, logs, None)
        return
    output.say(f"starting PostgreSQL in {asked} (its first start takes a few seconds)")
    server = EmbeddedPostgres(asked, revive=True)
    server.start()
    stays = False
    try:
        status = server.status()
        output.say(f"PostgreSQL {status.version} answers at {status.dsn}")
        if status.note is not None:
            output.say(status.note)
        settings = session.settings(database_url=status.dsn)
        yield DemoDatabase(settings, f"embedded:{folder_word(asked)}", status.folder, asked)
        stays = keep
    finally:
        server.stop(keep=stays)


@contextlib.contextmanager
def _scratch_folder(*, keep: bool) -> Iterator[Path]:
    """A folder for the logs of the workers, if the demo uses a server that it did not start."""
    if keep:
        yield Path(tempfile.mkdtemp(prefix="commandbus-demo-"))
        return
    with tempfile.TemporaryDirectory(prefix="commandbus-demo-") as name:
        yield Path(name)


def _prepare(bus: CommandBus, output: DemoOutput) -> None:
    before = bus.migrate(domains=[DOMAIN])
    state = bus.schema_state()
    what = "installed" if before.missing else "is there"
    output.say(
        f"the schema {what} (migration {max(state.applied)}, PGMQ {state.pgmq_version} by {state.pgmq_way})"
    )


# --- the run -------------------------------------------------------------------------------------------------


def _play(
    bus: CommandBus, fleet: DemoFleet, output: DemoOutput, count: int, correlation_id: str
) -> tuple[OutcomeCounts, list[str], float]:
    """Send, and watch until all have ended. Returns the counts, what is wrong with them, and how long it took."""
    output.say(f"{WORKERS} worker processes start: pid {', '.join(map(str, fleet.pids))}")
    if earlier := _waiting(bus):
        output.say(f"going first: {counted(earlier, 'command')} of earlier runs")
    commands = list(outcome_counts.make_commands(count, correlation_id))
    started = time.monotonic()
    receipts = bus.send_many(DOMAIN, commands)
    output.say(
        f"sent {counted(len(receipts), 'command')} to domain {DOMAIN} in {time.monotonic() - started:.2f} s"
    )
    ids = [receipt.id for receipt in receipts]
    while True:
        counts = bus.run(outcome_counts.count(ids))
        running = bus.status(DOMAIN)[0].running if counts.open else 0
        seconds = time.monotonic() - started
        output.progress(counts, count, seconds, running=running)
        if not counts.open and not counts.queued:
            return counts, outcome_counts.discrepancies(counts, commands), seconds
        trouble = fleet.obituary()
        if trouble is None and seconds > LIMIT_SECONDS:
            trouble = f"not through after {seconds:.0f} s; the workers' logs: {fleet.last_words()}"
        if trouble is not None:
            return counts, [trouble, *outcome_counts.discrepancies(counts, commands)], seconds
        time.sleep(TICK_SECONDS)


def _waiting(bus: CommandBus) -> int:
    status = bus.status(DOMAIN)[0]
    return status.ready + status.delayed + status.running + status.parked


def _conclude(output: DemoOutput, counts: OutcomeCounts, wrong: list[str], seconds: float) -> None:
    output.say()
    for problem in wrong:
        output.say(f"NOT AS EXPECTED  {problem}")
    if wrong:
        return
    output.say(
        f"Nothing was lost: {counts.sum('found')} sent = {counts.sum('completed')} completed + "
        f"{counts.sum('failed')} failed by a rule + {counts.sum('in_tsq')} waiting for a person, after "
        f"{counts.sum('attempts')} attempts in {seconds:.1f} s."
    )


def _point_on(bus: CommandBus, output: DemoOutput, database: DemoDatabase, correlation_id: str) -> None:
    if database.option is None:
        output.say("\nTo look further (COMMANDBUS_DATABASE_URL=… being the address that you gave):")
        prefix = program()
    else:
        output.say("\nTo look further:")
        prefix = f"{program()} --database {database.option}"
    output.say(f"  {prefix} status {DOMAIN}")
    output.say(f"  {prefix} commands --correlation-id {correlation_id} --limit 20")
    for group in GROUPS:
        page = bus.query_commands(
            domain=DOMAIN, command_type=group.command_type, correlation_id=correlation_id, limit=1
        )
        for record in page.items:
            has_failed = record.attempts > 1 or group.fate is not CommandStatus.COMPLETED
            more = " --autopsy" if group is GROUPS[-1] else " --traceback" if has_failed else ""
            output.say(f"  {prefix} show {DOMAIN} {record.command_id}{more}")
    output.say(f"  {prefix} stuck --domain {DOMAIN}")
    output.say(f"  {prefix} tsq list --domain {DOMAIN}")
    output.say(f"  {prefix} tsq cancel --all --domain {DOMAIN} --reason 'only a demo' --yes")
    output.say(f"  {prefix} doctor")


def _say_kept(output: DemoOutput, database: DemoDatabase, fleet: DemoFleet) -> None:
    output.say("\nEverything stays up. To stop it:")
    output.say(f"  {stop_line(fleet.pids)}")
    if database.folder is not None:
        output.say(f"  {program()} embedded stop --folder {folder_word(database.folder)}")
    output.say(f"The workers write to {' and '.join(map(str, fleet.log_files))}")


def _document(
    counts: OutcomeCounts, wrong: list[str], correlation_id: str, database: DemoDatabase, fleet: DemoFleet
) -> dict[str, object]:
    return {
        "correlation_id": correlation_id,
        "database": database.option,
        "groups": counts.lines,
        "problems": wrong,
        "workers": fleet.pids if fleet.keep else [],
    }


COMMANDS = [demo]
