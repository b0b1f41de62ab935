"""Batch norms on fake tensors, of which only the shapes are asked.

The exporter keeps a batch norm whole, but finds the shape of its result by running the formula behind it: a dozen operations on fake
tensors with symbolic sizes, which is a third of what capturing a ResNet takes. The result is shaped, typed and laid out like the input.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from sft.analysis.byshape import Decomposition, override_decomposition

__all__ = ["use_batch_norm_meta"]

_BATCH_NORM_DECOMPOSITION = "native_batch_norm_helper"
_BATCH_NORM_ARGUMENTS = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps", "functional")


def use_batch_norm_meta() -> AbstractContextManager[None]:
    """A context in which batch norms on fake tensors are not computed; all as ever where this torch has another formula."""
    return override_decomposition(_BATCH_NORM_DECOMPOSITION, _BATCH_NORM_ARGUMENTS, _batch_norm_meta)


def _batch_norm_meta(formula: Decomposition) -> Decomposition:
    def result(
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        training: bool,
        momentum: float,
        eps: float,
        functional: bool,
    ) -> Any:
        channels = (weight, bias, running_mean, running_var)
        fits = isinstance(input, FakeTensor) and all(t is None or tuple(t.shape) == (input.shape[1],) for t in channels)
        if not fits or not (training or running_mean is not None):  # the formula knows what is wrong
            return formula(input, weight, bias, running_mean, running_var, training, momentum, eps, functional)
        num_kept = input.shape[1] if training or input.device.type != "cpu" else 0
        mean, invstd = (torch.empty(num_kept, dtype=input.dtype, device=input.device) for _ in range(2))  # the exporter tells them apart
        if training and not functional and running_mean is not None and running_var is not None:
            running_mean.copy_(running_mean)  # they are written to, as far as anybody who watches can see
            running_var.copy_(running_var)
        return _empty_like(input), mean, invstd, running_mean, running_var

    return result


def _empty_like(value: Tensor) -> Tensor:
    """A tensor laid out like another one; of one that is seen to be contiguous nobody has to prove it.

    Strides are products of sizes. What PyTorch itself lays out counts at least one element in each dimension.
    """
    rests: set[Any] = {1}
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if _sympy_expression(stride) not in rests:
            return torch.empty_like(value)
        counted = {_sympy_expression(size), _sympy_expression(torch.sym_max(size, 1))}
        rests = {rest * count for rest in rests for count in counted}
    return torch.empty(value.shape, dtype=value.dtype, device=value.device)


def _sympy_expression(size: int | torch.SymInt) -> Any:
    """A size as SymPy writes it."""
    return size.node.expr if isinstance(size, torch.SymInt) else size
