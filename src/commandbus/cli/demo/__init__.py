"""`demo`: a PostgreSQL, two workers, a few hundred commands that end in all kinds of ways, and a table of them.

It ends by itself. At its end, also after Ctrl-C or SIGTERM, it stops what it started: first the workers, then the
server (its data stays). `--keep` leaves both up and says how to stop them.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click

from commandbus.bus import CommandBus
from commandbus.cli.demo import tally as books
from commandbus.cli.demo.fleet import DemoFleet, stop_line
from commandbus.cli.demo.handlers import DOMAIN
from commandbus.cli.demo.stage import Stage, folder_word, program
from commandbus.cli.demo.tally import GROUPS, OutcomeCounts
from commandbus.cli.exit_codes import ExitCode
from commandbus.cli.render import print_json
from commandbus.cli.session import CliCommand, CliSession
from commandbus.db.database_address import DEFAULT_FOLDER, embedded_folder
from commandbus.embedded import EmbeddedPostgres
from commandbus.model.command import CommandStatus, new_command_id
from commandbus.model.counting import counted
from commandbus.settings import Settings, mask_database_url

WORKERS = 2
TICK_SECONDS = 0.1
LIMIT_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Place:
    """The demo's database: its address, how to name it on a command line, and where logs may lie."""

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
    stage = Stage(as_json=session.as_json)
    correlation_id = f"demo-{new_command_id()}"
    with _place(session, folder, stage, keep=keep) as place, CommandBus(settings=place.settings) as bus:
        _prepare(bus, stage)
        with DemoFleet(place.settings.database_url or "", place.logs, size=WORKERS, keep=keep) as fleet:
            tally, wrong, seconds = _play(bus, fleet, stage, count, correlation_id)
            if session.as_json:
                print_json(_document(tally, wrong, correlation_id, place, fleet))
            else:
                stage.table(tally)
                _conclude(stage, tally, wrong, seconds)
                _point_on(bus, stage, place, correlation_id)
                if keep:
                    _say_kept(stage, place, fleet)
                elif place.folder is not None:
                    stage.say(
                        f"\nThe server stops now. Its data stays in {place.folder}; these lines start it again."
                    )
    if wrong:
        ctx.exit(ExitCode.NO)


# --- set-up --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _place(session: CliSession, folder: Path | None, stage: Stage, *, keep: bool) -> Iterator[Place]:
    if folder is not None and session.database is not None:
        raise click.UsageError("--folder is for the embedded server: it does not go with --database")
    if session.database is None:
        session.database = "embedded" if folder is None else f"embedded:{folder}"
    asked = embedded_folder(session.settings())
    if asked is None:
        with session.reachable() as settings, _scratch_folder(keep=keep) as logs:
            address = settings.database_url or ""
            shown = mask_database_url(address)
            stage.say(f"using {shown}")
            yield Place(settings, None if shown != address else address, logs, None)
        return
    stage.say(f"starting PostgreSQL in {asked} (its first start takes a few seconds)")
    server = EmbeddedPostgres(asked, revive=True)
    server.start()
    stays = False
    try:
        status = server.status()
        stage.say(f"PostgreSQL {status.version} answers at {status.dsn}")
        if status.note is not None:
            stage.say(status.note)
        settings = session.settings(database_url=status.dsn)
        yield Place(settings, f"embedded:{folder_word(asked)}", status.folder, asked)
        stays = keep
    finally:
        server.stop(keep=stays)


@contextlib.contextmanager
def _scratch_folder(*, keep: bool) -> Iterator[Path]:
    """For the logs of workers beside a server of the reader's own."""
    if keep:
        yield Path(tempfile.mkdtemp(prefix="commandbus-demo-"))
        return
    with tempfile.TemporaryDirectory(prefix="commandbus-demo-") as name:
        yield Path(name)


def _prepare(bus: CommandBus, stage: Stage) -> None:
    before = bus.migrate(domains=[DOMAIN])
    state = bus.schema_state()
    what = "installed" if before.missing else "is there"
    stage.say(f"the schema {what} (migration {max(state.applied)}, PGMQ {state.pgmq_version} by {state.pgmq_way})")


# --- the play ------------------------------------------------------------------------------------------------


def _play(
    bus: CommandBus, fleet: DemoFleet, stage: Stage, count: int, correlation_id: str
) -> tuple[OutcomeCounts, list[str], float]:
    """Send, and watch until all have ended. Returns the counts, what is wrong with them, and how long it took."""
    stage.say(f"{WORKERS} worker processes start: pid {', '.join(map(str, fleet.pids))}")
    if earlier := _waiting(bus):
        stage.say(f"going first: {counted(earlier, 'command')} of earlier runs")
    commands = list(books.make_commands(count, correlation_id))
    started = time.monotonic()
    receipts = bus.send_many(DOMAIN, commands)
    stage.say(f"sent {counted(len(receipts), 'command')} to domain {DOMAIN} in {time.monotonic() - started:.2f} s")
    ids = [receipt.id for receipt in receipts]
    while True:
        tally = bus.run(books.count(ids))
        running = bus.status(DOMAIN)[0].running if tally.open else 0
        seconds = time.monotonic() - started
        stage.progress(tally, count, seconds, running=running)
        if not tally.open and not tally.queued:
            return tally, books.discrepancies(tally, commands), seconds
        trouble = fleet.obituary()
        if trouble is None and seconds > LIMIT_SECONDS:
            trouble = f"not through after {seconds:.0f} s; the workers' logs: {fleet.last_words()}"
        if trouble is not None:
            return tally, [trouble, *books.discrepancies(tally, commands)], seconds
        time.sleep(TICK_SECONDS)


def _waiting(bus: CommandBus) -> int:
    status = bus.status(DOMAIN)[0]
    return status.ready + status.delayed + status.running + status.parked


def _conclude(stage: Stage, tally: OutcomeCounts, wrong: list[str], seconds: float) -> None:
    stage.say()
    for problem in wrong:
        stage.say(f"NOT AS EXPECTED  {problem}")
    if wrong:
        return
    stage.say(
        f"Nothing was lost: {tally.sum('found')} sent = {tally.sum('completed')} completed + "
        f"{tally.sum('failed')} failed by a rule + {tally.sum('in_tsq')} waiting for a person, after "
        f"{tally.sum('attempts')} attempts in {seconds:.1f} s."
    )


def _point_on(bus: CommandBus, stage: Stage, place: Place, correlation_id: str) -> None:
    if place.option is None:
        stage.say("\nTo look further (COMMANDBUS_DATABASE_URL=… being the address that you gave):")
        prefix = program()
    else:
        stage.say("\nTo look further:")
        prefix = f"{program()} --database {place.option}"
    stage.say(f"  {prefix} status {DOMAIN}")
    stage.say(f"  {prefix} commands --correlation-id {correlation_id} --limit 20")
    for group in GROUPS:
        page = bus.query_commands(
            domain=DOMAIN, command_type=group.command_type, correlation_id=correlation_id, limit=1
        )
        for record in page.items:
            has_failed = record.attempts > 1 or group.fate is not CommandStatus.COMPLETED
            more = " --autopsy" if group is GROUPS[-1] else " --traceback" if has_failed else ""
            stage.say(f"  {prefix} show {DOMAIN} {record.command_id}{more}")
    stage.say(f"  {prefix} stuck --domain {DOMAIN}")
    stage.say(f"  {prefix} tsq list --domain {DOMAIN}")
    stage.say(f"  {prefix} tsq cancel --all --domain {DOMAIN} --reason 'only a demo' --yes")
    stage.say(f"  {prefix} doctor")


def _say_kept(stage: Stage, place: Place, fleet: DemoFleet) -> None:
    stage.say("\nEverything stays up. To stop it:")
    stage.say(f"  {stop_line(fleet.pids)}")
    if place.folder is not None:
        stage.say(f"  {program()} embedded stop --folder {folder_word(place.folder)}")
    stage.say(f"The workers write to {' and '.join(map(str, fleet.log_files))}")


def _document(
    tally: OutcomeCounts, wrong: list[str], correlation_id: str, place: Place, fleet: DemoFleet
) -> dict[str, object]:
    return {
        "correlation_id": correlation_id,
        "database": place.option,
        "groups": tally.lines,
        "problems": wrong,
        "workers": fleet.pids if fleet.keep else [],
    }


COMMANDS = [demo]
