"""The settings as a service would see them, and the findings when its timeouts are out of order.

A unit or a manifest sets its own variables and options. They count for its worker, whatever the doctor's own
environment says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from commandbus.model.durations import format_seconds
from commandbus.settings import SETTINGS, Settings

SPARE_SECONDS: Final = 10
MEBIBYTE: Final = 1024 * 1024


def as_seen_there(
    settings: Settings, environ: Mapping[str, str], words: Sequence[str], *, source: str
) -> Settings:
    """The settings with this environment and these arguments of the worker. Raises ValueError if they are
    invalid."""
    changes: dict[str, Any] = {}
    for setting in SETTINGS.values():
        text = _option(words, f"--{setting.name.replace('_', '-')}") or environ.get(setting.env, "").strip()
        if text and not setting.secret:
            try:
                changes[setting.name] = setting.kind.parse(text, setting.name)
            except ValueError as error:
                raise ValueError(f"{source} sets {setting.env}: {error}") from None
    origins = {**settings.origins, **dict.fromkeys(changes, source)}
    return replace(settings, **changes, origins=origins)


def _option(words: Sequence[str], option: str) -> str | None:
    """The value of `--option value` or `--option=value`; the last one counts."""
    found = None
    for at, word in enumerate(words):
        if word == option and at + 1 < len(words):
            found = words[at + 1]
        elif word.startswith(f"{option}="):
            found = word.partition("=")[2]
    return found


def named(settings: Settings, name: str) -> str:
    """`shutdown_timeout (30s)`, and where the value comes from unless it is the default."""
    origin = settings.origins[name]
    where = "" if origin == "default" else f", from {origin}"
    return f"{name} ({SETTINGS[name].kind.show(getattr(settings, name))}{where})"


def with_spare(seconds: float) -> int:
    """A limit that is comfortably more than this, in whole seconds."""
    return math.ceil(seconds) + SPARE_SECONDS


def shown_span(seconds: float) -> str:
    """A time span as systemd and people write it."""
    return "infinity" if math.isinf(seconds) else format_seconds(seconds)


def memory_needed(settings: Settings) -> int | None:
    """Bytes that workers, and their child processes for commands in quarantine, may use before they are replaced;
    None if there is no such limit."""
    if settings.max_memory_mb is None:
        return None
    children = settings.quarantine_processes if settings.quarantine else 0
    return settings.max_memory_mb * settings.processes * (1 + children) * MEBIBYTE


def memory_advised(settings: Settings) -> int:
    """Megabytes with which the kernel kills no process, even while a replacement runs beside the old worker."""
    replacements = (settings.max_memory_mb or 0) * settings.processes
    return (memory_needed(settings) or 0) // MEBIBYTE + replacements


def shown_memory(settings: Settings) -> str:
    """How `memory_needed` is computed, for people."""
    each = f"{named(settings, 'max_memory_mb')} MB"
    if not settings.quarantine:
        return f"{named(settings, 'processes')} × {each}"
    return f"{named(settings, 'processes')} × {each} × (1 + {named(settings, 'quarantine_processes')})"
