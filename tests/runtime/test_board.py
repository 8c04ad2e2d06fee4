"""The board: what a worker writes its supervisor reads, and a dead worker's page stays readable."""

from __future__ import annotations

import math
import os

import pytest

from commandbus.runtime.board import Board, Snapshot, State


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


def test_attempts_come_and_go_in_their_slots(pair) -> None:
    theirs, ours = pair
    theirs.thread(7, 2**47 - 1, 4242)
    theirs.enter(7, 3, 2**62, 5, 10.5, math.inf)
    theirs.enter(0, 0, 1, 1, 11.5, 20.5)
    theirs.backend(7, 99, 2**52)
    first, second = ours.read().slots
    assert (first.index, first.msg_id, first.stuck_at) == (0, 1, 20.5)
    assert (second.index, second.domain_index, second.msg_id, second.read_ct) == (7, 3, 2**62, 5)
    assert (second.started, second.stuck_at) == (10.5, math.inf)
    assert (second.ident, second.native_id) == (2**47 - 1, 4242)
    assert (second.backend, second.backend_started) == (99, 2**52)
    assert ours.read().first_stuck_at == 20.5
    theirs.leave(0)
    assert ours.read().first_stuck_at is None
    theirs.stuck_at(7, 30.5)
    assert ours.read().first_stuck_at == 30.5
    theirs.leave(7)
    assert ours.read().slots == []


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
        theirs.backend(slot, slot + 3)
    theirs.note("x" * 600)
    beat(theirs, 5.0, State.DRAINING)
    shown = ours.read()
    assert [(slot.domain_index, slot.msg_id, slot.read_ct, slot.backend) for slot in shown.slots] == [
        (slot, slot + 1, slot + 2, slot + 3) for slot in range(8)
    ]
    assert (shown.beat_at, shown.state, len(shown.note)) == (5.0, State.DRAINING, 510)


def test_another_file_is_no_board() -> None:
    fd = os.memfd_create("other")
    os.ftruncate(fd, 4096)
    with pytest.raises(ValueError, match="no board"):
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
