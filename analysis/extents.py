"""Arithmetic of extents and shapes, which are integers or SymPy expressions of the image's size."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import sympy as sp

__all__ = ["broadcast_shapes", "divide_extent", "symbolic_floor", "same_shape", "split_factors"]


def split_factors(extent: Any, shape: Sequence[Any]) -> list[int]:
    """How many pixels of an axis may become a dimension of their own: where a shape has ``extent / factor, factor`` side by side; else 1.

    >>> split_factors(12, (2, 4, 4, 3, 4, 6))  # rows in three fours, if the fours before them are those of something else
    [3, 4, 1]
    """
    found = [
        factor
        for size, factor in pairwise(shape)
        if isinstance(factor, int)
        and factor > 1
        and size == divide_extent(extent, factor)
        and not (isinstance(extent, int) and extent % factor)
    ]
    return [*dict.fromkeys(found), 1]


def divide_extent(extent: Any, factor: int) -> Any:
    """Whole ``factor`` in an extent."""
    return extent // factor if isinstance(extent, int) else symbolic_floor(extent / sp.Integer(factor)) if factor != 1 else extent


def symbolic_floor(value: sp.Expr) -> sp.Expr:
    """The whole part of an expression, in one form for all that differ by a whole number.

    >>> h = sp.Symbol("h", integer=True)
    >>> symbolic_floor((h - 1) / 2) + 1 == symbolic_floor((h + 1) / 2)
    True
    """
    number, rest = value.as_coeff_Add()
    return sp.floor(rest + number % 1) + sp.floor(number) if number.is_Rational else sp.floor(value)


def broadcast_shapes(shapes: Sequence[Sequence[Any]], rank: int) -> tuple[Any, ...]:
    """The shape, of ``rank`` dimensions, that shapes broadcast to."""
    full = [(*[1] * (rank - len(shape)), *shape) for shape in shapes]
    return tuple(next((extent for extent in column if extent != 1), 1) for column in zip(*full, strict=True))


def same_shape(first: Sequence[Any], second: Sequence[Any]) -> bool:
    """Whether two shapes are equal for every size of the image."""
    return len(first) == len(second) and all(sp.simplify(sp.sympify(a) - sp.sympify(b)) == 0 for a, b in zip(first, second, strict=True))
