"""The entry: `commandbus` and `python -m commandbus.cli`. It puts the commands together and turns whatever
happens into one line and an exit code (`exits.py`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

import click
from click.shell_completion import shell_complete

from commandbus.cli import (
    batch,
    breakers,
    commands,
    config,
    demo,
    doctor,
    domain,
    embedded,
    limits,
    migrate,
    operate,
    process,
    prune,
    rejected,
    roles,
    send,
    status,
    stuck,
    tsq,
    undelivered,
    worker,
)
from commandbus.cli.exits import ExitCode, code_for, one_line, sentence_for
from commandbus.cli.release import release
from commandbus.cli.render import printable_lines, say
from commandbus.cli.session import Group, Session
from commandbus.cli.signals import TerminatedError, as_exceptions

COMPLETION = "_COMMANDBUS_COMPLETE"


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(release(), "--version", prog_name="commandbus", message="%(prog)s %(version)s")
def root() -> None:
    """Commands on PostgreSQL, run by workers that cannot hang.

    The options below may also stand after the command. `commandbus doctor` says whether everything is in
    order; `commandbus demo` shows it at work.
    """


for module in (
    demo, migrate, domain, roles, config, doctor, embedded, worker, send, status, commands, stuck, operate,
    limits, breakers, tsq, batch, process, rejected, undelivered, prune,
):  # fmt: skip
    for command in module.COMMANDS:
        root.add_command(command)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command line and exit."""
    if instruction := os.environ.get(COMPLETION):
        sys.exit(shell_complete(root, {}, "commandbus", COMPLETION, instruction))
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: Sequence[str]) -> int:
    """Run a command line; answers the exit code."""
    session = Session()
    # What psycopg has to say about a connection that a signal tore apart is of no use here; a worker logs it.
    logging.getLogger("psycopg").addHandler(logging.NullHandler())
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        with as_exceptions():
            _invoke(arguments, session)
            sys.stdout.flush()
    except click.exceptions.Exit as answer:
        return _flushed(answer.exit_code)
    except click.UsageError as error:
        return _usage(error)
    except click.ClickException as error:
        return _complain(error.format_message(), ExitCode.USAGE)
    except (KeyboardInterrupt, click.Abort):
        return ExitCode.INTERRUPTED
    except TerminatedError as terminated:
        return 128 + terminated.number
    except BrokenPipeError:
        return _hush()
    except Exception as error:  # noqa: BLE001 - the last place where an error can become a sentence
        if session.debug:
            for line in printable_lines("".join(traceback.format_exception(error))):
                say(line, is_error=True)
        return _complain(sentence_for(error), code_for(error))
    return ExitCode.OK


def _invoke(arguments: Sequence[str], session: Session) -> None:
    with root.make_context("commandbus", list(arguments), obj=session) as context:
        root.invoke(context)


def _flushed(code: int) -> int:
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        return _hush()
    return code


def _usage(error: click.UsageError) -> int:
    if type(error).__name__ == "NoArgsIsHelpError" and error.ctx is not None:
        click.echo(error.ctx.get_help())
        return ExitCode.OK
    hint = f" (see `{error.ctx.command_path} --help`)" if error.ctx is not None else ""
    return _complain(one_line(error.format_message()) + hint, ExitCode.USAGE)


def _complain(sentence: str, code: ExitCode) -> int:
    with contextlib.suppress(BrokenPipeError):
        say(f"commandbus: error: {one_line(sentence)}", is_error=True)
    return code


def _hush() -> int:
    """The reader is gone: nothing more is written, not even by the interpreter's own flush at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return ExitCode.BROKEN_PIPE
