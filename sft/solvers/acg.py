"""Strategy ``acg``: the checkpoints of least memory in an arbitrary graph, each segment recomputed once.

Source: Feng and Huang, "Optimal gradient checkpoint search for arbitrary computation graphs", CVPR 2021. Checkpoints cut a graph into
independent segments; what training holds is put as the checkpoints together and the largest segment between them, which is recomputed with
everything kept (equations 1 and 2). For a bound ``C`` on the segments the cheapest checkpoints follow from the division tree (`cuts`),
from the leaves up: a segment within the bound needs none; a linear one is a shortest path over its splitting vertices (Algorithms 1 and 5);
of a branch segment each branch is solved by itself; a complex one makes checkpoints of all ends of its parts. The bounds are tried from the
top, each time just below the largest segment that the last one led to, until the checkpoints alone outweigh the best sum.

The objective knows no gradients and no budget: a strategy here, on a chain, is the solution of the smallest sum whose schedule fits.
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

#: The bytes of the checkpoints inside a segment, and the checkpoints; None if the bound cannot be kept.
_Solution = tuple[int, tuple[int, ...]] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpointing:
    """A set of checkpoints.

    Attributes:
        checkpoints: the vertices, source and target included.
        checkpoint_bytes: their sizes together.
        segment_bytes: the largest segment between them.
    """

    checkpoints: tuple[int, ...]
    checkpoint_bytes: int
    segment_bytes: int

    @property
    def total_bytes(self) -> int:
        """The objective."""
        return self.checkpoint_bytes + self.segment_bytes


def optimal_checkpoints(dag: ValueDag) -> Checkpointing:
    """The checkpoints of the smallest sum of all checkpoints and the largest segment (of several, the fewest bytes of checkpoints)."""
    best: Checkpointing | None = None
    for found in solutions(dag):
        if best is not None and found.checkpoint_bytes >= best.total_bytes:
            break
        if best is None or found.total_bytes < best.total_bytes:
            best = found
    assert best is not None  # without a bound, the two ends are a solution
    return best


def solutions(dag: ValueDag) -> Iterator[Checkpointing]:
    """The cheapest checkpoints for smaller and smaller bounds on the segments."""
    tree = division_tree(dag)
    ends = (0, len(dag.sizes_bytes) - 1)
    bound = tree.inner_bytes
    while bound >= 0:
        found = _cheapest_within(dag, tree, bound)
        if found is None:
            return
        chosen = frozenset((*found[1], *ends))
        largest = _largest_segment(dag, tree, chosen)
        yield Checkpointing(
            checkpoints=tuple(sorted(chosen)),
            checkpoint_bytes=sum(dag.sizes_bytes[v] for v in chosen),
            segment_bytes=largest,
        )
        bound = largest - 1


def chain_dag(chain: StageChain) -> ValueDag:
    """A chain as a graph of values; what stages save belongs to the edges."""
    n = chain.num_stages
    return ValueDag(
        sizes_bytes=tuple(chain.activation_bytes(i) for i in range(n + 1)),
        edges=tuple((i, i + 1) for i in range(n)),
        edge_bytes={(i - 1, i): chain.stage(i).saved_bytes for i in range(1, n + 1) if chain.stage(i).saved_bytes},
    )


def solve_acg(chain: StageChain, *, budget_bytes: int, host_budget_bytes: int | None = None, link: HostLink | None = None) -> Schedule:
    """The schedule of the best sum of checkpoints and largest segment that fits.

    Raises:
        BudgetError: none does.
    """
    every = evaluate_plans(chain, "acg", _plans, link)
    for number, (_, peak_bytes) in enumerate(every):
        if peak_bytes <= budget_bytes:
            return pick_plan(chain, "acg", _plans, number)
    raise budget_error("acg", budget_bytes, min(peak_bytes for _, peak_bytes in every))


def _plans(chain: StageChain) -> Iterator[Callable[[], tuple[Operation, ...]]]:
    return (partial(reversal, chain, one_level(checkpoints)) for checkpoints in _solutions_by_sum(chain))


@lru_cache(maxsize=32)
def _solutions_by_sum(chain: StageChain) -> tuple[tuple[int, ...], ...]:
    """Checkpoints of the solutions, those with the least sum first."""
    found = sorted(islice(solutions(chain_dag(chain)), _MAX_SOLUTIONS), key=lambda found: found.total_bytes)
    return tuple(each.checkpoints for each in found)


def _cheapest_within(dag: ValueDag, part: Division, bound: int) -> _Solution:
    """The cheapest checkpoints inside a segment so that nothing between them exceeds the bound."""
    if part.kind in ("branch", "complex"):
        if part.kind == "complex" and part.inner_bytes <= bound:
            return 0, ()
        total, chosen = sum(dag.sizes_bytes[v] for v in part.connecting), list(part.connecting)
        for inner in part.parts:
            found = _cheapest_within(dag, inner, bound)
            if found is None:
                return None
            total += found[0]
            chosen += found[1]
        return total, tuple(chosen)
    if part.inner_bytes <= bound:
        return 0, ()
    return _shortest(dag, part, bound) if part.kind == "linear" else None


def _shortest(dag: ValueDag, part: Division, bound: int) -> _Solution:
    """The shortest path over a linear segment's splitting vertices."""
    ends = [part.source, *part.connecting, part.target]
    inner = [piece.inner_bytes for piece in part.parts]
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
            inside: _Solution = (0, ()) if first < last - 1 else _cheapest_within(dag, part.parts[first], bound)
            before = totals[first]
            if inside is not None and before is not None and (total is None or before + inside[0] < total):
                total, step = before + inside[0], (first, inside[1])
        totals.append(None if total is None else total + (0 if last == len(ends) - 1 else dag.sizes_bytes[ends[last]]))
        steps.append(step)
    if totals[-1] is None:
        return None
    chosen: list[int] = []
    last = len(ends) - 1
    while last:
        first, inside_chosen = steps[last]
        chosen += [*inside_chosen, *(ends[first : first + 1] if first else ())]
        last = first
    return totals[-1], tuple(chosen)


def _largest_segment(dag: ValueDag, part: Division, chosen: frozenset[int]) -> int:
    """The largest piece that the chosen vertices leave of a segment whose two ends are chosen."""
    if part.kind != "branch" and chosen.isdisjoint(part.interior):
        return part.inner_bytes
    if part.kind != "linear":
        return max(_largest_segment(dag, inner, chosen) for inner in part.parts)
    largest = run = 0
    ends = (*part.connecting, part.target)
    for piece, end in zip(part.parts, ends, strict=True):
        closed = end in chosen or end == part.target
        if closed and not run and (piece.source in chosen or piece.source == part.source):
            largest = max(largest, _largest_segment(dag, piece, chosen))
            continue
        run += piece.inner_bytes + (0 if closed else dag.sizes_bytes[end])
        if closed:
            largest, run = max(largest, run), 0
    return largest
