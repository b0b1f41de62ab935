"""Memory pool of a compiled model's steps on a GPU: segments of planned sizes, reserved before the first step.

PyTorch's allocator requests a segment for each tensor that finds no free block. Segments of a step that were made one by one fragment; a
plan knows in which segments its step fits (:mod:`sft.planner.measured.reserved_memory`). The pool requests them at once. It is the model's
own (``torch.cuda.MemPool``), so tensors of the training loop do not divide its blocks.

The passes of one model share the pool, whatever the sizes of their images. For a plan with larger segments it is replaced; memory of the
old pool returns to the device when the last tensor in it is freed. The allocator serves a block only to the stream on which it was
allocated, so another stream has segments of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["BoundPool", "DevicePool"]


@dataclass(slots=True)
class DevicePool:
    """Pool of one model; empty before the first step."""

    _pool: Any = field(default=None, repr=False)
    _segments: tuple[int, ...] = ()
    _stream: int = 0

    @contextmanager
    def use(self, device: torch.device, segments: tuple[int, ...]) -> Iterator[None]:
        """Allocate the memory of this thread in the pool, which has at least these segments."""
        with torch.cuda.device(device):
            # cuBLAS keeps its workspace, so it must not lie in the pool: the handle of this thread and stream allocates it.
            torch.cuda.current_blas_handle()
            stream = torch.cuda.current_stream(device).cuda_stream
            if self._pool is None or stream != self._stream or not _contains(self._segments, segments):
                self._replace(device, segments, stream)
            with torch.cuda.use_mem_pool(self._pool, device):
                yield

    def _replace(self, device: torch.device, segments: tuple[int, ...], stream: int) -> None:
        """Reserve segments in a new pool. Cached memory of the default pool returns to the device first, as programs were tried in it."""
        self._pool = None
        torch.cuda.empty_cache()
        self._pool, self._segments, self._stream = torch.cuda.MemPool(), segments, stream
        with torch.cuda.use_mem_pool(self._pool, device):
            tensors = [torch.empty(num_bytes, dtype=torch.uint8, device=device) for num_bytes in segments]
            del tensors


def _contains(segments: tuple[int, ...], needed: tuple[int, ...]) -> bool:
    """True if each of the needed segments fits into one of the segments."""
    available = sorted(segments, reverse=True)
    return len(needed) <= len(available) and all(have >= need for have, need in zip(available, sorted(needed, reverse=True), strict=False))


@dataclass(frozen=True, slots=True)
class BoundPool:
    """The pool of a model, with the segments of one plan.

    Attributes:
        pool: the model's pool.
        segments: bytes of the plan's segments.
    """

    pool: DevicePool
    segments: tuple[int, ...]

    def use(self, device: torch.device) -> Any:
        """Context of a pass."""
        return self.pool.use(device, self.segments)
