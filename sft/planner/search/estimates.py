"""Candidate estimates: peak and cost of every candidate of a grid, from sampled runs and one untiled program.

Every instruction of a program belongs to one operator. So one untiled program of the model gives the peak of each of its suffixes, and one
strip program of a run gives the peak of each of its prefixes, by counting only the storages of the operators inside
(``sft.planner.cost.strip_memory``). A few strip heights give those between them by interpolation (``sft.planner.cost.height_sampling``).
The estimates neglect borders of the image and odd last strips, which is a small error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from sft.common.array_types import FloatArray
from sft.planner.cost.boundary_memory import BoundaryTracker, untiled_memory
from sft.planner.cost.device_rates import DeviceRates
from sft.planner.cost.height_sampling import RunSampler, RunSamples, TiledCosts
from sft.planner.cost.step_time import source_bytes
from sft.planner.cost.strip_memory import suffix_peaks
from sft.planner.cost.tiling import Tiling
from sft.planner.problem import PlanningProblem
from sft.planner.projection import plain_programs
from sft.runtime.strip_checkpoints import Checkpoints

__all__ = ["Estimates", "GridAxes", "UntiledCosts", "estimate_candidates"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GridAxes:
    """Axes of a candidate grid: positions, strip heights and state policies.

    Attributes:
        cuts: operators of the run before each of its cuts, for each phase.
        positions: (phase, index into its cuts) of each position; the first tiles no operator.
        cut_at: operators of the model before each position.
        strip_rows: strip heights, in rows of the tallest run's source.
        sampled: indices of the strip heights that are lowered; estimates between them are interpolated.
        policies: state policies.
    """

    cuts: tuple[tuple[int, ...], ...]
    positions: tuple[tuple[int, int], ...]
    cut_at: tuple[int, ...]
    strip_rows: tuple[int, ...]
    sampled: tuple[int, ...]
    policies: tuple[Checkpoints, ...]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Numbers of positions, heights and policies."""
        return len(self.positions), len(self.strip_rows), len(self.policies)


@dataclass(frozen=True, slots=True, kw_only=True)
class UntiledCosts:
    """Costs of the untiled operators after each position; they do not depend on the tiling before it.

    Attributes:
        peak: peak bytes of these operators, [position].
        overhead: their cost in addition to FLOPs, in FLOPs, [position].
        forward_flops: FLOPs of the forward pass of each untiled operator of the model.
        flops: FLOPs of its forward and backward pass.
    """

    peak: FloatArray
    overhead: FloatArray
    forward_flops: Mapping[str, int]
    flops: Mapping[str, int]

    @property
    def plain_flops(self) -> int:
        """FLOPs of the untiled model."""
        return sum(self.flops.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimates:
    """Estimated bytes and costs of all candidates; arrays are [position, height, policy].

    Attributes:
        peak_bytes: peak of a step.
        cost: cost of a step, in FLOPs.
        head_bytes: bytes that a head keeps until its backward pass begins, including inputs and outputs.
        head_peak_bytes: peak while the strips of a head run.
        head_cost: cost of a head.
        untiled: costs of the untiled operators.
    """

    peak_bytes: FloatArray
    cost: FloatArray
    head_bytes: FloatArray
    head_peak_bytes: FloatArray
    head_cost: FloatArray
    untiled: UntiledCosts

    @property
    def min_cost(self) -> float:
        """Cost of running all possible operators in strips, with every state kept."""
        return float(self.cost[-1, :, 0].min())


def estimate_candidates(problem: PlanningProblem, tiling: Tiling, rates: DeviceRates, axes: GridAxes, *, streams: bool) -> Estimates:
    """Estimate all candidates of a grid.

    Args:
        problem: the planning problem.
        tiling: common parameters of the tiled runs.
        rates: cost of instructions in addition to their FLOPs.
        axes: the candidates.
        streams: true if values between tiled segments pass through the host.
    """
    sized, resources = problem.sized, problem.resources
    order, phases = sized.operators, sized.phases.phases
    untiled = _untiled_costs(problem, rates, axes.cut_at)
    peak_bytes, cost, head_bytes, head_peak_bytes, head_cost = (np.zeros(axes.shape) for _ in range(5))
    sampler = RunSampler(tiling=tiling, rates=rates, strip_rows=axes.strip_rows, sampled=axes.sampled, policies=axes.policies)
    tiled = [i for i, phase in enumerate(phases) if phase.streamed and any(i <= last and c for last, c in axes.positions)]
    runs = {i: sampler.sample(phases[i].streamed, axes.cuts[i], untiled.forward_flops, untiled.flops) for i in tiled}
    before, num_done = TiledCosts.zeros(axes.shape[1:]), 0
    new_grad_bytes = resources.input_grad_bytes + _parameter_grad_bytes(problem, order) if sized.training else 0
    boundaries = BoundaryTracker(problem, tiling, axes.strip_rows, streams=streams)
    tail_memory = untiled_memory(problem, axes.cut_at)
    flops_before = [0, *accumulate(untiled.flops[name] for name in order)]
    for p, ((last, index), boundary) in enumerate(zip(axes.positions, boundaries.advance(axes.cut_at), strict=True)):
        for i in range(num_done, last):
            before = before.plus(_tiled_costs(problem, tiling, runs[i], len(runs[i].cuts) - 1, untiled)) if i in runs else before
        num_done = last
        is_begun = last in runs and runs[last].cuts[index] > 0
        head = before.plus(_tiled_costs(problem, tiling, runs[last], index, untiled)) if is_begun else before
        tail_bytes = untiled.peak[p] + tail_memory[p].source_bytes + tail_memory[p].exchanged_bytes
        always_bytes = resources.border_bytes + boundary.kept_bytes + head.states
        tail_peak, head_peak = always_bytes + tail_bytes, np.broadcast_to(always_bytes, axes.shape[1:])
        if head.peaks:
            running = boundary.alive_bytes[:, None] + np.stack(head.peaks) + boundary.strip_bytes
            head_peak = np.maximum(head_peak, resources.border_bytes + head.states + new_grad_bytes + running.max(axis=0)[:, None])
            head_peak = np.where(head.is_allowed, head_peak, np.inf)
        read_bytes = head.read_bytes + (1 + sized.training) * tail_memory[p].source_bytes
        computing = untiled.plain_flops + untiled.overhead[p] + head.cost
        computing = computing + boundary.link_seconds * rates.flops_per_second
        cost[p] = _with_reading(problem, rates, computing, read_bytes)
        peak_bytes[p] = np.maximum(tail_peak, head_peak)
        head_peak_bytes[p], head_bytes[p] = head_peak, always_bytes
        head_cost[p] = cost[p] - untiled.overhead[p] - (untiled.plain_flops - flops_before[axes.cut_at[p]])
    return Estimates(
        peak_bytes=peak_bytes, cost=cost, head_bytes=head_bytes, head_peak_bytes=head_peak_bytes, head_cost=head_cost, untiled=untiled
    )


def _tiled_costs(problem: PlanningProblem, tiling: Tiling, run: RunSamples, cut: int, untiled: UntiledCosts) -> TiledCosts:
    """Bytes and costs that the operators of a run before a cut add when tiled."""
    names = run.names[: run.cuts[cut]]
    restarted_share = 1 - 1 / tiling.num_sweeps if tiling.restart else 0.0
    is_differentiated = any(name in problem.sized.requires_grad for name in names)
    reruns: Any = 1 + restarted_share + run.restored_share if is_differentiated else 0.0 * run.restored_share
    once = run.flops[cut] - sum(untiled.flops[name] for name in names) + run.num_steps * tiling.num_sweeps * run.overhead[cut]
    is_free = run.restored_share.shape[1] > 1  # otherwise the options force the policy
    return TiledCosts(
        states=run.states[cut],
        peaks=(run.peak[cut],),
        cost=once[:, None] + run.forward_flops[cut][:, None] * reruns,
        read_bytes=source_bytes(problem, names) * tiling.num_panels * (1 + reruns),
        is_allowed=(run.restored_share <= problem.limits.max_restored) if is_free else np.ones(run.restored_share.shape, dtype=bool),
    )


def _with_reading(problem: PlanningProblem, rates: DeviceRates, cost: FloatArray, read_bytes: FloatArray) -> FloatArray:
    """Costs including the time of reading so many bytes of inputs."""
    if not problem.resources.from_source:
        return cost
    reading = rates.reading_seconds(rates.flops_per_second) * read_bytes
    return cost + reading if rates.reads_on_device else np.maximum(cost, reading)


def _parameter_grad_bytes(problem: PlanningProblem, order: Sequence[str]) -> int:
    """Bytes of the new parameter gradients."""
    sized = problem.sized
    leaves = {o for name in order for o in sized.graph[name].operands if o in problem.resources.resident_leaves}
    return sum(sized.grad_bytes(o) for o in leaves & sized.requires_grad - sized.phases.streamed)


def _untiled_costs(problem: PlanningProblem, rates: DeviceRates, cut_at: tuple[int, ...]) -> UntiledCosts:
    return problem.memo.memoize(("untiled costs", cut_at, rates.device_type), lambda: _compute_untiled_costs(problem, rates, cut_at))


def _compute_untiled_costs(problem: PlanningProblem, rates: DeviceRates, cut_at: tuple[int, ...]) -> UntiledCosts:
    order = problem.sized.operators
    if not order:
        zeros = np.zeros(len(cut_at))
        return UntiledCosts(peak=zeros, overhead=zeros, forward_flops={}, flops={})
    index_of = {name: i for i, name in enumerate(order)}
    programs = [program.instructions for program in plain_programs(problem)]
    instructions = [instruction for listed in programs for instruction in listed]
    forward_flops, flops = dict.fromkeys(order, 0), dict.fromkeys(order, 0)
    for total, listed in ((forward_flops, programs[0]), (flops, instructions)):
        for instruction in listed:
            total[instruction.owner] += instruction.flops
    overhead = np.zeros(len(order) + 1)
    for instruction in instructions:
        overhead[index_of[instruction.owner]] += rates.overhead(instruction)
    suffix_overhead = np.cumsum(overhead[::-1])[::-1]
    return UntiledCosts(
        peak=suffix_peaks(instructions, index_of, cut_at),
        overhead=suffix_overhead[np.array(cut_at)],
        forward_flops=forward_flops,
        flops=flops,
    )
