"""`effect list|resolve`: calls to the outside world of which nobody knows whether they were made."""

from __future__ import annotations

from typing import Any

import click

from commandbus.cli import find_id
from commandbus.cli.parameters import JsonType, operator_options, page_options
from commandbus.cli.render import print_table, say
from commandbus.cli.session import CliGroup, CliSession
from commandbus.cli.table import columns


@click.group(cls=CliGroup)
def effect() -> None:
    """Effects outside the database: calls of which nobody knows whether they were made.

    A handler makes such a call in `ctx.effect(…)`. If it was interrupted there, the next attempt asks `verify`. If
    that cannot tell, the command goes to the troubleshooting queue with the code EFFECT_UNCERTAIN. Find out at the
    provider (`show` has the key), say it with `effect resolve`, then `tsq retry` the command.
    """


@effect.command("list")
@click.option("--domain", "domain_option", metavar="DOMAIN", help="Only effects of this domain.")
@page_options
@click.pass_obj
def list_(session: CliSession, domain_option: str | None, limit: int, cursor: str | None) -> None:
    """List open effects, the oldest command first. Calls that are being made now are among them."""
    with session.bus() as bus:
        page = bus.commands.list_open_effects(domain_option, limit=limit, cursor=cursor)
    session.answer(
        page.items,
        lambda: print_table(
            columns(":id domain type?? =command_id effect state :attempt_number??? at?? key?? +note?"),
            [(f"#{item.id}", item.domain, item.command_type, item.command_id, item.name, item.state, item.attempt,
              item.begun_at, item.key, item.note) for item in page.items],
            empty="no effect is open",
        ),
    )  # fmt: skip
    session.say_more(page)


@effect.command()
@click.argument("domain")
@click.argument("command_id", metavar="ID")
@click.argument("name", metavar="EFFECT")
@click.option("--done/--not-done", "is_done", default=None, help="Was the call made?")
@click.option("--receipt", type=JsonType(), metavar="JSON", help="With --done: what the call returned.")
@operator_options
@click.pass_obj
def resolve(
    session: CliSession,
    /,
    domain: str,
    command_id: str,
    name: str,
    is_done: bool | None,  # noqa: FBT001 - click passes it by name
    receipt: Any,
    operator: str | None,
    reason: str | None,
) -> None:
    """Say whether the call of an open effect was made. It does not retry the command.

    After --done, the next attempt gets the receipt and does not call. After --not-done, it calls again, with the
    same key.
    """
    if is_done is None:
        raise click.UsageError("say whether the call was made: --done or --not-done")
    if receipt is not None and not is_done:
        raise click.UsageError("--receipt belongs to --done: a call that was not made has none")
    with session.bus() as bus:
        command_id = find_id.of_command(bus, domain, command_id)
        bus.commands.resolve_effect(
            domain, command_id, name, done=is_done, receipt=receipt, operator=operator, reason=reason
        )
    how = "done" if is_done else "not done"
    session.answer(
        {"domain": domain, "command_id": command_id, "effect": name, "resolved": how, "receipt": receipt},
        lambda: say(f"effect {name} of {domain} {command_id} is recorded as {how}"),
    )


COMMANDS = [effect]
