"""One step of SGD in plain PyTorch: the operations of ``torch.optim.SGD(foreach=False)`` in their order."""

from __future__ import annotations

from torch import Tensor

__all__ = ["reference_sgd"]


def reference_sgd(
    parameter: Tensor,
    gradient: Tensor,
    momentum_buffer: Tensor | None,
    *,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    maximize: bool,
    first: bool,
) -> None:
    """Change ``parameter`` and ``momentum_buffer`` in place; see ``sgd.sgd_step``."""
    update = gradient.to(parameter.dtype)
    if maximize:
        update = -update
    if weight_decay != 0:
        update = update.add(parameter, alpha=weight_decay)
    if momentum_buffer is not None:
        if first:
            momentum_buffer.copy_(update)
        else:
            momentum_buffer.mul_(momentum).add_(update, alpha=1 - dampening)
        update = update.add(momentum_buffer, alpha=momentum) if nesterov else momentum_buffer
    parameter.add_(update, alpha=-lr)
