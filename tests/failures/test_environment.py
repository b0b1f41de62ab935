"""Environments in which a step cannot run: the message names the environment and not the model."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sft
from sft.torch_runtime.profiling import CACHE_VARIABLE


def test_an_exporter_that_cannot_be_loaded_is_no_fault_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with ``ulimit -f 0``, or on a disk that is full or read-only."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/nowhere"])
    with pytest.raises(sft.SourceError, match=r"cannot load torch's exporter.*No usable temporary directory.*TMPDIR.*ulimit -f") as error:
        sft.compile(nn.Conv2d(3, 4, 3), (1, 3, 16, 16), budget="1MiB")
    assert "forward" not in str(error.value) and "Conv2d" not in str(error.value)


def _is_file(folder: Path) -> Path:
    (folder / "file").touch()
    return folder / "file"


@pytest.mark.parametrize(
    "place", [_is_file, lambda folder: _is_file(folder) / "sub", lambda folder: Path("/proc/nowhere"), lambda folder: Path("")]
)
def test_a_cache_folder_that_cannot_be_written_costs_times_and_no_step(
    place: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, os.fspath(place(tmp_path)) if place(tmp_path) != Path() else "")
    net: Any = sft.compile(nn.Conv2d(3, 4, 3), (1, 3, 20, 20), budget="1MiB", options=sft.Options(profile="measure"))
    assert net(torch.randn(1, 3, 20, 20)).shape == (1, 4, 18, 18)
    assert net.plan.projected_seconds is not None
