"""Which release of commandbus this is."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from commandbus.cli.installation import DISTRIBUTION


def release() -> str:
    """The installed version; `unknown` in a source tree that was never installed."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "unknown"
