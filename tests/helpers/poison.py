"""Poisoned allocations: an unwritten element never has the right value by chance.

An uninitialised buffer often has zeros or the right values of an earlier run, so a kernel that omits a row passes its tests. Inside
:func:`poisoned` every buffer that is allocated without a value is filled first: NaN in floating and complex buffers, the largest value in
integer ones, True in boolean ones.

PyTorch itself fills them in its deterministic mode, so buffers that operators allocate inside are filled too.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["poisoned"]


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill every buffer allocated without a value, until the block ends.

    >>> with poisoned():
    ...     torch.empty(2), torch.empty(1, dtype=torch.int8)
    (tensor([nan, nan]), tensor([127], dtype=torch.int8))
    """
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch._C._get_deterministic_fill_uninitialized_memory(),
    )
    with warnings.catch_warnings():
        # Only warn: operators without a deterministic implementation run as usual.
        warnings.filterwarnings("ignore", message=".*does not have a deterministic implementation.*")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch._C._set_deterministic_fill_uninitialized_memory(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
            torch._C._set_deterministic_fill_uninitialized_memory(before[2])
