"""The SQL: one statement per file, named by what it does; `migrations/` holds the schema, numbered.

`text(name, domain=…)` fills in the names of a domain's queue. Only names that passed `model/names.py` get there,
so they need no quoting; everything else travels as a parameter.
"""

from __future__ import annotations

import re
from functools import cache, lru_cache
from importlib.resources import files

from commandbus.model.names import check_queue, pgmq_table, queue_of

_BANDS = {
    "millennium": "interval '8766000 hours'",
    "due_at": (
        "(CASE WHEN vt < 'epoch' THEN vt + interval '8766000 hours' "
        "WHEN vt >= timestamptz 'epoch' + interval '8766000 hours' THEN vt - interval '8766000 hours' ELSE vt END)"
    ),
    "bands": (
        "pg_catalog.unnest(ARRAY[interval '0', interval '-8766000 hours', interval '8766000 hours']) "
        "AS band (shift)"
    ),
}
"""The bands of vt (ADR 27). Messages of high priority are a thousand years early, those of low priority late.
Hours, because days and years depend on the session's time zone. `due_at` is the moment itself."""

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
    for place, part in {**parts, **_BANDS}.items():
        statement = statement.replace("{" + place + "}", part)
    return statement.encode()


@cache
def part(name: str) -> str:
    """A part that some statements have in the middle, from `<name>.sql` without its comments."""
    return "".join(line for line in _read(f"{name}.sql").splitlines(keepends=True) if not line.startswith("--"))


def migrations() -> dict[int, tuple[str, str]]:
    """Number → (name, SQL) of every migration, in order."""
    found = {}
    for file in sorted(files(__name__).joinpath("migrations").iterdir(), key=lambda entry: entry.name):
        if file.name.endswith(".sql"):
            number, _, name = file.name.removesuffix(".sql").partition("_")
            found[int(number)] = (name, file.read_text("utf-8"))
    return found


def is_compatible(text: str) -> bool:
    """May programs that do not know this migration work with the schema after it? Its header says so, with a line
    `-- Compatible: yes`."""
    return _COMPATIBLE.search(text) is not None


def _read(name: str) -> str:
    return files(__name__).joinpath(name).read_text("utf-8")
