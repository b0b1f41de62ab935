"""Running one segment, forwards and backwards: strip by strip, or whole.

Both kinds offer the same two calls. ``forward`` fills the segment's outputs and returns what the backward pass needs besides the
sources; ``backward`` takes the outputs' gradients and adds to (or makes) the gradients of sources and side tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import torch

from sft.analysis.interval import Interval
from sft.analysis.schedule import Schedule, Step
from sft.lower.context import Scope
from sft.lower.program import Port, Program
from sft.lower.step import StripKind, lower_finish, lower_strip, lower_whole, partial_shape
from sft.walk.checkpoints import backward_actions, kept_states
from sft.walk.machine import Handle, Machine, Saved, Strips
from sft.walk.reading import opened
from sft.walk.rowstore import RowStore

__all__ = ["Gradients", "TiledSegment", "Values", "WholeSegment"]


@dataclass(slots=True)
class Values:
    """Whole tensors by value name: cuts, parameters, buffers, global values; of inputs that are not resident, the sources.

    ``readers`` are those of the running walk, by input.
    """

    by_name: dict[str, Handle] = field(default_factory=dict)
    readers: dict[str, Strips] = field(default_factory=dict)


@dataclass(slots=True)
class Gradients:
    """Gradients of whole tensors by value name; ``sinks`` take those of inputs that are not resident."""

    by_name: dict[str, Handle] = field(default_factory=dict)
    sinks: dict[str, Handle] = field(default_factory=dict)


@dataclass(kw_only=True)
class TiledSegment:
    """A segment that never holds a whole inner value.

    Attributes:
        scope: what the lowering needs.
        schedule: the strips.
        state_every: a state is kept every so many strips.
        num_batch: batch elements of the whole input; walks take ``scope.batch`` at a time.
        sides: whole tensors that the segment reads.
        from_source: inputs that are read strip by strip and never resident.
    """

    #: gradients of sources are added to buffers that must exist
    accumulates: ClassVar[bool] = True

    scope: Scope
    schedule: Schedule
    state_every: int
    num_batch: int
    sides: tuple[str, ...]
    from_source: frozenset[str] = frozenset()
    _programs: dict[tuple[str, int, int], Program] = field(default_factory=dict, repr=False)
    _steps: dict[int, Step] = field(default_factory=dict, repr=False)
    _tails: dict[int, Scope] = field(default_factory=dict, repr=False)

    @cached_property
    def reductions(self) -> tuple[str, ...]:
        """Global values that the segment computes."""
        return tuple(name for name in self.scope.names if name not in self.scope.streamed)

    def open_reductions(self, machine: Machine, chunk: Interval | None) -> dict[str, Handle]:
        """Running reductions at zero: those of one walk, or (``None``) those that span the whole batch."""
        scope = self.scope if chunk is None else self._scope(chunk)
        names = [name for name in self.reductions if self._spans_batch(name) == (chunk is None)]
        return {name: machine.allocate(partial_shape(scope, name), torch.float64, zero=True) for name in names}

    def close_reductions(self, machine: Machine, values: Values, partial: dict[str, Handle], chunk: Interval | None) -> None:
        """Turn running reductions into global values."""
        for name in self.reductions:
            if self._spans_batch(name) == (chunk is None):
                out = values.by_name[name] if chunk is None else machine.view(values.by_name[name], chunk, None)
                program = self.finish(name, self.chunks[0] if chunk is None else chunk)
                machine.run(program, {Port("partial", name): partial.pop(name), Port("out", name): out})

    def _spans_batch(self, name: str) -> bool:
        return name not in self.scope.per_sample and self.num_batch > 1

    @property
    def kept(self) -> frozenset[int]:
        """States that the forward pass keeps."""
        return kept_states(self.schedule.num_steps, self.state_every)

    @cached_property
    def chunks(self) -> tuple[Interval, ...]:
        """The batch in walks."""
        tile = self.scope.batch
        return tuple(Interval(b, min(b + tile, self.num_batch)) for b in range(0, self.num_batch, tile))

    def finish(self, name: str, chunk: Interval) -> Program:
        """The program that turns a running sum into a global value."""
        return lower_finish(self._scope(chunk), name)

    def _scope(self, chunk: Interval) -> Scope:
        if len(chunk) == self.scope.batch:
            return self.scope
        if len(chunk) not in self._tails:
            fields = {name: getattr(self.scope, name) for name in self.scope.__dataclass_fields__}
            self._tails[len(chunk)] = Scope(**{**fields, "batch": len(chunk)})
        return self._tails[len(chunk)]

    def _step(self, index: int) -> Step:
        if index not in self._steps:
            self._steps[index] = self.schedule.step(index)
        return self._steps[index]

    def row_bytes(self, name: str, num_batch: int) -> int:
        """Bytes of one row of a streamed value for ``num_batch`` batch elements."""
        _, channels, _, width = self.scope.shapes[name]
        return num_batch * channels * width * self.scope.graph[name].itemsize_bytes

    @property
    def working_bytes(self) -> int:
        """The largest peak of the programs lowered so far."""
        return max((program.peak_bytes for program in self._programs.values()), default=0)

    def program(self, kind: StripKind, index: int, chunk: Interval) -> Program:
        """The program of a strip; strips of one signature share it."""
        key = (kind, int(self.schedule.kinds[1][index]), len(chunk))
        if key not in self._programs:
            self._programs[key] = lower_strip(self._scope(chunk), self._step(index), kind)
        return self._programs[key]

    def forward(self, machine: Machine, values: Values, *, keep: bool) -> list[RowStore]:
        """Walk all strips; with ``keep`` the states for the backward walk stay in the returned stores."""
        stores = []
        shared = self.open_reductions(machine, None)
        for chunk in self.chunks:
            store = RowStore()
            partial = {**shared, **self.open_reductions(machine, chunk)}
            kept = self.kept if keep else frozenset()
            with opened(machine, self, values.by_name, "forward", chunk) as readers:
                reading = Values(values.by_name, readers)
                for index in range(self.schedule.num_steps):
                    self._run_forward(machine, reading, store, index, chunk, partial, write=True)
                    store.hold(self.schedule.carried_rows(index + 1))
                    if index not in kept:
                        store.release(self.schedule.carried_rows(index))
            store.release(self.schedule.carried_rows(self.schedule.num_steps))
            self.close_reductions(machine, values, partial, chunk)
            del partial
            stores.append(store)
        self.close_reductions(machine, values, shared, None)
        return stores

    def _run_forward(
        self,
        machine: Machine,
        values: Values,
        store: RowStore,
        index: int,
        chunk: Interval,
        partial: Mapping[str, Handle],
        *,
        write: bool,
    ) -> None:
        step, program = self._step(index), self.program("forward" if write else "restore", index, chunk)
        bindings = self._bind(machine, program, step, chunk, values, store)
        for port in program.ports:
            if port.role == "out":
                rows = next(n.new for n in step.nodes if n.name == port.name)
                bindings[port] = machine.view(values.by_name[port.name], chunk, rows)
            elif port.role == "partial":
                bindings[port] = partial[port.name]
        results, _ = machine.run(program, bindings)
        for node in step.nodes:
            block = results.pop(Port("append", node.name), None)
            if block is not None:
                store.append(node.name, node.appended, block)

    def _bind(self, machine: Machine, program: Program, step: Step, chunk: Interval, values: Values, store: RowStore) -> dict[Port, Handle]:
        """The ports that forward and backward have in common."""
        bindings: dict[Port, Handle] = {}
        for port in program.ports:
            if port.role == "source":
                rows, reader = _rows_read(step, port.name), values.readers.get(port.name)
                bindings[port] = machine.view(values.by_name[port.name], chunk, rows) if reader is None else reader.take(rows)
            elif port.role == "side":
                bindings[port] = self._side(machine, values, port.name, chunk)
            elif port.role == "carry":
                rows = next(n.carried for n in step.nodes if n.name == port.name)
                bindings[port] = store.pieces(port.name, rows)
        return bindings

    def _side(self, machine: Machine, tensors: Values | Gradients, name: str, chunk: Interval) -> Handle:
        handle = tensors.by_name[name]
        return machine.view(handle, chunk, None) if name in self.scope.per_sample else handle

    def backward(self, machine: Machine, values: Values, stores: list[RowStore], grads: Gradients, *, consume: bool = True) -> None:
        """Walk the strips in reverse.

        Args:
            machine: what runs the programs.
            values: sources and side tensors.
            stores: what ``forward`` returned.
            grads: holds the outputs' gradients, zeros to add to for sources and side tensors that need a gradient, and sinks.
            consume: whether the stores are no longer needed afterwards.
        """
        if not consume:
            stores = [store.fork() for store in stores]
        chunks = list(self.chunks)
        while chunks:
            chunk = chunks.pop()
            with opened(machine, self, values.by_name, "backward", chunk) as readers:
                self._backward_chunk(machine, Values(values.by_name, readers), stores.pop(), grads, chunk)

    def _backward_chunk(self, machine: Machine, values: Values, store: RowStore, grads: Gradients, chunk: Interval) -> None:
        schedule = self.schedule
        carried: dict[str, Handle] = {}
        for action in backward_actions(schedule.num_steps, self.state_every):
            if action.kind == "forward":
                self._run_forward(machine, values, store, action.strip, chunk, {}, write=False)
                store.hold(schedule.carried_rows(action.strip + 1))
                continue
            step, program = self._step(action.strip), self.program("joint", action.strip, chunk)
            bindings = self._bind(machine, program, step, chunk, values, store)
            for port in program.ports:
                if port.role == "grad_out":
                    rows = next(n.new for n in step.nodes if n.name == port.name)
                    streamed = port.name in self.scope.streamed
                    bindings[port] = machine.view(grads.by_name[port.name], chunk, rows if streamed else None)
                elif port.role == "grad_carry":
                    bindings[port] = carried.pop(port.name)
                elif port.role == "grad_source" and port.name in grads.sinks:
                    shape = self._scope(chunk).strip_shape(port.name, len(_rows_read(step, port.name)))
                    bindings[port] = machine.allocate(shape, self.scope.side_dtype(port.name), zero=True)
                elif port.role == "grad_source":
                    bindings[port] = machine.view(grads.by_name[port.name], chunk, _rows_read(step, port.name))
                elif port.role == "grad_side":
                    bindings[port] = self._side(machine, grads, port.name, chunk)
            results, _ = machine.run(program, bindings)
            for name, sink in grads.sinks.items():
                if Port("grad_source", name) in bindings:
                    machine.give(sink, chunk, _rows_read(step, name), bindings[Port("grad_source", name)])
            bindings.clear()
            carried = {port.name: handle for port, handle in results.items()}
            results.clear()
            store.release(schedule.carried_rows(action.strip))


def _rows_read(step: Step, name: str) -> Interval:
    rows = Interval(0, 0)
    for node in step.nodes:
        for read in node.reads:
            if read.operand == name:
                rows = rows.hull(read.rows)
    return rows


@dataclass(kw_only=True)
class WholeSegment:
    """A segment that runs like plain PyTorch: everything that its backward needs is kept.

    Inputs that are not resident are read whole for its forward pass, and again for its backward pass.
    """

    #: gradients of sources come out as buffers of their own
    accumulates: ClassVar[bool] = False

    scope: Scope
    step: Step
    sides: tuple[str, ...]
    from_source: frozenset[str] = frozenset()
    _programs: dict[bool, tuple[Program, Program | None]] = field(default_factory=dict, repr=False)

    def programs(self, training: bool) -> tuple[Program, Program | None]:
        """The forward and, when training, the backward program."""
        if training not in self._programs:
            self._programs[training] = lower_whole(self.scope, self.step, training=training)
        return self._programs[training]

    def forward(self, machine: Machine, values: Values, *, keep: bool) -> Saved:
        """Run it; with ``keep`` what the backward needs is returned."""
        program, _ = self.programs(keep)
        bindings = {port: self._given(machine, port.name, values) for port in program.ports if port.role in ("source", "side", "out")}
        _, saved = machine.run(program, bindings)
        roots = {out.number: out.root for i in program.instructions for out in i.outputs if out is not None}
        viewed = {roots[number] for number in program.saved}
        for port, slot in program.ports.items():
            if port.name in self.from_source and port.role == "source" and slot.root in viewed:
                saved.loaded[port.name] = bindings[port]
        return saved

    def _given(self, machine: Machine, name: str, values: Values) -> Handle:
        """A value from outside; an input that is not resident is read as a whole."""
        handle = values.by_name[name]
        return machine.load(handle, self.scope.shapes[name], self.scope.side_dtype(name)) if name in self.from_source else handle

    def backward(self, machine: Machine, values: Values, saved: Saved, grads: Gradients, *, consume: bool = True) -> None:
        """Differentiate it; gradients of sources come out as new buffers, or are added to those that exist."""
        _, program = self.programs(True)
        assert program is not None
        bindings: dict[Port, Handle] = {}
        for port in program.ports:
            if port.role == "source" and port.name in saved.loaded:
                bindings[port] = saved.loaded[port.name]
            elif port.role in ("source", "side") and port.name in values.by_name:
                bindings[port] = self._given(machine, port.name, values)
            elif port.role in ("grad_out", "grad_side"):
                bindings[port] = grads.by_name[port.name]
        held = saved if consume else Saved(saved.values if not isinstance(saved.values, dict) else dict(saved.values))
        results, _ = machine.run(program, bindings, held)
        del held
        for port in list(results):
            handle = results.pop(port)
            if port.name in grads.sinks:
                num_batch, _, height, _ = self.scope.shapes[port.name]
                machine.give(grads.sinks[port.name], Interval(0, num_batch), Interval(0, height), handle)
            elif port.name in grads.by_name:
                machine.add(grads.by_name[port.name], handle)
            else:
                grads.by_name[port.name] = handle
            del handle
