"""The entry points ``sft.compile`` and ``sft.plan``: they check the arguments, and delegate to an engine."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import nn

from sft.api.call_arguments import bind_shapes
from sft.api.check import check_capturable
from sft.api.compiled_handle import of
from sft.api.compiled_module import CompiledModule, wrap_module
from sft.api.engine import Engine
from sft.api.inputs import InputShape, examples_of, hints_of, shapes_of
from sft.api.memory_limits import AUTO, is_automatic, planned_device_type, resolve_limits
from sft.api.outputs import OutputArgument, resolve_output
from sft.api.weight_placement import available_device, check_can_stream
from sft.common.byte_units import parse_bytes
from sft.common.errors import InputError, UnsupportedError
from sft.distributed.mesh import resolve_mesh
from sft.planner.options import Options
from sft.planner.plan import Plan
from sft.torch_runtime.streamed_parameters import StreamedParameters

__all__ = ["compile", "plan"]


ModuleT = TypeVar("ModuleT", bound=nn.Module)


def compile(
    model: ModuleT,
    input_shape: InputShape,
    *,
    budget: float | str | None = None,
    device: torch.device | str | None = None,
    optimizer: torch.optim.Optimizer | int | None = None,
    output: OutputArgument = "device",
    plan: Plan | None = None,
    mesh: Any = None,
    options: Options | None = None,
) -> ModuleT:
    """Wrap ``model`` in a module that computes the same outputs and gradients inside ``budget`` bytes.

    Args:
        model: an ``nn.Module`` of supported operators. It is shared, not copied. ``fully_shard`` (FSDP2) may have sharded its weights:
            outputs, gradients and updates are those of unsharded weights.
        input_shape: shape of the input, such as ``(N, C, H, W)``, or a sequence of shapes for several inputs. Inputs of three to five
            dimensions are images; a model without images (vectors ``(N, F)``, token ids ``(N, L)``) runs in stages on full tensors.
            A new size is planned at its first use. In place of a shape:

            - ``None`` for an extent that varies: planning waits for the first call;
            - a tensor on any device, such as ``torch.empty(1, H, W, dtype=torch.long, device="meta")``: its shape, integer type,
              channels-last layout, and ``requires_grad``;
            - the input itself (an array, a slide, a source), which is read in strips and never resident;
            - a dictionary for calls by name, ``net(**batch)``; inside a sequence, for a dictionary among the arguments, ``net(batch)``;
            - a list of shapes inside a sequence, ``[[first, second]]``, for a list among the arguments, ``net([x, y])``.
        budget: bytes of device memory, as a number or ``"11GiB"``: parameters, their gradients, buffers, the optimizer's state
            if ``optimizer`` is given, inputs, outputs, and all memory of the step. On a mesh, of each rank. ``"auto"`` is what the device
            has free, less a margin, read once, here; ``plan.explain()`` states it, and all ranks of a mesh take the least. Default:
            `None` (the budget of ``plan``, otherwise ``"auto"``).
        device: device of the computation, to which the model is moved. For a model on the meta device, the kind of device to plan for
            (``"cpu"`` or ``"cuda"``), which need not be in this machine. Default: `None` (the model's device).
        optimizer: its state counts in the budget: the present state, or before its first step the projected one. Or the bytes of the
            state.
        output: destination of the outputs of every call. Outside of ``"device"`` their bytes do not count in ``budget``.

            - ``"device"``;
            - ``"host"``: CPU tensors, which may be larger than the device. They leave it strip by strip, losses on them run on the host,
              and their gradients enter strip by strip;
            - the path of a ``.npy`` file, or a list with a path for each of several outputs: a tensor that maps the file. The file
              appears when a call has succeeded, and the next call replaces it;
            - ``"band"``: see ``mesh``.
        plan: a plan from :func:`plan` or from JSON, used for calls with its input shapes and its placements of inputs and outputs. A plan
            that needs more than ``budget`` on this machine is refused.
        mesh: a ``torch.distributed`` ``DeviceMesh`` with dimensions ``"replica"`` and ``"band"`` (one may be left out), or a pair
            ``(replicas, bands)``, to plan without processes. All ranks compile and call the model together.

            - Ranks along ``"band"`` share an image: each computes a band of rows. All pass the same input (a tensor of the full image, or
              a source, of which each rank reads its own rows and a halo). Outputs are complete and equal on all of them.
            - With ``output="band"`` each rank has its own rows of image outputs, ``net.band_rows(output)``. The minimised loss is the sum
              over bands of each rank's loss.
            - Ranks along ``"replica"`` have different images.
            - After ``backward`` the gradients of parameters are equal on all ranks: sums over bands, means over replicas.
        options: options of the plan.

    Raises:
        UnsupportedError: operators without an exact rule, each with its module path and a remedy.
        BudgetError: no plan fits.
        InputError: an argument is wrong.
    """
    destination = resolve_output(output)
    _check_types(model, options, optimizer, plan)
    options = options or Options()
    resolved_mesh = resolve_mesh(mesh, options.mesh_timeout)
    if destination.in_bands and resolved_mesh is None:
        raise InputError("output='band' is for several ranks: give a mesh, or output='device'")
    if plan is not None and (resolved_mesh is not None or plan.mesh is not None):
        raise InputError("plan is for a single device: leave it out with mesh=..., or make it again without a mesh")
    input_shape, structure = bind_shapes(model, input_shape)
    examples = examples_of(input_shape)
    shapes = () if examples else shapes_of(input_shape)
    if budget is None:
        budget = AUTO if plan is None else plan.budget_bytes
    if not is_automatic(budget):
        budget = parse_bytes(budget)  # a mistake is reported before the model moves
    if options.streams_weights:
        check_can_stream(resolved_mesh, None)
    device_type = planned_device_type(model, device)
    if device is not None and not device_type:
        _move_to_device(model, available_device(device), options)
    budget_bytes, limits = resolve_limits(model, options, optimizer, budget=budget, device_type=device_type)
    engine = Engine(
        model,
        budget_bytes=budget_bytes,
        options=options,
        optimizer=optimizer,
        plan=plan,
        destination=destination,
        mesh=resolved_mesh,
        limits=limits,
    )
    net: ModuleT = wrap_module(model, engine)
    try:
        if examples:
            engine.last_plan = engine.plan_for_inputs(examples, structure=structure)
        elif all(extent is not None for shape in shapes for extent in shape):
            static_shapes = [tuple(extent for extent in shape if extent is not None) for shape in shapes]
            engine.last_plan = engine.plan_for_shapes(static_shapes, hints_of(input_shape), structure)
    except UnsupportedError as error:
        is_plain = isinstance(input_shape, tuple) and all(isinstance(extent, int) for extent in input_shape)
        shape_text = repr(input_shape) if is_plain else "input_shape"
        error.args = (f"{error}\nTry: print(sft.check(model, {shape_text}))",)
        raise
    return net


def plan(
    model: nn.Module,
    input_shape: InputShape,
    *,
    budget: float | str | None = None,
    options: Options | None = None,
    **compile_arguments: Any,
) -> Plan:
    """The plan that :func:`compile` would use; no step is run. The model may be on the meta device.

    For a model on a GPU each program of the plan is run once on dummy data: only the device knows the workspaces of its libraries. With
    ``device="cuda"`` and a model on the meta device nothing runs, and these workspaces are not counted (``Plan.overhead_bytes``).

    Raises:
        UnsupportedError, BudgetError, InputError: as :func:`compile`.
    """
    net = compile(model, input_shape, budget=budget, options=options, **compile_arguments)
    result = of(net).engine.last_plan
    if result is None:
        raise InputError(f"a plan needs every extent, got input_shape {input_shape!r}")
    return result


def _kind(value: object) -> str:
    """Type of a wrong argument, for a message."""
    return f"the class {value.__name__}; give an instance" if isinstance(value, type) else type(value).__name__


def _check_types(model: Any, options: Any, optimizer: Any, plan: Any) -> None:
    """Refuse arguments of other types, and models that are compiled already or cannot be captured.

    Raises:
        InputError: an argument is wrong.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"model must be an nn.Module, got {_kind(model)}")
    if isinstance(model, CompiledModule):
        raise InputError("the model is compiled already; compile the original")
    check_capturable(model)
    if options is not None and not isinstance(options, Options):
        raise InputError(f"options must be an sft.Options, got {_kind(options)}; write sft.Options(...)")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer) and (type(optimizer) is not int or optimizer < 0):
        received = repr(optimizer) if isinstance(optimizer, int) else _kind(optimizer)
        raise InputError(
            f"optimizer must be a torch.optim.Optimizer, or its state's bytes, got {received}; leave it out for training without one"
        )
    if plan is not None and not isinstance(plan, Plan):
        raise InputError(f"plan must be an sft.Plan, got {type(plan).__name__}; read JSON with sft.Plan.from_json")


def _move_to_device(model: nn.Module, device: torch.device, options: Options) -> None:
    """Move a model to a device; with streamed weights only its resident tensors."""
    if not options.streams_weights:
        model.to(device)
        return
    streamed = StreamedParameters.of(model, device, options.weights_file)
    streamed_ids = {id(param) for param in streamed.params.values()}
    with torch.no_grad():
        for module in model.modules():
            for param in module._parameters.values():
                if param is not None and id(param) not in streamed_ids:
                    param.data = param.to(device)
            module._buffers.update((name, None if buffer is None else buffer.to(device)) for name, buffer in module._buffers.items())
