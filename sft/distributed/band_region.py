"""All segments of a model on one band, with what is said to the other ranks in between.

The order of events is the plain region's. After a segment has run forward, other bands get the rows of its results that they read. Before
it runs back the gradients of its results are made complete: borrowed rows return to their owners, and gradients of global values are summed
over bands. The gradients of a parameter are summed over bands when the last segment that reads it has run back, while the next one does;
what is left then, and the mean over replicas, comes at the end. (Replicas have images of their own, of any size, so one is not made to
wait for another before it is through.) Rows cross while segments run, too (``crossing``).

Gradients that arrive from the caller are complete on every rank, since every rank computed its loss from the same whole outputs; they are
counted once. Those of outputs that are kept in bands are each rank's own rows.

From decisions and a layout to the region that one band runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any, cast

from sft.analysis.ir.axes import ROWS
from sft.analysis.tiling.bands import BandPartition
from sft.analysis.tiling.strips import StripSchedule, build_schedule
from sft.common.errors import UnsupportedError
from sft.distributed.all_reduce import DenseBuffer, all_reduce_buffers, queue_all_reduce
from sft.distributed.band_segments import BandSegment, BandWholeSegment, OwnedGradMask
from sft.distributed.communicator import BandMachine, RowBuffer
from sft.distributed.halo_exchange import HaloExchange, StripTimeline
from sft.distributed.merge_statistics import MERGES
from sft.distributed.ownership import OwnershipMap, assign_ownership
from sft.distributed.transport import RankGroup, Topic
from sft.planner.plan import SegmentChoice
from sft.planner.problem import PlanningProblem
from sft.planner.region_builder import build_region
from sft.runtime.machine import Buffer, Gradients, Machine, ValueBindings
from sft.runtime.moves import ScheduleOp
from sft.runtime.region import Region, Tape
from sft.runtime.tiled_segment import TiledSegment
from sft.runtime.whole_segment import WholeSegment

__all__ = ["BandRegion", "BandRegionBuilder", "band_shapes"]


@dataclass(kw_only=True)
class BandRegion(Region):
    """A region of which a rank runs a band; ``shapes`` are those of its own buffers.

    Attributes:
        band: which.
        layout: who holds what.
        counts: what this rank counts of gradients that all ranks have.
        whole_shapes: shape of every value in the whole image.
        synchronized: moments that are those of all replicas together.
        num_replicas: images that are worked on at once; parameters get the mean of their gradients.
        strip_timelines: of each segment in strips.
        together: a context for the backward pass, which fails on all ranks or on none.
    """

    band: int
    layout: OwnershipMap
    counts: OwnedGradMask
    whole_shapes: Mapping[str, tuple[int, ...]]
    synchronized: frozenset[str] = frozenset()
    num_replicas: int = 1
    strip_timelines: tuple[StripTimeline | None, ...] = ()
    together: Any = field(default=nullcontext, repr=False)

    def output_shape(self, name: str) -> tuple[int, ...]:
        if name not in self.layout.kept_in_bands:
            return super().output_shape(name)
        return self.graph.axes.with_extent(self.whole_shapes[name], ROWS, len(self.layout.held[name].own[self.band]))

    # -- forward ----------------------------------------------------------------------------------------------------

    def forward(
        self, machine: Machine, given: Mapping[str, Buffer], *, keep: bool, hosts: Mapping[str, Buffer] | None = None
    ) -> tuple[dict[str, Buffer], Tape]:
        outputs, tape = super().forward(machine, given, keep=keep, hosts=hosts)
        own = cast(BandMachine, machine)
        self._crossing.end(own)
        for name in [name for name in outputs if name in self.layout.kept_in_bands]:
            held = self.layout.held[name]
            if held.rows[self.band] != held.own[self.band]:
                value = self._rows(name, outputs[name])
                part = machine.allocate(self.output_shape(name), self.dtypes[name], zero=False, contiguous=name in self.contiguous)
                own.copy(part, value.view(machine, held.own[self.band]))
                outputs[name] = part
        return outputs, tape

    def _run_forward(self, machine: Machine, values: ValueBindings, kept: dict[int, Any] | None, move: ScheduleOp) -> None:
        with self._crossing.forward(cast(BandMachine, machine), move.segment, values.by_name):
            super()._run_forward(machine, values, kept, move)

    @cached_property
    def _crossing(self) -> HaloExchange:
        """What goes between this band and others."""
        return HaloExchange(
            band=self.band,
            layout=self.layout,
            strip_timelines=self.strip_timelines,
            reads=self.liveness.reads_from_outside,
            makes=self.writes,
            returned=self._returned,
            rows=lambda name, handle, is_gradient: self._grad_rows(name, handle) if is_gradient else self._rows(name, handle),
        )

    @property
    def _returned(self) -> dict[str, int]:
        """Of values whose borrowed rows' gradients return beside strips the segment that adds to these last."""
        names = (name for name, held in self.layout.held.items() if held.lent and not held.is_whole)
        last = ((name, self._last_contribution(name)) for name in names)
        return {name: index for name, index in last if index is not None and self.strip_timelines[index] is not None}

    def _last_contribution(self, name: str) -> int | None:
        """The segment that adds to a value's gradient last: the first of those that read it."""
        readers = (
            index for index, reads in enumerate(self.liveness.reads_from_outside) if name in reads and self.liveness.differentiated[index]
        )
        return next(readers, None)

    def _grad_rows(self, name: str, handle: Buffer) -> RowBuffer:
        """This band's buffer of a value's gradient; what differentiates on whole tensors makes it in a layout of its own."""
        readers = (segment for segment, reads in zip(self.segments, self.liveness.reads_from_outside, strict=True) if name in reads)
        rows = self._rows(name, handle)
        is_dense = rows.is_dense and not any(isinstance(reader, WholeSegment) for reader in readers)
        return replace(rows, dtype=self.grad_dtypes[name], is_dense=is_dense)

    def _rows(self, name: str, handle: Buffer) -> RowBuffer:
        """This band's buffer of a value."""
        axes, shape = self.graph.axes, self.whole_shapes[name]
        is_contiguous = name in self.contiguous or len(shape) not in (4, 5)
        lead = prod(shape[: len(shape) - axes.count]) if is_contiguous else shape[0]
        held = self.layout.held[name]
        return RowBuffer(
            handle=handle,
            first_row=held.rows[self.band].start,
            shape=shape,
            dtype=self.dtypes[name],
            axes=axes,
            is_dense=lead == 1 and not held.is_whole,  # others made those, in a layout of their own
        )

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
        context: AbstractContextManager[Any] = self.together()
        with context:
            arriving = {name: self._arriving(machine, name, grad) for name, grad in output_grads.items()}
            del output_grads
            return super().backward(machine, tape, arriving, sinks=sinks, consume=consume)

    def _arriving(self, machine: Machine, name: str, grad: Buffer) -> Buffer:
        """The gradient of an output, laid out as this band holds the output."""
        held = self.layout.held.get(name)
        if name not in self.layout.kept_in_bands or held is None or held.rows[self.band] == held.own[self.band]:
            return grad
        wide = machine.allocate(self.shapes[name], self.grad_dtypes[name], zero=True)
        machine.add(self._rows(name, wide).view(machine, held.own[self.band]), grad)
        return wide

    def _allocate_accumulators(self, machine: Machine, index: int, values: ValueBindings, grads: Gradients, borrowed: set[str]) -> None:
        arriving = [n for n in self.reads[index] if n in borrowed and n not in self.writes[index] and n in self.requires_grad]
        super()._allocate_accumulators(machine, index, values, grads, borrowed)
        for name in arriving:
            if name not in self.layout.kept_in_bands:
                self.counts.apply(machine, name, grads.by_name[name], self.graph.axes)

    def _run_backward(
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
        own, is_run = cast(BandMachine, machine), self.liveness.differentiated[index]
        if is_run:
            for name in self.writes[index]:
                if name in grads.by_name and name in self.requires_grad and name not in borrowed:
                    self._complete(machine, name, grads.by_name[name])
                    if name in self.synchronized:
                        self._synchronize(machine, name, grads.by_name[name], values.by_name[name])
        with self._crossing.backward(own, index, grads.by_name, is_run=is_run):
            table = self.strip_timelines[index]
            if is_run and table is not None:
                complete = {name: grads.by_name[name] for name in self._grads_to_reduce[index] if name in grads.by_name}
                queue_all_reduce(own, self._wholes(complete), "band", "parameters", num_strips=table.num_strips)
                del complete
            super()._run_backward(machine, values, kept, grads, index, borrowed, waiting, consume)

    def _complete(self, machine: Machine, name: str, handle: Buffer) -> None:
        """Make a gradient complete where it is needed: in the owner's rows, or everywhere."""
        held = self.layout.held.get(name)
        own = cast(BandMachine, machine)
        if held is not None:
            if held.lent and name not in self._crossing.returned:
                sends = {t.target: t.rows for t in held.lent if t.source == self.band}
                receives = {t.source: t.rows for t in held.lent if t.target == self.band}
                own.comm.exchange(own, self._grad_rows(name, handle), sends, receives, adds=True)
            if held.is_summed and held.is_whole:
                mine = held.own[self.band]
                others = range(len(held.own))
                sends = {band: mine for band in others if band != self.band and mine}
                receives = {band: held.own[band] for band in others if band != self.band and held.own[band]}
                own.comm.exchange(own, self._grad_rows(name, handle), sends, receives, adds=False)
        elif name in self.layout.summed and name not in self.synchronized:
            self._sum(machine, {name: handle}, "band", "globals")

    def _synchronize(self, machine: Machine, name: str, handle: Buffer, moments: Buffer) -> None:
        """The gradient of moments over all replicas' images, as that of moments over this one's."""
        own = cast(BandMachine, machine)
        if name not in self.layout.summed and not self.counts.is_first:
            machine.fill(handle, 0.0)
        self._sum(machine, {name: handle}, "mesh", "globals")
        node = self.graph[name]
        num_elements = prod(self.whole_shapes[node.operands[0]]) // node.argument("groups")
        own.scale(handle, own.synchronized_share(moments, num_elements))

    def _sum(self, machine: Machine, handles: Mapping[str, Buffer], over: RankGroup, topic: Topic, factor: float = 1.0) -> None:
        all_reduce_buffers(cast(BandMachine, machine), self._wholes(handles), over, topic, factor=factor)

    def _wholes(self, handles: Mapping[str, Buffer]) -> list[DenseBuffer]:
        """Gradients of whole values, to be summed."""
        return [
            DenseBuffer(handle=handle, num_elements=prod(self.whole_shapes[name]), dtype=self.grad_dtypes[name])
            for name, handle in handles.items()
        ]

    @cached_property
    def _grads_to_reduce(self) -> dict[int, tuple[str, ...]]:
        """For each segment in strips that runs back the parameters whose gradients are complete when it begins, and were not before."""
        last = {
            node.name: self._last_contribution(node.name)
            for node in self.graph.nodes
            if node.name in self.liveness.leaves & self.requires_grad and node.name not in self.graph.inputs
        }
        found, complete = {}, list[str]()
        for index in reversed(range(len(self.segments))):
            if self.liveness.differentiated[index] and self.strip_timelines[index] is not None:
                found[index], complete = tuple(complete), []
            complete += [name for name, segment in last.items() if segment == index]
        return found

    def _complete_leaves(self, machine: Machine, grads: Gradients) -> None:
        self._crossing.end(cast(BandMachine, machine))
        found = {
            node.name: grads.by_name[node.name] for node in self.graph.nodes if node.name in self.liveness.leaves & grads.by_name.keys()
        }
        inputs = set(self.graph.inputs)
        for name in [name for name in found if name in inputs]:
            self._complete(machine, name, found[name])
        weights = {name: handle for name, handle in found.items() if name not in inputs}
        summed = {name for names in self._grads_to_reduce.values() for name in names}
        self._sum(machine, {name: handle for name, handle in weights.items() if name not in summed}, "band", "parameters")
        self._sum(machine, weights, "replica", "parameters", 1 / self.num_replicas)


def band_shapes(region: Region, layout: OwnershipMap, band: int) -> dict[str, tuple[int, ...]]:
    """Shape of every value as a band holds it."""
    axes = region.graph.axes
    shapes = dict(region.shapes)
    for name, held in layout.held.items():
        if not held.is_whole:
            shapes[name] = axes.with_extent(shapes[name], ROWS, len(held.rows[band]))
    return shapes


class BandRegionBuilder:
    """The same decisions for every band of an image.

    Args:
        problem: what is planned.
        choices: the decisions.
        shares: who owns which rows.
        outputs_in_bands: whether outputs that are images stay where they are made.
        num_replicas: images that are worked on at once.
        synchronized: global values that are those of all replicas together.
    """

    def __init__(
        self,
        problem: PlanningProblem,
        choices: Sequence[SegmentChoice],
        shares: BandPartition,
        *,
        outputs_in_bands: bool = False,
        num_replicas: int = 1,
        synchronized: frozenset[str] = frozenset(),
    ) -> None:
        self.problem, self.choices = problem, tuple(choices)
        self.num_replicas, self.synchronized = num_replicas, synchronized
        self.layout: OwnershipMap = assign_ownership(problem, choices, shares, outputs_in_bands=outputs_in_bands)
        self._whole = build_region(problem, choices)
        _check_reductions(problem)

    def region(self, band: int, together: Callable[[], Any] = nullcontext) -> BandRegion:
        """What a band runs; no program is lowered before it is needed."""
        problem, layout, whole = self.problem, self.layout, self._whole
        summed = {name: held for name, held in layout.held.items() if held.is_summed}
        counts = OwnedGradMask(
            own={name: held.own[band] for name, held in summed.items()},
            extents={name: problem.extent(name, ROWS) for name in summed},
            summed=layout.summed,
            is_first=band == 0,
        )
        segments: list[BandSegment | BandWholeSegment] = [
            self._tiled(index, segment, band) if isinstance(segment, TiledSegment) else _band_whole_segment(segment, counts)
            for index, segment in enumerate(whole.segments)
        ]
        return BandRegion(
            graph=whole.graph,
            segments=segments,
            reads=whole.reads,
            writes=whole.writes,
            shapes=band_shapes(whole, layout, band),
            dtypes=whole.dtypes,
            grad_dtypes=whole.grad_dtypes,
            requires_grad=whole.requires_grad,
            outputs=whole.outputs,
            contiguous=whole.contiguous,
            from_source=whole.from_source,
            host_outputs=whole.host_outputs,
            custom_schedule=whole.custom_schedule,
            band=band,
            layout=layout,
            counts=counts,
            whole_shapes=problem.shapes,
            synchronized=self.synchronized,
            num_replicas=self.num_replicas,
            strip_timelines=tuple(segment.timetable if isinstance(segment, BandSegment) else None for segment in segments),
            together=together,
        )

    def likeness(self, region: BandRegion) -> object:
        """What bands of equal cost have in common: the strips of their segments, what they hold, and what they send and receive."""
        layout, band = self.layout, region.band
        schedules = [segment.schedule for segment in region.segments if isinstance(segment, BandSegment)]
        strips = tuple(schedule.structural_hash() for schedule in schedules if isinstance(schedule, StripSchedule))
        crossing = tuple(
            (
                len(held.rows[band]),
                len(held.own[band]),
                tuple(
                    (len(t.rows), t.rows.start - held.own[band].start, t.source == band, t.source < t.target)
                    for t in (*held.borrowed, *held.lent)
                    if band in (t.source, t.target)
                ),
            )
            for held in layout.held.values()
        )
        return strips, crossing

    def _tiled(self, index: int, segment: TiledSegment, band: int) -> BandSegment:
        problem, layout, choice = self.problem, self.layout, self.choices[index]
        parts = layout.bands[index]
        assert parts is not None
        phases, graph = problem.phases, problem.graph
        schedule = build_schedule(graph, choice.nodes, phases.rows, phases.streamed, problem.extents(ROWS), choice.strip_rows, parts[band])
        # The bands' programs depend on nothing but this, and on the signatures of their strips.
        lowered = replace(choice, strip_rows=0, state_every=1, state_slots=0, restart=False)
        return BandSegment(
            scope=segment.scope,
            schedule=schedule,
            panels=segment.panels,
            checkpoints=segment.checkpoints,
            restart=segment.restart,
            num_batch=segment.num_batch,
            sides=segment.sides,
            from_source=segment.from_source,
            to_host=segment.to_host,
            contiguous=segment.contiguous,
            first_rows={name: held.rows[band].start for name, held in layout.held.items()},
            synchronized=self.synchronized,
            shared=problem.memoize(("programs of bands", lowered, segment.scope.outputs), dict),
        )


def _band_whole_segment(segment: Any, counts: OwnedGradMask) -> BandWholeSegment:
    """A segment on whole tensors with the plain one's programs."""
    return BandWholeSegment(
        scope=segment.scope,
        step=segment.step,
        sides=segment.sides,
        from_source=segment.from_source,
        counts=counts,
        _programs=segment._programs,
    )


def _check_reductions(problem: PlanningProblem) -> None:
    """Refuse reductions over the image that bands cannot merge.

    Raises:
        UnsupportedError: there is one.
    """
    rows = problem.phases.rows
    unknown = [node for node in problem.graph.operators if rows[node.name].role == "reduce" and rows[node.name].name not in MERGES]
    if unknown:
        raise UnsupportedError([f"{node.label}: bands cannot merge what they reduce; leave out mesh" for node in unknown])
