"""What one computation of a schedule reads, makes and costs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from sft.errors import InputError
from sft.plan.chain.chain import StageChain
from sft.plan.chain.schedule import Operation, activation_name, grad_name, saved_name

__all__ = ["OperationCost", "operation_cost"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationCost:
    """A forward, a backward or the loss.

    Attributes:
        reads: the values that have to be there.
        makes: the values that it makes, with their bytes.
        workspace_bytes: what it holds beside these while it runs, the window of streamed weights included.
        seconds: how long it computes.
        down_bytes: what its streamed weights send to the host.
        up_bytes: what they bring from there.
        streamable: whether its input and output may be on the host.
    """

    reads: tuple[str, ...]
    makes: tuple[tuple[str, int], ...]
    workspace_bytes: int
    seconds: float
    down_bytes: int = 0
    up_bytes: int = 0
    streamable: bool = False


def operation_cost(chain: StageChain, operation: Operation, streamed_weights: Collection[int] = ()) -> OperationCost:
    """The work of a computation; a free or a copy has none.

    Raises:
        InputError: the chain has no such stages or alternative.
    """
    n, first, last = chain.num_stages, operation.first, operation.last
    if operation.kind == "loss":
        return OperationCost(
            reads=(activation_name(n),), makes=((grad_name(n), chain.grad_bytes(n)),), workspace_bytes=0, seconds=0.0, streamable=True
        )
    if not 1 <= first <= last <= n or (not operation.mode and first != last):
        raise InputError(f"there are no stages {first}..{last} to run as one")
    other = chain.alternative(first, last, operation.mode) if operation.mode else None
    part = other or chain.stage(first)
    weights = sum(chain.stage(i).weight_bytes for i in range(first, last + 1) if i in streamed_weights)
    streamable = other is not None and other.streamable
    if operation.kind == "forward":
        made = [(activation_name(last), chain.activation_bytes(last))]
        if operation.save:
            made.append((saved_name(last), part.saved_bytes))
        return OperationCost(
            reads=(activation_name(first - 1),),
            makes=tuple(made),
            workspace_bytes=part.forward_workspace_bytes + weights,
            seconds=part.forward_seconds,
            up_bytes=weights,
            streamable=streamable,
        )
    reads = [grad_name(last), activation_name(first - 1)]
    if part.saved_bytes or part.reads_output:
        reads.append(saved_name(last))
    if part.reads_output:
        reads.append(activation_name(last))
    return OperationCost(
        reads=tuple(reads),
        makes=((grad_name(first - 1), chain.grad_bytes(first - 1)),),
        workspace_bytes=part.backward_workspace_bytes + 2 * weights,
        seconds=part.backward_seconds,
        down_bytes=weights,
        up_bytes=weights,
        streamable=streamable,
    )
