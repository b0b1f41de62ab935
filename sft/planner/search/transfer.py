"""Transfer of a plan to another number of samples: its decisions apply to a graph that differs in this number alone.

Bags of tiles have another number of tiles at each step, and a search takes seconds. But the decisions of a plan hardly depend on it: which
operators run in strips, how tall these are, how many samples a chunk has. So they are applied to the new graph, and projected once. The
bytes that grow with the samples (pooled vectors, resident inputs) may ask for smaller chunks: those of three quarters, a half, ... of the
samples are tried. A plan that fits in this way is taken unless the untiled model fits and takes less time, or the plan recomputes much and
leaves much of the room unused; then other decisions may be better, and the search decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from sft.common.errors import InputError
from sft.planner.materialize import ProjectedPlan, materialize
from sft.planner.options import Options
from sft.planner.plan import Plan, SegmentChoice
from sft.planner.problem import PlanningProblem
from sft.planner.projection import plain_programs
from sft.planner.search.auto import by_time
from sft.runtime.moves import parse_schedule

__all__ = ["can_transfer", "has_decisions", "transferred_plan"]


def has_decisions(plan: Plan) -> bool:
    """True if a plan for one device differs from plain PyTorch."""
    is_chunked = any(segment.mode == "tiled" or segment.takes_samples or segment.takes_windows for segment in plan.segments)
    return plan.mesh is None and (is_chunked or bool(plan.order))


def can_transfer(problem: PlanningProblem, plan: Plan) -> bool:
    """True if the decisions of a plan apply to a problem, which may have another number of samples."""
    resources = problem.resources
    placements = resources.input_placements, resources.output_placements
    names = sorted(name for segment in plan.segments for name in segment.nodes)
    is_same_call = plan.training == problem.sized.training and (plan.input_placements, plan.output_placements) == placements
    is_streamed = (plan.streamed_weights > 0, resources.weights is not None)
    return is_same_call and is_streamed[0] == is_streamed[1] and not plan.repeat_budgets and names == sorted(problem.sized.operators)


def transferred_plan(
    problem: PlanningProblem, plan: Plan, options: Options, room_bytes: int, accepts: Callable[[ProjectedPlan], bool]
) -> ProjectedPlan | None:
    """A plan with the decisions of one for another number of samples; ``None`` if it does not fit, or a search may find a better one.

    Args:
        problem: the planning problem.
        plan: the plan for another number of samples.
        options: constraints on the plan.
        room_bytes: bytes that a step may take.
        accepts: a further condition.
    """
    fitting = (each for each in _transfers(problem, plan, options) if each.projection.fits(problem.resources, room_bytes) and accepts(each))
    transferred = next(fitting, None)
    if transferred is None or not _is_economical(problem, transferred, room_bytes):
        return None
    untiled = _untiled_plan(problem, options, room_bytes)
    if untiled is None or not accepts(untiled):
        return transferred
    return by_time(problem, [untiled, transferred], problem.resources.rates)[0]


def _untiled_plan(problem: PlanningProblem, options: Options, room_bytes: int) -> ProjectedPlan | None:
    """The model without strips, chunks and recomputation; ``None`` if options exclude it, or it does not fit."""
    is_constrained = options.tile or options.halo != "auto" or options.state_every or options.state_slots or options.batch_tile
    largest_bytes = max((program.peak_bytes for program in plain_programs(problem)), default=0)
    if is_constrained or problem.resources.weights is not None or largest_bytes > room_bytes:
        return None
    plan = materialize(problem, (SegmentChoice(nodes=problem.sized.operators, mode="whole"),))
    return plan if plan.projection.fits(problem.resources, room_bytes) else None


def _is_economical(problem: PlanningProblem, plan: ProjectedPlan, room_bytes: int) -> bool:
    """True if a plan recomputes little, or uses most of the room."""
    plain_flops = sum(program.flops for program in plain_programs(problem))
    limits = problem.limits
    uses_room = plan.projection.peak_bytes >= limits.transferred_room_share * room_bytes
    return uses_room or plan.projection.flops <= limits.max_transferred_flops * plain_flops


def _transfers(problem: PlanningProblem, plan: Plan, options: Options) -> Iterator[ProjectedPlan]:
    """The plan for the samples of a problem, with ever smaller chunks of samples."""
    tried: set[tuple[SegmentChoice, ...]] = set()
    order = parse_schedule(plan.order, len(plan.segments)) if plan.order and problem.sized.training else None
    largest = max((segment.batch_tile for segment in plan.segments if segment.takes_samples), default=1)
    shares = (share for halvings in range(largest.bit_length() + 1) for share in (1 / 2**halvings, 0.75 / 2**halvings))
    for share in shares:
        choices = tuple(_choice_for(problem, plan, segment.choice, options, share) for segment in plan.segments)
        if choices not in tried:
            tried.add(choices)
            try:
                yield materialize(problem, choices, order)
            except InputError:  # an operator of a run exchanges the samples of this graph
                return


def _choice_for(problem: PlanningProblem, plan: Plan, choice: SegmentChoice, options: Options, share: float) -> SegmentChoice:
    """The decision about a segment for the samples of a problem, in chunks of a share of the samples."""
    num_samples, planned_samples = problem.sized.num_batch, plan.num_samples
    if choice.mode == "tiled":
        return replace(choice, batch_tile=problem.sized.batch_tile(options.batch_tile))
    if choice.strip_rows:
        return choice
    takes_all = not 0 < choice.batch_tile < planned_samples
    chunk = num_samples if takes_all else max(1, int(share * choice.batch_tile))
    if chunk >= num_samples:
        return replace(choice, batch_tile=0, state_slots=0)
    return replace(choice, batch_tile=chunk)
