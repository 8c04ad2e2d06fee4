"""deploy/ is right: its limits are in order with our defaults, and both service managers would accept it."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from commandbus.cli.doctor.unit import parse_span, read_unit
from commandbus.settings import SETTINGS, load_settings
from commandbus.supervisor.supervisor import STOP_RESERVE
from commandbus.worker.runtime import SETTLE_RESERVE_SECONDS

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
UNIT = DEPLOY / "commandbus-worker.service"
MANIFEST = DEPLOY / "kubernetes.yaml"
README = (DEPLOY / "README.md").read_text("utf-8")
DEFAULTS = load_settings(environ={}, directory=Path("/"))


@pytest.fixture
def service() -> dict[str, str]:
    """The last value of each key of [Service]."""
    return {key: values[-1] for key, values in read_unit(UNIT.read_text("utf-8"))["Service"].items() if values}


@pytest.fixture
def manifest() -> Any:
    return yaml.safe_load(MANIFEST.read_text("utf-8"))


@pytest.fixture
def pod(manifest: Any) -> Any:
    return manifest["spec"]["template"]["spec"]


@pytest.fixture
def container(pod: Any) -> Any:
    (found,) = pod["containers"]
    return found


def environment(pairs: dict[str, str], folder: Path) -> Any:
    """The settings of a worker with this environment; every variable must be one of ours."""
    assert set(pairs) <= {setting.env for setting in SETTINGS.values()}
    settings = load_settings(environ=pairs, directory=folder)
    assert settings.warnings == ()
    return settings


@pytest.fixture
def unit_settings(tmp_path: Path) -> Any:
    values = read_unit(UNIT.read_text("utf-8"))["Service"]["Environment"]
    return environment(dict(word.split("=", 1) for value in values for word in shlex.split(value)), tmp_path)


@pytest.fixture
def pod_settings(container: Any, tmp_path: Path) -> Any:
    return environment({item["name"]: item["value"] for item in container["env"] if "value" in item}, tmp_path)


def megabytes(text: str) -> int:
    match = re.fullmatch(r"(\d+)([MG])i?", text)
    assert match
    return int(match[1]) * {"M": 1, "G": 1024}[match[2]]


# --- the order of the limits -----------------------------------------------------------------------------------


def test_the_units_limits_are_in_order(service: dict[str, str], unit_settings: Any) -> None:
    for settings in (DEFAULTS, unit_settings):
        assert settings.cancel_grace < settings.shutdown_timeout < parse_span(service["TimeoutStopSec"], "")
        assert settings.heartbeat_timeout < parse_span(service["WatchdogSec"], "")
    workers = 2 * unit_settings.processes * unit_settings.max_memory_mb
    assert workers < megabytes(service["MemoryMax"])


def test_the_manifests_limits_are_in_order(pod: Any, container: Any, pod_settings: Any) -> None:
    liveness = container["livenessProbe"]
    for settings in (DEFAULTS, pod_settings):
        assert settings.cancel_grace < settings.shutdown_timeout < pod["terminationGracePeriodSeconds"]
        assert settings.heartbeat_timeout < liveness["periodSeconds"] * liveness["failureThreshold"]
    workers = 2 * pod_settings.processes * pod_settings.max_memory_mb
    assert workers < megabytes(container["resources"]["limits"]["memory"])


def test_limits_that_are_spelt_out_are_the_defaults(unit_settings: Any, pod_settings: Any) -> None:
    for settings in (unit_settings, pod_settings):
        assert settings.timeouts == DEFAULTS.timeouts


# --- systemd -----------------------------------------------------------------------------------------------------


def test_the_unit_says_what_a_supervisor_needs(service: dict[str, str]) -> None:
    assert service["Type"] == "notify"
    assert service["NotifyAccess"] == "main"
    assert service["KillMode"] == "mixed"
    assert service["Restart"] == "always"
    assert service["OOMPolicy"] == "continue"
    assert service["ExecReload"] == "/bin/kill -HUP $MAINPID"
    assert service["ExecStart"].endswith("/python -m commandbus.worker")
    assert "MemoryDenyWriteExecute" not in service


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    program = analyzer()
    # Only what differs from machine to machine is replaced: the path of Python.
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text("utf-8").replace("/opt/app/venv/bin/python", os.path.realpath(sys.executable)))
    done = verified(program, copy)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    copy.write_text(copy.read_text("utf-8").replace("KillMode=mixed", "KillMode=gently"))
    assert "gently" in verified(program, copy).stderr, "it would have told"


def analyzer() -> str:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd-analyze is not installed")
    said = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60, check=True).stdout
    if int(said.split()[1]) < 250:
        pytest.skip("systemd-analyze older than 250 judges other units of the machine too")
    return program


def verified(program: str, unit: Path) -> subprocess.CompletedProcess[str]:
    command = [program, "verify", "--man=no", "--recursive-errors=no", str(unit)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_hardening_allows_what_workers_do(service: dict[str, str]) -> None:
    program = analyzer()
    assert service["SystemCallFilter"] == "@system-service"
    allowed = allowed_calls(program, "@system-service")
    assert {"memfd_create", "prctl", "mmap", "kill", "execve", "clone", "wait4", "socket"} <= allowed
    assert {"AF_UNIX", "AF_INET", "AF_INET6"} == set(service["RestrictAddressFamilies"].split())


def allowed_calls(program: str, group: str) -> set[str]:
    text = subprocess.run(
        [program, "syscall-filter", group], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    found = {line.strip() for line in text.splitlines()[1:] if line.strip() and not line.strip().startswith("#")}
    groups = {name for name in found if name.startswith("@")}
    return (found - groups).union(*(allowed_calls(program, name) for name in groups))


# --- Kubernetes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["1.25", "1.29", "latest"])
def test_the_manifest_fits_the_schema(manifest: Any, version: str) -> None:
    import kubernetes_validate  # takes seconds, which every test worker would pay as it collects

    if version == "latest":
        version = kubernetes_validate.latest_version()
    kubernetes_validate.validate(manifest, version, strict=True)
    manifest["spec"]["template"]["spec"]["terminationGracePeriodSecond"] = 45
    with pytest.raises(kubernetes_validate.ValidationError, match="terminationGracePeriodSecond"):
        kubernetes_validate.validate(manifest, version, strict=True)


def test_the_probes_ask_where_the_supervisor_answers(container: Any, pod_settings: Any) -> None:
    (port,) = container["ports"]
    assert port == {"name": "health", "containerPort": 8080}
    assert (pod_settings.health_port, pod_settings.health_host) == (8080, "0.0.0.0")
    paths = {name: container[name]["httpGet"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert paths == {
        "startupProbe": {"path": "/health/live", "port": "health"},
        "livenessProbe": {"path": "/health/live", "port": "health"},
        "readinessProbe": {"path": "/health/ready", "port": "health"},
    }


def test_the_pod_is_nobody_special(pod: Any, container: Any, manifest: Any) -> None:
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    (url,) = [item for item in container["env"] if item["name"] == "COMMANDBUS_DATABASE_URL"]
    assert "secretKeyRef" in url["valueFrom"]
    labels = manifest["spec"]["template"]["metadata"]["labels"].items()
    assert manifest["spec"]["selector"]["matchLabels"].items() <= labels


# --- the page ----------------------------------------------------------------------------------------------------


def test_the_page_names_the_values_of_the_files(service: dict[str, str], pod: Any) -> None:
    for name in (
        "statement_timeout",
        "visibility_timeout",
        "cancel_grace",
        "shutdown_timeout",
        "heartbeat_timeout",
    ):
        assert f"`{name}` {getattr(DEFAULTS, name):g} s" in README
    for key in ("TimeoutStopSec", "WatchdogSec"):
        assert f"`{key}` {service[key]} s" in README
    assert f"`terminationGracePeriodSeconds` {pod['terminationGracePeriodSeconds']} s" in README


def test_every_file_and_variable_that_the_page_names_exists() -> None:
    for name in re.findall(r"`([\w-]+\.(?:service|yaml))`", README):
        assert (DEPLOY / name).exists()
    known = {setting.env for setting in SETTINGS.values()}
    assert set(re.findall(r"`((?:WORKER|COMMANDBUS)_[A-Z_]+)`", README)) <= known


def test_when_attempts_are_canceled_is_what_supervisor_and_worker_keep_in_reserve() -> None:
    assert f"`cancel_grace` + {STOP_RESERVE + SETTLE_RESERVE_SECONDS:g} s before the end" in README
    assert f"a supervisor: + {SETTLE_RESERVE_SECONDS:g} s" in README.replace("\n", " ")
