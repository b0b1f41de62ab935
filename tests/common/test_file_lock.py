"""Locks on files: one owner, released with the last reference, and not by a forked child."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sft.common.file_lock import lock_file, lock_holder


def test_one_owner_until_the_last_reference(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with pytest.raises(FileNotFoundError):
        lock_file(path, creates=False)
    first = lock_file(path, creates=True)
    with pytest.raises(BlockingIOError):
        lock_file(path, creates=False)
    assert lock_holder(path) == ("this process" if Path("/proc/locks").exists() else "another process")
    cycle: list[object] = [first]
    cycle.append(cycle)
    del first, cycle
    second = lock_file(path, creates=False)  # collects the cycle
    second.close()
    assert lock_holder(path) == "another process"  # unknown: it is free
    lock_file(path, creates=False).close()


def test_a_child_that_closes_its_copy_does_not_release_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "file"
    owner = lock_file(path, creates=True)
    child = os.fork()
    if child == 0:
        owner.close()
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(BlockingIOError):
        lock_file(path, creates=False)
    owner.close()
    lock_file(path, creates=False).close()


def test_a_file_that_was_renamed_away_is_another_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    old = lock_file(path, creates=True)
    new = lock_file(tmp_path / "next", creates=True)
    os.replace(tmp_path / "next", path)
    old.close()
    with pytest.raises(BlockingIOError):
        lock_file(path, creates=False)
    new.close()
    lock_file(path, creates=False).close()


def test_a_read_only_file_can_be_locked(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("")
    path.chmod(0o444)
    with lock_file(path, creates=False), pytest.raises(BlockingIOError):
        lock_file(path, creates=False)
