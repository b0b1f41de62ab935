"""Programs of all strips of one sweep, linked from cached fragments.

In the middle of a sweep nearly all strips are alike. At its ends each strip is a different program: rows first have to reach ever deeper
operators, and at the end no new rows arrive. Even there most operators do exactly what they do in other strips. So programs are linked
from fragments (:mod:`sft.lower.fragments`), one for each operator and pass, and a rule is called only for a new fragment
(:mod:`sft.lower.lower_strip`). The key of a fragment (:mod:`sft.lower.strip_keys`) is all that its instructions depend on:

- the operator's own rows and reads (``signatures`` of the schedule),
- the slots of its operands,
- backward, the gradients that reached it.

Slots are numbered by operator and pass. Operators that do the same in two strips therefore use the same slots, whatever the other
operators do.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from sft.analysis.tiling.independent_tiles import TileSchedule
from sft.analysis.tiling.strips import NodeRows, StripSchedule
from sft.common.array_types import IntArray
from sft.common.interval import Interval
from sft.lower.builder import ProgramBuilder
from sft.lower.context import GradContribution, NodeContext, SegmentInfo
from sft.lower.fragments import FragmentBuilder, ProgramFragment, concatenate_fragments, link_fragments
from sft.lower.lower_strip import StripKind, StripLowering, apply_backend
from sft.lower.program import Port, Program, Slot
from sft.lower.strip_keys import BackwardFragment, ForwardFragment, Interner, OperatorFragments, StripKey, ValueStripKey

__all__ = ["StripPrograms"]


#: Slot numbers reserved for the fragments of an operator in one pass.
_SLOTS_PER_FRAGMENT = 1 << 20


class StripPrograms:
    """Lowers the strips of a sweep.

    Args:
        scope: the segment.
        schedule: the strips.
    """

    def __init__(self, scope: SegmentInfo, schedule: StripSchedule | TileSchedule) -> None:
        self.scope, self.schedule = scope, schedule
        inside = frozenset(scope.names)
        self._operators = [self._operator(name, inside) for name in scope.names]
        self._place = {name: place for place, name in enumerate((*scope.names, *scope.sources))}
        self._ports: dict[Port, int] = {}
        self._rows: dict[str, dict[Hashable, ValueStripKey]] = {name: {} for name in schedule.names}
        #: Interned facts: work of operators, buffers with the offset of their first row, gradients.
        self._works, self._buffers, self._gradients = Interner(), Interner(), Interner()
        self._sources: dict[tuple[str, int, int], tuple[ProgramFragment, int]] = {}
        self._num_rows = self._num_forward = 0
        self._lowering = StripLowering(scope)
        self._steps: dict[int, StripKey] = {}
        self._spans: dict[str, tuple[IntArray, IntArray]] = {}

    @property
    def num_fragments(self) -> int:
        """Number of fragments lowered by rules so far."""
        counts = (len(operator.forward) + len(operator.append) + len(operator.backward) for operator in self._operators)
        return len(self._sources) + sum(counts)

    def rows_read(self, name: str) -> tuple[IntArray, IntArray]:
        """Start and stop of the rows that each step reads of a source."""
        if name not in self._spans:
            self._spans[name] = self.schedule.rows_read(name, [reader for reader in self.scope.names if self.scope.has_columns(reader)])
        return self._spans[name]

    def lower(self, kind: StripKind, index: int) -> Program:
        """The program of a strip; equal, instruction for instruction, to that of :func:`sft.lower.lower_strip.emit_strip`."""
        step = self._step(index)
        write_outputs, write_rows = kind == "forward", kind != "joint"
        fragments: list[ProgramFragment] = []
        buffers: dict[str, int] = {}
        global_slots: dict[str, Slot] = {}
        forward_fragments: dict[str, ForwardFragment] = {}
        for name in self.scope.sources:
            fragment, buffers[name] = self._source(step, name)
            fragments.append(fragment)
        for operator in self._operators:
            name = operator.name
            work = step.keys.get(name)
            if work is None:
                continue
            writes = write_outputs and operator.has_outputs
            key = (work, writes, *[buffers.get(operand) for operand in operator.reads])
            if operator.global_reads:
                key += tuple(operand in global_slots for operand in operator.global_reads)
            forward = operator.forward.get(key)
            if forward is None:
                forward = operator.forward[key] = self._new_forward(step, operator, writes, buffers, global_slots)
            forward_fragments[name] = forward
            if forward.fragment is not None:
                fragments.append(forward.fragment)
            if forward.buffer is not None:
                buffers[name] = forward.buffer
                if write_rows and step.rows[name].appends:
                    fragments.append(self._append(step, operator, forward.buffer))
            if forward.global_slot is not None:
                global_slots[name] = forward.global_slot
        if kind == "joint":
            self._differentiate(step, fragments, buffers, global_slots, forward_fragments)
        if self.scope.backend is None:
            return link_fragments(fragments)
        builder = concatenate_fragments(fragments, self.scope.dtype_of(self.scope.names[0]))
        apply_backend(self.scope, builder)
        return builder.finish()

    def _differentiate(
        self,
        step: StripKey,
        fragments: list[ProgramFragment],
        buffers: Mapping[str, int],
        global_slots: Mapping[str, Slot],
        forward_fragments: Mapping[str, ForwardFragment],
    ) -> None:
        """Append the backward fragments."""
        gradients: dict[str, list[int]] = {}
        for operator in reversed(self._operators):
            forward = forward_fragments.get(operator.name)
            if forward is None or not operator.needs_grad:
                continue
            key = (forward.number, *gradients.pop(operator.name, ()))
            backward = operator.backward.get(key)
            if backward is None:
                backward = operator.backward[key] = self._new_backward(step, operator, key[1:], buffers, global_slots, forward)
            if backward.fragment is not None:
                fragments.append(backward.fragment)
            for operand, contribution in backward.contributions:
                contributions = gradients.get(operand)
                if contributions is None:
                    gradients[operand] = [contribution]
                else:
                    contributions.append(contribution)

    # -- keys ---------------------------------------------------------------------------------------------------------

    def _operator(self, name: str, inside: frozenset[str]) -> OperatorFragments:
        scope = self.scope
        operands = tuple(dict.fromkeys(scope.graph[name].operands))
        return OperatorFragments(
            name=name,
            reads=tuple(operand for operand in operands if operand in scope.streamed),
            global_reads=tuple(operand for operand in operands if operand in inside and operand not in scope.streamed),
            has_outputs=name in scope.outputs or name not in scope.streamed,
            needs_grad=name in scope.requires_grad,
            is_inactive=not scope.has_columns(name),
        )

    def _step(self, index: int) -> StripKey:
        step = self._steps.get(index)
        if step is None:
            step = self._steps[index] = self._new_step(index)
        return step

    def _new_step(self, index: int) -> StripKey:
        rows: dict[str, ValueStripKey] = {}
        nodes: dict[str, NodeRows] = {}
        zero_rows: dict[str, tuple[int, int]] = {}
        for name, signature in zip(self.schedule.names, self.schedule.signatures(index), strict=True):
            key = self._rows[name].get(signature)
            if key is None:
                nodes[name] = self.schedule.node_rows(name, index)
                key = self._rows[name][signature] = self._new_rows(nodes[name])
            rows[name] = key
            if key.zero_row_requests:
                StripLowering.reserve_zero_rows(zero_rows, key.zero_row_requests)
        keys: dict[str, int] = {}
        for operator in self._operators:
            key = rows[operator.name]
            if not key.has_no_work:
                work: tuple[Hashable, ...] = (key.number, *[rows[operand].number for operand in operator.reads])
                if zero_rows:
                    work += tuple([zero_rows.get(name) for name in (operator.name, *operator.reads)])
                keys[operator.name] = self._works.number_of(work)
        return StripKey(index=index, rows=rows, zero_rows=zero_rows, read=self._read(index), keys=keys, nodes=nodes)

    def _new_rows(self, rows: NodeRows) -> ValueStripKey:
        name, place = rows.name, self._place[rows.name]
        self._num_rows += 1
        if place >= len(self._operators):
            return ValueStripKey(self._num_rows, False, False, ())
        operator = self._operators[place]
        is_streamed = name in self.scope.streamed
        has_no_work = operator.is_inactive or not (rows.available if is_streamed else rows.reads)
        lowering = self._lowering
        lowering.rows = {} if operator.is_inactive else {name: rows}
        return ValueStripKey(self._num_rows, has_no_work, bool(rows.appended), lowering.zero_row_requests(name))

    def _read(self, index: int) -> dict[str, Interval]:
        """The rows that a step reads of each source."""
        spans = {name: self.rows_read(name) for name in self.scope.sources}
        return {name: Interval(int(start[index]), int(stop[index])) for name, (start, stop) in spans.items()}

    # -- new fragments ------------------------------------------------------------------------------------------------

    def _source(self, step: StripKey, name: str) -> tuple[ProgramFragment, int]:
        """The fragment that loads the rows of a source, and the number of its buffer."""
        read, first = step.read[name], self._first(step, name)
        key = (name, read.start - first, read.stop - first)
        source = self._sources.get(key)
        if source is None:
            lowering = self._enter(step, self.scope.names[0], self._place[name], backward=False)
            lowering.load_source(name)
            slot, row = lowering.values[name]
            source = self._sources[key] = (ProgramFragment(lowering.builder), self._buffers.number_of((slot, row - first)))
        return source

    def _new_forward(
        self, step: StripKey, operator: OperatorFragments, writes: bool, buffers: Mapping[str, int], global_slots: Mapping[str, Slot]
    ) -> ForwardFragment:
        name = operator.name
        lowering = self._enter(step, name, self._place[name], backward=False)
        self._load_operands(lowering, step, operator, operator.reads, buffers, global_slots)
        lowering.write_outputs, lowering.write_rows = writes, False
        lowering.forward_of(name)
        self._num_forward += 1
        value, ctx = lowering.values.get(name), lowering.contexts.get(name)
        return ForwardFragment(
            number=self._num_forward,
            fragment=_built_fragment(lowering.builder),
            buffer=None if value is None else self._buffers.number_of((value[0], value[1] - self._first(step, name))),
            global_slot=lowering.global_slots.get(name),
            context=None if ctx is None else (ctx.saved, ctx.destination, ctx.overwrite),
        )

    def _append(self, step: StripKey, operator: OperatorFragments, buffer: int) -> ProgramFragment:
        """The fragment that copies rows for later strips to the row store; separate, as the computing fragment does not depend on it."""
        key = (step.keys[operator.name], buffer)
        fragment = operator.append.get(key)
        if fragment is None:
            name = operator.name
            lowering = self._enter(step, name, self._place[name], backward=False)
            lowering.builder._num_slots += _SLOTS_PER_FRAGMENT // 2
            self._load_operands(lowering, step, operator, (name,), {name: buffer}, {})
            lowering.append(name)
            fragment = operator.append[key] = ProgramFragment(lowering.builder)
        return fragment

    def _new_backward(
        self,
        step: StripKey,
        operator: OperatorFragments,
        gradients: Sequence[int],
        buffers: Mapping[str, int],
        global_slots: Mapping[str, Slot],
        forward: ForwardFragment,
    ) -> BackwardFragment:
        name = operator.name
        lowering = self._enter(step, name, self._place[name], backward=True)
        self._load_operands(lowering, step, operator, (name, *operator.reads), buffers, global_slots)
        if forward.context is not None:
            saved, destination, overwrite = forward.context
            lowering.contexts[name] = NodeContext(
                scope=self.scope,
                builder=lowering.builder,
                node=self.scope.graph[name],
                rows=lowering.rows.get(name) or _empty_rows(name),
                values=lowering.values,
                global_slots=lowering.global_slots,
                zero_rows=lowering.zero_rows,
                destination=destination,
                overwrite=overwrite,
                # Copied, as a rule may add entries.
                saved={key: dict(value) if isinstance(value, dict) else value for key, value in saved.items()},
            )
        contributions = lowering.backward_of(name, [self._contribution(step, name, number) for number in gradients])
        return BackwardFragment(
            fragment=_built_fragment(lowering.builder),
            contributions=tuple((operand, self._contribution_number(step, operand, term)) for operand, term in contributions),
        )

    def _enter(self, step: StripKey, owner: str, place: int, *, backward: bool) -> StripLowering:
        """The lowering, reset for one operator and pass."""
        lowering, dtype = self._lowering, self.scope.dtype_of(owner)
        lowering.builder = FragmentBuilder(
            dtype=dtype, owner=owner, port_numbers=self._ports, _num_slots=(2 * place + 1 + backward) * _SLOTS_PER_FRAGMENT
        )
        lowering.rows, lowering.values, lowering.global_slots, lowering.contexts = {}, {}, {}, {}
        lowering.read, lowering.zero_rows = step.read, step.zero_rows
        return lowering

    def _load_operands(
        self,
        lowering: StripLowering,
        step: StripKey,
        operator: OperatorFragments,
        names: Sequence[str],
        buffers: Mapping[str, int],
        global_slots: Mapping[str, Slot],
    ) -> None:
        """Provide the lowering with the rows, buffers and global slots of an operator's operands in this step."""
        # An operand's rows matter only if it is the single one, which may be overwritten.
        for name in (operator.name, *operator.reads[: len(operator.reads) == 1]):
            if self.scope.has_columns(name):
                lowering.rows[name] = self._node(step, name)
        for name in names:
            if name in buffers:
                slot, offset = self._buffers.values[buffers[name]]
                lowering.values[name] = (slot, offset + self._first(step, name))
        lowering.global_slots.update({name: global_slots[name] for name in operator.global_reads if name in global_slots})

    def _node(self, step: StripKey, name: str) -> NodeRows:
        """The rows of a value in a step."""
        rows = step.nodes.get(name)
        if rows is None:
            rows = step.nodes[name] = self.schedule.node_rows(name, step.index)
        return rows

    def _first(self, step: StripKey, name: str) -> int:
        """The first row of a value's buffer."""
        return self.schedule.first_row(name, step.index)

    def _contribution_number(self, step: StripKey, name: str, term: GradContribution) -> int:
        """The number of a contribution, with rows relative to the first row of the value."""
        if term.rows is None:
            return self._gradients.number_of(term)
        return self._gradients.number_of(term._replace(rows=term.rows.shift(-self._first(step, name))))

    def _contribution(self, step: StripKey, name: str, number: int) -> GradContribution:
        """The contribution of a number, with rows of this step."""
        term: GradContribution = self._gradients.values[number]
        if term.rows is None:
            return term
        return term._replace(rows=term.rows.shift(self._first(step, name)))


def _empty_rows(name: str) -> NodeRows:
    none = Interval(0, 0)
    return NodeRows(name, none, none, none, none, ())


def _built_fragment(builder: ProgramBuilder) -> ProgramFragment | None:
    """The emitted fragment; ``None`` if it is empty."""
    return ProgramFragment(builder) if builder.instructions or builder.results or builder.ports else None
