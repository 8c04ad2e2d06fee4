"""The life of a bus and of its calls: with a migrated database that has a domain `orders`."""

from __future__ import annotations

import pytest


@pytest.fixture
def has_orders() -> str:
    """`bus` has it."""
    return "bus"
