"""Running all segments of a model in order, and back.

Cuts (the values between segments) are whole buffers. In the plain order a cut lives from the segment that makes it to the backward pass of
the first segment that reads it, since that one recomputes from it; in another (``sft.runtime.moves``) it may go and be made again. Its
gradient lives from the backward pass of its last reader to that of its maker. Nothing outside is touched before the end: outputs, gradients
of inputs and of parameters are buffers of the region's own. Where the order says so, a cut, or what a segment kept, waits on the host for
its next reader (``sft.runtime.offload``).

A *streamed* cut is never whole on the device, nor is its gradient: to the segment that makes it it is an output that leaves strip by
strip, to those that read it an input that is not resident.

*Streamed* weights are on the device around the moves that read them, and their gradients leave one by one
(``sft.runtime.weight_prefetch``).

An output on the host that leaves its segment strip by strip (``to_host``) has no buffer here. Any other output on the host (small, made on
whole tensors, or read by later segments) is a cut that is copied when its segment is done; its gradient is loaded before the backward
pass of the last segment that has to do with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from sft.analysis.ir.graph import Graph
from sft.runtime.liveness import Liveness, Segment
from sft.runtime.machine import Buffer, Gradients, Machine, ValueBindings
from sft.runtime.moves import LOSS_OP, ScheduleOp, SegmentSchedule, default_schedule
from sft.runtime.offload import OffloadState
from sft.runtime.tiled_segment import TiledSegment
from sft.runtime.weight_prefetch import StreamedWeights, WeightPrefetcher, weights_completed_per_segment, weights_read_per_op

__all__ = ["Region", "Tape"]


@dataclass(slots=True)
class Tape:
    """What a forward pass leaves for the backward pass: cuts, by segment its own (row stores, or saved tensors), what of these has a
    copy on the host, and handles on streamed weights, of no bytes."""

    values: ValueBindings = field(default_factory=ValueBindings)
    kept: dict[int, Any] = field(default_factory=dict)
    copies: OffloadState = field(default_factory=OffloadState)
    weights: dict[str, Buffer] = field(default_factory=dict)


@dataclass(kw_only=True)
class Region:
    """A model cut into segments.

    Attributes:
        graph: the model.
        segments: in order.
        reads: for each segment the values it takes from outside: sources and side tensors.
        makes: for each segment the values that others, or the caller, need.
        shapes: shape of every value for this input.
        dtypes: element type of every value (``torch.dtype``).
        grad_dtypes: element type in which its gradient is summed up; a parameter's is rounded to the parameter's type at the end.
        requires_grad: values that need a gradient.
        outputs: the model's outputs, each once.
        contiguous: outputs that are laid out channels first.
        from_source: inputs that are read while walks run; their handles are sources, their gradients go to sinks.
        host_outputs: outputs that are on the host, with their gradients.
        streamed: cuts that are on the host, with their gradients.
        order: the moves of a step with a backward pass; ``None`` for the plain ones. A segment whose outputs leave strip by strip
            runs forward once.
        weights: the parameters that are streamed; ``None`` where all are resident.
    """

    graph: Graph
    segments: Sequence[Segment]
    reads: Sequence[tuple[str, ...]]
    makes: Sequence[tuple[str, ...]]
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, Any]
    grad_dtypes: Mapping[str, Any]
    requires_grad: frozenset[str]
    outputs: tuple[str, ...]
    contiguous: frozenset[str]
    from_source: frozenset[str] = frozenset()
    host_outputs: frozenset[str] = frozenset()
    streamed: frozenset[str] = frozenset()
    order: SegmentSchedule | None = None
    weights: StreamedWeights | None = None

    def forward(
        self, machine: Machine, given: Mapping[str, Buffer], *, keep: bool, hosts: Mapping[str, Buffer] | None = None
    ) -> tuple[dict[str, Buffer], Tape]:
        """Compute the outputs from inputs, parameters and buffers.

        Args:
            machine: what runs the programs.
            given: handles of inputs, parameters and buffers by value name.
            keep: whether a backward pass follows.
            hosts: what takes the outputs that are on the host; it is returned in their place.
        """
        tape, hosts = Tape(ValueBindings(dict(given))), hosts or {}
        outputs: dict[str, Buffer] = {name: given[name] for name in self.outputs if name in given}
        outputs.update({name: hosts[name] for name in self.host_outputs})
        moves = self.moves if keep else default_schedule(len(self.segments))
        moves = moves[: moves.index(LOSS_OP)]
        with self._passing(machine, moves, tape.weights) as passage:
            for place, (move, dying) in enumerate(
                zip(moves, self.lifetimes.dying if keep else self.lifetimes.forward_last_uses, strict=False)
            ):
                machine.begin(move)
                if move.is_copy:
                    self._copy(machine, tape.values, tape.kept, tape.copies, move)
                    self._drop(machine, tape.values, tape.copies, dying)
                    continue
                segment, makes = self.segments[move.segment], self.makes[move.segment]
                tape.copies.settle(machine, self.lifetimes.reads_from_outside[move.segment])
                tape.values.by_name |= {name: hosts[name] for name in segment.to_host - self.streamed}
                if passage is not None:
                    passage.enter(place, tape.values.by_name)
                self._run_forward(machine, tape.values, tape.kept if keep else None, move)
                outputs |= {name: tape.values.by_name[name] for name in makes if name in self.outputs and name not in self.host_outputs}
                for name in makes:
                    if name in self.host_outputs - segment.to_host:
                        machine.put(hosts[name], tape.values.by_name[name])
                if passage is not None:
                    passage.leave(place)
                self._drop(machine, tape.values, tape.copies, dying)
        if keep:
            machine.begin(LOSS_OP)
        return outputs, tape

    def run_unskipped(self) -> Region:
        """The region without strips being left out: a slab for copies is laid out for what each strip leaves behind."""
        tiled = [replace(each, skips_repeats=False) if isinstance(each, TiledSegment) else each for each in self.segments]
        return replace(self, segments=tiled)

    def output_shape(self, name: str) -> tuple[int, ...]:
        """Shape of an output, and of its gradient, as the caller has it."""
        return self.shapes[name]

    @cached_property
    def lifetimes(self) -> Liveness:
        """What lives from when to when."""
        return Liveness(
            graph=self.graph,
            segments=self.segments,
            reads=self.reads,
            makes=self.makes,
            requires_grad=self.requires_grad,
            outputs=self.outputs,
            streamed=self.streamed,
            moves=self.moves,
        )

    @property
    def moves(self) -> SegmentSchedule:
        """The moves of a step with a backward pass."""
        return default_schedule(len(self.segments)) if self.order is None else self.order

    def _copy(self, machine: Machine, values: ValueBindings, kept: Mapping[int, Any], copies: OffloadState, move: ScheduleOp) -> None:
        """Run a move that copies."""
        handles: Sequence[Buffer] = ()
        if move.kind == "offload":
            segment = self.segments[move.segment]
            handles = [values.by_name[move.value]] if move.value else segment.buffers(machine, kept[move.segment])
        copies.run(machine, move, handles)

    def _run_forward(self, machine: Machine, values: ValueBindings, kept: dict[int, Any] | None, move: ScheduleOp) -> None:
        """Run a segment forward; without ``kept`` no backward pass follows."""
        segment, keep = self.segments[move.segment], kept is not None and move.keep and self.lifetimes.differentiated[move.segment]
        own = segment.to_host | segment.self_allocated(keep)
        for name in self.makes[move.segment]:
            if name in self.streamed:
                values.by_name[name] = machine.host_cut(self.shapes[name], self.dtypes[name])
            elif name not in own:
                contiguous = name in self.contiguous
                values.by_name[name] = machine.allocate(self.shapes[name], self.dtypes[name], zero=False, contiguous=contiguous)
        saved = segment.forward(machine, values, keep=keep)
        if keep and kept is not None:
            kept[move.segment] = saved

    def _drop(self, machine: Machine, values: ValueBindings, copies: OffloadState, names: Sequence[str]) -> None:
        for name in names:
            values.by_name.pop(name, None)
        copies.end(machine, names)

    def backward(
        self,
        machine: Machine,
        tape: Tape,
        output_grads: Mapping[str, Buffer],
        *,
        sinks: Mapping[str, Buffer] | None = None,
        consume: bool = True,
    ) -> dict[str, Buffer]:
        """Gradients of the inputs and parameters that need one, given those of the outputs that need one (on the host where they are).

        Those of inputs that are not resident go to their ``sinks`` instead, strip by strip.
        """
        values = tape.values if consume else ValueBindings(dict(tape.values.by_name))
        kept = tape.kept if consume else dict(tape.kept)
        copies = tape.copies if consume else tape.copies.fork()
        grads, borrowed = Gradients(dict(output_grads), dict(sinks or {})), set(output_grads) - self.host_outputs
        waiting = {name for name in self.host_outputs if name in output_grads}
        turn = self.moves.index(LOSS_OP)
        self._drop(machine, values, copies, self.lifetimes.dying[turn])
        moves = self.moves[turn + 1 :]
        try:
            with self._passing(machine, moves, tape.weights) as passage:
                for place, (move, dying) in enumerate(zip(moves, self.lifetimes.dying[turn + 1 :], strict=True)):
                    machine.begin(move)
                    if move.is_copy:
                        self._copy(machine, values, kept, copies, move)
                        self._drop(machine, values, copies, dying)
                        continue
                    if passage is not None:
                        passage.enter(place, values.by_name)
                    if move.kind == "forward":
                        copies.settle(machine, self.lifetimes.reads_from_outside[move.segment])
                        self._run_forward(machine, values, kept, move)
                    else:
                        own = f"{move.segment}+"
                        copies.settle(machine, (*self.lifetimes.backward_reads[move.segment], own))
                        copies.end(machine, (own,))  # before it runs, as it frees what was kept piece by piece
                        is_last = consume or move.segment not in tape.kept
                        self._run_back(machine, values, kept, grads, move.segment, borrowed, waiting, is_last)
                    if passage is not None:
                        self._hand_over(machine, move, grads, passage)
                        passage.leave(place)
                    self._drop(machine, values, copies, dying)
            self._complete_leaves(machine, grads)
        finally:
            copies.restore(machine)
        found: dict[str, Buffer] = {}
        for name in [name for name in grads.by_name if name in self.lifetimes.leaves]:
            found[name] = self._rounded(machine, name, grads)
        return found

    def _rounded(self, machine: Machine, name: str, grads: Gradients) -> Buffer:
        """The gradient of a leaf, which is not added to any more, in the leaf's own type."""
        handle = grads.by_name.pop(name)
        return handle if self.grad_dtypes[name] == self.dtypes[name] else machine.cast(handle, self.shapes[name], self.dtypes[name])

    @contextmanager
    def _passing(self, machine: Machine, moves: SegmentSchedule, handles: dict[str, Buffer]) -> Iterator[WeightPrefetcher | None]:
        """The streamed weights of a pass over these moves; ``None`` where there are none."""
        if self.weights is None:
            yield None
            return
        backward_reads = self.lifetimes.backward_reads if any(move.kind == "backward" for move in moves) else self.reads
        reads = weights_read_per_op(moves, self.lifetimes.reads_from_outside, backward_reads, self.weights.num_bytes)
        passage = WeightPrefetcher(
            machine=machine, weights=self.weights, shapes=self.shapes, dtypes=self.dtypes, handles=handles, reads=reads
        )
        try:
            yield passage
        finally:
            passage.end()

    def _hand_over(self, machine: Machine, move: ScheduleOp, grads: Gradients, passage: WeightPrefetcher) -> None:
        """Have the gradients of streamed weights taken that are whole behind a move."""
        for name in self._completed[move.segment] if move.kind == "backward" else ():
            if name in grads.by_name:
                passage.take(name, self._rounded(machine, name, grads))

    @cached_property
    def _completed(self) -> tuple[tuple[str, ...], ...]:
        """For each segment the streamed weights whose gradients are whole when it has run back."""
        weights = self.requires_grad.intersection(() if self.weights is None else self.weights.num_bytes)
        return weights_completed_per_segment(self.reads, self.lifetimes.differentiated, weights)

    def _complete_leaves(self, machine: Machine, grads: Gradients) -> None:
        """Hear that all gradients of inputs and parameters are there that this process can compute."""

    def _run_back(
        self,
        machine: Machine,
        values: ValueBindings,
        kept: dict[int, Any],
        grads: Gradients,
        index: int,
        borrowed: set[str],
        waiting: set[str],
        consume: bool,
    ) -> None:
        """Run a segment back; with ``consume`` what it kept is used up."""
        segment, saved = self.segments[index], kept.pop(index, None)
        if self.lifetimes.differentiated[index]:
            for name in self.makes[index]:
                if name not in self.requires_grad:
                    continue
                if name in waiting - segment.to_host:
                    self._load_gradient(machine, name, values, grads, waiting)
                elif name in self.streamed:
                    self._make_host_gradient(machine, name, grads)
                elif name not in grads.by_name:
                    grads.by_name[name] = machine.zeros_like(values.by_name.get(name), self.shapes[name], self.grad_dtypes[name])
            for name in self.reads[index]:
                if name in waiting and name not in self.makes[index]:
                    self._load_gradient(machine, name, values, grads, waiting)
            self._make_accumulators(machine, index, values, grads, borrowed)
            segment.backward(machine, values, saved, grads, consume=consume)
        del saved
        for name in self.makes[index]:
            grads.by_name.pop(name, None)
            if name in self.streamed:
                grads.sinks.pop(name, None)

    def _make_host_gradient(self, machine: Machine, name: str, grads: Gradients) -> None:
        """Room for the gradient of a streamed cut, which its readers add to and its maker fetches from."""
        if name not in grads.by_name:
            grads.by_name[name] = grads.sinks[name] = machine.host_gradient(self.shapes[name], self.grad_dtypes[name])

    def _load_gradient(self, machine: Machine, name: str, values: ValueBindings, grads: Gradients, waiting: set[str]) -> None:
        """Bring the gradient of an output from the host: all of it, to be added to."""
        own = machine.zeros_like(values.by_name.get(name), self.shapes[name], self.grad_dtypes[name])
        machine.fetch(grads.by_name[name], own)
        grads.by_name[name] = own
        waiting.discard(name)

    def _make_accumulators(self, machine: Machine, index: int, values: ValueBindings, grads: Gradients, borrowed: set[str]) -> None:
        """Zeros to add to, where strips add to them.

        The gradient of an output that is read inside too is the caller's: it is copied before anything is added.
        """
        segment = self.segments[index]
        for name in self.reads[index]:
            if name in borrowed and name not in self.makes[index] and name in self.requires_grad:
                own = machine.zeros_like(values.by_name.get(name), self.shapes[name], self.grad_dtypes[name])
                machine.add(own, grads.by_name[name])
                grads.by_name[name] = own
                borrowed.discard(name)
                del own
            if name not in self.requires_grad or name in grads.by_name or name in self.from_source:
                continue
            if name in self.streamed:
                self._make_host_gradient(machine, name, grads)
            elif segment.accumulates:
                handle = values.by_name[name]
                grads.by_name[name] = machine.zeros_like(handle, self.shapes[name], self.grad_dtypes[name])
                del handle
