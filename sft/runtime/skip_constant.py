"""Strips that are left out of a walk because they would make what their neighbour made, and what stands in for them.

Which strips these are is found before a walk begins, from rows alone (``sft.analysis.tiling.constant_strips``): of each source, and
backwards of each output's gradient, whether each row equals the row above it in the panel's columns. A program that knows where its strip
lies repeats where all that its place changes is the same, too (`PositionalFunction`); one that says nothing about that never does.

*Once for all.* Of a strip and those that repeat it one is run, with a weight. What a program adds to (running reductions, gradients of
parameters and of global values) is divided by their number ``m`` before, and multiplied by it behind:

    m (A / m + g) = A + m g.

That takes no memory, and rounds three times instead of ``m`` times; where ``m`` is a power of two, as often as one addition does.
A reduction says itself which part of its running value is a sum (`AdditivePart`): a running mean is none, the largest element is none, but
how often it occurs is one. Rows of outputs are copied, blocks of carried rows are shared, and the gradient that a strip adds to a source,
whose rows overlap its neighbours', is made once, in a buffer of its own, and added at each place.

All panels are walks of their own, so a rectangle is left out where it is constant from column to column of a panel. Two panels that are the
same, side by side, are both run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np

from sft.analysis.ir.axes import ROWS
from sft.analysis.tiling.constant_strips import BoolArray, constant_strips_backward, constant_strips_forward, is_constant_per_strip
from sft.lower.lower_strip import StripKind
from sft.lower.program import Port, PositionalFunction, Program, slots_of
from sft.lower.rules.base import AdditivePart
from sft.lower.running_reductions import partial_additive
from sft.runtime.machine import Buffer, Gradients, Machine, ValueBindings
from sft.runtime.tiled_layout import Sweep, TiledLayout

__all__ = [
    "backward_constant_strips",
    "comparison_bytes",
    "comparison_chunk_rows",
    "forward_constant_strips",
    "num_repeated_strips",
    "same_geometry_strips",
    "separate_grad_bytes",
    "weighted_accumulation",
]

#: Rows are compared so many elements at a time, or one by one where a row has more.
_PIECE_ELEMENTS = 1 << 20


def same_geometry_strips(segment: TiledLayout) -> BoolArray:
    """For each strip whether the one before it has the same geometry."""
    _, kinds = segment.schedule.kinds
    found = np.zeros(len(kinds), dtype=bool)
    found[1:] = kinds[1:] == kinds[:-1]
    return found


def forward_constant_strips(machine: Machine, segment: TiledLayout, values: ValueBindings, walk: Sweep) -> BoolArray:
    """The strips of a walk that make what the strip before them makes."""
    scope, alike = segment.scope_of(walk), same_geometry_strips(segment)
    alike = _with_repeatable_programs(segment, "forward", walk, alike, step=-1)
    readers = [name for name in scope.names if scope.has_columns(name)]
    for name in scope.sources:
        start, stop = segment.schedule.rows_read(name, readers)
        if alike.any() and (stop > start).any():
            same = machine.repeated_rows(values.by_name[name], walk.chunk, segment.columns_of(name, walk).new, axes=scope.axes)
            alike = np.zeros_like(alike) if same is None else alike & is_constant_per_strip(same, start, stop)
    return constant_strips_forward(scope.graph, scope.rows, scope.streamed, segment.schedule, alike)


def backward_constant_strips(machine: Machine, segment: TiledLayout, grads: Gradients, walk: Sweep, forward: BoolArray) -> BoolArray:
    """The strips of a walk whose gradients are those of the strip behind them.

    Args:
        machine: what compares rows.
        segment: what walks.
        grads: those of its outputs.
        walk: the walk.
        forward: the strips that make what the strip before them makes.
    """
    scope = segment.scope_of(walk)
    alike = np.concatenate([forward[1:], [False]])
    alike = _with_repeatable_programs(segment, "joint", walk, alike, step=1)
    for name in _differentiated_outputs(segment, walk):
        if alike.any():
            same = machine.repeated_rows(grads.by_name[name], walk.chunk, segment.columns_of(name, walk).owned, axes=scope.axes)
            wanted = [segment.step(index)[name].owned for index in range(len(alike))]
            start, stop = (np.array([getattr(rows, end) for rows in wanted], dtype=np.int64) for end in ("start", "stop"))
            is_constant = np.zeros_like(alike) if same is None else is_constant_per_strip(same, start, stop)
            alike &= np.concatenate([is_constant[1:], [False]])
    wanted_gradients = scope.streamed & scope.requires_grad
    return constant_strips_backward(scope.graph, scope.rows, wanted_gradients, segment.schedule, alike)


def num_repeated_strips(repeats: BoolArray, index: int, *, step: int) -> int:
    """How many strips a strip stands for: itself, and those behind (``step`` 1) or before it (-1) that repeat one another."""
    following = repeats[index + 1 :] if step > 0 else repeats[:index][::-1]
    return 1 + (int(following.argmin()) if not following.all() else len(following))


@contextmanager
def weighted_accumulation(
    machine: Machine, segment: TiledLayout, bindings: Mapping[Port, Buffer], walk: Sweep, count: int
) -> Iterator[None]:
    """What a program that runs in the block adds to what lasts counts so many times."""
    sums = _accumulated_buffers(segment, bindings, walk) if count > 1 else []
    for handle, additive in sums:
        machine.weigh(handle, additive, count, down=True)
    yield
    for handle, additive in sums:
        machine.weigh(handle, additive, count, down=False)


def comparison_bytes(segment: TiledLayout, walk: Sweep, *, backward: bool) -> int:
    """Most bytes that comparing rows takes at the begin of a walk."""
    if not same_geometry_strips(segment).any():
        return 0
    scope = segment.scope_of(walk)
    names = _differentiated_outputs(segment, walk) if backward else [name for name in scope.sources if name not in segment.from_source]
    found = 0
    for name in names:
        extent, elements = scope.extent(name, ROWS), segment.row_elements(name, walk)
        found = max(found, extent + min(extent, comparison_chunk_rows(elements)) * (elements + 1))
    return found


def comparison_chunk_rows(row_elements: int) -> int:
    """Rows that are compared at a time."""
    return max(1, _PIECE_ELEMENTS // max(1, row_elements))


def separate_grad_bytes(segment: TiledLayout, program: Program) -> int:
    """Bytes of the gradients of resident sources that a strip makes apart where others repeat it."""
    ports = program.ports.items()
    return sum(slot.num_bytes for port, slot in ports if port.role == "grad_source" and port.name not in segment.from_source)


def _differentiated_outputs(segment: TiledLayout, walk: Sweep) -> list[str]:
    """The streamed outputs that bring a gradient."""
    scope = segment.scope_of(walk)
    return [n for n in scope.outputs if n in scope.streamed and n in scope.requires_grad and scope.columns[n].owned]


def _with_repeatable_programs(segment: TiledLayout, kind: StripKind, walk: Sweep, alike: BoolArray, *, step: int) -> BoolArray:
    """Those of some strips whose programs may repeat that of the strip beside them."""
    alike = alike.copy()
    first, kinds = segment.schedule.kinds
    for number in np.unique(kinds[alike]):
        program = segment.program(kind, int(first[number]), walk)
        of_kind = np.flatnonzero(alike & (kinds == number))
        placed = _positional_functions(program)
        if placed is None or not _has_weightable_sums(segment, program, walk):
            alike[of_kind] = False
            continue
        for index in of_kind.tolist() if placed else ():
            here, there = segment.step(index), segment.step(index + step)
            alike[index] = all(
                function.is_same_at(segment.origin(name, here, walk), segment.origin(name, there, walk)) for name, function in placed
            )
    return alike


def _positional_functions(program: Program) -> list[tuple[str, PositionalFunction]] | None:
    """The functions that are told where the strip lies, by operator; None where one cannot say what that changes."""
    origins = {slot.number: port.name for port, slot in program.ports.items() if port.role == "origin"}
    found: list[tuple[str, PositionalFunction]] = []
    for instruction in program.instructions if origins else ():
        function: object = instruction.function
        for slot in slots_of(instruction):
            if slot.number in origins:
                if not isinstance(function, PositionalFunction):
                    return None
                found.append((origins[slot.number], function))
    return found


def _has_weightable_sums(segment: TiledLayout, program: Program, walk: Sweep) -> bool:
    """Whether all running reductions of a program can be given a weight."""
    scope = segment.scope_of(walk)
    return all(partial_additive(scope, port.name) is not None for port in program.ports if port.role == "partial")


def _accumulated_buffers(segment: TiledLayout, bindings: Mapping[Port, Buffer], walk: Sweep) -> list[tuple[Buffer, AdditivePart]]:
    """What a program adds to that lasts: running reductions, and gradients of whole tensors."""
    found: list[tuple[Buffer, AdditivePart]] = []
    for port, handle in bindings.items():
        if port.role == "grad_side":
            found.append((handle, AdditivePart()))
        elif port.role == "partial":
            additive = partial_additive(segment.scope_of(walk), port.name)
            assert additive is not None
            found.append((handle, additive))
    return found
