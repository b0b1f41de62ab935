"""Prefix tokens: functions of all tokens but the first (a class token, registers) become functions of all tokens.

Rotary position embeddings leave prefix tokens out (EVA-02, DINOv3)::

    cat([q[:, :, :1], q[:, :, 1:] * cos + rotate(q[:, :, 1:]) * sin], dim=2)

The slice and the concatenation shift tokens against each other, so that no operator in between could run for some tokens at a time. This
pass computes the function for all tokens, with its constants padded by ones, and selects::

    where(is_rotated, q * pad(cos) + rotate(q) * pad(sin), q)

The function must compute every token on its own and be linear in the tokens: then it is defined for the prefix, too, and the zero gradient
of the values that are not selected stays zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy as sp

from sft.analysis.ir.graph import Graph, Node, Ref, map_refs
from sft.analysis.ir.ops.sample_axis import SampleAxis, SampleTracker
from sft.analysis.ir.ops.sample_rules import SAMPLE_RULES, with_num_samples
from sft.analysis.ir.targets import ATTENTION

__all__ = ["include_prefix_tokens"]

#: Operators that move elements, or are linear in them.
_LINEAR = frozenset(
    {
        *(f"aten.{name}.default" for name in ("view", "reshape", "_unsafe_view", "unsqueeze", "clone", "alias", "contiguous")),
        *(f"aten.{name}.default" for name in ("permute", "cat", "stack", "expand", "_to_copy", "neg")),
        *(f"aten.{name}.Tensor" for name in ("slice", "mul", "add", "sub")),
        *(f"aten.{name}.int" for name in ("transpose", "select")),
    }
)
_PRODUCTS = frozenset({ATTENTION, *(f"aten.{name}.default" for name in ("matmul", "bmm", "einsum"))})
_RULES = {target: rule for target, rule in SAMPLE_RULES.items() if target in _LINEAR}


def include_prefix_tokens(graph: Graph) -> Graph:
    """Rewrite a graph as described in the module docstring."""
    if not any(_joins_tokens(graph, node) for node in graph.operators):
        return graph
    search = _Search.of(graph)
    rewrites = {node.name: rewrite for node in graph.operators if (rewrite := search.find(node)) is not None}
    replaced = {name for rewrite in rewrites.values() for name in rewrite.inside}
    nodes: dict[str, Node] = {}
    for node in graph.nodes:
        for new in rewrites[node.name].nodes() if node.name in rewrites else [node] if node.name not in replaced else []:
            nodes.setdefault(new.name, new)
    return replace(graph, nodes=tuple(nodes.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rewrite:
    """A concatenation of a function of some tokens with the other tokens.

    Attributes:
        graph: the graph.
        join: the concatenation.
        tokens: the value with all tokens.
        result: the function's result.
        before: tokens before those of the function.
        after: tokens after them.
        num_tokens: all tokens.
        slices: equal slices of the tokens, which the function reads.
        inside: operators of the function in execution order.
        axes: position of the tokens in all of these, and in the constants that have an entry for each token.
        first_equal: for each constant of the graph the first one that is computed alike: blocks compute equal positions.
    """

    graph: Graph
    join: Node
    tokens: str
    result: str
    before: int
    after: int
    num_tokens: int
    slices: Sequence[str]
    inside: Sequence[str]
    axes: Mapping[str, SampleAxis] = field(repr=False)
    first_equal: Mapping[str, str] = field(repr=False)

    def nodes(self) -> Iterator[Node]:
        """The nodes in place of the concatenation."""
        constants = {name: self.first_equal[name] for name in self.axes if name not in {*self.slices, *self.inside}}
        for name, first in constants.items():
            yield self._padded(self.graph[first], self.axes[name], 1.0)
        name = next(iter(constants))
        yield from self._selection(self.graph[constants[name]], self.axes[name])
        new_name = dict.fromkeys(self.slices, self.tokens)
        new_name |= {name: self._padded_name(first, self.axes[name]) for name, first in constants.items()}
        for name in self.inside:
            node = with_num_samples(self.graph[name], self.axes[name], self.num_tokens)
            yield replace(node, arguments=_renamed(node, new_name))
        arguments = (("condition", Ref(self._mask_name)), ("self", Ref(self.result)), ("other", Ref(self.tokens)))
        yield replace(self.join, target="aten.where.self", arguments=arguments)

    @property
    def _mask_name(self) -> str:
        """Name of the condition, which all rewrites with these tokens share."""
        return f"tokens_{self.before}_{self.num_tokens}_{self.after}_{self._trailing_rank}__selected"

    @property
    def _trailing_rank(self) -> int:
        """Dimensions from that of the tokens on."""
        dim: int = self.join.argument("dim", 0) % len(self.join.shape)
        return len(self.join.shape) - dim

    def _padded_name(self, name: str, axis: SampleAxis) -> str:
        return f"{name}__padded_{axis.dim}_{self.before * axis.inner}_{self.after * axis.inner}"

    def _padded(self, node: Node, axis: SampleAxis, value: float) -> Node:
        """A constant with entries for the other tokens."""
        pad = (0, 0) * (len(node.shape) - 1 - axis.dim) + (self.before * axis.inner, self.after * axis.inner)
        shape = axis.resize(node.shape, self.num_tokens)
        return _operator(
            self._padded_name(node.name, axis), "aten.pad.default", shape, node, {"pad": pad, "mode": "constant", "value": value}
        )

    def _selection(self, constant: Node, axis: SampleAxis) -> Iterator[Node]:
        """True for the tokens of the function, made from one of its constants, on whose device it is."""
        node, prefix = constant, self._mask_name
        for dim in reversed(range(len(constant.shape))):
            if dim != axis.dim:
                shape = (*node.shape[:dim], *node.shape[dim + 1 :])
                node = _operator(f"{prefix}_{dim}", "aten.select.int", shape, node, {"dim": dim, "index": 0})
                yield node
        taken = self.num_tokens - self.before - self.after
        slice_arguments = {"dim": 0, "start": 0, "end": taken * axis.inner, "step": axis.inner}
        node = _operator(f"{prefix}_tokens", "aten.slice.Tensor", (taken,), node, slice_arguments)
        yield node
        node = _operator(f"{prefix}_ones", "aten.ones_like.default", (taken,), node, {})
        yield node
        shape = (taken, *(1,) * (self._trailing_rank - 1))
        node = _operator(f"{prefix}_view", "aten.view.default", shape, node, {"size": shape})
        yield node
        node = self._padded(node, SampleAxis(dim=0), 0.0)
        yield node
        node = _operator(prefix, "aten.ne.Scalar", node.shape, node, {"other": 0})
        yield replace(node, dtype="bool", itemsize_bytes=1)


def _operator(name: str, target: str, shape: Sequence[Any], operand: Node, arguments: Mapping[str, Any]) -> Node:
    """An operator on one operand, of its element type."""
    return Node(
        name=name,
        kind="operator",
        target=target,
        shape=tuple(shape),
        dtype=operand.dtype,
        itemsize_bytes=operand.itemsize_bytes,
        arguments=(("self", Ref(operand.name)), *arguments.items()),
        module_path=operand.module_path,
    )


def _renamed(node: Node, names: Mapping[str, str]) -> tuple[tuple[str, Any], ...]:
    return tuple((key, map_refs(value, lambda name: Ref(names.get(name, name)))) for key, value in node.arguments)


def _joins_tokens(graph: Graph, node: Node) -> bool:
    """True for a concatenation of a function of some tokens with slices of a value that has all tokens."""
    if node.target != "aten.cat.default":
        return False
    dim = node.argument("dim", 0) % len(node.shape)
    sliced = [_sliced(graph, name, dim) for name in node.operands]
    return sliced.count(None) == 1 and len(sliced) > 1 and isinstance(node.shape[dim], int)


def _sliced(graph: Graph, name: str, dim: int) -> tuple[str, int, int] | None:
    """The value that an operator takes a slice of along a dimension of known extent, with the bounds of the slice."""
    node = graph[name]
    if node.target != "aten.slice.Tensor" or node.argument("step", 1) != 1:
        return None
    (source,) = node.operands
    shape = graph[source].shape
    if node.argument("dim", 0) % len(shape) != dim or not isinstance(shape[dim], int):
        return None
    extent, start, end = shape[dim], node.argument("start") or 0, node.argument("end")
    if not isinstance(start, int) or not isinstance(end, int | None):
        return None
    return source, *slice(start, end).indices(extent)[:2]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Search:
    """Search for rewrites.

    Attributes:
        graph: the graph, possibly with symbolic sizes.
        constants: values that depend on no input, each with the first one that is computed alike.
    """

    graph: Graph
    constants: Mapping[str, str]

    @classmethod
    def of(cls, graph: Graph) -> _Search:
        constants: dict[str, str] = {}
        first: dict[str, str] = {}
        for node in graph.nodes:
            if node.kind != "input" and not node.effect and constants.keys() >= set(node.operands):
                key = node.name if node.kind != "operator" else repr((node.target, _renamed(node, constants)))
                constants[node.name] = first.setdefault(key, node.name)
        return cls(graph=graph, constants=constants)

    def find(self, join: Node) -> _Rewrite | None:
        """The rewrite of a concatenation; ``None`` if it is none of a function of tokens with other tokens."""
        graph = self.graph
        if not _joins_tokens(graph, join) or not self._feeds_product(join):
            return None
        dim = join.argument("dim", 0) % len(join.shape)
        (result,) = (name for name in join.operands if _sliced(graph, name, dim) is None)
        before = _num_before(graph, join, result, dim)
        num_taken = graph[result].shape[dim]
        tokens = next(sliced[0] for name in join.operands if (sliced := _sliced(graph, name, dim)) is not None)
        is_complete = graph[tokens].shape == join.shape and graph[tokens].dtype == join.dtype == graph[result].dtype
        if before is None or not is_complete or not isinstance(num_taken, int) or num_taken < 2:
            return None
        slices, inside = self._function(join, result, (tokens, before, before + num_taken), dim)
        axes = self._token_axes(slices, inside, dim, num_taken) if slices else None
        if axes is None or axes[result] != SampleAxis(dim=dim) or len(axes) == len(slices) + len(inside):
            return None
        after = join.shape[dim] - before - num_taken
        return _Rewrite(
            graph=graph,
            join=join,
            tokens=tokens,
            result=result,
            before=before,
            after=after,
            num_tokens=join.shape[dim],
            slices=slices,
            inside=inside,
            axes=axes,
            first_equal=self.constants,
        )

    def _feeds_product(self, join: Node) -> bool:
        """True if a value is an operand of attention, as it is or after operators that move elements or scale them."""
        waiting, seen = [join.name], {join.name}
        while waiting:
            for name in self.graph.users[waiting.pop()]:
                if self.graph[name].target in _PRODUCTS:
                    return True
                if self.graph[name].target in _LINEAR and name not in seen:
                    seen.add(name)
                    waiting.append(name)
        return False

    def _function(self, join: Node, result: str, taken: tuple[str, int, int], dim: int) -> tuple[Sequence[str], Sequence[str]]:
        """The slices that a function reads, and its operators in execution order; empty if it is read elsewhere, or is no such function."""
        graph, waiting, seen, leaves = self.graph, [result], {result}, []
        while waiting:
            node = graph[waiting.pop()]
            if _sliced(graph, node.name, dim) == taken:
                leaves.append(node.name)
                continue
            if node.target not in _RULES:
                return (), ()
            fresh = {name for name in node.operands if name not in seen and name not in self.constants}
            seen |= fresh
            waiting += sorted(fresh)
        operators = seen.difference(leaves)
        is_read_elsewhere = any(user not in seen and user != join.name for name in operators for user in graph.users[name])
        if not operators or is_read_elsewhere or not operators.isdisjoint(graph.results):
            return (), ()
        return leaves, tuple(node.name for node in graph.operators if node.name in operators)

    def _token_axes(self, slices: Sequence[str], inside: Sequence[str], dim: int, num_tokens: int) -> Mapping[str, SampleAxis] | None:
        """Position of the tokens in the operators of a function, and in its constants; ``None`` if an operator exchanges tokens."""
        tracker = _TokenTracker(
            graph=self.graph,
            rows={},
            streamed=frozenset(),
            per_sample=frozenset(),
            num_samples=num_tokens,
            rules=_RULES,
            image_rules={},
            axes=dict.fromkeys(slices, SampleAxis(dim=dim)),
        )
        is_followed = all(tracker.track(_at_one_size(self.graph[name])) for name in inside) and not tracker.read_in_full
        return tracker.axes if is_followed and all(axis.outer == 1 for axis in tracker.axes.values()) else None


def _num_before(graph: Graph, join: Node, result: str, dim: int) -> int | None:
    """Tokens before those of a function; ``None`` if the other operands of the concatenation are not the tokens around it, in order."""
    start, before, sources = 0, 0, set()
    for name in join.operands:
        extent, sliced = graph[name].shape[dim], _sliced(graph, name, dim)
        if name == result:
            before = start
        elif sliced is None or sliced[1:] != (start, start + extent):
            return None
        else:
            sources.add(sliced[0])
        start += extent
    return before if len(sources) == 1 else None


class _TokenTracker(SampleTracker):
    """Propagates tokens through operators of which no row of the operator table is known yet."""

    def _axis_of(self, node: Node) -> SampleAxis | None:
        rule = self.rules.get(node.target)
        return rule(self, node) if rule is not None and any(name in self.axes for name in node.operands) else None

    def shape(self, name: str) -> tuple[int, ...]:
        return _at_one_size(self.graph[name]).shape


def _at_one_size(node: Node) -> Node:
    """The node with a number for each symbol of its shape."""
    if all(isinstance(extent, int) for extent in node.shape):
        return node
    extents = [sp.sympify(extent) for extent in node.shape]
    symbols = sorted({symbol for extent in extents for symbol in extent.free_symbols}, key=str)
    sizes = {symbol: 1009 + 1000 * int.from_bytes(str(symbol).encode()) for symbol in symbols}
    return replace(node, shape=tuple(int(extent.subs(sizes)) for extent in extents))
