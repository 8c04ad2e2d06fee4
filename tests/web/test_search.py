"""What somebody types into the search box."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from commandbus.errors import InvalidCommandError
from commandbus.flow.commands.query import CommandQuery
from commandbus.web.search import read_search

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "query", "id_"),
    [
        ("", CommandQuery(), None),
        ("ship-17", CommandQuery(), "ship-17"),
        ("type:ship status:failed", CommandQuery(command_type="ship", status="FAILED"), None),
        ("status:tsq domain:orders", CommandQuery(status="IN_TROUBLESHOOTING_QUEUE", domain="orders"), None),
        ("since:2h", CommandQuery(created_after=NOW - timedelta(hours=2)), None),
        ("correlation:'a b' domain:x id:7", CommandQuery(correlation_id="a b", domain="x"), "id:7"),
        ('"an id with spaces"', CommandQuery(), "an id with spaces"),
        ("it's", CommandQuery(), "it's"),
        ("one two", CommandQuery(), "one two"),
        (
            "worker:w1 priority:high batch:b domain:x",
            CommandQuery(worker="w1", priority="high", batch_id="b", domain="x"),
            None,
        ),
        (
            "data.order_no=17 data.to.city=Bern",
            CommandQuery(data={"order_no": "17", "to.city": "Bern"}, created_after=NOW - timedelta(days=7)),
            None,
        ),
        ("error:'no city' since:1h", CommandQuery(error="no city", created_after=NOW - timedelta(hours=1)), None),
        ("data.=1", CommandQuery(), "data.=1"),
    ],
)
def test_words_are_filters_or_an_id(text: str, query: CommandQuery, id_: str | None) -> None:
    found = read_search(text, now=NOW)
    assert (found.query, found.id) == (query, id_)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("status:nonsense", "status:nonsense is none of pending"),
        ("status:c", "status:c is none of"),
        ("since:soon", "since"),
        ("type:", "type: has no value"),
        ("priority:urgent", "priority:urgent is none of"),
        ("since:99999999d", "since.*99999999d"),
    ],
)
def test_words_that_cannot_be_read(text: str, why: str) -> None:
    with pytest.raises(InvalidCommandError, match=why):
        read_search(text, now=NOW)
