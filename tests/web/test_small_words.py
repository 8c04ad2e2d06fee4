"""Sentences of the console that say what to do next."""

from __future__ import annotations

from typing import Any

import psycopg

from commandbus import CommandBus, HandlerRegistry, Limit, PermanentCommandError, Worker
from support.workers import quick_settings
from web.conftest import Answer, Serve, Visit


def act(visit: Visit, fields: dict[str, str]) -> Answer:
    mark = visit.mark("/limit?name=docai")
    return visit.post_json("/api/actions/set-limit", {"fields": fields}, X_Mark=mark)


def test_nothing_failed_but_some_need_a_person(serve: Serve, bus: CommandBus, database: str) -> None:
    handlers = HandlerRegistry()

    @handlers.handler("orders", "ship")
    def ship(command: Any, ctx: Any) -> None:
        raise PermanentCommandError("no street")

    visit = serve()
    assert "a person:" not in visit.get("/commands", search="status:failed").text
    for number in range(3):
        bus.send("orders", "ship", command_id=f"s-{number}")
    Worker(handlers, settings=quick_settings(database)).run(until_idle=True)
    page = visit.get("/commands", search="status:failed domain:orders").text
    assert "No command matches." in page
    assert (
        '3 need a person: <a href="/commands?search=status%3Atsq+domain%3Aorders">status:tsq domain:orders</a>'
        in page
    )
    assert "a person:" not in visit.get("/commands", search="status:failed type:other").text
    assert "a person:" not in visit.get("/commands", search="status:canceled").text
    assert 'placeholder="an id, or type:ship status:tsq since:2h"' in page


def test_a_limit_that_nobody_knows_is_set_with_a_warning(serve: Serve, bus: CommandBus) -> None:
    bus.declare_limit(Limit("docai", concurrency=5))
    visit = serve()
    done = act(visit, {"limit": "docia", "concurrency": "3"})
    assert done.status == 200, done.text
    assert "allows 3 at once" in done.text
    assert "nobody knows limit 'docia'" in done.text
    assert "did you mean 'docai'?" in done.text
    assert "nobody knows" not in act(visit, {"limit": "docai", "concurrency": "3"}).text


def test_a_number_that_is_refused_comes_with_its_range(serve: Serve, bus: CommandBus) -> None:
    bus.declare_limit(Limit("docai", concurrency=5))
    visit = serve()
    for bad in ("-1", "9" * 20):
        answer = act(visit, {"limit": "docai", "concurrency": bad})
        assert answer.status == 400
        assert f"concurrency must be a whole number from 0 to 999999999999999999, not '{bad}'" in answer.text


def test_details_of_actions_are_json(serve: Serve, bus: CommandBus) -> None:
    bus.key_limits.set("orders", "account", concurrency=3, operator="ann")
    visit = serve()
    for page in (visit.get("/audit").text, visit.get("/key", domain="orders", name="account").text):
        assert "&#34;concurrency&#34;: 3" in page
        assert "&#39;concurrency&#39;" not in page


def test_the_sessions_of_the_console_have_its_name(serve: Serve, database: str) -> None:
    assert serve().get("/commands").status == 200
    with psycopg.connect(database) as conn:
        names = conn.execute(
            "SELECT application_name FROM pg_stat_activity WHERE datname = current_database()"
        ).fetchall()
    assert ("commandbus console",) in names
