"""Max pooling with indices, and unpooling. Indices count the pixels of the full image in row-major order."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import sympy as sp

from sft.analysis.ir.access import AxisMap
from sft.analysis.ir.graph import Graph, Node
from sft.analysis.ir.ops.base import Operator, axis_entry
from sft.analysis.ir.ops.windows import MaxPoolSpec
from sft.common.interval import Interval

__all__ = ["UNPOOLINGS", "MaxPoolIndicesSpec", "MaxUnpoolSpec", "unpooling_factors"]

#: Unpooling operators. torch unpools signals as images one pixel wide; the passes restore the signals (``sft.max_unpool1d``).
UNPOOLINGS = ("sft.max_unpool1d", "aten.max_unpool2d.default", "aten.max_unpool3d.default")


@dataclass(frozen=True, slots=True, kw_only=True)
class MaxPoolIndicesSpec(MaxPoolSpec):
    """Indices of the maxima of a max pooling in the image (``return_indices``)."""

    name: str = "max_pool_indices"
    backward_reads: tuple[bool, bool] = (False, False)


def unpooling_factors(node: Node, graph: Graph) -> tuple[int, ...] | None:
    """Unpooling factors along each axis; ``None`` unless the indices are those of a pooling with adjacent windows."""
    pool = graph[node.argument("indices").name]
    if not (pool.target.startswith("aten.max_pool") and "_with_indices" in pool.target and pool.argument("result") == 1):
        return None
    row, axes = MaxPoolIndicesSpec(), range(len(pool.shape) - 2)
    windows = [row.window(pool, axis) for axis in axes]
    is_adjacent = all(w.stride == w.kernel and not w.pad_low and not w.pad_high and w.dilation == 1 for w in windows)
    return tuple(w.kernel for w in windows) if is_adjacent else None


@dataclass(frozen=True, slots=True, kw_only=True)
class MaxUnpoolSpec(Operator):
    """Max unpooling (``max_unpool1d``, ``2d``, ``3d``) of a pooling with adjacent windows, to the size of the pooled image."""

    name: str = "max_unpool"
    is_sized: bool = True

    def access(self, node: Node, axis: int) -> AxisMap:
        return AxisMap(divisor=node.argument("factors")[axis])

    def extent(self, node: Node, axis: int, extent: int) -> int:
        return axis_entry(node.argument("output_size"), axis)

    def computed(self, node: Node, axis: int, rows: Interval) -> Interval:
        # Complete windows only, so that no value read falls outside.
        factor = node.argument("factors")[axis]
        return Interval(rows.start // factor * factor, -(-rows.stop // factor) * factor).clip(self.extent(node, axis, 0))

    def problems(self, node: Node, graph: Graph, streamed: Collection[str]) -> list[str]:
        count, factors = graph.axes.count, node.argument("factors")
        if factors is None or len(factors) != count or any(name not in streamed for name in node.operands):
            return [
                f"{node.label}: its values may move from any strip to any other; take the indices of a max pooling in the same model "
                "with stride = kernel, padding 0 and dilation 1"
            ]
        pool = graph[node.argument("indices").name]
        pooled, image = graph.axes.of(pool.shape), graph.axes.of(graph[pool.operands[0]].shape)
        out = node.argument("output_size")[:count]
        is_too_small = _is_always_less(out[0], sp.Min(image[0], pooled[0] * factors[0]))
        if is_too_small or any(_is_always_less(a, b) or _is_always_less(b, a) for a, b in zip(out[1:], image[1:], strict=True)):
            return [
                f"{node.label}: to {_as_tuple(out)} pixels, but the indices count those of an image of {_as_tuple(image)}; "
                "give output_size=x.shape of what was pooled"
            ]
        return []


def _is_always_less(first: sp.Expr | int, second: sp.Expr | int) -> bool:
    """True if an extent is less than another at every size of the image."""
    difference = sp.sympify(first) - sp.sympify(second)
    return bool(difference.is_number and difference < 0)


def _as_tuple(extents: tuple[sp.Expr | int, ...]) -> str:
    return " x ".join(map(str, extents))
