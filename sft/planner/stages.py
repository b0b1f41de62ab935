"""A model as a chain of stages, and schedules for the chain as orders of segments.

The operators in execution order are cut wherever few values cross. Between two cuts is a stage, a segment that runs on whole tensors; what
crosses is the activation that stages hand on (where skips cross, several values). What a stage makes, saves and needs while it runs is not
estimated: its two programs are lowered, and they are the ones that run.

Cuts. A place that one large value crosses is a cut (others of at most a tenth of its bytes may go with it: the statistics of a norm, a
gate). Where such places are far apart, as in a network of long skips, places that up to eight values cross are taken, too; a skip then
counts once for each cut that it crosses, so the chain needs more than the model does. Two cuts without a FLOP between them are one: the
place that fewer bytes cross, so that a stage ends behind its activation and its pool. None is within a norm.

Operators that only make buffers' next values (running statistics) are asides: they run once, behind their stage, and never again. Those of
repeated blocks are made where the blocks run, and stay with them.

The chain leaves out what is there all the time: inputs and outputs, parameters and their gradients. What it gets wrong is small, and every
schedule is projected exactly before it becomes a plan.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

from sft.analysis.ir.graph import Graph
from sft.lower.program import Program, slots_of
from sft.planner.cost.roofline import DeviceRates
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

_MAX_VALUES = 8
_MAX_STAGES = 120
#: All values that cross a place but the largest may have this share of its bytes for the place to count as one that one value crosses.
_MINOR_SHARE = 0.1
#: Places that several large values cross are taken where the others leave a stage of more than this share of all activations.
_LARGEST_STAGE = 1 / 12


class StagedModel:
    """A model in stages.

    Attributes:
        problem: the model at one size.
        rates: what programs take.
        stages: the operators of each stage, in order.
        asides: behind each stage, those that only make buffers' next values.
    """

    def __init__(self, problem: PlanningProblem, rates: DeviceRates) -> None:
        self.problem, self.rates = problem, rates
        prologue = set(problem.phases.prologue)
        names = [name for name in problem.operators if name not in prologue]
        # What follows its operand is made where that is.
        rows, graph = problem.phases.rows, problem.graph
        needed = graph.ancestors([*graph.outputs, *(name for name in names if rows[name].is_extra_result)])
        self._main = _group_norms(graph, [name for name in names if name in needed])
        cuts = _StageCutSelection(problem, self._main).found
        self.stages = tuple(self._main[a:b] for a, b in pairwise((0, *(cut.place for cut in cuts), len(self._main))))
        self._cut_values = (*(cut.values for cut in cuts), ())
        behind = {name: number for number, stage in enumerate(self.stages) for name in stage}
        asides: list[list[str]] = [[] for _ in self.stages]
        for name in names:
            if name not in needed:
                behind[name] = max((behind[operand] for operand in problem.graph[name].operands if operand in behind), default=0)
                asides[behind[name]].append(name)
        self.asides = tuple(map(tuple, asides))

    @cached_property
    def choices(self) -> tuple[SegmentChoice, ...]:
        """The segments: the prologue, then each stage and what runs behind it."""
        prologue = self.problem.phases.prologue
        return (*([SegmentChoice(nodes=prologue, mode="whole")] if prologue else []), *self.choices_after(0))

    def choices_after(self, num_stages: int) -> tuple[SegmentChoice, ...]:
        """The segments behind the first stages."""
        groups = (group for pair in zip(self.stages[num_stages:], self.asides[num_stages:], strict=True) for group in pair)
        return tuple(SegmentChoice(nodes=group, mode="whole") for group in groups if group)

    def with_buffer_updates(self, head: Sequence[SegmentChoice], num_stages: int) -> tuple[SegmentChoice, ...]:
        """A head that is in the place of the first stages, and behind it what runs behind these and is not in it.

        Of a phase that ends behind the head the tail has running statistics of norms that are inside.
        """
        inside = {name for choice in head for name in choice.nodes}
        missing = tuple(name for aside in self.asides[:num_stages] for name in aside if name not in inside)
        return (*head, SegmentChoice(nodes=missing, mode="whole")) if missing else tuple(head)

    @property
    def cut_values(self) -> tuple[tuple[str, ...], ...]:
        """What crosses behind each stage."""
        return self._cut_values

    @cached_property
    def places(self) -> tuple[int, ...]:
        """How many operators lie before each stage, asides and prologue left out."""
        return tuple(accumulate(map(len, self.stages[:-1]), initial=0))

    def stage_after(self, head: Collection[str]) -> int | None:
        """The stage that begins behind these operators, asides and prologue among them or not; ``None`` where they end within one."""
        inside = self._in_stages.intersection(head)
        stage = self._stage_at.get(len(inside))
        return stage if stage is not None and inside.issuperset(self._main[: len(inside)]) else None

    @cached_property
    def _stage_at(self) -> dict[int, int]:
        return {place: stage for stage, place in enumerate(self.places)}

    @cached_property
    def _in_stages(self) -> frozenset[str]:
        return frozenset(self._main)

    @cached_property
    def region(self) -> Region:
        """The region of these segments, in the plain order."""
        return build_region(self.problem, self.choices)

    @cached_property
    def _index_of(self) -> dict[str, int]:
        """The segment that begins with an operator."""
        return {choice.nodes[0]: index for index, choice in enumerate(self.choices)}

    @cached_property
    def base_bytes(self) -> int:
        """What is there besides the chain: inputs, outputs, what is made of parameters alone, and the gradients that come out."""
        problem = self.problem
        made = sum(map(problem.value_bytes, problem.graph.live_out(problem.phases.prologue)))
        leaves = (name for name in problem.resident_leaves if problem.graph[name].kind in ("parameter", "buffer"))
        return problem.border_bytes + made + sum(problem.grad_bytes(name) for name in leaves if name in problem.requires_grad)

    @cached_property
    def chain(self) -> StageChain:
        """The chain, in seconds and bytes."""
        stages = tuple(self._stage(number) for number in range(len(self.stages)))
        return StageChain(input_bytes=0, stages=stages, input_grad_bytes=self.problem.input_grad_bytes)

    def _stage(self, number: int) -> Stage:
        problem, values = self.problem, self._cut_values[number]
        segment = self.region.segments[self._index_of[self.stages[number][0]]]
        assert isinstance(segment, WholeSegment)
        forward, backward = segment.programs(True)
        assert backward is not None
        results = sum(forward.result_bytes.values())
        saved = forward.end_bytes - results
        roots = {out.number: out.root for i in forward.instructions for out in i.outputs if out is not None}
        kept = {roots[slot] for slot in forward.saved}
        loaded = sum(map(problem.value_bytes, segment.from_source))  # for each pass
        return Stage(
            forward_seconds=self.rates.with_reading(self.rates.seconds(forward), loaded),
            backward_seconds=self.rates.with_reading(self.rates.seconds(backward), loaded) + self._once_seconds(number),
            output_bytes=sum(map(problem.value_bytes, values)),
            grad_bytes=sum(problem.grad_bytes(name) for name in values if name in problem.requires_grad),
            saved_bytes=max(int(segment.saves), saved),  # what it saves may be a view, of no bytes, but it must have run
            reads_output=any(slot.root in kept for slot in forward.results.values()),
            forward_workspace_bytes=loaded + max(0, forward.peak_bytes - forward.end_bytes, _peak_without_saving(forward) - results),
            backward_workspace_bytes=loaded + max(0, backward.peak_bytes - _source_gradients(backward)),
        )

    def _once_seconds(self, number: int) -> float:
        """What runs once for a stage besides its backward pass, however often its forward pass does: what it has aside.

        Of the first stage also what is made of parameters alone.
        """
        groups = (self.asides[number], self.problem.phases.prologue if number == 0 else ())
        segments = [self.region.segments[self._index_of[nodes[0]]] for nodes in groups if nodes]
        programs = [program for segment in segments if isinstance(segment, WholeSegment) for program in segment.programs(True)]
        return sum(self.rates.seconds(program) for program in programs if program is not None)

    def order(
        self,
        operations: Iterable[Operation],
        *,
        head: Sequence[SegmentChoice] | None = None,
        num_stages: int = 0,
        head_is_stage: bool = False,
    ) -> SegmentSchedule:
        """Operations of the chain as moves of segments.

        Args:
            operations: of a schedule, for the stages behind the first ``num_stages``.
            head: the segments before these stages, which run once; by default the prologue's.
            num_stages: how many stages the head is in the place of.
            head_is_stage: whether the operations count the head as their first stage: what it hands on, and the states of its tiled
                segment if there is one, may leave, too.
        """
        behind = self.choices_after(num_stages)
        first = len(self.choices) - len(behind) if head is None else len(head)
        index_of = {choice.nodes[0]: first + index for index, choice in enumerate(behind)}
        #: of stages of the model, by those of the operations
        shift = num_stages - 1 if head_is_stage else 0
        own = [index_of.get(stage[0], -1) for stage in self.stages[shift:]]
        if head_is_stage and head is not None:
            tiled = [index for index, choice in enumerate(head) if choice.mode == "tiled"]
            own[0] = tiled[0] if len(tiled) == 1 else -1
        copies = OffloadLowering(((), *self._cut_values[shift:]), (-1, *own))
        moves = [] if head_is_stage else [ScheduleOp("forward", i, True) for i in range(first)]
        seen: set[int] = set()
        for operation in operations:
            if operation.kind == "loss":
                moves.append(LOSS_OP)
            elif operation.kind not in ("forward", "backward"):
                moves += copies.moves(operation)
            if operation.kind not in ("forward", "backward"):
                continue
            if head_is_stage and operation.first == 1:
                is_forward = operation.kind == "forward"
                moves += [ScheduleOp("forward", i, True) for i in range(first)] if is_forward else []
                moves += [] if is_forward else [ScheduleOp("backward", i) for i in reversed(range(first))]
                if is_forward:
                    copies.made(1)
                continue
            stage = operation.first - 1 + shift
            index = index_of[self.stages[stage][0]]
            aside = index_of[self.asides[stage][0]] if self.asides[stage] else None
            if operation.kind == "forward":
                moves.append(ScheduleOp("forward", index, operation.save))
                if aside is not None and stage not in seen:
                    moves.append(ScheduleOp("forward", aside, True))
                seen.add(stage)
                copies.made(operation.last)
            else:
                moves += [ScheduleOp("backward", i) for i in (aside, index) if i is not None]
        return tuple(moves) if head_is_stage else (*moves, *(ScheduleOp("backward", i) for i in reversed(range(first))))

    def ordered(self, order: SegmentSchedule) -> Region:
        """The region in that order; programs are shared with all others of this model."""
        return replace(self.region, custom_schedule=order)


def _group_norms(graph: Graph, names: Sequence[str]) -> tuple[str, ...]:
    """The operators with the affine maps of norms right behind what they are made of.

    Elsewhere they wait for the phase that reads them (``sft.analysis.tiling.retiming``). A norm is one operator where all of it is in a
    segment (``sft.lower.lower_whole``), and its image is read no more.
    """
    place = {name: number for number, name in enumerate(names)}
    affine: dict[str, str] = {}
    for name in names:
        if graph[name].target == "sft.affine":
            behind = graph[name].argument("scale_shift").name
            if behind in place and all(place.get(operand, -1) <= place[behind] for operand in graph[name].operands):
                affine.setdefault(behind, name)
    moved = frozenset(affine.values())
    return tuple(each for name in names if name not in moved for each in ((name, affine[name]) if name in affine else (name,)))


def _peak_without_saving(forward: Program) -> int:
    """Most bytes alive in the forward half if what it saves were freed where it is read last."""
    results = {slot.root for slot in forward.results.values()}
    kept = set(forward.saved)
    saved: set[int] = set()
    last: dict[int, int] = {}
    num_bytes: dict[int, int] = {}
    for position, instruction in enumerate(forward.instructions):
        outputs = [out for out in instruction.outputs if out is not None]
        last.update((slot.root, position) for slot in (*slots_of(instruction), *outputs))
        num_bytes.update((out.root, out.num_bytes) for out in outputs if out.root == out.number)
        saved.update(out.root for out in outputs if out.number in kept)
    more = [0] * len(forward.instructions)
    for root, position in last.items():
        if root in saved and root not in results:
            more[position] += num_bytes.get(root, 0)
    now = peak = 0
    for instruction, freed_bytes in zip(forward.instructions, more, strict=True):
        now += instruction.num_bytes
        peak = max(peak, now + instruction.scratch_bytes)
        now -= instruction.freed_bytes + freed_bytes
    return peak


def _source_gradients(program: Program) -> int:
    return sum(size for port, size in program.result_bytes.items() if port.role == "grad_source")


@dataclass(frozen=True, slots=True, kw_only=True)
class _StageCut:
    """A place between two operators: its position, what crosses it, and the bytes of the largest of that and of all."""

    place: int
    values: tuple[str, ...]
    largest_bytes: int
    num_bytes: int

    @property
    def is_single(self) -> bool:
        return self.num_bytes - self.largest_bytes <= _MINOR_SHARE * self.largest_bytes


class _StageCutSelection:
    """The choice of cuts."""

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
            self._bytes_before.append(self._bytes_before[-1] + problem.value_bytes(name))

    @cached_property
    def found(self) -> tuple[_StageCut, ...]:
        """The cuts, in order."""
        crossed = self._crossed()
        singles = self._thinned([cut for cut in crossed if cut.is_single])
        most = _LARGEST_STAGE * self._bytes_before[-1]
        chosen: list[_StageCut] = []
        for first, last in pairwise((0, *(cut.place for cut in singles), len(self.names))):
            if self._bytes_before[last] - self._bytes_before[first] > most:
                chosen += self._thinned([cut for cut in crossed if first < cut.place < last])
            chosen += [cut for cut in singles if cut.place == last]
        chosen = self._thinned(chosen)
        while len(chosen) >= _MAX_STAGES:
            chosen = [chosen[i] for i in range(len(chosen)) if i % 2 == 0 or chosen[i].num_bytes < chosen[i - 1].num_bytes // 2]
        return tuple(chosen)

    def _crossed(self) -> list[_StageCut]:
        """Every place inside that few enough values cross; outputs are the caller's and do not count."""
        graph, outputs = self.problem.graph, set(self.problem.graph.outputs)
        place = {name: i for i, name in enumerate(self.names)}
        last = {name: max((place[user] for user in graph.users[name] if user in place), default=-1) for name in self.names}
        found = []
        alive: dict[str, None] = {}
        for position in range(1, len(self.names)):
            alive[self.names[position - 1]] = None
            alive = {name: None for name in alive if last[name] >= position}
            if self.problem.phases.rows[self.names[position]].is_extra_result:
                continue
            values = tuple(name for name in alive if name not in outputs)
            sizes = [self.problem.value_bytes(name) for name in values]
            if 1 <= len(values) <= _MAX_VALUES:
                found.append(_StageCut(place=position, values=values, largest_bytes=max(sizes), num_bytes=sum(sizes)))
        return found

    def _thinned(self, cuts: Sequence[_StageCut]) -> list[_StageCut]:
        """Of cuts without a FLOP between them the smallest, of equal ones the last."""
        found: list[_StageCut] = []
        for cut in sorted(cuts, key=lambda cut: cut.place):
            if found and self._flops_before[found[-1].place] == self._flops_before[cut.place]:
                if cut.num_bytes <= found[-1].num_bytes:
                    found[-1] = cut
            elif self._flops_before[cut.place] not in (0, self._flops_before[-1]):
                found.append(cut)
        return found
