"""The first planner: from a byte budget to segments, strip heights and kept states.

Of each phase's streamed run the first part is tiled and the rest kept whole, for deep layers are small and keeping them saves their
recomputation. The planner takes the shortest tiled part for which some strip height and state interval fit the budget. Candidates
are positions where a single value crosses (separators). Heights are tried from the preferred one downwards; the footprint formula
rules out hopeless ones without lowering anything, and every plan returned has been projected exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isqrt

from sft.analysis.footprint import Footprint, run_footprint
from sft.errors import BudgetError, InputError
from sft.options import Options
from sft.plan.build import build_region
from sft.plan.problem import Problem
from sft.plan.project import Projection, project
from sft.plan.types import SegmentChoice
from sft.units import format_bytes
from sft.walk.region import Region

__all__ = ["Planned", "cut_positions", "plan_segments"]

#: Largest strip working set worth having on a CPU: strips that stay near the caches run faster than tall ones.
_PREFERRED_WORKING_BYTES = {"cpu": 96 * 2**20}
_PREFERRED_WORKING_BYTES_DEFAULT = 2 * 2**30


@dataclass(frozen=True, slots=True)
class Planned:
    """Decisions, the region that carries them out, and what it costs."""

    choices: tuple[SegmentChoice, ...]
    region: Region
    projection: Projection


def plan_segments(problem: Problem, budget_bytes: int, options: Options, device_type: str) -> Planned:
    """Choose segments for a budget.

    Raises:
        BudgetError: nothing found fits; names the segment that needs most and the smallest budget found to work.
        InputError: an option does not fit the model.
    """
    search = _Search(problem, budget_bytes - problem.resident_bytes, options, device_type)
    found = search.best()
    if found is not None:
        return found
    smallest = search.smallest()
    needed = problem.resident_bytes + smallest.projection.peak_bytes
    worst = max(smallest.region.segments, key=lambda s: sum(problem.value_bytes(n) for n in s.scope.outputs + s.scope.sources))
    first, last = worst.scope.names[0], worst.scope.names[-1]
    raise BudgetError(
        f"the budget is {format_bytes(budget_bytes)}, but a step needs {format_bytes(needed)} at least "
        f"({format_bytes(problem.resident_bytes)} resident, {format_bytes(smallest.projection.peak_bytes)} for inputs, cuts and strips; "
        f"segment {problem.graph[first].label} .. {problem.graph[last].label}). "
        f"Raise the budget to {needed} bytes, give a smaller image, or leave out options that force tile or state_every.",
        needed_bytes=needed,
    )


class _Search:
    def __init__(self, problem: Problem, room_bytes: int, options: Options, device_type: str) -> None:
        self.problem, self.room_bytes, self.options, self.device_type = problem, room_bytes, options, device_type
        self.tried: list[Planned] = []
        self.cuts = [cut_positions(problem, phase.streamed) for phase in problem.phases.phases]
        self.depth = max((len(cuts) for cuts in self.cuts), default=1)

    def best(self) -> Planned | None:
        """The plan with the least recomputation that fits, as far as this planner looks."""
        if self.options.tile is not None:
            return self._fit(self.depth - 1)
        whole = self._fit(0)
        if whole is not None or self.options.strategy == "none":
            return whole
        # The deeper the cut the less memory is kept whole: bisect for the first that fits.
        low, high, found = 0, self.depth - 1, self._fit(self.depth - 1)
        if found is None:
            middles = sorted({self.depth // 2, 3 * self.depth // 4} - {0, self.depth - 1})
            return next((p for p in map(self._fit, middles) if p is not None), None)
        while high - low > 1:
            middle = (low + high) // 2
            planned = self._fit(middle)
            if planned is not None:
                high, found = middle, planned
            else:
                low = middle
        return found

    def smallest(self) -> Planned:
        """The smallest plan found, for the error message."""
        if self.options.strategy != "none":
            for depth in {self.depth - 1, self.depth // 2, 2 * self.depth // 3}:
                if depth > 0:
                    self._descend(depth)
        return min(self.tried, key=lambda planned: planned.projection.peak_bytes)

    def _descend(self, depth: int) -> None:
        """Try small strips with few states, coordinate by coordinate, until neither helps."""
        best: int | None = None
        for rows in self._heights(depth, smallest_first=True):
            num_steps = max(1, self._height(depth) // rows)
            results = [self._try(depth, rows, every).projection.peak_bytes for every in {1, max(1, isqrt(num_steps))}]
            if best is not None and min(results) > best:
                break
            best = min(results) if best is None else min(best, *results)

    def _fit(self, depth: int) -> Planned | None:
        """The first strip height and state interval that fit when the tiled parts reach to cut ``depth``."""
        if depth == 0:
            planned = self._try(0, 0, 1)
            return planned if planned.projection.peak_bytes <= self.room_bytes else None
        footprint, base_bytes = self._footprint(depth), self._base_bytes(depth)
        for rows in self._heights(depth):
            num_steps = -(-self._height(depth) // rows)
            for every in self._intervals(num_steps):
                estimate = base_bytes + footprint.working_bytes(rows) + footprint.states_bytes(num_steps, every, self._walks())
                # The formula leaves out what only the lowering knows (indices, gradients' copies): it may err by some.
                if estimate > 1.25 * self.room_bytes:
                    continue
                planned = self._try(depth, rows, every)
                if planned.projection.peak_bytes <= self.room_bytes:
                    return planned
        return None

    def _walks(self) -> int:
        return -(-self.problem.num_batch // self._batch_tile())

    def _batch_tile(self) -> int:
        return min(self.options.batch_tile or 1, self.problem.num_batch)

    def _intervals(self, num_steps: int) -> Iterator[int]:
        if self.options.state_every is not None:
            yield self.options.state_every
            return
        every = 1
        while every <= max(1, isqrt(num_steps) + 1):
            yield every
            every *= 2

    def _heights(self, depth: int, *, smallest_first: bool = False) -> list[int]:
        """Strip heights worth trying, the preferred one first."""
        height = self._height(depth)
        if self.options.tile is not None:
            return [min(self.options.tile[0], height)]
        stride = min(self._stride(depth), height)
        heights = [stride]
        while heights[-1] < height:
            heights.append(min(2 * heights[-1], height))
        if smallest_first:
            return sorted({max(1, stride // 8), max(1, stride // 2), *heights})
        limit = _PREFERRED_WORKING_BYTES.get(self.device_type, _PREFERRED_WORKING_BYTES_DEFAULT)
        fitting = [rows for rows in heights if self._footprint(depth).working_bytes(rows) <= limit] or [stride]
        small = [rows for rows in (stride // 2, stride // 4, stride // 8) if rows >= 1]
        return [*reversed(fitting), *small]

    def _height(self, depth: int) -> int:
        names = self._runs(depth)[0]
        streamed, inside = self.problem.phases.streamed, set(names)
        heights = [self.problem.shapes[o][2] for n in names for o in self.problem.graph[n].operands if o in streamed and o not in inside]
        return max(heights, default=1)

    def _stride(self, depth: int) -> int:
        return max(self.problem.stride(names) for names in self._runs(depth))

    def _runs(self, depth: int) -> list[tuple[str, ...]]:
        """The tiled part of each phase that has one."""
        runs = []
        for phase, cuts in zip(self.problem.phases.phases, self.cuts, strict=True):
            if phase.streamed:
                runs.append(phase.streamed[: cuts[min(depth, len(cuts) - 1)]])
        return [run for run in runs if run] or [()]

    def _footprint(self, depth: int) -> Footprint:
        problem = self.problem
        parts = [
            run_footprint(
                problem.graph,
                run,
                problem.phases.rows,
                problem.phases.streamed,
                problem.shapes,
                problem.requires_grad,
                self._batch_tile(),
            )
            for run in self._runs(depth)
            if run
        ]
        return max(parts, key=lambda part: part.working_bytes(self._stride(depth)))

    def _base_bytes(self, depth: int) -> int:
        """What is there whatever the strips: inputs, outputs twice, the tiled parts' results."""
        problem = self.problem
        graph = problem.graph
        size = sum(problem.value_bytes(name) for name in graph.inputs)
        size += (1 + problem.training) * sum(problem.value_bytes(name) for name in dict.fromkeys(graph.outputs))
        return size

    def _try(self, depth: int, rows: int, every: int) -> Planned:
        choices = self._choices(depth, rows, every)
        for planned in self.tried:
            if planned.choices == choices:
                return planned
        region = build_region(self.problem, choices, contiguous=not self.problem.channels_last)
        planned = Planned(choices, region, project(self.problem, region))
        self.tried.append(planned)
        return planned

    def _choices(self, depth: int, rows: int, every: int) -> tuple[SegmentChoice, ...]:
        choices: list[SegmentChoice] = []
        rest: tuple[str, ...] = ()
        for phase, cuts in zip(self.problem.phases.phases, self.cuts, strict=True):
            cut = cuts[min(depth, len(cuts) - 1)]
            tiled = phase.streamed[:cut]
            if tiled:
                if rest:
                    choices.append(SegmentChoice(nodes=rest, mode="whole"))
                    rest = ()
                choices.append(SegmentChoice(nodes=tiled, mode="tiled", strip_rows=rows, state_every=every, batch_tile=self._batch_tile()))
            rest += phase.streamed[cut:] + phase.tail
        if rest:
            choices.append(SegmentChoice(nodes=rest, mode="whole"))
        return tuple(choices)


def cut_positions(problem: Problem, names: Sequence[str]) -> list[int]:
    """Where a streamed run may be cut in two: 0, its end, and every place between that a single value crosses.

    Raises:
        InputError: never; kept whole runs are always legal.
    """
    graph = problem.graph
    inside = set(names)
    position = {name: i for i, name in enumerate(names)}
    last: dict[str, int] = {}
    for name in names:
        for operand in graph[name].operands:
            if operand in problem.phases.streamed:
                last[operand] = position[name]
    kept = [0] * (len(names) + 1)
    for value, end in last.items():
        start = position[value] + 1 if value in inside else 0
        for cut in range(max(start, 1), end + 1):
            kept[cut] += 1
    cuts = [cut for cut in range(1, len(names)) if kept[cut] == 1]
    return [0, *cuts, len(names)] if names else [0]


def check_tile(options: Options, width: int) -> None:
    """Refuse panels, which are not there yet.

    Raises:
        InputError: the tile asks for panels narrower than the image.
    """
    if options.tile is not None and options.tile[1] is not None and options.tile[1] < width:
        raise InputError(
            f"tile {options.tile}: panels of {options.tile[1]} columns of a {width} px wide image are not supported yet; "
            f"give (rows, None) or at least {width} columns"
        )
