"""Command ids: UUIDs of version 7, valid, in the order of time, never twice."""

from __future__ import annotations

import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
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
    for earlier, later in pairwise(stamps):
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


def test_a_seeded_application_still_gets_ids_of_its_own() -> None:
    """`random.seed(0)` is common in test suites and in science; two such processes must not send the same ids."""
    state = random.getstate()
    try:
        random.seed(0)
        first = [UUID(new_command_id()).int & ((1 << 62) - 1) for _ in range(5)]
        random.seed(0)
        second = [UUID(new_command_id()).int & ((1 << 62) - 1) for _ in range(5)]
    finally:
        random.setstate(state)
    assert not set(first) & set(second)


def test_a_forked_child_gets_ids_of_its_own() -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, "".join(new_command_id()[-12:] for _ in range(50)).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        theirs = pipe.read()
    os.waitpid(child, 0)
    assert len(theirs) == 600
    ours = {new_command_id()[-12:] for _ in range(50)}
    assert not ours & {theirs[start : start + 12] for start in range(0, 600, 12)}
