"""Trimming the C library's heap."""

from __future__ import annotations

import ctypes

import pytest
import torch

import sft
from sft.torch_runtime import machine as heap
from sft.torch_runtime.machine import TRIM_AFTER_BYTES, HeapTrimmer


@pytest.fixture
def trims(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each time that the heap is trimmed."""
    calls: list[int] = []
    monkeypatch.setattr(heap, "_find_malloc_trim", lambda: lambda: calls.append(1))
    return calls


def test_trims_each_time_that_enough_was_freed(trims: list[int]) -> None:
    counter = HeapTrimmer()
    for _ in range(7):
        counter.note(TRIM_AFTER_BYTES // 3 + 1)
    assert len(trims) == 2


def test_a_sweep_reports_its_programs(trims: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap, "TRIM_AFTER_BYTES", 64 * 2**10)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 3))
    net = sft.compile(model, (1, 3, 64, 64), budget="1GiB", options=sft.Options(tile=(8, None)))
    net(torch.randn(1, 3, 64, 64)).sum().backward()
    assert trims


def test_works_without_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap, "_find_malloc_trim", lambda: None)
    HeapTrimmer().note(TRIM_AFTER_BYTES)


def test_the_systems_own_call_runs() -> None:
    HeapTrimmer().note(TRIM_AFTER_BYTES)


def test_a_threshold_of_the_environment_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    find = heap._find_malloc_trim.__wrapped__
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_", raising=False)
    assert (find() is None) == (not hasattr(ctypes.CDLL(None), "malloc_trim"))
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1073741824")
    assert find() is None
