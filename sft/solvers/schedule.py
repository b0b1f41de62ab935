"""Schedule of one training step on a chain: an ordered list of operations with explicit frees, waits and copies.

The order is the order of issue. A compute operation allocates its results when it starts; freed bytes are available to all later
operations. Copies run concurrently, on their own streams: ``offload_op`` starts a copy to the host; ``release_op`` waits for it and frees
the device bytes; ``prefetch_op`` allocates device bytes and starts the copy back; the first operation that reads the value waits for it.
So the bytes on the device at any position of the list do not depend on durations. The peak is a property of the schedule alone, and a slow
copy costs time, never memory.

The three forwards of the checkpointing literature are: keep all values (``save``); keep the input (no ``save``); keep no values (no
``save``, then a free of the input).

As text:

| text | operation |
| --- | --- |
| ``F3``, ``F3+`` | forward of stage 3; ``+`` if it saves |
| ``F3-5[tile(64)]`` | forward of an alternative for the stages 3 to 5 |
| ``L`` | loss |
| ``B3`` | backward of stage 3 |
| ``-x2`` | free ``x_2`` |
| ``>x2``, ``~x2``, ``<x2`` | offload, release, prefetch ``x_2`` |

`operation_cost` gives the inputs, results, bytes and seconds of one computation.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal

from sft.common.errors import InputError
from sft.solvers.chain import StageChain

__all__ = [
    "Operation",
    "OperationCost",
    "OperationKind",
    "Schedule",
    "activation_name",
    "backward_op",
    "forward_op",
    "free_op",
    "grad_name",
    "loss_op",
    "offload_op",
    "operation_cost",
    "prefetch_op",
    "release_op",
    "saved_name",
]

OperationKind = Literal["forward", "loss", "backward", "free", "offload", "release", "prefetch"]

_KINDS = frozenset({"forward", "loss", "backward", "free", "offload", "release", "prefetch"})
_SIGNS = {"free": "-", "offload": ">", "release": "~", "prefetch": "<"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One entry of a schedule.

    Attributes:
        kind: the kind of operation.
        first: of computations, the first stage.
        last: of computations, the last stage.
        mode: the alternative's name; empty for a plain stage.
        save: of a forward, True if it saves the values that its backward reads.
        value: of frees and copies, the value: ``"x3"``, ``"s3"`` or ``"y3"``.
    """

    kind: OperationKind
    first: int = 0
    last: int = 0
    mode: str = ""
    save: bool = False
    value: str = ""

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise InputError(f"a schedule has no operation of kind {self.kind!r}; the kinds are {', '.join(sorted(_KINDS))}")

    def __str__(self) -> str:
        if self.kind == "loss":
            return "L"
        if self.kind in _SIGNS:
            return _SIGNS[self.kind] + self.value
        span = str(self.last) if self.first == self.last else f"{self.first}-{self.last}"
        mode = f"[{self.mode}]" if self.mode else ""
        return self.kind[0].upper() + span + mode + ("+" if self.save else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Result of a solver.

    Attributes:
        strategy: the name of the solver.
        operations: the operations, in order of issue.
        streamed_cuts: indices of activations that are never complete on the device. The alternatives before and after the cut write and
            read the activation and its gradient in slices on the host.
        streamed_weights: the stages that read their weights from the host at each use.
    """

    strategy: str
    operations: tuple[Operation, ...]
    streamed_cuts: tuple[int, ...] = ()
    streamed_weights: tuple[int, ...] = ()

    def __str__(self) -> str:
        return " ".join(str(operation) for operation in self.operations)

    def count(self, kind: OperationKind) -> int:
        """Number of stages that the operations of a kind cover; for kinds without stages the number of operations."""
        return sum(o.last - o.first + 1 for o in self.operations if o.kind == kind)


def activation_name(i: int) -> str:
    """Name of the activation ``x_i``."""
    return f"x{i}"


def saved_name(i: int) -> str:
    """Name of the values that the forward ending with stage ``i`` saved."""
    return f"s{i}"


def grad_name(i: int) -> str:
    """Name of the gradient ``y_i``."""
    return f"y{i}"


def forward_op(first: int, last: int = 0, *, mode: str = "", save: bool = False) -> Operation:
    """Forward of one stage, or of an alternative."""
    return Operation(kind="forward", first=first, last=last or first, mode=mode, save=save)


def backward_op(first: int, last: int = 0, *, mode: str = "") -> Operation:
    """Backward of one stage, or of an alternative."""
    return Operation(kind="backward", first=first, last=last or first, mode=mode)


def loss_op() -> Operation:
    """The loss: ``x_n`` becomes ``y_n``."""
    return Operation(kind="loss")


def free_op(*values: str) -> Iterable[Operation]:
    """Frees of values that no later operation reads."""
    return [Operation(kind="free", value=value) for value in values]


def offload_op(value: str) -> Operation:
    """Start of a copy to the host."""
    return Operation(kind="offload", value=value)


def release_op(value: str) -> Operation:
    """Wait for the copy to the host, then free the device bytes."""
    return Operation(kind="release", value=value)


def prefetch_op(value: str) -> Operation:
    """Allocation on the device and start of the copy back."""
    return Operation(kind="prefetch", value=value)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationCost:
    """Inputs, results and cost of a forward, a backward or the loss.

    Attributes:
        reads: values that must exist.
        makes: values that it creates, with their bytes.
        workspace_bytes: temporary bytes, including the window of streamed weights.
        seconds: compute time.
        down_bytes: bytes that its streamed weights send to the host.
        up_bytes: bytes that its streamed weights bring to the device.
        streamable: True if its input and output may be on the host.
    """

    reads: tuple[str, ...]
    makes: tuple[tuple[str, int], ...]
    workspace_bytes: int
    seconds: float
    down_bytes: int = 0
    up_bytes: int = 0
    streamable: bool = False


def operation_cost(chain: StageChain, operation: Operation, streamed_weights: Collection[int] = ()) -> OperationCost:
    """Cost of a computation (not of a free or a copy).

    Raises:
        InputError: the chain has no such stages or alternative.
    """
    n, first, last = chain.num_stages, operation.first, operation.last
    if operation.kind == "loss":
        return OperationCost(
            reads=(activation_name(n),), makes=((grad_name(n), chain.grad_bytes(n)),), workspace_bytes=0, seconds=0.0, streamable=True
        )
    if not 1 <= first <= last <= n or (not operation.mode and first != last):
        raise InputError(f"the chain has no stages {first}..{last} to run as one")
    alternative = chain.alternative(first, last, operation.mode) if operation.mode else None
    stage = alternative or chain.stage(first)
    weight_bytes = sum(chain.stage(i).weight_bytes for i in range(first, last + 1) if i in streamed_weights)
    streamable = alternative is not None and alternative.streamable
    if operation.kind == "forward":
        makes = [(activation_name(last), chain.activation_bytes(last))]
        if operation.save:
            makes.append((saved_name(last), stage.saved_bytes))
        return OperationCost(
            reads=(activation_name(first - 1),),
            makes=tuple(makes),
            workspace_bytes=stage.forward_workspace_bytes + weight_bytes,
            seconds=stage.forward_seconds,
            up_bytes=weight_bytes,
            streamable=streamable,
        )
    reads = [grad_name(last), activation_name(first - 1)]
    if stage.saved_bytes or stage.reads_output:
        reads.append(saved_name(last))
    if stage.reads_output:
        reads.append(activation_name(last))
    return OperationCost(
        reads=tuple(reads),
        makes=((grad_name(first - 1), chain.grad_bytes(first - 1)),),
        workspace_bytes=stage.backward_workspace_bytes + 2 * weight_bytes,
        seconds=stage.backward_seconds,
        down_bytes=weight_bytes,
        up_bytes=weight_bytes,
        streamable=streamable,
    )
