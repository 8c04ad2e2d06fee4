"""What strangers can fill is bounded by count and by bytes: the oldest go, in bites, and are counted."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from flow_harness import Bus, one

from commandbus.flow.commands.prune import ASIDES, Retention, prune_all

Db = psycopg.Connection[Any]
INSERTS = {
    "rejected_message": "(domain, msg_id, message, reason) SELECT 'orders', n, %s::jsonb, 'no command'",
    "undelivered_reply": "(queue, message, reason) SELECT 'gone', %s::jsonb, 'no queue'",
    "stray_reply": "(domain, message, reason) SELECT 'orders', %s::json, 'late'",
}


def fill(db: Db, table: str, count: int, message: str = "{}") -> None:
    db.execute(
        f"INSERT INTO commandbus.{table} {INSERTS[table]} FROM generate_series(1, {count}) n".encode(), (message,)
    )


@pytest.mark.parametrize("table", ASIDES)
def test_the_newest_are_kept_by_count(bus: Bus, db: Db, table: str) -> None:
    fill(db, table, 2500)
    newest = one(db, f"SELECT max(id) FROM commandbus.{table}")
    report = bus.follow(prune_all(Retention(asides_count=200, asides_bytes=1 << 40)))
    assert report.dropped == {ASIDES[table]: 2300}
    assert one(db, f"SELECT count(*) FROM commandbus.{table}") == 200
    assert one(db, f"SELECT max(id) FROM commandbus.{table}") == newest


@pytest.mark.parametrize("table", ASIDES)
def test_and_by_bytes_as_they_are_stored(bus: Bus, db: Db, table: str) -> None:
    db.execute(f"ALTER TABLE commandbus.{table} ALTER message SET STORAGE EXTERNAL".encode())
    try:
        fill(db, table, 50, '{"data": "' + "x" * 20_000 + '"}')
        bus.follow(prune_all(Retention(asides_count=1000, asides_bytes=200_000)))
        assert one(db, f"SELECT count(*) FROM commandbus.{table}") == 9
    finally:
        db.execute(f"ALTER TABLE commandbus.{table} ALTER message SET STORAGE EXTENDED".encode())


def test_what_is_within_its_bounds_stays(bus: Bus, db: Db) -> None:
    for table in ASIDES:
        fill(db, table, 100)
    assert bus.follow(prune_all(Retention(asides_count=100, asides_bytes=1 << 20))).dropped == {}


def test_a_locked_row_holds_up_nothing_and_goes_the_next_time(bus: Bus, db: Db) -> None:
    fill(db, "rejected_message", 50)
    retention = Retention(asides_count=10, asides_bytes=1 << 40)
    with psycopg.connect(bus.url) as other:
        locked = one(other, "SELECT id FROM commandbus.rejected_message ORDER BY id LIMIT 1 FOR UPDATE")
        assert bus.follow(prune_all(retention)).dropped == {"rejected messages": 39}
        assert one(db, "SELECT min(id) FROM commandbus.rejected_message") == locked
    assert bus.follow(prune_all(retention)).dropped == {"rejected messages": 1}
