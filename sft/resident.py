"""Bytes that a model holds on the card whether it runs or not."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

from sft.sharded import ShardedWeights, local_bytes

__all__ = ["resident_bytes"]


def resident_bytes(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | int | None,
    sharding: ShardedWeights | None = None,
    *,
    holds_gradients: bool = False,
    streamed: Collection[str] = (),
) -> int:
    """Bytes of parameters, their gradients, buffers and the optimizer's state.

    Args:
        model: the model.
        optimizer: the optimizer, if its state is to be counted, or the bytes of that.
        sharding: the parameters that are sharded.
        holds_gradients: whether whole gradients of these wait for more.
        streamed: parameters that are elsewhere, with their gradients and state.
    """
    sharded = {} if sharding is None else sharding.sizes
    parameters = [p for name, p in model.named_parameters() if name not in sharded and name not in streamed]
    size = 0 if sharding is None else sharding.resident_bytes(holds_gradients=holds_gradients)
    size += sum(p.numel() * p.element_size() for p in parameters)
    size += sum(p.numel() * p.element_size() for p in parameters if p.requires_grad)
    size += sum(b.numel() * b.element_size() for b in model.buffers())
    elsewhere = {id(p) for name, p in model.named_parameters() if name in streamed}
    return size + _optimizer_bytes(optimizer, elsewhere)


def _optimizer_bytes(optimizer: torch.optim.Optimizer | int | None, elsewhere: Collection[int]) -> int:
    """Bytes of an optimizer's state: what it holds, or will hold after its first step; that of some parameters, by id, is elsewhere."""
    if optimizer is None or isinstance(optimizer, int):
        return optimizer or 0
    states = (state for param, state in optimizer.state.items() if id(param) not in elsewhere)
    held = sum(local_bytes(v) for s in states for v in s.values() if isinstance(v, torch.Tensor))
    if held:
        return held
    total = 0
    for group in optimizer.param_groups:
        size = sum(local_bytes(p) for p in group["params"] if p.requires_grad and id(p) not in elsewhere)
        if isinstance(optimizer, torch.optim.SGD):
            copies = 1 if group.get("momentum") else 0
        else:
            copies = 3 if group.get("amsgrad") else 2
        total += copies * size
    return total
