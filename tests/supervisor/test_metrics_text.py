"""The metrics' text is what Prometheus reads: checked with its own parser."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from commandbus.supervisor.metrics import COUNTER, GAUGE, Metric, MetricKind, Sample, render

texts = st.text(st.characters(exclude_categories=["Cs"]))
numbers = st.floats(allow_nan=False) | st.integers(-(2**60), 2**60).map(float)


def parsed(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_scrape_reads_as_expected() -> None:
    text = render(
        [
            Metric("commandbus_slots", GAUGE, "Slots of a worker", [Sample(4, {"worker": "a"}), Sample(0.5)]),
            Metric("commandbus_settled_total", COUNTER, "Attempts settled", [Sample(12, {"a": "1", "b": "2"})]),
            Metric("commandbus_nothing", GAUGE, "Nothing yet", []),
        ]
    )
    assert text == (
        "# HELP commandbus_slots Slots of a worker\n"
        "# TYPE commandbus_slots gauge\n"
        'commandbus_slots{worker="a"} 4\n'
        "commandbus_slots 0.5\n"
        "# HELP commandbus_settled_total Attempts settled\n"
        "# TYPE commandbus_settled_total counter\n"
        'commandbus_settled_total{a="1",b="2"} 12\n'
        "# HELP commandbus_nothing Nothing yet\n"
        "# TYPE commandbus_nothing gauge\n"
    )


def test_nothing_is_an_empty_text() -> None:
    assert render([]) == ""


@given(texts, texts, numbers)
def test_any_text_and_any_number_come_back_from_prometheus_parser(label: str, about: str, value: float) -> None:
    # The parser, unlike Prometheus, takes every line break of Unicode for one, and trims.
    label, about = " ".join(label.split()), " ".join(about.split())
    text = render([Metric("commandbus_x", GAUGE, about, [Sample(value, {"name": label})])])
    assert parsed(text) == {("commandbus_x", frozenset({("name", label)})): value}


@pytest.mark.parametrize("label", ['say "no"', "a\\b", "two\nlines", "\\n", '\\"', "}", '{a="1"} 2', ""])
def test_labels_are_escaped(label: str) -> None:
    text = render([Metric("commandbus_x", GAUGE, "a\\b\nc", [Sample(1, {"name": label})])])
    assert parsed(text) == {("commandbus_x", frozenset({("name", label)})): 1.0}
    assert len(text.splitlines()) == 3


@pytest.mark.parametrize(
    ("value", "shown"),
    [(3, "3"), (3.0, "3"), (True, "1"), (0.1, "0.1"), (math.inf, "+Inf"), (-math.inf, "-Inf"), (math.nan, "NaN"),
     (1e300, "1e+300"), (-0.25, "-0.25")],
)  # fmt: skip
def test_numbers_are_shown_as_prometheus_reads_them(value: float, shown: str) -> None:
    assert render([Metric("commandbus_x", GAUGE, "x", [Sample(value)])]).split()[-1] == shown


@pytest.mark.parametrize(
    ("name", "kind", "samples", "told"),
    [
        ("slots", GAUGE, [], "commandbus_"),
        ("commandbus_Slots", GAUGE, [], "commandbus_Slots"),
        ("commandbus_a b", GAUGE, [], "commandbus_a b"),
        ("commandbus_", GAUGE, [], "commandbus_"),
        ("commandbus_settled", COUNTER, [], "_total"),
        ("commandbus_slots_total", GAUGE, [], "_total"),
        ("commandbus_x", GAUGE, [Sample(1, {"a-b": "1"})], "a-b"),
        ("commandbus_x", GAUGE, [Sample(1, {"__name__": "1"})], "__name__"),
        ("commandbus_x", GAUGE, [Sample(1, {"a": "1"}), Sample(2, {"a": "1"})], "two samples"),
    ],
)
def test_what_would_fail_the_whole_scrape_is_refused(
    name: str, kind: MetricKind, samples: list[Sample], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        Metric(name, kind, "x", samples)


def test_a_metric_given_twice_is_refused() -> None:
    metric = Metric("commandbus_x", GAUGE, "x", [])
    with pytest.raises(ValueError, match="twice"):
        render([metric, metric])
