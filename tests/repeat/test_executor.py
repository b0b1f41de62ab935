"""The executor of repeated blocks follows its schedule, with simulated bytes and counts of closed forms."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random
from collections.abc import Collection, Iterator, Mapping, Sequence

import pytest
import torch
from torch import Tensor, nn

import sft
from sft.nn import Repeat
from sft.repeat.autograd import ChainCall, run_chain
from sft.repeat.executor import StackedWeightAccess
from sft.repeat.lowering import BlockPrograms, lower_block
from sft.repeat.plan import RepeatCosts, RepeatPlan, count_forwards, plan_chain, revolve_plan, schedule_peak_bytes, to_stage_chain
from sft.repeat.trace import TensorMeta, trace_block
from sft.solvers import Schedule, simulate
from sft.solvers import simple as revolve
from sft.solvers.schedule import Operation

_SHAPE = (2, 3)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.sin(self.linear(x))


class _Recording(StackedWeightAccess):
    """Weight access that logs the blocks in the order of their reads."""

    def __init__(self, log: list[int], params: Mapping[str, Tensor], with_gradient: tuple[str, ...] = ()) -> None:
        super().__init__(params, {}, {}, with_gradient=with_gradient)
        self.log = log

    def acquire(self, block: int) -> dict[str, Tensor]:
        self.log.append(block + 1)
        return super().acquire(block)


def _programs() -> BlockPrograms:
    block = Block().double()
    params = {name: TensorMeta.of(param) for name, param in block.named_parameters()}
    own = TensorMeta(shape=_SHAPE, dtype=torch.float64)
    return lower_block(trace_block(block, own, params, {}, device=torch.device("cpu"), autocast=None))


def _run(net: Repeat, programs: BlockPrograms, plan: RepeatPlan, x: Tensor) -> tuple[Tensor, list[str], list[int]]:
    """Run a step with a plan; returns the output, the executed operations, and the blocks that were read."""
    executed: list[str] = []
    loads: list[int] = []
    params = dict(net.block.named_parameters())

    @contextlib.contextmanager
    def forward(operations: Sequence[Operation]) -> Iterator[StackedWeightAccess]:
        yield _Recording(loads, {name: p.detach() for name, p in params.items()})

    @contextlib.contextmanager
    def backward(operations: Sequence[Operation], tensors: Sequence[Tensor], _: Collection[str]) -> Iterator[StackedWeightAccess]:
        yield _Recording(loads, dict(zip(params, tensors, strict=True)), programs.with_gradient)

    call = ChainCall(
        programs=programs,
        plan=plan,
        device=x.device,
        names=tuple(params),
        forward=forward,
        backward=backward,
        trace=executed.append,
    )
    return run_chain(call, x, list(params.values()), []), executed, loads


def _assert_as_simulated(costs: RepeatCosts, plan: RepeatPlan, executed: list[str], loads: list[int]) -> None:
    weights = tuple(range(1, plan.num_blocks + 1))
    chain = to_stage_chain(costs)
    with_weights = dataclasses.replace(chain, stages=tuple(dataclasses.replace(stage, weight_bytes=1) for stage in chain.stages))
    schedule = Schedule(strategy="test", operations=plan.operations, streamed_weights=weights)
    simulation = simulate(with_weights, schedule)
    computed = [event.label for event in simulation.events if event.stream == "compute" and event.label != "L"]
    streamed = [event.label for event in simulation.events if event.stream == "up"]
    assert [word for word in executed if word[0] != "-"] == computed
    assert executed == [str(operation) for operation in plan.operations if operation.kind != "loss"]
    assert [f"{word} streams" for word in computed] == streamed
    assert loads == [int(word[1:].rstrip("+")) for word in computed]


def test_hundreds_of_random_schedules_run_as_simulated() -> None:
    rng = random.Random(0)
    programs = _programs()
    nets: dict[int, Repeat] = {}
    for case in range(240):
        n = rng.randint(1, 14)
        if n not in nets:
            torch.manual_seed(n)
            nets[n] = Repeat(Block, n).double()
        net = nets[n]
        grad_bytes = sum(p.numel() * 8 for p in net.parameters())
        costs = RepeatCosts.of(programs, n, backward_extra_bytes=grad_bytes)
        run = rng.choice([1, 1, rng.randint(1, n)])
        slots = rng.randint(1, -(-n // run))
        plan = revolve_plan(costs, slots, run)
        x = torch.randn(_SHAPE, dtype=torch.float64, requires_grad=True)
        for param in net.parameters():
            param.grad = None
        with sft.measure_peak() as peak:
            out, executed, loads = _run(net, programs, plan, x)
            gradient = torch.ones_like(out)
            out.backward(gradient)
        _assert_as_simulated(costs, plan, executed, loads)
        assert peak.num_bytes == plan.projected_peak_bytes, (n, slots, run)
        assert plan.num_forwards == count_forwards(n, slots, run) == sum(word[0] == "F" for word in executed)
        if run == 1:
            assert plan.num_forwards == revolve.num_advances(n, slots) + n
        if case % 6 == 0:
            eager = net.unstacked()
            other = x.detach().clone().requires_grad_()
            eager(other).backward(torch.ones(_SHAPE, dtype=torch.float64))
            assert x.grad is not None and other.grad is not None and torch.equal(x.grad, other.grad)
            for name, param in net.block.named_parameters():
                assert param.grad is not None
                for k, block in enumerate(eager):
                    expected = block.get_parameter(name).grad
                    assert expected is not None and torch.equal(param.grad[k], expected)


@pytest.mark.parametrize(
    ("n", "slots", "run", "text"),
    [
        (3, 3, 3, "F1+ F2+ F3+ L -x3 B3 -s3 -y3 -x2 B2 -s2 -y2 -x1 B1 -s1 -y1"),
        (3, 1, 1, "F1 F2 -x1 F3+ L -x3 B3 -s3 -y3 -x2 F1 F2+ -x2 B2 -s2 -y2 -x1 F1+ -x1 B1 -s1 -y1"),
        (3, 2, 1, "F1 F2 F3+ L -x3 B3 -s3 -y3 -x2 F2+ -x2 B2 -s2 -y2 -x1 F1+ -x1 B1 -s1 -y1"),
        (4, 1, 2, "F1 F2 -x1 F3+ F4+ L -x4 B4 -s4 -y4 -x3 B3 -s3 -y3 -x2 F1+ F2+ -x2 B2 -s2 -y2 -x1 B1 -s1 -y1"),
    ],
)
def test_small_schedules_written_out(n: int, slots: int, run: int, text: str) -> None:
    plan = revolve_plan(_costs(n), slots, run)
    assert str(Schedule(strategy="test", operations=plan.operations)) == text


def _costs(n: int, *, saved_bytes: int = 50, reads_output: bool = False) -> RepeatCosts:
    return RepeatCosts(
        num_blocks=n,
        output_bytes=10,
        grad_bytes=10,
        saved_bytes=saved_bytes,
        reads_output=reads_output,
        forward_bytes=35,
        save_bytes=15 + saved_bytes,
        backward_bytes=25,
    )


def test_the_simulator_finds_no_more_than_was_projected() -> None:
    """The simulator counts the input and frees the output; the projection does the opposite. All other bytes are equal."""
    rng = random.Random(1)
    for _ in range(150):
        n = rng.randint(1, 30)
        costs = _costs(n, saved_bytes=rng.choice([0, 20, 90]), reads_output=rng.random() < 0.3)
        run = rng.randint(1, n)
        plan = revolve_plan(costs, rng.randint(1, -(-n // run)), run)
        simulated = simulate(to_stage_chain(costs), Schedule(strategy="test", operations=plan.operations)).peak_bytes
        workspace = to_stage_chain(costs).stage(1).forward_workspace_bytes
        low = schedule_peak_bytes(costs, plan.operations) - costs.output_bytes - costs.grad_bytes - workspace
        assert low <= simulated <= plan.projected_peak_bytes + costs.output_bytes + workspace


def test_the_split_is_the_best_one() -> None:
    for n in range(2, 60):
        for slots in range(2, min(n, 9) + 1):
            costs = [k + revolve.num_advances(n - k, slots - 1) + revolve.num_advances(k, slots) for k in range(1, n)]
            assert revolve.revolve_split(n, slots) == 1 + costs.index(min(costs))


def test_budgets_are_used_and_kept() -> None:
    rng = random.Random(2)
    for _ in range(40):
        n = rng.randint(1, 90)
        costs = _costs(n, saved_bytes=rng.choice([0, 30, 200]))
        most = plan_chain(costs, budget_bytes=None)
        assert (most.strategy, most.num_forwards) == ("none", n)
        last = math.inf
        for share in (0.1, 0.3, 0.6, 1.0):
            budget = max(1, int(share * most.projected_peak_bytes))
            try:
                plan = plan_chain(costs, budget_bytes=budget)
            except sft.BudgetError as error:
                plan = plan_chain(costs, budget_bytes=error.needed_bytes)
                assert error.needed_bytes > budget
                budget = error.needed_bytes
            assert plan.projected_peak_bytes <= budget
            assert plan.num_forwards <= last
            last = plan.num_forwards
        assert last == n


def test_long_chains_are_planned_quickly_and_count_as_the_closed_form() -> None:
    for n in (3_333, 10_000):
        costs = _costs(n)
        plan = plan_chain(costs, budget_bytes=500, strategy="revolve")
        assert plan.num_forwards == revolve.num_advances(n, plan.slots) + n
        assert plan.projected_peak_bytes <= 500
        assert 25 <= plan.slots <= 45


def test_the_optimal_strategy_takes_short_chains_only() -> None:
    with pytest.raises(sft.InputError, match="64"):
        plan_chain(_costs(65), budget_bytes=10_000, strategy="optimal")
    best = plan_chain(_costs(12), budget_bytes=300, strategy="optimal")
    assert best.num_forwards <= plan_chain(_costs(12), budget_bytes=300, strategy="revolve").num_forwards
