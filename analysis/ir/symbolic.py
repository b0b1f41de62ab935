"""Symbolic sizes: arithmetic on extents and shapes, and the translation of the exporter's size expressions.

An extent is an integer, or a SymPy expression in the image's size on positive integer symbols. Integer arithmetic is exact in both. A
model may also multiply or divide a size by a float. Python rounds at each such operation; SymPy would expand, cancel and round only then,
and get another integer at some sizes. :class:`FloatSize`, :class:`FloatQuotient` and :class:`TruncatedSize` therefore stay unevaluated
until their arguments are numbers, and then compute as Python does.
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
    """Factors by which a pixel axis may be split into ``extent / factor, factor``: pairs of neighbours in a shape, and 1.

    >>> split_factors(12, (2, 4, 4, 3, 4, 6))  # 12 rows as 4 x 3, or as 3 x 4 if the 4 before is another dimension
    [3, 4, 1]
    """
    factors = [
        factor
        for size, factor in pairwise(shape)
        if isinstance(factor, int)
        and factor > 1
        and size == divide_extent(extent, factor)
        and not (isinstance(extent, int) and extent % factor)
    ]
    return [*dict.fromkeys(factors), 1]


def divide_extent(extent: Any, factor: int) -> Any:
    """``extent // factor``."""
    return extent // factor if isinstance(extent, int) else symbolic_floor(extent / sp.Integer(factor)) if factor != 1 else extent


def symbolic_floor(value: sp.Expr) -> sp.Expr:
    """The floor of an expression, in one canonical form for all expressions that differ by an integer.

    >>> h = sp.Symbol("h", integer=True)
    >>> symbolic_floor((h - 1) / 2) + 1 == symbolic_floor((h + 1) / 2)
    True
    """
    constant, variable = value.as_coeff_Add()
    return sp.floor(variable + constant % 1) + sp.floor(constant) if constant.is_Rational else sp.floor(value)


def broadcast_shapes(shapes: Sequence[Sequence[Any]], rank: int) -> tuple[Any, ...]:
    """The shape, of ``rank`` dimensions, that shapes broadcast to."""
    full = [(*[1] * (rank - len(shape)), *shape) for shape in shapes]
    return tuple(next((extent for extent in column if extent != 1), 1) for column in zip(*full, strict=True))


def same_shape(first: Sequence[Any], second: Sequence[Any]) -> bool:
    """True if two shapes are equal for every size of the image."""
    return len(first) == len(second) and all(sp.simplify(sp.sympify(a) - sp.sympify(b)) == 0 for a, b in zip(first, second, strict=True))


def _positive_symbol(symbol: sp.Symbol) -> sp.Symbol:
    return sp.Symbol(symbol.name, integer=True, positive=True)


def extent_from_torch(size: int | torch.SymInt) -> sp.Expr | int:
    """A size of the exporter as an integer, or as an expression on our symbols."""
    if isinstance(size, int):
        return size
    expr = size.node.expr
    if expr.is_number:
        return int(expr)
    return expr_from_torch(expr)


@lru_cache(maxsize=2**12)  # a network has many values of one size
def expr_from_torch(expr: sp.Expr) -> sp.Expr:
    """An expression of the exporter with plain SymPy functions in the place of torch's, on our symbols."""
    plain = expr
    names = {type(each).__name__ for each in sp.preorder_traversal(expr)}  # each replacement visits the expression again
    for name, function in _TORCH_FUNCTIONS.items():
        if name in names:
            plain = plain.replace(lambda e, name=name: type(e).__name__ == name, lambda e, function=function: function(*e.args))
    return plain.xreplace({symbol: _positive_symbol(symbol) for symbol in plain.free_symbols})


class FloatSize(sp.Function):  # type: ignore[misc]  # SymPy is not typed
    """A size converted to float. It blocks expansion: ``0.6 * (2 * n + 1)`` is rounded once, as in PyTorch.

    SymPy would expand it to ``1.2 * n + 0.6``, which at some sizes is just below the integer that PyTorch computes.
    """

    @classmethod
    def eval(cls, size: sp.Expr) -> sp.Expr | None:
        """Evaluate to double precision if the argument is an integer."""
        return sp.Float(int(size), 15) if size.is_Integer else None

    def _eval_is_integer(self) -> bool | None:
        is_integer: bool | None = self.args[0].is_integer
        return is_integer

    def _eval_is_positive(self) -> bool | None:
        is_positive: bool | None = self.args[0].is_positive
        return is_positive


class FloatQuotient(sp.Function):  # type: ignore[misc]  # SymPy is not typed
    """A quotient in double precision. SymPy's would be exact, and ``size / 49 * 49`` equal to the size."""

    @classmethod
    def eval(cls, number: sp.Expr, divisor: sp.Expr) -> sp.Expr | None:
        """Evaluate to double precision if both arguments are numbers."""
        return sp.Float(float(number) / float(divisor), 15) if number.is_number and divisor.is_number and divisor != 0 else None

    def _eval_is_nonnegative(self) -> bool | None:
        return True if self.args[0].is_nonnegative and self.args[1].is_positive else None


def _is_power_of_two(number: sp.Expr) -> bool:
    """True if division by the number is exact."""
    return bool(number.is_number and number > 0 and math.frexp(float(number))[0] == 0.5)


class TruncatedSize(sp.Function):  # type: ignore[misc]  # SymPy is not typed
    """A number truncated towards zero, like ``int``; for negative numbers that is not the floor."""

    is_integer = True

    @classmethod
    def eval(cls, number: sp.Expr) -> sp.Expr | None:
        """Evaluate if the argument is a number."""
        return sp.Integer(int(number)) if number.is_number else None


#: The exporter's own SymPy functions, by class name.
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
