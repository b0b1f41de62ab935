"""Slabs of host memory for what leaves the device during a step.

A plan says how many bytes of the host its step takes. They are one slab, made for the first step and kept for the next: page-locking memory
takes longer than copying into it. A step that begins while another's backward pass is still to come (two losses, two micro-batches) takes
a slab of its own; one whose tape is gone gives its slab back, whether its backward pass ran or not.

The memory is NumPy's, so `sft.measure_peak` on the CPU counts the device's share alone. For CUDA it is page-locked in place.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sft.errors import InternalError
from sft.execute.room import HostAllocator
from sft.weights.pinned import lock_pages

__all__ = ["SlabLease", "HostSlabPool"]


class HostSlabPool:
    """The slabs of one plan.

    Args:
        num_bytes: of each.
        device: where the copies come from.
        room: where their bytes come from.
    """

    def __init__(self, num_bytes: int, device: torch.device, room: HostAllocator) -> None:
        self.num_bytes, self._device, self._room = num_bytes, device, room
        self._free: list[Tensor] = []

    def lease(self) -> SlabLease:
        """A slab that is given back when nobody holds the lease any more.

        Raises: as :meth:`HostAllocator.take`.
        """
        slab = self._free.pop() if self._free else self._made()
        lease = SlabLease(slab)
        weakref.finalize(lease, self._free.append, slab)
        return lease

    def _made(self) -> Tensor:
        if self._device.type == "meta":
            return torch.empty(0, dtype=torch.uint8, device="cpu")  # a dry run has nothing to copy
        data = self._room.take(self.num_bytes, "the plan's copies")
        if self._device.type == "cuda" and self._room.folder is None:
            lock_pages(data, "the plan's copies", "Raise the limit of locked memory (ulimit -l), or give a smaller host_budget.")
        return torch.from_numpy(data)


@dataclass(slots=True, eq=False, weakref_slot=True)
class SlabLease:
    """The use of a slab.

    Attributes:
        data: its bytes.
    """

    data: Tensor = field(repr=False)

    def part(self, start: int, num_bytes: int) -> Tensor:
        """A stretch of it.

        Raises:
            InternalError: it ends behind the slab's end.
        """
        if start + num_bytes > self.data.numel():
            raise InternalError(f"a copy of {num_bytes} bytes at {start} of a slab of {self.data.numel()}: the plan took it for smaller")
        return self.data[start : start + num_bytes]
