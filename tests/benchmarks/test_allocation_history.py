"""The history of a step's allocations on a GPU, aligned with the simulated ones."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sft

_ROOT = Path(__file__).parents[2]
_MIB = 2**20


@pytest.fixture
def history(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module."""
    monkeypatch.syspath_prepend(str(_ROOT / "benchmarks" / "kernels"))
    return importlib.import_module("allocation_history")


def _simulated(history: Any) -> list[Any]:
    """Allocations of a step of a small network in strips on a GPU that is in another machine."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 8, 3, padding=1))
    plans = history.PlanRecorder()
    with plans.recording():
        plan = sft.plan(model, (1, 3, 512, 512), budget="64MiB", device="cuda", options=sft.Options(tile=(128, None)))
    assert not plans.simulated(plan.projected_peak_bytes + 1)
    allocations: list[Any] = plans.simulated(plan.projected_peak_bytes)
    return allocations


def _snapshot(allocations: list[Any], *, extra_bytes: int = 0) -> dict[str, Any]:
    """A snapshot of the caching allocator with these allocations, and in the middle another one."""
    frames = [{"filename": "/somewhere/sft/lower/custom_ops/statistics.py", "line": 7, "name": "sums"}]
    trace, live, free = [], dict[int, list[int]](), iter(range(1, 10**6))
    for position, each in enumerate(allocations):
        if each.num_bytes > 0:
            address = next(free)
            live.setdefault(each.num_bytes, []).append(address)
            trace.append({"action": "alloc", "addr": address, "size": each.num_bytes, "stream": 5, "frames": frames})
        else:
            address = live[-each.num_bytes].pop()
            trace.append({"action": "free_requested", "addr": address, "size": -each.num_bytes, "stream": 5})
            trace.append({"action": "free_completed", "addr": address, "size": -each.num_bytes, "stream": 5})
        if extra_bytes and position == len(allocations) // 2:
            entry = {"addr": 0, "size": extra_bytes, "stream": 5, "frames": frames}
            trace += [{"action": "alloc", **entry}, {"action": "free_completed", **entry}]
    return {"device_traces": [[], trace]}


def test_equal_sequences_have_no_difference(history: Any) -> None:
    simulated = _simulated(history)
    assert len(simulated) > 50
    assert all(each.label for each in simulated)
    assert any("convolution" in each.label for each in simulated)
    real = history.real_allocations(_snapshot(simulated))
    assert list(real) == [5]
    assert history.differences(real[5], simulated) == ""


def test_an_allocation_that_was_not_simulated_has_a_line(history: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = _simulated(history)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: _snapshot(simulated, extra_bytes=110 * _MIB))
    history.write_allocations(tmp_path / "case", simulated)
    head, *lines = (tmp_path / "case.allocations.txt").read_text(encoding="utf-8").splitlines()
    assert head.startswith("stream 5: ")
    assert [line.split()[0] for line in lines] == ["-", "-"]
    assert "+110.000 MiB  lower/custom_ops/statistics.py:7" in lines[0]
    assert "-110.000 MiB" in lines[1]


def test_the_simulated_allocations_are_those_of_the_plan(history: Any) -> None:
    """A step frees what it allocates, except for gradients of the caller, and its peak is that of the plan's pool."""
    live = peak = 0
    for each in _simulated(history):
        live += each.num_bytes
        peak = max(peak, live)
        assert live >= 0
    assert peak > 4 * _MIB
