"""The paper's must-tile / may-tile partition (Listing 3) on graphs small enough to check by hand, and on random ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sft.analysis.tiling.sft_partition import Partition, least_tile_bytes, partition
from tests.helpers.dag_nets import Dag, Join
from tests.helpers.dags import dags
from tests.helpers.graphs import Built, GraphBuilder, graph_of

#: One channel of a ``[1, C, 64, 48]`` float64 image.
_PLANE_BYTES = 64 * 48 * 8


def _partition(built: Built, limit_bytes: int) -> Partition:
    return partition(built.operators, built.shapes, limit_bytes)


def _shown(partition: Partition) -> list[tuple[str, ...]]:
    """Operators by segment; a tiled one is marked by a leading star."""
    return [(("*",) if segment.tiled else ()) + segment.names for segment in partition.segments]


def _down() -> Built:
    b = GraphBuilder((1, 3, 64, 48))
    b.conv("c1", "x", 8)
    b.conv("c2", "c1", 8)
    b.max_pool("p1", "c2", 2, 2)
    b.conv("c3", "p1", 8)
    b.max_pool("p2", "c3", 2, 2)
    b.conv("c4", "p2", 8)
    return b.build()


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (8 * _PLANE_BYTES + 1, [("c1", "c2", "p1", "c3", "p2", "c4")]),
        (8 * _PLANE_BYTES, [("*", "c1", "c2", "p1"), ("c3", "p2", "c4")]),  # a value that fills the memory does not fit
        (2 * _PLANE_BYTES + 1, [("*", "c1", "c2", "p1"), ("c3", "p2", "c4")]),
        (2 * _PLANE_BYTES, [("*", "c1", "c2", "p1", "c3", "p2"), ("c4",)]),
    ],
)
def test_partition_of_a_chain(limit: int, expected: list[tuple[str, ...]]) -> None:
    partition = _partition(_down(), limit)
    assert _shown(partition) == expected
    assert not partition.problems
    assert all(segment.dimensions == ("batch", "height", "width") for segment in partition.segments if segment.tiled)


def test_partition_out_of_memory() -> None:
    """No segment can end if not even the result fits: the paper's out of memory."""
    partition = _partition(_down(), _PLANE_BYTES // 2)
    assert _shown(partition) == [("*", "c1", "c2", "p1", "c3", "p2", "c4")]
    assert len(partition.problems) == 1 and f"holds {_PLANE_BYTES // 2} bytes" in partition.problems[0]


def test_partition_follows_a_skip_to_its_post_dominator() -> None:
    """c1 does not fit and the sum reads it, so the pools in between, which fit, cannot be checkpoints."""
    b = GraphBuilder((1, 3, 64, 48))
    b.conv("c1", "x", 8)
    b.max_pool("p1", "c1", 4, 4)
    b.conv("c2", "p1", 8)
    b.upsample("u", "c2", 4)
    b.join("sum", "u", "c1")
    b.max_pool("p2", "sum", 4, 4)
    b.conv("c3", "p2", 8)
    assert _shown(_partition(b.build(), 8 * _PLANE_BYTES)) == [("*", "c1", "p1", "c2", "u", "sum", "p2"), ("c3",)]


def test_partition_grows_transitively() -> None:
    """c0 is completed at c1, but c1 does not fit either and is read by the sum."""
    b = GraphBuilder((1, 3, 64, 48))
    b.conv("c0", "x", 8)
    b.conv("c1", "c0", 8)
    b.max_pool("p1", "c1", 4, 4)
    b.upsample("u", "p1", 4)
    b.join("sum", "u", "c1")
    b.max_pool("p2", "sum", 4, 4)
    b.conv("c3", "p2", 8)
    assert _shown(_partition(b.build(), 8 * _PLANE_BYTES)) == [("*", "c0", "c1", "p1", "u", "sum", "p2"), ("c3",)]


def test_partition_includes_a_branch_inside_the_range() -> None:
    """As in the listing a segment is a range of the order: q fits, lies inside of one, and its reader joins the segment."""
    b = GraphBuilder((1, 3, 64, 48))
    b.conv("c1", "x", 8)
    b.max_pool("q", "x", 4, 4)
    b.max_pool("p1", "c1", 4, 4)
    b.conv("c2", "p1", 3)
    b.join("late", "c2", "q")
    b.conv("c3", "late", 8)
    assert _shown(_partition(b.build(), 8 * _PLANE_BYTES)) == [("*", "c1", "q", "p1", "c2", "late"), ("c3",)]


def test_partition_with_an_output_inside() -> None:
    """q leaves the network, so only the network's end post-dominates all paths from c1."""
    b = GraphBuilder((1, 3, 64, 48))
    b.conv("c1", "x", 8)
    b.max_pool("q", "c1", 4, 4)
    b.max_pool("p", "c1", 4, 4)
    b.join("sum", "q", "p")
    b.conv("c2", "sum", 8)
    assert _shown(_partition(b.build(), 8 * _PLANE_BYTES)) == [("*", "c1", "q", "p", "sum"), ("c2",)]
    both = _partition(b.build("q", "c2"), 8 * _PLANE_BYTES)
    assert _shown(both) == [("*", "c1", "q", "p", "sum", "c2")] and not both.problems


def test_partition_reports_untileable_segments() -> None:
    """The gate makes the whole image wait, and the image does not fit."""
    b = GraphBuilder((1, 3, 64, 48))
    b.conv("c1", "x", 8)
    b.mean("g", "c1")
    b.join("gated", "c1", "g", "mul")
    b.max_pool("p", "gated", 4, 4)
    partition = _partition(b.build(), 8 * _PLANE_BYTES)
    assert [segment.dimensions for segment in partition.segments] == [("batch",)]
    assert len(partition.problems) == 1 and "smallest tile (batch)" in partition.problems[0]


def test_least_tile_by_hand() -> None:
    """One pixel after a 3x3 convolution and a 2x2 pool: 4x4 of the input's 3 channels, 2x2 of 8, and 8 of the result."""
    b = GraphBuilder((2, 3, 32, 24))
    b.conv("c", "x", 8)
    b.max_pool("p", "c", 2, 2)
    built = b.build()

    def least(*dimensions: str) -> int:
        return least_tile_bytes(built.operators, built.shapes, dimensions)

    assert least("batch", "height", "width") == 8 * (3 * 4 * 4 + 8 * 2 * 2 + 8)
    assert least("height", "width") == 2 * least("batch", "height", "width")
    assert least("batch", "height") == 8 * (3 * 4 * 24 + 8 * 2 * 24 + 8 * 12)
    assert least("batch") == 8 * (3 * 32 * 24 + 8 * 32 * 24 + 8 * 16 * 12)


@given(dag=dags(), limit_kib=st.integers(1, 80))
def test_partition_of_random_graphs(dag: Dag, limit_kib: int) -> None:
    """Every operator occurs once, in order; results of a segment fit, or the partition reports it; no cut could be earlier."""
    read = {source for node in dag.nodes for source in (node.sources if isinstance(node, Join) else (node.source,))}
    unread = {value for value in range(1, len(dag.nodes) + 1)} - read  # captures have no unused operators
    built = graph_of(replace(dag, outputs=tuple(sorted(unread.union(dag.outputs)))))
    graph, limit = built.graph, limit_kib * 1024
    partition = _partition(built, limit)
    assert tuple(name for segment in partition.segments for name in segment.names) == built.names

    def fits(name: str) -> bool:
        size = graph[name].itemsize_bytes
        for extent in built.shapes[name]:
            size *= extent
        return size < limit

    for segment in partition.segments:
        if not segment.tiled:
            assert all(fits(name) for name in segment.names)
            continue
        inside = set(segment.names)
        leaves = [name for name in segment.names if name in graph.outputs or not inside.issuperset(graph.users[name])]
        assert not fits(segment.names[0])
        assert segment.problem or all(fits(name) for name in leaves)
        # A shorter segment would end with a value that does not fit, or with a value that has readers in a later segment.
        for stop in range(1, len(segment.names)):
            shorter = set(segment.names[:stop])
            crossing = [n for n in shorter if n in graph.outputs or not shorter.issuperset(graph.users[n])]
            assert crossing != [segment.names[stop - 1]] or not fits(crossing[0])
