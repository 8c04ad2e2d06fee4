"""What the tests of the documents' own modules share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from commandbus.rate_limiter import shared_redis


@pytest.fixture(autouse=True)
def no_permit_outlives_its_test(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Who still holds a permit when Redis is emptied for the next test makes all newcomers wait for a lease."""
    made: list[shared_redis.SharedRedis] = []

    class Recorded(shared_redis.SharedRedis):
        def __init__(self, client: Any, environment: str) -> None:
            super().__init__(client, environment)
            made.append(self)

    monkeypatch.setattr(shared_redis, "SharedRedis", Recorded)
    yield
    for each in made:
        for token in list(each._permits):
            each.keep_until_lease_ends(token)
