"""What becomes of the gradients of blocks whose weights are streamed.

An optimizer for streamed weights takes them block by block; without one they are gathered on the host, and given to autograd.
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

__all__ = ["BlockSink", "GradientSink", "HostGradientSink", "RequestedGradients"]


class BlockSink(Protocol):
    """Takes the gradients of one backward pass."""

    def put(self, block: int, grads: dict[str, Tensor], weights: Mapping[str, Tensor]) -> bool:
        """Take a block's gradients, which may be changed in place.

        Args:
            block: its number, from 0.
            grads: by parameter, on the device.
            weights: the block's parameters, in the window.

        Returns:
            Whether the weights in the window were changed, and are to be written to the store's next generation.
        """
        ...

    def collect(self) -> Mapping[str, Tensor]:
        """The gradients for autograd, when the pass is done."""
        ...


class GradientSink(Protocol):
    """Where gradients go."""

    def extra_bytes(self) -> int:
        """What it holds on the device during a backward pass."""
        ...

    def opened(self, order: Sequence[int]) -> AbstractContextManager[BlockSink]:
        """For one backward pass, whose blocks' backwards come in this order. What it began is undone when the pass fails."""
        ...


@dataclass(frozen=True, slots=True)
class RequestedGradients:
    """Takes the gradients that a backward pass was asked for, and no others.

    Attributes:
        sink: takes them; none where nothing was asked for.
        names: of their parameters.
    """

    sink: BlockSink | None
    names: Collection[str]

    def put(self, block: int, grads: dict[str, Tensor], weights: Mapping[str, Tensor]) -> bool:
        """Hand on a block's gradients."""
        wanted = {name: grad for name, grad in grads.items() if name in self.names}
        return bool(wanted) and self.sink is not None and self.sink.put(block, wanted, weights)

    def collect(self) -> Mapping[str, Tensor]:
        """What the sink has for autograd."""
        return {} if self.sink is None else self.sink.collect()


class HostGradientSink:
    """Gathers gradients in the host's memory, for autograd to put into ``.grad``."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks

    def extra_bytes(self) -> int:
        """Nothing on the device."""
        return 0

    @contextlib.contextmanager
    def opened(self, order: Sequence[int]) -> Iterator[BlockSink]:
        """For one pass."""
        yield _HostBlockGradients(self._num_blocks)


class _HostBlockGradients:
    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._grads: dict[str, Tensor] = {}

    def put(self, block: int, grads: dict[str, Tensor], weights: Mapping[str, Tensor]) -> bool:
        for name, value in grads.items():
            if name not in self._grads:
                shape = (self._num_blocks, *value.shape)
                size = torch.Size(shape).numel() * value.element_size()
                self._grads[name] = allocate_host_bytes(size).view(value.dtype).view(shape)
            self._grads[name][block].copy_(value)
        return False

    def collect(self) -> Mapping[str, Tensor]:
        grads, self._grads = self._grads, {}
        return grads
