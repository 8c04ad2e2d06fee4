"""What the current role may do: look, send, run handlers, operate.

Each ability needs what the role of that name would be granted (`model/roles.py`). The doctor reads those GRANTs,
and asks the server about every privilege in them. So there is no second list that could disagree.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from commandbus.cli.doctor.findings import Conn, Findings, fail, ok, warn
from commandbus.model.roles import KINDS, grant_statements, queue_grants, role_names

PREFIX = "commandbus"
ABILITIES = {
    "reader": "look",
    "producer": "send",
    "limiter": "use limits in an application",
    "worker": "run handlers",
    "operator": "operate",
}
_GRANT = re.compile(
    r"GRANT (?P<what>[A-Z, ]+?)(?: \((?P<columns>[a-z_, ]+)\))? ON "
    r"(?:(?P<sort>SCHEMA|SEQUENCE|FUNCTION) )?(?P<where>[a-z0-9_.,() \[\]]+) TO (?P<role>\w+)"
)


def examine(conn: Conn) -> Findings:
    """What the role may do and, for everything else, which grant is missing. Nothing if there is no schema."""
    row = conn.execute(
        b"SELECT current_user, pg_catalog.to_regnamespace('commandbus') IS NOT NULL "
        b"AND pg_catalog.to_regnamespace('pgmq') IS NOT NULL"
    ).fetchone()
    if row is None or not row[1]:
        return
    name = row[0]
    queues = _queues(conn)
    lacking = {kind: _lacking(conn, kind, queues) for kind in KINDS}
    able = [ABILITIES[kind] for kind in KINDS if not lacking[kind]]
    if not able:
        yield fail("privileges", f"role {name} lacks {lacking['reader'][0]}", _remedy(name, "reader"))
        return
    yield ok("privileges", f"role {name} may {', '.join(able)}")
    for kind, missing in lacking.items():
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            yield warn(
                "privileges",
                f"role {name} may not {ABILITIES[kind]}: it lacks {missing[0]}{more}",
                f"{_remedy(name, kind)}, if it should",
            )


def _remedy(role: str, kind: str) -> str:
    return f"`commandbus roles` (as the owner of the schema) and GRANT {role_names(PREFIX)[kind]} TO {role}"


def _lacking(conn: Conn, kind: str, queues: list[str]) -> list[str]:
    role = role_names(PREFIX)[kind]
    grants = [text for text in grant_statements(PREFIX) if text.endswith(f" TO {role}")]
    for queue in queues:
        grants += [text for text in queue_grants(kind, role, queue) if text.startswith("GRANT")]
    wanted = list(dict.fromkeys(item for text in grants for item in _privileges(text)))
    if kind == "reader":  # a reader never needs an archive
        wanted = [item for item in wanted if not item[2].startswith("pgmq.a_")]
    # Without rights on a schema, the server says nothing about the objects in it.
    closed = [f"USAGE ON SCHEMA {name}" for _, sort, name in wanted
              if sort == "SCHEMA" and not _has(conn, "USAGE", sort, name)]  # fmt: skip
    return closed or [
        f"{privilege} ON {sort} {name}"
        for privilege, sort, name in wanted
        if not _has(conn, privilege, sort, name)
    ]


def _privileges(grant: str) -> Iterator[tuple[str, str, str]]:
    """(privilege, kind of object, its name) of everything that a GRANT names."""
    found = _GRANT.fullmatch(grant)
    if found is None:
        raise ValueError(f"cannot read this grant: {grant}")
    sort = found["sort"] or "TABLE"
    names = [found["where"]] if sort == "FUNCTION" else found["where"].split(", ")
    if found["columns"] is not None:
        sort, names = "COLUMN", [f"{name}.{column}" for name in names for column in found["columns"].split(", ")]
    for privilege in found["what"].split(", "):
        for name in names:
            yield privilege, sort, name


def _queues(conn: Conn) -> list[str]:
    """The domains' queues, from the catalog, which every role may read."""
    rows = conn.execute(
        b"SELECT pg_catalog.substr(relname, 3) FROM pg_catalog.pg_class WHERE relnamespace = 'pgmq'::regnamespace "
        b"AND relkind = 'r' AND relname ~ '^q_[a-z][a-z0-9_]*__commands$'::text ORDER BY 1"
    ).fetchall()
    return [name for (name,) in rows]


def _has(conn: Conn, privilege: str, sort: str, name: str) -> bool:
    if sort == "COLUMN":
        table, _, column = name.rpartition(".")
        row = conn.execute(
            b"SELECT pg_catalog.has_column_privilege(%s, %s, %s)", (table, column, privilege)
        ).fetchone()
        return row is not None and bool(row[0])
    statement = f"SELECT pg_catalog.has_{sort.lower()}_privilege(%(name)s, %(privilege)s)"
    row = conn.execute(statement.encode(), {"name": name, "privilege": privilege}).fetchone()
    return row is not None and bool(row[0])
