"""`config`: every setting's effective value and where it came from, secrets masked."""

from __future__ import annotations

import click

from commandbus.cli.render import print_json, print_table, say
from commandbus.cli.session import CliCommand, CliSession
from commandbus.cli.table import columns
from commandbus.model.durations import format_seconds
from commandbus.settings import SETTINGS, Settings


@click.command(cls=CliCommand)
@click.option("--changed", is_flag=True, help="Only what is not a default.")
@click.pass_obj
def config(session: CliSession, changed: bool) -> None:  # noqa: FBT001
    """Print the effective settings.

    Arguments count before the environment, then commandbus.toml, then [tool.commandbus] in pyproject.toml.
    """
    settings = session.settings()
    names = [name for name in SETTINGS if not changed or settings.origins[name] != "default"]
    if session.as_json:
        print_json(_document(settings, names))
        return
    shown = settings.displayed() | {name: format_seconds(value) for name, value in _effective(settings).items()}
    rows = [(name, shown[name], settings.origins[name], SETTINGS[name].toml, SETTINGS[name].env) for name in names]
    rows += [(key, _options(given), settings.origins[key], key, "") for key, given in settings.tables().items()]
    print_table(
        columns("setting =value from? toml??? environment??"),
        rows,
        empty="every setting has its default",
    )
    for warning in settings.warnings:
        say(f"warning: {warning}", is_error=True)


def _document(settings: Settings, names: list[str]) -> list[dict[str, object]]:
    effective = _effective(settings)
    masked = settings.masked() | effective
    return [
        {
            "name": name,
            "value": masked[name],
            "from": settings.origins[name],
            "default": effective.get(name, SETTINGS[name].default),
            "environment": SETTINGS[name].env,
            "toml": SETTINGS[name].toml,
            "help": SETTINGS[name].help,
        }
        for name in names
    ] + [
        {"name": key, "value": given, "from": settings.origins[key], "toml": key}
        for key, given in settings.tables().items()
    ]


def _options(given: dict[str, object]) -> str:
    return ", ".join(f"{name}={value}" for name, value in given.items()) or "defaults"


def _effective(settings: Settings) -> dict[str, float]:
    """Settings that follow from others: the deadline, if none is given."""
    deadline = settings.timeouts.deadline_seconds()
    return {} if settings.task_timeout is not None or deadline is None else {"task_timeout": deadline}


COMMANDS = [config]
