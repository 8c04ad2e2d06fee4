"""`console`: the web console, for people who look and act in a browser."""

from __future__ import annotations

import os
from pathlib import Path

import click

from commandbus.cli.render import say
from commandbus.cli.session import CliCommand, CliSession
from commandbus.errors import ConfigurationError

DEFAULT_PORT = 8750
TOKENS_VARIABLE = "COMMANDBUS_CONSOLE_TOKENS"


@click.command(cls=CliCommand)
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=DEFAULT_PORT, show_default=True)
@click.option(
    "--tokens", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE",
    help=f"Who may sign in: lines NAME ROLE TOKEN; ROLE is reader or operator. Or set {TOKENS_VARIABLE} to them.",
)  # fmt: skip
@click.option("--user-header", metavar="NAME", help="A proxy in front names the visitor in this header.")
@click.option("--operators", metavar="NAMES", default="", help="With --user-header: who may act, with commas.")
@click.option(
    "--app", "handlers", metavar="MODULE:REGISTRY",
    help="The handlers, as `worker` names them: with them, operators can rehearse commands.",
)  # fmt: skip
@click.option(
    "--connections", type=click.IntRange(1, 50), default=4, show_default=True,
    help="How many connections its pages use at most.",
)  # fmt: skip
@click.pass_obj
def console(
    session: CliSession,
    host: str,
    port: int,
    tokens: Path | None,
    user_header: str | None,
    operators: str,
    connections: int,
    handlers: str | None,
) -> None:
    """Run the web console: what needs a person, why, and the right button.

    Without --tokens and --user-header it listens on loopback only, and everybody on this machine is an operator.
    It needs the extra `web`: pip install 'commandbus-pg[web]'.
    """
    try:
        import uvicorn

        from commandbus.web.access import Access, is_loopback, read_tokens
        from commandbus.web.app import create_console
    except ImportError as error:
        raise ConfigurationError(
            f"the console needs the extra `web` ({error.name} is missing): pip install 'commandbus-pg[web]'"
        ) from None
    given = os.environ.get(TOKENS_VARIABLE)
    known = None
    if tokens is not None:
        known = read_tokens(tokens.read_text(encoding="utf-8"), source=str(tokens))
    elif given:
        known = read_tokens(given, source=TOKENS_VARIABLE)
    access = Access(
        tokens=known, user_header=user_header, operators={name.strip() for name in operators.split(",") if name}
    )
    if not access.is_open_to_the_network and not is_loopback(host):
        raise ConfigurationError(
            f"--host {host} would let everybody in: give --tokens or --user-header, or listen on 127.0.0.1"
        )
    with session.reachable() as settings:
        app = create_console(settings, access, connections=connections, handlers=handlers)
        server = uvicorn.Server(uvicorn.Config(app, host=host, port=port, log_level="warning", lifespan="on",
                                               timeout_graceful_shutdown=3))  # fmt: skip
        say(f"the console is at http://{host}:{port}/ (Ctrl-C ends it)")
        server.run()


COMMANDS = [console]
