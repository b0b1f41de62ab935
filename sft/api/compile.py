"""``sft.compile`` and ``sft.plan``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from sft.api.check import check_capturable
from sft.api.compiled_module import CompiledModule, wrap_module
from sft.api.engine import Engine
from sft.api.inputs import InputShape, dtypes_of, examples_of, input_grads_of, shapes_of
from sft.api.outputs import OutputArgument, resolve_output
from sft.api.weight_placement import available_device, check_can_stream
from sft.common.byte_units import parse_bytes
from sft.common.errors import InputError
from sft.distributed.mesh import resolve_mesh
from sft.planner.options import Options
from sft.planner.plan import Plan
from sft.torch_runtime.streamed_parameters import StreamedParameters

__all__ = ["compile", "plan"]

#: The memory of a small card.
DEFAULT_BUDGET = "11GiB"


def compile(
    model: nn.Module,
    input_shape: InputShape,
    *,
    budget: float | str | None = None,
    device: torch.device | str | None = None,
    optimizer: torch.optim.Optimizer | int | None = None,
    output: OutputArgument = "device",
    plan: Plan | None = None,
    mesh: Any = None,
    options: Options | None = None,
) -> Any:
    """A module that computes what ``model`` computes, with the same gradients, inside ``budget`` bytes.

    Args:
        model: any ``nn.Module`` of supported operators. It is shared, not copied. Its weights may be sharded: by ``fully_shard`` (FSDP2),
            applied before, to the model itself and any of its parts. Outputs, gradients and updates are those of whole weights.
        input_shape: shape of the input, ``(N, C, H, W)``, or a sequence of shapes for several inputs. Inputs of three to five dimensions
            are images; a model without any (vectors ``(N, F)``, token ids ``(N, L)``) runs in stages on whole tensors. ``None`` stands
            for an extent that varies; then planning waits for the first call. A new size re-plans on its first use. A tensor (on any
            device, such as ``torch.empty(1, H, W, dtype=torch.long, device="meta")``) stands for its shape, for the type of its numbers
            where these are whole, and for inputs that want a gradient where it requires one. Or the input itself where it will be read in
            strips (an array, a slide, a source): the plan then is one for inputs that are never resident.
        budget: what the card may hold, in bytes or as ``"11GiB"``: parameters, their gradients, buffers, the optimizer's state
            when ``optimizer`` is given, inputs, outputs, and all that the step makes. Default: `None` (11 GiB, or the budget that a given
            ``plan`` was made for).
        device: where to run; the model is moved there. The model's own device by default.
        optimizer: counts its state into the budget: what it holds, or before its first step what it will. Or the bytes of a state that is
            known otherwise.
        output: where outputs go, those of every call. ``"device"``; ``"band"`` (see ``mesh``); ``"host"`` for CPU tensors, which may be
            larger than the device: they leave it strip by strip, losses on them run on the host, and their gradients enter strip by
            strip. Or the path of a ``.npy`` file (a list, one for each output, where there are several): the tensor is then the mapped
            file, which appears when a call has succeeded and is replaced by the next call. None of their bytes are in ``budget``.
        plan: a plan made before, by :func:`plan` or from JSON, used for inputs of its shape that, like the outputs, are where it says. One
            that needs more than ``budget`` here (it may have been made on another machine) is refused.
        mesh: a ``torch.distributed`` ``DeviceMesh`` with dimensions ``"replica"`` and ``"band"`` (one may be left out): all its ranks
            compile and call the model together. Ranks along ``"band"`` share one image, of which each runs a band of rows; all of them
            give the same input (a tensor of the whole image, or a source, of which each reads its own rows and a few of its neighbours').
            Outputs are whole and equal on all of them, so that each computes the same loss; with ``output="band"`` outputs that are
            images stay where they are made, ``net.band_rows(output)`` says which rows those are, and the loss that is minimised is the sum
            over bands of what each computes of its own rows. Ranks along ``"replica"`` have images of their own. After ``backward`` the
            parameters' gradients are equal on all ranks: sums over bands, means over replicas. Or a pair ``(replicas, bands)``, to plan
            without any processes. ``budget`` is each rank's.
        options: wishes about the plan.

    Raises:
        UnsupportedError: operators without an exact rule, each with its module path and a remedy.
        BudgetError: no plan fits.
        InputError: an argument is wrong.
    """
    destination = resolve_output(output)
    if not isinstance(model, nn.Module):
        raise InputError(f"model must be an nn.Module, got {type(model).__name__}")
    if isinstance(model, CompiledModule):
        raise InputError("the model is compiled already; compile the original")
    check_capturable(model)
    if options is not None and not isinstance(options, Options):
        raise InputError(f"options must be an sft.Options, got {type(options).__name__}")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer) and (type(optimizer) is not int or optimizer < 0):
        given = repr(optimizer) if isinstance(optimizer, int) else type(optimizer).__name__
        raise InputError(f"optimizer must be a torch.optim.Optimizer, or its state's bytes, got {given}; leave it out where there is none")
    resolved = resolve_mesh(mesh, (options or Options()).mesh_timeout)
    if destination.in_bands and resolved is None:
        raise InputError("output='band' is for several ranks: give a mesh, or output='device'")
    if plan is not None and not isinstance(plan, Plan):
        raise InputError(f"plan must be an sft.Plan, got {type(plan).__name__}; read JSON with sft.Plan.from_json")
    if plan is not None and (resolved is not None or plan.mesh is not None):
        raise InputError("plan: plans that are handed in are for one device; leave plan out with mesh, and make another without")
    examples = examples_of(input_shape)
    shapes = () if examples else shapes_of(input_shape)
    if budget is None:
        budget = DEFAULT_BUDGET if plan is None else plan.budget_bytes
    budget_bytes = parse_bytes(budget)
    if (options or Options()).streams_weights:
        check_can_stream(resolved, None)
    if device is not None:
        _move_to_device(model, available_device(device), options or Options())
    engine = Engine(
        model,
        budget_bytes=budget_bytes,
        options=options or Options(),
        optimizer=optimizer,
        plan=plan,
        destination=destination,
        mesh=resolved,
    )
    net = wrap_module(model, engine)
    if examples:
        engine.last_plan = engine.plan_for_inputs(examples)
    elif all(extent is not None for shape in shapes for extent in shape):
        known = [tuple(extent for extent in shape if extent is not None) for shape in shapes]
        engine.last_plan = engine.plan_for_shapes(known, dtypes_of(input_shape), input_grads_of(input_shape))
    return net


def plan(
    model: nn.Module,
    input_shape: InputShape,
    *,
    budget: float | str = DEFAULT_BUDGET,
    options: Options | None = None,
    **compile_arguments: Any,
) -> Plan:
    """The plan that :func:`compile` would use; runs nothing. The model may be on the meta device.

    Of a model on a GPU the parts of the plan are tried there, each once on numbers of its own: only the device knows what it takes besides
    tensors (``Plan.overhead_bytes``).

    Raises:
        UnsupportedError, BudgetError, InputError: as :func:`compile`.
    """
    net = compile(model, input_shape, budget=budget, options=options, **compile_arguments)
    if net._sft_engine.last_plan is None:
        raise InputError(f"a plan needs every extent, got input_shape {input_shape!r}")
    found: Plan = net._sft_engine.last_plan
    return found


def _move_to_device(model: nn.Module, device: torch.device, options: Options) -> None:
    """Move a model to a device: of one whose weights are streamed only what is resident."""
    if not options.streams_weights:
        model.to(device)
        return
    taken = StreamedParameters.of(model, device, options.weights_file)
    own = {id(param) for param in taken.params.values()}
    with torch.no_grad():
        for module in model.modules():
            for param in module._parameters.values():
                if param is not None and id(param) not in own:
                    param.data = param.to(device)
            module._buffers.update((name, None if buffer is None else buffer.to(device)) for name, buffer in module._buffers.items())
