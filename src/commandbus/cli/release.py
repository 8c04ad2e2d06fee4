"""Which release of commandbus this is."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def release() -> str:
    """The installed version; `unknown` in a source tree that was never installed."""
    try:
        return version("commandbus")
    except PackageNotFoundError:
        return "unknown"
