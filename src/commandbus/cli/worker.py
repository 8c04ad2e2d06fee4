"""`worker`: run the handlers of a registry until SIGTERM or Ctrl-C, under a supervisor.

`python -m commandbus.worker` is the same, for a service manager's unit. This process is the supervisor: it imports
no user code. The workers are its children.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from commandbus.cli.exit_codes import ExitCode
from commandbus.cli.parameters import setting_options, settings_in
from commandbus.cli.render import print_json
from commandbus.cli.session import CliCommand, CliSession, connect
from commandbus.db.database_address import embedded_folder
from commandbus.errors import ConfigurationError
from commandbus.logger import safe_logger
from commandbus.settings import Settings
from commandbus.supervisor.supervisor import supervise
from commandbus.worker.isolation.child_setup import collect_garbage, spare_memory
from commandbus.worker.logs import set_up_logging

logger = safe_logger("commandbus.worker")

ARGUMENTS = ("handlers", "domains", "wait_for_database")
OPTIONS = [
    setting
    for setting in settings_in("worker", "retry", "pool", "retention", "log")
    if setting.name not in ARGUMENTS
]


@click.command(cls=CliCommand)
@click.argument("handlers", metavar="[MODULE:REGISTRY]", required=False)
@click.option(
    "--domain", "domains", multiple=True, metavar="NAME",
    help="Serve this domain; repeatable. [WORKER_DOMAINS; default: all that have handlers]",
)  # fmt: skip
@click.option(
    "--no-wait", is_flag=True,
    help="If the database is unreachable, end with exit code 6, do not wait. [WORKER_WAIT_FOR_DATABASE=false]",
)  # fmt: skip
@setting_options(OPTIONS)
@click.pass_context
def worker(
    ctx: click.Context, /, handlers: str | None, domains: tuple[str, ...], *, no_wait: bool, **overrides: Any
) -> None:
    """Run the handlers of a registry, until SIGTERM or Ctrl-C.

    The worker processes import MODULE, with the working directory on the path. REGISTRY is a
    commandbus.HandlerRegistry in it (default: WORKER_HANDLERS). This process supervises them: it replaces workers
    that drain, freeze or crash, and settles what they held. SIGHUP starts new workers with the current code; the
    old ones end when the new ones are ready. A second SIGTERM or Ctrl-C ends it without waiting for running
    attempts. Exit code 7 means that an attempt was cut off or an outcome was not written; the command is retried.
    If the database is unreachable at the start, the worker waits for it.
    """
    session: CliSession = ctx.obj
    if no_wait:
        overrides["wait_for_database"] = False

    def load() -> Settings:
        return session.settings(handlers=handlers, domains=list(domains) or None, **overrides)

    settings = load()
    set_up_logging(settings)
    for warning in settings.warnings:
        logger.warning("%s", warning)
    _check_reference(settings.handlers)
    if not settings.wait_for_database:
        _check_reachable(settings)
    collect_garbage()
    spare_memory()
    report = supervise(settings, reload=load)
    if session.as_json:
        print_json(report)
    if not report.is_clean:
        ctx.exit(ExitCode.LEFT_BEHIND)


def _check_reference(reference: str | None) -> None:
    """Report the most common mistake before a process is started."""
    module, colon, name = (reference or "").partition(":")
    if module.endswith(".py") and Path(module).is_file():
        raise ConfigurationError(
            f"handlers {reference!r} names a file, not a module; did you mean {module[:-3]}{colon}{name}?"
        )


def _check_reachable(settings: Settings) -> None:
    """Fail within seconds if the server is unreachable. The supervisor itself starts an embedded server."""
    if embedded_folder(settings) is None:
        connect(settings).close()


COMMANDS = [worker]
