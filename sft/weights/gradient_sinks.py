"""Gradient sinks: consumers of the gradients of blocks with streamed weights.

An optimizer for streamed weights consumes them block by block. Without one they are accumulated on the host and returned to autograd.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sft.weights.store import allocate_host_bytes

__all__ = ["BlockSink", "GradientSink", "HostGradientSink", "HostGradients", "RequestedGradients"]


class BlockSink(Protocol):
    """Consumer of the gradients of one backward pass."""

    def put(self, block: int, grads: dict[str, Tensor], weights: Mapping[str, Tensor]) -> bool:
        """Consume a block's gradients, which may be changed in place.

        Args:
            block: its number, from 0.
            grads: by parameter, on the device.
            weights: the block's parameters, in the window.

        Returns:
            True if the weights in the window were changed and must be written to the store's next generation.
        """
        ...

    def collect(self) -> Mapping[str, Tensor]:
        """The gradients for autograd, at the end of the pass."""
        ...


class GradientSink(Protocol):
    """Factory of block sinks, one per backward pass."""

    def extra_bytes(self) -> int:
        """Bytes that it holds on the device during a backward pass."""
        ...

    def open_pass(self, order: Sequence[int]) -> AbstractContextManager[BlockSink]:
        """Sink of one backward pass that visits the blocks in this order. Its effects are undone if the pass fails."""
        ...


@dataclass(frozen=True, slots=True)
class RequestedGradients:
    """Filter for the gradients that a backward pass was requested to compute.

    Attributes:
        sink: receives them; ``None`` if none were requested.
        names: names of their parameters.
    """

    sink: BlockSink | None
    names: Collection[str]

    def put(self, block: int, grads: dict[str, Tensor], weights: Mapping[str, Tensor]) -> bool:
        """Pass the requested gradients of a block to the sink."""
        requested = {name: grad for name, grad in grads.items() if name in self.names}
        return bool(requested) and self.sink is not None and self.sink.put(block, requested, weights)

    def collect(self) -> Mapping[str, Tensor]:
        """The sink's gradients for autograd."""
        return {} if self.sink is None else self.sink.collect()


class HostGradients:
    """Gradients of one backward pass, gathered in host memory for autograd to put into ``.grad``.

    Args:
        num_blocks: number of blocks, if gradients of one name are stacked over them; ``None`` if every block has its own names.
    """

    def __init__(self, num_blocks: int | None = None) -> None:
        self._num_blocks = num_blocks
        self._grads: dict[str, Tensor] = {}

    def put(self, block: int, grads: dict[str, Tensor], weights: Mapping[str, Tensor]) -> bool:
        """Copy a block's gradients to the host. The memory is pageable, since locking pages would take longer than the copy."""
        for name, value in grads.items():
            if name not in self._grads:
                shape = value.shape if self._num_blocks is None else (self._num_blocks, *value.shape)
                num_bytes = torch.Size(shape).numel() * value.element_size()
                self._grads[name] = allocate_host_bytes(num_bytes).view(value.dtype).view(shape)
            target = self._grads[name] if self._num_blocks is None else self._grads[name][block]
            target.copy_(value)
        return False

    def collect(self) -> Mapping[str, Tensor]:
        """The gradients by parameter; none is kept."""
        grads, self._grads = self._grads, {}
        return grads


class HostGradientSink:
    """Gradient sink without an optimizer; see `HostGradients`."""

    def __init__(self, num_blocks: int | None = None) -> None:
        self._num_blocks = num_blocks

    def extra_bytes(self) -> int:
        """Zero bytes on the device."""
        return 0

    @contextlib.contextmanager
    def open_pass(self, order: Sequence[int]) -> Iterator[BlockSink]:
        """Sink of one backward pass."""
        yield HostGradients(self._num_blocks)
