"""Results of exact storage: functions in place of ATen operators that allocate more than the elements of their result.

``im2col`` and ``col2im`` resize a tensor of the operand's size. ``slice_scatter``, ``select_scatter`` and ``diagonal_scatter`` copy the
whole storage that their first operand is a view of: of one row of an image, all of the image.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

__all__ = ["EXACT_STORAGE"]

aten = torch.ops.aten


def _into_empty(overload: Any) -> Callable[..., torch.Tensor]:
    def function(self: torch.Tensor, *arguments: Any) -> torch.Tensor:
        out: torch.Tensor = overload(self, *arguments, out=self.new_empty(0))
        return out

    return function


def _into_view_of_clone(view: Any) -> Callable[..., torch.Tensor]:
    def function(self: torch.Tensor, src: torch.Tensor, *arguments: Any) -> torch.Tensor:
        out = self.clone()
        view(out, *arguments).copy_(src)
        return out

    return function


EXACT_STORAGE: Mapping[Any, Callable[..., torch.Tensor]] = {
    aten.im2col.default: _into_empty(aten.im2col.out),
    aten.col2im.default: _into_empty(aten.col2im.out),
    aten.slice_scatter.default: _into_view_of_clone(aten.slice.Tensor),
    aten.select_scatter.default: _into_view_of_clone(aten.select.int),
    aten.diagonal_scatter.default: _into_view_of_clone(aten.diagonal.default),
}
"""Overload -> function of the same positional arguments and result."""
