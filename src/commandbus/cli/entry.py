"""The entry: `commandbus` and `python -m commandbus.cli`. It puts the commands together, and turns every result
into an exit code (`exit_codes.py`) and every error into one line.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

import click
from click.shell_completion import shell_complete

from commandbus.cli.exit_codes import ExitCode, code_for, one_line, sentence_for
from commandbus.cli.render import printable_lines, say
from commandbus.cli.session import CliGroup, CliSession
from commandbus.cli.signals import TerminatedError, as_exceptions
from commandbus.cli.version import release
from commandbus.light_imports import light_imports

COMPLETION = "_COMMANDBUS_COMPLETE"

# Every command, in the order of their use: its name, its module in this package, and the beginning of its help. A
# module is imported when its command is used, so that `--help` and `--version` are fast.
COMMANDS = {
    "demo": ("demo", "Show everything at work, in about ten seconds."),
    "migrate": ("migrate", "Create the schema, or upgrade it to this release."),
    "domain": ("domain", "Domains: queues of commands."),
    "queue": ("domain", "Plain PGMQ queues, for example for replies."),
    "roles": (
        "roles",
        "Create the roles reader, producer, limiter, worker and operator, and grant them what they need.",
    ),
    "config": ("config", "Print the effective settings."),
    "doctor": ("doctor", "Check configuration, server, schema, rights, clock and workers, and say what to do."),
    "embedded": (
        "embedded",
        "The embedded PostgreSQL: a real server in a folder, for development and tests.",
    ),
    "worker": ("worker", "Run the handlers of a registry, until SIGTERM or Ctrl-C."),
    "handlers": ("handlers", "List the handlers of a registry, with their payloads and options."),
    "send": ("send", "Send a command."),
    "wait": ("wait", "Wait for a command, and print its result."),
    "status": ("status", "Show how many commands wait, run or need a person, per domain."),
    "workers": ("status", "List workers: where they run, since when, their health, and which are silent."),
    "commands": ("commands", "List commands, newest first."),
    "show": ("show", "Show one command: its fields, data, result, last error and history."),
    "stuck": ("stuck", "List attempts that had to be stopped, newest first."),
    "failures": ("failures", "List failures that are alike, the one that was seen last first."),
    "cancel": ("operate", "Cancel a command. If it runs, ask its worker to stop it."),
    "priority": (
        "operate",
        "Change the priority of a command that waits. If it runs, its retries have the new one.",
    ),
    "pause": ("operate", "Pause a domain, or one command type in it."),
    "resume": ("operate", "Resume a paused domain or command type."),
    "pauses": ("operate", "List what is paused, who paused it, and why."),
    "limits": ("limits", "List limits: what they allow, who uses them, who waits, and their state."),
    "breakers": (
        "breakers",
        "List the breakers of command types and limits: their state, why they are open, and until when.",
    ),
    "keys": ("keys", "Key limits: how many commands of one key run at once, and in which order."),
    "schedules": ("schedules", "Schedules: commands that are sent by the clock."),
    "effect": ("effect", "Effects outside the database: calls of which nobody knows whether they were made."),
    "tsq": ("tsq", "The troubleshooting queue: commands that need a person."),
    "plan": (
        "plan",
        "Plans: retry, cancel or complete many commands of the troubleshooting queue, after a preview.",
    ),
    "rehearse": ("rehearse", "Run the handler of a command and roll everything back, to see what it would do."),
    "replay": ("replay", "Send a new command like an old one that has ended, with other data."),
    "batch": ("batch", "Batches: commands that are watched as one, and what happens when all are done."),
    "process": ("process", "Processes (sagas): commands that follow each other, and are undone if one fails."),
    "rejected": ("rejected", "List messages that were not commands, newest first, with the reason."),
    "undelivered": ("undelivered", "List replies that could not be delivered, newest first, with the reason."),
    "audit": ("audit", "List what people did, newest first: who, what, when and why."),
    "database": (
        "database",
        "Show dead rows, open transactions and who holds them, connections, slow statements.",
    ),
    "console": ("console", "Run the web console: what needs a person, why, and the right button."),
    "top": ("top", "Show what needs a person, what waits and runs per domain, and what every slot runs; live."),
    "stack": ("stack", "Show where a running command is at this moment."),
    "recycle": ("stack", "Have a worker replaced: it claims nothing more, and ends when what it runs has ended."),
    "pause-worker": (
        "stack",
        "Pause one worker: it claims nothing more, gives back what has not started, and finishes what it runs.",
    ),
    "resume-worker": ("stack", "Let a paused worker claim again."),
    "prune": ("prune", "Delete finished commands, old archives and rejected messages."),
}


class Root(CliGroup):
    """The group of all commands."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """Their names."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of this name; its module is imported."""
        if cmd_name in COMMANDS and cmd_name not in self.commands:
            with light_imports(has_loop=cmd_name != "worker"):
                module = importlib.import_module(f"commandbus.cli.{COMMANDS[cmd_name][0]}")
            gc.enable()
            for command in module.COMMANDS:
                self.add_command(command)
        return super().get_command(ctx, cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """The list of commands, without importing their modules."""
        width = formatter.width - 6 - max(map(len, COMMANDS))
        with formatter.section("Commands"):
            formatter.write_dl(
                [
                    (name, click.Command(name, help=text).get_short_help_str(width))
                    for name, (_, text) in COMMANDS.items()
                ]
            )


@click.group(cls=Root, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(release(), "--version", prog_name="commandbus", message="%(prog)s %(version)s")
def root() -> None:
    """Commands on PostgreSQL, run by workers that cannot hang.

    You may also put the options below after the command. `commandbus doctor` checks your installation;
    `commandbus demo` shows everything at work.
    """


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command line and exit."""
    if instruction := os.environ.get(COMPLETION):
        sys.exit(shell_complete(root, {}, "commandbus", COMPLETION, instruction))
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: Sequence[str]) -> int:
    """Run a command line. Returns the exit code."""
    session = CliSession()
    # psycopg warns about a connection that a signal interrupted. That does not help here; a worker logs it.
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
        return _interrupted()
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


def _invoke(arguments: Sequence[str], session: CliSession) -> None:
    with root.make_context("commandbus", list(arguments), obj=session) as context:
        root.invoke(context)


def _flushed(code: int) -> int:
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        return _hush()
    return code


def _interrupted() -> int:
    """Ctrl-C. If it came while Python executed a string (as an import of a dataclass does), Python has recorded it
    as unhandled, and `python -m` would end by the signal instead of with our exit code. Executing an empty string
    clears that record.
    """
    exec("")  # noqa: S102 - nothing is executed
    return ExitCode.INTERRUPTED


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
    """The reader of the output is gone: write nothing more, not even in the interpreter's own flush at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return ExitCode.BROKEN_PIPE
