"""Tiled heads of which values leave the device while the recomputed tail runs.

The segments of a tiled head pass large values to each other: the image of each norm, which the backward pass reads again. While the tail
runs, forward and back, they are idle. A proposal of :class:`~sft.planner.search.tiled_head.TiledHeadRecompute` may count on their bytes.
They then leave the device in one of two ways:

- *recomputed*: the segment that makes the value runs once more before its backward readers, if it reads inputs of the model alone. All
  values of one segment are recomputed in one run, before the first of these readers;
- *copied* to the host and back. The bytes are freed as late, and allocated as early, as the room allows, so that the copies overlap with
  as much computation as possible.

Values for which the room suffices stay. Reductions of cuts are in segments of their own (``sft.planner.search.separate_reductions``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product

from sft.planner.materialize import ProjectedPlan, materialize
from sft.planner.problem import PlanningProblem
from sft.planner.search.idle_values import IdleGap, idle_gaps
from sft.planner.search.separate_reductions import separate_reductions
from sft.planner.search.tiled_head import TiledHeadRecompute, TiledHeadRecomputePlan, head_and_tail_peaks
from sft.runtime.moves import LOSS_OP, ScheduleOp, SegmentSchedule, default_schedule

__all__ = ["relieved_head_plans"]


def relieved_head_plans(
    problem: PlanningProblem, heads: TiledHeadRecompute, room_bytes: int, nums_idle: Sequence[int]
) -> Iterator[ProjectedPlan]:
    """Plans that fit, with so many of the largest idle values of their heads off the device.

    The exact projections of a proposal correct the rooms of the next one: that of its tail by the difference, and that of its head first by
    the largest difference from the estimate, then by the ratio to it. The estimate lacks the gradients of the values that the segments of
    the head read, which grow with the height of the strips.
    """
    limits = problem.limits
    for num_idle, is_ratio in product(nums_idle, (False, True)):
        head_error, tail_error, best_cost, head_room_bytes = 0.0, 0.0, float("inf"), float(room_bytes)
        for _ in range(limits.max_projections):
            proposal = heads.cheapest(
                room_bytes - tail_error,
                limits.further_cost_share * best_cost,
                head_room_bytes=head_room_bytes,
                num_idle=num_idle,
            )
            if proposal is None:
                break
            relief = _Relief(problem, proposal, room_bytes)
            plans = relief.plans()
            fitting = [plan for plan in plans if plan.projection.fits(problem.resources, room_bytes)]
            if fitting:
                best_cost = proposal.cost
            yield from fitting
            if not plans:  # the values can be neither recomputed nor copied
                continue
            head_bytes, tail_bytes = (min(peaks) for peaks in zip(*map(head_and_tail_peaks, plans), strict=True))
            estimate = proposal.head_peak_bytes
            head_error = max(head_error, head_bytes - estimate)
            head_room_bytes = room_bytes * min(1.0, estimate / max(1.0, head_bytes)) if is_ratio else room_bytes - head_error
            tail_error += max(tail_bytes, min(head_bytes, room_bytes)) - room_bytes


class _Relief:
    """Schedules of one proposal in which its idle values leave the device.

    Args:
        problem: the planning problem.
        proposal: the proposal.
        room_bytes: bytes for the step.
    """

    def __init__(self, problem: PlanningProblem, proposal: TiledHeadRecomputePlan, room_bytes: int) -> None:
        self._problem, self._room_bytes = problem, room_bytes
        self._choices, order = separate_reductions(problem, proposal.choices, proposal.order)
        self._base = materialize(problem, self._choices, order or default_schedule(len(self._choices)))
        self._ops = self._base.region.schedule
        loss = self._ops.index(LOSS_OP)
        gaps = idle_gaps(self._base.region)
        #: the wait of each idle value from the forward to the backward pass
        self._gaps = {name: gap for name in proposal.idle for gap in gaps.get(name, ()) if gap.before < loss < gap.after}

    def plans(self) -> list[ProjectedPlan]:
        """The plan that recomputes what it can and copies the remaining values, and the plan that copies all of them."""
        recomputed = {name: segment for name in self._gaps for segment in self._writers(name)}
        copied = [gap for name, gap in self._gaps.items() if name not in recomputed]
        may_copy = self._problem.resources.host_budget_bytes != 0
        schedules = []
        if recomputed and (may_copy or not copied):
            schedules.append(self._with_copies(copied, recomputed))
        if self._gaps and may_copy:
            schedules.append(self._with_copies([*self._gaps.values()], {}))
        return [materialize(self._problem, self._choices, order) for order in schedules] if self._gaps else [self._base]

    def _writers(self, name: str) -> Iterator[int]:
        """The segment that makes a value, if it reads inputs of the model alone."""
        region = self._base.region
        for segment, (reads, writes) in enumerate(zip(region.reads, region.writes, strict=True)):
            if name in writes and all(region.graph[read].kind != "operator" for read in reads):
                yield segment

    def _with_copies(self, copied: Sequence[IdleGap], recomputed: Mapping[str, int]) -> SegmentSchedule:
        """The schedule with copies of some values, and with a second run of the segments that make other ones."""
        peaks = [record.peak_bytes for record in self._base.projection.op_records]
        sizes = {name: self._problem.sized.value_bytes(name) for name in self._gaps}
        reruns = {
            segment: min(self._gaps[name].after for name, writer in recomputed.items() if writer == segment)
            for segment in set(recomputed.values())
        }
        ends = {gap.target: gap.after for gap in copied} | {name: reruns[segment] for name, segment in recomputed.items()}
        for name, end in ends.items():
            for position in range(self._gaps[name].before + 1, end):
                peaks[position] -= sizes[name]
        before, after = defaultdict[int, list[ScheduleOp]](list), defaultdict[int, list[ScheduleOp]](list)
        for gap in copied:
            last, first, size = gap.before, gap.after, sizes[gap.target]
            while last + 1 < first and peaks[last + 1] + size <= self._room_bytes:
                last += 1
                peaks[last] += size
            while last + 1 < first - 1 and peaks[first - 1] + size <= self._room_bytes:
                first -= 1
                peaks[first] += size
            if last + 1 < first:
                after[gap.before].append(ScheduleOp("offload", value=gap.target))
                after[last].append(ScheduleOp("release", value=gap.target))
                before[first].append(ScheduleOp("prefetch", value=gap.target))
        first_runs = {self._ops.index(ScheduleOp("forward", segment, True)) for segment in reruns}
        for segment, position in sorted(reruns.items()):
            before[position].append(ScheduleOp("forward", segment, True))
        ops = (replace(op, keep=False) if position in first_runs else op for position, op in enumerate(self._ops))
        return tuple(op for position, run in enumerate(ops) for op in (*before[position], run, *after[position]))
