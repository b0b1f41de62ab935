"""Segments of one band: sweeps over the band's rows, and untiled segments with gradients that are counted once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

from sft.analysis.ir.axes import Axes
from sft.analysis.tiling.strips import StripSchedule, StripStep
from sft.common.interval import Interval
from sft.distributed.communicator import BandMachine
from sft.distributed.halo_exchange import StripTimeline
from sft.distributed.transport import RankGroup
from sft.lower.lower_strip import StripKind
from sft.lower.program import Program
from sft.lower.running_reductions import partial_shape
from sft.runtime.machine import Buffer, Gradients, Machine, Residuals, ValueBindings
from sft.runtime.tiled_layout import Sweep
from sft.runtime.tiled_segment import SweepRun, TiledSegment
from sft.runtime.whole_segment import WholeSegment

__all__ = ["BandSegment", "BandWholeSegment", "OwnedGradMask"]


@dataclass(kw_only=True)
class BandSegment(TiledSegment):
    """A tiled segment of which a band runs its own rows.

    Attributes:
        first_rows: first row of this band's buffer, in the full image, for each value that crosses the segment's border.
        synchronized: global values that are merged over all replicas.
        shared: programs by signature, shared by all bands of one process (a planner runs them all).
    """

    first_rows: Mapping[str, int]
    synchronized: frozenset[str] = frozenset()
    shared: dict[tuple[Any, ...], Program] = field(default_factory=dict, repr=False)

    def program(self, kind: StripKind, index: int, sweep: Sweep) -> Program:
        schedule = self.schedule
        assert isinstance(schedule, StripSchedule)
        key = (kind, schedule.signature(index), self.panel_kinds[sweep.panel], len(sweep.chunk))
        if key not in self.shared:
            self.shared[key] = super().program(kind, index, sweep)
        self._programs[(kind, int(schedule.kinds[1][index]), *key[2:])] = self.shared[key]
        return self.shared[key]

    @cached_property
    def reusable_sources(self) -> Mapping[str, tuple[str, ...]]:
        """None: other ranks may still read rows of a source."""
        return {}

    @cached_property
    def timeline(self) -> StripTimeline:
        """Order in which rows are computed and read."""
        assert isinstance(self.schedule, StripSchedule)
        return StripTimeline(schedule=self.schedule, num_sweeps=len(self.chunks) * len(self.panels))

    @cached_property
    def _strips_before(self) -> Mapping[Sweep, int]:
        """Strips before each sweep, forward."""
        return {sweep: number * self.schedule.num_steps for number, sweep in enumerate(self.sweeps)}

    def _run_forward(self, run: SweepRun, index: int, partial: Mapping[str, Buffer] | None) -> None:
        if partial is not None:  # restored strips run again in the backward pass, where `_run_joint` counts them
            cast(BandMachine, run.machine).comm_queue.reach(self._strips_before[run.sweep] + index)
        super()._run_forward(run, index, partial)

    def _run_joint(self, run: SweepRun, grads: Gradients, index: int, carried: dict[str, Buffer], weight: int) -> dict[str, Buffer]:
        cast(BandMachine, run.machine).comm_queue.reach(self.timeline.num_strips - self._strips_before[run.sweep] - index - 1)
        return super()._run_joint(run, grads, index, carried, weight)

    def close_reductions(self, machine: Machine, values: ValueBindings, partial: dict[str, Buffer], chunk: Interval | None) -> None:
        band_machine = cast(BandMachine, machine)
        for name in self.reductions:
            if self.spans_batch(name) == (chunk is None):
                scope = self.scope_of(Sweep(self.chunks[0] if chunk is None else chunk, 0))
                node = scope.graph[name]
                over: RankGroup = "mesh" if name in self.synchronized else "band"
                largest = bool(node.argument("largest", True))
                band_machine.comm.merge(
                    band_machine, partial[name], partial_shape(scope, name), scope.specs[name].name, over, largest=largest
                )
        super().close_reductions(machine, values, partial, chunk)

    def _source_slice(self, run: SweepRun, tensors: ValueBindings | Gradients, name: str, step: StripStep) -> Buffer:
        if isinstance(tensors, ValueBindings) and name in tensors.loaders:
            return super()._source_slice(run, tensors, name, step)
        rows = self.scope_of(run.sweep).rows_read(step)[name].shift(-self.first_rows[name])
        columns = self.panels[run.sweep.panel][name].new
        return run.machine.view(tensors.by_name[name], run.sweep.chunk, rows, columns, axes=self.scope.axes)

    def _output_slice(self, run: SweepRun, tensors: ValueBindings | Gradients, name: str, step: StripStep) -> Buffer:
        rows, columns = self.output_region(name, step, run.sweep)
        rows = rows.shift(-self.first_rows[name])
        return run.machine.view(tensors.by_name[name], run.sweep.chunk, rows, columns, axes=self.scope.axes)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedGradMask:
    """Part of a replicated gradient that this rank contributes to a sum over bands.

    Attributes:
        owned_rows: for images with a gradient summed over bands, the rows that this rank counts.
        num_rows: their number of rows.
        summed: untiled values with a gradient summed over bands.
        is_first: True if this rank counts these.
    """

    owned_rows: Mapping[str, Interval]
    num_rows: Mapping[str, int]
    summed: frozenset[str]
    is_first: bool

    def apply(self, machine: Machine, name: str, handle: Buffer, axes: Axes) -> None:
        """Zero the gradient that other ranks count."""
        if name in self.owned_rows:
            owned, num_rows = self.owned_rows[name], self.num_rows[name]
            for rows in (Interval(0, owned.start), Interval(owned.stop, num_rows)) if owned else (Interval(0, num_rows),):
                if rows:
                    machine.fill(machine.view(handle, None, rows, axes=axes), 0.0)
        elif name in self.summed and not self.is_first:
            machine.fill(handle, 0.0)


@dataclass(kw_only=True)
class BandWholeSegment(WholeSegment):
    """An untiled segment, which every rank runs.

    Attributes:
        grad_mask: the part of the gradients that this rank counts.
    """

    grad_mask: OwnedGradMask

    def backward(self, machine: Machine, values: ValueBindings, saved: Residuals | None, grads: Gradients, *, consume: bool = True) -> None:
        local_grads = Gradients({name: grads.by_name[name] for name in self.scope.outputs if name in grads.by_name}, grads.sinks)
        incoming = set(local_grads.by_name)
        super().backward(machine, values, saved, local_grads, consume=consume)
        for name in [name for name in local_grads.by_name if name not in incoming]:
            handle = local_grads.by_name.pop(name)
            self.grad_mask.apply(machine, name, handle, self.scope.axes)
            if name in grads.by_name:
                machine.add(grads.by_name[name], handle)
            else:
                grads.by_name[name] = handle
            del handle
