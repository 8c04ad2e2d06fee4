"""What is printed: aligned, escaped, and JSON that a program can rely on."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from commandbus.cli.parameters import parse_instant, parse_json
from commandbus.cli.render import age, print_fields, print_json, print_table, printable
from commandbus.cli.table import columns
from commandbus.model.command import AuditEntry, AuditEvent


def test_columns_are_aligned_and_numbers_stand_right(capsys):
    print_table(columns("name :count note"), [("a", 5, "x"), ("日本", 1234, None)])
    assert capsys.readouterr().out.splitlines() == [
        "NAME  COUNT  NOTE",
        "a         5  x",
        "日本   1234",
    ]


def test_an_empty_table_is_a_sentence(capsys):
    print_table(columns("name"), [], empty="nobody")
    assert capsys.readouterr().out == "nobody\n"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("a\nb\tc", "a\\nb\\tc"),
        ("\x1b[31mred\x07", "\\x1b[31mred\\x07"),
        ("\x9b31m", "\\x9b31m"),
        ("\u202egpj.exe", "\\u202egpj.exe"),
        ("\ud800", "\\ud800"),
        (True, "yes"),
        (None, ""),
        (["a", "b"], "a, b"),
        ({"a": 1}, '{"a": 1}'),
    ],
)
def test_nothing_from_a_database_can_write_to_a_terminal(value, shown):
    assert printable(value) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(None, ""), (-3, "0s"), (0.35, "350ms"), (12.34, "12.3s"), (250, "4m10s"), (11_100, "3h5m"), (1e6, "11d14h")],
)
def test_ages_are_rough(seconds, shown):
    assert age(seconds) == shown


def test_json_knows_our_types(capsys):
    at = datetime(2026, 1, 31, tzinfo=UTC)
    print_json([AuditEntry(AuditEvent.SENT, at), timedelta(seconds=2), Path("x"), {"b", "a"}])
    entry, *rest = json.loads(capsys.readouterr().out)
    assert entry == {
        "event": "SENT",
        "at": "2026-01-31T00:00:00+00:00",
        "attempt": None,
        "worker": None,
        "details": {},
    }
    assert rest == [2.0, "x", ["a", "b"]]


def test_fields_leave_out_what_is_none(capsys):
    print_fields({"a": 1, "long name": None, "b": "x"})
    assert capsys.readouterr().out == "a  1\nb  x\n"


@pytest.mark.parametrize("text", ["2026-01-31", "2026-01-31T09:30:00", "tomorrow", ""])
def test_an_instant_needs_a_time_zone(text):
    with pytest.raises(ValueError, match=r"time zone|not an instant"):
        parse_instant(text)


@pytest.mark.parametrize("text", ["{", "hello", "", "[" * 100_000])
def test_what_is_no_json_is_told(text):
    with pytest.raises(ValueError, match="not JSON"):
        parse_json(text)
