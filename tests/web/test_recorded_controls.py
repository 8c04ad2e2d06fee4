"""What operators do to key limits, batches and limits in the console: all of it is recorded, with who and why."""

from __future__ import annotations

import pytest

from commandbus import CommandBus, Limit, NewCommand
from commandbus.web.access import Access
from web.conftest import Serve, Visit

HOSTILE = '<script>alert("1")</script>'
KEY = "/key?domain=orders&name=tenant"
FIELDS = {"domain": "orders", "name": "tenant"}


@pytest.fixture
def ann(serve: Serve) -> Visit:
    return serve(Access(user_header="X-User", operators={"ann"}), headers={"X-User": "ann"})


def recorded(bus: CommandBus, subject: str) -> list[tuple[str, str, str | None]]:
    """What the audit has of this subject, the oldest first."""
    found = [item for item in bus.audit.list_actions() if item.subject == subject]
    return [(item.action, item.operator, item.reason) for item in reversed(found)]


def test_key_limits_are_made_changed_overridden_and_deleted(bus: CommandBus, ann: Visit) -> None:
    made = ann.act("set-key-limit", "/keys", **FIELDS, concurrency="2", reason="new tenants")
    assert "allows 2 of a key at once, in any order" in made.text
    shown = ann.get(KEY).text
    assert "2 of a key at once, in any order" in shown
    assert "new tenants" in shown
    changed = ann.act("set-key-limit", KEY, **FIELDS, concurrency="1", ordered="yes", on_failure="step_aside")
    assert "1 of a key at once, in the order of sending" in changed.text
    (limit,) = bus.key_limits.list("orders")
    assert (limit.concurrency, limit.ordered, limit.on_failure) == (1, True, "step_aside")

    assert (
        "0 at once for 2h" in ann.act("override-key", KEY, **FIELDS, key=HOSTILE, concurrency="0", until="2h").text
    )
    assert "all keys" in ann.act("override-key", KEY, **FIELDS, concurrency="3", until="1h").text
    assert [(item.key, item.concurrency) for item in bus.key_limits.overrides("orders", "tenant")] == [
        (None, 3),
        (HOSTILE, 0),
    ]
    shown = ann.get(KEY).text
    assert "All other keys: 3 at once" in shown
    assert "<script>alert" not in shown
    listed = ann.get("/api/key/overrides", **FIELDS).json
    assert [(item["key"], item["concurrency"]) for item in listed] == [(None, 3), (HOSTILE, 0)]
    for expected in ("the override is ended", "there was no override"):
        assert expected in ann.act("end-key-override", KEY, **FIELDS, key=HOSTILE).text

    assert "is deleted" in ann.act("delete-key-limit", KEY, **FIELDS, reason="not needed").text
    assert recorded(bus, "key_limit orders/tenant") == [
        ("SET", "ann", "new tenants"),
        ("SET", "ann", None),
        ("OVERRIDE", "ann", None),
        ("OVERRIDE", "ann", None),
        ("END_OVERRIDE", "ann", None),
        ("DELETE", "ann", "not needed"),
    ]
    assert ann.get("/api/key/actions", **FIELDS).json[0]["action"] == "DELETE"
    page = ann.get("/audit", operator="ann", domain="orders").text
    assert "key_limit orders/tenant" in page
    assert "end override" in page


def test_a_key_limit_that_cannot_be_so_is_refused(bus: CommandBus, ann: Visit) -> None:
    bus.key_limits.set("orders", "tenant")
    for fields in (
        {"concurrency": "0"},
        {"concurrency": "many"},
        {"concurrency": "9" * 5000},
        {"concurrency": "2", "ordered": "yes"},
        {"concurrency": "1", "ordered": "perhaps"},
        {"concurrency": "1", "on_failure": "explode"},
    ):
        assert ann.act("set-key-limit", KEY, **FIELDS, **fields).status == 400, fields
    for fields in ({"concurrency": "1", "until": "soon"}, {"concurrency": "-1", "until": "1h"}):
        assert ann.act("override-key", KEY, **FIELDS, **fields).status == 400, fields
    assert ann.act("override-key", KEY, domain="orders", name="nobody", concurrency="1", until="1h").status == 404
    assert ann.act("end-key-override", KEY, domain="orders", name="nobody").status == 404
    bus.send("orders", "read", key_limit="tenant", key="a")
    assert ann.act("delete-key-limit", KEY, **FIELDS).status == 409
    assert recorded(bus, "key_limit orders/tenant")[1:] == [], "what is refused is not recorded"


def test_an_open_batch_is_closed_and_canceled(bus: CommandBus, ann: Visit) -> None:
    bus.create_batch("orders", [NewCommand("ship")], batch_id="b 1", is_open=True)
    page = "/batch?domain=orders&id=b+1"
    target = {"domain": "orders", "id": "b 1"}
    assert "It is open" in ann.get(page).text
    closed = ann.act("close-batch", page, **target, reason="its program is gone")
    assert "is closed: nothing can be added to it" in closed.text
    assert "was already closed" in ann.act("close-batch", page, **target).text
    assert "It is open" not in ann.get(page).text
    assert "is being canceled" in ann.act("cancel-batch", page, **target).text
    expected = [("CLOSE", "ann", "its program is gone"), ("CANCEL", "ann", None)]
    assert recorded(bus, "batch orders/b 1") == expected
    shown = ann.get(page).text
    assert "What people did to it" in shown
    assert "its program is gone" in shown
    assert [item["action"] for item in ann.get("/api/batch/actions", **target).json] == ["CANCEL", "CLOSE"]
    assert [item["subject"] for item in ann.get("/api/audit", domain="orders", action="close").json["items"]] == [
        "batch orders/b 1"
    ]


def test_every_option_of_a_limit_is_set_and_unset(bus: CommandBus, ann: Visit) -> None:
    bus.declare_limit(Limit("docai", concurrency=5))
    page = "/limit?name=docai"
    assert "Calls at once" in ann.get(page).text
    fields = {
        "rate": "120/m", "burst": "3", "lease": "2m", "call_timeout": "none", "max_wait": "1h", "tries": "7",
        "backoff": "1s, 2s,4", "breaker_failures": "0", "breaker_reset": "30s",
    }  # fmt: skip
    done = ann.act("set-limit", page, limit="docai", reason="spare it", **fields)
    assert "allows 5 at once, 120/m; set: rate, burst, lease" in done.text
    info = bus.get_limit("docai")
    assert info is not None
    assert (info.rate, info.burst, info.lease_seconds, info.call_timeout_seconds) == ("120/m", 3, 120.0, None)
    assert (info.max_wait_seconds, info.tries, info.backoff) == (3600.0, 7, (1.0, 2.0, 4.0))
    assert (info.breaker_failures, info.breaker_reset_seconds) == (0, 30.0)
    assert ann.act("set-limit", page, limit="docai", concurrency="none", environment="test").status == 200
    shown = ann.get(page).text
    assert "Calls at once: 5 again" in shown
    assert "set by an operator" in shown
    one = ann.act("unset-limit", page, limit="docai", options="concurrency")
    assert "in its concurrency" in one.text
    info = bus.get_limit("docai")
    assert info is not None
    assert (info.concurrency, info.tries, info.environment) == (5, 7, "test")
    assert "is as its program declares it" in ann.act("unset-limit", page, limit="docai").text
    info = bus.get_limit("docai")
    assert info is not None
    assert (info.rate, info.tries, info.override) == (None, 4, None)
    assert recorded(bus, "limit docai") == [
        ("SET", "ann", "spare it"),
        ("SET", "ann", None),
        ("UNSET", "ann", None),
        ("UNSET", "ann", None),
    ]


def test_a_limit_that_cannot_be_so_is_refused(bus: CommandBus, ann: Visit) -> None:
    bus.declare_limit(Limit("docai", concurrency=5))
    page = "/limit?name=docai"
    for fields in (
        {},
        {"rate": "fast"},
        {"concurrency": "none"},  # then it would limit nothing
        {"lease": "0s"},
        {"backoff": "2,soon"},
        {"shared": "perhaps"},
        {"store": "files"},
        {"tries": "9" * 5000},
    ):
        assert ann.act("set-limit", page, limit="docai", **fields).status == 400, fields
    assert ann.act("unset-limit", page, limit="docai", options="color").status == 400
    assert recorded(bus, "limit docai") == []
    assert ann.act("set-limit", page, limit="other", rate="1/s").status == 200
    assert "Delete it: no program declares it" in ann.get("/limit?name=other").text
    assert "is deleted" in ann.act("unset-limit", page, limit="other").text


def test_a_reader_changes_nothing(bus: CommandBus, serve: Serve) -> None:
    bus.key_limits.set("orders", "tenant")
    bus.create_batch("orders", [], batch_id="b", is_open=True)
    bob = serve(Access(user_header="X-User", operators={"ann"}), headers={"X-User": "bob"})
    for page in (KEY, "/keys", "/batch?domain=orders&id=b"):
        assert 'method="post"' not in bob.get(page).text, page
    for name, fields in (
        ("set-key-limit", {**FIELDS, "concurrency": "3"}),
        ("override-key", {**FIELDS, "concurrency": "3", "until": "1h"}),
        ("end-key-override", FIELDS),
        ("delete-key-limit", FIELDS),
        ("close-batch", {"domain": "orders", "id": "b"}),
    ):
        assert bob.post(f"/actions/{name}", fields).status == 403, name
        assert bob.post_json(f"/api/actions/{name}", {"fields": fields}).status == 403, name
    record = bus.get_batch("orders", "b")
    assert record is not None
    assert record.is_open


def test_a_schedule_is_deleted_and_a_type_is_paused(bus: CommandBus, ann: Visit) -> None:
    bus.schedules.create("orders", "nightly", every="1h")
    target = {"domain": "orders", "name": "nightly"}
    assert "is deleted" in ann.act("delete-schedule", "/schedules", **target, reason="old").text
    assert ann.act("delete-schedule", "/domains", **target).status == 404
    assert recorded(bus, "schedule orders/nightly")[-1] == ("DELETE", "ann", "old")
    assert "is paused" in ann.act("pause", "/domains", domain="orders", command_type="ship").text
    assert [(item.domain, item.command_type) for item in bus.pauses()] == [("orders", "ship")]
