"""Sizes that are too intricate to be followed as symbols.

Networks that cut images into windows reshape by rounded quotients of sizes, once more in every block, and `torch.export` asks SymPy about
each: 1 s for timm's mobilevitv2_050 at one size, two minutes for it at any (benchmarks/results, `capture-windows`). So it is captured again
for each size. What decides is the length of the expressions, not a clock: reshapes that still stream, as pixels to channels by hand, ask
about some 70 operations.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any
from unittest import mock

import sympy as sp
from torch.fx.experimental.symbolic_shapes import ShapeEnv

__all__ = ["SymbolicSizeTooComplexError", "limit_symbolic_complexity"]

_MAX_OPERATIONS = 100


class SymbolicSizeTooComplexError(Exception):
    """The exporter asked about a size of many operations; the model is captured for one size instead."""


@contextmanager
def limit_symbolic_complexity() -> Iterator[None]:
    """A context in which the exporter gives up on such sizes.

    Raises:
        IntricateSizesError: out of the exporter, which may wrap it.
    """
    evaluate = ShapeEnv.evaluate_expr

    def checked(self: ShapeEnv, expr: Any, *arguments: Any, **keywords: Any) -> Any:
        if isinstance(expr, sp.Basic) and _num_operations(expr) > _MAX_OPERATIONS:
            raise SymbolicSizeTooComplexError(f"a size of more than {_MAX_OPERATIONS} operations")
        return evaluate(self, expr, *arguments, **keywords)

    with mock.patch.object(ShapeEnv, "evaluate_expr", checked):
        yield


@lru_cache(maxsize=2**12)
def _num_operations(expr: sp.Basic) -> int:
    return int(expr.count_ops())
