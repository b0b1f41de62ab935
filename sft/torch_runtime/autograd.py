"""A compiled region as one autograd function.

The whole schedule, forward and backward, is inside: autograd sees inputs, parameters and buffers going in and outputs coming out.
They pass through ``save_for_backward``, so changing one of them between forward and backward raises as it does in eager PyTorch.
Gradients are returned, not written: ``.grad`` is touched by autograd after the last strip, or not at all. A leaf that no used output
depends on gets no gradient, as in eager PyTorch, rather than zeros, which an optimizer with momentum or weight decay would act on.

The programs hold every cast that they need. Both passes therefore run with autocast off, whatever the caller has switched on.

Sources are no tensors and no part of that: the function keeps the object, and nobody notices when its content changes in between.
Their gradients leave through sinks, strip by strip, while the backward pass runs.

The backward pass that autograd runs at the moment: what it was asked for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

import torch

from sft.common.call_guards import refuse_after_failure, refuse_batched_grads
from sft.common.errors import UnsupportedError
from sft.common.torch_internals import task_retains_graph, will_engine_execute
from sft.runtime.region import Region
from sft.sources.sink import RowSink
from sft.sources.source import Source
from sft.torch_runtime.cuda_graphs import ActiveGraphs, GraphCache
from sft.torch_runtime.host_memory import HostAllocator, HostSlabPool
from sft.torch_runtime.host_outputs import HostOutput
from sft.torch_runtime.input_streaming import Reading
from sft.torch_runtime.machine import TorchMachine
from sft.torch_runtime.offload import HostOffloader
from sft.torch_runtime.skip_constant import Skipping
from sft.torch_runtime.weight_streaming import BoundWeights, WeightPass

__all__ = ["RegionInputs", "autocast_disabled", "engine_will_execute", "retains_graph", "run_region", "unneeded_grads"]


def retains_graph() -> bool:
    """Whether it was asked to retain the graph."""
    return task_retains_graph()


def engine_will_execute(node: Any) -> bool:
    """Whether it computes what flows into a node of the graph (``None``: into nothing).

    It does not where ``torch.autograd.grad(y, x)`` or ``backward(inputs=[x])`` leaves the node out. Whoever hands a gradient on is not
    asked; whoever uses it by himself has to be.
    """
    if node is None:
        return False
    try:
        return will_engine_execute(node)
    except RuntimeError:  # a leaf of torch.autograd.grad: there is no answer for those that are asked for
        return True


def unneeded_grads(context: Any, names: Iterable[str], first: int = 0) -> frozenset[str]:
    """Of the tensors that a function was given those whose gradients nobody asks for.

    Args:
        context: of the function, in its backward pass.
        names: of its tensors in order.
        first: the place of the first of them.
    """
    nodes = [node for node, _ in context.next_functions[first:]]
    return frozenset(name for name, node in zip(names, nodes, strict=False) if not engine_will_execute(node))


def autocast_disabled(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """A context in which autocast does not touch this device's operators."""
    if not torch.amp.is_autocast_available(device.type):
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionInputs:
    """What a region runs on.

    Attributes:
        names: the values that the tensors stand for.
        tensors: resident inputs, parameters and buffers.
        device: where the region runs.
        updated: buffers that get a new content right after the forward pass; the backward pass does not read them.
        sources: what inputs are read from that are not resident, by value name.
        version_guards: tensors behind such sources: changing them between forward and backward raises, as for all others.
        sinks: make what takes the gradients of such inputs, where they are wanted, afresh for each backward pass.
        reading: gains what is read.
        skipping: gains what strips are run, and which are left out.
        slabs: room on the host for copies; none where there are none.
        room: where cuts are that are never whole on the device.
        make_machine: makes what runs a pass, of what the plain machine is made of.
        graphs: recordings of programs of the region.
        turn: whose recordings are alive, of all plans of the model.
        differentiating: what the backward pass runs in.
        retaining: refuses a backward pass that retains the graph, where there is no room for that.
        weights: the parameters that are streamed; their tensors here are the host's.
    """

    names: tuple[str, ...]
    tensors: tuple[torch.Tensor, ...]
    device: torch.device
    updated: frozenset[str] = frozenset()
    sources: Mapping[str, Source] = field(default_factory=dict)
    version_guards: tuple[torch.Tensor, ...] = ()
    sinks: Mapping[str, Callable[[], RowSink]] = field(default_factory=dict)
    reading: Reading = field(default_factory=Reading)
    skipping: Skipping = field(default_factory=Skipping)
    slabs: HostSlabPool | None = None
    room: HostAllocator = field(default_factory=HostAllocator)
    make_machine: Callable[..., TorchMachine] = TorchMachine
    graphs: GraphCache | None = None
    turn: ActiveGraphs = field(default_factory=ActiveGraphs)
    differentiating: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    retaining: Callable[[], None] = lambda: None
    weights: BoundWeights | None = None

    def forward_weights(self) -> contextlib.AbstractContextManager[WeightPass | None]:
        """The streamed weights of a forward pass; ``None`` where there are none."""
        return contextlib.nullcontext() if self.weights is None else self.weights.forward()

    def backward_weights(self, reached: Collection[str], grads: dict[str, Any]) -> contextlib.AbstractContextManager[WeightPass | None]:
        """Those of a backward pass, which gain ``grads``; see :meth:`BoundWeights.backward`."""
        return contextlib.nullcontext() if self.weights is None else self.weights.backward(reached, grads)

    def machine(self, *, backward: bool, copies: HostOffloader | None = None, weights: WeightPass | None = None) -> TorchMachine:
        """What runs a pass."""
        self.turn.take(self.graphs)
        account, skipping = (self.reading.backward, self.skipping.backward) if backward else (self.reading.forward, self.skipping.forward)
        parts = {
            "reading": account,
            "skipping": skipping,
            "offloader": copies,
            "host_allocator": self.room,
            "graphs": self.graphs,
            "weights": weights,
        }
        return self.make_machine(self.device, **parts)


def run_region(region: Region, leaves: RegionInputs, hosts: Mapping[str, HostOutput] | None = None) -> dict[str, torch.Tensor]:
    """Run a region on tensors and sources; returns the outputs by value name.

    Args:
        region: what to run.
        leaves: what it runs on.
        hosts: what takes the outputs that are on the host. Their gradients arrive on the host, too.
    """
    tensors, hosts = leaves.tensors, hosts or {}
    keep = torch.is_grad_enabled() and (bool(leaves.sinks) or any(tensor.requires_grad for tensor in tensors))
    given = dict(zip(leaves.names, tensors, strict=True))
    made = [name for name in region.outputs if name not in given]
    if not keep:
        with torch.no_grad(), autocast_disabled(leaves.device), leaves.forward_weights() as weights:
            machine = leaves.machine(backward=False, weights=weights)
            outputs, _ = region.forward(machine, {**given, **leaves.sources}, keep=False, hosts=hosts)
        return {name: _output_tensor(output) for name, output in outputs.items()}
    # A sink is no tensor: without this one autograd might see nothing here that requires grad.
    extra = (torch.empty(0, requires_grad=True, device="cpu"),) if leaves.sinks else ()
    bare = replace(leaves, tensors=(), version_guards=())  # autograd's context must not keep what autograd is to watch
    results = _RegionFunction.apply(region, bare, hosts, *tensors, *leaves.version_guards, *extra)  # type: ignore[no-untyped-call]  # as torch leaves it
    return {**{name: given[name] for name in region.outputs if name in given}, **dict(zip(made, results, strict=True))}


def _output_tensor(output: torch.Tensor | HostOutput) -> torch.Tensor:
    return output.tensor if isinstance(output, HostOutput) else output


class _RegionFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, region: Region, leaves: RegionInputs, hosts: Mapping[str, HostOutput], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        given = {name: tensor.detach() for name, tensor in zip(leaves.names, tensors, strict=False)}
        copies = None if leaves.slabs is None else HostOffloader(leaves.device, leaves.slabs.lease())
        with autocast_disabled(leaves.device), _quiesce_on_error(copies), leaves.forward_weights() as weights:
            machine = leaves.machine(backward=False, copies=copies, weights=weights)
            outputs, tape = region.forward(machine, {**given, **leaves.sources}, keep=True, hosts=hosts)
            # The graph may be dropped before its backward pass: no copy may then still fill a buffer that is somebody else's.
            tape.copies.wait(machine, tuple(tape.copies.by_target))
        made = [name for name in region.outputs if name not in given]
        # The tape holds only what the region made: leaves come back through saved tensors, which autograd checks. Outputs on the tape
        # are aliases: the result itself would hold its own graph alive. An alias shares the version, so a change in place is noticed.
        # Of an output on the host the tape holds a copy of its own, which nobody can change.
        values = {name: value for name, value in tape.values.by_name.items() if name not in given and name not in leaves.sources}
        # Of an output that is a copy of what the tape holds, likewise.
        watched = [name for name in made if name in values and name not in hosts and values[name] is outputs[name]]
        values.update({name: outputs[name].detach() for name in watched})
        tape.values.by_name = values
        ctx.versions = {name: values[name]._version for name in watched}
        is_updated = [name in leaves.updated for name in leaves.names]
        ctx.save_for_backward(*(None if up else tensor for up, tensor in zip_longest(is_updated, tensors, fillvalue=False)))
        ctx.set_materialize_grads(False)
        ctx.region, ctx.leaves, ctx.tape, ctx.copies = region, leaves, tape, copies
        ctx.made, ctx.num_tensors = made, len(tensors)
        results = tuple(_output_tensor(outputs[name]) for name in made)
        fixed = [result for name, result in zip(made, results, strict=True) if name not in region.requires_grad]
        ctx.mark_non_differentiable(*fixed)
        return results

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise UnsupportedError(["(the compiled model): forward-mode derivatives have no strips; use the plain model, or backward mode"])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        refuse_batched_grads(grads)
        arriving = list(grads)
        # What a second derivative could be asked for: all that the gradients are a function of.
        watched = [t for t in (*grads, *ctx.saved_tensors) if t is not None and t.requires_grad] if torch.is_grad_enabled() else []
        del grads  # each gradient lives as long as the backward pass needs it
        with torch.no_grad(), ctx.leaves.differentiating():
            found = _differentiate(ctx, arriving)
        if not torch.is_grad_enabled():
            return (None, None, None, *found)
        # create_graph=True. Torch's own once_differentiable lets gradients through as constants where the incoming gradient is one.
        leaves = [None if grad is None else grad.detach().requires_grad_() for grad in found]
        given: Any = _OnceDifferentiable.apply(len(leaves), *leaves, *watched)  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        return (None, None, None, *given)


class _OnceDifferentiable(torch.autograd.Function):
    """Gradients as they are, which cannot be differentiated again."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return tensors[:count]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        raise UnsupportedError(
            [
                "(the compiled model): its gradient cannot be differentiated again (create_graph=True), as its backward pass recomputes "
                "strips outside of autograd; use the plain model for gradient penalties and Hessians"
            ]
        )


def _differentiate(ctx: Any, grads: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """The gradients of the function's tensors, given those of its results (the list is emptied)."""
    tensors = ctx.saved_tensors
    region: Region = ctx.region
    leaves: RegionInputs = ctx.leaves
    consume = not retains_graph()
    tape = ctx.tape
    refuse_after_failure(tape)
    for name, version in ctx.versions.items():
        if tape.values.by_name[name]._version != version:
            raise RuntimeError(
                f"the output {name} of the compiled model was modified in place after the forward pass, and the backward pass needs it; "
                "modify a clone of it instead"
            )
    if leaves.weights is not None:
        leaves.weights.check()
    if not consume:
        leaves.retaining()
    copies = ctx.copies
    if consume:
        ctx.tape = ctx.copies = None
    else:
        tape = tape.fork()
    given = {name: tensor.detach() for name, tensor in zip(leaves.names, tensors, strict=False) if tensor is not None}
    tape.values.by_name.update(given)
    tape.values.by_name.update(leaves.sources)
    by_output = {name: grad for name, grad in zip(ctx.made, grads, strict=True) if name in region.requires_grad}
    reached = _reachable_values(region, [name for name, grad in by_output.items() if grad is not None])
    wanted = {
        name: _materialize_grad(grad, region, name, torch.device("cpu") if name in region.host_outputs else leaves.device)
        for name, grad in by_output.items()
    }
    grads.clear()
    by_output.clear()
    sinks = {name: make() for name, make in leaves.sinks.items()}
    if copies is not None:
        copies.exceeds = not consume
    if leaves.weights is not None:  # their gradients are used here and now
        reached -= unneeded_grads(ctx, leaves.names)
    live_out: dict[str, torch.Tensor] = {}
    with leaves.backward_weights(reached, live_out) as weights:
        machine = leaves.machine(backward=True, copies=copies, weights=weights)
        with autocast_disabled(leaves.device), _quiesce_on_error(copies):
            found = region.backward(machine, tape, wanted, sinks=sinks, consume=consume)
        for sink in sinks.values():
            sink.finish()
    found.update(live_out)
    live_out.clear()
    if region.host_outputs and leaves.device.type == "cuda":
        # Gradients came from the host, so autograd knows no stream that it could wait for before it uses ours.
        torch.cuda.current_stream(leaves.device).synchronize()
    named = [found.get(name) if name in reached else None for name in leaves.names]
    return [*named, *[None] * (ctx.num_tensors - len(named))]


@contextlib.contextmanager
def _quiesce_on_error(copies: HostOffloader | None) -> Iterator[None]:
    """Where a pass fails, copies that are under way end before their buffers are somebody else's."""
    try:
        yield
    except BaseException:
        if copies is not None:
            copies.quiesce()
        raise


def _reachable_values(region: Region, outputs: Collection[str]) -> frozenset[str]:
    """The values that a gradient of these outputs flows to."""
    found = set(outputs)
    for node in reversed(region.graph.nodes):
        if node.name in found:
            found.update(name for name in node.operands if name in region.requires_grad)
    return frozenset(found)


def _materialize_grad(grad: torch.Tensor | None, region: Region, name: str, device: torch.device) -> torch.Tensor:
    """An output that the loss does not use has a zero gradient; it costs no memory."""
    if grad is not None:
        return grad
    return torch.zeros((), dtype=region.dtypes[name], device=device).expand(region.output_shape(name))
