"""Compiled region: the interpreter of segment schedules, forward and backward.

*Cuts*, the values between segments, are complete buffers. In the default schedule a cut lives from the segment that writes it to the
backward of the first segment that reads it, which recomputes from it; in another schedule (``sft.runtime.moves``) it may be freed and
written again. Its gradient lives from the backward of its last reader to that of its writer. A cut or the residuals of a segment may wait
on the host for their next reader (``sft.runtime.offload``). Outputs, and gradients of inputs and parameters, are buffers of the region;
the caller's tensors do not change before the end of a pass.

*Streamed cuts* are on the host, and so are their gradients: for the segment that writes it, such a cut is an output that leaves strip by
strip; for its readers, an input that is not resident. The strips of *direct* ones are copied to page-locked memory and back by the device
alone; those of others pass through buffers of a thread.

*Streamed weights* are on the device around the ops that read them, and their gradients leave one by one (``sft.runtime.weight_prefetch``).

*Outputs on the host* that leave their segment strip by strip (``to_host``) have no buffer here. Any other (small, written by an untiled
segment, or read by later segments) is a cut that is copied when its segment is complete; its gradient is loaded before the backward of the
last segment that writes or reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from sft.analysis.ir.graph import Graph
from sft.runtime.liveness import Liveness, Segment
from sft.runtime.machine import Buffer, BufferOps, Gradients, HostOps, Machine, ValueBindings
from sft.runtime.moves import LOSS_OP, ScheduleOp, SegmentSchedule, default_schedule
from sft.runtime.offload import OffloadState
from sft.runtime.strip_policy import RUN_ALL_STRIPS
from sft.runtime.tiled_segment import TiledSegment
from sft.runtime.weight_prefetch import StreamedWeights, WeightPrefetcher, weights_completed_per_segment, weights_read_per_op

__all__ = ["Region", "Tape"]


@dataclass(slots=True)
class Tape:
    """State that a forward pass leaves for the backward pass.

    Attributes:
        values: cuts and leaves by value name.
        residuals: by segment index, carry caches (tiled) or saved tensors (untiled).
        copies: values and residuals that have a copy on the host.
        weights: buffers of streamed weights, without memory.
    """

    values: ValueBindings = field(default_factory=ValueBindings)
    residuals: dict[int, Any] = field(default_factory=dict)
    copies: OffloadState = field(default_factory=OffloadState)
    weights: dict[str, Buffer] = field(default_factory=dict)

    def fork(self) -> Tape:
        """Tape for a backward pass that is not the last one; copies on the host are shared."""
        return Tape(ValueBindings(dict(self.values.by_name)), dict(self.residuals), self.copies, self.weights)


@dataclass(kw_only=True)
class Region:
    """Model cut into segments.

    Attributes:
        graph: the model.
        segments: the segments in forward order.
        reads: for each segment the values that it takes from outside: sources and side inputs.
        writes: for each segment the values that later segments or the caller read.
        shapes: shape of every value for this input.
        dtypes: element type of every value (``torch.dtype``).
        grad_dtypes: element type in which its gradient is accumulated; a parameter's gradient is rounded to the parameter's type
            at the end.
        requires_grad: values that need a gradient.
        outputs: the model's outputs, each once.
        contiguous: outputs in channels-first layout.
        from_source: inputs that are read while sweeps run; their buffers are sources, their gradients are added to sinks.
        host_outputs: outputs on the host, with their gradients.
        streamed: cuts on the host, with their gradients.
        direct: members of ``streamed`` in page-locked memory, of which a strip is one block of bytes for each sample.
        custom_schedule: schedule of a step with a backward pass; ``None`` for the default one. A segment with outputs that leave strip by
            strip runs forward once.
        weights: the streamed parameters; ``None`` if all are resident.
    """

    graph: Graph
    segments: Sequence[Segment]
    reads: Sequence[tuple[str, ...]]
    writes: Sequence[tuple[str, ...]]
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, Any]
    grad_dtypes: Mapping[str, Any]
    requires_grad: frozenset[str]
    outputs: tuple[str, ...]
    contiguous: frozenset[str]
    from_source: frozenset[str] = frozenset()
    host_outputs: frozenset[str] = frozenset()
    streamed: frozenset[str] = frozenset()
    direct: frozenset[str] = frozenset()
    custom_schedule: SegmentSchedule | None = None
    weights: StreamedWeights | None = None

    @property
    def schedule(self) -> SegmentSchedule:
        """Schedule of a step with a backward pass."""
        return default_schedule(len(self.segments)) if self.custom_schedule is None else self.custom_schedule

    @cached_property
    def liveness(self) -> Liveness:
        """Lifetimes of values under the schedule."""
        return Liveness(
            graph=self.graph,
            segments=self.segments,
            reads=self.reads,
            writes=self.writes,
            requires_grad=self.requires_grad,
            outputs=self.outputs,
            streamed=self.streamed,
            schedule=self.schedule,
        )

    def reachable_values(self, outputs: frozenset[str]) -> frozenset[str]:
        """Values that a gradient of these outputs reaches; computed once for each set of outputs."""
        if outputs not in self._reachable_values:
            reached = set(outputs)
            for node in reversed(self.graph.nodes):
                if node.name in reached:
                    reached.update(name for name in node.operands if name in self.requires_grad)
            self._reachable_values[outputs] = frozenset(reached)
        return self._reachable_values[outputs]

    @cached_property
    def _reachable_values(self) -> dict[frozenset[str], frozenset[str]]:
        return {}

    def output_shape(self, name: str) -> tuple[int, ...]:
        """Shape of an output, and of its gradient, as the caller sees it."""
        return self.shapes[name]

    def without_skipping(self) -> Region:
        """The region with every strip run: the slab for copies is laid out for the residuals of every strip."""
        segments = [replace(each, strip_policy=RUN_ALL_STRIPS) if isinstance(each, TiledSegment) else each for each in self.segments]
        return replace(self, segments=segments)

    # -- forward ----------------------------------------------------------------------------------------------------

    def forward(
        self, machine: Machine, leaves: Mapping[str, Buffer], *, keep: bool, hosts: Mapping[str, Buffer] | None = None
    ) -> tuple[dict[str, Buffer], Tape]:
        """Compute the outputs from inputs, parameters and buffers.

        Args:
            machine: runs the programs.
            leaves: buffers of inputs, parameters and model buffers by value name.
            keep: True if a backward pass follows.
            hosts: destinations of the outputs on the host, which are returned in their place.
        """
        tape, hosts = Tape(ValueBindings(dict(leaves))), hosts or {}
        outputs: dict[str, Buffer] = {name: leaves[name] for name in self.outputs if name in leaves}
        outputs.update({name: hosts[name] for name in self.host_outputs})
        ops = self.schedule if keep else default_schedule(len(self.segments))
        ops = ops[: ops.index(LOSS_OP)]
        last_uses = self.liveness.last_uses if keep else self.liveness.forward_last_uses
        with self._prefetched_weights(machine, ops, tape.weights) as prefetcher:
            for position, (op, dead) in enumerate(zip(ops, last_uses, strict=False)):
                machine.start_op(op)
                if op.is_copy:
                    self._run_copy(machine, tape.values, tape.residuals, tape.copies, op)
                    self._free(machine, tape.values, tape.copies, dead)
                    continue
                segment, writes = self.segments[op.segment], self.writes[op.segment]
                tape.copies.wait(machine, self.liveness.reads_from_outside[op.segment])
                tape.values.by_name |= {name: hosts[name] for name in segment.to_host - self.streamed}
                if prefetcher is not None:
                    prefetcher.before_op(position, tape.values.by_name)
                self._run_forward(machine, tape.values, tape.residuals if keep else None, op, dead)
                outputs |= {name: tape.values.by_name[name] for name in writes if name in self._device_outputs}
                for name in writes:
                    if name in self.host_outputs - segment.to_host:
                        machine.write_output(hosts[name], tape.values.by_name[name])
                if prefetcher is not None:
                    prefetcher.after_op(position)
                self._free(machine, tape.values, tape.copies, dead)
        if keep:
            machine.start_op(LOSS_OP)
        return outputs, tape

    def _run_forward(
        self, machine: Machine, values: ValueBindings, residuals: dict[int, Any] | None, op: ScheduleOp, dead: Sequence[str] = ()
    ) -> None:
        """Run a segment forward; without ``residuals`` no backward pass follows, and outputs may take the buffers of ``dead`` sources."""
        segment = self.segments[op.segment]
        keep = residuals is not None and op.keep and self.liveness.differentiated[op.segment]
        without_buffer = segment.to_host | segment.self_allocated(keep)
        reused = self._reused_sources(segment, dead) if residuals is None else {}
        for name in self.writes[op.segment]:
            if name in self.streamed:
                values.by_name[name] = machine.allocate_host_cut(self.shapes[name], self.dtypes[name], direct=name in self.direct)
            elif name in reused:
                values.by_name[name] = values.by_name[reused[name]]
            elif name not in without_buffer:
                contiguous = name in self.contiguous
                values.by_name[name] = machine.allocate(self.shapes[name], self.dtypes[name], zero=False, contiguous=contiguous)
        saved = segment.forward(machine, values, keep=keep)
        if keep and residuals is not None:
            residuals[op.segment] = saved

    def _reused_sources(self, segment: Segment, dead: Sequence[str]) -> dict[str, str]:
        """Outputs of a segment that take the buffer of a source that is read for the last time."""
        free = {name for name in dead if name in self._strip_cuts}
        reused: dict[str, str] = {}
        for output, sources in segment.reusable_sources.items():
            source = next((name for name in sources if name in free), None)
            if source is not None and output not in self.contiguous and output not in self.streamed:
                free.discard(source)
                reused[output] = source
        return reused

    @cached_property
    def _device_outputs(self) -> frozenset[str]:
        """Outputs that stay on the device."""
        return frozenset(self.outputs) - self.host_outputs

    @cached_property
    def _strip_cuts(self) -> frozenset[str]:
        """Cuts in buffers that tiled segments write, and that nothing outside of the region references."""
        written = {
            name
            for segment, writes in zip(self.segments, self.writes, strict=True)
            for name in set(writes) - segment.to_host - segment.self_allocated(False)
        }
        return frozenset(written - self.contiguous - self.streamed - self.host_outputs - set(self.outputs) - set(self.graph.results))

    def _run_copy(
        self, machine: Machine, values: ValueBindings, residuals: Mapping[int, Any], copies: OffloadState, op: ScheduleOp
    ) -> None:
        """Run an offload, release or prefetch."""
        buffers: Sequence[Buffer] = ()
        if op.kind == "offload":
            segment = self.segments[op.segment]
            buffers = [values.by_name[op.value]] if op.value else segment.buffers(machine, residuals[op.segment])
        copies.run_op(machine, op, buffers)

    def _free(self, machine: HostOps, values: ValueBindings, copies: OffloadState, names: Sequence[str]) -> None:
        """Drop values, and their copies on the host."""
        for name in names:
            values.by_name.pop(name, None)
        copies.free(machine, names)

    # -- backward ---------------------------------------------------------------------------------------------------

    def backward(
        self,
        machine: Machine,
        tape: Tape,
        output_grads: Mapping[str, Buffer],
        *,
        sinks: Mapping[str, Buffer] | None = None,
        consume: bool = True,
    ) -> dict[str, Buffer]:
        """Compute the gradients of inputs and parameters that need one.

        Args:
            machine: runs the programs.
            tape: result of the forward pass.
            output_grads: gradients of the outputs that need one; on the host for outputs on the host.
            sinks: destinations of the gradients of inputs that are not resident, which are added strip by strip.
            consume: True if no other backward pass uses the tape.
        """
        values = tape.values if consume else ValueBindings(dict(tape.values.by_name))
        residuals = tape.residuals if consume else dict(tape.residuals)
        copies = tape.copies if consume else tape.copies.fork()
        grads, caller_grads = Gradients(dict(output_grads), dict(sinks or {})), set(output_grads) - self.host_outputs
        host_grads = {name for name in self.host_outputs if name in output_grads}
        loss = self.schedule.index(LOSS_OP)
        self._free(machine, values, copies, self.liveness.last_uses[loss])
        ops = self.schedule[loss + 1 :]
        try:
            with self._prefetched_weights(machine, ops, tape.weights) as prefetcher:
                for position, (op, dead) in enumerate(zip(ops, self.liveness.last_uses[loss + 1 :], strict=True)):
                    machine.start_op(op)
                    if op.is_copy:
                        self._run_copy(machine, values, residuals, copies, op)
                        self._free(machine, values, copies, dead)
                        continue
                    if prefetcher is not None:
                        prefetcher.before_op(position, values.by_name)
                    if op.kind == "forward":
                        copies.wait(machine, self.liveness.reads_from_outside[op.segment])
                        self._run_forward(machine, values, residuals, op)
                    else:
                        target = f"{op.segment}+"
                        copies.wait(machine, (*self.liveness.backward_reads[op.segment], target))
                        copies.free(machine, (target,))  # before it runs, since it frees the residuals one by one
                        is_last = consume or op.segment not in tape.residuals
                        self._run_backward(machine, values, residuals, grads, op.segment, caller_grads, host_grads, is_last)
                    if prefetcher is not None:
                        self._send_weight_grads(machine, op, grads, prefetcher)
                        prefetcher.after_op(position)
                    self._free(machine, values, copies, dead)
            self._complete_leaves(machine, grads)
        finally:
            copies.restore(machine)
        leaves = [name for name in grads.by_name if name in self.liveness.leaves]
        return {name: self._rounded(machine, name, grads) for name in leaves}

    def _run_backward(
        self,
        machine: Machine,
        values: ValueBindings,
        residuals: dict[int, Any],
        grads: Gradients,
        index: int,
        caller_grads: set[str],
        host_grads: set[str],
        consume: bool,
    ) -> None:
        """Run a segment backward.

        Args:
            machine: runs the programs.
            values: the environment.
            residuals: residuals by segment; the segment's are removed.
            grads: gradients, read and added to.
            index: the segment.
            caller_grads: outputs with gradients in the caller's buffers, which must not change.
            host_grads: outputs with gradients that are still on the host.
            consume: True if the residuals are not needed afterwards.
        """
        segment, saved = self.segments[index], residuals.pop(index, None)
        if self.liveness.differentiated[index]:
            for name in self.writes[index]:
                if name not in self.requires_grad:
                    continue
                if name in host_grads - segment.to_host:
                    self._load_gradient(machine, name, values, grads, host_grads)
                elif name in self.streamed:
                    self._allocate_host_grad(machine, name, grads)
                elif name not in grads.by_name:
                    grads.by_name[name] = machine.zeros_like(values.by_name.get(name), self.shapes[name], self.grad_dtypes[name])
            for name in self.reads[index]:
                if name in host_grads and name not in self.writes[index]:
                    self._load_gradient(machine, name, values, grads, host_grads)
            self._allocate_accumulators(machine, index, values, grads, caller_grads)
            segment.backward(machine, values, saved, grads, consume=consume)
        del saved
        for name in self.writes[index]:
            grads.by_name.pop(name, None)
            if name in self.streamed:
                grads.sinks.pop(name, None)

    def _allocate_host_grad(self, machine: HostOps, name: str, grads: Gradients) -> None:
        """Allocate the gradient of a streamed cut on the host: its readers add to it, and its writer reads it."""
        if name not in grads.by_name:
            gradient = machine.allocate_host_grad(self.shapes[name], self.grad_dtypes[name], direct=name in self.direct)
            grads.by_name[name] = grads.sinks[name] = gradient

    def _load_gradient(self, machine: Machine, name: str, values: ValueBindings, grads: Gradients, host_grads: set[str]) -> None:
        """Copy the full gradient of an output from the host into a buffer that may be added to."""
        buffer = machine.zeros_like(values.by_name.get(name), self.shapes[name], self.grad_dtypes[name])
        machine.read_output_grad(grads.by_name[name], buffer)
        grads.by_name[name] = buffer
        host_grads.discard(name)

    def _allocate_accumulators(self, machine: Machine, index: int, values: ValueBindings, grads: Gradients, caller_grads: set[str]) -> None:
        """Allocate zeros for the gradients that the strips of a segment add to.

        The gradient of an output that is also read by a segment is the caller's buffer: it is copied before the first addition.
        """
        segment = self.segments[index]
        for name in self.reads[index]:
            if name in caller_grads and name not in self.writes[index] and name in self.requires_grad:
                buffer = machine.zeros_like(values.by_name.get(name), self.shapes[name], self.grad_dtypes[name])
                machine.add(buffer, grads.by_name[name])
                grads.by_name[name] = buffer
                caller_grads.discard(name)
                del buffer
            if name not in self.requires_grad or name in grads.by_name or name in self.from_source:
                continue
            if name in self.streamed:
                self._allocate_host_grad(machine, name, grads)
            elif segment.accumulates:
                value = values.by_name[name]
                grads.by_name[name] = machine.zeros_like(value, self.shapes[name], self.grad_dtypes[name])
                del value

    def _complete_leaves(self, machine: Machine, grads: Gradients) -> None:
        """Hook of distributed regions: every gradient of a leaf that this process computes is complete."""

    def _rounded(self, machine: BufferOps, name: str, grads: Gradients) -> Buffer:
        """The complete gradient of a leaf in the leaf's element type."""
        gradient = grads.by_name.pop(name)
        return gradient if self.grad_dtypes[name] == self.dtypes[name] else machine.cast(gradient, self.shapes[name], self.dtypes[name])

    # -- streamed weights -------------------------------------------------------------------------------------------

    @contextmanager
    def _prefetched_weights(self, machine: Machine, ops: SegmentSchedule, buffers: dict[str, Buffer]) -> Iterator[WeightPrefetcher | None]:
        """Prefetcher of the streamed weights of a pass over these ops; ``None`` if all weights are resident."""
        if self.weights is None:
            yield None
            return
        backward_reads = self.liveness.backward_reads if any(op.kind == "backward" for op in ops) else self.reads
        reads = weights_read_per_op(ops, self.liveness.reads_from_outside, backward_reads, self.weights.num_bytes)
        prefetcher = WeightPrefetcher(
            machine=machine, weights=self.weights, shapes=self.shapes, dtypes=self.dtypes, buffers=buffers, reads=reads
        )
        try:
            yield prefetcher
        finally:
            prefetcher.free_all()

    def _send_weight_grads(self, machine: Machine, op: ScheduleOp, grads: Gradients, prefetcher: WeightPrefetcher) -> None:
        """Send the gradients of streamed weights that are complete after an op."""
        for name in self._completed_weights[op.segment] if op.kind == "backward" else ():
            if name in grads.by_name:
                prefetcher.send_gradient(name, self._rounded(machine, name, grads))

    @cached_property
    def _completed_weights(self) -> tuple[tuple[str, ...], ...]:
        """For each segment the streamed weights with gradients that are complete after its backward."""
        weights = self.requires_grad.intersection(() if self.weights is None else self.weights.num_bytes)
        return weights_completed_per_segment(self.reads, self.liveness.differentiated, weights)
