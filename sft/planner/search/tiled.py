"""Candidate grids: thousands of tiled plans with their estimates, and the choice among them.

A grid belongs to one way of computing halos and one number of panels. A candidate is a *position* (operators before it are tiled, operators
after it untiled), a strip height ``h`` and a policy for states. Lowering thousands of candidates would take minutes;
``sft.planner.search.estimates`` estimates them from a handful of lowered programs. A plan always gets an exact projection.

With ``streams`` tiled segments pass values to each other through the host (``sft.planner.streamed_cuts``): the grid then counts their
strips instead of full cuts, and adds the link time. Costs are counted in FLOPs (``sft.planner.cost.device_rates``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from sft.analysis.ir.graph_cuts import cut_positions
from sft.planner.cost.device_rates import DeviceRates
from sft.planner.cost.height_sampling import halo_shares
from sft.planner.cost.tiling import Tiling
from sft.planner.options import Options
from sft.planner.plan import SegmentChoice
from sft.planner.problem import PlanningProblem
from sft.planner.search.estimates import GridAxes, estimate_candidates
from sft.planner.search_limits import SearchLimits
from sft.planner.streamed_cuts import streamable_values, with_streamed
from sft.runtime.strip_checkpoints import Checkpoints

__all__ = ["Candidate", "CandidateGrid"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One candidate: indices into the grid, estimated peak bytes and estimated cost in FLOPs."""

    position: int
    height: int
    policy: int
    peak_bytes: float
    cost: float


class CandidateGrid:
    """All candidates with one number of panels, and states that are kept or (``restart``) recomputed.

    Attributes:
        problem: the planning problem.
        options: constraints on the plan.
        num_panels: panels side by side.
        streams: true if values between tiled segments pass through the host.
        is_restarting: true if states may be recomputed.
        tiling: common parameters of the tiled runs.
        axes: positions, strip heights and state policies.
        estimates: bytes and costs of the candidates.
    """

    def __init__(
        self,
        problem: PlanningProblem,
        options: Options,
        rates: DeviceRates,
        num_panels: int = 1,
        *,
        restart: bool = True,
        streams: bool = False,
    ) -> None:
        self.problem, self.options, self._rates = problem, options, rates
        self.num_panels, self.streams, self.is_restarting = num_panels, streams, restart
        self.tiling = Tiling.of(problem, options, num_panels, restart=restart)
        self.axes = _grid_axes(problem, options, self.tiling, self._rates)
        self.estimates = estimate_candidates(problem, self.tiling, self._rates, self.axes, streams=streams)

    @classmethod
    def of(
        cls,
        problem: PlanningProblem,
        options: Options,
        rates: DeviceRates,
        num_panels: int = 1,
        *,
        restart: bool = True,
        streams: bool = False,
    ) -> CandidateGrid:
        """The grid of a problem, which its searches share: those in other rooms, in other host memory, and with replayed passes, whose
        kernels are the same.
        """
        rates = replace(rates, replays=False)
        key = ("candidate grid", options, rates, num_panels, restart, streams)
        return problem.memo.memoize(key, lambda: cls(problem, options, rates, num_panels, restart=restart, streams=streams))

    def head(self, position: int) -> tuple[str, ...]:
        """Operators before a position, including untiled ones between tiled runs."""
        return self.problem.sized.operators[: self.axes.cut_at[position]]

    def choices(self, candidate: Candidate) -> tuple[SegmentChoice, ...]:
        """Decisions of a candidate."""
        choices = self._choices(candidate.position, candidate.height, candidate.policy)
        return with_streamed(choices, streamable_values(self.problem, choices)) if self.streams else choices

    def head_choices(self, position: int, height: int, policy: int) -> tuple[SegmentChoice, ...]:
        """Decisions about the operators before a position."""
        inside = set(self.head(position))
        return tuple(choice for choice in self._choices(position, height, policy) if inside.issuperset(choice.nodes))

    def _choices(self, position: int, height: int, policy: int) -> tuple[SegmentChoice, ...]:
        choices: list[SegmentChoice] = []
        untiled: tuple[str, ...] = ()
        last, index = self.axes.positions[position]
        for number, (phase, cuts) in enumerate(zip(self.problem.sized.phases.phases, self.axes.cuts, strict=True)):
            cut = 0 if number > last else cuts[index] if number == last else cuts[-1]
            tiled = phase.streamed[:cut]
            if tiled:
                if untiled:
                    choices.append(SegmentChoice(nodes=untiled, mode="whole"))
                    untiled = ()
                choices.append(self.tiling.choice(tiled, self.axes.strip_rows[height], self.axes.policies[policy]))
            untiled += phase.streamed[cut:] + phase.tail
        if untiled:
            choices.append(SegmentChoice(nodes=untiled, mode="whole"))
        return tuple(choices)

    def untiled_tail_bytes(self, num_operators: int) -> float:
        """Lower bound of the peak of a step that keeps so many of the last operators untiled."""
        total = len(self.problem.sized.operators)
        peaks = [peak for cut, peak in zip(self.axes.cut_at, self.estimates.untiled.peak, strict=True) if total - cut <= num_operators]
        return self.problem.resources.border_bytes + float(max(peaks, default=0.0))

    def min_cost_in(self, num_panels: int) -> float:
        """Estimate of the minimal cost with another number of panels, scaled by the FLOPs of their halos."""
        tiling = Tiling.of(self.problem, self.options, num_panels, restart=self.is_restarting)
        return self.estimates.min_cost * self._flops_with_halos(tiling) / self._flops_with_halos(self.tiling)

    def _flops_with_halos(self, tiling: Tiling) -> float:
        total, flops = 1.0, self.estimates.untiled.flops
        for phase in self.problem.sized.phases.phases:
            cols = tiling.cols_of(phase.streamed) if phase.streamed else 0
            shares = halo_shares(self.problem, phase.streamed, cols, 1) if tiling.num_panels > 1 else {}
            total += sum(flops[name] * shares.get(name, 1.0) for name in phase.streamed)
        return total

    @property
    def last(self) -> Candidate:
        """The candidate that tiles all possible operators, in the tallest strips, with every state kept."""
        shape = self.axes.shape
        return self._candidate(int(np.ravel_multi_index((shape[0] - 1, shape[1] - 1, 0), shape)))

    @property
    def flops_per_second(self) -> float:
        """Rate that converts seconds to costs."""
        return self._rates.flops_per_second

    def cheapest(self, room_bytes: float, tried: npt.NDArray[np.bool_]) -> Candidate | None:
        """The cheapest untried candidate that should fit; ``None`` if none does."""
        cost = np.where((self.estimates.peak_bytes <= room_bytes) & ~tried, self.estimates.cost, np.inf)
        return self._candidate(int(cost.argmin())) if np.isfinite(cost.min()) else None

    def min_cost_within(self, room_bytes: float) -> float:
        """Smallest cost of the candidates that should fit; infinity if none does."""
        return float(np.where(self.estimates.peak_bytes <= room_bytes, self.estimates.cost, np.inf).min())

    def smallest(self) -> list[Candidate]:
        """The candidate of least estimated peak for each strip height; independent of the budget."""
        heights = range(self.axes.shape[1])
        flat = np.arange(self.estimates.cost.size).reshape(self.axes.shape)
        indices = [int(flat[:, height].flat[self.estimates.peak_bytes[:, height].argmin()]) for height in heights]
        return [candidate for candidate in map(self._candidate, indices) if np.isfinite(candidate.peak_bytes)]

    def _candidate(self, flat: int) -> Candidate:
        p, h, k = (int(i) for i in np.unravel_index(flat, self.axes.shape))
        peak_bytes, cost = (float(table[p, h, k]) for table in (self.estimates.peak_bytes, self.estimates.cost))
        return Candidate(position=p, height=h, policy=k, peak_bytes=peak_bytes, cost=cost)


def _grid_axes(problem: PlanningProblem, options: Options, tiling: Tiling, rates: DeviceRates) -> GridAxes:
    """Positions, strip heights (rows of the tallest run's source) and state policies that the options allow."""
    sized, phases = problem.sized, problem.sized.phases.phases
    cuts = tuple(tuple(cut_positions(sized.graph, phase.streamed, sized.phases.streamed)) for phase in phases)
    positions = [(0, 0), *((i, c) for i, of_phase in enumerate(cuts) for c in range(1, len(of_phase)))]
    if options.tile is not None:
        positions = positions[-1:]
    elif options.strategy == "none":
        positions = positions[:1]
    starts = np.cumsum([0, *(len(phase.streamed) + len(phase.tail) for phase in phases)])
    strip_rows, sampled = _strip_heights(problem, options, tiling, rates)
    num_steps = -(-tiling.height // strip_rows[0]) + 1
    keeps_states = sized.training and tiling.halo == "carry"
    return GridAxes(
        cuts=cuts,
        positions=tuple(positions),
        cut_at=tuple(int(starts[i]) + cuts[i][c] for i, c in positions),
        strip_rows=tuple(strip_rows),
        sampled=tuple(sampled),
        policies=tuple(_policies(options, num_steps, problem.limits)) if keeps_states else (Checkpoints(),),
    )


def _strip_heights(problem: PlanningProblem, options: Options, tiling: Tiling, rates: DeviceRates) -> tuple[list[int], list[int]]:
    """Strip heights in ascending order, and the indices of those that are lowered."""
    sized, tallest = problem.sized, tiling.height
    runs = [phase.streamed for phase in sized.phases.phases if phase.streamed]
    stride = max((sized.stride(names) for names in runs if sized.run_height(names) == tallest), default=1)
    # 32-bit GPU indices must address the tensors of a strip.
    max_rows = tallest if rates.device_type == "cpu" else tiling.indexed_rows

    def addressable(heights: list[int]) -> list[int]:
        return [rows for rows in heights if rows <= max_rows] or heights[:1]

    if options.tile is not None:
        return [min(options.tile[0], tallest)], [0]
    if tiling.halo == "recompute":
        halved = (-(-tallest // 2**e) for e in range(12, -1, -1))
        strip_rows = addressable([rows for rows in halved if rows >= min(stride, tallest)])
        return strip_rows, list(range(len(strip_rows)))
    low = sorted({max(1, stride // d) for d in (8, 4, 2)} - {stride})
    multiples = [stride * m for e in range(32) for m in (2**e, 3 * 2**e)]
    high = addressable(sorted({*(rows for rows in multiples if rows < tallest), min(stride, tallest), tallest}))
    strip_rows = [rows for rows in low if rows < tallest and rows < high[0]] + high
    inner = {strip_rows.index(rows) for rows in (stride * m for m in _sampled_multiples(tallest // stride, problem.limits)) if rows in high}
    # Below the stride the rows of deep values stay at one; the bytes grow with the rows of the remaining values alone.
    return strip_rows, sorted({0, *inner, len(strip_rows) - 1})


def _policies(options: Options, num_steps: int, limits: SearchLimits) -> list[Checkpoints]:
    """State policies: from every state kept to about one in the square root of their number, then fewer and fewer slots."""
    if options.state_slots is not None:
        return [Checkpoints(slots=options.state_slots)]
    if options.state_every is not None:
        return [Checkpoints(options.state_every)]
    intervals = [1]
    while intervals[-1] ** 2 < 4 * num_steps:
        intervals.append(max(intervals[-1] + 1, intervals[-1] * 5 // 4))
    return [*map(Checkpoints, intervals), *(Checkpoints(slots=slots) for slots in limits.state_slots if slots**2 < 4 * num_steps)]


def _sampled_multiples(num_strides: int, limits: SearchLimits) -> tuple[int, ...]:
    """Strip heights to lower, in strides, for an image of ``num_strides``: equal for images of similar height, so that samples are
    shared."""
    return next((multiples for bound, multiples in limits.sampled_strides if num_strides < bound), limits.sampled_strides_above)
