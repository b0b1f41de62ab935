"""Ways to run parts of a chain, as edges of a graph of cuts; and what a path through it is as a list of operations.

A node is a cut ``x_i`` that is whole on the device (number ``2 i``) or streamed, never whole there (``2 i + 1``). From node to node lead

- *kept*: one stage with everything kept;
- *nested*: the stages ``i+1..j`` forward with nothing kept inside, and in the backward the persistent schedule of `optimal` within so many
  buckets; with many that is one recomputation with everything kept, with few it nests;
- *alternatives* of the chain, such as fused-tiled segments. Only these lead to and from streamed cuts: they read ``x_i`` and write ``x_j``
piece by
  piece, and in the backward read ``x_i`` and ``y_j`` and write ``y_i``.

The stages whose weights are streamed are chosen beforehand; they add their windows to the needs and their bytes to the link's work.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from sft.solvers.chain import Alternative, StageChain
from sft.solvers.edges import Edge
from sft.solvers.label_search import PathStep
from sft.solvers.offloading import kept_edge, loss_edge
from sft.solvers.optimal import CostTable
from sft.solvers.schedule import Operation, activation_name, backward_op, forward_op, free_op, grad_name, loss_op, saved_name

__all__ = ["EdgeKind", "build_edges", "path_operations", "path_values", "streamed_cuts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeKind:
    """What an edge does.

    Attributes:
        first: the first stage.
        last: the last stage.
        mode: ``"keep"``, ``"nested"``, or an alternative's name.
        num_buckets: of a nested one, the buckets for its backward.
    """

    first: int
    last: int
    mode: str
    num_buckets: int = 0


def build_edges(
    chain: StageChain,
    table: CostTable,
    *,
    longest: int,
    max_points: int = 2,
    adaptive: bool = True,
    streamed_weights: Collection[int] = (),
) -> list[Edge]:
    """All edges, by their source, the loss last.

    Args:
        chain: the chain.
        table: solutions of all its parts.
        longest: most stages to a nested edge; lengths above 8 are thinned out.
        max_points: nested edges with a fixed budget for the backward, between the same cuts.
        adaptive: whether there is also one whose backward takes what is free.
        streamed_weights: the stages whose weights are streamed.
    """
    n = chain.num_stages
    found: list[Edge] = []
    lengths = [length for length in range(1, min(longest, n) + 1) if length <= 8 or length == n or length % max(1, length // 8) == 0]
    for i in range(n):
        found.append(
            _with_weights(chain, kept_edge(chain, i + 1), i + 1, i + 1, streamed_weights, EdgeKind(first=i + 1, last=i + 1, mode="keep"))
        )
        for length in lengths:
            if i + length <= n:
                found += _nested_edges(chain, table, i, i + length, max_points, adaptive, streamed_weights)
        for other in chain.alternatives:
            if other.first == i + 1:
                found += _alternative_edges(chain, other, streamed_weights)
    ends = [2 * n, 2 * n + 1] if any(edge.target == 2 * n + 1 for edge in found) else [2 * n]
    found += [loss_edge(chain, end, 2 * n + 2, streamed=bool(end % 2)) for end in ends]
    return sorted(found, key=lambda edge: edge.source)


def path_operations(chain: StageChain, table: CostTable, steps: tuple[PathStep, ...]) -> tuple[Operation, ...]:
    """The operations of a path, without copies."""
    taken = [
        replace(step.edge.label, num_buckets=step.num_buckets) if step.edge.backward_curve is not None else step.edge.label
        for step in steps
        if isinstance(step.edge.label, EdgeKind)
    ]
    operations: list[Operation] = []
    for way in taken:
        operations += _forward_operations(chain, way)
    operations.append(loss_op())
    for way in reversed(taken):
        operations += _backward_operations(chain, table, way)
    return tuple(operations)


def path_values(steps: tuple[PathStep, ...]) -> set[str]:
    """The values that leave."""
    found: set[str] = set()
    for step in steps:
        way = step.edge.label
        if step.leaves and isinstance(way, EdgeKind):
            if step.edge.input_bytes:
                found.add(activation_name(way.first - 1))
            if step.edge.saved_bytes:
                found.add(saved_name(way.last))
    return found


def streamed_cuts(steps: tuple[PathStep, ...]) -> tuple[int, ...]:
    """The streamed cuts that a path passes."""
    return tuple(sorted({node // 2 for step in steps for node in (step.edge.source, step.edge.target) if node % 2}))


def _forward_operations(chain: StageChain, way: EdgeKind) -> Iterator[Operation]:
    if way.mode == "nested":
        for i in range(way.first, way.last + 1):
            yield forward_op(i)
            if i > way.first:
                yield from free_op(activation_name(i - 1))
    elif way.mode == "keep":
        yield forward_op(way.first, save=not chain.stage(way.first).is_light)
    else:
        other = chain.alternative(way.first, way.last, way.mode)
        yield forward_op(way.first, way.last, mode=way.mode, save=bool(other.saved_bytes or other.reads_output))


def _backward_operations(chain: StageChain, table: CostTable, way: EdgeKind) -> Iterator[Operation]:
    if way.mode == "nested":
        yield from free_op(activation_name(way.last))
        yield from table.operations(way.first - 1, way.last, way.num_buckets)
        return
    mode = "" if way.mode == "keep" else way.mode
    part = chain.alternative(way.first, way.last, mode) if mode else chain.stage(way.first)
    if not part.reads_output:
        yield from free_op(activation_name(way.last))
    yield backward_op(way.first, way.last, mode=mode)
    if part.reads_output:
        yield from free_op(activation_name(way.last))
    if part.saved_bytes or part.reads_output:
        yield from free_op(saved_name(way.last))
    yield from free_op(grad_name(way.last))


def _nested_edges(
    chain: StageChain, table: CostTable, i: int, j: int, max_points: int, adaptive: bool, streamed_weights: Collection[int]
) -> Iterator[Edge]:
    """One stage or more with nothing kept inside; a light stage alone would be the kept one again."""
    if j == i + 1 and chain.stage(j).is_light:
        return
    curve = table.curve(i, j)
    if not curve:
        return
    if len(curve) > max_points:  # the least memory, the least time, and some between
        curve = [curve[k * (len(curve) - 1) // (max_points - 1)] for k in range(max_points)]
    needs = (
        chain.activation_bytes(k) + chain.stage(k).forward_workspace_bytes + (chain.activation_bytes(k - 1) if k > i + 1 else 0)
        for k in range(i + 1, j + 1)
    )
    forward_need = max(needs)
    forward_seconds = sum(chain.stage(k).forward_seconds for k in range(i + 1, j + 1))
    for num_buckets, seconds in curve:
        edge = Edge(
            source=2 * i,
            target=2 * j,
            forward_seconds=forward_seconds,
            backward_seconds=seconds,
            forward_need_bytes=forward_need,
            backward_need_bytes=num_buckets * table.bucket_bytes,
            input_bytes=chain.activation_bytes(i),
            saved_bytes=0,
            output_bytes=chain.activation_bytes(j),
        )
        way = EdgeKind(first=i + 1, last=j, mode="nested", num_buckets=num_buckets)
        yield _with_weights(chain, edge, i + 1, j, streamed_weights, way)
    if adaptive:
        edge = replace(edge, backward_curve=table.row(i, j), bucket_bytes=table.bucket_bytes)
        yield _with_weights(chain, edge, i + 1, j, streamed_weights, EdgeKind(first=i + 1, last=j, mode="nested"))


def _alternative_edges(chain: StageChain, other: Alternative, streamed_weights: Collection[int]) -> Iterator[Edge]:
    """An alternative between whole cuts and, if it can, to and from streamed ones."""
    i, j = other.first - 1, other.last
    x_in, x_out, y_in, y_out = chain.activation_bytes(i), chain.activation_bytes(j), chain.grad_bytes(i), chain.grad_bytes(j)
    source_may = other.streamable and (i > 0 or chain.input_may_stream)
    target_may = other.streamable and (j < chain.num_stages or chain.output_may_stream)
    for source_away in (False, True) if source_may else (False,):
        for target_away in (False, True) if target_may else (False,):
            here_in, here_out = not source_away, not target_away
            edge = Edge(
                source=2 * i + source_away,
                target=2 * j + target_away,
                forward_seconds=other.forward_seconds,
                backward_seconds=other.backward_seconds,
                forward_need_bytes=here_out * x_out + other.saved_bytes + other.forward_workspace_bytes,
                backward_need_bytes=here_in * y_in
                + here_out * (y_out + (x_out if other.reads_output else 0))
                + other.saved_bytes
                + other.backward_workspace_bytes,
                input_bytes=here_in * x_in,
                saved_bytes=other.saved_bytes,
                output_bytes=here_out * x_out,
                down_forward_bytes=target_away * x_out,
                up_forward_bytes=source_away * x_in,
                down_backward_bytes=source_away * y_in,
                up_backward_bytes=source_away * x_in + target_away * (y_out + (x_out if other.reads_output else 0)),
                host_bytes=target_away * (x_out + y_out),
            )
            yield _with_weights(chain, edge, i + 1, j, streamed_weights, EdgeKind(first=i + 1, last=j, mode=other.mode))


def _with_weights(chain: StageChain, edge: Edge, first: int, last: int, streamed_weights: Collection[int], way: EdgeKind) -> Edge:
    """The same edge with its label, its nodes as cuts, and its streamed weights: in the backward once more if it runs forward again."""
    sizes = [chain.stage(i).weight_bytes for i in range(first, last + 1) if i in streamed_weights]
    total, largest = sum(sizes), max(sizes, default=0)
    together = total if way.mode not in ("keep", "nested") else largest
    changes: dict[str, object] = {"label": way}
    if way.mode == "keep":
        changes |= {"source": 2 * (first - 1), "target": 2 * last}
    if total:
        changes |= {
            "forward_need_bytes": edge.forward_need_bytes + together,
            "backward_need_bytes": edge.backward_need_bytes + 2 * together,
            "up_forward_bytes": edge.up_forward_bytes + total,
            "up_backward_bytes": edge.up_backward_bytes + total * (2 if way.mode == "nested" else 1),
            "down_backward_bytes": edge.down_backward_bytes + total,
        }
    return replace(edge, **changes)  # type: ignore[arg-type]
