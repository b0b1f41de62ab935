"""Windows beside each other as channels, and channels put back where windows lie (:mod:`sft.analysis.im2col`)."""

from __future__ import annotations

from dataclasses import dataclass

from sft.analysis.access import AxisMap
from sft.analysis.axes import Axes
from sft.analysis.graph import Node
from sft.analysis.operators.base import Operator
from sft.analysis.operators.transposed import transposed_window_of

__all__ = ["Col2imSpec", "Im2colSpec"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Im2colSpec(Operator):
    """The pixels of every window as channels (``unfold``); there is no border."""

    name: str = "im2col"

    def access(self, node: Node, axis: int) -> AxisMap:
        windows = transposed_window_of(node, axis)
        return AxisMap(scale=windows.stride, last=windows.span - 1)

    def extent(self, node: Node, axis: int, extent: int) -> int:
        windows = transposed_window_of(node, axis)
        return (extent - windows.span) // windows.stride + 1

    def keeps(self, node: Node) -> tuple[bool, bool]:
        return (False, False)

    def dimension_map(self, node: Node, axes: Axes) -> tuple[int | None, ...]:
        return (0, None, *range(2, 2 + axes.count))


@dataclass(frozen=True, slots=True, kw_only=True)
class Col2imSpec(Operator):
    """Windows put back where they lie, summed where they overlap (``fold``)."""

    name: str = "col2im"
    is_phased: bool = True

    def access(self, node: Node, axis: int) -> AxisMap:
        return transposed_window_of(node, axis).access

    def extent(self, node: Node, axis: int, extent: int) -> int:
        return transposed_window_of(node, axis).extent(extent)

    def keeps(self, node: Node) -> tuple[bool, bool]:
        return (False, False)

    def dimension_map(self, node: Node, axes: Axes) -> tuple[int | None, ...]:
        return (0, None, *range(2, 2 + axes.count))
