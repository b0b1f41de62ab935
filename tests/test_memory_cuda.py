"""The meter on CUDA: the allocator's counters above the start, with a stand-in for them and on a device."""

from __future__ import annotations

import pytest
import torch

import sft.memory
from sft.memory import measure_peak


class _FakeAllocator:
    """Stands in for the CUDA caching allocator's counters."""

    def __init__(self) -> None:
        self.allocated = 1000
        self.highest = 1000

    def allocate(self, num_bytes: int) -> None:
        self.allocated += num_bytes
        self.highest = max(self.highest, self.allocated)

    def reset(self, _: torch.device) -> None:
        self.highest = self.allocated


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> _FakeAllocator:
    fake = _FakeAllocator()
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: fake.allocated)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: fake.highest)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", fake.reset)
    return fake


def test_cuda_reads_the_allocator_above_the_start(allocator: _FakeAllocator) -> None:
    allocator.allocate(500)
    allocator.allocate(-500)
    with measure_peak("cuda") as peak:
        assert str(peak.device) == "cuda:0"
        assert peak.num_bytes == 0
        allocator.allocate(300)
        assert peak.num_bytes == 300
        allocator.allocate(-200)
    allocator.allocate(10_000)
    assert peak.num_bytes == 300
    assert peak.current_bytes == 10_100


def test_nested_cuda_blocks_share_one_counter(allocator: _FakeAllocator) -> None:
    with measure_peak("cuda") as outer:
        allocator.allocate(700)
        allocator.allocate(-600)
        with measure_peak("cuda") as inner:
            allocator.allocate(50)
            assert (outer.num_bytes, inner.num_bytes) == (700, 50)
        allocator.allocate(1000)
        assert inner.num_bytes == 50
    assert (outer.num_bytes, inner.num_bytes) == (1150, 50)
    assert sft.memory._CudaMeter._open == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_device() -> None:
    with measure_peak("cuda") as peak:
        first = torch.empty(1 << 20, device="cuda")
        second = first + 1
        del first
    assert peak.num_bytes == 2 * (1 << 22)
    assert peak.current_bytes == 1 << 22
    del second
    assert peak.current_bytes == 0
