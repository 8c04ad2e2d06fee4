"""The SQL: one statement per file, named by what it does; `migrations/` holds the schema, numbered.

`text(name, domain=…)` fills in the names of a domain's queue. Only names that passed `model/names.py` get there,
so they need no quoting; everything else travels as a parameter.
"""

from __future__ import annotations

import re
from functools import cache, lru_cache
from pathlib import Path

from commandbus.model.names import check_queue, pgmq_table, queue_of

_FOLDER = Path(__file__).parent  # importlib.resources would bring zipfile: a megabyte in every process
_MILLENNIUM = "interval '8766000 hours'"
_EARLY = "timestamptz '1500-01-01 00:00:00+00'"
_LATE = "timestamptz '2500-01-01 00:00:00+00'"
_BANDS = {
    "millennium": _MILLENNIUM,
    "early": _EARLY,
    "late": _LATE,
    "due_at": (
        f"(CASE WHEN {{0}} < {_EARLY} THEN {{0}} + {_MILLENNIUM} "
        f"WHEN {{0}} >= {_LATE} THEN {{0}} - {_MILLENNIUM} ELSE {{0}} END)"
    ),
    "own_shift": (
        f"(CASE WHEN {{0}} < {_EARLY} THEN - {_MILLENNIUM} WHEN {{0}} >= {_LATE} THEN {_MILLENNIUM} "
        f"ELSE interval '0' END)"
    ),
    "shift_for": f"(CASE {{0}} WHEN 1 THEN - {_MILLENNIUM} WHEN -1 THEN {_MILLENNIUM} ELSE interval '0' END)",
    "turn_for": (
        f"(CASE {{0}} WHEN 1 THEN - {_MILLENNIUM} WHEN -1 THEN interval '10 minutes' ELSE interval '0' END)"
    ),
    "bands": f"pg_catalog.unnest(ARRAY[interval '0', - {_MILLENNIUM}, {_MILLENNIUM}]) AS band (shift)",
}
"""The bands of vt (ADR 27). A message of high priority is a thousand years early, so its vt is before `{early}`.
One of low priority is as much late, so its vt is after `{late}`. Hours, because days and years depend on the
session's time zone.

`{due_at}` is the moment at which a message is due. `{own_shift}` is how far the band of a message is from the
normal one: every UPDATE of vt adds it. `{shift_for priority}` is the same by the number of a priority: every
INSERT of a message that may have one adds it (tests/sql/test_bands.py). `{turn_for priority}` is how much earlier
or later a command stands in a limit's line than it was sent."""

_OF_BANDS = re.compile(r"\{(" + "|".join(_BANDS) + r")(?: ([^{}]+))?\}")
_COMPATIBLE = re.compile(r"^-- Compatible: yes\b", re.MULTILINE)


@lru_cache(maxsize=4096)
def text(
    name: str, *, domain: str | None = None, queue: str | None = None, pgmq: str | None = None, **parts: str
) -> bytes:
    """The statement in `<name>.sql`, for one domain's queue, or for a PGMQ queue by its own name: one of ours
    (`queue`), or any (`pgmq`), whose name is then quoted.

    `parts` fill the other places that a statement leaves open, from constants in this package. Every statement may
    use those of the bands of priorities.
    """
    statement = _read(f"{name}.sql")
    if domain is not None:
        queue = queue_of(domain)
        parts["domain"] = domain
    if queue is not None:
        parts |= {"queue": f"q_{check_queue(queue, what='queue')}", "archive": f"a_{queue}"}
    if pgmq is not None:
        parts |= {"queue": pgmq_table(pgmq), "archive": pgmq_table(pgmq, kind="a")}
    for place, part in parts.items():
        statement = statement.replace("{" + place + "}", part)
    return _OF_BANDS.sub(_in_bands, statement).encode()


@cache
def part(name: str) -> str:
    """A part that some statements have in the middle, from `<name>.sql` without its comments."""
    return "".join(line for line in _read(f"{name}.sql").splitlines(keepends=True) if not line.startswith("--"))


def migrations() -> dict[int, tuple[str, str]]:
    """Number → (name, SQL) of every migration, in order."""
    found = {}
    for file in sorted(_FOLDER.joinpath("migrations").glob("*.sql")):
        number, _, name = file.stem.partition("_")
        found[int(number)] = (name, file.read_text("utf-8"))
    return found


def is_compatible(text: str) -> bool:
    """May programs that do not know this migration work with the schema after it? Its header says so, with a line
    `-- Compatible: yes`."""
    return _COMPATIBLE.search(text) is not None


def _in_bands(found: re.Match[str]) -> str:
    """`{due_at}` is that of the column vt, `{due_at x}` that of x."""
    return _BANDS[found[1]].replace("{0}", found[2] or "vt")


def _read(name: str) -> str:
    return _FOLDER.joinpath(name).read_text("utf-8")
