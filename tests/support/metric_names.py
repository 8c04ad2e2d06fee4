"""The names of all metrics that commandbus exports."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from commandbus.supervisor.metrics import render
from commandbus.supervisor.view import View, metrics
from commandbus.web.metrics import _worker_metrics


def exported() -> dict[str, str]:
    """The type of each metric, by its name."""
    text = metrics(View(1.0, "RUNNING")) + render(_worker_metrics([]))
    return {
        f"{family.name}_total" if family.type == "counter" else family.name: family.type
        for family in text_string_to_metric_families(text)
    }
