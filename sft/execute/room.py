"""Room on the host for what is never whole on the device, or waits there: in memory, or in a file of a given folder.

A file has no name: it is removed when it is made, while it is open, where the system allows that, and else when it is closed. So it is gone
when the process is, however that ends. All of its blocks are allocated before it is mapped, since touching a page of a mapping whose
block the disk does not have kills the process; a full disk is thus an error like any other, and comes before anything is computed.

The memory is NumPy's or a file's, and `sft.measure_peak` on the CPU does not count it.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sft.errors import BudgetError, InputError, SourceError
from sft.sources.host import release_pages
from sft.sources.npy import allocate_blocks, free_space_text
from sft.units import format_bytes

__all__ = ["ByteArray", "HostAllocator"]

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
