"""The schema, PGMQ, and the domains' queues."""

from __future__ import annotations

from psycopg.errors import InsufficientPrivilege

from commandbus.cli.doctor.findings import Conn, Findings, fail, ok, warn
from commandbus.db.drivers import run
from commandbus.errors import SchemaError
from commandbus.flow.setup.domains import list_domains
from commandbus.flow.setup.schema_state import SchemaState, look
from commandbus.model.counting import counted
from commandbus.shell_words import arguments


def examine_schema(conn: Conn) -> tuple[SchemaState | None, Findings]:
    """The state of the schema; None if there is none that this release can use."""
    try:
        state = run(conn, look())
    except SchemaError as error:
        return None, iter([fail("schema", str(error))])
    except InsufficientPrivilege as error:
        return None, iter([fail("schema", f"it cannot be checked: {error.diag.message_primary}")])
    if not state.applied:
        return None, iter([fail("schema", "there is none in this database", "run `commandbus migrate`")])
    return state, _schema(state)


def _schema(state: SchemaState) -> Findings:
    if state.missing:
        missing = ", ".join(map(str, state.missing))
        yield fail("schema", f"it lacks migration {missing}", "run `commandbus migrate`")
    elif state.newer:
        yield ok(
            "schema",
            f"at migration {max(state.applied)}, newer than this release knows, and compatible with it",
            "update this release when the deploy is over",
        )
    else:
        yield ok("schema", f"at migration {max(state.applied)}, as this release needs it")
    yield ok("pgmq", f"PGMQ {state.pgmq_version}, installed by {_way(state.pgmq_way)}")


def _way(way: str | None) -> str:
    return "its extension" if way == "extension" else "its SQL"


def examine_domains(conn: Conn) -> Findings:
    """Does every domain have its queue?"""
    domains = run(conn, list_domains())
    lost = [domain.name for domain in domains if not queue_exists(conn, domain.queue)]
    for name in lost:
        yield fail(
            "domains",
            f"domain {name} has no queue",
            f"`commandbus domain create {arguments(name)}` makes it again",
        )
    if not domains:
        yield warn("domains", "there are none", "`commandbus domain create NAME` makes one")
    elif not lost:
        yield ok("domains", f"{counted(len(domains), 'domain')}, each with its queue")


def queue_exists(conn: Conn, queue: str) -> bool:
    """Does PGMQ have a table for this queue?"""
    row = conn.execute(b"SELECT pg_catalog.to_regclass(%(name)s)", {"name": f"pgmq.q_{queue}"}).fetchone()
    return row is not None and row[0] is not None
