"""The benchmark of rates on a CPU."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module, with few calls."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    module = importlib.import_module("gpu_rates")
    monkeypatch.setattr(module, "_CONVOLUTIONS", ((2, 3, 5),))
    monkeypatch.setattr(module, "_ROWS", (4,))
    return module


def test_every_rate_has_a_number(rates: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host_seconds = rates.host_seconds
    monkeypatch.setattr(rates, "host_seconds", lambda call, device, calls=1: host_seconds(call, device, 1))
    assert rates.main(["--device", "cpu", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.iterdir()
    measured = json.loads(path.read_text())
    assert measured["environment"]["torch"] == torch.__version__
    names = measured["rates"]
    assert {"host: add_", "host: convolution", "device: copy of 64 MiB", "bf16 2 -> 3, 4 x 5"} <= set(names)
    assert all(number > 0 for name in names if name.startswith(("host", "device")) for number in names[name].values())
    assert names["bf16 2 -> 3, 4 x 5"]["data"]["TFLOP/s"] > 0


def test_without_a_gpu(rates: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert rates.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err
