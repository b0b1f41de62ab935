"""Samples at grids of places on fake tensors, of which only the shapes are asked.

Where sizes are symbols the exporter finds the shape of `grid_sample` by running the formula behind it: a hundred operations, a second. The
result has the image's channels and the grid's extents.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from sft.analysis.byshape import Formula, instead_of

__all__ = ["grid_samples_by_shape"]

_FORMULA = "_grid_sampler_2d"
_ARGUMENTS = ("a", "grid", "interpolation_mode", "padding_mode", "align_corners", "_expand_grid")
_MODES = (0, 1, 2)


def grid_samples_by_shape() -> AbstractContextManager[None]:
    """A context in which fake tensors are not sampled; all as ever where this torch has another formula."""
    return instead_of(_FORMULA, _ARGUMENTS, _result_of)


def _result_of(formula: Formula) -> Formula:
    def result(
        a: Tensor,
        grid: Tensor,
        interpolation_mode: int = 0,
        padding_mode: int = 0,
        align_corners: bool = False,
        _expand_grid: bool = True,
    ) -> Tensor:
        fits = isinstance(a, FakeTensor) and a.dim() == grid.dim() == 4 and a.shape[0] == grid.shape[0] and grid.shape[3] == 2
        if not fits or interpolation_mode not in _MODES or padding_mode not in _MODES:  # the formula knows what is wrong
            found: Tensor = formula(a, grid, interpolation_mode, padding_mode, align_corners, _expand_grid)
            return found
        return torch.empty((*a.shape[:2], *grid.shape[1:3]), dtype=a.dtype, device=a.device)

    return result
