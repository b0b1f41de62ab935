"""Small tables that a program computes on the host when it runs: indices and weights of the rows that a strip reads."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["upload_table"]


def upload_table(table: npt.NDArray[Any], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A copy of ``table`` on ``device``, as ``dtype`` if one is given.

    The host does not wait for it: a copy from pageable memory would hold it until all that a GPU has queued is done, at every strip.
    """
    host = torch.from_numpy(np.ascontiguousarray(table)).to(dtype)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" and _can_pin_memory() else host.to(device)


@functools.cache
def _can_pin_memory() -> bool:
    """Whether there is page-locked memory: not without a GPU, where programs are traced for one, and not in every sandbox."""
    try:
        torch.empty(1, pin_memory=True)
    except RuntimeError:
        return False
    return True
