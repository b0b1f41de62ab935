"""Automatic budgets of a run: bytes that are read once, stated, and kept by a continued run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sft
from sft.api import memory_limits
from sft.common.free_memory import FreeMemory
from sft.wsi.cli import read_config
from sft.wsi.config import Config
from sft.wsi.data.cache_budget import cache_budget
from sft.wsi.train.auto_budgets import resolve_budgets
from sft.wsi.train.checkpoint import CheckpointFolder
from sft.wsi.train.distributed import SingleRank
from tests.helpers.wsi import real_pixels, tissue_places, write_config, write_slide, write_table
from tests.helpers.wsi import run_wsi as main

_GIB = 2**30


@pytest.fixture(autouse=True)
def _free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with 8 GiB free of 16 GiB."""
    monkeypatch.setattr(memory_limits, "free_host_memory", lambda: FreeMemory(free_bytes=8 * _GIB, total_bytes=16 * _GIB))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)


def _config(folder: Path, **groups: Any) -> Config:
    table = write_table(folder / "t.csv", [{"slide": "s.tif", "label": "a"}])
    data = {"csv": str(table), **groups.pop("data", {})}
    return read_config(write_config(folder / "c.yaml", table, folder / "run", data=data, **groups))


def test_automatic_budgets_become_bytes_with_their_origin(tmp_path: Path) -> None:
    budgets = resolve_budgets(_config(tmp_path, model={"budget": "auto"}))
    assert budgets.config.model.budget == 7 * _GIB
    assert budgets.lines == ("model.budget auto: 7.00 GiB of 8.00 GiB free on the host",)
    both = resolve_budgets(_config(tmp_path, model={"budget": "auto"}, data={"host_budget": "auto"}))
    cache_bytes = both.config.data.host_budget
    assert isinstance(cache_bytes, int) and cache_bytes == cache_budget(both.config)[0] and abs(cache_bytes / (1.8 * _GIB) - 1) < 1e-6
    assert both.config.model.budget == 5.25 * _GIB  # the host is the device: the cached rows are in the same memory
    assert len(both.lines) == 2 and both.lines[0].startswith("data.host_budget auto: 1.80 GiB; 8.00 GiB are free on the host")
    in_bytes = _config(tmp_path, model={"budget": "64MiB"})
    assert resolve_budgets(in_bytes).config is in_bytes


def test_ranks_take_the_least_budget(tmp_path: Path) -> None:
    class OfTwo(SingleRank):
        def gathered(self, value: Any, among: Any = "all") -> list[Any]:
            return [value, (3 * _GIB, "3.00 GiB of 4.00 GiB free on the host")]

    budgets = resolve_budgets(_config(tmp_path, model={"budget": "auto"}), OfTwo())
    assert budgets.config.model.budget == 3 * _GIB and budgets.budget_note.endswith("the least of 2 ranks")


def test_a_continued_run_keeps_its_budget(tmp_path: Path) -> None:
    config = _config(tmp_path, model={"budget": "auto"})
    state = {"epoch": 1, "step": 2, "settings": {"model.budget": 5 * _GIB}}
    CheckpointFolder(config.run / "checkpoints").save("last", 1, nn.Linear(1, 1), state, keep=1)
    assert resolve_budgets(config).config.model.budget == 7 * _GIB
    resumed = resolve_budgets(config, run=config.run)
    assert resumed.config.model.budget == 5 * _GIB
    assert resumed.lines == ("model.budget auto: 5.00 GiB, as in the checkpoint of this run",)


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_errors_name_the_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = _config(tmp_path, model={"budget": "auto"})
    on_gpu = replace(config, train=replace(config.train, device="cuda"))
    with pytest.raises(sft.InputError, match=r"model.budget auto is the free memory of the device, and this machine has no CUDA device"):
        resolve_budgets(on_gpu)
    monkeypatch.setattr(memory_limits, "free_host_memory", lambda: FreeMemory(free_bytes=2**20, total_bytes=_GIB))
    with pytest.raises(sft.BudgetError, match=r"model.budget auto: of 1.00 GiB on the host 1.00 MiB are free, and nothing is left"):
        resolve_budgets(config)


def test_a_training_states_its_automatic_budget(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = []
    for number, (top, left) in enumerate(tissue_places(72)[:3]):
        write_slide(tmp_path / f"s{number}.tif", real_pixels()[top : top + 64, left : left + 64])
        rows.append({"slide": f"s{number}.tif", "label": "ab"[number % 2], "split": "train" if number < 2 else "val"})
    table = write_table(tmp_path / "t.csv", rows)
    config = write_config(tmp_path / "c.yaml", table, tmp_path / "run", data={"csv": str(table), "host_budget": "auto"})
    assert main(["train", "--config", str(config), "--dry-run", "--model.budget", "auto"]) == 0
    told = capsys.readouterr().out
    assert "model.budget auto: 5.25 GiB of 8.00 GiB free on the host" in told and "data.host_budget auto: 1.80 GiB" in told
    assert "5.25 GiB (auto: 5.25 GiB of 8.00 GiB free on the host)" in " ".join(told.split())
