"""A compiled region as one autograd function.

The whole schedule, forward and backward, is inside: autograd sees inputs, parameters and buffers going in and outputs coming out.
They pass through ``save_for_backward``, so changing one of them between forward and backward raises as it does in eager PyTorch.
Gradients are returned, not written: ``.grad`` is touched by autograd after the last strip, or not at all.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from sft.execute.machine import TorchMachine
from sft.walk.region import Region

__all__ = ["run_region"]


def run_region(
    region: Region, names: Sequence[str], tensors: Sequence[torch.Tensor], *, updated: Collection[str] = ()
) -> dict[str, torch.Tensor]:
    """Run a region on tensors.

    Args:
        region: what runs.
        names: the values that the tensors stand for.
        tensors: inputs, parameters and buffers.
        updated: buffers that get a new content right after this; the backward pass does not read them.

    Returns:
        The outputs by value name.
    """
    keep = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    given = dict(zip(names, tensors, strict=True))
    made = [name for name in region.outputs if name not in given]
    if not keep:
        with torch.no_grad():
            outputs, _ = region.forward(TorchMachine(tensors[0].device), given, keep=False)
        return outputs
    results = _RegionFunction.apply(region, tuple(names), frozenset(updated), *tensors)  # type: ignore[no-untyped-call]
    return {**{name: given[name] for name in region.outputs if name in given}, **dict(zip(made, results, strict=True))}


class _RegionFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, region: Region, names: tuple[str, ...], updated: frozenset[str], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        given = {name: tensor.detach() for name, tensor in zip(names, tensors, strict=True)}
        outputs, tape = region.forward(TorchMachine(tensors[0].device), given, keep=True)
        # The tape holds only what the region made: leaves come back through saved tensors, which autograd checks.
        tape.values.by_name = {name: value for name, value in tape.values.by_name.items() if name not in given}
        ctx.save_for_backward(*(None if name in updated else tensor for name, tensor in zip(names, tensors, strict=True)))
        ctx.set_materialize_grads(False)
        ctx.region, ctx.names, ctx.tape = region, names, tape
        made = [name for name in region.outputs if name not in given]
        ctx.made = made
        # An output that later segments read is on the tape as well; the caller gets it as the function's own result.
        results = tuple(outputs[name] for name in made)
        ctx.mark_non_differentiable(*(outputs[name] for name in made if name not in region.requires_grad))
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        tensors = ctx.saved_tensors
        region: Region = ctx.region
        consume = not _keeps_graph()
        tape = ctx.tape
        if consume:
            ctx.tape = None
        elif tape is not None:
            tape = type(tape)(type(tape.values)(dict(tape.values.by_name)), list(tape.kept))
        given = {name: tensor.detach() for name, tensor in zip(ctx.names, tensors, strict=True) if tensor is not None}
        tape.values.by_name.update(given)
        device = next(tensor.device for tensor in tensors if tensor is not None)
        wanted = {
            name: _materialized(grad, region, name, device)
            for name, grad in zip(ctx.made, grads, strict=True)
            if name in region.requires_grad
        }
        del grads
        found = region.backward(TorchMachine(device), tape, wanted, consume=consume)
        return (None, None, None, *(found.get(name) for name in ctx.names))


def _materialized(grad: torch.Tensor | None, region: Region, name: str, device: torch.device) -> torch.Tensor:
    """An output that the loss does not use has a zero gradient; it costs no memory."""
    if grad is not None:
        return grad
    return torch.zeros((), dtype=region.dtypes[name], device=device).expand(region.shapes[name])


def _keeps_graph() -> bool:
    """Whether the running backward pass was asked to retain the graph."""
    query = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return bool(query()) if query is not None else True
