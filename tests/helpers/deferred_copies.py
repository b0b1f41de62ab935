"""Copies to the host and back that are as late as possible: their bytes move at the first wait for them.

On the CPU a copy is complete when its call returns, so a schedule without its waits gives the right results. Inside :func:`late_copies`
every byte of a copy under way is poison (all bits set: NaN in floating buffers, -1 in integers):

- the copy's place in the slab from the offload to the first wait for it. The copy has the content of the buffer at that moment, so a buffer
that changes or is reused too early gives wrong results, too;
- the buffer before its bytes are given back, and again from the prefetch to the first wait for it;
- the copy's place in the slab after its last use.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from torch import Tensor

from sft.runtime.offload import OffloadedValue
from sft.torch_runtime.host.offload import HostOffloader

__all__ = ["late_copies"]

_POISON = 255


class _LateCopies(HostOffloader):
    """Values of a step that are on the host, or will be after their copies."""

    def offload(self, target: str, tensors: Sequence[Tensor]) -> OffloadedValue:
        copy = super().offload(target, tensors)  # which has filled the slab already; these bytes may not be read
        self._poison_slab(copy)
        copy.offload_done = partial(self._move, copy, down=True)
        return copy

    def release(self, copy: OffloadedValue) -> None:
        self._wait_copies(copy)
        for buffer in copy.buffers:
            buffer.fill_(_POISON)
        super().release(copy)

    def prefetch(self, copy: OffloadedValue) -> None:
        super().prefetch(copy)
        for buffer in copy.buffers:
            buffer.fill_(_POISON)
        copy.prefetch_done = partial(self._move, copy, down=False)

    def free_offload(self, copy: OffloadedValue) -> None:
        self._wait_copies(copy)
        self._poison_slab(copy)
        super().free_offload(copy)

    def _poison_slab(self, copy: OffloadedValue) -> None:
        for _, slab in self._buffers_with_slab(copy):
            slab.fill_(_POISON)

    def _move(self, copy: OffloadedValue, *, down: bool) -> None:
        for buffer, slab in self._buffers_with_slab(copy):
            (slab if down else buffer).copy_(buffer if down else slab)

    def _wait_copies(self, copy: OffloadedValue) -> None:
        waiting: list[Any] = [copy.offload_done, copy.prefetch_done]
        copy.offload_done = copy.prefetch_done = None
        copy.is_arriving = False
        for move in waiting:
            if move is not None:
                move()


@contextmanager
def late_copies() -> Iterator[None]:
    """Let all steps of compiled models copy late, until the block ends."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr("sft.torch_runtime.region_inputs.HostOffloader", _LateCopies)
        yield
