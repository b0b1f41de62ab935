"""Strategy ``auto``: strips, stages that run again, values that wait on the host, and tiles, and of what fits whatever costs least.

The survey says what every candidate would cost and need, roughly. The cheapest that should fit is projected exactly, which tells how far
the survey is off, and the search goes on. What it returns has always been projected exactly.

When nothing fits, the smallest plan is looked for, whatever the budget was. It is the smallest that the search itself finds: where a search
in less than what that plan needs finds another, that one is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

import numpy as np

from sft.planner.cost.roofline import DeviceRates, num_calls
from sft.planner.cost.step_time import project_timeline
from sft.planner.cost.tiling import choose_panel_cols
from sft.planner.materialize import MAX_PROJECTIONS, WORTH_ANOTHER_LOOK, ProjectedPlan, materialize
from sft.planner.options import Options
from sft.planner.plan import SegmentChoice
from sft.planner.problem import PlanningProblem
from sft.planner.projection import plain_programs
from sft.planner.search.independent_tiles import cheaper_tile_plans, smallest_tile_plans
from sft.planner.search.staged import (
    WORTH_RECOMPUTING,
    cheapest_tiled_head,
    offloaded_plans,
    offloaded_tail_plans,
    published_plans,
    smallest_offloaded_tails,
    smallest_staged_plans,
)
from sft.planner.search.tiled import CandidateGrid
from sft.planner.search.tiled_head import TiledHeadRecompute
from sft.planner.stages import StagedModel
from sft.planner.streamed_cuts import minimize_streamed_cuts, stream_seconds, streamable_values

__all__ = ["AutoSearch", "candidate_grids"]

#: How many candidates for the smallest plan are projected at most: of networks with few operators that takes no time.
_NUM_SMALLEST, _NUM_SMALLEST_OF_FEW, _FEW_OPERATORS = 3, 12, 64
#: Of what the smallest plan needs that is known another should need less than this share, by surveys that are as exact.
_WORTH_PROJECTING = 0.95
#: Where plain PyTorch fits and costs at most so much more than any plan must, others are not looked for.
_WORTH_LOOKING = 1.05
#: A plan that costs at most so much more than running each strip once more is not worth looking further.
_WORTH_MORE_PANELS = 1.05
#: More panels must need less than this share of what fewer need, and a panel narrower than this is all halo.
_WORTH_ANOTHER_PANEL = 0.95
_MIN_PANEL_COLS = 64
#: The same before cuts are streamed over the host.
_WORTH_STREAMING = 1.05


class AutoSearch:
    """The plans of one problem; what was surveyed is kept for the next search.

    Args:
        problem: the model at one size.
        options: wishes.
        device_type: ``"cpu"``, ``"cuda"``.
    """

    def __init__(self, problem: PlanningProblem, options: Options, device_type: str) -> None:
        self._problem, self._options, self._device_type, self._rates = problem, options, device_type, DeviceRates(device_type)
        self._may_tile = options.strategy == "auto" and options.tile is None and options.halo == "auto"
        self._known: list[CandidateGrid] = []
        self._over_host_cache: list[CandidateGrid] = []
        self._coming = candidate_grids(problem, options, device_type)

    def fastest(self, room_bytes: int) -> ProjectedPlan | None:
        """The plan that takes least of all that fit; ``None`` where none does."""
        fitting = self._fitting(room_bytes)
        return _fastest_plan(self._problem, fitting, self._rates) if fitting else None

    def smallest(self) -> ProjectedPlan:
        """The plan that needs least, as far as this search knows."""
        problem, surveys = self._problem, [*self._surveys()]
        planned = [*_smallest_projected(problem, surveys), *_smallest_projected(problem, self._over_host(surveys))]
        mixed = self._mixed(surveys, 0)
        if mixed is not None:
            planned += smallest_staged_plans(mixed, min(each.projection.peak_bytes for each in planned))
            planned += smallest_offloaded_tails(mixed, min(each.projection.peak_bytes for each in planned))
        if self._may_tile:
            planned += smallest_tile_plans(problem, surveys[0], min(each.projection.peak_bytes for each in planned))
        best = _smallest_plan(planned)
        while fitting := self._fitting(best.projection.peak_bytes - 1):
            best = _smallest_plan([found for _, found in fitting])
        return best

    def _fitting(self, room_bytes: int) -> list[tuple[float, ProjectedPlan]]:
        """Plans that fit, and what they cost; no other that is known to fit costs less than the cheapest."""
        problem, rates = self._problem, self._rates
        plain = self._plain(room_bytes)
        if plain is not None and self._is_near_optimal:
            return [plain]
        surveys: list[CandidateGrid] = []
        fitting: list[tuple[float, ProjectedPlan]] = [] if plain is None else [plain]
        for survey in self._surveys():
            looks_at_tiles, expected = self._may_tile and not surveys, survey.min_cost_within(room_bytes)
            if looks_at_tiles:
                fitting += cheaper_tile_plans(problem, survey, room_bytes, rates, expected)
            found = _cheapest(problem, survey, room_bytes, _least_cost(fitting))
            if found is not None:
                fitting.append(found)
            if looks_at_tiles and expected < _least_cost(fitting):
                fitting += cheaper_tile_plans(problem, survey, room_bytes, rates, _least_cost(fitting))
            surveys.append(survey)
            if found is not None and found[0] <= _WORTH_MORE_PANELS * survey.min_cost:
                break  # what is left to gain are strips that run once more to restore states
            if fitting and survey.min_cost_in(2 * survey.num_panels) > _least_cost(fitting):
                break  # what more panels compute twice is more than that
        mixed = self._mixed(surveys, room_bytes)
        if mixed is not None and not (_least_cost(fitting) <= WORTH_RECOMPUTING * surveys[0].plain_flops):
            found = cheapest_tiled_head(problem, mixed, room_bytes, _least_cost(fitting))
            fitting += [*([found] if found is not None else []), *published_plans(mixed.staged, room_bytes)]
            fitting += offloaded_plans(mixed.staged, room_bytes, _least_cost(fitting))
            fitting += offloaded_tail_plans(mixed, room_bytes, _least_cost(fitting))
        if not (_least_cost(fitting) <= _WORTH_STREAMING * surveys[0].min_cost):
            for survey in self._over_host(surveys):
                found = _cheapest_streamed(problem, survey, room_bytes)
                if found is not None:
                    fitting.append(found)
                    if found[0] <= _WORTH_MORE_PANELS * survey.min_cost:
                        break
        return fitting

    def _plain(self, room_bytes: int) -> tuple[float, ProjectedPlan] | None:
        """The model as plain PyTorch runs it, and its cost, where it may run so and fits."""
        problem, costs = self._problem, self._plain_costs
        # Outputs are among what its programs make.
        if costs is None or problem.resident_input_bytes + max(program.peak_bytes for program in plain_programs(problem)) > room_bytes:
            return None
        planned = materialize(problem, (SegmentChoice(nodes=problem.operators, mode="whole"),))
        return (costs[0], planned) if planned.projection.peak_bytes <= room_bytes else None

    @property
    def _is_near_optimal(self) -> bool:
        """Whether no plan costs much less than plain PyTorch."""
        return self._plain_costs is not None and self._plain_costs[0] <= _WORTH_LOOKING * self._plain_costs[1]

    @cached_property
    def _plain_costs(self) -> tuple[float, float] | None:
        """What plain PyTorch costs, and what any plan does at least; ``None`` where it is not what is asked for, or not what it seems.

        Nothing computes less, and strips call at least as many operators. What they may spare is to touch large fresh buffers, those of
        parameters' gradients aside, and to read inputs, run repeats, or wait for weights and outputs one after the other.
        """
        problem, options = self._problem, self._options
        is_asked = options.tile or options.halo != "auto" or options.state_every or options.state_slots or options.batch_tile
        elsewhere = problem.from_source or problem.host_outputs or problem.weights is not None or problem.skips_repeats
        programs = plain_programs(problem)
        listed = [instruction for program in programs for instruction in program.instructions]
        if options.strategy != "auto" or is_asked or elsewhere or not listed:
            return None
        gradients = {slot.root for program in programs for port, slot in program.results.items() if port.role == "grad_side"}
        flops = sum(instruction.flops for instruction in listed)
        calls = np.array([num_calls(instruction) for instruction in listed], dtype=np.float64)
        num_bytes = np.array([instruction.num_bytes for instruction in listed], dtype=np.float64)
        needed = [any(out is not None and out.root in gradients for out in instruction.outputs) for instruction in listed]
        cost = flops + float(self._rates.overheads(calls, num_bytes).sum())
        least = flops + float(self._rates.overheads(calls, np.where(needed, num_bytes, 0.0)).sum())
        return cost, least

    def _surveys(self) -> Iterator[CandidateGrid]:
        """All surveys, those first that were made before."""
        yield from self._known
        for survey in self._coming:
            self._known.append(survey)
            yield survey

    def _over_host(self, surveys: Sequence[CandidateGrid]) -> Iterator[CandidateGrid]:
        """The same surveys, from the first one on, with cuts that are streamed, where that is allowed and there are any."""
        problem, options = self._problem, self._options
        if (
            problem.host_budget_bytes == 0
            or options.strategy != "auto"
            or not streamable_values(problem, surveys[0].choices(surveys[0].last))
        ):
            return
        for number, survey in enumerate(surveys):
            if number == len(self._over_host_cache):
                streamed = CandidateGrid(problem, options, self._device_type, survey.num_panels, restart=survey.is_restarting, streams=True)
                self._over_host_cache.append(streamed)
            yield self._over_host_cache[number]

    def _mixed(self, surveys: Sequence[CandidateGrid], room_bytes: int) -> TiledHeadRecompute | None:
        """The plans that recompute stages, where there may be any."""
        options = self._options
        if not self._problem.training or options.tile is not None or options.strategy != "auto" or options.halo == "recompute":
            return None
        return TiledHeadRecompute(self._staged, surveys, max(1, room_bytes)) if len(self._staged.stages) > 1 else None

    @cached_property
    def _staged(self) -> StagedModel:
        return StagedModel(self._problem, self._rates)


def _smallest_plan(planned: Sequence[ProjectedPlan]) -> ProjectedPlan:
    return min(planned, key=lambda each: each.projection.peak_bytes)


def _least_cost(fitting: Sequence[tuple[float, ProjectedPlan]]) -> float:
    """Of plans that fit, infinity where there are none."""
    return min((cost for cost, _ in fitting), default=float("inf"))


def _fastest_plan(problem: PlanningProblem, fitting: Sequence[tuple[float, ProjectedPlan]], rates: DeviceRates) -> ProjectedPlan:
    """The plan that costs least; where the host is used, too, the one that takes least time on the clock of its timeline."""
    at_home = [costed for costed in fitting if not costed[1].projection.host_bytes]
    found = [min(at_home, key=lambda costed: costed[0])[1]] if at_home else []
    found += [planned for _, planned in fitting if planned.projection.host_bytes]
    if len(found) == 1:
        return found[0]
    return min(found, key=lambda planned: project_timeline(problem, planned.choices, planned.projection, rates).estimated_seconds)


def _smallest_projected(problem: PlanningProblem, surveys: Iterable[CandidateGrid]) -> Iterator[ProjectedPlan]:
    """What should need least of all surveys; where it needs more than it should, others that may need less."""
    small = sorted(((candidate, survey) for survey in surveys for candidate in survey.smallest()), key=lambda pair: pair[0].peak_bytes)
    num_tried = _NUM_SMALLEST_OF_FEW if len(problem.graph.operators) <= _FEW_OPERATORS else _NUM_SMALLEST
    best_bytes, error = float("inf"), 0.0
    for candidate, survey in small[:num_tried]:
        if candidate.peak_bytes > (1 + error) * _WORTH_PROJECTING * best_bytes:
            return
        planned = materialize(problem, survey.choices(candidate))
        needed = planned.projection.peak_bytes
        error = max(error, abs(needed / max(1.0, candidate.peak_bytes) - 1))
        if problem.fits_host(planned.projection.host_bytes):
            best_bytes = min(best_bytes, needed)
            yield planned


def _cheapest_streamed(problem: PlanningProblem, survey: CandidateGrid, room_bytes: int) -> tuple[float, ProjectedPlan] | None:
    """The cheapest plan with streamed cuts that fits; what fits besides is kept."""
    found = _cheapest(problem, survey, room_bytes)
    if found is None:
        return None
    cost, planned = found

    def fitting(choices: Sequence[SegmentChoice]) -> ProjectedPlan | None:
        other = materialize(problem, choices)
        return other if other.projection.peak_bytes <= room_bytes else None

    best = minimize_streamed_cuts(problem, planned.choices, fitting) or planned
    if not problem.fits_host(best.projection.host_bytes):
        return None
    saved_seconds = stream_seconds(problem, planned.choices) - stream_seconds(problem, best.choices)
    return cost - saved_seconds * survey.flops_per_second, best


def _cheapest(
    problem: PlanningProblem, survey: CandidateGrid, room_bytes: int, known: float = float("inf")
) -> tuple[float, ProjectedPlan] | None:
    """The cheapest plan that fits and what it costs, as far as the survey and a few exact projections tell.

    What does not cost less than a plan that is known already (``known``) is not looked at: projecting a deep network takes seconds.
    """
    tried = np.zeros(survey.cost.shape, dtype=bool)
    # How many bytes more than the survey says are needed; it counts gradients of whole segments that leave where weights are streamed.
    error = -float(problem.streamed_grad_bytes)
    best: tuple[float, ProjectedPlan] | None = None
    for _ in range(MAX_PROJECTIONS):
        candidate = survey.cheapest(room_bytes - error, tried)
        if candidate is None or candidate.cost > (known if best is None else WORTH_ANOTHER_LOOK * best[0]):
            break
        tried[candidate.position, candidate.height, candidate.policy] = True
        planned = materialize(problem, survey.choices(candidate))
        error = planned.projection.peak_bytes - candidate.peak_bytes
        if planned.projection.peak_bytes <= room_bytes:
            best = (candidate.cost, planned)
    return best


def candidate_grids(problem: PlanningProblem, options: Options, device_type: str) -> Iterator[CandidateGrid]:
    """Surveys for the numbers of panels that may be worth it: 1, 2, 4, ... while more panels need less, whatever the budget."""
    least = float("inf")
    num_panels = 1
    while True:
        if num_panels > 1 and options.halo != "recompute":
            yield CandidateGrid(problem, options, device_type, num_panels, restart=False)
        survey = CandidateGrid(problem, options, device_type, num_panels)
        yield survey
        smallest = float(survey.peak_bytes.min())
        if options.tile is not None or options.strategy == "none" or smallest > _WORTH_ANOTHER_PANEL * least:
            return
        least = min(least, smallest)
        if survey.tiling.panel_cols <= max(_MIN_PANEL_COLS, choose_panel_cols(problem, options, survey.tiling.width, survey.tiling.width)):
            return
        num_panels *= 2
