"""Which release of commandbus this is."""

from __future__ import annotations

from commandbus.cli.installation import DISTRIBUTION
from commandbus.light_imports import version_of


def release() -> str:
    """The installed version; `unknown` in a source tree that was never installed."""
    return version_of(DISTRIBUTION) or "unknown"
