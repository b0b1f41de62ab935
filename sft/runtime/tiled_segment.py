"""Running one segment, forwards and backwards, strip by strip (``whole`` is the other kind).

Both kinds offer the same two calls. ``forward`` fills the segment's outputs and returns what the backward pass needs besides the
sources; ``backward`` takes the outputs' gradients and adds to (or makes) the gradients of sources and side tensors.

An output may be on the host (``to_host``): one that nobody reads again, or a cut that is read strip by strip, too. A strip of it is then a
buffer of its own on the device, which leaves when the strip's program has run, and a strip of its gradient is fetched from the host before
the strip's program runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

import numpy as np
import torch

from sft.analysis.ir.axes import ROWS
from sft.analysis.tiling.constant_strips import BoolArray
from sft.analysis.tiling.strips import StripStep
from sft.common.interval import Interval
from sft.lower.program import Port, Program
from sft.lower.running_reductions import partial_shape, partial_start
from sft.runtime.carry_cache import CarryCache
from sft.runtime.machine import Buffer, Gradients, Machine, ValueBindings
from sft.runtime.skip_constant import (
    backward_constant_strips,
    comparison_bytes,
    forward_constant_strips,
    num_repeated_strips,
    same_geometry_strips,
    separate_grad_bytes,
    weighted_accumulation,
)
from sft.runtime.streamed_inputs import open_loaders, reads_skipped_strips
from sft.runtime.tiled_layout import Sweep, TiledLayout

__all__ = ["TiledSegment"]


@dataclass(kw_only=True)
class TiledSegment(TiledLayout):
    """A segment that never holds a whole inner value."""

    #: gradients are added to buffers that must exist
    accumulates: ClassVar[bool] = True
    #: its backward pass needs the states of its forward pass
    saves: ClassVar[bool] = True

    def open_reductions(self, machine: Machine, chunk: Interval | None) -> dict[str, Buffer]:
        """Running reductions of nothing yet: those of some batch elements, or (``None``) those that span the whole batch."""
        scope = self.scope if chunk is None else self.scope_of(Sweep(chunk, 0))
        names = [name for name in self.reductions if self.spans_batch(name) == (chunk is None)]
        found = {name: machine.allocate(partial_shape(scope, name), torch.float64, zero=False) for name in names}
        for name, handle in found.items():
            machine.fill(handle, partial_start(scope, name))
        return found

    def close_reductions(self, machine: Machine, values: ValueBindings, partial: dict[str, Buffer], chunk: Interval | None) -> None:
        """Turn running reductions into global values."""
        for name in self.reductions:
            if self.spans_batch(name) == (chunk is None):
                out = values.by_name[name] if chunk is None else machine.view(values.by_name[name], chunk, None)
                program = self.finish(name, Sweep(self.chunks[0] if chunk is None else chunk, 0))
                machine.run(program, {Port("partial", name): partial.pop(name), Port("out", name): out})

    def self_allocated(self, keep: bool) -> frozenset[str]:
        """Outputs that need no buffer beforehand: none, as strips are written into them."""
        return frozenset()

    #: no output is part of what its backward pass needs
    views: ClassVar[frozenset[str]] = frozenset()
    #: its states are buffers that nobody else knows
    keeps_buffers: ClassVar[bool] = True

    def buffers(self, machine: Machine, stores: list[CarryCache | None]) -> list[Buffer]:
        """The buffers of its states."""
        return [block.handle for store in stores if store for blocks in store.blocks.values() for block in blocks]

    def backward_reads(self, reads: Sequence[str]) -> Sequence[str]:
        """Of the values that it reads those that its backward pass needs: all, as it computes everything again."""
        return reads

    def forward(self, machine: Machine, values: ValueBindings, *, keep: bool) -> list[CarryCache | None]:
        """Walk all strips; with ``keep`` the states for the backward walks stay in the returned stores (``None``: not kept)."""
        stores: list[CarryCache | None] = []
        shared = self.open_reductions(machine, None)
        for chunk in self.chunks:
            partial = {**shared, **self.open_reductions(machine, chunk)}
            for walk in (walk for walk in self.walks if walk.chunk == chunk):
                keeps = keep and self.keeps_states(walk)
                store = self._walk_forward(machine, values, walk, partial, self.kept if keeps else frozenset())
                stores.append(store if keeps else None)
            self.close_reductions(machine, values, partial, chunk)
            del partial
        self.close_reductions(machine, values, shared, None)
        return stores

    def _walk_forward(
        self, machine: Machine, values: ValueBindings, walk: Sweep, partial: Mapping[str, Buffer] | None, kept: frozenset[int]
    ) -> CarryCache:
        """Walk forward, holding on to some states; without ``partial`` only for the sake of these states."""
        direction: Literal["forward", "restore"] = "restore" if partial is None else "forward"
        last = self.walked(direction)
        store = CarryCache(repeats=self._repeats(machine, values, walk))
        with open_loaders(machine, self, values.by_name, direction, walk, skipped=store.repeats) as readers:
            reading = ValueBindings(values.by_name, readers)
            for index in range(last):
                self._run_forward(machine, reading, store, index, walk, partial)
                store.hold(self.schedule.carried_rows(index + 1))
                if index not in kept:
                    store.release(self.schedule.carried_rows(index))
        if last not in kept:
            store.release(self.schedule.carried_rows(last))
        return store

    def _repeats(self, machine: Machine, values: ValueBindings, walk: Sweep) -> BoolArray | None:
        """The strips that make what the strip before them makes; ``None`` where all are run."""
        if not self.skips_repeats:
            return None
        room = machine.reserve(comparison_bytes(self, walk, backward=False))
        found = forward_constant_strips(machine, self, values, walk)
        del room
        return found if found.any() else None

    def _run_forward(
        self,
        machine: Machine,
        values: ValueBindings,
        store: CarryCache,
        index: int,
        walk: Sweep,
        partial: Mapping[str, Buffer] | None,
    ) -> None:
        step, program = self.step(index), self.program("forward" if partial is not None else "restore", index, walk)
        if store.repeats is not None and store.repeats[index]:
            for node, like in zip(step.nodes, self.step(index - 1).nodes, strict=True):
                if Port("append", node.name) in program.results:
                    store.share(node.name, node.appended, like.appended)
            self._skip(machine, program, step, walk, values)
            return
        # Of strips that repeat this one the outputs are written, and the sums are made, here; what is carried is theirs to hand on.
        count = 1 if store.repeats is None or partial is None else num_repeated_strips(store.repeats, index, step=1)
        bindings = self._bind(machine, program, step, walk, values, store)
        leaving: dict[str, Buffer] = {}
        for port, slot in program.ports.items():
            if self.is_exchanged(port):
                leaving[port.name] = machine.allocate(slot.shape, slot.dtype, zero=False, contiguous=port.name in self.contiguous)
                bindings[port] = leaving[port.name]
            elif port.role == "out":
                bindings[port] = self._own_part(machine, values, port.name, step, walk)
            elif port.role == "partial":
                assert partial is not None
                bindings[port] = partial[port.name]
        with weighted_accumulation(machine, self, bindings, walk, count):
            results, _ = machine.run(program, bindings)
        machine.note_strips(program, num_run=1, num_skipped=0)
        for node in step.nodes:
            block = results.pop(Port("append", node.name), None)
            if block is not None:
                store.append(node.name, node.appended, block)
        written = {port.name: bindings[port] for port in bindings if port.role == "out" and port.name not in leaving}
        bindings.clear()
        for repeat in range(1, count):
            for name, handle in written.items():
                machine.copy(self._own_part(machine, values, name, self.step(index + repeat), walk), handle)
        del written
        for name in list(leaving):
            part = leaving.pop(name)
            for repeat in range(count):
                rows, columns = self.part(name, self.step(index + repeat), walk)
                machine.put(values.by_name[name], part, walk.chunk, rows, columns, axes=self.scope.axes)
            del part

    def _skip(self, machine: Machine, program: Program, step: StripStep, walk: Sweep, values: ValueBindings) -> None:
        """Leave a strip out."""
        machine.note_strips(program, num_run=0, num_skipped=1)
        if values.reads_skipped:
            for port in program.ports:
                if port.role == "source" and port.name in values.readers:
                    values.readers[port.name].take(self.reads(step, walk)[port.name])

    def _bind(
        self, machine: Machine, program: Program, step: StripStep, walk: Sweep, values: ValueBindings, store: CarryCache
    ) -> dict[Port, Buffer]:
        """The ports that forward and backward have in common."""
        bindings: dict[Port, Buffer] = {}
        for port in program.ports:
            if port.role == "source":
                bindings[port] = self._rows_read(machine, values, port.name, step, walk)
            elif port.role == "side":
                bindings[port] = self._side(machine, values, port.name, walk.chunk)
            elif port.role == "carry":
                bindings[port] = store.pieces(port.name, step[port.name].carried)
            elif port.role == "origin":
                bindings[port] = self.origin(port.name, step, walk)
        return bindings

    def _rows_read(self, machine: Machine, tensors: ValueBindings | Gradients, name: str, step: StripStep, walk: Sweep) -> Buffer:
        """What a strip reads of a source, or of its gradient."""
        rows, columns = self.reads(step, walk)[name], self.columns_of(name, walk).new
        reader = tensors.readers.get(name) if isinstance(tensors, ValueBindings) else None
        if reader is not None:
            return machine.view(reader.take(rows), None, None, columns, axes=self.scope.axes)
        return machine.view(tensors.by_name[name], walk.chunk, rows, columns, axes=self.scope.axes)

    def _zero_rows(self, machine: Machine, name: str, step: StripStep, walk: Sweep) -> Buffer:
        """Room for a strip's gradient of an input that is not resident: rows in full width, as a sink takes them."""
        shape = self.scope.axes.with_extent(self.scope.shapes[name], ROWS, len(self.reads(step, walk)[name]))
        return machine.allocate((len(walk.chunk), *shape[1:]), self.source_grad_dtype(name), zero=True)

    def _own_part(self, machine: Machine, tensors: ValueBindings | Gradients, name: str, step: StripStep, walk: Sweep) -> Buffer:
        """The part of a streamed output, or of its gradient, that a strip is for."""
        rows, columns = self.part(name, step, walk)
        return machine.view(tensors.by_name[name], walk.chunk, rows, columns, axes=self.scope.axes)

    def _side(self, machine: Machine, tensors: ValueBindings | Gradients, name: str, chunk: Interval) -> Buffer:
        handle = tensors.by_name[name]
        return machine.view(handle, chunk, None) if name in self.scope.per_sample else handle

    def backward(
        self, machine: Machine, values: ValueBindings, stores: list[CarryCache | None], grads: Gradients, *, consume: bool = True
    ) -> None:
        """Walk the strips in reverse.

        Args:
            machine: what runs the programs.
            values: sources and side tensors.
            stores: what ``forward`` returned.
            grads: holds the outputs' gradients (on the host, those of ``to_host``), zeros to add to for sources and side tensors that
                need a gradient, and sinks.
            consume: whether the stores are no longer needed afterwards.
        """
        if not consume:
            stores = [store and store.fork() for store in stores]
        walks = list(self.walks)
        while walks:
            self._walk_backward(machine, values, stores.pop(), grads, walks.pop())

    def _walk_backward(self, machine: Machine, values: ValueBindings, store: CarryCache | None, grads: Gradients, walk: Sweep) -> None:
        if store is None:
            store = self._walk_forward(machine, values, walk, None, self.kept)
        repeats = self._backward_repeats(machine, grads, walk, store)
        with open_loaders(machine, self, values.by_name, "backward", walk, skipped=repeats) as readers:
            reading = ValueBindings(values.by_name, readers, reads_skipped_strips(self, "backward"))
            self._walk_joint(machine, reading, store, grads, walk, repeats)

    def _backward_repeats(self, machine: Machine, grads: Gradients, walk: Sweep, store: CarryCache) -> BoolArray | None:
        """The strips whose gradients are those of the strip behind them; ``None`` where all are run."""
        if not self.skips_repeats:
            return None
        room = machine.reserve(comparison_bytes(self, walk, backward=True))
        found = None if store.repeats is None else backward_constant_strips(machine, self, grads, walk, store.repeats)
        del room
        return found if found is not None and found.any() else None

    def _walk_joint(
        self, machine: Machine, values: ValueBindings, store: CarryCache, grads: Gradients, walk: Sweep, repeats: BoolArray | None
    ) -> None:
        schedule = self.schedule
        carried: dict[str, Buffer] = {}
        for action in self.checkpoints.actions(schedule.num_steps):
            if action.kind == "forward":
                self._run_forward(machine, values, store, action.strip, walk, None)
                store.hold(schedule.carried_rows(action.strip + 1))
                if action.drops:
                    store.release(schedule.carried_rows(action.strip))
                continue
            if repeats is not None and repeats[action.strip]:  # what it hands on is what was handed to it
                self._skip(machine, self.program("joint", action.strip, walk), self.step(action.strip), walk, values)
            else:
                count = 1 if repeats is None else num_repeated_strips(repeats, action.strip, step=-1)
                carried = self._run_joint(machine, values, store, grads, action.strip, walk, carried, count)
            store.release(schedule.carried_rows(action.strip))

    def _run_joint(
        self,
        machine: Machine,
        values: ValueBindings,
        store: CarryCache,
        grads: Gradients,
        index: int,
        walk: Sweep,
        carried: dict[str, Buffer],
        count: int,
    ) -> dict[str, Buffer]:
        """Differentiate a strip, for ``count`` of them upwards; takes the gradients of the rows that it hands on and returns those of the
        rows handed to it."""
        step, program = self.step(index), self.program("joint", index, walk)
        bindings = self._bind(machine, program, step, walk, values, store)
        parts: dict[str, Buffer] = {}
        apart: dict[str, Buffer] = {}
        for port, slot in program.ports.items():
            if self.is_exchanged(port):
                bindings[port] = machine.allocate(slot.shape, slot.dtype, zero=False)
                rows, columns = self.part(port.name, step, walk)
                machine.fetch(grads.by_name[port.name], bindings[port], walk.chunk, rows, columns, axes=self.scope.axes)
            elif port.role == "grad_out":
                if port.name in self.scope.streamed:
                    bindings[port] = self._own_part(machine, grads, port.name, step, walk)
                else:
                    bindings[port] = self._side(machine, grads, port.name, walk.chunk)
            elif port.role == "grad_carry":
                bindings[port] = carried.pop(port.name)
            elif port.role == "grad_source" and port.name in grads.sinks:
                parts[port.name] = self._zero_rows(machine, port.name, step, walk)
                columns = self.columns_of(port.name, walk).new
                bindings[port] = machine.view(parts[port.name], None, None, columns, axes=self.scope.axes)
            elif port.role == "grad_source" and count > 1:
                bindings[port] = apart[port.name] = machine.allocate(slot.shape, slot.dtype, zero=True)
            elif port.role == "grad_source":
                bindings[port] = self._rows_read(machine, grads, port.name, step, walk)
            elif port.role == "grad_side":
                bindings[port] = self._side(machine, grads, port.name, walk.chunk)
        room = (
            machine.reserve(separate_grad_bytes(self, program))
            if self.skips_repeats and count == 1 and self._same_geometry[index]
            else None
        )
        with weighted_accumulation(machine, self, bindings, walk, count):
            results, _ = machine.run(program, bindings)
        machine.note_strips(program, num_run=1, num_skipped=0)
        del room
        bindings.clear()
        for repeat in range(count):
            above = self.step(index - repeat)
            for name, part in parts.items():
                machine.give(grads.sinks[name], walk.chunk, self.reads(above, walk)[name], part)
            for name, part in apart.items():
                machine.add(self._rows_read(machine, grads, name, above, walk), part)
        return {port.name: handle for port, handle in results.items()}

    @cached_property
    def _same_geometry(self) -> BoolArray:
        """Strips of a geometry that stands twice in a row somewhere, so that one might repeat the other."""
        found = same_geometry_strips(self)
        return np.isin(self.schedule.kinds[1], self.schedule.kinds[1][found])
