"""Pool of a model's steps: reserved once, replaced for larger plans, entered by both passes; gradients that outlive a step are copied out
of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import sft
from sft.torch_runtime.device_pool import DevicePool, PoolLayout, prepare_cublas, release_cublas
from tests.helpers.models import ConvNet, image, seeded

_MIB = 2**20


class _FakeCuda:
    """Calls of ``torch.cuda`` in order; allocations are meta tensors."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.stream, self.num_pools = 0, 0
        empty = torch.empty

        def record(*sizes: Any, **options: Any) -> torch.Tensor:
            self.calls.append(f"allocate {sizes[0] // _MIB}")
            return empty(0)

        class Stream:
            cuda_stream = property(lambda _: self.stream)

        @contextmanager
        def use(pool: int, device: torch.device) -> Iterator[None]:
            self.calls.append(f"enter {pool}")
            try:
                yield
            finally:
                self.calls.append(f"leave {pool}")

        @contextmanager
        def device_of(device: torch.device) -> Iterator[None]:
            yield

        def make_pool() -> int:
            self.num_pools += 1
            return self.num_pools

        patch.setattr("sft.torch_runtime.device_pool._PREPARED", set())
        patch.setattr("sft.torch_runtime.device_pool._add_product", lambda device: self.calls.append("product"))
        patch.setattr(torch, "empty", record)
        for name, value in {
            "device": device_of,
            "current_blas_handle": lambda: self.calls.append("blas"),
            "current_stream": lambda device: Stream(),
            "empty_cache": lambda: self.calls.append("empty cache"),
            "MemPool": make_pool,
            "use_mem_pool": use,
        }.items():
            patch.setattr(torch.cuda, name, value)

    def take(self) -> list[str]:
        calls, self.calls = self.calls, []
        return calls


def test_segments_are_reserved_before_the_first_step_and_for_larger_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, pool, device = _FakeCuda(monkeypatch), DevicePool(), torch.device("cuda", 0)

    def step(*segments: int) -> list[str]:
        with pool.use(device, PoolLayout(tuple(size * _MIB for size in segments))):
            cuda.calls.append("step")
        return cuda.take()

    first = ["empty cache", "blas", "product", "empty cache", "enter 1", "allocate 30", "allocate 20", "leave 1"]
    first += ["enter 1", "step", "leave 1"]
    assert step(30, 20) == first  # workspaces of cuBLAS and cached memory come before the pool
    for smaller in ((30, 20), (20, 30), (25,), (15, 29), ()):
        assert step(*smaller) == ["blas", "enter 1", "step", "leave 1"], smaller
    for larger in ((31,), (25, 25), (1, 1, 1)):
        calls = step(*larger)
        assert calls[1] == "empty cache" and calls[-2:] == ["step", f"leave {cuda.num_pools}"], larger
    cuda.stream = 7  # blocks belong to a stream
    assert "empty cache" in step(1)
    device = torch.device("cuda", 1)  # and to a device
    assert "empty cache" in step(1) and "empty cache" not in step(1)


def test_one_thread_at_a_time_enters_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator refuses a pool that is in use, by another thread or by the same one."""
    cuda, pool, device = _FakeCuda(monkeypatch), DevicePool(), torch.device("cuda", 0)
    entered = threading.Event()

    def other() -> None:
        with pool.use(device, PoolLayout()):
            entered.set()

    thread = threading.Thread(target=other)
    with pool.use(device, PoolLayout()):
        with pool.use(device, PoolLayout((20 * _MIB,))):  # a pass within a pass
            pass
        thread.start()
        assert not entered.wait(0.1)
        assert cuda.take() == ["empty cache", "blas", "product", "empty cache", "enter 1", "leave 1", "enter 1"]
    thread.join(10)
    assert entered.is_set() and cuda.take() == ["leave 1", "empty cache", "blas", "product", "enter 1", "leave 1"]


def test_segments_that_could_not_be_reserved_are_reserved_by_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, pool, device = _FakeCuda(monkeypatch), DevicePool(), torch.device("cuda", 0)
    with monkeypatch.context() as patch:

        def full(*_: Any, **__: Any) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB.")

        patch.setattr(torch, "empty", full)
        refusal = r"cuda:0 has less free: the memory pool of its steps takes 20\.00 MiB .*Tried to allocate 20 MiB.*lower the budget"
        with pytest.raises(sft.BudgetError, match=refusal) as raised, pool.use(device, PoolLayout((20 * _MIB,))):
            pass
    assert raised.value.needed_bytes == 20 * _MIB
    cuda.take()
    with pool.use(device, PoolLayout((20 * _MIB,))):
        assert "allocate 20" in cuda.take()


def test_cublas_has_no_workspace_where_no_matrices_are_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, pool, device = _FakeCuda(monkeypatch), DevicePool(), torch.device("cuda", 0)
    with pool.use(device, PoolLayout((20 * _MIB,), multiplies=False)):
        assert "blas" not in cuda.take()


def test_an_error_leaves_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, pool = _FakeCuda(monkeypatch), DevicePool()
    depth: list[int] = []

    @contextmanager
    def use(number: int, device: torch.device) -> Iterator[None]:
        depth.append(number)
        try:
            yield
        finally:
            depth.pop()

    monkeypatch.setattr(torch.cuda, "use_mem_pool", use)
    with pytest.raises(ZeroDivisionError), pool.use(torch.device("cuda", 0), PoolLayout((20 * _MIB,))):
        assert depth == [1]
        raise ZeroDivisionError
    assert not depth and cuda.num_pools == 1


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of allocations in the pool, by a model that is compiled as for a GPU."""
    monkeypatch.setattr("sft.api.pipeline._has_pool", lambda _: True)
    monkeypatch.setattr("sft.api.plan_search.PlanSearch._is_for_gpu", property(lambda _: True))
    monkeypatch.setattr("sft.planner.measured.allocator_overhead.choose_segments", lambda trace, settings, resident: (30 * _MIB,))
    entered: list[int] = []

    @contextmanager
    def use(pool: DevicePool, device: torch.device, layout: PoolLayout) -> Iterator[None]:
        entered.append(len(layout.segments))
        yield
        entered.append(-1)

    monkeypatch.setattr(DevicePool, "use", use)
    return entered


def test_both_passes_allocate_in_the_pool(entered: list[int]) -> None:
    net: Any = sft.compile(seeded(ConvNet), (1, 3, 512, 512), budget="64MiB")
    out = net(image(1, 3, 512, 512))
    assert entered == [1, -1]
    out.sum().backward()
    assert len(entered) == 4
    with torch.no_grad():
        net(image(1, 3, 512, 512))
    assert len(entered) == 6


def test_gradients_that_outlast_the_step_are_copied(entered: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd keeps the first gradient of a parameter; later ones are added to it and freed."""
    model: nn.Module = seeded(ConvNet)
    expected = seeded(ConvNet)
    net: Any = sft.compile(model, (1, 3, 64, 64), budget="64MiB")
    copied: list[torch.Size] = []
    clone = torch.Tensor.clone

    def note(tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        copied.append(tensor.shape)
        return clone(tensor, *args, **options)

    x = image(1, 3, 64, 64)
    for count in (len(list(model.parameters())), 0):
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "clone", note)
            net(x).sum().backward()
        assert len(copied) == count
        copied.clear()
        expected(x).sum().backward()
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_released_workspaces_are_allocated_again(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, device = _FakeCuda(monkeypatch), torch.device("cuda", 0)
    monkeypatch.setattr("sft.torch_runtime.device_pool.clear_cublas_workspaces", lambda: cuda.calls.append("free"))
    for _ in range(2):
        prepare_cublas(device)
    release_cublas()
    prepare_cublas(device)
    assert cuda.take() == ["empty cache", "blas", "product", "blas", "free", "empty cache", "blas", "product"]
