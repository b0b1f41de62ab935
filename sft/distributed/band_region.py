"""All segments of a model on one band, with the communication between them.

The order of events is that of a plain region:

- After a segment has run forward, other bands receive the halo rows that they read of its results.
- Before a segment runs backward, the gradients of its results are completed: gradients of halo rows return to the owners, and gradients of
  global values are summed over bands.
- The gradients of a parameter are summed over bands when the last segment that reads it has run backward, while the next segment runs. The
  remaining sums, and the mean over replicas, follow at the end. (Replicas have images of different sizes, so none waits for another
  before its own step is done.)

Rows are also exchanged while segments run (`halo_exchange`).

Gradients from the caller are complete on every rank, since every rank computed its loss from the same complete outputs; they are counted
once. Gradients of outputs that are kept in bands are each rank's own rows.

`BandRegionBuilder` builds the region of each band from the planner's decisions.
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
    """A region of which a rank runs one band; ``shapes`` are those of the band's buffers.

    Attributes:
        band: index of the band.
        ownership: row ownership of the values between segments.
        grad_mask: the part of replicated gradients that this rank counts.
        image_shapes: shape of every value in the full image.
        synchronized: moments that are merged over all replicas.
        num_replicas: images that are processed at once; parameters get the mean of their gradients.
        strip_timelines: timeline of each segment in strips.
        collective: context of the backward pass, which fails on all ranks or on none.
    """

    band: int
    ownership: OwnershipMap
    grad_mask: OwnedGradMask
    image_shapes: Mapping[str, tuple[int, ...]]
    synchronized: frozenset[str] = frozenset()
    num_replicas: int = 1
    strip_timelines: tuple[StripTimeline | None, ...] = ()
    collective: Any = field(default=nullcontext, repr=False)

    def output_shape(self, name: str) -> tuple[int, ...]:
        if name not in self.ownership.kept_in_bands:
            return super().output_shape(name)
        return self.graph.axes.with_extent(self.image_shapes[name], ROWS, len(self.ownership.values[name].owned_rows[self.band]))

    def forward(
        self, machine: Machine, leaves: Mapping[str, Buffer], *, keep: bool, hosts: Mapping[str, Buffer] | None = None
    ) -> tuple[dict[str, Buffer], Tape]:
        outputs, tape = super().forward(machine, leaves, keep=keep, hosts=hosts)
        band_machine = cast(BandMachine, machine)
        self._halo_exchange.end(band_machine)
        for name in [name for name in outputs if name in self.ownership.kept_in_bands]:
            row_ownership = self.ownership.values[name]
            if row_ownership.buffer_rows[self.band] != row_ownership.owned_rows[self.band]:
                value = self._row_buffer(name, outputs[name])
                output = machine.allocate(self.output_shape(name), self.dtypes[name], zero=False, contiguous=name in self.contiguous)
                band_machine.copy(output, value.view(machine, row_ownership.owned_rows[self.band]))
                outputs[name] = output
        return outputs, tape

    def _run_forward(
        self, machine: Machine, values: ValueBindings, kept: dict[int, Any] | None, move: ScheduleOp, dead: Sequence[str] = ()
    ) -> None:
        with self._halo_exchange.forward(cast(BandMachine, machine), move.segment, values.by_name):
            super()._run_forward(machine, values, kept, move)

    @cached_property
    def _halo_exchange(self) -> HaloExchange:
        """Exchange of halo rows with the other bands."""
        return HaloExchange(
            band=self.band,
            ownership=self.ownership,
            strip_timelines=self.strip_timelines,
            reads=self.liveness.reads_from_outside,
            writes=self.writes,
            last_contributors=self._last_contributors,
            row_buffer=lambda name, handle, is_gradient: (
                self._grad_row_buffer(name, handle) if is_gradient else self._row_buffer(name, handle)
            ),
        )

    @property
    def _last_contributors(self) -> dict[str, int]:
        """For values with gradients of halo rows that return between strips, the segment that adds to them last."""
        names = (
            name
            for name, row_ownership in self.ownership.values.items()
            if row_ownership.grad_transfers and not row_ownership.is_replicated
        )
        last = ((name, self._last_contributor(name)) for name in names)
        return {name: index for name, index in last if index is not None and self.strip_timelines[index] is not None}

    def _last_contributor(self, name: str) -> int | None:
        """The segment that adds to a value's gradient last: the first that reads it."""
        readers = (
            index for index, reads in enumerate(self.liveness.reads_from_outside) if name in reads and self.liveness.differentiated[index]
        )
        return next(readers, None)

    def _grad_row_buffer(self, name: str, handle: Buffer) -> RowBuffer:
        """This band's buffer of a value's gradient. Untiled segments compute it in a memory layout of their own."""
        readers = (segment for segment, reads in zip(self.segments, self.liveness.reads_from_outside, strict=True) if name in reads)
        rows = self._row_buffer(name, handle)
        is_dense = rows.is_dense and not any(isinstance(reader, WholeSegment) for reader in readers)
        return replace(rows, dtype=self.grad_dtypes[name], is_dense=is_dense)

    def _row_buffer(self, name: str, handle: Buffer) -> RowBuffer:
        """This band's buffer of a value."""
        axes, shape = self.graph.axes, self.image_shapes[name]
        is_contiguous = name in self.contiguous or len(shape) not in (4, 5)
        lead = prod(shape[: len(shape) - axes.count]) if is_contiguous else shape[0]
        row_ownership = self.ownership.values[name]
        return RowBuffer(
            handle=handle,
            first_row=row_ownership.buffer_rows[self.band].start,
            shape=shape,
            dtype=self.dtypes[name],
            axes=axes,
            is_dense=lead == 1 and not row_ownership.is_replicated,  # those come in another memory layout
        )

    def backward(
        self,
        machine: Machine,
        tape: Tape,
        output_grads: Mapping[str, Buffer],
        *,
        sinks: Mapping[str, Buffer] | None = None,
        consume: bool = True,
    ) -> dict[str, Buffer]:
        context: AbstractContextManager[Any] = self.collective()
        with context:
            arriving = {name: self._buffer_grad(machine, name, grad) for name, grad in output_grads.items()}
            del output_grads
            return super().backward(machine, tape, arriving, sinks=sinks, consume=consume)

    def _buffer_grad(self, machine: Machine, name: str, grad: Buffer) -> Buffer:
        """The gradient of an output, extended to the rows of this band's buffer."""
        row_ownership = self.ownership.values.get(name)
        if (
            name not in self.ownership.kept_in_bands
            or row_ownership is None
            or row_ownership.buffer_rows[self.band] == row_ownership.owned_rows[self.band]
        ):
            return grad
        wide = machine.allocate(self.shapes[name], self.grad_dtypes[name], zero=True)
        machine.add(self._row_buffer(name, wide).view(machine, row_ownership.owned_rows[self.band]), grad)
        return wide

    def _allocate_accumulators(self, machine: Machine, index: int, values: ValueBindings, grads: Gradients, borrowed: set[str]) -> None:
        arriving = [n for n in self.reads[index] if n in borrowed and n not in self.writes[index] and n in self.requires_grad]
        super()._allocate_accumulators(machine, index, values, grads, borrowed)
        for name in arriving:
            if name not in self.ownership.kept_in_bands:
                self.grad_mask.apply(machine, name, grads.by_name[name], self.graph.axes)

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
        band_machine, is_run = cast(BandMachine, machine), self.liveness.differentiated[index]
        if is_run:
            for name in self.writes[index]:
                if name in grads.by_name and name in self.requires_grad and name not in borrowed:
                    self._complete_grad(machine, name, grads.by_name[name])
                    if name in self.synchronized:
                        self._synchronize(machine, name, grads.by_name[name], values.by_name[name])
        with self._halo_exchange.backward(band_machine, index, grads.by_name, is_run=is_run):
            timeline = self.strip_timelines[index]
            if is_run and timeline is not None:
                complete = {name: grads.by_name[name] for name in self._grads_to_reduce[index] if name in grads.by_name}
                queue_all_reduce(band_machine, self._dense_buffers(complete), num_strips=timeline.num_strips)
                del complete
            super()._run_backward(machine, values, kept, grads, index, borrowed, waiting, consume)

    def _complete_grad(self, machine: Machine, name: str, handle: Buffer) -> None:
        """Complete a gradient in the owner's rows or, of a replicated value, in all rows."""
        row_ownership = self.ownership.values.get(name)
        band_machine = cast(BandMachine, machine)
        if row_ownership is not None:
            if row_ownership.grad_transfers and name not in self._halo_exchange.last_contributors:
                sends = {t.target: t.rows for t in row_ownership.grad_transfers if t.source == self.band}
                receives = {t.source: t.rows for t in row_ownership.grad_transfers if t.target == self.band}
                band_machine.comm.exchange(band_machine, self._grad_row_buffer(name, handle), sends, receives, adds=True)
            if row_ownership.is_summed and row_ownership.is_replicated:
                owned = row_ownership.owned_rows[self.band]
                bands = range(len(row_ownership.owned_rows))
                sends = {band: owned for band in bands if band != self.band and owned}
                receives = {band: row_ownership.owned_rows[band] for band in bands if band != self.band and row_ownership.owned_rows[band]}
                band_machine.comm.exchange(band_machine, self._grad_row_buffer(name, handle), sends, receives, adds=False)
        elif name in self.ownership.summed and name not in self.synchronized:
            self._all_reduce(machine, {name: handle}, "band", "globals")

    def _synchronize(self, machine: Machine, name: str, handle: Buffer, moments: Buffer) -> None:
        """Convert the gradient of moments over all replicas' images to that of moments over this image."""
        band_machine = cast(BandMachine, machine)
        if name not in self.ownership.summed and not self.grad_mask.is_first:
            machine.fill(handle, 0.0)
        self._all_reduce(machine, {name: handle}, "mesh", "globals")
        node = self.graph[name]
        num_elements = prod(self.image_shapes[node.operands[0]]) // node.argument("groups")
        band_machine.scale(handle, band_machine.synchronized_share(moments, num_elements))

    def _all_reduce(self, machine: Machine, handles: Mapping[str, Buffer], over: RankGroup, topic: Topic, factor: float = 1.0) -> None:
        """All-reduce gradients of untiled values."""
        all_reduce_buffers(cast(BandMachine, machine), self._dense_buffers(handles), over, topic, factor=factor)

    def _dense_buffers(self, handles: Mapping[str, Buffer]) -> list[DenseBuffer]:
        """Gradients of untiled values as dense buffers."""
        return [
            DenseBuffer(handle=handle, num_elements=prod(self.image_shapes[name]), dtype=self.grad_dtypes[name])
            for name, handle in handles.items()
        ]

    @cached_property
    def _grads_to_reduce(self) -> dict[int, tuple[str, ...]]:
        """For each segment in strips that runs backward, the parameters with gradients that became complete just before it."""
        last = {
            node.name: self._last_contributor(node.name)
            for node in self.graph.nodes
            if node.name in self.liveness.leaves & self.requires_grad and node.name not in self.graph.inputs
        }
        by_segment, complete = dict[int, tuple[str, ...]](), list[str]()
        for index in reversed(range(len(self.segments))):
            if self.liveness.differentiated[index] and self.strip_timelines[index] is not None:
                by_segment[index], complete = tuple(complete), []
            complete += [name for name, segment in last.items() if segment == index]
        return by_segment

    def _complete_leaves(self, machine: Machine, grads: Gradients) -> None:
        """Complete the gradients of inputs and parameters at the end of the backward pass."""
        self._halo_exchange.end(cast(BandMachine, machine))
        leaf_grads = {
            node.name: grads.by_name[node.name] for node in self.graph.nodes if node.name in self.liveness.leaves & grads.by_name.keys()
        }
        inputs = set(self.graph.inputs)
        for name in [name for name in leaf_grads if name in inputs]:
            self._complete_grad(machine, name, leaf_grads[name])
        weights = {name: handle for name, handle in leaf_grads.items() if name not in inputs}
        reduced = {name for names in self._grads_to_reduce.values() for name in names}
        self._all_reduce(machine, {name: handle for name, handle in weights.items() if name not in reduced}, "band", "parameters")
        self._all_reduce(machine, weights, "replica", "parameters", 1 / self.num_replicas)


def band_shapes(region: Region, ownership: OwnershipMap, band: int) -> dict[str, tuple[int, ...]]:
    """Shape of every value in a band's buffers."""
    axes = region.graph.axes
    shapes = dict(region.shapes)
    for name, row_ownership in ownership.values.items():
        if not row_ownership.is_replicated:
            shapes[name] = axes.with_extent(shapes[name], ROWS, len(row_ownership.buffer_rows[band]))
    return shapes


class BandRegionBuilder:
    """Regions of all bands of an image, from the same decisions.

    Args:
        problem: the planning problem.
        choices: the decisions.
        partition: rows of each band.
        outputs_in_bands: True if outputs that are images stay on the ranks that compute them.
        num_replicas: images that are processed at once.
        synchronized: global values that are merged over all replicas.
    """

    def __init__(
        self,
        problem: PlanningProblem,
        choices: Sequence[SegmentChoice],
        partition: BandPartition,
        *,
        outputs_in_bands: bool = False,
        num_replicas: int = 1,
        synchronized: frozenset[str] = frozenset(),
    ) -> None:
        self.problem, self.choices = problem, tuple(choices)
        self.num_replicas, self.synchronized = num_replicas, synchronized
        self.ownership: OwnershipMap = assign_ownership(problem, choices, partition, outputs_in_bands=outputs_in_bands)
        self._whole = build_region(problem, choices)
        _check_reductions(problem)

    def region(self, band: int, collective: Callable[[], Any] = nullcontext) -> BandRegion:
        """The region of one band; programs are lowered on first use."""
        problem, ownership, plain = self.problem, self.ownership, self._whole
        summed = {name: row_ownership for name, row_ownership in ownership.values.items() if row_ownership.is_summed}
        grad_mask = OwnedGradMask(
            owned_rows={name: row_ownership.owned_rows[band] for name, row_ownership in summed.items()},
            num_rows={name: problem.sized.extent(name, ROWS) for name in summed},
            summed=ownership.summed,
            is_first=band == 0,
        )
        segments: list[BandSegment | BandWholeSegment] = [
            self._band_segment(index, segment, band) if isinstance(segment, TiledSegment) else _band_whole_segment(segment, grad_mask)
            for index, segment in enumerate(plain.segments)
        ]
        return BandRegion(
            graph=plain.graph,
            segments=segments,
            reads=plain.reads,
            writes=plain.writes,
            shapes=band_shapes(plain, ownership, band),
            dtypes=plain.dtypes,
            grad_dtypes=plain.grad_dtypes,
            requires_grad=plain.requires_grad,
            outputs=plain.outputs,
            contiguous=plain.contiguous,
            from_source=plain.from_source,
            host_outputs=plain.host_outputs,
            custom_schedule=plain.custom_schedule,
            band=band,
            ownership=ownership,
            grad_mask=grad_mask,
            image_shapes=problem.sized.shapes,
            synchronized=self.synchronized,
            num_replicas=self.num_replicas,
            strip_timelines=tuple(segment.timeline if isinstance(segment, BandSegment) else None for segment in segments),
            collective=collective,
        )

    def cost_key(self, region: BandRegion) -> object:
        """Key of a band's cost: the strips of its segments, its buffers, and its transfers."""
        ownership, band = self.ownership, region.band
        schedules = [segment.schedule for segment in region.segments if isinstance(segment, BandSegment)]
        strips = tuple(schedule.structural_hash() for schedule in schedules if isinstance(schedule, StripSchedule))
        crossing = tuple(
            (
                len(row_ownership.buffer_rows[band]),
                len(row_ownership.owned_rows[band]),
                tuple(
                    (len(t.rows), t.rows.start - row_ownership.owned_rows[band].start, t.source == band, t.source < t.target)
                    for t in (*row_ownership.halo_transfers, *row_ownership.grad_transfers)
                    if band in (t.source, t.target)
                ),
            )
            for row_ownership in ownership.values.values()
        )
        return strips, crossing

    def _band_segment(self, index: int, segment: TiledSegment, band: int) -> BandSegment:
        """The tiled segment of one band."""
        problem, ownership, choice = self.problem, self.ownership, self.choices[index]
        row_bands = ownership.bands[index]
        assert row_bands is not None
        run = problem.sized.phases.run(choice.nodes)
        schedule = build_schedule(run, problem.sized.extents(ROWS), choice.strip_rows, row_bands[band])
        # The bands' programs depend only on these fields, and on the signatures of their strips.
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
            first_rows={name: row_ownership.buffer_rows[band].start for name, row_ownership in ownership.values.items()},
            synchronized=self.synchronized,
            shared=problem.memo.memoize(("programs of bands", lowered, segment.scope.outputs), dict),
        )


def _band_whole_segment(segment: Any, grad_mask: OwnedGradMask) -> BandWholeSegment:
    """An untiled segment with the programs of the plain one."""
    return BandWholeSegment(
        scope=segment.scope,
        step=segment.step,
        sides=segment.sides,
        from_source=segment.from_source,
        grad_mask=grad_mask,
        _programs=segment._programs,
    )


def _check_reductions(problem: PlanningProblem) -> None:
    """Refuse reductions over the image that have no merge function.

    Raises:
        UnsupportedError: such a reduction exists.
    """
    rows = problem.sized.phases.rows
    unmergeable = [
        node for node in problem.sized.graph.operators if rows[node.name].role == "reduce" and rows[node.name].name not in MERGES
    ]
    if unmergeable:
        raise UnsupportedError([f"{node.label}: bands cannot merge what they reduce; leave out mesh" for node in unmergeable])
