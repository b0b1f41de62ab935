"""What every candidate plan would roughly cost, from a handful of lowered programs.

A survey is for one way of getting halos and one number of panels. A candidate is a *position* (everything before it is tiled,
everything behind it kept whole), a strip height ``h`` and a policy for states. There are thousands. Lowering each would take minutes,
and is needless: every instruction of a program belongs to one operator, so one whole program of the model tells the peak of every suffix
of it, and one strip program of a run tells the peak of every prefix: count only the storages of the operators inside
(``sft.planner.cost.strip_memory``). A few strip heights tell those between them (``sft.planner.cost.height_sampling``).

With ``streams`` what tiled segments hand to each other passes over the host (``sft.planner.streamed_cuts``): instead of the cuts the
strips of them are held that are under way, and the time of the link is added.

What is left out (borders, odd tails) is small, and no plan is returned before it has been projected exactly.

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
from sft.planner.cost.state_memory import MAX_RESTORED
from sft.planner.cost.strip_memory import suffix_peaks
from sft.planner.cost.tiling import Tiling
from sft.planner.options import Options
from sft.planner.plan import SegmentChoice
from sft.planner.problem import PlanningProblem
from sft.planner.projection import plain_programs
from sft.planner.streamed_cuts import streamable_values, with_streamed
from sft.runtime.strip_checkpoints import Checkpoints

__all__ = ["Candidate", "CandidateGrid"]

#: Numbers of states to hold where even a state at every square root of the strips is too much.
_SLOTS = (16, 12, 8, 6, 4, 3, 2)
#: Strip heights that are sampled besides the lowest and the whole image, in strides, of images below so many strides.
_SAMPLED: tuple[tuple[float, tuple[int, ...]], ...] = (
    (16, (1, 2, 4)),
    (128, (1, 4, 16)),
    (4096, (1, 12, 96)),
    (float("inf"), (1, 12, 96, 1024)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A place in the survey: indices of position, height and interval, what it should need and cost."""

    position: int
    height: int
    policy: int
    peak_bytes: float
    cost: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _UntiledCosts:
    """The whole model, kept whole: peak and overhead behind each position, FLOPs of each operator (forward, and in all)."""

    peak: Floats
    overhead: Floats
    forward_flops: Mapping[str, int]
    flops: Mapping[str, int]


class CandidateGrid:
    """Estimates for all candidates of one number of panels, whose states are kept or (``restart``) made again.

    Attributes:
        positions: (phase, index into that phase's cuts) of each position; the first tiles nothing.
        peak_bytes: estimated peak, [position, height, policy].
        flops: of each operator on whole values, forward and backward.
        forward_flops: the same, forward alone.
        sampled: indices of the strip heights that were lowered; between them peaks are interpolated.
        min_cost: of running all that can be in strips, each state kept.
        cost: estimated cost in FLOPs, likewise.
        heads: the operators before each position, those on whole tensors between tiled runs included.
        head_bytes: what they leave until their backward pass begins, and what is there all the time, likewise.
        head_peak_bytes: the peak while their strips run, likewise.
        head_cost: what they cost, likewise.
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
            inner = {self.strip_rows.index(rows) for rows in (stride * m for m in _sampled_multiples(tallest // stride)) if rows in high}
            # Below the stride deep values gain a row at a time; what is alive grows with the rows of the others alone.
            self.sampled = sorted({0, *inner, len(self.strip_rows) - 1})
        most = -(-tallest // self.strip_rows[0]) + 1
        self.policies = _policies(options, most) if problem.training and self.tiling.halo == "carry" else [Checkpoints()]

    def _indexed(self, heights: list[int]) -> list[int]:
        """Of these strip heights, in ascending order, those whose strips a GPU's operators take; the lowest at least."""
        most = self.tiling.height if self._rates.device_type == "cpu" else self.tiling.indexed_rows
        return [rows for rows in heights if rows <= most] or heights[:1]

    def choices(self, candidate: Candidate) -> tuple[SegmentChoice, ...]:
        """The decisions that a candidate stands for."""
        found = self._choices(self.positions[candidate.position], self.strip_rows[candidate.height], self.policies[candidate.policy])
        return with_streamed(found, streamable_values(self.problem, found)) if self.streams else found

    def head_choices(self, position: int, height: int, policy: int) -> tuple[SegmentChoice, ...]:
        """The decisions about the operators before a position."""
        found = self._choices(self.positions[position], self.strip_rows[height], self.policies[policy])
        inside = set(self.heads[position])
        return tuple(choice for choice in found if inside.issuperset(choice.nodes))

    def _choices(self, position: tuple[int, int], strip_rows: int, policy: Checkpoints) -> tuple[SegmentChoice, ...]:
        choices: list[SegmentChoice] = []
        rest: tuple[str, ...] = ()
        last, index = position
        for number, (phase, cuts) in enumerate(zip(self._phases, self._cuts, strict=True)):
            cut = 0 if number > last else cuts[index] if number == last else cuts[-1]
            tiled = phase.streamed[:cut]
            if tiled:
                if rest:
                    choices.append(SegmentChoice(nodes=rest, mode="whole"))
                    rest = ()
                choices.append(self.tiling.choice(tiled, strip_rows, policy))
            rest += phase.streamed[cut:] + phase.tail
        if rest:
            choices.append(SegmentChoice(nodes=rest, mode="whole"))
        return tuple(choices)

    # -- estimates --------------------------------------------------------------------------------------------------

    def _estimate(self) -> None:
        problem = self.problem
        order = problem.operators
        starts = np.cumsum([0, *(len(phase.streamed) + len(phase.tail) for phase in self._phases)])
        cut_at = [int(starts[i]) + self._cuts[i][c] for i, c in self.positions]
        whole = self._whole(order, cut_at)
        self._whole_from, self._whole_peaks = [len(order) - cut for cut in cut_at], whole.peak
        self.plain_flops, self.flops, self.forward_flops = sum(whole.flops.values()), whole.flops, whole.forward_flops
        grad_bytes = self._param_grad_bytes(order)
        shape = (len(self.positions), len(self.strip_rows), len(self.policies))
        self.peak_bytes, self.cost = np.zeros(shape), np.zeros(shape)
        self.head_peak_bytes, self.head_bytes, self.head_cost = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        self.heads = [tuple(order[:cut]) for cut in cut_at]
        tiled = [i for i, phase in enumerate(self._phases) if phase.streamed and any(i <= last and c for last, c in self.positions)]
        sampler = RunSampler(
            tiling=self.tiling, rates=self._rates, strip_rows=self.strip_rows, sampled=self.sampled, policies=self.policies
        )
        runs = {i: sampler.run(self._phases[i].streamed, self._cuts[i], whole.forward_flops, whole.flops) for i in tiled}
        before, num_done = TiledCosts.nothing(shape[1:]), 0
        grads = problem.input_grad_bytes + grad_bytes if problem.training else 0
        crossings = BoundaryTracker(problem, self.tiling, self.strip_rows, streams=self.streams)
        held_behind = untiled_memory(problem, cut_at)
        flops_before = [0, *accumulate(whole.flops[name] for name in order)]
        for p, ((last, index), crossed) in enumerate(zip(self.positions, crossings.until(cut_at), strict=True)):
            for i in range(num_done, last):
                before = before.and_run(self._tiled(runs[i], len(runs[i].cuts) - 1, whole)) if i in runs else before
            num_done = last
            is_begun = last in runs and runs[last].cuts[index] > 0
            tiled_part = before.and_run(self._tiled(runs[last], index, whole)) if is_begun else before
            states, num_runs = tiled_part.states, len(tiled_part.peaks)
            behind = whole.peak[p] + held_behind[p].source_bytes + held_behind[p].exchanged_bytes
            held = problem.border_bytes + crossed.made_bytes.sum() + states
            peak, head = held + behind, np.broadcast_to(held, shape[1:])
            if num_runs:
                running = np.cumsum(crossed.made_bytes)[:, None] + np.stack(tiled_part.peaks) + crossed.strip_bytes
                head = np.maximum(head, problem.border_bytes + states + grads + running.max(axis=0)[:, None])
                head = np.where(tiled_part.is_wanted, head, np.inf)
            cost = self.plain_flops + whole.overhead[p] + tiled_part.cost
            cost = cost + crossed.link_seconds * self._rates.flops_per_second
            read_bytes = tiled_part.read_bytes + (1 + problem.training) * held_behind[p].source_bytes
            cost = self._with_reading(cost, read_bytes)
            self.peak_bytes[p], self.cost[p] = np.maximum(peak, head), cost
            self.head_peak_bytes[p], self.head_bytes[p] = head, held
            self.head_cost[p] = cost - whole.overhead[p] - (self.plain_flops - flops_before[cut_at[p]])
        self.min_cost = float(self.cost[-1, :, 0].min())

    def _tiled(self, run: RunSamples, cut: int, whole: _UntiledCosts) -> TiledCosts:
        """What the operators of a run before a cut add when they are tiled."""
        problem, names = self.problem, run.names[: run.cuts[cut]]
        again = 1 - 1 / self.tiling.num_walks if self.tiling.restart else 0.0
        is_differentiated = any(name in problem.requires_grad for name in names)
        more: Any = 1 + again + run.restored_share if is_differentiated else 0.0 * run.restored_share
        once = run.flops[cut] - sum(whole.flops[name] for name in names) + run.num_steps * self.tiling.num_walks * run.overhead[cut]
        is_free = len(self.policies) > 1  # else it was asked for
        return TiledCosts(
            states=run.states[cut],
            peaks=(run.peak[cut],),
            cost=once[:, None] + run.forward_flops[cut][:, None] * more,
            read_bytes=source_bytes(problem, names) * self.tiling.num_panels * (1 + more),
            is_wanted=(run.restored_share <= MAX_RESTORED) if is_free else np.ones(run.restored_share.shape, dtype=bool),
        )

    def untiled_tail_bytes(self, num_operators: int) -> float:
        """What a step needs at least that keeps so many of the last operators whole."""
        peaks = [peak for count, peak in zip(self._whole_from, self._whole_peaks, strict=True) if count <= num_operators]
        return self.problem.border_bytes + float(max(peaks, default=0.0))

    def _with_reading(self, cost: Floats, read_bytes: Floats) -> Floats:
        """Costs, with what reading so many bytes of inputs meanwhile adds."""
        if not self.problem.from_source:
            return cost
        reading = self._rates.reading_seconds(self._rates.flops_per_second) * read_bytes
        return cost + reading if self._rates.reads_on_device else np.maximum(cost, reading)

    def min_cost_in(self, num_panels: int) -> float:
        """What ``min_cost`` would be in so many panels, by the FLOPs that these compute twice at their borders."""
        tiling = Tiling.of(self.problem, self.options, num_panels, restart=self.is_restarting)
        return self.min_cost * self._flops_with_halos(tiling) / self._flops_with_halos(self.tiling)

    def _flops_with_halos(self, tiling: Tiling) -> float:
        total = 1.0
        for phase in self._phases:
            cols = tiling.cols_of(phase.streamed) if phase.streamed else 0
            shares = halo_shares(self.problem, phase.streamed, cols, 1) if tiling.num_panels > 1 else {}
            total += sum(self.flops[name] * shares.get(name, 1.0) for name in phase.streamed)
        return total

    def _whole(self, order: Sequence[str], cut_at: Sequence[int]) -> _UntiledCosts:
        """What lies behind each position when it is kept whole, whatever the tiling before it."""
        key = ("whole behind", tuple(cut_at), self._rates)
        return self.problem.remembered(key, lambda: self._new_whole(order, cut_at))

    def _new_whole(self, order: Sequence[str], cut_at: Sequence[int]) -> _UntiledCosts:
        problem = self.problem
        if not order:
            zeros = np.zeros(len(cut_at))
            return _UntiledCosts(peak=zeros, overhead=zeros, forward_flops={}, flops={})
        place = {name: i for i, name in enumerate(order)}
        programs = [program.instructions for program in plain_programs(problem)]
        listed = [instruction for instructions in programs for instruction in instructions]
        flops = [dict.fromkeys(order, 0) for _ in range(2)]
        for found, instructions in zip(flops, (programs[0], listed), strict=True):
            for instruction in instructions:
                found[instruction.owner] += instruction.flops
        overhead = np.zeros(len(order) + 1)
        for instruction in listed:
            overhead[place[instruction.owner]] += self._rates.overhead(instruction)
        behind = np.cumsum(overhead[::-1])[::-1]
        return _UntiledCosts(
            peak=suffix_peaks(listed, place, cut_at),
            overhead=behind[np.array(cut_at)],
            forward_flops=flops[0],
            flops=flops[1],
        )

    def _param_grad_bytes(self, order: Sequence[str]) -> int:
        """Bytes of the new parameter gradients."""
        problem = self.problem
        leaves = {o for name in order for o in problem.graph[name].operands if o in problem.resident_leaves}
        return sum(problem.grad_bytes(o) for o in leaves & problem.requires_grad - problem.phases.streamed)

    @property
    def last(self) -> Candidate:
        """The candidate that tiles all that can be, in the tallest strips, each state kept."""
        shape = self.cost.shape
        return self._candidate(int(np.ravel_multi_index((shape[0] - 1, shape[1] - 1, 0), shape)))

    @property
    def flops_per_second(self) -> float:
        """The rate by which seconds become costs."""
        return self._rates.flops_per_second

    # -- choosing ---------------------------------------------------------------------------------------------------

    def cheapest(self, room_bytes: float, tried: npt.NDArray[np.bool_]) -> Candidate | None:
        """The cheapest untried candidate that should fit."""
        cost = np.where((self.peak_bytes <= room_bytes) & ~tried, self.cost, np.inf)
        return self._candidate(int(cost.argmin())) if np.isfinite(cost.min()) else None

    def min_cost_within(self, room_bytes: float) -> float:
        """Of candidates that should fit; infinity where none does."""
        return float(np.where(self.peak_bytes <= room_bytes, self.cost, np.inf).min())

    def smallest(self) -> list[Candidate]:
        """For each strip height the candidate that should need least, whatever has been tried: the answer must not depend on the budget."""
        heights = range(self.cost.shape[1])
        flat = np.arange(self.cost.size).reshape(self.cost.shape)
        found = [int(flat[:, height].flat[self.peak_bytes[:, height].argmin()]) for height in heights]
        return [candidate for candidate in map(self._candidate, found) if np.isfinite(candidate.peak_bytes)]

    def _candidate(self, flat: int) -> Candidate:
        p, h, k = (int(i) for i in np.unravel_index(flat, self.cost.shape))
        return Candidate(position=p, height=h, policy=k, peak_bytes=float(self.peak_bytes[p, h, k]), cost=float(self.cost[p, h, k]))


def _policies(options: Options, num_steps: int) -> list[Checkpoints]:
    """The policies worth a look: from every state kept to about the square root of their number, then few and fewer slots."""
    if options.state_slots is not None:
        return [Checkpoints(slots=options.state_slots)]
    if options.state_every is not None:
        return [Checkpoints(options.state_every)]
    found = [1]
    while found[-1] ** 2 < 4 * num_steps:
        found.append(max(found[-1] + 1, found[-1] * 5 // 4))
    return [*map(Checkpoints, found), *(Checkpoints(slots=slots) for slots in _SLOTS if slots**2 < 4 * num_steps)]


def _sampled_multiples(num_strides: int) -> tuple[int, ...]:
    """Strip heights that are sampled, in strides, of an image of so many: the same for images about as high, which share what is found."""
    return next(multiples for most, multiples in _SAMPLED if num_strides < most)
