"""Results of a folder of gpu.sh, in the form of `benchmarks/results`."""

from __future__ import annotations

import gzip
import importlib
import json
from pathlib import Path
from typing import Any

import pytest

_ROOT = Path(__file__).parents[2]


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(_ROOT / "benchmarks"))
    return importlib.import_module("gpu_results")


def _case(network: str, status: str) -> dict[str, Any]:
    sizes = ("allocated_bytes", "projected_bytes", "reserved_bytes", "projected_reserved_bytes")
    return {"network": network, "mode": "strips", "status": status, "error": 1e-15, "note": "", **dict.fromkeys(sizes, 2**20)}


def test_files_of_a_kind_are_merged(results: Any, tmp_path: Path) -> None:
    """The later of two results with one name counts; paths of commands are left out."""
    environment = {"command": "gpu.sh --out /somewhere", "commit": "abc", "device": "NVIDIA H100"}
    for day, case in (("01", _case("u-net", "failed")), ("02", _case("u-net", "ok")), ("03", _case("vgg16", "ok"))):
        folder = tmp_path / "in" / day
        folder.mkdir(parents=True)
        (folder / f"2026-01-{day}-gpu-smoke.json").write_text(json.dumps({"environment": environment, "cases": [case]}))
    (tmp_path / "in" / "gpu-check").mkdir()
    log = "FAILED tests/a/test_b.py::test_c - AssertionError\n== 1 failed, 99 passed, 2 skipped in 46.14s ==\n"
    (tmp_path / "in" / "gpu-check" / "log.txt").write_text(log)
    (tmp_path / "in" / "kernel-tests.txt").write_text("26 passed in 10.0s\n")
    assert results.main([str(tmp_path / "in"), "--gpu", "h100", "--out", str(tmp_path / "out")]) == 0
    smoke = json.loads((tmp_path / "out" / "2026-01-03-h100-gpu-smoke.json").read_text())
    assert [(case["network"], case["status"]) for case in smoke["cases"]] == [("u-net", "ok"), ("vgg16", "ok")]
    assert smoke["environment"] == {"commit": "abc", "device": "NVIDIA H100"}
    tests = json.loads((tmp_path / "out" / "2026-01-03-h100-gpu-tests.json").read_text())["tests"]
    assert tests["marked gpu"] == {"failed": 1, "passed": 99, "skipped": 2, "failures": ["tests/a/test_b.py::test_c"]}
    assert tests["kernels, compiled"] == {"passed": 26, "failures": []}
    assert "| u-net | strips | ok | 1.0e-15 | 1.00 MiB |" in (tmp_path / "out" / "2026-01-03-h100-gpu-smoke.md").read_text()


def test_kernels_of_traces_are_summed_by_name(results: Any, tmp_path: Path) -> None:
    kernels = [("void at::native::a<float>", 2000), ("b", 1500), ("void at::native::a<float>", 1000)]
    events = [{"cat": "kernel", "name": name, "dur": microseconds} for name, microseconds in kernels] + [{"cat": "cpu_op", "name": "a"}]
    names = ("Memcpy HtoD (Pinned -> Device)", "Memcpy HtoD (Pinned -> Device)", "Memcpy DtoD (Device -> Device)")
    events += [{"cat": "gpu_memcpy", "name": name, "dur": 50, "args": {"bytes": 2 * 2**20}} for name in names]
    (tmp_path / "2026-01-02-net.trace.json.gz").write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    rows = [tuple(row.values()) for row in results._kernels(tmp_path)["net"]]
    assert rows == [("all", 3, 4.5), ("a<float>", 2, 3.0), ("b", 1, 1.5), ("copy HtoD, 2.0 MiB", 2, 0.1)]


def test_a_folder_without_results(results: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert results.main([str(tmp_path), "--gpu", "h100", "--out", str(tmp_path)]) == 1
    assert "no results of gpu.sh" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["rates", "smoke", "steps"])
def test_committed_results_have_their_tables(results: Any, kind: str, tmp_path: Path) -> None:
    """Collecting a committed file again writes it unchanged."""
    newest = max((_ROOT / "benchmarks" / "results").glob(f"*-h100-gpu-{kind}.json"))
    (tmp_path / newest.name).write_text(newest.read_text())
    (name,) = results.collect(tmp_path, "h100", tmp_path / "out")
    for suffix in (".json", ".md"):
        assert (tmp_path / "out" / f"{name}{suffix}").read_text() == newest.with_suffix(suffix).read_text()
