"""Boundary memory: bytes that cross the segment borders of a grid's candidates, on the device and over the host link.

A candidate tiles all operators of runs before a position and keeps those after it untiled. From one position to the next little changes: a
value is made, or its last reader becomes tiled. So candidates are visited in order, and changes are counted. Examining the segments of each
candidate would take time quadratic in their number; a batch norm in training ends a run, so deep networks have hundreds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from sft.analysis.tiling.phases import Phase
from sft.common.array_types import FloatArray
from sft.planner.cost.tiling import Tiling
from sft.planner.problem import PlanningProblem
from sft.planner.region_builder import can_stream
from sft.runtime.buffer_reuse import PIXEL_OPS

__all__ = ["BoundaryMemory", "BoundaryTracker", "UntiledMemory", "untiled_memory"]


#: Host buffers of a reader of a streamed value.
_READ_BUFFERS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryMemory:
    """Boundary bytes of one candidate, for each run with tiled operators.

    Attributes:
        made_bytes: device bytes of the values that it passes on, [run]; outputs that are not read again are excluded.
        freed_bytes: device bytes of such values that no later run reads, freed after the run, [run]; 0 in training, where the backward pass
            reads them again.
        reused_bytes: device bytes of values that take the buffer of a value that the run reads for the last time, [run].
        strip_bytes: device bytes of strips of streamed values and of their gradients while it runs, [run, height].
        link_seconds: link seconds of a step, over all runs.
    """

    made_bytes: FloatArray
    freed_bytes: FloatArray
    reused_bytes: FloatArray
    strip_bytes: FloatArray
    link_seconds: float

    @property
    def alive_bytes(self) -> FloatArray:
        """Device bytes of passed values that are alive while each run runs, its own included, [run]."""
        return np.cumsum(self.made_bytes) - np.cumsum(self.freed_bytes) + self.freed_bytes - self.reused_bytes

    @property
    def kept_bytes(self) -> float:
        """Device bytes of passed values after the last run."""
        return float(self.made_bytes.sum() - self.freed_bytes.sum())


@dataclass(slots=True)
class _TiledRun:
    """Tiled operators of a run, and the streamed values that they read and make.

    Attributes:
        names: all operators of the run.
        num_tiled: number of tiled operators.
        num_panels: panels across the width.
        down_bytes: bytes of the streamed values that they make.
        down_grad_bytes: bytes of the gradients of these values.
        up_bytes: bytes of the streamed values that they read, once.
        up_grad_bytes: bytes of the gradients of these values.
        seconds: link seconds; ``None`` until computed.
    """

    names: tuple[str, ...]
    num_tiled: int = 0
    num_panels: int = 1
    down_bytes: int = 0
    down_grad_bytes: int = 0
    up_bytes: int = 0
    up_grad_bytes: int = 0
    seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class _BoundaryChange:
    """Change of the boundary when the operator at a position becomes tiled.

    Attributes:
        position: index of the operator in execution order.
        value: the value that changes.
        sign: +1 if its bytes on the device are counted from now on, -1 if no longer; 0 if it is streamed from now on.
        frees_after: number of the run after which it is freed from now on; -1 if it is not.
    """

    position: int
    value: str
    sign: int
    frees_after: int = -1


class BoundaryTracker:
    """Tracks boundary bytes from candidate to candidate.

    Args:
        problem: the planning problem.
        tiling: common parameters of the tiled runs.
        strip_rows: strip heights of the grid.
        streams: true if values between tiled segments pass through the host.
    """

    def __init__(self, problem: PlanningProblem, tiling: Tiling, strip_rows: Sequence[int], *, streams: bool) -> None:
        self._problem, self._tiling, self._strip_rows, self._streams = problem, tiling, strip_rows, streams
        self._runs = [_TiledRun(phase.streamed) for phase in problem.sized.phases.phases if phase.streamed]
        self._run_of = {name: number for number, run in enumerate(self._runs) for name in run.names}
        self._made_bytes = np.zeros(len(self._runs))
        self._freed_bytes = np.zeros(len(self._runs))
        self._starts = [start for start, phase in self._phase_starts() if phase.streamed]
        self._exchanged_bytes = np.zeros(len(self._runs))
        self._strip_shares = np.zeros((len(self._runs), len(strip_rows)))
        self._changes = sorted(self._list_changes())
        self._reused_bytes = [self._reused_in(number) for number in range(len(self._runs))]

    def _phase_starts(self) -> Iterator[tuple[int, Phase]]:
        """Each phase with the position of its first operator."""
        start = 0
        for phase in self._problem.sized.phases.phases:
            yield start, phase
            start += len(phase.streamed) + len(phase.tail)

    def _list_changes(self) -> Iterator[_BoundaryChange]:
        problem, graph, run_of = self._problem, self._problem.sized.graph, self._run_of
        position_of = {name: number for number, name in enumerate(problem.sized.operators)}
        results = frozenset(graph.results) - problem.resources.host_outputs
        for name, run in run_of.items():
            users = graph.users[name]
            if not users:
                continue
            last = max(position_of[user] for user in users)
            leaves_run = any(run_of.get(user) != run for user in users)
            is_streamed = self._streams and leaves_run and can_stream(problem, name) and all(user in run_of for user in users)
            if name not in results:
                yield _BoundaryChange(position=position_of[name], value=name, sign=1)
                if is_streamed or not leaves_run:
                    yield _BoundaryChange(position=last, value=name, sign=-1)
                elif not problem.sized.training and all(user in run_of for user in users):
                    yield _BoundaryChange(position=last, value=name, sign=0, frees_after=bisect_right(self._starts, last) - 1)
            if is_streamed:
                yield _BoundaryChange(position=last, value=name, sign=0)

    def _reused_in(self, number: int) -> int:
        """Bytes of the values of a run, tiled as a whole, that take the buffers of values which it reads for the last time."""
        sized, inside = self._problem.sized, self._runs[number].names
        freed = [change.value for change in self._changes if change.frees_after == number and change.value not in inside]
        allocated = [change.value for change in self._changes if change.sign == 1 and self._run_of[change.value] == number]
        reused = 0
        for source in freed:
            readers = [name for name in sized.graph.users[source] if name in inside]
            if not all(sized.phases.rows[name].name in PIXEL_OPS for name in readers):
                continue
            replacement = next((name for name in allocated if sized.shapes[name] == sized.shapes[source]), None)
            if replacement is not None:
                allocated.remove(replacement)
                reused += sized.value_bytes(replacement)
        return reused

    def advance(self, positions: Sequence[int]) -> Iterator[BoundaryMemory]:
        """Boundary memory for each of ascending positions, with all operators of runs before it tiled."""
        num_applied, num_begun = 0, 0
        starts = self._starts
        for position in positions:
            while num_applied < len(self._changes) and self._changes[num_applied].position < position:
                self._apply(self._changes[num_applied])
                num_applied += 1
            first = max(0, num_begun - 1)  # the last run that was begun may continue
            while num_begun < len(starts) and starts[num_begun] < position:
                num_begun += 1
            for number in range(first, num_begun):
                self._set_tiled(number, min(position - starts[number], len(self._runs[number].names)))
            yield BoundaryMemory(
                made_bytes=self._made_bytes[:num_begun].copy(),
                freed_bytes=self._freed_bytes[:num_begun].copy(),
                reused_bytes=np.array(
                    [
                        float(reused) if position - start >= len(run.names) else 0.0
                        for reused, start, run in zip(self._reused_bytes[:num_begun], starts, self._runs, strict=False)
                    ]
                ),
                strip_bytes=self._exchanged_bytes[:num_begun, None] * self._strip_shares[:num_begun],
                link_seconds=sum(map(self._link_seconds, self._runs[:num_begun])),
            )

    def _apply(self, change: _BoundaryChange) -> None:
        problem, name = self._problem, change.value
        maker, num_bytes = self._run_of[name], problem.sized.value_bytes(name)
        if change.frees_after >= 0:
            self._freed_bytes[change.frees_after] += num_bytes
            return
        if change.sign:
            self._made_bytes[maker] += change.sign * num_bytes
            return
        grad_bytes = problem.sized.grad_bytes(name) if name in problem.sized.requires_grad else 0
        run = self._runs[maker]
        run.down_bytes, run.down_grad_bytes, run.seconds = run.down_bytes + num_bytes, run.down_grad_bytes + grad_bytes, None
        self._exchanged_bytes[maker] += num_bytes
        for number in {self._run_of[user] for user in problem.sized.graph.users[name]} - {maker}:
            run = self._runs[number]
            run.up_bytes, run.up_grad_bytes, run.seconds = run.up_bytes + num_bytes, run.up_grad_bytes + grad_bytes, None
            self._exchanged_bytes[number] += num_bytes * (_READ_BUFFERS + problem.sized.training)

    def _set_tiled(self, number: int, num_tiled: int) -> None:
        """Update the number of tiled operators of a run."""
        problem, tiling, run = self._problem, self._tiling, self._runs[number]
        if run.num_tiled == num_tiled or not self._streams:
            return
        names = run.names[:num_tiled]
        run.num_tiled, run.seconds = num_tiled, None
        run.num_panels = problem.sized.num_panels(names, tiling.cols_of(names)) if tiling.num_panels > 1 else 1
        rows, height = np.array(tiling.heights_of(names, self._strip_rows), dtype=np.float64), problem.sized.run_height(names)
        self._strip_shares[number] = np.minimum(1.0, rows / height) * (tiling.batch_tile / problem.sized.num_batch)

    def _link_seconds(self, run: _TiledRun) -> float:
        """Link seconds of a run in a step: each panel reads in full width; rows that restored strips read again are not counted."""
        if run.seconds is None:
            link, up_bytes = self._problem.resources.link, run.num_panels * run.up_bytes
            run.seconds = link.streamed_seconds(run.down_bytes, up_bytes)
            if self._problem.sized.training:
                run.seconds += link.streamed_seconds(run.num_panels * run.up_grad_bytes, up_bytes + run.down_grad_bytes)
        return run.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class UntiledMemory:
    """Device bytes of untiled operators for streamed inputs and host outputs.

    Attributes:
        source_bytes: bytes of the streamed inputs that they read.
        exchanged_bytes: bytes of the host outputs that they make or read. For one that they make, first the value is on the device, later
            its gradient; for one that they only read, the gradient is loaded before their backward pass adds to it.
    """

    source_bytes: int
    exchanged_bytes: int


def untiled_memory(problem: PlanningProblem, positions: Sequence[int]) -> list[UntiledMemory]:
    """Bytes of the untiled operators from each of ascending positions on."""
    order, exchanged = problem.sized.operators, problem.resources.host_outputs
    inputs: set[str] = set()
    outputs: set[str] = set()
    memory: list[UntiledMemory] = []
    end = len(order)
    for position in reversed(positions):
        for name in order[position:end]:
            inputs.update(problem.resources.from_source.intersection(problem.sized.graph[name].operands))
            inputs.update(exchanged.intersection(problem.sized.graph[name].operands))
        outputs.update(exchanged.intersection(order[position:end]))
        end = position
        loaded = (inputs & exchanged & problem.sized.requires_grad) - outputs
        output_bytes = sum(max(problem.sized.value_bytes(name), problem.sized.grad_bytes(name)) for name in outputs)
        memory.append(
            UntiledMemory(
                source_bytes=sum(map(problem.sized.value_bytes, inputs & problem.resources.from_source)),
                exchanged_bytes=output_bytes + sum(map(problem.sized.grad_bytes, loaded)),
            )
        )
    return memory[::-1]
