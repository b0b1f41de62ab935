"""Strips in front, recomputation behind: plans whose head is tiled and whose other stages run again as often as memory asks for.

The survey knows what each head costs and holds (where it ends, strip height, policy for states). What lies behind is a chain of stages
(``sft.plan.stages``), of which the table of `optimal` knows the time for every number of bytes, from every stage on. So a mixed plan costs

    head(p, h, k) + P(i(p), room - held(p, h, k)),

and one table serves all of them. No head at all, and everything kept behind one, are special cases. As with the survey nothing is returned
that has not been projected exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from sft.plan.chain.optimal import MinMemorySchedule, CostTable
from sft.plan.chain.reversal import DecisionFunction, reversal
from sft.plan.stages import StagedModel
from sft.plan.survey import CandidateGrid
from sft.plan.types import SegmentChoice
from sft.walk.order import SegmentSchedule

__all__ = ["TiledHeadRecompute", "TiledHeadRecomputePlan"]

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
        self._made_bytes = sum(map(problem.value_bytes, problem.graph.handed_on(problem.phases.prologue)))
        self._bucket_bytes = max(1, -(-room_bytes // _NUM_BUCKETS))
        at = [[staged.stage_behind(head) for head in survey.heads] for survey in surveys]
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
            head = self.staged.with_asides(head, place.stage)
            choices = (*head, *self.staged.choices_behind(place.stage))
            order = self.staged.order(operations, head=head, num_stages=place.stage)
        else:
            choices, order = self.staged.choices, self.staged.order(operations)
        return TiledHeadRecomputePlan(choices=choices, order=order, peak_bytes=peak_bytes, cost=cost)


def _argmin_index(table: npt.NDArray[np.float64]) -> tuple[int, int]:
    h, k = np.unravel_index(int(table.argmin()), table.shape)
    return int(h), int(k)
