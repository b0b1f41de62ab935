"""A compiled region as one autograd function.

The whole schedule, forward and backward, is inside: autograd sees inputs, parameters and buffers going in and outputs coming out.
They pass through ``save_for_backward``, so changing one of them between forward and backward raises as it does in eager PyTorch.
Gradients are returned, not written: ``.grad`` is touched by autograd after the last strip, or not at all.

Sources are no tensors and no part of that: the function keeps the object, and nobody notices when its content changes in between.
Their gradients leave through sinks, strip by strip, while the backward pass runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from sft.execute.machine import TorchMachine
from sft.execute.reading import Reading
from sft.sources.sink import RowSink
from sft.sources.source import Source
from sft.walk.region import Region

__all__ = ["Leaves", "run_region"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaves:
    """What a region runs on.

    Attributes:
        names: the values that the tensors stand for.
        tensors: resident inputs, parameters and buffers.
        device: where the region runs.
        updated: buffers that get a new content right after the forward pass; the backward pass does not read them.
        sources: what inputs are read from that are not resident, by value name.
        witnesses: tensors behind such sources: changing them between forward and backward raises, as for all others.
        sinks: make what takes the gradients of such inputs, where they are wanted, afresh for each backward pass.
        reading: gains what is read.
    """

    names: tuple[str, ...]
    tensors: tuple[torch.Tensor, ...]
    device: torch.device
    updated: frozenset[str] = frozenset()
    sources: Mapping[str, Source] = field(default_factory=dict)
    witnesses: tuple[torch.Tensor, ...] = ()
    sinks: Mapping[str, Callable[[], RowSink]] = field(default_factory=dict)
    reading: Reading = field(default_factory=Reading)


def run_region(region: Region, leaves: Leaves) -> dict[str, torch.Tensor]:
    """Run a region on tensors and sources; returns the outputs by value name."""
    tensors = leaves.tensors
    keep = torch.is_grad_enabled() and (bool(leaves.sinks) or any(tensor.requires_grad for tensor in tensors))
    given = dict(zip(leaves.names, tensors, strict=True))
    made = [name for name in region.outputs if name not in given]
    if not keep:
        with torch.no_grad():
            machine = TorchMachine(leaves.device, account=leaves.reading.forward)
            outputs, _ = region.forward(machine, {**given, **leaves.sources}, keep=False)
        return outputs
    # A sink is no tensor: without this one autograd might see nothing here that requires grad.
    extra = (torch.empty(0, requires_grad=True),) if leaves.sinks else ()
    bare = replace(leaves, tensors=(), witnesses=())  # autograd's context must not keep what autograd is to watch
    results = _RegionFunction.apply(region, bare, *tensors, *leaves.witnesses, *extra)  # type: ignore[no-untyped-call]
    return {**{name: given[name] for name in region.outputs if name in given}, **dict(zip(made, results, strict=True))}


class _RegionFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, region: Region, leaves: Leaves, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = {name: tensor.detach() for name, tensor in zip(leaves.names, tensors, strict=False)}
        machine = TorchMachine(leaves.device, account=leaves.reading.forward)
        outputs, tape = region.forward(machine, {**given, **leaves.sources}, keep=True)
        # The tape holds only what the region made: leaves come back through saved tensors, which autograd checks.
        tape.values.by_name = {n: v for n, v in tape.values.by_name.items() if n not in given and n not in leaves.sources}
        is_updated = [name in leaves.updated for name in leaves.names]
        ctx.save_for_backward(*(None if up else tensor for up, tensor in zip_longest(is_updated, tensors, fillvalue=False)))
        ctx.set_materialize_grads(False)
        ctx.region, ctx.leaves, ctx.tape = region, leaves, tape
        made = [name for name in region.outputs if name not in given]
        ctx.made, ctx.num_tensors = made, len(tensors)
        # An output that later segments read is on the tape as well; the caller gets it as the function's own result.
        results = tuple(outputs[name] for name in made)
        ctx.mark_non_differentiable(*(outputs[name] for name in made if name not in region.requires_grad))
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        tensors = ctx.saved_tensors
        region: Region = ctx.region
        leaves: Leaves = ctx.leaves
        consume = not _keeps_graph()
        tape = ctx.tape
        if consume:
            ctx.tape = None
        elif tape is not None:
            tape = type(tape)(type(tape.values)(dict(tape.values.by_name)), list(tape.kept))
        given = {name: tensor.detach() for name, tensor in zip(leaves.names, tensors, strict=False) if tensor is not None}
        tape.values.by_name.update(given)
        tape.values.by_name.update(leaves.sources)
        wanted = {
            name: _materialized(grad, region, name, leaves.device)
            for name, grad in zip(ctx.made, grads, strict=True)
            if name in region.requires_grad
        }
        del grads
        sinks = {name: make() for name, make in leaves.sinks.items()}
        machine = TorchMachine(leaves.device, account=leaves.reading.backward)
        found = region.backward(machine, tape, wanted, sinks=sinks, consume=consume)
        for sink in sinks.values():
            sink.finish()
        named = [found.get(name) for name in leaves.names]
        return (None, None, *named, *[None] * (ctx.num_tensors - len(named)))


def _materialized(grad: torch.Tensor | None, region: Region, name: str, device: torch.device) -> torch.Tensor:
    """An output that the loss does not use has a zero gradient; it costs no memory."""
    if grad is not None:
        return grad
    return torch.zeros((), dtype=region.dtypes[name], device=device).expand(region.shapes[name])


def _keeps_graph() -> bool:
    """Whether the running backward pass was asked to retain the graph."""
    query = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return bool(query()) if query is not None else True
