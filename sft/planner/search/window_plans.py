"""Plans that take some rows of windows at a time: runs of untiled operators on the windows of one image.

Streamed operators run in strips, as in every tiled plan. Of the untiled operators of a phase, those that compute every row of windows on
its own (:mod:`sft.analysis.tiling.window_runs`) are walked in chunks of rows, or of windows of a row, forward and once more backward.
Operators that exchange rows of windows run untiled between them. Streamed operators without products right before a run (a norm, a cyclic
shift, the partition) run again before its backward pass, so that their results are not kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter

from sft.analysis.ir.ops.sample_rules import PRODUCT_TARGETS
from sft.analysis.tiling.window_runs import WindowStage
from sft.planner.cost.roofline import DeviceRates
from sft.planner.materialize import ProjectedPlan, materialize
from sft.planner.plan import SegmentChoice
from sft.planner.problem import PlanningProblem
from sft.planner.search.samples import MIN_UNTILED_SHARE, NUM_CHECKPOINTS, cost_of, largest_chunk
from sft.planner.search.tiled import CandidateGrid
from sft.runtime.moves import LOSS_OP, ScheduleOp, SegmentSchedule

__all__ = ["WindowPlans", "has_window_runs"]


def has_window_runs(problem: PlanningProblem) -> bool:
    """True if untiled operators of window runs make a considerable share of the bytes of all values."""
    sized = problem.sized
    names = (name for windows in sized.window_runs.values() for name in windows.run_names)
    untiled_bytes = sum(sized.value_bytes(name) for name in names if sized.phases.rows[name].role == "whole")
    return untiled_bytes > MIN_UNTILED_SHARE * sum(map(sized.value_bytes, sized.operators))


class WindowPlans:
    """Plans that take some rows of windows at a time.

    Args:
        grid: candidates for the tiled segments: strip heights and state policies.
        rates: rates of programs.
    """

    def __init__(self, grid: CandidateGrid, rates: DeviceRates) -> None:
        self._problem, self._grid, self._rates = grid.problem, grid, rates
        self._plans: dict[tuple[int, int, int, int], ProjectedPlan] = {}
        stages = [stage for windows in self._problem.sized.window_runs.values() for stage in windows.stages]
        self._num_windows = max(stage.num_windows for stage in stages)

    def smallest(self) -> list[ProjectedPlan]:
        """The plans of one window at a time, in low strips; the smallest of them also with checkpoints within a window."""
        strips = self._strips(lowest_first=True)
        plans = [self.plan(1, height, policy) for height, policy in strips]
        if self._problem.sized.training:
            best = min(range(len(plans)), key=lambda index: plans[index].projection.peak_bytes)
            plans += [self.plan(1, *strips[best], num_cuts) for num_cuts in NUM_CHECKPOINTS]
        return plans

    def cheapest(self, room_bytes: int, worse_than: float) -> tuple[float, ProjectedPlan] | None:
        """The plan of the tallest strips, and then of most windows at a time, that fits and costs less than ``worse_than``."""
        max_projections = self._problem.limits.max_projections
        for strips in self._strips(lowest_first=False):
            plan = largest_chunk(partial(self._plan, strips), 1, self._num_windows, self._num_windows, room_bytes, max_projections)
            cost = math.inf if plan is None else cost_of(plan, self._rates)
            if plan is not None and cost < worse_than:
                return cost, plan
        fitting = [plan for plan in self.smallest() if plan.projection.peak_bytes <= room_bytes]
        costs = [(cost_of(plan, self._rates), plan) for plan in fitting]
        best = min(costs, key=itemgetter(0), default=None)
        return best if best is not None and best[0] < worse_than else None

    def plan(self, num_windows: int, height: int, policy: int, num_cuts: int = 0) -> ProjectedPlan:
        """The plan of about so many windows at a time, with this strip height and state policy of the grid.

        Args:
            num_windows: windows at a time.
            height: index of the strip height.
            policy: index of the state policy.
            num_cuts: checkpoints within a chunk of windows.
        """
        return self._plan((height, policy), num_windows, num_cuts)

    def _plan(self, strips: tuple[int, int], num_windows: int, num_cuts: int = 0) -> ProjectedPlan:
        key = (*strips, num_windows, num_cuts)
        if key not in self._plans:
            choices = [
                replace(choice, state_slots=num_cuts) if choice.mode == "whole" and choice.strip_rows else choice
                for choice in _merged(self._choices(num_windows, *strips))
            ]
            self._plans[key] = materialize(self._problem, choices, self._order(choices))
        return self._plans[key]

    def _choices(self, num_windows: int, height: int, policy: int) -> Iterator[SegmentChoice]:
        grid, sized = self._grid, self._problem.sized
        for index, phase in enumerate(sized.phases.phases):
            windows = sized.window_runs.get(index)
            if phase.streamed and (windows is None or not windows.has_streamed):
                for names in self._split_movement(index, phase.streamed):
                    yield grid.tiling.choice(names, grid.axes.strip_rows[height], grid.axes.policies[policy])
            for stage in windows.stages if windows is not None else [WindowStage(names=phase.tail)]:
                if stage.names:
                    yield _stage_choice(stage, num_windows)

    def _split_movement(self, index: int, names: tuple[str, ...]) -> list[tuple[str, ...]]:
        """The streamed operators of a phase up to a cut of few bytes, and those without products after it.

        The latter (a norm, padding, the partition into windows) are recomputed from the cut before the backward pass of the windows, which
        takes no FLOP that is counted. So their results are not kept.
        """
        sized = self._problem.sized
        last = max((position for position, name in enumerate(names) if sized.graph[name].target in PRODUCT_TARGETS), default=-1)
        cuts = [cut for cut in self._grid.axes.cuts[index] if last < cut < len(names) and cut]
        if last < 0 or not cuts:
            return [names]

        def kept_bytes(cut: int) -> int:
            crossing = {*sized.graph.live_out(names[:cut]), *sized.graph.live_out(names[cut:])}
            return sum(map(sized.value_bytes, crossing))

        cut = min(cuts, key=kept_bytes)
        return [names[:cut], names[cut:]]

    def _order(self, choices: Sequence[SegmentChoice]) -> SegmentSchedule | None:
        """Schedule that recomputes operators without products right before the backward pass of the windows that they lead to."""
        if not self._problem.sized.training or self._problem.resources.weights is not None:
            return None
        is_moved = [choice.mode == "tiled" and not self._has_products(choice) for choice in choices]
        again: dict[int, range] = {}
        for index, choice in enumerate(choices):
            first = index
            while choice.mode == "whole" and choice.strip_rows and first and is_moved[first - 1]:
                first -= 1
            again[index] = range(first, index)
        repeated = {index for indices in again.values() for index in indices}
        forward = [ScheduleOp("forward", index, index not in repeated) for index in range(len(choices))]
        backward = (
            op
            for index in reversed(range(len(choices)))
            for op in (*(ScheduleOp("forward", each, True) for each in again[index]), ScheduleOp("backward", index))
        )
        return (*forward, LOSS_OP, *backward) if repeated else None

    def _has_products(self, choice: SegmentChoice) -> bool:
        return any(self._problem.sized.graph[name].target in PRODUCT_TARGETS for name in choice.nodes)

    def _strips(self, *, lowest_first: bool) -> list[tuple[int, int]]:
        """Indices of strip heights and state policies to try: a few heights, with every state and with a middle number of them."""
        phases, runs, axes = self._problem.sized.phases.phases, self._problem.sized.window_runs, self._grid.axes
        if all(not phase.streamed or (index in runs and runs[index].has_streamed) for index, phase in enumerate(phases)):
            return [(0, 0)]
        heights = sorted(axes.sampled, reverse=not lowest_first)
        policies = sorted({0, len(axes.policies) // 2})
        return [(height, policy) for height in heights[: self._problem.limits.num_smallest] for policy in policies]


def _stage_choice(stage: WindowStage, num_windows: int) -> SegmentChoice:
    """Decision of a stage: at most so many windows at a time, if it may take less than a row of them."""
    if stage.rows is None:
        return SegmentChoice(nodes=stage.names, mode="whole")
    per_row = 1 if stage.columns is None else stage.columns.num_samples
    if num_windows < per_row:
        return SegmentChoice(nodes=stage.names, mode="whole", strip_rows=1, panel_cols=num_windows)
    return SegmentChoice(nodes=stage.names, mode="whole", strip_rows=min(num_windows // per_row, stage.rows.num_samples))


def _merged(choices: Iterator[SegmentChoice]) -> list[SegmentChoice]:
    """The decisions with neighbouring untiled segments merged."""
    merged: list[SegmentChoice] = []
    for choice in choices:
        if merged and all(each.mode == "whole" and not each.strip_rows for each in (merged[-1], choice)):
            choice = SegmentChoice(nodes=merged.pop().nodes + choice.nodes, mode="whole")
        merged.append(choice)
    return merged
