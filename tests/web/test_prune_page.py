"""Pruning in the console: a preview first, then a portion in each request, recorded with who and why."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from commandbus import CommandBus
from commandbus.web.access import Access
from commandbus.web.actions import retention
from web.conftest import Serve, Visit

OLD = (
    "INSERT INTO commandbus.command (domain, command_id, command_type, status, created_at, finished_at) "
    "SELECT 'orders', 'old' || n, 'ship', 'COMPLETED', now() - interval '2 d', now() - interval '2 d' "
    "FROM generate_series(1, %s) n"
)


@pytest.fixture
def ann(serve: Serve) -> Visit:
    return serve(Access(user_header="X-User", operators={"ann"}), headers={"X-User": "ann"})


def _fill(bus: CommandBus, count: int) -> None:
    with psycopg.connect(bus.settings.database_url, autocommit=True) as conn:
        conn.execute(OLD, [count])


def _left(bus: CommandBus) -> int:
    with psycopg.connect(bus.settings.database_url) as conn:
        found: tuple[Any, ...] | None = conn.execute("SELECT count(*) FROM commandbus.command").fetchone()
    assert found is not None
    return int(found[0])


def test_what_would_be_deleted_is_shown_and_then_deleted(bus: CommandBus, ann: Visit) -> None:
    _fill(bus, 30)
    bus.send("orders", "ship", command_id="young")
    page = ann.get("/prune", age="1d").text
    assert "30 commands" in page
    assert "Nothing has happened yet" in page
    assert _left(bus) == 31
    assert ann.get("/api/prune", age="1d").json["by_status"] == {"COMPLETED": 30, "FAILED": 0, "CANCELED": 0}
    done = ann.act("prune", "/prune?age=1d", age="1d", reason="disk full")
    assert "deleted: 30 commands" in done.text
    assert "nothing more is left" in done.text
    assert _left(bus) == 1
    found = [(item.action, item.operator, item.reason) for item in bus.audit.list_actions()]
    assert found == [("PRUNED", "ann", "disk full"), ("PRUNE", "ann", "disk full")]
    assert "retention" in ann.get("/audit", action="prune").text


def test_a_large_count_is_estimated(bus: CommandBus, ann: Visit) -> None:
    page = ann.get("/prune", count="1000000").text
    assert "Beyond the newest 1000000 there are" in page
    assert "by the server&#39;s statistics" in page or "by the server's statistics" in page
    assert "/actions/prune" in page


def test_many_are_deleted_in_portions(bus: CommandBus, ann: Visit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "PORTION", 2000)
    _fill(bus, 4500)
    fields: dict[str, str] = {"age": "1d"}
    mark, rounds = ann.mark("/prune?age=1d"), 0
    while True:
        answer = ann.post_json("/api/actions/prune", {"fields": fields, "reason": "why"}, X_Mark=mark).json
        rounds += 1
        if "again" not in answer:
            break
        fields = answer["again"]
        assert rounds < 20
    assert rounds >= 3, "a request looks at 2,000 rows"
    assert _left(bus) == 0
    assert sum(item.action == "PRUNE" for item in bus.audit.list_actions()) == 1
    assert sum(item.action == "PRUNED" for item in bus.audit.list_actions()) == rounds


def test_the_page_of_a_portion_goes_on_with_the_same_fields(
    bus: CommandBus, ann: Visit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "PORTION", 3000)
    _fill(bus, 4500)
    page = ann.act("prune", "/prune?age=1d", age="1d", reason='"why" <not>').text
    assert "data-goes-on" in page
    assert 'name="reason" value="&#34;why&#34; &lt;not&gt;"' in page
    assert 'name="age" value="1d"' in page
    assert "there may be more" in page
    assert "data-goes-on" not in ann.get("/prune", age="1d", go_on_from="[]").text, "a link deletes nothing"


def test_who_may_not_and_what_is_wrong_deletes_nothing(bus: CommandBus, serve: Serve, ann: Visit) -> None:
    _fill(bus, 5)
    reader = serve(Access(user_header="X-User", operators={"ann"}), headers={"X-User": "bob"})
    assert "5 commands" in reader.get("/prune", age="1d").text
    assert 'action="/actions/prune"' not in reader.get("/prune", age="1d").text
    assert reader.post("/actions/prune", {"age": "1d"}).status == 403
    assert ann.post("/actions/prune", {"age": "1d"}).status == 403, "no mark: not a form of this console"
    for path, fields in (
        ("/prune", {"age": "soon"}),
        ("/prune", {"count": "many"}),
        ("/api/prune", {"age": "-1"}),
        ("/api/prune", {"age": "nan"}),
    ):
        answer = ann.get(path, **fields)
        assert answer.status == 400, (path, fields, answer.text)
        assert next(iter(fields)) in answer.text
    for fields in ({"age": "soon"}, {"count": "-1"}, {"age": "1d", "go_on_from": "x"}):
        answer = ann.act("prune", "/prune?age=1d", **fields)
        assert answer.status == 400, fields
    assert _left(bus) == 5


def test_counting_that_takes_too_long_says_what_to_do(bus: CommandBus, ann: Visit) -> None:
    """Somebody's lock makes the statement of the page take longer than two seconds."""
    with psycopg.connect(bus.settings.database_url) as conn:
        conn.execute("LOCK TABLE commandbus.rejected_message IN ACCESS EXCLUSIVE MODE")
        answer = ann.get("/api/prune", count="1000000")
    assert answer.status == 503
    assert list(answer.json) == ["error"]
