"""Interfaces of the lowering: the view that a rule has of its operator in one step, and the protocol of kernel backends.

:class:`SegmentInfo` holds the facts that all steps of a segment share. A lowering (:mod:`sft.lower.lower_strip`,
:mod:`sft.lower.lower_whole`) makes a :class:`NodeContext` for each operator and step, and passes it to the operator's rule
(:mod:`sft.lower.rules.base`). The rule emits instructions and reports gradients as :class:`GradContribution`.

Names of tensors:

- *streamed* values come in strips. The buffer of one holds the rows carried from earlier steps, then the new rows of this step.
- *global* values do not: parameters, buffers, and reductions over the image. Each is one full tensor.

A :class:`Backend` sees a lowered program as a list of ATen calls and may replace some by its own kernels.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from sft.analysis.ir.axes import COLUMNS, ROWS, Axes
from sft.analysis.ir.graph import Graph, Node, Ref, refs_in
from sft.analysis.ir.ops import Operator, Window, window_of
from sft.analysis.tiling.strips import NodeRows, OperandRead, StripStep
from sft.common.interval import Interval
from sft.lower.builder import ProgramBuilder
from sft.lower.concat import DimSlice, dim_slices
from sft.lower.program import Port, Slot

__all__ = ["Backend", "GradContribution", "NodeContext", "SegmentInfo", "accumulation_dtype", "grad_dtype_of"]


class Backend(Protocol):
    """A kernel backend: replaces instructions of a lowered program."""

    @property
    def decomposes_norms(self) -> bool:
        """True if norms of whole images are decomposed, so that kernels replace their parts; otherwise each is one call of ATen."""

    @property
    def without_kernels(self) -> Backend | None:
        """The backend without kernels of its own, where these are optional; ``None`` where they are not, or where it has none."""

    def fuses_attention(self, dtype: torch.dtype) -> bool:
        """True if attention of this element type is one operator on the device."""

    def resamples(self, dtype: torch.dtype, shape: Sequence[int], num_terms: Sequence[int], *, is_adjoint: bool) -> bool:
        """True if a kernel resamples images of this element type.

        Args:
            dtype: element type of the operand.
            shape: shape of the result.
            num_terms: number of terms of a sum, for each axis; 1 for an axis that stays as it is.
            is_adjoint: True for the gradient.
        """

    def rewrite(self, builder: ProgramBuilder, laid_out: Collection[Port], *, training: bool, num_forward: int | None = None) -> int | None:
        """Replace instructions of the builder.

        Args:
            builder: holds the lowered program.
            laid_out: ports bound to images that are channels-last.
            training: True if a backward pass follows.
            num_forward: number of instructions of the forward half, if the program will be split.

        Returns:
            ``num_forward`` after the replacement.
        """


class GradContribution(NamedTuple):
    """A contribution to the gradient of a value.

    Attributes:
        slot: the gradient.
        rows: its rows, for a streamed value.
        columns: its columns, for a streamed value.
        owned: True if no other slot needs the storage, so that it may be overwritten.
        channels: the channels of the slot that it consists of; ``None`` for all.
        span: the slice of the value that it is the gradient of, along another dimension than rows and columns; ``None`` for all of it.
    """

    slot: Slot
    rows: Interval | None
    columns: Interval | None
    owned: bool
    channels: Interval | None = None
    span: DimSlice | None = None


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Element type of sums over the image: fp32 for half types, which would round the sum of each strip."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def grad_dtype_of(graph: Graph, streamed: Collection[str], name: str) -> torch.dtype:
    """Element type in which the gradient of a value is accumulated.

    A global value gets a contribution from every strip, so its gradient is accumulated in :func:`accumulation_dtype`. A streamed value
    gets one or two contributions, so its own type suffices, with one exception. The gradient of the input of a norm over the image is the
    sum of two terms that nearly cancel. If the gradient is constant over the image (as after a global pool), rounding the first term to
    float16 moves all pixels in the same direction, and their sum by a multiple of the rounding error of eager PyTorch. (In bfloat16 the
    rounding of the activations hides it.)
    """
    dtype = getattr(torch, graph[name].dtype)
    assert isinstance(dtype, torch.dtype)
    is_norm_input = dtype == torch.float16 and any(graph[user].target == "sft.moments" for user in graph.users[name])
    return dtype if name in streamed and not is_norm_input else accumulation_dtype(dtype)


@dataclass(frozen=True, kw_only=True)
class SegmentInfo:
    """Facts that all steps of a segment share.

    Attributes:
        graph: the model.
        specs: the operator's entry in the operator table, by operator.
        streamed: values that come in strips.
        names: the segment's operators in order.
        shapes: full shape of every value of the graph for this input size and the full batch.
        requires_grad: values that need a gradient.
        outputs: the segment's values that are read outside.
        sources: streamed values from outside.
        in_program_layout: sources that already are channels last, and global tensors with a gradient that may keep the layout in which
            programs compute it: contiguous, or channels last with two or three axes. All global tensors except parameters are among them.
        batch: batch elements of a sweep.
        per_sample: global values with an entry for each batch element, in their first dimension.
        full_shapes: shapes for all samples, of the values that ``shapes`` has for some samples only (:mod:`sft.runtime.sample_segment`).
        columns: the columns that the panel computes and reads, for every streamed value and operator of the segment. A panel carries no
            columns: it computes its own halo.
        keeps_torch_layouts: True if images have the memory layout of eager PyTorch; otherwise all are channels last. For untiled segments
            only.
        row_major: global values with the rank of images that are row-major, or copied so, which untiled operators read without a copy.
        channels_last_weights: parameters and folded weights from outside that are channels last: kernels need no copy of them.
        strided: global values of which the program has a slice that is not a contiguous block; it is copied before its first use.
        backend: replaces instructions by kernels; ``None`` for ATen alone.
        deterministic: True if sums need a fixed order, which ATen's own derivatives do not keep on the device.
        single_grads: parameters with gradients of a single contribution: one operator reads them, and runs once.
        on_host: True if the device's memory is the host's, which reads the seed of random numbers as a number.
    """

    graph: Graph
    specs: Mapping[str, Operator]
    streamed: frozenset[str]
    names: tuple[str, ...]
    shapes: Mapping[str, tuple[int, ...]]
    requires_grad: frozenset[str]
    outputs: tuple[str, ...]
    sources: tuple[str, ...]
    in_program_layout: frozenset[str]
    batch: int
    columns: Mapping[str, NodeRows]
    per_sample: frozenset[str] = frozenset()
    full_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    row_major: frozenset[str] = frozenset()
    channels_last_weights: frozenset[str] = frozenset()
    strided: frozenset[str] = frozenset()
    keeps_torch_layouts: bool = False
    backend: Backend | None = None
    deterministic: bool = False
    on_host: bool = True
    single_grads: frozenset[str] = frozenset()
    _windows: dict[str, tuple[Window, ...]] = field(default_factory=dict, repr=False, compare=False)
    _dtypes: dict[str, torch.dtype] = field(default_factory=dict, repr=False, compare=False)
    #: Cache for these columns only: `init=False`, so that `replace` starts a new one.
    _columns_read: dict[str, dict[str, OperandRead]] = field(init=False, default_factory=dict, repr=False, compare=False)

    def windows(self, name: str) -> tuple[Window, ...]:
        """The sliding window of a convolution or a pool, for each axis."""
        if name not in self._windows:
            windows = [window_of(self.graph[name], axis) for axis in range(self.axes.count)]
            self._windows[name] = tuple(window for window in windows if window is not None)
            assert len(self._windows[name]) == self.axes.count
        return self._windows[name]

    @property
    def axes(self) -> Axes:
        """The spatial axes of the images."""
        return self.graph.axes

    def block_shape(self, name: str, num_rows: int, num_columns: int) -> tuple[int, ...]:
        """Shape of a block of rows and columns of a streamed value in one sweep."""
        shape = self.axes.with_extent(self.shapes[name], ROWS, num_rows)
        return (self.batch, *self.axes.with_extent(shape, COLUMNS, num_columns)[1:])

    def strip_shape(self, name: str, num_rows: int) -> tuple[int, ...]:
        """Shape of ``num_rows`` rows of a streamed value in one sweep over one panel."""
        return self.block_shape(name, num_rows, len(self.columns[name].new))

    def extent(self, name: str, axis: int) -> int:
        """Extent of a streamed value along an axis."""
        return self.axes.extent(self.shapes[name], axis)

    def has_columns(self, name: str) -> bool:
        """True if an operator computes or reads columns in this panel; false if it is too far from the panel's outputs."""
        return bool(self.columns[name].new) if name in self.streamed else bool(self.columns[name].reads)

    def rows_read(self, step: StripStep) -> dict[str, Interval]:
        """The rows of each operand that a step reads."""
        rows_read: dict[str, Interval] = {}
        for rows in step.nodes:
            if rows.reads and self.has_columns(rows.name):
                for read in rows.reads:
                    rows_read[read.operand] = rows_read.get(read.operand, Interval(0, 0)).hull(read.rows)
        return rows_read

    def global_shape(self, name: str) -> tuple[int, ...]:
        """Shape of a global value in one sweep."""
        shape = self.shapes[name]
        return (self.batch, *shape[1:]) if name in self.per_sample else shape

    def dtype_of(self, name: str) -> torch.dtype:
        """Element type of a value."""
        dtype = self._dtypes.get(name)
        if dtype is None:
            dtype = self._dtypes[name] = getattr(torch, self.graph[name].dtype)
            assert isinstance(dtype, torch.dtype)
        return dtype

    def columns_read(self, name: str) -> dict[str, OperandRead]:
        """The columns that an operator reads, by streamed operand."""
        reads = self._columns_read.get(name)
        if reads is None:
            reads = self._columns_read[name] = _by_operand(self.columns[name].reads)
        return reads

    def grad_dtype(self, name: str) -> torch.dtype:
        """Element type in which the gradient of a value is accumulated; its own type for a single contribution."""
        return self.dtype_of(name) if name in self.single_grads else grad_dtype_of(self.graph, self.streamed, name)

    def sink_dtype(self, name: str) -> torch.dtype:
        """Element type in which a sink receives gradients: for a cut that of its gradient, for an input the input's."""
        return self.grad_dtype(name) if self.graph[name].kind == "operator" else self.dtype_of(name)


@dataclass
class NodeContext:
    """One operator in one step, as its lowering rule sees it.

    Attributes:
        scope: the segment.
        builder: takes the instructions.
        node: the operator.
        rows: the rows that it computes, holds and reads in the step.
        values: the buffer of each streamed value, and the buffer's first row.
        global_slots: global values computed by this program.
        zero_rows: rows of zeros above and below the buffer of each value.
        destination: the slot for the new rows, if the rule can compute in place.
        overwrite: the operand's buffer, if this operator is its last reader and may overwrite it.
        has_backward: True if the forward pass of an untiled segment leaves residuals for a backward pass.
        saved: slots and facts that the rule's forward pass leaves for its backward pass.
        contributions: gradients of operands reported so far.
    """

    scope: SegmentInfo
    builder: ProgramBuilder
    node: Node
    rows: NodeRows
    values: dict[str, tuple[Slot, int]]
    global_slots: dict[str, Slot]
    zero_rows: Mapping[str, tuple[int, int]]
    destination: Slot | None
    overwrite: Slot | None
    has_backward: bool = False
    saved: dict[str, Any] = field(default_factory=dict)
    contributions: list[tuple[str, GradContribution]] = field(default_factory=list)
    _rows_read: dict[str, OperandRead] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._rows_read = _by_operand(self.rows.reads)

    @property
    def new_rows(self) -> int:
        """Number of rows that the step computes."""
        return len(self.rows.new)

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Shape of the new rows."""
        return self.scope.strip_shape(self.node.name, self.new_rows)

    @property
    def covers_image(self) -> bool:
        """True if the step covers the full image, so that the operator can be called without explicit padding."""
        return self._covers(self.rows, ROWS) and self.is_full_width

    @property
    def is_full_width(self) -> bool:
        """True if the panel is as wide as the image."""
        columns = self.scope.columns.get(self.node.name)
        return columns is None or self._covers(columns, COLUMNS)

    def _covers(self, span: NodeRows, axis: int) -> bool:
        scope, name = self.scope, self.node.name
        return all(len(read.rows) == scope.extent(read.operand, axis) for read in span.reads) and (
            name not in scope.streamed or len(span.new) == scope.extent(name, axis)
        )

    def read_of(self, operand: str) -> OperandRead:
        """The rows that are read of a streamed operand."""
        return self._rows_read[operand]

    def columns_of(self, operand: str) -> OperandRead:
        """The columns that are read of a streamed operand."""
        return self.scope.columns_read(self.node.name)[operand]

    def has_empty_read(self, operand: str) -> bool:
        """True if only padding of an operand is read."""
        return not (self.read_of(operand).rows and self.columns_of(operand).rows)

    def spans(self, operand: str) -> list[tuple[Interval, Interval]]:
        """For each axis, the interval that is computed and the interval that is read of a streamed operand."""
        shape, source = self.scope.shapes[self.node.name], self.scope.shapes[operand]
        columns = self.scope.columns[self.node.name].new
        tiled = [(self.rows.new, self.read_of(operand).rows), (columns, self.columns_of(operand).rows)]
        full = zip(self.scope.axes.of(shape)[2:], self.scope.axes.of(source)[2:], strict=True)
        return [*tiled, *((Interval(0, out), Interval(0, extent)) for out, extent in full)][: self.scope.axes.count]

    def strip(self, operand: str) -> Slot:
        """The rows and columns read of a streamed operand: a view of its buffer."""
        slot, spans = self.buffer_slices(operand)
        for span in spans:
            slot = self.builder.narrow(slot, *span)
        return slot

    def buffer_slices(self, operand: str) -> tuple[Slot, tuple[DimSlice, ...]]:
        """The buffer of a streamed operand, and the slices of it that are read."""
        scope = self.scope
        rows, columns = self._rows_read[operand].rows, scope.columns_read(self.node.name)[operand].rows
        num_rows, num_columns = rows.stop - rows.start, columns.stop - columns.start
        if num_rows <= 0 or num_columns <= 0:
            return self.builder.empty(scope.block_shape(operand, len(rows), len(columns)), scope.dtype_of(operand)), ()
        slot, first_row = self.values[operand]
        first_column = columns.start - scope.columns[operand].new.start
        return slot, dim_slices(scope.graph.axes, slot, rows.start - first_row, num_rows, first_column, num_columns)

    def narrow(self, slot: Slot, axis: int, start: int, length: int) -> Slot:
        """A view of a streamed value along an axis."""
        return self.builder.narrow_axis(slot, self.scope.axes, axis, start, length)

    def _columns(self, operand: str, strip: Slot) -> Slot:
        columns = self.columns_of(operand).rows
        return self.narrow(strip, COLUMNS, columns.start - self.scope.columns[operand].new.start, len(columns))

    def zero_padded_strip(self, operand: str) -> Slot | None:
        """The rows read with their zero padding as one view, if the operand's buffer has rows of zeros; ``None`` otherwise."""
        read = self.read_of(operand)
        low, high = self.zero_rows.get(operand, (0, 0))
        if self.has_empty_read(operand) or low < read.pad_low or high < read.pad_high or not (low or high):
            return None
        slot, first_row = self.values[operand]
        start = read.rows.start - read.pad_low - first_row
        return self._columns(operand, self.narrow(slot, ROWS, start, read.pad_low + len(read.rows) + read.pad_high))

    def operand_slot(self, value: Any) -> Any:
        """An argument with its reference resolved: a strip, a global tensor, or the plain value."""
        name = value.name if type(value) is Ref else next(refs_in(value), None)
        if name is None:
            return value
        return self.strip(name) if name in self.scope.streamed else self.global_slot(name)

    def global_slot(self, name: str) -> Slot:
        """The full tensor of a parameter, a buffer or a global value."""
        if name in self.global_slots:
            return self.global_slots[name]
        slot = self.builder.port("side", name, self.scope.global_shape(name), self.scope.dtype_of(name))
        if name in self.scope.strided:
            slot = self.global_slots[name] = self.builder.row_major(slot)
        return slot

    def global_grad(self, name: str) -> Slot:
        """The accumulator of the gradient of a global tensor."""
        scope = self.scope
        return self.builder.global_grad(name, self.global_shape(name), scope.grad_dtype(name), scope.dtype_of(name))

    def global_shape(self, name: str) -> tuple[int, ...]:
        """Shape of a global value in one sweep."""
        return self.scope.global_shape(name)

    def is_per_sample(self, name: str) -> bool:
        """True if a global value has an entry for each batch element."""
        return name in self.scope.per_sample

    def dtype_of(self, value: Any) -> torch.dtype:
        """Element type of the tensor that an argument refers to."""
        (name,) = refs_in(value)
        return self.scope.dtype_of(name)

    def needs_grad(self, value: Any) -> bool:
        """True if the tensor that an argument refers to needs a gradient."""
        return any(name in self.scope.requires_grad for name in refs_in(value))

    def add_grad(self, value: Any, slot: Slot, *, owned: bool, channels: Interval | None = None, span: DimSlice | None = None) -> None:
        """Report a gradient of the operand that an argument refers to; it may be in a wider type than the operand.

        Args:
            value: the argument.
            slot: the gradient, of the rows and columns read (streamed) or of the full tensor.
            owned: True if no other slot needs the storage, so that it may be overwritten.
            channels: the channels of the slot that it consists of; ``None`` for all.
            span: the slice of the operand that the gradient is of; ``None`` for all of it.
        """
        (name,) = refs_in(value)
        rows = columns = None
        if name in self.scope.streamed:
            rows, columns = self.read_of(name).rows, self.columns_of(name).rows
        self.contributions.append((name, GradContribution(slot, rows, columns, owned, channels, span)))


def _by_operand(reads: Sequence[OperandRead]) -> dict[str, OperandRead]:
    return {read.operand: read for read in reads}
