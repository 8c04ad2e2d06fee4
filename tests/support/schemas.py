"""JSON schemas, read by a package that knows nothing of ours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jsonschema import Draft202012Validator


def validator_of(schema: Any) -> Draft202012Validator:
    """Fails if it is no schema. The package is imported here: that takes two seconds, in every test worker."""
    from jsonschema import Draft202012Validator

    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)
