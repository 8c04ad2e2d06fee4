"""docs/guide/metrics.md names every metric that is exported, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from commandbus.model.attempt_counts import OUTCOMES
from support.metric_names import exported

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "metrics.md"


def test_the_page_names_what_is_exported() -> None:
    assert set(re.findall(r"`(commandbus_[a-z_]+)`", PAGE.read_text())) == set(exported())


def test_the_page_names_every_outcome() -> None:
    (sentence,) = re.findall(r"^`outcome` is.*?\n\n", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert set(re.findall(r"`([a-z_]+)`", sentence)) - {"outcome"} == set(OUTCOMES)
