"""Strategy ``auto``: the cheapest plan among strips, chunks of samples, recomputed stages, offloaded values and independent tiles.

Candidate grids estimate cost and peak of thousands of tiled plans. The cheapest candidate that should fit is projected exactly; the error
of its estimate corrects the next choice. Every returned plan has an exact projection.

If no plan fits, the search looks for the smallest plan, independent of the budget. As long as a search below its peak finds another plan,
that one takes its place. So a budget of the smallest plan's peak always has a plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

import numpy as np

from sft.planner.cost.device_rates import DeviceRates, num_calls
from sft.planner.cost.step_time import project_timeline
from sft.planner.cost.tiling import choose_panel_cols
from sft.planner.materialize import ProjectedPlan, least_peak_bytes, materialize
from sft.planner.options import Options
from sft.planner.plan import SegmentChoice
from sft.planner.problem import PlanningProblem
from sft.planner.projection import plain_programs
from sft.planner.search.independent_tiles import cheaper_tile_plans, smallest_tile_plans
from sft.planner.search.relieved_heads import relieved_head_plans
from sft.planner.search.samples import SamplePlans
from sft.planner.search.separate_reductions import with_separate_reductions
from sft.planner.search.split_runs import split_run_plans
from sft.planner.search.staged import (
    cheapest_tiled_head,
    offloaded_plans,
    offloaded_tail_plans,
    published_plans,
    smallest_offloaded_tails,
    smallest_staged_plans,
)
from sft.planner.search.tiled import Candidate, CandidateGrid
from sft.planner.search.tiled_head import TiledHeadRecompute
from sft.planner.search.window_plans import WindowPlans, has_window_runs
from sft.planner.stages import StagedModel
from sft.planner.streamed_cuts import minimize_streamed_cuts, stream_seconds, streamable_values

__all__ = ["AutoSearch", "by_time", "candidate_grids", "cheapest_by_height"]


class AutoSearch:
    """Search for plans of one problem; candidate grids are kept for the next search.

    Args:
        problem: the planning problem.
        options: constraints on the plan.
        rates: rates of the kind of device.
    """

    def __init__(self, problem: PlanningProblem, options: Options, rates: DeviceRates) -> None:
        self._problem, self._options, self._rates = problem, options, rates
        self._may_tile = options.is_automatic and options.tile is None and options.halo == "auto"
        self._known_grids: list[CandidateGrid] = []
        self._known_streaming_grids: list[CandidateGrid] = []
        self._new_grids = candidate_grids(problem, options, rates)

    def fastest(self, room_bytes: int) -> ProjectedPlan | None:
        """The fastest of all plans that fit; ``None`` if none does."""
        fitting = self._fitting(room_bytes)
        return _cheapest_or_offloaded(self._problem, fitting, self._rates) if fitting else None

    def candidates(self, room_bytes: int) -> Iterator[ProjectedPlan]:
        """Plans that fit and that may be the fastest: those of least cost, those of the strip heights that cost least, and tiled heads of
        which values leave the device while the tail runs. Plans with reductions of cuts have a variant with these in segments of their own.
        """
        for plan in self._unseparated(room_bytes):
            yield plan
            separate = with_separate_reductions(self._problem, plan) if self._may_separate else None
            if separate is not None and separate.projection.fits(self._problem.resources, room_bytes):
                yield separate

    def _unseparated(self, room_bytes: int) -> Iterator[ProjectedPlan]:
        if self._problem.resources.step_end_bytes > room_bytes:
            return
        fitting = self._fitting(room_bytes)
        yield from (plan for _, plan in fitting)
        if not self._options.is_automatic or self._options.tile is not None:
            return
        if not self._is_near_optimal or self._plain(room_bytes) is None:
            heads = self._tiled_heads(self._known_grids, room_bytes)
            yield from relieved_head_plans(self._problem, heads, room_bytes, self._problem.limits.num_idle_values) if heads else ()
        if all(plan.projection.host_bytes for _, plan in fitting):
            heads = self._tiled_heads([*self._streaming_grids(self._known_grids)], room_bytes)
            yield from relieved_head_plans(self._problem, heads, room_bytes, (0,)) if heads else ()
        if self._may_split and not self._is_near_plain([plan for _, plan in fitting]):
            yield from split_run_plans(self._problem, room_bytes)
        if not fitting:
            return
        for grid, candidate in cheapest_by_height(self._problem, room_bytes, self._options, self._rates):
            plan = materialize(self._problem, grid.choices(candidate))
            if plan.projection.fits(self._problem.resources, room_bytes):
                yield plan

    @property
    def _may_separate(self) -> bool:
        """True if the options do not determine the segments, and weights are not loaded for each of them."""
        resources = self._problem.resources
        return self._may_tile and self._problem.sized.training and resources.weights is None and not resources.host_outputs

    @property
    def _may_split(self) -> bool:
        """True if runs may be cut, and cuts pass through the host."""
        resources = self._problem.resources
        return self._may_tile and resources.host_budget_bytes != 0 and resources.weights is None and not resources.host_outputs

    def _is_near_plain(self, plans: Sequence[ProjectedPlan]) -> bool:
        """True if one of these plans computes little again, or takes little longer than plain PyTorch."""
        programs, limits = plain_programs(self._problem), self._problem.limits
        plain_flops = sum(program.flops for program in programs)
        if any(plan.projection.flops <= limits.split_flops * plain_flops for plan in plans):
            return True
        rates = self._problem.resources.rates
        longest = limits.split_seconds * sum(map(rates.seconds, programs))
        timelines = (project_timeline(self._problem, plan.choices, plan.projection, rates) for plan in plans)
        return any(timeline.estimated_seconds <= longest for timeline in timelines)

    def smallest(self, room_bytes: float = math.inf) -> ProjectedPlan | None:
        """The plan with the smallest peak that this search knows.

        With a room it is that plan if it fits; if it does not, a larger one or ``None``, as plans that surely do not fit are left out.
        """
        problem, grids = self._problem, [*self._grids()]
        plans = [*_smallest_projected(problem, grids, room_bytes), *_smallest_projected(problem, self._streaming_grids(grids), room_bytes)]
        if self._samples is not None:
            plans.append(self._samples.smallest())
        if self._windows is not None:
            plans += self._windows.smallest()
        # Estimates above the room are no proof that a plan does not fit.
        most_bytes = problem.limits.optimal_bytes_factor * room_bytes
        heads = self._tiled_heads(grids, 0)
        if heads is not None:
            plans += smallest_staged_plans(heads, _least_peak(plans, most_bytes))
            plans += smallest_offloaded_tails(heads.staged, grids, _least_peak(plans, most_bytes))
        if self._may_tile:
            plans += smallest_tile_plans(problem, grids[0], _least_peak(plans, most_bytes))
        best = _smallest_plan(plans) if plans else None
        if best is None or best.projection.peak_bytes > room_bytes:
            return best
        while fitting := self._fitting(best.projection.peak_bytes - 1):
            best = _smallest_plan([plan for _, plan in fitting])
        return best

    def _fitting(self, room_bytes: int) -> list[tuple[float, ProjectedPlan]]:
        """Plans that fit, with their costs, including the cheapest one known."""
        problem, rates = self._problem, self._rates
        if problem.resources.step_end_bytes > room_bytes:
            return []
        plain = self._plain(room_bytes)
        if plain is not None and self._is_near_optimal:
            return [plain]
        grids: list[CandidateGrid] = []
        fitting: list[tuple[float, ProjectedPlan]] = [] if plain is None else [plain]
        if self._samples is not None:
            in_samples = self._samples.cheapest(room_bytes, _least_cost(fitting))
            fitting += [in_samples] if in_samples is not None else []
        if self._windows is not None:
            in_windows = self._windows.cheapest(room_bytes, _least_cost(fitting))
            fitting += [in_windows] if in_windows is not None else []
        for grid in self._grids():
            tries_tiles, expected = self._may_tile and not grids, grid.min_cost_within(room_bytes)
            if tries_tiles:
                fitting += cheaper_tile_plans(problem, grid, room_bytes, rates, expected)
            tiled = _cheapest(problem, grid, room_bytes, _least_cost(fitting))
            if tiled is not None:
                fitting.append(tiled)
            if tries_tiles and expected < _least_cost(fitting):
                fitting += cheaper_tile_plans(problem, grid, room_bytes, rates, _least_cost(fitting))
            grids.append(grid)
            if tiled is not None and tiled[0] <= problem.limits.few_panels_cost * grid.estimates.min_cost:
                break  # more panels could only save strips that run once more to restore states
            if fitting and grid.min_cost_in(2 * grid.num_panels) > _least_cost(fitting):
                break  # the halos of more panels cost more than that
        heads = self._tiled_heads(grids, room_bytes)
        if heads is not None and not (_least_cost(fitting) <= problem.limits.recompute_cost * grids[0].estimates.untiled.plain_flops):
            recomputed = cheapest_tiled_head(problem, heads, room_bytes, _least_cost(fitting))
            fitting += [*([recomputed] if recomputed is not None else []), *published_plans(heads.staged, room_bytes)]
            fitting += offloaded_plans(heads.staged, room_bytes, _least_cost(fitting))
            fitting += offloaded_tail_plans(heads.staged, grids, room_bytes, _least_cost(fitting))
        if not (_least_cost(fitting) <= problem.limits.streaming_cost * grids[0].estimates.min_cost):
            for grid in self._streaming_grids(grids):
                streamed = _cheapest_streamed(problem, grid, room_bytes)
                if streamed is not None:
                    fitting.append(streamed)
                    if streamed[0] <= problem.limits.few_panels_cost * grid.estimates.min_cost:
                        break
        return fitting

    def _plain(self, room_bytes: int) -> tuple[float, ProjectedPlan] | None:
        """The untiled model as plain PyTorch runs it, with its cost, if it is allowed and fits."""
        problem, costs = self._problem, self._plain_costs
        # The programs' bytes include the outputs.
        if (
            costs is None
            or problem.resources.resident_input_bytes + max(program.peak_bytes for program in plain_programs(problem)) > room_bytes
        ):
            return None
        plan = materialize(problem, (SegmentChoice(nodes=problem.sized.operators, mode="whole"),))
        return (costs[0], plan) if plan.projection.peak_bytes <= room_bytes else None

    @property
    def _is_near_optimal(self) -> bool:
        """True if no plan costs much less than plain PyTorch."""
        return self._plain_costs is not None and self._plain_costs[0] <= self._problem.limits.near_optimal_cost * self._plain_costs[1]

    @cached_property
    def _plain_costs(self) -> tuple[float, float] | None:
        """Cost of plain PyTorch, and a lower bound of the cost of all plans; ``None`` if options or streamed tensors exclude the
        comparison.

        No plan computes fewer FLOPs, and strips call at least as many operators. A plan can save only the first touch of large buffers
        (except parameter gradients), and overlap: of input reads, repeats, streamed weights and outputs, which is why these are excluded.
        """
        problem, options = self._problem, self._options
        is_constrained = options.tile or options.halo != "auto" or options.state_every or options.state_slots or options.batch_tile
        overlaps = (
            problem.resources.from_source
            or problem.resources.host_outputs
            or problem.resources.weights is not None
            or problem.resources.skips_repeats
        )
        programs = plain_programs(problem)
        instructions = [instruction for program in programs for instruction in program.instructions]
        if not options.is_automatic or is_constrained or overlaps or not instructions:
            return None
        gradients = {slot.root for program in programs for port, slot in program.results.items() if port.role == "grad_side"}
        flops = sum(instruction.flops for instruction in instructions)
        calls = np.array([num_calls(instruction) for instruction in instructions], dtype=np.float64)
        num_bytes = np.array([instruction.num_bytes for instruction in instructions], dtype=np.float64)
        makes_gradient = [any(out is not None and out.root in gradients for out in instruction.outputs) for instruction in instructions]
        cost = flops + float(self._rates.overheads(calls, num_bytes).sum())
        lower_bound = flops + float(self._rates.overheads(calls, np.where(makes_gradient, num_bytes, 0.0)).sum())
        return cost, lower_bound

    def _grids(self) -> Iterator[CandidateGrid]:
        """Candidate grids for 1, 2, 4, ... panels, known ones first."""
        yield from self._known_grids
        for grid in self._new_grids:
            self._known_grids.append(grid)
            yield grid

    def _streaming_grids(self, grids: Sequence[CandidateGrid]) -> Iterator[CandidateGrid]:
        """The same grids with streamed cuts, if these are allowed and exist."""
        problem, options = self._problem, self._options
        if (
            problem.resources.host_budget_bytes == 0
            or not options.is_automatic
            or not streamable_values(problem, grids[0].choices(grids[0].last))
        ):
            return
        for number, grid in enumerate(grids):
            if number == len(self._known_streaming_grids):
                streaming = CandidateGrid.of(problem, options, self._rates, grid.num_panels, restart=grid.is_restarting, streams=True)
                self._known_streaming_grids.append(streaming)
            yield self._known_streaming_grids[number]

    def _tiled_heads(self, grids: Sequence[CandidateGrid], room_bytes: int) -> TiledHeadRecompute | None:
        """Plans with recomputed stages after a tiled head; ``None`` if options or the model exclude them."""
        options = self._options
        if not self._problem.sized.training or options.tile is not None or not options.is_automatic or options.halo == "recompute":
            return None
        return TiledHeadRecompute(self._staged, grids, max(1, room_bytes)) if len(self._staged.stages) > 1 else None

    @cached_property
    def _samples(self) -> SamplePlans | None:
        """Plans that take some samples at a time; ``None`` if options or the model exclude them."""
        options = self._options
        if not self._may_tile or options.state_every is not None or options.state_slots is not None:
            return None
        plans = SamplePlans(self._problem, options, self._rates)
        return plans if plans.exist else None

    @cached_property
    def _windows(self) -> WindowPlans | None:
        """Plans that take some rows of windows at a time; ``None`` if options or the model exclude them."""
        options = self._options
        is_constrained = not self._may_tile or options.state_every is not None or options.state_slots is not None or options.batch_tile
        return (
            None if is_constrained or not has_window_runs(self._problem) else WindowPlans(self._problem, next(self._grids()), self._rates)
        )

    @cached_property
    def _staged(self) -> StagedModel:
        return StagedModel.of(self._problem, self._rates)


def _least_peak(plans: Sequence[ProjectedPlan], most_bytes: float) -> float:
    """The smallest peak of some plans, at most so many bytes."""
    return min([most_bytes, *(plan.projection.peak_bytes for plan in plans)])


def _smallest_plan(plans: Sequence[ProjectedPlan]) -> ProjectedPlan:
    return min(plans, key=lambda plan: plan.projection.peak_bytes)


def _least_cost(fitting: Sequence[tuple[float, ProjectedPlan]]) -> float:
    """Smallest cost of the plans; infinity for none."""
    return min((cost for cost, _ in fitting), default=float("inf"))


def by_time(problem: PlanningProblem, plans: Iterable[ProjectedPlan], rates: DeviceRates) -> list[ProjectedPlan]:
    """The distinct plans in the order of their timelines, shortest first."""
    distinct = {plan.key: plan for plan in plans}
    return sorted(distinct.values(), key=lambda plan: project_timeline(problem, plan.choices, plan.projection, rates).estimated_seconds)


def _cheapest_or_offloaded(problem: PlanningProblem, fitting: Sequence[tuple[float, ProjectedPlan]], rates: DeviceRates) -> ProjectedPlan:
    """The cheapest plan without offloading, or an offloading plan with a shorter timeline."""
    on_device = [costed for costed in fitting if not costed[1].projection.host_bytes]
    plans = [min(on_device, key=lambda costed: costed[0])[1]] if on_device else []
    plans += [plan for _, plan in fitting if plan.projection.host_bytes]
    return plans[0] if len(plans) == 1 else by_time(problem, plans, rates)[0]


def _smallest_projected(problem: PlanningProblem, grids: Iterable[CandidateGrid], room_bytes: float) -> Iterator[ProjectedPlan]:
    """The candidate of least estimated peak over all grids; further ones while the estimates leave room for a smaller plan.

    Candidates of which the bound shows that they are not smaller, or do not fit into the room, are left out.
    """
    small = sorted(((candidate, grid) for grid in grids for candidate in grid.smallest()), key=lambda pair: pair[0].peak_bytes)
    limits = problem.limits
    num_tried = limits.num_smallest_of_few if len(problem.sized.graph.operators) <= limits.few_operators else limits.num_smallest
    best_bytes, error = float("inf"), 0.0
    for candidate, grid in small[:num_tried]:
        if candidate.peak_bytes > (1 + error) * limits.smaller_bytes_share * best_bytes:
            return
        choices = grid.choices(candidate)
        limit_bytes = min(best_bytes, room_bytes + 1)
        least_bytes = least_peak_bytes(problem, choices) if math.isfinite(limit_bytes) else 0
        if least_bytes >= limit_bytes:
            error = max(error, least_bytes / max(1.0, candidate.peak_bytes) - 1)
            continue
        plan = materialize(problem, choices)
        needed = plan.projection.peak_bytes
        error = max(error, abs(needed / max(1.0, candidate.peak_bytes) - 1))
        if problem.resources.fits_host(plan.projection.host_bytes):
            best_bytes = min(best_bytes, needed)
            yield plan


def _cheapest_streamed(problem: PlanningProblem, grid: CandidateGrid, room_bytes: int) -> tuple[float, ProjectedPlan] | None:
    """The cheapest fitting plan with streamed cuts and its cost; cuts for which the room suffices stay on the device."""
    cheapest = _cheapest(problem, grid, room_bytes)
    if cheapest is None:
        return None
    cost, all_streamed = cheapest

    def fitting_plan(choices: Sequence[SegmentChoice]) -> ProjectedPlan | None:
        plan = materialize(problem, choices)
        return plan if plan.projection.peak_bytes <= room_bytes else None

    best = minimize_streamed_cuts(problem, all_streamed.choices, fitting_plan) or all_streamed
    if not problem.resources.fits_host(best.projection.host_bytes):
        return None
    saved_seconds = stream_seconds(problem, all_streamed.choices) - stream_seconds(problem, best.choices)
    return cost - saved_seconds * grid.flops_per_second, best


def _cheapest(
    problem: PlanningProblem, grid: CandidateGrid, room_bytes: int, known_cost: float = float("inf")
) -> tuple[float, ProjectedPlan] | None:
    """The cheapest fitting plan of a grid and its cost, after a few exact projections.

    Candidates above the cost of a known plan (``known_cost``) are skipped: projecting a deep network takes seconds.
    """
    is_tried = np.zeros(grid.axes.shape, dtype=bool)
    # Bytes needed in excess of the estimate, which includes gradients of untiled segments although streamed weights send them off.
    error = -float(problem.resources.streamed_grad_bytes)
    best: tuple[float, ProjectedPlan] | None = None
    for _ in range(problem.limits.max_projections):
        candidate = grid.cheapest(room_bytes - error, is_tried)
        if candidate is None or candidate.cost > (known_cost if best is None else problem.limits.further_cost_share * best[0]):
            break
        is_tried[candidate.position, candidate.height, candidate.policy] = True
        plan = materialize(problem, grid.choices(candidate))
        error = plan.projection.peak_bytes - candidate.peak_bytes
        if plan.projection.peak_bytes <= room_bytes:
            best = (candidate.cost, plan)
    return best


def candidate_grids(problem: PlanningProblem, options: Options, rates: DeviceRates) -> Iterator[CandidateGrid]:
    """Candidate grids for 1, 2, 4, ... panels, while more panels need fewer bytes; independent of the budget."""
    min_bytes = float("inf")
    num_panels = 1
    while True:
        if num_panels > 1 and options.halo != "recompute":
            yield CandidateGrid.of(problem, options, rates, num_panels, restart=False)
        grid = CandidateGrid.of(problem, options, rates, num_panels)
        yield grid
        smallest = float(grid.estimates.peak_bytes.min())
        if options.tile is not None or options.strategy == "none" or smallest > problem.limits.panel_bytes_share * min_bytes:
            return
        min_bytes = min(min_bytes, smallest)
        if grid.tiling.panel_cols <= max(
            problem.limits.min_panel_px, choose_panel_cols(problem, options, grid.tiling.width, grid.tiling.width)
        ):
            return
        num_panels *= 2


def cheapest_by_height(
    problem: PlanningProblem, room_bytes: int, options: Options, rates: DeviceRates
) -> list[tuple[CandidateGrid, Candidate]]:
    """The cheapest candidate that should fit for each strip height; of these the cheapest few."""
    candidates: list[tuple[CandidateGrid, Candidate]] = []
    for grid in candidate_grids(problem, options, rates):
        for height in range(grid.axes.shape[1]):
            excluded = np.ones(grid.axes.shape, dtype=bool)
            excluded[:, height] = False
            candidate = grid.cheapest(room_bytes, excluded)
            if candidate is not None and candidate.position:
                candidates.append((grid, candidate))
        min_cost = min((candidate.cost for _, candidate in candidates), default=float("inf"))
        if grid.min_cost_in(2 * grid.num_panels) > min_cost:
            break
    return sorted(candidates, key=lambda pair: pair[1].cost)[: problem.limits.num_timed_heights]
