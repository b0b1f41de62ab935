"""``max`` and ``min`` of sizes while a model is captured: decided by comparing, as Python does.

The exporter keeps them as functions of the image's size. A network that pads as TensorFlow does, by what the size leaves over, then has
sizes that hold those of the layer before several times over; after five strides they fill pages, and proving anything about them takes
minutes. Compared instead, one of the two numbers is taken, sizes stay as short as they are for any other network, and the comparison is
one more condition under which the capture holds.
"""

from __future__ import annotations

import builtins
import contextlib
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch

__all__ = ["specialize_size_minmax"]

_BUILTIN_MAX, _BUILTIN_MIN = max, min


@contextlib.contextmanager
def specialize_size_minmax() -> Iterator[None]:
    """While this is on, ``max`` and ``min`` of sizes return one of them; of anything else they are what they were."""
    before = builtins.max, builtins.min
    builtins.max = _minmax_by_comparison(_BUILTIN_MAX, before[0], operator.le)
    builtins.min = _minmax_by_comparison(_BUILTIN_MIN, before[1], operator.ge)
    try:
        yield
    finally:
        builtins.max, builtins.min = before


def _minmax_by_comparison(
    plain: Callable[..., Any], exporters: Callable[..., Any], gives_way: Callable[[Any, Any], bool]
) -> Callable[..., Any]:
    def compared(*values: Any, **keywords: Any) -> Any:
        if any(isinstance(value, torch.Tensor) for value in values):
            return exporters(*values, **keywords)
        if len(values) == 2 and not keywords:
            for size, number in (values, values[::-1]):
                if isinstance(size, torch.SymInt) and isinstance(number, int):
                    # A tie is the number: max(-(size % 2), 0) is 0 then, and not one thing for odd sizes and another for even ones.
                    return number if gives_way(size, number) else size
        return plain(*values, **keywords)

    return compared
