"""Page-locked host memory and the streams of copies, for copies to and from a CUDA device that overlap with the computation.

The memory is NumPy's, locked in place: torch's own page-locked buffers are rounded up to powers of two and cached after use. A system that
refuses to lock so many pages (a limit, a sandbox) costs speed only: CUDA also copies pageable memory, but the computation waits.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sft.common.byte_units import format_bytes

__all__ = ["CopyStreams", "begin_download", "copy_streams", "lock_pages"]


@dataclass(frozen=True, slots=True)
class CopyStreams:
    """Streams of the copies between a CUDA device and the host, one in each direction."""

    down: torch.cuda.Stream
    up: torch.cuda.Stream


@cache
def copy_streams(device: torch.device, *, recorded: bool = False) -> CopyStreams:
    """Streams of the copies of a device.

    Args:
        device: the device.
        recorded: copies while a CUDA graph is recorded. They have streams of their own: what another thread queued on them would be
            recorded, too.
    """
    return CopyStreams(torch.cuda.Stream(device), torch.cuda.Stream(device))


def begin_download(target: torch.Tensor, source: torch.Tensor) -> torch.cuda.Event:
    """Begin to copy a tensor on a CUDA device into page-locked memory, after all work queued so far; the event of its end.

    The computation's stream waits for the copy, so that the tensor may be changed and freed at once. The host waits for the event before it
    reads the target.
    """
    down, compute = copy_streams(source.device).down, torch.cuda.current_stream(source.device)
    down.wait_stream(compute)
    with torch.cuda.stream(down):
        target.copy_(source, non_blocking=True)
        done: torch.cuda.Event = down.record_event()
    compute.wait_event(done)
    return done


def lock_pages(data: npt.NDArray[np.uint8], purpose: str, remedy: str) -> None:
    """Lock an array's pages for the lifetime of the array, or warn if the system refuses.

    Args:
        data: the array.
        purpose: subject of the warning, plural: ``"the plan's copies"``.
        remedy: last sentence of the warning.
    """
    if not data.nbytes:
        return
    runtime = torch.cuda.cudart()
    status = int(runtime.cudaHostRegister(data.ctypes.data, data.nbytes, 0))
    if status != 0:
        with suppress(RuntimeError):  # CUDA reports the failure once more, at the next kernel
            torch.zeros(1, device="cuda").add_(1)
        warnings.warn(
            f"{purpose} take {format_bytes(data.nbytes)} of page-locked host memory, which could not be allocated (CUDA error {status}): "
            f"the step computes the same, and waits for its copies. {remedy}",
            RuntimeWarning,
            stacklevel=2,
        )
        return
    weakref.finalize(data, _unlock_pages, runtime, torch.cuda.synchronize, data.ctypes.data)


def _unlock_pages(runtime: Any, synchronize: Callable[[], None], address: int) -> None:
    """Unlock an array's pages before its memory is freed; copies that are still under way, after a step that was dropped, end first."""
    with suppress(RuntimeError):  # while a graph is recorded, or after an error of the device
        synchronize()
    runtime.cudaHostUnregister(address)
