"""Strips in front, and behind them stages whose values wait on the host.

As in ``sft.planner.search.tiled_head`` the survey knows what heads cost and hold, and what lies behind is a chain of stages. Here the head
is the first stage of that chain: it makes the cut that the others read, and saves the states of its strips. So the solvers that copy to
the host (alone, or together with recomputation) decide about all of it: the stages' values, the cut, and the states, which nobody needs
while the stages behind run. A head runs once; schedules that would run it again are left out.

Of all heads those few are tried that would be fastest if nothing had to leave. What a solver proposes is projected exactly, and its budget
corrected by what it was off by; nothing is returned that has not been projected.

Strips in front, recomputation behind: plans whose head is tiled and whose other stages run again as often as memory asks for.

The survey knows what each head costs and holds (where it ends, strip height, policy for states). What lies behind is a chain of stages
(``sft.planner.stages``), of which the table of `optimal` knows the time for every number of bytes, from every stage on. So a mixed plan
costs

    head(p, h, k) + P(i(p), room - held(p, h, k)),

and one table serves all of them. No head at all, and everything kept behind one, are special cases. As with the survey nothing is returned
that has not been projected exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from sft.common.errors import BudgetError
from sft.planner.cost.height_sampling import Floats
from sft.planner.offload_moves import drop_idle_copies
from sft.planner.plan import SegmentChoice
from sft.planner.region_builder import segment_borders
from sft.planner.search.tiled import CandidateGrid
from sft.planner.stages import StagedModel
from sft.runtime.moves import SegmentSchedule
from sft.runtime.region import Region
from sft.solvers.chain import Stage, StageChain
from sft.solvers.optimal import CostTable, MinMemorySchedule
from sft.solvers.registry import get_solver
from sft.solvers.reversal import DecisionFunction, reversal
from sft.solvers.schedule import Schedule
from sft.solvers.simulate import simulate

__all__ = [
    "TiledHeadOffload",
    "TiledHeadOffloadPlan",
    "TiledHeadRecompute",
    "TiledHeadRecomputePlan",
    "smallest_tail_schedule",
    "smallest_tiled_head_offloads",
    "tiled_head_offloads",
]

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
        min_cost: what the whole would cost if nothing had to leave or run again, in FLOPs.
    """

    staged: StagedModel
    head: tuple[SegmentChoice, ...]
    num_stages: int
    chain: StageChain
    base_bytes: int
    min_cost: float

    @property
    def choices(self) -> tuple[SegmentChoice, ...]:
        """All segments."""
        return (*self.head, *self.staged.choices_after(self.num_stages))

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
            stage = staged.stage_after(head)
            if stage and _cut_is_made(staged, survey, position, stage):
                yield survey, position, stage


def _cut_is_made(staged: StagedModel, survey: CandidateGrid, position: int, stage: int) -> bool:
    """Whether the head makes all that crosses the cut behind it."""
    return set(survey.heads[position]).issuperset(staged.cut_values[stage - 1])


def _tiled_head_offload(
    staged: StagedModel, survey: CandidateGrid, position: int, height: int, policy: int, stage: int
) -> TiledHeadOffload:
    problem = staged.problem
    head = staged.with_buffer_updates(survey.head_choices(position, height, policy), stage)
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
        min_cost=chain.compute_seconds * staged.rates.flops_per_second,
    )


_NUM_BUCKETS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class TiledHeadRecomputePlan:
    """A proposal.

    Attributes:
        choices: the segments.
        order: their moves.
        peak_bytes: estimated peak, or the room that it should fit into.
        cost: estimated cost in FLOPs.
    """

    choices: tuple[SegmentChoice, ...]
    order: SegmentSchedule
    peak_bytes: float
    cost: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _HeadEnd:
    """Where in the surveys a head was found, and the stage that begins behind it."""

    survey: int
    position: int
    height: int
    policy: int
    stage: int


class TiledHeadRecompute:
    """Mixed plans for a model.

    Args:
        staged: the model in stages.
        surveys: the heads.
        room_bytes: most that will be asked for.
    """

    def __init__(self, staged: StagedModel, surveys: Sequence[CandidateGrid], room_bytes: int) -> None:
        self.staged, self.surveys, self._room_bytes = staged, surveys, room_bytes
        problem = staged.problem
        self._made_bytes = sum(map(problem.value_bytes, problem.graph.live_out(problem.phases.prologue)))
        self._bucket_bytes = max(1, -(-room_bytes // _NUM_BUCKETS))
        at = [[staged.stage_after(head) for head in survey.heads] for survey in surveys]
        #: (survey, position, stage behind it)
        self._ends = [(s, p, stage) for s, row in enumerate(at) for p, stage in enumerate(row) if stage or (stage == 0 and p == 0)]
        self._tried: set[tuple[_HeadEnd, int]] = set()

    def cheapest(self, room_bytes: float, worse_than: float) -> TiledHeadRecomputePlan | None:
        """The cheapest proposal that should fit, costs less than so many FLOPs, and was not made before."""
        best: tuple[float, _HeadEnd, int] | None = None
        for s, p, stage in self._ends:
            survey = self.surveys[s]
            spare = np.clip((room_bytes - self._made_bytes - survey.head_bytes[p]) / self._bucket_bytes, -1, _NUM_BUCKETS)
            fits = (spare >= 0) & (survey.head_peak_bytes[p] <= room_bytes)
            buckets = np.maximum(np.floor(spare), 0).astype(np.int64)
            behind = self.staged.rates.flops_per_second * self._table.first_pass_row(stage)[buckets]
            cost = np.where(fits, survey.head_cost[p] + behind, np.inf)
            for known, num_buckets in self._tried:
                if (known.survey, known.position) == (s, p) and buckets[known.height, known.policy] == num_buckets:
                    cost[known.height, known.policy] = np.inf
            h, k = _argmin_index(cost)
            if cost[h, k] < (worse_than if best is None else best[0]):
                best = (float(cost[h, k]), _HeadEnd(survey=s, position=p, height=h, policy=k, stage=stage), int(buckets[h, k]))
        if best is None:
            return None
        cost_flops, place, num_buckets = best
        self._tried.add((place, num_buckets))
        return self._plan(place, self._table.decide, num_buckets, peak_bytes=room_bytes, cost=cost_flops)

    def smallest(self) -> TiledHeadRecomputePlan | None:
        """The proposal that should need least."""
        least, best = MinMemorySchedule(self.staged.chain), None
        for s, p, stage in self._ends:
            survey = self.surveys[s]
            behind = survey.head_bytes[p] + self._made_bytes + least.first_pass_bytes(stage)
            peak = np.maximum(survey.head_peak_bytes[p], behind)
            h, k = _argmin_index(peak)
            if peak[h, k] < (np.inf if best is None else best[0]):
                best = (float(peak[h, k]), _HeadEnd(survey=s, position=p, height=h, policy=k, stage=stage))
        return None if best is None else self._plan(best[1], least.decide, 0, peak_bytes=best[0], cost=float("inf"))

    @cached_property
    def _table(self) -> CostTable:
        return CostTable(self.staged.chain, num_buckets=_NUM_BUCKETS, bucket_bytes=self._bucket_bytes, with_loss=True)

    def _plan(self, place: _HeadEnd, decide: DecisionFunction, state: int, *, peak_bytes: float, cost: float) -> TiledHeadRecomputePlan:
        operations = reversal(self.staged.chain, decide, state, first=place.stage)
        if place.stage:
            head = self.surveys[place.survey].head_choices(place.position, place.height, place.policy)
            head = self.staged.with_buffer_updates(head, place.stage)
            choices = (*head, *self.staged.choices_after(place.stage))
            order = self.staged.order(operations, head=head, num_stages=place.stage)
        else:
            choices, order = self.staged.choices, self.staged.order(operations)
        return TiledHeadRecomputePlan(choices=choices, order=order, peak_bytes=peak_bytes, cost=cost)


def _argmin_index(table: npt.NDArray[np.float64]) -> tuple[int, int]:
    h, k = np.unravel_index(int(table.argmin()), table.shape)
    return int(h), int(k)
