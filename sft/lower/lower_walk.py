"""Programs of the strips of a segment, made of parts that strips have in common.

A walk has few strips in its middle that differ, and many at its ends: while rows arrive at ever deeper operators, and again when no more
arrive. There each strip is a program of its own, though most of its operators do in it just what they do in other strips. What an
operator emits depends on its own rows and reads (``signatures`` of the schedule), on the slots of what it reads and, backwards, on the
gradients that reached it: that is what a part is remembered by. Slots are numbered by operator and pass, so that operators which do the
same in two strips name the same slots, whatever happens elsewhere. The rules are asked when a part is new (``sft.lower.lower_strip``).
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


#: The parts of an operator in one pass have fewer slots than this.
_SLOTS_PER_FRAGMENT = 1 << 20


class StripPrograms:
    """Lowers the strips of one walk's geometry.

    Args:
        scope: what does not change from strip to strip.
        schedule: the strips.
    """

    def __init__(self, scope: SegmentInfo, schedule: StripSchedule | TileSchedule) -> None:
        self.scope, self.schedule = scope, schedule
        inside = frozenset(scope.names)
        self._operators = [self._operator(name, inside) for name in scope.names]
        self._place = {name: place for place, name in enumerate((*scope.names, *scope.sources))}
        self._ports: dict[Port, int] = {}
        self._rows: dict[str, dict[Hashable, ValueStripKey]] = {name: {} for name in schedule.names}
        #: what is remembered by number: what operators do, buffers with the place of their first row, and gradients
        self._works, self._values, self._patches = Interner(), Interner(), Interner()
        self._sources: dict[tuple[str, int, int], tuple[ProgramFragment, int]] = {}
        self._num_rows = self._num_forward = 0
        self._lowering = StripLowering(scope)
        self._steps: dict[int, StripKey] = {}
        self._spans: dict[str, tuple[IntArray, IntArray]] = {}

    @property
    def num_parts(self) -> int:
        """How many parts the rules have been asked for."""
        own = (len(operator.forward) + len(operator.append) + len(operator.backward) for operator in self._operators)
        return len(self._sources) + sum(own)

    def rows_read(self, name: str) -> tuple[IntArray, IntArray]:
        """First row, and the one behind the last, that each step reads of a source."""
        if name not in self._spans:
            self._spans[name] = self.schedule.rows_read(name, [reader for reader in self.scope.names if self.scope.has_columns(reader)])
        return self._spans[name]

    def lower(self, kind: StripKind, index: int) -> Program:
        """The program of a strip; see :func:`sft.lower.lower_strip.lower_strip`, which makes the same of one alone."""
        step = self._step(index)
        outputs, rows = kind == "forward", kind != "joint"
        parts: list[ProgramFragment] = []
        values: dict[str, int] = {}
        global_slots: dict[str, Slot] = {}
        done: dict[str, ForwardFragment] = {}
        for name in self.scope.sources:
            part, values[name] = self._source(step, name)
            parts.append(part)
        for operator in self._operators:
            name = operator.name
            work = step.keys.get(name)
            if work is None:
                continue
            writes = outputs and operator.leaves
            key = (work, writes, *[values.get(operand) for operand in operator.reads])
            if operator.reduced:
                key += tuple(operand in global_slots for operand in operator.reduced)
            found = operator.forward.get(key)
            if found is None:
                found = operator.forward[key] = self._new_forward(step, operator, writes, values, global_slots)
            done[name] = found
            if found.part is not None:
                parts.append(found.part)
            if found.value is not None:
                values[name] = found.value
                if rows and step.rows[name].appends:
                    parts.append(self._append(step, operator, found.value))
            if found.whole is not None:
                global_slots[name] = found.whole
        if kind == "joint":
            self._differentiate(step, parts, values, global_slots, done)
        if self.scope.backend is None:
            return link_fragments(parts)
        builder = concatenate_fragments(parts, self.scope.dtype_of(self.scope.names[0]))
        apply_backend(self.scope, builder)
        return builder.finish()

    def _differentiate(
        self,
        step: StripKey,
        parts: list[ProgramFragment],
        values: Mapping[str, int],
        global_slots: Mapping[str, Slot],
        done: Mapping[str, ForwardFragment],
    ) -> None:
        """Add the backward parts."""
        gradients: dict[str, list[int]] = {}
        for operator in reversed(self._operators):
            forward = done.get(operator.name)
            if forward is None or not operator.needs_grad:
                continue
            key = (forward.number, *gradients.pop(operator.name, ()))
            found = operator.backward.get(key)
            if found is None:
                found = operator.backward[key] = self._new_backward(step, operator, key[1:], values, global_slots, forward)
            if found.part is not None:
                parts.append(found.part)
            for operand, patch in found.patches:
                arrived = gradients.get(operand)
                if arrived is None:
                    gradients[operand] = [patch]
                else:
                    arrived.append(patch)

    # -- what strips have in common -----------------------------------------------------------------------------------

    def _operator(self, name: str, inside: frozenset[str]) -> OperatorFragments:
        scope = self.scope
        operands = tuple(dict.fromkeys(scope.graph[name].operands))
        return OperatorFragments(
            name=name,
            reads=tuple(operand for operand in operands if operand in scope.streamed),
            reduced=tuple(operand for operand in operands if operand in inside and operand not in scope.streamed),
            leaves=name in scope.outputs or name not in scope.streamed,
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
            found = self._rows[name].get(signature)
            if found is None:
                nodes[name] = self.schedule.node_rows(name, index)
                found = self._rows[name][signature] = self._new_rows(nodes[name])
            rows[name] = found
            if found.paddings:
                StripLowering.reserve_zero_rows(zero_rows, found.paddings)
        keys: dict[str, int] = {}
        for operator in self._operators:
            own = rows[operator.name]
            if not own.has_no_work:
                work: tuple[Hashable, ...] = (own.number, *[rows[operand].number for operand in operator.reads])
                if zero_rows:
                    work += tuple([zero_rows.get(name) for name in (operator.name, *operator.reads)])
                keys[operator.name] = self._works.of(work)
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
        return ValueStripKey(self._num_rows, has_no_work, bool(rows.appended), lowering.paddings(name))

    def _read(self, index: int) -> dict[str, Interval]:
        """The rows of each source that a step reads."""
        spans = {name: self.rows_read(name) for name in self.scope.sources}
        return {name: Interval(int(start[index]), int(stop[index])) for name, (start, stop) in spans.items()}

    # -- new parts ----------------------------------------------------------------------------------------------------

    def _source(self, step: StripKey, name: str) -> tuple[ProgramFragment, int]:
        """The part that brings the rows of a source, and the number of its buffer."""
        read, first = step.read[name], self._first(step, name)
        key = (name, read.start - first, read.stop - first)
        found = self._sources.get(key)
        if found is None:
            lowering = self._enter(step, self.scope.names[0], self._place[name], backward=False)
            lowering.load_source(name)
            slot, row = lowering.values[name]
            found = self._sources[key] = (ProgramFragment(lowering.builder), self._values.of((slot, row - first)))
        return found

    def _new_forward(
        self, step: StripKey, operator: OperatorFragments, writes: bool, values: Mapping[str, int], global_slots: Mapping[str, Slot]
    ) -> ForwardFragment:
        name = operator.name
        lowering = self._enter(step, name, self._place[name], backward=False)
        self._give(lowering, step, operator, operator.reads, values, global_slots)
        lowering.write_outputs, lowering.write_rows = writes, False
        lowering.forward_of(name)
        self._num_forward += 1
        value, ctx = lowering.values.get(name), lowering.contexts.get(name)
        return ForwardFragment(
            number=self._num_forward,
            part=_built_fragment(lowering.builder),
            value=None if value is None else self._values.of((value[0], value[1] - self._first(step, name))),
            whole=lowering.global_slots.get(name),
            context=None if ctx is None else (ctx.saved, ctx.destination, ctx.overwrite),
        )

    def _append(self, step: StripKey, operator: OperatorFragments, value: int) -> ProgramFragment:
        """The part that hands over the rows that later strips need: what computes them is the same where none are handed over."""
        key = (step.keys[operator.name], value)
        found = operator.append.get(key)
        if found is None:
            name = operator.name
            lowering = self._enter(step, name, self._place[name], backward=False)
            lowering.builder._num_slots += _SLOTS_PER_FRAGMENT // 2
            self._give(lowering, step, operator, (name,), {name: value}, {})
            lowering.append(name)
            found = operator.append[key] = ProgramFragment(lowering.builder)
        return found

    def _new_backward(
        self,
        step: StripKey,
        operator: OperatorFragments,
        patches: Sequence[int],
        values: Mapping[str, int],
        global_slots: Mapping[str, Slot],
        forward: ForwardFragment,
    ) -> BackwardFragment:
        name = operator.name
        lowering = self._enter(step, name, self._place[name], backward=True)
        self._give(lowering, step, operator, (name, *operator.reads), values, global_slots)
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
                # A rule may add to what it finds there.
                saved={key: dict(value) if isinstance(value, dict) else value for key, value in saved.items()},
            )
        found = lowering.backward_of(name, [self._patch(step, name, number) for number in patches])
        return BackwardFragment(
            part=_built_fragment(lowering.builder),
            patches=tuple((operand, self._patch_number(step, operand, patch)) for operand, patch in found),
        )

    def _enter(self, step: StripKey, owner: str, place: int, *, backward: bool) -> StripLowering:
        """The lowering, ready for one operator."""
        lowering, dtype = self._lowering, self.scope.dtype_of(owner)
        lowering.builder = FragmentBuilder(
            dtype=dtype, owner=owner, port_numbers=self._ports, _num_slots=(2 * place + 1 + backward) * _SLOTS_PER_FRAGMENT
        )
        lowering.rows, lowering.values, lowering.global_slots, lowering.contexts = {}, {}, {}, {}
        lowering.read, lowering.zero_rows = step.read, step.zero_rows
        return lowering

    def _give(
        self,
        lowering: StripLowering,
        step: StripKey,
        operator: OperatorFragments,
        names: Sequence[str],
        values: Mapping[str, int],
        global_slots: Mapping[str, Slot],
    ) -> None:
        """Give the lowering the rows and buffers of some values in this step."""
        # Of what it reads the lowering looks at the rows where it is one value, which it may write over.
        for name in (operator.name, *operator.reads[: len(operator.reads) == 1]):
            if self.scope.has_columns(name):
                lowering.rows[name] = self._node(step, name)
        for name in names:
            if name in values:
                slot, offset = self._values.things[values[name]]
                lowering.values[name] = (slot, offset + self._first(step, name))
        lowering.global_slots.update({name: global_slots[name] for name in operator.reduced if name in global_slots})

    def _node(self, step: StripKey, name: str) -> NodeRows:
        """What a value does in a step."""
        rows = step.nodes.get(name)
        if rows is None:
            rows = step.nodes[name] = self.schedule.node_rows(name, step.index)
        return rows

    def _first(self, step: StripKey, name: str) -> int:
        """The first row that is held of a value."""
        return self.schedule.first_row(name, step.index)

    def _patch_number(self, step: StripKey, name: str, patch: GradContribution) -> int:
        """The number of a gradient, its rows counted from the first that is held."""
        if patch.rows is None:
            return self._patches.of(patch)
        return self._patches.of(
            GradContribution(patch.slot, patch.rows.shift(-self._first(step, name)), patch.columns, patch.owned, patch.channels)
        )

    def _patch(self, step: StripKey, name: str, number: int) -> GradContribution:
        """The gradient of that number in this step."""
        patch: GradContribution = self._patches.things[number]
        if patch.rows is None:
            return patch
        return GradContribution(patch.slot, patch.rows.shift(self._first(step, name)), patch.columns, patch.owned, patch.channels)


def _empty_rows(name: str) -> NodeRows:
    none = Interval(0, 0)
    return NodeRows(name, none, none, none, none, ())


def _built_fragment(builder: ProgramBuilder) -> ProgramFragment | None:
    """What was emitted, if anything was."""
    return ProgramFragment(builder) if builder.instructions or builder.results or builder.ports else None
