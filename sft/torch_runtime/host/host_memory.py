"""Host memory for values that are never complete on the device, or that wait on the host: in RAM, or in files of a given folder.

*Files* have no name: each is unlinked when it is created, while it is open, if the system allows that, otherwise when it is closed. It is
thus gone when the process is, however that ends. All of its blocks are allocated before it is mapped, since touching a page of a mapping
without a block on the disk kills the process; a full disk is thus an ordinary error before any computation.

*Slabs* contain the values that are offloaded during a step. A plan knows how many bytes of the host its step takes: one slab, which is
allocated for the first step and kept for the next, since page-locking memory takes longer than copying into it. A step that begins before
another's backward pass (two losses, two micro-batches) leases a slab of its own. A slab returns to the pool when its tape is dropped, with
or without a backward pass.

The memory is NumPy's or a file's, so `sft.measure_peak` on the CPU counts the device's share alone. For CUDA, slabs are page-locked in
place.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sft.common.array_types import ByteArray
from sft.common.byte_units import format_bytes
from sft.common.errors import BudgetError, InputError, InternalError, SourceError
from sft.common.pinned_memory import lock_pages
from sft.sources.host_arrays import release_pages
from sft.sources.sink import allocate_blocks, free_space_text

__all__ = ["HostAllocator", "HostSlabPool", "SlabLease"]


@dataclass(frozen=True, slots=True)
class HostAllocator:
    """Allocator of bytes on the host.

    Attributes:
        folder: folder of the files; ``None`` for RAM.
    """

    folder: Path | None = None

    def allocate(self, num_bytes: int, purpose: str) -> ByteArray:
        """Allocate uninitialized bytes (in a file: zeros), which are freed with the last array on them.

        Args:
            num_bytes: number of bytes.
            purpose: plural subject of the error message: ``"the plan's copies"``.

        Raises:
            BudgetError: the system has less memory.
            InputError: the folder does not exist or is not writable.
            SourceError: the disk is full, or fails.
        """
        if self.folder is None:
            try:
                return np.empty(num_bytes, np.uint8)
            except MemoryError as error:
                raise BudgetError(
                    f"{purpose} take {format_bytes(num_bytes)} of the host's memory, which could not be allocated. Name a folder with "
                    "Options(host_folder=...), set host_budget to what is free, or raise the device's budget.",
                    needed_bytes=num_bytes,
                ) from error
        try:
            with tempfile.TemporaryFile(prefix=".sft-", dir=self.folder) as file:
                allocate_blocks(file.fileno(), 0, num_bytes)
                data: ByteArray = np.memmap(file, np.uint8, "r+", shape=(num_bytes,))
                return data
        except OSError as error:
            problem = f"cannot put {purpose} ({format_bytes(num_bytes)}) into a file in {os.fspath(self.folder)!r}: {error.strerror}"
            if isinstance(error, (FileNotFoundError, NotADirectoryError, PermissionError)):
                raise InputError(f"{problem}. Give a folder that exists and may be written to.") from error
            raise SourceError(error.errno, f"{problem}{free_space_text(self.folder)}. Make room, or choose another disk.") from error

    def release_pages(self, data: ByteArray) -> None:
        """Release pages of a file to the kernel; their content stays in the file."""
        if self.folder is not None:
            release_pages(data.reshape(-1, 1, 1))


class HostSlabPool:
    """Slabs of one plan.

    Args:
        num_bytes: size of a slab.
        device: device of the offloaded buffers.
        allocator: allocates the slabs.
        purpose: plural subject of messages. Default: ``"the plan's copies"``
    """

    def __init__(self, num_bytes: int, device: torch.device, allocator: HostAllocator, purpose: str = "the plan's copies") -> None:
        self.num_bytes, self._device, self._allocator, self._purpose = num_bytes, device, allocator, purpose
        self._free: list[Tensor] = []

    def lease(self) -> SlabLease:
        """Lease a slab, which returns to the pool when the lease is garbage.

        Raises: as :meth:`HostAllocator.allocate`.
        """
        slab = self._free.pop() if self._free else self._allocate()
        lease = SlabLease(slab)
        weakref.finalize(lease, self._free.append, slab)
        return lease

    def _allocate(self) -> Tensor:
        if self._device.type == "meta":
            return torch.empty(0, dtype=torch.uint8, device="cpu")  # a dry run copies no bytes
        data = self._allocator.allocate(self.num_bytes, self._purpose)
        if self._device.type == "cuda" and self._allocator.folder is None:
            lock_pages(data, self._purpose, "Raise the limit of locked memory (ulimit -l), or give a smaller host_budget.")
        return torch.from_numpy(data)


@dataclass(slots=True, eq=False, weakref_slot=True)
class SlabLease:
    """Lease of a slab.

    Attributes:
        data: bytes of the slab.
    """

    data: Tensor = field(repr=False)

    def slice(self, start: int, num_bytes: int) -> Tensor:
        """View of a range of the slab.

        Raises:
            InternalError: the range ends after the slab's end.
        """
        if start + num_bytes > self.data.numel():
            raise InternalError(
                f"a copy of {num_bytes} bytes at {start} of a slab of {self.data.numel()}: the plan projected a smaller copy"
            )
        return self.data[start : start + num_bytes]
