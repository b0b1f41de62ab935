"""Staging memory: page-locked host memory in which rows wait for their copy to the device.

A copy from other host memory would make the host wait until all queued work of the device is complete. A plan knows the bytes that its step
needs: one slab, kept for the next step (:class:`~sft.torch_runtime.host.host_memory.HostSlabPool`). Work outside of a planned step has
torch's page-locked memory, which is rounded up and cached.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from sft.runtime.offload import HostArena
from sft.torch_runtime.host.host_memory import SlabLease

__all__ = ["HostStaging", "StagingRange"]


@dataclass(slots=True, eq=False)
class StagingRange:
    """Range of staging memory, split into buffers one after the other.

    Attributes:
        data: its bytes.
        start: its offset in the slab; ``None`` for memory of its own.
    """

    data: Tensor
    start: int | None
    _used: int = 0

    def take(self, num_bytes: int, aligned: int) -> Tensor:
        """The next buffer, which uses ``aligned`` bytes of the range."""
        buffer = self.data[self._used : self._used + num_bytes]
        self._used += aligned
        return buffer


@dataclass(slots=True)
class HostStaging:
    """Staging memory of one pass.

    Attributes:
        lease: the plan's slab; ``None`` outside of a planned step.
    """

    lease: SlabLease | None = None
    _arena: HostArena = field(default_factory=HostArena)

    def allocate(self, num_bytes: int) -> StagingRange:
        """Allocate a range; one that the slab has no room for has memory of its own."""
        if self.lease is not None:
            start = self._arena.allocate(num_bytes)
            if start + num_bytes <= self.lease.data.numel():
                return StagingRange(self.lease.slice(start, num_bytes), start)
            self._arena.free(start)
        return StagingRange(torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True), None)

    def free(self, staged: StagingRange) -> None:
        """Free a range; no copy uses it any more."""
        if staged.start is not None:
            self._arena.free(staged.start)
            staged.start = None
