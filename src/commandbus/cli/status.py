"""`status` of domains and `workers`: what waits, what runs, and who runs it."""

from __future__ import annotations

import sys
import time

import click

from commandbus.cli.parameters import DURATION
from commandbus.cli.render import age, age_of, print_json, print_table, say
from commandbus.cli.session import CliCommand, CliSession
from commandbus.cli.table import columns
from commandbus.flow.commands.inspect import DomainStatus, WorkerInfo
from commandbus.flow.commands.unhandled_types import MOST_COUNTED, UnhandledType
from commandbus.model.counting import counted

CLEAR = "\x1b[H\x1b[2J"


@click.command(cls=CliCommand)
@click.argument("domains", nargs=-1, metavar="[DOMAIN]...")
@click.option("--watch", is_flag=True, help="Repeat until Ctrl-C.")
@click.option("--interval", type=DURATION, default="2s", show_default=True, help="With --watch: how often.")
@click.pass_obj
def status(session: CliSession, domains: tuple[str, ...], watch: bool, interval: float) -> None:  # noqa: FBT001
    """Show how many commands wait, run or need a person, per domain.

    READY commands can run now (in parentheses: those of high and low priority), and OLDEST is how long the first
    of them has waited. DELAYED ones will be ready later. RUNNING ones are claimed by workers, including those
    that have not started. PARKED ones wait for the end of a pause, for a breaker to close, for a permit of a
    limit, or for a worker that handles their type. TSQ counts those that need a person. RATE is how many commands
    the live workers settle per second.
    """
    with session.bus() as bus:
        while True:
            found = bus.status(*domains).items
            if session.as_json:
                print_json(found, on_one_line=watch)
            else:
                _print(found, clear=watch and sys.stdout.isatty())
            if not watch:
                return
            sys.stdout.flush()
            time.sleep(interval)


def _print(found: list[DomainStatus], *, clear: bool) -> None:
    if clear:
        click.echo(CLEAR, nl=False)
    print_table(
        columns("=domain :ready :delayed? :running :parked? :tsq :rejected?? :oldest? :rate?? paused"),
        [
            (
                item.domain, _ready(item), item.delayed, item.running, item.parked, item.in_tsq, item.rejected,
                age(item.oldest_seconds) or "-", f"{item.settled_per_second:.1f}/s", _paused(item),
            )
            for item in found
        ],
        empty="no domains; `commandbus domain create NAME` creates one",
    )  # fmt: skip
    for item in found:
        for kind in item.unhandled:
            say(unhandled_text(kind))


def unhandled_text(item: UnhandledType) -> str:
    """One command type whose commands wait for a handler, as a sentence."""
    count = (
        f"{MOST_COUNTED} commands or more" if item.waiting >= MOST_COUNTED else counted(item.waiting, "command")
    )
    waits = (
        f"{count} of {item.name} {'waits' if item.waiting == 1 else 'wait'} for a worker that handles that type"
    )
    who = f"{counted(item.workers, 'running worker')} can" if item.workers else "no running worker does"
    return f"{waits} (the first for {age_of(item.since)}); {who}"


def _ready(item: DomainStatus) -> str:
    others = {"high": item.ready_high, "low": item.ready_low}
    shown = ", ".join(f"{count} {name}" for name, count in others.items() if count)
    return f"{item.ready} ({shown})" if shown else str(item.ready)


def _paused(item: DomainStatus) -> str:
    if item.is_paused:
        return "all"
    return ", ".join(item.paused_types) or "-"


@click.command(cls=CliCommand)
@click.option("--all", "everyone", is_flag=True, help="Also list workers that stopped cleanly.")
@click.pass_obj
def workers(session: CliSession, everyone: bool) -> None:  # noqa: FBT001
    """List workers: where they run, since when, their health, and which are silent.

    STATE is ACTIVE, PAUSED (by an operator), DRAINING (claims nothing more), STOPPING or STOPPED. HEALTH is what
    the worker reports about itself; it is unknown if the worker is silent.
    """
    with session.bus() as bus:
        found = [worker for worker in bus.workers() if everyone or worker.state != "STOPPED"]
    session.answer(found, lambda: _print_workers(found))


def _print_workers(found: list[WorkerInfo]) -> None:
    print_table(
        columns(
            "=worker host?? :pid??? supervisor??? state ~health domains? :slots?? :running? :settled??? "
            "started???? code_version???? heartbeat?"
        ),
        [
            (
                item.id, item.host, item.pid, item.supervisor or "-", _state(item), _health(item), item.domains,
                item.concurrency, item.running, item.settled, item.started_at, item.code_version,
                f"{age(item.heartbeat_age_seconds)} ago",
            )
            for item in found
        ],
        empty="no workers; `commandbus worker MODULE:REGISTRY` runs one",
    )  # fmt: skip


def _state(item: WorkerInfo) -> str:
    return item.state if item.is_alive or item.state == "STOPPED" else f"{item.state}, silent"


def _health(item: WorkerInfo) -> str:
    """Its state and, in parentheses, the reasons if it is not healthy. A silent worker's last report is
    outdated."""
    if not item.is_alive and item.state != "STOPPED":
        return "?"
    if item.health is None:
        return "-"
    reasons = item.health.get("reasons")
    shown = "; ".join(map(str, reasons)) if isinstance(reasons, list) else ""
    return f"{item.health.get('state', '-')}" + (f" ({shown})" if shown else "")


COMMANDS = [status, workers]
