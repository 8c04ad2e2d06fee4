"""`plan list|preview|show|start|stop`: retry, cancel or complete many commands, after a preview."""

from __future__ import annotations

from typing import Any

import click

from commandbus.cli.parameters import DURATION, JsonType, operator_options, page_options
from commandbus.cli.render import age_of, print_fields, print_table, say, say_heading
from commandbus.cli.session import CliSession, ListingGroup, check_known
from commandbus.cli.table import columns
from commandbus.cli.wait_for_plan import wait_for_plan
from commandbus.model.page import Page
from commandbus.model.plan import ACTIONS, PlannedCommand, PlanRecord

SAMPLE = 10


@click.group(cls=ListingGroup)
@click.pass_context
def plan(ctx: click.Context) -> None:
    """Plans: retry, cancel or complete many commands of the troubleshooting queue, after a preview."""
    if ctx.invoked_subcommand is None:
        ctx.invoke(list_plans, domain=None, limit=50, cursor=None)


@plan.command("list")
@click.option("--domain", metavar="NAME", help="Only of this domain.")
@page_options
@click.pass_obj
def list_plans(session: CliSession, domain: str | None, limit: int, cursor: str | None) -> None:
    """List plans, newest first."""
    with session.bus() as bus:
        page = bus.plans.list(domain, limit=limit, cursor=cursor)
        if not page.items:
            check_known(bus, domain)
    session.answer(
        page.items,
        lambda: print_table(
            columns(":id domain action state :total :moved :skipped age?? by ~reason?"),
            [(item.id, item.domain, item.action, item.state, item.total, item.moved, item.skipped,
              age_of(item.created_at), item.started_by or item.previewed_by, item.reason) for item in page.items],
            empty="there are no plans",
        ),
    )  # fmt: skip
    session.say_more(page)


@plan.command()
@click.argument("domain")
@click.argument("action", type=click.Choice(ACTIONS))
@click.option("--type", "command_type", metavar="TYPE", help="Only of this command type.")
@click.option("--code", "error_code", metavar="CODE", help="Only those with this error code.")
@click.option("--fingerprint", metavar="FINGERPRINT", help="Only those with this failure, as `failures` lists it.")
@click.option("--id", "command_ids", metavar="ID", multiple=True, help="Only this command; may be repeated.")
@click.option("--over", type=DURATION, default="0", metavar="10m",
              help="Spread it evenly over this time. [default: as fast as the workers can]")  # fmt: skip
@click.option("--result", type=JsonType(), metavar="JSON", help="The result of `complete`.")
@operator_options
@click.pass_obj
def preview(session: CliSession, /, domain: str, action: Any, command_ids: tuple[str, ...], **given: Any) -> None:
    """Show exactly which commands a plan would act on, and store it. Nothing happens to them."""
    with session.bus() as bus:
        found = bus.plans.preview(domain, action, command_ids=list(command_ids) or None, **given)
        sample = bus.plans.commands(found.id, limit=SAMPLE)
    session.answer({"plan": found, "sample": sample.items}, lambda: _print_preview(found, sample))


@plan.command()
@click.argument("plan_id", metavar="ID", type=click.IntRange(1))
@page_options
@click.pass_obj
def show(session: CliSession, plan_id: int, limit: int, cursor: str | None) -> None:
    """Show a plan: how far it is, its commands, and what became of each."""
    with session.bus() as bus:
        found = bus.plans.get(plan_id)
        page = bus.plans.commands(plan_id, limit=limit, cursor=cursor)
    session.answer({"plan": found, "commands": page.items}, lambda: _print_plan(found, page))
    session.say_more(page)


@plan.command()
@click.argument("plan_id", metavar="ID", type=click.IntRange(1))
@click.option("--wait", is_flag=True, help="Show the progress until it has ended. Ctrl-C does not stop the plan.")
@operator_options
@click.pass_obj
def start(session: CliSession, /, plan_id: int, *, wait: bool, operator: str | None, reason: str | None) -> None:
    """Start a plan, if its commands are still exactly those of the preview.

    The workers of its domain carry it out, also after this program has ended.
    """
    with session.bus() as bus:
        found = bus.plans.start(plan_id, operator=operator, reason=reason)
        if wait:
            found = wait_for_plan(bus, found, is_quiet=session.as_json)
    session.answer(found, lambda: say(f"plan {found.id} {_STATES[found.state]}: {found.progress_text}"))


@plan.command()
@click.argument("plan_id", metavar="ID", type=click.IntRange(1))
@operator_options
@click.pass_obj
def stop(session: CliSession, plan_id: int, operator: str | None, reason: str | None) -> None:
    """Stop a plan. What it has done stays; the rest stays in the troubleshooting queue."""
    with session.bus() as bus:
        found = bus.plans.stop(plan_id, operator=operator, reason=reason)
    session.answer(found, lambda: say(f"plan {found.id} is stopped: {found.progress_text}"))


_STATES = {"PREVIEWED": "waits for its start", "RUNNING": "runs", "DONE": "is done", "STOPPED": "is stopped"}


def _print_preview(found: PlanRecord, sample: Page[PlannedCommand]) -> None:
    say(f"plan {found.id}: {found.text}")
    _print_groups(found)
    say_heading(f"the first {len(sample)} of {found.total}")
    _print_commands(sample)
    say()
    say(f"nothing has happened yet; to do it: commandbus plan start {found.id}")


def _print_plan(found: PlanRecord, page: Page[PlannedCommand]) -> None:
    print_fields(
        {
            "plan": found.id, "state": found.state, "what": found.text, "progress": found.progress_text,
            "previewed": f"{age_of(found.created_at)} ago by {found.previewed_by}",
            "started": found.started_at and f"{age_of(found.started_at)} ago by {found.started_by}",
            "ended": found.finished_at and f"{age_of(found.finished_at)} ago",
            "stopped by": found.stopped_by, "reason": found.reason, "note": found.note,
        }
    )  # fmt: skip
    _print_groups(found)
    say_heading("commands")
    _print_commands(page)


def _print_groups(found: PlanRecord) -> None:
    say_heading("types and error codes")
    print_table(
        columns("type code :count"),
        [(group.command_type, group.error_code, group.count) for group in found.groups],
    )


def _print_commands(page: Page[PlannedCommand]) -> None:
    print_table(
        columns("=command_id type state since?? code ~error?"),
        [(item.command_id, item.command_type, item.state.lower(), f"{age_of(item.entered_at)} ago",
          item.error_code, item.error) for item in page],
    )  # fmt: skip


COMMANDS = [plan]
