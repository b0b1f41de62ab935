"""Label operators and unreduced losses (one value for each pixel)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["bincount", "cross_entropy", "label_weight", "nll", "one_hot"]


def bincount(self: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """Count (or sum of weights) of each number below ``minlength``; the length of ``torch.bincount`` depends on the values."""
    indices = self.reshape(-1).long()
    if weights is None:
        weights = torch.ones_like(indices)
    elif weights.dtype != torch.float32:
        weights = weights.double()
    return weights.new_zeros(minlength).index_add(0, indices, weights.detach().reshape(-1))


def one_hot(self: Tensor, num_classes: int) -> Tensor:
    """One-hot encoding of labels ``[N, 1, axes...]`` along channels, ``[N, num_classes, axes...]``.

    As in torch a label that is not a class is an error, checked without a wait for the device.
    """
    is_class = ((self >= 0) & (self < num_classes)).all()
    torch.ops.aten._assert_async.msg(is_class, f"Class values must be at least 0 and less than the number of classes, {num_classes}")
    classes = torch.arange(num_classes, device=self.device).view(num_classes, *[1] * (self.dim() - 2))
    return (self == classes).to(self.dtype)


def cross_entropy(self: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, label_smoothing: float) -> Tensor:
    """Cross-entropy of each pixel, ``[N, 1, axes...]``, for labels of that shape or class probabilities."""
    labels = target if target.is_floating_point() else target.squeeze(1)
    options: dict[str, Any] = {"weight": weight, "ignore_index": ignore_index, "label_smoothing": label_smoothing}
    return torch.nn.functional.cross_entropy(self, labels, reduction="none", **options).unsqueeze(1)


def nll(self: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """Negative log-likelihood of each pixel, ``[N, 1, axes...]``; the backward of torch's own loss requires channels first."""
    is_counted = target != ignore_index
    labels = torch.where(is_counted, target, torch.zeros_like(target)).long()
    loss = -self.gather(1, labels)
    if weight is not None:
        loss = loss * weight[labels]
    return torch.where(is_counted, loss, torch.zeros((), dtype=loss.dtype, device=loss.device))


def label_weight(self: Tensor, weight: Tensor | None, ignore_index: int, dtype: str) -> Tensor:
    """Weight of each pixel's label in a mean, ``[N, 1, axes...]``; zero for ignored labels."""
    is_counted = self != ignore_index
    kind = getattr(torch, dtype)
    if weight is None:
        return is_counted.to(kind)
    labels = torch.where(is_counted, self, torch.zeros_like(self))
    return torch.where(is_counted, weight.to(kind)[labels], torch.zeros((), dtype=kind, device=self.device))
