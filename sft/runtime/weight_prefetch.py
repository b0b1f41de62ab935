"""Streamed weights on any machine: on the device while a segment reads them, and not otherwise.

A pass is a list of moves, so it is known which weights each of them reads. What a move reads is there before its segment runs; where the
pass reads *ahead*, what the next one reads is on its way meanwhile. Behind a move everything goes that the next one does not read. So a
pass holds the weights of one move, or of two, and this is not in the order: like the frees of values it follows from it.

What a segment kept for its backward pass may hold views of a weight. A weight's buffer is therefore emptied under all handles on it, and
filled again, as that of a value that leaves for the host (``sft.runtime.offload``).

The gradient of a weight is whole when the first segment that adds to it has run back: segments run back in reverse, each once. It then goes
to whoever takes it (``take_gradient``), who may update the weight in its place: nobody reads this copy again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sft.runtime.moves import ScheduleOp

if TYPE_CHECKING:
    from sft.runtime.machine import Buffer, Machine

__all__ = ["GradientTransfer", "StreamedWeights", "WeightPrefetcher", "weights_completed_per_segment", "weights_read_per_op"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientTransfer:
    """What it takes to take the gradient of a weight: all of it is over before the next gradient is taken.

    Attributes:
        scratch_bytes: on the device, beside the gradient and the weight.
        up_bytes: to the device.
        down_bytes: to the host.
    """

    scratch_bytes: int = 0
    up_bytes: int = 0
    down_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedWeights:
    """The weights of a model that are streamed.

    Attributes:
        num_bytes: by name, what each takes on the device while it is there.
        grad_transfers: by name, what its gradient takes; weights without a gradient are not among them.
        reads_ahead: whether the weights of the next move are on their way while one runs.
    """

    num_bytes: Mapping[str, int]
    grad_transfers: Mapping[str, GradientTransfer]
    reads_ahead: bool


def weights_read_per_op(
    moves: Sequence[ScheduleOp], reads: Sequence[Collection[str]], backward_reads: Sequence[Collection[str]], weights: Collection[str]
) -> tuple[tuple[str, ...], ...]:
    """For each move the weights that its segment reads; none where something is copied, or the caller has its turn.

    Args:
        moves: of one pass.
        reads: for each segment the values that it takes from outside.
        backward_reads: for each segment the values that its backward pass needs.
        weights: the streamed ones.
    """
    of_kind: dict[str, Sequence[Collection[str]]] = {"forward": reads, "backward": backward_reads}
    return tuple(
        tuple(dict.fromkeys(name for name in of_kind[move.kind][move.segment] if name in weights)) if move.kind in of_kind else ()
        for move in moves
    )


def weights_completed_per_segment(
    reads: Sequence[Collection[str]], differentiated: Sequence[bool], weights: Collection[str]
) -> tuple[tuple[str, ...], ...]:
    """For each segment the weights whose gradients are whole when it has run back: it is the first that reads them.

    Args:
        reads: for each segment the values that it takes from outside.
        differentiated: whether each runs back.
        weights: the streamed ones that have a gradient.
    """
    seen: set[str] = set()
    found = []
    for names, runs_back in zip(reads, differentiated, strict=True):
        own = tuple(dict.fromkeys(name for name in names if runs_back and name in weights and name not in seen))
        seen.update(own)
        found.append(own)
    return tuple(found)


@dataclass(slots=True, kw_only=True)
class WeightPrefetcher:
    """The weights of one pass.

    Attributes:
        machine: brings them.
        weights: which there are.
        shapes: of all values.
        dtypes: of all values.
        handles: those made so far, of no bytes while their weights are away; they outlive the pass where something was kept.
        reads: for each move of the pass the weights that it reads.
    """

    machine: Machine
    weights: StreamedWeights
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, object]
    handles: dict[str, Buffer]
    reads: Sequence[tuple[str, ...]]
    _there: dict[str, None] = field(default_factory=dict)
    _taken: set[str] = field(default_factory=set)

    def enter(self, place: int, values: dict[str, Buffer]) -> None:
        """Have the weights of a move there, by name in ``values``, and begin to read those of the next one."""
        own = self.reads[place]
        if not own:
            return
        self._load(own, ahead=False)
        self.machine.settle_weights(own)
        if self.weights.reads_ahead:
            self._load(self._next(place), ahead=True)
        values.update((name, self.handles[name]) for name in own)

    def leave(self, place: int) -> None:
        """Let go of what the next move does not read, and of what may have been updated: who reads that again wants it as it was."""
        if self.reads[place]:
            stay = set(self._next(place)) - self._taken
            self._release([name for name in self._there if name not in stay])
            self._taken.clear()

    def end(self) -> None:
        """Let go of everything, be it after a failure."""
        self._release(list(self._there))

    def take(self, name: str, gradient: Buffer) -> None:
        """Have a gradient taken that is whole; the weight is there."""
        self._taken.add(name)
        self.machine.take_gradient(name, gradient, self.handles[name], self.weights.grad_transfers[name])

    def _next(self, place: int) -> tuple[str, ...]:
        """The weights of the next move that reads any."""
        return next((names for names in self.reads[place + 1 :] if names), ())

    def _load(self, names: Sequence[str], *, ahead: bool) -> None:
        for name in names:
            if name not in self._there:
                size, shape, dtype = self.weights.num_bytes[name], self.shapes[name], self.dtypes[name]
                self.handles[name] = self.machine.load_weight(name, size, shape, dtype, self.handles.get(name), ahead=ahead)
                self._there[name] = None

    def _release(self, names: Sequence[str]) -> None:
        for name in names:
            self.machine.release_weight(name, self.handles[name])
            del self._there[name]
