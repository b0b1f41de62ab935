"""Edges and paths of the joint search: from ways to run parts of a chain to a list of operations.

A node is a cut: ``2 i`` if ``x_i`` is complete on the device, ``2 i + 1`` if it is streamed and never complete on the device. Three kinds
of edges lead from node to node:

- *kept*: one stage with all values kept;
- *nested*: the stages ``i+1..j`` forward with no values kept inside, and in the backward the persistent schedule of `optimal` within a
  number of buckets. With many buckets that is one recomputation with all values kept; with few it nests;
- *alternatives* of the chain, such as fused-tiled segments. Only these lead to and from streamed cuts: the forward reads ``x_i`` and writes
  ``x_j`` in slices, the backward reads ``x_i`` and ``y_j`` and writes ``y_i``.

The stages with streamed weights are chosen beforehand. They add their windows to the needs of an edge, and their bytes to its link work.
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
    """The operations of an edge.

    Attributes:
        first: the first stage.
        last: the last stage.
        mode: ``"keep"``, ``"nested"``, or an alternative's name.
        num_buckets: of a nested edge, the buckets of its backward.
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
        table: optimal costs of all spans of the chain.
        longest: most stages of a nested edge; lengths above 8 are thinned out.
        max_points: number of nested edges with a fixed budget between the same cuts.
        adaptive: True to add a nested edge with a backward that takes the free memory.
        streamed_weights: the stages with streamed weights.
    """
    n = chain.num_stages
    edges: list[Edge] = []
    lengths = [length for length in range(1, min(longest, n) + 1) if length <= 8 or length == n or length % max(1, length // 8) == 0]
    for i in range(n):
        edges.append(_with_weights(chain, kept_edge(chain, i + 1), EdgeKind(first=i + 1, last=i + 1, mode="keep"), streamed_weights))
        for length in lengths:
            if i + length <= n:
                edges += _nested_edges(chain, table, i, i + length, max_points, adaptive, streamed_weights)
        for alternative in chain.alternatives:
            if alternative.first == i + 1:
                edges += _alternative_edges(chain, alternative, streamed_weights)
    ends = [2 * n, 2 * n + 1] if any(edge.target == 2 * n + 1 for edge in edges) else [2 * n]
    edges += [loss_edge(chain, end, 2 * n + 2, streamed=bool(end % 2)) for end in ends]
    return sorted(edges, key=lambda edge: edge.source)


def path_operations(chain: StageChain, table: CostTable, steps: tuple[PathStep, ...]) -> tuple[Operation, ...]:
    """Operations of a path, without copies."""
    kinds = [
        replace(step.edge.label, num_buckets=step.num_buckets) if step.edge.backward_curve is not None else step.edge.label
        for step in steps
        if isinstance(step.edge.label, EdgeKind)
    ]
    operations: list[Operation] = []
    for kind in kinds:
        operations += _forward_operations(chain, kind)
    operations.append(loss_op())
    for kind in reversed(kinds):
        operations += _backward_operations(chain, table, kind)
    return tuple(operations)


def path_values(steps: tuple[PathStep, ...]) -> set[str]:
    """Values that leave for the host on a path."""
    values: set[str] = set()
    for step in steps:
        kind = step.edge.label
        if step.leaves and isinstance(kind, EdgeKind):
            if step.edge.input_bytes:
                values.add(activation_name(kind.first - 1))
            if step.edge.saved_bytes:
                values.add(saved_name(kind.last))
    return values


def streamed_cuts(steps: tuple[PathStep, ...]) -> tuple[int, ...]:
    """Streamed cuts on a path."""
    return tuple(sorted({node // 2 for step in steps for node in (step.edge.source, step.edge.target) if node % 2}))


def _forward_operations(chain: StageChain, kind: EdgeKind) -> Iterator[Operation]:
    """Forward of an edge."""
    if kind.mode == "nested":
        for i in range(kind.first, kind.last + 1):
            yield forward_op(i)
            if i > kind.first:
                yield from free_op(activation_name(i - 1))
    elif kind.mode == "keep":
        yield forward_op(kind.first, save=not chain.stage(kind.first).is_light)
    else:
        alternative = chain.alternative(kind.first, kind.last, kind.mode)
        yield forward_op(kind.first, kind.last, mode=kind.mode, save=bool(alternative.saved_bytes or alternative.reads_output))


def _backward_operations(chain: StageChain, table: CostTable, kind: EdgeKind) -> Iterator[Operation]:
    """Backward of an edge."""
    if kind.mode == "nested":
        yield from free_op(activation_name(kind.last))
        yield from table.operations(kind.first - 1, kind.last, kind.num_buckets)
        return
    mode = "" if kind.mode == "keep" else kind.mode
    stage = chain.alternative(kind.first, kind.last, mode) if mode else chain.stage(kind.first)
    if not stage.reads_output:
        yield from free_op(activation_name(kind.last))
    yield backward_op(kind.first, kind.last, mode=mode)
    if stage.reads_output:
        yield from free_op(activation_name(kind.last))
    if stage.saved_bytes or stage.reads_output:
        yield from free_op(saved_name(kind.last))
    yield from free_op(grad_name(kind.last))


def _nested_edges(
    chain: StageChain, table: CostTable, i: int, j: int, max_points: int, adaptive: bool, streamed_weights: Collection[int]
) -> Iterator[Edge]:
    """Nested edges of a span. A single light stage has none, since it would equal the kept one."""
    if j == i + 1 and chain.stage(j).is_light:
        return
    curve = table.curve(i, j)
    if not curve:
        return
    if len(curve) > max_points:  # the least memory, the least time, and some points between
        curve = [curve[k * (len(curve) - 1) // (max_points - 1)] for k in range(max_points)]
    need_bytes = (
        chain.activation_bytes(k) + chain.stage(k).forward_workspace_bytes + (chain.activation_bytes(k - 1) if k > i + 1 else 0)
        for k in range(i + 1, j + 1)
    )
    forward_need = max(need_bytes)
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
        kind = EdgeKind(first=i + 1, last=j, mode="nested", num_buckets=num_buckets)
        yield _with_weights(chain, edge, kind, streamed_weights)
    if adaptive:
        edge = replace(edge, backward_curve=table.row(i, j), bucket_bytes=table.bucket_bytes)
        yield _with_weights(chain, edge, EdgeKind(first=i + 1, last=j, mode="nested"), streamed_weights)


def _alternative_edges(chain: StageChain, alternative: Alternative, streamed_weights: Collection[int]) -> Iterator[Edge]:
    """Edges of an alternative, between complete cuts and, if it is streamable, between streamed ones."""
    i, j = alternative.first - 1, alternative.last
    x_in, x_out, y_in, y_out = chain.activation_bytes(i), chain.activation_bytes(j), chain.grad_bytes(i), chain.grad_bytes(j)
    source_may = alternative.streamable and (i > 0 or chain.input_may_stream)
    target_may = alternative.streamable and (j < chain.num_stages or chain.output_may_stream)
    for source_streamed in (False, True) if source_may else (False,):
        for target_streamed in (False, True) if target_may else (False,):
            has_input, has_output = not source_streamed, not target_streamed
            edge = Edge(
                source=2 * i + source_streamed,
                target=2 * j + target_streamed,
                forward_seconds=alternative.forward_seconds,
                backward_seconds=alternative.backward_seconds,
                forward_need_bytes=has_output * x_out + alternative.saved_bytes + alternative.forward_workspace_bytes,
                backward_need_bytes=has_input * y_in
                + has_output * (y_out + (x_out if alternative.reads_output else 0))
                + alternative.saved_bytes
                + alternative.backward_workspace_bytes,
                input_bytes=has_input * x_in,
                saved_bytes=alternative.saved_bytes,
                output_bytes=has_output * x_out,
                down_forward_bytes=target_streamed * x_out,
                up_forward_bytes=source_streamed * x_in,
                down_backward_bytes=source_streamed * y_in,
                up_backward_bytes=source_streamed * x_in + target_streamed * (y_out + (x_out if alternative.reads_output else 0)),
                host_bytes=target_streamed * (x_out + y_out),
            )
            yield _with_weights(chain, edge, EdgeKind(first=i + 1, last=j, mode=alternative.mode), streamed_weights)


def _with_weights(chain: StageChain, edge: Edge, kind: EdgeKind, streamed_weights: Collection[int]) -> Edge:
    """The edge with its label, its nodes as cuts, and its streamed weights. A recomputing backward reads them once more."""
    sizes = [chain.stage(i).weight_bytes for i in range(kind.first, kind.last + 1) if i in streamed_weights]
    total, largest = sum(sizes), max(sizes, default=0)
    window_bytes = total if kind.mode not in ("keep", "nested") else largest
    changes: dict[str, object] = {"label": kind}
    if kind.mode == "keep":
        changes |= {"source": 2 * (kind.first - 1), "target": 2 * kind.last}
    if total:
        changes |= {
            "forward_need_bytes": edge.forward_need_bytes + window_bytes,
            "backward_need_bytes": edge.backward_need_bytes + 2 * window_bytes,
            "up_forward_bytes": edge.up_forward_bytes + total,
            "up_backward_bytes": edge.up_backward_bytes + total * (2 if kind.mode == "nested" else 1),
            "down_backward_bytes": edge.down_backward_bytes + total,
        }
    return replace(edge, **changes)  # type: ignore[arg-type]
