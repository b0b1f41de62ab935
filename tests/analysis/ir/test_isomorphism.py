"""Graphs that are equal up to names, and graphs that are not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sft.analysis.ir.graph import Graph, Node, Ref
from sft.analysis.ir.isomorphism import isomorphism, renamed


def _graph(first: str = "relu", second: str = "add", value: float = 1.0) -> Graph:
    shared = {"shape": (2, 3), "dtype": "float32", "itemsize_bytes": 4}
    nodes = (
        Node(name="x", kind="input", target="x", **shared),  # type: ignore[arg-type]
        Node(name=first, kind="operator", target="aten.relu.default", arguments=(("self", Ref("x")),), **shared),  # type: ignore[arg-type]
        Node(
            name=second,
            kind="operator",
            target="aten.add.Tensor",
            arguments=(("self", Ref(first)), ("other", [Ref("x"), value])),
            **shared,  # type: ignore[arg-type]
        ),
    )
    return Graph(nodes=nodes, outputs=(second,), updates=((first, "mean"),), constant_outputs=((1, None),))


def test_names_are_ignored() -> None:
    graph, reference = _graph("relu_7", "add_9"), _graph()
    names = isomorphism(graph, reference)
    assert names == {"x": "x", "relu_7": "relu", "add_9": "add"}
    assert renamed(graph, names) == reference


@pytest.mark.parametrize(
    "change",
    [
        {"outputs": ("relu",)},
        {"updates": ()},
        {"constant_outputs": ((1, 2),)},
        {"nodes": _graph().nodes[:2], "outputs": ("relu",)},
        {"nodes": (*_graph().nodes[:2], replace(_graph().nodes[2], shape=(3, 3)))},
    ],
)
def test_other_differences_count(change: dict[str, Any]) -> None:
    assert isomorphism(_graph(), replace(_graph(), **change)) is None
    assert isomorphism(_graph(), _graph(value=2.0)) is None
