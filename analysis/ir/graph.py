"""The captured model as immutable data: nodes in topological order, each with the one value that it computes.

Shapes are SymPy expressions in the input's height and width (plain integers where the capture found them constant), so one graph serves
every image size. This module does not depend on torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import sympy as sp

from sft.analysis.ir.axes import Axes

__all__ = ["Graph", "Node", "NodeKind", "Ref", "SideEffect", "SymbolicNumber", "label_range", "map_refs", "refs_in"]

NodeKind = Literal["input", "parameter", "buffer", "constant", "seed", "operator"]
SideEffect = Literal["", "draws", "writes"]


@dataclass(frozen=True, slots=True)
class Ref:
    """A reference to a node's value in another node's arguments."""

    name: str


@dataclass(frozen=True, slots=True)
class SymbolicNumber:
    """A fractional number that `forward` computes from sizes, such as ``1 / x.shape[-1]``, in a node's arguments.

    It is evaluated as Python does, call by call: algebra on sizes would round differently, or not at all.

    Attributes:
        function: the function called.
        arguments: its arguments: sizes as expressions, numbers, and nested symbolic numbers.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]

    def at(self, size: Callable[[sp.Basic], int]) -> Any:
        """Evaluate the number; ``size`` gives the value of an expression."""
        return self.function(*(_evaluate_number(argument, size) for argument in self.arguments))

    def folded(self) -> Any:
        """The number itself if no size in it is unknown; else unchanged."""
        is_known = not any(isinstance(argument, (sp.Basic, SymbolicNumber)) for argument in self.arguments)
        return self.function(*self.arguments) if is_known else self


def _evaluate_number(value: Any, size: Callable[[sp.Basic], int]) -> Any:
    if isinstance(value, SymbolicNumber):
        return value.at(size)
    return size(value) if isinstance(value, sp.Basic) else value


_FLOATING_DTYPES = frozenset({"float16", "bfloat16", "float32", "float64"})


@dataclass(frozen=True, kw_only=True)
class Node:
    """One value of the model.

    Attributes:
        name: unique in the graph.
        kind: origin of the value.
        target: the operator (``"aten.conv2d.default"``); for parameters and buffers their qualified name.
        arguments: the operator's arguments in schema order, by name; tensors are represented by :class:`Ref`.
        shape: extents, symbolic in the input's height and width.
        dtype: element type without the ``torch.`` (``"float32"``).
        itemsize_bytes: bytes of one element.
        module_path: the qualified name of the module that called the operator (``""`` is the model itself).
        effect: side effect of the operator: it draws random numbers, or writes into its operands.
    """

    name: str
    kind: NodeKind
    target: str
    shape: tuple[sp.Expr | int, ...]
    dtype: str
    itemsize_bytes: int
    arguments: tuple[tuple[str, Any], ...] = ()
    module_path: str = ""
    effect: SideEffect = ""

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of the values that the operator reads, in order; a value that is read twice occurs twice."""
        return tuple(refs_in(tuple(value for _, value in self.arguments)))

    def argument(self, name: str, default: Any = None) -> Any:
        """The argument called ``name``."""
        return self._by_name.get(name, default)

    @cached_property
    def _by_name(self) -> dict[str, Any]:
        return dict(self.arguments)

    def with_shape(self, shape: tuple[int, ...]) -> Node:
        """A copy with these extents, which are numbers. Cached attributes of the arguments are shared."""
        if shape == self.shape and all(type(extent) is int for extent in self.shape):
            return self
        resized = copy(self)
        object.__setattr__(resized, "shape", shape)
        return resized

    @property
    def is_complex(self) -> bool:
        """True if the elements are complex numbers."""
        return self.dtype.startswith("complex")

    @property
    def is_floating(self) -> bool:
        """True if the elements are floating-point numbers, not integers or booleans."""
        return self.dtype in _FLOATING_DTYPES

    @property
    def label(self) -> str:
        """Module path and operator, for messages."""
        operator = self.target.removeprefix("aten.").removeprefix("sft.").split(".")[0]
        return f"{self.module_path or '(the model itself)'}: {operator}"


def label_range(first: str, last: str) -> str:
    """Labels of the first and the last operator of a run, one label if they are the same."""
    return first if first == last else f"{first} .. {last}"


def refs_in(value: Any) -> Iterator[str]:
    """Names referred to in an argument, in order."""
    if isinstance(value, Ref):
        yield value.name
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from refs_in(item)


def map_refs(value: Any, replace: Callable[[str], Any]) -> Any:
    """An argument with every reference replaced."""
    if isinstance(value, Ref):
        return replace(value.name)
    if isinstance(value, (tuple, list)):
        return type(value)(map_refs(item, replace) for item in value)
    return value


@dataclass(frozen=True, kw_only=True)
class Graph:
    """Nodes in topological order.

    Attributes:
        nodes: inputs, parameters, buffers and operators.
        outputs: names of the values that the model returns, in order.
        updates: values that become a buffer's content after the model has run, with the buffer's qualified name.
        axes: the spatial axes of its images.
        constant_outputs: non-tensor results of the model (``None``, strings, numbers), each with its position among all results.
    """

    nodes: tuple[Node, ...]
    outputs: tuple[str, ...]
    updates: tuple[tuple[str, str], ...] = ()
    axes: Axes = field(default_factory=Axes)
    constant_outputs: tuple[tuple[int, Any], ...] = ()
    _index: dict[str, int] = field(init=False, repr=False, compare=False)
    _node_of: dict[str, Node] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        index = {node.name: position for position, node in enumerate(self.nodes)}
        object.__setattr__(self, "_index", index)
        object.__setattr__(self, "_node_of", {node.name: node for node in self.nodes})
        for position, node in enumerate(self.nodes):
            for name in node.operands:
                if index.get(name, position) >= position:
                    raise ValueError(f"{node.name} reads {name}, which does not come before it")

    def __getitem__(self, name: str) -> Node:
        return self._node_of[name]

    def position(self, name: str) -> int:
        """Index of a node in the topological order."""
        return self._index[name]

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """Names of the model's tensor inputs, in order."""
        return tuple(node.name for node in self.nodes if node.kind == "input")

    @cached_property
    def leaves(self) -> tuple[Node, ...]:
        """The nodes that are not operators, in order."""
        return tuple(node for node in self.nodes if node.kind != "operator")

    @cached_property
    def seeds(self) -> tuple[str, ...]:
        """Names of the seeds of random numbers: none or one."""
        return tuple(node.name for node in self.nodes if node.kind == "seed")

    @cached_property
    def call_leaves(self) -> frozenset[str]:
        """Names of the leaves that differ from call to call: inputs and seeds."""
        return frozenset((*self.inputs, *self.seeds))

    @cached_property
    def results(self) -> tuple[str, ...]:
        """The values that the graph must deliver, each once: outputs, then updates."""
        return tuple(dict.fromkeys((*self.outputs, *(name for name, _ in self.updates))))

    @cached_property
    def _results(self) -> frozenset[str]:
        return frozenset(self.results)

    def ancestors(self, names: Collection[str]) -> frozenset[str]:
        """The values that ``names`` depend on, ``names`` included."""
        reached = set(names)
        for node in reversed(self.nodes):
            if node.name in reached:
                reached.update(node.operands)
        return frozenset(reached)

    def descendants(self, names: Collection[str]) -> frozenset[str]:
        """The values that depend on ``names``, ``names`` included."""
        reached = set(names)
        for node in self.nodes:
            if not reached.isdisjoint(node.operands):
                reached.add(node.name)
        return frozenset(reached)

    def without_dead_operators(self) -> Graph:
        """Dead-code elimination: drop operators and parameters that no result depends on; inputs stay."""
        needed = self.ancestors(self.results)
        return replace(self, nodes=tuple(node for node in self.nodes if node.name in needed or node.kind == "input"))

    def sources(self, names: Sequence[str], among: Collection[str]) -> tuple[str, ...]:
        """Values among ``among`` that the operators ``names`` read from outside their own set, in order."""
        inside = set(names)
        return tuple(dict.fromkeys(o for name in names for o in self[name].operands if o in among and o not in inside))

    def live_out(self, names: Sequence[str]) -> tuple[str, ...]:
        """Values of the operators ``names`` that are results, or that operators outside ``names`` read."""
        inside, results, users = set(names), self._results, self.users
        return tuple(name for name in names if name in results or not inside.issuperset(users[name]))

    @cached_property
    def operators(self) -> tuple[Node, ...]:
        """The operator nodes, in order."""
        return tuple(node for node in self.nodes if node.kind == "operator")

    @cached_property
    def users(self) -> dict[str, tuple[str, ...]]:
        """For each value the operators that read it, in order."""
        users: dict[str, list[str]] = {node.name: [] for node in self.nodes}
        for node in self.nodes:
            for name in dict.fromkeys(node.operands):
                users[name].append(node.name)
        return {name: tuple(names) for name, names in users.items()}
