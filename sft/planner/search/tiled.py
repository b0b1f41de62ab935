"""Candidate grids: estimated peak and cost of thousands of tiled plans, from a handful of lowered programs.

A grid belongs to one way of computing halos and one number of panels. A candidate is a *position* (operators before it are tiled, operators
after it untiled), a strip height ``h`` and a policy for states. Lowering thousands of candidates would take minutes, and is not needed.
Every instruction of a program belongs to one operator. So one untiled program of the model gives the peak of each of its suffixes, and one
strip program of a run gives the peak of each of its prefixes, by counting only the storages of the operators inside
(``sft.planner.cost.strip_memory``). A few strip heights give those between them by interpolation (``sft.planner.cost.height_sampling``).

With ``streams`` tiled segments pass values to each other through the host (``sft.planner.streamed_cuts``): the grid then counts their
strips instead of full cuts, and adds the link time.

The estimates neglect borders of the image and odd last strips, which is a small error; a plan always gets an exact projection.
Costs are counted in FLOPs (``sft.planner.cost.roofline``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from sft.analysis.tiling.segments import cut_positions
from sft.planner.cost.boundary_memory import BoundaryTracker, untiled_memory
from sft.planner.cost.height_sampling import Floats, RunSampler, RunSamples, TiledCosts, halo_shares
from sft.planner.cost.roofline import DeviceRates, source_bytes
from sft.planner.cost.strip_memory import suffix_peaks
from sft.planner.cost.tiling import Tiling
from sft.planner.options import Options
from sft.planner.plan import SegmentChoice
from sft.planner.problem import PlanningProblem
from sft.planner.projection import plain_programs
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _UntiledCosts:
    """The untiled model: peak and overhead after each position, and FLOPs of each operator (forward, and in total)."""

    peak: Floats
    overhead: Floats
    forward_flops: Mapping[str, int]
    flops: Mapping[str, int]


class CandidateGrid:
    """Estimates for all candidates with one number of panels, and states that are kept or (``restart``) recomputed.

    Attributes:
        positions: (phase, index into that phase's cuts) of each position; the first tiles no operator.
        peak_bytes: estimated peak, [position, height, policy].
        flops: FLOPs of each untiled operator, forward and backward.
        forward_flops: FLOPs of its forward pass alone.
        sampled: indices of the strip heights that were lowered; peaks between them are interpolated.
        min_cost: cost of running all possible operators in strips, with every state kept.
        cost: estimated cost in FLOPs, [position, height, policy].
        heads: operators before each position, including untiled ones between tiled runs.
        head_bytes: bytes that a head keeps until its backward pass begins, including inputs and outputs, [position, height, policy].
        head_peak_bytes: peak while the strips of a head run, [position, height, policy].
        head_cost: cost of a head, [position, height, policy].
    """

    def __init__(
        self,
        problem: PlanningProblem,
        options: Options,
        device_type: str,
        num_panels: int = 1,
        *,
        restart: bool = True,
        streams: bool = False,
    ) -> None:
        self.streams, self.num_panels, self.is_restarting = streams, num_panels, restart
        self.problem, self.options, self._rates = problem, options, DeviceRates(device_type)
        self.tiling = Tiling.of(problem, options, num_panels, restart=restart)
        self._phases = problem.phases.phases
        self._cuts = [cut_positions(problem.graph, phase.streamed, problem.phases.streamed) for phase in self._phases]
        self.positions = [(0, 0), *((i, c) for i, cuts in enumerate(self._cuts) for c in range(1, len(cuts)))]
        if options.tile is not None:
            self.positions = self.positions[-1:]
        elif options.strategy == "none":
            self.positions = self.positions[:1]
        self._grid()
        self._estimate()

    # -- the grid ---------------------------------------------------------------------------------------------------

    def _grid(self) -> None:
        """Strip heights (rows of the tallest run's source) and state intervals."""
        problem, options = self.problem, self.options
        runs = [(phase.streamed, problem.run_height(phase.streamed)) for phase in self._phases if phase.streamed]
        tallest = self.tiling.height
        stride = max((problem.stride(names) for names, height in runs if height == tallest), default=1)
        if options.tile is not None:
            self.strip_rows, self.sampled = [min(options.tile[0], tallest)], [0]
        elif self.tiling.halo == "recompute":
            halved = (-(-tallest // 2**e) for e in range(12, -1, -1))
            self.strip_rows = self._indexed([rows for rows in halved if rows >= min(stride, tallest)])
            self.sampled = list(range(len(self.strip_rows)))
        else:
            low = sorted({max(1, stride // d) for d in (8, 4, 2)} - {stride})
            multiples = [stride * m for e in range(32) for m in (2**e, 3 * 2**e)]
            high = self._indexed(sorted({*(rows for rows in multiples if rows < tallest), min(stride, tallest), tallest}))
            self.strip_rows = [rows for rows in low if rows < tallest and rows < high[0]] + high
            inner = {
                self.strip_rows.index(rows)
                for rows in (stride * m for m in _sampled_multiples(tallest // stride, problem.limits))
                if rows in high
            }
            # Below the stride the rows of deep values stay at one; the bytes grow with the rows of the remaining values alone.
            self.sampled = sorted({0, *inner, len(self.strip_rows) - 1})
        most = -(-tallest // self.strip_rows[0]) + 1
        self.policies = _policies(options, most, problem.limits) if problem.training and self.tiling.halo == "carry" else [Checkpoints()]

    def _indexed(self, heights: list[int]) -> list[int]:
        """Select the strip heights with tensors that 32-bit GPU indices can address; at least the lowest."""
        most = self.tiling.height if self._rates.device_type == "cpu" else self.tiling.indexed_rows
        return [rows for rows in heights if rows <= most] or heights[:1]

    def choices(self, candidate: Candidate) -> tuple[SegmentChoice, ...]:
        """Decisions of a candidate."""
        choices = self._choices(self.positions[candidate.position], self.strip_rows[candidate.height], self.policies[candidate.policy])
        return with_streamed(choices, streamable_values(self.problem, choices)) if self.streams else choices

    def head_choices(self, position: int, height: int, policy: int) -> tuple[SegmentChoice, ...]:
        """Decisions about the operators before a position."""
        choices = self._choices(self.positions[position], self.strip_rows[height], self.policies[policy])
        inside = set(self.heads[position])
        return tuple(choice for choice in choices if inside.issuperset(choice.nodes))

    def _choices(self, position: tuple[int, int], strip_rows: int, policy: Checkpoints) -> tuple[SegmentChoice, ...]:
        choices: list[SegmentChoice] = []
        untiled: tuple[str, ...] = ()
        last, index = position
        for number, (phase, cuts) in enumerate(zip(self._phases, self._cuts, strict=True)):
            cut = 0 if number > last else cuts[index] if number == last else cuts[-1]
            tiled = phase.streamed[:cut]
            if tiled:
                if untiled:
                    choices.append(SegmentChoice(nodes=untiled, mode="whole"))
                    untiled = ()
                choices.append(self.tiling.choice(tiled, strip_rows, policy))
            untiled += phase.streamed[cut:] + phase.tail
        if untiled:
            choices.append(SegmentChoice(nodes=untiled, mode="whole"))
        return tuple(choices)

    # -- estimates --------------------------------------------------------------------------------------------------

    def _estimate(self) -> None:
        problem = self.problem
        order = problem.operators
        starts = np.cumsum([0, *(len(phase.streamed) + len(phase.tail) for phase in self._phases)])
        cut_at = [int(starts[i]) + self._cuts[i][c] for i, c in self.positions]
        untiled = self._untiled_costs(order, cut_at)
        self._num_untiled, self._untiled_peaks = [len(order) - cut for cut in cut_at], untiled.peak
        self.plain_flops, self.flops, self.forward_flops = sum(untiled.flops.values()), untiled.flops, untiled.forward_flops
        grad_bytes = self._param_grad_bytes(order)
        shape = (len(self.positions), len(self.strip_rows), len(self.policies))
        self.peak_bytes, self.cost = np.zeros(shape), np.zeros(shape)
        self.head_peak_bytes, self.head_bytes, self.head_cost = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        self.heads = [tuple(order[:cut]) for cut in cut_at]
        tiled = [i for i, phase in enumerate(self._phases) if phase.streamed and any(i <= last and c for last, c in self.positions)]
        sampler = RunSampler(
            tiling=self.tiling, rates=self._rates, strip_rows=self.strip_rows, sampled=self.sampled, policies=self.policies
        )
        runs = {i: sampler.sample(self._phases[i].streamed, self._cuts[i], untiled.forward_flops, untiled.flops) for i in tiled}
        before, num_done = TiledCosts.zeros(shape[1:]), 0
        grads = problem.input_grad_bytes + grad_bytes if problem.training else 0
        boundaries = BoundaryTracker(problem, self.tiling, self.strip_rows, streams=self.streams)
        tail_memory = untiled_memory(problem, cut_at)
        flops_before = [0, *accumulate(untiled.flops[name] for name in order)]
        for p, ((last, index), boundary) in enumerate(zip(self.positions, boundaries.advance(cut_at), strict=True)):
            for i in range(num_done, last):
                before = before.plus(self._tiled_costs(runs[i], len(runs[i].cuts) - 1, untiled)) if i in runs else before
            num_done = last
            is_begun = last in runs and runs[last].cuts[index] > 0
            head = before.plus(self._tiled_costs(runs[last], index, untiled)) if is_begun else before
            tail_bytes = untiled.peak[p] + tail_memory[p].source_bytes + tail_memory[p].exchanged_bytes
            kept = problem.border_bytes + boundary.made_bytes.sum() + head.states
            tail_peak, head_peak = kept + tail_bytes, np.broadcast_to(kept, shape[1:])
            if head.peaks:
                running = np.cumsum(boundary.made_bytes)[:, None] + np.stack(head.peaks) + boundary.strip_bytes
                head_peak = np.maximum(head_peak, problem.border_bytes + head.states + grads + running.max(axis=0)[:, None])
                head_peak = np.where(head.is_allowed, head_peak, np.inf)
            cost = self.plain_flops + untiled.overhead[p] + head.cost
            cost = cost + boundary.link_seconds * self._rates.flops_per_second
            read_bytes = head.read_bytes + (1 + problem.training) * tail_memory[p].source_bytes
            cost = self._with_reading(cost, read_bytes)
            self.peak_bytes[p], self.cost[p] = np.maximum(tail_peak, head_peak), cost
            self.head_peak_bytes[p], self.head_bytes[p] = head_peak, kept
            self.head_cost[p] = cost - untiled.overhead[p] - (self.plain_flops - flops_before[cut_at[p]])
        self.min_cost = float(self.cost[-1, :, 0].min())

    def _tiled_costs(self, run: RunSamples, cut: int, untiled: _UntiledCosts) -> TiledCosts:
        """Bytes and costs that the operators of a run before a cut add when tiled."""
        problem, names = self.problem, run.names[: run.cuts[cut]]
        restarted_share = 1 - 1 / self.tiling.num_walks if self.tiling.restart else 0.0
        is_differentiated = any(name in problem.requires_grad for name in names)
        reruns: Any = 1 + restarted_share + run.restored_share if is_differentiated else 0.0 * run.restored_share
        once = run.flops[cut] - sum(untiled.flops[name] for name in names) + run.num_steps * self.tiling.num_walks * run.overhead[cut]
        is_free = len(self.policies) > 1  # otherwise the options force the policy
        return TiledCosts(
            states=run.states[cut],
            peaks=(run.peak[cut],),
            cost=once[:, None] + run.forward_flops[cut][:, None] * reruns,
            read_bytes=source_bytes(problem, names) * self.tiling.num_panels * (1 + reruns),
            is_allowed=(run.restored_share <= problem.limits.max_restored) if is_free else np.ones(run.restored_share.shape, dtype=bool),
        )

    def untiled_tail_bytes(self, num_operators: int) -> float:
        """Lower bound of the peak of a step that keeps so many of the last operators untiled."""
        peaks = [peak for count, peak in zip(self._num_untiled, self._untiled_peaks, strict=True) if count <= num_operators]
        return self.problem.border_bytes + float(max(peaks, default=0.0))

    def _with_reading(self, cost: Floats, read_bytes: Floats) -> Floats:
        """Costs including the time of reading so many bytes of inputs."""
        if not self.problem.from_source:
            return cost
        reading = self._rates.reading_seconds(self._rates.flops_per_second) * read_bytes
        return cost + reading if self._rates.reads_on_device else np.maximum(cost, reading)

    def min_cost_in(self, num_panels: int) -> float:
        """Estimate of ``min_cost`` for another number of panels, scaled by the FLOPs of their halos."""
        tiling = Tiling.of(self.problem, self.options, num_panels, restart=self.is_restarting)
        return self.min_cost * self._flops_with_halos(tiling) / self._flops_with_halos(self.tiling)

    def _flops_with_halos(self, tiling: Tiling) -> float:
        total = 1.0
        for phase in self._phases:
            cols = tiling.cols_of(phase.streamed) if phase.streamed else 0
            shares = halo_shares(self.problem, phase.streamed, cols, 1) if tiling.num_panels > 1 else {}
            total += sum(self.flops[name] * shares.get(name, 1.0) for name in phase.streamed)
        return total

    def _untiled_costs(self, order: Sequence[str], cut_at: Sequence[int]) -> _UntiledCosts:
        """Costs of the untiled operators after each position; they do not depend on the tiling before it."""
        key = ("whole behind", tuple(cut_at), self._rates)
        return self.problem.memoize(key, lambda: self._compute_untiled_costs(order, cut_at))

    def _compute_untiled_costs(self, order: Sequence[str], cut_at: Sequence[int]) -> _UntiledCosts:
        problem = self.problem
        if not order:
            zeros = np.zeros(len(cut_at))
            return _UntiledCosts(peak=zeros, overhead=zeros, forward_flops={}, flops={})
        index_of = {name: i for i, name in enumerate(order)}
        programs = [program.instructions for program in plain_programs(problem)]
        instructions = [instruction for listed in programs for instruction in listed]
        forward_flops, flops = dict.fromkeys(order, 0), dict.fromkeys(order, 0)
        for total, listed in ((forward_flops, programs[0]), (flops, instructions)):
            for instruction in listed:
                total[instruction.owner] += instruction.flops
        overhead = np.zeros(len(order) + 1)
        for instruction in instructions:
            overhead[index_of[instruction.owner]] += self._rates.overhead(instruction)
        suffix_overhead = np.cumsum(overhead[::-1])[::-1]
        return _UntiledCosts(
            peak=suffix_peaks(instructions, index_of, cut_at),
            overhead=suffix_overhead[np.array(cut_at)],
            forward_flops=forward_flops,
            flops=flops,
        )

    def _param_grad_bytes(self, order: Sequence[str]) -> int:
        """Bytes of the new parameter gradients."""
        problem = self.problem
        leaves = {o for name in order for o in problem.graph[name].operands if o in problem.resident_leaves}
        return sum(problem.grad_bytes(o) for o in leaves & problem.requires_grad - problem.phases.streamed)

    @property
    def last(self) -> Candidate:
        """The candidate that tiles all possible operators, in the tallest strips, with every state kept."""
        shape = self.cost.shape
        return self._candidate(int(np.ravel_multi_index((shape[0] - 1, shape[1] - 1, 0), shape)))

    @property
    def flops_per_second(self) -> float:
        """Rate that converts seconds to costs."""
        return self._rates.flops_per_second

    # -- choosing ---------------------------------------------------------------------------------------------------

    def cheapest(self, room_bytes: float, tried: npt.NDArray[np.bool_]) -> Candidate | None:
        """The cheapest untried candidate that should fit; ``None`` if none does."""
        cost = np.where((self.peak_bytes <= room_bytes) & ~tried, self.cost, np.inf)
        return self._candidate(int(cost.argmin())) if np.isfinite(cost.min()) else None

    def min_cost_within(self, room_bytes: float) -> float:
        """Smallest cost of the candidates that should fit; infinity if none does."""
        return float(np.where(self.peak_bytes <= room_bytes, self.cost, np.inf).min())

    def smallest(self) -> list[Candidate]:
        """The candidate of least estimated peak for each strip height; independent of the budget."""
        heights = range(self.cost.shape[1])
        flat = np.arange(self.cost.size).reshape(self.cost.shape)
        indices = [int(flat[:, height].flat[self.peak_bytes[:, height].argmin()]) for height in heights]
        return [candidate for candidate in map(self._candidate, indices) if np.isfinite(candidate.peak_bytes)]

    def _candidate(self, flat: int) -> Candidate:
        p, h, k = (int(i) for i in np.unravel_index(flat, self.cost.shape))
        return Candidate(position=p, height=h, policy=k, peak_bytes=float(self.peak_bytes[p, h, k]), cost=float(self.cost[p, h, k]))


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
