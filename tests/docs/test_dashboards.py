"""deploy/alerts.yaml and deploy/grafana.json load in their tools, and ask for metrics that there are."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from commandbus.model.attempt_counts import OUTCOMES
from support.metric_names import exported

DEPLOY = Path(__file__).parents[2] / "deploy"
ALERTS = DEPLOY / "alerts.yaml"
CASES = Path(__file__).parent / "alerts_test.yaml"
COLUMNS = 24
PARTS = re.compile(r"_(bucket|sum|count)$")
METRIC = re.compile(r"\bcommandbus_[a-z0-9_]+")


@pytest.fixture
def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not installed (Debian's package prometheus has it)")
    return found


@pytest.fixture
def dashboard() -> Any:
    return json.loads((DEPLOY / "grafana.json").read_text())


def run(*words: str, folder: Path) -> None:
    found = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr


def is_exported(name: str) -> bool:
    known = exported()
    return name in known or known.get(PARTS.sub("", name)) == "histogram"


def alert_expressions() -> dict[str, str]:
    return {rule["alert"]: rule["expr"] for group in yaml.safe_load(ALERTS.read_text())["groups"]
            for rule in group["rules"]}  # fmt: skip


def panels(dashboard: Any) -> Iterator[Any]:
    for panel in dashboard["panels"]:
        yield panel
        yield from panel.get("panels", ())


def expressions(dashboard: Any) -> dict[str, str]:
    return {f"{panel['title']} {target['refId']}": target["expr"] for panel in panels(dashboard)
            for target in panel.get("targets", ())}  # fmt: skip


def test_promtool_accepts_the_alerts_and_they_fire_when_they_should(promtool: str, tmp_path: Path) -> None:
    shutil.copy(ALERTS, tmp_path)
    shutil.copy(CASES, tmp_path)
    run(promtool, "check", "rules", ALERTS.name, folder=tmp_path)
    run(promtool, "test", "rules", CASES.name, folder=tmp_path)


def test_promtool_accepts_every_question_of_the_dashboard(promtool: str, dashboard: Any, tmp_path: Path) -> None:
    asked = {where: text.replace("$__rate_interval", "5m").replace("$domain", ".*")
             for where, text in expressions(dashboard).items()}  # fmt: skip
    rules = [{"record": f"panel:{number}", "expr": text} for number, text in enumerate(asked.values())]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    run(promtool, "check", "rules", "rules.yaml", folder=tmp_path)


def test_every_metric_that_they_name_is_exported(dashboard: Any) -> None:
    for where, text in {**alert_expressions(), **expressions(dashboard)}.items():
        names = METRIC.findall(text)
        assert names, where
        assert [name for name in names if not is_exported(name)] == [], where
    variables = [item["definition"] for item in dashboard["templating"]["list"] if "definition" in item]
    assert all(is_exported(name) for text in variables for name in METRIC.findall(text))


def test_every_outcome_that_they_name_exists(dashboard: Any) -> None:
    for where, text in {**alert_expressions(), **expressions(dashboard)}.items():
        for choice in re.findall(r'outcome[=!]~?"([^"]+)"', text):
            assert set(choice.split("|")) <= set(OUTCOMES), where


def test_every_alert_says_what_to_do() -> None:
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        for rule in group["rules"]:
            assert rule["labels"]["severity"] in ("page", "ticket"), rule["alert"]
            assert rule["annotations"]["description"].endswith("."), rule["alert"]


def test_the_dashboard_has_the_form_that_grafana_reads(dashboard: Any) -> None:
    assert {"title", "uid", "schemaVersion", "panels", "templating", "time"} <= set(dashboard)
    ids = [panel["id"] for panel in panels(dashboard)]
    assert len(ids) == len(set(ids))
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        assert set(place) == {"h", "w", "x", "y"}, panel["title"]
        assert 0 <= place["x"] < place["x"] + place["w"] <= COLUMNS, panel["title"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"])
                 for y in range(place["y"], place["y"] + place["h"])}  # fmt: skip
        assert not cells & taken, f"{panel['title']} lies on another panel"
        taken |= cells
        if panel["type"] == "row":
            continue
        assert panel["type"] in ("timeseries", "stat"), panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert panel["fieldConfig"]["defaults"]["unit"] in ("short", "s", "ops", "bytes"), panel["title"]
        assert [target["refId"] for target in panel["targets"]] == [
            chr(65 + number) for number in range(len(panel["targets"]))
        ]
    assert {item["name"] for item in dashboard["templating"]["list"]} == {"datasource", "domain"}
    assert "http://" not in json.dumps(dashboard)
