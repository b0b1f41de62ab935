"""Padding and cropping: operators that shift the origin of the image's rows and columns."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from fractions import Fraction

from sft.analysis.ir.access import AxisMap, AxisPlacement
from sft.analysis.ir.axes import ROWS, Axes
from sft.analysis.ir.graph import Graph, Node
from sft.analysis.ir.ops.base import Operator, Role, untiled_operand_problem

__all__ = ["AssignSliceSpec", "BorderRowsSpec", "ChannelPadSpec", "CircularPadSpec", "PadSpec", "SliceSpec"]

_MODES = ("constant", "reflect", "replicate", "circular")


@dataclass(frozen=True, slots=True, kw_only=True)
class PadSpec(Operator):
    """Padding (``pad``): constant, reflecting, replicating or circular; negative amounts crop.

    Row ``o`` reads row ``o - low`` or, beyond the border, a mirrored one: at most ``2 * low`` rows further up, ``2 * high`` further
    down. A map has one form for all rows, so the access map has that slack everywhere. Along a circularly padded axis it covers the full
    axis, so a panel computes its operand for all columns. Circular padding of rows is decomposed (:class:`CircularPadSpec`).
    """

    name: str = "pad"
    is_sized: bool = True
    backward_reads: tuple[bool, bool] = (False, False)

    def amounts(self, node: Node, axis: int) -> tuple[int, int]:
        """Rows added before and after the image."""
        flat = node.argument("pad")
        first = 2 * (self._num_axes(node) - 1 - axis)
        return (int(flat[first]), int(flat[first + 1])) if 0 <= first < len(flat) else (0, 0)

    def _num_axes(self, node: Node) -> int:
        count: int = node.argument("axes")
        return count

    def mode(self, node: Node) -> str:
        """The padding mode."""
        mode: str = node.argument("mode")
        return mode

    def resolved(self, node: Node, extents: tuple[int, ...]) -> Node:
        return replace(node, arguments=(*node.arguments, ("axes", len(extents)), ("extents", extents)))

    def access(self, node: Node, axis: int) -> AxisMap:
        low, high = self.amounts(node, axis)
        if self._wraps(node, axis):
            extent = node.argument("extents")[axis]
            return AxisMap(first=-low - extent - high, last=extent)
        reach = {"constant": 0, "reflect": 2, "replicate": 1, "circular": 0}[self.mode(node)]
        return AxisMap(first=-low - reach * max(0, high), last=-low + reach * max(0, low))

    def placement(self, node: Node, axis: int) -> AxisPlacement:
        # Inside the image row o is row o - low; the slack of the access map is for the borders.
        low = Fraction(self.amounts(node, axis)[0])
        return AxisPlacement(first=-low, last=-low)

    def _wraps(self, node: Node, axis: int) -> bool:
        return self.mode(node) == "circular" and any(self.amounts(node, axis))

    def dimension_map(self, node: Node, axes: Axes) -> tuple[int | None, ...]:
        node = self.resolved(node, (0,) * axes.count)
        return (0, 1, *(None if self._wraps(node, axis) else 2 + axis for axis in range(axes.count)))

    def extent(self, node: Node, axis: int, extent: int) -> int:
        return extent + sum(self.amounts(node, axis))

    def problems(self, node: Node, graph: Graph, streamed: Collection[str]) -> list[str]:
        flat, mode = node.argument("pad"), self.mode(node)
        if mode not in _MODES:
            return [f"{node.label}: mode {mode!r} is not supported"]
        if mode == "circular" and any(flat[2 * graph.axes.count - 2 :]):
            return [f"{node.label}: this circular padding of rows is not decomposed; pad an image [N, C, ...] by at least 0"]
        if any(flat[2 * graph.axes.count :]):
            return [
                f"{node.label}: pads the batch, or channels by a number that depends on the image's size ({flat}); only channels and the "
                "image's axes can be padded in strips, so join samples outside the compiled model"
            ]
        if mode != "constant" and any(amount < 0 for amount in flat if isinstance(amount, int)):  # symbolic ones are known at a size
            return [f"{node.label}: crops with mode {mode!r}; crop before padding"]
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class CircularPadSpec(PadSpec):
    """Circular padding of rows: the image with rows of the opposite border above and below it."""

    name: str = "circular_pad"
    is_sized: bool = False

    def streamed_operands(self, node: Node, streamed: Collection[str]) -> tuple[str, ...]:
        return node.operands[:1]

    def amounts(self, node: Node, axis: int) -> tuple[int, int]:
        return (node.argument("low"), node.argument("high")) if axis == ROWS else (0, 0)

    def mode(self, node: Node) -> str:
        return "constant"

    def resolved(self, node: Node, extents: tuple[int, ...]) -> Node:
        return node

    def problems(self, node: Node, graph: Graph, streamed: Collection[str]) -> list[str]:
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class BorderRowsSpec(Operator):
    """Rows at the image's lower and upper border, for circular padding."""

    name: str = "border_rows"
    role: Role = "reduce"
    is_sized: bool = True
    backward_reads: tuple[bool, bool] = (False, False)

    def dimension_map(self, node: Node, axes: Axes) -> tuple[int | None, ...]:
        return (0, 1, None, *range(3, 2 + axes.count))

    def problems(self, node: Node, graph: Graph, streamed: Collection[str]) -> list[str]:
        rows, count = graph.axes.of(graph[node.operands[0]].shape)[ROWS], max(node.argument("low"), node.argument("high"))
        if isinstance(rows, int) and count > rows:
            return [f"{node.label}: {count} rows wrap round an image of {rows}"]
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelPadSpec(Operator):
    """Padding (``pad``) of channels only."""

    name: str = "per_pixel"

    def problems(self, node: Node, graph: Graph, streamed: Collection[str]) -> list[str]:
        flat, axes = node.argument("pad"), graph.axes
        if any(flat[: 2 * axes.count]) or any(flat[2 * (len(node.shape) - 1) :]) or any(not isinstance(amount, int) for amount in flat):
            return [f"{node.label}: pads more than channels ({flat})"]
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignSliceSpec(Operator):
    """Assignment of another image of the same size to some rows, columns or slices: ``x[:, :, 2:5] = y``, ``cat`` along an axis."""

    name: str = "assign_slice"
    backward_reads: tuple[bool, bool] = (False, False)

    def problems(self, node: Node, graph: Graph, streamed: Collection[str]) -> list[str]:
        return untiled_operand_problem(node, streamed)


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceSpec(Operator):
    """Strided slice ``x[:, :, start:end:step]`` of the image along an axis."""

    name: str = "slice"
    backward_reads: tuple[bool, bool] = (False, False)

    def span(self, node: Node, axis: int) -> tuple[int, int, int]:
        """First row, end row (exclusive), and step."""
        sliced, *span = node.argument("span")
        return (span[0], span[1], span[2]) if axis == sliced else (0, node.argument("extents")[axis], 1)

    def resolved(self, node: Node, extents: tuple[int, ...]) -> Node:
        rank = len(node.shape)
        axis = node.argument("dim") % rank - (rank - len(extents))
        bounds = slice(node.argument("start"), node.argument("end"), node.argument("step", 1)).indices(extents[axis])
        return replace(node, arguments=(*node.arguments, ("span", (axis, *bounds)), ("extents", extents)))

    def access(self, node: Node, axis: int) -> AxisMap:
        start, _, step = self.span(node, axis)
        return AxisMap(scale=step, first=start, last=start)

    def extent(self, node: Node, axis: int, extent: int) -> int:
        return len(range(*self.span(node, axis)))

    def problems(self, node: Node, graph: Graph, streamed: Collection[str]) -> list[str]:
        if node.argument("dim", 0) % len(node.shape) < len(node.shape) - graph.axes.count:
            return [f"{node.label}: slices the batch; only channels and the image's axes can be sliced in strips"]
        return []
