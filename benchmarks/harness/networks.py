"""Real networks as graphs of values, and their training step with any set of checkpoints, on meta tensors.

A network is traced with `torch.fx`; its tensors are the vertices. An in-place operator shares the vertex of the tensor that it overwrites.
A view has no bytes. The indices of max pooling (eight bytes each) are a weight of its edge. The step with checkpoints runs each independent
segment between them under `torch.utils.checkpoint`, which recomputes it with everything kept, as Feng and Huang do.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import networkx as nx
import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

import sft
from sft.analysis.ir.graph_cuts import ValueDag
from sft.solvers.chain import Stage, StageChain

__all__ = ["Network", "Roofline", "trace"]

_VIEWS = frozenset({"flatten", "view", "reshape", "getattr", "size", "getitem", "add_scalar"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Roofline model of a device: an operator takes the longer time of computation and transfer, and a time to start.

    Attributes:
        flops_per_second: multiplications and additions a second.
        bytes_per_second: of the device's memory.
        start_seconds: to start an operator.
    """

    flops_per_second: float = 19.5e12
    bytes_per_second: float = 1.5e12
    start_seconds: float = 5e-6

    def seconds(self, flops: float, num_bytes: float) -> float:
        """Time of one operator."""
        return self.start_seconds + max(flops / self.flops_per_second, num_bytes / self.bytes_per_second)


@dataclass(frozen=True, kw_only=True)
class Network:
    """A traced network at one size.

    Attributes:
        module: the traced module, on the meta device, in training mode.
        shape: of its input.
        groups: for each vertex its operators, in order; the last one's value is the vertex. The first vertex is the input.
        dag: the vertices.
    """

    module: fx.GraphModule
    shape: tuple[int, ...]
    groups: tuple[tuple[fx.Node, ...], ...]
    dag: ValueDag

    def step_peak_bytes(self, checkpoints: Sequence[int] | None = None) -> int:
        """Peak of forward and backward, above input, parameters and their gradients, which exist before; the loss is a sum."""
        x = torch.zeros(self.shape, device="meta")
        for parameter in self.module.parameters():
            parameter.grad = torch.zeros_like(parameter)
        with sft.measure_peak("meta") as peak:
            run: Callable[[Tensor], Tensor] = self.module if checkpoints is None else self._checkpointed(frozenset(checkpoints))
            run(x).sum().backward()
        return peak.num_bytes

    def _checkpointed(self, chosen: frozenset[int]) -> Callable[[Tensor], Tensor]:
        graph = nx.DiGraph(self.dag.edges)
        last = len(self.groups) - 1
        feeding: dict[int, list[tuple[int, frozenset[int]]]] = {v: [] for v in chosen}
        for component in nx.weakly_connected_components(graph.subgraph(set(graph) - chosen)):
            (source,) = {a for v in component for a in graph.predecessors(v)} - component
            (target,) = {b for v in component for b in graph.successors(v)} - component
            feeding[target].append((source, frozenset(component)))

        def run(x: Tensor) -> Tensor:
            values: dict[int, Any] = {0: x}
            for target in sorted(chosen - {0}):
                feeds = feeding[target]
                direct = any(a in chosen for a in graph.predecessors(target))
                if len(feeds) == 1 and not direct:
                    source, inside = feeds[0]
                    order = (*sorted(inside), target)
                    segment = self._segment(source, order, (target,))
                    made = segment(values[source]) if target == last else _again(segment, values[source])
                    values[target] = made[0]
                    continue
                here = {a: values[a] for a in graph.predecessors(target) if a in chosen}
                for source, inside in feeds:
                    ends = tuple(sorted(a for a in graph.predecessors(target) if a in inside))
                    here.update(zip(ends, _again(self._segment(source, tuple(sorted(inside)), ends), values[source]), strict=True))
                values[target] = self._run_group(target, here)
            result: Tensor = values[last]
            return result

        return run

    def _segment(self, source: int, order: tuple[int, ...], ends: tuple[int, ...]) -> Callable[[Tensor], tuple[Tensor, ...]]:
        def run(x: Tensor) -> tuple[Tensor, ...]:
            values: dict[int, Any] = {source: x}
            for v in order:
                values[v] = self._run_group(v, values)
            return tuple(values[v] for v in ends)

        return run

    def _run_group(self, vertex: int, values: dict[int, Any]) -> Any:
        """Run the operators of a vertex, given the vertices that it reads."""
        inner: dict[fx.Node, Any] = {}

        def value(node: fx.Node) -> Any:
            return inner[node] if node in inner else values[self._vertex_of[node]]

        for node in self.groups[vertex]:
            args, kwargs = fx.map_arg(node.args, value), fx.map_arg(node.kwargs, value)
            if node.op == "call_module":
                inner[node] = self.module.get_submodule(str(node.target))(*args, **kwargs)
            elif node.op == "call_function":
                inner[node] = node.target(*args, **kwargs)  # type: ignore[operator]
            else:
                inner[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
        return inner[self.groups[vertex][-1]]

    @cached_property
    def _vertex_of(self) -> dict[fx.Node, int]:
        return {node: v for v, group in enumerate(self.groups) for node in group}

    def chain(self, device: Roofline) -> StageChain:
        """The chain of its single-tensor cuts, with a device's times; the stage saves all values between two cuts."""
        cuts = [0, *self._separators(), len(self.groups) - 1]
        stages = []
        for a, b in pairwise(cuts):
            inside = range(a + 1, b)
            costs = [self._cost(node) for v in (*inside, b) for node in self.groups[v]]
            edges = [bytes_ for (u, v), bytes_ in self.dag.edge_bytes.items() if a <= u and v <= b]
            output = self.dag.sizes_bytes[b]
            stages.append(
                Stage(
                    forward_seconds=sum(device.seconds(flops, moved) for flops, moved in costs),
                    backward_seconds=sum(device.seconds(2 * flops, 2 * moved) for flops, moved in costs),
                    output_bytes=output,
                    grad_bytes=output,
                    saved_bytes=sum(self.dag.sizes_bytes[v] for v in inside) + sum(edges),
                    reads_output=any(_reads_output(self.module, node) for node in self.groups[b]),
                )
            )
        return StageChain(input_bytes=self.dag.sizes_bytes[0], stages=tuple(stages))

    def _separators(self) -> list[int]:
        reach, positions = max(self.dag.successors[0]), []
        for v in range(1, len(self.groups) - 1):
            # an alias (a view) is not a cut of its own: its bytes are those of its base
            if reach <= v and self.dag.sizes_bytes[v]:
                positions.append(v)
            reach = max(reach, *self.dag.successors[v])
        return positions

    def _cost(self, node: fx.Node) -> tuple[float, float]:
        """FLOPs and bytes of an operator's forward."""
        if _name(self.module, node) in _VIEWS:
            return 0.0, 0.0
        out = node.meta["shape"].numel()
        moved = 4.0 * (out + sum(i.meta["shape"].numel() for i in node.all_input_nodes if i.meta.get("shape") is not None))
        if node.op != "call_module":
            return float(out), moved
        layer = self.module.get_submodule(str(node.target))
        if isinstance(layer, nn.Conv2d):
            return 2.0 * out * layer.in_channels // layer.groups * layer.kernel_size[0] * layer.kernel_size[1], moved
        if isinstance(layer, nn.Linear):
            return 2.0 * out * layer.in_features, moved + 4.0 * layer.weight.numel()
        return float(out), moved


def trace(model: nn.Module, shape: tuple[int, ...]) -> Network:
    """Trace a network that lives on the meta device; its result is one tensor."""
    module = fx.symbolic_trace(model.train())
    _chain_concatenations(module)
    _Shapes(module).run(torch.zeros(shape, device="meta"))
    nodes = [node for node in module.graph.nodes if node.op not in ("output", "get_attr")]
    groups: list[list[fx.Node]] = []
    vertex_of: dict[fx.Node, int] = {}
    for node in nodes:
        sources = [i for i in node.all_input_nodes if i in vertex_of]
        if sources and _in_place(module, node):
            groups[vertex_of[sources[0]]].append(node)
            vertex_of[node] = vertex_of[sources[0]]
        else:
            vertex_of[node] = len(groups)
            groups.append([node])
    sizes, edges, noted = [], set(), {}
    for v, group in enumerate(groups):
        last = group[-1]
        is_view = _name(module, group[0]) in _VIEWS or not isinstance(last.meta.get("shape"), torch.Size)
        sizes.append(0 if is_view else 4 * last.meta["shape"].numel())
        for node in group:
            for i in node.all_input_nodes:
                if i in vertex_of and vertex_of[i] != v:
                    edges.add((vertex_of[i], v))
                    if _name(module, node) == "maxpool":
                        noted[vertex_of[i], v] = 8 * node.meta["shape"].numel()
    dag = ValueDag(sizes_bytes=tuple(sizes), edges=tuple(sorted(edges)), edge_bytes=noted)
    return Network(module=module, shape=shape, groups=tuple(tuple(group) for group in groups), dag=dag)


def _chain_concatenations(module: fx.GraphModule) -> None:
    """Make a concatenation that begins with all operands of an earlier one from the earlier result.

    DenseNet concatenates every layer's input anew from all features before it; so no single value would cut a dense block. Feng and Huang's
    networks concatenate step by step, which is the same values.
    """
    earlier: list[fx.Node] = []
    for node in module.graph.nodes:
        if node.op != "call_function" or node.target is not torch.cat:
            continue
        operands = tuple(node.args[0])
        for before in reversed(earlier):
            known = tuple(before.meta["parts"])
            if len(known) < len(operands) and operands[: len(known)] == known:
                node.args = ([before, *operands[len(known) :]], *node.args[1:])
                break
        node.meta["parts"] = operands
        earlier.append(node)
    module.recompile()


def _again(segment: Callable[[Tensor], tuple[Tensor, ...]], x: Tensor) -> tuple[Tensor, ...]:
    made: tuple[Tensor, ...] = checkpoint(segment, x, use_reentrant=False, preserve_rng_state=False)
    return made


class _Shapes(fx.Interpreter):
    """Interpreter that records the shape of every value."""

    def run_node(self, n: fx.Node) -> Any:
        with torch.no_grad():
            result = super().run_node(n)
        n.meta["shape"] = result.shape if isinstance(result, Tensor) else None
        return result


def _name(module: fx.GraphModule, node: fx.Node) -> str:
    """Short name of operators with a rule of their own."""
    if node.op == "call_module":
        return "maxpool" if isinstance(module.get_submodule(str(node.target)), nn.MaxPool2d) else ""
    if node.op == "call_method":
        return str(node.target)
    if node.target is operator.getitem:
        return "getitem"
    name = getattr(node.target, "__name__", "")
    return "maxpool" if "max_pool2d" in name else str(name)


def _in_place(module: fx.GraphModule, node: fx.Node) -> bool:
    if node.op == "call_module":
        return bool(getattr(module.get_submodule(str(node.target)), "inplace", False))
    return bool(node.kwargs.get("inplace", False)) or node.target is operator.iadd


def _reads_output(module: fx.GraphModule, node: fx.Node) -> bool:
    """True if the operator's backward reads its result, as ReLU's does."""
    if node.op == "call_module":
        return isinstance(module.get_submodule(str(node.target)), (nn.ReLU, nn.ReLU6))
    return getattr(node.target, "__name__", "") == "relu"
