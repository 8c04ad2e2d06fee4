"""What found no queue is shown on the command line, and by both buses."""

from __future__ import annotations

import asyncio
import re

import psycopg
import pytest

from commandbus import AsyncCommandBus, HandlerRegistry, InvalidCommandError, Page, Worker
from commandbus.cli.exit_codes import ExitCode
from support.workers import quick_settings


def fill(database, *rows):
    with psycopg.connect(database) as conn:
        conn.cursor().executemany(
            "INSERT INTO commandbus.undelivered_reply (queue, message, reason) VALUES (%s, %s, %s)", rows
        )


def test_the_list_and_its_pages(cli, bus, database):
    assert cli("undelivered").out == "every reply was delivered\n"
    assert cli("undelivered", "--json").document == []
    fill(database, *((f"q{number}", f'{{"n": {number}}}', "it is\n\x1bgone") for number in range(3)))
    head, *rows = cli("undelivered").out.splitlines()
    assert head.split() == ["ID", "QUEUE", "AT", "REASON", "MESSAGE"]
    assert [row.split()[1] for row in rows] == ["q2", "q1", "q0"]
    assert re.search(r"^ *\d+  q2 +\d{4}-\d\d-\d\d \d\d:\d\d:\d\d +it is\\n\\x1bgone +\{\"n\": 2\}$", rows[0])
    first, second = cli("undelivered", "--limit", "2", "--json").document
    assert (first["queue"], first["message"], first["reason"]) == ("q2", {"n": 2}, "it is\n\x1bgone")
    (last,) = cli("undelivered", "--cursor", str(second["id"]), "--json").document
    assert last["queue"] == "q0"
    for words in (["--limit", "0"], ["--limit", "many"], ["--cursor", "-1"]):
        assert cli("undelivered", *words).code == ExitCode.USAGE


def test_a_long_or_unreadable_message_is_shown_all_the_same(cli, database):
    fill(database, ("q", '{"much": "' + "x" * 500 + '"}', "gone"), ("q", '{"n": ' + "9" * 5000 + "}", "gone"))
    answer = cli("undelivered")
    assert answer.code == 0
    assert max(map(len, answer.out.splitlines())) < 200
    assert len(cli("undelivered", "--json").document) == 2


def test_a_reply_whose_queue_has_vanished(orders, bus, database):
    bus.create_queue("answers")
    bus.send("orders", "ship", command_id="a", reply_to="answers")
    with psycopg.connect(database) as conn:
        conn.execute("SELECT pgmq.drop_queue('answers')")
    handlers = HandlerRegistry()
    handlers.register("orders", "ship", lambda command, ctx: {"by": "truck"})
    Worker(handlers, settings=quick_settings(database)).run(until_idle=True)
    (kept,) = bus.undelivered_replies()
    assert (kept.queue, kept.message["command_id"], kept.message["result"]) == ("answers", "a", {"by": "truck"})
    assert "the queue does not exist" in kept.reason

    async def look():
        async with AsyncCommandBus(database) as abus:
            return await abus.undelivered_replies(limit=1), await abus.undelivered_replies(cursor=str(kept.id))

    assert asyncio.run(look()) == (Page([kept]), Page([]))
    assert "`commandbus undelivered`" in str(orders("doctor", "--json").document)


def test_what_makes_no_sense_is_refused(bus):
    for wrong in ({"limit": 0}, {"limit": "many"}, {"cursor": 0}, {"cursor": "0"}, {"cursor": str(2**64)}):
        with pytest.raises(InvalidCommandError):
            bus.undelivered_replies(**wrong)
