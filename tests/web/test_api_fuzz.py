"""The API, fuzzed from its own description: no error of the server, no answer that is not described or has no end.

Texts are drawn from what hurts: NUL, lone surrogates, other alphabets, numbers that no column holds, long texts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from commandbus import CommandBus
from commandbus.web.access import Access, Visitor
from commandbus.web.actions import ACTIONS
from commandbus.web.app import LARGEST_ANSWER
from support.running import examples
from web.conftest import Serve, Visit
from web.test_console import settled

pytestmark = pytest.mark.slow

TOKEN = "t" * 20
CHECKS = [
    not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance,
]  # fmt: skip
PLAYED = {"deadline": None, "database": None, "derandomize": True, "phases": [Phase.explicit, Phase.generate]}
SOME = settings(max_examples=examples(6, thorough=40), suppress_health_check=list(HealthCheck), **PLAYED)
FEW = settings(SOME, max_examples=examples(2, thorough=40))  # for each of the actions, which are alike
NASTY_TEXTS = [
    "\x00", "0001-01-01T00:00:00Z", "9999-12-31T23:59:59-14:00", "99999999999999999999", "-1", "1e400", "NaN", "{",
    "[]", "null", "' OR 1=1", "x" * 3000, "٣", "0",
]  # fmt: skip
NASTY = st.sampled_from([*NASTY_TEXTS, "\ud800"])
KNOWN = st.sampled_from(["orders", "processes", "good", "bad", "three", "p-1", "ship", "docai", "1", "nightly"])


@pytest.fixture
def api(database: str, bus: CommandBus, serve: Serve) -> Visit:
    """A console with data in it, also with rows that are as long as a row can be. The visitor is a program."""
    settled(database, bus)
    bus.schedules.create("orders", "nightly", cron="0 3 * * *", command_type="ship", data={})
    for number in range(5):
        bus.send("orders", "ship", {"long": "x" * 1_000_000}, command_id=f"long-{number}")
    access = Access(tokens={TOKEN: Visitor("ann", "operator")})
    return serve(access, headers={"Authorization": f"Bearer {TOKEN}"})


def described(visit: Visit, mode: GenerationMode) -> Iterator[Any]:
    """Every operation of the description, as the console serves it, that can be asked well, or badly."""
    schema = schemathesis.openapi.from_dict(visit.get("/api/openapi.json").json)
    for found in schema.get_all_operations():
        operation = found.ok()
        if mode is GenerationMode.POSITIVE or operation.query or operation.body:
            yield operation


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_every_operation_keeps_to_its_description(api: Visit, mode: GenerationMode) -> None:
    with requests.Session() as session:
        session.headers.update(api.headers)
        operations = list(described(api, mode))
        for operation in operations:
            some = FEW if operation.path.startswith("/api/actions/") else SOME
            _ask(operation.as_strategy(generation_mode=mode), api, session, some)
    assert len(operations) > 3


def _ask(cases: st.SearchStrategy[Any], api: Visit, session: requests.Session, some: settings) -> None:
    @some
    @given(case=cases)
    def play(case: Any) -> None:
        answer = case.call(base_url=f"http://127.0.0.1:{api.port}", session=session, timeout=30)
        case.validate_response(answer, checks=CHECKS)
        assert len(answer.content) <= LARGEST_ANSWER, case.as_curl_command()

    play()


def test_no_parameter_is_an_error_of_the_server(api: Visit) -> None:
    """Each parameter by itself, in otherwise good requests."""
    texts = NASTY_TEXTS[: examples(4, thorough=len(NASTY_TEXTS))]
    asked = 0
    for path, operations in api.get("/api/openapi.json").json["paths"].items():
        needed = [item for item in operations.get("get", {}).get("parameters", []) if item["in"] == "query"]
        usual = {
            item["name"]: "orders" if item["name"] == "domain" else "good" for item in needed if item["required"]
        }
        for name, text in itertools.product([item["name"] for item in needed], texts):
            answer = api.get(path, **{**usual, name: text})
            assert answer.status < 500, (path, name, text, answer.text)
            assert len(answer.text) <= LARGEST_ANSWER
            asked += 1
    assert asked > 100


def test_no_action_is_an_error_of_the_server(api: Visit) -> None:
    """Whatever its fields say: it is done, or refused with a sentence."""
    paths = api.get("/api/openapi.json").json["paths"]
    for name, action in ACTIONS.items():
        described = paths[f"/api/actions/{name}"]["post"]
        _act(name, [field.rstrip("?") for field in action.fields], api, set(described["responses"]))


def _act(name: str, fields: list[str], api: Visit, statuses: set[str]) -> None:
    @SOME
    @given(given=st.fixed_dictionaries({}, optional=dict.fromkeys(fields, KNOWN | NASTY)), reason=NASTY)
    def play(given: dict[str, str], reason: str) -> None:
        answer = api.post_json(f"/api/actions/{name}", {"fields": given, "reason": reason})
        assert answer.status < 500, (name, given, reason, answer.text)
        assert str(answer.status) in statuses, (name, given, answer.status)
        assert answer.json.keys() == {"done" if answer.status == 200 else "error"}
        assert len(answer.text) < 10_000

    play()


def test_lists_leave_payloads_out_and_errors_are_sentences(bus: CommandBus, serve: Serve) -> None:
    visit = serve()
    bus.send("orders", "ship", {"long": "x" * 1_000_000}, command_id="long")
    answer = visit.get("/api/commands")
    assert answer.status == 200
    assert len(answer.text) < 2000
    assert len(visit.get("/api/command", domain="orders", id="long").text) > 1_000_000
    mistaken = visit.get("/api/nowhere")
    assert (mistaken.status, mistaken.json) == (404, {"error": "This console has no such page."})
    assert "<h1>Not Found</h1>" in visit.get("/nowhere").text


def test_an_answer_that_is_too_large_is_not_sent(
    bus: CommandBus, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("commandbus.web.app.LARGEST_ANSWER", 1_000_000)
    bus.send("orders", "ship", {"long": "x" * 1_000_000}, command_id="long")
    answer = serve().get("/api/command", domain="orders", id="long")
    assert answer.status == 400
    assert "at most 1000000 are sent: ask for fewer" in answer.json["error"]
