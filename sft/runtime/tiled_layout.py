"""Layout of a tiled segment: its sweeps, panels and strips, the rows that each strip reads and computes, and its programs.

A *sweep* runs the strips of one panel for some batch elements. Strips of one signature share a program, and so do panels of one geometry.
``sft.runtime.tiled_segment`` runs the programs; ``sft.runtime.analytic_profile`` sums up their cost.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from sft.analysis.ir.axes import ROWS
from sft.analysis.tiling.independent_tiles import TileSchedule, distinct_steps
from sft.analysis.tiling.strips import NodeRows, StripSchedule, StripStep
from sft.common.array_types import BoolArray, IntArray
from sft.common.interval import Interval
from sft.lower.context import SegmentInfo
from sft.lower.lower_strip import StripKind
from sft.lower.program import Port, Program
from sft.lower.running_reductions import lower_finish
from sft.lower.strip_programs import StripPrograms
from sft.runtime.strip_checkpoints import Checkpoints
from sft.runtime.strip_policy import RUN_ALL_STRIPS, StripPolicy

__all__ = ["Sweep", "TiledLayout"]


@dataclass(frozen=True, slots=True)
class Sweep:
    """One pass over the strips of one panel, for some batch elements.

    Attributes:
        chunk: the batch elements.
        panel: index of the panel.
    """

    chunk: Interval
    panel: int


@dataclass(kw_only=True)
class TiledLayout:
    """Static description of a tiled segment.

    Attributes:
        scope: input of the lowering, for ``scope.batch`` batch elements and the full width.
        schedule: the strips.
        panels: columns that each panel computes and reads.
        checkpoints: policy that selects the states of a sweep to keep.
        restart: True if only the last sweep keeps its states in the forward pass; every other sweep runs forward again before its backward.
        num_batch: batch elements of the full input; a sweep takes ``scope.batch`` of them.
        sides: side inputs (parameters, buffers, global values) that the segment reads.
        from_source: inputs, and cuts on the host, that are read strip by strip and never resident.
        to_host: outputs that leave strip by strip and are never resident, with their gradients.
        direct: those of both that are direct cuts: strips leave, and gradients of outputs arrive, while the next strip is computed.
        contiguous: members of ``to_host`` in channels-first layout.
        strip_policy: selects the strips that a sweep runs.
    """

    scope: SegmentInfo
    schedule: StripSchedule | TileSchedule
    panels: tuple[StripStep, ...]
    checkpoints: Checkpoints
    restart: bool
    num_batch: int
    sides: tuple[str, ...]
    from_source: frozenset[str] = frozenset()
    to_host: frozenset[str] = frozenset()
    direct: frozenset[str] = frozenset()
    contiguous: frozenset[str] = frozenset()
    strip_policy: StripPolicy = RUN_ALL_STRIPS
    #: costs of its sweeps (``sft.runtime.analytic_profile``); valid for these states and borders alone, so `replace` must not copy it
    profiles: dict[Hashable, Any] = field(init=False, default_factory=dict, repr=False)
    _programs: dict[tuple[str, int, int, int], Program] = field(default_factory=dict, repr=False)
    _lowerings: dict[tuple[int, int], StripPrograms] = field(default_factory=dict, repr=False)
    _steps: dict[int, StripStep] = field(default_factory=dict, repr=False)
    _scopes: dict[tuple[int, int], SegmentInfo] = field(default_factory=dict, repr=False)
    _rows: dict[tuple[int, int], Mapping[str, Interval]] = field(default_factory=dict, repr=False)
    _finishes: dict[tuple[str, int], Program] = field(default_factory=dict, repr=False)

    @cached_property
    def reductions(self) -> tuple[str, ...]:
        """Global values that the segment computes by reduction."""
        return tuple(name for name in self.scope.names if name not in self.scope.streamed)

    def spans_batch(self, name: str) -> bool:
        """True if a reduction is one value for several batch elements."""
        return name not in self.scope.per_sample and self.num_batch > 1

    @property
    def kept_states(self) -> frozenset[int]:
        """Indices of the states that the forward pass keeps."""
        return self.checkpoints.kept(self.schedule.num_steps)

    @cached_property
    def chunks(self) -> tuple[Interval, ...]:
        """Batch elements of each sweep."""
        size = self.scope.batch
        return tuple(Interval(start, min(start + size, self.num_batch)) for start in range(0, self.num_batch, size))

    @cached_property
    def sweeps(self) -> tuple[Sweep, ...]:
        """All sweeps in forward order: every panel of the first chunk, of the next chunk, ...; empty without strips."""
        if not self.schedule.num_steps:
            return ()
        return tuple(Sweep(chunk, panel) for chunk in self.chunks for panel in range(len(self.panels)))

    def keeps_states(self, sweep: Sweep) -> bool:
        """True if the states of a sweep stay from its forward to its backward pass."""
        return not self.restart or sweep == self.sweeps[-1]

    @cached_property
    def panel_kinds(self) -> tuple[int, ...]:
        """For each panel, the first panel of the same geometry, which shares its programs."""
        first, kinds = distinct_steps(self.panels)
        return tuple(int(first[kind]) for kind in kinds)

    @cached_property
    def consecutive_signatures(self) -> BoolArray:
        """For each strip signature, True if two consecutive strips have it."""
        first, signatures = self.schedule.kinds
        consecutive = np.zeros(len(first), dtype=bool)
        consecutive[signatures[1:][signatures[1:] == signatures[:-1]]] = True
        return consecutive

    def scope_of(self, sweep: Sweep) -> SegmentInfo:
        """Input of the lowering for one sweep."""
        key = (len(sweep.chunk), self.panel_kinds[sweep.panel])
        if key not in self._scopes:
            columns = {node.name: node for node in self.panels[key[1]].nodes}
            self._scopes[key] = replace(self.scope, batch=key[0], columns=columns)
        return self._scopes[key]

    def step(self, index: int) -> StripStep:
        """Geometry of strip ``index``."""
        if index not in self._steps:
            self._steps[index] = self.schedule.step(index)
        return self._steps[index]

    def reads(self, step: StripStep, sweep: Sweep) -> Mapping[str, Interval]:
        """Rows of each operand that a strip reads."""
        key = (step.index, self.panel_kinds[sweep.panel])
        if key not in self._rows:
            self._rows[key] = self.scope_of(sweep).rows_read(step)
        return self._rows[key]

    def rows_read(self, name: str, sweep: Sweep) -> tuple[IntArray, IntArray]:
        """First and end row (exclusive) of a source that each strip of a sweep reads."""
        return self._lowering(sweep).rows_read(name)

    def row_bytes(self, name: str, sweep: Sweep) -> int:
        """Bytes of one row of a streamed value in a sweep."""
        scope = self.scope_of(sweep)
        return math.prod(scope.strip_shape(name, 1)) * scope.graph[name].itemsize_bytes

    def row_elements(self, name: str, sweep: Sweep) -> int:
        """Elements of one row of a streamed value in a sweep."""
        return math.prod(self.scope_of(sweep).strip_shape(name, 1))

    def source_row_bytes(self, name: str, sweep: Sweep, *, gradient: bool = False) -> int:
        """Bytes of one full-width row of an input that is not resident, or of its gradient."""
        shape = self.scope.axes.with_extent(self.scope.shapes[name], ROWS, 1)
        dtype = self.scope.sink_dtype(name) if gradient else self.scope.dtype_of(name)
        return len(sweep.chunk) * math.prod(shape[1:]) * dtype.itemsize

    @property
    def lowered_programs(self) -> tuple[Program, ...]:
        """The programs lowered so far."""
        return tuple(self._programs.values())

    @property
    def working_bytes(self) -> int:
        """The largest peak of the programs lowered so far."""
        return max((program.peak_bytes for program in self._programs.values()), default=0)

    def program(self, kind: StripKind, index: int, sweep: Sweep) -> Program:
        """Program of a strip; strips of one signature in panels of one geometry share it."""
        key = (kind, int(self.schedule.kinds[1][index]), self.panel_kinds[sweep.panel], len(sweep.chunk))
        if key not in self._programs:
            self._programs[key] = self._lowering(sweep).lower(kind, index)
        return self._programs[key]

    def finish_program(self, name: str, sweep: Sweep) -> Program:
        """Program that turns a running reduction over a sweep's batch elements into the global value."""
        key = (name, len(sweep.chunk))
        if key not in self._finishes:
            self._finishes[key] = lower_finish(self.scope_of(sweep), name)
        return self._finishes[key]

    def _lowering(self, sweep: Sweep) -> StripPrograms:
        """Lowering of the strips of sweeps of one geometry."""
        key = (len(sweep.chunk), self.panel_kinds[sweep.panel])
        if key not in self._lowerings:
            self._lowerings[key] = StripPrograms(self.scope_of(sweep), self.schedule)
        return self._lowerings[key]

    def host_strip_bytes(self, program: Program) -> int:
        """Device bytes of the output strips, or of their gradients, that a program exchanges with the host."""
        return sum(slot.num_bytes for port, slot in program.ports.items() if self.is_exchanged(port))

    def direct_strip_bytes(self, program: Program) -> int:
        """Device bytes of the output strips that a program writes of direct cuts."""
        return sum(slot.num_bytes for port, slot in program.ports.items() if port.role == "out" and port.name in self.direct)

    def is_exchanged(self, port: Port) -> bool:
        """True if a port is a strip of an output, or of its gradient, that is exchanged with the host in a buffer of its own."""
        return port.name in self.to_host and (port.role == "out" or (port.role == "grad_out" and port.name not in self.direct))

    def num_sweep_strips(self, direction: Literal["forward", "restore"]) -> int:
        """Number of strips of a forward sweep: all, or (``"restore"``) those before the last kept state."""
        return self.schedule.num_steps if direction == "forward" else max(self.kept_states)

    def origin(self, name: str, step: StripStep, sweep: Sweep) -> tuple[int, int, int]:
        """Batch element, row and column of the first element that a strip computes of a value, or that it reduces."""
        return (sweep.chunk.start, _first_row(step[name]), _first_row(self.columns_of(name, sweep)))

    def columns_of(self, name: str, sweep: Sweep) -> NodeRows:
        """Columns of a value that a sweep's panel computes and reads; `scope_of` has those of the first panel of the same geometry."""
        return self.panels[sweep.panel][name]

    def output_region(self, name: str, step: StripStep, sweep: Sweep) -> tuple[Interval, Interval]:
        """Rows and columns of a streamed output that a strip writes."""
        return step[name].owned, self.columns_of(name, sweep).owned


def _first_row(rows: NodeRows) -> int:
    """First row computed; of a reduction, which computes none, the first row read."""
    return rows.new.start if rows.new or not rows.reads else rows.reads[0].rows.start
