"""The board: what a worker writes its supervisor reads, and a dead worker's page stays readable."""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import random
import struct
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commandbus.worker.board import CHUNK, Board, Snapshot, State
from support.running import examples


@pytest.fixture
def pair():
    ours = Board.create(8)
    theirs = Board.attach(os.dup(ours.fd))
    yield theirs, ours
    ours.close()
    theirs.close()


def beat(board: Board, now: float = 1.0, state: State = State.ACTIVE) -> None:
    board.beat(
        now, state=state, health=1, running=2, settled=2**40, claimed=7, free=3, stuck=4, rss_mb=123.5
    )  # fmt: skip


def test_a_fresh_board_says_that_nothing_has_happened(pair) -> None:
    _, ours = pair
    assert ours.read() == Snapshot(0.0, State.STARTING, 0, 0, 0, 0, 0, 0, 0.0, "", [], frozenset())


def test_a_beat(pair) -> None:
    theirs, ours = pair
    beat(theirs)
    theirs.note("too slow: ☃")
    shown = ours.read()
    assert (shown.beat_at, shown.state, shown.health) == (1.0, State.ACTIVE, 1)
    assert (shown.running, shown.settled, shown.claimed, shown.free, shown.stuck) == (2, 2**40, 7, 3, 4)
    assert (shown.rss_mb, shown.note) == (123.5, "too slow: ☃")


class Looker:
    """The number 3, which looks at the board while it is being written."""

    def __init__(self, look) -> None:
        self.look = look

    def __index__(self) -> int:
        self.look()
        return 3

    def __float__(self) -> float:
        self.look()
        return 3.0


def test_while_it_is_written_a_reader_sees_what_was_there_before(pair) -> None:
    theirs, ours = pair
    beat(theirs)
    theirs.thread(0, 5, 6)
    theirs.enter(0, 0, 1, 1, 1.0, 20.5)
    theirs.session(0, 7, 8)
    before, seen = ours.read(), []

    def look() -> None:
        seen.append(ours.read())

    theirs.beat(
        1.0,
        state=State.ACTIVE,
        health=Looker(look),
        running=2,
        settled=2**40,
        claimed=7,
        free=3,
        stuck=4,
        rss_mb=1.0,
    )
    assert seen.pop() == before
    theirs.session(0, 9, Looker(look))
    assert [slot.session_pid for slot in seen.pop().slots] == [0], "none is better than half of one"
    before = ours.read()
    theirs.stuck_at(0, Looker(look))
    assert seen.pop() == before
    assert ours.read().slots[0].stuck_at == 3.0


def test_attempts_come_and_go_in_their_slots(pair) -> None:
    theirs, ours = pair
    theirs.thread(7, 2**47 - 1, 4242)
    theirs.enter(7, 3, 2**62, 5, 10.5, math.inf)
    theirs.enter(0, 0, 1, 1, 11.5, 20.5)
    theirs.session(7, 99, 2**52)
    first, second = ours.read().slots
    assert (first.index, first.msg_id, first.stuck_at) == (0, 1, 20.5)
    assert (second.index, second.domain_index, second.msg_id, second.read_ct) == (7, 3, 2**62, 5)
    assert (second.started, second.stuck_at) == (10.5, math.inf)
    assert (second.ident, second.native_id) == (2**47 - 1, 4242)
    assert (second.session_pid, second.session_started) == (99, 2**52)
    assert ours.read().first_stuck_at == 20.5
    theirs.leave(0)
    assert ours.read().first_stuck_at is None
    theirs.stuck_at(7, 30.5)
    assert ours.read().first_stuck_at == 30.5
    theirs.leave(7)
    assert ours.read().slots == []


def test_a_slot_may_run_a_chunk(pair) -> None:
    theirs, ours = pair
    theirs.enter(2, 0, 77, 1, 5.0, math.inf, CHUNK)
    theirs.enter(3, 0, 78, 1, 5.0, math.inf)
    shown = ours.read()
    assert [(slot.msg_id, slot.is_chunk) for slot in shown.slots] == [(77, True), (78, False)]
    assert shown.nonsense == ""
    theirs.leave(2)
    assert [slot.msg_id for slot in ours.read().slots] == [78]


def test_a_replaced_thread_is_remembered(pair) -> None:
    theirs, ours = pair
    theirs.thread(0, 111, 11)
    theirs.enter(0, 0, 5, 1, 1.0, 2.0)
    assert ours.read().gone == frozenset()
    theirs.thread(0, 222, 22)
    assert ours.read().slots == []
    theirs.thread(0, 222, 22)
    assert ours.read().gone == {(111, 11)}
    for ident in range(1000, 1200):
        theirs.thread(1, ident, ident)
    assert len(ours.read().gone) == 64


def test_a_long_note_is_cut_between_characters(pair) -> None:
    theirs, ours = pair
    theirs.note("ü☃" * 400)
    assert ours.read().note.startswith("ü☃ü☃")
    assert len(ours.read().note.encode()) <= 510
    assert "\N{REPLACEMENT CHARACTER}" not in ours.read().note


def test_neighbours_do_not_touch_each_other(pair) -> None:
    theirs, ours = pair
    for slot in range(8):
        theirs.thread(slot, 2**64 - 1, 2**32 - 1)
        theirs.enter(slot, slot, slot + 1, slot + 2, float(slot), float(slot))
        theirs.session(slot, slot + 3)
    theirs.note("x" * 600)
    beat(theirs, 5.0, State.DRAINING)
    shown = ours.read()
    assert [(slot.domain_index, slot.msg_id, slot.read_ct, slot.session_pid) for slot in shown.slots] == [
        (slot, slot + 1, slot + 2, slot + 3) for slot in range(8)
    ]
    assert (shown.beat_at, shown.state, len(shown.note)) == (5.0, State.DRAINING, 510)


def test_another_file_is_no_board() -> None:
    fd = os.memfd_create("other")
    os.ftruncate(fd, 4096)
    with pytest.raises(ValueError, match="not a board"):
        Board.attach(fd)
    os.close(fd)


def test_the_page_outlives_the_process_that_wrote_it() -> None:
    board = Board.create(2)
    pid = os.fork()
    if pid == 0:
        Board.attach(board.fd).enter(1, 0, 77, 1, 1.0, 2.0)
        os._exit(0)
    os.waitpid(pid, 0)
    assert [slot.msg_id for slot in board.read().slots] == [77]
    board.close()


# --- a worker that writes anything -----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 100, 1 << 30])
def test_the_size_cannot_be_changed_by_whoever_inherits_it(pair, size: int) -> None:
    theirs, ours = pair
    with pytest.raises(PermissionError):
        os.ftruncate(theirs.fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(theirs.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    beat(theirs)
    assert ours.read().beat_at == 1.0


def scribble(board: Board, at: int, data: bytes) -> None:
    with mmap.mmap(board.fd, os.fstat(board.fd).st_size) as memory:
        memory[at : at + len(data)] = data


@settings(max_examples=examples(300, thorough=10_000), deadline=None)
@given(data=st.data())
def test_whatever_is_written_the_reader_returns_a_snapshot_of_possible_values(data: st.DataObject) -> None:
    board = Board.create(4)
    try:
        for slot in range(4):
            board.enter(slot, slot, slot + 1, 1, 1.0, 2.0)
        size = os.fstat(board.fd).st_size
        for _ in range(data.draw(st.integers(1, 4))):
            at = data.draw(st.integers(0, size - 1))
            odd = st.sampled_from([math.nan, math.inf, -math.inf, -1.0, 1e308, 5e-324]).map(
                lambda value: struct.pack("@d", value)
            )
            piece = data.draw(st.binary(max_size=size) | odd)
            scribble(board, at, piece[: size - at])
        is_possible(board.read())
    finally:
        board.close()


def is_possible(shown: Snapshot) -> None:
    assert math.isfinite(shown.beat_at)
    assert shown.beat_at >= 0
    assert math.isfinite(shown.rss_mb)
    assert isinstance(shown.state, State)
    assert shown.health in (0, 1, 2)
    assert 0 <= max(shown.settled, shown.claimed) <= 2**53
    assert len(shown.note) <= 510
    shown.note.encode()
    assert shown.first_stuck_at is None or math.isfinite(shown.first_stuck_at)
    for slot in shown.slots:
        assert math.isfinite(slot.started)
        assert slot.stuck_at >= 0
        assert slot.read_ct < 2**31
        assert slot.session_pid < 2**31
        round((time.monotonic() - slot.started) * 1000)


def test_random_bytes_are_seen_to_be_nonsense(pair) -> None:
    theirs, ours = pair
    beat(theirs)
    assert ours.read().nonsense == ""
    scribble(theirs, 0, random.Random(7).randbytes(os.fstat(theirs.fd).st_size))
    assert ours.read().nonsense == "its first bytes were overwritten"


def test_a_head_that_cannot_be_is_no_head_and_the_next_beat_puts_it_right(pair) -> None:
    theirs, ours = pair
    for beat_at in (math.nan, math.inf, -1.0):
        beat(theirs, beat_at)
        shown = ours.read()
        assert (shown.beat_at, shown.state, shown.nonsense) == (
            0.0, State.STARTING, "its heartbeat holds impossible numbers"
        )  # fmt: skip
    beat(theirs, 2.0)
    assert (ours.read().beat_at, ours.read().nonsense) == (2.0, "")


def test_an_attempt_that_cannot_be_is_left_out_and_its_neighbors_are_shown(pair) -> None:
    theirs, ours = pair
    theirs.enter(0, 0, 1, 1, 1.0, 2.0)
    theirs.enter(1, 0, 2, 1, math.nan, 2.0)
    theirs.enter(2, 0, -3, 1, 1.0, math.nan)
    shown = ours.read()
    assert [(slot.msg_id, slot.stuck_at) for slot in shown.slots] == [(1, 2.0), (-3, math.inf)]
    assert shown.nonsense == "what it shows in slot 1 is not an attempt"
