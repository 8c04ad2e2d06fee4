"""What the modules of the API share: the parameters of their routes."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query

Limit = Annotated[int, Query(ge=1, le=200, description="How many at most.")]
Cursor = Annotated[str | None, Query(description="The next page: `next_cursor` of the last one.", max_length=200)]
Domain = Annotated[str, Query(max_length=100)]
Id = Annotated[str, Query(max_length=2000)]
Name = Annotated[str, Query(max_length=2000)]
