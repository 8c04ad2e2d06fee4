"""Command ids: UUIDs of version 7, valid, in the order of time, never twice."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from uuid import RFC_4122, UUID

from commandbus.model.command import new_command_id


def test_an_id_is_a_uuid_of_version_7_with_the_time_in_it() -> None:
    before = time.time_ns() // 1_000_000
    ids = [new_command_id() for _ in range(200)]
    after = time.time_ns() // 1_000_000
    for text in ids:
        parsed = UUID(text)
        assert str(parsed) == text
        assert parsed.version == 7
        assert parsed.variant == RFC_4122
        assert before <= parsed.int >> 80 <= after


def test_ids_of_later_milliseconds_sort_later_as_text() -> None:
    by_millisecond: dict[int, list[str]] = {}
    while len(by_millisecond) < 5:
        text = new_command_id()
        by_millisecond.setdefault(UUID(text).int >> 80, []).append(text)
    stamps = sorted(by_millisecond)
    for earlier, later in zip(stamps, stamps[1:], strict=False):
        assert max(by_millisecond[earlier]) < min(by_millisecond[later])


def test_no_two_are_alike_and_every_random_bit_is_used() -> None:
    with ThreadPoolExecutor(8) as threads:
        chunks = threads.map(lambda _: [new_command_id() for _ in range(5000)], range(8))
    ids = [text for chunk in chunks for text in chunk]
    assert len(set(ids)) == len(ids) == 40_000
    ever_set = ever_clear = 0
    for text in ids:
        ever_set |= UUID(text).int
        ever_clear |= ~UUID(text).int
    random_bits = (0xFFF << 64) | ((1 << 62) - 1)
    assert ever_set & random_bits == random_bits
    assert ever_clear & random_bits == random_bits
