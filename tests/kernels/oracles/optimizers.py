"""One step of SGD and of AdamW in plain PyTorch: the operations of ``torch.optim`` with ``foreach=False``, in their order."""

from __future__ import annotations

from torch import Tensor

__all__ = ["reference_adamw", "reference_sgd"]


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
    """Change ``parameter`` and ``momentum_buffer`` in place."""
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


def reference_adamw(
    parameter: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    maximize: bool,
) -> None:
    """Change ``parameter``, ``mean`` and ``square`` in place."""
    gradient = gradient.to(parameter.dtype)
    if maximize:
        gradient = -gradient
    if weight_decay != 0:
        parameter.mul_(1 - lr * weight_decay)
    mean.lerp_(gradient, 1 - betas[0])
    square.mul_(betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])
    step_size = lr / (1 - betas[0] ** step)
    spread = (square.sqrt() / (1 - betas[1] ** step) ** 0.5).add_(eps)
    parameter.addcdiv_(mean, spread, value=-step_size)
