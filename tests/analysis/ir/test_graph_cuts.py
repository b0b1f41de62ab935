"""Cut sets of graphs, and division trees of the same graphs as graphs of values."""

from __future__ import annotations

from math import prod

from hypothesis import given

from sft.analysis.ir.graph_cuts import ValueDag, division_tree
from tests.helpers.dag_nets import Dag as Network
from tests.helpers.dags import dags
from tests.helpers.graph_cuts import Cut, crossing_cuts, separators, value_dag
from tests.helpers.graphs import Built, GraphBuilder, graph_of


def _u_net() -> Built:
    b = GraphBuilder((1, 2, 16, 16))
    b.conv("a", "x", 2)
    b.max_pool("p", "a", 2, 2)
    b.conv("b", "p", 4)
    b.max_pool("q", "b", 2, 2)
    b.conv("c", "q", 8)
    b.upsample("u", "c", 2)
    b.conv("d", "u", 4)
    b.join("j", "d", "b", "cat")
    b.upsample("v", "j", 2)
    b.join("k", "v", "a", "cat")
    b.conv("e", "k", 2)
    return b.build()


def _cuts(built: Built, most_values: int) -> tuple[Cut, ...]:
    return crossing_cuts(built.graph, built.names, built.streamed | {"x"}, built.shapes, most_values=most_values)


def test_the_cut_sets_of_a_u_net() -> None:
    """Sets of one value exist at the ends only; sets of two span the outer skip, sets of three the inner one, too."""
    built = _u_net()
    assert [cut.values for cut in _cuts(built, 1)] == [("x",), ("a",), ("k",), ("e",)]
    assert [cut.values for cut in _cuts(built, 2)] == [("x",), ("a",), ("a", "p"), ("a", "b"), ("a", "j"), ("a", "v"), ("k",), ("e",)]
    assert len(_cuts(built, 3)) == len(built.names) + 1
    size = {name: prod(shape) * built.graph[name].itemsize_bytes for name, shape in built.shapes.items()}
    for cut in _cuts(built, 3):
        assert cut.num_bytes == sum(size[name] for name in cut.values)


@given(dags())
def test_the_cuts_of_one_value_are_the_separators(network: Network) -> None:
    built = graph_of(network)
    names = built.names
    inner = {
        cut.position: cut.values for cut in crossing_cuts(built.graph, names, built.streamed, built.shapes) if 0 < cut.position < len(names)
    }
    known = {position: (value,) for position, value in separators(built.graph, names, built.streamed)}
    results = set(built.graph.live_out(names))
    # An early result crosses every later cut; `separators` of the run alone does not count it.
    assert inner.items() <= known.items()
    if results == {names[-1]}:
        assert inner == known


def test_the_division_of_a_u_net() -> None:
    built = _u_net()
    dag = value_dag(built.graph, built.names, {"x"}, built.shapes)
    assert dag.names == ("x", *built.names)
    tree = division_tree(dag)
    assert tree.kind == "linear"
    assert [dag.names[v] for v in tree.connecting] == ["a", "k"]
    skipped = tree.parts[1]
    assert skipped.kind == "branch"
    assert [division.kind for division in skipped.parts] == ["linear", "edge"]
    assert [dag.names[v] for v in skipped.parts[0].connecting] == ["p", "b", "j", "v"]
    assert tree.inner_bytes == sum(dag.sizes_bytes[1:-1])


def test_several_inputs_and_results_get_common_ends() -> None:
    b = GraphBuilder((1, 2, 8, 8))
    b.image("y", (1, 2, 8, 8))
    b.conv("a", "x", 2)
    b.conv("b", "y", 2)
    b.join("s", "a", "b", "add")
    b.conv("t", "s", 2)
    built = b.build("s", "t")
    dag = value_dag(built.graph, built.names, {"x", "y"}, built.shapes)
    assert dag.names == ("", "x", "y", "a", "b", "s", "t", "")
    assert dag.sizes_bytes[0] == dag.sizes_bytes[-1] == 0
    tree = division_tree(dag)
    assert [dag.names[v] for v in tree.connecting] == ["s"]
    assert [division.kind for division in tree.parts] == ["branch", "branch"]


@given(dags())
def test_every_vertex_has_one_place_in_the_tree(network: Network) -> None:
    built = graph_of(network)
    dag = value_dag(built.graph, built.names, {node.name for node in built.graph.nodes if node.kind == "input"}, built.shapes)
    assert _places(dag) == sorted(range(1, len(dag.sizes_bytes) - 1))


def _places(dag: ValueDag) -> list[int]:
    places: list[int] = []
    waiting = [division_tree(dag)]
    while waiting:
        division = waiting.pop()
        places += division.connecting
        waiting += division.parts
    return sorted(places)
