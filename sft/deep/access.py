"""Weights that are on the device as stacked tensors, one for each parameter of the block, with the block's number as first dimension."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["StackedWeightAccess"]


class StackedWeightAccess:
    """Parameters, buffers and gradients stacked on the device.

    Nothing of the caller's is written before :meth:`commit`: the buffers' next values and the gradients are in tensors of their own.

    Args:
        params: each parameter of the block, ``[n, ...]``.
        buffers: each buffer, likewise.
        shared: buffers that all blocks share.
        updated: the buffers that change.
        with_gradient: the parameters that get a gradient; none in a forward pass.
        sums: what gradients are added to, by parameter, where they are not to be new tensors. Default: `None`
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        shared: Mapping[str, Tensor],
        *,
        updated: tuple[str, ...] = (),
        with_gradient: tuple[str, ...] = (),
        sums: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._stacked = {**params, **buffers}
        self._shared = dict(shared)
        self._buffers = buffers
        self.next_values = {name: torch.empty_like(buffers[name]) for name in updated}
        self.sums = sums
        self.grads = {name: torch.empty_like(params[name], memory_format=torch.contiguous_format) for name in with_gradient}

    def take(self, block: int) -> dict[str, Tensor]:
        """Views of one block."""
        return {**{name: stack[block] for name, stack in self._stacked.items()}, **self._shared}

    def give(self, block: int) -> None:
        """Nothing to do."""

    def update(self, block: int, values: Mapping[str, Tensor]) -> None:
        """Set the next values aside."""
        for name, value in values.items():
            self.next_values[name][block].copy_(value)

    def gradients(self, block: int, grads: dict[str, Tensor]) -> None:
        """Put the gradients where they belong: each block's backward runs once."""
        for name, value in grads.items():
            if self.sums is None:
                self.grads[name][block].copy_(value)
            else:
                self.sums[name][block].add_(value)

    def collect(self) -> dict[str, Tensor]:
        """The gradients, which are the caller's from then on."""
        grads, self.grads = self.grads, {}
        return grads

    def commit(self) -> None:
        """Give the buffers their next values."""
        for name, value in self.next_values.items():
            self._buffers[name].copy_(value)
