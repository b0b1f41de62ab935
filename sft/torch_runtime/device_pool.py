"""Memory pool of a compiled model's steps on a GPU: segments of planned sizes, reserved before the first step.

PyTorch's allocator requests a segment for each tensor that finds no free block. Segments of a step that were made one by one fragment; a
plan knows in which segments its step fits (:mod:`sft.planner.measured.segment_search`). The pool requests them at once. It is the model's
own (``torch.cuda.MemPool``), so tensors of the training loop do not divide its blocks.

The passes of one model share the pool, whatever the sizes of their images. For a plan with larger segments it is replaced; memory of the
old pool returns to the device when the last tensor in it is freed. The allocator serves a block only to the device and the stream on which
it was allocated, so another one has segments of its own. The allocator also refuses a pool that another thread allocates in: a pass waits
for that of another thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from sft.common.byte_units import format_bytes
from sft.common.errors import BudgetError
from sft.common.torch_internals import clear_cublas_workspaces

__all__ = ["DevicePool", "PoolLayout", "prepare_cublas", "release_cublas", "reserve_pool"]

#: Threads, devices and streams that have a workspace of cuBLAS.
_PREPARED: set[tuple[int, torch.device, int]] = set()


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """Memory that a plan has for its steps.

    Attributes:
        segments: bytes of the segments.
        multiplies: false if no program of the plan uses cuBLAS.
        input_segment_bytes: segment outside of the pool for the largest input of a recording, with room for a group of gradients; 0 if
            the allocator chooses it.
    """

    segments: tuple[int, ...] = ()
    multiplies: bool = True
    input_segment_bytes: int = 0


@dataclass(slots=True)
class DevicePool:
    """Pool of one model; empty before the first step."""

    _pool: Any = field(default=None, repr=False)
    _segments: tuple[int, ...] = ()
    _place: tuple[torch.device, int] | None = None
    _lock: Any = field(default_factory=threading.RLock, repr=False)
    _depth: int = 0

    @contextmanager
    def use(self, device: torch.device, layout: PoolLayout) -> Iterator[None]:
        """Allocate the memory of this thread in the pool, which has at least the segments of the layout.

        Waits while another thread allocates in the pool. Within a pass of the same thread there is nothing to do.
        """
        with self._lock:
            if self._depth:
                yield
                return
            with torch.cuda.device(device):
                if layout.multiplies:
                    prepare_cublas(device)
                place = (device, torch.cuda.current_stream(device).cuda_stream)
                if self._pool is None or place != self._place or not _contains(self._segments, layout.segments):
                    self._replace(place, layout.segments)
                self._depth += 1
                try:
                    with torch.cuda.use_mem_pool(self._pool, device):
                        yield
                finally:
                    self._depth -= 1

    def release(self) -> None:
        """Free the pool; the next pass reserves another one."""
        with self._lock:
            self._pool, self._segments, self._place = None, (), None

    def _replace(self, place: tuple[torch.device, int], segments: tuple[int, ...]) -> None:
        """Reserve segments in a new pool. After a failure the next pass reserves again."""
        self.release()
        self._pool = reserve_pool(place[0], segments)
        self._segments, self._place = segments, place


def prepare_cublas(device: torch.device) -> None:
    """Let cuBLAS and cuBLASLt allocate their workspaces for this thread and the current stream, which they keep, outside of any pool.

    Cached memory returns to the device before the first one: the workspace would divide a larger block of a tensor, whose segment it then
    occupies. On an H200 a workspace of 32 MiB occupied 50 MiB (``benchmarks/results/2026-11-28-h200-gpu-steps.md``).
    """
    place = (threading.get_ident(), device, torch.cuda.current_stream(device).cuda_stream)
    with torch.cuda.device(device):
        is_prepared = place in _PREPARED
        if not is_prepared:
            torch.cuda.empty_cache()
        torch.cuda.current_blas_handle()
        if not is_prepared:
            _add_product(device)
            _PREPARED.add(place)


def release_cublas() -> None:
    """Free the workspaces of :func:`prepare_cublas`; not after a CUDA graph with products was recorded, which has their addresses."""
    clear_cublas_workspaces()
    _PREPARED.clear()


def _add_product(device: torch.device) -> None:
    """Multiply with a bias, by cuBLASLt; its tensors have a pool of their own, so that the workspaces of two threads share a segment."""
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool, device):
        bias = torch.zeros(16, dtype=torch.float32, device=device)  # not the default type, which a user may have changed
        matrix = torch.zeros(16, 16, dtype=torch.float32, device=device)
        result = torch.empty_like(matrix)
    torch.addmm(bias, matrix, matrix, out=result)


def reserve_pool(device: torch.device, segments: tuple[int, ...]) -> Any:
    """Memory pool with segments, for the current stream.

    Cached memory of the default pool returns to the device first, as programs were tried in it.

    Raises:
        BudgetError: the device has too little free memory.
    """
    torch.cuda.empty_cache()
    pool = torch.cuda.MemPool()
    try:
        with torch.cuda.use_mem_pool(pool, device):
            tensors = [torch.empty(num_bytes, dtype=torch.uint8, device=device) for num_bytes in segments]
            del tensors
    except torch.OutOfMemoryError as error:
        raise BudgetError(
            f"the plan fits the budget, but {device} has less free: the memory pool of its steps takes {format_bytes(sum(segments))} "
            f"({error}). Free other tensors and models, end other processes on the device, or lower the budget to what is free.",
            needed_bytes=sum(segments),
        ) from error
    return pool


def _contains(segments: tuple[int, ...], needed: tuple[int, ...]) -> bool:
    """True if each of the needed segments fits into one of the segments."""
    available = sorted(segments, reverse=True)
    return len(needed) <= len(available) and all(have >= need for have, need in zip(available, sorted(needed, reverse=True), strict=False))
