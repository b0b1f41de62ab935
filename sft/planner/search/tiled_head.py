"""Tiled heads: plans that run the first stages in strips, and recompute or offload the remaining untiled stages.

A candidate grid gives cost and bytes of each head (end position, strip height, policy for states). The operators after it are a chain of
stages (``sft.planner.stages``).

Recomputed tails (:class:`TiledHeadRecompute`). The table of the solver `optimal` holds the time ``P(i, b)`` of the chain from every stage
``i`` on in every number of bytes ``b``. So a plan with a head that ends at ``p``, in strips of height ``h`` with policy ``k``, costs

    head(p, h, k) + P(i(p), room - kept(p, h, k)),

and one table serves all heads. No head at all, and a tail that keeps all residuals, are special cases.

Offloaded tails (:class:`TiledHeadOffload`). The head becomes the first stage of the chain: its output is the cut to the tail, its residuals
are the states of its strips. So the solvers that copy to the host, alone or with recomputation, place all of these: the values of stages,
the cut, and the states, which are unused while the tail runs. A head runs once; schedules that would run it again are dropped. Only the few
heads are tried that would be fastest without copies.

All plans here are proposals: each is projected exactly, and the error corrects the budget of the next one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sft.common.array_types import FloatArray
from sft.common.errors import BudgetError
from sft.planner.materialize import ProjectedPlan
from sft.planner.offload_moves import drop_idle_copies
from sft.planner.plan import SegmentChoice
from sft.planner.region_builder import segment_borders
from sft.planner.search.tiled import CandidateGrid
from sft.planner.stages import StagedModel
from sft.planner.streamed_cuts import streamable_values, with_streamed
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
    "head_and_tail_peaks",
    "smallest_tail_schedule",
    "smallest_tiled_head_offloads",
    "tiled_head_offloads",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class TiledHeadOffloadPlan:
    """Proposal of a tiled head with an offloaded tail.

    Attributes:
        choices: the segments.
        order: their schedule.
        cost: estimated cost in FLOPs.
        peak_bytes: peak of the chain alone.
    """

    choices: tuple[SegmentChoice, ...]
    order: SegmentSchedule
    cost: float
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TiledHeadOffload:
    """A tiled head as the first stage of a chain with the remaining stages.

    Attributes:
        staged: the model in stages.
        head: segments of the head.
        num_stages: number of stages that the head replaces.
        chain: the head and the remaining stages.
        base_bytes: bytes outside the chain.
        min_cost: cost without copies and recomputation, in FLOPs.
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
        """Schedule of a solver for the chain in a byte budget.

        Raises:
            BudgetError: no schedule fits.
        """
        problem = self.staged.problem
        return get_solver(name)(
            self.chain, budget_bytes=budget_bytes, host_budget_bytes=problem.resources.host_budget_bytes, link=problem.resources.link
        )

    def plan(self, schedule: Schedule, region: Region) -> TiledHeadOffloadPlan | None:
        """Translate a chain schedule for the region's segments; ``None`` if it runs the head again."""
        if sum(operation.kind == "forward" and operation.first == 1 for operation in schedule.operations) > 1:
            return None
        order = self.staged.segment_schedule(schedule.operations, head=self.head, num_stages=self.num_stages, head_is_stage=True)
        simulation = simulate(self.chain, schedule, link=self.staged.problem.resources.link)
        return TiledHeadOffloadPlan(
            choices=self.choices,
            order=drop_idle_copies(region, order),
            cost=simulation.seconds * self.staged.rates.flops_per_second,
            peak_bytes=simulation.peak_bytes,
        )


@dataclass(frozen=True, slots=True)
class _RankedHead:
    """End of a head and the stage after it, with a score per strip height and state policy; the smallest is best."""

    scores: FloatArray
    grid: CandidateGrid
    position: int
    stage: int


def tiled_head_offloads(staged: StagedModel, grids: Sequence[CandidateGrid], room_bytes: float) -> Iterator[TiledHeadOffload]:
    """Heads with strips that fit, sorted by the cost without copies."""
    seconds = [stage.forward_seconds + stage.backward_seconds for stage in staged.chain.stages]
    heads: list[_RankedHead] = []
    for grid, position, stage in _head_ends(staged, grids):
        cost = np.where(grid.estimates.head_peak_bytes[position] <= room_bytes, grid.estimates.head_cost[position], np.inf)
        tail_cost = sum(seconds[stage:]) * staged.rates.flops_per_second
        heads.append(_RankedHead(cost + tail_cost, grid, position, stage))
    yield from _best_heads(staged, heads)


def smallest_tiled_head_offloads(staged: StagedModel, grids: Sequence[CandidateGrid]) -> Iterator[TiledHeadOffload]:
    """Heads sorted by the least bytes with an offloaded tail, independent of the budget."""
    stages = staged.chain.stages
    heads: list[_RankedHead] = []
    for grid, position, stage in _head_ends(staged, grids):
        # While the tail runs, only its largest stage needs to be on the device.
        tail_bytes = max(
            each.output_bytes + each.saved_bytes + max(each.forward_workspace_bytes, each.backward_workspace_bytes)
            for each in stages[stage:]
        )
        heads.append(_RankedHead(np.maximum(grid.estimates.head_peak_bytes[position], tail_bytes), grid, position, stage))
    yield from _best_heads(staged, heads)


def smallest_tail_schedule(tail: TiledHeadOffload) -> Schedule:
    """The offloading schedule of least memory, with an unlimited host."""
    solver, link = get_solver("offload-dp"), tail.staged.problem.resources.link
    try:
        return solver(tail.chain, budget_bytes=1, link=link)
    except BudgetError as refusal:
        return solver(tail.chain, budget_bytes=refusal.needed_bytes, link=link)


def _best_heads(staged: StagedModel, heads: Sequence[_RankedHead]) -> Iterator[TiledHeadOffload]:
    """The best few heads, each with its best height and policy."""
    for head in sorted(heads, key=lambda each: float(each.scores.min()))[: staged.problem.limits.max_heads]:
        if np.isfinite(head.scores.min()):
            h, k = _argmin_index(head.scores)
            yield _tiled_head_offload(staged, head.grid, head.position, h, k, head.stage)


def _head_ends(staged: StagedModel, grids: Sequence[CandidateGrid]) -> Iterator[tuple[CandidateGrid, int, int]]:
    """Positions where a head ends and a stage begins; the head computes all values of the cut, and neither head nor tail is empty."""
    for grid in grids:
        for position in range(len(grid.axes.positions)):
            head = grid.head(position)
            stage = staged.stage_after(head)
            if stage and set(head).issuperset(staged.cut_values[stage - 1]):
                yield grid, position, stage


def _tiled_head_offload(staged: StagedModel, grid: CandidateGrid, position: int, height: int, policy: int, stage: int) -> TiledHeadOffload:
    problem = staged.problem
    head = staged.with_buffer_updates(grid.head_choices(position, height, policy), stage)
    crossing = staged.cut_values[stage - 1]
    cut_bytes = sum(map(problem.sized.value_bytes, crossing))
    outputs = {
        name
        for choice, (_, makes) in zip(head, segment_borders(problem.sized.graph, head), strict=True)
        if choice.mode == "tiled"
        for name in makes
    }
    output_bytes = sum(problem.sized.value_bytes(name) for name in outputs if name not in problem.sized.graph.results)
    kept, peak = (int(table[position, height, policy]) for table in (grid.estimates.head_bytes, grid.estimates.head_peak_bytes))
    num_tiled = sum(choice.mode == "tiled" for choice in head)
    # Cuts between several tiled segments stay; only the states of a single one can leave.
    state_bytes = max(0, kept - problem.resources.border_bytes - output_bytes) if num_tiled == 1 else 0
    base_bytes = kept - min(kept, cut_bytes + state_bytes)
    seconds = float(grid.estimates.head_cost[position, height, policy]) / staged.rates.flops_per_second
    first = Stage(
        forward_seconds=seconds / 3,
        backward_seconds=seconds * 2 / 3,
        output_bytes=cut_bytes,
        grad_bytes=sum(problem.sized.grad_bytes(name) for name in crossing if name in problem.sized.requires_grad),
        saved_bytes=max(1, state_bytes),
        forward_workspace_bytes=max(0, peak - kept),
        backward_workspace_bytes=max(0, peak - kept),
    )
    chain = StageChain(input_bytes=0, stages=(first, *staged.chain.stages[stage:]), input_grad_bytes=problem.resources.input_grad_bytes)
    return TiledHeadOffload(
        staged=staged,
        head=head,
        num_stages=stage,
        chain=chain,
        base_bytes=base_bytes,
        min_cost=chain.compute_seconds * staged.rates.flops_per_second,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TiledHeadRecomputePlan:
    """Proposal of a tiled head with a recomputed tail.

    Attributes:
        choices: the segments.
        order: their schedule.
        peak_bytes: estimated peak, or the room that it should fit into.
        cost: estimated cost in FLOPs.
        idle: values of the head that must leave the device while the tail runs.
        head_peak_bytes: estimated peak while the strips of the head run.
    """

    choices: tuple[SegmentChoice, ...]
    order: SegmentSchedule
    peak_bytes: float
    cost: float
    idle: tuple[str, ...] = ()
    head_peak_bytes: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _HeadEnd:
    """Indices of a head in the grids, and the stage that begins after it."""

    grid: int
    position: int
    height: int
    policy: int
    stage: int
    num_idle: int = 0


class TiledHeadRecompute:
    """Search for plans with a tiled head and a recomputed tail.

    Args:
        staged: the model in stages.
        grids: candidate grids that give the heads.
        room_bytes: largest room of later calls.
    """

    def __init__(self, staged: StagedModel, grids: Sequence[CandidateGrid], room_bytes: int) -> None:
        self.staged, self._grids = staged, grids
        problem = staged.problem
        self._prologue_bytes = sum(map(problem.sized.value_bytes, problem.sized.graph.live_out(problem.sized.phases.prologue)))
        self._num_buckets = problem.limits.num_buckets
        self._bucket_bytes = max(1, -(-room_bytes // self._num_buckets))
        stages = [[staged.stage_after(grid.head(p)) for p in range(len(grid.axes.positions))] for grid in grids]
        #: (grid, position, stage after it)
        self._ends = [(g, p, stage) for g, row in enumerate(stages) for p, stage in enumerate(row) if stage or (stage == 0 and p == 0)]
        self._tried: set[tuple[_HeadEnd, int]] = set()
        self._idle: dict[tuple[int, int], tuple[str, ...]] = {}

    def cheapest(
        self, room_bytes: float, worse_than: float, *, head_room_bytes: float | None = None, num_idle: int = 0
    ) -> TiledHeadRecomputePlan | None:
        """The cheapest new proposal that should fit and costs less than ``worse_than`` FLOPs.

        Args:
            room_bytes: bytes for the step.
            worse_than: cost of a known plan.
            head_room_bytes: bytes while the strips of the head run; ``None`` for the same.
            num_idle: number of the largest values between the segments of a head that leave the device while the tail runs; heads with
                fewer of them are left out.
        """
        best: tuple[float, _HeadEnd, int] | None = None
        for g, p, stage in self._ends:
            grid = self._grids[g]
            idle = self._idle_values(g, p, stage)[:num_idle] if num_idle else ()
            if len(idle) < num_idle:
                continue
            kept_bytes = self._prologue_bytes + grid.estimates.head_bytes[p] - sum(map(self.staged.problem.sized.value_bytes, idle))
            spare = np.clip((room_bytes - kept_bytes) / self._bucket_bytes, -1, self._num_buckets)
            fits = (spare >= 0) & (grid.estimates.head_peak_bytes[p] <= (room_bytes if head_room_bytes is None else head_room_bytes))
            buckets = np.maximum(np.floor(spare), 0).astype(np.int64)
            tail_cost = self.staged.rates.flops_per_second * self._table.first_pass_row(stage)[buckets]
            cost = np.where(fits, grid.estimates.head_cost[p] + tail_cost, np.inf)
            for tried, num_buckets in self._tried:
                if (tried.grid, tried.position, tried.num_idle) == (g, p, num_idle) and buckets[tried.height, tried.policy] == num_buckets:
                    cost[tried.height, tried.policy] = np.inf
            h, k = _argmin_index(cost)
            if cost[h, k] < (worse_than if best is None else best[0]):
                end = _HeadEnd(grid=g, position=p, height=h, policy=k, stage=stage, num_idle=num_idle)
                best = (float(cost[h, k]), end, int(buckets[h, k]))
        if best is None:
            return None
        cost_flops, end, num_buckets = best
        self._tried.add((end, num_buckets))
        return self._plan(end, self._table.decide, num_buckets, peak_bytes=room_bytes, cost=cost_flops)

    def smallest(self) -> TiledHeadRecomputePlan | None:
        """The proposal of least estimated peak."""
        min_memory, best = MinMemorySchedule(self.staged.chain), None
        for g, p, stage in self._ends:
            grid = self._grids[g]
            tail_peak = grid.estimates.head_bytes[p] + self._prologue_bytes + min_memory.first_pass_bytes(stage)
            peak = np.maximum(grid.estimates.head_peak_bytes[p], tail_peak)
            h, k = _argmin_index(peak)
            if peak[h, k] < (np.inf if best is None else best[0]):
                best = (float(peak[h, k]), _HeadEnd(grid=g, position=p, height=h, policy=k, stage=stage))
        return None if best is None else self._plan(best[1], min_memory.decide, 0, peak_bytes=best[0], cost=float("inf"))

    @cached_property
    def _table(self) -> CostTable:
        return CostTable(self.staged.chain, num_buckets=self._num_buckets, bucket_bytes=self._bucket_bytes)

    def _plan(self, end: _HeadEnd, decide: DecisionFunction, state: int, *, peak_bytes: float, cost: float) -> TiledHeadRecomputePlan:
        operations = reversal(self.staged.chain, decide, state, first=end.stage)
        if end.stage:
            head = self._grids[end.grid].head_choices(end.position, end.height, end.policy)
            head = self.staged.with_buffer_updates(head, end.stage)
            choices = (*head, *self.staged.choices_after(end.stage))
            if self._grids[end.grid].streams:
                choices = with_streamed(choices, streamable_values(self.staged.problem, choices))
            order = self.staged.segment_schedule(operations, head=head, num_stages=end.stage)
        else:
            choices, order = self.staged.choices, self.staged.segment_schedule(operations)
        idle = self._idle_values(end.grid, end.position, end.stage)[: end.num_idle] if end.num_idle else ()
        return TiledHeadRecomputePlan(
            choices=choices,
            order=order,
            peak_bytes=peak_bytes,
            cost=cost,
            idle=idle,
            head_peak_bytes=float(self._grids[end.grid].estimates.head_peak_bytes[end.position, end.height, end.policy]),
        )

    def _idle_values(self, grid: int, position: int, stage: int) -> tuple[str, ...]:
        """Streamed values that the segments of a head pass to each other, and not to the tail; the largest first."""
        if (grid, position) not in self._idle:
            sized = self.staged.problem.sized
            head = self._grids[grid].head_choices(position, 0, 0)
            borders = segment_borders(sized.graph, head)
            crossing = {*self.staged.cut_values[stage - 1], *sized.graph.results} if stage else set()
            made = {name for _, makes in borders for name in makes if name in sized.phases.streamed}
            read = {name for reads, _ in borders for name in reads}
            self._idle[grid, position] = tuple(sorted((made & read) - crossing, key=lambda name: (-sized.value_bytes(name), name)))
        return self._idle[grid, position]


def head_and_tail_peaks(plan: ProjectedPlan) -> tuple[float, float]:
    """Peak while the strips of a head run, and while untiled segments do."""
    records = [record for record in plan.projection.op_records if record.move.kind in ("forward", "backward")]
    tiled = {index for index, choice in enumerate(plan.choices) if choice.mode == "tiled"}
    head, tail = ([float(r.peak_bytes) for r in records if (r.move.segment in tiled) is is_head] for is_head in (True, False))
    return max(head, default=0.0), max(tail, default=0.0)


def _argmin_index(table: FloatArray) -> tuple[int, int]:
    h, k = np.unravel_index(int(table.argmin()), table.shape)
    return int(h), int(k)
