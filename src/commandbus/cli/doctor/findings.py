"""A finding of the doctor: one check, how it went, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Any, TypeAlias

from psycopg import Connection

from commandbus.quick_dataclass import dataclass


class Level(StrEnum):
    """FAIL: something will not work. WARN: it works, but probably not as intended."""

    OK = "OK"
    WARN = "WARN"
    FAIL = "FAIL"


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found; `remedy` says what to do, if there is something to do."""

    check: str
    level: Level
    message: str
    remedy: str | None = None


Findings: TypeAlias = Iterator[Finding]
Conn: TypeAlias = "Connection[Any]"


def ok(check: str, message: str, remedy: str | None = None) -> Finding:
    """All is well. A remedy is then only a hint."""
    return Finding(check, Level.OK, message, remedy)


def warn(check: str, message: str, remedy: str | None = None) -> Finding:
    """Worth a look."""
    return Finding(check, Level.WARN, message, remedy)


def fail(check: str, message: str, remedy: str | None = None) -> Finding:
    """Something will not work."""
    return Finding(check, Level.FAIL, message, remedy)
