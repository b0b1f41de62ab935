"""Streamed weights on any machine: on the device while a segment reads them, and not otherwise.

A pass is a list of ops, so the weights that each op reads are known. They are loaded before its segment runs; with prefetching, the
weights of the next op are copied while it runs. After an op, every weight that the next op does not read is freed. A pass thus keeps the
weights of one op, or of two. Like the frees of values, loads and frees follow from the schedule and are not part of it.

The residuals of a segment may contain views of a weight. A weight's bytes are therefore freed under all references to its buffer and filled
again, as those of an offloaded value (``sft.runtime.offload``).

The gradient of a weight is complete after the backward of the first segment that reads the weight: segments run backward in reverse, each
once. It is then sent to its receiver (``send_weight_grad``), which may update the weight in place, since no op reads this copy again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from sft.runtime.moves import ScheduleOp

if TYPE_CHECKING:
    from sft.runtime.machine import Buffer

__all__ = ["GradientTransfer", "StreamedWeights", "WeightOps", "WeightPrefetcher", "weights_completed_per_segment", "weights_read_per_op"]


class WeightOps(Protocol):
    """Transfers of streamed weights to the device, and of their gradients from it."""

    def load_weight(self, name: str, num_bytes: int, shape: tuple[int, ...], dtype: Any, buffer: Buffer | None, *, ahead: bool) -> Buffer:
        """Begin to copy a weight to the device.

        Args:
            name: the weight.
            num_bytes: bytes that it uses on the device.
            shape: its shape.
            dtype: its element type.
            buffer: its buffer without memory, from an earlier load; ``None`` allocates one.
            ahead: True if another op runs before the weight is read.
        """

    def wait_weights(self, names: Sequence[str]) -> None:
        """Make the next program wait for those of these weights that are being copied."""

    def free_weight(self, name: str, buffer: Buffer) -> None:
        """Free the device's bytes of a weight; its buffer remains, without memory."""

    def send_weight_grad(self, name: str, gradient: Buffer, weight: Buffer, transfer: GradientTransfer) -> None:
        """Send the complete gradient of a weight to its receiver; both buffers may be changed in place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientTransfer:
    """Cost of sending the gradient of a weight; the transfer is complete before the next gradient is sent.

    Attributes:
        scratch_bytes: bytes on the device in addition to the gradient and the weight.
        up_bytes: bytes copied to the device.
        down_bytes: bytes copied to the host.
    """

    scratch_bytes: int = 0
    up_bytes: int = 0
    down_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedWeights:
    """The streamed weights of a model.

    Attributes:
        num_bytes: bytes of each weight on the device, by name.
        grad_transfers: cost of sending its gradient, by name; weights without a gradient are absent.
        reads_ahead: True if the weights of the next op are copied while an op runs.
    """

    num_bytes: Mapping[str, int]
    grad_transfers: Mapping[str, GradientTransfer]
    reads_ahead: bool


def weights_read_per_op(
    ops: Sequence[ScheduleOp], reads: Sequence[Collection[str]], backward_reads: Sequence[Collection[str]], weights: Collection[str]
) -> tuple[tuple[str, ...], ...]:
    """For each op the weights that its segment reads; empty for copies and the loss.

    Args:
        ops: ops of one pass.
        reads: for each segment the values that it takes from outside.
        backward_reads: for each segment the values that its backward reads.
        weights: the streamed weights.
    """
    reads_by_kind: dict[str, Sequence[Collection[str]]] = {"forward": reads, "backward": backward_reads}
    return tuple(
        tuple(dict.fromkeys(name for name in reads_by_kind[op.kind][op.segment] if name in weights)) if op.kind in reads_by_kind else ()
        for op in ops
    )


def weights_completed_per_segment(
    reads: Sequence[Collection[str]], differentiated: Sequence[bool], weights: Collection[str]
) -> tuple[tuple[str, ...], ...]:
    """For each segment the weights with gradients that are complete after its backward: those that no earlier segment reads.

    Args:
        reads: for each segment the values that it takes from outside.
        differentiated: for each segment, True if it has a backward.
        weights: the streamed weights that have a gradient.
    """
    seen: set[str] = set()
    completed = []
    for names, has_backward in zip(reads, differentiated, strict=True):
        first_read = tuple(dict.fromkeys(name for name in names if has_backward and name in weights and name not in seen))
        seen.update(first_read)
        completed.append(first_read)
    return tuple(completed)


@dataclass(slots=True, kw_only=True)
class WeightPrefetcher:
    """Loads and frees the weights of one pass.

    Attributes:
        machine: copies them.
        weights: the streamed weights.
        shapes: shapes of all values.
        dtypes: element types of all values.
        buffers: buffers of the weights loaded so far, without memory while they are away; residuals may keep them after the pass.
        reads: for each op of the pass the weights that it reads.
    """

    machine: WeightOps
    weights: StreamedWeights
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, object]
    buffers: dict[str, Buffer]
    reads: Sequence[tuple[str, ...]]
    _loaded: dict[str, None] = field(default_factory=dict)
    _sent: set[str] = field(default_factory=set)

    def before_op(self, position: int, values: dict[str, Buffer]) -> None:
        """Load the weights of an op into ``values``, and begin to load those of the next one."""
        names = self.reads[position]
        if not names:
            return
        self._load(names, ahead=False)
        self.machine.wait_weights(names)
        if self.weights.reads_ahead:
            self._load(self._next(position), ahead=True)
        values.update((name, self.buffers[name]) for name in names)

    def after_op(self, position: int) -> None:
        """Free the weights that the next op does not read, and those that may have been updated: a later reader needs the old values."""
        if self.reads[position]:
            needed = set(self._next(position)) - self._sent
            self._free([name for name in self._loaded if name not in needed])
            self._sent.clear()

    def free_all(self) -> None:
        """Free every weight, also after a failure."""
        self._free(list(self._loaded))

    def send_gradient(self, name: str, gradient: Buffer) -> None:
        """Send a complete gradient; its weight is on the device."""
        self._sent.add(name)
        self.machine.send_weight_grad(name, gradient, self.buffers[name], self.weights.grad_transfers[name])

    def _next(self, position: int) -> tuple[str, ...]:
        """Weights of the next op that reads any."""
        return next((names for names in self.reads[position + 1 :] if names), ())

    def _load(self, names: Sequence[str], *, ahead: bool) -> None:
        for name in names:
            if name not in self._loaded:
                size, shape, dtype = self.weights.num_bytes[name], self.shapes[name], self.dtypes[name]
                self.buffers[name] = self.machine.load_weight(name, size, shape, dtype, self.buffers.get(name), ahead=ahead)
                self._loaded[name] = None

    def _free(self, names: Sequence[str]) -> None:
        for name in names:
            self.machine.free_weight(name, self.buffers[name])
            del self._loaded[name]
