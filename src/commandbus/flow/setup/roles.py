"""Create the least-privilege roles and grant them what they need, or print the SQL that does it."""

from __future__ import annotations

from collections.abc import Sequence

from psycopg import errors as pg

from commandbus import sql
from commandbus.errors import InvalidCommandError, SchemaError, UnknownDomainError
from commandbus.flow.operation import Statement, Steps, operation
from commandbus.model import roles
from commandbus.model.roles import Tenant

_QUEUES = (
    b"SELECT name || '__commands' FROM commandbus.domain UNION ALL "
    b"SELECT pg_catalog.substr(name, 7) FROM commandbus.setting WHERE name LIKE 'queue.%%' ORDER BY 1"
)


@operation(atomic=True)
def create_roles(
    prefix: str = "commandbus",
    *,
    domains: Sequence[str] = (),
    queues: Sequence[str] = (),
    keep_seconds: float | None = None,
) -> Steps[dict[str, str]]:
    """Create missing roles, grant everything. Returns kind → role name. With `domains`, the roles are a
    tenant's."""
    try:
        for text in (yield from _statements(prefix, domains, queues, keep_seconds)):
            yield Statement(text.encode())
    except pg.InsufficientPrivilege as error:
        raise SchemaError(
            f"this role may not create or grant roles ({error.diag.message_primary}); give a DBA the output of "
            f"`commandbus roles --print`"
        ) from None
    except pg.LockNotAvailable:
        raise SchemaError(
            "row security could not be switched on: a transaction on the tables does not end; end it "
            "(`commandbus doctor` names the oldest), and run this again"
        ) from None
    return roles.role_names(prefix, roles.TENANT_KINDS if domains else roles.KINDS)


@operation(atomic=False)
def print_roles(
    prefix: str = "commandbus",
    *,
    domains: Sequence[str] = (),
    queues: Sequence[str] = (),
    keep_seconds: float | None = None,
) -> Steps[str]:
    """The same statements as a script."""
    statements = yield from _statements(prefix, domains, queues, keep_seconds)
    return "BEGIN;\n" + "".join(f"{text};\n" for text in statements) + "COMMIT;\n"


def grant_again() -> Steps[None]:
    """Grant what is new to roles that exist already."""
    rows = yield Statement(
        b"SELECT s.name, s.value FROM commandbus.setting s JOIN pg_catalog.pg_roles r "
        b"ON r.rolname = CASE WHEN s.name = 'role.worker' THEN s.value "
        b"ELSE pg_catalog.substr(s.name, 8) || '_worker' END "
        b"WHERE s.name = 'role.worker' OR s.name LIKE 'tenant.%%' ORDER BY s.name",
        {},
    )
    for name, value in rows:
        if name == "role.worker":
            texts = yield from _full(value.removesuffix("_worker"))
        else:
            tenant = Tenant.from_setting(name, value)
            texts = roles.create_statements(tenant.prefix, roles.TENANT_KINDS) + roles.tenant_statements(tenant)
        for text in texts:
            yield Statement(text.encode())


def _statements(
    prefix: str, domains: Sequence[str], queues: Sequence[str], keep_seconds: float | None
) -> Steps[list[str]]:
    roles.role_names(prefix)
    yield from _refuse_newer_schema()
    yield from _refuse_mixture(prefix, is_tenant=bool(domains))
    if domains:
        statements = yield from _of_tenant(Tenant.make(prefix, domains, queues))
    elif queues:
        raise InvalidCommandError("queues are named for the roles of a tenant; give its domains, too")
    else:
        statements = yield from _full(prefix)
    return statements if keep_seconds is None else [*statements, roles.keep_statement(keep_seconds)]


def _full(prefix: str) -> Steps[list[str]]:
    queues = yield Statement(_QUEUES, {})
    statements = roles.create_statements(prefix) + roles.grant_statements(prefix)
    for (queue,) in queues:
        for kind, name in roles.role_names(prefix).items():
            statements += roles.queue_grants(kind, name, queue)
    return statements


def _of_tenant(tenant: Tenant) -> Steps[list[str]]:
    rows = yield Statement(_QUEUES, {})
    for domain in tenant.domains:
        if (f"{domain}__commands",) not in rows:
            raise UnknownDomainError(domain)
    for queue in tenant.queues:
        if (queue,) not in rows:
            raise InvalidCommandError(f"there is no queue {queue!r}; create it with bus.create_queue({queue!r})")
    statements = roles.create_statements(tenant.prefix, roles.TENANT_KINDS) + roles.tenant_statements(tenant)
    known = yield Statement(
        b"SELECT name, value FROM commandbus.setting WHERE name = %(name)s", {"name": f"tenant.{tenant.prefix}"}
    )
    for name, value in known:  # earlier rights that the role must lose
        for queue in Tenant.from_setting(name, value).all_queues():
            if (queue,) in rows and queue not in tenant.all_queues():
                statements += roles.revoke_statements(tenant, queue)
    return statements


def _refuse_newer_schema() -> Steps[None]:
    """Refuse to work on a newer schema: this release would revoke rights that it does not know."""
    rows = yield Statement(b"SELECT pg_catalog.max(number) FROM commandbus.migration")
    newest, known = rows[0][0], max(sql.migrations())
    if newest is not None and newest > known:
        raise SchemaError(
            f"this database's commandbus schema is at migration {newest}, newer than this release knows "
            f"({known}); make roles with the newer release"
        )


def _refuse_mixture(prefix: str, *, is_tenant: bool) -> Steps[None]:
    """A role cannot become a tenant's role, or stop being one, because its earlier grants would stay."""
    rows = yield Statement(
        b"SELECT name FROM commandbus.setting "
        b"WHERE (name = 'role.worker' AND value = %(worker)s) OR name = %(tenant)s",
        {"worker": f"{prefix}_worker", "tenant": f"tenant.{prefix}"},
    )
    if any((name == "role.worker") == is_tenant for (name,) in rows):
        has = "all domains" if is_tenant else "some domains only"
        raise InvalidCommandError(f"the roles {prefix}_… exist and have {has}; choose another prefix")
