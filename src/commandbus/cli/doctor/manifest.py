"""A Kubernetes manifest: do its timeouts and memory fit ours, and do its probes ask the right port and path?

It reads a file of one or more documents, or the output of `kubectl get … -o json`. It checks only containers that
run a worker: their command, arguments or environment name commandbus or WORKER_ variables. If a field is not set,
the default of Kubernetes counts. Values from a ConfigMap or a Secret cannot be read. A check that depends on them
says so, and does not fail.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any, Final

from commandbus.cli.doctor.findings import Findings, fail, ok, warn
from commandbus.cli.doctor.service import (
    as_seen_there,
    memory_advised,
    memory_needed,
    named,
    shown_memory,
    with_spare,
)
from commandbus.model.durations import format_seconds
from commandbus.quick_dataclass import dataclass
from commandbus.settings import Settings

CHECK: Final = "kubernetes"
DEFAULT_GRACE_SECONDS: Final = 30
PROBES: Final = {"livenessProbe": "/health/live", "readinessProbe": "/health/ready"}
_LOCAL: Final = ("127.0.0.1", "localhost", "::1")
_QUANTITIES: Final = {
    "": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12,
    "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class WorkerContainer:
    """A container that runs a worker, and the pod around it."""

    name: str
    pod: dict[str, Any]
    container: dict[str, Any]

    @property
    def words(self) -> list[str]:
        """Its command and arguments."""
        return [str(word) for key in ("command", "args") for word in _list(self.container.get(key))]

    @property
    def environ(self) -> dict[str, str]:
        """The variables whose values are in the manifest itself."""
        variables = [item for item in _list(self.container.get("env")) if isinstance(item, dict)]
        return {str(item.get("name")): str(item["value"]) for item in variables if item.get("value") is not None}

    def may_set(self, variable: str) -> bool:
        """Can this variable have a value that the manifest does not show?"""
        named_ones = [item.get("name") for item in _list(self.container.get("env")) if isinstance(item, dict)]
        return bool(self.container.get("envFrom")) or variable in named_ones


def examine(text: str, settings: Settings) -> Findings:
    """All findings about the workers in the text of a manifest."""
    try:
        found = list(_worker_containers(_read(text)))
    except UnreadableError as error:
        yield fail(
            CHECK,
            str(error),
            "give it as JSON: `kubectl create -f FILE --dry-run=client -o json | commandbus doctor --manifest -`",
        )
        return
    if not found:
        yield fail(
            CHECK,
            "no container in it runs a worker",
            "a worker's container has `-m commandbus.worker` or `commandbus worker` as its command, or WORKER_ "
            "variables in its env",
        )
    for worker in found:
        try:
            seen = as_seen_there(settings, worker.environ, worker.words, source="its env")
        except ValueError as error:
            yield fail(CHECK, f"{worker.name}: {error}", "correct it there")
            continue
        yield from _stop(worker, seen)
        yield from _probes(worker, seen)
        yield from _memory(worker, seen)


class UnreadableError(ValueError):
    """The text cannot be read; the message says why, and where."""


def _read(text: str) -> list[Any]:
    """All documents of the text, JSON or YAML."""
    try:
        return [json.loads(text)]
    except (ValueError, RecursionError):
        pass
    try:
        import yaml
    except ImportError:
        raise UnreadableError(
            "it is not JSON, and PyYAML, which reads YAML, is not installed: "
            "pip install 'commandbus-pg[kubernetes]'"
        ) from None
    try:
        return list(yaml.safe_load_all(text))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = "it" if mark is None else f"line {mark.line + 1}"
        raise UnreadableError(f"{where} cannot be read: {getattr(error, 'problem', None) or error}") from None
    except (ValueError, RecursionError) as error:  # an impossible date, or brackets nested too deeply
        raise UnreadableError(f"it cannot be read: {error}") from None


def _worker_containers(documents: list[Any]) -> Iterator[WorkerContainer]:
    for document in documents:
        if not isinstance(document, dict):
            continue
        if str(document.get("kind", "")).endswith("List"):
            yield from _worker_containers(_list(document.get("items")))
            continue
        name = f"{document.get('kind')} {_at(document, 'metadata', 'name')}"
        spec = _at(document, "spec")
        for path in (("jobTemplate", "spec", "template", "spec"), ("template", "spec"), ()):
            pod = _at(spec, *path)
            if isinstance(pod, dict) and isinstance(pod.get("containers"), list):
                for container in pod["containers"]:
                    worker = WorkerContainer(name, pod, container if isinstance(container, dict) else {})
                    if _runs_a_worker(worker):
                        yield worker


def _runs_a_worker(worker: WorkerContainer) -> bool:
    names = [str(item.get("name")) for item in _list(worker.container.get("env")) if isinstance(item, dict)]
    told = any("commandbus" in word for word in worker.words)
    return told or any(name.startswith("WORKER_") for name in names)


# --- the checks --------------------------------------------------------------------------------------------------


def _stop(worker: WorkerContainer, settings: Settings) -> Findings:
    field = worker.pod.get("terminationGracePeriodSeconds")
    limit = _number(field, DEFAULT_GRACE_SECONDS)
    origin = ", the default of Kubernetes" if field is None else ""
    shown = f"terminationGracePeriodSeconds ({format_seconds(limit)}{origin})"
    ours = named(settings, "shutdown_timeout")
    if limit <= settings.shutdown_timeout:
        yield fail(
            CHECK,
            f"{worker.name}: {shown} is not more than {ours}: the kubelet kills a worker that is still finishing "
            "its work",
            f"set terminationGracePeriodSeconds: {with_spare(settings.shutdown_timeout)}, or a shorter "
            "WORKER_SHUTDOWN_TIMEOUT",
        )
    else:
        yield ok(CHECK, f"{worker.name}: {ours} < {shown}")


def _probes(worker: WorkerContainer, settings: Settings) -> Findings:
    wanted = [name for name in (*PROBES, "startupProbe") if isinstance(_at(worker.container, name), dict)]
    for name, path in PROBES.items():
        if name not in wanted:
            yield warn(
                CHECK,
                f"{worker.name} has no {name}: Kubernetes does not see when its workers are "
                f"{'frozen' if name == 'livenessProbe' else 'cut off from the database'}",
                f"add a {name} with httpGet, path {path}",
            )
    asked = {name: get for name in wanted if isinstance(get := _at(worker.container, name, "httpGet"), dict)}
    if asked:
        yield from _listener(worker, settings)
    for name, get in asked.items():
        yield from _target(worker, settings, name, get)
    if "livenessProbe" in wanted:
        yield from _patience(worker, settings)


def _listener(worker: WorkerContainer, settings: Settings) -> Findings:
    """Does a server answer there, and can the kubelet reach it?"""
    if settings.health_port is None:
        finding = warn if worker.may_set("WORKER_HEALTH_PORT") else fail
        yield finding(
            CHECK,
            f"{worker.name} has probes, but health_port is off: nothing answers them",
            "set WORKER_HEALTH_PORT in its env",
        )
    elif settings.health_host in _LOCAL:
        finding = warn if worker.may_set("WORKER_HEALTH_HOST") else fail
        yield finding(
            CHECK,
            f"{worker.name} has probes, but {named(settings, 'health_host')} answers only inside the pod",
            "set WORKER_HEALTH_HOST to 0.0.0.0 in its env",
        )


def _target(worker: WorkerContainer, settings: Settings, probe: str, get: dict[str, Any]) -> Findings:
    port, path = get.get("port"), get.get("path")
    ports = [item for item in _list(worker.container.get("ports")) if isinstance(item, dict)]
    number = next((item.get("containerPort") for item in ports if item.get("name") == port), port)
    if settings.health_port is not None and str(number) != str(settings.health_port):
        yield fail(
            CHECK,
            f"{worker.name}: the {probe} asks port {port}, but {named(settings, 'health_port')} answers",
            "give both the same port",
        )
    right = PROBES.get(probe)
    if right is not None and path != right:
        yield warn(CHECK, f"{worker.name}: the {probe} asks {path}, not {right}", f"set its path to {right}")


def _patience(worker: WorkerContainer, settings: Settings) -> Findings:
    """The kubelet must not end the pod before the supervisor has replaced a frozen worker."""
    probe = worker.container["livenessProbe"]
    period, threshold = _number(probe.get("periodSeconds"), 10), _number(probe.get("failureThreshold"), 3)
    ours = named(settings, "heartbeat_timeout")
    shown = f"periodSeconds ({period:g}) × failureThreshold ({threshold:g}) of the livenessProbe"
    if period * threshold <= settings.heartbeat_timeout:
        yield warn(
            CHECK,
            f"{worker.name}: {shown} is not more than {ours}: the pod may be restarted when the supervisor would "
            "replace one frozen worker",
            f"set failureThreshold: {math.floor(with_spare(settings.heartbeat_timeout) / period) + 1}",
        )
    else:
        yield ok(CHECK, f"{worker.name}: {ours} < {shown}")


def _memory(worker: WorkerContainer, settings: Settings) -> Findings:
    text, needed = str(_at(worker.container, "resources", "limits", "memory") or ""), memory_needed(settings)
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kMGT]?|[KMGT]i)", text)
    if match is None or needed is None:
        return
    if float(match[1]) * _QUANTITIES[match[2]] <= needed:
        yield warn(
            CHECK,
            f"{worker.name}: the memory limit ({text}) is not more than {shown_memory(settings)}: "
            f"the kernel kills workers before the supervisor replaces them",
            f"set a limit of {memory_advised(settings)}Mi (a replacement starts before the old one ends), "
            "or a lower WORKER_MAX_MEMORY_MB",
        )


def _at(value: Any, *path: str) -> Any:
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _number(value: Any, default: float) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else default
