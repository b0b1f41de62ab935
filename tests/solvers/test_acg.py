"""Checkpoints in arbitrary graphs, compared with all subsets of vertices."""

from __future__ import annotations

import random
from itertools import combinations

import networkx as nx
import pytest

from sft.analysis.ir.graph_cuts import Division, ValueDag, division_tree
from sft.common.errors import BudgetError
from sft.solvers import acg
from sft.solvers.simulate import simulate
from tests.helpers.chains import instances, random_chain, uniform_chain

pytestmark = pytest.mark.usefixtures("without_proposals")


def _random_dag(rng: random.Random, num_vertices: int) -> ValueDag:
    """One source, one target; sparse enough that linear and branch segments occur, with some weighted edges."""
    edges = set()
    for v in range(1, num_vertices):
        edges.add((rng.randint(max(0, v - 3), v - 1), v))
    for v in range(num_vertices - 1):
        if not any(a == v for a, _ in edges):
            edges.add((v, rng.randint(v + 1, min(num_vertices - 1, v + 3))))
    for _ in range(rng.choice([0, 0, 1, 2, 4])):
        a, b = sorted(rng.sample(range(num_vertices), 2))
        edges.add((a, b))
    heavy = {edge: rng.randint(1, 9) for edge in sorted(edges) if rng.random() < 0.15}
    return ValueDag(
        sizes_bytes=tuple(rng.randint(0 if rng.random() < 0.1 else 1, 20) for _ in range(num_vertices)),
        edges=tuple(sorted(edges)),
        edge_bytes=heavy,
    )


def _largest_of(dag: ValueDag, chosen: frozenset[int]) -> int | None:
    """The largest segment between checkpoints, by definition; None if a segment has more than one source or target."""
    graph = nx.DiGraph(dag.edges)
    largest = max((dag.edge_bytes.get((a, b), 0) for a, b in dag.edges if a in chosen and b in chosen), default=0)
    for component in nx.weakly_connected_components(graph.subgraph(set(graph) - chosen)):
        sources = {a for v in component for a in graph.predecessors(v)} - component
        targets = {b for v in component for b in graph.successors(v)} - component
        if len(sources) != 1 or len(targets) != 1:
            return None
        inner = sum(dag.edge_bytes.get((a, b), 0) for a, b in dag.edges if a in component or b in component)
        largest = max(largest, inner + sum(dag.sizes_bytes[v] for v in component))
    return largest


def _least_total(dag: ValueDag) -> int:
    last = len(dag.sizes_bytes) - 1
    best = None
    for count in range(last):
        for inside in combinations(range(1, last), count):
            chosen = frozenset((0, *inside, last))
            largest = _largest_of(dag, chosen)
            if largest is not None:
                total = largest + sum(dag.sizes_bytes[v] for v in chosen)
                best = total if best is None else min(best, total)
    assert best is not None
    return best


def _kinds(division: Division) -> set[str]:
    return {division.kind}.union(*(_kinds(inner) for inner in division.parts))


def test_no_subset_of_vertices_is_better() -> None:
    rng = random.Random(21)
    seen: set[str] = set()
    num_inside = 0
    for case in instances(600):
        dag = _random_dag(rng, rng.randint(2, 8 if case % 6 else 10))
        optimum = acg.optimal_checkpoints(dag)
        chosen = frozenset(optimum.checkpoints)
        assert _largest_of(dag, chosen) == optimum.segment_bytes
        assert optimum.checkpoint_bytes == sum(dag.sizes_bytes[v] for v in chosen)
        assert optimum.total_bytes == _least_total(dag), case
        seen |= _kinds(division_tree(dag))
        num_inside += len(chosen) > 2
    assert seen == {"edge", "linear", "branch", "complex"}
    assert num_inside > 100


def test_no_subset_of_a_chains_vertices_is_better() -> None:
    rng = random.Random(22)
    for _ in instances(200):
        dag = acg.chain_dag(random_chain(rng, rng.randint(1, 9), light=rng.random() < 0.5, largest=20))
        assert acg.optimal_checkpoints(dag).total_bytes == _least_total(dag)


def test_every_bound_has_its_cheapest_checkpoints() -> None:
    """For each occurring bound, not only for the best sum, no cheaper checkpoints satisfy it."""
    rng = random.Random(23)
    for _ in instances(60):
        dag = _random_dag(rng, rng.randint(3, 7))
        last = len(dag.sizes_bytes) - 1
        outcomes = []
        for count in range(last):
            for inside in combinations(range(1, last), count):
                chosen = frozenset((0, *inside, last))
                largest = _largest_of(dag, chosen)
                if largest is not None:
                    outcomes.append((largest, sum(dag.sizes_bytes[v] for v in chosen)))
        for solution in acg.solutions(dag):
            assert solution.checkpoint_bytes == min(num_bytes for largest, num_bytes in outcomes if largest <= solution.segment_bytes)


@pytest.mark.parametrize("root", [3, 5, 12])
def test_equal_vertices_need_two_square_roots(root: int) -> None:
    """k segments of n/k: with the source, k + 1 checkpoints and n/k - 1 between two of them."""
    optimum = acg.optimal_checkpoints(acg.chain_dag(uniform_chain(root * root, light=True)))
    assert optimum.total_bytes == 2 * root


def test_a_segment_inside_a_complex_one() -> None:
    """Between 1 and 4, vertex 2 is independent; the edge to 3 leads out of it."""
    dag = ValueDag(
        sizes_bytes=(1, 1, 50, 1, 1, 1, 1),
        edges=((0, 1), (0, 3), (1, 2), (1, 3), (2, 4), (1, 4), (3, 5), (4, 5), (4, 6), (5, 6)),
        edge_bytes={},
    )
    tree = division_tree(dag)
    assert tree.kind == "complex"
    assert {(division.source, division.target, division.interior) for division in tree.parts if division.interior} == {(1, 4, (2,))}


def test_schedules_on_chains() -> None:
    rng = random.Random(24)
    for _ in instances(40):
        chain = random_chain(rng, rng.randint(2, 9))
        with pytest.raises(BudgetError) as refusal:
            acg.solve_acg(chain, budget_bytes=1)
        needed = refusal.value.needed_bytes
        simulation = simulate(chain, acg.solve_acg(chain, budget_bytes=needed))
        assert simulation.peak_bytes == needed
        best = acg.optimal_checkpoints(acg.chain_dag(chain))
        roomy = simulate(chain, acg.solve_acg(chain, budget_bytes=10**6))
        assert roomy.peak_bytes <= best.total_bytes + max(s.grad_bytes for s in chain.stages) * 2 + chain.input_grad_bytes + 12


def test_impossible_graphs_are_refused() -> None:
    for sizes, edges in [((1,), ()), ((1, 1), ()), ((1, 1, 1), ((0, 1), (0, 2))), ((1, 1, 1), ((0, 2), (1, 2))), ((1, 1), ((1, 0),))]:
        with pytest.raises(ValueError, match=r"source|edges"):
            ValueDag(sizes_bytes=sizes, edges=edges)
