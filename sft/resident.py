"""Bytes that a model holds on the card whether it runs or not."""

from __future__ import annotations

import torch
from torch import nn

from sft.sharded import Sharding, local_bytes

__all__ = ["resident_bytes"]


def resident_bytes(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, sharding: Sharding | None = None, *, holds_gradients: bool = False
) -> int:
    """Bytes of parameters, their gradients, buffers and the optimizer's state.

    Args:
        model: the model.
        optimizer: the optimizer, if its state is to be counted.
        sharding: the parameters that are sharded.
        holds_gradients: whether whole gradients of these wait for more.
    """
    sharded = {} if sharding is None else sharding.sizes
    parameters = [p for name, p in model.named_parameters() if name not in sharded]
    size = 0 if sharding is None else sharding.resident_bytes(holds_gradients=holds_gradients)
    size += sum(p.numel() * p.element_size() for p in parameters)
    size += sum(p.numel() * p.element_size() for p in parameters if p.requires_grad)
    size += sum(b.numel() * b.element_size() for b in model.buffers())
    return size + _optimizer_bytes(optimizer)


def _optimizer_bytes(optimizer: torch.optim.Optimizer | None) -> int:
    """Bytes of an optimizer's state: what it holds, or will hold after its first step."""
    if optimizer is None:
        return 0
    held = sum(local_bytes(v) for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor))
    if held:
        return held
    total = 0
    for group in optimizer.param_groups:
        size = sum(local_bytes(p) for p in group["params"] if p.requires_grad)
        if isinstance(optimizer, torch.optim.SGD):
            copies = 1 if group.get("momentum") else 0
        else:
            copies = 3 if group.get("amsgrad") else 2
        total += copies * size
    return total
