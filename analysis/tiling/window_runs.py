"""Window runs: untiled operators that compute every row of windows of an image on its own.

A model partitions an image into windows, computes each of them, and joins or pools the results::

    x.view(B, C, H // t, t, W // t, t).permute(0, 2, 4, 1, 3, 5).reshape(-1, C, t, t)

Passes turn the partition into an image of ``H / t`` rows whose channels are the pixels of a window (``sft.pixel_unshuffle``), and a
permutation of its dimensions (``sft.restore_dims``). A row of this image is a row of windows. So the windows are samples along the rows:
:class:`~sft.analysis.ir.ops.sample_axis.SampleAxis` follows them through the operators after the partition, and back into an image
(``[B, H / t, t, W, C]`` has ``inner = t``). A run takes some rows of windows at a time, without halos.

Operators that exchange rows of windows (a cyclic shift, a norm over all windows, pooling of their vectors) end a run, as in
:mod:`sft.analysis.tiling.sample_runs`. Streamed operators before the partition join the run if each row of windows reads rows of its own;
the image may then be read from a source, a row of windows at a time. Otherwise they run in strips, as a segment before it.

**Windows of a row.** If the operators of a run compute every window on its own, and the values that cross its border have the windows in
contiguous blocks, a chunk may also be some windows of one row. Positions of windows in a row are found in the graph of a single row: there
the columns of images are what rows are in the graph.

The batch must be one image: of several, the rows of windows are no contiguous blocks of the windows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sft.analysis.ir.axes import COLUMNS, ROWS
from sft.analysis.ir.graph import Graph, Node
from sft.analysis.ir.ops import ELEMENTWISE
from sft.analysis.ir.ops.sample_axis import SampleAxis, SampleLevel, SampleTracker
from sft.analysis.ir.ops.sample_rules import SAMPLE_RULES, graph_of_samples
from sft.analysis.tiling.phases import Phase, PhasedGraph
from sft.analysis.tiling.sample_runs import sort_into_runs
from sft.common.interval import Interval

__all__ = ["PhaseWindows", "WindowStage", "find_window_runs"]

#: Streamed operators whose computation does not depend on the position of a row or column.
_POSITION_INDEPENDENT = frozenset(
    {
        *ELEMENTWISE,
        *(f"aten.conv{n}d.default" for n in (1, 2, 3)),
        *(f"aten.{name}.default" for name in ("pixel_shuffle", "pixel_unshuffle")),
        *(f"sft.{name}" for name in ("pixel_unshuffle", "im2col", "rearrange", "channel_norm")),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowStage:
    """Operators of a phase between two exchanges of rows of windows, or such an exchange.

    Attributes:
        names: operators in execution order.
        rows: the rows of windows; ``None`` for an exchange.
        columns: the windows of a row, in the graph of a single row; ``None`` if they cannot be taken one by one.
    """

    names: tuple[str, ...]
    rows: SampleLevel | None = None
    columns: SampleLevel | None = None

    @property
    def num_windows(self) -> int:
        """Largest number of chunks that the stage can be divided into."""
        return (1 if self.rows is None else self.rows.num_samples) * (1 if self.columns is None else self.columns.num_samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseWindows:
    """Window runs of one phase.

    Attributes:
        stages: the stages in execution order.
        has_streamed: True if the stages include the phase's streamed operators; otherwise its tail alone.
    """

    stages: tuple[WindowStage, ...]
    has_streamed: bool

    @property
    def run_names(self) -> frozenset[str]:
        """Operators inside of runs."""
        return frozenset(name for stage in self.stages if stage.rows is not None for name in stage.names)


def find_window_runs(phases: PhasedGraph) -> Mapping[int, PhaseWindows]:
    """Window runs by index of the phase, for those that have any; none for a batch of several images.

    Args:
        phases: the phased graph at one input size.
    """
    graph = phases.graph
    if any(graph[name].shape[0] != 1 for name in graph.inputs if name in phases.streamed):
        return {}
    results = {}
    for index, phase in enumerate(phases.phases):
        candidates = [
            windows
            for num_rows in _extents_read(phases, phase.tail, ROWS)
            for has_streamed in (True, False)
            if (windows := _phase_windows(phases, phase, num_rows, has_streamed=has_streamed)) is not None
        ]
        if candidates:
            results[index] = max(candidates, key=lambda windows: _num_elements(graph, windows.run_names))
    return results


def _num_elements(graph: Graph, names: frozenset[str]) -> int:
    return sum(math.prod(graph[name].shape) for name in names)


def _extents_read(phases: PhasedGraph, names: Sequence[str], axis: int) -> Sequence[int]:
    """Extents of the images that untiled operators read, more than one: those of windows are among them."""
    graph = phases.graph
    untiled = (name for name in names if phases.rows[name].role == "whole")
    read = dict.fromkeys(name for user in untiled for name in graph[user].operands if name in phases.streamed)
    return [extent for extent in dict.fromkeys(graph.axes.extent(graph[name].shape, axis) for name in read) if extent > 1]


def _phase_windows(phases: PhasedGraph, phase: Phase, num_rows: int, *, has_streamed: bool) -> PhaseWindows | None:
    """Stages of a phase; ``None`` if no operator is in a run, or a streamed one is in none although it should."""
    graph = phases.graph
    names = frozenset((*(phase.streamed if has_streamed else ()), *phase.tail))
    operators = [node for node in graph.operators if node.name in names]

    def tracker_without(excluded: frozenset[str]) -> SampleTracker:
        return WindowTracker.of(phases, graph, names, num_rows, axis=ROWS, excluded=excluded)

    runs = sort_into_runs(graph, operators, frozenset(), tracker_without)
    rows = SampleLevel(num_samples=num_rows, axes=runs.axes)
    stages = [
        WindowStage(names=stage.names, rows=rows, columns=_columns(phases, stage.names, rows))
        if stage.is_run
        else WindowStage(names=stage.names)
        for stage in runs.stages
    ]
    windows = PhaseWindows(stages=tuple(stages), has_streamed=has_streamed)
    inside = windows.run_names
    return None if not inside or (has_streamed and not inside.issuperset(phase.streamed)) else windows


def _columns(phases: PhasedGraph, names: Sequence[str], rows: SampleLevel) -> SampleLevel | None:
    """Windows of a row of a run; ``None`` if its operators exchange them, or if they are no contiguous blocks of its results."""
    graph = phases.graph
    row = graph_of_samples(graph, rows.axes, 1)
    for num_columns in _extents_read(phases, names, COLUMNS):
        tracker = WindowTracker.of(phases, row, frozenset(names), num_columns, axis=COLUMNS, excluded=frozenset())
        if all(tracker.track(row[name]) for name in names) and all(
            tracker.is_sliceable(name, tracker.axes[name]) for name in graph.live_out(names)
        ):
            return SampleLevel(num_samples=num_columns, axes=tracker.axes)
    return None


class WindowTracker(SampleTracker):
    """Propagates the rows of windows of one image, or the windows of a row, through a graph."""

    #: Axis of images along which the windows are samples.
    image_axis: int
    #: Operators that may be inside of a run.
    allowed: frozenset[str]

    @classmethod
    def of(
        cls, phases: PhasedGraph, graph: Graph, allowed: frozenset[str], num_samples: int, *, axis: int, excluded: frozenset[str]
    ) -> WindowTracker:
        """Tracker that begins at the images from outside that some operators read."""
        tracker = cls(
            graph=graph,
            rows=phases.rows,
            streamed=phases.streamed,
            per_sample=frozenset(),
            num_samples=num_samples,
            rules=SAMPLE_RULES,
            image_rules={},
            excluded=excluded,
        )
        tracker.image_axis, tracker.allowed = axis, allowed
        outside = {name for user in allowed for name in graph[user].operands if name in phases.streamed and name not in allowed}
        tracker.axes |= {name: position for name in sorted(outside) if (position := tracker.image_position(name)) is not None}
        return tracker

    def image_position(self, name: str) -> SampleAxis | None:
        """Position of the samples in an image; ``None`` if they do not divide its rows (columns)."""
        shape, axes = self.shape(name), self.graph.axes
        dim = axes.dim(len(shape), self.image_axis)
        if dim is None or shape[dim] % self.num_samples:
            return None
        return SampleAxis(dim=dim, inner=shape[dim] // self.num_samples)

    def is_sliceable(self, name: str, axis: SampleAxis) -> bool:
        shape = self.shape(name)
        return axis.outer == 1 and (math.prod(shape[: axis.dim]) == 1 or (name in self.streamed and axis == self.image_position(name)))

    def _is_uniform(self, node: Node, axis: SampleAxis) -> bool:
        return node.name in self.allowed and super()._is_uniform(node, axis)

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
