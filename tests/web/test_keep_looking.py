"""A search for a rare command type: it says how far it has looked, and goes on by itself."""

from __future__ import annotations

from http.client import HTTPConnection
from urllib.parse import urlencode

import psycopg
import pytest

from commandbus import CommandBus
from commandbus.flow.commands import query_filters, query_sources
from web.conftest import Serve, Visit

HOSTILE = "<script>alert(1)</script>"


@pytest.fixture
def rare(bus: CommandBus, database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rare commands among 3,000; one look sees 200."""
    bus.send("orders", "rare", command_id=HOSTILE)
    bus.send("orders", "rare", command_id="second")
    with psycopg.connect(database, autocommit=True) as db:
        db.execute(
            "INSERT INTO commandbus.command (domain, command_id, command_type, status, finished_at) "
            "SELECT 'orders', 'c' || n, 'ship', 'COMPLETED', now() FROM generate_series(1, 3000) n"
        )
    monkeypatch.setattr(query_filters, "BUDGET", 200)
    monkeypatch.setattr(query_sources, "FEW", 10)


def events(visit: Visit, **query: str) -> list[tuple[str, str]]:
    """All events of a stream that ends by itself: name and data."""
    connection = HTTPConnection("127.0.0.1", visit.port, timeout=60)
    connection.request("GET", f"/commands/events?{urlencode(query)}")
    answer = connection.getresponse()
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = []
    for one in answer.read().decode().split("\n\n")[:-1]:
        name, *rest = one.split("\n")
        found.append((name.removeprefix("event: "), "\n".join(rest)))
    connection.close()
    return found


def test_it_says_how_far_it_has_looked_and_goes_on_to_the_end(bus: CommandBus, rare: None, serve: Serve) -> None:
    visit = serve()
    first = visit.get("/api/commands", search="type:rare").json
    assert (first["items"], first["is_partial"]) == ([], True)
    assert first["reached_at"] is not None
    page = visit.get("/commands", search="type:rare").text
    assert "Looked at everything back to <time" in page
    assert 'data-continue="/commands/events?search=type%3Arare&amp;cursor=' in page
    told = events(visit, search="type:rare", cursor=first["next_cursor"])
    assert [name for name, _ in told[-3:]] == ["rows", "reached", "end"]
    assert sum(name == "reached" for name, _ in told) == 15
    assert "Looked at all commands" in told[-2][1]
    assert told[-2][1].startswith("id: \n"), "nothing is left to continue"
    assert "second" in told[-3][1]
    assert "&lt;script&gt;" in told[-3][1]
    assert HOSTILE not in told[-3][1]


def test_what_cannot_be_searched_is_refused(bus: CommandBus, serve: Serve) -> None:
    visit = serve()
    assert visit.get("/commands/events", search="type:rare").status == 422
    assert visit.get("/commands/events", search="type:rare", cursor="x").status == 400
    assert visit.get("/commands/events", search="status:nonsense", cursor="9").status == 400
