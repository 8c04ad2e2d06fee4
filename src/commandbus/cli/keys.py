"""`keys list|show|set|override|end-override|delete`: how many commands of one key run at once, and who waits."""

from __future__ import annotations

import click

from commandbus.cli.parameters import DURATION, operator_options
from commandbus.cli.render import print_table, say
from commandbus.cli.session import CliGroup, CliSession
from commandbus.cli.table import columns
from commandbus.model.durations import roughly
from commandbus.model.key_limit import MOST_COUNTED, NO_KEY, ON_FAILURE, KeyLine, OnFailure


@click.group(cls=CliGroup)
def keys() -> None:
    """Key limits: how many commands of one key run at once, and in which order."""


@keys.command("list")
@click.argument("domain", required=False)
@click.pass_obj
def list_key_limits(session: CliSession, domain: str | None) -> None:
    """List key limits, of one DOMAIN or of all."""
    with session.bus() as bus:
        found = list(bus.key_limits.list(domain))
    session.answer(
        found,
        lambda: print_table(
            columns("domain =name :concurrency order on_failure"),
            [(item.domain, item.name, item.concurrency, "as sent" if item.ordered else "any", item.on_failure)
             for item in found],
            empty="there are no key limits",
        ),
    )  # fmt: skip


@keys.command()
@click.argument("domain")
@click.argument("name")
@click.argument("key", nargs=-1)
@click.option("--limit", type=click.IntRange(1, 10_000), default=50, show_default=True)
@click.pass_obj
def show(session: CliSession, domain: str, name: str, key: tuple[str, ...], limit: int) -> None:
    """Show the keys of a key limit that have unfinished commands, those with the most waiting first."""
    with session.bus() as bus:
        found = bus.key_limits.lines(domain, name, keys=key or None, limit=limit)
    session.answer(
        found,
        lambda: print_table(
            columns("=key places :waiting next? override_ends_at? ~warning"),
            [(item.key or NO_KEY, f"{item.released} of {item.concurrency}", _waiting(item), _next(item),
              item.override_ends_at, _warning(item)) for item in found],
            empty="no key has unfinished commands",
        ),
    )  # fmt: skip


@keys.command("set")
@click.argument("domain")
@click.argument("name")
@click.option(
    "--concurrency", type=int, default=1, show_default=True, metavar="N", help="So many of a key at once."
)
@click.option("--ordered", is_flag=True, help="One after the other, in the order of sending.")
@click.option("--on-failure", type=click.Choice(ON_FAILURE), help="What one in the troubleshooting queue does.")
@operator_options
@click.pass_obj
def set_key_limit(
    session: CliSession,
    domain: str,
    name: str,
    *,
    concurrency: int,
    ordered: bool,
    on_failure: OnFailure | None,
    operator: str | None,
    reason: str | None,
) -> None:
    """Create a key limit, or change it."""
    with session.bus() as bus:
        limit = bus.key_limits.set(
            domain,
            name,
            concurrency=concurrency,
            ordered=ordered,
            on_failure=on_failure,
            operator=operator,
            reason=reason,
        )
    session.answer(limit, lambda: say(f"key limit {domain}/{name}: {limit.concurrency} of a key at once"))


@keys.command()
@click.argument("domain")
@click.argument("name")
@click.argument("key", required=False)
@click.option("--concurrency", type=int, required=True, metavar="N", help="So many at once; 0 stops the key.")
@click.option("--until", type=DURATION, required=True, metavar="TIME", help="For how long: 2h.")
@operator_options
@click.pass_obj
def override(
    session: CliSession,
    domain: str,
    name: str,
    key: str | None,
    *,
    concurrency: int,
    until: float,
    operator: str | None,
    reason: str | None,
) -> None:
    """Give one KEY, or all keys, another concurrency for some time."""
    with session.bus() as bus:
        bus.key_limits.override(
            domain, name, key, concurrency=concurrency, until=until, operator=operator, reason=reason
        )
    whose = "all keys" if key is None else f"key {key}"
    session.answer(
        {"domain": domain, "key_limit": name, "key": key, "concurrency": concurrency},
        lambda: say(f"{whose} of {domain}/{name}: {concurrency} at once for this time"),
    )


@keys.command("end-override")
@click.argument("domain")
@click.argument("name")
@click.argument("key", required=False)
@operator_options
@click.pass_obj
def end_override(
    session: CliSession, domain: str, name: str, key: str | None, operator: str | None, reason: str | None
) -> None:
    """End the override of one KEY, or that of all keys, before its time."""
    with session.bus() as bus:
        ended = bus.key_limits.end_override(domain, name, key, operator=operator, reason=reason)
    whose = "all keys" if key is None else f"key {key}"
    done = "has no override any more" if ended else "had no override"
    session.answer(
        {"domain": domain, "key_limit": name, "key": key, "ended": ended},
        lambda: say(f"{domain}/{name}, {whose}: {done}"),
    )


@keys.command()
@click.argument("domain")
@click.argument("name")
@operator_options
@click.pass_obj
def delete(session: CliSession, domain: str, name: str, operator: str | None, reason: str | None) -> None:
    """Delete a key limit that no unfinished command uses."""
    with session.bus() as bus:
        bus.key_limits.delete(domain, name, operator=operator, reason=reason)
    session.answer({"domain": domain, "key_limit": name}, lambda: say(f"deleted key limit {domain}/{name}"))


def _waiting(line: KeyLine) -> str:
    return f"{line.waiting:,}{'+' if line.waiting >= MOST_COUNTED else ''}"


def _next(line: KeyLine) -> str | None:
    return None if line.next_seconds is None else f"in about {roughly(line.next_seconds)}"


def _warning(line: KeyLine) -> str | None:
    if line.blocked_by is None:
        return None
    return f"blocked by {line.blocked_by}, which is in the troubleshooting queue"


COMMANDS = [keys]
