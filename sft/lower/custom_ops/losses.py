"""Labels, and losses of each element."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["bincount", "cross_entropy", "label_weight", "nll", "one_hot"]


def bincount(self: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """How often each number below ``minlength`` occurs; torch's own has as many entries as the largest number asks for."""
    places = self.reshape(-1).long()
    if weights is None:
        weights = torch.ones_like(places)
    elif weights.dtype != torch.float32:
        weights = weights.double()
    return weights.new_zeros(minlength).index_add(0, places, weights.detach().reshape(-1))


def one_hot(self: Tensor, num_classes: int) -> Tensor:
    """Labels ``[N, 1, axes...]`` as channels of zeros and a one, ``[N, num_classes, axes...]``."""
    classes = torch.arange(num_classes, device=self.device).view(num_classes, *[1] * (self.dim() - 2))
    return (self == classes).to(self.dtype)


def cross_entropy(self: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, label_smoothing: float) -> Tensor:
    """Cross-entropy of each pixel, ``[N, 1, axes...]``, given labels of that shape or probabilities of the classes."""
    labels = target if target.is_floating_point() else target.squeeze(1)
    options: dict[str, Any] = {"weight": weight, "ignore_index": ignore_index, "label_smoothing": label_smoothing}
    return torch.nn.functional.cross_entropy(self, labels, reduction="none", **options).unsqueeze(1)


def nll(self: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """The negative of the channel that each pixel's label names, ``[N, 1, axes...]``; the backward of torch's own wants channels first."""
    counts = target != ignore_index
    named = torch.where(counts, target, torch.zeros_like(target)).long()
    found = -self.gather(1, named)
    if weight is not None:
        found = found * weight[named]
    return torch.where(counts, found, torch.zeros((), dtype=found.dtype, device=found.device))


def label_weight(self: Tensor, weight: Tensor | None, ignore_index: int, dtype: str) -> Tensor:
    """What each pixel's label weighs in a mean, ``[N, 1, axes...]``: nothing where it is ignored."""
    counts = self != ignore_index
    kind = getattr(torch, dtype)
    if weight is None:
        return counts.to(kind)
    return torch.where(
        counts, weight.to(kind)[torch.where(counts, self, torch.zeros_like(self))], torch.zeros((), dtype=kind, device=self.device)
    )
