"""Soft Dice (Milletari, Navab and Ahmadi, "V-Net", 2016), in sums over pixels, so that it is computed strip by strip."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from sft.errors import InputError

__all__ = ["DiceLoss"]

Activation = Literal["softmax", "sigmoid", "none"]


class DiceLoss(nn.Module):
    """One minus the Dice coefficient ``(2 * sum(p * t) + smooth) / (sum(p) + sum(t) + smooth)``, the mean over classes and samples.

    >>> loss = DiceLoss("none", smooth=0.0)
    >>> mask = torch.zeros(1, 1, 4, 4)
    >>> mask[..., :2] = 1
    >>> loss(mask, mask).item(), loss(1 - mask, mask).item(), loss(torch.ones_like(mask), mask).item()
    (0.0, 1.0, 0.3333333134651184)

    Args:
        activation: makes probabilities of the prediction: over its classes, each by itself, or not at all.
        smooth: added to both sides of the fraction; a class that is nowhere, and nowhere predicted, has a loss of 0.
        squared: whether the denominator sums squares, as V-Net does. Default: `False`
        batch: whether one coefficient is for all samples together. Default: `False`
        include_background: whether the first class counts. Default: `True`
        ignore_index: labels that count neither way. Default: `None`
    """

    def __init__(
        self,
        activation: Activation = "softmax",
        *,
        smooth: float = 1.0,
        squared: bool = False,
        batch: bool = False,
        include_background: bool = True,
        ignore_index: int | None = None,
    ) -> None:
        super().__init__()
        if activation not in ("softmax", "sigmoid", "none"):
            raise InputError(f"activation {activation!r}: choose softmax, sigmoid or none")
        if not smooth >= 0:
            raise InputError(f"smooth {smooth!r}: give a number of at least 0")
        self.activation, self.smooth, self.squared, self.batch = activation, smooth, squared, batch
        self.include_background, self.ignore_index = include_background, ignore_index

    def extra_repr(self) -> str:
        """The arguments."""
        return f"{self.activation!r}, smooth={self.smooth}, squared={self.squared}, batch={self.batch}"

    def forward(self, prediction: Tensor, target: Tensor) -> Tensor:
        """The loss, a number.

        Args:
            prediction: ``[N, C, axes...]``.
            target: labels ``[N, axes...]`` or ``[N, 1, axes...]`` (whole numbers below C), or masks ``[N, C, axes...]``.

        Raises:
            InputError: their shapes do not fit.
        """
        num_classes, dims = prediction.shape[1], list(range(2, prediction.dim()))
        shares = self._shares(prediction)
        mask, counted = self._mask(target, num_classes, shares)
        if counted is not None:
            shares = shares * counted
        if not self.include_background and num_classes > 1:
            shares, mask = shares[:, 1:], mask[:, 1:]
        power = 2 if self.squared else 1
        sums = [(shares * mask).sum(dims), (shares**power).sum(dims), (mask**power).sum(dims)]
        common, predicted, true = (value.sum(0) if self.batch else value for value in sums)
        return (1 - (2 * common + self.smooth) / (predicted + true + self.smooth)).mean()

    def _shares(self, prediction: Tensor) -> Tensor:
        if self.activation == "none":
            return prediction
        return prediction.softmax(1) if self.activation == "softmax" else prediction.sigmoid()

    def _mask(self, target: Tensor, num_classes: int, like: Tensor) -> tuple[Tensor, Tensor | None]:
        """The true classes as channels of zeros and ones, and where there is one that counts."""
        if target.dim() == like.dim() - 1:
            target = target.unsqueeze(1)
        if target.dim() != like.dim() or target.shape[1] not in (1, num_classes):
            raise InputError(
                f"a target of shape {tuple(target.shape)} for a prediction of {tuple(like.shape)}; give labels [N, axes...] or masks "
                f"of {num_classes} channels"
            )
        counted = None if self.ignore_index is None else (target != self.ignore_index).to(like.dtype)
        if target.shape[1] == num_classes:
            mask = target.to(like.dtype)
            return (mask, None) if counted is None else (torch.where(counted > 0, mask, torch.zeros_like(mask)), counted)
        classes = torch.arange(num_classes, device=target.device).view(num_classes, *[1] * (like.dim() - 2))
        return (target == classes).to(like.dtype), counted
