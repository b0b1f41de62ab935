"""``gaussian_nll_loss``, which looks at its variances before it computes: the exporter cannot follow that.

In its place is the same loss without a look: where a variance is negative, and PyTorch would raise, it is NaN. PyTorch writes the smallest
variance, ``eps``, into the variances under ``torch.no_grad``; so a gradient passes to those that were smaller as to all others.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["skip_variance_checks"]

_gaussian_nll_loss = F.gaussian_nll_loss


@contextlib.contextmanager
def skip_variance_checks() -> Iterator[None]:
    """A context in which this loss can be exported."""
    with mock.patch.object(F, "gaussian_nll_loss", _gaussian_nll_loss_unchecked):
        yield


def _gaussian_nll_loss_unchecked(
    input: Tensor, target: Tensor, var: Tensor | float, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Tensor:
    is_column = isinstance(var, Tensor) and var.dim() == input.dim() - 1 and var.shape == input.shape[:-1]
    if not torch.compiler.is_exporting() or not isinstance(var, Tensor) or reduction not in ("none", "mean", "sum"):
        return _gaussian_nll_loss(input, target, var, full=full, eps=eps, reduction=reduction)  # it says what is wrong
    if is_column:
        var = var.unsqueeze(-1)
    elif var.dim() != input.dim() or sum(own for own, other in zip(var.shape, input.shape, strict=True) if own != other) > 1:
        raise ValueError("var is of incorrect size")
    value = var.detach()
    written = torch.where(value < 0, math.nan, value.clamp(min=eps))
    var = var + (written - value)
    loss = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss
