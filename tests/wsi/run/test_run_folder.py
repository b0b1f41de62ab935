"""The folder of a run: effects of a refused run, locks of writers, and numbers of epochs."""

from __future__ import annotations

import csv
import os
import shutil
from pathlib import Path

import pytest

from sft.wsi.errors import RunFolderError
from sft.wsi.run.folder import RunFolder
from tests.helpers.wsi import run_wsi as main
from tests.helpers.wsi import write_config, write_task

pytestmark = pytest.mark.usefixtures("without_proposals")


def test_a_refused_run_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    table = write_task(tmp_path, num_slides=6, size_px=96)
    run = tmp_path / "runs" / "group" / "first"
    arguments = ["train", "--config", str(write_config(tmp_path / "c.yaml", table, run))]
    before = sorted(tmp_path.rglob("*"))
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 10**5))
        assert main(arguments) == 1  # no disk space for checkpoints
    for option in (
        ["--model.budget", "20KiB"],
        ["--data.mpp", "0.1"],
        ["--train.monitor", "auc", "--tensorboard", "true", "--data.mpp", "9"],
    ):
        assert main([*arguments, *option]) == 1  # refused with the folder locked
    assert sorted(tmp_path.rglob("*")) == before
    run.mkdir(parents=True)
    assert main([*arguments, "--model.budget", "20KiB"]) == 1
    assert list(run.iterdir()) == [], "an empty folder of the user's stays, without a lock"
    capsys.readouterr()


@pytest.mark.usefixtures("frozen_objects")
def test_a_refused_run_leaves_the_run_that_is_there(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run") as folder:
        with pytest.raises(RunFolderError, match="in use by this process"), RunFolder(tmp_path / "run"):
            pass
        assert (tmp_path / "run" / ".lock").exists(), "the lock of the run that is going on stays"
        folder.write_yaml("config.yaml", {"a": 1})
    with pytest.raises(KeyError), RunFolder(tmp_path / "run"):
        raise KeyError
    assert (tmp_path / "run" / "config.yaml").exists() and (tmp_path / "run" / ".lock").exists()


@pytest.mark.usefixtures("frozen_objects")
def test_a_lock_of_a_removed_file_locks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is refused removes its lock file at the moment when another one opens it."""
    import fcntl

    flock, calls = fcntl.flock, []

    def locked(file: object, flags: int) -> None:
        flock(file, flags)  # type: ignore[arg-type]
        calls.extend([flags] if flags & fcntl.LOCK_EX else [])
        if len(calls) == 1 and flags & fcntl.LOCK_EX:
            (tmp_path / "run" / ".lock").unlink()

    monkeypatch.setattr("sft.common.atomic_files.fcntl.flock", locked)
    with RunFolder(tmp_path / "run"):
        monkeypatch.setattr("sft.common.atomic_files.fcntl.flock", flock)
        assert len(calls) == 2 and (tmp_path / "run" / ".lock").exists()
        with pytest.raises(RunFolderError, match="in use"), RunFolder(tmp_path / "run"):
            pass


def _epochs(run: Path) -> list[str]:
    with (run / "steps.csv").open(newline="") as file:
        return [row["epoch"] for row in csv.DictReader(file)]


def test_epochs_count_from_one_and_old_files_are_brought_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = write_task(tmp_path, num_slides=6, size_px=96)
    config = write_config(tmp_path / "c.yaml", table, tmp_path / "run", train={"epochs": 2, "accumulate": 1})
    assert main(["train", "--config", str(config), "--bootstrap", "0"]) == 0
    assert _epochs(tmp_path / "run") == ["1", "1", "2", "2"]
    path = tmp_path / "run" / "steps.csv"
    header, *rows = path.read_text().splitlines()
    assert header.split(",")[:2] == ["step", "epoch"]
    old = [",".join([step, str(int(epoch) - 1), *rest]) for step, epoch, *rest in (row.split(",") for row in rows)]
    path.write_text("\n".join([header, *old]) + "\n")
    for _ in range(2):  # converted once
        with RunFolder(tmp_path / "run") as folder:
            folder.start_steps(3)
        assert _epochs(tmp_path / "run") == ["1", "1", "2"]
    assert os.path.getsize(path) > 0 and "epoch 2 of 2" in capsys.readouterr().out
