"""The console rehearses a command if it has the handlers, and shows the command line if it has not."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
import uvicorn

from commandbus import CommandBus, Settings
from commandbus.web.access import Access
from commandbus.web.app import create_console
from support.waiting import until
from web.conftest import Serve, Visit

PAGE = "/command?domain=orders&id=tx"


@pytest.fixture
def with_handlers(database: str) -> Iterator[Visit]:
    app = create_console(Settings(database_url=database), handlers="support.rehearsed_handlers:handlers")
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until(lambda: server.started)
    yield Visit(server.servers[0].sockets[0].getsockname()[1])
    server.should_exit = True
    thread.join(30)


def test_the_button_shows_what_would_happen(database: str, bus: CommandBus, with_handlers: Visit) -> None:
    with psycopg.connect(database, autocommit=True) as db:
        db.execute("CREATE TABLE shipped (id text)")
        bus.send("orders", "tx", {}, command_id="tx")
        assert "<button>Rehearse</button>" in with_handlers.get(PAGE).text
        shown = with_handlers.act("rehearse", PAGE, domain="orders", id="tx")
        assert shown.status == 200, shown.text
        assert "would complete" in shown.text
        assert "public.shipped" in shown.text
        assert "INSERT INTO shipped" in shown.text
        assert db.execute("SELECT count(*) FROM shipped").fetchone() == (0,)
    assert with_handlers.act("rehearse", PAGE, domain="orders", id="nobody").status == 404
    assert with_handlers.post("/actions/rehearse", {"domain": "orders", "id": "tx"}).status == 403


def test_without_handlers_it_shows_the_command_line_and_readers_may_not(bus: CommandBus, serve: Serve) -> None:
    bus.send("orders", "tx", {}, command_id="tx")
    visit = serve()
    assert "commandbus rehearse MODULE:REGISTRY orders tx" in visit.get(PAGE).text
    refused = visit.act("rehearse", PAGE, domain="orders", id="tx")
    assert (refused.status, "this console has no handlers" in refused.text) == (409, True)
    reader = serve(Access(user_header="X-User", operators={"ann"}), headers={"X-User": "bob"})
    answer: Any = reader.post_json("/api/rehearse", {"domain": "orders", "id": "tx"})
    assert answer.status == 403
