"""Strategy ``acg``: checkpoints of least memory in an arbitrary graph, each segment recomputed once.

Source: Feng and Huang, "Optimal gradient checkpoint search for arbitrary computation graphs", CVPR 2021. Checkpoints cut a graph into
independent segments. The memory of training is the sum of all checkpoints and the largest segment between them, which is recomputed with
all values kept (equations 1 and 2). For a bound ``C`` on the segments, the cheapest checkpoints follow from the division tree
(`graph_cuts`), from the leaves up: a segment within the bound needs none; a linear segment is a shortest path over its splitting vertices
(Algorithms 1 and 5); of a branch segment each branch is solved separately; a complex segment has checkpoints at all ends of its parts. The
bounds are tried from the largest down, each just below the largest segment of the last solution, until the checkpoints alone exceed the
best sum.

The objective has no gradients and no budget. As a strategy on a chain, the solution with the smallest sum is taken among those that fit.
Complexity: O(V^2) for a bound, at most O(V^2) bounds, few in practice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice

from sft.analysis.ir.graph_cuts import Division, ValueDag, division_tree
from sft.solvers.chain import HostLink, StageChain
from sft.solvers.reversal import one_level, reversal
from sft.solvers.schedule import Operation, Schedule
from sft.solvers.solver import budget_error, evaluate_plans, pick_plan

__all__ = ["Checkpointing", "chain_dag", "optimal_checkpoints", "solutions", "solve_acg"]

_MAX_SOLUTIONS = 256

#: Bytes of the checkpoints inside a segment, and the checkpoints; None if the segment cannot stay within the bound.
_Solution = tuple[int, tuple[int, ...]] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpointing:
    """A set of checkpoints.

    Attributes:
        checkpoints: the vertices, including source and target.
        checkpoint_bytes: sum of their sizes.
        segment_bytes: the largest segment between them.
    """

    checkpoints: tuple[int, ...]
    checkpoint_bytes: int
    segment_bytes: int

    @property
    def total_bytes(self) -> int:
        """The objective: all checkpoints and the largest segment."""
        return self.checkpoint_bytes + self.segment_bytes


def optimal_checkpoints(dag: ValueDag) -> Checkpointing:
    """Checkpoints with the smallest sum of all checkpoints and the largest segment (of several, those with the smallest checkpoints)."""
    best: Checkpointing | None = None
    for solution in solutions(dag):
        if best is not None and solution.checkpoint_bytes >= best.total_bytes:
            break
        if best is None or solution.total_bytes < best.total_bytes:
            best = solution
    assert best is not None  # the two ends are a solution for the largest bound
    return best


def solutions(dag: ValueDag) -> Iterator[Checkpointing]:
    """Cheapest checkpoints for decreasing bounds on the segments."""
    tree = division_tree(dag)
    ends = (0, len(dag.sizes_bytes) - 1)
    bound = tree.inner_bytes
    while bound >= 0:
        inner = _cheapest_within(dag, tree, bound)
        if inner is None:
            return
        checkpoints = frozenset((*inner[1], *ends))
        largest_bytes = _largest_segment(dag, tree, checkpoints)
        yield Checkpointing(
            checkpoints=tuple(sorted(checkpoints)),
            checkpoint_bytes=sum(dag.sizes_bytes[v] for v in checkpoints),
            segment_bytes=largest_bytes,
        )
        bound = largest_bytes - 1


def chain_dag(chain: StageChain) -> ValueDag:
    """The chain as a graph of values; saved values belong to the edges."""
    n = chain.num_stages
    return ValueDag(
        sizes_bytes=tuple(chain.activation_bytes(i) for i in range(n + 1)),
        edges=tuple((i, i + 1) for i in range(n)),
        edge_bytes={(i - 1, i): chain.stage(i).saved_bytes for i in range(1, n + 1) if chain.stage(i).saved_bytes},
    )


def solve_acg(chain: StageChain, *, budget_bytes: int, host_budget_bytes: int | None = None, link: HostLink | None = None) -> Schedule:
    """Schedule of the best fitting sum of checkpoints and largest segment.

    Raises:
        BudgetError: no solution fits.
    """
    costs = evaluate_plans(chain, "acg", _plans, link)
    for number, (_, peak_bytes) in enumerate(costs):
        if peak_bytes <= budget_bytes:
            return pick_plan(chain, "acg", _plans, number)
    raise budget_error("acg", budget_bytes, min(peak_bytes for _, peak_bytes in costs))


def _plans(chain: StageChain) -> Iterator[Callable[[], tuple[Operation, ...]]]:
    return (partial(reversal, chain, one_level(checkpoints)) for checkpoints in _solutions_by_sum(chain))


@lru_cache(maxsize=32)
def _solutions_by_sum(chain: StageChain) -> tuple[tuple[int, ...], ...]:
    """Checkpoints of the solutions, by increasing sum."""
    ordered = sorted(islice(solutions(chain_dag(chain)), _MAX_SOLUTIONS), key=lambda solution: solution.total_bytes)
    return tuple(solution.checkpoints for solution in ordered)


def _cheapest_within(dag: ValueDag, division: Division, bound: int) -> _Solution:
    """Cheapest checkpoints inside a segment, such that no segment between them exceeds the bound."""
    if division.kind in ("branch", "complex"):
        if division.kind == "complex" and division.inner_bytes <= bound:
            return 0, ()
        num_bytes, checkpoints = sum(dag.sizes_bytes[v] for v in division.connecting), list(division.connecting)
        for child in division.parts:
            solution = _cheapest_within(dag, child, bound)
            if solution is None:
                return None
            num_bytes += solution[0]
            checkpoints += solution[1]
        return num_bytes, tuple(checkpoints)
    if division.inner_bytes <= bound:
        return 0, ()
    return _shortest(dag, division, bound) if division.kind == "linear" else None


def _shortest(dag: ValueDag, division: Division, bound: int) -> _Solution:
    """Shortest path over a linear segment's splitting vertices."""
    ends = [division.source, *division.connecting, division.target]
    inner = [child.inner_bytes for child in division.parts]
    totals: list[int | None] = [0]
    steps: list[tuple[int, tuple[int, ...]]] = [(0, ())]
    for last in range(1, len(ends)):
        total: int | None = None
        step: tuple[int, tuple[int, ...]] = (0, ())
        between = 0
        for first in range(last - 1, -1, -1):
            between += inner[first] + (dag.sizes_bytes[ends[first + 1]] if first + 1 < last else 0)
            if between > bound and first < last - 1:
                break
            solution: _Solution = (0, ()) if first < last - 1 else _cheapest_within(dag, division.parts[first], bound)
            before = totals[first]
            if solution is not None and before is not None and (total is None or before + solution[0] < total):
                total, step = before + solution[0], (first, solution[1])
        totals.append(None if total is None else total + (0 if last == len(ends) - 1 else dag.sizes_bytes[ends[last]]))
        steps.append(step)
    if totals[-1] is None:
        return None
    checkpoints: list[int] = []
    last = len(ends) - 1
    while last:
        first, inside = steps[last]
        checkpoints += [*inside, *(ends[first : first + 1] if first else ())]
        last = first
    return totals[-1], tuple(checkpoints)


def _largest_segment(dag: ValueDag, division: Division, checkpoints: frozenset[int]) -> int:
    """Largest segment that the checkpoints leave of a division between two checkpoints."""
    if division.kind != "branch" and checkpoints.isdisjoint(division.interior):
        return division.inner_bytes
    if division.kind != "linear":
        return max(_largest_segment(dag, child, checkpoints) for child in division.parts)
    largest = run = 0
    ends = (*division.connecting, division.target)
    for child, end in zip(division.parts, ends, strict=True):
        closed = end in checkpoints or end == division.target
        if closed and not run and (child.source in checkpoints or child.source == division.source):
            largest = max(largest, _largest_segment(dag, child, checkpoints))
            continue
        run += child.inner_bytes + (0 if closed else dag.sizes_bytes[end])
        if closed:
            largest, run = max(largest, run), 0
    return largest
