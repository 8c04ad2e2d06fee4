"""The doctor's YAML: it reads as PyYAML does, or says that it cannot; it never misreads."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from commandbus.cli.doctor.yaml_text import UnreadableError, read_documents

words = st.text("abz -:#'\",[]{}|>&*!%@\\01.~/=", max_size=10)
keys = st.text("abcZ_./-09", min_size=1, max_size=8)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | words,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=12,
)
names = st.from_regex(r"[a-z][a-zA-Z0-9]{0,7}", fullmatch=True).filter(
    lambda name: name not in ("true", "false", "null", "yes", "no", "on", "off", "y", "n")
)
tame = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(0, 9999)
    | names
    | st.sampled_from(["30s", "8080", "a: b", "x #y", "[1]", ""]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=4),
    max_leaves=20,
)


def by_pyyaml(text: str) -> list[Any]:
    return [document for document in yaml.safe_load_all(text) if document is not None]


@given(values, st.sampled_from([False, None, True]))
def test_nothing_is_misread(value: Any, flow: bool | None) -> None:
    text = yaml.safe_dump(value, default_flow_style=flow, width=10**6)
    try:
        found = read_documents(text)
    except UnreadableError:
        return
    assert found == by_pyyaml(text)


@given(tame, st.sampled_from([False, None]), st.integers(2, 4))
def test_what_manifests_are_made_of_is_read(value: Any, flow: bool | None, indent: int) -> None:
    text = yaml.safe_dump(value, default_flow_style=flow, width=10**6, indent=indent)
    assert read_documents(text) == by_pyyaml(text)


@pytest.mark.parametrize(
    "text",
    [
        "a: 1 # one\n# two\nb:\n  # three\n  - x # four\n\n  - 'it''s # five' # six\n",
        "a:\n- b: 1\n  c: 2\n-\n  d: 3\n- - e\n  - f\n",
        'a: ["x", y, \'z\', 1, {b: c, "d": [e]}]\nb: {}\nc: []\n',
        "a: |\n  line 1\n    line 2\n\n  line 3\nb: |-\n  x\nc: 1\n",
        "- |\n  a\n- b\n",
        "---\na: 1\n--- # two\nb: 2\n...\n",
        "a: http://x:80/y#z\nb: 10.0.0.1\nc: 1.5\nd: -7\ne: 007x\nf: a:b\n",
        '"quoted key": 1\n\'other\': "a\\tb\\u00e4"\napp.kubernetes.io/name: x\n',
        "a:\r\n  b: 1\r\n",
        "\ufeffa: 1\n",
        "a:\n  b:\n  c: null\n  d: ~\n",
    ],
)
def test_examples_are_read_as_pyyaml_reads_them(text: str) -> None:
    assert read_documents(text) == by_pyyaml(text)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a: 1\nb: &x 2\n", 2),
        ("a: *x\n", 1),
        ("a: !!str 1\n", 1),
        ("a: 1\n\n  b: 2\n", 3),
        ("a:\n  b: 1\n c: 2\n", 3),
        ("a: [1,\n  2]\n", 1),
        ("a: 'x\n  y'\n", 1),
        ("a: x\n  y\n", 2),
        ("a: 1\na: 2\n", 2),
        ("a: 1\n- b\n", 2),
        ("\ta: 1\n", 1),
        ("a: {b}\n", 1),
        ("a: [b] c\n", 1),
        ('a: "\\x41"\n', 1),
        ("a: don't # isn't\n", 1),
    ],
)
def test_what_is_not_read_names_its_line(text: str, line: int) -> None:
    with pytest.raises(UnreadableError, match=f"^line {line} cannot be read: "):
        read_documents(text)


@given(st.text())
def test_any_text_is_read_or_refused(text: str) -> None:
    with suppress(UnreadableError):
        assert isinstance(read_documents(text), list)
