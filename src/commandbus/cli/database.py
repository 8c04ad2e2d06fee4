"""`database`: what the server says about our tables, open transactions, connections and slow statements."""

from __future__ import annotations

import click

from commandbus.cli.render import age, age_of, print_table, say, say_heading, shortened
from commandbus.cli.session import CliCommand, CliSession
from commandbus.cli.table import columns
from commandbus.flow.database.report import DatabaseReport
from commandbus.model.counting import counted


@click.command(cls=CliCommand)
@click.pass_obj
def database(session: CliSession) -> None:
    """Show dead rows, open transactions and who holds them, connections, slow statements.

    An old transaction, a prepared one or a replication slot keeps dead rows: no vacuum removes them, and every
    claim gets slower. HOLDER is a session (its pid), a prepared transaction or a replication slot.
    """
    with session.bus() as bus:
        report = bus.database_report()
    session.answer(report, lambda: _print(report))


def _print(report: DatabaseReport) -> None:
    say(
        f"PostgreSQL {report.version}, {report.used_connections} of {report.max_connections} connections, "
        f"{size(report.total_bytes)}" + ("" if report.autovacuum else "; autovacuum is OFF: switch it on")
    )
    say_heading("Tables")
    print_table(
        columns("=table :rows :dead :size vacuumed?? analyzed???"),
        [
            (item.name, item.live_rows, f"{item.dead_rows} ({item.dead_share:.0%})", size(item.total_bytes),
             _ago(item.vacuumed_at), _ago(item.analyzed_at))
            for item in report.tables
        ],
        empty="no tables",
    )  # fmt: skip
    say_heading("Open transactions")
    print_table(
        columns("kind =holder role program?? :open :holds_back? state? ~query??"),
        [
            (item.kind, item.name, item.role, item.application, age(item.seconds), _held_back(item.xid_age),
             item.waits_for or item.state,
             shortened(item.query or ""))
            for item in report.holders
        ],
        empty="no transaction is open" + (" that this role can see" if report.hidden_sessions else ""),
    )  # fmt: skip
    if report.hidden_sessions:
        say(
            f"{counted(report.hidden_sessions, 'session')} of other roles hide what they do; "
            f"GRANT pg_read_all_stats to this role to see it"
        )
    say_heading("Connections")
    print_table(
        columns("=role program :total :active :idle_in_transaction"),
        [
            (item.role, item.application, item.total, item.active, item.idle_in_transaction)
            for item in report.connections
        ],
        empty="no connections",
    )
    say_heading("Statements that took most time")
    if report.why_no_statements is not None:
        say(report.why_no_statements)
        return
    print_table(
        columns(":total :calls :mean_ms :max_ms ~statement"),
        [
            (
                age(item.total_seconds),
                item.calls,
                f"{item.mean_ms:.2f}",
                f"{item.max_ms:.1f}",
                shortened(item.query),
            )
            for item in report.statements
        ],
        empty="none of ours",
    )


def _held_back(count: int | None) -> str:
    return "" if count is None else counted(count, "transaction")


def _ago(moment: object) -> str:
    return "never" if moment is None else f"{age_of(moment)} ago"  # type: ignore[arg-type]


def size(count: float) -> str:
    """A number of bytes for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


COMMANDS = [database]
