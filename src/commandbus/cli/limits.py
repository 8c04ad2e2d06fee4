"""`limits`, `limits show|set|unset|estimate`: what limits allow, who uses them, and who waits."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import click

from commandbus.cli.parameters import DURATION, AnyType, operator_options
from commandbus.cli.render import age, moment, print_fields, print_table, say, say_heading
from commandbus.cli.session import CliSession, ListingGroup
from commandbus.cli.table import columns
from commandbus.errors import ConfigurationError
from commandbus.flow.commands.known_types import doubt_limit
from commandbus.flow.limits.detail import InLimitLine, LimitDetail, PermitHolder
from commandbus.flow.limits.inspect import ControlAction, Estimate, LimitInfo, list_actions
from commandbus.model.counting import counted
from commandbus.model.durations import format_seconds, roughly
from commandbus.model.limit import PERMIT_OPTIONS

ACTIONS = 10
_MAY_BE_NONE = ("concurrency", "rate", "call_timeout", "max_wait")
SHOWN = 10
HOW_TO = (
    "there are no limits. Declare one in commandbus.toml ([limits.docai] concurrency = 5), at a handler "
    '(limits=[Limit("docai", concurrency=5)]), or here: `commandbus limits set docai --concurrency 5 --rate 120/m`'
)


class _DurationsType(AnyType):
    """`2,4,8,16,30s`: durations with commas between them."""

    name = "durations"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[float]:
        if isinstance(value, list):
            return value
        return [DURATION.convert(part.strip(), param, ctx) for part in str(value).split(",")]


class _NumberOrNoneType(AnyType):
    """A whole number, or `none`."""

    name = "number or none"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        return "none" if value == "none" else click.INT.convert(value, param, ctx)


class _DurationOrNoneType(AnyType):
    """A duration, or `none`."""

    name = "duration or none"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float | str:
        return "none" if value == "none" else DURATION.convert(value, param, ctx)


@click.group(cls=ListingGroup)
@click.pass_context
def limits(ctx: click.Context) -> None:
    """List limits: what they allow, who uses them, who waits, and their state.

    MODE is where the permits are kept: postgres, redis, degraded (Redis is unreachable, and every program uses
    only its share), joining (Redis is back, and holders register their permits), unknown (this program cannot
    reach Redis). PARKED commands wait for a permit, and CALLERS wait for one inside programs. STARTS/S is the rate
    measured lately.
    """
    if ctx.invoked_subcommand is not None:
        return
    session: CliSession = ctx.obj
    with session.bus() as bus:
        found = bus.limits().items
        undeclared = sorted({limit.name for limit in bus.settings.permit_limits} - {item.name for item in found})
    session.answer(found, lambda: _print(found, undeclared))


@limits.command()
@click.argument("name")
@click.option("--actions", type=click.IntRange(0, 1000), default=ACTIONS, show_default=True,
              help="How many of the last changes to show.")  # fmt: skip
@click.pass_obj
def show(session: CliSession, name: str, actions: int) -> None:
    """Show one limit: what it allows and who said so, who holds its permits, and its last changes."""
    with session.bus() as bus:
        estimate, detail = bus.estimate(name), bus.limit_detail(name)
        done = bus.run(list_actions(name, limit=actions))
    document = _document(detail.limit) | {
        "estimate": estimate,
        "actions": done,
        "permits": detail.holders,
        "line": detail.line,
        "backoffs": detail.backoffs,
    }
    session.answer(document, lambda: _print_one(detail, estimate, done))


@limits.command("set")
@click.argument("name")
@click.option("--concurrency", type=_NumberOrNoneType(), metavar="N|none", help="How many calls at once.")
@click.option("--rate", metavar="RATE|none", help="How many calls may begin per time: 2/s, 120/m, 1000/h.")
@click.option("--burst", type=int, metavar="N", help="How many calls may begin at the same moment.")
@click.option("--lease", type=DURATION, metavar="120s", help="How long a permit is kept for a silent holder.")
@click.option("--call-timeout", type=_DurationOrNoneType(), metavar="60s|none",
              help="How long the call in a block may take, unless the block says otherwise.")  # fmt: skip
@click.option("--max-wait", type=_DurationOrNoneType(), metavar="1h|none",
              help="How long a command waits while no call succeeds, before it needs a person.")  # fmt: skip
@click.option("--tries", type=int, metavar="N", help="How many 429s a command may get before it needs a person.")
@click.option("--backoff", type=_DurationsType(), metavar="2,4,8", help="How long nobody calls after a 429.")
@click.option(
    "--breaker-failures", type=int, metavar="N", help="Bad answers in a row that open the breaker; 0: never."
)
@click.option("--breaker-reset", type=DURATION, metavar="60s", help="How long the breaker stays open.")
@click.option("--store", type=click.Choice(["postgres", "redis"]), help="The permit store, while nobody uses it.")
@click.option("--environment", metavar="NAME", help="The environment, while nobody uses it.")
@click.option("--shared/--not-shared", default=None,
              help="Do stand-alone semaphores use its permits in Redis, too?")  # fmt: skip
@operator_options
@click.pass_obj
def set_limit(session: CliSession, /, name: str, operator: str | None, reason: str | None, **options: Any) -> None:
    """Change or create a limit. All workers follow at once. It stays so over deployments, until `limits unset`.

    If no program declares the limit and nobody has used it, it is created with a warning: the name may be
    misspelled.
    """
    given = {key: value for key, value in options.items() if value is not None}
    if not given:
        raise click.UsageError("no change is given; give --concurrency 5, --rate 120/m, …")
    given |= {key: None for key in _MAY_BE_NONE if given.get(key) == "none"}
    with session.bus() as bus:
        try:
            info = bus.set_limit(name, operator=operator, reason=reason, **given)
        except ConfigurationError as error:
            raise click.UsageError(str(error)) from None
        doubt = info.warning and doubt_limit(name, {item.name for item in bus.limits()} - {name})
    session.warn(doubt)
    session.answer(_document(info) | {"warning": doubt}, lambda: say(f"limit {name}: {_allows(info)}"))


@limits.command(context_settings={"ignore_unknown_options": True})
@click.argument("name")
@click.argument("options", nargs=-1, metavar="[OPTION]...")
@operator_options
@click.pass_obj
def unset(
    session: CliSession, name: str, options: tuple[str, ...], operator: str | None, reason: str | None
) -> None:
    """Go back to the declared values, for these options (concurrency, rate, …) or for all.

    A limit that no program declares is deleted.
    """
    chosen = [option.removeprefix("--").replace("-", "_") for option in options]
    for option, key in zip(options, chosen, strict=True):
        if key not in PERMIT_OPTIONS:
            raise click.UsageError(f"a limit has no option {option!r}; it has {', '.join(PERMIT_OPTIONS)}")
    with session.bus() as bus:
        try:
            info = bus.unset_limit(name, *chosen, operator=operator, reason=reason)
        except ConfigurationError as error:
            raise click.UsageError(str(error)) from None
    gone = f"limit {name} is deleted: no program declares it"
    session.answer(
        {"name": name, "removed": info is None, "limit": None if info is None else _document(info)},
        lambda: say(gone if info is None else f"limit {name}: {_allows(info)}"),
    )


@limits.command()
@click.argument("name")
@click.option("--domain", metavar="NAME", help="The domain of the command.")
@click.option("--command-id", metavar="ID", help="A waiting command; without it, a command that is sent now.")
@click.pass_obj
def estimate(session: CliSession, name: str, domain: str | None, command_id: str | None) -> None:
    """Estimate how long a command waits: the rest of the back-off, plus those ahead at the measured rate."""
    if (domain is None) != (command_id is None):
        raise click.UsageError("a command needs both: --domain D --command-id ID")
    with session.bus() as bus:
        found = bus.estimate(name, domain=domain, command_id=command_id)
    session.answer(found, lambda: say(f"limit {name}: {_estimated(found)}"))


def _print(found: list[LimitInfo], undeclared: list[str]) -> None:
    print_table(
        columns("=name mode?? :in_use rate? :parked :callers? :starts/s? +state"),
        [
            (
                item.name, item.mode, _used(item), item.rate or "-", item.parked, item.callers, _pace(item),
                item.text if item.state == "AVAILABLE" else f"{_state(item)} {item.text}",
            )
            for item in found
        ],
        empty=HOW_TO,
    )  # fmt: skip
    if undeclared:
        say(f"in the settings, but not declared yet (a starting worker declares them): {', '.join(undeclared)}")


def _print_one(detail: LimitDetail, estimate: Estimate, done: list[ControlAction]) -> None:
    info = detail.limit
    print_fields(
        {
            "limit": info.name,
            "environment": info.environment,
            "state": f"{_state(info)}: {info.text}",
            "kept in": info.store if info.mode == info.store else f"{info.store} ({info.mode})",
            "shared with": "stand-alone semaphores" if info.shared else None,
            "at once": "any number" if info.concurrency is None else info.concurrency,
            "rate": "any" if info.rate is None else f"{info.rate}, burst {info.burst}",
            "lease": format_seconds(info.lease_seconds),
            "call timeout": "none"
            if info.call_timeout_seconds is None
            else format_seconds(info.call_timeout_seconds),
            "longest wait": "none" if info.max_wait_seconds is None else format_seconds(info.max_wait_seconds),
            "tries": f"{info.tries} refusals, then a person",
            "back-off": ", ".join(map(format_seconds, info.backoff)),
            "breaker": _breaker(info),
            "declared": "nowhere" if info.declared is None else info.declared or "with defaults",
            "set here": info.override,
            "changed": info.changed_at,
            "in use": _used(info) if info.why_unknown is None else f"{_used(info)} (unknown: {info.why_unknown})",
            "waiting": _waiting(info),
            "starts": f"{_pace(info)}/s lately, {info.granted} in all",
            "refused by the API": info.rate_limited,
            "waited": f"{counted(info.waits, 'time')}, {age(info.waited_seconds)} in all",
            "estimate": _estimated(estimate),
        }
    )
    _print_detail(detail)
    if done:
        say_heading("changes")
        print_table(
            columns("at what action by +reason +details?"),
            [
                (moment(item.performed_at), item.subject, item.action, item.operator, item.reason, item.details)
                for item in done
            ],
        )


def _print_detail(detail: LimitDetail) -> None:
    if detail.holders:
        say_heading("permits")
        print_table(columns(":left =holder since? command?"), [_held(item) for item in detail.holders])
    if detail.line:
        say_heading("line")
        print_table(columns(":ahead =who since :estimate +note?"), [_stands(item) for item in detail.line[:SHOWN]])
    if detail.backoffs:
        say_heading("back-offs")
        print_table(
            columns("at answer :step :for +reason"),
            [
                (moment(item.at), item.answer, item.step, age(item.seconds), item.reason)
                for item in detail.backoffs[:SHOWN]
            ],
        )


def _held(item: PermitHolder) -> tuple[object, ...]:
    since = "-" if item.since is None else moment(item.since)
    return f"{item.lease_seconds:.0f}s", item.holder, since, item.command_id or "-"


def _stands(item: InLimitLine) -> tuple[object, ...]:
    who, estimated = item.command_id or item.caller, "-" if item.seconds is None else age(item.seconds)
    return item.ahead, who, moment(item.waits_since), estimated, item.note


def _document(info: LimitInfo) -> dict[str, Any]:
    return {field.name: getattr(info, field.name) for field in fields(info)}


def _state(info: LimitInfo) -> str:
    return info.state.lower().replace("_", " ")


def _used(info: LimitInfo) -> str:
    used = "?" if info.in_use is None else str(info.in_use)
    return used if info.concurrency is None else f"{used}/{info.concurrency}"


def _pace(info: LimitInfo) -> str:
    return "-" if info.starts_per_second is None else f"{info.starts_per_second:.3g}"


def _breaker(info: LimitInfo) -> str:
    if not info.breaker_failures:
        return "never opens by itself"
    reset = format_seconds(info.breaker_reset_seconds)
    return f"opens after {info.breaker_failures} bad answers in a row (now {info.failures}), for {reset}"


def _waiting(info: LimitInfo) -> str:
    text = f"{counted(info.parked, 'command')}, {counted(info.callers, 'caller')}"
    return text if info.oldest_seconds is None else f"{text}, the first for {age(info.oldest_seconds)}"


def _allows(info: LimitInfo) -> str:
    cap = None if info.concurrency is None else f"{info.concurrency} at once"
    rate = None if info.rate is None else f"{info.rate} (burst {info.burst})"
    return ", ".join(part for part in (cap, rate, f"kept in {info.store}") if part)


def _estimated(found: Estimate) -> str:
    if found.seconds is None:
        return f"no estimate: {found.text}"
    when = "at once" if found.seconds < 0.05 else f"in about {roughly(found.seconds)}"
    return f"{when}: {found.text}"


COMMANDS = [limits]
