"""PGMQ's set-up: by its extension where the server has it and the role may, else by its published SQL.

The package `pgmq` carries the SQL; it installs as a plain database owner. What is there already is used as it
is, if it is 1.5 or newer (older ones have no `headers`).

The SQL is run with all the rights of the database's owner. So it is run only if it is, byte for byte, the one that
this release was tested with: `pyproject.toml` pins the package, and `PACKAGED_SHA256` is checked here before
anything of it is sent to a server. To use another PGMQ, install it before `commandbus migrate`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Generator
from importlib.resources import files
from typing import Any

from psycopg import errors as pg

from commandbus.errors import SchemaError
from commandbus.light_imports import version_of

OLDEST = (1, 5)
PACKAGE = "pgmq==1.1.4"
PACKAGED_VERSION = "1.13.0"
PACKAGED_SHA256 = "bf7e66c75ed771df0c5f7cb2b9f0123ca77992daacd56e3911d1894a3efa99de"


def packaged_version() -> str:
    """The version of PGMQ's SQL that the package carries."""
    return PACKAGED_VERSION


def packaged_sql() -> str:
    """PGMQ's SQL, if it is the one that we know."""
    content = files("pgmq").joinpath("sql", "pgmq.sql").read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != PACKAGED_SHA256:
        raise SchemaError(
            f"the installed package pgmq {_installed()} carries SQL that this release does not know (SHA-256 "
            f"{found}, expected {PACKAGED_SHA256}), and it would run with the rights of the database's owner: run "
            f"`pip install --force-reinstall {PACKAGE}`, or install a PGMQ of your choice into the database first "
            f"(CREATE EXTENSION pgmq, or its SQL): what is there is used as it is"
        )
    return content.decode()


def _installed() -> str:
    return version_of("pgmq") or "(of an unknown version)"


def install(statement: Callable[..., Any]) -> Generator[Any, list[tuple[Any, ...]], tuple[str, str]]:
    """Steps that make sure PGMQ is there. Returns its version and the way it came: `extension` or `sql`.

    `statement` makes what the driver runs; it is passed in because this module is below `flow`.
    """
    present = yield from _present(statement)
    if present is not None:
        return present
    available = yield statement(b"SELECT 1 FROM pg_catalog.pg_available_extensions WHERE name = 'pgmq'")
    if available:
        yield statement(b"SAVEPOINT commandbus_pgmq")
        try:
            yield statement(b"CREATE EXTENSION pgmq")
        except (pg.InsufficientPrivilege, pg.UndefinedFile):
            yield statement(b"ROLLBACK TO SAVEPOINT commandbus_pgmq")
        else:
            created = yield from _present(statement)
            if created is not None:
                return created
    yield statement(packaged_sql().encode())
    return packaged_version(), "sql"


def script() -> str:
    """The same for a script: the extension if the server has it, else the SQL."""
    body = packaged_sql().replace("$pgmq_install$", "")
    return (
        "DO $pgmq_choice$ BEGIN\n"
        "IF to_regclass('pgmq.meta') IS NULL\n"
        "   AND EXISTS (SELECT FROM pg_available_extensions WHERE name = 'pgmq') THEN\n"
        "  BEGIN CREATE EXTENSION pgmq; EXCEPTION WHEN insufficient_privilege THEN NULL; END;\n"
        "END IF;\n"
        "IF to_regclass('pgmq.meta') IS NULL THEN\n"
        f"  EXECUTE $pgmq_install$\n{body}\n$pgmq_install$;\n"
        "END IF; END $pgmq_choice$;"
    )


def _present(statement: Callable[..., Any]) -> Generator[Any, list[tuple[Any, ...]], tuple[str, str] | None]:
    rows = yield statement(b"SELECT extversion FROM pg_catalog.pg_extension WHERE extname = 'pgmq'")
    if rows:
        version = rows[0][0]
        if _parsed(version) < OLDEST:
            raise SchemaError(
                f"this database has the extension pgmq {version}, which is older than 1.5; "
                f"run ALTER EXTENSION pgmq UPDATE"
            )
        return version, "extension"
    rows = yield statement(
        b"SELECT attname FROM pg_catalog.pg_attribute "
        b"WHERE attrelid = pg_catalog.to_regclass('pgmq.message_record')::oid AND NOT attisdropped"
    )
    if not rows:
        return None
    columns = {row[0] for row in rows}
    if "headers" not in columns:
        raise SchemaError("this database has a PGMQ older than 1.5 (no headers); upgrade it")
    return ("1.10 or newer" if "last_read_at" in columns else "1.5 or newer"), "sql"


def _parsed(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
