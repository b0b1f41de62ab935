"""Compiled region as one autograd function.

The complete schedule, forward and backward, is inside one function: autograd sees inputs, parameters and buffers as its arguments and the
outputs as its results. The arguments pass through ``save_for_backward``, so changing one between forward and backward raises, as in eager
PyTorch. Gradients are returned, not written: autograd touches ``.grad`` after the last strip, or not at all. A leaf that no used output
depends on gets no gradient, as in eager PyTorch, rather than zeros, on which an optimizer with momentum or weight decay would act.

Sources are not tensors: the function keeps the object, and a change of its content in between goes unnoticed. Their gradients are added to
sinks, strip by strip, while the backward pass runs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress, zip_longest
from operator import attrgetter
from typing import Any

import torch

from sft.common.errors import UnsupportedError
from sft.common.torch_internals import apply_function, task_retains_graph, unwrapped
from sft.common.transform_checks import refuse_batched_grads
from sft.runtime.region import Region, Tape
from sft.torch_runtime.backward_checks import check_before_backward, unneeded_grads
from sft.torch_runtime.failed_passes import quiesced_on_error, running
from sft.torch_runtime.gradient_groups import GradientGroups, copy_lasting_grads
from sft.torch_runtime.host.host_outputs import HostOutput
from sft.torch_runtime.host.offload import HostOffloader
from sft.torch_runtime.pass_graphs import RecordedCall
from sft.torch_runtime.region_inputs import RegionInputs

__all__ = ["run_region"]

_requires_grad = attrgetter("requires_grad")


def run_region(region: Region, inputs: RegionInputs, hosts: Mapping[str, HostOutput] | None = None) -> dict[str, torch.Tensor]:
    """Run a region on tensors and sources.

    Args:
        region: the region.
        inputs: its inputs.
        hosts: destinations of the outputs on the host. Their gradients arrive on the host, too.

    Returns:
        The outputs by value name.
    """
    leaves, hosts = dict(zip(inputs.names, inputs.tensors, strict=True)), hosts or {}
    needs_grad = [*map(_requires_grad, inputs.tensors)]
    keep = torch.is_grad_enabled() and (bool(inputs.sinks) or any(needs_grad))
    pass_graphs = inputs.resources.pass_graphs
    graphs_of_step = pass_graphs if keep and pass_graphs is not None and pass_graphs.is_enabled else None
    # A GPU computes while autograd gets to know this call.
    recorded = _replay_forward(region, inputs, leaves, keep=keep)
    if not keep:
        if recorded is not None:
            return {name: leaves[name] if name in leaves else recorded.outputs[name] for name in region.outputs}
        offloader = inputs.make_offloader() if region.direct else None
        with (
            torch.no_grad(),
            inputs.pass_settings(region),
            inputs.memory(),
            quiesced_on_error(offloader),
            inputs.forward_weights() as weights,
            running(inputs.machine(backward=False, offloader=offloader, weights=weights)) as machine,
        ):
            outputs, _ = region.forward(machine, {**leaves, **inputs.sources}, keep=False, hosts=hosts)
        return {name: _output_tensor(output) for name, output in outputs.items()}
    is_watched = [needs or name not in inputs.updated for name, needs in zip(leaves, needs_grad, strict=True)]
    watched = dict(zip(compress(leaves, is_watched), unwrapped(compress(inputs.tensors, is_watched)), strict=True))
    groups = GradientGroups()
    if graphs_of_step is not None:
        groups = graphs_of_step.gradient_groups(region, dict(compress(leaves.items(), needs_grad)))
    # Autograd's context must not keep the tensors that autograd watches.
    without_tensors = replace(inputs, names=tuple(watched), tensors=(), version_guards=(), gradient_groups=groups)
    outputs = {name: leaves[name] for name in region.outputs if name in leaves}
    # A sink is not a tensor: without this one, autograd might see no argument that requires a gradient.
    anchor = (torch.empty(0, requires_grad=True, device="cpu"),) if inputs.sinks else ()
    call = _RegionCall(region=region, inputs=without_tensors, hosts=hosts, leaves=leaves, outputs=outputs, recorded=recorded)
    tensors = (*groups.aliases(watched).values(), *unwrapped(inputs.version_guards), *anchor)
    results = apply_function(_RegionFunction, call, *tensors)
    outputs.update(zip((name for name in region.outputs if name not in outputs), results, strict=True))
    return outputs


def _replay_forward(region: Region, inputs: RegionInputs, leaves: dict[str, torch.Tensor], *, keep: bool) -> RecordedCall | None:
    """Replay a recorded forward pass; ``None`` if the pass runs instruction by instruction."""
    pass_graphs = inputs.resources.pass_graphs
    if pass_graphs is None:
        return None
    inputs.active_graphs.activate(pass_graphs)

    def run(leaves: Mapping[str, torch.Tensor], offloader: HostOffloader | None) -> tuple[dict[str, torch.Tensor], Tape]:
        with torch.no_grad(), inputs.pass_settings(region), running(inputs.machine(backward=False, offloader=offloader)) as machine:
            outputs, tape = region.forward(machine, _detached(leaves), keep=keep)
            if offloader is not None:
                offloader.finish(tape.copies.by_target.values())
            return outputs, tape

    return pass_graphs.forward(
        leaves,
        run,
        keep=keep,
        uncopied=inputs.new_buffers,
        release=inputs.device_pool.release if inputs.has_pool else lambda: None,
        make_offloader=partial(inputs.make_offloader, is_recorded=True) if keep or region.direct else lambda: None,
    )


def _forward_with_tape(
    region: Region,
    inputs: RegionInputs,
    leaves: Mapping[str, torch.Tensor],
    hosts: Mapping[str, HostOutput],
    offloader: HostOffloader | None,
) -> tuple[dict[str, Any], Tape]:
    """Run a forward pass that a backward pass follows."""
    with (
        inputs.pass_settings(region),
        inputs.memory(),
        quiesced_on_error(offloader),
        inputs.forward_weights() as weights,
        running(inputs.machine(backward=False, offloader=offloader, weights=weights)) as machine,
    ):
        outputs, tape = region.forward(machine, {**leaves, **inputs.sources}, keep=True, hosts=hosts)
        # The graph may be dropped before its backward pass: until then, no copy may fill a buffer that is allocated again.
        tape.copies.wait(machine, tuple(tape.copies.by_target))
    return outputs, tape


def _detach_tape(
    tape: Tape, outputs: Mapping[str, Any], computed: Sequence[str], leaves: Collection[str], hosts: Mapping[str, HostOutput]
) -> dict[str, int]:
    """Reduce a tape to the values that the region computed; the versions of those that the caller can change.

    Leaves return through saved tensors, which autograd checks. Outputs on the tape become aliases, since a result would keep its own graph
    alive. An alias shares the version, so a change in place is noticed. Of outputs on the host, and of outputs that are copies of a value
    on the tape, the tape has its own value, which cannot change.
    """
    values = {name: value for name, value in tape.values.by_name.items() if name not in leaves}
    watched = [name for name in computed if name in values and name not in hosts and values[name] is outputs[name]]
    values.update({name: outputs[name].detach() for name in watched})
    tape.values.by_name = values
    return {name: values[name]._version for name in watched}


def _detached(leaves: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Leaves without their graphs: a tape must not keep these alive."""
    return {name: tensor.detach() for name, tensor in leaves.items()}


def _output_tensor(output: torch.Tensor | HostOutput) -> torch.Tensor:
    return output.tensor if isinstance(output, HostOutput) else output


@dataclass(slots=True, kw_only=True)
class _RegionCall:
    """A call of a region with gradients.

    Attributes:
        region: the region.
        inputs: its inputs, without the tensors; their names are those of the tensors that autograd watches.
        hosts: destinations of the outputs on the host.
        leaves: all tensors.
        outputs: the leaves among the outputs; new contents of buffers are added.
        recorded: the replayed forward pass; ``None`` if it is still to be run.
    """

    region: Region
    inputs: RegionInputs
    hosts: Mapping[str, HostOutput]
    leaves: Mapping[str, torch.Tensor]
    outputs: dict[str, torch.Tensor]
    recorded: RecordedCall | None


class _RegionFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _RegionCall, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The outputs that a caller sees."""
        region, inputs, leaves = call.region, call.inputs, call.leaves
        computed = [name for name in region.outputs if name not in leaves and name not in inputs.new_buffers]
        ctx.recorded, ctx.tape, ctx.offloader, ctx.versions = call.recorded, None, None, {}
        if ctx.recorded is None:
            offloader = ctx.offloader = inputs.make_offloader()
            outputs, ctx.tape = _forward_with_tape(region, inputs, _detached(leaves), call.hosts, offloader)
            ctx.versions = _detach_tape(ctx.tape, outputs, computed, {*leaves, *inputs.sources}, call.hosts)
        else:
            outputs, ctx.recorded.outputs = ctx.recorded.outputs, {}
        call.outputs.update((name, outputs[name]) for name in region.outputs if name in inputs.new_buffers)
        is_updated = [name in inputs.updated for name in inputs.names]
        ctx.save_for_backward(*(None if updated else tensor for updated, tensor in zip_longest(is_updated, tensors, fillvalue=False)))
        ctx.set_materialize_grads(False)
        ctx.region, ctx.inputs = region, inputs
        ctx.computed, ctx.num_tensors = computed, len(tensors)
        results = tuple(_output_tensor(outputs[name]) for name in computed)
        constant = [result for name, result in zip(computed, results, strict=True) if name not in region.requires_grad]
        ctx.mark_non_differentiable(*constant)
        return results

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise UnsupportedError(["(the compiled model): forward-mode derivatives have no strips; use the plain model, or backward mode"])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        refuse_batched_grads(grads)
        output_grads = list(grads)
        # Tensors that the gradients are a function of: a second derivative could be taken with respect to them.
        watched = [t for t in (*grads, *ctx.saved_tensors) if t is not None and t.requires_grad] if torch.is_grad_enabled() else []
        del grads  # each gradient lives as long as the backward pass needs it
        with torch.no_grad(), ctx.inputs.backward_context():
            input_grads = _differentiate(ctx, output_grads)
        if not torch.is_grad_enabled():
            return (None, *input_grads)
        # create_graph=True. Torch's own once_differentiable returns constants if the incoming gradient is one.
        leaves = [None if grad is None else grad.detach().requires_grad_() for grad in input_grads]
        guarded: Any = _OnceDifferentiable.apply(len(leaves), *leaves, *watched)  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        return (None, *guarded)


class _OnceDifferentiable(torch.autograd.Function):
    """Identity on gradients that raises when it is differentiated."""

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
    """Gradients of the function's tensors, given the gradients of its results; empties the list."""
    region: Region = ctx.region
    inputs: RegionInputs = ctx.inputs
    tensors, consume = ctx.saved_tensors, not task_retains_graph()
    check_before_backward(ctx, consume=consume)
    output_grads, reached = _grads_of_outputs(ctx, grads)
    if inputs.weights is not None:  # their gradients are used during the pass
        reached -= unneeded_grads(ctx, inputs.names)
    leaf_grads = _replay_backward(ctx, tensors, output_grads, consume=consume)
    if leaf_grads is None:
        leaves = _saved_leaves(inputs, tensors)
        leaf_grads = _run_backward(ctx, _detached(leaves), output_grads, reached, consume=consume)
        if inputs.has_pool:
            inputs.gradient_groups.copy_next(unneeded_grads(ctx, inputs.names))
            copy_lasting_grads(region, leaves, leaf_grads, inputs.device)
    return _grads_of_tensors(ctx, leaf_grads, reached)


def _grads_of_outputs(ctx: Any, grads: list[torch.Tensor | None]) -> tuple[dict[str, torch.Tensor], frozenset[str]]:
    """Gradients of the differentiable outputs, and the values that they reach; empties the list of gradients of all outputs."""
    region, device = ctx.region, ctx.inputs.device
    by_computed = {name: grad for name, grad in zip(ctx.computed, grads, strict=True) if name in region.requires_grad}
    grads.clear()
    new_buffers = region.requires_grad & ctx.inputs.new_buffers
    by_output = {name: None for name in region.outputs if name in new_buffers} | by_computed
    reached = region.reachable_values(frozenset(name for name, grad in by_output.items() if grad is not None))
    devices = {name: torch.device("cpu") if name in region.host_outputs else device for name in by_output}
    return {name: _materialize_grad(grad, region, name, devices[name]) for name, grad in by_output.items()}, reached


def _saved_leaves(inputs: RegionInputs, tensors: Sequence[torch.Tensor | None]) -> dict[str, torch.Tensor]:
    """The leaves among the saved tensors."""
    return {name: tensor for name, tensor in zip(inputs.names, tensors, strict=False) if tensor is not None}


def _replay_backward(
    ctx: Any, tensors: Sequence[torch.Tensor | None], output_grads: dict[str, torch.Tensor], *, consume: bool
) -> dict[str, torch.Tensor] | None:
    """Gradients of the leaves by a recorded backward pass; ``None`` if the pass must run on the tape, which is then computed."""
    inputs: RegionInputs = ctx.inputs
    recorded: RecordedCall | None = ctx.recorded
    if recorded is None:
        return None
    if consume:
        ctx.recorded = None
    groups = inputs.gradient_groups
    run = partial(_record_backward, ctx.region, inputs)
    leaf_grads = recorded.backward(output_grads, run, is_last=consume, uncopied=groups.names)
    if leaf_grads is not None:
        groups.copy_next(unneeded_grads(ctx, inputs.names), recorded.release if consume else lambda: None)
    else:
        ctx.recorded = None
        offloader = inputs.make_offloader()
        tape = _recompute_tape(ctx.region, inputs, _detached(_saved_leaves(inputs, tensors)), offloader)
        if not consume:
            inputs.check_retain_graph()
        ctx.tape, ctx.offloader = tape, offloader
    return leaf_grads


def _run_backward(
    ctx: Any, leaves: Mapping[str, torch.Tensor], output_grads: dict[str, torch.Tensor], reached: Collection[str], *, consume: bool
) -> dict[str, torch.Tensor]:
    """Gradients of the leaves by a backward pass on the tape, or on a copy of it unless the pass is the last one."""
    region: Region = ctx.region
    inputs: RegionInputs = ctx.inputs
    tape, offloader = ctx.tape, ctx.offloader
    if consume:
        ctx.tape = ctx.offloader = None
    else:
        tape = tape.fork()
    tape.values.by_name.update({**leaves, **inputs.sources})
    sinks = {name: make() for name, make in inputs.sinks.items()}
    if offloader is not None:
        offloader.may_exceed_slab = not consume
    weight_grads: dict[str, torch.Tensor] = {}
    with inputs.memory(), inputs.backward_weights(reached, weight_grads) as weights:
        with (
            inputs.pass_settings(region),
            quiesced_on_error(offloader),
            running(inputs.machine(backward=True, offloader=offloader, weights=weights)) as machine,
        ):
            leaf_grads = region.backward(machine, tape, output_grads, sinks=sinks, consume=consume)
        for sink in sinks.values():
            sink.finish()
    leaf_grads.update(weight_grads)
    weight_grads.clear()
    if region.host_outputs and inputs.device.type == "cuda":
        # Their gradients came from the host, so autograd knows no stream that it could wait for before it uses ours.
        torch.cuda.current_stream(inputs.device).synchronize()
    return leaf_grads


def _grads_of_tensors(ctx: Any, leaf_grads: Mapping[str, torch.Tensor], reached: Collection[str]) -> list[torch.Tensor | None]:
    """Gradients in the order of the function's tensors."""
    by_tensor = [leaf_grads.get(name) if name in reached else None for name in ctx.inputs.names]
    return [*by_tensor, *[None] * (ctx.num_tensors - len(by_tensor))]


def _record_backward(
    region: Region, inputs: RegionInputs, tape: Tape, offloader: HostOffloader | None, output_grads: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Run a backward pass while it is recorded: in the memory pool of the recording."""
    with inputs.pass_settings(region), running(inputs.machine(backward=True, offloader=offloader)) as machine:
        return region.backward(machine, tape, output_grads)


def _recompute_tape(region: Region, inputs: RegionInputs, leaves: Mapping[str, torch.Tensor], offloader: HostOffloader | None) -> Tape:
    """Tape of another forward pass, for a backward pass that could not be recorded.

    Buffers that the forward pass has updated are zeros in it: only their own updates depend on them.
    """
    zeros = {name: torch.zeros(region.shapes[name], dtype=region.dtypes[name], device=inputs.device) for name in inputs.updated}
    outputs, tape = _forward_with_tape(region, inputs, {**leaves, **zeros}, {}, offloader)
    _detach_tape(tape, outputs, (), {*leaves, *zeros}, {})
    return tape


def _materialize_grad(grad: torch.Tensor | None, region: Region, name: str, device: torch.device) -> torch.Tensor:
    """The gradient of an output; of an output that the loss does not use, zeros that take no memory."""
    if grad is not None:
        return grad
    return torch.zeros((), dtype=region.dtypes[name], device=device).expand(region.output_shape(name))
