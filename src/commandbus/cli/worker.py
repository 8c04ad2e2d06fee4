"""`worker`: run the handlers of a registry until SIGTERM, Ctrl-C or a limit.

`python -m commandbus.worker` is the same, for a service manager's unit.
"""

from __future__ import annotations

import logging
from typing import Any

import click

from commandbus.cli.exits import ExitCode
from commandbus.cli.parameters import setting_options, settings_in
from commandbus.cli.render import print_json
from commandbus.cli.session import Command, Session, connect
from commandbus.db.resolve import embedded_folder
from commandbus.errors import ConfigurationError
from commandbus.runtime.handlers import HandlerRegistry
from commandbus.runtime.load import load_registry
from commandbus.runtime.logs import set_up_logging
from commandbus.runtime.worker import Worker
from commandbus.settings import Settings

logger = logging.getLogger("commandbus.worker")

ARGUMENTS = ("handlers", "domains")
OPTIONS = [
    setting
    for setting in settings_in("worker", "retry", "pool", "retention", "log")
    if setting.name not in ARGUMENTS
]


@click.command(cls=Command)
@click.argument("handlers", metavar="[MODULE:REGISTRY]", required=False)
@click.option(
    "--domain", "domains", multiple=True, metavar="NAME",
    help="Serve this domain; repeatable. [WORKER_DOMAINS; default: all that have handlers]",
)  # fmt: skip
@setting_options(OPTIONS)
@click.pass_context
def worker(ctx: click.Context, /, handlers: str | None, domains: tuple[str, ...], **overrides: Any) -> None:
    """Run the handlers of a registry, until SIGTERM, Ctrl-C or a limit.

    MODULE is imported with the working directory on the path; REGISTRY is a commandbus.HandlerRegistry in it
    (default: WORKER_HANDLERS). A second signal ends it without waiting for what runs. Exit code 7 says that
    something was left behind: its lease runs out, and another worker takes it.
    """
    session: Session = ctx.obj
    settings = session.settings(handlers=handlers, domains=list(domains) or None, **overrides)
    if settings.processes > 1:
        raise ConfigurationError(
            f"processes is {settings.processes} (from {settings.origins['processes']}), but this release runs one "
            f"process for each `commandbus worker`: set it to 1 and start the command {settings.processes} times"
        )
    set_up_logging(settings)
    for warning in settings.warnings:
        logger.warning("%s", warning)
    registry = _load(settings.handlers)
    _check_reachable(settings)
    report = Worker(registry, settings=settings).run()
    if session.as_json:
        print_json(report)
    if not report.is_clean:
        ctx.exit(ExitCode.LEFT_BEHIND)


def _load(reference: str | None) -> HandlerRegistry:
    try:
        return load_registry(reference)
    except ConfigurationError as error:
        module, colon, name = (reference or "").partition(":")
        if not module.endswith(".py"):
            raise
        raise ConfigurationError(
            f"handlers {reference!r} names a file, not a module; did you mean {module[:-3]}{colon}{name}?"
        ) from error


def _check_reachable(settings: Settings) -> None:
    """Say within seconds that a server is away; the embedded one is started by the worker itself."""
    if embedded_folder(settings) is None:
        connect(settings).close()


COMMANDS = [worker]
