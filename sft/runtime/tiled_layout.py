"""How a tiled segment is laid out: in parts of the batch, panels and strips, what each of these computes and reads, and its program.

A walk goes over the strips of one panel for some batch elements. Strips of one signature share a program, and so do panels of one geometry.
What runs the programs is the segment (``sft.runtime.tiled_segment``); what they cost is added up from here, too
(``sft.runtime.analytic_profile``).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from sft.analysis.ir.axes import ROWS
from sft.analysis.tiling.independent_tiles import TileSchedule, distinct_steps
from sft.analysis.tiling.strips import NodeRows, StripSchedule, StripStep
from sft.common.interval import Interval
from sft.lower.context import SegmentInfo
from sft.lower.lower_strip import StripKind
from sft.lower.lower_walk import StripPrograms
from sft.lower.program import Port, Program
from sft.lower.running_reductions import lower_finish
from sft.runtime.strip_checkpoints import Checkpoints

__all__ = ["Sweep", "TiledLayout"]

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Sweep:
    """One walk over the strips: some batch elements of one panel."""

    chunk: Interval
    panel: int


@dataclass(kw_only=True)
class TiledLayout:
    """What there is to know of a tiled segment before it runs.

    Attributes:
        scope: what the lowering needs, for ``scope.batch`` batch elements and the full width.
        schedule: the strips.
        panels: what each panel computes and reads along the width.
        checkpoints: which states of a walk are kept.
        restart: only the last walk keeps its states in the forward pass; the others run forward once more before their backward.
        num_batch: batch elements of the whole input; walks take ``scope.batch`` at a time.
        sides: whole tensors that the segment reads.
        from_source: inputs, and cuts on the host, that are read strip by strip and never resident.
        to_host: outputs that leave strip by strip and are never whole on the device, with their gradients.
        contiguous: those of them that are laid out channels first.
        skips_repeats: whether strips are left out that would make what a neighbour made (``sft.runtime.skip_constant``).
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
    contiguous: frozenset[str] = frozenset()
    skips_repeats: bool = False
    #: what its walks cost (``sft.runtime.analytic_profile``); of these states and borders alone, so that `replace` must not hand it on
    profiles: dict[Hashable, Any] = field(init=False, default_factory=dict, repr=False)
    _programs: dict[tuple[str, int, int, int], Program] = field(default_factory=dict, repr=False)
    _lowerings: dict[tuple[int, int], StripPrograms] = field(default_factory=dict, repr=False)
    _steps: dict[int, StripStep] = field(default_factory=dict, repr=False)
    _scopes: dict[tuple[int, int], SegmentInfo] = field(default_factory=dict, repr=False)
    _rows: dict[tuple[int, int], Mapping[str, Interval]] = field(default_factory=dict, repr=False)
    _finishes: dict[tuple[str, int], Program] = field(default_factory=dict, repr=False)

    @cached_property
    def reductions(self) -> tuple[str, ...]:
        """Global values that the segment computes."""
        return tuple(name for name in self.scope.names if name not in self.scope.streamed)

    def spans_batch(self, name: str) -> bool:
        """Whether a reduction is one value for all batch elements, where there are several."""
        return name not in self.scope.per_sample and self.num_batch > 1

    @property
    def kept(self) -> frozenset[int]:
        """States that the forward pass keeps."""
        return self.checkpoints.kept(self.schedule.num_steps)

    @cached_property
    def chunks(self) -> tuple[Interval, ...]:
        """The batch in walks."""
        tile = self.scope.batch
        return tuple(Interval(b, min(b + tile, self.num_batch)) for b in range(0, self.num_batch, tile))

    @cached_property
    def walks(self) -> tuple[Sweep, ...]:
        """All walks in the order of the forward pass: the panels of the first batch elements, of the next, ...; none without strips."""
        if not self.schedule.num_steps:
            return ()
        return tuple(Sweep(chunk, panel) for chunk in self.chunks for panel in range(len(self.panels)))

    def keeps_states(self, walk: Sweep) -> bool:
        """Whether a walk's states stay from its forward to its backward pass."""
        return not self.restart or walk == self.walks[-1]

    @cached_property
    def panel_kinds(self) -> tuple[int, ...]:
        """For each panel the first one of the same geometry, with which it shares its programs."""
        first, kinds = distinct_steps(self.panels)
        return tuple(int(first[kind]) for kind in kinds)

    def scope_of(self, walk: Sweep) -> SegmentInfo:
        """What the lowering needs of one walk."""
        key = (len(walk.chunk), self.panel_kinds[walk.panel])
        if key not in self._scopes:
            columns = {part.name: part for part in self.panels[key[1]].nodes}
            self._scopes[key] = replace(self.scope, batch=key[0], columns=columns)
        return self._scopes[key]

    def step(self, index: int) -> StripStep:
        """Strip ``index``."""
        if index not in self._steps:
            self._steps[index] = self.schedule.step(index)
        return self._steps[index]

    def reads(self, step: StripStep, walk: Sweep) -> Mapping[str, Interval]:
        """The rows of each operand that a step reads."""
        key = (step.index, self.panel_kinds[walk.panel])
        if key not in self._rows:
            self._rows[key] = self.scope_of(walk).rows_read(step)
        return self._rows[key]

    def rows_read(self, name: str, walk: Sweep) -> tuple[Ints, Ints]:
        """First row, and the one behind the last, that each step of a walk reads of a source."""
        return self._lowering(walk).rows_read(name)

    def row_bytes(self, name: str, walk: Sweep) -> int:
        """Bytes of one row of a streamed value in a walk."""
        scope = self.scope_of(walk)
        return math.prod(scope.strip_shape(name, 1)) * scope.graph[name].itemsize_bytes

    def row_elements(self, name: str, walk: Sweep) -> int:
        """Elements of one row of a streamed value in a walk."""
        return math.prod(self.scope_of(walk).strip_shape(name, 1))

    def source_row_bytes(self, name: str, walk: Sweep, *, gradient: bool = False) -> int:
        """Bytes of one row in full width of an input that is not resident, or of its gradient."""
        shape = self.scope.axes.with_extent(self.scope.shapes[name], ROWS, 1)
        dtype = self.source_grad_dtype(name) if gradient else self.scope.dtype_of(name)
        return len(walk.chunk) * math.prod(shape[1:]) * dtype.itemsize

    def source_grad_dtype(self, name: str) -> torch.dtype:
        """Element type in which a sink gets the gradient of what is not resident: that of an input is the input's."""
        return self.scope.grad_dtype(name) if self.scope.graph[name].kind == "operator" else self.scope.dtype_of(name)

    @property
    def lowered(self) -> tuple[Program, ...]:
        """The programs lowered so far."""
        return tuple(self._programs.values())

    @property
    def working_bytes(self) -> int:
        """The largest peak of the programs lowered so far."""
        return max((program.peak_bytes for program in self._programs.values()), default=0)

    def program(self, kind: StripKind, index: int, walk: Sweep) -> Program:
        """The program of a strip; strips of one signature share it, in panels of one geometry."""
        key = (kind, int(self.schedule.kinds[1][index]), self.panel_kinds[walk.panel], len(walk.chunk))
        if key not in self._programs:
            self._programs[key] = self._lowering(walk).lower(kind, index)
        return self._programs[key]

    def finish(self, name: str, walk: Sweep) -> Program:
        """The program that turns a running reduction of a walk's batch elements into the global value."""
        key = (name, len(walk.chunk))
        if key not in self._finishes:
            self._finishes[key] = lower_finish(self.scope_of(walk), name)
        return self._finishes[key]

    def _lowering(self, walk: Sweep) -> StripPrograms:
        """What lowers the strips of walks of one geometry."""
        key = (len(walk.chunk), self.panel_kinds[walk.panel])
        if key not in self._lowerings:
            self._lowerings[key] = StripPrograms(self.scope_of(walk), self.schedule)
        return self._lowerings[key]

    def host_strip_bytes(self, program: Program) -> int:
        """Bytes on the device of the strips of outputs, or of their gradients, that a program of the segment exchanges with the host."""
        return sum(slot.num_bytes for port, slot in program.ports.items() if self.is_exchanged(port))

    def is_exchanged(self, port: Port) -> bool:
        """Whether a port is a strip of an output, or of its gradient, that is exchanged with the host."""
        return port.name in self.to_host and port.role in ("out", "grad_out")

    def walked(self, direction: Literal["forward", "restore"]) -> int:
        """Strips that a walk forward runs: all, or those before the last kept state."""
        return self.schedule.num_steps if direction == "forward" else max(self.kept)

    def origin(self, name: str, step: StripStep, walk: Sweep) -> tuple[int, int, int]:
        """Batch element, row and column of the first element that a strip adds to a value, or that it reduces."""
        return (walk.chunk.start, _first_row(step[name]), _first_row(self.columns_of(name, walk)))

    def columns_of(self, name: str, walk: Sweep) -> NodeRows:
        """What a walk's panel computes and reads of a value along the width; `scope_of` speaks of the first panel of its geometry."""
        return self.panels[walk.panel][name]

    def part(self, name: str, step: StripStep, walk: Sweep) -> tuple[Interval, Interval]:
        """Rows and columns of a streamed output that a strip is for."""
        return step[name].owned, self.columns_of(name, walk).owned


def _first_row(part: NodeRows) -> int:
    """The first row computed; of a reduction, which has none, the first one read."""
    return part.new.start if part.new or not part.reads else part.reads[0].rows.start
