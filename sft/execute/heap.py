"""Giving freed memory back to the system while a walk runs on the CPU.

The C library serves buffers of up to 32 MiB from one heap. A walk makes and frees such buffers strip after strip, and between them the
small blocks of carried rows that stay. Each block lands in the hole of a freed buffer, which then is too small for the next strip's,
so the heap grows by some strips' worth with every strip, although hardly any of it is in use: measured 5.9 GiB of process memory for
0.9 GiB of live tensors. Trimming hands the pages of the holes back. It is a no-op where the C library has no such call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

__all__ = ["TRIM_AFTER_BYTES", "HeapTrimmer"]

#: Bytes of freed buffers that may pile up before the heap is trimmed; making them takes far longer than the trim.
TRIM_AFTER_BYTES = 256 * 2**20


@cache
def _find_malloc_trim() -> Callable[[], None] | None:
    """The C library's call, `None` where it has none."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        return None
    trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    return lambda: trim(0)


@dataclass(slots=True)
class HeapTrimmer:
    """Trims the heap each time that programs have made and freed enough."""

    freed_bytes: int = 0

    def note(self, num_bytes: int) -> None:
        """A program has run whose buffers took so many bytes at its peak."""
        self.freed_bytes += num_bytes
        if self.freed_bytes >= TRIM_AFTER_BYTES:
            self.freed_bytes = 0
            trim = _find_malloc_trim()
            if trim is not None:
                trim()
