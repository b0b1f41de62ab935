"""Driver of ``torch.export``: contexts around the trace, a second attempt with constant sizes, and messages about models it cannot follow.

The trace runs on fake tensors, with symbolic sizes where possible. Contexts around it follow habits that the exporter loses, or treats
differently from eager PyTorch. A model that cannot be followed is refused with a reason in its own terms, and not in the exporter's.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import sympy as sp
import torch
from torch import nn
from torch.export import Dim, ExportedProgram

from sft.analysis.frontend.aliasing.overlapping_writes import (
    has_symbolic_overlaps,
    refuse_overlapping_writes,
    refuse_writes_to_shared_buffers,
)
from sft.analysis.frontend.autocast import AutocastPolicy, autocast_composites
from sft.analysis.frontend.call_mode_guards import CallModeGuards
from sft.analysis.frontend.constants.kept_tensors import watch_kept_tensors
from sft.analysis.frontend.constants.tracking import ConstantTracker, model_tensors
from sft.analysis.frontend.diagnostics.export_errors import (
    refusal_of,
    refuse_reads_of_updated_buffers,
    refuse_tensor_to_number,
    refuse_writes_to_empty_buffers,
)
from sft.analysis.frontend.diagnostics.model_errors import eager_error, model_error
from sft.analysis.frontend.functionalize import FunctionalProgram, functionalize
from sft.analysis.frontend.grad_mode import track_grad_modes
from sft.analysis.frontend.graph_builder import symbol_guards
from sft.analysis.frontend.state_snapshot import preserve_model_state
from sft.analysis.frontend.torch_patches import apply_patches
from sft.analysis.frontend.trace_context import suppress_output, use_unsharded_parameters
from sft.analysis.ir.axes import Axes
from sft.common.errors import SourceError, UnsupportedError
from sft.common.torch_internals import FakeTensorMode

__all__ = ["CHANNELS_LAST", "export_model", "memory_formats_of"]

#: Channels last format by number of dimensions.
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}

#: Rows of the patch table that hold while the exporter decomposes a program, and while it traces one.
_DECOMPOSITION_PATCHES = (
    *("stack_traces", "tracer_stack_traces", "mode_stacks", "node_metadata", "generated_code", "composite_operators"),
    *("composite_kernels", "rnn_state_shapes", "bincount_dtype", "pooling_sizes", "buffer_hooks"),
)
_EXPORT_PATCHES = (
    *_DECOMPOSITION_PATCHES,
    *(
        "batch_norm_shapes",
        "grid_sample_shapes",
        "pointwise_shapes",
        "upsample_linear_shapes",
        "upsample_nearest_shapes",
        "exporter_minmax",
        "deterministic_algorithms",
        "fake_tensor_cache",
        "module_stack",
        "ranges_of_sizes",
    ),
)

#: Modules that the exporter imports on first use.
_LAZY_MODULES = ("torch._dynamo", "torch.export._trace")


def export_model(
    model: nn.Module,
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    any_size: bool,
    guards: CallModeGuards,
    *,
    any_batch: bool = False,
) -> FunctionalProgram:
    """Export a model and functionalize the program.

    Args:
        model: the model; it is unchanged afterwards.
        shapes: shapes of its inputs.
        dtypes: dtypes of its inputs.
        device: device of its inputs.
        any_size: make sizes symbols. They become constants where the exporter fails with symbols.
        guards: guards on the call's modes; the trace adds to them.
        any_batch: make the number of samples a symbol, in the same way.

    Raises:
        UnsupportedError: the model cannot be followed.
        InputError: an operator of the model refuses inputs of this shape.
        SourceError: the exporter cannot be loaded, such as without a folder for temporary files.
        Exception: `forward` itself raises it.
    """
    _load_exporter()
    exporter = _Exporter(model, shapes, dtypes, device, guards)
    with suppress_output():
        try:
            functional = exporter.export(_dynamic_dims(shapes, any_size=any_size, any_batch=any_batch))
            # A fixed product of sizes (position embeddings of a list of pixels) determines no size, and few sizes satisfy it.
            is_fixed = any(map(_specializes_size_product, symbol_guards(functional.program)))
            if not is_fixed and not exporter.needs_constant_sizes:
                return functional
        except Exception as error:
            if not exporter.needs_constant_sizes:
                if isinstance(error, UnsupportedError):
                    raise
                exporter.raise_error_of_model(error)
        # The exporter's solver fails on some size expressions, or takes too long; constant sizes need no solver.
        try:
            return exporter.export(None)
        except UnsupportedError:
            raise
        except Exception as error:  # without symbols the error is about the model
            exporter.raise_error_of_model(error)
            raise refusal_of(model, error, exporter.tracker.unknown_reads) from error


def _dynamic_dims(shapes: Sequence[tuple[int, ...]], *, any_size: bool, any_batch: bool) -> tuple[tuple[Any, ...], ...] | None:
    """Symbolic and constant dimensions of each input; ``None`` if all are constant. The exporter makes no symbol of an extent of 1."""
    axes, num_samples = Axes.of_inputs(shapes), Axes.num_samples_of(shapes)
    dynamic = tuple(
        tuple(
            Dim.AUTO
            if size > 1 and ((any_size and axis >= 2 and axes.is_image_shape(shape)) or (any_batch and axis == 0 and size == num_samples))
            else Dim.STATIC
            for axis, size in enumerate(shape)
        )
        for shape in shapes
    )
    return dynamic if any_size or any_batch else None


def _load_exporter() -> None:
    """Import the parts of torch that the exporter loads on first use; they write files.

    Raises:
        SourceError: they cannot be imported. The error of torch would look like one of the model.
    """
    try:
        tempfile.gettempdir()  # first: a failed import cannot be repeated in the same process
        for name in _LAZY_MODULES:
            importlib.import_module(name)
    except Exception as error:
        raise SourceError(
            f"cannot load torch's exporter, which captures the model ({type(error).__name__}: {str(error).rstrip('.')}). It writes "
            "temporary files: name a folder that can be written with TMPDIR, make room on its disk, and raise the limit on file sizes "
            "(`ulimit -f`)."
        ) from error


def _specializes_size_product(guard: sp.Basic) -> bool:
    if not (isinstance(guard, sp.Eq) and guard.rhs.is_Integer and guard.rhs > 1 and len(guard.lhs.free_symbols) > 1):
        return False
    # Guards on ratios of sizes, which exports also have, stay constant for larger images.
    small, large = (guard.lhs.subs(dict.fromkeys(guard.lhs.free_symbols, size)) for size in (2**12, 2**16))
    return bool(small < large)


class _Exporter:
    """Exports one model, with symbolic or constant sizes.

    Args:
        model: the model.
        shapes: shapes of its inputs.
        dtypes: dtypes of its inputs.
        device: device of its inputs.
        guards: guards on the call's modes; the trace adds to them.

    Attributes:
        tracker: constants of the last trace.
        has_symbolic_overlaps: writes of the last trace may overlap at some sizes.
    """

    def __init__(
        self,
        model: nn.Module,
        shapes: Sequence[tuple[int, ...]],
        dtypes: Sequence[torch.dtype],
        device: torch.device,
        guards: CallModeGuards,
    ) -> None:
        self._model, self._shapes, self._dtypes, self._device, self._guards = model, shapes, dtypes, device, guards
        self._accepts_input = False
        self.tracker = ConstantTracker(model, {}, is_any_size=False)
        self.has_symbolic_overlaps = False

    @property
    def needs_constant_sizes(self) -> bool:
        """True where the last trace depends on the sizes in ways that a program with symbols does not show."""
        return self.has_symbolic_overlaps or self.tracker.has_size_dependent_reads

    def export(self, dynamic: tuple[tuple[Any, ...], ...] | None) -> FunctionalProgram:
        """Export the model and functionalize the program; ``dynamic`` are its symbolic sizes, ``None`` for constant ones."""
        model, device = self._model, self._device
        mode = contextlib.nullcontext() if device.type == "meta" else FakeTensorMode()
        with mode:
            inputs = _fake_inputs(self._shapes, self._dtypes, device, self._guards)
        patches = _EXPORT_PATCHES if dynamic is None else (*_EXPORT_PATCHES, "size_complexity_limit")
        with contextlib.ExitStack() as stack:
            stack.enter_context(preserve_model_state(model))  # a second attempt must not see state that the first one left
            stack.enter_context(use_unsharded_parameters(model, mode))
            self.tracker = ConstantTracker(model, model_tensors(model), is_any_size=dynamic is not None)
            unregistered = stack.enter_context(track_grad_modes(model, self._guards, self.tracker))
            kept = stack.enter_context(watch_kept_tensors(model, self.tracker))
            stack.enter_context(autocast_composites(device))
            stack.enter_context(apply_patches(*patches))
            exported = torch.export.export(model, inputs, dynamic_shapes=_group_var_positional(model, dynamic), strict=False)
        self.has_symbolic_overlaps = has_symbolic_overlaps(exported)
        if not self.has_symbolic_overlaps:
            refuse_overlapping_writes(model, exported)
        _refuse_grad_mode_hooks(model, exported)
        refuse_tensor_to_number(exported, self.tracker.unknown_reads)
        is_cast = torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
        with apply_patches(*_DECOMPOSITION_PATCHES):
            functional = functionalize(exported, AutocastPolicy(device.type) if is_cast else None)
        refuse_reads_of_updated_buffers(model, self.tracker.reads, functional.updates.values())
        refuse_writes_to_empty_buffers(model, functional.updates.values())
        refuse_writes_to_shared_buffers(model, functional.program, functional.updates.values())
        return replace(functional, unregistered=tuple(unregistered), reads=tuple(self.tracker.reads), kept=next(iter(kept), None))

    def raise_error_of_model(self, error: Exception) -> None:
        """Raise the error of the eager model on these inputs, if it has one; ``error`` is that of the exporter."""
        if self._accepts_input:
            return
        own_error = eager_error(self._model, self._shapes, self._dtypes, self._device)
        if own_error is None:
            self._accepts_input = True
            return
        raised = model_error(own_error, self._model, self._shapes, self._dtypes)
        raise raised from (None if raised is own_error else own_error)


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
