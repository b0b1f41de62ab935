"""Fused-tileable dimensions and separators, on graphs small enough to check by hand and on random ones by definition."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from examples.models import freeze_norm, resnet18, unet
from sft.analysis.frontend.capture import capture
from sft.analysis.ir.axes import Axes
from sft.analysis.ir.graph import Node
from sft.analysis.ir.graph_cuts import cut_positions
from sft.analysis.ir.ops import Operator
from sft.analysis.passes.infer_attributes import infer_attributes
from sft.analysis.tiling.phases import PhasedGraph, find_phases
from sft.analysis.tiling.sft_partition import (
    DimensionComponent,
    ValueDimension,
    dimension_components,
    dimension_names,
    fused_components,
    fused_dimensions,
)
from tests.helpers.dag_nets import Dag
from tests.helpers.dags import dags
from tests.helpers.graph_cuts import fused_segments, separators
from tests.helpers.graphs import Built, GraphBuilder, graph_of

DIMENSIONS = dimension_names(Axes(2))


def _fused(built: Built, *names: str) -> tuple[str, ...]:
    return fused_dimensions(built.phases.run(names))


def _separators(built: Built) -> list[tuple[int, str]]:
    return separators(built.graph, built.names, built.streamed)


def _segments(built: Built, *wanted: str) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    segments = fused_segments(built.operators, wanted)
    return [(segment.names, segment.dimensions) for segment in segments]


def _chain() -> Built:
    """The kind of pipeline of the paper's figure 6: two convolutions, a max pool, and a global pool."""
    b = GraphBuilder()
    b.conv("c1", "x", 8)
    b.conv("c2", "c1", 8)
    b.max_pool("p", "c2", 2, 2)
    b.mean("g", "p")
    return b.build()


# -- dimensions -----------------------------------------------------------------------------------------------------------


def test_chain_splits_where_the_paper_splits_it() -> None:
    built = _chain()
    assert _fused(built, "c1", "c2", "p", "g") == ("batch",)
    assert _fused(built, "c1", "c2", "p") == ("batch", "height", "width")
    assert _fused(built, "p") == DIMENSIONS
    assert _fused(built) == ()
    assert _segments(built, "height") == [(("c1", "c2", "p"), ("batch", "height", "width"))]
    assert _segments(built, "batch") == [(("c1", "c2", "p", "g"), ("batch",))]
    assert _segments(built, "channel") == [(("p", "g"), ("batch", "channel"))]


def test_components_of_a_chain_in_full() -> None:
    b = GraphBuilder()
    b.conv("c", "x", 8)
    b.relu("r", "c")
    built = b.build()
    both, relu = frozenset({"c", "r"}), frozenset({"r"})
    expected = {
        DimensionComponent(vertices=frozenset(ValueDimension(value, d) for value in ("x", "c", "r")), operators=both) for d in (0, 2, 3)
    } | {DimensionComponent(vertices=frozenset({ValueDimension("c", 1), ValueDimension("r", 1)}), operators=relu)}
    assert set(dimension_components(built.operators)) == expected


def test_residual_and_concatenation() -> None:
    b = GraphBuilder((2, 8, 32, 24))
    b.relu("r", "x")
    b.join("sum", "r", "x")
    b.join("cat", "sum", "r", "cat")
    built = b.build()
    assert _fused(built, "r", "sum") == DIMENSIONS
    assert _fused(built, "r", "sum", "cat") == ("batch", "height", "width")


@pytest.mark.parametrize(
    ("groups", "inputs", "outputs", "keeps"),
    [(8, 8, 8, True), (1, 8, 8, False), (2, 8, 8, False), (1, 8, 1, False), (1, 1, 1, False)],
)
def test_only_depthwise_convolutions_keep_channels(groups: int, inputs: int, outputs: int, keeps: bool) -> None:
    b = GraphBuilder((2, inputs, 32, 24))
    b.relu("r", "x")
    b.conv("c", "r", outputs, groups=groups)
    built = b.build()
    assert ("channel" in _fused(built, "r", "c")) == keeps


def test_global_pool_in_the_middle() -> None:
    """Squeeze and excite: values between the pool and the product are no images."""
    b = GraphBuilder((2, 8, 32, 24))
    b.conv("c1", "x", 8)
    b.mean("g", "c1")
    b.sigmoid_of_global("s", "g")
    b.join("gated", "c1", "s", "mul")
    b.conv("c2", "gated", 8)
    built = b.build()
    assert built.names == ("c1", "g", "s", "gated", "c2")
    assert _fused(built, *built.names) == ()
    assert _fused(built, "c1", "g") == ("batch",)
    assert _fused(built, "gated", "c2") == ("batch", "height", "width")
    # Between c1 and the product both c1 and values computed from it are needed; no single value separates them.
    assert _separators(built) == [(1, "c1"), (4, "gated")]
    assert _segments(built, "height") == [(("c1",), ("batch", "height", "width")), (("c2",), ("batch", "height", "width"))]


def test_chains_side_by_side() -> None:
    """Two images that join later are traversed together, along the dimensions that both allow; no component has both."""
    b = GraphBuilder((2, 8, 32, 24))
    b.image("y", (2, 8, 32, 24))
    b.relu("rx", "x")
    b.conv("cy", "y", 8)
    built = b.build("rx", "cy")
    assert fused_components(built.operators) == ()
    assert _fused(built, "rx", "cy") == ("batch", "height", "width")
    assert _fused(built, "rx") == DIMENSIONS


class _Transposes(Operator):
    """Not in the table: a join of an image with its transpose."""

    def dimension_map(self, node: Node, axes: Axes) -> tuple[int | None, ...]:
        return (0, 1, 3, 2) if node.name == "t" else Operator.dimension_map(self, node, axes)


def test_a_component_with_two_dimensions_of_one_value_is_no_tile() -> None:
    b = GraphBuilder((2, 8, 32, 32))
    b.relu("t", "x")
    b.join("sum", "t", "x")
    built = b.build()
    run = replace(built.operators, rows={**built.rows, "t": _Transposes(name="pointwise")})
    assert fused_dimensions(run) == ("batch", "channel")
    assert fused_dimensions(run.of(["t"])) == DIMENSIONS


# -- separators -----------------------------------------------------------------------------------------------------------


def _captured(model: nn.Module, size: int) -> PhasedGraph:
    return find_phases(infer_attributes(capture(model, [(1, 3, size, size)], [torch.float32], torch.device("cpu")).graph))


def _operator(phases: PhasedGraph, name: str) -> str:
    return phases.graph[name].target.removeprefix("aten.").split(".")[0]


def test_separators_of_resnet18() -> None:
    """The stem's four operators, and in each block the sum and the ReLU after it; inside a block the skip crosses too."""
    phases = _captured(freeze_norm(resnet18(2, width=4)), 64)
    run = phases.phases[0].streamed
    positions = separators(phases.graph, run, phases.streamed)
    assert [_operator(phases, value) for _, value in positions] == [
        "conv2d", "_native_batch_norm_legit_no_training", "relu", "max_pool2d", *["add", "relu"] * 8,
    ]  # fmt: skip
    # Blocks have 5 operators between, 7 with a convolution and a norm on the skip; the pooled mean reads the last ReLU.
    assert [b - a for (a, _), (b, _) in pairwise(positions[3:])] == [6, 1, 6, 1, *[8, 1, 6, 1] * 3]
    position, value = positions[-1]
    assert run[position] == phases.graph.users[value][0]
    whole = fused_segments(phases.run(run[:position]))
    assert [(segment.names, segment.dimensions) for segment in whole] == [(run[:position], ("batch", "height", "width"))]


def test_separators_of_a_unet() -> None:
    """Between the first level's last ReLU and the last concatenation, which reads it, at least two values cross."""
    phases = _captured(unet(2, levels=4, width=4), 64)
    run = phases.phases[0].streamed
    positions = separators(phases.graph, run, phases.streamed)
    kinds = [_operator(phases, value) for _, value in positions]
    assert kinds == ["conv2d", "relu", "conv2d", "relu", "cat", "conv2d", "relu", "conv2d", "relu"]
    assert [position for position, _ in positions] == [1, 2, 3, 4, *range(len(run) - 5, len(run))]


@given(dag=dags())
def test_separators_are_minimum_cuts(dag: Dag) -> None:
    """The definition on random graphs: a position is a separator if one value before it has readers after it."""
    built = graph_of(dag)
    graph, names = built.graph, built.names
    cuts = {}
    for cut in range(1, len(names)):
        before = {*graph.inputs, *names[:cut]}
        crossing = {o for name in names[cut:] for o in graph[name].operands if o in before}
        if len(crossing) == 1:
            cuts[cut] = crossing.pop()
    assert dict(_separators(built)) == cuts
    assert cut_positions(graph, names, built.streamed) == (0, *cuts, len(names))


def test_a_run_without_operators_has_one_cut_position() -> None:
    assert cut_positions(_chain().graph, (), frozenset()) == (0,)


@given(dag=dags(), wanted=st.sampled_from(DIMENSIONS))
def test_segments_are_maximal(dag: Dag, wanted: str) -> None:
    """Exactly the runs between separators that are fused-tileable and that no other such run contains."""
    built = graph_of(dag)
    cuts = cut_positions(built.graph, built.names, built.streamed)
    legal = {(a, b) for i, a in enumerate(cuts) for b in cuts[i + 1 :] if wanted in _fused(built, *built.names[a:b])}
    maximal = {(a, b) for a, b in legal if not any((c, d) != (a, b) and c <= a and b <= d for c, d in legal)}
    assert {names for names, _ in _segments(built, wanted)} == {built.names[a:b] for a, b in maximal}
