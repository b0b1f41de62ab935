"""What optimizer steps on flat buffers have in common: which buffers go together."""

from __future__ import annotations

import torch
from torch import Tensor

from sft.errors import InputError
from sft.kernels.geometry import raise_problems

__all__ = ["check_flat", "check_rates"]


def check_flat(parameter: Tensor, gradient: Tensor, states: dict[str, Tensor | None], copy: Tensor | None) -> None:
    """Raise unless all are contiguous vectors of one length, states of the parameter's dtype, fp32 or fp64."""
    problems = []
    if parameter.dtype not in (torch.float32, torch.float64):
        problems.append(f"parameter is {parameter.dtype}; keep a master copy in torch.float32 and give the other as copy")
    vectors = {"parameter": parameter, "gradient": gradient, **states, "copy": copy}
    for name, tensor in vectors.items():
        if tensor is None:
            continue
        if tensor.dim() != 1 or not tensor.is_contiguous() or tensor.numel() != parameter.numel() or tensor.device != parameter.device:
            what = f"{tuple(tensor.shape)}, strides {tensor.stride()}, on {tensor.device}"
            problems.append(f"{name} is {what}; give a contiguous vector of {parameter.numel()} elements on {parameter.device}")
        elif not tensor.is_floating_point() or (name in states and tensor.dtype != parameter.dtype):
            problems.append(f"{name} is {tensor.dtype}, parameter is {parameter.dtype}; cast it")
    raise_problems("these buffers are not one optimizer's", problems)


def check_rates(**rates: float) -> None:
    """Raise unless all are at least 0."""
    if any(not rate >= 0 for rate in rates.values()):
        raise InputError(f"an optimizer's rates are at least 0, got {', '.join(f'{name}={rate}' for name, rate in rates.items())}")
