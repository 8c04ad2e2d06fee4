"""`top`: what needs a person, domains and slots, full-screen and live; with --once as plain text."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import click

from commandbus.cli.parameters import DURATION
from commandbus.cli.render import print_table, say, say_heading
from commandbus.cli.session import CliCommand, CliSession
from commandbus.cli.table import columns
from commandbus.cli.top_view import TopView, look, view_of
from commandbus.errors import ConfigurationError

if TYPE_CHECKING:
    from commandbus.bus import CommandBus
    from commandbus.web.attention import Fleet

SLOTS_SECONDS: Final = 4.0
LOOK_SECONDS: Final = 0.25


@click.command(cls=CliCommand)
@click.option("--interval", type=DURATION, default="2s", show_default=True, help="How often it looks.")
@click.option(
    "--filter", "wanted", default="", metavar="TEXT", help="Only domains, types, ids and workers with it."
)
@click.option("--once", is_flag=True, help="Print one screen as plain text, and end.")
@click.pass_obj
def top(session: CliSession, interval: float, wanted: str, once: bool) -> None:  # noqa: FBT001
    """Show what needs a person, what waits and runs per domain, and what every slot runs; live.

    Keys: arrows and tab move, enter shows details (of a slot: where its command is now), / filters, p pauses the
    screen, ? lists the keys, q ends it. It needs the extra `top`: pip install 'commandbus-pg[top]'. --once does
    without it.
    """
    if once or session.as_json:
        with session.bus() as bus:
            view = view_of(_look_with_slots(bus), wanted)
        session.answer(view, lambda: _print(view))
        return
    try:
        from commandbus.cli.top_app import TopApp
    except ImportError as error:
        raise ConfigurationError(
            f"`commandbus top` needs the extra `top` ({error.name} is missing): pip install 'commandbus-pg[top]'; "
            f"`commandbus top --once` does without it"
        ) from None
    with session.bus() as bus:
        TopApp(bus, interval=max(0.2, interval), wanted=wanted).run()


def _look_with_slots(bus: CommandBus) -> Fleet:
    """Look until every live worker has published its slots, or has had the time for it."""
    until = time.monotonic() + SLOTS_SECONDS
    while True:
        found = look(bus)
        missing = {worker.id for worker in found.workers if worker.is_alive} - {
            item.worker for item in found.slots
        }
        if not missing or time.monotonic() > until:
            return found
        time.sleep(LOOK_SECONDS)


def _print(view: TopView) -> None:
    say(view.headline)
    for text in view.concerns:
        say(f"- {text}")
    say_heading("Domains")
    print_table(
        columns(
            "=domain :ready :oldest :delayed? :parked? :running :tsq :wait_50%?? :wait_99%?? :rate +last_hour???"
        ),
        [row.cells for row in view.domains],
        empty="no domains",
    )
    say_heading("Slots")
    print_table(
        columns("state +domain/type =command :time +of_its_time =worker"),
        [row.cells for row in view.slots],
        empty="no slots",
    )


COMMANDS = [top]
