"""Which migrations a database has, and whether this release can work with them. Every worker looks when it starts.

A newer schema is refused if any of its newer migrations is not compatible (`migrate.py` says what that means).
"""

from __future__ import annotations

from collections.abc import Mapping

from psycopg import errors as pg

from commandbus import sql
from commandbus.errors import MissingPrivilegeError, SchemaError
from commandbus.flow.operation import Statement, Steps, operation
from commandbus.quick_dataclass import dataclass

_APPLIED = b"SELECT number, is_compatible FROM commandbus.migration ORDER BY number"


@dataclass(frozen=True, slots=True)
class SchemaState:
    """What a database has, and what this release would add.

    `newer` are applied migrations that this release does not know; they are compatible with it. `incompatible` are
    missing migrations after which older programs cannot start.
    """

    applied: tuple[int, ...]
    missing: tuple[int, ...]
    pgmq_version: str | None
    pgmq_way: str | None
    newer: tuple[int, ...] = ()
    incompatible: tuple[int, ...] = ()

    @property
    def is_current(self) -> bool:
        """Nothing is missing."""
        return not self.missing


@operation(atomic=False)
def look() -> Steps[SchemaState]:
    """Returns what this database has, and changes nothing. Raises SchemaError if this release cannot work with
    it."""
    return (yield from look_now())


def look_now() -> Steps[SchemaState]:
    """The same as a part of another operation."""
    try:
        return (yield from _state())
    except pg.InsufficientPrivilege as error:
        raise MissingPrivilegeError(
            f"this role may not look at the commandbus schema ({error.diag.message_primary}); grant it one of the "
            f"roles of `commandbus roles`"
        ) from None


def _state() -> Steps[SchemaState]:
    known = sql.migrations()
    (exists,) = (yield Statement(b"SELECT pg_catalog.to_regclass('commandbus.migration') IS NOT NULL"))[0]
    if not exists:
        return SchemaState((), tuple(known), None, None, incompatible=tuple(known))
    found: dict[int, bool] = dict((yield Statement(_APPLIED)))
    applied = tuple(found)
    settings: dict[str, str] = {}
    if applied:
        rows = yield Statement(b"SELECT name, value FROM commandbus.setting WHERE name LIKE 'pgmq%%'", {})
        settings = dict(rows)
    missing = tuple(number for number in known if number not in applied)
    incompatible = tuple(number for number in missing if not sql.is_compatible(known[number][1]))
    newer = {number: is_compatible for number, is_compatible in found.items() if number > max(known)}
    _refuse_newer(newer)
    pgmq_version, pgmq_way = settings.get("pgmq_version"), settings.get("pgmq_way")
    return SchemaState(applied, missing, pgmq_version, pgmq_way, tuple(newer), incompatible)


def _refuse_newer(newer: Mapping[int, bool]) -> None:
    """The error that names the first migration that is not compatible with this release."""
    if strange := [number for number, is_compatible in newer.items() if not is_compatible]:
        raise SchemaError(
            f"this database's commandbus schema is at migration {max(newer)}, newer than this release knows "
            f"({max(sql.migrations())}), and migration {strange[0]} is not compatible with older releases; "
            f"install a newer commandbus"
        )
