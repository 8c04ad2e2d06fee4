"""RunningFile: what ran in a worker that vanished, for whoever finds its commands on the same machine."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from commandbus.worker import running_file
from commandbus.worker.running_file import KEPT_SECONDS, RunningFile, own_folder, read, read_slots


@pytest.fixture
def shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place of this test alone."""
    monkeypatch.setattr(running_file, "SHARED_MEMORY", tmp_path)
    return tmp_path


def create(worker: str = "w1", slots: int = 4) -> RunningFile:
    file = RunningFile.create(worker, ["orders", "mail"], slots)
    assert file is not None
    return file


def content() -> Path:
    (path,) = own_folder().iterdir()
    return path


def test_it_says_what_runs_also_to_other_processes(shared_memory: Path) -> None:
    file = create()
    assert read("w1") == frozenset()
    file.enter(0, "orders", 7)
    file.enter(3, "mail", 7)
    file.enter(1, "orders", 9)
    file.leave(1)
    assert read("w1") == {("orders", 7), ("mail", 7)}
    file.enter(0, "orders", 8)
    assert read("w1") == {("orders", 8), ("mail", 7)}


def test_it_says_which_commands_run_in_a_chunk(shared_memory: Path) -> None:
    file = RunningFile.create("w1", ["orders", "mail"], 4, 3)
    assert file is not None
    file.enter_chunk(2, "mail", [5, 9, 7])
    file.enter(3, "orders", 8)
    assert read_slots("w1") == {2: {("mail", 5), ("mail", 9), ("mail", 7)}, 3: {("orders", 8)}}
    assert read("w1") == {("mail", 5), ("mail", 9), ("mail", 7), ("orders", 8)}
    file.enter_chunk(2, "orders", [4, 6])
    assert read_slots("w1") == {2: {("orders", 4), ("orders", 6)}, 3: {("orders", 8)}}
    file.enter(2, "orders", 4)  # the same command by itself
    assert read_slots("w1") == {2: {("orders", 4)}, 3: {("orders", 8)}}
    file.enter_chunk(2, "orders", [4, 6])
    file.leave(2)
    assert read("w1") == {("orders", 8)}


def test_a_chunk_that_was_overwritten_says_nothing(shared_memory: Path) -> None:
    file = RunningFile.create("w1", ["orders"], 1, 3)
    assert file is not None
    file.enter_chunk(0, "orders", [5, 9])
    data = bytearray(content().read_bytes())
    data[-8 - 4 * 8] = 4  # more than the largest chunk
    content().write_bytes(data)
    assert read("w1") is None


def test_of_a_worker_that_left_no_file_nobody_knows(shared_memory: Path) -> None:
    create().remove()
    assert read("w1") is None
    assert read("w2") is None
    assert read("../../etc/passwd") is None
    assert read("a\ud800\x00") is None


@pytest.mark.parametrize("at", [0, 9, 30, -1, -12])
def test_a_file_that_was_overwritten_says_nothing(shared_memory: Path, at: int) -> None:
    create().enter(3, "orders", 7)
    data = bytearray(content().read_bytes())
    data[at] ^= 0xFF
    content().write_bytes(data)
    assert read("w1") is None


@pytest.mark.parametrize("size", [0, 5, 16, 40])
def test_a_file_that_was_cut_off_says_nothing(shared_memory: Path, size: int) -> None:
    create()
    content().write_bytes(content().read_bytes()[:size])
    assert read("w1") is None


def test_a_folder_that_others_could_have_written_is_not_used(shared_memory: Path) -> None:
    file = create()
    own_folder().chmod(0o777)
    assert read("w1") is None
    assert RunningFile.create("w2", ["orders"], 1) is None
    file.enter(0, "orders", 1)  # who has it already goes on


def test_a_machine_without_shared_memory_has_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(running_file, "SHARED_MEMORY", tmp_path / "missing")
    assert RunningFile.create("w1", ["orders"], 1) is None
    assert read("w1") is None


def test_files_of_long_gone_workers_are_removed_and_those_of_living_ones_kept(shared_memory: Path) -> None:
    create("gone")
    old = time.time() - 2 * KEPT_SECONDS
    os.utime(content(), (old, old))
    create("w1")
    assert read("gone") is None
    assert read("w1") == frozenset()
