"""The figures of each minute, as workers add to them and as people see them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from psycopg import errors as pg

from commandbus import sql
from commandbus.flow.operation import Statement, Steps, no_schema, operation
from commandbus.model import names
from commandbus.model.minute_figures import MOST_COUNTED, HourFigures, MinuteRow, WorkerLife, hours_of

ALIVE_SECONDS = 15.0
MOST_LIVES = 5000


@operation(atomic=False)
def add_figures(domain: str, *, settled: int, waits: Sequence[int], counts_ready: bool) -> Steps[None]:
    """Add to the current minute of a domain. `counts_ready`: also count what could run now, unless another worker
    has done so in this minute. Nothing is written if there is nothing to tell."""
    params: Mapping[str, object] = {
        "domain": domain,
        "settled": settled,
        "waits": list(waits),
        "counts_ready": counts_ready,
        "most": MOST_COUNTED,
    }
    yield Statement(sql.text("workers/add_figures", domain=domain), params)


@operation(atomic=False)
def last_hour(domains: Sequence[str] | None = None) -> Steps[list[HourFigures]]:
    """The last hour of these domains (None: all), minute by minute."""
    for domain in domains or ():
        names.check_domain(domain)
    try:
        rows = yield Statement(sql.text("workers/last_hour"), {"domains": None if domains is None else [*domains]})
    except (pg.UndefinedTable, pg.InvalidSchemaName):
        raise no_schema() from None
    lives = yield Statement(sql.text("workers/lives"), {"alive": ALIVE_SECONDS, "most": MOST_LIVES})
    if domains is None:
        found = yield Statement(b"SELECT name FROM commandbus.domain ORDER BY name")
        domains = [name for (name,) in found]
    now = rows[0][0]
    return hours_of(
        domains,
        now,
        [MinuteRow(*row) for _, *row in rows if row[0] is not None],
        [WorkerLife(*row) for row in lives],
    )
