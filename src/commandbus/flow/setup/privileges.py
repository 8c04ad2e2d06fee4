"""Checks once, before a worker starts, whether its role may run a worker.

A worker whose role may read but not claim would pass every other check, fail at its first claim, and be started
again and again. This checks only what every worker needs, which is less than `commandbus roles` grants.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from psycopg import errors as pg

from commandbus import sql
from commandbus.errors import MissingPrivilegeError, UnknownDomainError
from commandbus.flow.operation import Statement, Steps, explain_absence, operation
from commandbus.model.names import queue_of
from commandbus.quick_dataclass import dataclass

_SCHEMAS = ("commandbus", "pgmq")
_NEEDED = {
    "domain": ("SELECT",),
    "command": ("SELECT", "UPDATE"),
    "attempt": ("INSERT",),
    "tsq": ("INSERT",),
    "parked": ("INSERT",),
    "worker": ("INSERT", "UPDATE"),
    "waiting": ("INSERT", "DELETE"),
}
_NEEDED_OF_A_QUEUE = ("SELECT", "UPDATE", "DELETE")
_QUEUE = re.compile(r"pgmq\.q_(\w+)__commands")

Wanted = tuple[str, str, str]  # schema, table ("" for the schema itself), privilege


@dataclass(frozen=True, slots=True)
class Permitted:
    """The role, which may run a worker, and the domains that have no queue."""

    role: str
    without_queue: frozenset[str]


@operation(atomic=False)
def check_may_work(domains: Sequence[str]) -> Steps[Permitted]:
    """Raises `MissingPrivilegeError`, which names what is missing, if this role cannot work for these domains.

    A missing table is not reported here: `look` reports a missing schema.
    """
    wanted = list(_wanted(domains))
    schemas, names, privileges = zip(*wanted, strict=True)
    rows = yield Statement(
        sql.text("setup/worker_privileges"),
        {"schemas": list(schemas), "names": list(names), "privileges": list(privileges)},
    )
    role = str(rows[0][0])
    missing = [
        _shown(schema, name, privilege) for _, schema, name, privilege, exists, has in rows if exists and not has
    ]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise may_not_work(role, f"it lacks {missing[0]}{more}")
    absent = {name for _, _, name, _, exists, _ in rows if not exists}
    return Permitted(role, frozenset(domain for domain in domains if f"q_{queue_of(domain)}" in absent))


def may_not_work(role: str, reason: str) -> MissingPrivilegeError:
    """The sentence for a role that may not run a worker."""
    return MissingPrivilegeError(
        f"role {role} may not run a worker: {reason}; run `commandbus roles` as the owner of the schema, then "
        f"GRANT commandbus_worker TO {role}"
    )


def explained(error: BaseException, role: str) -> BaseException:
    """The sentence for a server error in a running worker, if a person must repair its cause."""
    if isinstance(error, pg.InsufficientPrivilege):
        return may_not_work(role, error.diag.message_primary or str(error))
    if isinstance(error, pg.UndefinedTable) and (queue := _QUEUE.search(error.diag.message_primary or "")):
        return UnknownDomainError(queue[1])
    if isinstance(error, pg.UndefinedTable | pg.InvalidSchemaName):
        return explain_absence(error)
    return error


def _wanted(domains: Sequence[str]) -> Iterable[Wanted]:
    for schema in _SCHEMAS:
        yield schema, "", "USAGE"
    for domain in domains:
        for privilege in _NEEDED_OF_A_QUEUE:
            yield "pgmq", f"q_{queue_of(domain)}", privilege
    for table, privileges in _NEEDED.items():
        for privilege in privileges:
            yield "commandbus", table, privilege


def _shown(schema: str, name: str, privilege: str) -> str:
    return f"{privilege} ON {schema}.{name}" if name else f"{privilege} ON SCHEMA {schema}"
