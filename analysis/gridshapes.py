"""Samples at grids of places on fake tensors, of which only the shapes are asked.

Where sizes are symbols the exporter finds the shape of `grid_sample` by running the formula behind it: a hundred operations, a second. The
result has the image's channels and the grid's extents.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from sft.analysis.byshape import Decomposition, override_decomposition

__all__ = ["use_grid_sample_meta"]

_GRID_SAMPLE_DECOMPOSITION = "_grid_sampler_2d"
_GRID_SAMPLE_ARGUMENTS = ("a", "grid", "interpolation_mode", "padding_mode", "align_corners", "_expand_grid")
_GRID_SAMPLE_MODES = (0, 1, 2)


def use_grid_sample_meta() -> AbstractContextManager[None]:
    """A context in which fake tensors are not sampled; all as ever where this torch has another formula."""
    return override_decomposition(_GRID_SAMPLE_DECOMPOSITION, _GRID_SAMPLE_ARGUMENTS, _grid_sample_meta)


def _grid_sample_meta(formula: Decomposition) -> Decomposition:
    def result(
        a: Tensor,
        grid: Tensor,
        interpolation_mode: int = 0,
        padding_mode: int = 0,
        align_corners: bool = False,
        _expand_grid: bool = True,
    ) -> Tensor:
        fits = isinstance(a, FakeTensor) and a.dim() == grid.dim() == 4 and a.shape[0] == grid.shape[0] and grid.shape[3] == 2
        if (
            not fits or interpolation_mode not in _GRID_SAMPLE_MODES or padding_mode not in _GRID_SAMPLE_MODES
        ):  # the formula knows what is wrong
            found: Tensor = formula(a, grid, interpolation_mode, padding_mode, align_corners, _expand_grid)
            return found
        return torch.empty((*a.shape[:2], *grid.shape[1:3]), dtype=a.dtype, device=a.device)

    return result
