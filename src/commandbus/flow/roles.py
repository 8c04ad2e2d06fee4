"""roles: create the four least-privilege roles and grant them what they need, or print the SQL that does."""

from __future__ import annotations

from psycopg import errors as pg

from commandbus.errors import SchemaError
from commandbus.flow.statement import Statement, Steps, operation
from commandbus.model import roles


@operation(atomic=True)
def create_roles(prefix: str = "commandbus") -> Steps[dict[str, str]]:
    """Create what is missing, grant everything; answers kind → role name."""
    try:
        for text in (yield from _statements(prefix)):
            yield Statement(text.encode())
    except pg.InsufficientPrivilege as error:
        raise SchemaError(
            f"this role may not create or grant roles ({error.diag.message_primary}); give a DBA the output of "
            f"`commandbus roles --print`"
        ) from None
    return roles.role_names(prefix)


@operation(atomic=False)
def print_roles(prefix: str = "commandbus") -> Steps[str]:
    """The same as a script."""
    statements = yield from _statements(prefix)
    return "BEGIN;\n" + "".join(f"{text};\n" for text in statements) + "COMMIT;\n"


def _statements(prefix: str) -> Steps[list[str]]:
    queues = yield Statement(
        b"SELECT name || '__commands' FROM commandbus.domain UNION ALL "
        b"SELECT pg_catalog.substr(name, 7) FROM commandbus.setting WHERE name LIKE 'queue.%%' ORDER BY 1",
        {},
    )
    statements = roles.create_statements(prefix) + roles.grant_statements(prefix)
    for (queue,) in queues:
        for kind, name in roles.role_names(prefix).items():
            statements += roles.queue_grants(kind, name, queue)
    return statements
