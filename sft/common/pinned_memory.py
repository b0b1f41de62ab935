"""Page-locked memory of the host, which copies to and from a CUDA device run beside the computation.

It is NumPy's, locked in place: torch's own page-locked buffers are rounded up to powers of two, and kept when they are free. A system that
does not lock so much (a limit, a sandbox) loses speed and nothing else: CUDA copies from and to other memory, too, and waits meanwhile.
"""

from __future__ import annotations

import warnings
import weakref
from contextlib import suppress

import numpy as np
import numpy.typing as npt
import torch

from sft.common.byte_units import format_bytes

__all__ = ["lock_pages"]


def lock_pages(data: npt.NDArray[np.uint8], purpose: str, remedy: str) -> None:
    """Lock an array's pages for as long as it lives, or warn that the system does not.

    Args:
        data: the array.
        purpose: for the warning: ``"the plan's copies"``.
        remedy: likewise, a sentence.
    """
    if not data.nbytes:
        return
    runtime = torch.cuda.cudart()
    status = int(runtime.cudaHostRegister(data.ctypes.data, data.nbytes, 0))
    if status != 0:
        with suppress(RuntimeError):  # CUDA reports the failure once more, at the next kernel, whosever that is
            torch.zeros(1, device="cuda").add_(1)
        warnings.warn(
            f"{purpose} take {format_bytes(data.nbytes)} of page-locked host memory, which the system does not give (CUDA error {status}): "
            f"the step computes the same, and waits for its copies. {remedy}",
            RuntimeWarning,
            stacklevel=2,
        )
        return
    weakref.finalize(data, runtime.cudaHostUnregister, data.ctypes.data)
