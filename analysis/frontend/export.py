"""Driver of ``torch.export``: contexts around the trace, a second attempt with constant sizes, and messages about models it cannot follow.

The trace runs on fake tensors, with symbolic sizes where possible. Contexts around it follow habits that the exporter loses, or treats
differently from eager PyTorch. A model that cannot be followed is refused with a reason in its own terms, and not in the exporter's.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import sympy as sp
import torch
from torch import nn
from torch.export import Dim, ExportedProgram

from sft.analysis.frontend.autocast import AutocastPolicy, autocast_composites
from sft.analysis.frontend.call_mode_guards import CallModeGuards
from sft.analysis.frontend.class_labels import ClassLabelMode
from sft.analysis.frontend.functionalize import FunctionalProgram, functionalize
from sft.analysis.frontend.grad_mode import track_grad_modes
from sft.analysis.frontend.graph_builder import module_path_of, symbol_guards
from sft.analysis.frontend.source_location import error_location, is_distributions_error
from sft.analysis.frontend.state_snapshot import preserve_model_state
from sft.analysis.frontend.torch_patches import apply_patches
from sft.analysis.frontend.trace_context import suppress_output, use_fake_tensors, use_unsharded_parameters
from sft.analysis.ir.axes import Axes
from sft.common.errors import InputError, UnsupportedError
from sft.common.torch_internals import REGISTER_PYTREE_NODE, FakeTensorMode

__all__ = ["CHANNELS_LAST", "MIXED_DTYPES", "export_model", "memory_formats_of"]

aten = torch.ops.aten

#: Channels last format by number of dimensions.
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}

MIXED_DTYPES = "operands of two types meet there, as autocast allows in eager PyTorch; cast one of them with .to()"
#: Remedies by words of the exporter's errors.
_REMEDIES = {
    "tensor subclasses": "numbers leave torch there; compute with tensors, or outside of the compiled model",
    "DataDependentOutput": "this operator looks at values to decide what to do; compute it outside of the compiled model",
    "DynamicOutputShape": "the size of what this operator makes depends on values; compute it outside of the compiled model",
    "expected scalar type": MIXED_DTYPES,
}
_DISTRIBUTIONS_REMEDY = "distributions look at their values to check them; make them with validate_args=False"
_CONTROL_FLOW_REMEDY = "control flow that depends on tensor values must move out of `forward`"


#: Rows of the patch table that hold while the exporter decomposes a program, and while it traces one.
_DECOMPOSITION_PATCHES = (
    *("stack_traces", "tracer_stack_traces", "node_metadata"),
    *("rnn_state_shapes", "bincount_dtype", "pooling_sizes", "buffer_hooks"),
)
_EXPORT_PATCHES = (
    *_DECOMPOSITION_PATCHES,
    *("batch_norm_shapes", "grid_sample_shapes", "exporter_minmax", "deterministic_algorithms", "fake_tensor_cache"),
)


def export_model(
    model: nn.Module,
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    any_size: bool,
    guards: CallModeGuards,
) -> FunctionalProgram:
    """Export a model and functionalize the program.

    Args:
        model: the model; it is unchanged afterwards.
        shapes: shapes of its inputs.
        dtypes: dtypes of its inputs.
        device: device of its inputs.
        any_size: make sizes symbols. They become constants where the exporter fails with symbols.
        guards: guards on the call's modes; the trace adds to them.

    Raises:
        UnsupportedError: the model cannot be followed.
        InputError: the model itself refuses inputs of this shape.
    """
    axes = Axes.of_inputs(shapes)
    dynamic = tuple(
        tuple(Dim.AUTO if axis >= 2 and size > 1 else Dim.STATIC for axis, size in enumerate(shape))
        if axes.is_image_shape(shape)
        else tuple(Dim.STATIC for _ in shape)
        for shape in shapes
    )
    with suppress_output():
        try:
            functional = _export_once(model, shapes, dtypes, device, dynamic if any_size else None, guards)
            # A fixed product of sizes (position embeddings of a list of pixels) determines no size, and few sizes satisfy it.
            is_fixed = any(map(_specializes_size_product, symbol_guards(functional.program)))
            return _export_once(model, shapes, dtypes, device, None, guards) if is_fixed else functional
        except UnsupportedError:
            raise
        except Exception as error:
            # Distinguish a model that rejects this input from a model that only the exporter cannot follow.
            reason = _eager_error(model, shapes, dtypes, device)
            if reason is not None:
                sizes = ", ".join("x".join(map(str, shape)) for shape in shapes)
                raise InputError(f"the model refuses an input of shape {sizes}: {reason}{_detector_hint(model, reason)}") from error
            # The exporter's solver fails on some size expressions, or takes too long; constant sizes need no solver.
            try:
                return _export_once(model, shapes, dtypes, device, None, guards)
            except UnsupportedError:
                raise
            except Exception as constant_size_error:
                error = constant_size_error  # without symbols the error is about the model
            raise _export_error(model, error) from error


def _detector_hint(model: nn.Module, reason: str) -> str:
    """Remedy for torchvision's detectors, which in training take lists of boxes."""
    if "targets" not in reason or not isinstance(getattr(model, "backbone", None), nn.Module):
        return ""
    return "; of a detector compile the backbone alone: model.backbone = sft.compile(model.backbone, input_shape)"


def _export_error(model: nn.Module, error: Exception) -> UnsupportedError:
    """The exporter's error as a refusal with a remedy."""
    first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if match := _UNREGISTERED_OUTPUT.search(first_line):
        return UnsupportedError(
            [
                f"(the model itself): returns a {match[1]}, and torch.export does not know what is inside; register the class with "
                f"torch.export.register_dataclass or {REGISTER_PYTREE_NODE}, or return a tuple or a dict"
            ]
        )
    message = f"{type(error).__name__}: {first_line}"
    default_remedy = _DISTRIBUTIONS_REMEDY if is_distributions_error(error) else _CONTROL_FLOW_REMEDY
    remedy = next((remedy for word, remedy in _REMEDIES.items() if word in message), default_remedy)
    line = error_location(error)
    location = f"the model at {line}" if line else "the model"
    return UnsupportedError([f"{type(model).__name__}: torch.export cannot follow {location} ({message}); {remedy}"])


#: The exporter's error about an output of an unregistered class.
_UNREGISTERED_OUTPUT = re.compile(r"Found <class '(.*?)'> in output")


def _specializes_size_product(guard: sp.Basic) -> bool:
    if not (isinstance(guard, sp.Eq) and guard.rhs.is_Integer and guard.rhs > 1 and len(guard.lhs.free_symbols) > 1):
        return False
    # Guards on ratios of sizes, which exports also have, stay constant for larger images.
    small, large = (guard.lhs.subs(dict.fromkeys(guard.lhs.free_symbols, size)) for size in (2**12, 2**16))
    return bool(small < large)


def _export_once(
    model: nn.Module,
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    dynamic: tuple[tuple[Any, ...], ...] | None,
    guards: CallModeGuards,
) -> FunctionalProgram:
    mode = contextlib.nullcontext() if device.type == "meta" else FakeTensorMode()
    with mode:
        inputs = _fake_inputs(shapes, dtypes, device, guards)
    patches = _EXPORT_PATCHES if dynamic is None else (*_EXPORT_PATCHES, "size_complexity_limit")
    with contextlib.ExitStack() as stack:
        stack.enter_context(preserve_model_state(model))  # a second attempt must not see state that the first one left
        stack.enter_context(use_unsharded_parameters(model, mode))
        unregistered = stack.enter_context(track_grad_modes(model, guards))
        stack.enter_context(autocast_composites(device))
        stack.enter_context(apply_patches(*patches))
        exported = torch.export.export(model, inputs, dynamic_shapes=_group_var_positional(model, dynamic), strict=False)
    _refuse_grad_mode_hooks(model, exported)
    _refuse_tensor_to_number(model, exported)
    is_cast = torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
    with apply_patches(*_DECOMPOSITION_PATCHES):
        functional = functionalize(exported, AutocastPolicy(device.type) if is_cast else None)
    return replace(functional, unregistered=tuple(unregistered))


def _fake_inputs(
    shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype], device: torch.device, guards: CallModeGuards
) -> tuple[torch.Tensor, ...]:
    modes, none = guards.modes, (False,) * len(shapes)
    channels_last, requires_grad = (modes.channels_last or none, modes.inputs or none) if guards.with_call_inputs else (none, none)
    return tuple(
        torch.empty(shape, dtype=dtype, device=device, memory_format=memory_format).requires_grad_(needs_grad)
        for shape, dtype, memory_format, needs_grad in zip(
            shapes, dtypes, memory_formats_of(shapes, channels_last), requires_grad, strict=True
        )
    )


def memory_formats_of(shapes: Sequence[tuple[int, ...]], channels_last: Sequence[bool]) -> list[torch.memory_format]:
    """The memory format of each input."""
    return [CHANNELS_LAST[len(shape)] if last else torch.contiguous_format for shape, last in zip(shapes, channels_last, strict=True)]


def _group_var_positional(model: nn.Module, dynamic: tuple[tuple[Any, ...], ...] | None) -> tuple[Any, ...] | None:
    """Dynamic dimensions per parameter of `forward`: those of inputs that it takes as ``*inputs`` are grouped."""
    kinds = [parameter.kind for parameter in inspect.signature(model.forward).parameters.values()]
    if dynamic is None or inspect.Parameter.VAR_POSITIONAL not in kinds:
        return dynamic
    start = kinds.index(inspect.Parameter.VAR_POSITIONAL)
    return (*dynamic[:start], dynamic[start:]) if len(dynamic) > start else dynamic


def _refuse_grad_mode_hooks(model: nn.Module, exported: ExportedProgram) -> None:
    """Refuse switches of the grad mode outside of `forward`: decomposition loses them, and gradients would appear where eager has none.

    Raises:
        UnsupportedError: the exported program has a switch; those of `forward` are hidden from the exporter.
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
_TO_NUMBER_OPS = (aten.item.default, aten._local_scalar_dense.default)


def _refuse_tensor_to_number(model: nn.Module, exported: ExportedProgram) -> None:
    """Refuse computation with Python numbers read from tensors (``item()``): they differ between calls, and a graph has no node for them.

    Raises:
        UnsupportedError: an operator or an output uses such a number.
    """
    numbers: dict[torch.fx.Node, str] = {}
    problems: dict[str, None] = {}
    for node in exported.graph.nodes:
        value = node.meta.get("val")
        paths = [numbers[operand] for operand in node.all_input_nodes if operand in numbers]
        if node.target in _TO_NUMBER_OPS:
            numbers[node] = module_path_of(node) or "(the model itself)"
        elif paths and isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            numbers[node] = paths[0]
        elif paths and (value is not None or node.op == "output"):
            problems |= {f"{path}: item: it computes with a Python number read from a tensor": None for path in paths}
    if problems:
        raise UnsupportedError([f"{problem}; use the tensor itself, of one element, or a plain attribute" for problem in problems])


def _eager_error(model: nn.Module, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype], device: torch.device) -> str | None:
    """The error of the eager model on a fake input of this shape; ``None`` where it accepts the input or does not run on fake tensors."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with suppress_output():
        try:
            with (
                torch.enable_grad(),
                mode,
                use_fake_tensors(model, mode),
                ClassLabelMode(),
            ):  # gradients on: models that differentiate inside need them
                model(*(torch.empty(shape, dtype=dtype, device=device) for shape, dtype in zip(shapes, dtypes, strict=True)))
        except InputError as error:  # of a loss of ours, or of labels
            return str(error)
        except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
            message = str(error).strip().splitlines() or [""]
            # Errors about fake tensors (data-dependent control flow) have types of their own, or these words.
            is_eager_error = type(error) in (RuntimeError, ValueError, TypeError, IndexError, AssertionError)
            is_eager_error = is_eager_error and not any(word in message[0] for word in ("Fake", "tensor subclasses"))
            return message[0] or type(error).__name__ if is_eager_error else None
        except Exception:
            return None
    return None
