"""Plans that take some rows of windows, or some tokens, at a time: runs of untiled operators on the windows or tokens of one image.

Streamed operators run in strips, as in every tiled plan. Of the untiled operators of a phase, those that compute every row of windows
(every token) on its own (:mod:`sft.analysis.tiling.window_runs`) run in chunks of rows, or of windows of a row, forward and once
more backward. Operators that exchange rows of windows run untiled between them. Streamed operators without products right before a run
(a norm, a cyclic shift, the partition) run again before its backward pass, so that their results are not kept.

**Queries, keys and values** cross from one run to the next, with the residual stream. To keep the latter alone, the end of a run that
computes them is a segment of its own, which also runs again before the backward pass of the attention that reads them.

**On the host.** Where no such plan fits, and the host may be used, values between segments wait there for the backward pass
(:mod:`sft.planner.search.idle_values`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import product
from operator import itemgetter

from sft.analysis.ir.ops.sample_rules import PRODUCT_TARGETS
from sft.analysis.tiling.window_runs import WindowStage
from sft.planner.cost.device_rates import DeviceRates
from sft.planner.cost.step_time import project_timeline
from sft.planner.materialize import ProjectedPlan, materialize
from sft.planner.plan import SegmentChoice
from sft.planner.problem import PlanningProblem
from sft.planner.search.idle_values import fewest_offloaded, smallest_offloaded
from sft.planner.search.samples import MIN_UNTILED_SHARE, NUM_CHECKPOINTS, cost_of, largest_chunk
from sft.planner.search.tiled import CandidateGrid
from sft.runtime.moves import LOSS_OP, ScheduleOp, SegmentSchedule

__all__ = ["WindowPlans", "has_window_runs"]

#: Largest share of the FLOPs of a run in its end that runs again, and least share of the bytes of its results that this saves.
_END_FLOPS_SHARE, _SAVED_SHARE = 0.5, 0.3


def has_window_runs(problem: PlanningProblem) -> bool:
    """True if untiled operators of window runs make a considerable share of the bytes of all values, or read keys and values in full.

    Attention over all pixels takes more bytes than its values have.
    """
    sized = problem.sized
    if any(stage.read_in_full for windows in sized.window_runs.values() for stage in windows.stages):
        return True
    names = (name for windows in sized.window_runs.values() for name in windows.run_names)
    untiled_bytes = sum(sized.value_bytes(name) for name in names if sized.phases.rows[name].role == "whole")
    return untiled_bytes > MIN_UNTILED_SHARE * sum(map(sized.value_bytes, sized.operators))


class WindowPlans:
    """Plans that take some rows of windows at a time.

    Args:
        problem: the planning problem.
        grid: candidates for the tiled segments: strip heights and state policies.
        rates: rates of programs.
    """

    def __init__(self, problem: PlanningProblem, grid: CandidateGrid, rates: DeviceRates) -> None:
        self._problem, self._grid, self._rates = problem, grid, rates
        self._plans: dict[tuple[int, int, int, int, bool], ProjectedPlan] = {}
        stages = [stage for windows in self._problem.sized.window_runs.values() for stage in windows.stages]
        self._num_windows = max(stage.num_windows for stage in stages)
        self._ends: dict[tuple[str, ...], tuple[str, ...]] = {}

    def smallest(self) -> list[ProjectedPlan]:
        """The plans of one window at a time, in low strips; the smallest of them also with checkpoints within a window, and those of
        least memory with values on the host.
        """
        plans = self._smallest_on_device
        bases = {plan.key: plan for plan in (min(plans, key=_peak_bytes), min(plans[: len(self._lowest_strips)], key=_peak_bytes))}
        offloaded = (smallest_offloaded(self._problem, plan) for plan in bases.values() if self._may_offload)
        return [*plans, *(plan for plan in offloaded if plan is not None)]

    @cached_property
    def _lowest_strips(self) -> list[tuple[int, int]]:
        return self._strips(lowest_first=True)

    @cached_property
    def _smallest_on_device(self) -> list[ProjectedPlan]:
        """These plans without values on the host; the first ones compute nothing again but the windows."""
        strips = [(*each, repeats) for repeats in self._repeats for each in self._lowest_strips]
        plans = [self.plan(1, height, policy, repeats=repeats) for height, policy, repeats in strips]
        if self._problem.sized.training:
            height, policy, repeats = strips[min(range(len(plans)), key=lambda index: _peak_bytes(plans[index]))]
            plans += [self.plan(1, height, policy, num_cuts, repeats=repeats) for num_cuts in NUM_CHECKPOINTS]
        return plans

    def cheapest(self, room_bytes: int, worse_than: float) -> tuple[float, ProjectedPlan] | None:
        """The plan of the tallest strips, and then of most windows at a time, that fits and costs less than ``worse_than``.

        Values wait on the host only where no other plan fits.
        """
        max_projections = self._problem.limits.max_projections
        for repeats, strips in product(self._repeats, self._strips(lowest_first=False)):
            plan_of = partial(self._plan, strips, repeats=repeats)
            plan = largest_chunk(plan_of, 1, self._num_windows, self._num_windows, room_bytes, max_projections)
            cost = math.inf if plan is None else cost_of(plan, self._rates)
            if plan is not None and cost < worse_than:
                return cost, plan
        fitting = [plan for plan in self._smallest_on_device if _peak_bytes(plan) <= room_bytes]
        costs = [(cost_of(plan, self._rates), plan) for plan in fitting]
        best = min(costs, key=itemgetter(0), default=None) or self._cheapest_offloaded(room_bytes)
        return best if best is not None and best[0] < worse_than else None

    def _cheapest_offloaded(self, room_bytes: int) -> tuple[float, ProjectedPlan] | None:
        """The plan of fewest FLOPs that fits with values on the host, with its cost."""
        bases = sorted(self._smallest_on_device, key=lambda plan: plan.projection.flops) if self._may_offload else ()
        offloaded = (fewest_offloaded(self._problem, plan, room_bytes) for plan in bases)
        plan = next((plan for plan in offloaded if plan is not None), None)
        if plan is None:
            return None
        timeline = project_timeline(self._problem, plan.choices, plan.projection, self._rates)
        return timeline.estimated_seconds * self._rates.flops_per_second, plan

    @property
    def _may_offload(self) -> bool:
        """True if values may wait on the host for the backward pass."""
        resources = self._problem.resources
        return self._problem.sized.training and resources.host_budget_bytes != 0 and resources.weights is None

    @cached_property
    def _repeats(self) -> tuple[bool, ...]:
        """Values of ``repeats`` to try."""
        sized = self._problem.sized
        has_ends = any(self._end_of(stage) for windows in sized.window_runs.values() for stage in windows.stages)
        return (False, True) if has_ends and sized.training and self._problem.resources.weights is None else (False,)

    def plan(self, num_windows: int, height: int, policy: int, num_cuts: int = 0, *, repeats: bool = False) -> ProjectedPlan:
        """The plan of about so many windows at a time, with this strip height and state policy of the grid.

        Args:
            num_windows: windows at a time.
            height: index of the strip height.
            policy: index of the state policy.
            num_cuts: checkpoints within a chunk of windows.
            repeats: True if queries, keys and values are computed again before the backward pass of attention.
        """
        return self._plan((height, policy), num_windows, num_cuts, repeats=repeats)

    def _plan(self, strips: tuple[int, int], num_windows: int, num_cuts: int = 0, *, repeats: bool = False) -> ProjectedPlan:
        key = (*strips, num_windows, num_cuts, repeats)
        if key not in self._plans:
            choices = [
                replace(choice, state_slots=num_cuts) if choice.mode == "whole" and choice.strip_rows else choice
                for choice in _merged(self._choices(num_windows, *strips, repeats=repeats))
            ]
            self._plans[key] = materialize(self._problem, choices, self._order(choices))
        return self._plans[key]

    def _choices(self, num_windows: int, height: int, policy: int, *, repeats: bool) -> Iterator[SegmentChoice]:
        grid, sized = self._grid, self._problem.sized
        for index, phase in enumerate(sized.phases.phases):
            windows = sized.window_runs.get(index)
            if phase.streamed and (windows is None or not windows.has_streamed):
                for names in self._split_movement(index, phase.streamed):
                    yield grid.tiling.choice(names, grid.axes.strip_rows[height], grid.axes.policies[policy])
            for stage in windows.stages if windows is not None else [WindowStage(names=phase.tail)]:
                for names in self._divided(stage) if repeats else [stage.names]:
                    if names:
                        yield _stage_choice(replace(stage, names=names), num_windows)

    def _divided(self, stage: WindowStage) -> list[tuple[str, ...]]:
        """The operators of a run, and its end if that is a segment of its own."""
        end = self._end_of(stage)
        return [stage.names[: len(stage.names) - len(end)], end]

    def _end_of(self, stage: WindowStage) -> tuple[str, ...]:
        """The last operators of a run if their results are large and take few FLOPs; empty if there are none.

        They are cut off where the fewest bytes remain to be kept.
        """
        if stage.rows is None:
            return ()
        if stage.names not in self._ends:
            self._ends[stage.names] = self._find_end(stage.names)
        return self._ends[stage.names]

    def _find_end(self, names: tuple[str, ...]) -> tuple[str, ...]:
        results = frozenset(self._problem.sized.graph.results)
        end_flops, best, best_bytes = 0, len(names), (1 - _SAVED_SHARE) * self._crossing_bytes(names)
        for cut in range(len(names) - 1, -1, -1):
            end_flops += self._flops(names[cut])
            if end_flops > _END_FLOPS_SHARE * self._run_flops or names[cut] in results:
                break
            kept_bytes = self._crossing_bytes(names[:cut])
            if kept_bytes < best_bytes:
                best, best_bytes = cut, kept_bytes
        return names[best:]

    @cached_property
    def _run_flops(self) -> int:
        """FLOPs of the run with most of them."""
        stages = (stage for windows in self._problem.sized.window_runs.values() for stage in windows.stages if stage.rows is not None)
        return max(sum(map(self._flops, stage.names)) for stage in stages)

    def _crossing_bytes(self, names: Sequence[str]) -> int:
        """Bytes of the values of some operators that other ones read."""
        return sum(map(self._problem.sized.value_bytes, self._problem.sized.graph.live_out(names)))

    def _flops(self, name: str) -> int:
        """FLOPs of a product, about; 0 for other operators."""
        node, shapes = self._problem.sized.graph[name], self._problem.sized.shapes
        if node.target not in PRODUCT_TARGETS:
            return 0
        operands = [shapes[operand] for operand in node.operands if len(shapes[operand]) > 1]
        return math.prod(node.shape) * max((shape[-2] if len(shape) > 2 else math.prod(shape[1:]) for shape in operands[1:]), default=1)

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
        ends = set(self._ends.values())
        is_moved = [choice.nodes in ends or (choice.mode == "tiled" and not self._has_products(choice)) for choice in choices]
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


def _peak_bytes(plan: ProjectedPlan) -> int:
    return plan.projection.peak_bytes


def _stage_choice(stage: WindowStage, num_windows: int) -> SegmentChoice:
    """Decision of a stage: at most so many windows at a time, if it may take less than a row of them."""
    if stage.rows is None:
        return SegmentChoice(nodes=stage.names, mode="whole")
    batch_tile = 0 if stage.images is None else 1
    per_row = 1 if stage.columns is None else stage.columns.num_samples
    if num_windows < per_row:
        return SegmentChoice(nodes=stage.names, mode="whole", strip_rows=1, panel_cols=num_windows, batch_tile=batch_tile)
    num_rows = min(num_windows // per_row * stage.rows_per_chunk, stage.rows.num_samples)
    return SegmentChoice(nodes=stage.names, mode="whole", strip_rows=num_rows, batch_tile=batch_tile)


def _merged(choices: Iterator[SegmentChoice]) -> list[SegmentChoice]:
    """The decisions with neighbouring untiled segments merged."""
    merged: list[SegmentChoice] = []
    for choice in choices:
        if merged and all(each.mode == "whole" and not each.strip_rows for each in (merged[-1], choice)):
            choice = SegmentChoice(nodes=merged.pop().nodes + choice.nodes, mode="whole")
        merged.append(choice)
    return merged
