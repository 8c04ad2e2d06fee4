"""CliSession: what one run of the command line shares: the options that all commands have, the settings that
follow from them, and a bus on a database that is reachable.

One direct connection with a short timeout finds out whether the server is reachable, with libpq's own error,
before a pool starts to wait for it. An embedded server is started if necessary, and released when the command
ends.

Modules that talk to the database are imported on first use, so that `commandbus --help` is fast.

No command waits for a lock for longer than LOCK_SECONDS. Behind PgBouncer the role's own lock_timeout counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from commandbus.cli.render import moment, print_json, say
from commandbus.errors import UnknownDomainError
from commandbus.shell_words import quoted

if TYPE_CHECKING:
    from psycopg import Connection

    from commandbus.bus import CommandBus
    from commandbus.model.page import Page
    from commandbus.settings import Settings

CONNECT_SECONDS = 3
LOCK_SECONDS = 30
POOL_SECONDS = 10.0


@dataclass
class CliSession:
    """The options of this run. Commands get it with `@click.pass_obj`."""

    database: str | None = None
    config: Path | None = None
    as_json: bool = False
    debug: bool = False

    def settings(self, **overrides: object) -> Settings:
        """The effective settings; `overrides` are the values of the command's own options."""
        from commandbus.settings import load_settings

        return load_settings({"database_url": self.database, **overrides}, config_file=self.config)

    @contextmanager
    def bus(self) -> Iterator[CommandBus]:
        """A bus on a database that is reachable. What it returns is masked."""
        from commandbus.bus.masked import bus_for_people

        with self.reachable() as settings:
            modest = replace(settings, pool_min_size=0, pool_max_size=1, pool_timeout=POOL_SECONDS)
            with bus_for_people(modest) as bus:
                yield bus

    @contextmanager
    def connection(self, *, autocommit: bool = True) -> Iterator[Connection[Any]]:
        """A separate connection; without autocommit the block is one transaction."""
        with self.resolved() as settings, connect(settings, autocommit=autocommit) as conn:
            yield conn

    @contextmanager
    def reachable(self) -> Iterator[Settings]:
        """Settings whose `database_url` is known to be reachable."""
        with self.resolved() as settings:
            conn, used = _connect(settings, autocommit=True)
            conn.close()
            yield used

    @contextmanager
    def resolved(self) -> Iterator[Settings]:
        """Settings whose `database_url` is the address of a server. An embedded server has been started."""
        from commandbus.db.database_address import Database

        database = Database(self.settings())
        try:
            yield database.resolve()
        finally:
            database.close()

    def answer(self, document: Any, for_people: Callable[[], object]) -> None:
        """Print the document, or let the function print what people read."""
        if self.as_json:
            print_json(document)
        else:
            for_people()

    def say_more(self, page: Page[Any], *, is_error: bool = False) -> None:
        """Print how to get the next page, if there is one; with --json or `is_error` on stderr."""
        is_error = is_error or self.as_json
        if page.is_partial:
            reached = "" if page.reached_at is None else f", back to {moment(page.reached_at)}"
            say(
                f"this is not all: the search has looked at as many as it may at once{reached}; "
                f"to continue, add --cursor {quoted(page.next_cursor or '')}",
                is_error=is_error,
            )
        elif page.next_cursor is not None:
            say(f"more: add --cursor {quoted(page.next_cursor)}", is_error=is_error)

    def warn(self, sentence: str | None) -> None:
        """Print a warning. With --json the document has it in `warning`."""
        if sentence is not None and not self.as_json:
            say(f"warning: {sentence}", is_error=True)


def connect(settings: Settings, *, autocommit: bool = True) -> Connection[Any]:
    """Connect now, or raise libpq's error."""
    return _connect(settings, autocommit=autocommit)[0]


def connect_as_the_role(settings: Settings) -> Connection[Any]:
    """Connect now, or raise libpq's error. The session has the role's own timeouts, and none of ours."""
    return _connect_as(settings, autocommit=True)


def _connect(settings: Settings, *, autocommit: bool) -> tuple[Connection[Any], Settings]:
    """A connection, and the settings with which it was made: with a lock_timeout, if the server accepts
    options."""
    import psycopg

    from commandbus.db.pool import refuses_options

    limited = _with_lock_limit(settings)
    try:
        return _connect_as(limited, autocommit=autocommit), limited
    except psycopg.OperationalError as error:
        if limited == settings or not refuses_options(error):
            raise
    return _connect_as(settings, autocommit=autocommit), settings


def _with_lock_limit(settings: Settings) -> Settings:
    from psycopg.conninfo import make_conninfo

    from commandbus.db.pool import check_conninfo, options_of

    if not settings.prepared_statements:
        return settings
    url = check_conninfo(settings.database_url)
    # Options in the address come last, so they win.
    options = f"-c lock_timeout={LOCK_SECONDS}s {options_of(url)}".strip()
    return replace(settings, database_url=make_conninfo(url, options=options))


def _connect_as(settings: Settings, *, autocommit: bool) -> Connection[Any]:
    import psycopg
    from psycopg.conninfo import conninfo_to_dict

    from commandbus.db.pool import check_conninfo, connection_kwargs, lasting_conninfo

    conninfo = check_conninfo(settings.database_url)
    kwargs = connection_kwargs(settings, name="cli") | {"autocommit": autocommit}
    if not conninfo_to_dict(conninfo).get("connect_timeout"):
        kwargs["connect_timeout"] = CONNECT_SECONDS
    conn: Connection[Any] = psycopg.connect(lasting_conninfo(conninfo), **kwargs)
    return conn


def check_known(bus: CommandBus, domain: str | None) -> None:
    """Raise an error if there is no such domain. Called when a search in it found nothing."""
    if domain is not None and all(item.name != domain for item in bus.list_domains()):
        raise UnknownDomainError(domain)


# --- the options that every command has ----------------------------------------------------------------------


def _remember(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    """Store a value. If an option is given twice, the one nearer to the end of the line counts."""
    if value and param.name is not None:
        setattr(ctx.ensure_object(CliSession), param.name, value)


def shared_options() -> list[click.Parameter]:
    """`--database`, `--config`, `--json` and `--debug`, to be added to a command."""
    common: dict[str, Any] = {"expose_value": False, "callback": _remember}
    return [
        click.Option(
            ["--database"], metavar="URL", help="PostgreSQL, or `embedded`, or `embedded:FOLDER`.", **common
        ),
        click.Option(
            ["--config"], metavar="FILE", type=click.Path(path_type=Path), **common,
            help="Settings from this file instead of the nearest commandbus.toml.",
        ),
        click.Option(["as_json", "--json"], is_flag=True, help="JSON instead of text for people.", **common),
        click.Option(["--debug"], is_flag=True, help="Show tracebacks of errors.", **common),
    ]  # fmt: skip


class CliCommand(click.Command):
    """A command with the options that every command has."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.extend(shared_options())


class CliGroup(click.Group):
    """A group of such commands; without a subcommand it shows its help."""

    command_class = CliCommand

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs | {"no_args_is_help": True})
        self.params.extend(shared_options())

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """The commands in the order in which they were added, which is the order of their use."""
        return list(self.commands)


class ListingGroup(CliGroup):
    """A group that lists if no subcommand is given, instead of showing its help."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs | {"invoke_without_command": True})
        self.no_args_is_help = False


CliGroup.group_class = CliGroup
