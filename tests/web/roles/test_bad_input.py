"""A console under attack: bad input on every page and form, a database that is down, slow or not migrated. Every
answer is a sentence; none is an error of the server."""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import parse_qsl, quote, urlsplit

import psycopg
import pytest

from commandbus import Settings
from commandbus.web.access import Access, Visitor
from commandbus.web.actions import ACTIONS
from commandbus.web.app import LARGEST_FORM, MOST_FIELDS, create_console
from support.consoles import served
from support.databases import Databases
from web.conftest import Answer, Visit
from web.roles.role_consoles import Consoles, problem

pytestmark = [pytest.mark.slow, pytest.mark.shared_setup("consoles")]

NASTY = ["", "%00", "%ED%A0%80", "%FF", "-1", "99999999999999999999", "1e400", "x" * 3000, "%D9%A3", "' OR 1=1",
         "<script>", "..%2F..%2Fetc%2Fpasswd", "%E2%80%AE"]  # fmt: skip
NEEDS_NO_SCHEMA = {"/metrics", "/health/ready", "/api/actions", "/database", "/api/database"}
TEXT = re.compile(r"Traceback|Internal Server Error|psycopg|site-packages")


def is_sentence(answer: Answer) -> bool:
    """An answer that says what is wrong, in words for people."""
    text = problem(answer.text) if "<h1>" in answer.text else answer.text
    return answer.status < 500 and len(text) < 20_000 and not TEXT.search(text)


def nasty(addresses: list[str], parameters: dict[str, list[str]]) -> Iterator[str]:
    """Each address with each of its parameters bad, one at a time."""
    for address in addresses:
        path, given = urlsplit(address).path, dict(parse_qsl(urlsplit(address).query))
        for name in parameters.get(path, []):
            others = "".join(f"&{key}={quote(value)}" for key, value in given.items() if key != name)
            for value in NASTY:
                yield f"{path}?{name}={quote(value, safe='%')}{others}"
            yield f"{path}?{name}=a&{name}=b{others}"


def test_no_parameter_of_any_page_is_an_error_of_the_server(consoles: Consoles) -> None:
    visit = consoles.visits["operator"]
    once = {urlsplit(address).path: address for address in consoles.reads if not address.startswith("/api/")}
    wrong = []
    for address in nasty(list(once.values()), consoles.parameters):
        answer = visit.get(address)
        if answer.status >= 500 or (answer.status >= 400 and not is_sentence(answer)):
            wrong.append(f"{address[:120]}: {answer.status} {problem(answer.text)[:200]}")
    assert not wrong, "\n".join(wrong[:60])


def test_a_form_that_is_not_ours_does_nothing(consoles: Consoles) -> None:
    """Without the mark of the console's own form, with somebody else's, or from another page of the browser."""
    visit = consoles.visits["operator"]
    mark, before = visit.mark("/domains"), visit.get("/api/audit").text
    fields = {"domain": "orders", "command_type": "ship"}
    for given, headers in (
        (fields, {}),
        ({**fields, "mark": "0" * 64}, {}),
        ({**fields, "mark": ""}, {}),
        ({**fields, "mark": mark}, {"Origin": "http://evil.example"}),
        ({**fields, "mark": mark}, {"Sec_Fetch_Site": "cross-site"}),
    ):
        for name in ("pause", "cancel-batch", "rehearse", "nothing"):
            answer = visit.post(f"/actions/{name}", given, **headers)
            assert answer.status == 403, (name, given, headers)
            assert is_sentence(answer)
        answer = visit.post_json("/api/actions/pause", {"fields": fields}, **headers)
        assert (answer.status, list(answer.json)) == (403, ["error"])
    assert visit.get("/api/audit").text == before


def test_no_form_is_an_error_of_the_server(consoles: Consoles) -> None:
    visit = consoles.visits["operator"]
    mark = visit.mark("/domains")
    wrong = []
    for name, action in ACTIONS.items():
        fields = [field.rstrip("?") for field in action.fields]
        for bad in ("", "\x00", "\ud800", "-1", "9" * 30, "{", "x" * 3000, "nothing"):
            given = {"mark": mark, **dict.fromkeys(fields, bad)}
            body = {key: value.encode("utf-8", "surrogatepass") for key, value in given.items()}
            answer = visit.post(f"/actions/{name}", body)  # type: ignore[arg-type]
            if not 400 <= answer.status < 500 or not is_sentence(answer):
                wrong.append(f"{name} {bad[:20]!r}: {answer.status} {problem(answer.text)[:200]}")
    assert not wrong, "\n".join(wrong[:60])


def test_a_body_of_any_size_and_kind_is_answered(consoles: Consoles) -> None:
    visit = consoles.visits["operator"]
    mark = visit.mark("/domains")
    for body, kind in (
        (f"mark={mark}&" + "a=1&" * MOST_FIELDS, "application/x-www-form-urlencoded"),
        (f"mark={mark}&domain=" + "x" * LARGEST_FORM, "application/x-www-form-urlencoded"),
        ("%", "application/x-www-form-urlencoded"),
        ("\x00\x01", "multipart/form-data; boundary=x"),
        ("[]", "application/json"),
    ):
        for path in ("/actions/pause", "/sign-in", "/api/actions/pause", "/api/rehearse"):
            answer = visit._ask("POST", path, body, {"Content-Type": kind})
            assert 400 <= answer.status < 500, (path, body[:40], answer.status)
            assert is_sentence(answer), (path, answer.text[:300])
    for method in ("PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"):
        for path in ("/", "/api/commands", "/actions/pause"):
            answer = visit._ask(method, path, None, {})
            assert (answer.status, is_sentence(answer)) == (405, True), (method, path, answer.text[:200])


def test_a_reader_may_press_no_button(consoles: Consoles) -> None:
    token = "r" * 20
    access = Access(tokens={token: Visitor("rita", "reader")})
    app = create_console(Settings(database_url=consoles.url("operator")), access)
    with served(app) as port:
        reader, stranger = Visit(port, Authorization=f"Bearer {token}"), Visit(port)
        assert "/actions/" not in reader.get("/domains").text.replace('action="/sign-out"', "")
        for name in ACTIONS:
            assert reader.post_json(f"/api/actions/{name}", {"fields": {}}).status == 403
            assert stranger.post_json(f"/api/actions/{name}", {"fields": {}}).status == 401
            assert stranger.post(f"/actions/{name}", {}).status in (303, 401, 403)
        for address in consoles.reads:
            if not address.startswith("/health"):
                assert stranger.get(address).status in (303, 401), address


@pytest.mark.parametrize("state", ["down", "unmigrated", "slow"])
def test_a_database_that_cannot_answer_is_one_sentence(
    consoles: Consoles, databases: Databases, state: str
) -> None:
    url, words = consoles.database, "locked|two seconds"
    if state == "down":
        url, words = re.sub(r":\d+/", ":1/", url), "The database does not answer"
    elif state == "unmigrated":
        url, words = re.sub(r"/[^/]+$", "/template1", url), "commandbus migrate"
    with served(create_console(Settings(database_url=url))) as port, psycopg.connect(consoles.database) as other:
        visit = Visit(port)
        if state == "slow":
            other.execute("LOCK commandbus.domain, commandbus.command, commandbus.plan IN ACCESS EXCLUSIVE MODE")
        asked = consoles.reads if state != "slow" else ["/?", "/commands?", "/api/plans?"]
        wrong = []
        if state == "unmigrated":
            assert visit.get("/").status == 503  # so the page opens by itself after `commandbus migrate`
            assert "commandbus migrate" in visit.get("/health/ready").json["reason"]
        for address in asked:
            if address.partition("?")[0] in NEEDS_NO_SCHEMA:
                continue
            answer = visit.get(address)
            text = problem(answer.text)
            if not (400 <= answer.status < 500 or answer.status == 503) or not re.search(words, text):
                wrong.append(f"{address}: {answer.status} {text[:200]}")
    assert not wrong, "\n".join(wrong[:60])
