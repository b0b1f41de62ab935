"""Strips in front, and behind them stages whose values wait on the host.

As in ``sft.plan.mixed`` the survey knows what heads cost and hold, and what lies behind is a chain of stages. Here the head is the first
stage of that chain: it makes the cut that the others read, and saves the states of its strips. So the solvers that copy to the host
(alone, or together with recomputation) decide about all of it: the stages' values, the cut, and the states, which nobody needs while the
stages behind run. A head runs once; schedules that would run it again are left out.

Of all heads those few are tried that would be fastest if nothing had to leave. What a solver proposes is projected exactly, and its budget
corrected by what it was off by; nothing is returned that has not been projected.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from sft.errors import BudgetError
from sft.plan.build import segment_borders
from sft.plan.chain.chain import StageChain, Stage
from sft.plan.chain.schedule import Schedule
from sft.plan.chain.simulate import simulate
from sft.plan.chain.strategies import get_solver
from sft.plan.copies import drop_idle_copies
from sft.plan.sampling import Floats
from sft.plan.stages import StagedModel
from sft.plan.survey import CandidateGrid
from sft.plan.types import SegmentChoice
from sft.walk.order import SegmentSchedule
from sft.walk.region import Region

__all__ = ["TiledHeadOffload", "TiledHeadOffloadPlan", "smallest_tail_schedule", "smallest_tiled_head_offloads", "tiled_head_offloads"]

#: Heads that are tried.
_MAX_HEADS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class TiledHeadOffloadPlan:
    """A proposal.

    Attributes:
        choices: the segments.
        order: their moves, for a region of these segments.
        cost: estimated cost in FLOPs.
        peak_bytes: of the chain, without what is there besides.
    """

    choices: tuple[SegmentChoice, ...]
    order: SegmentSchedule
    cost: float
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TiledHeadOffload:
    """A head, and the chain that it is the first stage of.

    Attributes:
        staged: the model in stages.
        head: the segments of the head.
        num_stages: how many stages these are in the place of.
        chain: the head and the other stages.
        base_bytes: what is there besides the chain.
        least_cost: what the whole would cost if nothing had to leave or run again, in FLOPs.
    """

    staged: StagedModel
    head: tuple[SegmentChoice, ...]
    num_stages: int
    chain: StageChain
    base_bytes: int
    least_cost: float

    @property
    def choices(self) -> tuple[SegmentChoice, ...]:
        """All segments."""
        return (*self.head, *self.staged.choices_behind(self.num_stages))

    def schedule(self, name: str, budget_bytes: int) -> Schedule:
        """What a solver makes of the chain in so many bytes.

        Raises:
            BudgetError: it does not fit.
        """
        problem = self.staged.problem
        return get_solver(name)(self.chain, budget_bytes=budget_bytes, host_budget_bytes=problem.host_budget_bytes, link=problem.link)

    def plan(self, schedule: Schedule, region: Region) -> TiledHeadOffloadPlan | None:
        """A schedule as an order of the region's segments; ``None`` if it runs the head again."""
        if sum(operation.kind == "forward" and operation.first == 1 for operation in schedule.operations) > 1:
            return None
        order = self.staged.order(schedule.operations, head=self.head, num_stages=self.num_stages, head_is_stage=True)
        found = simulate(self.chain, schedule, link=self.staged.problem.link)
        return TiledHeadOffloadPlan(
            choices=self.choices,
            order=drop_idle_copies(region, order),
            cost=found.seconds * self.staged.rates.flops_per_second,
            peak_bytes=found.peak_bytes,
        )


@dataclass(frozen=True, slots=True)
class _RankedHead:
    """Where a head ends, and the stage behind it; of each strip height and policy for states a number, of which the least is best."""

    marks: Floats
    survey: CandidateGrid
    position: int
    stage: int


def _best_heads(staged: StagedModel, found: Sequence[_RankedHead]) -> Iterator[TiledHeadOffload]:
    """Each with its best height and policy, the best few of them."""
    for one in sorted(found, key=lambda each: float(each.marks.min()))[:_MAX_HEADS]:
        if np.isfinite(one.marks.min()):
            h, k = (int(i) for i in np.unravel_index(int(one.marks.argmin()), one.marks.shape))
            yield _tiled_head_offload(staged, one.survey, one.position, h, k, one.stage)


def tiled_head_offloads(staged: StagedModel, surveys: Sequence[CandidateGrid], room_bytes: float) -> Iterator[TiledHeadOffload]:
    """Heads whose strips fit, those first that would be fastest if nothing had to leave."""
    seconds = [stage.forward_seconds + stage.backward_seconds for stage in staged.chain.stages]
    found: list[_RankedHead] = []
    for survey, position, stage in _head_ends(staged, surveys):
        cost = np.where(survey.head_peak_bytes[position] <= room_bytes, survey.head_cost[position], np.inf)
        behind = sum(seconds[stage:]) * staged.rates.flops_per_second
        found.append(_RankedHead(cost + behind, survey, position, stage))
    yield from _best_heads(staged, found)


def smallest_tiled_head_offloads(staged: StagedModel, surveys: Sequence[CandidateGrid]) -> Iterator[TiledHeadOffload]:
    """Heads that should need least with a tail that may leave, whatever the budget."""
    stages = staged.chain.stages
    found: list[_RankedHead] = []
    for survey, position, stage in _head_ends(staged, surveys):
        # Of the stages behind only the largest need count, and of the head, while they run, nothing.
        behind = max(
            each.output_bytes + each.saved_bytes + max(each.forward_workspace_bytes, each.backward_workspace_bytes)
            for each in stages[stage:]
        )
        found.append(_RankedHead(np.maximum(survey.head_peak_bytes[position], behind), survey, position, stage))
    yield from _best_heads(staged, found)


def smallest_tail_schedule(tail: TiledHeadOffload, name: str) -> Schedule:
    """The schedule of least memory that a solver knows, on a host of any size."""
    link = tail.staged.problem.link
    try:
        return get_solver(name)(tail.chain, budget_bytes=1, link=link)
    except BudgetError as refusal:
        return get_solver(name)(tail.chain, budget_bytes=refusal.needed_bytes, link=link)


def _head_ends(staged: StagedModel, surveys: Sequence[CandidateGrid]) -> Iterator[tuple[CandidateGrid, int, int]]:
    """Where heads end, and the stage behind each; a head of no stage, or of all of them, has no tail."""
    for survey in surveys:
        for position, head in enumerate(survey.heads):
            stage = staged.stage_behind(head)
            if stage and _cut_is_made(staged, survey, position, stage):
                yield survey, position, stage


def _cut_is_made(staged: StagedModel, survey: CandidateGrid, position: int, stage: int) -> bool:
    """Whether the head makes all that crosses the cut behind it."""
    return set(survey.heads[position]).issuperset(staged.cut_values[stage - 1])


def _tiled_head_offload(
    staged: StagedModel, survey: CandidateGrid, position: int, height: int, policy: int, stage: int
) -> TiledHeadOffload:
    problem = staged.problem
    head = staged.with_asides(survey.head_choices(position, height, policy), stage)
    crossing = staged.cut_values[stage - 1]
    cut_bytes = sum(map(problem.value_bytes, crossing))
    made = {
        name
        for choice, (_, makes) in zip(head, segment_borders(problem.graph, head), strict=True)
        if choice.mode == "tiled"
        for name in makes
    }
    made_bytes = sum(problem.value_bytes(name) for name in made if name not in problem.graph.results)
    held, peak = (int(table[position, height, policy]) for table in (survey.head_bytes, survey.head_peak_bytes))
    num_tiled = sum(choice.mode == "tiled" for choice in head)
    # Between several tiled segments there are cuts that stay; only the states of a single one can leave.
    state_bytes = max(0, held - problem.border_bytes - made_bytes) if num_tiled == 1 else 0
    base_bytes = held - min(held, cut_bytes + state_bytes)
    seconds = float(survey.head_cost[position, height, policy]) / staged.rates.flops_per_second
    first = Stage(
        forward_seconds=seconds / 3,
        backward_seconds=seconds * 2 / 3,
        output_bytes=cut_bytes,
        grad_bytes=sum(problem.grad_bytes(name) for name in crossing if name in problem.requires_grad),
        saved_bytes=max(1, state_bytes),
        forward_workspace_bytes=max(0, peak - held),
        backward_workspace_bytes=max(0, peak - held),
    )
    chain = StageChain(input_bytes=0, stages=(first, *staged.chain.stages[stage:]), input_grad_bytes=problem.input_grad_bytes)
    return TiledHeadOffload(
        staged=staged,
        head=head,
        num_stages=stage,
        chain=chain,
        base_bytes=base_bytes,
        least_cost=chain.compute_seconds * staged.rates.flops_per_second,
    )
