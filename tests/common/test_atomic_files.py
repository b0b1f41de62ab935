"""Files are replaced atomically or unchanged, no temporary file remains, and a lock has one owner."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

import sft
from sft.common.atomic_files import PARTIAL_MARK, as_path, atomic_write, fsync_folder, lock_file, lock_holder
from sft.common.errors import InputError, SourceError
from sft.wsi.errors import RunFolderError
from sft.wsi.run.files import clear_partial, write_text
from sft.wsi.run.folder import RunFolder


class _Lost(Exception):
    """Exception while writing that is no disk failure."""


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "mask.png"
    path.write_text("old")
    return path


def test_a_finished_file_takes_the_place_of_the_old_one(old: Path) -> None:
    with atomic_write(old) as temporary:
        assert temporary.suffix == ".png" and temporary.parent == old.parent and temporary.name.startswith(PARTIAL_MARK)
        temporary.write_text("new")
        assert old.read_text() == "old"
    assert old.read_text() == "new" and _names(old.parent) == ["mask.png"]
    fsync_folder(old.parent)


def test_a_failure_in_the_block_leaves_the_old_file(old: Path) -> None:
    with pytest.raises(_Lost), atomic_write(old) as temporary:
        temporary.write_text("half")
        raise _Lost
    assert old.read_text() == "old" and _names(old.parent) == ["mask.png"]


@pytest.mark.parametrize("where", ["write", "os.fsync", "os.replace"])
def test_a_full_disk_leaves_the_old_file(where: str, old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if where != "write":
        monkeypatch.setattr(f"sft.common.atomic_files.{where}", full)
    with (
        pytest.raises(SourceError, match=r"cannot write .*mask\.png: No space left on device\. Make room") as raised,
        atomic_write(old) as temporary,
    ):
        temporary.write_text("half")
        if where == "write":
            full()
    assert raised.type is SourceError
    assert old.read_text() == "old" and _names(old.parent) == ["mask.png"]


def test_a_block_that_writes_nothing_is_refused(old: Path) -> None:
    with pytest.raises(SourceError, match="No such file"), atomic_write(old):
        pass
    assert old.read_text() == "old"


def test_a_missing_folder_is_made_only_on_request(tmp_path: Path) -> None:
    target = tmp_path / "no" / "plan.json"
    with pytest.raises(SourceError, match=r"plan\.json: No such file"), atomic_write(target) as temporary:
        temporary.write_text("new")
    assert _names(tmp_path) == []
    with atomic_write(target, parents=True) as temporary:
        temporary.write_text("new")
    assert target.read_text() == "new" and _names(target.parent) == ["plan.json"]


def test_a_name_may_be_as_long_as_names_can_be(tmp_path: Path) -> None:
    target = tmp_path / ("n" * 251 + ".txt")
    with atomic_write(target) as temporary:
        temporary.write_text("new")
    assert _names(tmp_path) == [target.name]


def test_an_error_of_the_requested_class_passes(old: Path) -> None:
    with pytest.raises(SourceError, match=r"^cannot read the slide$"), atomic_write(old):
        raise SourceError("cannot read the slide")
    with pytest.raises(RunFolderError, match=r"cannot write .*cannot read the slide"), atomic_write(old, refusal=RunFolderError):
        raise SourceError("cannot read the slide")


def test_errors_of_a_run_folder_name_the_run_folder(tmp_path: Path) -> None:
    write_text(tmp_path / "new" / "plan.txt", "a plan")
    assert _names(tmp_path / "new") == ["plan.txt"]
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="is a file, not a folder"):
        write_text(tmp_path / "file" / "plan.txt", "a plan")


def test_partial_files_of_a_crash_are_removed(tmp_path: Path) -> None:
    (tmp_path / f"{PARTIAL_MARK}0.png").write_text("half")
    (tmp_path / f"{PARTIAL_MARK}best-1").mkdir()
    (tmp_path / f"{PARTIAL_MARK}best-1" / "weights").write_text("half")
    (tmp_path / "whole.png").write_text("whole")
    clear_partial(tmp_path)
    assert _names(tmp_path) == ["whole.png"]


@pytest.mark.parametrize("path", [".", "/"])
def test_a_path_without_a_name(path: str) -> None:
    with pytest.raises(SourceError, match="it names no file"), atomic_write(path):
        raise AssertionError("the block runs")


def test_a_failed_run_folder_is_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunFolderError, match="cannot write to the run folder"), RunFolder(tmp_path / "run"):
        raise AssertionError("the block runs")
    assert not (tmp_path / "run").exists(), "a folder that the refused run created is removed"


def test_a_folder_of_foreign_files_is_no_run_folder(tmp_path: Path) -> None:
    """A run would overwrite a table or page of that name."""
    (tmp_path / "splits.csv").write_text("a table")
    (tmp_path / ".hidden").write_text("")
    with pytest.raises(RunFolderError, match=r"holds other files \(splits.csv\).* Give a new one with --run"), RunFolder(tmp_path):
        raise AssertionError("the block runs")
    assert _names(tmp_path) == [".hidden", "splits.csv"]
    (tmp_path / "splits.csv").unlink()
    for _ in range(2):  # an empty one, and one with a run
        with RunFolder(tmp_path):
            (tmp_path / "splits.csv").write_text("of the run")


@pytest.mark.usefixtures("frozen_objects")
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


@pytest.mark.usefixtures("frozen_objects")
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


@pytest.mark.usefixtures("frozen_objects")
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


@pytest.mark.usefixtures("frozen_objects")
def test_a_read_only_file_can_be_locked(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("")
    path.chmod(0o444)
    with lock_file(path, creates=False), pytest.raises(BlockingIOError):
        lock_file(path, creates=False)


@pytest.mark.parametrize(
    ("value", "refusal"),
    [
        (3, "the plot: its path is 3, an int; give a text"),
        (None, "the plot: its path is None, a NoneType"),
        (b"a.png", "the plot: its path is b'a.png', a bytes"),
        ("a\0.png", "no file can have the path 'a.x00.png'"),
        ("", "no file can have the path ''"),
    ],
)
def test_values_that_are_no_path(value: Any, refusal: str) -> None:
    with pytest.raises(InputError, match=refusal):
        as_path(value, "the plot")
    with pytest.raises(InputError, match=r"a file to write|no file can have"), atomic_write(value):
        pass


@pytest.mark.parametrize("path", ["a\0.safetensors", b"weights.safetensors", "", 3])
def test_weights_files_and_folders_have_paths(path: Any) -> None:
    with pytest.raises(InputError, match="weights file"):
        sft.WeightsFile(path)
    with pytest.raises(InputError, match="host_folder"):
        sft.Options(host_folder=path)
