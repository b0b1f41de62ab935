"""Window trackers: propagation of windows and tokens through the operators of one image."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Self, TypedDict, Unpack

from sft.analysis.ir.graph import Graph, Node, refs_in
from sft.analysis.ir.ops import ELEMENTWISE
from sft.analysis.ir.ops.sample_axis import SampleAxis, SampleTracker
from sft.analysis.ir.ops.sample_rules import SAMPLE_RULES
from sft.analysis.ir.targets import ATTENTION
from sft.analysis.tiling.phases import PhasedGraph
from sft.common.interval import Interval

__all__ = ["ImageTracker", "SequenceTracker", "TrackerScope", "WindowTracker", "extents_read", "num_windows_read", "sequence_lengths"]

#: Streamed operators whose computation does not depend on the position of a row or column.
_POSITION_INDEPENDENT = frozenset(
    {
        *ELEMENTWISE,
        *(f"aten.conv{n}d.default" for n in (1, 2, 3)),
        *(f"aten.{name}.default" for name in ("pixel_shuffle", "pixel_unshuffle")),
        *(f"sft.{name}" for name in ("pixel_unshuffle", "im2col", "rearrange", "channel_norm")),
    }
)


def extents_read(phases: PhasedGraph, names: Collection[str], axis: int) -> Sequence[int]:
    """Extents of the images that untiled operators read, more than one: those of windows are among them."""
    graph = phases.graph
    untiled = (name for name in names if phases.rows[name].role == "whole")
    read = dict.fromkeys(name for user in untiled for name in graph[user].operands if name in phases.streamed)
    return [extent for extent in dict.fromkeys(graph.axes.extent(graph[name].shape, axis) for name in read) if extent > 1]


def sequence_lengths(graph: Graph, names: Collection[str]) -> Sequence[int]:
    """Numbers of queries of attention over one sequence, as one operator or as a softmax of scores; more than one."""
    lengths = (extent for name in names for extent in _num_queries(graph, graph[name]))
    return [extent for extent in dict.fromkeys(lengths) if extent > 1]


def num_windows_read(graph: Graph, names: Collection[str]) -> Sequence[int]:
    """Extents of the first dimension of the operands of linear layers, more than one: numbers of windows are among them."""
    operands = (graph[name].argument("input").name for name in names if graph[name].target == "aten.linear.default")
    shapes = (graph[name].shape for name in operands)
    return [extent for extent in dict.fromkeys(shape[0] for shape in shapes if len(shape) > 2) if extent > 1]


def _num_queries(graph: Graph, node: Node) -> Iterator[int]:
    if node.target == ATTENTION:
        yield from (graph[name].shape[-2] for name in refs_in(node.argument("query")))
    elif node.target == "aten.softmax.int" and len(node.shape) > 1:
        yield from node.shape[-2:-1]


class TrackerScope(TypedDict):
    """Operators and values that a tracker may follow.

    Attributes:
        allowed: operators that may be inside of a run.
        excluded: operators that must not be made for some samples alone.
        batch_axes: position of the elements of the batch in the values of several images, of which the graph has one.
    """

    allowed: frozenset[str]
    excluded: frozenset[str]
    batch_axes: Mapping[str, SampleAxis]


class WindowTracker(SampleTracker):
    """Propagates samples of one image through some operators of a phase; :class:`TrackerScope` has its attributes."""

    allowed: frozenset[str]
    batch_axes: Mapping[str, SampleAxis]

    @classmethod
    def of(
        cls,
        phases: PhasedGraph,
        graph: Graph,
        num_samples: int,
        **scope: Unpack[TrackerScope],
    ) -> Self:
        """Tracker of a number of samples."""
        tracker = cls(
            graph=graph,
            rows=phases.rows,
            streamed=phases.streamed,
            per_sample=frozenset(),
            num_samples=num_samples,
            rules=SAMPLE_RULES,
            image_rules={},
            excluded=scope["excluded"],
        )
        tracker.allowed, tracker.batch_axes = scope["allowed"], scope["batch_axes"]
        return tracker

    def is_sliceable(self, name: str, axis: SampleAxis) -> bool:
        batch = self.batch_axes.get(name)
        return axis.outer == 1 and (batch is None or batch.outer == 1)

    def outside(self, among: Collection[str]) -> list[str]:
        """Values of a set that operators of the tracker read from outside."""
        return sorted({name for user in self.allowed for name in self.graph[user].operands if name in among and name not in self.allowed})

    def _is_uniform(self, node: Node, axis: SampleAxis) -> bool:
        return node.name in self.allowed and super()._is_uniform(node, axis)

    def _axis_of_image(self, node: Node, *, reduces: bool) -> SampleAxis | None:
        return None


class ImageTracker(WindowTracker):
    """Propagates the rows of windows of one image, or the windows of a row: they divide the rows (columns) of the images."""

    #: Axis of images along which the windows are samples.
    image_axis: int

    def begin_at_images(self, image_axis: int) -> ImageTracker:
        """The tracker, after the images from outside that its operators read."""
        self.image_axis = image_axis
        positions = ((name, self.image_position(name)) for name in self.outside(self.streamed))
        self.axes |= {name: position for name, position in positions if position is not None}
        return self

    def image_position(self, name: str) -> SampleAxis | None:
        """Position of the samples in an image; ``None`` if they do not divide its rows (columns)."""
        shape, axes = self.shape(name), self.graph.axes
        dim = axes.dim(len(shape), self.image_axis)
        if dim is None or shape[dim] % self.num_samples:
            return None
        return SampleAxis(dim=dim, inner=shape[dim] // self.num_samples)

    def is_sliceable(self, name: str, axis: SampleAxis) -> bool:
        is_image_row = name not in self.streamed or math.prod(self.shape(name)[: axis.dim]) == 1 or axis == self.image_position(name)
        return super().is_sliceable(name, axis) and is_image_row

    def _axis_of_image(self, node: Node, *, reduces: bool) -> SampleAxis | None:
        """Sample axis of a streamed operator each of whose blocks of rows reads one block of its operands."""
        if reduces or node.target not in _POSITION_INDEPENDENT or node.name not in self.streamed:
            return None
        row, axis = self.rows[node.name], self.image_position(node.name)
        operands = row.streamed_operands(node, self.streamed)
        if axis is None or any(name in self.axes for name in node.operands if name not in operands):
            return None
        block, access = Interval(0, axis.inner), row.access(node, self.image_axis)
        for name in operands:
            operand_axis = self.image_position(name)
            if operand_axis is None or self.take(name, operand_axis) != operand_axis:
                return None
            read = access.read(block)
            if access.scale * axis.inner != access.divisor * operand_axis.inner or read.start < 0 or read.stop > operand_axis.inner:
                return None
        return axis if row.computed(node, self.image_axis, block) == block else None


class SequenceTracker(WindowTracker):
    """Propagates tokens of a sequence, or windows in the first dimension.

    It begins at results of operators that exchange them, and at values from outside.
    """

    #: True for windows in the first dimension; false for tokens.
    is_leading: bool

    def begin_at_sequences(self, *, is_leading: bool) -> SequenceTracker:
        """The tracker, after the sequences from outside that its operators read."""
        self.is_leading = is_leading
        for name in self.outside([node.name for node in self.graph.nodes]):
            self._begin_at(name)
        return self

    def track(self, node: Node) -> bool:
        is_inside = super().track(node)
        if node.name not in self.axes:
            self._begin_at(node.name)
        return is_inside

    def _begin_at(self, name: str) -> None:
        """Record the samples of a value; weights are taken where they are read."""
        node, shape = self.graph[name], self.shape(name)
        is_input = node.kind == "input" and name not in self.streamed
        if not is_input and (node.kind != "operator" or self.rows[name].is_extra_result):
            return
        dim = self._dim_of_samples(shape)
        if dim is not None and self.is_sliceable(name, SampleAxis(dim=dim)):
            self.axes[name] = SampleAxis(dim=dim)

    def _dim_of_samples(self, shape: tuple[int, ...]) -> int | None:
        """Dimension of the samples in a value of a shape: the first one of windows; of tokens the only one before the last."""
        if self.is_leading:
            return 0 if len(shape) > 1 and shape[0] == self.num_samples else None
        last = len(shape) - 2
        dims = (dim for dim in (last, *range(last)) if dim >= 0 and shape[dim] == self.num_samples)
        return next(dims, None) if math.prod(shape[: last + 1]) == self.num_samples else None
