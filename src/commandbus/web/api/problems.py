"""What every route of the API may answer instead of what was asked for."""

from __future__ import annotations

from typing import Any, Final

from pydantic import BaseModel


class Problem(BaseModel):
    """Why it was not done, as a sentence."""

    error: str


_REASONS: Final = {
    400: "A parameter or a field cannot be what was given.",
    401: "The visitor is not known.",
    403: "The visitor may not do this.",
    404: "There is no such thing.",
    409: "It cannot be done in the state that the thing is in.",
    422: "A parameter is missing, or is not of its type.",
    503: "The database does not answer in time, another session has locked this, or there is no schema.",
}
PROBLEMS: Final[dict[int | str, dict[str, Any]]] = {
    code: {"model": Problem, "description": reason} for code, reason in _REASONS.items()
}
