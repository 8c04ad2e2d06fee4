"""Logins on an embedded server of the tests: the superuser's password, and roles that have none."""

from __future__ import annotations

import os

import psycopg
from psycopg import sql

from commandbus.db.embedded import EmbeddedPostgres
from commandbus.db.embedded.access import password_file, verifier

# Tests make roles without passwords. The superuser always needs one.
_HBA = """\
host    all          postgres  127.0.0.1/32  scram-sha-256
host    replication  all       127.0.0.1/32  scram-sha-256
host    all          all       127.0.0.1/32  trust
local   all          all                     scram-sha-256
"""


def passfile_of(server: EmbeddedPostgres) -> str:
    data = server.status().data
    assert data is not None
    return str(password_file(data))


def password_in(passfile: str) -> str:
    with open(passfile) as file:
        return file.read().splitlines()[-1].rpartition(":")[2]


def let_roles_in(server: EmbeddedPostgres) -> None:
    """Let the roles that tests make connect without a password, until the server's next start.

    The superuser's password stays what it is, and is checked with less computing: tests connect very often.
    """
    with psycopg.connect(server.dsn, autocommit=True) as admin:
        row = admin.execute("SHOW hba_file").fetchone()
        assert row is not None
        with open(f"{row[0]}.{os.getpid()}", "w") as file:
            file.write(_HBA)
            os.fchmod(file.fileno(), 0o644)
        os.replace(file.name, row[0])
        cheap = verifier(password_in(passfile_of(server)), iterations=1)
        # One after another: of two that change a role at the same moment the server refuses one.
        admin.execute("SELECT pg_advisory_lock(2)")
        admin.execute(sql.SQL("ALTER ROLE postgres PASSWORD {}").format(cheap))
        admin.execute("SELECT pg_reload_conf()")


def plain_address(server: EmbeddedPostgres, database: str = "postgres") -> str:
    """An address that ends in the database's name, for roles too; the password is found through PGPASSFILE."""
    return f"postgresql://postgres@127.0.0.1:{server.status().port}/{database}"
