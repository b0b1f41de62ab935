"""From an ``nn.Module`` to a :class:`Graph`: the only part of the analysis that knows torch.

``torch.export`` traces the model on fake tensors whose height and width are symbols, so a 100,000 x 100,000 image costs
no memory and one capture serves every size that satisfies the export's guards. ``run_decompositions({})`` then removes
in-place forms while keeping composite operators (``conv2d``, ``max_pool2d``) whole. Where the model fixes its own size the
export makes the extents constant, and so does a second attempt where its solver fails on a size expression; such a capture
serves that one size and the caller captures again for another.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sympy as sp
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

from sft.analysis.graph import Graph, Node, Ref, map_refs
from sft.errors import InputError, UnsupportedError

__all__ = ["Capture", "capture", "dtype_name"]

_STREAMED_RANK = 4


@dataclass(frozen=True, kw_only=True)
class Capture:
    """A captured model and how its symbols follow from the inputs' shapes.

    Attributes:
        graph: the model; dead operators are gone.
        out_spec: the pytree of the model's return value, over ``graph.outputs``.
        bounds: for each symbol the smallest and largest value that the capture holds for.
        guards: relations between the symbols under which the model took the path that was captured.
        shapes: the inputs' shapes at capture, for which it holds by definition.
    """

    graph: Graph
    out_spec: pytree.TreeSpec
    bounds: tuple[tuple[sp.Symbol, int, int | None], ...]
    guards: tuple[sp.Basic, ...]
    shapes: tuple[tuple[int, ...], ...]

    def bind(self, shapes: Sequence[tuple[int, ...]]) -> dict[sp.Symbol, int] | None:
        """The symbols' values for these input shapes; ``None`` when the capture does not hold for them."""
        values: dict[sp.Symbol, int] = {}
        for name, shape in zip(self.graph.inputs, shapes, strict=True):
            expected = self.graph[name].shape
            if len(expected) != len(shape):
                return None
            for extent, size in zip(expected, shape, strict=True):
                if isinstance(extent, sp.Symbol):
                    if values.setdefault(extent, size) != size:
                        return None
                elif isinstance(extent, int):
                    if extent != size:
                        return None
                else:
                    return None
        for symbol, low, high in self.bounds:
            value = values.get(symbol)
            if value is not None and (value < low or (high is not None and value > high)):
                return None
        if tuple(shapes) == self.shapes or all(guard.subs(values) is sp.true for guard in self.guards):
            return values
        return None


def capture(model: nn.Module, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> Capture:
    """Trace ``model`` on inputs of these shapes (height and width of rank-4 inputs symbolic).

    Raises:
        UnsupportedError: torch.export cannot follow the model.
        InputError: the model itself refuses inputs of this shape.
    """
    program = _export(model, shapes, dtype, device)
    return Capture(
        graph=_without_dead_operators(_graph(program)),
        out_spec=program.call_spec.out_spec,
        bounds=_bounds(program),
        guards=_guards(program),
        shapes=tuple(shapes),
    )


def dtype_name(dtype: torch.dtype) -> str:
    """``"float32"`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def _export(model: nn.Module, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> ExportedProgram:
    dynamic = tuple(
        tuple(Dim.AUTO if axis >= 2 and size > 1 else Dim.STATIC for axis, size in enumerate(shape))
        if len(shape) == _STREAMED_RANK
        else tuple(Dim.STATIC for _ in shape)
        for shape in shapes
    )
    with _quiet():
        try:
            return _exported(model, shapes, dtype, device, dynamic)
        except Exception as error:
            # Tell a model that cannot take this input at all from one that only export cannot follow.
            reason = _eager_refusal(model, shapes, dtype)
            if reason is not None:
                wanted = ", ".join("x".join(map(str, shape)) for shape in shapes)
                raise InputError(f"the model refuses an input of shape {wanted}: {reason}") from error
            # The exporter's solver fails on some size expressions; the sizes at hand are still a capture, for themselves alone.
            with contextlib.suppress(Exception):
                return _exported(model, shapes, dtype, device, None)
            first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise UnsupportedError(
                [
                    f"{type(model).__name__}: torch.export cannot follow the model ({type(error).__name__}: {first_line}); "
                    "control flow that depends on tensor values must move out of `forward`"
                ]
            ) from error


def _exported(
    model: nn.Module,
    shapes: Sequence[tuple[int, ...]],
    dtype: torch.dtype,
    device: torch.device,
    dynamic: tuple[tuple[Any, ...], ...] | None,
) -> ExportedProgram:
    with contextlib.nullcontext() if device.type == "meta" else FakeTensorMode():
        inputs = tuple(torch.empty(shape, dtype=dtype, device=device) for shape in shapes)
    exported = torch.export.export(model, inputs, dynamic_shapes=dynamic, strict=False)
    decomposed: ExportedProgram = exported.run_decompositions({})
    return decomposed


def _eager_refusal(model: nn.Module, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> str | None:
    """What eager PyTorch says to a fake input of this shape, ``None`` when it accepts or cannot be asked."""
    with _quiet(), FakeTensorMode(allow_non_fake_inputs=True):
        try:
            device = next((p.device for p in model.parameters()), torch.device("cpu"))
            with torch.no_grad():
                model(*(torch.empty(shape, dtype=dtype, device=device) for shape in shapes))
        except RuntimeError as error:
            message = str(error).strip().splitlines()
            # Data-dependent control flow fails on fake tensors too, but says so in its own type.
            return None if type(error) is not RuntimeError or not message else message[0]
        except Exception:
            return None
    return None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep export's warnings and logs off the user's terminal; a failure is raised, not logged."""
    loggers = [logging.getLogger(name) for name in ("torch.fx.experimental.symbolic_shapes", "torch.export", "torch._export")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        with warnings.catch_warnings(), contextlib.redirect_stdout(None), contextlib.redirect_stderr(_Discard()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


class _Discard:
    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        pass


def _bounds(program: ExportedProgram) -> tuple[tuple[sp.Symbol, int, int | None], ...]:
    bounds = []
    for symbol, interval in program.range_constraints.items():
        # The exporter's default lower bound of 2 only excludes the sizes 0 and 1, which it specialises.
        low = int(interval.lower) if interval.lower.is_finite else 0
        high = int(interval.upper) if interval.upper.is_finite and interval.upper < 2**62 else None
        bounds.append((_plain_symbol(symbol), low, high))
    return tuple(bounds)


def _guards(program: ExportedProgram) -> tuple[sp.Basic, ...]:
    for node in program.graph.nodes:
        for size in getattr(node.meta.get("val"), "shape", ()) if node.op == "placeholder" else ():
            if isinstance(size, torch.SymInt):
                env = size.node.shape_env
                return tuple(dict.fromkeys(_plain_expr(env.replace(guard.expr)) for guard in env.guards))
    return ()


def _plain_symbol(symbol: sp.Symbol) -> sp.Symbol:
    return sp.Symbol(symbol.name, integer=True, positive=True)


def _extent(size: int | torch.SymInt) -> sp.Expr | int:
    if isinstance(size, int):
        return size
    expr = size.node.expr
    if expr.is_number:
        return int(expr)
    return _plain_expr(expr)


def _plain_expr(expr: sp.Expr) -> sp.Expr:
    """Torch's own integer division in SymPy's words, on our symbols."""
    plain = expr
    for name, meaning in _TORCH_FUNCTIONS.items():
        plain = plain.replace(lambda e, name=name: type(e).__name__ == name, lambda e, meaning=meaning: meaning(*e.args))
    return plain.xreplace({symbol: _plain_symbol(symbol) for symbol in plain.free_symbols})


#: The exporter's own SymPy functions.
_TORCH_FUNCTIONS: dict[str, Callable[..., sp.Expr]] = {
    "FloorDiv": lambda a, b: sp.floor(a / b),
    "CleanDiv": lambda a, b: a / b,
    "CeilDiv": lambda a, b: sp.ceiling(a / b),
    "PythonMod": lambda a, b: a - b * sp.floor(a / b),
    "Mod": lambda a, b: a - b * sp.floor(a / b),
    "Max": lambda *a: sp.Max(*a),
    "Min": lambda *a: sp.Min(*a),
}


def _graph(program: ExportedProgram) -> Graph:
    signature = program.graph_signature
    parameters, buffers = signature.inputs_to_parameters, signature.inputs_to_buffers
    constants = signature.inputs_to_lifted_tensor_constants
    nodes: list[Node] = []
    alias: dict[str, str] = {}
    scalars: dict[str, Any] = {}
    problems: list[str] = []
    outputs: tuple[str, ...] = ()
    mutated = set(signature.buffers_to_mutate) | set(signature.user_inputs_to_mutate)

    def convert(value: Any) -> Any:
        if isinstance(value, torch.fx.Node):
            if value.name in scalars:
                return scalars[value.name]
            return Ref(alias.get(value.name, value.name))
        if isinstance(value, (list, tuple)):
            return tuple(convert(item) for item in value)
        return _extent(value) if isinstance(value, torch.SymInt) else value

    for fx_node in program.graph.nodes:
        value = fx_node.meta.get("val")
        if fx_node.op == "output":
            names = [arg.name if isinstance(arg, torch.fx.Node) else None for arg in fx_node.args[0]]
            for name in names:
                if name is not None and name not in mutated:
                    if name in scalars:
                        problems.append("(the model itself): returns a number, not a tensor; return tensors only")
                    outputs += (alias.get(name, name),)
            if None in names:
                problems.append("(the model itself): returns None or a constant; return tensors only")
        elif fx_node.op == "placeholder":
            kind, target = (
                ("parameter", parameters[fx_node.name])
                if fx_node.name in parameters
                else ("buffer", buffers[fx_node.name])
                if fx_node.name in buffers
                else ("constant", constants[fx_node.name])
                if fx_node.name in constants
                else ("input", fx_node.name)
            )
            nodes.append(_node(fx_node.name, kind, target, value))
        elif isinstance(value, (torch.SymInt, int, float, torch.SymFloat, bool)):
            scalars[fx_node.name] = _extent(value) if isinstance(value, torch.SymInt) else value
        elif value is None and not fx_node.users:
            continue  # an assertion on metadata; the graph's own shapes and dtypes are checked at each call
        elif fx_node.op != "call_function":
            problems.append(f"{fx_node.name}: {fx_node.op} nodes are not supported; write the model with plain operators")
        elif fx_node.target is __import__("operator").getitem:
            source, index = fx_node.args
            if index == 0 and _first_output_only(source):
                alias[fx_node.name] = alias.get(source.name, source.name)
                nodes = [_node(n.name, n.kind, n.target, value, n.arguments, n.module_path) if n.name == source.name else n for n in nodes]
            elif index != 0 and _first_output_only(source):
                continue
            else:
                nodes.append(_node(fx_node.name, "operator", "getitem", value, (("source", convert(source)), ("index", index))))
        else:
            arguments = tuple((name, convert(arg)) for name, arg in _named_arguments(fx_node))
            target = str(fx_node.target)
            if target in _IDENTITY or (target in _CASTS and value.dtype == fx_node.args[0].meta["val"].dtype):
                alias[fx_node.name] = next(iter(map_refs_list(arguments)))
                continue
            sample = value[0] if isinstance(value, (tuple, list)) else value
            nodes.append(_node(fx_node.name, "operator", target, sample, arguments, _module_path(fx_node)))
    if problems:
        raise UnsupportedError(problems)
    return Graph(nodes=tuple(nodes), outputs=outputs)


#: Copies and markers that change neither values nor gradients.
_IDENTITY = frozenset({"aten.clone.default", "aten.contiguous.default", "aten.alias.default", "aten.lift_fresh_copy.default"})

#: Casts, which change nothing where the type is the same already.
_CASTS = frozenset({"aten._to_copy.default", "aten.to.dtype", "aten.to.dtype_layout", "aten.to.device"})

#: Operators of which only the first result matters to a gradient-exact run.
_FIRST_ONLY = frozenset({"aten._native_batch_norm_legit_no_training.default", "aten._native_batch_norm_legit_functional.default"})


def _first_output_only(source: Any) -> bool:
    return str(source.target) in _FIRST_ONLY


def map_refs_list(arguments: tuple[tuple[str, Any], ...]) -> list[str]:
    """The names referred to in named arguments, in order."""
    names: list[str] = []
    map_refs(tuple(value for _, value in arguments), lambda name: names.append(name))
    return names


def _node(name: str, kind: Any, target: str, value: Any, arguments: tuple[tuple[str, Any], ...] = (), module_path: str = "") -> Node:
    return Node(
        name=name,
        kind=kind,
        target=target,
        shape=tuple(_extent(size) for size in value.shape),
        dtype=dtype_name(value.dtype),
        itemsize_bytes=value.dtype.itemsize,
        arguments=arguments,
        module_path=module_path,
    )


def _named_arguments(fx_node: torch.fx.Node) -> list[tuple[str, Any]]:
    """Positional and keyword arguments by schema name, defaults filled in."""
    named = []
    for position, argument in enumerate(fx_node.target._schema.arguments):  # type: ignore[union-attr]
        if position < len(fx_node.args):
            named.append((argument.name, fx_node.args[position]))
        elif argument.name in fx_node.kwargs:
            named.append((argument.name, fx_node.kwargs[argument.name]))
        elif argument.has_default_value():
            named.append((argument.name, argument.default_value))
    return named


def _module_path(fx_node: torch.fx.Node) -> str:
    stack = fx_node.meta.get("nn_module_stack") or {}
    path = list(stack.values())[-1][0] if stack else ""
    return "" if path.startswith("_empty_nn_module_stack") else path


def _without_dead_operators(graph: Graph) -> Graph:
    needed = set(graph.outputs)
    for node in reversed(graph.nodes):
        if node.name in needed:
            needed.update(node.operands)
    return Graph(nodes=tuple(node for node in graph.nodes if node.name in needed or node.kind == "input"), outputs=graph.outputs)
