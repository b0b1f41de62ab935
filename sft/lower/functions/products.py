"""Products of channels."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["contract_pixels", "mix_channels"]


def contract_pixels(
    self: Tensor,
    other: Tensor,
    left: Sequence[Sequence[int]],
    right: Sequence[Sequence[int]],
    shape: Sequence[int],
    axes: int,
) -> Tensor:
    """The product of two images over all pixels.

    Args:
        self: ``[N, channels..., axes...]``.
        other: the same.
        left: the dimensions of channels of ``self`` that a product is made for each of, and the others.
        right: the same of ``other``.
        shape: of the result.
        axes: of the image.
    """
    return torch.bmm(_pixel_matrices(self, left, axes), _pixel_matrices(other, right, axes).transpose(1, 2)).view(tuple(shape))


def mix_channels(self: Tensor, matrix: Tensor, part: Sequence[Sequence[int]], channels: Sequence[int], axes: int) -> Tensor:
    """Every pixel's channels multiplied with a matrix of its sample, ``[N, groups, to, from, 1]``."""
    pixels = _pixel_matrices(self, part, axes)
    found = torch.bmm(matrix.reshape(pixels.shape[0], -1, pixels.shape[1]), pixels)
    return found.view(self.shape[0], *channels, *self.shape[self.dim() - axes :])


def _pixel_matrices(value: Tensor, part: Sequence[Sequence[int]], axes: int) -> Tensor:
    """An image as matrices of channels by pixels, one for each sample and group."""
    groups, rest = part
    moved = value.permute(0, *groups, *rest, *range(value.dim() - axes, value.dim()))
    count = math.prod(value.shape[dim] for dim in (0, *groups))
    return moved.reshape(count, math.prod(value.shape[dim] for dim in rest), -1)
