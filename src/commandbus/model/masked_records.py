"""Records as people see them: with the masking rules applied to what they carry, whatever record it is.

A field that holds JSON is masked by its own name. Texts that may quote a payload (`error`, `traceback`, `note` …)
lose the hidden values of the same record, and those of records that were shown shortly before: the attempts of a
command come after the command.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping
from typing import Any, Final

from commandbus.model.mask import Mask

_TEXTS: Final = frozenset(
    ("error", "last_error", "message", "note", "preview", "problem", "reason", "stack", "text", "traceback")
)
_ENVELOPES: Final = frozenset(("autopsy", "details", "message"))
"""Fields with JSON of ours, in which fields of a command have their own names."""
_REMEMBERED: Final = 256


class RecordMask:
    """Masks what a bus returns. Used by one bus; `show` may be called by several threads."""

    def __init__(self, mask: Mask) -> None:
        self._mask = mask
        self._seen: deque[str] = deque(maxlen=_REMEMBERED)

    def check_search(self, data: object) -> None:
        """Raises InvalidCommandError if a search for commands by their data would find out what is hidden."""
        if isinstance(data, Mapping):
            self._mask.check_search("data", {str(path): str(value) for path, value in data.items()})

    def show(self, value: Any) -> Any:
        """The same record, page or list without what is hidden."""
        if isinstance(value, list):
            return [self.show(item) for item in value]
        if isinstance(value, tuple) and not hasattr(value, "_fields"):
            return tuple(self.show(item) for item in value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self._record(value, {field.name: getattr(value, field.name) for field in _fields(value)})
        return value

    def _record(self, record: Any, fields: dict[str, Any]) -> Any:
        documents = {name: item for name, item in fields.items() if _is_json(name, item)}
        secrets = self._secrets(documents)
        changed = {name: new for name, item in fields.items() if (new := self._field(name, item, secrets)) != item}
        return dataclasses.replace(record, **changed) if changed else record

    def _secrets(self, documents: dict[str, Any]) -> list[str]:
        found = self._mask.secrets(documents)
        for name, item in documents.items():
            if name in _ENVELOPES and isinstance(item, dict):
                found |= self._mask.secrets(item)
        self._seen.extend(found - set(self._seen))
        return list(self._seen)

    def _field(self, name: str, value: Any, secrets: list[str]) -> Any:
        if isinstance(value, str):
            hidden = self._mask.hide(name, value)
            return self._mask.text(hidden, secrets) if name in _TEXTS else hidden
        if not _is_json(name, value):
            return self.show(value)
        if name in _ENVELOPES and isinstance(value, dict):
            value = {key: self._mask.hide(key, item) for key, item in value.items()}
        hidden = self._mask.hide(name, value)
        return self._mask.texts(hidden, secrets) if name in _ENVELOPES else hidden


def _is_json(name: str, value: Any) -> bool:
    """Is it a JSON value, and no list of records, nor records by their names?"""
    if isinstance(value, dict):
        return not any(_is_record(item) for item in value.values())
    if isinstance(value, list):
        return not any(_is_record(item) for item in value)
    return isinstance(value, str | int | float) and name in ("data", "result", "progress", "state", "receipt")


def _is_record(item: Any) -> bool:
    return dataclasses.is_dataclass(item) or isinstance(item, tuple)


def _fields(record: Any) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(record) if field.init]
