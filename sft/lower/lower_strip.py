"""Lowering of one strip: forward, restoration of states, and backpropagation, including the gradient of carried rows.

A segment is a recurrent network over strips; its hidden state is the rows that each strip carries to the next. The backward pass is
backpropagation through time. **The gradient of carried rows** takes this way (:meth:`StripLowering.backward_of`):

1. The buffer of a value holds the rows carried from earlier strips, then the new rows of this strip. Its gradient covers the same rows.
2. Contributions to it are summed: from all readers in this strip, from the output (``grad_out`` port), and, for the rows that are carried
   to the next strip, from the ``grad_carry`` port, which the next strip's program has filled.
3. The sum is split. The gradient of the new rows is passed to the rule of the operator that computed them. The gradient of the carried
   rows becomes this program's ``grad_carry`` result, the input of the previous strip's program.

Forward, the operators run in order: each rule (:mod:`sft.lower.rules`) computes the new rows from its operands' buffers. Rows that later
strips need are ``append`` results, stored in the row store. Backward, the operators run in reverse order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, Literal, Self

import torch

from sft.analysis.frontend.capture import CHANNELS_LAST
from sft.analysis.ir.axes import COLUMNS, ROWS
from sft.analysis.ir.graph import Node
from sft.analysis.tiling.strips import NodeRows, StripStep
from sft.common.interval import Interval
from sft.lower.builder import ProgramBuilder
from sft.lower.context import GradContribution, NodeContext, SegmentInfo
from sft.lower.grad_accumulation import add_contributions, contribution_slot, sum_contributions, sum_global_gradients
from sft.lower.program import Slot, load_rows
from sft.lower.rules import rule_of
from sft.lower.rules.base import Rule
from sft.lower.rules.convolution import ConvolutionRule, column_padding

__all__ = [
    "StripKind",
    "StripLowering",
    "apply_backend",
    "emit_strip",
]

aten = torch.ops.aten

#: Kinds of strip programs (see :func:`emit_strip`).
StripKind = Literal["forward", "restore", "joint"]


def emit_strip(scope: SegmentInfo, step: StripStep, kind: StripKind) -> ProgramBuilder:
    """Lower one strip alone, up to dead code elimination and frees (:meth:`ProgramBuilder.finish`).

    :class:`sft.lower.strip_programs.StripPrograms` makes equal programs from cached fragments.

    Args:
        scope: the segment.
        step: the rows of the strip.
        kind: ``forward`` computes outputs and the rows for later strips; ``restore`` only the rows; ``joint`` recomputes the strip and
            differentiates it.
    """
    lowering = StripLowering.of(scope, step)
    lowering.forward(write_outputs=kind == "forward", write_rows=kind != "joint")
    if kind == "joint":
        lowering.backward()
    apply_backend(scope, lowering.builder)
    return lowering.builder


def apply_backend(scope: SegmentInfo, builder: ProgramBuilder, num_forward: int | None = None) -> int | None:
    """Let the backend, if any, replace instructions; ``num_forward`` as in :meth:`sft.lower.context.Backend.rewrite`."""
    if scope.backend is None:
        return num_forward
    num_forward = builder.prune(num_forward)  # dead readers must not prevent a replacement
    # The library chooses the layout of strips, states and cuts; the caller that of outputs and their gradients.
    cuts = scope.streamed.difference(scope.graph.results)
    names_by_role = {
        "source": scope.in_program_layout,
        "side": scope.channels_last_weights,
        "grad_carry": scope.streamed,
        "out": cuts,
        "grad_out": cuts,
    }
    laid_out = [port for port in builder.ports if port.name in names_by_role.get(port.role, ())]
    return scope.backend.rewrite(builder, laid_out, training=bool(scope.requires_grad), num_forward=num_forward)


class StripLowering:
    """Lowers one step, operator by operator.

    Attributes:
        emitter: takes the instructions.
        rows: the rows that each operator computes, holds and reads in the step; operators without columns in the panel have none.
        read: the rows that the step reads of each operand.
        borders: zero rows above and below each value that a buffer gets room for, so that no convolution has to pad a copy of it.
        values: the buffer of each value so far, and its first row.
        wholes: global values so far.
        contexts: operators that have been lowered forwards.
    """

    #: True if the step is a full untiled segment (:mod:`sft.lower.lower_whole`).
    untiled: ClassVar[bool] = False
    #: True if the program allocates its outputs and gradients, instead of writing into the caller's buffers
    allocates_results: ClassVar[bool] = False

    def __init__(self, scope: SegmentInfo, *, has_backward: bool = False) -> None:
        self.scope, self.has_backward = scope, has_backward
        self.write_outputs = self.write_rows = False
        dtype = scope.dtype_of(scope.names[0])
        self.builder = ProgramBuilder(dtype, keeps_torch_layouts=scope.keeps_torch_layouts, makes_gradients=self.allocates_results)
        self.rows: dict[str, NodeRows] = {}
        self.read: Mapping[str, Interval] = {}
        self.zero_rows: Mapping[str, tuple[int, int]] = {}
        self.values: dict[str, tuple[Slot, int]] = {}
        self.global_slots: dict[str, Slot] = {}
        self.contexts: dict[str, NodeContext] = {}
        self._rules: dict[str, Rule] = {}
        self._inside = frozenset(scope.names)

    @classmethod
    def of(cls, scope: SegmentInfo, step: StripStep, *, has_backward: bool = False) -> Self:
        """The lowering of all operators of a step."""
        lowering = cls(scope, has_backward=has_backward)
        lowering.rows = {rows.name: rows for rows in step.nodes if scope.has_columns(rows.name)}
        lowering.read = scope.rows_read(step)
        if not lowering.untiled:
            zero_rows: dict[str, tuple[int, int]] = {}
            for name in scope.names:
                lowering.reserve_zero_rows(zero_rows, lowering.zero_row_requests(name))
            lowering.zero_rows = zero_rows
        return lowering

    def _rule(self, node: Node) -> Rule:
        """The rule that lowers a node."""
        rule = self._rules.get(node.name)
        if rule is None:
            rule = self._rules[node.name] = rule_of(self.scope, node, untiled=self.untiled)
        return rule

    def zero_row_requests(self, name: str) -> tuple[tuple[str, int, int], ...]:
        """Operands of a convolution to be padded in their own buffers, each with the rows of zeros above and below.

        A convolution pads symmetrically by itself. If only one image border is in the strip, zero rows in the buffer avoid a padded copy.
        """
        scope, node = self.scope, self.scope.graph[name]
        if name not in self.rows or not isinstance(self._rule(node), ConvolutionRule):
            return ()
        requests = []
        for read in self.rows[name].reads:
            low, high = column_padding(scope, node, read.operand)
            if read.operand in self._inside and read.rows and read.pad_low != read.pad_high and low == high:
                requests.append((read.operand, read.pad_low, read.pad_high))
        return tuple(requests)

    @staticmethod
    def reserve_zero_rows(zero_rows: dict[str, tuple[int, int]], requests: Iterable[tuple[str, int, int]]) -> None:
        """Extend ``zero_rows`` to cover the requests."""
        for operand, pad_low, pad_high in requests:
            low, high = zero_rows.get(operand, (0, 0))
            zero_rows[operand] = (max(low, pad_low), max(high, pad_high))

    def _enter(self, name: str) -> None:
        """Make an operator the owner of the next instructions."""
        self.builder.owner, self.builder.dtype = name, self.scope.dtype_of(name)

    # -- forward ----------------------------------------------------------------------------------------------------

    def forward(self, *, write_outputs: bool, write_rows: bool) -> None:
        """Emit the new rows of all operators.

        Args:
            write_outputs: True if outputs and running reductions are written.
            write_rows: True if rows for later strips become results.
        """
        self.write_outputs, self.write_rows = write_outputs, write_rows
        self.builder.owner = self.scope.names[0]
        for name in self.scope.sources:
            self.load_source(name)
        for name in self.scope.names:
            self.forward_of(name)

    def forward_of(self, name: str) -> None:
        """Emit one operator's new rows."""
        node = self.scope.graph[name]
        self._enter(name)
        if name in self.scope.streamed:
            self._forward_streamed(node)
        else:
            self._forward_global(node)

    def load_source(self, name: str) -> None:
        """Bind the rows of a source that the step reads; copy them if their layout is not that of programs."""
        rows, builder = self.read.get(name, Interval(0, 0)), self.builder
        shape = self.scope.strip_shape(name, len(rows))
        slot = builder.port("source", name, shape, self.scope.dtype_of(name))
        # Columns of a wider image are not contiguous channels last either.
        layout = CHANNELS_LAST.get(len(shape))
        if self.scope.keeps_torch_layouts:
            layout = None
            if self.scope.graph[name].kind == "input":  # copies a view without a standard layout, no contiguous tensor
                slot = builder.call(aten.contiguous.default, slot, shape=shape, dtype=slot.dtype)
        narrow = len(self.scope.columns[name].new) < self.scope.extent(name, COLUMNS)
        if rows and layout is not None and (name not in self.scope.in_program_layout or narrow):
            slot = builder.call(aten.clone.default, slot, shape=shape, dtype=slot.dtype, keywords={"memory_format": layout})
        self.values[name] = (slot, rows.start)

    def _forward_streamed(self, node: Node) -> None:
        scope, builder, rows = self.scope, self.builder, self.rows.get(node.name)
        if rows is None or not rows.available:
            return
        buffer = None
        low, high = self.zero_rows.get(node.name, (0, 0))
        if rows.carried or low or high:
            storage = builder.empty(scope.strip_shape(node.name, low + len(rows.available) + high))
            for start, length in ((0, low), (low + len(rows.available), high)):
                if length:
                    zeros = self._rows_of(storage, start, length)
                    builder.call(aten.zero_.default, zeros, writes=zeros)
            buffer = self._rows_of(storage, low, len(rows.available))
            if rows.carried:
                top = self._rows_of(buffer, 0, len(rows.carried))
                dim = scope.axes.dim(len(top.shape), ROWS)
                builder.call(load_rows, top, dim, builder.port("carry", node.name, top.shape), writes=top)
            self.values[node.name] = (storage, rows.available.start - low)
        if rows.new:
            self._compute(node, rows, buffer)
        if self.write_rows and rows.appended:
            self.append(node.name)

    def append(self, name: str) -> None:
        """Emit a copy of the rows of a computed value that later steps need, as a result for the row store."""
        rows, builder = self.rows[name].appended, self.builder
        slot, first = self.values[name]
        block = builder.empty(self.scope.strip_shape(name, len(rows)))
        builder.copy(block, self._rows_of(slot, rows.start - first, len(rows)))
        builder.result("append", name, block)

    def _compute(self, node: Node, rows: NodeRows, buffer: Slot | None) -> None:
        scope, builder = self.scope, self.builder
        rule = self._rule(node)
        tail = self._rows_of(buffer, len(rows.carried), len(rows.new)) if buffer is not None else None
        ctx = self._context(node, rows, tail if rule.in_place else None)
        ctx.overwrite = self._overwritable_operand(node, rule) if tail is None else None
        result = rule.forward(ctx)
        if tail is not None:
            if result is not tail:
                builder.copy(tail, result)
        else:
            self.values[node.name] = (result, rows.new.start)
        if node.name in scope.outputs and self.write_outputs and self._owns_rows(rows):
            if self.allocates_results and node.name not in scope.graph.results and builder.owns(result):
                builder.result("out", node.name, result)  # a cut: the value itself is the result, without a copy
                return
            out = builder.port("out", node.name, self._owned_shape(rows))
            value, first = self.values[node.name]
            columns = scope.columns[node.name]
            value = self._rows_of(value, rows.owned.start - first, len(rows.owned))
            builder.copy(out, self._columns_of(value, columns.owned.start - columns.new.start, len(columns.owned)))

    def _rows_of(self, slot: Slot, start: int, length: int) -> Slot:
        return self.builder.narrow_axis(slot, self.scope.axes, ROWS, start, length)

    def _columns_of(self, slot: Slot, start: int, length: int) -> Slot:
        return self.builder.narrow_axis(slot, self.scope.axes, COLUMNS, start, length)

    def _owns_rows(self, rows: NodeRows) -> bool:
        return bool(rows.owned and self.scope.columns[rows.name].owned)

    def _owned_shape(self, rows: NodeRows) -> tuple[int, ...]:
        """Shape of the rows and columns of a value that this step and panel own."""
        return self.scope.block_shape(rows.name, len(rows.owned), len(self.scope.columns[rows.name].owned))

    def _overwritable_operand(self, node: Node, rule: Rule) -> Slot | None:
        """The operand's buffer, if this operator is its only reader and may overwrite it."""
        scope = self.scope
        name = rule.overwritten(node, scope.streamed, untiled=self.untiled)
        if name is None or name not in self._inside or name in scope.outputs or scope.graph.users[name] != (node.name,):
            return None
        if name in scope.requires_grad and self._rule(scope.graph[name]).saves_output:
            return None
        slot, first = self.values[name]
        rows = self.rows[name]
        if first != rows.new.start or rows.appended or slot.root != slot.number:
            return None
        # Upsampling computes full input rows and columns, which may be more than a tile reads.
        is_same = rows.new == self.rows[node.name].new and scope.columns[name].new == scope.columns[node.name].new
        return slot if is_same else None

    def _forward_global(self, node: Node) -> None:
        empty = Interval(0, 0)
        rows = self.rows.get(node.name) or NodeRows(node.name, empty, empty, empty, empty, ())
        rule = self._rule(node)
        if not self.untiled and not rows.reads:
            return
        ctx = self._context(node, rows, None)
        if not (self.write_outputs or self.untiled):
            return  # reductions of strips run in the forward pass only
        result = rule.forward(ctx)
        self.global_slots[node.name] = result
        if self.untiled and self.write_outputs and node.name in self.scope.outputs:
            self.builder.copy(self.builder.port("out", node.name, result.shape, result.dtype), result)

    def _context(self, node: Node, rows: NodeRows, destination: Slot | None) -> NodeContext:
        ctx = NodeContext(
            scope=self.scope,
            builder=self.builder,
            node=node,
            rows=rows,
            values=self.values,
            global_slots=self.global_slots,
            zero_rows=self.zero_rows,
            destination=destination,
            overwrite=None,
            has_backward=self.has_backward,
        )
        self.contexts[node.name] = ctx
        return ctx

    # -- backward ---------------------------------------------------------------------------------------------------

    def backward(self) -> None:
        """Differentiate the step: gradients of parameters, of sources, and of carried rows."""
        scope = self.scope
        gradients: dict[str, list[GradContribution]] = {}
        for name in reversed(scope.names):
            if name in scope.requires_grad:
                for operand, term in self.backward_of(name, gradients.pop(name, [])):
                    gradients.setdefault(operand, []).append(term)
        self.write_gradients(gradients)

    def write_gradients(self, gradients: Mapping[str, Sequence[GradContribution]]) -> None:
        """Emit the gradients of sources as results. Strips have none: they add to the caller's accumulators in :meth:`backward_of`."""

    def backward_of(self, name: str, contributions: list[GradContribution]) -> list[tuple[str, GradContribution]]:
        """Differentiate one operator.

        Args:
            name: the operator.
            contributions: gradients of its value.

        Returns:
            Gradients of its operands inside the segment. Gradients of sources and global tensors are added to their accumulators.
        """
        scope = self.scope
        self._enter(name)
        if name in scope.streamed:
            self._backward_streamed(scope.graph[name], contributions)
        elif name in self.contexts:
            self._backward_global(scope.graph[name], contributions)
        ctx = self.contexts.get(name)
        inside: list[tuple[str, GradContribution]] = []
        for operand, term in () if ctx is None else ctx.contributions:
            if operand in self._inside or (operand in scope.streamed and self.untiled):
                inside.append((operand, term))
            elif operand in scope.streamed:
                self._add_to_source(operand, term)
            else:
                assert ctx is not None
                self.add_to_global_grad(ctx, operand, term)
        return inside

    def add_to_global_grad(self, ctx: NodeContext, name: str, term: GradContribution) -> None:
        """Add a contribution to the gradient of a global tensor from outside."""
        target = ctx.global_grad(name)
        target = target if term.span is None else self.builder.narrow(target, *term.span)
        self.builder.add_into(target, contribution_slot(self.builder, term))

    def _add_to_source(self, name: str, term: GradContribution) -> None:
        read = self.read[name]
        target = self.builder.port("grad_source", name, self.scope.strip_shape(name, len(read)), self.scope.grad_dtype(name))
        add_contributions(self.scope, self.builder, name, target, read, [term])

    def _backward_streamed(self, node: Node, contributions: list[GradContribution]) -> None:
        scope, builder, rows = self.scope, self.builder, self.rows.get(node.name)
        if rows is None or not rows.available:
            return
        columns = scope.columns[node.name]
        contributions = [term for term in contributions if term.rows and term.columns]
        if rows.kept and not self.untiled:
            port = builder.port("grad_carry", node.name, scope.strip_shape(node.name, len(rows.kept)))
            contributions.append(GradContribution(port, rows.kept, columns.new, False))
        if node.name in scope.outputs and self._owns_rows(rows):
            port = builder.port("grad_out", node.name, self._owned_shape(rows), scope.grad_dtype(node.name))
            # The gradient of a cut is read only here and may be overwritten; that of an output belongs to the caller.
            contributions.append(GradContribution(port, rows.owned, columns.owned, self.untiled and node.name not in scope.graph.results))
        if not contributions:
            if rows.carried:
                builder.result("grad_carry", node.name, builder.zeros(scope.strip_shape(node.name, len(rows.carried))))
            return
        total, owned = sum_contributions(scope, builder, node.name, rows.available, contributions, scope.dtype_of(node.name))
        if rows.carried:
            block = builder.empty(scope.strip_shape(node.name, len(rows.carried)))
            builder.copy(block, self._rows_of(total, 0, len(rows.carried)))
            builder.result("grad_carry", node.name, block)
        if rows.new:
            ctx = self.contexts[node.name]
            new = self._rows_of(total, len(rows.carried), len(rows.new))
            self._rule(node).backward(ctx, new, owned)

    def _backward_global(self, node: Node, contributions: list[GradContribution]) -> None:
        builder, scope = self.builder, self.scope
        shape = scope.shapes[node.name] if self.untiled else scope.global_shape(node.name)
        if node.name in scope.outputs:
            slot = builder.port("grad_out", node.name, shape, scope.grad_dtype(node.name))
            is_copied = node.name in scope.strided
            contributions = [*contributions, GradContribution(builder.row_major(slot) if is_copied else slot, None, None, is_copied)]
        if not contributions:
            return
        total, owned = sum_global_gradients(builder, shape, contributions)
        rule = self._rule(node)
        if not rule.accepts_wide_grad and total.dtype != scope.dtype_of(node.name):
            total, owned = builder.cast(total, scope.dtype_of(node.name)), True
        rule.backward(self.contexts[node.name], total, owned)
