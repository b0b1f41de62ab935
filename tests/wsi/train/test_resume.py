"""A run that is killed repeatedly ends in the bits of an undisturbed run."""

from __future__ import annotations

import csv
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from sft.wsi.train.checkpoint import CheckpointFolder
from tests.helpers.crash_injection import Death, _child, run_process
from tests.helpers.fork_server import fork_context
from tests.helpers.wsi import write_config, write_task

_TRAINING, _GROUPS, _CHECKPOINT = (
    "sft.wsi.train.trainer:Trainer",
    "sft.wsi.train.grad_accumulation:GradientAccumulator",
    "sft.wsi.train.checkpoint",
)

#: In the order in which they happen to one run of 3 epochs with 3 optimizer steps each, and a checkpoint every second step.
_DEATHS = (
    Death(place=f"{_TRAINING}._step", call=2, manner="after"),  # weights have changed, nothing is saved
    Death(place=f"{_CHECKPOINT}:save_file", manner="half"),  # half of the weights are written
    Death(place=f"{_GROUPS}._forward", call=4),  # in the middle of a group
    Death(place=f"{_CHECKPOINT}:os.rename", manner="after"),  # the new checkpoint exists, and so do the old ones
    Death(place="sft.wsi.eval.predict:Predictor._predict", call=2),  # validating
    Death(place=f"{_CHECKPOINT}:fsync_folder", call=2),  # between the best checkpoint and the last one
    Death(place=f"{_GROUPS}._forward", call=4, manner="term"),  # terminated in the middle of a group
    Death(place="sft.wsi.eval.report:write_csv"),  # training is complete, and no evaluation
    Death(place="sft.wsi.eval.report:write_csv", manner="term"),  # terminated between the evaluations of two splits
)


def _command(folder: Path, table: Path, name: str) -> list[str]:
    config = write_config(
        folder / f"{name}.yaml",
        table,
        folder / name,
        task={"kind": "multilabel", "class_weights": "balanced"},
        model={"budget": "420KiB"},
        train={"epochs": 3, "precision": "fp16", "checkpoint_every": 2, "clip_norm": 1.0, "warmup_steps": 2},
    )
    return ["train", "--config", str(config), "--bootstrap", "20"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("undisturbed")
    table = write_task(folder, num_slides=10)
    assert run_process(_command(folder, table, "run")) == 0
    return folder / "run", table


def _state(run: Path, kind: str) -> dict[str, Any]:
    checkpoint = CheckpointFolder(run / "checkpoints").load(kind)
    assert checkpoint is not None
    state = {name: value for name, value in checkpoint.state.items() if name not in ("settings", "weights_sha256")}
    if "progress" in state:  # a terminated run has saved once more than the other
        state["progress"] = {name: value for name, value in state["progress"].items() if name != "serial"}
    return {"weights": checkpoint.weights, **state}


def _assert_same_bits(value: Any, other: Any, where: str = "") -> None:
    assert type(value) is type(other), where
    if isinstance(value, torch.Tensor):
        assert value.dtype == other.dtype and value.shape == other.shape, where
        assert torch.equal(
            value.contiguous().view(torch.uint8) if value.dim() else value, other.contiguous().view(torch.uint8) if value.dim() else other
        ), where
    elif isinstance(value, dict):
        assert list(value) == list(other), where
        for name in value:
            _assert_same_bits(value[name], other[name], f"{where}.{name}")
    elif isinstance(value, (list, tuple)):
        assert len(value) == len(other), where
        for number, (a, b) in enumerate(zip(value, other, strict=True)):
            _assert_same_bits(a, b, f"{where}[{number}]")
    else:
        assert value == other, where


def _assert_same_run(folder: Path, other: Path) -> None:
    for kind in ("last", "best"):
        _assert_same_bits(_state(folder, kind), _state(other, kind), kind)
    steps = []
    for run in (folder, other):
        with (run / "steps.csv").open(newline="") as file:
            steps.append([{name: cell for name, cell in row.items() if "seconds" not in name} for row in csv.DictReader(file)])
    assert steps[0] == steps[1] and len(steps[0]) == 9
    for name in ("metrics.csv", "val/predictions.csv", "test/predictions.csv", "val/metrics.json", "test/patients.csv", "plan.json"):
        assert (folder / name).read_bytes() == (other / name).read_bytes(), name


def _kill_from_outside(command: list[str], run: Path) -> None:
    """Kill the run as soon as its second checkpoint exists."""
    process = fork_context().Process(target=_child, args=(command, None))
    process.start()
    assert process.pid is not None
    while not list((run / "checkpoints").glob("last-00000002")) and process.is_alive():
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    process.close()


@pytest.mark.parametrize(
    "numbers",
    [(6,), (1, 6), (0, 2, 4), (3, 5, 7)],
    ids=["asked to end", "while saving, and asked to end", "while computing", "between checkpoints"],
)
def test_a_run_killed_at_critical_calls_ends_in_the_same_bits(
    undisturbed: tuple[Path, Path], tmp_path: Path, numbers: tuple[int, ...]
) -> None:
    run, table = undisturbed
    command = _command(tmp_path, table, "run")
    _kill_from_outside(command, tmp_path / "run")
    for death in (_DEATHS[number] for number in numbers):
        expected = 75 if death.manner == "term" else -signal.SIGKILL
        assert run_process(command, death) == expected, death
    assert run_process(command) == 0
    _assert_same_run(run, tmp_path / "run")
    assert not list((tmp_path / "run").rglob(".partial-*"))
