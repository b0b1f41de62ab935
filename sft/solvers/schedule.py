"""A schedule is data: an ordered list of operations with explicit frees, waits and copies.

The order is the order of issue. What a compute operation allocates is there from its start; what is freed is free for everything behind in
the list. Copies run beside the computation, on streams of their own: ``offload_op`` starts a copy to the host, ``release_op`` waits for it
and gives the device's bytes back, ``prefetch_op`` takes device bytes and starts the copy back, and the first operation that reads the
value waits for it. So which bytes are held at any place of the list does not depend on how long anything takes: the peak is a property of
the schedule alone, and a slow copy costs time, never memory.

The three forwards of the checkpointing literature are: keeping everything (``save``), keeping the input (no ``save``), keeping nothing (no
``save``, and a free of the input behind it).

In text, ``F3`` is a forward, ``F3+`` one that saves, ``L`` the loss, ``B3`` a backward, ``F3-5[tile(64)]`` an alternative, ``-x2`` a free,
``>x2`` an offload, ``~x2`` a release, ``<x2`` a prefetch.

What one computation of a schedule reads, makes and costs.
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
        kind: what it does.
        first: of computations the first stage.
        last: of computations the last stage.
        mode: the alternative's name; empty for a plain stage.
        save: of a forward, whether it leaves what its backward needs.
        value: of the other kinds the value: ``"x3"``, ``"s3"`` or ``"y3"``.
    """

    kind: OperationKind
    first: int = 0
    last: int = 0
    mode: str = ""
    save: bool = False
    value: str = ""

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise InputError(f"a schedule has no operation of kind {self.kind!r}; there are {', '.join(sorted(_KINDS))}")

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
    """What a solver returns and an executor runs.

    Attributes:
        strategy: the name of the solver.
        operations: in order of issue.
        streamed_cuts: the activations that are never whole on the device: they, and their gradients, are written to the host and read from
            it piece by piece by the alternatives on their two sides.
        streamed_weights: the stages whose weights come from the host at each use.
    """

    strategy: str
    operations: tuple[Operation, ...]
    streamed_cuts: tuple[int, ...] = ()
    streamed_weights: tuple[int, ...] = ()

    def __str__(self) -> str:
        return " ".join(str(operation) for operation in self.operations)

    def count(self, kind: OperationKind) -> int:
        """How many stages the operations of a kind cover (or how many operations, if they cover none)."""
        return sum(o.last - o.first + 1 for o in self.operations if o.kind == kind)


def activation_name(i: int) -> str:
    """The name of ``x_i``."""
    return f"x{i}"


def saved_name(i: int) -> str:
    """The name of what the forward that ended with stage ``i`` saved."""
    return f"s{i}"


def grad_name(i: int) -> str:
    """The name of ``y_i``."""
    return f"y{i}"


def forward_op(first: int, last: int = 0, *, mode: str = "", save: bool = False) -> Operation:
    """A forward of one stage, or of an alternative."""
    return Operation(kind="forward", first=first, last=last or first, mode=mode, save=save)


def backward_op(first: int, last: int = 0, *, mode: str = "") -> Operation:
    """A backward of one stage, or of an alternative."""
    return Operation(kind="backward", first=first, last=last or first, mode=mode)


def loss_op() -> Operation:
    """The caller's turn: ``x_n`` becomes ``y_n``."""
    return Operation(kind="loss")


def free_op(*values: str) -> Iterable[Operation]:
    """Values that nobody reads any more."""
    return [Operation(kind="free", value=value) for value in values]


def offload_op(value: str) -> Operation:
    """Start a copy to the host."""
    return Operation(kind="offload", value=value)


def release_op(value: str) -> Operation:
    """Wait for that copy, and give the bytes on the device back."""
    return Operation(kind="release", value=value)


def prefetch_op(value: str) -> Operation:
    """Start the copy back."""
    return Operation(kind="prefetch", value=value)


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
