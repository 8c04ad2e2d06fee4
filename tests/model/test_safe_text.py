"""Text from outside: every character is seen, none does anything, and nothing else is changed."""

from __future__ import annotations

import json
import sys
import unicodedata

from hypothesis import example, given
from hypothesis import strategies as st

from commandbus.model.safe_text import block, escaped, escaped_json, escaped_lines, unescaped
from support.unsafe_text import is_unsafe

HOSTILE = (
    "\n2026-01-31T09:30:00.123Z ERROR fake\r\x1b[2J\x7f\x85\x9b31m\u202e\u2066\u200b\u061c\u2028\U000e0041\ud800"
)
any_text = st.text(st.characters(), max_size=60) | st.text(st.sampled_from(HOSTILE + "\\xu0nrt1b"), max_size=60)


def test_every_character_that_does_something_is_escaped_and_no_other():
    for code in range(sys.maxunicode + 1):
        char = chr(code)
        if is_unsafe(char):
            assert escaped(char).isascii(), hex(code)
        elif unicodedata.category(char) != "Cn":  # of a newer Unicode
            assert escaped(char) == char, hex(code)


def test_the_escapes_are_those_that_people_know():
    assert escaped("\x1b[0m\n\x85\u202e\U000e0041") == "\\x1b[0m\\n\\x85\\u202e\\U000e0041"
    assert escaped("Größe 日本 😀 C:\\temp") == "Größe 日本 😀 C:\\temp"


@given(any_text)
@example(HOSTILE)
def test_no_text_leaves_a_trace_of_what_it_could_do(text):
    assert not any(map(is_unsafe, escaped(text)))
    for line in [*escaped_lines(text), *block(text).split("\n")]:
        assert not any(map(is_unsafe, line))
    assert all(line.startswith("    ") for line in block(text).split("\n"))


@given(any_text)
def test_what_was_escaped_can_be_typed_again(text):
    if unescaped(text) == text:  # it holds nothing that looks like an escape itself
        assert unescaped(escaped(text)) == text


def test_an_escape_of_what_is_never_escaped_is_left_alone():
    assert (
        unescaped("\\x41 \\u00e4 \\U0010ffff \\Uffffffff \\q \\\\")
        == "\\x41 \\u00e4 \\U0010ffff \\Uffffffff \\q \\\\"
    )


@given(st.dictionaries(any_text, any_text, max_size=3))
@example({HOSTILE: HOSTILE})
def test_json_stays_the_same_value(value):
    document = escaped_json(json.dumps(value, ensure_ascii=False, indent=2))
    assert json.loads(document) == value
    assert not any(map(is_unsafe, document.replace("\n", "")))
    assert document.count("\n") == json.dumps(value, indent=2).count("\n")
