"""The schema, PGMQ, the domains' queues, and what the current role may do with them."""

from __future__ import annotations

from commandbus.cli.doctor.findings import Conn, Findings, fail, ok, warn
from commandbus.cli.render import counted
from commandbus.db.drive import run
from commandbus.errors import SchemaError
from commandbus.flow.domains import DomainInfo, list_domains
from commandbus.flow.migrate import SchemaState, look
from commandbus.model.roles import KINDS, QUEUE_GRANTS, TABLE_GRANTS

ALL_TABLES = "ALL TABLES IN SCHEMA commandbus"
ALL_SEQUENCES = "ALL SEQUENCES IN SCHEMA commandbus"
ABILITIES = {"reader": "look", "producer": "send", "worker": "run handlers", "operator": "operate"}


def examine_schema(conn: Conn) -> tuple[SchemaState | None, Findings]:
    """The state of the schema, if there is one that we can use."""
    try:
        state = run(conn, look())
    except SchemaError as error:
        return None, iter([fail("schema", str(error))])
    if not state.applied:
        return None, iter([fail("schema", "there is none in this database", "run `commandbus migrate`")])
    return state, _schema(state)


def _schema(state: SchemaState) -> Findings:
    if state.missing:
        missing = ", ".join(map(str, state.missing))
        yield fail("schema", f"it lacks migration {missing}", "run `commandbus migrate`")
    else:
        yield ok("schema", f"at migration {max(state.applied)}, as this release needs it")
    yield ok("pgmq", f"PGMQ {state.pgmq_version}, installed by {_way(state.pgmq_way)}")


def _way(way: str | None) -> str:
    return "its extension" if way == "extension" else "its SQL"


def examine_domains(conn: Conn) -> Findings:
    """Every domain has its queue."""
    domains = run(conn, list_domains())
    lost = [domain.name for domain in domains if not _exists(conn, f"pgmq.q_{domain.queue}")]
    for name in lost:
        yield fail("domains", f"domain {name} has no queue", f"`commandbus domain create {name}` makes it again")
    if not domains:
        yield warn("domains", "there are none", "`commandbus domain create NAME` makes one")
    elif not lost:
        yield ok("domains", f"{counted(len(domains), 'domain')}, each with its queue")


def _exists(conn: Conn, name: str) -> bool:
    row = conn.execute(b"SELECT to_regclass(%(name)s)", {"name": name}).fetchone()
    return row is not None and row[0] is not None


# --- privileges ----------------------------------------------------------------------------------------------


def examine_privileges(conn: Conn) -> Findings:
    """What the current role may do: the grants of the four roles, looked up one by one."""
    role = conn.execute(b"SELECT current_user").fetchone()
    name = role[0] if role is not None else "?"
    domains = [domain for domain in run(conn, list_domains()) if _exists(conn, f"pgmq.q_{domain.queue}")]
    lacking = {kind: _lacking(conn, kind, domains) for kind in KINDS}
    able = [ABILITIES[kind] for kind in KINDS if not lacking[kind]]
    if not able:
        kind = "reader"
        yield fail("privileges", f"role {name} lacks {lacking[kind][0]}", _remedy(name, kind))
        return
    yield ok("privileges", f"role {name} may {', '.join(able)}")
    for kind in KINDS:
        if lacking[kind]:
            more = f" and {len(lacking[kind]) - 1} more" if len(lacking[kind]) > 1 else ""
            yield warn(
                "privileges",
                f"role {name} may not {ABILITIES[kind]}: it lacks {lacking[kind][0]}{more}",
                f"{_remedy(name, kind)}, if it should",
            )


def _remedy(role: str, kind: str) -> str:
    return f"`commandbus roles` (as the owner of the schema) and GRANT commandbus_{kind} TO {role}"


def _lacking(conn: Conn, kind: str, domains: list[DomainInfo]) -> list[str]:
    wanted = [("schema", "USAGE", schema) for schema in ("commandbus", "pgmq")]
    for privileges, where in TABLE_GRANTS[kind]:
        wanted += [
            (sort, privilege, name) for sort, name in _objects(conn, where) for privilege in privileges.split(", ")
        ]
    for domain in domains:
        wanted += [("table", privilege, f"pgmq.q_{domain.queue}") for privilege in QUEUE_GRANTS[kind].split(", ")]
        if kind != "reader":
            wanted.append(("sequence", "USAGE", f"pgmq.q_{domain.queue}_msg_id_seq"))
    return [
        f"{privilege} ON {sort.upper()} {name}"
        for sort, privilege, name in wanted
        if not _has(conn, sort, name, privilege)
    ]


def _objects(conn: Conn, where: str) -> list[tuple[str, str]]:
    if where not in (ALL_TABLES, ALL_SEQUENCES):
        return [("table", name) for name in where.split(", ")]
    sort, kinds = ("table", ["r", "v", "p"]) if where == ALL_TABLES else ("sequence", ["S"])
    rows = conn.execute(
        b"SELECT 'commandbus.' || quote_ident(relname) FROM pg_class "
        b"WHERE relnamespace = 'commandbus'::regnamespace AND relkind = ANY (%(kinds)s::\"char\"[]) ORDER BY 1",
        {"kinds": kinds},
    ).fetchall()
    return [(sort, name) for (name,) in rows]


def _has(conn: Conn, sort: str, name: str, privilege: str) -> bool:
    statement = f"SELECT has_{sort}_privilege(%(name)s, %(privilege)s)"
    row = conn.execute(statement.encode(), {"name": name, "privilege": privilege}).fetchone()
    return row is not None and bool(row[0])
