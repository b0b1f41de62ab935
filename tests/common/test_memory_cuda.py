"""The meter on CUDA: the allocator's counters above the start, with a stand-in for them and on a device."""

from __future__ import annotations

import pytest
import torch

import sft.common.memory
from sft.common.memory import measure_peak


class _FakeAllocator:
    """Stand-in for the CUDA caching allocator's counters."""

    def __init__(self) -> None:
        self.allocated = self.requested = 1000
        self.highest = self.highest_requested = 1000

    def allocate(self, num_bytes: int, block_bytes: int | None = None) -> None:
        self.requested += num_bytes
        self.allocated += num_bytes if block_bytes is None else block_bytes
        self.highest = max(self.highest, self.allocated)
        self.highest_requested = max(self.highest_requested, self.requested)

    def reset(self, _: torch.device) -> None:
        self.highest, self.highest_requested = self.allocated, self.requested

    def stats(self, _: torch.device) -> dict[str, int]:
        return {
            "allocated_bytes.all.current": self.allocated,
            "allocated_bytes.all.peak": self.highest,
            "requested_bytes.all.current": self.requested,
            "requested_bytes.all.peak": self.highest_requested,
        }


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> _FakeAllocator:
    fake = _FakeAllocator()
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "memory_stats", fake.stats)
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
    assert sft.common.memory._CudaMeter._open == []


def test_requested_bytes_differ_from_allocator_blocks(allocator: _FakeAllocator) -> None:
    with measure_peak("cuda") as outer:
        allocator.allocate(100, 512)
        allocator.allocate(-100, -512)
        with measure_peak("cuda") as inner:
            allocator.allocate(40, 512)
        assert (inner.num_bytes, inner.requested_bytes) == (512, 40)
    assert (outer.num_bytes, outer.requested_bytes) == (512, 100)


def test_on_the_cpu_requested_and_allocated_bytes_are_equal() -> None:
    with measure_peak() as peak:
        torch.empty(100)
    assert peak.num_bytes == peak.requested_bytes == 400


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
