"""JSON in the signatures of the public API: what goes in, and what comes out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

JsonValue: TypeAlias = "bool | int | float | str | Sequence[JsonValue] | Mapping[str, JsonValue] | None"
"""What can be sent as JSON. Objects are dicts whose keys are text; arrays are lists or tuples."""

Json: TypeAlias = Any
"""A JSON value that comes out. Type checkers let you index it, as they do with what `json.loads` returns."""
