"""Every statement that writes a message's vt keeps the message in the band of its priority (ADR 27).

Parsed by PostgreSQL's own parser: an UPDATE of vt adds the shift of the message's own band, and an INSERT that of
the command's priority. One that forgets it would start a command at the wrong time, or never.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from pglast import ast, parse_sql
from pglast.stream import RawStream
from pglast.visitors import Visitor

from support import statements

SHIFT = re.compile(r"8766000 hours|commandbus\.shift_for")
NORMAL = {  # messages that never have a priority
    "commands/send_plain.sql",
    "commands/send_many_plain.sql",
    "commands/reply.sql",  # a reply queue is read by clients of PGMQ
    "processes/message.sql",  # messages to processes
    "processes/reply_to_process.sql",
    "processes/reply_to_parent.sql",
    "processes/start_nested.sql",
    "commandbus.signal_process",
    "commandbus.start_processes",
    "queues/send.sql",  # raw messages get their priority when they are adopted
    "queues/send_many.sql",
}
_PLACES = re.compile(r"%(?:\d+\$)?([ILs])")


class Writes(Visitor):
    """What a statement writes into the vt of messages in queues, as text."""

    def __init__(self) -> None:
        super().__init__()
        self.updates: list[str] = []
        self.inserts: list[str] = []

    def visit_UpdateStmt(self, _: Any, node: ast.UpdateStmt) -> None:  # noqa: N802
        if _is_queue(node.relation):
            self.updates += [RawStream()(target.val) for target in node.targetList if target.name == "vt"]

    def visit_InsertStmt(self, _: Any, node: ast.InsertStmt) -> None:  # noqa: N802
        if not _is_queue(node.relation):
            return
        place = [column.name for column in node.cols].index("vt")
        rows = node.selectStmt.valuesLists or [[target.val for target in node.selectStmt.targetList]]
        self.inserts += [RawStream()(row[place]) for row in rows]


def _is_queue(relation: Any) -> bool:
    return relation.schemaname == "pgmq" and relation.relname.startswith("q_")


def _all() -> Iterator[tuple[str, str]]:
    yield from ((found.place, found.text) for found in statements.statements())
    for body in statements.bodies():
        for text in body.text.split("$sql$")[1::2]:
            yield (
                body.name,
                _PLACES.sub(lambda found: {"I": "q_orders__commands", "L": "'x'"}.get(found[1], ""), text),
            )


def _writes(text: str) -> Writes:
    writes = Writes()
    writes(parse_sql(text))
    return writes


@pytest.fixture(scope="module")
def found() -> dict[str, Writes]:
    """By the place of each statement."""
    return {f"{place} {number}": _writes(text) for number, (place, text) in enumerate(_all())}


def test_an_update_of_vt_stays_in_the_band(found: dict[str, Writes]) -> None:
    forgotten = {
        place.rsplit(" ", 1)[0]
        for place, writes in found.items()
        for text in writes.updates
        if not SHIFT.search(text)
    }
    assert forgotten == {"queues/read.sql", "queues/set_vt.sql"}  # these refuse the queues of domains
    assert sum(len(writes.updates) for writes in found.values()) >= 14


def test_a_new_message_goes_into_the_band_of_its_command(found: dict[str, Writes]) -> None:
    plain = {
        place.rsplit(" ", 1)[0]
        for place, writes in found.items()
        for text in writes.inserts
        if not SHIFT.search(text)
    }
    assert plain == NORMAL & plain
    assert sum(len(writes.inserts) for writes in found.values()) >= 16


def test_the_check_sees_what_forgets_the_band() -> None:
    writes = _writes(
        "WITH a AS (UPDATE pgmq.q_orders__commands SET vt = now() WHERE msg_id = 1) "
        "INSERT INTO pgmq.q_orders__commands (msg_id, vt) SELECT 1, now() + interval '8766000 hours'"
    )
    assert [bool(SHIFT.search(text)) for text in writes.updates + writes.inserts] == [False, True]
