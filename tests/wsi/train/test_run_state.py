"""Changes that a resumed run may and may not make, and its early stop."""

from __future__ import annotations

import csv
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from torch import nn

from sft.common.errors import InputError, SourceError
from sft.distributed.mesh import MeshShape
from sft.wsi.cli import read_config
from sft.wsi.commands import _plans
from sft.wsi.data.table import SlideTable, file_bytes, read_table
from sft.wsi.errors import RunFolderError
from sft.wsi.run.progress import Reporter
from sft.wsi.train.experiment import calibrate_norms, load_experiment
from sft.wsi.train.run_state import check_same_run, config_fingerprint, run_environment
from tests.helpers.wsi import TinyNet, damage_tile, write_config, write_task
from tests.helpers.wsi import run_wsi as main


def _steps(run: Path) -> list[dict[str, str]]:
    with (run / "steps.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _start(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code and output of a run; warnings are printed, as from a shell."""
    with warnings.catch_warnings():
        warnings.filterwarnings("always", ".* not to the same bits")
        code = main(["train", *arguments, "--bootstrap", "0"])
    output, errors = capsys.readouterr()
    return code, " ".join((output + errors).split())


def test_a_run_stopped_by_a_slide_continues_with_the_remedy_of_the_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = write_task(tmp_path, num_slides=6, size_px=136)
    damage_tile(tmp_path / "s1.tif")
    config = write_config(tmp_path / "c.yaml", table, tmp_path / "run", model={"norm": "frozen"}, train={"epochs": 1, "accumulate": 1})
    code, said = _start(["--config", str(config)], capsys)
    assert code == 1 and "s1.tif" in said and "6 slides checked, 0 cannot be used" in said
    code, said = _start(["--config", str(config), "--train.on_error", "skip", "--model.budget", "65MiB"], capsys)
    assert code == 3, said
    assert "model.budget (was '64MiB', is '65MiB'), train.on_error (was 'raise', is 'skip'). It continues, but not to the same bits" in said
    assert [row["slides"] for row in _steps(tmp_path / "run")] == ["s0"]


def test_norms_are_calibrated_without_damaged_slides(tmp_path: Path) -> None:
    table = write_task(tmp_path, num_slides=6, size_px=136)
    damage_tile(tmp_path / "s1.tif")
    for policy in ("skip", "raise"):
        config = read_config(write_config(tmp_path / "c.yaml", table, tmp_path / "run", train={"on_error": policy}))
        experiment = load_experiment(config, trust="tests")
        if policy == "raise":
            with pytest.raises(SourceError, match="s1"):
                calibrate_norms(experiment, {})
        else:
            assert calibrate_norms(experiment, {}) == 2
            norms = [module for module in experiment.model.modules() if isinstance(module, nn.BatchNorm2d)]
            assert len(norms) == 2 and all(norm.running_mean is not None and norm.running_mean.abs().sum() > 0 for norm in norms)


def test_patience_ends_a_run_and_more_of_it_continues(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = write_task(tmp_path, num_slides=6, size_px=96)
    train = {"lr": 1e-30, "patience": 1, "epochs": 5, "accumulate": 2}
    config = ["--config", str(write_config(tmp_path / "c.yaml", table, tmp_path / "run", train=train))]
    for _ in range(2):
        code, said = _start(config, capsys)
        assert code == 0 and len(_steps(tmp_path / "run")) == 2, "an epoch without a better validation; again: nothing is trained"
    code, said = _start([*config, "--train.patience", "2"], capsys)
    assert code == 0 and len(_steps(tmp_path / "run")) == 3 and "train.patience (was 1, is 2)" in said


def test_a_run_whose_network_was_rewritten_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = write_task(tmp_path, num_slides=6, size_px=96)
    config = ["--config", str(write_config(tmp_path / "c.yaml", table, tmp_path / "run", train={"epochs": 1}))]
    assert _start(config, capsys)[0] == 0
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    monkeypatch.setattr("tests.helpers.wsi.tiny_net", lambda: TinyNet(10))
    code, said = _start(config, capsys)
    assert code == 1 and "its weights are not those of the model" in said and "Traceback" not in said
    assert before == {path: path.read_bytes() for path in before}


def test_other_environments_are_named_and_other_settings_are_refused(tmp_path: Path) -> None:
    config = read_config(write_config(tmp_path / "c.yaml", write_task(tmp_path, num_slides=2, size_px=96), tmp_path / "run"))
    table, now = SlideTable(records=(), classes=()), run_environment()
    assert {
        "torch",
        "num_threads",
        "sft-engine",
        "numpy",
        "tifffile",
        "imagecodecs",
        "simplejpeg",
        "openslide-bin",
        "cpu",
        "machine",
    } <= set(now)
    assert now["numpy"] and now["tifffile"] and now["cpu"]
    state = {"settings": config_fingerprint(config), "table": table.digest(), "surroundings": now}
    check_same_run(tmp_path, state, config, table)
    older = {**state, "surroundings": {name: now[name] for name in ("torch", "num_threads")}}
    check_same_run(tmp_path, older, config, table)  # warnings are errors here
    with pytest.warns(
        RuntimeWarning, match=r"under other conditions: num_replicas \(was 1, is 2\). It continues, but not to the same bits"
    ):
        check_same_run(tmp_path, older, config, table, MeshShape(num_replicas=2))
    other = {**state, "surroundings": {**now, "imagecodecs": "0", "gpu": "H200"}}
    with pytest.warns(
        RuntimeWarning, match=r"under other conditions: imagecodecs \(was '0', is '[^']+'\), gpu \(was 'H200', is None\). It"
    ):
        check_same_run(tmp_path, other, config, table)
    full = read_table(config.data.csv, config.task)
    sizes = {"table": full.digest(), "file_bytes": file_bytes(full)}
    check_same_run(tmp_path, {**state, **sizes}, config, full)
    resized = {**state, **sizes, "file_bytes": {**file_bytes(full), full.records[0].name: 1}}
    told = r"under other conditions: 1 slide file\(s\) of another size, bytes of \w+ \(was 1, is \w+\). It continues"
    with pytest.warns(RuntimeWarning, match=told):
        check_same_run(tmp_path, resized, config, full)
    changed = replace(config, train=replace(config.train, lr=1.0, on_error="skip"))
    with pytest.raises(RunFolderError, match=r"other settings: train.lr \(was 0.01, is 1.0\)\. Restore"):
        check_same_run(tmp_path, state, changed, table)


def test_the_largest_the_widest_and_the_highest_slide_are_planned_for_once_each() -> None:
    sizes = {"large": (50, 50), "wide": (90, 10), "high": (10, 90), "small": (9, 9), "broken": (999, 999)}
    planned: list[tuple[str, bool]] = []
    trainer: Any = SimpleNamespace(plan=lambda record, turned: planned.append((record.name, turned)))
    for rotations, expected in (
        (False, [("large", False), ("wide", False), ("high", False)]),
        (True, [("large", False), ("wide", False), ("wide", True)]),
    ):
        experiment: Any = SimpleNamespace(
            feed=SimpleNamespace(sizes=sizes),
            records=lambda split: [SimpleNamespace(name=name) for name in sizes],
            config=SimpleNamespace(augment=SimpleNamespace(rotations=rotations)),
        )
        planned.clear()
        _plans(experiment, trainer, {"broken": "cannot be read"})
        assert planned == expected


def test_tensorboard_gets_numbers_and_is_missed_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []

    class Writer:
        def __init__(self, folder: str) -> None:
            told.append(folder)

        def add_scalar(self, name: str, value: float, number: int) -> None:
            told.append((name, value, number))

        def close(self) -> None:
            told.append("closed")

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))
    with Reporter(Console(quiet=True), 2, events=tmp_path) as reporter:
        reporter.step({"step": 3, "loss": 0.5, "lr": 0.1, "grad_norm": float("inf")})
        reporter.epoch({"epoch": 1, "val_loss": 0.25, "seconds": 2.0})
    assert told == [
        str(tmp_path), ("train/loss", 0.5, 3), ("train/lr", 0.1, 3), ("epoch/val_loss", 0.25, 1), ("epoch/seconds", 2.0, 1), "closed"
    ]  # fmt: skip
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(InputError, match=r"TensorBoard is missing .*pip install .*\[tensorboard\]"):
        Reporter(Console(quiet=True), 2, events=tmp_path)
