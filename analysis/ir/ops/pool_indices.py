"""Where the maxima of a pooling were, and what puts values back there: places in the whole image, row-major."""

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

#: What puts values back; torch has that of signals as one of images a pixel wide, which are signals again by then.
UNPOOLINGS = ("sft.max_unpool1d", "aten.max_unpool2d.default", "aten.max_unpool3d.default")


@dataclass(frozen=True, slots=True, kw_only=True)
class MaxPoolIndicesSpec(MaxPoolSpec):
    """Where in the image the maxima of a max pooling are (``return_indices``)."""

    name: str = "max_pool_indices"

    def saves_for_backward(self, node: Node) -> tuple[bool, bool]:
        return (False, False)


def unpooling_factors(node: Node, graph: Graph) -> tuple[int, ...] | None:
    """Rows and columns that a pooled pixel goes back to, where the places are those of a pooling whose windows lie side by side."""
    pool = graph[node.argument("indices").name]
    if not (pool.target.startswith("aten.max_pool") and "_with_indices" in pool.target and pool.argument("result") == 1):
        return None
    row, axes = MaxPoolIndicesSpec(), range(len(pool.shape) - 2)
    windows = [row.window(pool, axis) for axis in axes]
    is_side_by_side = all(w.stride == w.kernel and not w.pad_low and not w.pad_high and w.dilation == 1 for w in windows)
    return tuple(w.kernel for w in windows) if is_side_by_side else None


@dataclass(frozen=True, slots=True, kw_only=True)
class MaxUnpoolSpec(Operator):
    """``max_unpool1d``, ``max_unpool2d``, ``max_unpool3d`` of a pooling whose windows lie side by side, to the size that it had pooled."""

    name: str = "max_unpool"
    is_sized: bool = True

    def access(self, node: Node, axis: int) -> AxisMap:
        return AxisMap(divisor=node.argument("factors")[axis])

    def extent(self, node: Node, axis: int, extent: int) -> int:
        return axis_entry(node.argument("output_size"), axis)

    def computed(self, node: Node, axis: int, part: Interval) -> Interval:
        # By whole windows, so that no value read lands outside.
        factor = node.argument("factors")[axis]
        return Interval(part.start // factor * factor, -(-part.stop // factor) * factor).clip(self.extent(node, axis, 0))

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
        is_far = _is_always_less(out[0], sp.Min(image[0], pooled[0] * factors[0]))
        if is_far or any(_is_always_less(a, b) or _is_always_less(b, a) for a, b in zip(out[1:], image[1:], strict=True)):
            return [
                f"{node.label}: to {_as_tuple(out)} pixels, but the indices count those of an image of {_as_tuple(image)}; "
                "give output_size=x.shape of what was pooled"
            ]
        return []


def _is_always_less(first: sp.Expr | int, second: sp.Expr | int) -> bool:
    """Whether an extent is less than another at every size of the image."""
    difference = sp.sympify(first) - sp.sympify(second)
    return bool(difference.is_number and difference < 0)


def _as_tuple(extents: tuple[sp.Expr | int, ...]) -> str:
    return " x ".join(map(str, extents))
