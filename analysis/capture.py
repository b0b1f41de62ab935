"""From an ``nn.Module`` to a :class:`Graph`: the only part of the analysis that knows torch.

``torch.export`` traces the model on fake tensors whose height and width are symbols, so a 100,000 x 100,000 image costs
no memory and one capture serves every size that satisfies the export's guards. :mod:`sft.analysis.functional` then removes
in-place forms while keeping composite operators (``conv2d``, ``max_pool2d``) whole. Where the model fixes its own size the
export makes the extents constant, and so does a second attempt where its solver fails on a size expression, or would take
minutes (:mod:`sft.analysis.intricate`); such a capture serves that one size and the caller captures again for another.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy as sp
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

from sft.analysis.attributes import Changes, attributes_set
from sft.analysis.axes import Axes
from sft.analysis.barenodes import bare_nodes
from sft.analysis.casts import Casts
from sft.analysis.composites import composites_cast, shared_and_alone
from sft.analysis.deterministic import any_algorithm
from sft.analysis.exported import bounds_of, graph_of, guards_of, module_path_of, ties_of, with_sizes
from sft.analysis.functional import FunctionalProgram, functional
from sft.analysis.gradmodes import grad_modes_followed
from sft.analysis.graph import Graph, Node
from sft.analysis.intricate import intricate_sizes_refused
from sft.analysis.leftovers import nothing_left
from sft.analysis.likelihoods import variances_as_they_are
from sft.analysis.loose import loose_tensors, memory_of
from sft.analysis.normshapes import norms_by_shape
from sft.analysis.objects import ObjectChanges, objects_kept, objects_set
from sft.analysis.preparation import hooks_aside, on_fake_tensors, on_whole_parameters, prepared
from sft.analysis.questions import Answers, Modes, Questions
from sft.analysis.quiet import plain_autograd, quiet
from sft.analysis.recurrent import states_in_shape
from sft.analysis.repeated import repetitions_followed
from sft.analysis.whereabouts import is_of_distributions, line_of
from sft.errors import InputError, UnsupportedError

__all__ = ["CHANNELS_LAST", "Capture", "attribute_of", "capture", "is_channels_last", "outputs_channels_last"]

#: The layout with channels last, by the number of dimensions.
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}

_TWO_TYPES = "operands of two types meet there, as autocast allows in eager PyTorch; cast one of them with .to()"
#: What to do about what the exporter says, by words of its errors.
_REMEDIES = {
    "tensor subclasses": "numbers leave torch there; compute with tensors, or outside of the compiled model",
    "DataDependentOutput": "this operator looks at values to decide what to do; compute it outside of the compiled model",
    "DynamicOutputShape": "the size of what this operator makes depends on values; compute it outside of the compiled model",
    "expected scalar type": _TWO_TYPES,
}
_PRODUCTS = ("aten.mm.", "aten.bmm.", "aten.addmm.", "aten.baddbmm.", "aten.einsum.")
_UNCHECKED = "distributions look at their values to check them; make them with validate_args=False"
_LEAVE = "control flow that depends on tensor values must move out of `forward`"


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
    answers: Answers = ()
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
            values |= _solved(extent.subs(values), size)
            if extent.subs(values) != size:
                return None
        for extent, low, high in self.bounds:
            value = extent.subs(values)
            if value.is_Integer and (value < low or (high is not None and value > high)):
                return None
        if tuple(shapes) == self.shapes or all(guard.subs(values) is sp.true for guard in self.guards):
            return values
        return None


def _solved(extent: sp.Expr, size: int) -> dict[sp.Symbol, int]:
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
    modes: Modes | None = None,
) -> Capture:
    """Trace ``model`` on inputs of these shapes and dtypes (the axes of images symbolic, if it is to serve more than this size).

    With ``autocast`` the model is traced as under ``torch.autocast`` of that dtype: casts become operators of the graph. Regions
    that ``forward`` itself puts under autocast, or takes out of it, come out the same way. ``modes`` is what it is told of the call.

    Raises:
        UnsupportedError: torch.export cannot follow the model.
        InputError: the model itself refuses inputs of this shape.
    """
    questions = Questions(modes or Modes())
    with plain_autograd():
        found, changes, others = _captured(model, shapes, dtypes, device, autocast, any_size, questions)
        if questions.needs_true_inputs:
            questions = Questions(questions.modes, with_true_inputs=True)
            found, changes, others = _captured(model, shapes, dtypes, device, autocast, any_size, questions)
    if changes or others:
        with plain_autograd(), attributes_set(changes), objects_set(others):
            later, *_ = _captured(model, shapes, dtypes, device, autocast, any_size, questions)
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


def _captured(
    model: nn.Module,
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    autocast: torch.dtype | None,
    any_size: bool,
    questions: Questions,
) -> tuple[Capture, Changes, ObjectChanges]:
    """A capture, and what `forward` has changed meanwhile of plain attributes, of its modules and of others; they are as before."""
    # The caller may be in inference mode, or under autocast with a cache of casts.
    with (
        torch.inference_mode(False),
        _autocast(device, autocast),
        objects_kept(model) as others,
        prepared(model) as changes,
        repetitions_followed(model) as repeated,
    ):
        found = _export(model, shapes, dtypes, device, any_size, questions)
    program = found.program
    loose = loose_tensors(model)
    constants = _constants(program, model, (*loose.values(), *(tensor for tensor, _ in found.foreign)))
    name = type(model).__name__
    places = {id(tensor): f"{name} at {line}, of shape {tuple(tensor.shape)}" for tensor, line in found.foreign}
    places |= {id(tensor): path for path, tensor in loose.items()}
    unnamed = f"a tensor of {name}"
    graph = graph_of(found, repeated.repetitions)
    mixed = [node for node in graph.operators if node.target.startswith(_PRODUCTS) and _mixes(node, graph)]
    if mixed:  # the exporter of torch 2.11 lets them through
        raise UnsupportedError([f"{node.label}: {_TWO_TYPES}" for node in mixed])
    ties = ties_of(graph, shapes)
    return (
        Capture(
            graph=with_sizes(graph, ties),
            out_spec=program.call_spec.out_spec,
            bounds=tuple((size.xreplace(ties), low, high) for size, low, high in bounds_of(program)),
            guards=tuple(guard.xreplace(ties) for guard in guards_of(program)),
            shapes=tuple(shapes),
            constants={name: value.detach().to(device) for name, value in constants.items()},
            differentiable_constants={name: places.get(id(value), unnamed) for name, value in constants.items() if value.requires_grad},
            answers=questions.modes.answers(questions.asked),
            enables_grad=questions.enables_grad,
        ),
        changes,
        others,
    )


def _mixes(node: Node, graph: Graph) -> bool:
    """Whether a product is of two types; an ``einsum`` that sums over nothing that two operands share is none."""
    is_product = "einsum" not in node.target or any(shared_and_alone(str(node.argument("equation")))[0])
    return is_product and len({graph[name].dtype for name in node.operands}) > 1


def _constants(program: ExportedProgram, model: nn.Module, known: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors that `forward` makes, or finds elsewhere than in parameters and buffers (``known``), by the target of their node."""
    found = {}
    originals = {memory_of(tensor): tensor for tensor in known}
    for name in program.graph_signature.inputs_to_lifted_tensor_constants.values():
        value = program.constants[name]
        if attribute_of(model, name) is None and isinstance(value, torch.Tensor):
            # Made under fake tensors, it still knows its numbers.
            numbers = value.constant if isinstance(value, FakeTensor) else value
            if numbers is None:
                raise UnsupportedError([f"{type(model).__name__}: `forward` {_without_numbers(value, program)}"])
            found[name] = originals.get(memory_of(numbers), numbers)
    return found


def _without_numbers(value: torch.Tensor, program: ExportedProgram) -> str:
    own = {getattr(node.meta.get("val"), "fake_mode", None) for node in program.graph.nodes if node.op == "placeholder"}
    if isinstance(value, FakeTensor) and value.fake_mode not in own:
        return (
            "finds a tensor of an earlier trace in a cache (a global, functools.lru_cache): empty it (cache_clear()), and call the model "
            "once before it is compiled, or make that tensor a buffer"
        )
    return "makes a tensor whose numbers are not known; make it a buffer"


def attribute_of(model: nn.Module, path: str) -> torch.Tensor | None:
    """A tensor that a module holds, by its qualified name; ``None`` if there is none."""
    value: Any = model
    for part in path.split("."):
        value = getattr(value, part, None)
    return value if isinstance(value, torch.Tensor) else None


def _autocast(device: torch.device, dtype: torch.dtype | None) -> contextlib.AbstractContextManager[Any]:
    if not torch.amp.is_autocast_available(device.type):
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype, enabled=dtype is not None, cache_enabled=False)


def _export(
    model: nn.Module,
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    any_size: bool,
    questions: Questions,
) -> FunctionalProgram:
    axes = Axes.of_inputs(shapes)
    dynamic = tuple(
        tuple(Dim.AUTO if axis >= 2 and size > 1 else Dim.STATIC for axis, size in enumerate(shape))
        if axes.are_of(shape)
        else tuple(Dim.STATIC for _ in shape)
        for shape in shapes
    )
    with quiet():
        try:
            found = _exported(model, shapes, dtypes, device, dynamic if any_size else None, questions)
            # Where only a product of sizes is fixed (positions of a list of pixels), no size follows from it; few are left anyway.
            is_fixed = any(map(_fixes_a_product, guards_of(found.program)))
            return _exported(model, shapes, dtypes, device, None, questions) if is_fixed else found
        except UnsupportedError:
            raise
        except Exception as error:
            # Tell a model that cannot take this input at all from one that only export cannot follow.
            reason = _eager_refusal(model, shapes, dtypes, device)
            if reason is not None:
                wanted = ", ".join("x".join(map(str, shape)) for shape in shapes)
                raise InputError(f"the model refuses an input of shape {wanted}: {reason}") from error
            # The exporter's solver fails on some size expressions, or takes too long; the sizes at hand are still a capture.
            try:
                return _exported(model, shapes, dtypes, device, None, questions)
            except UnsupportedError:
                raise
            except Exception as of_this_size:
                error = of_this_size  # what is left where no size is a symbol is about the model
            first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            if unknown := _UNKNOWN_OUTPUT.search(first_line):
                raise UnsupportedError(
                    [
                        f"(the model itself): returns a {unknown[1]}, and torch.export does not know what is inside; register the class "
                        "with torch.export.register_dataclass or torch.utils._pytree.register_pytree_node, or return a tuple or a dict"
                    ]
                ) from error
            said = f"{type(error).__name__}: {first_line}"
            leave = _UNCHECKED if is_of_distributions(error) else _LEAVE
            remedy = next((remedy for word, remedy in _REMEDIES.items() if word in said), leave)
            line = line_of(error)
            where = f"the model at {line}" if line else "the model"
            raise UnsupportedError([f"{type(model).__name__}: torch.export cannot follow {where} ({said}); {remedy}"]) from error


#: What torch.export says to a class that is not registered.
_UNKNOWN_OUTPUT = re.compile(r"Found <class '(.*?)'> in output")


def _fixes_a_product(guard: sp.Basic) -> bool:
    if not (isinstance(guard, sp.Eq) and guard.rhs.is_Integer and guard.rhs > 1 and len(guard.lhs.free_symbols) > 1):
        return False
    # Ratios of sizes, which an export also states, are the same for larger images.
    small, large = (guard.lhs.subs(dict.fromkeys(guard.lhs.free_symbols, size)) for size in (2**12, 2**16))
    return bool(small < large)


def _exported(
    model: nn.Module,
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    dynamic: tuple[tuple[Any, ...], ...] | None,
    questions: Questions,
) -> FunctionalProgram:
    mode = contextlib.nullcontext() if device.type == "meta" else FakeTensorMode()
    with mode:
        inputs = _inputs(shapes, dtypes, device, questions)
    # What the exporter remembers of fake tensors costs it more than it saves: sizes are symbols, and few layers are alike.
    quick = torch._dynamo.config.patch(fake_tensor_cache_enabled=False)
    limited = contextlib.nullcontext() if dynamic is None else intricate_sizes_refused()
    around = (composites_cast(device), norms_by_shape(), any_algorithm())
    with contextlib.ExitStack() as stack:
        stack.enter_context(nothing_left(model))  # an attempt must not find what one before it has left
        stack.enter_context(on_whole_parameters(model, mode))
        foreign = stack.enter_context(grad_modes_followed(model, questions))
        for context in (*around, bare_nodes(), states_in_shape(), variances_as_they_are(), quick, limited):
            stack.enter_context(context)
        exported = torch.export.export(model, inputs, dynamic_shapes=_as_parameters(model, dynamic), strict=False)
    _refuse_grad_modes(model, exported)
    _refuse_numbers(model, exported)
    is_cast = torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
    with bare_nodes(), states_in_shape():
        return replace(functional(exported, Casts(device.type) if is_cast else None), foreign=tuple(foreign))


def _inputs(
    shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype], device: torch.device, questions: Questions
) -> tuple[torch.Tensor, ...]:
    modes, no = questions.modes, (False,) * len(shapes)
    last, differentiated = (modes.channels_last or no, modes.inputs or no) if questions.with_true_inputs else (no, no)
    return tuple(
        torch.empty(shape, dtype=dtype, device=device, memory_format=layout).requires_grad_(wants)
        for shape, dtype, layout, wants in zip(shapes, dtypes, _layouts(shapes, last), differentiated, strict=True)
    )


def _layouts(shapes: Sequence[tuple[int, ...]], channels_last: Sequence[bool]) -> list[torch.memory_format]:
    return [CHANNELS_LAST[len(shape)] if last else torch.contiguous_format for shape, last in zip(shapes, channels_last, strict=True)]


def _as_parameters(model: nn.Module, dynamic: tuple[tuple[Any, ...], ...] | None) -> tuple[Any, ...] | None:
    """What is said of each input, those that `forward` takes as one (``*inputs``) together."""
    kinds = [parameter.kind for parameter in inspect.signature(model.forward).parameters.values()]
    if dynamic is None or inspect.Parameter.VAR_POSITIONAL not in kinds:
        return dynamic
    place = kinds.index(inspect.Parameter.VAR_POSITIONAL)
    return (*dynamic[:place], dynamic[place:]) if len(dynamic) > place else dynamic


def _refuse_grad_modes(model: nn.Module, exported: ExportedProgram) -> None:
    """Decomposing forgets under which grad mode an operator ran: its gradient would come out where eager has none.

    Raises:
        UnsupportedError: the exporter has seen a switch, so it was not `forward` that made it.
    """
    for module in exported.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule) and any("set_grad_enabled" in str(node.target) for node in module.graph.nodes):
            raise UnsupportedError(
                [
                    f"{type(model).__name__}: a hook of the model itself switches the grad mode (torch.nn.utils.spectral_norm does), and "
                    "runs outside of what is compiled. Use torch.nn.utils.parametrizations.spectral_norm, or nn.Sequential(model)"
                ]
            )


#: Operators that turn a tensor into a Python number.
_NUMBERS = (torch.ops.aten.item.default, torch.ops.aten._local_scalar_dense.default)


def _refuse_numbers(model: nn.Module, exported: ExportedProgram) -> None:
    """A number that `forward` reads from a tensor is another one at each call, and a captured program has no place for it.

    Raises:
        UnsupportedError: something is computed with one.
    """
    read: dict[torch.fx.Node, str] = {}
    problems: dict[str, None] = {}
    for node in exported.graph.nodes:
        value = node.meta.get("val")
        paths = [read[operand] for operand in node.all_input_nodes if operand in read]
        if node.target in _NUMBERS:
            read[node] = module_path_of(node) or "(the model itself)"
        elif paths and isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            read[node] = paths[0]
        elif paths and (value is not None or node.op == "output"):
            problems |= {f"{path}: item: it computes with a Python number read from a tensor": None for path in paths}
    if problems:
        raise UnsupportedError([f"{problem}; use the tensor itself, of one element, or a plain attribute" for problem in problems])


def _eager_refusal(model: nn.Module, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype], device: torch.device) -> str | None:
    """What eager PyTorch says to a fake input of this shape, ``None`` when it accepts or cannot be asked."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with quiet():
        try:
            with torch.enable_grad(), mode, on_fake_tensors(model, mode):  # what differentiates inside is not to blame on the input
                model(*(torch.empty(shape, dtype=dtype, device=device) for shape, dtype in zip(shapes, dtypes, strict=True)))
        except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
            message = str(error).strip().splitlines() or [""]
            # Data-dependent control flow fails on fake tensors too, but says so in its own type.
            is_own = type(error) in (RuntimeError, ValueError, TypeError, IndexError, AssertionError)
            is_own = is_own and not any(word in message[0] for word in ("Fake", "tensor subclasses"))
            return message[0] or type(error).__name__ if is_own else None
        except Exception:
            return None
    return None


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
    layouts = _layouts(shapes, channels_last)
    with quiet(), torch.inference_mode(False), torch.no_grad(), _autocast(device, autocast), hooks_aside(model):
        try:
            with mode, on_fake_tensors(model, mode), repetitions_followed(model):
                inputs = [torch.empty(s, dtype=d, device=device, memory_format=f) for s, d, f in zip(shapes, dtypes, layouts, strict=True)]
                outputs = pytree.tree_leaves(model(*inputs))
        except Exception:
            return None
    return tuple(is_channels_last(out) for out in outputs if isinstance(out, torch.Tensor))


def is_channels_last(value: torch.Tensor) -> bool:
    """Whether an image is laid out channels last, and not channels first at the same time."""
    layout = CHANNELS_LAST.get(value.dim())
    return layout is not None and value.is_contiguous(memory_format=layout) and not value.is_contiguous()
