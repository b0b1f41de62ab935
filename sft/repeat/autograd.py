"""Autograd function of a chain of equal blocks.

The forward pass runs the schedule up to the loss, the backward pass the remaining operations. All steps that can fail come before changes
that the caller sees: buffers take their next values at the end of the forward pass, gradients are returned at the end of the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from sft.common.errors import UnsupportedError
from sft.common.torch_internals import task_retains_graph
from sft.common.transform_checks import refuse_batched_grads
from sft.kernels.rng.philox import KeyWord
from sft.repeat.executor import Environment, Executor, WeightAccess
from sft.repeat.lowering import BlockPrograms
from sft.repeat.plan import RepeatPlan
from sft.solvers.schedule import Operation, activation_name, grad_name
from sft.torch_runtime.backward_checks import check_unmodified, unneeded_grads
from sft.torch_runtime.failed_passes import refuse_after_failure
from sft.torch_runtime.machine import TorchMachine
from sft.torch_runtime.pass_settings import autocast_disabled

__all__ = ["BackwardWeightAccess", "ChainCall", "ForwardWeightAccess", "run_chain", "run_inference"]


class ForwardWeightAccess(WeightAccess, Protocol):
    """Weights during a forward pass."""

    def commit(self) -> None:
        """Store the next values in the buffers."""
        ...


class BackwardWeightAccess(WeightAccess, Protocol):
    """Weights during a backward pass."""

    def collect(self) -> Mapping[str, Tensor]:
        """The gradients for autograd, by parameter, at the end of the pass. The caller owns them."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainCall:
    """One call of a chain.

    Attributes:
        programs: programs of a block.
        plan: the schedule.
        device: device of the call.
        names: names of the parameters, in the order of their tensors.
        forward: opens the weights for a forward pass over these operations.
        backward: opens the weights for a backward pass, given the tensors that autograd checked and the parameters without a needed
            gradient.
        seed: seed of random masks.
        trace: called with each operation that has run.
    """

    programs: BlockPrograms
    plan: RepeatPlan
    device: torch.device
    names: tuple[str, ...]
    forward: Callable[[Sequence[Operation]], AbstractContextManager[ForwardWeightAccess]]
    backward: Callable[[Sequence[Operation], Sequence[Tensor], Collection[str]], AbstractContextManager[BackwardWeightAccess]]
    seed: KeyWord = 0
    trace: Callable[[str], None] | None = field(default=None)

    def executor(self, access: WeightAccess, *, wants_input_grad: bool = True) -> Executor:
        """Create an executor with these weights."""
        return Executor(
            programs=self.programs,
            machine=TorchMachine(self.device),
            access=access,
            seed=self.seed,
            wants_input_grad=wants_input_grad,
            trace=self.trace,
        )


def run_inference(call: ChainCall, x: Tensor) -> Tensor:
    """Run without gradients; no activations are kept."""
    operations = [operation for operation in call.plan.operations[: call.plan.turn] if operation.kind == "forward"]
    with torch.no_grad(), autocast_disabled(call.device), call.forward(operations) as access:
        out = call.executor(access).infer(x.detach().contiguous(), call.plan.num_blocks)
        access.commit()
    return out


def run_chain(call: ChainCall, x: Tensor, watched: Sequence[Tensor], params: Sequence[Tensor]) -> Tensor:
    """Run with gradients.

    Args:
        call: the call.
        x: the input.
        watched: tensors that the backward pass reads; autograd checks that they do not change before it.
        params: parameters that are not among these (they are in a store that checks them itself); autograd needs to see them.
    """
    out: Tensor = _ChainFunction.apply(call, len(watched), x, *watched, *params)  # type: ignore[no-untyped-call]  # as torch leaves it
    return out


class _ChainFunction(torch.autograd.Function):
    """The autograd function: ``forward`` up to the loss of the schedule, ``backward`` after it."""

    @staticmethod
    def forward(ctx: Any, call: ChainCall, num_watched: int, x: Tensor, *tensors: Tensor) -> Tensor:
        operations, turn = call.plan.operations, call.plan.turn
        last = activation_name(call.plan.num_blocks)
        source = x.detach().contiguous()
        has_copy = source.data_ptr() != x.data_ptr()
        environment = Environment({activation_name(0): source})
        with autocast_disabled(call.device), call.forward(operations[:turn]) as access:
            call.executor(access).run(operations[:turn], environment, is_first=True)
            access.commit()
        out = environment.values[last]
        # The context keeps an alias, since the result itself would keep its own graph alive. An alias shares the version counter.
        ctx.version = out._version
        result = out.detach()
        if not has_copy:
            del environment.values[activation_name(0)]
        ctx.save_for_backward(x, *tensors[:num_watched])
        ctx.set_materialize_grads(False)
        ctx.call, ctx.environment, ctx.num_tensors = call, environment, len(tensors)
        return result

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise UnsupportedError(["(a repeated block): forward-mode derivatives have no schedule; use backward mode"])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_batched_grads(grads)
        if torch.is_grad_enabled():
            raise UnsupportedError(
                ["(a repeated block): its gradient cannot be differentiated again (create_graph=True); use an nn.Sequential of the blocks"]
            )
        x, *watched = ctx.saved_tensors
        call: ChainCall = ctx.call
        if grads[0] is None:
            no_grads: tuple[Tensor | None, ...] = (None,) * (3 + ctx.num_tensors)
            return no_grads
        n = call.plan.num_blocks
        refuse_after_failure(ctx.environment)
        environment: Environment = ctx.environment
        if call.programs.reads_output:
            check_unmodified(environment.values[activation_name(n)], ctx.version, "the output of a repeated block")
        if task_retains_graph():
            environment = environment.copy()
        else:
            ctx.environment = None
        environment.values.setdefault(activation_name(0), x.detach())
        environment.values[grad_name(n)] = grads[0].contiguous()
        operations = call.plan.operations[call.plan.turn + 1 :]
        wants_input_grad = ctx.needs_input_grad[2]
        with autocast_disabled(call.device), call.backward(operations, watched, unneeded_grads(ctx, call.names, 1)) as access:
            call.executor(access, wants_input_grad=wants_input_grad).run(operations, environment, is_first=False)
            param_grads = dict(access.collect())
        input_grad = environment.values.pop(grad_name(0), None)
        by_name = [param_grads.pop(name, None) for name in call.names]
        return (None, None, input_grad, *_scatter_param_grads(by_name, ctx.num_tensors, len(watched)))


def _scatter_param_grads(grads: list[Tensor | None], num_tensors: int, num_watched: int) -> list[Tensor | None]:
    """The parameters' gradients at the positions of their tensors: first among the watched tensors, or after all of them."""
    if num_tensors == num_watched:
        return [*grads, *[None] * (num_tensors - len(grads))]
    return [*[None] * num_watched, *grads]
