"""What crosses the borders of a survey's candidates: what runs that are tiled hand on, and what of it passes over the host.

A candidate tiles all operators of runs before a place and keeps those behind it whole. From one place to the next little changes: a value
is made, its last reader is tiled, too. So candidates are gone through in order, and what changes is counted. To look at each candidate's
segments would take time in the square of their number, and a batch norm in training ends a run: deep networks have hundreds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sft.planner.cost.tiling import Tiling
from sft.planner.problem import PlanningProblem
from sft.planner.region_builder import can_stream

__all__ = ["BoundaryMemory", "BoundaryTracker", "UntiledMemory", "untiled_memory"]

Floats = npt.NDArray[np.float64]

_READ_BUFFERS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryMemory:
    """Of one candidate, for each run of which operators are tiled.

    Attributes:
        made_bytes: of what it hands on, on the device, [run]; outputs aside, which are at the border or leave, unless they are read again.
        strip_bytes: of the strips of streamed values, and of their gradients, that are on the device while it runs, [run, height].
        link_seconds: the time of the link in a step, of all together.
    """

    made_bytes: Floats
    strip_bytes: Floats
    link_seconds: float


@dataclass(slots=True)
class _TiledRun:
    """The operators of a run that are tiled, and what is streamed of what they read and make.

    Attributes:
        names: all operators of the run.
        num_tiled: how many are tiled.
        num_panels: into which the width is divided.
        down_bytes: of what they make.
        down_grad_bytes: of its gradients.
        up_bytes: of what they read, once.
        up_grad_bytes: of its gradients.
        seconds: of the link; ``None`` until it is asked for.
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
    """What is otherwise as soon as the operator at a place is tiled.

    Attributes:
        place: of the operator, in the order of all.
        value: which value is meant.
        sign: +1 where it is handed on from now on, -1 where no longer, on the device; 0 where it is streamed from now on.
    """

    place: int
    value: str
    sign: int


class BoundaryTracker:
    """What crosses, candidate by candidate.

    Args:
        problem: the model at one size.
        tiling: how runs are tiled.
        strip_rows: the strip heights that are asked for.
        streams: whether what tiled segments hand to each other passes over the host.
    """

    def __init__(self, problem: PlanningProblem, tiling: Tiling, strip_rows: Sequence[int], *, streams: bool) -> None:
        self._problem, self._tiling, self._strip_rows, self._streams = problem, tiling, strip_rows, streams
        self._runs = [_TiledRun(phase.streamed) for phase in problem.phases.phases if phase.streamed]
        self._run_of = {name: number for number, run in enumerate(self._runs) for name in run.names}
        self._made_bytes = np.zeros(len(self._runs))
        self._exchanged_bytes = np.zeros(len(self._runs))
        self._shares = np.zeros((len(self._runs), len(strip_rows)))
        self._changes = sorted(self._listed())

    def _listed(self) -> Iterator[_BoundaryChange]:
        problem, graph, run_of = self._problem, self._problem.graph, self._run_of
        place = {name: number for number, name in enumerate(problem.operators)}
        results = frozenset(graph.results) - problem.host_outputs
        for name, run in run_of.items():
            users = graph.users[name]
            if not users:
                continue
            last = max(place[user] for user in users)
            has_others = any(run_of.get(user) != run for user in users)
            is_streamed = self._streams and has_others and can_stream(problem, name) and all(user in run_of for user in users)
            if name not in results:
                yield _BoundaryChange(place=place[name], value=name, sign=1)
                if is_streamed or not has_others:
                    yield _BoundaryChange(place=last, value=name, sign=-1)
            if is_streamed:
                yield _BoundaryChange(place=last, value=name, sign=0)

    def until(self, places: Sequence[int]) -> Iterator[BoundaryMemory]:
        """For each of ascending places what crosses where the operators of runs before it are tiled."""
        coming, begun = 0, 0
        starts = np.cumsum([0, *(len(phase.streamed) + len(phase.tail) for phase in self._problem.phases.phases)]).tolist()
        starts = [start for start, phase in zip(starts, self._problem.phases.phases, strict=False) if phase.streamed]
        for place in places:
            while coming < len(self._changes) and self._changes[coming].place < place:
                self._apply(self._changes[coming])
                coming += 1
            first = max(0, begun - 1)  # the last one that was begun may go on
            while begun < len(starts) and starts[begun] < place:
                begun += 1
            for number in range(first, begun):
                self._tile(number, min(place - starts[number], len(self._runs[number].names)))
            yield BoundaryMemory(
                made_bytes=self._made_bytes[:begun].copy(),
                strip_bytes=self._exchanged_bytes[:begun, None] * self._shares[:begun],
                link_seconds=sum(map(self._seconds, self._runs[:begun])),
            )

    def _apply(self, change: _BoundaryChange) -> None:
        problem, name = self._problem, change.value
        own, num_bytes = self._run_of[name], problem.value_bytes(name)
        if change.sign:
            self._made_bytes[own] += change.sign * num_bytes
            return
        grad_bytes = problem.grad_bytes(name) if name in problem.requires_grad else 0
        run = self._runs[own]
        run.down_bytes, run.down_grad_bytes, run.seconds = run.down_bytes + num_bytes, run.down_grad_bytes + grad_bytes, None
        self._exchanged_bytes[own] += num_bytes
        for number in {self._run_of[user] for user in problem.graph.users[name]} - {own}:
            run = self._runs[number]
            run.up_bytes, run.up_grad_bytes, run.seconds = run.up_bytes + num_bytes, run.up_grad_bytes + grad_bytes, None
            # A reader has two buffers in the host's memory; the strip's gradient is in both cases the device's.
            self._exchanged_bytes[number] += num_bytes * ((_READ_BUFFERS if problem.on_host else 1) + problem.training)

    def _tile(self, number: int, num_tiled: int) -> None:
        """So many operators of a run are tiled."""
        problem, tiling, run = self._problem, self._tiling, self._runs[number]
        if run.num_tiled == num_tiled or not self._streams:
            return
        names = run.names[:num_tiled]
        run.num_tiled, run.seconds = num_tiled, None
        run.num_panels = problem.num_panels(names, tiling.cols_of(names)) if tiling.num_panels > 1 else 1
        rows, height = np.array(tiling.heights_of(names, self._strip_rows), dtype=np.float64), problem.run_height(names)
        self._shares[number] = np.minimum(1.0, rows / height) * (tiling.batch_tile / problem.num_batch)

    def _seconds(self, run: _TiledRun) -> float:
        """Of the link, in a step: each panel reads in full width; rows that restored strips read once more are left out."""
        if run.seconds is None:
            link, up_bytes = self._problem.link, run.num_panels * run.up_bytes
            run.seconds = link.streamed_seconds(run.down_bytes, up_bytes)
            if self._problem.training:
                run.seconds += link.streamed_seconds(run.num_panels * run.up_grad_bytes, up_bytes + run.down_grad_bytes)
        return run.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class UntiledMemory:
    """Of operators that are kept whole.

    Attributes:
        source_bytes: of inputs that they read of sources.
        exchanged_bytes: of outputs that they exchange with the host. Of one that they make first the value is on the device, later its
            gradient; of one that they read the gradient is loaded before their backward pass adds to it.
    """

    source_bytes: int
    exchanged_bytes: int


def untiled_memory(problem: PlanningProblem, places: Sequence[int]) -> list[UntiledMemory]:
    """For each of ascending places what the operators from there on hold where they are kept whole."""
    order, exchanged = problem.operators, problem.host_outputs
    read: set[str] = set()
    made: set[str] = set()
    found: list[UntiledMemory] = []
    end = len(order)
    for place in reversed(places):
        for name in order[place:end]:
            read.update(problem.from_source.intersection(problem.graph[name].operands))
            read.update(exchanged.intersection(problem.graph[name].operands))
        made.update(exchanged.intersection(order[place:end]))
        end = place
        loaded = (read & exchanged & problem.requires_grad) - made
        held = sum(max(problem.value_bytes(name), problem.grad_bytes(name)) for name in made)
        found.append(
            UntiledMemory(
                source_bytes=sum(map(problem.value_bytes, read & problem.from_source)),
                exchanged_bytes=held + sum(map(problem.grad_bytes, loaded)),
            )
        )
    return found[::-1]
