"""Tiled segment: runs its strips forward and backward; the gradient of carried rows goes to the strip that made them.

Every segment has two calls (``sft.runtime.whole_segment`` is the other kind). ``forward`` fills the segment's outputs and returns the
state that the backward pass needs in addition to the sources. ``backward`` takes the outputs' gradients and adds to, or allocates, the
gradients of sources and side inputs.

An output may be on the host (``to_host``): one that no later segment reads, or a cut that is also read strip by strip. Its strip is then a
buffer of its own on the device, which is copied to the host after the strip's program, and the strip of its gradient is copied from the
host before. Strips of direct cuts leave while the next strip's program runs, and gradients arrive as inputs do, one strip ahead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

import torch

from sft.analysis.ir.axes import ROWS
from sft.analysis.tiling.strips import StripStep
from sft.analysis.tiling.sweep_start import FULL_SWEEP, SweepStart, sweep_start
from sft.common.interval import Interval
from sft.lower.program import Port, Program
from sft.lower.running_reductions import partial_shape, partial_start
from sft.runtime.buffer_reuse import reusable_sources
from sft.runtime.carry_cache import CarryCache
from sft.runtime.machine import Buffer, BufferOps, Gradients, Machine, ProgramOps, ValueBindings
from sft.runtime.streamed_inputs import open_grad_loaders, open_loaders, reads_skipped_strips
from sft.runtime.strip_policy import StripSelection
from sft.runtime.tiled_layout import Sweep, TiledLayout

__all__ = ["SweepRun", "TiledSegment"]


@dataclass(frozen=True, slots=True)
class SweepRun:
    """A sweep that a machine runs.

    Attributes:
        machine: runs the programs.
        sweep: the sweep.
        values: sources and side inputs.
        cache: rows that its strips carry.
    """

    machine: Machine
    sweep: Sweep
    values: ValueBindings
    cache: CarryCache


@dataclass(kw_only=True)
class TiledSegment(TiledLayout):
    """Segment that runs strip by strip."""

    #: its gradients are added to existing buffers
    accumulates: ClassVar[bool] = True
    #: its backward pass needs the states of its forward pass
    saves: ClassVar[bool] = True
    #: none of its outputs is part of the state that its backward pass needs
    views: ClassVar[frozenset[str]] = frozenset()
    #: its states are buffers that only it references
    keeps_buffers: ClassVar[bool] = True

    def open_reductions(self, machine: BufferOps, chunk: Interval | None) -> dict[str, Buffer]:
        """Initial running reductions over some batch elements, or (``None``) over the full batch."""
        scope = self.scope if chunk is None else self.scope_of(Sweep(chunk, 0))
        names = [name for name in self.reductions if self.spans_batch(name) == (chunk is None)]
        partial = {name: machine.allocate(partial_shape(scope, name), torch.float64, zero=False) for name in names}
        for name, buffer in partial.items():
            machine.fill(buffer, partial_start(scope, name))
        return partial

    def close_reductions(self, machine: Machine, values: ValueBindings, partial: dict[str, Buffer], chunk: Interval | None) -> None:
        """Turn the running reductions over some batch elements (``None``: the full batch) into global values."""
        for name in self.reductions:
            if self.spans_batch(name) == (chunk is None):
                out = values.by_name[name] if chunk is None else machine.view(values.by_name[name], chunk, None)
                program = self.finish_program(name, Sweep(self.chunks[0] if chunk is None else chunk, 0))
                machine.run(program, {Port("partial", name): partial.pop(name), Port("out", name): out})

    @cached_property
    def reusable_sources(self) -> Mapping[str, tuple[str, ...]]:
        """For outputs the sources whose buffers they may take (:mod:`sft.runtime.buffer_reuse`)."""
        return reusable_sources(self)

    def self_allocated(self, keep: bool) -> frozenset[str]:
        """Outputs that the segment allocates itself: none, since strips are written into existing buffers."""
        return frozenset()

    def buffers(self, machine: ProgramOps, caches: list[CarryCache | None]) -> list[Buffer]:
        """Buffers of its states."""
        return [block.buffer for cache in caches if cache for blocks in cache.blocks.values() for block in blocks]

    def backward_reads(self, reads: Sequence[str]) -> Sequence[str]:
        """Values that its backward pass reads: all, since it recomputes the strips."""
        return reads

    def forward(self, machine: Machine, values: ValueBindings, *, keep: bool) -> list[CarryCache | None]:
        """Run all sweeps.

        Returns:
            For each sweep its carry cache, with the states for the backward pass; ``None`` for a sweep that keeps none.
        """
        caches: list[CarryCache | None] = []
        shared = self.open_reductions(machine, None)
        for chunk in self.chunks:
            partial = {**shared, **self.open_reductions(machine, chunk)}
            for sweep in (sweep for sweep in self.sweeps if sweep.chunk == chunk):
                keeps = keep and self.keeps_states(sweep)
                cache = self._sweep_forward(machine, values, sweep, partial, self.kept_states if keeps else frozenset())
                caches.append(cache if keeps else None)
            self.close_reductions(machine, values, partial, chunk)
            del partial
        self.close_reductions(machine, values, shared, None)
        return caches

    def _sweep_forward(
        self, machine: Machine, values: ValueBindings, sweep: Sweep, partial: Mapping[str, Buffer] | None, kept: frozenset[int]
    ) -> CarryCache:
        """Run the strips of a sweep forward and keep some of its states; without ``partial`` compute these states alone."""
        direction: Literal["forward", "restore"] = "restore" if partial is None else "forward"
        last = self.num_sweep_strips(direction)
        start = FULL_SWEEP if partial is None or kept else self._missing_strips(machine, values)
        selection = self.strip_policy.select_forward(machine, self, values, sweep)
        cache = CarryCache(selection=selection.with_strips_before(start.complete))
        with open_loaders(machine, self, values.by_name, direction, sweep, first=start.first, selection=cache.selection) as loaders:
            run = SweepRun(machine, sweep, ValueBindings(values.by_name, loaders), cache)
            if start.first:
                self._append_unread_rows(run, start.first)
            for index in range(start.first, last):
                self._run_forward(run, index, partial)
                if index in kept:
                    cache.retain(self.schedule.carried_rows(index + 1))
                else:
                    cache.advance(self.schedule.row_changes(index))
            if partial is not None:
                self._finish_strips(machine, values.by_name, self.to_host)
        if last not in kept:
            cache.release(self.schedule.carried_rows(last))
        return cache

    def _finish_strips(self, machine: Machine, hosts: Mapping[str, Buffer], names: frozenset[str]) -> None:
        """Free the strips of direct cuts, or of their gradients, that leave."""
        for name in sorted(self.direct & names):
            if name in hosts:
                machine.finish_strips(hosts[name])

    def _missing_strips(self, machine: Machine, values: ValueBindings) -> SweepStart:
        """Start of the only sweep, if the consumers of all outputs have rows of them already: an interrupted prediction that is resumed."""
        if len(self.sweeps) != 1 or self.reductions or not self.to_host.issuperset(self.scope.outputs):
            return FULL_SWEEP
        known_rows = {name: machine.known_rows(values.by_name[name]) for name in self.scope.outputs}
        return sweep_start(self.schedule, known_rows) if any(known_rows.values()) else FULL_SWEEP

    def _append_unread_rows(self, run: SweepRun, index: int) -> None:
        """Zeros in place of the rows carried into the first strip of a sweep that starts below: no row that counts reads them.

        Their blocks are those of a full sweep, so that they are dropped at the same strips.
        """
        state, scope = self.schedule.carried_rows(index), self.scope_of(run.sweep)
        blocks: list[tuple[str, Interval]] = []
        missing = {name: len(rows) for name, rows in state.items()}
        earlier = index
        while any(missing.values()):
            earlier -= 1
            for node in self.step(earlier).nodes:
                common = node.appended.intersect(state[node.name]) if node.name in state else None
                if common:
                    blocks.append((node.name, node.appended))
                    missing[node.name] -= len(common)
        for name, rows in reversed(blocks):
            run.cache.append(name, rows, run.machine.allocate(scope.strip_shape(name, len(rows)), scope.dtype_of(name), zero=True))
        run.cache.retain(state)

    def _run_forward(self, run: SweepRun, index: int, partial: Mapping[str, Buffer] | None) -> None:
        """Run one strip forward, or share the rows of the strip before it if the selection leaves it out."""
        machine, sweep, values, cache = run.machine, run.sweep, run.values, run.cache
        step, program = self.step(index), self.program("forward" if partial is not None else "restore", index, sweep)
        if not cache.selection.runs(index):
            for node, source in zip(step.nodes, self.step(index - 1).nodes, strict=True):
                if Port("append", node.name) in program.results:
                    cache.append_equal(node.name, node.appended, source.appended)
            self._skip(run, program, step)
            return
        # The outputs and sums of the strips that this one represents are written here; their carried rows are shared when they are skipped.
        weight = 1 if partial is None else cache.selection.weight(index, step=1)
        bindings = self._bind(run, program, step)
        host_strips: dict[str, Buffer] = {}
        for port, slot in program.ports.items():
            if port.role == "out" and self.is_exchanged(port):
                host_strips[port.name] = machine.allocate(slot.shape, slot.dtype, zero=False, contiguous=port.name in self.contiguous)
                bindings[port] = host_strips[port.name]
            elif port.role == "out":
                bindings[port] = self._output_slice(run, values, port.name, step)
            elif port.role == "partial":
                assert partial is not None
                bindings[port] = partial[port.name]
        with self.strip_policy.weighted(run, self, index, program, bindings, weight):
            results, _ = machine.run(program, bindings)
        for node in step.nodes:
            block = results.pop(Port("append", node.name), None)
            if block is not None:
                cache.append(node.name, node.appended, block)
        outputs = {port.name: bindings[port] for port in bindings if port.role == "out" and port.name not in host_strips}
        bindings.clear()
        for offset in range(1, weight):
            for name, buffer in outputs.items():
                machine.copy(self._output_slice(run, values, name, self.step(index + offset)), buffer)
        del outputs
        if partial is not None:
            self._finish_strips(machine, values.by_name, self.to_host)
        for name in list(host_strips):
            strip = host_strips.pop(name)
            for offset in range(weight):
                rows, columns = self.output_region(name, self.step(index + offset), sweep)
                machine.write_output(values.by_name[name], strip, sweep.chunk, rows, columns, axes=self.scope.axes)
            del strip

    def _skip(self, run: SweepRun, program: Program, step: StripStep) -> None:
        """Leave a strip out; its inputs are read and dropped if the loaders expect that."""
        self.strip_policy.skip(run.machine, program)
        if run.values.loads_skipped:
            for port in program.ports:
                if port.role == "source" and port.name in run.values.loaders:
                    run.values.loaders[port.name].take(self.reads(step, run.sweep)[port.name])

    def _bind(self, run: SweepRun, program: Program, step: StripStep) -> dict[Port, Buffer]:
        """Bindings of the ports that forward and backward programs have in common; without data, of those that take memory along."""
        bindings: dict[Port, Buffer] = {}
        values, sweep = run.values, run.sweep
        if not run.machine.has_data:
            reads = [port for port in program.ports if port.role == "source" and port.name in values.loaders] if values.loaders else ()
            return {port: values.loaders[port.name].take(self.reads(step, sweep)[port.name]) for port in reads}
        for port in program.ports:
            if port.role == "source":
                bindings[port] = self._source_slice(run, values, port.name, step)
            elif port.role == "side":
                bindings[port] = self._side(run, values, port.name)
            elif port.role == "carry":
                bindings[port] = run.cache.slices(port.name, step[port.name].carried)
            elif port.role == "origin":
                bindings[port] = self.origin(port.name, step, sweep)
        return bindings

    def _source_slice(self, run: SweepRun, tensors: ValueBindings | Gradients, name: str, step: StripStep) -> Buffer:
        """View of the rows that a strip reads of a source, or of the source's gradient."""
        rows, columns = self.reads(step, run.sweep)[name], self.columns_of(name, run.sweep).new
        loader = tensors.loaders.get(name) if isinstance(tensors, ValueBindings) else None
        if loader is not None:
            return run.machine.view(loader.take(rows), None, None, columns, axes=self.scope.axes)
        return run.machine.view(tensors.by_name[name], run.sweep.chunk, rows, columns, axes=self.scope.axes)

    def _zero_rows(self, run: SweepRun, name: str, step: StripStep) -> Buffer:
        """Zeros for a strip's gradient of an input that is not resident: full-width rows, as a sink takes them."""
        shape = self.scope.axes.with_extent(self.scope.shapes[name], ROWS, len(self.reads(step, run.sweep)[name]))
        return run.machine.allocate((len(run.sweep.chunk), *shape[1:]), self.scope.sink_dtype(name), zero=True)

    def _output_slice(self, run: SweepRun, tensors: ValueBindings | Gradients, name: str, step: StripStep) -> Buffer:
        """View of the region that a strip writes of a streamed output, or that it reads of the output's gradient."""
        rows, columns = self.output_region(name, step, run.sweep)
        return run.machine.view(tensors.by_name[name], run.sweep.chunk, rows, columns, axes=self.scope.axes)

    def _side(self, run: SweepRun, tensors: ValueBindings | Gradients, name: str) -> Buffer:
        """A side input, or its gradient: of some batch elements where it has them."""
        buffer = tensors.by_name[name]
        return run.machine.view(buffer, run.sweep.chunk, None) if name in self.scope.per_sample else buffer

    def backward(
        self, machine: Machine, values: ValueBindings, caches: list[CarryCache | None], grads: Gradients, *, consume: bool = True
    ) -> None:
        """Run the sweeps in reverse.

        Args:
            machine: runs the programs.
            values: sources and side inputs.
            caches: result of ``forward``.
            grads: gradients of the outputs (on the host for ``to_host``), zeros to add to for sources and side inputs that need a gradient,
                and sinks.
            consume: True if the caches are not needed afterwards.
        """
        if not consume:
            caches = [cache and cache.fork() for cache in caches]
        sweeps = list(self.sweeps)
        while sweeps:
            self._sweep_backward(machine, values, caches.pop(), grads, sweeps.pop())

    def _sweep_backward(self, machine: Machine, values: ValueBindings, cache: CarryCache | None, grads: Gradients, sweep: Sweep) -> None:
        """Differentiate the strips of a sweep, last to first; a sweep without a cache runs forward again before."""
        if cache is None:
            cache = self._sweep_forward(machine, values, sweep, None, self.kept_states)
        selection = self.strip_policy.select_backward(machine, self, grads, sweep, cache.selection)
        with (
            open_loaders(machine, self, values.by_name, "backward", sweep, selection=selection) as loaders,
            open_grad_loaders(machine, self, grads.by_name, sweep) as grad_loaders,
        ):
            streaming = ValueBindings(values.by_name, loaders, reads_skipped_strips(self, "backward"))
            sums = Gradients(grads.by_name, grads.sinks, grad_loaders)
            self._sweep_reverse(SweepRun(machine, sweep, streaming, cache), sums, selection)
            self._finish_strips(machine, grads.sinks, self.from_source)

    def _sweep_reverse(self, run: SweepRun, grads: Gradients, selection: StripSelection) -> None:
        """Run the checkpoint actions of a sweep: strips forward to restore states, and backward."""
        schedule, cache = self.schedule, run.cache
        carried: dict[str, Buffer] = {}
        for action in self.checkpoints.actions(schedule.num_steps):
            if action.kind == "forward":
                self._run_forward(run, action.strip, None)
                if action.drops:
                    cache.advance(schedule.row_changes(action.strip))
                else:
                    cache.retain(schedule.carried_rows(action.strip + 1))
                continue
            if selection.runs(action.strip):
                weight = selection.weight(action.strip, step=-1)
                carried = self._run_joint(run, grads, action.strip, carried, weight)
            else:  # the gradients of the rows carried in equal those of the rows carried out
                self._skip(run, self.program("joint", action.strip, run.sweep), self.step(action.strip))
            cache.release(schedule.carried_rows(action.strip))

    def _run_joint(self, run: SweepRun, grads: Gradients, index: int, carried: dict[str, Buffer], weight: int) -> dict[str, Buffer]:
        """Differentiate a strip and the ``weight - 1`` strips before it that it represents.

        Args:
            run: its sweep.
            grads: gradients, read and added to.
            index: the strip.
            carried: gradients of the rows that the strip carries out, emptied.
            weight: number of strips that it represents.

        Returns:
            Gradients of the rows carried into the strip.
        """
        machine, sweep = run.machine, run.sweep
        step, program = self.step(index), self.program("joint", index, sweep)
        bindings = self._bind(run, program, step)
        sink_grads: dict[str, Buffer] = {}
        separate_grads: dict[str, Buffer] = {}
        for port, slot in program.ports.items():
            if port.role == "grad_out" and self.is_exchanged(port):
                bindings[port] = machine.allocate(slot.shape, slot.dtype, zero=False)
                rows, columns = self.output_region(port.name, step, sweep)
                machine.read_output_grad(grads.by_name[port.name], bindings[port], sweep.chunk, rows, columns, axes=self.scope.axes)
            elif port.role == "grad_out" and port.name in grads.loaders:
                bindings[port] = grads.loaders[port.name].take(self.output_region(port.name, step, sweep)[0])
            elif port.role == "grad_out":
                is_streamed = port.name in self.scope.streamed
                bindings[port] = self._output_slice(run, grads, port.name, step) if is_streamed else self._side(run, grads, port.name)
            elif port.role == "grad_carry":
                bindings[port] = carried.pop(port.name)
            elif port.role == "grad_source" and port.name in grads.sinks:
                sink_grads[port.name] = self._zero_rows(run, port.name, step)
                columns = self.columns_of(port.name, sweep).new
                bindings[port] = machine.view(sink_grads[port.name], None, None, columns, axes=self.scope.axes)
            elif port.role == "grad_source" and weight > 1:
                bindings[port] = separate_grads[port.name] = machine.allocate(slot.shape, slot.dtype, zero=True)
            elif port.role == "grad_source":
                bindings[port] = self._source_slice(run, grads, port.name, step)
            elif port.role == "grad_side":
                bindings[port] = self._side(run, grads, port.name)
        with self.strip_policy.weighted(run, self, index, program, bindings, weight):
            results, _ = machine.run(program, bindings)
        bindings.clear()
        self._finish_strips(machine, grads.sinks, self.from_source)
        for offset in range(weight):
            target = self.step(index - offset)
            for name, gradient in sink_grads.items():
                machine.add_to_sink(grads.sinks[name], sweep.chunk, self.reads(target, sweep)[name], gradient)
            for name, gradient in separate_grads.items():
                machine.add(self._source_slice(run, grads, name, target), gradient)
        return {port.name: buffer for port, buffer in results.items()}
