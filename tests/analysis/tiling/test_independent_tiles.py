"""Listing 4: the halo of an independent tile, compared with the rows that eager PyTorch reads."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from examples.models import unet
from sft.analysis.frontend.capture import capture
from sft.analysis.passes.infer_attributes import infer_attributes
from sft.analysis.tiling.independent_tiles import independent_tile, tile_lengths
from sft.analysis.tiling.phases import find_phases
from sft.analysis.tiling.strips import NodeRows, OperandRead
from sft.common.interval import Interval
from sft.lower.lower_strip import emit_strip
from sft.planner.plan import SegmentChoice
from sft.planner.region_builder import build_region
from tests.helpers.dag_nets import AvgPool, Conv, Dag, DagNet, MaxPool
from tests.helpers.dags import dags
from tests.helpers.dependence import input_rows, row_dependence
from tests.helpers.graphs import Built, GraphBuilder, every_value, graph_of
from tests.helpers.problems import problem_of


def _tile(built: Built, wanted: dict[str, Interval], axis: int = 0) -> dict[str, NodeRows]:
    step = independent_tile(built.run, built.extents(axis), wanted, axis=axis)
    return {node.name: node for node in step.nodes}


def _paper() -> Built:
    """The forward half of the paper's figure 7: two 3x3 convolutions, each followed by a pool of stride 2."""
    b = GraphBuilder((1, 3, 1024, 512))
    b.conv("c1", "x", 4)
    b.max_pool("p1", "c1", 2, 2)
    b.conv("c2", "p1", 4)
    b.max_pool("p2", "c2", 2, 2)
    return b.build()


def test_sizes_of_the_papers_example() -> None:
    """64 rows of the result, hence 128 after the second convolution, 130 before, 260 after the first, 262 of the input."""
    nodes = _tile(_paper(), {"p2": Interval(64, 128)})
    assert {name: len(node.new) for name, node in nodes.items()} == {"x": 262, "c1": 260, "p1": 130, "c2": 128, "p2": 64}


def test_clipped_at_the_border_in_full() -> None:
    """The first and the last tile lack one row of halo at each convolution, and have padding instead."""
    first, last = _tile(_paper(), {"p2": Interval(0, 64)}), _tile(_paper(), {"p2": Interval(192, 256)})
    assert first["c2"].reads == (OperandRead(operand="p1", rows=Interval(0, 129), pad_low=1, pad_high=0),)
    assert first["c1"].reads == (OperandRead(operand="x", rows=Interval(0, 259), pad_low=1, pad_high=0),)
    assert last["c2"].reads == (OperandRead(operand="p1", rows=Interval(383, 512), pad_low=0, pad_high=1),)
    assert last["x"].new == Interval(765, 1024)
    node = first["c1"]
    assert (node.available, node.kept, node.carried) == (node.new, Interval(258, 258), Interval(0, 0))


def test_axes_are_independent() -> None:
    assert _tile(_paper(), {"p2": Interval(100, 128)}, axis=1)["x"].new == Interval(397, 512)


def test_several_results_and_a_reduction() -> None:
    """A value is needed for the hull of its readers; the mean takes the tile's own share and no halo."""
    b = GraphBuilder((1, 3, 32, 24))
    b.conv("c1", "x", 4)
    b.mean("g", "c1")
    b.conv("c2", "c1", 4, 5)
    built = b.build("c2", "g")
    nodes = _tile(built, {"c1": Interval(8, 16), "c2": Interval(8, 16)})
    assert nodes["c1"].new == Interval(6, 18) and nodes["x"].new == Interval(5, 19)
    assert nodes["g"].reads == (OperandRead(operand="c1", rows=Interval(8, 16), pad_low=0, pad_high=0),)
    shares = [_tile(built, {"c1": i, "c2": i})["g"].reads[0].rows for i in (Interval(0, 10), Interval(10, 20), Interval(20, 32))]
    assert shares == [Interval(0, 10), Interval(10, 20), Interval(20, 32)]


def test_upsampled_rows_are_computed_in_complete_groups() -> None:
    """The kernel reads rows 8 to 14 of the upsampled value; rows 6 to 15 are the copies of input rows 2 to 4."""
    b = GraphBuilder((1, 3, 10, 10))
    b.upsample("up", "x", 3)
    b.conv("c", "up", 4)
    nodes = _tile(b.build(), {"c": Interval(9, 13)})
    assert nodes["c"].reads == (OperandRead(operand="up", rows=Interval(8, 14), pad_low=0, pad_high=0),)
    assert (nodes["up"].new, nodes["x"].new) == (Interval(6, 15), Interval(2, 5))


@pytest.mark.parametrize("kind", ["forward", "joint"])
def test_tiles_can_be_lowered(kind: Literal["forward", "joint"]) -> None:
    """Tiles that recompute halos: a program has no carried rows, and all tiles together do redundant work."""
    problem = problem_of(unet(2, levels=3, width=4), (1, 3, 64, 16), training=True)
    run, phases = problem.sized.phases.phases[0].streamed, problem.sized.phases
    segment = build_region(problem, (SegmentChoice(nodes=run, mode="tiled", strip_rows=64, batch_tile=1),)).segments[0]
    extents = {name: problem.sized.shapes[name][2] for name in phases.streamed}

    def flops(*tiles: Interval) -> int:
        total = 0
        for number, tile in enumerate(tiles):
            step = independent_tile(phases.run(run), extents, {run[-1]: tile}, index=number)
            program = emit_strip(segment.scope, step, kind).finish()
            assert not any(port.role in ("carry", "grad_carry", "append") for port in (*program.ports, *program.results))
            total += program.flops
        return total

    assert 1.5 < flops(*(Interval(start, start + 16) for start in range(0, 64, 16))) / flops(Interval(0, 64)) < 3


def test_an_empty_tile_reads_no_rows() -> None:
    nodes = _tile(_paper(), {"p2": Interval(7, 7)})
    assert not any(node.new or node.reads for node in nodes.values())


class _Net(nn.Module):
    """All kinds of paths: a strided stem, a skip around a pool and an upsampling, a wide and a dilated kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 3, 5, stride=2, padding=1)
        self.down = nn.Conv2d(3, 3, 3, padding=1)
        self.pool = nn.AvgPool2d(2)
        self.up = nn.Upsample(scale_factor=2)
        self.last = nn.Conv2d(6, 2, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        stem = torch.sigmoid(self.stem(x))
        out: torch.Tensor = self.last(torch.cat([self.up(self.down(self.pool(stem))), stem], 1))
        return out


@pytest.mark.parametrize("axis", [0, 1])
def test_input_rows_are_those_with_a_gradient(axis: int) -> None:
    """Rows of the input with a nonzero gradient of a sum over a tile of the output."""
    torch.manual_seed(0)
    model = _Net().double()
    image = torch.randn(1, 2, 42, 26, dtype=torch.float64, requires_grad=True)
    phases = find_phases(infer_attributes(capture(model, [(1, 2, 42, 26)], [torch.float64], torch.device("cpu")).graph))
    run = phases.phases[0].streamed
    # All but the pooled level has the stem's extent; every other extent follows from the table.
    extents = {phases.graph.inputs[0]: image.shape[2 + axis]}
    for name in run:
        node = phases.graph[name]
        operand = next(o for o in node.operands if o in phases.streamed)
        extents[name] = phases.rows[name].extent(node, axis, extents[operand])
    output = model(image)
    height = output.shape[2 + axis]
    for start in range(height):
        for stop in range(start + 1, height + 1):
            (gradient,) = torch.autograd.grad(output.narrow(2 + axis, start, stop - start).sum(), image, retain_graph=True)
            touched = gradient.abs().amax(dim=(0, 1, 3 - axis)).nonzero().flatten()
            step = independent_tile(phases.run(run), extents, {run[-1]: Interval(start, stop)}, axis=axis)
            assert step.nodes[0].new == Interval(int(touched[0]), int(touched[-1]) + 1), (start, stop)


@st.composite
def _tiles(draw: st.DrawFn) -> tuple[Dag, int, int, Interval]:
    """A network, an axis, one of its values, and an interval of it."""
    dag = draw(dags())
    axis, value = draw(st.integers(0, 1)), draw(st.integers(1, len(dag.nodes)))
    extent = graph_of(dag).extents(axis)[f"v{value}"]
    start = draw(st.integers(0, extent - 1))
    return dag, axis, value, Interval(start, draw(st.integers(start + 1, extent)))


@given(case=_tiles())
def test_tiles_of_random_networks(case: tuple[Dag, int, int, Interval]) -> None:
    """A tile has every input row that its results depend on; without holes in kernels, its end rows are needed."""
    dag, axis, value, tile = case
    built = graph_of(dag)
    net = DagNet(every_value(dag))
    dependence = row_dependence(net, dag.shape[1:], axis)[value - 1]
    touched = input_rows(dependence, tile)
    wanted = {f"v{value}": tile}
    step = _tile(built, wanted, axis)
    lengths = tile_lengths(built.run, built.extents(axis), wanted, axis=axis)
    assert lengths == {name: len(node.new) for name, node in step.items() if node.new}
    rows = step["x"].new
    if touched:
        assert rows.contains(Interval(touched[0], touched[-1] + 1))
    if not any(_has_holes(node) for node in dag.nodes):
        assert rows == (Interval(touched[0], touched[-1] + 1) if touched else Interval(rows.start, rows.start))


def _has_holes(node: object) -> bool:
    """True if the node's windows skip rows or columns, or may lie in the padding only."""
    if isinstance(node, Conv | MaxPool | AvgPool):
        dilation = (1, 1) if isinstance(node, AvgPool) else node.dilation
        wide = node.padding != "same" and any(p >= k for p, k in zip(node.padding, node.kernel, strict=True))
        return wide or dilation != (1, 1) or any(s > k for s, k in zip(node.stride, node.kernel, strict=True))
    return False
