"""The benchmark of kernels without a GPU: its arguments, and its cases under Triton's interpreter."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.triton_process import interpret_benchmark, needs_triton

_ROOT = Path(__file__).parents[2]
_FAMILIES = {"conv2d", "conv3d", "depthwise", "dropout", "norm", "optimizer", "pool", "resize", "rows"}


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module, as on a machine without a GPU."""
    monkeypatch.syspath_prepend(str(_ROOT / "benchmarks" / "kernels"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return importlib.import_module("kernel_bench")


@pytest.mark.parametrize("arguments", [["--only", "rows"], ["all"], ["--stage", "2"], ["test"], ["sanitize"], ["tune"]], ids=" ".join)
def test_without_a_gpu_the_script_refuses(arguments: list[str], tmp_path: Path) -> None:
    environment = os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "RESULTS": str(tmp_path)}
    command = [str(_ROOT / "benchmarks" / "gpu.sh"), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and "no CUDA device here" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "nothing"], "invalid choice: 'nothing'"),
        (["--rounds", "1"], "--rounds must be at least 2, got 1"),
        (["--dtypes"], "expected"),
    ],
)
def test_arguments_that_are_refused(bench: Any, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        bench.parse(arguments)
    assert stopped.value.code == 2 and message in capsys.readouterr().err


def test_lists_the_cases(bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.sh", "--list"])
    assert bench.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines} == _FAMILIES
    assert len(set(lines)) == len(lines) == sum(len(case.dtypes) for case in bench.all_cases())
    monkeypatch.setattr(sys, "argv", ["gpu.sh", "--list", "--only", "rows", "--dtypes", "bf16"])
    assert bench.main() == 0
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()] == [["rows", "bf16"]] * 2


@needs_triton
@pytest.mark.parametrize("family", sorted(_FAMILIES))
def test_cases_are_right_under_the_interpreter(bench: Any, family: str, tmp_path: Path) -> None:
    """In fp32 the results of every case are within a few roundings of the exact ones."""
    cases = [case for case in bench.all_cases() if case.family == family]
    # The other layers are the first one with more channels.
    cases = [case for case in cases if not case.name.startswith(("vgg 2", "vgg 3", "vgg 5"))]
    errors = interpret_benchmark([{"name": case.name} for case in cases], tmp_path)
    for case, error in zip(cases, errors, strict=True):
        assert error < (2e-6 if torch.float32 in case.dtypes else 8e-3), case.name
    assert cases


def test_a_wrong_result_has_an_error(bench: Any) -> None:
    truth = [torch.tensor([3.0, 4.0], dtype=torch.float64)]
    assert bench.relative_error([torch.tensor([3.0, 4.5])], truth) == pytest.approx(0.1)
    for wrong in ([torch.tensor([3.0, float("nan")])], [torch.zeros(3)], []):
        assert bench.relative_error(wrong, truth) == float("inf")


def test_results_are_a_table(bench: Any, tmp_path: Path) -> None:
    good = bench.Record(name="a", family="rows", dtype="fp32", error=1e-7, floor_seconds=1e-5, floor="bytes")
    good.ours_seconds, good.theirs_seconds = (1e-5, 2e-5, 3e-5), (3e-5, 5e-5, 6e-5)
    bad = bench.Record(name="b", family="rows", dtype="bf16", status="wrong", note="error 1, limit 0.1")
    bench.write(tmp_path / "x", [good, bad], None, {"device": "none"})
    text = (tmp_path / "x.md").read_text()
    assert "| a | fp32 | 1.0e-07 | 10 | bytes | 20 (10 to 30) | 50 (30 to 60) | 2.50 |  |" in text
    assert "**wrong**: error 1, limit 0.1" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.json", "x.md"]
