"""``sft.check`` and ``sft.position_grids``: operators that run in strips, and centres of output positions, without a plan."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from sft.analysis.frontend.source_location import error_line
from sft.analysis.tiling.position_grid import PositionGrid, output_grids
from sft.api.call_arguments import bind_arguments, bind_shapes, describes_shapes
from sft.api.engine import Engine
from sft.api.inputs import InputShape, hints_of, shapes_of
from sft.common.errors import InputError, MissingValuesError, SftError, UnsupportedError
from sft.distributed.fsdp import FLAT_SHARDS_MESSAGE
from sft.planner.options import Options

__all__ = ["CheckReport", "check", "check_capturable", "checked", "position_grids"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """Result of :func:`check`.

    Attributes:
        ok: whether the model compiles.
        problems: if not, one line per operator, with module path and remedy.
        num_streamed: operators that run in strips.
        num_whole: operators that run on full tensors.
        num_phases: phases between barriers (global values).
        whole_reasons: reasons why operators that read an image run on full tensors: one line each, with module path and remedy.
    """

    ok: bool
    problems: tuple[str, ...] = ()
    num_streamed: int = 0
    num_whole: int = 0
    num_phases: int = 0
    whole_reasons: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.ok:
            return "cannot be compiled exactly:\n" + "\n".join(f"  - {problem}" for problem in self.problems)
        lines = [
            f"exact: {self.num_streamed} operators in strips, {self.num_whole} whole, {self.num_phases} phase(s) between barriers",
            "  in strips: computed for a few rows at a time",
            "  whole: computed on full tensors; mostly vectors with a number per channel, as in norms and pooled heads",
            "  phase: ends at a barrier, a value that needs the whole image, such as the mean of a norm in training",
        ]
        if self.whole_reasons:
            lines += ["on full tensors, if they fit:", *(f"  - {reason}" for reason in self.whole_reasons)]
        return "\n".join(lines)


def check(model: nn.Module, input_shape: InputShape) -> CheckReport:
    """Report which operators of ``model`` run in strips, which cannot, and remedies. Never raises."""
    try:
        return checked(model, input_shape)
    except UnsupportedError as error:
        return CheckReport(ok=False, problems=error.problems)


def checked(model: nn.Module, input_shape: InputShape) -> CheckReport:
    """As :func:`check`.

    Raises:
        MissingValuesError: ``forward`` reads values, and the model is on the meta device.
    """
    try:
        check_capturable(model)
        engine = Engine(model, budget_bytes=2**62, options=Options(), optimizer=None, plan=None)
        input_shape, structure = bind_shapes(model, input_shape)
        shapes = [tuple(256 if extent is None else extent for extent in shape) for shape in shapes_of(input_shape)]
        engine.plan_for_shapes(shapes, hints_of(input_shape), structure)
        phases = engine.phases()
    except MissingValuesError:
        raise
    except UnsupportedError as error:
        return CheckReport(ok=False, problems=error.problems)
    except Exception as error:
        line = None if isinstance(error, SftError) else error_line(error)
        place = f" (at {line})" if line is not None else ""
        return CheckReport(ok=False, problems=(f"{type(error).__name__}: {error}{place}",))
    streamed = sum(len(phase.streamed) for phase in phases.phases)
    whole = sum(len(phase.tail) for phase in phases.phases)
    return CheckReport(
        ok=True,
        num_streamed=streamed,
        num_whole=whole,
        num_phases=len(phases.phases) - bool(phases.prologue),
        whole_reasons=tuple(dict.fromkeys(phases.whole_reasons.values())),
    )


def check_capturable(model: nn.Module) -> None:
    """Refuse modules that cannot be captured.

    Raises:
        InputError: a module without ``forward`` or with its own ``__call__``, a data-parallel wrapper, a sharding wrapper, a scripted
            module, or lazy parameters.
    """
    has_class_forward = inspect.getattr_static(type(model), "forward") is not nn.Module.forward  # scripted modules compute theirs
    if not has_class_forward and "forward" not in vars(model):
        raise InputError(
            f"(the model itself): {type(model).__name__} has no `forward`, so it computes nothing; compile the module that calls its parts"
        )
    if isinstance(getattr(model, "_orig_mod", None), nn.Module):
        raise InputError(
            f"(the model itself): {type(model).__name__} is a result of torch.compile; compile the original model, model._orig_mod"
        )
    if type(model).__call__ is not nn.Module.__call__ and not isinstance(model, (torch.fx.GraphModule, torch.jit.ScriptModule)):
        raise InputError(
            f"(the model itself): {type(model).__name__} overrides `__call__`, which would run twice: around the compiled model and "
            "inside of it; move its code into `forward`, or compile nn.Sequential(model)"
        )
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        raise InputError(
            f"(the model itself): {type(model).__name__} copies gradients between devices around the model; compile model.module, and wrap "
            "the compiled one in nn.parallel.DistributedDataParallel"
        )
    for path, module in model.named_modules():
        if type(module).__module__ == "torch.distributed.fsdp.fully_sharded_data_parallel":
            raise InputError(f"{path or '(the model itself)'}: {FLAT_SHARDS_MESSAGE}")
        label = f"{path or '(the model itself)'}: {type(module).__name__}"
        if isinstance(module, torch.jit.ScriptModule):
            raise InputError(f"{label}: a scripted or traced module cannot be captured; give the original module")
        if any(is_lazy(value) for value in (*module._parameters.values(), *module._buffers.values())):
            raise InputError(f"{label}: its parameters are not initialised yet; call the model once before it is compiled")


def position_grids(model: nn.Module, *inputs: Any) -> tuple[tuple[PositionGrid, ...] | None, ...]:
    """Centre and stride of the positions of every output, in pixels of the first image: for maps and crops.

    A ResNet has position ``i`` centred on pixel ``32 * i``, not on the middle of pixels ``32 * i`` to ``32 * i + 31``. The grids follow
    from the access maps of the operators (padding, stride, dilation, pooling, upsampling, crops); nothing is computed.
    An operator without an access map (attention over all positions) keeps the grid of the latest image of its size, or else divides the
    latest image into equal cells.

    >>> conv = torch.nn.Conv2d(3, 8, 3, stride=2, padding=1)
    >>> position_grids(conv, (1, 3, 64, 65))[0]  # doctest: +NORMALIZE_WHITESPACE
    (PositionGrid(stride_px=Fraction(2, 1), first_centre_px=Fraction(1, 2)),
     PositionGrid(stride_px=Fraction(2, 1), first_centre_px=Fraction(1, 2)))

    Args:
        model: a compiled model, whose captured graph is used, or any ``nn.Module`` that `sft.compile` takes.
        inputs: as in a call, or as shapes.

    Returns:
        For each tensor of the result a grid for each axis (height and width of an image); ``None`` for a result without positions.

    Raises:
        InputError: an extent is missing, or the model cannot be captured.
        UnsupportedError: the model has operators without an exact rule.
    """
    engine = getattr(model, "_sft_engine", None)
    if not isinstance(engine, Engine):
        check_capturable(model)
        engine = Engine(model, budget_bytes=2**62, options=Options(), optimizer=None, plan=None)
    if inputs and not describes_shapes(inputs, {}):
        arguments = bind_arguments(engine.model, inputs, {})
        return output_grids(engine.specialize_for_inputs(arguments.inputs, arguments.structure))
    input_shape, structure = bind_shapes(engine.model, inputs[0] if len(inputs) == 1 and not isinstance(inputs[0], Mapping) else inputs)
    shapes = [tuple(extent for extent in shape if extent is not None) for shape in shapes_of(input_shape)]
    if shapes != list(shapes_of(input_shape)):
        raise InputError(f"position_grids needs every extent, got {inputs!r}")
    return output_grids(engine.specialize_for_shapes(shapes, hints_of(input_shape), structure))
