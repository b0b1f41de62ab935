"""Sized graph: a phased graph at one input size, with its gradients, layouts, element types, bytes and runs."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import sympy as sp
import torch

from sft.analysis.ir.axes import COLUMNS, ROWS
from sft.analysis.ir.graph import Graph, Node, SymbolicNumber, refs_in
from sft.analysis.passes.positional_rng import SEED_NAME
from sft.analysis.tiling.phases import PhasedGraph, find_phases
from sft.analysis.tiling.sample_runs import SampleRuns, find_sample_runs
from sft.analysis.tiling.strips import row_rates, source_rates, total_stride
from sft.analysis.tiling.window_runs import PhaseWindows, WindowStage, find_window_runs
from sft.common.errors import InputError, UnsupportedError
from sft.lower.context import grad_dtype_of
from sft.planner.memo import Memo

__all__ = ["SizedGraph", "specialize_graph", "specialize_phases"]


@dataclass(frozen=True, kw_only=True, eq=False)
class SizedGraph:
    """A phased graph at one input size.

    Attributes:
        phases: the phased graph, with shapes and arguments as numbers.
        requires_grad: values that need a gradient; empty for inference.
        channels_last: model inputs and outputs in channels-last layout.
        weights_in_layout: parameters in the memory layout that programs give to their results
            (:func:`sft.analysis.frontend.capture.is_in_program_layout`).
        row_major_weights: parameters that are contiguous.
        splits_batch: true if the batch may be split.
        memo: extents, sources and strides of runs.
    """

    phases: PhasedGraph
    requires_grad: frozenset[str]
    channels_last: frozenset[str] = frozenset()
    weights_in_layout: frozenset[str] = frozenset()
    row_major_weights: frozenset[str] = frozenset()
    splits_batch: bool = True
    memo: Memo = field(default_factory=Memo, init=False, repr=False)

    @property
    def graph(self) -> Graph:
        """The graph, in execution order."""
        return self.phases.graph

    @cached_property
    def operators(self) -> tuple[str, ...]:
        """All operators, phase by phase."""
        return tuple(name for phase in self.phases.phases for name in (*phase.streamed, *phase.tail))

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every value."""
        return {node.name: node.shape for node in self.graph.nodes}

    @property
    def training(self) -> bool:
        """True if a backward pass follows."""
        return bool(self.requires_grad)

    @cached_property
    def dtypes(self) -> dict[str, torch.dtype]:
        """Element type of every value."""
        return {node.name: getattr(torch, node.dtype) for node in self.graph.nodes}

    @cached_property
    def grad_dtypes(self) -> dict[str, torch.dtype]:
        """Element type in which every value's gradient is accumulated."""
        return {node.name: grad_dtype_of(self.graph, self.phases.streamed, node.name) for node in self.graph.nodes}

    def single_grads(self, names: Iterable[str]) -> frozenset[str]:
        """Parameters that the graph reads once, in one of these operators: each gradient is a single contribution."""
        reads = ((operand, count) for name in names for operand, count in Counter(self.graph[name].operands).items())
        return frozenset(
            operand
            for operand, count in reads
            if operand in self.requires_grad and self.graph[operand].kind == "parameter" and count == len(self.graph.users[operand]) == 1
        )

    def value_bytes(self, name: str) -> int:
        """Bytes of a full value."""
        size = self.graph[name].itemsize_bytes
        for extent in self.shapes[name]:
            size *= extent
        return size

    def grad_bytes(self, name: str) -> int:
        """Bytes of the accumulator of a full value's gradient."""
        return self.value_bytes(name) // self.dtypes[name].itemsize * self.grad_dtypes[name].itemsize

    @cached_property
    def num_batch(self) -> int:
        """Batch elements of the first image input, or of the first input with any dimension."""
        images = [name for name in self.graph.inputs if name in self.phases.streamed]
        return next(self.shapes[name][0] for name in (*images, *self.graph.inputs) if self.shapes[name])

    @cached_property
    def per_sample(self) -> frozenset[str]:
        """Values that are not images and have one entry per batch element in their first dimension; empty for a batch of one."""
        if self.num_batch == 1:
            return frozenset()
        names = set()
        depends = self.graph.descendants({*self.graph.inputs, SEED_NAME})
        for node in (*(self.graph[name] for name in self.graph.inputs), *self.graph.operators):
            if node.name in self.phases.streamed or node.name not in depends or self.shapes[node.name][:1] != (self.num_batch,):
                continue
            # The first dimension of a value of an image's rank is the batch; that of a value of lower rank is channels, of any number.
            is_reduction = node.kind == "operator" and self.phases.rows[node.name].role == "reduce"
            if len(node.shape) >= self.graph.axes.rank or is_reduction or node.target == "sft.scale_shift":
                names.add(node.name)
        return frozenset(names)

    @cached_property
    def sample_runs(self) -> SampleRuns | None:
        """Runs of operators that are independent along samples; ``None`` if the batch cannot be split."""
        if self.batch_tile(1) == self.num_batch:
            return None
        phases = self.phases
        return find_sample_runs(
            self.graph,
            rows=phases.rows,
            streamed=phases.streamed,
            per_sample=self.per_sample,
            prologue=phases.prologue,
            num_samples=self.num_batch,
        )

    @cached_property
    def window_runs(self) -> Mapping[int, PhaseWindows]:
        """Window runs by index of the phase."""
        return find_window_runs(self.phases, self.sample_runs)

    def window_stage(self, names: Sequence[str]) -> WindowStage | None:
        """The window run that has these operators."""
        stages = (stage for windows in self.window_runs.values() for stage in windows.stages if stage.rows is not None)
        return next((stage for stage in stages if set(stage.names).issuperset(names)), None)

    def batch_tile(self, requested: int | None) -> int:
        """Batch elements per sweep for a requested number (``None``: one)."""
        return min(requested or 1, self.num_batch) if self.splits_batch and not self._needs_whole_batch else self.num_batch

    @cached_property
    def _needs_whole_batch(self) -> bool:
        """True if a streamed operator reads a value that cannot be split with the batch.

        A weight with ``num_batch`` entries may be computed from all elements; per-sample matrices may be parameters, or computed from some.
        """
        nodes = [self.graph[name] for name in self.phases.streamed]
        weights = {name for node in nodes for key in ("weight", "bias") for name in refs_in(node.argument(key))}
        matrices = {name for node in nodes if node.target == "sft.mix_channels" for name in refs_in(node.argument("matrix"))}
        batched = {name for name in matrices if self.shapes[name][0] == self.num_batch > 1}
        return not self.per_sample.isdisjoint(weights) or not batched <= self.per_sample

    def extent(self, name: str, axis: int) -> int:
        """Extent of a streamed value along an axis."""
        return self.graph.axes.extent(self.shapes[name], axis)

    def extents(self, axis: int) -> Mapping[str, int]:
        """Extent of every streamed value along an axis."""
        return self.memo.memoize(("extents", axis), lambda: {name: self.extent(name, axis) for name in self.phases.streamed})

    def run_sources(self, names: Sequence[str]) -> tuple[str, ...]:
        """Streamed values outside a run that it reads."""
        run = tuple(names)
        return self.memo.memoize(("sources", run), lambda: self.graph.sources(run, self.phases.streamed))

    def run_height(self, names: Sequence[str]) -> int:
        """Rows of the tallest source of a run."""
        return max((self.extent(name, ROWS) for name in self.run_sources(names)), default=1)

    def run_width(self, names: Sequence[str]) -> int:
        """Columns of the widest source of a run."""
        return max((self.extent(name, COLUMNS) for name in self.run_sources(names)), default=1)

    def num_panels(self, names: Sequence[str], panel_cols: int) -> int:
        """Panels of a run; a ``panel_cols`` of 0 is the full width."""
        return -(-self.run_width(names) // panel_cols) if panel_cols else 1

    def stride(self, names: Sequence[str]) -> int:
        """Rows of the run's tallest source after which the row pattern of every value repeats, exactly or nearly.

        An interpolation by an odd ratio has a period longer than any strip; it is replaced by a ratio close to it.
        """
        run = tuple(names)
        return self.memo.memoize(("stride", run), lambda: self._stride(run))

    def _stride(self, names: tuple[str, ...]) -> int:
        input_rates = source_rates({name: self.extent(name, ROWS) for name in self.run_sources(names)})
        if not input_rates:
            return 1
        rates, longest = row_rates(self.phases.run(names), input_rates), self.run_height(names) // 8
        stride = total_stride(rates)
        return stride if stride <= max(longest, 64) else total_stride({name: rate.limit_denominator(4) for name, rate in rates.items()})


def specialize_phases(phases: PhasedGraph, symbols: Mapping[sp.Symbol, int], input_shapes: Mapping[str, tuple[int, ...]]) -> PhasedGraph:
    """Substitute one input size into a phased graph: shapes and arguments become numbers.

    Args:
        phases: the phased graph with symbolic sizes.
        symbols: the value of every symbol in it.
        input_shapes: shape of each input.

    Raises:
        InputError: an operator's output would be empty, or operands differ in size.
        UnsupportedError: an operand broadcasts along the image, or a size depends on values.
    """
    phases = _resort_phases(phases, symbols)
    shapes: dict[str, tuple[int, ...]] = dict(input_shapes)
    nodes: list[Node] = []
    for node in phases.graph.nodes:
        numbers = _evaluate_argument(node.arguments, symbols, node)
        if numbers is not node.arguments:
            node = replace(node, arguments=numbers)
        operands = [name for name in node.operands if name in phases.streamed]
        if node.name not in shapes:
            if node.name in phases.streamed and operands and phases.rows[node.name].role == "stream":
                node, shapes[node.name] = _specialize_streamed(phases, node, symbols, [shapes[name] for name in operands])
            else:
                if operands and phases.rows[node.name].role == "reduce":
                    node = phases.rows[node.name].resolved(node, phases.graph.axes.of(shapes[operands[0]]))
                shapes[node.name] = tuple(_evaluate_extent(extent, symbols, node) for extent in node.shape)
        nodes.append(node.with_shape(shapes[node.name]))
    last = phases.graph[phases.graph.outputs[0]]
    constant_outputs = tuple((place, _evaluate_argument(value, symbols, last)) for place, value in phases.graph.constant_outputs)
    return replace(phases, graph=replace(phases.graph, nodes=tuple(nodes), constant_outputs=constant_outputs))


def specialize_graph(graph: Graph, symbols: Mapping[sp.Symbol, int]) -> Graph:
    """Substitute one input size into a graph.

    Raises:
        UnsupportedError: a size depends on values.
    """
    nodes = (
        replace(node, shape=_evaluate_argument(node.shape, symbols, node), arguments=_evaluate_argument(node.arguments, symbols, node))
        for node in graph.nodes
    )
    return replace(graph, nodes=tuple(nodes))


def _resort_phases(phases: PhasedGraph, symbols: Mapping[sp.Symbol, int]) -> PhasedGraph:
    """Find phases again if an operator that streams at other sizes does not stream at this one."""
    sized = [name for name, row in phases.rows.items() if row.is_sized]
    if not sized:
        return phases
    graph = specialize_graph(phases.graph, symbols)
    is_same = not any(phases.rows[name].problems(graph[name], graph, phases.streamed) for name in sized)
    return phases if is_same else replace(find_phases(graph), clones=phases.clones)


def _specialize_streamed(
    phases: PhasedGraph, node: Node, symbols: Mapping[sp.Symbol, int], operands: Sequence[tuple[int, ...]]
) -> tuple[Node, tuple[int, ...]]:
    """Specialize a node with streamed rows: resolve its rule for the operands' extents, and compute its shape."""
    axes, row = phases.graph.axes, phases.rows[node.name]
    sizes = {axes.of(shape) for shape in operands}
    if len(sizes) > 1:
        if any(1 in size for size in sizes):
            raise UnsupportedError([f"{node.label}: an operand broadcasts along the image {sorted(sizes)}; expand it first"])
        listed = " and ".join("x".join(map(str, size)) for size in sorted(sizes))
        raise InputError(f"{node.label}: operands of different size, {listed}; choose an input size at which they agree")
    node = row.resolved(node, axes.of(operands[0]))
    extents = [row.extent(node, axis, extent) for axis, extent in enumerate(axes.of(operands[0]))]
    if min(extents) < 1:
        size, result = "x".join(map(str, operands[0])), " x ".join(map(str, extents))
        raise InputError(f"{node.label}: an input of {size} leaves no output (it would be {result}); give a larger image")
    # The exporter may know channels only as an expression of the image's size: those of a pixel_unshuffle.
    channels = (_evaluate_extent(extent, symbols, node) for extent in node.shape[1 : len(node.shape) - axes.count])
    return node, (operands[0][0], *channels, *extents)


def _evaluate_extent(extent: Any, symbols: Mapping[sp.Symbol, int], node: Node) -> int:
    if type(extent) is int:
        return extent
    value = sp.sympify(sp.sympify(extent).xreplace(dict(symbols)))  # a symbol alone is replaced by a plain number
    if not value.is_number:
        remedy = "keep it outside the compiled model"
        if node.target == "aten.index.Tensor":
            remedy = f"where a mask says what changes, write torch.where(mask, new, old); else {remedy}"
        raise UnsupportedError([f"{node.label}: its size {extent} depends on the values of the image; {remedy}"])
    return int(value)


def _evaluate_argument(value: Any, symbols: Mapping[sp.Symbol, int], node: Node) -> Any:
    """Substitute sizes into an argument; an argument without any is returned as it is."""
    if isinstance(value, SymbolicNumber):
        return value.at(lambda size: _evaluate_extent(size, symbols, node))
    if isinstance(value, sp.Basic):
        return _evaluate_extent(value, symbols, node)
    if not isinstance(value, (tuple, list)):
        return value
    values = [_evaluate_argument(item, symbols, node) for item in value]
    return value if all(map(operator.is_, values, value)) else type(value)(values)
