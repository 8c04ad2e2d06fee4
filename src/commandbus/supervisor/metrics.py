"""Prometheus' text exposition format 0.0.4, written from plain data.

    render([Metric("commandbus_slots", GAUGE, "Slots of the worker", [Sample(4, {"worker": "a"})])])

It collects nothing and keeps nothing: the caller gives the values. A name that Prometheus would refuse raises
ValueError here, so that a typing mistake never makes a whole scrape fail. Any text may be a label's value.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from enum import StrEnum
from typing import Final

from commandbus.quick_dataclass import dataclass

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
PREFIX: Final = "commandbus_"

_NAME = re.compile(r"commandbus_[a-z0-9_]*[a-z0-9]")
_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
_HELP_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n"})
_LABEL_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


class MetricKind(StrEnum):
    """A counter only grows (and starts again from 0 with its process); a gauge is the current value; a histogram
    counts values in buckets."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


COUNTER: Final = MetricKind.COUNTER
GAUGE: Final = MetricKind.GAUGE
HISTOGRAM: Final = MetricKind.HISTOGRAM


@dataclass(frozen=True, slots=True)
class Sample:
    """One value, with the labels that distinguish it from the other values of its metric. `suffix` says which part
    of a histogram it is: _bucket, _sum or _count."""

    value: float
    labels: Mapping[str, str] = field(default_factory=dict)
    suffix: str = ""


@dataclass(frozen=True, slots=True)
class Metric:
    """A name, what it means, and its values now. It may have no samples, if there is nothing to count."""

    name: str
    kind: MetricKind
    help: str
    samples: Sequence[Sample]

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"metric {self.name!r}: a name is {PREFIX} and then lower-case letters, digits and _")
        if (self.kind is COUNTER) is not self.name.endswith("_total"):
            raise ValueError(
                f"metric {self.name!r} is a {self.kind}: names of counters, and no others, end in _total"
            )
        seen = set()
        for sample in self.samples:
            for label in sample.labels:
                if not _LABEL.fullmatch(label):
                    raise ValueError(f"metric {self.name!r}: {label!r} is not a label's name")
            key = (sample.suffix, frozenset(sample.labels.items()))
            if key in seen:
                raise ValueError(f"metric {self.name!r} has two samples with the labels {dict(sample.labels)}")
            seen.add(key)


def render(metrics: Iterable[Metric]) -> str:
    """The text of a scrape's answer. Raises ValueError if two metrics have the same name."""
    lines: list[str] = []
    names: set[str] = set()
    for metric in metrics:
        if metric.name in names:
            raise ValueError(f"metric {metric.name!r} is given twice")
        names.add(metric.name)
        lines.extend(_lines(metric))
    return "".join(f"{line}\n" for line in lines)


def _lines(metric: Metric) -> Iterator[str]:
    yield f"# HELP {metric.name} {metric.help.translate(_HELP_ESCAPES)}"
    yield f"# TYPE {metric.name} {metric.kind.value}"
    for sample in metric.samples:
        yield f"{metric.name}{sample.suffix}{_labels(sample.labels)} {_number(sample.value)}"


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    pairs = ",".join(f'{name}="{value.translate(_LABEL_ESCAPES)}"' for name, value in labels.items())
    return f"{{{pairs}}}"


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) and abs(value) < 2**53 else repr(float(value))
