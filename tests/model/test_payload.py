"""JSON in and out: whatever JSON can say comes back as it was, and the rest is refused with its place."""

from __future__ import annotations

import json
import math
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commandbus.errors import InvalidCommandError
from commandbus.model import payload

_TEXT = st.text(st.characters(exclude_characters="\x00", exclude_categories=("Cs",)))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | _TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_TEXT, inner, max_size=4),
    max_leaves=12,
)


@given(JSON)
def test_all_json_round_trips(value: Any) -> None:
    text = payload.dump(value, what="data")
    assert payload.loads(text) == value
    assert json.dumps(payload.loads(text), sort_keys=True) == json.dumps(value, sort_keys=True)
    text.encode()


@given(JSON)
def test_the_text_is_compact_and_one_line(value: Any) -> None:
    text = payload.dump(value, what="data")
    assert "\n" not in text
    assert len(text) <= len(json.dumps(value, ensure_ascii=True))


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ("\x00", r"at \$,"),
        ({"a": ["b", "c\x00d"]}, r"at \$\.a\[1\],"),
        ({"a\x00": 1}, r"at \$ \(key\),"),
        ({"x": {"y\x00": 1}}, r"at \$\.x \(key\),"),
    ],
)
def test_nul_is_refused_with_its_place(value: Any, place: str) -> None:
    with pytest.raises(InvalidCommandError, match=f"data contains a NUL character {place}") as caught:
        payload.dump(value, what="data")
    assert "\x00" not in str(caught.value)


def test_what_only_looks_like_a_nul_passes() -> None:
    text = payload.dump("\\u0000", what="data")
    assert payload.loads(text) == "\\u0000"


@pytest.mark.parametrize("value", ["\ud800", {"a": "x\udfff"}, {"\ud83d": 1}, ["ok", "\udc00\ud800"]])
def test_lone_surrogates_are_refused(value: Any) -> None:
    with pytest.raises(InvalidCommandError, match="lone surrogate") as caught:
        payload.dump(value, what="headers")
    str(caught.value).encode()


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_has_no_word_for_are_refused_with_their_place(number: float) -> None:
    with pytest.raises(InvalidCommandError, match=r"data is not JSON: .*\(at \$\.prices\[1\]: float\)"):
        payload.dump({"prices": [1.0, number]}, what="data")


@pytest.mark.parametrize(
    ("leaf", "kind"),
    [
        (Decimal("NaN"), "Decimal"),
        (b"bytes", "bytes"),
        ({1, 2}, "set"),
        (object(), "object"),
        (1 + 2j, "complex"),
        (10**5000, "int"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_leaf_that_is_not_json_is_named(leaf: Any, kind: str) -> None:
    with pytest.raises(InvalidCommandError, match=rf"result is not JSON: .*\(at \$\.order\.lines\[2\]: {kind}\)"):
        payload.dump({"order": {"lines": [1, "two", leaf]}}, what="result")


def test_a_key_that_is_not_json_is_refused() -> None:
    with pytest.raises(InvalidCommandError, match="data is not JSON: keys must be"):
        payload.dump({("a", "b"): 1}, what="data")


def test_the_size_is_counted_in_bytes() -> None:
    assert payload.dump("x" * 98, what="data", max_bytes=100) == '"' + "x" * 98 + '"'
    with pytest.raises(InvalidCommandError, match="data is 101 bytes of JSON, over the limit of 100"):
        payload.dump("x" * 99, what="data", max_bytes=100)
    assert payload.dump("é" * 49, what="data", max_bytes=100)
    with pytest.raises(InvalidCommandError, match="data is 102 bytes"):
        payload.dump("é" * 50, what="data", max_bytes=100)
    with pytest.raises(InvalidCommandError, match=r"1048579 bytes .* COMMANDBUS_MAX_PAYLOAD_BYTES"):
        payload.dump("x" * (1024 * 1024 + 1), what="data")


def test_what_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(InvalidCommandError, match="data is not JSON"):
        payload.dump({"loop": loop}, what="data")


@pytest.mark.parametrize("leaf", [1, "\x00", b"x", math.nan])
def test_any_depth_is_dumped_or_refused_and_nothing_else(leaf: Any) -> None:
    """Every depth around the interpreter's limit: no step may be the first to run out of stack."""
    for depth in [*range(850, 1010), 20_000]:
        nested = leaf
        for _ in range(depth):
            nested = [nested]
        try:
            payload.dump(nested, what="data")
        except InvalidCommandError as error:
            assert str(error).startswith("data ")  # noqa: PT017 - both ends are right, at most one of them
        else:
            assert leaf == 1


@pytest.mark.parametrize("kind", ["list", "tuple", "dict", "mixed", "behind a wide one"])
def test_nesting_has_a_limit_that_no_stack_decides(kind: str) -> None:
    def nested(depth: int) -> object:
        value: Any = []
        for n in range(depth - 1):
            pair: dict[str, Any] = {"list": [value], "tuple": (value,), "dict": {"a]": value}}
            wide = [[]] * 3 + [value] + [{}] * 3
            value = pair.get(kind, wide if kind != "mixed" else [value] if n % 2 else {"[[": value})
        return value

    deepest = payload.MAX_NESTING
    text = payload.dump(nested(deepest), what="data")
    assert payload.dump(payload.loads(text), what="data") == text
    with pytest.raises(InvalidCommandError, match="data is nested more than 200 levels deep"):
        payload.dump(nested(deepest + 1), what="data")
    composed = {"event": "x", "result": nested(deepest)}
    assert payload.loads(payload.dump(composed, what="reply", max_bytes=payload.COMPOSED))


def test_what_only_looks_nested_passes() -> None:
    for value in ("[" * 1000, ["{" * 500] * 3, [[]] * 1000, [{"a": [1]}] * 1000, {"[" * 300: 1}):
        assert payload.loads(payload.dump(value, what="data")) == value


@given(st.text(st.characters(exclude_categories=())), st.integers(1, 50))
def test_cleaned_text_can_be_stored_and_is_bounded(text: str, longest: int) -> None:
    cleaned = payload.clean_text(text, longest=longest)
    cleaned.encode()
    assert "\x00" not in cleaned
    if len(text) <= longest and "\x00" not in text and not any(0xD800 <= ord(char) < 0xE000 for char in text):
        assert cleaned == text


def test_a_long_text_keeps_its_end() -> None:
    cleaned = payload.clean_text("x" * 100 + "the reason", longest=10)
    assert cleaned == "[… 100 characters left out]\nthe reason"


@given(_TEXT)
def test_a_quoted_text_is_a_json_string(text: str) -> None:
    assert json.loads(payload.quote(text)) == text


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({1: "a"}, "1 of type int at $"),
        ({"a": [{"b": {-1.5: 0}}]}, "-1.5 of type float at $.a[0].b"),
        ({"x": {True: 1}}, "True of type bool at $.x"),
        ({None: 1}, "None of type NoneType at $"),
        ([{"1": 1, 1: 2}], "1 of type int at $[0]"),
    ],
)
def test_a_key_that_is_not_text_is_refused_and_not_changed(value: Any, said: str) -> None:
    with pytest.raises(InvalidCommandError) as refused:
        payload.dump(value, what="data")
    assert f"data has a key that is not text ({said})" in str(refused.value)
    assert "str(key)" in str(refused.value)


@pytest.mark.parametrize(
    "value",
    [
        {"1": 1, "true": 2, "null": 3, "-1.5e3": 4},
        {"a": '"1":'},
        {"1": {"2": [{"3": None}]}},
        {"n": "x", "NaN": 1},
    ],
)
def test_text_that_looks_like_a_number_is_a_key(value: Any) -> None:
    assert payload.loads(payload.dump(value, what="data")) == value


@given(st.dictionaries(st.integers() | st.floats(allow_nan=False) | st.booleans() | st.none() | _TEXT, JSON))
def test_whatever_is_accepted_comes_back_with_its_keys(value: Any) -> None:
    if all(isinstance(key, str) for key in value):
        assert payload.loads(payload.dump(value, what="data")) == value
    else:
        with pytest.raises(InvalidCommandError):
            payload.dump(value, what="data")
