"""The benchmark of whole steps without a GPU."""

from __future__ import annotations

import gzip
import importlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
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


def test_without_a_gpu_the_script_refuses(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [str(_ROOT / "benchmarks" / "gpu.sh"), "steps", "--out", str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert "run it on a machine with a GPU" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_step_is_compared_with_eager_pytorch(bench: Any) -> None:
    (case,) = (case for case in bench.step_cases() if case.name == "vgg block 1")
    ours, eager = bench.verify_step(case, torch.float32, "aten", torch.device("cpu"), 40)
    assert 0 < ours <= 1.1 * eager


def _small(bench: Any, name: str) -> Any:
    """A case with one block of VGG in place of its network, and a small image."""
    (case,) = (case for case in bench.step_cases() if case.name == name)
    (block,) = (each.make for each in bench.step_cases() if each.name == "vgg block 1")
    return replace(case, make=block, size=64, budget=None)


def _run(bench: Any, case: Any, tmp_path: Path, *options: str) -> Any:
    parsed = bench.parse(["--dry-run", "--out", str(tmp_path), *options])
    return bench.run_step(case, "fp32", "aten", torch.device("cpu"), parsed)


@pytest.mark.parametrize(
    "name", ["vgg16 offload", "vgg16 streamed weights", "vgg16 file", "resnet18 frozen strips, CUDA graphs", "vgg16 large"]
)
def test_each_mode_of_execution_is_verified_and_timed(bench: Any, name: str, tmp_path: Path) -> None:
    case = _small(bench, name)
    record = _run(bench, case, tmp_path)
    assert (record.status, record.note) == ("ok", "")
    assert record.seconds is not None and (record.plain_seconds is not None) == case.has_plain
    assert 0 < record.allocated_bytes <= record.projected_peak_bytes


@pytest.mark.parametrize(("share", "note"), [(1, ""), (10**6, "smallest budget with a plan, ")])
def test_a_case_without_a_plan_gets_the_smallest_budget(
    bench: Any, share: int, note: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workspaces of a GPU may exceed the case's share of the memory of eager PyTorch's activations."""
    monkeypatch.setattr(bench, "verify_step", lambda *_: (1e-6, 1e-6))
    case = replace(_small(bench, "vgg block 1"), tile=None, share_of_plain=share)
    parsed = bench.parse(["--dry-run", "--out", str(tmp_path)])
    parsed.dry_run = False
    record = bench.run_step(case, "fp32", "aten", torch.device("cpu"), parsed)
    assert record.status == "ok" and record.note.startswith(note) and bool(record.note) == bool(note)
    assert 0 < record.allocated_bytes <= record.projected_peak_bytes


def test_cases_plan_together_and_are_timed_in_turn(tmp_path: Path) -> None:
    script = _ROOT / "benchmarks" / "kernels" / "kernel_steps.py"
    options = ["--dry-run", "--together", "--time", "--only", "vgg block 1", "vgg block 2", "--dtypes", "bf16", "--backends", "aten"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(_ROOT)}
    command = [sys.executable, str(script), *options, "--out", str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "2 of 2 right" in done.stdout, done.stderr
    states = [line.split("s  ", 1)[1].split(",")[0].split(maxsplit=1) for line in done.stderr.splitlines() if " s  " in line]
    last = [" ".join(state) for state in states[-4:]]
    assert last == ["timed vgg block 1", "ended vgg block 1", "timed vgg block 2", "ended vgg block 2"]


def test_all_networks_and_modes_have_a_case(bench: Any) -> None:
    cases = bench.step_cases()
    words = " ".join(case.name for case in cases)
    assert all(word in words for word in ("vgg16", "resnet18 frozen", "resnet18 training", "u-net", "large"))
    assert {"offload-dp", "auto"} == {case.strategy for case in cases}
    assert any(case.cuda_graphs is True for case in cases) and any(case.reads_file for case in cases)
    assert any(case.weights == "stream" for case in cases)
    assert cases[0].name == "vgg16 step", "the most telling case comes first"


@pytest.mark.parametrize(
    ("errors", "status"),
    [((1e-6, 1e-6), "ok"), ((1.5e-5, 1e-6), "ok"), ((1.05e-4, 1e-4), "ok"), ((3e-5, 1e-6), "wrong"), ((float("nan"), 1e-6), "wrong")],
)
def test_a_case_is_timed_always_and_flagged_by_the_limits_of_tune(
    bench: Any, errors: tuple[float, float], status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuDNN selects other algorithms for strips than for the full image, so the smaller error may be on either side."""
    monkeypatch.setattr(bench, "verify_step", lambda *_: errors)
    record = _run(bench, _small(bench, "vgg block 1"), tmp_path)
    assert record.status == status and record.seconds is not None and record.plain_seconds is not None
    assert ("limit 2e-05" in record.note) == (status == "wrong")


def test_a_failing_verification_does_not_hide_the_time(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("no algorithm")

    monkeypatch.setattr(bench, "verify_step", fail)
    record = _run(bench, _small(bench, "vgg block 1"), tmp_path)
    assert (record.status, record.note) == ("failed", "RuntimeError: no algorithm") and record.seconds is not None


def test_a_trace_is_an_extra(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "verify_step", lambda *_: (1e-6, 1e-6))
    record = _run(bench, _small(bench, "vgg block 1"), tmp_path, "--trace")
    (trace,) = tmp_path.glob("*-gpu-steps-vgg-block-1-fp32-aten.trace.json.gz")
    assert "aten::convolution" in gzip.decompress(trace.read_bytes()).decode() and record.note == ""

    def fail(*_: Any) -> None:
        raise RuntimeError("no profiler")

    monkeypatch.setattr(bench, "_write_trace", fail)
    record = _run(bench, _small(bench, "vgg block 1"), tmp_path, "--trace")
    assert (record.status, record.note) == ("ok", "no trace: RuntimeError: no profiler") and record.seconds is not None


def test_more_memory_than_projected_is_wrong(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "verify_step", lambda *_: (1e-6, 1e-6))
    measure = bench.measure_step_memory
    monkeypatch.setattr(bench, "measure_step_memory", lambda *each: replace(measure(*each), allocated_bytes=2**40, reserved_bytes=2**41))
    record = _run(bench, _small(bench, "vgg block 1"), tmp_path)
    assert record.status == "wrong" and "allocated 1.00 TiB, projected" in record.note and record.seconds is not None
    assert "reserved 2.00 TiB, projected" in record.note
    record.projected_reserved_bytes = 2**40
    assert "| 2.000 |" in bench.step_table([record])


def test_both_sides_have_the_same_settings_of_cudnn(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both run with or without the search of cuDNN, by an option; by default without."""
    seen: list[tuple[bool, bool]] = []

    def run_step(case: Any, dtype: str, backend: str, *_: Any) -> Any:
        seen.append(_cudnn())
        return bench.StepRecord(name=case.name, dtype=dtype, backend=backend)

    monkeypatch.setattr(bench, "run_step", run_step)
    command = ["--dry-run", "--only", "vgg block 1", "--dtypes", "fp32", "--backends", "aten", "--out", str(tmp_path)]
    before = _cudnn()
    assert bench.main(command) == bench.main([*command, "--cudnn-benchmark"]) == 0
    assert seen == [(True, False), (True, True)] and _cudnn() == before
    assert bench.main([*command, "--minutes", "0"]) == 0 and len(seen) == 2


def _cudnn() -> tuple[bool, bool]:
    return torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark


def test_results_are_a_table(bench: Any, tmp_path: Path) -> None:
    good = bench.StepRecord(name="a", dtype="bf16", backend="auto", error=1e-3, eager_error=2e-3, allocated_bytes=2**30)
    good.seconds, good.plain_seconds = (1e-3, 2e-3, 3e-3), (3e-3, 5e-3, 6e-3)
    good.queued_seconds, good.plain_queued_seconds = 1.5e-3, 4e-3
    bad = bench.StepRecord(name="b", dtype="fp32", backend="triton", status="wrong", note="error 1 | 2")
    bench.write_steps(tmp_path / "x", [good, bad], {"device": "none"})
    text = (tmp_path / "x.md").read_text()
    assert "| a | bf16 | auto | 0.50 | 2.0 (1.0 to 3.0) |  | 5.0 (3.0 to 6.0) | 1.5 | 4.0 | 2.50 | 1.00 GiB |" in text
    assert "**wrong**: error 1 \\| 2" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.json", "x.md"]


def test_segments_of_a_step_by_pool() -> None:
    harness = importlib.import_module("harness.gpu")
    snapshot = [{"segment_pool_id": (0, 2), "stream": 7, "total_size": size << 20} for size in (2, 2, 20)] + [
        {"stream": 0, "total_size": 2**21}
    ]
    pools = harness.segments_by_pool(snapshot)
    assert pools == {"pool (0, 2), stream 7": [20, 2, 2], "pool (0, 0), stream 0": [2]}
    memory = harness.DeviceMemory(allocated_bytes=1, requested_bytes=1, reserved_bytes=2**30, segments=pools)
    plan = SimpleNamespace(projected_peak_bytes=1, projected_reserved_bytes=2**29)
    assert "pool (0, 2), stream 7: 20 2 x 2 MiB; pool (0, 0), stream 0: 2 MiB" in harness.memory_problem(memory, plan)
