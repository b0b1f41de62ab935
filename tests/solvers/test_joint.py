"""The joint strategy, compared with all paths and placements, and with all other strategies."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest

from sft.common.errors import BudgetError, InputError
from sft.solvers import joint
from sft.solvers.chain import Alternative, HostLink, Stage, StageChain
from sft.solvers.edges import Edge
from sft.solvers.joint import JointSearch
from sft.solvers.joint_paths import EdgeKind, build_edges
from sft.solvers.label_search import FluidPath, PathStep
from sft.solvers.offloading import plain_peak_bytes
from sft.solvers.registry import SOLVERS, get_solver
from sft.solvers.simulate import simulate
from tests.helpers.chains import instances, random_chain

pytestmark = pytest.mark.usefixtures("without_proposals")


def _with_tiles(rng: random.Random, chain: StageChain, *, streamable: bool) -> StageChain:
    """Up to two alternatives that take longer and store less."""
    tiles = []
    for number in range(rng.randint(0, 2)):
        first = rng.randint(1, chain.num_stages)
        last = rng.randint(first, chain.num_stages)
        forward = sum(chain.stage(i).forward_seconds for i in range(first, last + 1))
        backward = sum(chain.stage(i).backward_seconds for i in range(first, last + 1))
        tiles.append(
            Alternative(
                first=first,
                last=last,
                mode=f"tile({number})",
                forward_seconds=forward + rng.randint(0, 3),
                backward_seconds=forward + backward + rng.randint(0, 5),
                saved_bytes=rng.choice([0, 0, 1]),
                reads_output=rng.random() < 0.2,
                forward_workspace_bytes=rng.randint(0, 3),
                backward_workspace_bytes=rng.randint(0, 4),
                streamable=streamable and rng.random() < 0.7,
            )
        )
    return replace(chain, alternatives=tuple(tiles), input_may_stream=rng.random() < 0.5, output_may_stream=rng.random() < 0.5)


def _every_path(edges: list[Edge], node: int, end: int) -> Iterator[tuple[Edge, ...]]:
    if node == end:
        yield ()
        return
    for edge in edges:
        if edge.source == node:
            for rest in _every_path(edges, edge.target, end):
                yield (edge, *rest)


def _case(rng: random.Random, *, streamable: bool, full_duplex: bool) -> tuple[StageChain, HostLink, int]:
    chain = _with_tiles(rng, random_chain(rng, rng.randint(1, 3)), streamable=streamable)
    rate = rng.choice([1, 2, 3])
    top = plain_peak_bytes(chain)
    link = HostLink(down_bytes_per_second=rate, up_bytes_per_second=rate, full_duplex=full_duplex)
    return chain, link, rng.randint(max(chain.input_bytes + 1, top // 2), top)


def test_the_search_is_exact_over_every_path_and_placement() -> None:
    """In the fluid model, with kept, nested and tiled segments, each offload set of each path priced by a linear programme."""
    pytest.importorskip("scipy")
    from tests.helpers.offload_lp import fluid_optimum

    rng = random.Random(31)
    num_feasible = num_mixed = 0
    for case in instances(30):
        chain, link, budget = _case(rng, streamable=False, full_duplex=False)
        search = JointSearch(chain, link=link, slot_bytes=1, bucket_bytes=1, max_labels=10**6, adaptive=False)
        optima = search.paths(budget)
        assert search.table is not None
        paths = list(_every_path(build_edges(chain, search.table, longest=chain.num_stages, adaptive=False), 0, 2 * chain.num_stages + 2))
        best, path, leaves = fluid_optimum(paths, start_bytes=chain.input_bytes, budget_bytes=budget, rate=link.down_bytes_per_second)
        assert (best is None) == (not optima), case
        if best is not None:
            assert optima[0].seconds == pytest.approx(best, abs=1e-6), case
            num_feasible += 1
            num_mixed += any(leaves) and any(edge.label.mode != "keep" for edge in path if isinstance(edge.label, EdgeKind))
    assert num_feasible >= 12 and num_mixed >= 2


def test_schedules_against_every_path_and_placement() -> None:
    """With complete copies and streamed cuts: feasible if a schedule exists, and nearly always the best one."""
    rng = random.Random(32)
    num_cases = num_best = 0
    for case in instances(200):
        chain, link, budget = _case(rng, streamable=True, full_duplex=case % 2 == 0)
        search = JointSearch(chain, link=link, slot_bytes=1, bucket_bytes=1)
        search.paths(budget)
        assert search.table is not None
        edges = build_edges(chain, search.table, longest=chain.num_stages, max_points=5, adaptive=False)
        best = math.inf
        for start in (0, 1):
            for path in _every_path(edges, start, 2 * chain.num_stages + 2):
                movable = [(False, True) if edge.movable and edge.input_bytes + edge.saved_bytes else (False,) for edge in path]
                for leaves in product(*movable):
                    steps = tuple(PathStep(edge, away) for edge, away in zip(path, leaves, strict=True))
                    schedule, peak = search.schedule(FluidPath(steps=steps, seconds=0.0), budget)
                    if peak <= budget:
                        simulation = simulate(chain, schedule, link=link)
                        assert simulation.peak_bytes == peak
                        best = min(best, simulation.seconds)
        if best == math.inf:
            continue
        simulation = simulate(chain, joint.solve_joint(chain, budget_bytes=budget, link=link), link=link)
        assert simulation.peak_bytes <= budget
        num_cases += 1
        num_best += simulation.seconds <= best + 1e-9
    assert num_cases > 100 and num_best >= 0.97 * num_cases


@pytest.mark.parametrize("full_duplex", [False, True])
def test_auto_is_never_slower_than_any_strategy(full_duplex: bool) -> None:
    rng = random.Random(33)
    num_better = 0
    for _ in instances(25):
        chain = _with_tiles(rng, random_chain(rng, rng.randint(3, 9), weights=rng.random() < 0.4), streamable=True)
        rate = rng.choice([1, 3])
        link = HostLink(down_bytes_per_second=rate, up_bytes_per_second=rate, full_duplex=full_duplex)
        budget = rng.randint(plain_peak_bytes(chain) // 2, plain_peak_bytes(chain))
        times = {}
        for name in SOLVERS:
            try:
                simulation = simulate(chain, get_solver(name)(chain, budget_bytes=budget, link=link), link=link)
            except BudgetError:
                continue
            assert simulation.peak_bytes <= budget
            times[name] = simulation.seconds
        if times:
            assert times["auto"] == min(times.values())
            num_better += times["auto"] < min((seconds for name, seconds in times.items() if name != "auto"), default=math.inf)
    assert num_better >= 5


def test_the_search_is_monotone_in_budget_rate_and_menu() -> None:
    rng = random.Random(34)
    for _ in instances(12):
        chain = _with_tiles(rng, random_chain(rng, 4), streamable=True)
        top = plain_peak_bytes(chain)
        last = math.inf
        for budget in range(top // 3, top + 1, max(1, top // 8)):
            times = []
            for tiles in (chain.alternatives, ()):
                for rate in (4, 2):
                    link = HostLink(down_bytes_per_second=rate, up_bytes_per_second=rate, full_duplex=False)
                    optima = JointSearch(replace(chain, alternatives=tiles), link=link, slot_bytes=1, bucket_bytes=1).paths(budget)
                    times.append(optima[0].seconds if optima else math.inf)
            assert times[0] <= times[1] and times[2] <= times[3]  # a faster link
            assert times[0] <= times[2] and times[1] <= times[3]  # a larger menu
            assert times[0] <= last + 1e-9
            last = times[0]


def test_a_cut_that_is_larger_than_the_device_is_streamed() -> None:
    stage = Stage(forward_seconds=4.0, backward_seconds=8.0, output_bytes=1000, grad_bytes=1000)
    tiles = tuple(
        Alternative(
            first=i,
            last=i,
            mode="tile",
            forward_seconds=5.0,
            backward_seconds=12.0,
            forward_workspace_bytes=40,
            backward_workspace_bytes=60,
            streamable=True,
        )
        for i in (1, 2)
    )
    chain = StageChain(input_bytes=20, stages=(stage, replace(stage, output_bytes=10, grad_bytes=10)), alternatives=tiles)
    schedule = joint.solve_joint(chain, budget_bytes=100, link=HostLink(down_bytes_per_second=500, up_bytes_per_second=500))
    assert schedule.streamed_cuts == (1,)
    simulation = simulate(chain, schedule)
    assert simulation.peak_bytes <= 100 and simulation.host_peak_bytes == 2000
    everything = replace(chain, input_may_stream=True, output_may_stream=True)
    assert joint.solve_joint(everything, budget_bytes=60).streamed_cuts == (0, 1, 2)
    with pytest.raises(InputError, match="does not allow"):
        simulate(chain, joint.solve_joint(everything, budget_bytes=60))
    with pytest.raises(BudgetError) as refusal:
        joint.solve_joint(chain, budget_bytes=100, host_budget_bytes=1999)
    assert refusal.value.needed_bytes > 1000  # then the cut must be complete on the device
    with pytest.raises(BudgetError) as refusal:
        joint.solve_joint(chain, budget_bytes=50)
    needed = refusal.value.needed_bytes
    assert 50 < needed <= 100
    assert simulate(chain, joint.solve_joint(chain, budget_bytes=needed)).peak_bytes <= needed


def test_weights_are_streamed_where_they_do_not_fit() -> None:
    stage = Stage(forward_seconds=4.0, backward_seconds=8.0, output_bytes=10, grad_bytes=10, weight_bytes=100)
    chain = StageChain(input_bytes=10, stages=(stage,) * 4)
    link = HostLink(down_bytes_per_second=100, up_bytes_per_second=100)
    schedule = joint.solve_joint(chain, budget_bytes=600, link=link)
    simulation = simulate(chain, schedule, link=link)
    assert schedule.streamed_weights and simulation.peak_bytes <= 600 < plain_peak_bytes(chain)
    assert simulation.seconds == chain.compute_seconds  # a second to copy a weight, four or eight to use it
    assert joint.solve_joint(chain, budget_bytes=plain_peak_bytes(chain), link=link).streamed_weights == ()


def test_the_host_budget_is_kept() -> None:
    rng = random.Random(35)
    for _ in instances(30):
        chain = _with_tiles(rng, random_chain(rng, 5), streamable=True)
        budget = plain_peak_bytes(chain) * 3 // 4
        for host in (0, 4, 12):
            try:
                schedule = joint.solve_joint(chain, budget_bytes=budget, host_budget_bytes=host)
            except BudgetError:
                continue
            simulation = simulate(chain, schedule)
            assert simulation.peak_bytes <= budget and simulation.host_peak_bytes <= host


def test_unknown_strategies_are_refused() -> None:
    assert set(SOLVERS) >= {"none", "sqrt", "revolve", "bisect", "optimal", "acg", "offload-greedy", "offload-dp", "auto"}
    with pytest.raises(InputError, match=r"'fastest'.*revolve"):
        get_solver("fastest")
    chain = random_chain(random.Random(36), 3)
    top = plain_peak_bytes(chain)
    assert simulate(chain, get_solver("none")(chain, budget_bytes=top)).peak_bytes == top
    with pytest.raises(BudgetError, match="'none'") as refusal:
        get_solver("none")(chain, budget_bytes=top - 1)
    assert refusal.value.needed_bytes == top
