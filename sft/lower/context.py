"""What a lowering rule sees of the step it is lowered for.

One :class:`StepLowering` lowers one step: it walks the operators forwards, asking each one's rule for its new rows, then
backwards, asking for the gradients of what the rows were computed from. Values live in buffers ``[held)`` that begin with the
rows carried from earlier steps; a gradient buffer spans the same rows, collects contributions from the step's readers and from
the following step, and passes on two parts: the new rows' gradient to the operator that made them, the carried rows' gradient to
the step before. That is backpropagation through time with the carried rows as the hidden state.

What the lowering asks of a backend: to run parts of a program in another way than by ATen's operators.

A backend sees a program after it was lowered, as a list of ATen calls, and may put its own calls in their place. The lowering knows
nothing else of it.
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
    """Replaces instructions of a program."""

    def rewrite(self, builder: ProgramBuilder, laid_out: Collection[Port], *, training: bool, num_forward: int | None = None) -> int | None:
        """Exchange instructions of the emitter.

        Args:
            emitter: holds the lowered program.
            laid_out: ports bound to images that are channels-last.
            training: whether a backward pass follows.
            turn: number of instructions of the first of two halves.

        Returns:
            The same number afterwards.
        """


class GradContribution(NamedTuple):
    """A contribution to the gradient of a value.

    Attributes:
        slot: the gradient.
        rows: its rows, for a streamed value.
        columns: its columns, for a streamed value.
        owned: whether the slot's storage is nobody else's, so that it may be written to.
        channels: which channels of the slot it is; ``None`` for all.
    """

    slot: Slot
    rows: Interval | None
    columns: Interval | None
    owned: bool
    channels: Interval | None = None


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """In what sums over the image are kept: a half type would round each strip's share."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def grad_dtype_of(graph: Graph, streamed: Collection[str], name: str) -> torch.dtype:
    """Element type in which a value's gradient is summed up.

    Whole values get a share from every strip. A streamed value gets one or two, so its own type does, with one exception. The gradient
    of what a norm over the image reads arrives in two parts that nearly cancel. Rounding the first to float16 moves all pixels the same
    way where the gradient is constant over the image (as behind a global pool), and their sum by a multiple of what eager PyTorch's
    rounding does. (In bfloat16 the rounding of the activations hides it.)
    """
    dtype = getattr(torch, graph[name].dtype)
    assert isinstance(dtype, torch.dtype)
    is_norm_input = dtype == torch.float16 and any(graph[user].target == "sft.moments" for user in graph.users[name])
    return dtype if name in streamed and not is_norm_input else accumulation_dtype(dtype)


@dataclass(frozen=True, kw_only=True)
class SegmentInfo:
    """What does not change from step to step of a segment.

    Attributes:
        graph: the model.
        rows: the operator table's row of each operator.
        streamed: values that come in strips.
        names: the segment's operators in order.
        shapes: whole shapes of every value of the graph for this input size (the whole batch).
        requires_grad: values that need a gradient.
        outputs: the segment's values that others need.
        sources: streamed values from outside.
        in_layout: sources that already are channels last, and tensors that are not streamed whose gradients are wanted as they are made:
            in order, those of two or three axes channels last (other than parameters it is all, nobody asks how theirs lie).
        batch: batch elements to a walk.
        per_sample: global values with an entry for each batch element, in their first dimension.
        columns: what the panel computes and reads along the width, for every streamed value and operator of the segment. A panel
            carries nothing: it computes its own halo.
        keeps_torch_layouts: whether images are laid out as torch lays them; else all are made channels last. Of segments that run whole.
        backend: runs parts of programs in its own way; ``None`` for ATen alone.
        deterministic: whether sums must be made in an order that ATen's own derivatives do not keep on the device.
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
    keeps_torch_layouts: bool = False
    backend: Backend | None = None
    deterministic: bool = False
    _windows: dict[str, tuple[Window, ...]] = field(default_factory=dict, repr=False, compare=False)
    _dtypes: dict[str, torch.dtype] = field(default_factory=dict, repr=False, compare=False)
    #: of these columns alone, so it must not be handed on by `replace`
    _columns_read: dict[str, dict[str, OperandRead]] = field(init=False, default_factory=dict, repr=False, compare=False)

    def windows(self, name: str) -> tuple[Window, ...]:
        """The sliding window of a convolution or a pool, for each axis."""
        if name not in self._windows:
            found = [window_of(self.graph[name], axis) for axis in range(self.axes.count)]
            self._windows[name] = tuple(window for window in found if window is not None)
            assert len(self._windows[name]) == self.axes.count
        return self._windows[name]

    @property
    def axes(self) -> Axes:
        """The spatial axes of the images."""
        return self.graph.axes

    def block_shape(self, name: str, num_rows: int, num_columns: int) -> tuple[int, ...]:
        """Shape of so many rows and columns of a streamed value for one walk."""
        shape = self.axes.with_extent(self.shapes[name], ROWS, num_rows)
        return (self.batch, *self.axes.with_extent(shape, COLUMNS, num_columns)[1:])

    def strip_shape(self, name: str, num_rows: int) -> tuple[int, ...]:
        """Shape of ``num_rows`` rows of a streamed value for one walk of one panel."""
        return self.block_shape(name, num_rows, len(self.columns[name].new))

    def extent(self, name: str, axis: int) -> int:
        """Extent of a streamed value along an axis."""
        return self.axes.extent(self.shapes[name], axis)

    def has_columns(self, name: str) -> bool:
        """Whether an operator has anything to do in this panel; one far from all that the panel is for has not."""
        return bool(self.columns[name].new) if name in self.streamed else bool(self.columns[name].reads)

    def rows_read(self, step: StripStep) -> dict[str, Interval]:
        """The rows of each operand that a step reads."""
        found: dict[str, Interval] = {}
        for rows in step.nodes:
            if rows.reads and self.has_columns(rows.name):
                for read in rows.reads:
                    found[read.operand] = found.get(read.operand, Interval(0, 0)).hull(read.rows)
        return found

    def global_shape(self, name: str) -> tuple[int, ...]:
        """Shape of what one walk sees of a whole value."""
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
        """Which columns an operator reads of each streamed operand."""
        found = self._columns_read.get(name)
        if found is None:
            found = self._columns_read[name] = _by_operand(self.columns[name].reads)
        return found

    def grad_dtype(self, name: str) -> torch.dtype:
        """Element type in which a value's gradient is summed up."""
        return grad_dtype_of(self.graph, self.streamed, name)


@dataclass
class NodeContext:
    """One operator in one step, as its lowering rule sees it; ``keeps`` says whether a backward pass of the step follows."""

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
        """Rows that the step adds to the value."""
        return len(self.rows.new)

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Shape of the new rows."""
        return self.scope.strip_shape(self.node.name, self.new_rows)

    @property
    def covers_image(self) -> bool:
        """Whether the step is the whole image, so that the operator can be called as it stands."""
        return self._covers(self.rows, ROWS) and self.is_full_width

    @property
    def is_full_width(self) -> bool:
        """Whether the panel is as wide as the image."""
        columns = self.scope.columns.get(self.node.name)
        return columns is None or self._covers(columns, COLUMNS)

    def _covers(self, part: NodeRows, axis: int) -> bool:
        scope, name = self.scope, self.node.name
        return all(len(read.rows) == scope.extent(read.operand, axis) for read in part.reads) and (
            name not in scope.streamed or len(part.new) == scope.extent(name, axis)
        )

    def read_of(self, operand: str) -> OperandRead:
        """Which rows of a streamed operand are read."""
        return self._rows_read[operand]

    def columns_of(self, operand: str) -> OperandRead:
        """Which columns of a streamed operand are read."""
        return self.scope.columns_read(self.node.name)[operand]

    def has_empty_read(self, operand: str) -> bool:
        """Whether all that is read of an operand lies in the padding."""
        return not (self.read_of(operand).rows and self.columns_of(operand).rows)

    def spans(self, operand: str) -> list[tuple[Interval, Interval]]:
        """For each axis what is computed, and what is read of a streamed operand."""
        shape, source = self.scope.shapes[self.node.name], self.scope.shapes[operand]
        columns = self.scope.columns[self.node.name].new
        parts = [(self.rows.new, self.read_of(operand).rows), (columns, self.columns_of(operand).rows)]
        rest = zip(self.scope.axes.of(shape)[2:], self.scope.axes.of(source)[2:], strict=True)
        return [*parts, *((Interval(0, out), Interval(0, extent)) for out, extent in rest)][: self.scope.axes.count]

    def strip(self, operand: str) -> Slot:
        """The rows and columns read of a streamed operand: a view of its buffer."""
        slot, spans = self.buffer_slices(operand)
        for span in spans:
            slot = self.builder.narrow(slot, *span)
        return slot

    def buffer_slices(self, operand: str) -> tuple[Slot, tuple[DimSlice, ...]]:
        """The buffer of a streamed operand, and where in it the rows and columns lie that are read."""
        scope = self.scope
        rows, columns = self._rows_read[operand].rows, scope.columns_read(self.node.name)[operand].rows
        num_rows, num_columns = rows.stop - rows.start, columns.stop - columns.start
        if num_rows <= 0 or num_columns <= 0:
            return self.builder.empty(scope.block_shape(operand, len(rows), len(columns)), scope.dtype_of(operand)), ()
        slot, first_row = self.values[operand]
        first_column = columns.start - scope.columns[operand].new.start
        return slot, dim_slices(scope.graph.axes, slot, rows.start - first_row, num_rows, first_column, num_columns)

    def narrow(self, slot: Slot, axis: int, start: int, length: int) -> Slot:
        """A view of part of a streamed value along an axis."""
        return self.builder.narrow_axis(slot, self.scope.axes, axis, start, length)

    def _columns(self, operand: str, strip: Slot) -> Slot:
        columns = self.columns_of(operand).rows
        return self.narrow(strip, COLUMNS, columns.start - self.scope.columns[operand].new.start, len(columns))

    def zero_padded_strip(self, operand: str) -> Slot | None:
        """The rows read and their zero border as one view, where the operand's buffer has room for the border."""
        read = self.read_of(operand)
        low, high = self.zero_rows.get(operand, (0, 0))
        if self.has_empty_read(operand) or low < read.pad_low or high < read.pad_high or not (low or high):
            return None
        slot, first_row = self.values[operand]
        start = read.rows.start - read.pad_low - first_row
        return self._columns(operand, self.narrow(slot, ROWS, start, read.pad_low + len(read.rows) + read.pad_high))

    def operand_slot(self, value: Any) -> Any:
        """An argument with its references replaced: strips, whole tensors, or the plain value."""
        name = value.name if type(value) is Ref else next(refs_in(value), None)
        if name is None:
            return value
        return self.strip(name) if name in self.scope.streamed else self.global_slot(name)

    def global_slot(self, name: str) -> Slot:
        """A tensor that is not streamed: a parameter, a buffer, a global value."""
        if name in self.global_slots:
            return self.global_slots[name]
        return self.builder.port("side", name, self.scope.global_shape(name), self.scope.dtype_of(name))

    def global_grad(self, name: str) -> Slot:
        """What the gradient of a side tensor is added to."""
        scope = self.scope
        return self.builder.global_grad(name, self.global_shape(name), scope.grad_dtype(name), scope.dtype_of(name))

    def global_shape(self, name: str) -> tuple[int, ...]:
        """Shape of what the walk sees of a whole value."""
        return self.scope.global_shape(name)

    def is_per_sample(self, name: str) -> bool:
        """Whether a whole value has an entry for each batch element."""
        return name in self.scope.per_sample

    def dtype_of(self, value: Any) -> torch.dtype:
        """Element type of the tensor that an argument refers to."""
        (name,) = refs_in(value)
        return self.scope.dtype_of(name)

    def needs_grad(self, value: Any) -> bool:
        """Whether the tensor that an argument refers to needs a gradient."""
        return any(name in self.scope.requires_grad for name in refs_in(value))

    def add_grad(self, value: Any, slot: Slot, *, owned: bool, channels: Interval | None = None) -> None:
        """Report a gradient of the operand that an argument refers to; it may be in a wider type than the operand.

        Args:
            value: the argument.
            slot: the gradient, of the rows and columns read (streamed) or of the whole tensor.
            owned: whether the slot's storage is nobody else's, so that it may be written to.
            channels: which of the slot's it is; ``None`` for all.
        """
        (name,) = refs_in(value)
        rows = columns = None
        if name in self.scope.streamed:
            rows, columns = self.read_of(name).rows, self.columns_of(name).rows
        self.contributions.append((name, GradContribution(slot, rows, columns, owned, channels)))


def _by_operand(reads: Sequence[OperandRead]) -> dict[str, OperandRead]:
    return {read.operand: read for read in reads}
