"""Capture of an ``nn.Module`` as a :class:`Graph`.

``torch.export`` traces the model on fake tensors whose height and width are symbols. A 100,000 x 100,000 image thus costs no memory, and
one capture serves all sizes that satisfy its guards. Then :mod:`sft.analysis.frontend.functionalize` removes in-place forms and keeps
composite operators (``conv2d``, ``max_pool2d``).

Some captures have constant sizes and serve one size each: where the model fixes its size, and where the exporter's solver fails on a size
expression or would take minutes (:mod:`sft.analysis.frontend.torch_patches`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy as sp
import torch
from torch import nn
from torch.export import ExportedProgram

from sft.analysis.frontend.autocast import contracted_letters
from sft.analysis.frontend.call_mode_guards import CallModeGuards, CallModes, GuardValues
from sft.analysis.frontend.class_labels import LabelShapes
from sft.analysis.frontend.constants.expressions import tensor_attribute
from sft.analysis.frontend.constants.kept_tensors import KeptTensors, ReturnsKept
from sft.analysis.frontend.constants.lifted import fake_modes, lifted_constants, read_storages
from sft.analysis.frontend.constants.tracking import ConstantRead, ConstantTracker, model_tensors
from sft.analysis.frontend.diagnostics.export_errors import MIXED_DTYPES
from sft.analysis.frontend.export import CHANNELS_LAST, export_model, memory_formats_of
from sft.analysis.frontend.graph_builder import build_graph, substitute_sizes, symbol_bounds, symbol_guards, tied_sizes
from sft.analysis.frontend.module_state import (
    AttributeChanges,
    ObjectChanges,
    is_hook_registry,
    override_attributes,
    override_objects,
    preserve_objects,
)
from sft.analysis.frontend.side_effect_checks import unregistered_tensors
from sft.analysis.frontend.trace_context import (
    disable_root_hooks,
    prepare_for_tracing,
    suppress_output,
    use_fake_tensors,
    without_autograd_debugging,
)
from sft.analysis.ir.graph import Graph, Node
from sft.analysis.ir.repeat_op import capture_repeats
from sft.common.errors import UnsupportedError
from sft.common.torch_internals import FakeTensorMode, forget_real_tensors, pytree, without_parametrization_cache

__all__ = ["CHANNELS_LAST", "Capture", "capture", "is_channels_last", "is_in_program_layout", "outputs_channels_last", "tensor_attribute"]

_PRODUCT_PREFIXES = ("aten.mm.", "aten.bmm.", "aten.addmm.", "aten.baddbmm.", "aten.einsum.")


@dataclass(frozen=True, kw_only=True)
class Capture:
    """A captured model, the conditions under which it holds, and the derivation of its symbols from input shapes.

    Attributes:
        graph: the model, without dead operators.
        out_spec: the pytree of the model's return value, over ``graph.outputs``.
        bounds: smallest and largest value (``None``: no limit) of each symbol, and of each size that is a multiple of a symbol or has an
            offset to it.
        guards: relations between the symbols under which the model takes the captured branches.
        shapes: the inputs' shapes at capture, for which the capture holds by definition.
        constants: tensors by the target of their node: those that ``forward`` makes of numbers, and those that modules keep in containers
            or other objects. Parameters and buffers are not among them.
        differentiable_constants: names, for messages, of the constants that require a gradient.
        guard_values: modes of the call that `forward` queries; the capture holds for calls with the same values.
        enables_grad: true where `forward` switches gradients on by itself.
        labels: shapes of the labels of losses, which are checked at each size.
        reads: values that `forward` read from tensors of the model; the capture holds while they are the same.
        written_inputs: positions of the inputs that `forward` writes to.
        kept_losses: attributes to which `forward` sets a number with a gradient that no output depends on.
    """

    graph: Graph
    out_spec: pytree.TreeSpec
    bounds: tuple[tuple[sp.Expr, int, int | None], ...]
    guards: tuple[sp.Basic, ...]
    shapes: tuple[tuple[int, ...], ...]
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)
    differentiable_constants: Mapping[str, str] = field(default_factory=dict)
    guard_values: GuardValues = ()
    enables_grad: bool = False
    labels: tuple[LabelShapes, ...] = ()
    reads: tuple[ConstantRead, ...] = ()
    written_inputs: tuple[int, ...] = ()
    kept_losses: tuple[str, ...] = ()

    def bind(self, shapes: Sequence[tuple[int, ...]]) -> dict[sp.Symbol, int] | None:
        """Return the symbols' values for input shapes; ``None`` where the capture does not hold for them."""
        values: dict[sp.Symbol, int] = {}
        expressions: list[tuple[sp.Expr, int]] = []
        for name, shape in zip(self.graph.inputs, shapes, strict=True):
            expected = self.graph[name].shape
            if len(expected) != len(shape):
                return None
            for extent, size in zip(expected, shape, strict=True):
                if isinstance(extent, sp.Symbol):
                    if values.setdefault(extent, size) != size:
                        return None
                else:
                    expressions.append((sp.sympify(extent), size))
        for extent, size in sorted(expressions, key=lambda pair: len(pair[0].free_symbols)):
            values |= _solve_symbol(extent.subs(values), size)
            if extent.subs(values) != size:
                return None
        for extent, low, high in self.bounds:
            value = extent.subs(values)
            if value.is_Integer and (value < low or (high is not None and value > high)):
                return None
        if tuple(shapes) == self.shapes or all(guard.subs(values) is sp.true for guard in self.guards):
            return values
        return None

    @property
    def sample_symbols(self) -> frozenset[sp.Symbol]:
        """Symbols of the number of samples: first extents of inputs."""
        return frozenset(size for name in self.graph.inputs for size in self.graph[name].shape[:1] if isinstance(size, sp.Symbol))

    def with_symbols_of(self, other: Capture) -> Capture:
        """The capture with the symbols of sizes that another capture has at the same places; those of samples get names of their own."""
        symbol_map = {symbol: sp.Symbol(f"samples_{symbol.name}", integer=True, positive=True) for symbol in self.sample_symbols}
        for name, other_name in zip(self.graph.inputs, other.graph.inputs, strict=True):
            for size, symbol in zip(self.graph[name].shape, other.graph[other_name].shape, strict=True):
                if isinstance(size, sp.Symbol) and isinstance(symbol, sp.Symbol):
                    symbol_map[size] = symbol
        return self._with_sizes(symbol_map)

    def _with_sizes(self, known: Mapping[sp.Symbol, sp.Basic]) -> Capture:
        """The capture with expressions in place of symbols; conditions without a symbol must hold."""
        graph = substitute_sizes(self.graph, known)
        guards = (guard.xreplace(known) for guard in self.guards)
        bounds = ((size.xreplace(known), low, high) for size, low, high in self.bounds)
        return replace(
            self,
            graph=graph,
            bounds=tuple(bound for bound in bounds if bound[0].free_symbols),
            guards=tuple(guard for guard in guards if guard.free_symbols),
            labels=LabelShapes.of(graph),
        )

    def with_samples(self, shapes: Sequence[tuple[int, ...]]) -> Capture | None:
        """The capture with the number of samples of these input shapes in place of its symbols; ``None`` where it does not hold."""
        values = self.bind(shapes)
        if values is None:
            return None
        symbol_map = {symbol: sp.Integer(values[symbol]) for symbol in self.sample_symbols}
        return replace(self._with_sizes(symbol_map), shapes=tuple(shapes))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trace:
    """A capture by one trace, and state that `forward` changed in it.

    Attributes:
        capture: the capture.
        module_changes: plain attributes of modules.
        object_changes: plain attributes of other objects.
        kept: tensors in attributes of modules.
        read_storages: identities of the memory of the constants that the program or `forward` reads.
    """

    capture: Capture
    module_changes: AttributeChanges
    object_changes: ObjectChanges
    kept: KeptTensors
    read_storages: frozenset[int]


def _solve_symbol(extent: sp.Expr, size: int) -> dict[sp.Symbol, int]:
    """Solve ``a * symbol + b = size``; empty where the extent has no symbol or several, or the solution is not a positive integer."""
    if len(extent.free_symbols) != 1:
        return {}
    symbol = next(iter(extent.free_symbols))
    slope = extent.diff(symbol)
    value = (size - extent.subs(symbol, 0)) / slope if slope.is_Rational and slope else sp.nan
    return {symbol: int(value)} if value.is_Integer and value.is_positive else {}


def capture(
    model: nn.Module,
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    *,
    autocast: torch.dtype | None = None,
    any_size: bool = True,
    any_batch: bool = False,
    modes: CallModes | None = None,
) -> Capture:
    """Trace a model on inputs of given shapes and dtypes.

    Args:
        model: the model; it is unchanged afterwards.
        shapes: shapes of its inputs.
        dtypes: dtypes of its inputs.
        device: device of its inputs.
        autocast: trace as under ``torch.autocast`` of this dtype. Casts become operators of the graph, also those of regions that
            ``forward`` itself puts under autocast.
        any_size: make the image axes of inputs symbols, so that the capture serves more than one size.
        any_batch: make the number of samples a symbol, for :meth:`Capture.with_samples`.
        modes: modes of the call, which ``forward`` may query.

    Raises:
        UnsupportedError: torch.export cannot follow the model.
        InputError: the model itself refuses inputs of this shape.
    """

    def trace(guards: CallModeGuards, *, any_size: bool = any_size, any_batch: bool = any_batch) -> _Trace:
        return _capture_once(model, shapes, dtypes, device, autocast, guards, any_size=any_size, any_batch=any_batch)

    call_guards = CallModeGuards(modes or CallModes())
    with without_autograd_debugging():
        traced = trace(call_guards)
        if call_guards.needs_call_inputs:
            call_guards = CallModeGuards(call_guards.modes, with_call_inputs=True)
            traced = trace(call_guards)
    first, module_changes, object_changes = traced.capture, traced.module_changes, traced.object_changes
    if traced.kept.values:
        values, markers = traced.kept.with_markers()
        with without_autograd_debugging(), override_attributes({**module_changes, **values}), override_objects(object_changes):
            marked = trace(call_guards)
        places = dict.fromkeys(place for storage, place in markers.items() if storage in marked.read_storages)
        if places:
            with without_autograd_debugging():
                kept = _capture_once(ReturnsKept(model), shapes, dtypes, device, autocast, call_guards, any_size=False, any_batch=False)
            places = {place: None for place in places if place in _varying_outputs(kept.capture)}
        elif marked.capture.graph != first.graph and not module_changes and not object_changes:
            places = dict.fromkeys(markers.values())
        if places:
            raise UnsupportedError([_KEPT_STATE_MESSAGE.format(place) for place in places])
    if not module_changes and not object_changes:
        return first
    with without_autograd_debugging(), override_attributes(module_changes), override_objects(object_changes):
        second = trace(call_guards).capture
    if second.graph != first.graph:
        raise UnsupportedError(_state_problems(model, module_changes, object_changes))
    if not object_changes and all(is_hook_registry(name) for _, name in module_changes):
        # Only hooks were taken back: a flag that cannot be seen may keep `forward` from registering them again.
        with without_autograd_debugging():
            third = trace(call_guards).capture
        if third.graph != first.graph:
            raise UnsupportedError(_state_problems(model, module_changes, object_changes))
    return first


_KEPT_STATE_MESSAGE = (
    "{}: `forward` keeps a tensor in this attribute, and its next call depends on it; a compiled model takes all calls for the same. "
    "Register it as a buffer of one shape (register_buffer), or make it an input and an output"
)


def _varying_outputs(capture: Capture) -> frozenset[str]:
    """Names of the outputs, a dictionary of lists, that depend on inputs or random numbers."""
    varying: set[str] = set()
    for node in capture.graph.nodes:
        reads_values = not node.target.startswith("aten.new_") and "_like." not in node.target
        if node.kind == "input" or node.effect == "draws" or (reads_values and not varying.isdisjoint(node.operands)):
            varying.add(node.name)
    outputs = pytree.tree_unflatten(list(capture.graph.outputs), capture.out_spec)
    return frozenset(place for place, names in outputs.items() if not varying.isdisjoint(names))


def _state_problems(model: nn.Module, module_changes: AttributeChanges, object_changes: ObjectChanges) -> list[str]:
    """Messages about a `forward` that changes state on which its next call depends."""
    paths = {id(module): path or "(the model itself)" for path, module in model.named_modules()}
    changes = [(paths[id(module)], name, value) for (module, name), value in module_changes.items() if not is_hook_registry(name)]
    changes += [(owner.name, name, value) for (owner, name), value in object_changes.items()]
    problems = [
        f"{owner}: `forward` sets {name}, to {value!r}, so the next call computes other values; a compiled model takes "
        "all calls for the same. Set it outside of `forward`, or make it an input"
        for owner, name, value in changes
    ]
    hooked = dict.fromkeys(paths[id(module)] for module, name in module_changes if is_hook_registry(name))
    return problems + [
        f"{path}: `forward` registers or removes a hook on this submodule when it runs, and computes another function at its next call; "
        "register hooks outside of `forward`, or call the model once before it is compiled"
        for path in hooked
    ]


def _capture_once(
    model: nn.Module,
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    autocast: torch.dtype | None,
    call_guards: CallModeGuards,
    *,
    any_size: bool,
    any_batch: bool,
) -> _Trace:
    """A capture, and the attributes that `forward` sets, of its modules and of other objects; all are restored."""
    # The caller may be in inference mode, under autocast with a cache of casts, or in a cache of parametrized tensors.
    with (
        torch.inference_mode(False),
        without_parametrization_cache(),
        _autocast(device, autocast),
        preserve_objects(model) as object_changes,
        prepare_for_tracing(model) as module_changes,
        capture_repeats(model) as repeats,
    ):
        functional = export_model(model, shapes, dtypes, device, any_size, call_guards, any_batch=any_batch)
    program = functional.program
    in_containers = unregistered_tensors(model)
    constants = lifted_constants(program, model, (*in_containers.values(), *(tensor for tensor, _ in functional.unregistered)))
    model_name = type(model).__name__
    names = {id(tensor): f"{model_name} at {line}, of shape {tuple(tensor.shape)}" for tensor, line in functional.unregistered}
    names |= {id(tensor): path for path, tensor in in_containers.items()}
    default_name = f"a tensor of {model_name}"
    graph = build_graph(functional, repeats.repetitions)
    mixed = [node for node in graph.operators if node.target.startswith(_PRODUCT_PREFIXES) and _mixes_dtypes(node, graph)]
    if mixed:  # the exporter of torch 2.11 lets them through
        raise UnsupportedError([f"{node.label}: {MIXED_DTYPES}" for node in mixed])
    ties = tied_sizes(graph, shapes)
    graph = substitute_sizes(graph, ties)
    kept = functional.kept or KeptTensors()
    for mode in fake_modes(program):
        forget_real_tensors(mode)
    return _Trace(
        capture=Capture(
            graph=graph,
            out_spec=program.call_spec.out_spec,
            bounds=tuple((size.xreplace(ties), low, high) for size, low, high in symbol_bounds(program)),
            guards=tuple(guard.xreplace(ties) for guard in symbol_guards(program)),
            shapes=tuple(shapes),
            constants={name: value.detach().to(device) for name, value in constants.items()},
            differentiable_constants={
                target: names.get(id(value), default_name) for target, value in constants.items() if value.requires_grad
            },
            guard_values=call_guards.modes.guard_values(call_guards.kinds),
            enables_grad=call_guards.enables_grad,
            labels=LabelShapes.of(graph),
            reads=functional.reads,
            written_inputs=_written_inputs(program),
            kept_losses=kept.losses,
        ),
        module_changes=module_changes,
        object_changes=object_changes,
        kept=kept,
        read_storages=read_storages(functional),
    )


def _written_inputs(program: ExportedProgram) -> tuple[int, ...]:
    signature = program.graph_signature
    written = set(signature.user_inputs_to_mutate.values())
    tensors = [node.name for node in program.graph.nodes if node.op == "placeholder" and isinstance(node.meta.get("val"), torch.Tensor)]
    inputs = [name for name in tensors if name in signature.user_inputs]
    return tuple(position for position, name in enumerate(inputs) if name in written)


def _mixes_dtypes(node: Node, graph: Graph) -> bool:
    """Return true for a product of operands of two dtypes; an ``einsum`` that sums over no common letter is not a product."""
    is_product = "einsum" not in node.target or any(contracted_letters(str(node.argument("equation")))[0])
    return is_product and len({graph[name].dtype for name in node.operands}) > 1


def _autocast(device: torch.device, dtype: torch.dtype | None) -> contextlib.AbstractContextManager[Any]:
    if not torch.amp.is_autocast_available(device.type):
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype, enabled=dtype is not None, cache_enabled=False)


def outputs_channels_last(
    model: nn.Module,
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    channels_last: Sequence[bool],
    *,
    autocast: torch.dtype | None = None,
) -> tuple[bool, ...] | None:
    """For each output, true where eager PyTorch returns it channels last; ``None`` where the model does not run on fake tensors.

    Args:
        model: the model; the memory formats of its parameters count, too.
        shapes: shapes of the inputs.
        dtypes: dtypes of the inputs.
        device: device of the inputs.
        channels_last: for each input, true where its memory format is channels last.
        autocast: dtype of autocast, as for :func:`capture`.
    """
    mode = FakeTensorMode()
    tracker = ConstantTracker(model, model_tensors(model), is_any_size=False)
    layouts = memory_formats_of(shapes, channels_last)
    with suppress_output(), torch.inference_mode(False), torch.no_grad(), _autocast(device, autocast), disable_root_hooks(model):
        try:
            with without_parametrization_cache(), mode, use_fake_tensors(model, mode), capture_repeats(model), tracker.watch():
                inputs = [torch.empty(s, dtype=d, device=device, memory_format=f) for s, d, f in zip(shapes, dtypes, layouts, strict=True)]
                outputs = pytree.tree_leaves(model(*inputs))
        except Exception:
            return None
    return tuple(is_channels_last(out) for out in outputs if isinstance(out, torch.Tensor))


def is_in_program_layout(value: torch.Tensor) -> bool:
    """Return true for a tensor in the layout of programs: images channels last, other tensors contiguous."""
    return value.is_contiguous(memory_format=CHANNELS_LAST.get(value.dim(), torch.contiguous_format))


def is_channels_last(value: torch.Tensor) -> bool:
    """Return true for an image in channels last format that is not in channels first format at the same time."""
    layout = CHANNELS_LAST.get(value.dim())
    return layout is not None and not value.is_contiguous() and value.is_contiguous(memory_format=layout)
