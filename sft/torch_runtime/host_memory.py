"""Room on the host for what is never whole on the device, or waits there: in memory, or in a file of a given folder.

A file has no name: it is removed when it is made, while it is open, where the system allows that, and else when it is closed. So it is gone
when the process is, however that ends. All of its blocks are allocated before it is mapped, since touching a page of a mapping whose
block the disk does not have kills the process; a full disk is thus an error like any other, and comes before anything is computed.

The memory is NumPy's or a file's, and `sft.measure_peak` on the CPU does not count it.

Slabs of host memory for what leaves the device during a step.

A plan says how many bytes of the host its step takes. They are one slab, made for the first step and kept for the next: page-locking memory
takes longer than copying into it. A step that begins while another's backward pass is still to come (two losses, two micro-batches) takes
a slab of its own; one whose tape is gone gives its slab back, whether its backward pass ran or not.

The memory is NumPy's, so `sft.measure_peak` on the CPU counts the device's share alone. For CUDA it is page-locked in place.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sft.common.byte_units import format_bytes
from sft.common.errors import BudgetError, InputError, InternalError, SourceError
from sft.common.pinned_memory import lock_pages
from sft.sources.host_arrays import release_pages
from sft.sources.sink import allocate_blocks, free_space_text

__all__ = ["ByteArray", "HostAllocator", "HostSlabPool", "SlabLease"]

ByteArray = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class HostAllocator:
    """Where bytes on the host come from.

    Attributes:
        folder: of the files; ``None`` for memory.
    """

    folder: Path | None = None

    def take(self, num_bytes: int, purpose: str) -> ByteArray:
        """Bytes, of which nobody knows what is in them (in a file zeros); gone when the last array on them is.

        Args:
            num_bytes: how many.
            purpose: for the error message: ``"the plan's copies"``.

        Raises:
            BudgetError: there is not so much memory.
            InputError: the folder is none, or nothing may be written there.
            SourceError: the disk is full, or fails.
        """
        if self.folder is None:
            try:
                return np.empty(num_bytes, np.uint8)
            except MemoryError as error:
                raise BudgetError(
                    f"{purpose} take {format_bytes(num_bytes)} of the host's memory, which the system does not give. Give a folder with "
                    "Options(host_folder=...), set host_budget to what there is, or raise the device's budget.",
                    needed_bytes=num_bytes,
                ) from error
        try:
            with tempfile.TemporaryFile(prefix=".sft-", dir=self.folder) as file:
                allocate_blocks(file.fileno(), 0, num_bytes)
                found: ByteArray = np.memmap(file, np.uint8, "r+", shape=(num_bytes,))
                return found
        except OSError as error:
            wanted = f"cannot put {purpose} ({format_bytes(num_bytes)}) into a file in {os.fspath(self.folder)!r}: {error.strerror}"
            if isinstance(error, (FileNotFoundError, NotADirectoryError, PermissionError)):
                raise InputError(f"{wanted}. Give a folder that exists and may be written to.") from error
            raise SourceError(error.errno, f"{wanted}{free_space_text(self.folder)}. Make room, or choose another disk.") from error

    def let_go(self, part: ByteArray) -> None:
        """Hand pages of a file back to the kernel: what is in them stays in the file."""
        if self.folder is not None:
            release_pages(part.reshape(-1, 1, 1))


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
