"""Banded interpolation in plain PyTorch, on any device and in any floating dtype: the oracle of the kernel, bit for bit in fp32."""

from __future__ import annotations

import torch
from torch import Tensor

from sft.kernels.resize.tile_axis import BandTable

__all__ = ["reference_resize"]


def reference_resize(x: Tensor, height: BandTable, width: BandTable) -> Tensor:
    """Both bands applied to a buffer ``[N, C, h, w]``, in the dtype of ``x``: sums in fp32 at least, rows before columns."""
    wide = torch.promote_types(x.dtype, torch.float32)
    total = torch.zeros(*x.shape[:2], len(height.first), len(width.first), dtype=wide, device=x.device)
    for row in range(height.weights.shape[1]):
        for column in range(width.weights.shape[1]):
            weights = height.weights[:, row, None] * width.weights[None, :, column]
            valid = (row < height.count)[:, None] & (column < width.count)
            rows, columns = (table.first + place for table, place in ((height, row), (width, column)))
            pixels = x[:, :, rows.clamp(0, x.shape[2] - 1).long()][:, :, :, columns.clamp(0, x.shape[3] - 1).long()].to(wide)
            total += torch.where(valid, pixels * weights, 0)
    return total.to(x.dtype)
