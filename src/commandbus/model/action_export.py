"""Actions of operators as CSV or JSON lines, for a spreadsheet or a program."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Sequence
from typing import Any, Final

from commandbus.model.to_json import to_json

MOST_EXPORTED: Final = 10_000
COLUMNS: Final = (
    "performed_at", "operator", "action", "subject", "domain", "command_id", "command_type", "reason", "details",
)  # fmt: skip
_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")


def as_csv(records: Iterable[Any]) -> str:
    """A header and a line for each. A text that a spreadsheet would take for a formula gets an apostrophe."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(COLUMNS)
    writer.writerows([_cell(getattr(record, name)) for name in COLUMNS] for record in records)
    return text.getvalue()


def as_json_lines(records: Sequence[Any]) -> str:
    """One JSON object per line."""
    return "".join(json.dumps(to_json(record), ensure_ascii=False) + "\n" for record in records)


def _cell(value: object) -> str:
    if value is None:
        return ""
    text = value if isinstance(value, str) else json.dumps(to_json(value), ensure_ascii=False).strip('"')
    return f"'{text}" if text.startswith(_FORMULA) else text
