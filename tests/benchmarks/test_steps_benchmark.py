"""The benchmark of whole steps, as far as a machine without a GPU can run it."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

_ROOT = Path(__file__).parents[2]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module."""
    monkeypatch.syspath_prepend(str(_ROOT / "benchmarks" / "kernels"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return importlib.import_module("kernel_steps")


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [str(_ROOT / "benchmarks" / "gpu.sh"), "steps", "--out", str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert "run it on a machine with a GPU" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_step_is_compared_with_eager_pytorch(bench: Any) -> None:
    case = bench.step_cases()[0]
    ours, eager = bench.verify_step(case, torch.float32, "aten", torch.device("cpu"), 40)
    assert 0 < ours <= 1.1 * eager


def test_results_are_a_table(bench: Any, tmp_path: Path) -> None:
    good = bench.StepRecord(name="a", dtype="bf16", backend="auto", error=1e-3, eager_error=2e-3, allocated_bytes=2**30)
    good.seconds, good.plain_seconds = (1e-3, 2e-3, 3e-3), (3e-3, 5e-3, 6e-3)
    bad = bench.StepRecord(name="b", dtype="fp32", backend="triton", status="wrong", note="error 1 | 2")
    bench.write_steps(tmp_path / "x", [good, bad], {"device": "none"})
    text = (tmp_path / "x.md").read_text()
    assert "| a | bf16 | auto | 0.50 | 2.0 (1.0 to 3.0) | 5.0 (3.0 to 6.0) | 2.50 | 1.00 GiB |" in text
    assert "**wrong**: error 1 \\| 2" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.json", "x.md"]
