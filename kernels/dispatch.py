"""What runs on a tensor: a Triton kernel or the plain reference."""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor

__all__ = ["KERNEL_DTYPES", "empty_channels_last", "has_triton", "uses_triton"]

#: what the kernels on images compute with; others take the reference
KERNEL_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def uses_triton(tensor: Tensor) -> bool:
    """Whether a kernel runs on this tensor, and not the reference."""
    return tensor.is_cuda and has_triton() and tensor.dtype in KERNEL_DTYPES


def empty_channels_last(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """An uninitialised channels-last tensor with the dtype and device of ``like``."""
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last)
