"""`send`: one command from the command line, or many from a file of JSON lines, all or none."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any

import click

from commandbus.bus import CommandBus
from commandbus.cli.json_lines import STDIN, read_items, read_text
from commandbus.cli.parameters import DURATION, INSTANT, parse_instant, parse_json
from commandbus.cli.render import print_json, say
from commandbus.cli.session import CliCommand, CliSession
from commandbus.errors import InvalidCommandError
from commandbus.flow.commands import send as send_flow
from commandbus.model import names, unique_key
from commandbus.model.command import NewCommand, SentCommand
from commandbus.model.counting import counted
from commandbus.model.priority import PRIORITIES
from commandbus.model.unique_key import ON_CONFLICT
from commandbus.settings import Settings


@click.command(cls=CliCommand)
@click.argument("domain")
@click.argument("command_type", metavar="[TYPE]", required=False)
@click.argument("data", metavar="[DATA]", required=False)
@click.option("--data-file", metavar="FILE", help="Read the data from a file.")
@click.option("--id", "command_id", metavar="ID", help="Its command_id: the same id again sends nothing twice.")
@click.option("--correlation-id", metavar="ID")
@click.option("--reply-to", metavar="QUEUE", help="The queue that gets the reply.")
@click.option("--max-attempts", type=int, metavar="N")
@click.option(
    "--timeout", type=DURATION, metavar="TIME", help="How long one attempt may take: 90s; 0: no deadline."
)
@click.option("--delay", type=DURATION, metavar="TIME", help="Start it no earlier than after this time: 5m.")
@click.option("--at", type=INSTANT, metavar="ISO", help="Start it no earlier than this: 2026-01-31T09:30:00Z.")
@click.option("--expires", type=DURATION, metavar="TIME", help="Cancel it if it has not started by then: 10m.")
@click.option(
    "--on-exhausted",
    type=click.Choice(["troubleshoot", "fail"]),
    help="What happens when its attempts are used up.",
)
@click.option("--priority", type=click.Choice(PRIORITIES), help="Which of the waiting commands start first.")
@click.option("--unique", metavar="KEY", help="Send it unless another command has this key.")
@click.option(
    "--unique-while",
    metavar="WHILE",
    help="What keeps the key taken: waiting, unfinished, or a time after sending: 1h.",
)
@click.option("--on-conflict", type=click.Choice(ON_CONFLICT), help="What happens if the key is taken.")
@click.option("--debounce", type=DURATION, metavar="TIME", help="Of those with this --unique, run the last: 5s.")
@click.option("--max-delay", type=DURATION, metavar="TIME", help="How long --debounce may put it off in all.")
@click.option("--key", metavar="KEY", help="Put it into the line of this key.")
@click.option("--key-limit", metavar="NAME", help="The key limit that rules --key.")
@click.option("--header", "headers", multiple=True, metavar="NAME=VALUE", help="Repeatable.")
@click.option("--from", "source", metavar="FILE", help="Send one command per line of this file of JSON lines.")
@click.pass_obj
def send(
    session: CliSession,
    /,
    domain: str,
    command_type: str | None,
    data: str | None,
    data_file: str | None,
    source: str | None,
    headers: tuple[str, ...],
    **fields: Any,
) -> None:
    """Send a command. DATA is JSON, or - to read it from the standard input.

    With --from each line is an object {"command_type": …, "data": …, "command_id": …, "delay": "5m", …}. All
    commands are sent, or none.
    """
    settings = session.settings()
    names.check_domain(domain)
    if source is not None:
        if command_type or data or data_file or headers or any(value is not None for value in fields.values()):
            raise click.UsageError("--from takes everything from its file; leave out TYPE, DATA and other options")
        _send_file(session, domain, list(read_commands(source, settings).values()))
        return
    if command_type is None:
        raise click.UsageError("Missing argument 'TYPE', or --from FILE for many.")
    if data is not None and data_file is not None:
        raise click.UsageError("DATA and --data-file exclude each other; give one of them")
    new = NewCommand(
        command_type=command_type, data=_data(data, data_file), headers=_headers(headers) or None, **fields
    )
    plain = unique_key.split(new)[0]
    send_flow.prepare(plain, max_bytes=settings.max_payload_bytes)  # refused before we connect
    with session.bus() as bus:
        receipt = bus.commands.save(domain, new)
    session.answer(
        receipt,
        lambda: say(f"{_did(receipt)}: {domain} {receipt.command_id}"),
    )


def _did(receipt: SentCommand) -> str:
    if receipt.created:
        return "sent"
    return "replaced" if receipt.replaced else "was there already"


def _send_file(session: CliSession, domain: str, commands: list[NewCommand]) -> None:
    with session.connection(autocommit=False) as conn, CommandBus(settings=session.settings()) as bus:
        sent = bus.send_many(domain, commands, conn=conn)
    if session.as_json:
        print_json(sent)
        return
    known = sum(not receipt.created for receipt in sent)
    say(
        f"sent {counted(len(sent) - known, 'command')} to {domain}"
        + (f"; {known} {'was' if known == 1 else 'were'} there" if known else "")
    )


def _data(text: str | None, file: str | None) -> Any:
    if file is not None or text == STDIN:
        text = read_text(file or STDIN)
    if text is None:
        return None
    try:
        return parse_json(text)
    except ValueError as error:
        raise click.UsageError(f"DATA is {error}") from None


def _headers(pairs: Iterable[str]) -> dict[str, str]:
    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise click.BadParameter(f"{pair!r} is not NAME=VALUE", param_hint="--header")
        found[name] = value
    return found


def read_commands(name: str, settings: Settings) -> dict[int, NewCommand]:
    """The commands of a file, by line number. The error names the first bad line, and then nothing is sent."""

    def command_of(line: Any) -> NewCommand:
        new = _to_command(line)
        send_flow.prepare(new, max_bytes=settings.max_payload_bytes)
        return new

    return read_items(name, command_of, undone="nothing was sent")


def _to_command(line: Any) -> NewCommand:
    if not isinstance(line, dict):
        raise InvalidCommandError('it is not an object such as {"command_type": "ship", "data": {}}')
    at = line.get("at")
    instant: datetime | None = parse_instant(at) if isinstance(at, str) else at
    return send_flow.to_new_command({**line, "at": instant})


COMMANDS = [send]
