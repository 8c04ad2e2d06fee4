"""A systemd unit: do its timeouts and memory fit ours, and does it start, watch and stop a worker correctly?

It reads the text of one unit, or the output of `systemctl cat NAME` with its drop-ins. If a key is not set,
systemd's own default counts. It does not ask systemd itself.
"""

from __future__ import annotations

import math
import re
import shlex
from collections import defaultdict
from pathlib import Path
from typing import Final, TypeAlias

from commandbus.cli.doctor.findings import Findings, fail, ok, warn
from commandbus.cli.doctor.service import (
    as_seen_there,
    memory_advised,
    memory_needed,
    named,
    shown_memory,
    shown_span,
    with_spare,
)
from commandbus.settings import Settings

CHECK: Final = "systemd unit"
DEFAULT_STOP_SECONDS: Final = 90.0
NOTIFYING: Final = ("notify", "notify-reload")

_UNITS: Final = {
    **dict.fromkeys(("us", "usec", "µs", "μs"), 1e-6),
    **dict.fromkeys(("ms", "msec"), 1e-3),
    **dict.fromkeys(("", "s", "sec", "second", "seconds"), 1.0),
    **dict.fromkeys(("m", "min", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hr", "hour", "hours"), 3600.0),
    **dict.fromkeys(("d", "day", "days"), 86_400.0),
    **dict.fromkeys(("w", "week", "weeks"), 604_800.0),
}
_SPAN: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([a-zµμ]*)\s*")
_SIZES: Final = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4}

Section: TypeAlias = dict[str, list[str]]


def examine(text: str, settings: Settings) -> Findings:
    """All findings about the text of a unit."""
    service = read_unit(text).get("Service")
    if not service or not service.get("ExecStart"):
        yield fail(
            CHECK,
            "the unit has no [Service] section with an ExecStart",
            "give the unit's own file, or `systemctl cat NAME | commandbus doctor --unit -`",
        )
        return
    try:
        words = _words(service["ExecStart"][-1])
        settings = as_seen_there(settings, _environment(service), words, source="the unit")
        yield from _stop(service, settings)
        yield from _watchdog(service, settings)
    except ValueError as error:
        yield fail(CHECK, str(error), "correct it there")
        return
    yield from _kill(service)
    yield from _start(service)
    yield from _memory(service, settings)


def read_unit(text: str) -> dict[str, Section]:
    """Section → key → its values. An empty value deletes the values before it."""
    found: dict[str, Section] = defaultdict(lambda: defaultdict(list))
    section = ""
    for line in re.sub(r"\\\n", " ", text).splitlines():
        line = line.strip()  # noqa: PLW2901 - it is the line
        if line.startswith("[") and line.endswith("]"):
            section = line[1:-1]
        elif line and line[0] not in "#;":
            key, _, value = (part.strip() for part in line.partition("="))
            for name in ("TimeoutStartSec", "TimeoutStopSec") if key == "TimeoutSec" else (key,):
                if value:
                    found[section][name].append(value)
                else:
                    found[section][name].clear()
    return found


def parse_span(text: str, key: str) -> float:
    """A time span of systemd in seconds: `40`, `1min 30s`, `infinity`."""
    if text == "infinity":
        return math.inf
    if not re.fullmatch(rf"(?:{_SPAN.pattern})+", text):
        raise ValueError(f"{key}={text} is not a time span of systemd (40, 90s, 1min 30s, infinity)")
    total = 0.0
    for number, unit in _SPAN.findall(text):
        if unit not in _UNITS:
            raise ValueError(f"{key}={text}: systemd does not know {unit!r} here")
        total += float(number) * _UNITS[unit]
    return total


def _last(service: Section, key: str, default: str = "") -> str:
    values = service.get(key)
    return values[-1] if values else default


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def _environment(service: Section) -> dict[str, str]:
    """The variables of Environment= and, if it can be read, EnvironmentFile=, which overrides them."""
    pairs = [word for value in service.get("Environment", []) for word in _words(value)]
    for name in service.get("EnvironmentFile", []):
        try:
            lines = Path(name.removeprefix("-")).read_text("utf-8", errors="replace").splitlines()
        except OSError:
            continue  # the file is on another machine, or we may not read it
        pairs += [word for line in lines if not line.lstrip().startswith(("#", ";")) for word in _words(line)[:1]]
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


# --- the checks --------------------------------------------------------------------------------------------------


def _stop(service: Section, settings: Settings) -> Findings:
    text = _last(service, "TimeoutStopSec")
    limit = parse_span(text, "TimeoutStopSec") if text else DEFAULT_STOP_SECONDS
    shown = f"TimeoutStopSec ({shown_span(limit or math.inf)}{'' if text else ', the default of systemd'})"
    ours = named(settings, "shutdown_timeout")
    if 0 < limit <= settings.shutdown_timeout:  # 0 means no limit
        yield fail(
            CHECK,
            f"{shown} is not more than {ours}: systemd kills a worker that is still finishing its work",
            f"set TimeoutStopSec={with_spare(settings.shutdown_timeout)}, or a shorter WORKER_SHUTDOWN_TIMEOUT",
        )
    else:
        yield ok(CHECK, f"{ours} < {shown}")


def _watchdog(service: Section, settings: Settings) -> Findings:
    kind, text = _last(service, "Type", "simple"), _last(service, "WatchdogSec")
    limit = parse_span(text, "WatchdogSec") if text else 0.0
    is_watched = 0 < limit < math.inf
    access = _last(service, "NotifyAccess", "main" if kind in NOTIFYING or is_watched else "none")
    ours = named(settings, "heartbeat_timeout")
    if kind in ("forking", "oneshot", "dbus"):
        yield fail(CHECK, f"Type={kind}, but a worker stays in the foreground", "set Type=notify")
    if (kind in NOTIFYING or is_watched) and access == "none":
        yield fail(
            CHECK,
            f"NotifyAccess=none with Type={kind} and WatchdogSec={text or 'off'}: systemd does not hear that the "
            "worker lives, and kills it",
            "set NotifyAccess=main",
        )
    if not is_watched:
        yield warn(
            CHECK,
            "WatchdogSec is off: nobody notices when the supervisor hangs",
            f"set Type=notify and WatchdogSec={with_spare(settings.heartbeat_timeout)}",
        )
        return
    if kind not in NOTIFYING:
        yield warn(
            CHECK,
            f"WatchdogSec={text} with Type={kind}: systemd counts from the start of the process, not from when it "
            "is ready",
            "set Type=notify",
        )
    if limit <= settings.heartbeat_timeout:
        yield warn(
            CHECK,
            f"WatchdogSec ({shown_span(limit)}) is not more than {ours}: systemd may restart everything when the "
            "supervisor would replace one frozen worker",
            f"set WatchdogSec={with_spare(settings.heartbeat_timeout)}, or a shorter WORKER_HEARTBEAT_TIMEOUT",
        )
    else:
        yield ok(CHECK, f"{ours} < WatchdogSec ({shown_span(limit)})")


def _kill(service: Section) -> Findings:
    mode = _last(service, "KillMode", "control-group")
    harm = {
        "control-group": "SIGTERM goes to every worker as well as to their supervisor, which sends it too: they "
        "take the second for an order to end at once",
        "process": "workers are left running when their supervisor is killed",
        "none": "nothing is stopped at all",
    }
    if mode in harm:
        yield warn(CHECK, f"KillMode={mode}: {harm[mode]}", "set KillMode=mixed")
    signal = _last(service, "KillSignal", "SIGTERM")
    if signal.removeprefix("SIG") not in ("TERM", "INT", "15", "2"):
        yield warn(CHECK, f"KillSignal={signal} does not stop a worker cleanly", "set KillSignal=SIGTERM")


def _start(service: Section) -> Findings:
    if (restart := _last(service, "Restart", "no")) == "no":
        yield warn(CHECK, f"Restart={restart}: a supervisor that dies stays dead", "set Restart=always")
    if (policy := _last(service, "OOMPolicy", "stop")) != "continue":
        yield warn(
            CHECK,
            f"OOMPolicy={policy}: when the kernel kills one worker for its memory, systemd stops all workers",
            "set OOMPolicy=continue; the supervisor replaces that worker",
        )


def _memory(service: Section, settings: Settings) -> Findings:
    text, needed = _last(service, "MemoryMax"), memory_needed(settings)
    match = re.fullmatch(r"(\d+)([KMGT]?)", text)
    if match is None or needed is None:
        return
    limit = int(match[1]) * _SIZES[match[2]]
    if limit <= needed:
        yield warn(
            CHECK,
            f"MemoryMax ({text}) is not more than {shown_memory(settings)}: "
            f"the kernel kills workers before the supervisor replaces them",
            f"set MemoryMax={memory_advised(settings)}M (a replacement starts before the old one ends), "
            "or a lower WORKER_MAX_MEMORY_MB",
        )
