"""Builder of a :class:`Graph` from a functionalized program: nodes, sizes as SymPy expressions, guards and bounds of symbols."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import sympy as sp
import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import CustomObjArgument

from sft.analysis.frontend.functionalize import FunctionalProgram
from sft.analysis.frontend.side_effect_checks import storage_key
from sft.analysis.ir.axes import Axes
from sft.analysis.ir.graph import Graph, Node, NodeKind, Ref, SideEffect, SymbolicNumber, refs_in
from sft.analysis.ir.ops.resampling import DEVICE_TYPE, is_interpolation
from sft.analysis.ir.repeat_op import REPEAT, REPEAT_NEXT, RepeatHandle
from sft.analysis.ir.symbolic import expr_from_torch, extent_from_torch
from sft.common.errors import UnsupportedError
from sft.common.torch_internals import OpOverload, op_schema

__all__ = ["build_graph", "module_path_of", "substitute_sizes", "symbol_bounds", "symbol_guards", "tied_sizes"]


def symbol_bounds(program: ExportedProgram) -> tuple[tuple[sp.Expr, int, int | None], ...]:
    """Smallest and largest value (``None``: no limit) of each symbol, and of each size that the model relates to a symbol."""
    bounds = []
    for size, interval in program.range_constraints.items():
        # The exporter's default lower bound of 2 excludes the sizes 0 and 1, which it specializes.
        low, high = _finite_bound(interval.lower), _finite_bound(interval.upper)
        bounds.append((expr_from_torch(size), low or 0, None if high is None or high >= 2**62 else high))
    return tuple(bounds)


def _finite_bound(value: sp.Expr) -> int | None:
    """A bound as a number; ``None`` for any of SymPy's infinities."""
    return int(value) if value.is_Integer else None


def symbol_guards(program: ExportedProgram) -> tuple[sp.Basic, ...]:
    """Relations between the symbols under which the model takes the exported branches."""
    for node in program.graph.nodes:
        for size in getattr(node.meta.get("val"), "shape", ()) if node.op == "placeholder" else ():
            if isinstance(size, torch.SymInt):
                env = size.node.shape_env
                return tuple(dict.fromkeys(expr_from_torch(env.replace(guard.expr)) for guard in env.guards))
    return ()


def build_graph(functional: FunctionalProgram, repetitions: Sequence[RepeatHandle] = ()) -> Graph:
    """Build the graph of a program.

    Args:
        functional: the program.
        repetitions: repeated blocks; nodes refer to them by index.

    Raises:
        UnsupportedError: a graph cannot express the program: calls of functions that are not operators, no tensor among the outputs.
    """
    builder = _GraphBuilder(functional, repetitions)
    for fx_node in functional.nodes:
        builder.add(fx_node)
    builder.add_outputs(functional)
    if builder.problems:
        raise UnsupportedError(builder.problems)
    constants = {guard.lhs: guard.rhs for guard in symbol_guards(functional.program) if isinstance(guard, sp.Eq) and guard.rhs.is_Integer}
    constants |= dict(pair for node in builder.nodes.values() if (pair := _bincount_size(node)) is not None)
    graph = Graph(
        nodes=tuple(builder.nodes.values()),
        outputs=tuple(builder.outputs),
        updates=tuple(builder.updates),
        axes=Axes.of_inputs([node.shape for node in builder.nodes.values() if node.kind == "input"]),
        constant_outputs=tuple(builder.constant_outputs),
    )
    return substitute_sizes(graph, constants).without_dead_operators()


def _bincount_size(node: Node) -> tuple[sp.Basic, sp.Integer] | None:
    """Number of counts of a `bincount` node, as a symbol of the exporter and as its `minlength`, which is taken as the number."""
    minlength = dict(node.arguments).get("minlength", 0) if node.target == "aten.bincount.default" else 0
    return (node.shape[0], sp.Integer(minlength)) if minlength and isinstance(node.shape[0], sp.Symbol) else None


def substitute_sizes(graph: Graph, known: Mapping[Any, Any]) -> Graph:
    """Substitute expressions of sizes in a graph. (The exporter leaves the factors of an extent that ``view`` splits as unknowns.)"""

    def substitute(value: Any) -> Any:
        if isinstance(value, SymbolicNumber):
            return replace(value, arguments=substitute(value.arguments)).folded()
        if isinstance(value, sp.Basic):
            size = value.xreplace(known)
            return int(size) if size.is_Integer else size
        return type(value)(substitute(item) for item in value) if isinstance(value, (tuple, list)) else value

    if not known:
        return graph
    nodes = (
        replace(node, shape=substitute(node.shape), arguments=tuple((name, substitute(value)) for name, value in node.arguments))
        for node in graph.nodes
    )
    return replace(graph, nodes=tuple(nodes), constant_outputs=substitute(graph.constant_outputs))


def tied_sizes(graph: Graph, shapes: Sequence[Sequence[int]]) -> dict[sp.Symbol, sp.Symbol]:
    """Symbols of input sizes that equal those of an earlier input at capture: labels, masks, the second image of a pair.

    The exporter has a symbol for each size. Where operators do not compare them (a loss that gathers by labels), it does not see that they
    are equal, and results would have a size of neither input.
    """
    ties: dict[sp.Symbol, sp.Symbol] = {}
    first: dict[tuple[int, int], sp.Symbol] = {}
    for name, shape in zip(graph.inputs, shapes, strict=True):
        if not graph.axes.is_image_shape(shape):
            continue
        for axis, (symbol, extent) in enumerate(zip(graph.axes.of(graph[name].shape), graph.axes.of(shape), strict=True)):
            if isinstance(symbol, sp.Symbol) and (other := first.setdefault((axis, extent), symbol)) is not symbol:
                ties[symbol] = other
    return ties


class _GraphBuilder:
    """Converts a program node by node.

    *Grad-tracked* values depend on an input, a parameter, a buffer or a differentiable constant, and not through ``detach`` alone.
    """

    def __init__(self, functional: FunctionalProgram, repetitions: Sequence[RepeatHandle]) -> None:
        signature = functional.program.graph_signature
        self._repetitions = repetitions
        self.nodes: dict[str, Node] = {}
        self.outputs: list[str] = []
        self.updates: list[tuple[str, str]] = []
        self.constant_outputs: list[tuple[int, Any]] = []
        self.problems: list[str] = []
        self._leaves: dict[str, tuple[NodeKind, str]] = {
            **{name: ("parameter", target) for name, target in signature.inputs_to_parameters.items()},
            **{name: ("buffer", target) for name, target in signature.inputs_to_buffers.items()},
            **{name: ("constant", target) for name, target in signature.inputs_to_lifted_tensor_constants.items()},
        }
        self._alias: dict[str, str] = {}
        self._casts: dict[tuple[str, torch.dtype], str] = {}
        self._scalars: dict[str, Any] = {}
        self._grad_tracked: set[str] = set()
        unregistered = {storage_key(tensor) for tensor, _ in functional.unregistered}
        constants = functional.program.constants
        self._differentiable_constants = {
            name for name, target in signature.inputs_to_lifted_tensor_constants.items() if storage_key(constants[target]) in unregistered
        }

    def add(self, fx_node: torch.fx.Node) -> None:
        """Convert one node."""
        value: Any = fx_node.meta.get("val")
        if fx_node.op == "placeholder":
            if isinstance(value, CustomObjArgument):
                self.problems += [_non_tensor_read_problem(user) for user in fx_node.users]
                return
            kind, target = self._leaves.get(fx_node.name, ("input", fx_node.name))
            self._add(fx_node.name, kind, target, value)
        elif isinstance(value, (torch.SymInt, int, float, torch.SymFloat, bool, torch.SymBool)):
            self._scalars[fx_node.name] = self._number(fx_node, value)
        elif value is None and not fx_node.users:
            pass  # an assertion on metadata; shapes and dtypes are checked at each call
        elif fx_node.op != "call_function":
            self.problems.append(f"{fx_node.name}: {fx_node.op} nodes are not supported; write the model with plain operators")
        elif fx_node.target is operator.getitem:
            self._add_result(fx_node, value)
        else:
            self._add_operator(fx_node, value)

    def _add(
        self,
        name: str,
        kind: NodeKind,
        target: str,
        value: torch.Tensor,
        arguments: Sequence[tuple[str, Any]] = (),
        module_path: str = "",
        effect: SideEffect = "",
    ) -> None:
        self.nodes[name] = Node(
            name=name,
            kind=kind,
            target=target,
            shape=tuple(extent_from_torch(size) for size in value.shape),
            dtype=str(value.dtype).removeprefix("torch."),
            itemsize_bytes=value.dtype.itemsize,
            arguments=tuple(arguments),
            module_path=module_path,
            effect=effect,
        )
        if (
            kind in ("input", "parameter", "buffer")
            or name in self._differentiable_constants
            or (
                target not in (_DETACH, REPEAT_NEXT)
                and not self._grad_tracked.isdisjoint(refs_in(tuple(argument for _, argument in arguments)))
            )
        ):
            self._grad_tracked.add(name)

    def add_outputs(self, functional: FunctionalProgram) -> None:
        """Convert the outputs and buffer updates of the program."""
        self.updates += [(self._alias.get(name, name), buffer) for name, buffer in functional.updates.items()]
        for position, output in enumerate(functional.outputs):
            if isinstance(output, torch.fx.Node) and output.name not in self._scalars:
                self.outputs.append(self._alias.get(output.name, output.name))
            else:
                self.constant_outputs.append((position, self._convert(output)))
        if not self.outputs:
            self.problems.append("(the model itself): returns no tensor, so there is nothing to compute; return what you train on")

    def _add_result(self, fx_node: torch.fx.Node, value: torch.Tensor) -> None:
        """Convert one of several results. The first result of some operators stands for the operator itself."""
        source, index = fx_node.args
        assert isinstance(source, torch.fx.Node) and isinstance(index, int)
        target = str(source.target)
        if target in _FIRST_RESULT_OPS:
            if index == 0:
                self._alias[fx_node.name] = source.name
            else:
                self._add(fx_node.name, "operator", "getitem", value, (("source", self._convert(source)), ("index", index)))
            return
        node = self.nodes[source.name]
        if target == REPEAT:
            if index == 0:
                self._alias[fx_node.name] = source.name
            else:
                next_arguments = (("source", Ref(source.name)), ("index", index - 1))
                self._add(fx_node.name, "operator", REPEAT_NEXT, value, next_arguments, node.module_path)
            return
        if target in _SPLIT_OPS:
            arguments = _split_arguments(node, source.meta["val"], index)
            target = "aten.select.int" if target == "aten.unbind.int" else "aten.slice.Tensor"
        else:
            arguments = (*node.arguments, ("result", index))
        self._add(fx_node.name, "operator", target, value, arguments, node.module_path, node.effect)

    def _add_operator(self, fx_node: torch.fx.Node, value: Any) -> None:
        arguments = [(name, self._convert(argument)) for name, argument in _named_arguments(fx_node)]
        target = str(fx_node.target)
        if target.startswith("aten.embedding_renorm"):
            path = module_path_of(fx_node) or "(the model itself)"
            self.problems.append(f"{path}: embedding: max_norm writes into its weights; scale them outside, under torch.no_grad")
        if target in _NEW_FACTORIES:
            target, options = _NEW_FACTORIES[target], {"dtype": value.dtype, "device": value.device}
            arguments = [(name, options.get(name, argument)) for name, argument in arguments if name != "self"]
        if is_interpolation(target) and value.device.type == "cuda":
            arguments.append((DEVICE_TYPE, value.device.type))
        if target == REPEAT:
            arguments[-1] = ("which", self._repetitions[arguments[-1][1]])
        if target == "aten.copy.default" and all(_has_same_shape_and_dtype(value, source) for source in fx_node.args[:2]):
            destination, source = (next(refs_in(argument)) for _, argument in arguments[:2])
            if self._differentiated_leaves(destination) <= self._differentiated_leaves(source):
                self._alias[fx_node.name] = source
                return
        if target == _DETACH and self._grad_tracked.isdisjoint(refs_in(arguments[0][1])):
            target = _ALIAS  # the operand has no gradient already
        if target in _IDENTITY_OPS or (target in _CAST_OPS and value.dtype == _dtype_of(fx_node.args[0])):
            self._alias[fx_node.name] = next(refs_in(tuple(argument for _, argument in arguments)))
            return
        if target in _CAST_OPS:
            operand = next(refs_in(tuple(argument for _, argument in arguments)))
            if self.nodes[operand].kind not in ("input", "operator"):
                # Autocast casts a weight once, also where several layers share it.
                first_cast = self._casts.setdefault((operand, value.dtype), fx_node.name)
                if first_cast != fx_node.name:
                    self._alias[fx_node.name] = first_cast
                    return
        first = value[0] if isinstance(value, (tuple, list)) else value
        self._add(fx_node.name, "operator", target, first, arguments, module_path_of(fx_node), _side_effect(fx_node.target))

    def _differentiated_leaves(self, name: str) -> frozenset[str]:
        """The inputs and parameters that a gradient of a value reaches, also one of zeros: that of a value which a copy overwrites."""
        leaves: set[str] = set()
        seen, pending = {name}, [name] if name in self._grad_tracked else []
        while pending:
            node = self.nodes[pending.pop()]
            if node.kind in ("input", "parameter"):
                leaves.add(node.name)
            operands = self._grad_tracked.intersection(node.operands) - seen
            seen |= operands
            pending += operands
        return frozenset(leaves)

    def _number(self, fx_node: torch.fx.Node, value: Any) -> Any:
        """Convert a number computed from sizes."""
        if isinstance(value, torch.SymInt):
            return extent_from_torch(value)
        if not isinstance(value, (torch.SymFloat, torch.SymBool)):
            return value
        if fx_node.kwargs or not callable(fx_node.target):
            self.problems.append(f"{fx_node.name}: {fx_node.target} of sizes is not supported; compute the number of them in another way")
            return 0
        return SymbolicNumber(fx_node.target, tuple(self._convert(argument) for argument in fx_node.args))

    def _convert(self, value: Any) -> Any:
        """Convert an argument: nodes to references, symbolic sizes to SymPy."""
        if isinstance(value, torch.fx.Node):
            if value.name in self._scalars:
                return self._scalars[value.name]
            return Ref(self._alias.get(value.name, value.name))
        if isinstance(value, (list, tuple)):
            return tuple(self._convert(item) for item in value)
        return extent_from_torch(value) if isinstance(value, torch.SymInt) else value


def _has_same_shape_and_dtype(value: torch.Tensor, fx_node: Any) -> bool:
    """Return true where a tensor has the shape and dtype of a node's value."""
    other = fx_node.meta["val"]
    return bool(other.dtype == value.dtype and tuple(map(extent_from_torch, other.shape)) == tuple(map(extent_from_torch, value.shape)))


def _dtype_of(fx_node: Any) -> torch.dtype:
    dtype = fx_node.meta["val"].dtype
    assert isinstance(dtype, torch.dtype)
    return dtype


_DETACH, _ALIAS = "aten.detach.default", "aten.alias.default"

#: Copies and markers that change neither values nor gradients.
_IDENTITY_OPS = frozenset({"aten.clone.default", "aten.contiguous.default", _ALIAS, "aten.lift_fresh_copy.default"})

#: Casts; they are identities where the dtype is the same already.
_CAST_OPS = frozenset({"aten._to_copy.default", "aten.to.dtype", "aten.to.dtype_layout", "aten.to.device"})

#: Factories that take only dtype and device from an operand, and their form without the operand.
_NEW_FACTORIES = {
    "aten.new_zeros.default": "aten.zeros.default",
    "aten.new_ones.default": "aten.ones.default",
    "aten.new_full.default": "aten.full.default",
    "aten.new_empty.default": "aten.empty.memory_format",
}

#: Operators whose first result stands for the operator itself.
_FIRST_RESULT_OPS = frozenset(
    {
        "aten._native_batch_norm_legit_no_training.default",
        "aten._native_batch_norm_legit_functional.default",
        "aten._native_batch_norm_legit.no_stats",
        "aten.native_dropout.default",
    }
)


#: Operators whose results are slices of their operand along a dimension.
_SPLIT_OPS = frozenset(
    {
        "aten.split.Tensor",
        "aten.split_with_sizes.default",
        "aten.chunk.default",
        "aten.unbind.int",
        "aten.unsafe_split.Tensor",
        "aten.unsafe_chunk.default",
        "aten.tensor_split.sections",
    }
)


def _split_arguments(node: Node, slices: Sequence[torch.Tensor], index: int) -> tuple[tuple[str, Any], ...]:
    """Arguments of the ``slice`` (for ``unbind``: ``select``) that equals result ``index``."""
    dim, operand = node.argument("dim", 0), node.argument("self")
    if node.target == "aten.unbind.int":
        return (("self", operand), ("dim", dim), ("index", index))
    start = sum((extent_from_torch(each.shape[dim]) for each in slices[:index]), start=0)
    end = start + extent_from_torch(slices[index].shape[dim])
    return (("self", operand), ("dim", dim), ("start", start), ("end", end), ("step", 1))


def _named_arguments(fx_node: torch.fx.Node) -> list[tuple[str, Any]]:
    """Positional and keyword arguments by schema name, defaults filled in."""
    named = []
    overload = fx_node.target
    if not isinstance(overload, OpOverload):
        wrapped = next((argument for argument in fx_node.args if isinstance(argument, OpOverload)), overload)
        path = module_path_of(fx_node) or "(the model itself)"
        raise UnsupportedError([f"{path}: {wrapped} is not an ATen operator; write the model with plain operators"])
    for position, argument in enumerate(op_schema(overload).arguments):
        if position < len(fx_node.args):
            named.append((argument.name, fx_node.args[position]))
        elif argument.name in fx_node.kwargs:
            named.append((argument.name, fx_node.kwargs[argument.name]))
        elif argument.has_default_value():
            named.append((argument.name, argument.default_value))
    return named


def _side_effect(overload: Any) -> SideEffect:
    if not isinstance(overload, OpOverload):
        return ""
    if op_schema(overload).is_mutable:
        return "writes"
    return "draws" if torch.Tag.nondeterministic_seeded in overload.tags else ""


def _non_tensor_read_problem(fx_node: torch.fx.Node) -> str:
    """Refusal of an operator that reads an object that is not a tensor."""
    return (
        f"{module_path_of(fx_node) or '(the model itself)'}: {fx_node.name} reads an object that is not a tensor, "
        "such as a torch.Generator; compute that outside of the compiled model, as a buffer or an input"
    )


def module_path_of(fx_node: torch.fx.Node) -> str:
    """Path of the module whose `forward` calls a node's operator; empty for the model itself."""
    stack = fx_node.meta.get("nn_module_stack") or {}
    path = list(stack.values())[-1][0] if stack else ""
    return "" if path.startswith("_empty_nn_module_stack") else path
