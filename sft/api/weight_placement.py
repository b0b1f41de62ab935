"""Weight placement: resident bytes of a model, the streamed weights of a plan, and the checks that streaming is possible."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from sft.analysis.ir.graph import Graph
from sft.common.byte_units import format_bytes, size_at_least
from sft.common.errors import BudgetError, InputError, UnsupportedError
from sft.distributed.fsdp import ShardedWeights, local_bytes
from sft.planner.options import Options
from sft.runtime.weight_prefetch import GradientTransfer, StreamedWeights
from sft.torch_runtime.streamed_parameters import StreamedParameters, record_bytes, streamable_parameters

__all__ = ["available_device", "check_can_stream", "check_optimizer_step", "resident_bytes", "weights_to_stream"]


def resident_bytes(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | int | None,
    sharding: ShardedWeights | None = None,
    *,
    holds_gradients: bool = False,
    streamed: Collection[str] = (),
) -> int:
    """Device bytes of parameters, their gradients, buffers and the optimizer's state, whether the model runs or not.

    Args:
        model: the model.
        optimizer: the optimizer, if its state counts, or the bytes of that state.
        sharding: the sharded parameters.
        holds_gradients: whether full gradients of sharded parameters are being accumulated.
        streamed: parameters that are off the device, with their gradients and state.
    """
    sharded = {} if sharding is None else sharding.sizes
    parameters = [p for name, p in model.named_parameters() if name not in sharded and name not in streamed]
    num_bytes = 0 if sharding is None else sharding.resident_bytes(holds_gradients=holds_gradients)
    num_bytes += sum(p.numel() * p.element_size() for p in parameters)
    num_bytes += sum(p.numel() * p.element_size() for p in parameters if p.requires_grad)
    num_bytes += sum(b.numel() * b.element_size() for b in model.buffers())
    return num_bytes + _optimizer_bytes(optimizer, {id(p) for name, p in model.named_parameters() if name in streamed})


def _optimizer_bytes(optimizer: torch.optim.Optimizer | int | None, streamed_ids: Collection[int]) -> int:
    """Bytes of an optimizer's state, present or after its first step, without that of streamed parameters."""
    if optimizer is None or isinstance(optimizer, int):
        return optimizer or 0
    states = (state for param, state in optimizer.state.items() if id(param) not in streamed_ids)
    present_bytes = sum(local_bytes(v) for s in states for v in s.values() if isinstance(v, torch.Tensor))
    if present_bytes:
        return present_bytes
    total = 0
    for group in optimizer.param_groups:
        size = sum(local_bytes(p) for p in group["params"] if p.requires_grad and id(p) not in streamed_ids)
        if isinstance(optimizer, torch.optim.SGD):
            copies = 1 if group.get("momentum") else 0
        else:
            copies = 3 if group.get("amsgrad") else 2
        total += copies * size
    return total


def weights_to_stream(model: nn.Module, graph: Graph, device: torch.device, options: Options) -> StreamedWeights:
    """The streamed weights of a model, as a plan counts them, whether they are streamed already or will be.

    Raises:
        UnsupportedError: a parameter cannot be streamed.
    """
    streamable, streamed = streamable_parameters(model), StreamedParameters.known(model)
    paths = {node.name: node.target for node in graph.nodes if node.kind == "parameter" and node.target in streamable}
    returned = [path for name, path in paths.items() if name in graph.results]
    if returned:
        raise UnsupportedError(
            [f"{path}: the model returns this parameter, so it cannot be streamed; return a clone of it" for path in returned]
        )
    sizes = {name: record_bytes(streamable[path]) for name, path in paths.items()}
    return StreamedWeights(
        num_bytes=sizes,
        grad_transfers={
            name: GradientTransfer(down_bytes=sizes[name]) if streamed is None else streamed.grad_transfer_of(path)
            for name, path in paths.items()
        },
        reads_ahead=options.weights_file is not None or device.type != "cpu" if streamed is None else streamed.reads_ahead,
    )


def check_can_stream(mesh: Any, sharding: Any) -> None:
    """Refuse streamed weights on a mesh and with sharded weights.

    Raises:
        UnsupportedError: the model is on several ranks.
    """
    problems = []
    if mesh is not None:
        problems.append("weights='stream' is for one device, and the ranks of a mesh would each want a store; leave out mesh, or weights")
    if sharding is not None:
        problems.append("weights='stream' and fully_shard are two places for the same weights; leave one out")
    if problems:
        raise UnsupportedError(problems)


def check_optimizer_step(model: nn.Module, resident_bytes: int, budget_bytes: int) -> None:
    """Check that an optimizer's step, which is not part of a plan, fits the budget.

    Raises:
        BudgetError: it does not.
    """
    streamed = StreamedParameters.known(model)
    needed = 0 if streamed is None or not streamed.step_bytes else resident_bytes + streamed.step_bytes
    if needed > budget_bytes:
        raise BudgetError(
            f"the budget is {format_bytes(budget_bytes)}, and a two-phase step of the optimizer for streamed weights needs "
            f"{format_bytes(needed)} for the largest parameter. Raise the budget to {size_at_least(needed)} ({needed} bytes), or leave out "
            "two_phase and max_norm.",
            needed_bytes=needed,
        )


def available_device(device: torch.device | str) -> torch.device:
    """Parse a device and check that it is usable.

    Raises:
        InputError: it is not.
    """
    try:
        resolved = torch.device(device)
        torch.empty(0, device=resolved)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise InputError(f"device {str(device)!r} cannot be used here: {str(error).splitlines()[0]}") from error
    return resolved
