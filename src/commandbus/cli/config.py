"""`config`: every setting's effective value and where it came from, secrets masked."""

from __future__ import annotations

import click

from commandbus.cli.render import columns, print_json, print_table
from commandbus.cli.session import Command, Session
from commandbus.settings import SETTINGS, Settings


@click.command(cls=Command)
@click.option("--changed", is_flag=True, help="Only what is not a default.")
@click.pass_obj
def config(session: Session, changed: bool) -> None:  # noqa: FBT001
    """Print the effective settings.

    Arguments count before the environment, then commandbus.toml, then [tool.commandbus] in pyproject.toml.
    """
    settings = session.settings()
    names = [name for name in SETTINGS if not changed or settings.origins[name] != "default"]
    if session.as_json:
        print_json(_document(settings, names))
        return
    shown = settings.displayed()
    print_table(
        columns("setting value from"),
        [(name, shown[name], settings.origins[name]) for name in names],
        empty="every setting has its default",
    )
    for warning in settings.warnings:
        click.echo(f"warning: {warning}", err=True)


def _document(settings: Settings, names: list[str]) -> list[dict[str, object]]:
    masked = settings.masked()
    return [
        {
            "name": name,
            "value": masked[name],
            "from": settings.origins[name],
            "default": SETTINGS[name].default,
            "environment": SETTINGS[name].env,
            "toml": SETTINGS[name].toml,
            "help": SETTINGS[name].help,
        }
        for name in names
    ]


COMMANDS = [config]
