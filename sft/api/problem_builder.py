"""The problem stage: ``Phases -> PlanningProblem``.

:func:`build_problem` adds to the phases of a model the facts about one kind of call that plans depend on: the values that need a gradient,
memory layouts, resident bytes, streamed inputs, and the host memory that may be used.
"""

from __future__ import annotations

import torch
from torch import nn

from sft.analysis.frontend.capture import CHANNELS_LAST, Capture, is_in_program_layout, outputs_channels_last, tensor_attribute
from sft.analysis.frontend.trace_context import squeeze_label_channels
from sft.analysis.ir.grad_reachability import grad_reachable_values
from sft.analysis.ir.graph import Graph, Node
from sft.analysis.ir.ops import differentiable_operands
from sft.analysis.tiling.phases import PhasedGraph
from sft.api.call_arguments import use_structure
from sft.api.call_signature import CallSignature
from sft.api.capture_cache import CapturedModel, SpecializedModel
from sft.api.outputs import OutputDestination
from sft.api.settings import PlanningRequest
from sft.api.weight_placement import resident_bytes
from sft.backends.resolve import backend_for
from sft.common.errors import InputError, UnsupportedError
from sft.common.weighted_lru import WeightedLRU
from sft.distributed.fsdp import FLAT_SHARDS_MESSAGE
from sft.planner.problem import PlanningProblem
from sft.planner.resources import Resources
from sft.planner.sized_graph import SizedGraph
from sft.torch_runtime.profiling import table_folders

__all__ = ["build_problem", "resolve_tensor"]


def build_problem(request: PlanningRequest, specialized: SpecializedModel, shared: WeightedLRU | None = None) -> PlanningProblem:
    """The planning problem of one kind of call.

    Args:
        request: the kind of call.
        specialized: the model captured for this kind of call, at its size.
        shared: cache of results that are shared by problems of other sizes.

    Raises:
        UnsupportedError: gradients would reach a tensor that is not registered, or an output that has one only under ``enable_grad``.
        InputError: inputs or outputs cannot be streamed as requested.
    """
    model, signature, settings = request.model, request.signature, request.settings
    captured, phases = specialized.captured, specialized.phases
    graph, device, options = phases.graph, signature.device, settings.options
    rates = settings.rates(device)
    weights = {node.name: resolve_tensor(model, node.target) for node in graph.nodes if node.kind == "parameter"}
    sized = SizedGraph(
        phases=phases,
        requires_grad=_values_with_grad(model, signature, phases, captured.capture),
        channels_last=_channels_last_values(model, signature, graph, captured) - _outputs_in_files(settings.destination, graph),
        weights_in_layout=frozenset(name for name, weight in weights.items() if is_in_program_layout(weight)),
        row_major_weights=frozenset(name for name, weight in weights.items() if weight.is_contiguous()),
        splits_batch=signature.splits_batch,
    )
    weight_bytes = resident_bytes(model, settings.optimizer, settings.sharding, holds_gradients=signature.holds_gradients)
    on_host = rates.device_type in ("cpu", "meta")
    resources = Resources(
        sized=sized,
        resident_bytes=weight_bytes + (0 if on_host else sum(sized.value_bytes(seed) for seed in graph.seeds)),
        from_source=frozenset(name for name, is_read in zip(graph.inputs, signature.from_source, strict=True) if is_read),
        outputs_on_host=settings.destination.on_host,
        on_host=on_host,
        host_budget_bytes=settings.host_budget_bytes(device),
        host_is_files=options.host_folder is not None,
        rates=rates,
        link=rates.link(options.link_bytes_per_second),
        skips_repeats=settings.skips_repeats,
        deterministic=signature.deterministic,
        backend=settings.backend or backend_for(options.backend, device, table_folders(), rates.device_type),
    )
    problem = PlanningProblem(resources=resources, shared=WeightedLRU() if shared is None else shared)
    _check_sources(problem, options.batch_tile)
    settings.destination.check([problem.sized.dtypes[name] for name in graph.outputs])
    return problem


def _check_sources(problem: PlanningProblem, batch_tile: int | None) -> None:
    """Check that streamed inputs support the plan.

    Raises:
        InputError: the model returns one, or it cannot be read in groups of batch elements.
    """
    returned = sorted(problem.resources.from_source.intersection(problem.sized.graph.results))
    if returned:
        raise InputError(f"{', '.join(returned)} is read strip by strip, but the model returns it whole; give it as a tensor")
    if not problem.sized.splits_batch and batch_tile is not None and batch_tile < problem.sized.num_batch:
        raise InputError(
            f"batch_tile {batch_tile} takes {problem.sized.num_batch} batch elements in parts, but a source or sink has no method "
            "samples(batch); add one, or leave out batch_tile"
        )


def _channels_last_values(model: nn.Module, signature: CallSignature, graph: Graph, captured: CapturedModel) -> frozenset[str]:
    """Inputs in channels-last layout, and the outputs to which eager PyTorch would then give this layout."""
    inputs = [name for name, is_last in zip(graph.inputs, signature.channels_last, strict=True) if is_last]
    if not inputs and not any(signature.weights_last) and not captured.permutes:
        return frozenset()
    if not any(len(graph[name].shape) in CHANNELS_LAST for name in graph.outputs):
        return frozenset(inputs)  # no output is an image
    key = signature.capture_key
    with use_structure(model, key.structure), squeeze_label_channels(model, key.lacking_channels):
        flags = outputs_channels_last(model, signature.shapes, key.dtypes, key.device, signature.channels_last, autocast=key.autocast)
    if flags is None and inputs:  # eager PyTorch cannot be run: the outputs follow the inputs
        return frozenset((*inputs, *graph.outputs))
    return frozenset((*inputs, *(name for name, is_last in zip(graph.outputs, flags or (), strict=False) if is_last)))


def _outputs_in_files(destination: OutputDestination, graph: Graph) -> frozenset[str]:
    """Outputs that are written to files, which are in C order."""
    names = zip(graph.outputs, destination.paths, strict=False)
    return frozenset(name for name, path in names if path is not None and graph[name].kind == "operator")


def _values_with_grad(model: nn.Module, signature: CallSignature, phases: PhasedGraph, capture: Capture) -> frozenset[str]:
    """Values that need a gradient.

    Raises:
        UnsupportedError: one of them is an unregistered tensor, a loss that `forward` keeps in an attribute, or an output that has a
            gradient only under ``enable_grad``.
    """
    if not signature.grad_enabled and not capture.enables_grad:
        return frozenset()
    values: set[str] = set()
    unregistered: list[str] = []
    reachable = grad_reachable_values(phases.graph)
    input_grads = iter(signature.modes.inputs)
    for node in phases.graph.nodes:
        if node.kind == "input":
            needs_grad = next(input_grads)
        elif node.kind in ("parameter", "buffer"):
            needs_grad = node.name in reachable and resolve_tensor(model, node.target).requires_grad
        elif node.kind == "operator":
            needs_grad = node.name in reachable and any(name in values for name in differentiable_operands(node))
        else:
            needs_grad = False
        if needs_grad:
            values.add(node.name)
        if node.kind == "constant" and node.name in reachable:
            unregistered += _unregistered_tensor(model, node, capture)
    if not signature.grad_enabled:
        if not values.isdisjoint(phases.graph.outputs):
            raise UnsupportedError([_ENABLE_GRAD_MESSAGE.format(type(model).__name__)])
        return frozenset()
    if unregistered and any(getattr(module, "_is_fsdp_managed_module", False) for module in model.modules()):
        raise UnsupportedError([f"{type(model).__name__}: {FLAT_SHARDS_MESSAGE}"])
    if unregistered:
        raise UnsupportedError([_UNREGISTERED_MESSAGE.format(name) for name in unregistered])
    if values and capture.kept_losses:
        raise UnsupportedError([_KEPT_LOSS_MESSAGE.format(name) for name in capture.kept_losses])
    return frozenset(values)


def _unregistered_tensor(model: nn.Module, node: Node, capture: Capture) -> list[str]:
    """The name of a constant that requires a gradient; empty for other constants."""
    name = capture.differentiable_constants.get(node.target)
    if name is None and node.target not in capture.constants and resolve_tensor(model, node.target).requires_grad:
        name = node.target
    return [] if name is None else [name]


_ENABLE_GRAD_MESSAGE = (
    "{}: `forward` switches gradients on (torch.enable_grad), so that in eager PyTorch its outputs have one although it is called without; "
    "call it outside of torch.no_grad, or leave the switch to the caller"
)

_KEPT_LOSS_MESSAGE = (
    "{}: `forward` keeps a number with a gradient in this attribute, such as an auxiliary loss, and no output depends on it; a compiled "
    "model sets no attributes. Return it: compile a module whose forward returns it with the output of this model"
)

_UNREGISTERED_MESSAGE = (
    "{}: a tensor that requires a gradient and is not a parameter of the model; make it an nn.Parameter of one of its modules (of modules "
    "in a plain list: make it an nn.ModuleList), or detach it"
)


def resolve_tensor(model: nn.Module, path: str) -> torch.Tensor:
    """A tensor of the model by its path, also under ``functional_call``, which replaces parameters by other tensors."""
    value = tensor_attribute(model, path)
    assert value is not None
    return value
