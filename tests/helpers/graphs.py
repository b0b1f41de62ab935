"""Graphs built by hand, without capture: fast, with names for tests."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any

from sft.analysis.ir.graph import Graph, Node, Ref
from sft.analysis.ir.ops import Operator
from sft.analysis.tiling.operator_run import OperatorRun
from sft.analysis.tiling.phases import PhasedGraph, find_phases
from sft.planner.sized_graph import specialize_phases
from tests.helpers.dag_nets import Activation, AvgPool, Conv, Dag, Join, MaxPool, Norm, Pair, Upsample

__all__ = ["Built", "GraphBuilder", "every_value", "graph_of"]


@dataclass(frozen=True, kw_only=True)
class Built:
    """A sorted graph with the shape of every value."""

    phases: PhasedGraph
    shapes: dict[str, tuple[int, ...]]

    @property
    def graph(self) -> Graph:
        return self.phases.graph

    @property
    def rows(self) -> dict[str, Operator]:
        return self.phases.rows

    @property
    def streamed(self) -> frozenset[str]:
        return self.phases.streamed

    @property
    def names(self) -> tuple[str, ...]:
        """All operators."""
        return tuple(node.name for node in self.graph.operators)

    @property
    def run(self) -> OperatorRun:
        """The first streamed run."""
        return self.phases.run(self.phases.phases[0].streamed)

    @property
    def operators(self) -> OperatorRun:
        """All operators, as one run."""
        return self.phases.run(self.names)

    def extents(self, axis: int = 0) -> dict[str, int]:
        """Extent of every streamed value along an axis."""
        return {name: self.shapes[name][2 + axis] for name in self.streamed}


class GraphBuilder:
    """Builder of a graph, one operator a call; the first argument names its value, the second its operand. The input is ``"x"``."""

    def __init__(self, shape: tuple[int, int, int, int] = (2, 3, 32, 24)) -> None:
        self.shape = shape
        self.inputs = {"x": shape}
        self.channels = {"x": shape[1]}
        self.nodes: list[Node] = [self._node("x", "input", "x", shape)]

    def image(self, name: str, shape: tuple[int, int, int, int]) -> str:
        """Add an input."""
        self.nodes.append(self._node(name, "input", name, shape))
        self.inputs[name], self.channels[name] = shape, shape[1]
        return name

    def conv(
        self,
        name: str,
        source: str,
        channels: int,
        kernel: int | Pair = 3,
        *,
        stride: int | Pair = 1,
        padding: int | Pair | str | None = None,
        dilation: int | Pair = 1,
        groups: int = 1,
    ) -> str:
        """A convolution, size-preserving at stride 1 unless a padding is given."""
        kernel = _pair(kernel)
        weight = self._node(f"{name}_weight", "parameter", f"{name}.weight", (channels, self.channels[source] // groups, *kernel))
        self.nodes.append(weight)
        if padding is None:
            padding = (kernel[0] // 2, kernel[1] // 2)
        arguments = {
            "input": Ref(source),
            "weight": Ref(weight.name),
            "stride": _pair(stride),
            "padding": padding if isinstance(padding, str) else _pair(padding),
            "dilation": _pair(dilation),
            "groups": groups,
            "kernel_size": kernel,
        }
        target = "aten.conv2d.padding" if isinstance(padding, str) else "aten.conv2d.default"
        return self._add(name, target, channels, **arguments)

    def max_pool(
        self,
        name: str,
        source: str,
        kernel: int | Pair,
        stride: int | Pair,
        padding: int | Pair = 0,
        dilation: int | Pair = 1,
        ceil: bool = False,
    ) -> str:
        """A maximum pooling."""
        arguments = {"kernel_size": _pair(kernel), "stride": _pair(stride), "padding": _pair(padding), "dilation": _pair(dilation)}
        return self._add(name, "aten.max_pool2d.default", self.channels[source], self=Ref(source), **arguments, ceil_mode=ceil)

    def avg_pool(self, name: str, source: str, kernel: int | Pair, stride: int | Pair, padding: int | Pair = 0, ceil: bool = False) -> str:
        """An average pooling."""
        arguments = {"kernel_size": _pair(kernel), "stride": _pair(stride), "padding": _pair(padding)}
        return self._add(name, "aten.avg_pool2d.default", self.channels[source], self=Ref(source), **arguments, ceil_mode=ceil)

    def upsample(self, name: str, source: str, factor: int | Pair) -> str:
        """Nearest upsampling."""
        return self._add(name, "aten.upsample_nearest2d.vec", self.channels[source], input=Ref(source), factors=_pair(factor))

    def relu(self, name: str, source: str) -> str:
        """A pointwise operator."""
        return self._add(name, "aten.relu.default", self.channels[source], self=Ref(source))

    def join(self, name: str, first: str, second: str, how: str = "add") -> str:
        """A sum, difference, product or concatenation; ``second`` may be a global value."""
        if how == "cat":
            return self._add(
                name, "aten.cat.default", self.channels[first] + self.channels[second], tensors=(Ref(first), Ref(second)), dim=1
            )
        return self._add(name, f"aten.{how}.Tensor", self.channels[first], self=Ref(first), other=Ref(second))

    def mean(self, name: str, source: str) -> str:
        """A global average, ``[N, C, 1, 1]``."""
        self.channels[name] = channels = self.channels[source]
        arguments = (("self", Ref(source)), ("output_size", (1, 1)))
        self.nodes.append(self._node(name, "operator", "aten.adaptive_avg_pool2d.default", (self.shape[0], channels, 1, 1), arguments))
        return name

    def sigmoid_of_global(self, name: str, source: str) -> str:
        """An operator on a global value: it runs whole."""
        self.channels[name] = channels = self.channels[source]
        self.nodes.append(self._node(name, "operator", "aten.sigmoid.default", (self.shape[0], channels, 1, 1), (("self", Ref(source)),)))
        return name

    def build(self, *outputs: str) -> Built:
        """The sorted graph; the last value is the output unless others are named."""
        phases = find_phases(Graph(nodes=tuple(self.nodes), outputs=outputs or (self.nodes[-1].name,)))
        phases = specialize_phases(phases, {}, self.inputs)
        return Built(phases=phases, shapes={node.name: node.shape for node in phases.graph.nodes})

    def _add(self, name: str, target: str, channels: int, /, **arguments: Any) -> str:
        self.channels[name] = channels
        # The analysis reads only the channels of an image; height and width follow from the table.
        self.nodes.append(self._node(name, "operator", target, (self.shape[0], channels, 0, 0), tuple(arguments.items())))
        return name

    @staticmethod
    def _node(name: str, kind: Any, target: str, shape: tuple[int, ...], arguments: tuple[tuple[str, Any], ...] = ()) -> Node:
        assert prod(shape) >= 0
        return Node(name=name, kind=kind, target=target, shape=shape, dtype="float64", itemsize_bytes=8, arguments=arguments)


def graph_of(dag: Dag) -> Built:
    """The graph of a random network: value ``i`` is called ``v<i>``, the input ``x``, the pooled value of a head ``pooled``."""
    builder = GraphBuilder(dag.shape)
    value = {0: "x"}
    for index, node in enumerate(dag.nodes, start=1):
        name = value[index] = f"v{index}"
        match node:
            case Conv():
                conv = {"stride": node.stride, "padding": node.padding, "dilation": node.dilation, "groups": node.groups}
                builder.conv(name, value[node.source], node.channels, node.kernel, **conv)  # type: ignore[arg-type]
            case MaxPool():
                builder.max_pool(name, value[node.source], node.kernel, node.stride, node.padding, node.dilation, node.ceil_mode)
            case AvgPool():
                builder.avg_pool(name, value[node.source], node.kernel, node.stride, node.padding, node.ceil_mode)
            case Upsample():
                builder.upsample(name, value[node.source], node.factor)
            case Activation() | Norm():
                builder.relu(name, value[node.source])
            case Join():
                builder.join(name, value[node.sources[0]], value[node.sources[1]], node.how)
    outputs = [value[output] for output in dag.outputs]
    if dag.head is not None:
        outputs.append(builder.mean("pooled", value[dag.head.source]))
    return builder.build(*outputs)


def every_value(dag: Dag) -> Dag:
    """The network that returns each of its values, nothing overwritten."""
    nodes = tuple(replace(node, inplace=False) if isinstance(node, Activation) else node for node in dag.nodes)
    return replace(dag, nodes=nodes, outputs=tuple(range(1, len(nodes) + 1)), head=None, structure="flat")


def _pair(value: int | Pair) -> Pair:
    return (value, value) if isinstance(value, int) else value
