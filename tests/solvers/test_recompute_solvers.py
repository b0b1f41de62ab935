"""Strategies that only recompute, compared with closed forms, exhaustive searches, and another library."""

from __future__ import annotations

import math
import random
from importlib import import_module
from typing import Any

import pytest
from harness.butt import algorithm_3_4

from sft.common.errors import BudgetError
from sft.solvers import optimal, simple
from sft.solvers.chain import Stage, StageChain
from sft.solvers.registry import get_solver
from sft.solvers.reversal import keep_all, reversal
from sft.solvers.schedule import Operation, Schedule
from sft.solvers.simulate import Simulation, simulate
from sft.solvers.solver import Solver
from tests.helpers.chains import every_persistent_schedule, fastest_of_all_states, instances, random_chain, uniform_chain

pytestmark = pytest.mark.usefixtures("without_proposals")

_ONE_LEVEL = pytest.mark.parametrize(
    "solver", [simple.solve_sqrt, simple.solve_bisect, simple.solve_revolve], ids=["sqrt", "bisect", "revolve"]
)


def _play(chain: StageChain, operations: tuple[Operation, ...]) -> Simulation:
    return simulate(chain, Schedule(strategy="test", operations=operations))


def _num_forwards(operations: tuple[Operation, ...]) -> int:
    return Schedule(strategy="test", operations=operations).count("forward")


def test_plain_training_written_out() -> None:
    chain = StageChain(
        input_bytes=5,
        stages=(
            Stage(forward_seconds=1, backward_seconds=2, output_bytes=7, grad_bytes=7),
            Stage(forward_seconds=1, backward_seconds=2, output_bytes=3, grad_bytes=3, saved_bytes=2),
            Stage(forward_seconds=1, backward_seconds=2, output_bytes=1, grad_bytes=1, reads_output=True),
        ),
    )
    operations = reversal(chain, keep_all)
    assert str(Schedule(strategy="none", operations=operations)) == "F1 F2+ F3+ L B3 -x3 -s3 -y3 -x2 B2 -s2 -y2 -x1 B1 -y1"
    simulation = _play(chain, operations)
    assert simulation.seconds == chain.compute_seconds == simulation.compute_seconds == 9
    assert (
        simulation.peak_bytes == 5 + 7 + 2 + 3 + 7
    )  # at B2: x_0, x_1, saved values of stage 2, and two gradients; x_2 has no further reader


def test_one_recomputation_written_out() -> None:
    chain = uniform_chain(3)
    assert (
        str(optimal.solve_optimal(chain, budget_bytes=5))
        == "F1 F2 -x1 F3+ L -x3 B3 -s3 -y3 -x2 F1 F2+ -x2 B2 -s2 -y2 -x1 F1+ -x1 B1 -s1 -y1"
    )


@pytest.mark.parametrize(("num_steps", "slots", "total"), [(10, 3, 25), (50, 5, 172), (100, 10, 322), (1000, 10, 4636), (1000, 20, 3747)])
def test_revolve_counts_of_the_literature(num_steps: int, slots: int, total: int) -> None:
    assert simple.num_advances(num_steps, slots) + num_steps == total
    assert _num_forwards(simple.revolve_operations(uniform_chain(num_steps), slots)) == total


def test_revolve_is_the_closed_form_and_uses_its_slots() -> None:
    for n in range(1, 41):
        for slots in range(1, min(n, 8) + 1):
            repetitions = next(r for r in range(n) if math.comb(slots + r, slots) >= n)
            expected = repetitions * n - math.comb(slots + repetitions, slots + 1)
            for light, own in ((False, n), (True, 1)):
                chain = uniform_chain(n, light=light)
                assert _num_forwards(simple.revolve_operations(chain, slots)) == expected + own
            # activations during the loss: the slots, and x_n, with which every reversal ends
            assert _play(uniform_chain(n), simple.revolve_operations(uniform_chain(n), slots)).peak_bytes <= slots + 4


def test_revolve_agrees_with_checkpoint_schedules() -> None:
    other = pytest.importorskip("checkpoint_schedules")
    for n, slots in [(3, 2), (7, 2), (10, 3), (17, 4), (30, 3), (50, 5)]:
        schedule = other.Revolve(n, slots)
        forwards = 0
        for action in schedule:
            if isinstance(action, other.Forward):
                forwards += action.n1 - action.n0
            if isinstance(action, other.EndReverse):
                break
        assert _num_forwards(simple.revolve_operations(uniform_chain(n), slots)) == forwards


@pytest.mark.parametrize("power", range(1, 9))
def test_bisection_runs_n_log_n_half_more_forwards_in_log_n_states(power: int) -> None:
    n = 2**power
    operations = simple.bisect_operations(uniform_chain(n), 1)
    assert _num_forwards(operations) - n == n * power // 2
    assert _play(uniform_chain(n), operations).peak_bytes == 1 + power + 3  # x_0, the midpoints, and with the last one s and two y
    assert n * power // 2 >= simple.num_advances(n, power + 1)


def test_sqrt_of_equal_stages_keeps_two_square_roots() -> None:
    chain = uniform_chain(100, light=True, backward_seconds=1.0)
    with pytest.raises(BudgetError) as refusal:
        simple.solve_sqrt(chain, budget_bytes=10)
    least = refusal.value.needed_bytes
    assert least <= 2 * 10 + 4
    simulation = simulate(chain, simple.solve_sqrt(chain, budget_bytes=least))
    assert simulation.peak_bytes == least and simulation.seconds <= 2 * 100 + 100
    with pytest.raises(BudgetError):
        simple.solve_sqrt(chain, budget_bytes=least - 1)


def test_optimal_is_the_best_of_all_persistent_schedules() -> None:
    rng = random.Random(1)
    num_feasible = num_recomputing = 0
    for case in instances(200):
        chain = random_chain(rng, rng.randint(1, 4 if case % 8 else 5), weights=case % 3 == 0)
        outcomes = {
            (simulation.peak_bytes, simulation.seconds) for simulation in (_play(chain, plan) for plan in every_persistent_schedule(chain))
        }
        least = min(peak for peak, _ in outcomes)
        for budget in {least - 1, least, *(rng.choice(sorted(outcomes))[0] for _ in range(3))}:
            fitting = [seconds for peak, seconds in outcomes if peak <= budget]
            if not fitting:
                with pytest.raises(BudgetError) as refusal:
                    optimal.solve_optimal(chain, budget_bytes=budget)
                assert refusal.value.needed_bytes == least
                continue
            simulation = simulate(chain, optimal.solve_optimal(chain, budget_bytes=budget, bucket_bytes=1))
            assert simulation.peak_bytes <= budget
            assert simulation.seconds == min(fitting), (case, budget)
            num_feasible += 1
            num_recomputing += simulation.seconds > chain.compute_seconds
    assert num_feasible > 350 and num_recomputing > 150


def test_optimal_against_all_states() -> None:
    """Schedules that drop a checkpoint early may be faster, never slower; they rarely are (see the module)."""
    rng = random.Random(2)
    num_equal = num_cases = 0
    for _ in instances(250):
        chain = random_chain(rng, rng.randint(2, 5), light=True)
        least = optimal.MinMemorySchedule(chain).first_pass_bytes(0) + chain.input_bytes
        for budget in (least, least + rng.randint(1, 8)):
            best = fastest_of_all_states(chain, budget)
            seconds = simulate(chain, optimal.solve_optimal(chain, budget_bytes=budget, bucket_bytes=1)).seconds
            assert best is not None and best <= seconds
            num_cases += 1
            num_equal += best == seconds
    assert num_equal >= 0.95 * num_cases


def test_optimal_on_equal_stages_is_revolve() -> None:
    for n in (3, 6, 11, 20):
        chain = uniform_chain(n, light=True)
        for slots in range(1, min(n, 6) + 1):
            operations = simple.revolve_operations(chain, slots)
            other = _play(chain, operations)
            simulation = simulate(chain, optimal.solve_optimal(chain, budget_bytes=other.peak_bytes, bucket_bytes=1))
            assert simulation.seconds <= other.seconds
            if slots < n - 1:
                assert simulation.seconds >= simple.num_advances(n, slots + 1)


@_ONE_LEVEL
def test_no_restricted_strategy_beats_optimal(solver: Solver) -> None:
    rng = random.Random(3)
    for _ in instances(60):
        chain = random_chain(rng, rng.randint(2, 9))
        top = _play(chain, reversal(chain, keep_all)).peak_bytes
        for budget in {top, top * 3 // 4, top // 2}:
            try:
                schedule = solver(chain, budget_bytes=budget)
            except BudgetError as refusal:
                assert simulate(chain, solver(chain, budget_bytes=refusal.needed_bytes)).peak_bytes == refusal.needed_bytes
                continue
            simulation = simulate(chain, schedule)
            best = simulate(chain, optimal.solve_optimal(chain, budget_bytes=budget, bucket_bytes=1))
            assert simulation.peak_bytes <= budget and best.peak_bytes <= budget
            assert best.seconds <= simulation.seconds


def test_optimal_is_monotone_and_coarse_buckets_stay_inside() -> None:
    rng = random.Random(4)
    for _ in instances(15):
        chain = random_chain(rng, 8, largest=200)
        top = _play(chain, reversal(chain, keep_all)).peak_bytes
        least = optimal.MinMemorySchedule(chain).first_pass_bytes(0) + chain.input_bytes
        last = math.inf
        for budget in range(least, top + 1, max(1, (top - least) // 10)):
            simulation = simulate(chain, optimal.solve_optimal(chain, budget_bytes=budget, bucket_bytes=1))
            assert simulation.seconds <= last
            last = simulation.seconds
            coarse = simulate(chain, optimal.solve_optimal(chain, budget_bytes=budget, bucket_bytes=16))
            assert coarse.peak_bytes <= budget and coarse.seconds >= simulation.seconds
        assert simulate(chain, optimal.solve_optimal(chain, budget_bytes=top, bucket_bytes=1)).seconds == chain.compute_seconds


@pytest.mark.parametrize(
    ("num_layers", "more", "less", "printed", "ours"),
    [(20, 40, 10, (41, 54), (40, 52)), (100, 60, 10, (244, 359), (242, 356))],
    ids=["20 layers", "100 layers"],
)
def test_butts_algorithm_as_printed(num_layers: int, more: int, less: int, printed: tuple[int, int], ours: tuple[int, int]) -> None:
    """Its times on equal layers, where its two misprints have no effect, equal ours except for the targets' gradient."""
    stage = Stage(forward_seconds=1.0, backward_seconds=1.0, output_bytes=1, grad_bytes=1)
    chain = StageChain(input_bytes=1, input_grad_bytes=1, stages=(stage,) * num_layers)
    for memory, theirs, own in zip((more, less), printed, ours, strict=True):
        assert algorithm_3_4(num_layers, memory, corrected=False) == algorithm_3_4(num_layers, memory, corrected=True) == theirs
        assert simulate(chain, optimal.solve_optimal(chain, budget_bytes=memory, bucket_bytes=1)).seconds == own


def test_shared_solutions_of_equal_parts_change_nothing() -> None:
    """Equal blocks, against the same chain with slightly different times, so that no stages are equal."""
    rng = random.Random(5)
    block = random_chain(rng, 3).stages
    chain = StageChain(input_bytes=block[-1].output_bytes, stages=block * 4)
    apart = StageChain(
        input_bytes=chain.input_bytes,
        stages=tuple(
            Stage(
                **{name: getattr(stage, name) for name in Stage.__slots__ if name != "backward_seconds"},
                backward_seconds=stage.backward_seconds + i * 2.0**-30,
            )
            for i, stage in enumerate(chain.stages)
        ),
    )
    top = _play(chain, reversal(chain, keep_all)).peak_bytes
    for budget in range(top // 2, top, 3):
        seconds, other = (simulate(c, optimal.solve_optimal(c, budget_bytes=budget, bucket_bytes=1)).seconds for c in (chain, apart))
        assert seconds == pytest.approx(other, abs=1e-6)


def test_a_chain_is_judged_once_for_all_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    solver, count = import_module("sft.solvers.solver"), 0

    def counted(*arguments: Any, **keywords: Any) -> Any:
        nonlocal count
        count += 1
        return simulate(*arguments, **keywords)

    monkeypatch.setattr(solver, "simulate", counted)
    stages = tuple(Stage(forward_seconds=1 + i % 3, backward_seconds=2, output_bytes=7 + i, grad_bytes=7 + i) for i in range(9))
    chain = StageChain(input_bytes=5, stages=stages, input_grad_bytes=5)
    for name in ("sqrt", "revolve", "bisect", "acg"):
        with pytest.raises(BudgetError) as refused:
            get_solver(name)(chain, budget_bytes=1)
        judged, count = count, 0
        assert judged > 1
        for budget_bytes in (refused.value.needed_bytes, 2 * refused.value.needed_bytes, 10**6):
            assert simulate(chain, get_solver(name)(chain, budget_bytes=budget_bytes)).peak_bytes <= budget_bytes
        assert count == 0
