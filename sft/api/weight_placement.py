"""Weight placement: the streamed weights of a plan, and the checks that streaming is possible."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from sft.analysis.ir.graph import Graph
from sft.common.byte_units import format_bytes
from sft.common.errors import BudgetError, InputError, UnsupportedError
from sft.planner.options import Options
from sft.runtime.weight_prefetch import GradientTransfer, StreamedWeights
from sft.torch_runtime.streamed_parameters import StreamedParameters, record_bytes, streamable_parameters

__all__ = ["available_device", "check_can_stream", "check_optimizer_step", "weights_to_stream"]


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
            f"{format_bytes(needed)} for the largest parameter. Raise the budget to {needed} bytes, or leave out two_phase and max_norm.",
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
