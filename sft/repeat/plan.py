"""Which blocks of a deep chain are kept and which are computed again, for a byte budget.

All blocks are alike, so the choice is one of a few numbers: Revolve with so many slots, whose leaves are runs of so many blocks that are
kept whole. With runs of one block that is Griewank and Walther's schedule: no other persistent schedule with as many slots runs fewer
forwards. With a run of all blocks it is plain training. Between the two, a budget that is worth more than its slots goes into longer runs:
a forward that is saved needs the block's intermediate values instead of one activation. ``bisect`` halves until a run is that short
(Siskind and Pearlmutter, 2018), ``optimal`` is the dynamic program over bytes, for short chains.

The projected peak is the sum over the schedule's own operations, with the peaks of the programs that they run, for exactly what the
executor holds: what stays in the caller's hands (the output, its gradient) counts from when it exists to the end, the input never.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal

from sft.common.byte_units import format_bytes
from sft.common.errors import BudgetError, InputError
from sft.repeat.lowering import BlockPrograms
from sft.solvers import optimal
from sft.solvers import simple as revolve
from sft.solvers.chain import Stage, StageChain
from sft.solvers.reversal import DecisionFunction, keep_all, reversal
from sft.solvers.schedule import Operation

__all__ = [
    "STRATEGIES",
    "RepeatCosts",
    "RepeatPlan",
    "Strategy",
    "count_forwards",
    "plan_chain",
    "revolve_plan",
    "schedule_peak_bytes",
    "to_stage_chain",
]

Strategy = Literal["auto", "none", "revolve", "bisect", "optimal"]
STRATEGIES: tuple[Strategy, ...] = ("auto", "none", "revolve", "bisect", "optimal")

#: The dynamic program's tables grow with the square of this.
_MAX_OPTIMAL_BLOCKS = 64
#: Up to here, schedules are tried to find the largest that fits; above, one is chosen by its formula.
_MAX_TRIED_BLOCKS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatCosts:
    """What the blocks of a chain hold, and what is held beside them.

    Attributes:
        num_blocks: how many there are.
        output_bytes: an activation between two blocks.
        grad_bytes: its gradient.
        saved_bytes: what a block leaves for its backward.
        reads_output: whether that reads its output, too.
        forward_bytes: the peak of a forward, output included.
        save_bytes: the same of one that leaves something, which is included.
        backward_bytes: the peak of a backward above what the block left, gradients included.
        wants_input_grad: whether somebody wants the gradient of the first block's input.
        input_copy_bytes: a copy of the input, if one has to be made.
        forward_extra_bytes: what is held during the whole forward pass besides (a window of weights, buffers' next values).
        backward_extra_bytes: the same of the backward pass (gradients of parameters, a window of weights and state).
    """

    num_blocks: int
    output_bytes: int
    grad_bytes: int
    saved_bytes: int
    reads_output: bool
    forward_bytes: int
    save_bytes: int
    backward_bytes: int
    wants_input_grad: bool = True
    input_copy_bytes: int = 0
    forward_extra_bytes: int = 0
    backward_extra_bytes: int = 0

    @classmethod
    def of(
        cls,
        programs: BlockPrograms,
        num_blocks: int,
        *,
        wants_input_grad: bool = True,
        input_copy_bytes: int = 0,
        forward_extra_bytes: int = 0,
        backward_extra_bytes: int = 0,
    ) -> RepeatCosts:
        """The costs of so many blocks with these programs."""
        return cls(
            num_blocks=num_blocks,
            output_bytes=programs.output_bytes,
            grad_bytes=programs.grad_bytes,
            saved_bytes=programs.saved_bytes,
            reads_output=programs.reads_output,
            forward_bytes=max(programs.first.peak_bytes, programs.again.peak_bytes),
            save_bytes=max(programs.first_save.peak_bytes, programs.again_save.peak_bytes),
            backward_bytes=programs.backward.peak_bytes,
            wants_input_grad=wants_input_grad,
            input_copy_bytes=input_copy_bytes,
            forward_extra_bytes=forward_extra_bytes,
            backward_extra_bytes=backward_extra_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatPlan:
    """A schedule for a chain of equal blocks.

    Attributes:
        strategy: how it was found.
        num_blocks: the length of the chain.
        slots: how many activations are stored at once, at most, the input among them; 0 where that is not what was chosen.
        run_blocks: how many blocks in a row are kept whole; 0 where that is not what was chosen.
        operations: what is run, in order; the forward pass ends with the loss.
        num_forwards: how many forwards of a block there are, the first ones included.
        projected_peak_bytes: most bytes that the repeated blocks hold at once on the device.
    """

    strategy: Strategy
    num_blocks: int
    slots: int
    run_blocks: int
    operations: tuple[Operation, ...]
    num_forwards: int
    projected_peak_bytes: int

    @property
    def turn(self) -> int:
        """The place of the loss among the operations."""
        return next(place for place, operation in enumerate(self.operations) if operation.kind == "loss")

    def explain(self) -> str:
        """The plan in a sentence or two."""
        how = f"{self.slots} slots, runs of {self.run_blocks}" if self.run_blocks else "chosen block by block"
        extra = self.num_forwards - self.num_blocks
        return (
            f"{self.num_blocks} blocks, {self.strategy} ({how}): {self.num_forwards} forwards, {extra} of them recomputations "
            f"({self.num_forwards / self.num_blocks:.2f} per block); projected peak {format_bytes(self.projected_peak_bytes)}"
        )


def to_stage_chain(costs: RepeatCosts) -> StageChain:
    """The chain as solvers and the simulator know it. Times are counts of forwards; a backward counts as two."""
    made, kept = costs.output_bytes, costs.output_bytes + costs.saved_bytes
    stage = Stage(
        forward_seconds=1.0,
        backward_seconds=2.0,
        output_bytes=costs.output_bytes,
        grad_bytes=costs.grad_bytes,
        saved_bytes=costs.saved_bytes,
        reads_output=costs.reads_output,
        forward_workspace_bytes=max(0, costs.forward_bytes - made, costs.save_bytes - kept),
        backward_workspace_bytes=max(0, costs.backward_bytes - costs.grad_bytes),
    )
    return StageChain(input_bytes=costs.output_bytes, stages=(stage,) * costs.num_blocks, input_grad_bytes=costs.grad_bytes)


def plan_chain(costs: RepeatCosts, *, budget_bytes: int | None, strategy: Strategy = "auto") -> RepeatPlan:
    """Choose a schedule.

    Args:
        costs: what blocks hold.
        budget_bytes: most bytes that the repeated blocks may hold; None is no limit.
        strategy: how to look for it.

    Raises:
        BudgetError: no schedule of that strategy fits.
        InputError: there is no such strategy, or not for so many blocks.
    """
    if strategy not in STRATEGIES:
        raise InputError(f"there is no strategy {strategy!r}; choose one of {', '.join(STRATEGIES)}")
    if budget_bytes is None and strategy == "auto":
        strategy = "none"
    limit = float("inf") if budget_bytes is None else budget_bytes
    match strategy:
        case "none":
            candidates: Iterable[RepeatPlan] = [_reversal_plan(costs, "none", keep_all, 1, costs.num_blocks)]
        case "revolve":
            candidates = _max_slots_by_run(costs, limit, [1])
        case "bisect":
            candidates = (_bisected(costs, base) for base in _halved_counts(costs.num_blocks))
        case "optimal":
            candidates = [_optimal(costs, budget_bytes)]
        case _:
            candidates = _max_slots_by_run(costs, limit, _halved_counts(costs.num_blocks))
    best, least = None, None
    for plan in candidates:
        least = plan.projected_peak_bytes if least is None else min(least, plan.projected_peak_bytes)
        if plan.projected_peak_bytes <= limit and (best is None or _plan_rank(plan) < _plan_rank(best)):
            best = plan
    if best is None:
        # Schedules that cannot fit are not written down above.
        needed = _smallest(costs).projected_peak_bytes if least is None or strategy in ("auto", "revolve") else least
        raise _too_small(costs, strategy, needed, limit)
    return best


def _too_small(costs: RepeatCosts, strategy: Strategy, needed_bytes: int, limit: float) -> BudgetError:
    return BudgetError(
        f"{costs.num_blocks} repeated blocks need {format_bytes(needed_bytes)} at least with strategy {strategy!r}, the budget is "
        f"{format_bytes(int(limit))}. Raise the budget to {needed_bytes} bytes, or make the blocks smaller.",
        needed_bytes=needed_bytes,
    )


def revolve_plan(costs: RepeatCosts, slots: int, run: int) -> RepeatPlan:
    """Revolve with so many slots and runs of so many blocks.

    Args:
        costs: what blocks hold.
        slots: how many activations are stored at once, the input among them.
        run: how many blocks in a row are kept whole at the leaves.
    """

    def decide(i: int, j: int, pending: bool, free: int) -> tuple[int, int, int]:
        if j - i <= run:
            return i, free, free
        return i + _advance(j - i, free, run), max(1, free - 1), free

    return _reversal_plan(costs, "revolve" if run < costs.num_blocks or run == 1 else "none", decide, slots, run)


def _plan_rank(plan: RepeatPlan) -> tuple[int, int]:
    return plan.num_forwards, plan.projected_peak_bytes


def _halved_counts(num_blocks: int) -> list[int]:
    """n, n/2, n/4, ..., 1, rounded up."""
    return sorted({-(-num_blocks // 2**power) for power in range(num_blocks.bit_length() + 1)}, reverse=True)


def _bisected(costs: RepeatCosts, base: int) -> RepeatPlan:
    def decide(i: int, j: int, pending: bool, state: int) -> tuple[int, int, int]:
        return (i if j - i <= base else (i + j) // 2), 0, 0

    return _reversal_plan(costs, "bisect", decide, 0, base)


def _optimal(costs: RepeatCosts, budget_bytes: int | None) -> RepeatPlan:
    if costs.num_blocks > _MAX_OPTIMAL_BLOCKS:
        raise InputError(
            f"strategy 'optimal' takes up to {_MAX_OPTIMAL_BLOCKS} blocks, and there are {costs.num_blocks}; 'auto' takes any number"
        )
    chain = to_stage_chain(costs)
    # The solver holds the input and frees the output; here it is the other way round. The rest is held all the time.
    beside = _external_bytes(costs) - costs.output_bytes + max(costs.forward_extra_bytes, costs.backward_extra_bytes)
    whole = schedule_peak_bytes(costs, reversal(chain, keep_all)) + costs.output_bytes
    room = (whole if budget_bytes is None else min(budget_bytes, whole)) - beside
    try:
        operations = optimal.solve_optimal(chain, budget_bytes=room).operations
    except BudgetError as error:
        raise _too_small(costs, "optimal", error.needed_bytes + beside, room + beside) from error
    return _to_repeat_plan("optimal", costs, operations, 0, 0)


def _external_bytes(costs: RepeatCosts) -> int:
    return costs.output_bytes + costs.grad_bytes + costs.input_copy_bytes


def _max_slots_by_run(costs: RepeatCosts, limit: float, runs: list[int]) -> Iterator[RepeatPlan]:
    """For each length of runs the most slots that fit."""
    n = costs.num_blocks
    found: list[tuple[int, int, int]] = []
    for run in runs:
        groups = -(-n // run)
        if _estimate(costs, 1, run) - _estimate_slack(costs, run) > limit:
            continue
        slots = groups
        if _estimate(costs, slots, run) > limit:
            slots = max(1, min(groups, 1 + int((limit - _estimate(costs, 1, run)) // max(1, costs.output_bytes))))
        found.append((count_forwards(n, slots, run), run, slots))
    found.sort()
    for place, (forwards, run, slots) in enumerate(found):
        if place and n > _MAX_TRIED_BLOCKS and forwards > found[0][0]:
            continue  # long lists are written for the best only, unless it does not fit
        plan = revolve_plan(costs, slots, run)
        while plan.projected_peak_bytes > limit and slots > 1:
            slots -= 1
            plan = revolve_plan(costs, slots, run)
        while n <= _MAX_TRIED_BLOCKS and plan.projected_peak_bytes <= limit and slots < -(-n // run):
            slots += 1
            larger = revolve_plan(costs, slots, run)
            if larger.projected_peak_bytes > limit:
                break
            plan = larger
        yield plan


def _smallest(costs: RepeatCosts) -> RepeatPlan:
    """The schedule of least memory; its peak does not depend on how long the chain is, if it is long."""
    few = min(costs.num_blocks, 8)
    short = RepeatCosts(**{name: getattr(costs, name) for name in RepeatCosts.__slots__} | {"num_blocks": few})
    return revolve_plan(short, 1, 1)


def _estimate(costs: RepeatCosts, slots: int, run: int) -> int:
    """No less than the peak of such a schedule."""
    kept = costs.output_bytes + costs.saved_bytes
    last = max(
        costs.grad_bytes + costs.output_bytes + costs.forward_bytes,
        costs.grad_bytes + costs.save_bytes,
        costs.grad_bytes + kept + costs.backward_bytes,
    )
    beside = _external_bytes(costs) + max(costs.forward_extra_bytes, costs.backward_extra_bytes)
    return beside + (slots - 1) * costs.output_bytes + (run - 1) * kept + last


def _estimate_slack(costs: RepeatCosts, run: int) -> int:
    """By how much the estimate may be above the peak: what is counted twice there."""
    return 2 * (costs.output_bytes + costs.grad_bytes) + costs.saved_bytes + costs.forward_extra_bytes + costs.backward_extra_bytes


@cache
def count_forwards(num_blocks: int, slots: int, run: int = 1) -> int:
    """How many forwards Revolve runs with so many slots and runs of so many blocks, the first ones included.

    With runs of one block that is ``revolve.num_advances(n, slots) + n``.

    >>> [count_forwards(n, s) for n, s in ((10, 3), (100, 10), (5, 5))], count_forwards(100, 1, 100)
    ([25, 322, 9], 100)
    """

    @cache
    def advances(length: int, free: int) -> int:
        if length <= run:
            return 0
        if free == 1:
            groups = -(-length // run)
            return run * groups * (groups - 1) // 2
        k = _advance(length, free, run)
        return k + advances(length - k, max(1, free - 1)) + advances(k, free)

    return num_blocks + advances(num_blocks, slots)


def _advance(length: int, slots: int, run: int) -> int:
    return revolve.revolve_split(-(-length // run), slots) * run


def _reversal_plan(costs: RepeatCosts, strategy: Strategy, decide: DecisionFunction, slots: int, run: int) -> RepeatPlan:
    return _to_repeat_plan(strategy, costs, reversal(to_stage_chain(costs), decide, slots), slots, run)


def _to_repeat_plan(strategy: Strategy, costs: RepeatCosts, operations: tuple[Operation, ...], slots: int, run: int) -> RepeatPlan:
    return RepeatPlan(
        strategy=strategy,
        num_blocks=costs.num_blocks,
        slots=slots,
        run_blocks=run,
        operations=operations,
        num_forwards=sum(operation.kind == "forward" for operation in operations),
        projected_peak_bytes=schedule_peak_bytes(costs, operations),
    )


def schedule_peak_bytes(costs: RepeatCosts, operations: Iterable[Operation]) -> int:
    """The most bytes that the executor holds at once while it runs the operations."""
    n, out, kept = costs.num_blocks, costs.output_bytes, costs.saved_bytes
    last_output, last_grad = f"x{n}", f"y{n}"
    held = costs.forward_extra_bytes + costs.input_copy_bytes
    peak = held
    for operation in operations:
        match operation.kind:
            case "forward":
                peak = max(peak, held + (costs.save_bytes if operation.save else costs.forward_bytes))
                held += out + (kept if operation.save else 0)
            case "loss":
                held += costs.backward_extra_bytes - costs.forward_extra_bytes + costs.grad_bytes
                peak = max(peak, held)
            case "backward":
                first = operation.first == 1 and not costs.wants_input_grad
                peak = max(peak, held + costs.backward_bytes - (costs.grad_bytes if first else 0))
                held += 0 if first else costs.grad_bytes
            case "free":
                name = operation.value
                if name in ("x0", last_output, last_grad):
                    continue  # the caller's
                held -= out if name[0] == "x" else costs.grad_bytes if name[0] == "y" else kept
            case _:
                raise InputError(f"a chain of repeated blocks has no operation {operation}")
    return peak
