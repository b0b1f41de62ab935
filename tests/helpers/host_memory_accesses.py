"""Accesses to host memory outside of dispatch modes: NumPy's copies, strip readers, and page locks."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from sft.sources import strip_reader
from tests.helpers.happens_before import library_line

if TYPE_CHECKING:
    from tests.helpers.fake_cuda import FakeGpu

__all__ = ["watch_host_memory"]


def watch_host_memory(patches: pytest.MonkeyPatch, gpu: FakeGpu) -> None:
    """Report NumPy's copies and allocations, and the reads of strip readers, to a fake device."""
    copyto, empty, read_strip = np.copyto, np.empty, strip_reader._read_strip

    def copy_noted(target: Any, source: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(source, np.ndarray):
            gpu.host_access(f"numpy.copyto{library_line()}", [source], writes=False)
        gpu.host_access(f"numpy.copyto{library_line()}", [target], writes=True)
        copyto(target, source, *args, **kwargs)

    def empty_noted(*args: Any, **kwargs: Any) -> Any:
        array = empty(*args, **kwargs)
        if array.nbytes:
            start = array.__array_interface__["data"][0]
            gpu.new_host_memory(start, array.nbytes)
            weakref.finalize(array, gpu.free_host_memory, start, array.nbytes).atexit = False
        return array

    def read_noted(shared: Any, data: Any, *args: Any) -> Any:
        gpu.host_access("read of a strip into a reader's buffer", [data], writes=True)
        return read_strip(shared, data, *args)

    class Runtime:
        """CUDA runtime: page locks."""

        def cudaHostRegister(self, start: int, num_bytes: int, flags: int) -> int:
            gpu.pinned.append((start, start + num_bytes))
            return 0

        def cudaHostUnregister(self, start: int) -> int:
            gpu.pinned[:] = [each for each in gpu.pinned if each[0] != start]
            return 0

    patches.setattr(np, "copyto", copy_noted)
    patches.setattr(np, "empty", empty_noted)
    patches.setattr(strip_reader, "_read_strip", read_noted)
    patches.setattr(torch.cuda, "cudart", Runtime)
