"""Names: what passes can stand in SQL unquoted; what does not is named in the error."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commandbus.errors import InvalidCommandError
from commandbus.model import names

HOSTILE = [
    "",
    " ",
    "Orders",
    "ORDERS",
    "1orders",
    "_orders",
    "orders-eu",
    "orders.eu",
    "orders eu",
    "orders\n",
    "orders\x00",
    'orders"',
    "orders'",
    "x; drop table commandbus.command",
    "x; drop table commandbus.command --",
    "pg_catalog.pg_class",
    "ordérs",
    "оrders",  # a Cyrillic o
    "orders\u200b",
    "x" * 38,
    "x" * 100_000,
    None,
    True,
    7,
    10**5000,
    1.5,
    b"orders",
    ["orders"],
    {"orders": 1},
]


class _Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize("domain", ["a", "orders", "orders_2", "a" * 37, "select", "user", "q__commands"])
def test_a_good_domain_is_returned_and_names_its_queue(domain: str) -> None:
    assert names.check_domain(domain) == domain
    assert names.queue_of(domain) == f"{domain}__commands"
    assert len(names.queue_of(domain)) <= names.MAX_QUEUE_LENGTH
    assert names.check_queue(names.queue_of(domain)) == names.queue_of(domain)


@pytest.mark.parametrize("domain", HOSTILE, ids=lambda value: repr(value)[:30] if value != 10**5000 else "huge")
def test_a_hostile_domain_is_refused_in_one_short_line(domain: object) -> None:
    with pytest.raises(InvalidCommandError) as caught:
        names.check_domain(domain)
    said = str(caught.value)
    assert said.startswith("domain ")
    assert "lower-case" in said
    assert len(said) < 400
    assert "\n" not in said
    assert "\x00" not in said
    for check in (names.queue_of, names.check_queue):
        if isinstance(domain, str) and 37 < len(domain) <= 47 and check is names.check_queue:
            continue
        with pytest.raises(InvalidCommandError):
            check(domain)


def test_upper_case_gets_a_hint() -> None:
    with pytest.raises(InvalidCommandError, match="did you mean 'orders'"):
        names.check_domain("Orders")


def test_a_value_without_a_repr_is_refused_all_the_same() -> None:
    for check in (names.check_domain, names.check_queue, names.check_type, names.check_id):
        with pytest.raises(InvalidCommandError):
            check(_Unprintable())


@given(st.text(max_size=60))
def test_only_the_documented_alphabet_passes(text: str) -> None:
    documented = re.fullmatch(r"[a-z][a-z0-9_]{0,36}", text, re.ASCII) is not None and not text.endswith("\n")
    try:
        names.check_domain(text)
        passed = True
    except InvalidCommandError:
        passed = False
    assert passed == documented


def test_queue_names_have_47_characters_and_say_what_they_are() -> None:
    assert names.check_queue("r" * 47) == "r" * 47
    with pytest.raises(InvalidCommandError, match="reply_to"):
        names.check_queue("r" * 48)
    with pytest.raises(InvalidCommandError, match=r"^queue 'R'"):
        names.check_queue("R", what="queue")


@pytest.mark.parametrize(
    ("check", "longest"), [(names.check_type, names.MAX_TYPE_LENGTH), (names.check_id, names.MAX_ID_LENGTH)]
)
def test_types_and_ids_are_printable_text_of_a_length(check: object, longest: int) -> None:
    assert callable(check)
    for good in ("x", "x" * longest, "Ship Order", "naïve ☃ 日本", "o'brien; drop table", "%s %(x)s {}"):
        assert check(good) == good
    for bad in ("", "x" * (longest + 1), "a\x00b", "a\nb", "a\x7fb", "a\ud800b", None, 5, True, b"x", ["x"]):
        with pytest.raises(InvalidCommandError, match="control characters"):
            check(bad)


@given(st.text())
def test_whatever_text_comes_as_an_id_it_is_returned_or_refused(text: str) -> None:
    try:
        found = names.check_id(text)
    except InvalidCommandError:
        return
    assert found is text
    text.encode()
    assert "\x00" not in text
