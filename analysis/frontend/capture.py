"""From an ``nn.Module`` to a :class:`Graph`; with :mod:`sft.analysis.frontend.export` the part of the analysis that knows torch.

``torch.export`` traces the model on fake tensors whose height and width are symbols, so a 100,000 x 100,000 image costs
no memory and one capture serves every size that satisfies the export's guards. :mod:`sft.analysis.frontend.functionalize` then removes
in-place forms while keeping composite operators (``conv2d``, ``max_pool2d``) whole. Where the model fixes its own size the
export makes the extents constant, and so does a second attempt where its solver fails on a size expression, or would take
minutes (:mod:`sft.analysis.frontend.torch_patches`); such a capture serves that one size and the caller captures again for another.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy as sp
import torch
from torch import nn
from torch.export import ExportedProgram

from sft.analysis.frontend.autocast import contracted_letters
from sft.analysis.frontend.call_mode_guards import CallModeGuards, CallModes, GuardValues
from sft.analysis.frontend.export import CHANNELS_LAST, MIXED_DTYPES, export_model, memory_formats_of
from sft.analysis.frontend.graph_builder import build_graph, substitute_sizes, symbol_bounds, symbol_guards, tied_sizes
from sft.analysis.frontend.module_guards import storage_key, unregistered_tensors
from sft.analysis.frontend.module_state import AttributeChanges, ObjectChanges, override_attributes, override_objects, preserve_objects
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
from sft.common.torch_internals import FakeTensor, FakeTensorMode, pytree

__all__ = ["CHANNELS_LAST", "Capture", "capture", "is_channels_last", "is_in_program_layout", "outputs_channels_last", "tensor_attribute"]

_PRODUCT_PREFIXES = ("aten.mm.", "aten.bmm.", "aten.addmm.", "aten.baddbmm.", "aten.einsum.")


@dataclass(frozen=True, kw_only=True)
class Capture:
    """A captured model and how its symbols follow from the inputs' shapes.

    Attributes:
        graph: the model; dead operators are gone.
        out_spec: the pytree of the model's return value, over ``graph.outputs``.
        bounds: for each symbol, and each size that is a multiple of one or has an offset to it, the smallest and largest value that the
            capture holds for.
        guards: relations between the symbols under which the model took the path that was captured.
        shapes: the inputs' shapes at capture, for which it holds by definition.
        constants: tensors that ``forward`` makes of numbers, or that modules hold in containers, or others, by the target of their node;
            the model's own attributes are not among them.
        differentiable_constants: those of them that require a gradient, and where they are.
        answers: what `forward` asked of the call, and was told; the capture holds for calls that are answered the same.
        enables_grad: whether `forward` switches gradients on by itself.
    """

    graph: Graph
    out_spec: pytree.TreeSpec
    bounds: tuple[tuple[sp.Expr, int, int | None], ...]
    guards: tuple[sp.Basic, ...]
    shapes: tuple[tuple[int, ...], ...]
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)
    differentiable_constants: Mapping[str, str] = field(default_factory=dict)
    answers: GuardValues = ()
    enables_grad: bool = False

    def bind(self, shapes: Sequence[tuple[int, ...]]) -> dict[sp.Symbol, int] | None:
        """The symbols' values for these input shapes; ``None`` when the capture does not hold for them."""
        values: dict[sp.Symbol, int] = {}
        related: list[tuple[sp.Expr, int]] = []
        for name, shape in zip(self.graph.inputs, shapes, strict=True):
            expected = self.graph[name].shape
            if len(expected) != len(shape):
                return None
            for extent, size in zip(expected, shape, strict=True):
                if isinstance(extent, sp.Symbol):
                    if values.setdefault(extent, size) != size:
                        return None
                else:
                    related.append((sp.sympify(extent), size))
        for extent, size in sorted(related, key=lambda pair: len(pair[0].free_symbols)):
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


def _solve_symbol(extent: sp.Expr, size: int) -> dict[sp.Symbol, int]:
    """The one symbol of ``a * symbol + b``, where that is of this size; nothing where there are others, or none."""
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
    modes: CallModes | None = None,
) -> Capture:
    """Trace ``model`` on inputs of these shapes and dtypes (the axes of images symbolic, if it is to serve more than this size).

    With ``autocast`` the model is traced as under ``torch.autocast`` of that dtype: casts become operators of the graph. Regions
    that ``forward`` itself puts under autocast, or takes out of it, come out the same way. ``modes`` is what it is told of the call.

    Raises:
        UnsupportedError: torch.export cannot follow the model.
        InputError: the model itself refuses inputs of this shape.
    """
    questions = CallModeGuards(modes or CallModes())
    with without_autograd_debugging():
        found, changes, others = _capture_once(model, shapes, dtypes, device, autocast, any_size, questions)
        if questions.needs_call_inputs:
            questions = CallModeGuards(questions.modes, with_call_inputs=True)
            found, changes, others = _capture_once(model, shapes, dtypes, device, autocast, any_size, questions)
    if changes or others:
        with without_autograd_debugging(), override_attributes(changes), override_objects(others):
            later, *_ = _capture_once(model, shapes, dtypes, device, autocast, any_size, questions)
        if later.graph != found.graph:
            paths = {id(module): path for path, module in model.named_modules()}
            set_there = [(paths[id(module)] or "(the model itself)", name, value) for (module, name), value in changes.items()]
            set_there += [(holder.name, name, value) for (holder, name), value in others.items()]
            raise UnsupportedError(
                [
                    f"{where}: `forward` sets {name}, to {value!r}, and computes something else at the next call; a compiled model takes "
                    "all calls for the same. Set it outside of `forward`, or make it an input"
                    for where, name, value in set_there
                ]
            )
    return found


def _capture_once(
    model: nn.Module,
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    autocast: torch.dtype | None,
    any_size: bool,
    questions: CallModeGuards,
) -> tuple[Capture, AttributeChanges, ObjectChanges]:
    """A capture, and what `forward` has changed meanwhile of plain attributes, of its modules and of others; they are as before."""
    # The caller may be in inference mode, or under autocast with a cache of casts.
    with (
        torch.inference_mode(False),
        _autocast(device, autocast),
        preserve_objects(model) as others,
        prepare_for_tracing(model) as changes,
        capture_repeats(model) as repeated,
    ):
        found = export_model(model, shapes, dtypes, device, any_size, questions)
    program = found.program
    loose = unregistered_tensors(model)
    constants = _lifted_constants(program, model, (*loose.values(), *(tensor for tensor, _ in found.foreign)))
    name = type(model).__name__
    places = {id(tensor): f"{name} at {line}, of shape {tuple(tensor.shape)}" for tensor, line in found.foreign}
    places |= {id(tensor): path for path, tensor in loose.items()}
    unnamed = f"a tensor of {name}"
    graph = build_graph(found, repeated.repetitions)
    mixed = [node for node in graph.operators if node.target.startswith(_PRODUCT_PREFIXES) and _mixes_dtypes(node, graph)]
    if mixed:  # the exporter of torch 2.11 lets them through
        raise UnsupportedError([f"{node.label}: {MIXED_DTYPES}" for node in mixed])
    ties = tied_sizes(graph, shapes)
    return (
        Capture(
            graph=substitute_sizes(graph, ties),
            out_spec=program.call_spec.out_spec,
            bounds=tuple((size.xreplace(ties), low, high) for size, low, high in symbol_bounds(program)),
            guards=tuple(guard.xreplace(ties) for guard in symbol_guards(program)),
            shapes=tuple(shapes),
            constants={name: value.detach().to(device) for name, value in constants.items()},
            differentiable_constants={name: places.get(id(value), unnamed) for name, value in constants.items() if value.requires_grad},
            answers=questions.modes.answers(questions.asked),
            enables_grad=questions.enables_grad,
        ),
        changes,
        others,
    )


def _mixes_dtypes(node: Node, graph: Graph) -> bool:
    """Whether a product is of two types; an ``einsum`` that sums over nothing that two operands share is none."""
    is_product = "einsum" not in node.target or any(contracted_letters(str(node.argument("equation")))[0])
    return is_product and len({graph[name].dtype for name in node.operands}) > 1


def _lifted_constants(program: ExportedProgram, model: nn.Module, known: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors that `forward` makes, or finds elsewhere than in parameters and buffers (``known``), by the target of their node."""
    found = {}
    originals = {storage_key(tensor): tensor for tensor in known}
    for name in program.graph_signature.inputs_to_lifted_tensor_constants.values():
        value = program.constants[name]
        if tensor_attribute(model, name) is None and isinstance(value, torch.Tensor):
            # Made under fake tensors, it still knows its numbers.
            numbers = value.constant if isinstance(value, FakeTensor) else value
            if numbers is None:
                raise UnsupportedError([f"{type(model).__name__}: `forward` {_unknown_constant_problem(value, program)}"])
            found[name] = originals.get(storage_key(numbers), numbers)
    return found


def _unknown_constant_problem(value: torch.Tensor, program: ExportedProgram) -> str:
    own = {getattr(node.meta.get("val"), "fake_mode", None) for node in program.graph.nodes if node.op == "placeholder"}
    if isinstance(value, FakeTensor) and value.fake_mode not in own:
        return (
            "finds a tensor of an earlier trace in a cache (a global, functools.lru_cache): empty it (cache_clear()), and call the model "
            "once before it is compiled, or make that tensor a buffer"
        )
    return "makes a tensor whose numbers are not known; make it a buffer"


def tensor_attribute(model: nn.Module, path: str) -> torch.Tensor | None:
    """A tensor that a module holds, by its qualified name; ``None`` if there is none."""
    value: Any = model
    for part in path.split("."):
        value = getattr(value, part, None)
    return value if isinstance(value, torch.Tensor) else None


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
    """For each output whether eager PyTorch lays it out channels last; ``None`` where the model does not run on fake tensors.

    Args:
        model: its parameters' layouts count, too.
        shapes: of the inputs.
        dtypes: of the inputs.
        device: of the inputs.
        channels_last: for each input whether it is laid out channels last.
        autocast: as for :func:`capture`.
    """
    mode = FakeTensorMode()
    layouts = memory_formats_of(shapes, channels_last)
    with suppress_output(), torch.inference_mode(False), torch.no_grad(), _autocast(device, autocast), disable_root_hooks(model):
        try:
            with mode, use_fake_tensors(model, mode), capture_repeats(model):
                inputs = [torch.empty(s, dtype=d, device=device, memory_format=f) for s, d, f in zip(shapes, dtypes, layouts, strict=True)]
                outputs = pytree.tree_leaves(model(*inputs))
        except Exception:
            return None
    return tuple(is_channels_last(out) for out in outputs if isinstance(out, torch.Tensor))


def is_in_program_layout(value: torch.Tensor) -> bool:
    """Whether a tensor lies in memory as programs lay theirs: images channels last, others in order."""
    return value.is_contiguous(memory_format=CHANNELS_LAST.get(value.dim(), torch.contiguous_format))


def is_channels_last(value: torch.Tensor) -> bool:
    """Whether an image is laid out channels last, and not channels first at the same time."""
    layout = CHANNELS_LAST.get(value.dim())
    return layout is not None and value.is_contiguous(memory_format=layout) and not value.is_contiguous()
