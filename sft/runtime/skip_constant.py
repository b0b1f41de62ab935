"""Policy that leaves out constant strips: strips that would compute the same bits as their neighbour.

*Selection.* Before a sweep, rows alone decide (``sft.analysis.tiling.constant_strips``): for each source, and in the backward sweep for
each output's gradient, whether each row equals the row above it in the panel's columns. A program that depends on the strip's position
repeats only where all its positional functions say that they compute the same at both places (`PositionalFunction`).

*Weight.* Of ``m`` equal strips one runs, with weight ``m``. Each value that a program accumulates (running reductions, gradients of
parameters and of global values) is divided by ``m`` before it runs and multiplied by ``m`` after it:

    m (A / m + g) = A + m g

This takes no memory and rounds three times instead of ``m`` times; if ``m`` is a power of two, as often as one addition does. A reduction
declares which entries of its running value are sums (`AdditivePart`): neither a running mean nor a maximum is one, the count of a maximum
is.

*Copies.* Rows of outputs are copied and blocks of carried rows are shared. The gradient that a strip adds to a source overlaps with that of
its neighbour; it is computed once in a buffer of its own and added at each place.

Each panel is a sweep of its own, so a strip is left out where the panel's columns are constant. Equal panels side by side all run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from sft.analysis.ir.axes import ROWS
from sft.analysis.tiling.constant_strips import constant_strips_backward, constant_strips_forward, is_constant_per_strip
from sft.common.array_types import BoolArray, IntArray
from sft.lower.lower_strip import StripKind
from sft.lower.program import Port, PositionalFunction, Program, slots_of
from sft.lower.rules.base import AdditivePart
from sft.lower.running_reductions import partial_additive
from sft.runtime.machine import Buffer, Gradients, Machine, ValueBindings
from sft.runtime.strip_policy import ALL_STRIPS, StripOps, StripPolicy, StripSelection
from sft.runtime.tiled_layout import Sweep, TiledLayout

if TYPE_CHECKING:
    from sft.runtime.tiled_segment import SweepRun

__all__ = ["SkipConstantStrips", "comparison_chunk_rows"]


#: Elements that are compared at a time; a row with more is compared by itself.
_CHUNK_ELEMENTS = 1 << 20


@dataclass(frozen=True, slots=True)
class SkipConstantStrips(StripPolicy):
    """Policy under which constant strips are left out."""

    skips: ClassVar[bool] = True

    def select_forward(self, machine: Machine, segment: TiledLayout, values: ValueBindings, sweep: Sweep) -> StripSelection:
        reserved = machine.strip_ops.reserve(self.selection_bytes(segment, sweep, backward=False))
        skipped = _forward_constant_strips(machine.strip_ops, segment, values, sweep)
        del reserved
        return StripSelection(skipped) if skipped.any() else ALL_STRIPS

    def select_backward(
        self, machine: Machine, segment: TiledLayout, grads: Gradients, sweep: Sweep, forward: StripSelection
    ) -> StripSelection:
        reserved = machine.strip_ops.reserve(self.selection_bytes(segment, sweep, backward=True))
        skipped = None if forward.skipped is None else _backward_constant_strips(machine.strip_ops, segment, grads, sweep, forward.skipped)
        del reserved
        return StripSelection(skipped) if skipped is not None and skipped.any() else ALL_STRIPS

    @contextmanager
    def weighted(
        self, run: SweepRun, segment: TiledLayout, index: int, program: Program, bindings: Mapping[Port, Buffer], weight: int
    ) -> Iterator[None]:
        ops = run.machine.strip_ops
        # With other data this strip may represent several, and then needs gradients of its own.
        may_repeat = segment.consecutive_signatures[segment.schedule.kinds[1][index]]
        reserved = ops.reserve(_separate_grad_bytes(segment, program)) if weight == 1 and may_repeat else None
        sums = _accumulated_buffers(segment, bindings, run.sweep) if weight > 1 else []
        for buffer, additive in sums:
            ops.scale_sums(buffer, additive, weight, divide=True)
        yield
        for buffer, additive in sums:
            ops.scale_sums(buffer, additive, weight, divide=False)
        ops.count_strips(program, num_run=1, num_skipped=0)
        del reserved

    def skip(self, machine: Machine, program: Program) -> None:
        machine.strip_ops.count_strips(program, num_run=0, num_skipped=1)

    def selection_bytes(self, segment: TiledLayout, sweep: Sweep, *, backward: bool) -> int:
        if not segment.consecutive_signatures.any():
            return 0
        scope = segment.scope_of(sweep)
        names = _differentiated_outputs(segment, sweep) if backward else [name for name in scope.sources if name not in segment.from_source]
        num_bytes = 0
        for name in names:
            extent, elements = scope.extent(name, ROWS), segment.row_elements(name, sweep)
            num_bytes = max(num_bytes, extent + min(extent, comparison_chunk_rows(elements)) * (elements + 1))
        return num_bytes

    def separate_grad_bytes(self, segment: TiledLayout, programs: list[Program]) -> IntArray:
        num_bytes = np.array([_separate_grad_bytes(segment, program) for program in programs], dtype=np.int64)
        return num_bytes * segment.consecutive_signatures


def comparison_chunk_rows(row_elements: int) -> int:
    """Number of rows that are compared at a time."""
    return max(1, _CHUNK_ELEMENTS // max(1, row_elements))


def _equals_previous_geometry(segment: TiledLayout) -> BoolArray:
    """For each strip, True if the strip before it has the same geometry."""
    _, kinds = segment.schedule.kinds
    equals = np.zeros(len(kinds), dtype=bool)
    equals[1:] = kinds[1:] == kinds[:-1]
    return equals


def _forward_constant_strips(ops: StripOps, segment: TiledLayout, values: ValueBindings, sweep: Sweep) -> BoolArray:
    """For each strip of a sweep, True if it computes the same as the strip before it."""
    scope, candidates = segment.scope_of(sweep), _equals_previous_geometry(segment)
    candidates = _with_repeatable_programs(segment, "forward", sweep, candidates, step=-1)
    readers = [name for name in scope.names if scope.has_columns(name)]
    for name in scope.sources:
        start, stop = segment.schedule.rows_read(name, readers)
        if candidates.any() and (stop > start).any():
            equal = ops.equal_rows(values.by_name[name], sweep.chunk, segment.columns_of(name, sweep).new, axes=scope.axes)
            candidates = np.zeros_like(candidates) if equal is None else candidates & is_constant_per_strip(equal, start, stop)
    return constant_strips_forward(scope.graph, scope.specs, scope.streamed, segment.schedule, candidates)


def _backward_constant_strips(ops: StripOps, segment: TiledLayout, grads: Gradients, sweep: Sweep, forward: BoolArray) -> BoolArray:
    """For each strip of a sweep, True if its gradients are those of the strip after it.

    Args:
        ops: compares rows.
        segment: the segment.
        grads: gradients of its outputs.
        sweep: the sweep.
        forward: for each strip, True if it computes the same as the strip before it.
    """
    scope = segment.scope_of(sweep)
    candidates = np.concatenate([forward[1:], [False]])
    candidates = _with_repeatable_programs(segment, "joint", sweep, candidates, step=1)
    for name in _differentiated_outputs(segment, sweep):
        if candidates.any():
            equal = ops.equal_rows(grads.by_name[name], sweep.chunk, segment.columns_of(name, sweep).owned, axes=scope.axes)
            rows = [segment.step(index)[name].owned for index in range(len(candidates))]
            start, stop = (np.array([getattr(interval, end) for interval in rows], dtype=np.int64) for end in ("start", "stop"))
            is_constant = np.zeros_like(candidates) if equal is None else is_constant_per_strip(equal, start, stop)
            candidates &= np.concatenate([is_constant[1:], [False]])
    return constant_strips_backward(scope.graph, scope.specs, scope.streamed & scope.requires_grad, segment.schedule, candidates)


def _separate_grad_bytes(segment: TiledLayout, program: Program) -> int:
    """Bytes of the gradients of resident sources, which a strip that represents several writes into buffers of its own."""
    ports = program.ports.items()
    return sum(slot.num_bytes for port, slot in ports if port.role == "grad_source" and port.name not in segment.from_source)


def _differentiated_outputs(segment: TiledLayout, sweep: Sweep) -> list[str]:
    """The streamed outputs with gradients that the backward sweep reads."""
    scope = segment.scope_of(sweep)
    return [n for n in scope.outputs if n in scope.streamed and n in scope.requires_grad and scope.columns[n].owned]


def _with_repeatable_programs(segment: TiledLayout, kind: StripKind, sweep: Sweep, candidates: BoolArray, *, step: int) -> BoolArray:
    """Candidates with programs that compute the same as the neighbour's (``step`` 1: the strip after, -1: the strip before)."""
    candidates = candidates.copy()
    first, kinds = segment.schedule.kinds
    for signature in np.unique(kinds[candidates]):
        program = segment.program(kind, int(first[signature]), sweep)
        indices = np.flatnonzero(candidates & (kinds == signature))
        positional = _positional_functions(program)
        if positional is None or not _has_weightable_sums(segment, program, sweep):
            candidates[indices] = False
            continue
        for index in indices.tolist() if positional else ():
            strip, neighbour = segment.step(index), segment.step(index + step)
            candidates[index] = all(
                function.is_same_at(segment.origin(name, strip, sweep), segment.origin(name, neighbour, sweep))
                for name, function in positional
            )
    return candidates


def _positional_functions(program: Program) -> list[tuple[str, PositionalFunction]] | None:
    """Functions that read the strip's position, by operator; ``None`` if the effect of one of them is unknown."""
    origins = {slot.number: port.name for port, slot in program.ports.items() if port.role == "origin"}
    functions: list[tuple[str, PositionalFunction]] = []
    for instruction in program.instructions if origins else ():
        function: object = instruction.function
        for slot in slots_of(instruction):
            if slot.number in origins:
                if not isinstance(function, PositionalFunction):
                    return None
                functions.append((origins[slot.number], function))
    return functions


def _has_weightable_sums(segment: TiledLayout, program: Program, sweep: Sweep) -> bool:
    """True if all running reductions of a program accept a weight."""
    scope = segment.scope_of(sweep)
    return all(partial_additive(scope, port.name) is not None for port in program.ports if port.role == "partial")


def _accumulated_buffers(segment: TiledLayout, bindings: Mapping[Port, Buffer], sweep: Sweep) -> list[tuple[Buffer, AdditivePart]]:
    """Buffers that a program adds to and that outlive the strip: running reductions, and gradients of side tensors."""
    buffers: list[tuple[Buffer, AdditivePart]] = []
    for port, buffer in bindings.items():
        if port.role == "grad_side":
            buffers.append((buffer, AdditivePart()))
        elif port.role == "partial":
            additive = partial_additive(segment.scope_of(sweep), port.name)
            assert additive is not None
            buffers.append((buffer, additive))
    return buffers
