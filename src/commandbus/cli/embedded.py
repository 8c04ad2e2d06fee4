"""`embedded start|stop|status`: control the embedded PostgreSQL by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from commandbus.cli.render import print_fields, say
from commandbus.cli.session import CliGroup, CliSession
from commandbus.db.database_address import DEFAULT_FOLDER, embedded_folder
from commandbus.embedded import EmbeddedPostgres, EmbeddedStatus

FOLDER = click.option(
    "--folder", type=click.Path(path_type=Path),
    help=f"The folder of its data. [default: that of --database embedded:FOLDER, else {DEFAULT_FOLDER}]",
)  # fmt: skip


@click.group(cls=CliGroup)
def embedded() -> None:
    """The embedded PostgreSQL: a real server in a folder, for development and tests.

    `--database embedded` starts it while a command runs. `start` leaves it up until `stop`.
    """


@embedded.command()
@FOLDER
@click.pass_obj
def start(session: CliSession, folder: Path | None) -> None:
    """Start the server and leave it up. Does nothing if it is up already."""
    server = EmbeddedPostgres(folder or _default_folder(session))
    server.start()
    try:
        status = server.status()
    finally:
        server.stop(keep=True)
    _say(session, status)


@embedded.command()
@FOLDER
@click.pass_obj
def stop(session: CliSession, folder: Path | None) -> None:
    """Stop the server, even if programs use it. Its data stays."""
    server = EmbeddedPostgres(folder or _default_folder(session))
    was_running = server.stop(force=True)
    where = server.status().folder
    session.answer(
        {"stopped": was_running, "folder": where},
        lambda: say(f"{'stopped' if was_running else 'not running'}; the data is in {where}"),
    )


@embedded.command("status")
@FOLDER
@click.pass_obj
def show_status(session: CliSession, folder: Path | None) -> None:
    """Show whether the server is up, where its data is, and its address."""
    _say(session, EmbeddedPostgres(folder or _default_folder(session)).status())


def _default_folder(session: CliSession) -> Path:
    return embedded_folder(session.settings()) or Path(DEFAULT_FOLDER)


def _say(session: CliSession, status: EmbeddedStatus) -> None:
    session.answer(_document(status), lambda: print_fields(_document(status)))


def _document(status: EmbeddedStatus) -> dict[str, Any]:
    return {
        "running": status.running,
        "address": status.dsn,
        "version": status.version,
        "pid": status.pid,
        "port": status.port,
        "folder": status.folder,
        "data": status.data,
        "note": status.note,
    }


COMMANDS = [embedded]
