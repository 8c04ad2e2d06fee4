"""docs/guide/metrics.md names every metric that is exported, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from commandbus.model.attempt_counts import OUTCOMES
from commandbus.supervisor.view import View, metrics

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "metrics.md"


def exported() -> set[str]:
    return {
        f"{family.name}_total" if family.type == "counter" else family.name
        for family in text_string_to_metric_families(metrics(View(1.0, "RUNNING")))
    }


def test_the_page_names_what_is_exported() -> None:
    assert set(re.findall(r"`(commandbus_[a-z_]+)`", PAGE.read_text())) == exported()


def test_the_page_names_every_outcome() -> None:
    (sentence,) = re.findall(r"^`outcome` is.*?\n\n", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert set(re.findall(r"`([a-z_]+)`", sentence)) - {"outcome"} == set(OUTCOMES)
