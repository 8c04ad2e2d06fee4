"""The SQL of the roles: names are checked before they are written into it."""

from __future__ import annotations

import pytest

from commandbus.errors import InvalidCommandError
from commandbus.model import roles


def test_every_kind_has_its_name_and_its_statements() -> None:
    assert roles.role_names("acme") == {kind: f"acme_{kind}" for kind in roles.KINDS}
    created = roles.create_statements("acme")
    granted = roles.grant_statements("acme")
    for kind in roles.KINDS:
        assert sum(f"CREATE ROLE acme_{kind} NOLOGIN" in text for text in created) == 1
        assert any(f"TO acme_{kind}" in text for text in granted)
        assert any(f"'role.{kind}', 'acme_{kind}'" in text for text in granted)
    assert not any("SUPERUSER" in text or "CREATEDB" in text for text in created)
    assert not any("GRANT ALL" in text for text in granted)


@pytest.mark.parametrize(
    "prefix", ["", "Acme", "1acme", "acme-x", 'a"b', "a; drop role postgres", "a" * 42, "a\n", "ä", None, 5]
)
def test_a_hostile_prefix_is_refused(prefix: object) -> None:
    for make in (roles.role_names, roles.create_statements, roles.grant_statements):
        with pytest.raises(InvalidCommandError, match="role prefix"):
            make(prefix)  # type: ignore[operator]


def test_a_reader_only_reads_and_only_workers_and_operators_delete() -> None:
    assert roles.queue_grants("reader", "acme_reader", "orders__commands") == [
        "REVOKE ALL ON pgmq.q_orders__commands FROM acme_reader",
        "GRANT SELECT ON pgmq.q_orders__commands TO acme_reader",
        "GRANT SELECT ON pgmq.a_orders__commands TO acme_reader",
    ]
    text = " ".join(roles.queue_grants("producer", "acme_producer", "orders__commands"))
    assert "INSERT" in text
    assert "DELETE" not in text
    assert "UPDATE" not in text
    for kind in ("worker", "operator"):
        assert "DELETE" in " ".join(roles.queue_grants(kind, f"acme_{kind}", "orders__commands"))


def test_a_strange_role_in_the_settings_table_does_not_get_into_sql() -> None:
    for kind, role in (
        ("worker", "x; drop table y"),
        ("worker", "x TO public; --_worker"),
        ("owner", "acme_owner"),
    ):
        with pytest.raises(InvalidCommandError, match="strange role"):
            roles.queue_grants(kind, role, "orders__commands")
