"""The doctor looks at a systemd unit and at a Kubernetes manifest; a finding names both values and a remedy."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import yaml

from commandbus.cli.doctor import manifest, unit
from commandbus.cli.exit_codes import ExitCode
from commandbus.settings import load_settings

DEPLOY = Path(__file__).parents[2] / "deploy"
UNIT = (DEPLOY / "commandbus-worker.service").read_text("utf-8")
MANIFEST = (DEPLOY / "kubernetes.yaml").read_text("utf-8")
NOWHERE = "postgresql://a@127.0.0.1:1/a"


@pytest.fixture
def settings(tmp_path):
    return load_settings(environ={}, directory=tmp_path)


def changed(text, **keys):
    """The unit with other values; None takes a key out."""
    for key, value in keys.items():
        text = re.sub(rf"(?m)^{key}=.*\n", "" if value is None else f"{key}={value}\n", text)
        assert value is None or f"{key}={value}\n" in text
    return text


def told(findings, level):
    return [f"{item.message} → {item.remedy}" for item in findings if item.level == level]


# --- systemd ---------------------------------------------------------------------------------------------------


def test_our_own_unit_is_in_order(settings):
    found = list(unit.examine(UNIT, settings))
    assert told(found, "WARN") + told(found, "FAIL") == []
    assert [item.message for item in found] == [
        "shutdown_timeout (30s, from the unit) < TimeoutStopSec (40s)",
        "heartbeat_timeout (15s, from the unit) < WatchdogSec (30s)",
    ]


@pytest.mark.parametrize("text", ["30", "30s", "29s 999ms", "500ms", "0.5min"])
def test_a_stop_timeout_that_is_too_short_fails(settings, text):
    (finding,) = told(unit.examine(changed(UNIT, TimeoutStopSec=text), settings), "FAIL")
    assert "TimeoutStopSec (" in finding
    assert "is not more than shutdown_timeout (30s, from the unit)" in finding
    assert "set TimeoutStopSec=40" in finding
    assert "WORKER_SHUTDOWN_TIMEOUT" in finding


@pytest.mark.parametrize("text", ["30s 1ms", "1min", "infinity", "0", "2h 5min"])
def test_a_stop_timeout_that_is_longer_is_fine(settings, text):
    assert told(unit.examine(changed(UNIT, TimeoutStopSec=text), settings), "FAIL") == []


def test_without_a_stop_timeout_the_default_of_systemd_counts(settings):
    without = changed(UNIT, TimeoutStopSec=None)
    assert "TimeoutStopSec (1m30s, the default of systemd)" in "\n".join(
        told(unit.examine(without, settings), "OK")
    )
    longer = without.replace("WORKER_SHUTDOWN_TIMEOUT=30s", "WORKER_SHUTDOWN_TIMEOUT=2m")
    (finding,) = told(unit.examine(longer, settings), "FAIL")
    assert "shutdown_timeout (2m, from the unit)" in finding
    assert "set TimeoutStopSec=130" in finding


def test_timeout_sec_is_both_and_the_last_one_counts(settings):
    with_both = changed(UNIT, TimeoutStopSec=None).replace(
        "[Install]", "TimeoutStopSec=40\nTimeoutSec=20\n[Install]"
    )
    assert "TimeoutStopSec (20s)" in told(unit.examine(with_both, settings), "FAIL")[0]
    drop_in = UNIT + "\n# /etc/systemd/system/x.service.d/override.conf\n[Service]\nTimeoutStopSec=10s\n"
    assert "TimeoutStopSec (10s)" in told(unit.examine(drop_in, settings), "FAIL")[0]


@pytest.mark.parametrize(
    "setting",
    [
        'Environment="WORKER_SHUTDOWN_TIMEOUT=50s" WORKER_X=1',
        "Environment=A=1 \\\n  WORKER_SHUTDOWN_TIMEOUT=50",
        "ExecStart=\nExecStart=/usr/bin/commandbus worker app:handlers --shutdown-timeout 50s",
        "ExecStart=\nExecStart=/usr/bin/commandbus worker app:handlers --shutdown-timeout=50s",
    ],
)
def test_what_the_unit_sets_itself_counts(settings, setting):
    (finding,) = told(unit.examine(UNIT.replace("[Install]", f"{setting}\n[Install]"), settings), "FAIL")
    assert "shutdown_timeout (50s, from the unit)" in finding


def test_a_file_with_variables_counts_where_it_can_be_read(settings, tmp_path):
    file = tmp_path / "worker.env"
    file.write_text(
        "# no\nWORKER_SHUTDOWN_TIMEOUT='50s'\n; no\nCOMMANDBUS_DATABASE_URL=postgresql://a:secret@b/c\n"
    )
    text = changed(UNIT, EnvironmentFile=f"-{file}")
    (finding,) = told(unit.examine(text, settings), "FAIL")
    assert "50s" in finding
    assert "secret" not in finding


@pytest.mark.parametrize(
    ("keys", "level", "said"),
    [
        ({"WatchdogSec": "15"}, "WARN", ["WatchdogSec (15s)", "heartbeat_timeout (15s", "set WatchdogSec=25"]),
        ({"Type": "simple"}, "WARN", ["WatchdogSec=30 with Type=simple", "set Type=notify"]),
        ({"Type": "forking"}, "FAIL", ["Type=forking", "set Type=notify"]),
        ({"NotifyAccess": "none"}, "FAIL", ["NotifyAccess=none", "WatchdogSec=30", "set NotifyAccess=main"]),
        ({"WatchdogSec": None}, "WARN", ["WatchdogSec is off", "set Type=notify and WatchdogSec=25"]),
        ({"WatchdogSec": "0"}, "WARN", ["WatchdogSec is off"]),
        ({"KillMode": None}, "WARN", ["KillMode=control-group", "set KillMode=mixed"]),
        ({"KillMode": "process"}, "WARN", ["KillMode=process", "left running"]),
        ({"KillMode": "mixed\nKillSignal=SIGUSR1"}, "WARN", ["KillSignal=SIGUSR1", "SIGTERM"]),
        ({"Restart": None}, "WARN", ["Restart=no", "set Restart=always"]),
        ({"OOMPolicy": None}, "WARN", ["OOMPolicy=stop", "set OOMPolicy=continue"]),
        (
            {"MemoryMax": "400M"},
            "WARN",
            [
                "MemoryMax (400M)",
                "processes (2, from the unit)",
                "max_memory_mb (200,",
                "(1 + quarantine_processes (2))",
                "set MemoryMax=1600M",
            ],
        ),
        ({"TimeoutStopSec": "soon"}, "FAIL", ["TimeoutStopSec=soon is not a time span"]),
        ({"WatchdogSec": "3 moons"}, "FAIL", ["WatchdogSec=3 moons", "'moons'"]),
    ],
)
def test_what_is_wrong_in_a_unit_is_said_with_its_remedy(settings, keys, level, said):
    found = "\n".join(told(unit.examine(changed(UNIT, **keys), settings), level))
    assert [words for words in said if words not in found] == []


@pytest.mark.parametrize("text", ["", "[Unit]\nDescription=x\n", "[Service]\nType=notify\n", "\0\x01", "[Service"])
def test_a_text_that_is_no_unit_of_a_service_fails(settings, text):
    assert "ExecStart" in told(unit.examine(text, settings), "FAIL")[0]


@pytest.mark.parametrize(
    "setting",
    ["WORKER_SHUTDOWN_TIMEOUT=later", "WORKER_STATEMENT_TIMEOUT=60s", "WORKER_HEALTH_PORT=tcp://10.0.0.1:80"],
)
def test_settings_that_make_no_sense_there_fail(settings, setting):
    text = UNIT.replace("[Install]", f"Environment={setting}\n[Install]")
    (finding,) = told(unit.examine(text, settings), "FAIL")
    assert setting.partition("=")[0].removeprefix("WORKER_").lower() in finding.lower()


# --- Kubernetes --------------------------------------------------------------------------------------------------


def test_our_own_manifest_is_in_order(settings):
    found = list(manifest.examine(MANIFEST, settings))
    assert told(found, "WARN") + told(found, "FAIL") == []
    assert [item.message.partition(": ")[2] for item in found] == [
        "shutdown_timeout (30s, from its env) < terminationGracePeriodSeconds (45s)",
        "heartbeat_timeout (15s, from its env) < periodSeconds (10) × failureThreshold (3) of the livenessProbe",
    ]


def edited(change):
    document = yaml.safe_load(MANIFEST)
    pod = document["spec"]["template"]["spec"]
    change(pod, pod["containers"][0])
    return document


def without(key):
    return lambda pod, container: (pod if key in pod else container).pop(key)


def variable(name, value):
    def change(pod, container):
        container["env"] = [item for item in container["env"] if item["name"] != name]
        if value is not None:
            container["env"].append({"name": name, "value": value})

    return change


def at(path, value):
    def change(pod, container):
        target = pod if path[0] in pod else container
        for key in path[:-1]:
            target = target[key]
        target[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "level", "said"),
    [
        (
            at(["terminationGracePeriodSeconds"], 30),
            "FAIL",
            [
                "terminationGracePeriodSeconds (30s)",
                "shutdown_timeout (30s",
                "set terminationGracePeriodSeconds: 40",
            ],
        ),
        (
            without("terminationGracePeriodSeconds"),
            "FAIL",
            ["(30s, the default of Kubernetes)", "shutdown_timeout"],
        ),
        (variable("WORKER_SHUTDOWN_TIMEOUT", "1m"), "FAIL", ["(45s)", "shutdown_timeout (1m, from its env)"]),
        (at(["args"], ["--shutdown-timeout", "1m"]), "FAIL", ["(45s)", "shutdown_timeout (1m, from its env)"]),
        (without("livenessProbe"), "WARN", ["no livenessProbe", "/health/live"]),
        (without("readinessProbe"), "WARN", ["no readinessProbe", "/health/ready"]),
        (variable("WORKER_HEALTH_PORT", None), "FAIL", ["health_port is off", "set WORKER_HEALTH_PORT"]),
        (variable("WORKER_HEALTH_PORT", "9090"), "FAIL", ["asks port health", "health_port (9090, from its env)"]),
        (variable("WORKER_HEALTH_HOST", None), "FAIL", ["health_host (127.0.0.1)", "0.0.0.0"]),
        (at(["readinessProbe", "httpGet", "path"], "/ready"), "WARN", ["asks /ready, not /health/ready"]),
        (
            at(["livenessProbe", "failureThreshold"], 1),
            "WARN",
            ["periodSeconds (10) × failureThreshold (1)", "heartbeat_timeout (15s", "set failureThreshold: 3"],
        ),
        (
            at(["resources", "limits", "memory"], "400Mi"),
            "WARN",
            ["(400Mi)", "processes (2,", "max_memory_mb (200,", "(1 + quarantine_processes (2))", "1600Mi"],
        ),
        (variable("WORKER_STATEMENT_TIMEOUT", "60s"), "FAIL", ["statement_timeout", "visibility_timeout"]),
        (variable("WORKER_PROCESSES", "two"), "FAIL", ["its env sets WORKER_PROCESSES", "'two'"]),
    ],
)
@pytest.mark.parametrize("form", ["yaml", "json", "list"])
def test_what_is_wrong_in_a_manifest_is_said_with_its_remedy(settings, change, level, said, form):
    document = edited(change)
    text = yaml.safe_dump(document, width=10_000) if form == "yaml" else json.dumps(document)
    if form == "list":
        text = json.dumps({"kind": "List", "items": [{"kind": "Service", "spec": {}}, document]})
    found = "\n".join(told(manifest.examine(text, settings), level))
    assert [words for words in said if words not in found] == []
    assert "Deployment commandbus-worker" in found


def test_what_comes_from_elsewhere_is_no_failure(settings):
    def change(pod, container):
        variable("WORKER_HEALTH_PORT", None)(pod, container)
        container["envFrom"] = [{"configMapRef": {"name": "worker"}}]

    found = list(manifest.examine(yaml.safe_dump(edited(change)), settings))
    assert told(found, "FAIL") == []
    assert "health_port is off" in told(found, "WARN")[0]


@pytest.mark.parametrize(
    ("kind", "wrap"),
    [
        ("Pod", lambda pod: pod),
        ("StatefulSet", lambda pod: {"template": {"spec": pod}}),
        ("CronJob", lambda pod: {"jobTemplate": {"spec": {"template": {"spec": pod}}}}),
    ],
)
def test_workers_are_found_in_every_kind(settings, kind, wrap):
    pod = edited(without("terminationGracePeriodSeconds"))["spec"]["template"]["spec"]
    document = {"kind": kind, "metadata": {"name": "w"}, "spec": wrap(pod)}
    assert f"{kind} w: " in told(manifest.examine(yaml.safe_dump(document), settings), "FAIL")[0]


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", "5", "a: b", "kind: Pod\nspec:\n  containers:\n  - image: x\n", "---", "a: &x 1\nb: *x\n"],
)
def test_a_manifest_without_workers_fails(settings, text):
    (finding,) = told(manifest.examine(text, settings), "FAIL")
    assert "no container in it runs a worker" in finding


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a:\n  b: 1\n c: 2\n", "line 3 cannot be read: "),
        ("\tx: 1", "line 1 cannot be read: "),
        ("a: [1\n", "line 2 cannot be read: "),
        ("a: b: c", "line 1 cannot be read: mapping values are not allowed here"),
        ("a: !!python/object:os.system x", "line 1 cannot be read: could not determine a constructor"),
        ("a: 2026-99-99", "it cannot be read: month must be in 1..12"),
        ("[" * 3000, "it cannot be read: maximum recursion depth exceeded"),
        ("a: \x00", "it cannot be read: "),
    ],
)
def test_a_manifest_that_cannot_be_read_fails_and_says_how_else(settings, text, said):
    (finding,) = told(manifest.examine(text, settings), "FAIL")
    assert said in finding
    assert "-o json | commandbus doctor --manifest -" in finding


def test_without_pyyaml_only_json_is_read(settings, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    (finding,) = told(manifest.examine(MANIFEST, settings), "FAIL")
    assert "PyYAML, which reads YAML, is not installed: pip install 'commandbus-pg[kubernetes]'" in finding
    document = json.dumps(edited(without("terminationGracePeriodSeconds")))
    assert "Deployment commandbus-worker: " in told(manifest.examine(document, settings), "FAIL")[0]


# --- the command line --------------------------------------------------------------------------------------------


def test_both_options_at_once_and_standard_input(bare_cli, tmp_path):
    file = tmp_path / "short.service"
    file.write_text(changed(UNIT, TimeoutStopSec="20"))
    answer = bare_cli(
        "doctor", "--json", "--database", NOWHERE, "--unit", str(file), "--manifest", "-", stdin=MANIFEST
    )
    assert answer.code == ExitCode.NO
    checks = [(item["check"], item["level"]) for item in answer.document]
    assert checks.count(("systemd unit", "FAIL")) == 1
    assert checks.count(("kubernetes", "OK")) == 2
    assert checks.index(("systemd unit", "FAIL")) < checks.index(("server", "FAIL"))


def test_a_file_that_is_not_there_is_a_usage_error(bare_cli):
    answer = bare_cli("doctor", "--unit", "/nowhere/x.service")
    assert answer.code == ExitCode.USAGE
    assert "/nowhere/x.service" in answer.err


def test_a_file_that_is_no_text_is_a_finding(bare_cli, tmp_path):
    file = tmp_path / "x"
    file.write_bytes(bytes(range(256)))
    for option in ("--unit", "--manifest"):
        answer = bare_cli("doctor", "--json", "--database", NOWHERE, option, str(file))
        assert answer.code == ExitCode.NO
        assert answer.document
