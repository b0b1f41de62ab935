"""The exporter's sizes in SymPy's words, on our symbols.

Sizes are integers, and SymPy's arithmetic of these is exact, as Python's. Where a model multiplies a size by a float, or divides it, Python
rounds at each operation; SymPy would multiply out, cancel and only then round, and find another integer at some sizes. The functions here
are numbers to SymPy only when a size is, and are then what Python computes.

Arithmetic of extents and shapes, which are integers or SymPy expressions of the image's size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import sympy as sp
import torch

__all__ = [
    "FloatQuotient",
    "FloatSize",
    "TruncatedSize",
    "broadcast_shapes",
    "divide_extent",
    "expr_from_torch",
    "extent_from_torch",
    "same_shape",
    "split_factors",
    "symbolic_floor",
]


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


def _positive_symbol(symbol: sp.Symbol) -> sp.Symbol:
    return sp.Symbol(symbol.name, integer=True, positive=True)


def extent_from_torch(size: int | torch.SymInt) -> sp.Expr | int:
    """A size of the exporter's as a number, or on our symbols."""
    if isinstance(size, int):
        return size
    expr = size.node.expr
    if expr.is_number:
        return int(expr)
    return expr_from_torch(expr)


@lru_cache(maxsize=2**12)  # a network has many values of one size
def expr_from_torch(expr: sp.Expr) -> sp.Expr:
    """Torch's own integer division in SymPy's words, on our symbols."""
    plain = expr
    for name, meaning in _TORCH_FUNCTIONS.items():
        plain = plain.replace(lambda e, name=name: type(e).__name__ == name, lambda e, meaning=meaning: meaning(*e.args))
    return plain.xreplace({symbol: _positive_symbol(symbol) for symbol in plain.free_symbols})


class FloatSize(sp.Function):  # type: ignore[misc]  # SymPy is not typed
    """A size as a floating-point number, so that what it is multiplied by is not: ``0.6 * (2 * n + 1)`` is rounded once, as PyTorch does.

    SymPy would make ``1.2 * n + 0.6`` of it, which at some sizes is just below the whole number that PyTorch finds.
    """

    @classmethod
    def eval(cls, size: sp.Expr) -> sp.Expr | None:
        """Of a number the same in double precision."""
        return sp.Float(int(size), 15) if size.is_Integer else None

    def _eval_is_integer(self) -> bool | None:
        found: bool | None = self.args[0].is_integer
        return found

    def _eval_is_positive(self) -> bool | None:
        found: bool | None = self.args[0].is_positive
        return found


class FloatQuotient(sp.Function):  # type: ignore[misc]  # SymPy is not typed
    """A quotient in double precision; SymPy's would be exact, and ``size / 49 * 49`` the size again."""

    @classmethod
    def eval(cls, number: sp.Expr, divisor: sp.Expr) -> sp.Expr | None:
        """Of numbers a number."""
        return sp.Float(float(number) / float(divisor), 15) if number.is_number and divisor.is_number and divisor != 0 else None

    def _eval_is_nonnegative(self) -> bool | None:
        return True if self.args[0].is_nonnegative and self.args[1].is_positive else None


def _is_power_of_two(number: sp.Expr) -> bool:
    """Whether dividing by it is exact."""
    return bool(number.is_number and number > 0 and math.frexp(float(number))[0] == 0.5)


class TruncatedSize(sp.Function):  # type: ignore[misc]  # SymPy is not typed
    """A number without what is behind its point, as ``int`` takes it: of one below zero that is not its floor."""

    is_integer = True

    @classmethod
    def eval(cls, number: sp.Expr) -> sp.Expr | None:
        """Of a number the whole one."""
        return sp.Integer(int(number)) if number.is_number else None


#: The exporter's own SymPy functions.
_TORCH_FUNCTIONS: dict[str, Callable[..., sp.Expr]] = {
    "FloorDiv": lambda a, b: symbolic_floor(a / b),
    "CleanDiv": lambda a, b: a / b,
    "CeilDiv": lambda a, b: symbolic_floor((a + b - 1) / b),
    "PythonMod": lambda a, b: a - b * symbolic_floor(a / b),
    "Mod": lambda a, b: a - b * symbolic_floor(a / b),
    "IntTrueDiv": lambda a, b: a / b if _is_power_of_two(b) else FloatQuotient(a, b),
    "FloatTrueDiv": lambda a, b: a / b if _is_power_of_two(b) else FloatQuotient(a, b),
    "ToFloat": lambda a: FloatSize(a) if a.is_Add or a.is_Mul else a,
    "TruncToInt": lambda a: symbolic_floor(a) if a.is_nonnegative else TruncatedSize(a),
    "FloorToInt": lambda a: symbolic_floor(a),
    "CeilToInt": lambda a: sp.ceiling(a),
    "Max": lambda *a: sp.Max(*a),
    "Min": lambda *a: sp.Min(*a),
}
