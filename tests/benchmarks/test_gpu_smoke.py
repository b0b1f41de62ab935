"""The smoke test of a GPU, on a CPU: its cases are right, and faults change its status and its exit code."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import sft

_ROOT = Path(__file__).parents[2]
_CPU = torch.device("cpu")
_SIZE = (48, 40)


@pytest.fixture
def smoke(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The script as a module, on a machine without a GPU."""
    monkeypatch.syspath_prepend(str(_ROOT / "benchmarks"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    module = importlib.import_module("gpu_smoke")
    yield module
    module._reference.cache_clear()


@pytest.fixture
def small(smoke: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script with four convolutions in place of each network."""

    def make() -> nn.Module:
        pairs = itertools.pairwise((3, 8, 8, 8, 8))
        return nn.Sequential(*(nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU()) for a, b in pairs)).eval()

    monkeypatch.setattr(smoke, "STANDARD_NETWORKS", dict.fromkeys(smoke.STANDARD_NETWORKS, make))
    smoke._reference.cache_clear()
    return smoke


def test_a_network_in_strips(smoke: Any) -> None:
    result = smoke.run_case("u-net", "strips", _CPU, _SIZE)
    assert (result.status, result.note) == ("ok", "") and 0 < result.error < 1e-10


def test_a_line_for_each_case(small: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--device", "cpu", "--only", "u-net", "--modes", "strips", "file", "cuda-graphs", "--size", *map(str, _SIZE)]
    assert small.main([*command, "--out", str(tmp_path)]) == 0
    first, *lines, last = capsys.readouterr().out.splitlines()
    assert first.startswith("device ") and last.startswith("3 of 3 right")
    assert [line.split()[:3] for line in lines] == [["ok", "u-net", mode] for mode in ("strips", "cuda-graphs", "file")]
    assert all("error " in line and "allocated " in line and "projected " in line and "reserved " not in line for line in lines)
    assert "no strip of this network can be recorded" in lines[1]
    (path,) = tmp_path.iterdir()
    results = json.loads(path.read_text())
    assert results["environment"]["torch"] == torch.__version__
    assert all(0 <= case["error"] <= 1e-10 and 0 < case["allocated_bytes"] <= case["projected_bytes"] for case in results["cases"])


@pytest.mark.slow
def test_networks_in_processes(tmp_path: Path) -> None:
    """The results of all processes arrive, and are in one file."""
    script = [sys.executable, "-P", str(_ROOT / "benchmarks" / "gpu_smoke.py"), "--device", "cpu", "--processes", "2"]
    cases = ["--only", "u-net", "vgg16", "--modes", "strips", "--size", *map(str, _SIZE), "--out", str(tmp_path)]
    paths = os.pathsep.join((str(_ROOT), str(_ROOT / "benchmarks")))
    done = subprocess.run([*script, *cases], env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.iterdir()
    assert {case["network"] for case in json.loads(path.read_text())["cases"]} == {"u-net", "vgg16"} and "2 of 2 right" in done.stdout


@pytest.mark.parametrize("mode", ["offload", "streamed-weights"])
def test_modes_have_their_feature(small: Any, mode: str) -> None:
    result = small.run_case("u-net", mode, _CPU, _SIZE)
    assert (result.status, result.note) == ("ok", "")


def test_networks_and_modes(smoke: Any) -> None:
    assert set(smoke.NETWORKS) == {"vgg16", "resnet18-frozen", "resnet18-training", "u-net"}
    assert set(smoke.MODES) >= {"strips", "offload", "streamed-weights", "cuda-graphs"}
    options = smoke.parse([])
    assert tuple(options.only) == tuple(smoke.NETWORKS) and tuple(options.modes) == smoke.MODES and options.device == "cuda"


@pytest.mark.parametrize("network", ["vgg16", "resnet18-frozen"])
def test_graphs_can_be_recorded_at_the_size_of_their_case(smoke: Any, network: str) -> None:
    """Programs are recorded if they run often, and the first and last strips of deep networks are programs of their own."""
    with torch.device("meta"):
        model = smoke.STANDARD_NETWORKS[smoke.NETWORKS[network]]()
    size = smoke.image_size(network, "cuda-graphs")
    net: Any = sft.compile(model, (1, 3, *size), budget="64GiB", options=smoke._options("cuda-graphs"), device="cpu")
    assert smoke._check_graphs(net, _CPU) == ("", "no graphs on a CPU: the strips ran one call at a time")


def test_graphs_that_are_not_replayed_are_wrong(smoke: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smoke, "recordable_programs", lambda region, *, training: [object()])
    graphs = SimpleNamespace(num_replays=0)
    prepared = {
        0: SimpleNamespace(region=None, resources=SimpleNamespace(graphs=graphs, pass_graphs=None)),
        1: SimpleNamespace(region=None, resources=SimpleNamespace(graphs=None, pass_graphs=None)),
    }
    net = SimpleNamespace(_sft_engine=SimpleNamespace(plan_cache=SimpleNamespace(prepared=prepared)))
    assert smoke._check_graphs(net, torch.device("cuda")) == ("no strip was replayed as a graph", "")
    graphs.num_replays = 12
    assert smoke._check_graphs(net, torch.device("cuda")) == ("", "12 replays")


def test_faults_are_wrong(small: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """More memory than projected, an error, or a plan without the mode's feature: the status is wrong, and the exit code is 1."""
    command = ["--device", "cpu", "--only", "u-net", "--modes", "strips", "--size", *map(str, _SIZE)]
    with monkeypatch.context() as patch:
        measure = small.measure_step_memory
        patch.setattr(small, "measure_step_memory", lambda *each: replace(measure(*each), allocated_bytes=2**40))
        assert small.main(command) == 1
        assert "wrong" in (line := capsys.readouterr().out.splitlines()[1]) and "allocated 1.00 TiB, projected" in line
    with monkeypatch.context() as patch:
        patch.setattr(small, "relative_error", lambda *_: 1e-9)
        assert small.run_case("u-net", "strips", _CPU, _SIZE).note == "error above 1e-10"
        patch.setattr(small, "_options", lambda mode: small.sft.Options(strategy="none"))
        assert small.run_case("u-net", "strips", _CPU, _SIZE).note == "error above 1e-10; the plan has no strips"
    with monkeypatch.context() as patch:
        patch.setattr(small, "_step", lambda *_: 1 / 0)
        small._reference.cache_clear()
        assert small.main(command) == 1
        assert "failed" in (text := capsys.readouterr().out) and "ZeroDivisionError" in text and "0 of 1 right" in text


def test_without_the_device_or_time(smoke: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert smoke.main([]) == 2
    assert "no device cuda" in capsys.readouterr().err
    assert smoke.main(["--device", "cpu", "--minutes", "0"]) == 1
    assert "0 of 0 right, no time for 20 of 20" in capsys.readouterr().out


def test_reserved_bytes_have_a_column_on_a_gpu(smoke: Any) -> None:
    sizes = {"allocated_bytes": 2**20, "projected_bytes": 2**21, "reserved_bytes": 2**22, "projected_reserved_bytes": 2**23}
    line = smoke.SmokeResult(network="vgg16", mode="strips", error=1e-15, **sizes).line(has_reserved=True)
    assert "allocated   1.00 MiB of   2.00 MiB projected  reserved   4.00 MiB of   8.00 MiB projected" in line


def test_reserved_bytes_above_the_projection_are_wrong(smoke: Any) -> None:
    """A card runs out of reserved memory."""
    gpu = importlib.import_module("harness.gpu")
    plan = sft.plan(nn.Sequential(nn.Conv2d(3, 4, 3)), (1, 3, 32, 32), budget="1GiB", device="cpu")
    plan = replace(plan, projected_reserved_bytes=2**30)

    def problem(reserved: int | None) -> str:
        sentence: str = gpu.memory_problem(gpu.DeviceMemory(allocated_bytes=1, requested_bytes=1, reserved_bytes=reserved), plan)
        return sentence

    assert problem(None) == problem(2**30) == ""
    assert problem(2**31) == "reserved 2.00 GiB, projected 1.00 GiB with all that is resident"
