"""Readings of a CUDA device by benchmarks, with stand-ins for torch's counters and properties."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

_ROOT = Path(__file__).parents[2]
_CUDA = torch.device("cuda", 0)
_MIB = 2**20


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the benchmarks' folder."""
    monkeypatch.syspath_prepend(str(_ROOT / "benchmarks"))
    return importlib.import_module("harness.gpu")


class _Counters:
    """Stand-in for the allocator's counters: reserved bytes stay until the cache is emptied, and their peak until it is reset."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allocated = self.peak = 10 * _MIB
        self.reserved = self.reserved_peak = 40 * _MIB
        self.calls: list[str] = []
        for name in ("synchronize", "empty_cache", "memory_reserved", "max_memory_reserved", "memory_stats", "reset_peak_memory_stats"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "init", lambda: None)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)

    def allocate(self, num_bytes: int) -> None:
        self.allocated += num_bytes
        self.reserved = max(self.reserved, 2 * self.allocated)
        self.peak, self.reserved_peak = max(self.peak, self.allocated), max(self.reserved_peak, self.reserved)

    def synchronize(self, device: torch.device) -> None:
        self.calls.append("synchronize")

    def empty_cache(self) -> None:
        self.calls.append("empty")
        self.reserved = self.allocated

    def memory_reserved(self, device: torch.device) -> int:
        return self.reserved

    def max_memory_reserved(self, device: torch.device) -> int:
        return self.reserved_peak

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.peak, self.reserved_peak = self.allocated, self.reserved

    def memory_stats(self, device: torch.device) -> dict[str, int]:
        current, peak = {"current": self.allocated}, {"peak": self.peak}
        return {f"{name}_bytes.all.{key}": value for name in ("allocated", "requested") for key, value in (current | peak).items()}


def test_memory_of_a_step(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Allocated bytes are above the start of the step, reserved bytes above the state before the model was made."""
    counters = _Counters(monkeypatch)
    before = gpu.reserved_bytes(_CUDA)
    assert before == 10 * _MIB and counters.calls == ["synchronize", "empty"]
    counters.allocate(5 * _MIB)  # the model

    def step() -> None:
        counters.allocate(20 * _MIB)
        counters.allocate(-20 * _MIB)

    memory = gpu.measure_step_memory(step, _CUDA, before)
    assert memory.allocated_bytes == memory.requested_bytes == 20 * _MIB
    assert memory.reserved_bytes == 2 * 35 * _MIB - before
    assert counters.calls[-1] == "synchronize"


def test_the_environment_of_a_result(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA Test")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 * 2**30))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91000)
    monkeypatch.setattr("sft.backends.autotune.benchmark.compiler_version", lambda _: "3.9.0-ptxas-13.4")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    with gpu.convolution_settings(search=True):
        facts = gpu.device_environment(_CUDA)
    assert facts["device"] == "NVIDIA Test (sm_90)" and facts["memory"] == "80.00 GiB" and facts["cudnn"] == "91000"
    assert facts["allocator"] == "expandable_segments:True"
    assert (facts["cudnn.benchmark"], facts["tf32"]) == ("True", "False")
    if facts["triton"] != "not installed":
        assert facts["triton"] == "3.9.0-ptxas-13.4"
    on_cpu = gpu.device_environment(torch.device("cpu"))
    assert set(facts) - set(on_cpu) == {"cudnn", "cuda", "memory"}


def test_a_deadline_is_over_after_its_minutes(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [50.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    limited, unlimited = gpu.Deadline.after(2.0), gpu.Deadline.after(None)
    clock[0] += 120
    assert not limited.is_over and not unlimited.is_over
    clock[0] += 0.1
    assert limited.is_over and not unlimited.is_over


@pytest.mark.parametrize(
    "folder", [["--out", "/home/someone/results"], ["--out=/home/someone/results"], []], ids=["two words", "one word", "none"]
)
def test_the_command_of_a_result_names_no_folder(folder: list[str], gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["kernel_bench.py", "--verify", *folder, "--name", "a name"])
    assert gpu.device_environment(torch.device("cpu"))["command"] == "benchmarks/gpu.sh --verify --name 'a name'"
