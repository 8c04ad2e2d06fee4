"""Who gets in, as whom, and which changes are taken."""

from __future__ import annotations

import pytest
from starlette.requests import Request

from commandbus.errors import ConfigurationError
from commandbus.web.access import COOKIE, Access, Visitor, is_loopback, read_tokens

TOKENS = {"a" * 20: Visitor("ann", "operator"), "b" * 20: Visitor("bob", "reader")}


def request(**headers: str) -> Request:
    named = {"host": "127.0.0.1:8750", **{name.replace("_", "-"): value for name, value in headers.items()}}
    raw = [(name.encode(), value.encode("latin-1")) for name, value in named.items()]
    return Request({"type": "http", "method": "GET", "path": "/", "headers": raw, "query_string": b""})


@pytest.mark.parametrize("host", ["127.0.0.1:8750", "localhost", "[::1]:8750", "127.9.9.9"])
def test_without_tokens_this_machine_gets_in_as_an_operator(host: str) -> None:
    visitor = Access().visitor(request(host=host))
    assert visitor is not None
    assert visitor.may_act


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "192.168.0.1", "", "[::2]:80"])
def test_a_page_under_another_name_does_not_reach_this_machine(host: str) -> None:
    assert Access().visitor(request(host=host)) is None


def test_tokens_name_their_visitor_and_role() -> None:
    access = Access(tokens=TOKENS)
    ann = access.visitor(request(authorization=f"Bearer {'a' * 20}"))
    assert ann == Visitor("ann", "operator", is_program=True)
    bob = access.visitor(request(cookie=f"{COOKIE}={access.cookie_for('b' * 20)}"))
    assert bob == Visitor("bob", "reader")
    assert access.visitor(request()) is None
    assert access.visitor(request(authorization="Bearer wrong")) is None
    assert access.visitor(request(authorization=f"Basic {'a' * 20}")) is None


def test_a_cookie_cannot_be_made_without_the_tokens() -> None:
    access = Access(tokens=TOKENS)
    cookie = access.cookie_for("b" * 20)
    assert cookie is not None
    assert access.cookie_for("wrong") is None
    for forged in (cookie.replace(".bob", ".ann"), "ann", ".ann", "x" * 64 + ".ann", ""):
        assert access.visitor(request(cookie=f"{COOKIE}={forged}")) is None
    without_bob = Access(tokens={"a" * 20: TOKENS["a" * 20]})
    assert without_bob.visitor(request(cookie=f"{COOKIE}={cookie}")) is None  # bob's token was taken away


def test_a_name_may_have_any_letters() -> None:
    access = Access(tokens={"a" * 20: Visitor("Рома.%41", "reader"), "ä" * 20: Visitor("Zoë", "operator")})
    cookie = access.cookie_for("a" * 20)
    assert cookie is not None
    assert cookie.isascii()  # a header cannot carry it otherwise
    assert access.visitor(request(cookie=f"{COOKIE}={cookie}")) == Visitor("Рома.%41", "reader")
    sent = f"Bearer {'ä' * 20}".encode().decode("latin-1")  # as a server gives the bytes of a header
    assert access.visitor(request(authorization=sent)) == Visitor("Zoë", "operator", is_program=True)
    proxied = Access(user_header="X-User", operators={"Zoë"})
    assert proxied.visitor(request(x_user="Zoë".encode().decode("latin-1"))) == Visitor("Zoë", "operator")
    assert proxied.visitor(request(x_user="Zoë")) == Visitor("Zoë", "operator"), "a proxy that sends Latin-1"


def test_a_proxy_names_the_visitor() -> None:
    access = Access(user_header="X-User", operators={"ann"})
    assert access.visitor(request(x_user="ann")) == Visitor("ann", "operator")
    assert access.visitor(request(x_user="bob")) == Visitor("bob", "reader")
    for nobody in ("", "x" * 300, "a\x1bb"):
        assert access.visitor(request(x_user=nobody)) is None
    assert access.visitor(request()) is None


def test_a_change_must_come_from_a_page_of_ours() -> None:
    access, ann = Access(), Visitor("ann", "operator")
    mark = access.csrf_mark(ann)
    assert access.is_ours(request(), ann, mark)
    assert access.is_ours(request(origin="http://127.0.0.1:8750", sec_fetch_site="same-origin"), ann, mark)
    assert not access.is_ours(request(), ann, "")
    assert not access.is_ours(request(), ann, access.csrf_mark(Visitor("bob", "operator")))
    assert not access.is_ours(request(), ann, Access().csrf_mark(ann))  # of another console
    assert not access.is_ours(request(origin="http://evil.example"), ann, mark)
    assert not access.is_ours(request(sec_fetch_site="cross-site"), ann, mark)
    assert access.is_ours(request(), Visitor("ann", "operator", is_program=True), "")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("ann operator", "line 1 of tokens is not NAME ROLE TOKEN"),
        ("# nobody\n\nann chief aaaaaaaaaaaaaaaaaaaa", "line 3 of tokens is not NAME ROLE TOKEN"),
        ("ann reader aaaaaaaaaaaaaaaaaaaa\nann reader bbbbbbbbbbbbbbbbbbbb", "line 2 of tokens repeats a name"),
        ("ann reader aaaaaaaaaaaaaaaaaaaa\nbob reader aaaaaaaaaaaaaaaaaaaa", "line 2 of tokens repeats a name"),
        ("\n# only a comment\n", "tokens has no token"),
    ],
)
def test_tokens_that_cannot_be_read(text: str, why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        read_tokens(text, source="tokens")


def test_what_is_configured_wrongly() -> None:
    assert read_tokens("ann operator " + "a" * 20, source="f") == {"a" * 20: Visitor("ann", "operator")}
    with pytest.raises(ConfigurationError, match="the token of 'ann' has 5 characters; give it 16 or more"):
        Access(tokens={"short": Visitor("ann", "operator")})
    with pytest.raises(ConfigurationError, match="tokens or a proxy header, not both"):
        Access(tokens=TOKENS, user_header="X-User")


def test_loopback_addresses() -> None:
    assert [is_loopback(host) for host in ("localhost", "::1", "0.0.0.0", "a.b")] == [True, True, False, False]
