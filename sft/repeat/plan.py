"""Checkpointing plans for a chain of equal blocks under a byte budget.

All blocks are alike, so a plan is a choice of a few numbers: Revolve with a number of slots, with *runs* of blocks at its leaves that are
kept completely. Runs of one block are Griewank and Walther's schedule: no persistent schedule with as many slots runs fewer forwards. A run
of all blocks is plain training. In between, a larger budget buys longer runs: a saved forward costs the block's intermediate values instead
of one activation. ``bisect`` halves until a run is short enough (Siskind and Pearlmutter, 2018), ``optimal`` is the dynamic program over
bytes, for short chains.

The projected peak is the sum over the schedule's operations, with the peaks of the programs that they run, for exactly the tensors of the
executor. Tensors that the caller keeps (the output, its gradient) count from their creation to the end, the input never.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal

from sft.common.byte_units import format_bytes, size_at_least
from sft.common.errors import BudgetError, InputError
from sft.repeat.lowering import BlockPrograms
from sft.solvers.chain import Stage, StageChain
from sft.solvers.optimal import solve_optimal
from sft.solvers.reversal import DecisionFunction, keep_all, reversal
from sft.solvers.schedule import Operation
from sft.solvers.simple import revolve_split

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
#: Up to this length, schedules are built to find the largest that fits; above it, one is chosen by formula.
_MAX_TRIED_BLOCKS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatCosts:
    """Memory of the blocks of a chain, and of tensors that live next to them.

    Attributes:
        num_blocks: number of blocks.
        output_bytes: an activation between two blocks.
        grad_bytes: its gradient.
        saved_bytes: values that a block saves for its backward.
        reads_output: True if the backward also reads the block's output.
        forward_bytes: peak of a forward, including the output.
        save_bytes: peak of a forward that saves, including output and saved values.
        backward_bytes: peak of a backward, including gradients, without the saved values.
        wants_input_grad: True if the first block's input needs a gradient.
        input_copy_bytes: a copy of the input, if one is necessary.
        forward_extra_bytes: extra bytes during the forward pass (a window of weights, buffers' next values).
        backward_extra_bytes: extra bytes during the backward pass (gradients of parameters, a window of weights and state).
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
        """Costs of a number of blocks with these programs."""
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
        strategy: the strategy that made it.
        num_blocks: length of the chain.
        slots: most activations that are stored at once, including the input; 0 if the strategy has no slots.
        run_blocks: blocks in a row that are kept completely; 0 if the strategy has no runs.
        operations: operations in order; the forward pass ends with the loss.
        num_forwards: number of forwards of a block, including the first ones.
        projected_peak_bytes: most bytes of the repeated blocks on the device.
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
        """Position of the loss in the operations."""
        return next(place for place, operation in enumerate(self.operations) if operation.kind == "loss")

    def explain(self) -> str:
        """Summary of the plan."""
        how = f"{self.slots} slots, runs of {self.run_blocks}" if self.run_blocks else "chosen block by block"
        extra = self.num_forwards - self.num_blocks
        return (
            f"{self.num_blocks} blocks, {self.strategy} ({how}): {self.num_forwards} forwards, {extra} of them recomputations "
            f"({self.num_forwards / self.num_blocks:.2f} per block); projected peak {format_bytes(self.projected_peak_bytes)}"
        )


def to_stage_chain(costs: RepeatCosts) -> StageChain:
    """The chain for solvers and the simulator. The unit of time is a forward; a backward counts as two."""
    output_bytes, kept_bytes = costs.output_bytes, costs.output_bytes + costs.saved_bytes
    stage = Stage(
        forward_seconds=1.0,
        backward_seconds=2.0,
        output_bytes=costs.output_bytes,
        grad_bytes=costs.grad_bytes,
        saved_bytes=costs.saved_bytes,
        reads_output=costs.reads_output,
        forward_workspace_bytes=max(0, costs.forward_bytes - output_bytes, costs.save_bytes - kept_bytes),
        backward_workspace_bytes=max(0, costs.backward_bytes - costs.grad_bytes),
    )
    return StageChain(input_bytes=costs.output_bytes, stages=(stage,) * costs.num_blocks, input_grad_bytes=costs.grad_bytes)


def plan_chain(costs: RepeatCosts, *, budget_bytes: int | None, strategy: Strategy = "auto") -> RepeatPlan:
    """Choose a schedule.

    Args:
        costs: memory of the blocks.
        budget_bytes: most bytes of the repeated blocks; None is no limit.
        strategy: the strategy.

    Raises:
        BudgetError: no schedule of the strategy fits.
        InputError: no strategy has that name, or it does not support so many blocks.
    """
    if strategy not in STRATEGIES:
        raise InputError(f"no strategy is called {strategy!r}; choose one of {', '.join(STRATEGIES)}")
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
    best, least_bytes = None, None
    for plan in candidates:
        least_bytes = plan.projected_peak_bytes if least_bytes is None else min(least_bytes, plan.projected_peak_bytes)
        if plan.projected_peak_bytes <= limit and (best is None or _plan_rank(plan) < _plan_rank(best)):
            best = plan
    if best is None:
        # Schedules that cannot fit were not built above.
        needed_bytes = _smallest(costs).projected_peak_bytes if least_bytes is None or strategy in ("auto", "revolve") else least_bytes
        raise _too_small(costs, strategy, needed_bytes, limit)
    return best


def _too_small(costs: RepeatCosts, strategy: Strategy, needed_bytes: int, limit: float) -> BudgetError:
    return BudgetError(
        f"{costs.num_blocks} repeated blocks need {format_bytes(needed_bytes)} at least with strategy {strategy!r}, the budget is "
        f"{format_bytes(int(limit))}. Raise the budget to {size_at_least(needed_bytes)} ({needed_bytes} bytes), or make the "
        "blocks smaller.",
        needed_bytes=needed_bytes,
    )


def revolve_plan(costs: RepeatCosts, slots: int, run: int) -> RepeatPlan:
    """Revolve with a number of slots, and runs of a number of blocks.

    Args:
        costs: memory of the blocks.
        slots: activations that are stored at once, including the input.
        run: blocks in a row that are kept completely at the leaves.
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
            f"strategy 'optimal' takes up to {_MAX_OPTIMAL_BLOCKS} blocks, and the chain has {costs.num_blocks}; 'auto' takes any number"
        )
    chain = to_stage_chain(costs)
    # The solver counts the input and frees the output; here it is the other way round. The other external bytes are constant.
    external_bytes = _external_bytes(costs) - costs.output_bytes + max(costs.forward_extra_bytes, costs.backward_extra_bytes)
    plain_bytes = schedule_peak_bytes(costs, reversal(chain, keep_all)) + costs.output_bytes
    room_bytes = (plain_bytes if budget_bytes is None else min(budget_bytes, plain_bytes)) - external_bytes
    try:
        operations = solve_optimal(chain, budget_bytes=room_bytes).operations
    except BudgetError as error:
        raise _too_small(costs, "optimal", error.needed_bytes + external_bytes, room_bytes + external_bytes) from error
    return _to_repeat_plan("optimal", costs, operations, 0, 0)


def _external_bytes(costs: RepeatCosts) -> int:
    return costs.output_bytes + costs.grad_bytes + costs.input_copy_bytes


def _max_slots_by_run(costs: RepeatCosts, limit: float, runs: list[int]) -> Iterator[RepeatPlan]:
    """For each length of runs, the plan with the most slots that fits."""
    n = costs.num_blocks
    candidates: list[tuple[int, int, int]] = []
    for run in runs:
        groups = -(-n // run)
        if _estimate(costs, 1, run) - _estimate_slack(costs, run) > limit:
            continue
        slots = groups
        if _estimate(costs, slots, run) > limit:
            slots = max(1, min(groups, 1 + int((limit - _estimate(costs, 1, run)) // max(1, costs.output_bytes))))
        candidates.append((count_forwards(n, slots, run), run, slots))
    candidates.sort()
    for rank, (forwards, run, slots) in enumerate(candidates):
        if rank and n > _MAX_TRIED_BLOCKS and forwards > candidates[0][0]:
            continue  # long schedules are built for the best only, unless it does not fit
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
    """The schedule of least memory; for long chains its peak does not depend on the length."""
    few = min(costs.num_blocks, 8)
    short = RepeatCosts(**{name: getattr(costs, name) for name in RepeatCosts.__slots__} | {"num_blocks": few})
    return revolve_plan(short, 1, 1)


def _estimate(costs: RepeatCosts, slots: int, run: int) -> int:
    """Upper bound on the peak of such a schedule."""
    kept_bytes = costs.output_bytes + costs.saved_bytes
    leaf_bytes = max(
        costs.grad_bytes + costs.output_bytes + costs.forward_bytes,
        costs.grad_bytes + costs.save_bytes,
        costs.grad_bytes + kept_bytes + costs.backward_bytes,
    )
    external_bytes = _external_bytes(costs) + max(costs.forward_extra_bytes, costs.backward_extra_bytes)
    return external_bytes + (slots - 1) * costs.output_bytes + (run - 1) * kept_bytes + leaf_bytes


def _estimate_slack(costs: RepeatCosts, run: int) -> int:
    """Largest excess of the upper bound over the peak: bytes that it counts twice."""
    return 2 * (costs.output_bytes + costs.grad_bytes) + costs.saved_bytes + costs.forward_extra_bytes + costs.backward_extra_bytes


@cache
def count_forwards(num_blocks: int, slots: int, run: int = 1) -> int:
    """Number of forwards that Revolve runs with so many slots and runs of so many blocks, including the first ones.

    With runs of one block that is ``num_advances(n, slots) + n``.

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
    return revolve_split(-(-length // run), slots) * run


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
    """Most bytes that the executor needs while it runs the operations."""
    n, output_bytes, saved_bytes = costs.num_blocks, costs.output_bytes, costs.saved_bytes
    last_output, last_grad = f"x{n}", f"y{n}"
    current_bytes = costs.forward_extra_bytes + costs.input_copy_bytes
    peak_bytes = current_bytes
    for operation in operations:
        match operation.kind:
            case "forward":
                peak_bytes = max(peak_bytes, current_bytes + (costs.save_bytes if operation.save else costs.forward_bytes))
                current_bytes += output_bytes + (saved_bytes if operation.save else 0)
            case "loss":
                current_bytes += costs.backward_extra_bytes - costs.forward_extra_bytes + costs.grad_bytes
                peak_bytes = max(peak_bytes, current_bytes)
            case "backward":
                first = operation.first == 1 and not costs.wants_input_grad
                peak_bytes = max(peak_bytes, current_bytes + costs.backward_bytes - (costs.grad_bytes if first else 0))
                current_bytes += 0 if first else costs.grad_bytes
            case "free":
                name = operation.value
                if name in ("x0", last_output, last_grad):
                    continue  # the caller keeps these
                current_bytes -= output_bytes if name[0] == "x" else costs.grad_bytes if name[0] == "y" else saved_bytes
            case _:
                raise InputError(f"a chain of repeated blocks has no operation {operation}")
    return peak_bytes
