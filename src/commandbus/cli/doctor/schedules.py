"""Schedules that nobody fires, and those that cannot be fired."""

from __future__ import annotations

from commandbus.cli.doctor.findings import Conn, Findings, ok, warn
from commandbus.cli.render import age
from commandbus.model.counting import counted
from commandbus.shell_words import arguments

_OVERDUE = b"""
SELECT domain, name, extract(epoch FROM pg_catalog.now() - next_at)::float8 FROM commandbus.schedule
 WHERE paused_at IS NULL AND next_at < pg_catalog.now() - interval '15 seconds' ORDER BY 3 DESC LIMIT 10
"""
_FAILING = b"""
SELECT domain, name, note FROM commandbus.schedule
 WHERE paused_at IS NULL AND pg_catalog.starts_with(note, 'cannot be fired')
   AND noted_at > pg_catalog.now() - interval '2 minutes' ORDER BY 1, 2 LIMIT 10
"""
_DIFFERENT = b"""
SELECT domain, name, pg_catalog.count(*) FROM commandbus.schedule_declaration
 WHERE seen_at > pg_catalog.now() - interval '15 seconds'
 GROUP BY domain, name HAVING pg_catalog.count(*) > 1 ORDER BY 1, 2 LIMIT 10
"""
_COUNT = b"SELECT pg_catalog.count(*), pg_catalog.count(paused_at) FROM commandbus.schedule"


def examine(conn: Conn) -> Findings:
    """Findings about schedules; none if there are no schedules."""
    row = conn.execute(_COUNT).fetchone()
    total, paused = row or (0, 0)
    if not total:
        return
    is_well = True
    for domain, name, seconds in conn.execute(_OVERDUE).fetchall():
        is_well = False
        yield warn(
            "schedules",
            f"schedule {domain}/{name} should have fired {age(seconds)} ago",
            f"run a worker of domain {domain}: any of them fires it",
        )
    for domain, name, note in conn.execute(_FAILING).fetchall():
        is_well = False
        line = f"`commandbus schedules show {arguments(domain, name)}`"
        yield warn("schedules", f"schedule {domain}/{name} {note}", line)
    for domain, name, count in conn.execute(_DIFFERENT).fetchall():
        is_well = False
        yield warn(
            "schedules",
            f"live workers declare schedule {domain}/{name} in {count} ways; the newest is in effect",
            "that is so during a deploy; afterwards, end the workers of the old release",
        )
    if is_well:
        are_paused = f", {paused} paused" if paused else ""
        yield ok("schedules", f"{counted(total, 'schedule')}{are_paused}; none is overdue")
