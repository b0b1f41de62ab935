"""Staged models: the operators as a chain of untiled stages, and chain schedules as schedules of segments.

The operators in execution order are cut where few values cross. The operators between two cuts are a stage, a segment that runs untiled;
the values that cross a cut are the activation that one stage passes to the next (several values where skips cross). The output, residual
and workspace bytes of a stage are not estimated: its forward and backward programs are lowered, and they are the ones that run.

Cuts. A position that one large value crosses is a cut; further values may cross it if they have at most a tenth of its bytes (statistics of
a norm, a gate). Where such positions are rare, as in a network of long skips, positions that up to eight values cross are taken as
well; a skip then counts once for each cut that it crosses, so the chain needs more bytes than the model does. Of two cuts without a FLOP
between them only the one with fewer bytes remains, so that a stage ends after its activation and its pool. No cut is within a norm.

Buffer updates. Operators that only compute next values of buffers (running statistics) run once, after their stage, and are never
recomputed. Those of repeats are computed where the blocks run, and stay with them.

The chain excludes tensors that exist during the whole step: inputs and outputs, parameters and their gradients. Its error is small, and
every schedule has an exact projection before it becomes a plan.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

from sft.analysis.ir.graph import Graph
from sft.lower.program import Program, slots_of
from sft.planner.cost.device_rates import DeviceRates
from sft.planner.offload_moves import OffloadLowering
from sft.planner.plan import SegmentChoice
from sft.planner.problem import PlanningProblem
from sft.planner.projection import plain_programs
from sft.planner.region_builder import build_region
from sft.runtime.moves import LOSS_OP, ScheduleOp, SegmentSchedule
from sft.runtime.region import Region
from sft.runtime.whole_segment import WholeSegment
from sft.solvers.chain import Stage, StageChain
from sft.solvers.schedule import Operation

__all__ = ["StagedModel"]


class StagedModel:
    """A model as a chain of stages.

    Attributes:
        problem: the planning problem.
        rates: rates of programs.
        stages: operators of each stage, in execution order.
        buffer_updates: operators after each stage that only compute next values of buffers.
    """

    def __init__(self, problem: PlanningProblem, rates: DeviceRates) -> None:
        self.problem, self.rates = problem, rates
        prologue = set(problem.sized.phases.prologue)
        names = [name for name in problem.sized.operators if name not in prologue]
        # An operator that follows its operand stays in the stage of that operand.
        rows, graph = problem.sized.phases.rows, problem.sized.graph
        needed = graph.ancestors([*graph.outputs, *(name for name in names if rows[name].is_extra_result)])
        self._main = _group_norms(graph, [name for name in names if name in needed])
        cuts = _StageCutSelection(problem, self._main).cuts
        self.stages = tuple(self._main[a:b] for a, b in pairwise((0, *(cut.position for cut in cuts), len(self._main))))
        self._cut_values = (*(cut.values for cut in cuts), ())
        stage_of = {name: number for number, stage in enumerate(self.stages) for name in stage}
        updates: list[list[str]] = [[] for _ in self.stages]
        for name in names:
            if name not in needed:
                stage_of[name] = max((stage_of[operand] for operand in graph[name].operands if operand in stage_of), default=0)
                updates[stage_of[name]].append(name)
        self.buffer_updates = tuple(map(tuple, updates))

    @classmethod
    def of(cls, problem: PlanningProblem, rates: DeviceRates) -> StagedModel:
        """The stages of a problem at these rates, which its searches share; those with another host budget have other stages, whose
        schedules it limits.
        """
        return problem.memo.memoize(("stages", rates, problem.resources.host_budget_bytes), lambda: cls(problem, rates))

    @cached_property
    def choices(self) -> tuple[SegmentChoice, ...]:
        """All segments: the prologue, then each stage and its buffer updates."""
        prologue = self.problem.sized.phases.prologue
        return (*([SegmentChoice(nodes=prologue, mode="whole")] if prologue else []), *self.choices_after(0))

    def choices_after(self, num_stages: int) -> tuple[SegmentChoice, ...]:
        """Segments after the first ``num_stages`` stages."""
        groups = (group for pair in zip(self.stages[num_stages:], self.buffer_updates[num_stages:], strict=True) for group in pair)
        return tuple(SegmentChoice(nodes=group, mode="whole") for group in groups if group)

    def with_buffer_updates(self, head: Sequence[SegmentChoice], num_stages: int) -> tuple[SegmentChoice, ...]:
        """Complete a head that replaces the first stages with those of their buffer updates that it lacks.

        A phase that ends after the head has its running statistics in the tail, although their norms are in the head.
        """
        inside = {name for choice in head for name in choice.nodes}
        missing = tuple(name for updates in self.buffer_updates[:num_stages] for name in updates if name not in inside)
        return (*head, SegmentChoice(nodes=missing, mode="whole")) if missing else tuple(head)

    @property
    def cut_values(self) -> tuple[tuple[str, ...], ...]:
        """Values that cross the cut after each stage."""
        return self._cut_values

    @cached_property
    def stage_starts(self) -> tuple[int, ...]:
        """Number of operators before each stage, without buffer updates and prologue."""
        return tuple(accumulate(map(len, self.stages[:-1]), initial=0))

    def stage_after(self, head: Collection[str]) -> int | None:
        """Index of the stage that begins after these operators (buffer updates and prologue are ignored); ``None`` within a stage."""
        inside = self._in_stages.intersection(head)
        stage = self._stage_at.get(len(inside))
        return stage if stage is not None and inside.issuperset(self._main[: len(inside)]) else None

    @cached_property
    def _stage_at(self) -> dict[int, int]:
        return {start: stage for stage, start in enumerate(self.stage_starts)}

    @cached_property
    def _in_stages(self) -> frozenset[str]:
        return frozenset(self._main)

    @cached_property
    def region(self) -> Region:
        """The region of all segments, in the default schedule."""
        return build_region(self.problem, self.choices)

    @cached_property
    def _index_of(self) -> dict[str, int]:
        """Index of each segment, by its first operator."""
        return {choice.nodes[0]: index for index, choice in enumerate(self.choices)}

    @cached_property
    def base_bytes(self) -> int:
        """Bytes outside the chain: inputs, outputs, values computed from parameters alone, and gradients of parameters."""
        problem = self.problem
        prologue_bytes = sum(map(problem.sized.value_bytes, problem.sized.graph.live_out(problem.sized.phases.prologue)))
        leaves = (name for name in problem.resources.resident_leaves if problem.sized.graph[name].kind in ("parameter", "buffer"))
        return (
            problem.resources.border_bytes
            + prologue_bytes
            + sum(problem.sized.grad_bytes(name) for name in leaves if name in problem.sized.requires_grad)
        )

    @cached_property
    def chain(self) -> StageChain:
        """The stages with their seconds and bytes."""
        stages = tuple(self._stage(number) for number in range(len(self.stages)))
        return StageChain(input_bytes=0, stages=stages, input_grad_bytes=self.problem.resources.input_grad_bytes)

    def _stage(self, number: int) -> Stage:
        problem, values = self.problem, self._cut_values[number]
        segment = self.region.segments[self._index_of[self.stages[number][0]]]
        assert isinstance(segment, WholeSegment)
        forward, backward = segment.programs(True)
        assert backward is not None
        results = sum(forward.result_bytes.values())
        saved = forward.end_bytes - results
        roots = {out.number: out.root for i in forward.instructions for out in i.outputs if out is not None}
        residuals = {roots[slot] for slot in forward.residuals}
        loaded = sum(map(problem.sized.value_bytes, segment.from_source))  # for each pass
        return Stage(
            forward_seconds=self.rates.with_reading(self.rates.seconds(forward), loaded),
            backward_seconds=self.rates.with_reading(self.rates.seconds(backward), loaded) + self._once_seconds(number),
            output_bytes=sum(map(problem.sized.value_bytes, values)),
            grad_bytes=sum(problem.sized.grad_bytes(name) for name in values if name in problem.sized.requires_grad),
            saved_bytes=max(int(segment.saves), saved),  # residuals may be views, of no bytes, but the forward must have run
            reads_output=any(slot.root in residuals for slot in forward.results.values()),
            forward_workspace_bytes=loaded + max(0, forward.peak_bytes - forward.end_bytes, _peak_without_saving(forward) - results),
            backward_workspace_bytes=loaded + max(0, backward.peak_bytes - _source_gradients(backward)),
        )

    def _once_seconds(self, number: int) -> float:
        """Seconds of the operators that run once with a stage, however often its forward pass runs: its buffer updates.

        The first stage includes the prologue.
        """
        groups = (self.buffer_updates[number], self.problem.sized.phases.prologue if number == 0 else ())
        segments = [self.region.segments[self._index_of[nodes[0]]] for nodes in groups if nodes]
        programs = [program for segment in segments if isinstance(segment, WholeSegment) for program in segment.programs(True)]
        return sum(self.rates.seconds(program) for program in programs if program is not None)

    def segment_schedule(
        self,
        operations: Iterable[Operation],
        *,
        head: Sequence[SegmentChoice] | None = None,
        num_stages: int = 0,
        head_is_stage: bool = False,
    ) -> SegmentSchedule:
        """Translate chain operations into a schedule of segments.

        Args:
            operations: a chain schedule for the stages after the first ``num_stages``.
            head: segments before these stages, which run once; by default the prologue.
            num_stages: number of stages that the head replaces.
            head_is_stage: true if the operations count the head as their first stage: its output, and the states of its tiled segment if
                there is exactly one, may leave, too.
        """
        tail = self.choices_after(num_stages)
        num_head = len(self.choices) - len(tail) if head is None else len(head)
        index_of = {choice.nodes[0]: num_head + index for index, choice in enumerate(tail)}
        # Stage index in the model of the first stage that the operations count.
        shift = num_stages - 1 if head_is_stage else 0
        segment_of_stage = [index_of.get(stage[0], -1) for stage in self.stages[shift:]]
        if head_is_stage and head is not None:
            tiled = [index for index, choice in enumerate(head) if choice.mode == "tiled"]
            segment_of_stage[0] = tiled[0] if len(tiled) == 1 else -1
        copies = OffloadLowering(((), *self._cut_values[shift:]), (-1, *segment_of_stage))
        moves = [] if head_is_stage else [ScheduleOp("forward", i, True) for i in range(num_head)]
        updated: set[int] = set()
        for operation in operations:
            if operation.kind == "loss":
                moves.append(LOSS_OP)
            elif operation.kind not in ("forward", "backward"):
                moves += copies.lower(operation)
            if operation.kind not in ("forward", "backward"):
                continue
            if head_is_stage and operation.first == 1:
                is_forward = operation.kind == "forward"
                moves += [ScheduleOp("forward", i, True) for i in range(num_head)] if is_forward else []
                moves += [] if is_forward else [ScheduleOp("backward", i) for i in reversed(range(num_head))]
                if is_forward:
                    copies.mark_computed(1)
                continue
            stage = operation.first - 1 + shift
            index = index_of[self.stages[stage][0]]
            update = index_of[self.buffer_updates[stage][0]] if self.buffer_updates[stage] else None
            if operation.kind == "forward":
                moves.append(ScheduleOp("forward", index, operation.save))
                if update is not None and stage not in updated:
                    moves.append(ScheduleOp("forward", update, True))
                updated.add(stage)
                copies.mark_computed(operation.last)
            else:
                moves += [ScheduleOp("backward", i) for i in (update, index) if i is not None]
        return tuple(moves) if head_is_stage else (*moves, *(ScheduleOp("backward", i) for i in reversed(range(num_head))))

    def with_schedule(self, order: SegmentSchedule) -> Region:
        """The region with this schedule; programs are shared by all regions of this model."""
        return replace(self.region, custom_schedule=order)


def _group_norms(graph: Graph, names: Sequence[str]) -> tuple[str, ...]:
    """Move affine maps of norms directly after their scale and shift.

    In the execution order they wait for the phase that reads them (``sft.analysis.tiling.retiming``). A norm with all operators in one
    segment is lowered as one operator (``sft.lower.lower_whole``), and its image is not read again.
    """
    position = {name: number for number, name in enumerate(names)}
    affine_of: dict[str, str] = {}
    for name in names:
        if graph[name].target == "sft.affine":
            scale_shift = graph[name].argument("scale_shift").name
            end = position.get(scale_shift)
            if end is not None and all(position.get(operand, -1) <= end for operand in graph[name].operands):
                affine_of.setdefault(scale_shift, name)
    moved = frozenset(affine_of.values())
    return tuple(each for name in names if name not in moved for each in ((name, affine_of[name]) if name in affine_of else (name,)))


def _peak_without_saving(forward: Program) -> int:
    """Peak bytes of the forward half if its residuals were freed after their last use."""
    results = {slot.root for slot in forward.results.values()}
    residuals = set(forward.residuals)
    saved: set[int] = set()
    last: dict[int, int] = {}
    num_bytes: dict[int, int] = {}
    for position, instruction in enumerate(forward.instructions):
        outputs = [out for out in instruction.outputs if out is not None]
        last.update((slot.root, position) for slot in (*slots_of(instruction), *outputs))
        num_bytes.update((out.root, out.num_bytes) for out in outputs if out.root == out.number)
        saved.update(out.root for out in outputs if out.number in residuals)
    freed_early = [0] * len(forward.instructions)
    for root, position in last.items():
        if root in saved and root not in results:
            freed_early[position] += num_bytes.get(root, 0)
    now = peak = 0
    for instruction, more_bytes in zip(forward.instructions, freed_early, strict=True):
        now += instruction.num_bytes
        peak = max(peak, now + instruction.scratch_bytes)
        now -= instruction.freed_bytes + more_bytes
    return peak


def _source_gradients(program: Program) -> int:
    return sum(size for port, size in program.result_bytes.items() if port.role == "grad_source")


@dataclass(frozen=True, slots=True, kw_only=True)
class _StageCut:
    """A cut between two operators.

    Attributes:
        position: number of operators before it.
        values: values that cross it.
        largest_bytes: bytes of the largest of them.
        num_bytes: bytes of all of them.
    """

    position: int
    values: tuple[str, ...]
    largest_bytes: int
    num_bytes: int

    def is_single(self, minor_bytes_share: float) -> bool:
        """True if one large value crosses, and all further ones have at most this share of its bytes."""
        return self.num_bytes - self.largest_bytes <= minor_bytes_share * self.largest_bytes


class _StageCutSelection:
    """Selection of the cuts between stages."""

    def __init__(self, problem: PlanningProblem, names: Sequence[str]) -> None:
        self.problem, self.names = problem, names
        costs = {name: 0 for name in names}
        for program in plain_programs(problem):
            for instruction in program.instructions:
                if instruction.owner in costs:
                    costs[instruction.owner] += instruction.flops
        self._flops_before = [0]
        for name in names:
            self._flops_before.append(self._flops_before[-1] + costs[name])
        self._bytes_before = [0]
        for name in names:
            self._bytes_before.append(self._bytes_before[-1] + problem.sized.value_bytes(name))

    @cached_property
    def cuts(self) -> tuple[_StageCut, ...]:
        """The selected cuts, in order."""
        candidates, limits = self._candidates(), self.problem.limits
        singles = self._merge_without_flops([cut for cut in candidates if cut.is_single(limits.minor_bytes_share)])
        most_bytes = limits.max_stage_share * self._bytes_before[-1]
        selected: list[_StageCut] = []
        for first, last in pairwise((0, *(cut.position for cut in singles), len(self.names))):
            if self._bytes_before[last] - self._bytes_before[first] > most_bytes:
                selected += self._merge_without_flops([cut for cut in candidates if first < cut.position < last])
            selected += [cut for cut in singles if cut.position == last]
        selected = self._merge_without_flops(selected)
        while len(selected) >= limits.max_stages:
            selected = [cut for i, cut in enumerate(selected) if i % 2 == 0 or cut.num_bytes < selected[i - 1].num_bytes // 2]
        return tuple(selected)

    def _candidates(self) -> list[_StageCut]:
        """All positions that at most ``max_cut_values`` values cross; outputs belong to the caller and do not count."""
        graph, outputs = self.problem.sized.graph, set(self.problem.sized.graph.outputs)
        position_of = {name: i for i, name in enumerate(self.names)}
        last = {name: max((position_of[user] for user in graph.users[name] if user in position_of), default=-1) for name in self.names}
        cuts = []
        alive: dict[str, None] = {}
        for position in range(1, len(self.names)):
            alive[self.names[position - 1]] = None
            alive = {name: None for name in alive if last[name] >= position}
            if self.problem.sized.phases.rows[self.names[position]].is_extra_result:
                continue
            values = tuple(name for name in alive if name not in outputs)
            sizes = [self.problem.sized.value_bytes(name) for name in values]
            if 1 <= len(values) <= self.problem.limits.max_cut_values:
                cuts.append(_StageCut(position=position, values=values, largest_bytes=max(sizes), num_bytes=sum(sizes)))
        return cuts

    def _merge_without_flops(self, cuts: Sequence[_StageCut]) -> list[_StageCut]:
        """Keep, of cuts without a FLOP between them, the one with the fewest bytes, and of equal ones the last."""
        merged: list[_StageCut] = []
        for cut in sorted(cuts, key=lambda cut: cut.position):
            if merged and self._flops_before[merged[-1].position] == self._flops_before[cut.position]:
                if cut.num_bytes <= merged[-1].num_bytes:
                    merged[-1] = cut
            elif self._flops_before[cut.position] not in (0, self._flops_before[-1]):
                merged.append(cut)
        return merged
