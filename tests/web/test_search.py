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
        ("one two", "only one id can be searched at a time, not 2: one, two"),
    ],
)
def test_words_that_cannot_be_read(text: str, why: str) -> None:
    with pytest.raises(InvalidCommandError, match=why):
        read_search(text, now=NOW)
