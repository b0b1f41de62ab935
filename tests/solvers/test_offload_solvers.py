"""Strategies that only offload, compared with linear programs over every offload set, and with their lower bound."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from sft.common.errors import BudgetError
from sft.solvers import offloading
from sft.solvers.chain import HostLink, Stage, StageChain
from sft.solvers.lower_bounds import offload_bound_seconds, stage_bound_bytes, turn_bound_seconds
from sft.solvers.offloading import kept_edge, loss_edge, min_offload_bytes, offload_schedule, plain_peak_bytes
from sft.solvers.simulate import simulate
from sft.solvers.solver import Solver
from tests.helpers.chains import instances, random_chain

pytestmark = pytest.mark.usefixtures("without_proposals")

_SOLVERS = pytest.mark.parametrize(
    "solver", [offloading.solve_offload_greedy, offloading.solve_offload_dp, offloading.solve_vdnn], ids=["greedy", "dp", "vdnn"]
)


def _link(rate: float, *, full_duplex: bool = False) -> HostLink:
    return HostLink(down_bytes_per_second=rate, up_bytes_per_second=rate, full_duplex=full_duplex)


def _between(rng: random.Random, chain: StageChain) -> int:
    return rng.randint(min_offload_bytes(chain), max(min_offload_bytes(chain), plain_peak_bytes(chain)))


def test_dp_is_the_least_of_the_linear_programmes_over_all_offload_sets() -> None:
    pytest.importorskip("scipy")
    from tests.helpers.offload_lp import fluid_optimum

    rng = random.Random(11)
    num_slowed = 0
    for case in instances(40):
        chain = random_chain(rng, rng.randint(1, 4))
        n, rate, budget = chain.num_stages, rng.choice([1, 2, 3]), _between(rng, chain)
        edges = [*(kept_edge(chain, i) for i in range(1, n + 1)), loss_edge(chain, n, n + 1)]
        best, _, leaves = fluid_optimum([edges], start_bytes=chain.input_bytes, budget_bytes=budget, rate=rate)
        optima = offloading.fluid_optima(chain, budget_bytes=budget, link=_link(rate), slot_bytes=1)
        assert best is not None and optima[0].seconds == pytest.approx(best, abs=1e-6), case
        num_slowed += any(leaves) and best > chain.compute_seconds
    assert num_slowed > 12


def test_two_corrections_of_the_published_formulas() -> None:
    """Beaumont's own model (outputs are read, no other values saved): idle link credit is not memory, and ex^B is not ex^F."""
    stage = Stage(forward_seconds=10.0, backward_seconds=1.0, output_bytes=2, grad_bytes=0, reads_output=True)
    chain = StageChain(input_bytes=2, stages=(stage, replace(stage, backward_workspace_bytes=4)))
    # With all values offloaded B_2 needs x_1, x_2 and its workspace: 8. Algorithm 1 as printed counts the 8 bytes that the link could have
    # carried during F_1 as bytes on the device, and has no solution.
    assert min_offload_bytes(chain) == 8
    assert offloading.fluid_optima(chain, budget_bytes=7, link=_link(1.0), slot_bytes=1) == []
    # At 8, x_0 is offloaded during B_2 and returns only after B_2, which takes 2 seconds. Equation 6 with the forward's workspace, which is
    # none, would make the return free.
    optima = offloading.fluid_optima(chain, budget_bytes=8, link=_link(1.0), slot_bytes=1)
    assert optima[0].seconds == chain.compute_seconds + 2.0


@_SOLVERS
@pytest.mark.parametrize("full_duplex", [False, True])
def test_schedules_stay_inside_and_never_beat_the_bounds(solver: Solver, full_duplex: bool) -> None:
    rng = random.Random(12)
    for _ in instances(120):
        chain = random_chain(rng, rng.randint(1, 8), light=rng.random() < 0.5, weights=rng.random() < 0.3)
        link, budget = _link(rng.choice([1, 2, 5]), full_duplex=full_duplex), _between(rng, chain)
        simulation = simulate(chain, solver(chain, budget_bytes=budget, link=link), link=link)
        assert simulation.peak_bytes <= budget
        assert simulation.compute_seconds == chain.compute_seconds
        assert simulation.seconds >= offload_bound_seconds(chain, budget_bytes=budget, link=link) - 1e-9
        assert simulation.seconds >= turn_bound_seconds(chain, budget_bytes=budget, link=link) - 1e-9
        assert simulation.peak_bytes >= stage_bound_bytes(chain)
        assert simulation.host_peak_bytes >= plain_peak_bytes(chain) - budget
        if not full_duplex and not any(stage.saved_bytes for stage in chain.stages):  # else a schedule may move half of what a stage keeps
            fluid = offloading.fluid_optima(chain, budget_bytes=budget, link=link, slot_bytes=1)
            assert simulation.seconds >= fluid[0].seconds - 1e-6


@_SOLVERS
def test_refusals_name_a_budget_that_works(solver: Solver) -> None:
    rng = random.Random(13)
    for _ in instances(40):
        chain = random_chain(rng, rng.randint(1, 6))
        with pytest.raises(BudgetError) as refusal:
            solver(chain, budget_bytes=min_offload_bytes(chain) - 1)
        needed = refusal.value.needed_bytes
        assert needed == min_offload_bytes(chain)
        assert simulate(chain, solver(chain, budget_bytes=needed)).peak_bytes == needed
        with pytest.raises(BudgetError) as refusal:
            solver(chain, budget_bytes=plain_peak_bytes(chain) - 1, host_budget_bytes=0)
        assert simulate(chain, solver(chain, budget_bytes=refusal.value.needed_bytes, host_budget_bytes=0)).host_peak_bytes == 0


def test_dp_keeps_inside_the_host_and_is_no_slower_than_greedy_on_the_whole() -> None:
    rng = random.Random(14)
    worse = better = 0
    for _ in instances(150):
        chain = random_chain(rng, rng.randint(3, 8))
        link, budget = _link(rng.choice([1, 2, 3])), _between(rng, chain)
        dp, greedy = (
            simulate(chain, s(chain, budget_bytes=budget, link=link), link=link)
            for s in (offloading.solve_offload_dp, offloading.solve_offload_greedy)
        )
        worse += dp.seconds > greedy.seconds + 1e-9
        better += dp.seconds < greedy.seconds - 1e-9
        host = max(plain_peak_bytes(chain) - budget, dp.host_peak_bytes - 1)
        try:
            limited = offloading.solve_offload_dp(chain, budget_bytes=budget, host_budget_bytes=host, link=link)
        except BudgetError:
            continue
        assert simulate(chain, limited, link=link).host_peak_bytes <= host
    assert better > 3 * worse


def test_the_fluid_optimum_is_monotone_in_budget_and_rate() -> None:
    rng = random.Random(15)
    for _ in instances(40):
        chain = random_chain(rng, rng.randint(2, 7))
        low, top = min_offload_bytes(chain), plain_peak_bytes(chain)
        last = math.inf
        for budget in range(low, top + 1, max(1, (top - low) // 6)):
            seconds = offloading.fluid_optima(chain, budget_bytes=budget, link=_link(2), slot_bytes=1)[0].seconds
            assert seconds <= last + 1e-9
            last = seconds
            faster = offloading.fluid_optima(chain, budget_bytes=budget, link=_link(4), slot_bytes=1)[0].seconds
            assert faster <= seconds + 1e-9


def test_an_offload_written_out() -> None:
    """Three stages, memory for all but one input: x_0 leaves during F1, is released before F3, and returns as soon as it fits."""
    stage = Stage(forward_seconds=4.0, backward_seconds=4.0, output_bytes=4, grad_bytes=1)
    chain = StageChain(input_bytes=4, stages=(stage, stage, stage))
    schedule, peak = offload_schedule(chain, "test", [1], 13)
    assert str(schedule) == ">x0 F1 F2 ~x0 F3 L -x3 B3 -y3 <x0 -x2 B2 -y2 -x1 B1 -y1"
    assert peak == simulate(chain, schedule).peak_bytes == 13
    assert simulate(chain, schedule, link=_link(1.0)).seconds == 24.0
    assert simulate(chain, schedule, link=_link(0.25)).seconds == 16 + 4 + 4 + 16 + 4  # both copies are waited for
    assert offloading.num_offloaded(chain, 13) == 1


def test_coarse_slots_cost_little_and_never_the_budget() -> None:
    rng = random.Random(16)
    for _ in instances(12):
        chain = random_chain(rng, 12, largest=5000)
        budget, link = _between(rng, chain), _link(800)
        exact = offloading.fluid_optima(chain, budget_bytes=budget, link=link, slot_bytes=10)[0].seconds
        simulation = simulate(chain, offloading.solve_offload_dp(chain, budget_bytes=budget, link=link), link=link)
        assert simulation.peak_bytes <= budget and simulation.seconds <= 1.5 * exact
