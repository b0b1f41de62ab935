"""Plans with the batch as streamed axis: runs of operators that are independent along samples, for some samples at a time.

A run of untiled operators (a vision transformer on a bag of tiles) needs memory for every sample that it takes at once. It runs in
chunks of samples, forward and once more backward, at one recomputation of its FLOPs. Operators that exchange samples, such as the pooling
of the bag, run untiled between the runs. Runs of images alone are left to strips, which take few samples at a time as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from sft.planner.cost.device_rates import DeviceRates
from sft.planner.materialize import ProjectedPlan, materialize
from sft.planner.options import Options
from sft.planner.plan import SegmentChoice
from sft.planner.problem import PlanningProblem

__all__ = ["MIN_UNTILED_SHARE", "NUM_CHECKPOINTS", "SamplePlans", "cost_of", "largest_chunk"]

#: Least share of the bytes of all values that untiled operators of runs make; below it strips hold nearly all of the model.
MIN_UNTILED_SHARE = 0.25
#: Numbers of checkpoints within a chunk that are tried.
NUM_CHECKPOINTS = (1, 3, 7)


class SamplePlans:
    """Plans that take some samples at a time.

    Args:
        problem: the planning problem.
        options: ``batch_tile`` sets the number of samples.
        rates: rates of programs.
    """

    def __init__(self, problem: PlanningProblem, options: Options, rates: DeviceRates) -> None:
        self._problem, self._rates, self._requested = problem, rates, options.batch_tile
        self._plans: dict[tuple[int, int], ProjectedPlan] = {}
        self.exist = self._has_untiled_runs()

    def _has_untiled_runs(self) -> bool:
        sized = self._problem.sized
        if self._requested is not None and self._requested >= sized.num_batch:
            return False
        runs = sized.sample_runs
        if runs is None:
            return False
        in_runs = (name for stage in runs.stages if stage.is_run for name in stage.names if name in stage.axes)
        untiled_bytes = sum(sized.value_bytes(name) for name in in_runs if sized.phases.rows[name].role == "whole")
        return untiled_bytes > MIN_UNTILED_SHARE * sum(map(sized.value_bytes, sized.operators))

    def smallest(self) -> ProjectedPlan:
        """The plan of fewest samples at a time, with as many checkpoints within them as save bytes."""
        best = self.plan(self._requested or 1)
        for num_cuts in NUM_CHECKPOINTS if self._problem.sized.training else ():
            plan = self.plan(self._requested or 1, num_cuts)
            if plan.projection.peak_bytes >= best.projection.peak_bytes:
                break
            best = plan
        return best

    def cheapest(self, room_bytes: int, worse_than: float) -> tuple[float, ProjectedPlan] | None:
        """The plan of most samples at a time that fits and costs less than ``worse_than``, with its cost."""
        least, most = self._requested or 1, self._requested or self._problem.sized.num_batch // 2
        plan = largest_chunk(self.plan, least, most, self._problem.sized.num_batch, room_bytes, self._problem.limits.max_projections)
        cost = math.inf if plan is None else cost_of(plan, self._rates)
        if plan is None and self._problem.sized.training:
            # Only with checkpoints within a sample: the fewest with which it fits.
            plans = (self.plan(least, num_cuts) for num_cuts in NUM_CHECKPOINTS)
            plan = next((plan for plan in plans if plan.projection.peak_bytes <= room_bytes), None)
            cost = math.inf if plan is None else cost_of(plan, self._rates)
        return (cost, plan) if plan is not None and cost < worse_than else None

    def plan(self, num_samples: int, num_cuts: int = 0) -> ProjectedPlan:
        """The plan of so many samples at a time, with so many checkpoints within them."""
        key = (num_samples, num_cuts)
        if key not in self._plans:
            runs = self._problem.sized.sample_runs
            assert runs is not None
            run, exchange = {"batch_tile": num_samples, "state_slots": num_cuts}, {"batch_tile": 0, "state_slots": 0}
            choices = [
                SegmentChoice(nodes=stage.names, mode="whole", batch_tile=kind["batch_tile"], state_slots=kind["state_slots"])
                for stage, kind in ((stage, run if stage.is_run else exchange) for stage in runs.stages)
            ]
            self._plans[key] = materialize(self._problem, choices)
        return self._plans[key]


def largest_chunk(
    plan_of: Callable[[int], ProjectedPlan], least: int, most: int, num_samples: int, room_bytes: int, max_projections: int
) -> ProjectedPlan | None:
    """The plan of most samples at a time that fits; ``None`` if none does.

    Args:
        plan_of: the plan of a number of samples at a time.
        least: least number.
        most: largest number.
        num_samples: number of all samples.
        room_bytes: bytes that a step may take.
        max_projections: plans to try, about.
    """
    if plan_of(least).projection.peak_bytes > room_bytes:
        return None
    upper = most
    for _ in range(max_projections):
        if least >= upper:
            break
        # Peaks grow by nearly equal bytes with each sample.
        peak_bytes = plan_of(least).projection.peak_bytes
        slope = max(1, plan_of(least + 1).projection.peak_bytes - peak_bytes)
        proposed = max(least + 1, min(upper, least + (room_bytes - peak_bytes) // slope))
        proposed = max(least + 1, -(-num_samples // -(-num_samples // proposed)))  # the least number that takes as few chunks
        if plan_of(proposed).projection.peak_bytes <= room_bytes:
            least = proposed
        else:
            upper = proposed - 1
    return plan_of(least)


def cost_of(plan: ProjectedPlan, rates: DeviceRates) -> float:
    """FLOPs and overheads of a step, in FLOPs."""
    runs = (run for record in plan.projection.op_records for run in record.runs)
    return sum(rates.seconds(program) * count for program, count in runs) * rates.flops_per_second
